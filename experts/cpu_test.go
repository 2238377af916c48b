package experts

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/kernels"
)

// mixtralExpert is the layout of an expert of Mixtral-8x7B: 352 MB.
var mixtralExpert = kernels.ExpertLayout{ExpertShape: kernels.ExpertShape{Hidden: 4096, Intermediate: 14336, DType: kernels.BF16}, Tag: kernels.Tiles, Size: 3 * 2 * 4096 * 14336}

// server are the rates of a host: 90 GB/s of weights, a link of 55 GB/s.
var (
	serverCPU  = CPURate{BytesPerSecond: 90e9, FlopsPerSecond: 1e12, Latency: 50 * time.Microsecond}
	serverLink = hostLink{bytesPerSecond: 55e9, start: 20 * time.Microsecond}
)

// TestDivide divides experts between the CPU and the link.
func TestDivide(t *testing.T) {
	whole := mixtralExpert.Size
	copying := func(left ...int64) (list []candidate) {
		for i, n := range left {
			list = append(list, candidate{expert: i, rows: 1, left: n})
		}
		return list
	}
	for _, c := range []struct {
		what string
		cpu  CPURate
		link hostLink
		list []candidate
		want []int // experts on the CPU
	}{
		{"nothing", serverCPU, serverLink, nil, nil},
		{"one: the CPU is faster", serverCPU, serverLink, copying(whole), []int{0}},
		{"two: one each", serverCPU, serverLink, copying(whole, whole), []int{1}},
		{"five: three to two", serverCPU, serverLink, copying(whole, whole, whole, whole, whole), []int{4, 3, 2}},
		{"one that has almost arrived", serverCPU, serverLink, copying(whole / 4), nil},
		{"one that has hardly begun", serverCPU, serverLink, copying(whole - 1000), []int{0}},
		{"the other is the link's that has begun", serverCPU, serverLink, copying(whole/2, whole), []int{1}},
		{"the link has a head start", serverCPU, hostLink{bytesPerSecond: 55e9, head: 4 * time.Millisecond}, copying(whole), nil},
		{"too short a head start", serverCPU, hostLink{bytesPerSecond: 55e9, head: 2 * time.Millisecond}, copying(whole), []int{0}},
		{"a slow CPU", CPURate{BytesPerSecond: 10e9, FlopsPerSecond: 1e12}, serverLink, copying(whole, whole, whole), nil},
		{"arithmetic is slow: many rows go to the GPU", CPURate{BytesPerSecond: 90e9, FlopsPerSecond: 1e11}, serverLink, []candidate{{rows: 1, left: whole}, {expert: 1, rows: 8, left: whole}}, []int{0}},
		{"no rate of the link is known", serverCPU, hostLink{}, copying(whole, whole), nil},
	} {
		forCPU(c.list)
		n := c.cpu.time(&mixtralExpert).divide(c.link, c.list)
		var got []int
		for _, x := range c.list[:n] {
			got = append(got, x.expert)
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: the CPU computes %v, want %v", c.what, got, c.want)
		}
	}
}

// TestDivideCutsCopies: of a copy in progress only what is in flight costs the link time where the CPU
// computes the expert.
func TestDivideCutsCopies(t *testing.T) {
	cpu, link := CPUTime{Expert: 0.3}, hostLink{bytesPerSecond: 100}
	for _, c := range []struct {
		inFlight int64
		want     int
		seconds  float64
	}{{0, 2, 0.6}, {10, 2, 0.6}, {70, 2, 0.7}, {90, 1, 0.9}} {
		list := []candidate{{rows: 1, left: 100}, {expert: 1, rows: 1, left: 90, inFlight: c.inFlight}}
		n := cpu.divide(link, list)
		if seconds := cpu.longer(link, list, n); n != c.want || math.Abs(seconds-c.seconds) > 1e-9 {
			t.Errorf("%d bytes in flight: %d on the CPU in %v s, want %d in %v", c.inFlight, n, seconds, c.want, c.seconds)
		}
	}
}

// TestDivideEndsTogether: of many experts, CPU and link end within the time of one; no other number
// of experts on the CPU would end earlier.
func TestDivideEndsTogether(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 1000 {
		cpu := CPUTime{Layer: 1e-4 * r.Float64(), Expert: 1e-3 + 1e-2*r.Float64(), Row: 1e-4 * r.Float64()}
		link := hostLink{bytesPerSecond: 1e9 + 100e9*r.Float64(), start: time.Duration(r.IntN(50)) * time.Microsecond}
		var list []candidate
		for e := range 2 + r.IntN(30) {
			list = append(list, candidate{expert: e, rows: 1 + r.IntN(4), left: mixtralExpert.Size})
		}
		forCPU(list)
		end := func(n int) (onCPU, onLink float64) {
			if n > 0 {
				onCPU = sum(cpu.terms(), quantities(computed(list, division{onCPU: n})))
			}
			return onCPU, link.seconds(list[n:])
		}
		n := cpu.divide(link, list)
		a, b := end(n)
		if one := max(cpu.Layer+cpu.Expert+4*cpu.Row, link.seconds(list[:1])); math.Abs(a-b) > one {
			t.Fatalf("%+v, %+v, %d experts: %d on the CPU, for %v s, %v s on the link", cpu, link, len(list), n, a, b)
		}
		for m := range len(list) + 1 {
			if x, y := end(m); max(x, y) < max(a, b)-1e-12 {
				t.Fatalf("%+v, %+v, %d experts: %v s with %d on the CPU, %v s with %d", cpu, link, len(list), max(a, b), n, max(x, y), m)
			}
		}
	}
}

// computed is what the CPU computes of a layer's candidates.
func computed(list []candidate, d division) (all []ComputedExpert) {
	for _, c := range list[:d.onCPU] {
		all = append(all, ComputedExpert{c.rows, 1})
	}
	if d.first > 0 {
		all = append(all, ComputedExpert{list[d.onCPU].rows, 1 - float64(d.first)/float64(mixtralExpert.Intermediate)})
	}
	return all
}

// TestSplitEndsTogether: CPU and link end within the time of TileColumns columns with a divided expert, no
// other division of it would end earlier, and the time is what is predicted.
func TestSplitEndsTogether(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	divided := 0
	for range 1000 {
		cpu := CPUTime{Layer: 1e-4 * r.Float64(), Expert: 1e-3 + 1e-2*r.Float64(), Row: 1e-4 * r.Float64()}
		link := hostLink{bytesPerSecond: 1e9 + 100e9*r.Float64(), start: time.Duration(r.IntN(50)) * time.Microsecond}
		read := [terms]float64{1e-4 * r.Float64(), 1 / (link.bytesPerSecond * (0.5 + 0.5*r.Float64()))}
		var list []candidate
		for e := range 1 + r.IntN(5) {
			list = append(list, candidate{expert: e, rows: 1 + r.IntN(4), left: mixtralExpert.Size})
		}
		forCPU(list)
		n := r.IntN(len(list))
		end := func(first int) (onCPU, onLink float64) {
			onCPU = sum(cpu.terms(), quantities(computed(list, division{onCPU: n, first: first})))
			bytes := readBytes(division{first: first})
			onLink = read[0] + read[1]*bytes
			if copies := link.seconds(list[n+1:]); copies > 0 {
				onLink = max(onLink, copies+bytes/link.bytesPerSecond)
			}
			return onCPU, onLink
		}
		s, ok := cpu.split(&mixtralExpert, link, read, list, n, false)
		if !ok {
			if a, b := end(kernels.TileColumns); a > b {
				if a, b := end(mixtralExpert.Intermediate - kernels.TileColumns); a < b {
					t.Fatalf("%+v, %+v, %+v, %d of %d experts: not divided", cpu, link, read, n, len(list))
				}
			}
			continue
		}
		divided++
		a, b := end(s.first)
		if math.Abs(max(a, b)-s.seconds) > 1e-9 || math.Abs(max(a-b, 0)-s.linkFree) > 1e-9 {
			t.Fatalf("%+v, %+v, %+v: %+v, and it is %v on the CPU, %v on the link", cpu, link, read, s, a, b)
		}
		for first := kernels.TileColumns; first < mixtralExpert.Intermediate; first += kernels.TileColumns {
			if x, y := end(first); max(x, y) < max(a, b)-(cpu.Expert+read[1]*float64(mixtralExpert.Size))*kernels.TileColumns/float64(mixtralExpert.Intermediate) {
				t.Fatalf("%+v, %+v, %+v: %v s with %d columns, %v s with %d", cpu, link, read, max(a, b), s.first, max(x, y), first)
			}
		}
	}
	if divided < 200 {
		t.Errorf("%d of 1000 were divided", divided)
	}
	// An expert that is being copied, and one with many rows.
	cpu, link := CPUTime{Expert: 3e-3}, hostLink{bytesPerSecond: 50e9}
	for _, c := range []candidate{{rows: 1, left: mixtralExpert.Size / 2}, {rows: 17, left: mixtralExpert.Size}} {
		if s, ok := cpu.split(&mixtralExpert, link, [terms]float64{0, 1 / 45e9}, []candidate{c}, 0, true); ok {
			t.Errorf("%+v was divided: %+v", c, s)
		}
	}
	// One of which the CPU, or the link, should get nothing is divided only if it must be.
	for _, cpu := range []CPUTime{{Expert: 100}, {Expert: 1e-6}} {
		list := []candidate{{rows: 1, left: mixtralExpert.Size}}
		if s, ok := cpu.split(&mixtralExpert, link, [terms]float64{1e-3, 1 / 45e9}, list, 0, false); ok {
			t.Errorf("%+v: divided: %+v", cpu, s)
		}
		want := kernels.TileColumns
		if cpu.Expert == 100 {
			want = mixtralExpert.Intermediate - kernels.TileColumns
		}
		if s, ok := cpu.split(&mixtralExpert, link, [terms]float64{1e-3, 1 / 45e9}, list, 0, true); !ok || s.first != want {
			t.Errorf("%+v: %+v, want %d columns", cpu, s, want)
		}
	}
}

// TestCPUShare: what the CPU computes is neither fetched nor in a wave, and counts as a miss.
func TestCPUShare(t *testing.T) {
	r := newRig(t, small(rowMajor), emulated.Options{Virtual: true}, 200)
	for _, c := range []struct {
		fraction         float64
		predicted, chose []int32
		onCPU, fetched   []int
		prefetched       int64
	}{
		{0, []int32{1}, []int32{1, 3}, nil, []int{1, 3}, 1},
		{1, []int32{1, 5}, []int32{0, 3, 1, 1}, []int{1, 3}, nil, 0},
		{0.5, nil, []int32{1, 3}, []int{3}, []int{1}, 0},    // one row each: the higher
		{0.5, nil, []int32{1, 3, 3}, []int{1}, []int{3}, 0}, // the fewer rows
		{0.5, []int32{1, 3}, []int32{1, 3}, []int{3}, []int{1}, 1},
		{1, nil, []int32{0, 2}, nil, nil, 0},
	} {
		r.cpu = NewCPUShare(c.fraction, serverCPU)
		s := r.open(Config{Placement: r.placed(0.5), CacheSlots: 3}) // experts 1, 3 and 5 of layer 0 are offloaded
		r.fill(s, 11)
		st := r.begin(s)
		r.ok(st.PrefetchPredicted(0, c.predicted))
		open, err := st.LayerUnrouted(t.Context(), 0)
		r.ok(err)
		use, err := open.FetchChosen(t.Context(), c.chose)
		r.ok(err)
		var onCPU, fetched []int
		for _, x := range use.OnCPU {
			onCPU = append(onCPU, x.Expert)
			if want := s.places.hostRegion(ID{0, x.Expert}).Range; x.Range != want {
				t.Errorf("%+v: expert %d at %v, want %v", c, x.Expert, x.Range, want)
			}
		}
		for _, w := range use.Waves {
			fetched = append(fetched, w.IDs...)
		}
		r.ok(use.Release())
		r.ok(r.end(st))
		stats := s.Stats()
		if fmt.Sprint(onCPU, fetched) != fmt.Sprint(c.onCPU, c.fetched) || stats.OnCPU != int64(len(c.onCPU)) || stats.Misses != int64(len(c.onCPU)+len(c.fetched)) || stats.Prefetched != c.prefetched {
			t.Errorf("%+v: on the CPU %v, fetched %v, %+v", c, onCPU, fetched, stats)
		}
	}
}

// TestCPUShareOfCached: only with a fraction does the CPU compute experts that are cached.
func TestCPUShareOfCached(t *testing.T) {
	r := newRig(t, small(rowMajor), emulated.Options{Virtual: true}, 200)
	for _, fraction := range []float64{AutoCPUShare, 0.9, 1} {
		r.cpu = NewCPUShare(fraction, serverCPU)
		s := r.open(Config{Placement: r.placed(0.5)})
		r.fill(s, 11)
		st := r.begin(s)
		use, err := st.Layer(t.Context(), 0) // fetches 1, 3 and 5
		r.ok(err)
		r.ok(use.Release())
		r.ok(r.end(st))
		st = r.begin(s)
		open, err := st.LayerUnrouted(t.Context(), 0)
		r.ok(err)
		use, err = open.FetchChosen(t.Context(), []int32{1, 3})
		r.ok(err)
		want := 0
		if fraction > 0 {
			want = 2
		}
		if len(use.OnCPU) != want {
			t.Errorf("fraction %v: the CPU computes %v, which are cached", fraction, use.OnCPU)
		}
		r.ok(use.Release())
		r.ok(r.end(st))
	}
}

// TestCPUShareOfBusyLink: while the link is busy with a wrong prediction, the CPU computes what the
// link would otherwise bring sooner.
func TestCPUShareOfBusyLink(t *testing.T) {
	for _, predicted := range [][]int32{nil, {1}} {
		r := newRig(t, small(rowMajor), emulated.Options{Virtual: true, HostLink: emulated.Link{BytesPerSecond: 1e6}}, 200)
		size := r.model.layout.Size
		// An expert takes the CPU 1.4 times as long as the link.
		r.cpu = NewCPUShare(AutoCPUShare, CPURate{BytesPerSecond: float64(r.model.layout.Bytes()) / (1.4 * float64(size) / 1e6), FlopsPerSecond: 1e15})
		s := r.open(Config{Placement: r.placed(0.5), CacheSlots: 3})
		r.fill(s, 11)
		stuck := r.m.Inject(&emulated.Fault{Kind: emulated.StallCopy, Match: func(p emulated.Point) bool { return p.To == device.HBM(0) && strings.HasPrefix(p.Stream, "copy ") }})
		st := r.begin(s)
		r.cpu.fraction = 0 // prefetch it whatever it costs
		r.ok(st.PrefetchPredicted(0, predicted))
		r.cpu.fraction = AutoCPUShare
		r.ok(r.compute.Synchronize(t.Context()))
		open, err := st.LayerUnrouted(t.Context(), 0)
		r.ok(err)
		use, err := open.FetchChosen(t.Context(), []int32{3})
		r.ok(err)
		if got := len(use.OnCPU) == 1; got != (predicted != nil) {
			t.Errorf("predicted were %v: on the CPU %v", predicted, use.OnCPU)
		}
		want := size // expert 3
		if predicted != nil {
			want = 2 * 200 // in vain: two chunks of expert 1, which are in flight
		}
		if r.cpu.copying != want {
			t.Errorf("predicted were %v: %d bytes are copied for the layer, want %d", predicted, r.cpu.copying, want)
		}
		stuck.Release()
		r.ok(use.Release())
		r.ok(r.end(st))
	}
}
