package metrics

import (
	"io/fs"
	"math"
	"os"
	"strconv"
	"strings"
)

// Process collects what Linux says of this process, under the names that Prometheus's client
// libraries have for it. Where there is no /proc it has nothing.
func Process() Collector { return process{os.DirFS("/proc"), os.Getpagesize()} }

// process reads a /proc.
type process struct {
	proc      fs.FS
	pageBytes int
}

// ticksPerSecond of the times in /proc, on all architectures that Go runs on.
const ticksPerSecond = 100

var (
	cpuSeconds  = NewDesc("process_cpu_seconds_total", "Total user and system CPU time spent in seconds.")
	startTime   = NewDesc("process_start_time_seconds", "Start time of the process since unix epoch in seconds.")
	virtual     = NewDesc("process_virtual_memory_bytes", "Virtual memory size in bytes.")
	mostVirtual = NewDesc("process_virtual_memory_max_bytes", "Maximum amount of virtual memory available in bytes.")
	resident    = NewDesc("process_resident_memory_bytes", "Resident memory size in bytes.")
	openFiles   = NewDesc("process_open_fds", "Number of open file descriptors.")
	mostFiles   = NewDesc("process_max_fds", "Maximum number of open file descriptors.")
	received    = NewDesc("process_network_receive_bytes_total", "Number of bytes received by the process over the network.")
	sent        = NewDesc("process_network_transmit_bytes_total", "Number of bytes sent by the process over the network.")
)

// Collect implements Collector. What cannot be read is left out.
func (p process) Collect(to *Sink) {
	// The fields of stat behind the command, which stands in parentheses and may itself have
	// some. proc_pid_stat(5) counts from 1, and the first of these is the third.
	if _, after, ok := cutLast(p.read("self/stat"), ") "); ok {
		fields := strings.Fields(after)
		field := func(n int) float64 { return number(fields, n-3) }
		to.Counter(cpuSeconds, (field(14)+field(15))/ticksPerSecond)
		if _, boot, ok := strings.Cut(p.read("stat"), "\nbtime "); ok {
			to.Gauge(startTime, number(strings.Fields(boot), 0)+field(22)/ticksPerSecond)
		}
		to.Gauge(virtual, field(23))
		to.Gauge(resident, field(24)*float64(p.pageBytes))
	}
	if files, err := fs.ReadDir(p.proc, "self/fd"); err == nil {
		to.Gauge(openFiles, float64(len(files)-1)) // but the folder that is read here
	}
	for line := range strings.Lines(p.read("self/limits")) {
		if most, ok := strings.CutPrefix(line, "Max open files"); ok {
			to.Gauge(mostFiles, number(strings.Fields(most), 0))
		}
		if most, ok := strings.CutPrefix(line, "Max address space"); ok {
			to.Gauge(mostVirtual, number(strings.Fields(most), 0))
		}
	}
	// Pairs of lines: names, and values in the same order. The counts are those of the
	// process's network namespace.
	var names []string
	for line := range strings.Lines(p.read("self/net/netstat")) {
		fields := strings.Fields(line)
		if len(fields) == 0 || fields[0] != "IpExt:" {
			continue
		}
		for i, name := range names {
			switch name {
			case "InOctets":
				to.Counter(received, number(fields, i))
			case "OutOctets":
				to.Counter(sent, number(fields, i))
			}
		}
		names = fields
	}
}

// read returns a file's text, empty where it cannot be read.
func (p process) read(name string) string {
	text, err := fs.ReadFile(p.proc, name)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(text))
}

// cutLast cuts s at the last sep.
func cutLast(s, sep string) (before, after string, ok bool) {
	if i := strings.LastIndex(s, sep); i >= 0 {
		return s[:i], s[i+len(sep):], true
	}
	return s, "", false
}

// number is the i-th field; one that is unlimited is as large as 64 bits allow.
func number(fields []string, i int) float64 {
	if i >= len(fields) {
		return 0
	}
	if fields[i] == "unlimited" {
		return math.MaxUint64
	}
	v, err := strconv.ParseFloat(fields[i], 64)
	if err != nil {
		return 0
	}
	return v
}
