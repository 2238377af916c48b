//go:build cuda

package cuda

import (
	"bytes"
	"math/rand/v2"
	"testing"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
)

// testExpertTiles holds wide tiles of experts, of every number of tokens that GEMMs
// are made for and of experts in several parts, to the bits of narrow ones, which the
// conformance suite checks; and the way down that starts early to the one that does not.
func testExpertTiles(t *testing.T, m device.Machine, b *Backend, s device.Stream) {
	const hidden, intermediate = 192, 64
	multiprocessors := b.multiprocessors
	defer func() { b.multiprocessors = multiprocessors }()
	x := &bench{TB: t, m: m, b: b, s: s, random: rand.New(rand.NewPCG(1, 2)), exponent: 9}
	defer x.free()
	layout, slots, all := x.experts(&benchModel{hidden: hidden, intermediate: intermediate, experts: 1})
	if layout.Tag != Tiles {
		t.Fatalf("experts lie in layout %q", layout.Tag)
	}
	rows := []int{161, 200, 302, 321, 481}
	for n := 33; n <= 160; n += 5 {
		rows = append(rows, n)
	}
	const most = 500
	in, blank := x.act(most, hidden), x.act(most, hidden+intermediate)
	for i, n := range rows {
		order := make([]int32, n)
		for p, to := range x.random.Perm(n) {
			order[p] = int32(to)
		}
		up := kernels.ExpertUp{ExpertGEMM: kernels.ExpertGEMM{
			X: in.Slice(0, n), Offsets: x.ints(0, int32(n)), Order: x.ints(order...), Slots: slots, Experts: all, Layout: layout, Out: x.act(n, intermediate),
		}}
		down := kernels.ExpertDown{ExpertGEMM: up.ExpertGEMM}
		down.X, down.Out = up.Out, x.act(n, hidden)
		run := func(multiprocessors int, want kernelID, between ...kernels.Op) (got []byte) {
			b.multiprocessors = multiprocessors
			for _, units := range []int{2 * intermediate / unitRows, hidden / unitRows} {
				if shape := b.chooseExpertShape(units, n, 1, n); shape != want {
					t.Fatalf("%d rows on %d multiprocessors: shape %d, want %d", n, multiprocessors, shape, want)
				}
			}
			for _, out := range []*kernels.Tensor{&up.Out, &down.Out} {
				r := device.Range{Addr: out.Addr, Bytes: out.Bytes()}
				if err := s.Copy(r, device.Range{Addr: blank.Addr, Bytes: r.Bytes}); err != nil {
					t.Fatal(err)
				}
			}
			for _, op := range append(append([]kernels.Op{&up}, between...), &down) {
				if err := b.Enqueue(s, op); err != nil {
					t.Fatal(err)
				}
			}
			for _, out := range []*kernels.Tensor{&up.Out, &down.Out} {
				got = append(got, x.download(out)...)
			}
			return got
		}
		narrow := run(1000, expertNarrow, &kernels.Clamp{X: x.act(1, 8), Limit: 1}) // which comes between: the way down waits
		if wide := run(1+i%2, expertWide); !bytes.Equal(narrow, wide) {
			t.Errorf("%d rows: wide tiles give other bits than narrow ones", n)
		}
	}
}

// testExpertRuns holds kernels that read the runs that a router has listed to the bits of those that look for
// experts with pairs, of every number of rows, and the way down that starts early to the one that does not.
func testExpertRuns(t *testing.T, m device.Machine, b *Backend, s device.Stream) {
	multiprocessors := b.multiprocessors
	defer func() { b.multiprocessors = multiprocessors }()
	used := map[string]int{}
	for i, c := range []struct{ hidden, intermediate, experts, k int }{{192, 128, 8, 2}, {64, 320, 60, 4}, {128, 64, 128, 8}} {
		x := &bench{TB: t, m: m, b: b, s: s, random: rand.New(rand.NewPCG(1, uint64(i))), exponent: 9}
		layout, slots, all := x.experts(&benchModel{hidden: c.hidden, intermediate: c.intermediate, experts: c.experts})
		for _, rows := range []int{1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 20, 31, 32, 33, 48, kernels.MaxRunRows} {
			pairs := rows * c.k
			route := kernels.Route{
				Logits: x.weights(kernels.F32, rows, c.experts), Method: kernels.SoftmaxRenorm,
				IDs: x.ints(make([]int32, pairs)...).View(rows, c.k), Weights: x.weights(kernels.F32, rows, c.k),
				Offsets: x.ints(make([]int32, c.experts+1)...), Order: x.ints(make([]int32, pairs)...),
				Runs: x.ints(make([]int32, kernels.RunColumns*kernels.MostRuns(c.experts, pairs))...).View(kernels.MostRuns(c.experts, pairs), kernels.RunColumns),
			}
			up := kernels.ExpertUp{ExpertGEMM: kernels.ExpertGEMM{
				X: x.act(rows, c.hidden), Offsets: route.Offsets, Order: route.Order, Slots: slots, Experts: all, Layout: layout, Out: x.act(pairs, c.intermediate),
			}}
			down := kernels.ExpertDown{ExpertGEMM: up.ExpertGEMM}
			down.X, down.Out = up.Out, x.act(pairs, c.hidden)
			between := &kernels.Clamp{X: x.act(1, 8), Limit: 1}
			blank := x.act(pairs, c.hidden+c.intermediate)
			run := func(ops ...kernels.Op) (got []byte) {
				for _, out := range []*kernels.Tensor{&up.Out, &down.Out} {
					r := device.Range{Addr: out.Addr, Bytes: out.Bytes()}
					if err := s.Copy(r, device.Range{Addr: blank.Addr, Bytes: r.Bytes}); err != nil {
						t.Fatal(err)
					}
				}
				for _, op := range ops {
					if err := b.Enqueue(s, op); err != nil {
						t.Fatal(err)
					}
				}
				for _, out := range []*kernels.Tensor{&up.Out, &down.Out} {
					got = append(got, x.download(out)...)
				}
				return got
			}
			for _, n := range []int{2, pairs, 2 * pairs, 1000} {
				b.multiprocessors = n
				for way, units := range map[string]int{"up": 2 * c.intermediate / unitRows, "down": c.hidden / unitRows} {
					used[way+" "+expertNames[b.chooseExpertShape(units, ceil(pairs, c.experts), min(c.experts, pairs), pairs)]]++
				}
				up.Runs, down.Runs = kernels.Tensor{}, kernels.Tensor{}
				want := run(&route, &up, between, &down)
				up.Runs, down.Runs = route.Runs, route.Runs
				if !bytes.Equal(run(&route, &up, &down), want) || !bytes.Equal(run(&route, &up, between, &down), want) {
					t.Errorf("%d rows, %+v, %d multiprocessors: other bits with runs", rows, c, n)
				}
			}
		}
		x.free()
	}
	for _, name := range []string{"up 256", "up 64", "up alone", "down 256", "down 64", "down alone"} {
		if used[name] == 0 {
			t.Errorf("the way %s is not tested: %v", name, used)
		}
	}
}
