package emulated_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
)

func TestParseSpec(t *testing.T) {
	gpus := func(n int, g emulated.GPU) (gs []emulated.GPU) {
		for range n {
			gs = append(gs, g)
		}
		return gs
	}
	for spec, want := range map[string]emulated.Options{
		"":       {GPUs: gpus(3, emulated.GPU{})},
		"gpus=1": {GPUs: gpus(1, emulated.GPU{})},
		"gpus=3,hbm=8GiB,host=16GiB,pcie=55.3GB/s,nvlink=395GB/s,flops=800T,bw=4.6TB/s,latency=8us,virtual,check,seed=1,schedule=lazy,nodata": {
			GPUs: gpus(3, emulated.GPU{MemoryBytes: 8 << 30, FlopsPerSecond: 800e12, BytesPerSecond: 4.6e12}),
			Host: emulated.GPU{MemoryBytes: 16 << 30}, HostLink: emulated.Link{BytesPerSecond: 55.3e9, Latency: 8 * time.Microsecond},
			PeerLink: emulated.Link{BytesPerSecond: 395e9, Latency: 8 * time.Microsecond},
			Virtual:  true, Check: true, NoData: true, Seed: 1, Schedule: emulated.Lazy,
		},
		" gpus=2 , hostroot=100GB/s, peerlatency=9.5us,latency=8us,pace,cpuflops=2T,cpubw=300GB/s": {
			GPUs: gpus(2, emulated.GPU{}), Host: emulated.GPU{FlopsPerSecond: 2e12, BytesPerSecond: 300e9},
			HostLink: emulated.Link{Latency: 8 * time.Microsecond}, PeerLink: emulated.Link{Latency: 9500 * time.Nanosecond},
			HostRoots: []emulated.Root{{GPUs: []int{0, 1}, BytesPerSecond: 100e9}}, Pace: true,
		},
		"gpus=4,pcie=50GB/s,hostroot=0-1:60GB/s+3:70GB/s,traffic=in1:30GB/s@10ms-50ms+out0:5GB/s@1s,hostlink=1:1GB/s+2:down@80ms-": {
			GPUs: gpus(4, emulated.GPU{}), HostLink: emulated.Link{BytesPerSecond: 50e9},
			HostRoots: []emulated.Root{{GPUs: []int{0, 1}, BytesPerSecond: 60e9}, {GPUs: []int{3}, BytesPerSecond: 70e9}},
			Traffic: []emulated.Traffic{
				{GPU: 1, BytesPerSecond: 30e9, Span: emulated.Span{From: 10 * time.Millisecond, Until: 50 * time.Millisecond}},
				{GPU: 0, ToHost: true, BytesPerSecond: 5e9, Span: emulated.Span{From: time.Second}},
			},
			HostRates: []emulated.HostRate{{GPU: 1, BytesPerSecond: 1e9}, {GPU: 2, Span: emulated.Span{From: 80 * time.Millisecond}}},
		},
		"hbm=80G,host=512M":      {GPUs: gpus(3, emulated.GPU{MemoryBytes: 80 << 30}), Host: emulated.GPU{MemoryBytes: 512 << 20}},
		"hbm=1.5GB,host=2048KiB": {GPUs: gpus(3, emulated.GPU{MemoryBytes: 1_500_000_000}), Host: emulated.GPU{MemoryBytes: 2 << 20}},
	} {
		got, err := emulated.ParseSpec(spec)
		if err != nil {
			t.Errorf("%q: %v", spec, err)
			continue
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%q:\n%s", spec, diff)
		}
	}
}

func TestParseSpecErrors(t *testing.T) {
	for spec, want := range map[string]string{
		"gpu=3":         `unknown key "gpu"; the keys are busy, bw, check, `,
		"gpus=0":        `key "gpus": "0": want a number of GPUs from 1`,
		"gpus":          `key "gpus" needs a value`,
		"virtual=yes":   `key "virtual" takes no value`,
		"gpus=1,gpus=2": `key "gpus" is given twice`,
		"gpus=1,,check": "empty setting",
		"hbm=8":         `key "hbm": "8": the unit is missing: want a size over 0 like 8GiB`,
		"hbm=-8GiB":     `key "hbm"`,
		"hbm=8gib":      `key "hbm": "8gib": there is no unit "gib": want a size over 0 like 8GiB`,
		"hbm=2000PiB":   `key "hbm": "2000PiB": it is more than 1024PiB: want a size`,
		"flops=1e":      `key "flops": "1e": there is no unit "e"`,
		"pcie=" + strings.Repeat("9", 400) + "GB/s": `it is too large: want a rate`,
		"hbm=0GiB":                              `key "hbm"`,
		"hbm=9999999TiB":                        `key "hbm"`,
		"hbm=1.2.3GiB":                          `key "hbm"`,
		"pcie=55GB":                             `key "pcie": "55GB": want a rate over 0 like 55.3GB/s`,
		"nvlink=/s":                             `key "nvlink"`,
		"flops=800":                             `key "flops": "800": the unit is missing: want flops per second over 0 like 800T`,
		"latency=8":                             `key "latency": "8": want a duration like 8us`,
		"latency=-8us":                          `key "latency"`,
		"seed=-1":                               `key "seed"`,
		"schedule=soon":                         `key "schedule": "soon": want eager, lazy or random`,
		"virtual,pace":                          "use only one of pace and virtual",
		"nodata":                                "nodata needs virtual",
		"schedule=random":                       "schedule=random needs virtual",
		"hostroot=0GB/s,check":                  `key "hostroot"`,
		"hostroot=1-0:5GB/s":                    `key "hostroot": "1-0:5GB/s": want a rate that all GPUs share, or sets of GPUs with rates like 0-3:`,
		"hostroot=0-9:5GB/s":                    "a host root names gpu3, but there are 3 GPUs",
		"traffic=1:30GB/s":                      `key "traffic": "1:30GB/s": want copies of others to and from GPUs like in1:30GB/s@10ms-50ms`,
		"traffic=in1:30GB/s@1":                  `key "traffic"`,
		"traffic=in1:30GB/s":                    "traffic of gpu1, and the links to the host have no rate; set HostLink (pcie=)",
		"pcie=1GB/s,traffic=in7:30GB/s":         "traffic of gpu7, but there are 3 GPUs",
		"pcie=1GB/s,traffic=in1:30GB/s@9ms-3ms": "from 9ms to 3ms: it must end after it begins",
		"hostlink=1:slow":                       `key "hostlink": "1:slow": want rates of GPUs' links like 1:1GB/s@10ms-50ms+2:down@80ms`,
		"pcie=1GB/s,hostlink=1:2GB/s":           "above that of HostLink (pcie=), 1e+09",
	} {
		if _, err := emulated.ParseSpec(spec); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want an error that says %q", spec, err, want)
		}
	}
}

// TestSpecHelp: the help names every key, which an unknown one lists.
func TestSpecHelp(t *testing.T) {
	_, err := emulated.ParseSpec("?")
	_, list, ok := strings.Cut(err.Error(), "the keys are ")
	if !ok {
		t.Fatal(err)
	}
	for _, key := range strings.Split(list, ", ") {
		if !strings.Contains(emulated.SpecHelp, key) {
			t.Errorf("the help does not tell of %q", key)
		}
	}
}

func FuzzParseSpec(f *testing.F) {
	for _, s := range []string{"", "gpus=2,hbm=8GiB,virtual", "pcie=55.3GB/s,latency=8us", "flops=1e9T", "seed=18446744073709551616", "hostroot=1B/s,gpus=1024", "pcie=1B/s,traffic=in1:30GB/s@10ms-,hostlink=1:1B/s@1s-2s+0:down,hostroot=0-1:1B/s"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		o, err := emulated.ParseSpec(s)
		if err != nil {
			if !strings.HasPrefix(err.Error(), "emulated: ") {
				t.Errorf("%q: error %q", s, err)
			}
			return
		}
		// What is accepted opens.
		m, err := emulated.Open(o)
		if err != nil {
			t.Fatalf("%q: %v", s, err)
		}
		if err := m.Close(); err != nil {
			t.Fatal(err)
		}
	})
}

func TestOptionsRefused(t *testing.T) {
	topo := func(change func(*device.Topology)) emulated.Options {
		d := &device.Topology{Host: device.Info{MemoryBytes: 1}, GPUs: []device.Info{{MemoryBytes: 1}}, Paths: map[device.Pair]device.Path{}}
		change(d)
		return emulated.Options{Topology: d}
	}
	for want, o := range map[string]emulated.Options{
		"schedule 7":                {Schedule: 7},
		"NoData needs Virtual":      {NoData: true},
		"one of Pace and Virtual":   {Pace: true, Virtual: true},
		"schedule lazy needs":       {Schedule: emulated.Lazy},
		"DeadlockAfter":             {DeadlockAfter: -1},
		"gpu0 has a negative":       {GPUs: []emulated.GPU{{MemoryBytes: -1}}},
		"host has a negative":       {Host: emulated.GPU{FlopsPerSecond: -1}},
		"a link has a negative":     {PeerLink: emulated.Link{Latency: -1}},
		"rate is 0 bytes/s":         {GPUs: make([]emulated.GPU, 1), HostRoots: []emulated.Root{{GPUs: []int{0}}}},
		"names gpu1, but there":     {GPUs: make([]emulated.GPU, 1), HostRoots: []emulated.Root{{GPUs: []int{1}, BytesPerSecond: 1}}},
		"behind two host roots":     {GPUs: make([]emulated.GPU, 1), HostRoots: []emulated.Root{{GPUs: []int{0, 0}, BytesPerSecond: 1}}},
		"leave GPUs, Host":          {GPUs: make([]emulated.GPU, 1), Topology: &device.Topology{}},
		"gpu0 has 0 bytes":          topo(func(d *device.Topology) { d.GPUs[0].MemoryBytes = 0 }),
		"there is no gpu1":          topo(func(d *device.Topology) { d.Paths[device.Pair{To: device.HBM(1)}] = device.Path{} }),
		"uses link 3 of 0":          topo(func(d *device.Topology) { d.Paths[device.Pair{To: device.HBM(0)}] = device.Path{Links: []int{3}} }),
		"has a bad rate or latency": topo(func(d *device.Topology) { d.Paths[device.Pair{To: device.HBM(0)}] = device.Path{Latency: -1} }),
	} {
		if _, err := emulated.Open(o); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want an error that says %q", err, want)
		}
	}
}

// TestTopology opens a machine from a topology: copies go where it has a path, at
// its rate.
func TestTopology(t *testing.T) {
	gpu := device.Info{MemoryBytes: 1 << 20}
	d := &device.Topology{
		Host: gpu, GPUs: []device.Info{gpu, gpu},
		Links: []device.Link{{Name: "wire", BytesPerSecond: 1e9}},
		Paths: map[device.Pair]device.Path{{From: device.Host, To: device.HBM(0)}: {Links: []int{0}, BytesPerSecond: 5e8, Latency: time.Microsecond}},
	}
	m := open(t, emulated.Options{Topology: d, Virtual: true})
	if m.Topology() != d {
		t.Error("another topology")
	}
	host, a, b := alloc(t, m, device.Host, 1000, "host"), alloc(t, m, device.HBM(0), 1000, "a"), alloc(t, m, device.HBM(1), 1000, "b")
	s := stream(t, m, device.HBM(0), "s")
	wants(t, s.Copy(b.Range(0, 1000), a.Range(0, 1000)), device.ErrUnreachable, "copy")
	if err := s.Copy(a.Range(0, 1000), host.Range(0, 1000)); err != nil {
		t.Fatal(err)
	}
	if err := s.Copy(a.Range(0, 500), a.Range(500, 500)); err != nil {
		t.Fatal(err)
	}
	if err := s.Synchronize(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := m.Now(); got != 3*time.Microsecond {
		t.Errorf("1000 bytes at 0.5 bytes/ns behind 1 us took %v", got)
	}
}

// TestPairsAndBusy: single pairs of GPUs may be slower, and what others use of a memory's
// bandwidth slows its copies, which no description of the machine shows.
func TestPairsAndBusy(t *testing.T) {
	o, err := emulated.ParseSpec("virtual,gpus=3,hbm=64MiB,nvlink=400GB/s,pairs=2-0:50GB/s+2-1:100GB/s,busy=1:75%+2:0")
	if err != nil {
		t.Fatal(err)
	}
	m := open(t, o)
	rate := func(from, to int) float64 {
		p, err := m.Topology().Path(device.HBM(from), device.HBM(to))
		if err != nil {
			t.Fatal(err)
		}
		const bytes = 1 << 20
		src, dst := alloc(t, m, device.HBM(from), bytes, "from"), alloc(t, m, device.HBM(to), bytes, "to")
		s, err := m.NewStream(device.HBM(to), device.StreamOptions{Name: "copy"})
		if err != nil {
			t.Fatal(err)
		}
		begin := m.Now()
		if err := errors.Join(s.Copy(dst.Range(0, bytes), src.Range(0, bytes)), s.Synchronize(t.Context()), s.Close()); err != nil {
			t.Fatal(err)
		}
		took := m.Now() - begin
		if said := p.BytesPerSecond; said != map[int]float64{1: 400e9, 2: 50e9}[max(from, to)] {
			t.Errorf("the topology says %g bytes/s from %d to %d", said, from, to)
		}
		return bytes / took.Seconds()
	}
	for _, c := range []struct {
		from, to int
		want     float64
	}{{1, 0, 100e9}, {0, 1, 100e9}, {2, 0, 50e9}, {0, 2, 50e9}} {
		if got := rate(c.from, c.to); got < 0.99*c.want || got > 1.01*c.want {
			t.Errorf("from %d to %d: %g bytes/s, want %g", c.from, c.to, got, c.want)
		}
	}
	if a, b := m.OtherBandwidth(device.HBM(1)), m.OtherBandwidth(device.HBM(2)); a != 0.75 || b != 0 {
		t.Errorf("others use %g and %g", a, b)
	}
	for _, text := range []string{
		"pairs=1:5GB/s", "pairs=1-1:5GB/s", "pairs=1-0:5", "pairs=0-9:5GB/s", "pairs=", "busy=1", "busy=1:x", "busy=1:100%", "busy=1:-1", "busy=7:10%", "busy=-1:10%",
	} {
		if _, err := emulated.ParseSpec(text); err == nil {
			t.Errorf("%q is accepted", text)
		}
	}
}
