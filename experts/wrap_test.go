package experts

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/moeserve/moeserve/device/emulated"
)

// TestFencesWrap: steps, swaps and promotions go on as ever where the fences' values pass
// half of their range, or begin again from 0.
func TestFencesWrap(t *testing.T) {
	for _, start := range []uint32{1<<31 - 20, 1<<32 - 20, 1<<32 - 1} {
		for schedule := range emulated.Schedule(3) {
			t.Run(fmt.Sprintf("%#x/%v", start, schedule), func(t *testing.T) {
				rng := rand.New(rand.NewPCG(3, uint64(start)))
				r := newRig(t, small(rowMajor), emulated.Options{Virtual: true, Schedule: schedule, Seed: 4, FenceStart: start}, 200)
				r.lend()
				s := r.open(Config{Placement: r.placed(0.5), CacheSlots: 6, Dynamic: true, SpareSlots: 2})
				r.fill(s, 11)
				all := offloaded(s)
				r.promote(s, all[:len(all)/2]...)
				for i := range 12 {
					id := all[i%len(all)]
					r.ok(s.Swap(id, ID{id.Layer, residentOf(s, id.Layer)}))
					r.ok(s.WaitMoves(t.Context()))
					if i%3 == 0 { // otherwise the first step behind the swap fetches only routed experts
						r.steps(s, 1, i%2 == 0)
					}
					c := choices(rng, r.model)
					out, err := r.routedStep(s, c, 0)
					r.ok(err)
					r.verifyRouted(s, c, out)
					all = offloaded(s)
				}
				if v := s.tables.done.Value(); v-start < 60 {
					t.Errorf("only %d layers passed", v-start)
				}
			})
		}
	}
}

// residentOf is a resident expert of a layer.
func residentOf(s *Store, layer int) int {
	for e, p := range s.Placed()[layer] {
		if p.Tier == Resident {
			return e
		}
	}
	return -1
}
