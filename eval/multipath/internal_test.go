package multipath

import (
	"context"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
)

// Rates count only while all flows are busy.
func TestRates(t *testing.T) {
	ms := func(all ...int) (times []time.Duration) {
		for _, n := range all {
			times = append(times, time.Duration(n)*time.Millisecond)
		}
		return times
	}
	for name, c := range map[string]struct {
		flows []progress
		want  []float64
	}{
		"alone":    {[]progress{{ms(0, 1, 2), 1e6}}, []float64{1e9}},
		"faster":   {[]progress{{ms(0, 2, 4), 2e6}, {ms(0, 1, 2, 3, 4, 5, 6), 2e6}}, []float64{1e9, 2e9}},
		"slowed":   {[]progress{{ms(0, 2, 3), 1e6}, {ms(0, 2), 1e6}}, []float64{0.5e9, 0.5e9}},
		"in turns": {[]progress{{ms(0, 1), 1e6}, {ms(2, 4), 1e6}}, []float64{1e9, 0.5e9}},
	} {
		got := rates(c.flows)
		for i := range c.want {
			if math.Abs(got[i]/c.want[i]-1) > 1e-6 {
				t.Errorf("%s: %v, want %v", name, got, c.want)
				break
			}
		}
	}
}

// A copy with a wrong byte, or one that was not made, is an error that says where.
func TestCheck(t *testing.T) {
	m, err := emulated.New(emulated.Options{Virtual: true, GPUs: make([]emulated.GPU, 2)})
	if err != nil {
		t.Fatal(err)
	}
	r := newRig(Options{Machine: m, GPU: device.HBM(0), Relays: []device.Space{device.HBM(1)}, Bytes: 3<<20 + 16, LinkBytes: 1 << 20, Chunks: []int64{1 << 20}, ChunkBytes: 1 << 20, Depths: []int{2}, Parts: []Part{StaticPart}}.EnsureDefaults())
	if err := r.open(t.Context()); err != nil {
		t.Fatal(err)
	}
	n := r.o.Bytes
	for _, d := range directions {
		s := r.o.statically(r.o.Relays)
		if err := r.checkSplit(t.Context(), d, s); err != nil {
			t.Error(err)
		}
		spoiled := int64(2<<20 + 8)
		for name, c := range map[string]struct {
			run   func(context.Context) error
			where string
		}{
			"not made": {func(context.Context) error { return nil }, "from byte 0 on"},
			"in part":  {func(ctx context.Context) error { _, err := r.split(ctx, d, spoiled, s); return err }, "from byte 2097160 on"},
			"one word twice": {func(ctx context.Context) error {
				if _, err := r.split(ctx, d, n, s); err != nil {
					return err
				}
				dst, src := r.ends(d, n)
				return r.direct(ctx, dst.Slice(spoiled, 8).Range, src.Slice(0, 8).Range)
			}, "from byte 2097160 on"},
		} {
			err := r.check(t.Context(), d, n, func() error { return c.run(t.Context()) })
			if err == nil || !strings.Contains(err.Error(), c.where) {
				t.Errorf("%s, %s: %v", d, name, err)
			}
		}
	}
	if err := r.close(); err != nil {
		t.Error(err)
	}
	if err := m.Close(); err != nil {
		t.Error(err)
	}
}

// Nested roots are found, by measurements that vary by some per cent.
func TestFindRoots(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 6).Draw(t, "links")
		alone := slices.Repeat([]float64{53e9}, n)
		noise := func(v float64) float64 { return v * rapid.Float64Range(0.97, 1.02).Draw(t, "noise") }
		// Roots of neighbors, each clearly slower than what is behind it, and one of all of them.
		var want []root
		behind, largest := 0.0, 0.0
		for from := 0; from < n; {
			to := rapid.IntRange(from+1, n).Draw(t, "to")
			links, all, most := []int{}, 0.0, 0.0
			for i := from; i < to; i++ {
				links, all, most = append(links, i), all+alone[i], max(most, alone[i])
			}
			if all*0.8 > most && len(links) < n && rapid.Bool().Draw(t, "root") {
				all = max(most, all*rapid.Float64Range(0.4, 0.8).Draw(t, "part"))
				want = append(want, root{links, all})
			}
			behind, largest, from = behind+all, max(largest, all), to
		}
		if behind*0.8 > largest && rapid.Bool().Draw(t, "all") {
			links := make([]int, n)
			for i := range links {
				links[i] = i
			}
			want = append(want, root{links, max(largest, behind*rapid.Float64Range(0.4, 0.8).Draw(t, "part"))})
		}
		measured := make([]float64, n)
		for i := range measured {
			measured[i] = noise(alone[i])
		}
		got, err := findRoots(measured, func(set []int) (float64, error) { return noise(expected(alone, want, set)), nil })
		if err != nil {
			t.Fatal(err)
		}
		// What is found explains the rate of all together, and every root is one of links that
		// really share one.
		all := make([]int, n)
		for i := range all {
			all[i] = i
		}
		if e, w := expected(measured, got, all), expected(alone, want, all); n > 1 && (e > 1.2*w || e < 0.85*w) {
			t.Fatalf("found %v, want %v: all %v, want %v", got, want, e, w)
		}
		for _, g := range got {
			if !slices.ContainsFunc(want, func(w root) bool { return containsAll(w.links, g.links) }) {
				t.Fatalf("found %v, want %v", got, want)
			}
		}
		if len(want) == 0 && len(got) > 0 {
			t.Fatalf("found %v where all add up", got)
		}
	})
}

func containsAll(all, some []int) bool {
	return !slices.ContainsFunc(some, func(x int) bool { return !slices.Contains(all, x) })
}

// Sixteen links have too many sets: what all reach together is kept.
func TestFindRootsOfMany(t *testing.T) {
	alone := make([]float64, 16)
	all := make([]int, 16)
	for i := range alone {
		alone[i], all[i] = 50e9, i
	}
	behind := []root{{all, 500e9}}
	got, err := findRoots(alone, func(set []int) (float64, error) { return expected(alone, behind, set), nil })
	if err != nil || len(got) != 1 || !slices.Equal(got[0].links, all) || got[0].rate != 500e9 {
		t.Errorf("%v, %v", got, err)
	}
}

// Relays are chosen one by one, the one that gains most first, until none adds to the rate.
func TestPayingRelays(t *testing.T) {
	rate := map[device.Space]float64{device.HBM(1): 20, device.HBM(2): 50, device.HBM(3): 50, device.HBM(4): 1}
	shared := []device.Space{device.HBM(2), device.HBM(3)} // together no faster than one of them
	got, err := payingRelays([]device.Space{device.HBM(1), device.HBM(2), device.HBM(3), device.HBM(4)}, func(sets [][]device.Space) ([]float64, error) {
		var rates []float64
		for _, set := range sets {
			total, root := 50.0, 0.0
			for _, s := range set {
				if slices.Contains(shared, s) {
					root = max(root, rate[s])
				} else {
					total += rate[s]
				}
			}
			rates = append(rates, total+root)
		}
		return rates, nil
	})
	if want := []device.Space{device.HBM(2), device.HBM(1)}; err != nil || !slices.Equal(got, want) {
		t.Errorf("%v, %v, want %v", got, err, want)
	}
}

func TestBest(t *testing.T) {
	point := func(d Direction, depth int, chunk int64, rate float64) ChunkPoint {
		return ChunkPoint{Direction: d, Depth: depth, ChunkBytes: chunk, BytesPerSecond: rate}
	}
	points := []ChunkPoint{
		point(ToGPU, 1, 4, 90), point(ToGPU, 1, 8, 92), point(ToGPU, 2, 4, 99.5), point(ToGPU, 2, 8, 100), point(ToGPU, 4, 4, 99.8), point(ToGPU, 4, 2, 99.2),
		point(FromGPU, 1, 4, 80), point(FromGPU, 1, 8, 100), point(FromGPU, 2, 4, 95), point(FromGPU, 2, 8, 100), point(FromGPU, 4, 4, 70), point(FromGPU, 4, 2, 60),
	}
	if got := bestChunk(points, ToGPU); got != points[5] { // as many bytes in flight as points[2], in smaller chunks
		t.Errorf("to the GPU: %+v", got)
	}
	if got := bestChunk(points, FromGPU); got != points[7] {
		t.Errorf("from the GPU: %+v", got)
	}
	if depth, in, out := bestDepth(points); depth != 2 || in != 4 || out != 8 {
		t.Errorf("depth %d, chunks of %d and %d", depth, in, out)
	}
	for name, c := range map[string]struct {
		engine []float64 // native: 1
		want   int64
	}{"from the middle": {[]float64{0.5, 2, 0.9, 0.8}, 3}, "never": {[]float64{0.5, 0.5, 0.5, 1}, 0}, "always": {[]float64{0.9, 0.8, 0.7, 0.6}, 1}} {
		var sizes []SizePoint
		for i, s := range c.engine {
			sizes = append(sizes, SizePoint{Bytes: int64(i + 1), Native: 1, Engine: s})
		}
		if got := breakEven(sizes); got != c.want {
			t.Errorf("%s: %d, want %d", name, got, c.want)
		}
	}
}
