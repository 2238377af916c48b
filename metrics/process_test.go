package metrics

import (
	"strings"
	"testing"
	"testing/fstest"
)

func TestProcess(t *testing.T) {
	// The command may hold spaces and parentheses.
	const stat = "7 (a) b (c) S 1 7 7 0 -1 4194560 100 0 0 0 250 50 0 0 20 0 5 0 1000 4096000 200 18446744073709551615"
	proc := fstest.MapFS{
		"self/stat":        {Data: []byte(stat)},
		"stat":             {Data: []byte("cpu 1 2\nbtime 1700000000\nprocesses 5\n")},
		"self/fd/0":        {},
		"self/fd/1":        {},
		"self/fd/9":        {},
		"self/limits":      {Data: []byte("Limit  Soft Limit  Hard Limit  Units\nMax open files            1024                 4096                 files\nMax address space         unlimited            unlimited            bytes\n")},
		"self/net/netstat": {Data: []byte("TcpExt: InOctets Other\nTcpExt: 1 2\nIpExt: InNoRoutes InOctets OutOctets\nIpExt: 3 44 55\n")},
	}
	text := func(fs fstest.MapFS) string {
		var b strings.Builder
		if err := Write(&b, process{fs, 4096}); err != nil {
			t.Fatal(err)
		}
		var values strings.Builder
		for line := range strings.Lines(b.String()) {
			if !strings.HasPrefix(line, "#") {
				values.WriteString(line)
			}
		}
		return values.String()
	}
	want := `process_cpu_seconds_total 3
process_max_fds 1024
process_network_receive_bytes_total 44
process_network_transmit_bytes_total 55
process_open_fds 2
process_resident_memory_bytes 819200
process_start_time_seconds 1.70000001e+09
process_virtual_memory_bytes 4.096e+06
process_virtual_memory_max_bytes 1.8446744073709552e+19
`
	if got := text(proc); got != want {
		t.Errorf("%s", got)
	}
	if got := text(fstest.MapFS{}); got != "" {
		t.Errorf("of nothing: %s", got)
	}
	// Shorter than any kernel writes: nothing is made up, and nothing panics.
	for n := range len(stat) {
		text(fstest.MapFS{"self/stat": {Data: []byte(stat[:n])}, "self/net/netstat": {Data: []byte("IpExt: InOctets\nIpExt:\n")}})
	}
}
