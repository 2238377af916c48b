//go:build cuda

package cuda

import (
	"math"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/cuda/nvml"
)

// h200 is one of a machine whose GPUs are joined by switches.
func h200(bus string) facts {
	f := facts{
		name: "NVIDIA H200", uuid: bus, bus: bus, memoryBytes: 141 << 30, capability: 90, multiprocessors: 132,
		clockHz: 1.83e9, memoryClockHz: 3.2e9, memoryBits: 6144, numa: 1,
		links: nvml.Links{PCIeGeneration: 5, PCIeWidth: 16},
	}
	for range 18 {
		f.links.NVLinks = append(f.links.NVLinks, nvml.NVLink{Version: 4, Switch: true})
	}
	return f
}

func full(n int) [][]bool {
	reach := make([][]bool, n)
	for i := range reach {
		reach[i] = make([]bool, n)
		for j := range reach[i] {
			reach[i][j] = true
		}
	}
	return reach
}

func near(t *testing.T, what string, got, want float64) {
	t.Helper()
	if math.Abs(got-want) > 0.03*want {
		t.Errorf("%s: %.4g, want about %.4g", what, got, want)
	}
}

func rate(t *testing.T, top *device.Topology, from, to device.Space) float64 {
	t.Helper()
	p, err := top.Path(from, to)
	if err != nil {
		t.Fatal(err)
	}
	return p.BytesPerSecond
}

func TestLayoutOfSwitchedGPUs(t *testing.T) {
	top := layout(device.Info{Name: "cpu", MemoryBytes: 1 << 40}, []facts{h200("0000:0a:00.0"), h200("0000:0b:00.0"), h200("0000:0c:00.0")}, full(3))
	near(t, "flops", top.GPUs[0].FlopsPerSecond, 989e12)
	near(t, "memory", top.GPUs[0].BytesPerSecond, 4.9e12)
	near(t, "host to GPU", rate(t, top, device.Host, device.HBM(1)), 55e9)
	near(t, "GPU to host", rate(t, top, device.HBM(1), device.Host), 55e9)
	near(t, "peer", rate(t, top, device.HBM(0), device.HBM(2)), 390e9)
	near(t, "within", rate(t, top, device.HBM(0), device.HBM(0)), 2.45e12)
	// Two copies into one GPU share its port, and nothing else.
	shared := func(a, b device.Pair) []string {
		var names []string
		for _, x := range top.Paths[a].Links {
			for _, y := range top.Paths[b].Links {
				if x == y {
					names = append(names, top.Links[x].Name)
				}
			}
		}
		return names
	}
	g := device.HBM
	if d := cmp.Diff(shared(device.Pair{From: g(1), To: g(0)}, device.Pair{From: g(2), To: g(0)}), []string{"switch to gpu0"}); d != "" {
		t.Error(d)
	}
	if got := shared(device.Pair{From: g(1), To: g(0)}, device.Pair{From: g(0), To: g(1)}); len(got) != 0 {
		t.Errorf("the two directions share %v", got)
	}
	if got := shared(device.Pair{From: g(1), To: g(0)}, device.Pair{From: device.Host, To: g(0)}); len(got) != 0 {
		t.Errorf("a peer's copy and the host's share %v", got)
	}
	if want := (device.Info{Name: "NVIDIA H200", UUID: "0000:0a:00.0", MemoryBytes: 141 << 30, Multiprocessors: 132, ComputeCapability: 90, NUMANode: 1}); true {
		got := top.GPUs[0]
		got.FlopsPerSecond, got.BytesPerSecond = 0, 0
		if d := cmp.Diff(got, want); d != "" {
			t.Error(d)
		}
	}
}

func TestLayoutOfOtherMachines(t *testing.T) {
	// Two GPUs wired to each other by 4 links, a third on PCIe alone that only the
	// first reaches, and reaches back.
	a, b, c := h200("0000:0a:00.0"), h200("0000:0B:00.0"), h200("0000:0c:00.0")
	a.links.NVLinks, b.links.NVLinks, c.links.NVLinks = nil, nil, nil
	for range 4 {
		a.links.NVLinks = append(a.links.NVLinks, nvml.NVLink{Version: 3, Bus: "0000:0b:00.0"})
		b.links.NVLinks = append(b.links.NVLinks, nvml.NVLink{Version: 3, Bus: "0000:0a:00.0"})
	}
	c.links = nvml.Links{PCIeGeneration: 4, PCIeWidth: 8}
	reach := full(3)
	reach[1][2], reach[2][1] = false, false
	top := layout(device.Info{}, []facts{a, b, c}, reach)
	near(t, "wired", rate(t, top, device.HBM(0), device.HBM(1)), 4*25e9*attainable)
	near(t, "over PCIe", rate(t, top, device.HBM(0), device.HBM(2)), 8*1.969e9*attainable)
	if p, err := top.Path(device.HBM(1), device.HBM(2)); err == nil {
		t.Errorf("a path where there is no access: %+v", p)
	}
	// What nobody knows is no limit.
	a.links = nvml.Links{}
	top = layout(device.Info{}, []facts{a}, full(1))
	if got := rate(t, top, device.Host, device.HBM(0)); got != 0 {
		t.Errorf("an unknown link carries %g", got)
	}
}

func TestNUMANode(t *testing.T) {
	root := fstest.MapFS{
		"sys/bus/pci/devices/0000:0a:00.0/numa_node": {Data: []byte("1\n")},
		"sys/bus/pci/devices/0000:0b:00.0/numa_node": {Data: []byte("?")},
	}
	for bus, want := range map[string]int{"0000:0A:00.0": 1, "0000:0b:00.0": -1, "0000:0c:00.0": -1} {
		if got := numaNode(root, bus); got != want {
			t.Errorf("%s: node %d, want %d", bus, got, want)
		}
	}
}

func TestHostMemory(t *testing.T) {
	const gib = 1 << 30
	meminfo := "MemTotal: 67108864 kB\nMemFree: 1 kB\nMemAvailable: 33554432 kB\n"
	for _, test := range []struct {
		name             string
		files            map[string]string
		total, available int64
	}{
		{"no groups", nil, 64 * gib, 32 * gib},
		{"version 2", map[string]string{
			"proc/self/cgroup":                 "0::/a/b\n",
			"sys/fs/cgroup/memory.max":         "max\n",
			"sys/fs/cgroup/a/memory.max":       "17179869184\n",
			"sys/fs/cgroup/a/memory.current":   "8589934592\n",
			"sys/fs/cgroup/a/memory.stat":      "anon 1\ninactive_file 1073741824\n",
			"sys/fs/cgroup/a/b/memory.max":     "34359738368\n",
			"sys/fs/cgroup/a/b/memory.current": "1\n",
		}, 16 * gib, 9 * gib},
		{"in a container", map[string]string{
			"proc/self/cgroup":             "0::/../elsewhere\n",
			"sys/fs/cgroup/memory.max":     "2147483648\n",
			"sys/fs/cgroup/memory.current": "1073741824\n",
		}, 2 * gib, 1 * gib},
		{"version 1", map[string]string{
			"proc/self/cgroup": "12:cpu,cpuacct:/x\n7:memory:/docker/1\n",
			"sys/fs/cgroup/memory/docker/1/memory.limit_in_bytes": "4294967296\n",
			"sys/fs/cgroup/memory/docker/1/memory.usage_in_bytes": "5368709120\n",
			"sys/fs/cgroup/memory/docker/1/memory.stat":           "total_inactive_file 0\n",
		}, 4 * gib, 0},
		{"limit above the machine's", map[string]string{
			"proc/self/cgroup":         "0::/\n",
			"sys/fs/cgroup/memory.max": "1099511627776\n",
		}, 64 * gib, 32 * gib},
	} {
		root := fstest.MapFS{"proc/meminfo": {Data: []byte(meminfo)}}
		for name, text := range test.files {
			root[name] = &fstest.MapFile{Data: []byte(text)}
		}
		if total, available := hostMemory(root); total != test.total || available != test.available {
			t.Errorf("%s: %d in all, %d available; want %d and %d", test.name, total, available, test.total, test.available)
		}
	}
}

func TestIndex(t *testing.T) {
	var x index
	var mems []*memory
	for _, at := range []device.Addr{4096, 1024, 8192} {
		mem := &memory{base: at, bytes: 512}
		mems = append(mems, mem)
		x.add(mem)
	}
	for _, test := range []struct {
		r    device.Range
		want *memory
	}{
		{device.Range{Addr: 4096, Bytes: 512}, mems[0]},
		{device.Range{Addr: 4607, Bytes: 1}, mems[0]},
		{device.Range{Addr: 4607, Bytes: 2}, nil},
		{device.Range{Addr: 4608, Bytes: 1}, nil},
		{device.Range{Addr: 1024, Bytes: 1}, mems[1]},
		{device.Range{Addr: 1023, Bytes: 2}, nil},
		{device.Range{Addr: 0, Bytes: 1 << 40}, nil},
		{device.Range{Addr: 8192, Bytes: -1}, nil},
		{device.Range{Addr: 9000, Bytes: 1}, nil},
	} {
		if got := x.find(test.r); got != test.want {
			t.Errorf("%v: %v", test.r, got)
		}
	}
	x.remove(mems[0])
	if x.find(device.Range{Addr: 4096, Bytes: 1}) != nil || x.find(device.Range{Addr: 8192, Bytes: 1}) != mems[2] {
		t.Error("after a removal the index has what it should not, or lacks what it should have")
	}
}
