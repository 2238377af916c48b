package experts

import (
	"context"
	"testing"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/harvest"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/transfer"
)

// BenchmarkReadInPlace is what a step in place costs the host, of a model of 48 layers of 128 experts
// half of which have peer copies: while nothing moves, and where the tables are written anew.
func BenchmarkReadInPlace(b *testing.B) {
	const layers, experts = 48, 128
	check := func(err error) {
		b.Helper()
		if err != nil {
			b.Fatal(err)
		}
	}
	m, err := emulated.New(emulated.Options{})
	check(err)
	engine, err := transfer.New(transfer.Options{Machine: m})
	check(err)
	compute, err := m.NewStream(device.HBM(0), device.StreamOptions{Name: "compute"})
	check(err)
	layout := kernels.ExpertLayout{ExpertShape: kernels.ExpertShape{Hidden: 16, Intermediate: 16, DType: kernels.BF16}, Tag: rowMajor, Size: 1536}
	h, err := harvest.New(harvest.Options{Machine: m, Peers: []device.Space{device.HBM(1)}, SlabBytes: 4 * layout.Size, HeadroomBytes: -1})
	check(err)
	placement, err := Place(layers, experts, 0.5)
	check(err)
	c := Config{Experts: experts, Layout: layout, Placement: placement, InPlace: true}
	for l := range layers {
		c.Layers = append(c.Layers, l)
	}
	plan, err := NewPlan(c)
	check(err)
	s, err := New(Options{Machine: m, Space: device.HBM(0), Backend: packer{}, Transfer: engine, Harvest: h, Plan: plan})
	check(err)
	row := make([]byte, 16*2)
	for l := range layers {
		for e := range experts {
			for _, part := range []kernels.Part{kernels.W1, kernels.W3, kernels.W2} {
				for r := range 16 {
					check(s.Expert(l, e, part, r, row))
				}
			}
		}
	}
	check(s.Seal(b.Context()))
	for l := range layers {
		for _, e := range placement[l] {
			check(s.Promote(ID{l, e}, PromoteOptions{}))
		}
	}
	check(s.WaitMoves(b.Context()))
	for _, moves := range []bool{false, true} {
		b.Run(map[bool]string{false: "moves=none", true: "moves=some"}[moves], func(b *testing.B) {
			for b.Loop() {
				s.inPlace.valid = s.inPlace.valid && !moves
				st, err := s.BeginStep(b.Context(), compute)
				check(err)
				_, err = st.ReadInPlace()
				check(err)
				b.StopTimer()
				check(compute.Synchronize(b.Context()))
				b.StartTimer()
				check(st.End())
			}
		})
	}
	check(compute.Close())
	check(h.Close(context.Background()))
	check(s.Close())
	check(engine.Close())
	check(m.Close())
}
