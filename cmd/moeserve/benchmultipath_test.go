package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/moeserve/moeserve/eval/multipath"
	"github.com/moeserve/moeserve/node/planning"
)

// bench multipath measures the parts that are named on any number of GPUs, and bench transfer
// --links is its first part.
func TestBenchMultipath(t *testing.T) {
	const emulate = "virtual,nodata,gpus=3,hbm=8GiB,pcie=55GB/s,hostroot=99GB/s,nvlink=395GB/s,latency=8us"
	dir := t.TempDir()
	stdout, stderr, code := invoke(t, strings.NewReader(""), "bench", "multipath", "--parts", "roots,static", "--copy-size", "256MiB", "--link-copy-size", "8MiB",
		"--rounds", "1", "--emulate", emulate, "--json", "-", "--plots", dir)
	var r multipath.Result
	if err := json.Unmarshal([]byte(stdout), &r); err != nil || code != exitDone {
		t.Fatalf("exit code %d, %v: %s", code, err, stderr)
	}
	if r.GPU != "gpu0" || len(r.Relays) != 2 || r.Links != nil || r.Relay != nil || len(r.Roots.Sets) != 2 || len(r.Static.Points) != 2*3 {
		t.Errorf("%+v", r)
	}
	if svg, err := os.ReadFile(filepath.Join(dir, "multipath-static.svg")); err != nil || !strings.Contains(string(svg), "each copying its own data") {
		t.Errorf("%v: %s", err, svg)
	}
	stdout, stderr, code = invoke(t, strings.NewReader(""), "bench", "transfer", "--links", "--repetitions", "1", "--emulate", emulate)
	if code != exitDone || !strings.Contains(stdout, "between GPUs, each pair alone") || strings.Contains(stdout, "static") {
		t.Errorf("exit code %d, %s: %s", code, stderr, stdout)
	}
	path := filepath.Join(dir, "machine.json")
	stdout, stderr, code = invoke(t, strings.NewReader(""), "bench", "transfer", "--largest-mib", "8", "--repetitions", "1", "--emulate", emulate, "--calibrate", path)
	if h, err := planning.LoadHardware(path); err != nil || code != exitDone || h.Multipath == nil || !slices.Equal(h.Multipath.Relays, []int{1, 2}) || len(h.HostToGPU) != 3 ||
		!strings.Contains(stdout, "relays that pay: gpu1") {
		t.Errorf("exit code %d, %s, %v, %+v: %s", code, stderr, err, h.Multipath, stdout)
	}
	for _, c := range []struct{ args, want string }{
		{"multipath --parts figure-8", "--parts figure-8: no such part; known are links, "},
		{"multipath --parts statics", "did you mean static?"},
		{"multipath --parts links,links", "--parts has links twice"},
		{"multipath --copy-size much", `--copy-size: "much" is not a size`},
		{"multipath --link-copy-size 7B", "--link-copy-size 7B: must be a multiple of 64 bytes"},
		{"multipath --chunk-sizes 1MiB,1000B", "--chunk-sizes 1000B: must be a multiple of 64 bytes"},
		{"multipath --depths 0", "--depths [0]: must be numbers from 1 to 64"},
		{"multipath --rounds 0", "--rounds is 0: must be from 1 to"},
		{"multipath --plots nowhere", "--plots nowhere: no such directory"},
		{"multipath --peers none", "bench multipath needs a second GPU"},
		{"multipath --copy-size 1TiB", "the copies are too large; give a smaller --copy-size"},
		{"transfer --links --csv x.csv", "--links has no --calibrate, --csv or --plot"},
	} {
		args := append([]string{"bench"}, append(strings.Fields(c.args), "--emulate", "virtual,nodata,hbm=16GiB")...)
		if stdout, stderr, code := invoke(t, strings.NewReader(""), args...); code != exitUsage || stdout != "" || !strings.Contains(stderr, c.want) {
			t.Errorf("%s: exit code %d, %q, want %q", c.args, code, stderr, c.want)
		}
	}
}

// TestEmulatedSizes: on emulated devices with data the copies are small unless flags say otherwise: with those
// of GPUs all parts need gigabytes and minutes.
func TestEmulatedSizes(t *testing.T) {
	m := emulatedSizes(multipath.Options{Depths: []int{1, 2, 3, 4}}, true)
	if m.Bytes > 64<<20 || m.Largest > 64<<20 || m.LinkBytes > 8<<20 || slices.Max(m.Chunks) > 4<<20 {
		t.Errorf("%+v", m)
	}
	var all int64
	for _, bytes := range m.Needs() {
		all += bytes
	}
	if all > 1<<30 {
		t.Errorf("%d bytes are allocated", all)
	}
	if m := emulatedSizes(multipath.Options{}, false); m.Bytes != 1<<30 || m.Largest != 1<<30 {
		t.Errorf("without data: %+v", m)
	}
	if m := emulatedSizes(multipath.Options{Bytes: 1 << 25, LinkBytes: 1 << 24, Chunks: []int64{1 << 23}}, true); m.Bytes != 1<<25 || m.Largest != 1<<25 || m.LinkBytes != 1<<24 || m.Chunks[0] != 1<<23 {
		t.Errorf("with flags: %+v", m)
	}
}
