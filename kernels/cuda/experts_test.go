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
