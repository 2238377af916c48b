package lending_test

import (
	"testing"
	"time"

	"github.com/moeserve/moeserve/rebalancer/lending"
)

// TestReplaced: an extent whose expert has just left for another, whose copy starts with the next tick,
// is not returned; one that no expert has come to for long is.
func TestReplaced(t *testing.T) {
	c := lending.NewCore(lending.CoreOptions{ExtentBlocks: 10})
	v := lending.View{Present: 1000, Free: 1000, BlockSeconds: 0.01, Fetch: 0.01, Exposed: 1, Next: []float64{3, 3, 3}, Lent: []lending.Extent{{Worth: 2}}}
	now := time.Duration(0)
	for ; now < time.Minute; now += 100 * time.Millisecond {
		if d := c.Decide(v, now); len(d.Return) > 0 {
			t.Fatalf("an extent in use is returned at %v", now)
		}
	}
	v.Lent[0] = lending.Extent{Free: true, FreeSince: now}
	if d := c.Decide(v, now); len(d.Return) > 0 {
		t.Errorf("an extent that is free for a moment is returned: %+v", d)
	}
	if d := c.Decide(v, now+time.Minute); len(d.Return) != 1 {
		t.Errorf("an extent that is free for a minute is not returned: %+v", d)
	}
}
