package multipath_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/eval"
	"github.com/moeserve/moeserve/eval/multipath"
	"github.com/moeserve/moeserve/planner"
)

const (
	hostRate, peerRate = 55.3e9, 395e9
	hostLatency        = 7400 * time.Nanosecond
	peerLatency        = 9300 * time.Nanosecond
)

// machine has links of the rates of H200's, and so many GPUs.
func machine(t *testing.T, gpus int, o emulated.Options) device.Machine {
	t.Helper()
	o.Virtual, o.GPUs = true, make([]emulated.GPU, gpus)
	o.HostLink = emulated.Link{BytesPerSecond: hostRate, Latency: hostLatency}
	o.PeerLink = emulated.Link{BytesPerSecond: peerRate, Latency: peerLatency}
	m, err := emulated.New(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err) // memory that was not freed
		}
	})
	return m
}

// measure measures parts on all GPUs of a machine.
func measure(t *testing.T, m device.Machine, o multipath.Options) *multipath.Result {
	t.Helper()
	o.Machine, o.GPU = m, device.HBM(0)
	for i := range len(m.Topology().GPUs) - 1 {
		o.Relays = append(o.Relays, device.HBM(i+1))
	}
	r := &multipath.Result{Machine: eval.Machine{Device: "emulated", Emulated: true, Emulation: &eval.Emulation{Rates: eval.RatesVirtual}}}
	if err := multipath.Measure(t.Context(), o, r); err != nil {
		t.Fatal(err)
	}
	for s, want := range o.Needs() {
		if u, err := m.Usage(s); err != nil || u.Peak != want {
			t.Errorf("%s: peak of %d bytes, %v; %d announced", s, u.Peak, err, want)
		}
	}
	return r
}

func near(got, want, slack float64) bool { return math.Abs(got/want-1) <= slack }

// Each link has its rate alone, and a shared root bounds all at once.
func TestLinks(t *testing.T) {
	const shared = 100e9
	m := machine(t, 4, emulated.Options{NoData: true, HostRoots: []emulated.Root{{GPUs: []int{0, 1, 2}, BytesPerSecond: shared}}})
	l := measure(t, m, multipath.Options{Parts: []multipath.Part{multipath.LinksPart}, Rounds: 1}).Links
	if len(l.PCIe) != 4 || len(l.Pairs) != 4*3 {
		t.Fatalf("%d links to the host, %d pairs", len(l.PCIe), len(l.Pairs))
	}
	for i, p := range l.PCIe {
		sharedRate := shared / 3
		if i == 3 {
			sharedRate = hostRate
		}
		if !near(p.H2D, hostRate, 0.02) || !near(p.D2H, hostRate, 0.02) || !near(p.Both, 2*hostRate, 0.02) || !near(p.SharedH2D, sharedRate, 0.02) || !near(p.SharedD2H, sharedRate, 0.02) {
			t.Errorf("%+v", p)
		}
	}
	for _, p := range l.Pairs {
		if !near(p.BytesPerSecond, peerRate, 0.06) || p.From == p.To {
			t.Errorf("%+v", p)
		}
	}
	if all := shared + hostRate; !near(l.ToGPUs, all, 0.02) || !near(l.FromGPUs, all, 0.02) || !near(l.Both, 2*all, 0.02) || !near(l.FromPeers, peerRate, 0.06) || !near(l.ToPeers, peerRate, 0.06) {
		t.Errorf("%+v", l)
	}
	one := measure(t, machine(t, 1, emulated.Options{NoData: true}), multipath.Options{Parts: []multipath.Part{multipath.LinksPart}, Rounds: 1}).Links
	if len(one.Pairs) != 0 || !near(one.ToGPUs, hostRate, 0.02) {
		t.Errorf("one GPU: %+v", one)
	}
}

// A static split is as fast as its paths together, in both directions, and every byte of it is in
// its place; a root that they share bounds it.
func TestStatic(t *testing.T) {
	small := multipath.Options{
		Parts: []multipath.Part{multipath.StaticPart}, Bytes: 16<<20 + 4096, LinkBytes: 1 << 20, Chunks: []int64{256 << 10}, Depths: []int{2}, ChunkBytes: 256 << 10, Rounds: 1,
	}
	s := measure(t, machine(t, 3, emulated.Options{Check: true}), small).Static
	if len(s.Points) != 2*3 {
		t.Fatalf("%+v", s)
	}
	for _, p := range s.Points {
		if want := float64(p.Paths) / (hostLatency.Seconds()/(256<<10) + 1/hostRate); !near(p.BytesPerSecond, want, 0.1) || !near(p.Own, float64(p.Paths)*(1<<20)/(hostLatency.Seconds()+(1<<20)/hostRate), 0.02) {
			t.Errorf("%+v, want %.4g", p, want)
		}
	}
	small.Bytes, small.LinkBytes, small.ChunkBytes = 256<<20, 16<<20, 4<<20
	shared := measure(t, machine(t, 2, emulated.Options{NoData: true, HostRoots: []emulated.Root{{GPUs: []int{0, 1}, BytesPerSecond: 60e9}}}), small).Static
	for _, p := range shared.Points {
		if limit := 60e9; p.Paths == 2 && (!near(p.Own, limit, 0.1) || p.BytesPerSecond > limit) {
			t.Errorf("over a shared root: %+v", p)
		}
	}
}

// A copy over a relay alone reaches its link's rate with two buffers, and only part of it with
// one, whose two hops do not overlap; small chunks are slower.
func TestRelay(t *testing.T) {
	o := multipath.Options{
		Parts: []multipath.Part{multipath.RelayPart}, Bytes: 256 << 20, LinkBytes: 4 << 20, Chunks: []int64{64 << 10, 4 << 20}, Depths: []int{1, 2}, Rounds: 1,
	}
	x := measure(t, machine(t, 2, emulated.Options{NoData: true}), o).Relay
	if len(x.Points) != 2*2*2 {
		t.Fatalf("%+v", x)
	}
	for _, p := range x.Points {
		chunk := float64(p.ChunkBytes)
		host, peer := hostLatency.Seconds()+chunk/hostRate, peerLatency.Seconds()+chunk/peerRate
		want := chunk / max(host, peer)
		if p.Depth == 1 {
			want = chunk / (host + peer)
		}
		if !near(p.BytesPerSecond, want, 0.06) || p.ShareOfLink > 1 {
			t.Errorf("%+v, want %.4g", p, want)
		}
	}
}

// Links that share a root are found, and nothing else is.
func TestRoots(t *testing.T) {
	for name, c := range map[string]struct {
		gpus  int
		roots []emulated.Root
		want  []string
	}{
		"none":      {4, nil, nil},
		"pair":      {4, []emulated.Root{{GPUs: []int{1, 3}, BytesPerSecond: 60e9}}, []string{"gpu1 gpu3"}},
		"fours":     {8, []emulated.Root{{GPUs: []int{0, 1, 2, 3}, BytesPerSecond: 108e9}, {GPUs: []int{4, 5, 6, 7}, BytesPerSecond: 108e9}}, []string{"gpu0 gpu1 gpu2 gpu3", "gpu4 gpu5 gpu6 gpu7"}},
		"all eight": {8, []emulated.Root{{GPUs: []int{0, 1, 2, 3, 4, 5, 6, 7}, BytesPerSecond: 167e9}}, []string{"gpu0 gpu1 gpu2 gpu3 gpu4 gpu5 gpu6 gpu7"}},
	} {
		t.Run(name, func(t *testing.T) {
			o := multipath.Options{Parts: []multipath.Part{multipath.RootsPart}, LinkBytes: 16 << 20, Rounds: 1}
			r := measure(t, machine(t, c.gpus, emulated.Options{NoData: true, HostRoots: c.roots}), o)
			for _, d := range []multipath.Direction{multipath.ToGPU, multipath.FromGPU} {
				var got []string
				for _, x := range r.Roots.Sets {
					if x.Direction == d {
						got = append(got, strings.Join(x.GPUs, " "))
						if !near(x.BytesPerSecond, c.roots[len(got)-1].BytesPerSecond, 0.02) || !near(x.Alone, float64(len(x.GPUs))*hostRate, 0.04) {
							t.Errorf("%+v", x)
						}
					}
				}
				if !slices.Equal(got, c.want) {
					t.Errorf("%s: %q, want %q", d, got, c.want)
				}
			}
		})
	}
}

// Every part has a table and, if it is a figure, a chart; what is to be reached is said.
func TestOutput(t *testing.T) {
	var spent time.Duration
	o := multipath.Options{
		Bytes: 64 << 20, LinkBytes: 4 << 20, Chunks: []int64{1 << 20, 2 << 20}, Depths: []int{1, 2}, Largest: 64 << 20, Rounds: 1, CPUSpan: time.Millisecond,
		CPUTime: func() time.Duration { spent += time.Millisecond; return spent },
	}
	r := measure(t, machine(t, 3, emulated.Options{NoData: true}), o)
	var table bytes.Buffer
	if err := multipath.WriteTable(&table, r); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"relays: gpu1, gpu2", "between GPUs", "static round-robin split of 64 MiB", "host to GPU: no links share a root", "copies of 64 MiB over gpu1 alone, GPU to host",
		"(Figure 8)", "(Figure 9)", "(Figures 10a and 11)", "(Figure 10b)", "(Figure 12)", "(Figure 13)", "(Figure 14)", "(Table 2)", "beside the engine without direct first", "copies over 2 relays' links",
		"reached: host to GPU over 3 GPUs: engine over the better of static split and own copies is ", ", at most 1.00 cores",
	} {
		if !strings.Contains(table.String(), want) {
			t.Errorf("no %q in\n%s", want, &table)
		}
	}
	figures := r.Figures()
	if len(figures) != 9 {
		t.Errorf("%d figures", len(figures))
	}
	for name, chart := range figures {
		var svg bytes.Buffer
		if err := chart.Write(&svg, "svg"); err != nil || !strings.Contains(svg.String(), "</svg>") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A copy by the engine over all links comes near what they reach together, and beside others' copies
// it is faster than any static split that does not know of them; every byte is in its place.
func TestEngine(t *testing.T) {
	o := multipath.Options{
		Parts: []multipath.Part{multipath.GPUsPart, multipath.TrafficPart, multipath.EnginesPart, multipath.DirectPart}, Bytes: 512 << 20, LinkBytes: 16 << 20, Rounds: 1,
	}
	r := measure(t, machine(t, 3, emulated.Options{NoData: true}), o)
	for _, p := range r.GPUs.Points {
		if share := p.Engine / max(p.Own, p.Static); share < 0.85 || share > 1.01 {
			t.Errorf("%+v", p)
		}
	}
	for _, p := range r.Traffic.Points {
		gain := 1.3
		switch p.Beside {
		case "no other copies", "copies over both in turn": // as much over each link
			gain = 0.95
		}
		if p.Engine < 0.95*p.Native || p.Engine < gain*p.Even || p.Engine < 0.95*p.Uneven || p.Covered < 1 {
			t.Errorf("%+v", p)
		}
	}
	for _, p := range r.Engines.Points {
		if !near(p.Each[0], p.Each[1], 0.1) || p.Together < 0.95*p.Alone {
			t.Errorf("%+v", p)
		}
	}
	if d := r.Direct; d.BesideEngine < 0.9*d.Alone || d.Relayed > 0.2 || d.RelayedLongest < 0.5 || d.BesideLongest > 0.95*d.BesideEngine {
		t.Errorf("%+v", d)
	}
	small := multipath.Options{
		Parts: []multipath.Part{multipath.SizesPart, multipath.GPUsPart, multipath.ChunksPart, multipath.ThresholdPart}, Bytes: 24 << 20, Largest: 24 << 20, LinkBytes: 1 << 20,
		Chunks: []int64{1 << 20}, Depths: []int{2}, ChunkBytes: 1 << 20, Rounds: 1,
	}
	checked := measure(t, machine(t, 2, emulated.Options{Check: true}), small)
	if last := checked.Sizes.Points[14]; last.Bytes != 16<<20 || last.Native < 1.2*last.Engine {
		t.Errorf("%+v", last)
	}
}

// A calibration finds the relays whose links add to the rate, in hardware that can be read again.
func TestCalibrate(t *testing.T) {
	m := machine(t, 4, emulated.Options{NoData: true, HostRoots: []emulated.Root{{GPUs: []int{0, 1, 2}, BytesPerSecond: 60e9}}})
	o := multipath.Options{Machine: m, GPU: device.HBM(0), Relays: []device.Space{device.HBM(1), device.HBM(2), device.HBM(3)}, Bytes: 256 << 20, Rounds: 1}
	c, err := multipath.Calibrate(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	// One more link behind the shared root adds some, the last one does not.
	if len(c.Relays) == 0 || c.Relays[0] != "gpu3" || len(c.Relays) > 2 {
		t.Errorf("relays %v", c.Relays)
	}
	h, err := planner.HardwarePreset("h200")
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Put(&h, &eval.Machine{}, func(space string) int { return 10 + int(space[3]-'0') }); err != nil {
		t.Fatal(err)
	}
	data, err := json.Marshal(h)
	if err != nil {
		t.Fatal(err)
	}
	back, err := planner.ParseHardware(data)
	if err != nil {
		t.Fatal(err)
	}
	x := back.Multipath
	if x.GPU != 10 || x.Relays[0] != 13 || len(x.SharedRoots) != 1 || !slices.Equal(x.SharedRoots[0], []int{10, 11, 12}) || len(back.HostToGPU) != len(x.Relays)+1 {
		t.Errorf("%+v", x)
	}
	if rate := back.HostToGPU[1]; rate < 95e9 || rate > 111e9 || x.ThresholdIn < 1<<20 || x.ThresholdIn > 16<<20 || x.ChunkIn < 1<<20 || x.Depth < 1 {
		t.Errorf("%v, %+v", back.HostToGPU, x)
	}
	if !strings.HasPrefix(back.Sources["multipath"], "measured by bench transfer") || !strings.Contains(c.Table(), "relays that pay: gpu3") {
		t.Errorf("%v\n%s", back.Sources, c.Table())
	}
	// Where all links share one root, no relay pays.
	alone := machine(t, 2, emulated.Options{NoData: true, HostRoots: []emulated.Root{{GPUs: []int{0, 1}, BytesPerSecond: hostRate}}})
	o.Machine, o.Relays = alone, o.Relays[:1]
	if c, err = multipath.Calibrate(t.Context(), o); err != nil || len(c.Relays) != 0 || c.ThresholdIn != 0 {
		t.Fatalf("%+v, %v", c, err)
	}
	if err := c.Put(&h, &eval.Machine{Emulated: true}, func(string) int { return 0 }); err != nil || len(h.HostToGPU) != 1 || len(h.Multipath.Relays) != 0 {
		t.Errorf("%+v, %v", h.Multipath, err)
	}
}

func TestOptions(t *testing.T) {
	m := machine(t, 2, emulated.Options{NoData: true})
	good := multipath.Options{Machine: m, GPU: device.HBM(0), Relays: []device.Space{device.HBM(1)}, Bytes: 1 << 20, LinkBytes: 1 << 20, Parts: []multipath.Part{multipath.LinksPart}}
	for name, spoil := range map[string]func(*multipath.Options){
		"no machine":       func(o *multipath.Options) { o.Machine = nil },
		"the host":         func(o *multipath.Options) { o.GPU = device.Host },
		"itself":           func(o *multipath.Options) { o.Relays = []device.Space{o.GPU} },
		"twice":            func(o *multipath.Options) { o.Relays = append(o.Relays, o.Relays...) },
		"no bytes":         func(o *multipath.Options) { o.Bytes = -1 },
		"no buffer":        func(o *multipath.Options) { o.Depths = []int{0} },
		"an unknown part":  func(o *multipath.Options) { o.Parts = []multipath.Part{"figure 7"} },
		"no relay":         func(o *multipath.Options) { o.Relays, o.Parts = nil, []multipath.Part{multipath.StaticPart} },
		"more than exists": func(o *multipath.Options) { o.Bytes = 1 << 50 },
	} {
		o := good
		spoil(&o)
		if err := multipath.Measure(t.Context(), o, &multipath.Result{}); err == nil {
			t.Errorf("%s: measured", name)
		}
	}
	if err := multipath.Measure(t.Context(), good, &multipath.Result{}); err != nil {
		t.Error(err)
	}
}

// competitor is one on a machine of its own, and the end of its Compete.
func competitor(t *testing.T) (*multipath.Remote, <-chan error) {
	t.Helper()
	m := machine(t, 1, emulated.Options{})
	commands, tell := io.Pipe()
	hear, answers := io.Pipe()
	ended := make(chan error, 2)
	go func() {
		err := multipath.Compete(t.Context(), multipath.Options{Machine: m, GPU: device.HBM(0), LinkBytes: 1 << 20}, commands, answers)
		ended <- err
		ended <- err
		commands.Close() //nolint:errcheck // of a pipe in memory
		answers.Close()  //nolint:errcheck // likewise
	}()
	return &multipath.Remote{Commands: tell, Answers: hear, Wait: func() error { return <-ended }}, ended
}

// A competitor copies from Start to Stop and at no other time, and ends with an error when it is told what it
// does not know.
func TestCompetitor(t *testing.T) {
	r, _ := competitor(t)
	count := func() int64 {
		n, err := r.Bytes(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	if n := count(); n != 0 {
		t.Errorf("%d bytes before the start", n)
	}
	for _, d := range []multipath.Direction{multipath.ToGPU, multipath.FromGPU} {
		before := count()
		if err := r.Start(t.Context(), d); err != nil {
			t.Fatal(err)
		}
		for count() < before+10<<20 {
			continue
		}
		if err := r.Stop(t.Context()); err != nil {
			t.Fatal(err)
		}
		if a, b := count(), count(); a != b || a%(1<<20) != 0 {
			t.Errorf("%s: %d bytes, then %d, after the stop", d, a, b)
		}
	}
	if err := r.Start(t.Context(), "sideways"); err == nil {
		t.Error("it goes sideways")
	}
	if err := r.Close(); err == nil || !strings.Contains(err.Error(), `"sideways" to a competitor: must be h2d, d2h, stop or bytes`) {
		t.Errorf("it ended with %v", err)
	}
}

// counted counts the calls of a competitor.
type counted struct {
	*multipath.Remote
	starts, stops int
}

func (c *counted) Start(ctx context.Context, d multipath.Direction) error {
	c.starts++
	return c.Remote.Start(ctx, d)
}

func (c *counted) Stop(ctx context.Context) error {
	c.stops++
	return c.Remote.Stop(ctx)
}

// Copies of other processes are measured beside those of the engine; there is one process for each GPU.
func TestTrafficOfProcesses(t *testing.T) {
	started := map[device.Space]*counted{}
	var ends []<-chan error
	m := machine(t, 2, emulated.Options{})
	x := measure(t, m, multipath.Options{
		Parts: []multipath.Part{multipath.TrafficPart}, Bytes: 32 << 20, LinkBytes: 4 << 20, Rounds: 1,
		Others: func(_ context.Context, gpu device.Space) (multipath.Competitor, error) {
			if started[gpu] != nil {
				t.Errorf("another competitor on %s", gpu)
			}
			r, ended := competitor(t)
			ends = append(ends, ended)
			started[gpu] = &counted{Remote: r}
			return started[gpu], nil
		},
	}).Traffic
	for _, e := range ends {
		if err := <-e; err != nil {
			t.Error(err)
		}
	}
	// Beside each: a native copy, two static splits, the engine in both modes; two directions.
	for _, gpu := range []device.Space{device.HBM(0), device.HBM(1)} {
		if c := started[gpu]; c == nil || c.starts < 2*5 || c.starts != c.stops {
			t.Errorf("the competitor on %s: %+v", gpu, c)
		}
	}
	for _, p := range x.Points {
		if p.Native <= 0 || p.Even <= 0 || p.Engine <= 0 || p.EngineWaits <= 0 {
			t.Errorf("%s beside %s: %+v", p.Direction, p.Beside, p)
		}
	}
	if !x.Processes {
		t.Error("the result does not say that the others are processes")
	}
}

// stubborn is a competitor that does not stop.
type stubborn struct{ *multipath.Remote }

func (s *stubborn) Stop(context.Context) error { return errors.New("it goes on") }

// A competitor that cannot be stopped ends the measurement: what follows would be measured beside it.
func TestTrafficThatGoesOn(t *testing.T) {
	m := machine(t, 2, emulated.Options{})
	o := multipath.Options{
		Machine: m, GPU: device.HBM(0), Relays: []device.Space{device.HBM(1)}, Parts: []multipath.Part{multipath.TrafficPart}, Bytes: 32 << 20, LinkBytes: 4 << 20, Rounds: 1,
		Others: func(context.Context, device.Space) (multipath.Competitor, error) {
			r, _ := competitor(t)
			return &stubborn{r}, nil
		},
	}
	if err := multipath.Measure(t.Context(), o, &multipath.Result{}); err == nil || !strings.Contains(err.Error(), "it goes on") {
		t.Errorf("the measurement ended with %v", err)
	}
}
