//go:build simulate

package node_test

import (
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/moeserve/moeserve/configs"
)

func init() {
	shiftSplits = []int{64, 80, 96, 112, 128, 144, 160, 172}
	shiftLeast = []int{64, 96}
}

// TestLendingOnSteadyLoads: a load that does not shift takes about as long with memory that is lent
// by worth as with the best fixed split that leaves experts no less.
func TestLendingOnSteadyLoads(t *testing.T) {
	for name, long := range map[string][]bool{"short requests": {false, false, false}, "long prefixes": {true, true}} {
		splits := map[int]time.Duration{}
		for _, n := range []int{64, 96, 128, 172} {
			x := openShift(t, n, configs.StaticShare)
			x.run(long)
			text, all := x.row(fmt.Sprintf("%s, %d experts resident", name, n))
			t.Log(text)
			splits[n] = all
		}
		for _, n := range shiftLeast {
			x := openShift(t, n, configs.AutoShare)
			x.run(long)
			text, all := x.row(fmt.Sprintf("%s, by worth, %d experts resident at least", name, n))
			t.Log(text, x.lent)
			best := time.Duration(math.MaxInt64)
			for resident, took := range splits {
				if resident >= n {
					best = min(best, took)
				}
			}
			if all > best*105/100 {
				t.Errorf("it takes %v, and %v with the best fixed split", all, best)
			}
		}
	}
}

// TestLendingWithTier: with a tier in host memory, from which prefixes are loaded over the link that
// experts come over, experts get more, and a load that shifts takes less time than with any split.
func TestLendingWithTier(t *testing.T) {
	tier := func(s *configs.Settings) { s.KV.OffloadingSize = 40 }
	best := time.Duration(math.MaxInt64)
	for _, n := range []int{96, 160, 172} {
		x := openShift(t, n, configs.StaticShare, tier)
		x.run(shifting)
		text, all := x.row(fmt.Sprintf("%d experts resident", n))
		t.Log(text)
		best = min(best, all)
	}
	x := openShift(t, 96, configs.AutoShare, tier)
	x.run(shifting)
	text, all := x.row("by worth, 96 experts resident at least")
	t.Log(text, x.lent)
	if all > best {
		t.Errorf("it takes %v, and %v with the best fixed split", all, best)
	}
}
