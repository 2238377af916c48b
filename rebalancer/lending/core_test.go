package lending_test

import (
	"math"
	"slices"
	"testing"
	"time"

	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/rebalancer/lending"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	extentBlocks = 10
	interval     = 100 * time.Millisecond
)

// history is a core that decides on a view that changes, with the hits and the losses per second
// of each block that Reuse counts.
type history struct {
	core       *lending.Core
	v          lending.View
	now        time.Duration
	cold, lost float64
	sums       [2]float64
}

func newHistory() *history {
	return &history{core: lending.NewCore(lending.CoreOptions{ExtentBlocks: extentBlocks}), v: lending.View{
		Present: 1000, Free: 1000, BlockSeconds: 0.01, Fetch: 0.01, Exposed: 1,
		Reuse: kvcache.Reuse{MaxLost: 800},
	}}
}

// run lets time pass, without anything that is decided being carried out, and returns the last
// decision.
func (h *history) run(d time.Duration) (last lending.Decision) {
	for end := h.now + d; h.now < end; {
		h.now += interval
		r := &h.v.Reuse
		h.sums[0] += h.cold * 0.25 * float64(r.Cached) * interval.Seconds()
		h.sums[1] += h.lost * float64(r.Lost) * interval.Seconds()
		r.ColdHits, r.LostHits = int64(h.sums[0]), int64(h.sums[1])
		r.Hits = 4 * r.ColdHits
		last = h.core.Decide(h.v, h.now)
	}
	return last
}

// TestLends: what is lent, and what is not.
func TestLends(t *testing.T) {
	worth := func(n int, each float64) []float64 { return slices.Repeat([]float64{each}, n) }
	for _, c := range []struct {
		name   string
		change func(h *history)
		want   int
	}{
		{"empty blocks are worth nothing", func(h *history) { h.v.Reuse.Empty = 1000 }, 8},
		{"experts that are not used, neither", func(h *history) { h.v.Reuse.Empty, h.v.Next = 1000, nil }, 0},
		{"no more than experts would use", func(h *history) { h.v.Reuse.Empty, h.v.Next = 1000, worth(3, 0.1) }, 3},
		{"a copy that does not pay", func(h *history) { h.v.Reuse.Empty, h.v.Next = 1000, worth(9, 0.0009) }, 0},
		{"copies that compute hides", func(h *history) { h.v.Reuse.Empty, h.v.Exposed = 1000, 0 }, 0},
		{"cached blocks that nobody finds", func(h *history) { h.v.Reuse.Cached = 1000 }, 8},
		{"cached blocks that are worth less", func(h *history) { h.v.Reuse.Cached, h.cold = 1000, 0.2 }, 8}, // 10 x 0.2/s x 10 ms = 0.02
		{"cached blocks that are worth half as much", func(h *history) { h.v.Reuse.Cached, h.cold = 1000, 0.6 }, 0},
		{"cached blocks that nobody would have to compute", func(h *history) { h.v.Reuse.Cached, h.cold, h.v.BlockSeconds = 1000, 0.6, 0 }, 8},
		{"as many as are empty, beside what grows", func(h *history) {
			h.v.Free, h.v.Reuse.Empty, h.v.Reuse.Cached, h.cold = 800, 80, 720, 0.6 // 200 used blocks may grow by 50
		}, 3},
		{"not what running sequences need to grow", func(h *history) { h.v.Free, h.v.Reuse.Empty = 190, 190 }, 0},
		{"empty blocks to which lost ones come back", func(h *history) { h.v.Reuse.Empty, h.v.Reuse.Lost, h.lost = 950, 930, 0.6 }, 2},
		{"while a request waits", func(h *history) { h.v.Reuse.Empty, h.v.Lacking = 1000, 1 }, 0},
		{"what is lent ahead counts", func(h *history) {
			h.v.Reuse.Empty, h.v.Lent = 1000, slices.Repeat([]lending.Extent{{Free: true, Since: time.Hour}}, 5)
		}, 3},
		{"busy extents that leave too little", func(h *history) {
			h.v.Reuse.Empty, h.v.Free, h.v.Present, h.v.Least.Busy = 18, 18, 18, 9
		}, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := newHistory()
			h.v.Next = worth(64, 0.1)
			c.change(h)
			if d := h.run(time.Minute); d.Lend != c.want || len(d.Return) > 0 {
				t.Errorf("%+v, want %d lent", d, c.want)
			}
		})
	}
}

// TestReturns: what comes back, and what does not.
func TestReturns(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(h *history)
		want   []int
	}{
		{"nothing was lost", func(*history) {}, nil},
		{"what was lost is worth more", func(h *history) { h.v.Reuse.Lost, h.lost = 25, 3 }, []int{1, 0}}, // 10 x 3/s x 10 ms = 0.3
		{"than some experts", func(h *history) { h.v.Reuse.Lost, h.lost = 800, 1 }, []int{1}},
		{"what was lost is worth less than twice as much", func(h *history) { h.v.Reuse.Lost, h.lost = 800, 0.15 }, nil},
		{"there is room for it", func(h *history) { h.v.Reuse.Lost, h.v.Reuse.Empty, h.lost = 800, 900, 3 }, nil},
		{"copies that compute hides on a link that idles", func(h *history) {
			h.v.Reuse.Lost, h.lost, h.v.Exposed, h.v.Load = 800, 0.15, 0, 0.01
		}, []int{1, 0, 2, 3}},
		{"copies that compute would not hide any more", func(h *history) {
			h.v.Reuse.Lost, h.lost, h.v.Exposed, h.v.Load = 800, 0.15, 0, 1
		}, nil},
		{"lent too lately", func(h *history) {
			h.v.Reuse.Lost, h.lost = 800, 3
			for i := range h.v.Lent {
				h.v.Lent[i].Since = time.Minute - time.Second
			}
		}, nil},
		{"but for a request that waits", func(h *history) {
			h.v.Lacking, h.v.Free, h.v.Running = 25, 5, 0
			for i := range h.v.Lent {
				h.v.Lent[i].Since = time.Minute - time.Second
			}
		}, []int{1, 0}},
		{"a request that would add little", func(h *history) { h.v.Lacking, h.v.Free, h.v.Running = 100, 5, 30 }, nil},
		{"unused", func(h *history) { h.v.Lent[2] = lending.Extent{Free: true} }, []int{2}},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := newHistory()
			h.v.Reuse.Cached, h.v.Free = 500, 500
			h.v.Lent = []lending.Extent{{Worth: 0.08}, {Worth: 0.01}, {Worth: 0.09}, {Worth: 0.1}}
			c.change(h)
			if d := h.run(time.Minute); !slices.Equal(d.Return, c.want) || d.Lend > 0 {
				t.Errorf("%+v, want %v back", d, c.want)
			}
		})
	}
}

// TestNoThrashing: after extents came back none is lent for a while, which grows where requests
// lacked what had just been lent.
func TestNoThrashing(t *testing.T) {
	h := newHistory()
	h.v.Reuse.Empty, h.v.Next = 900, []float64{1, 1, 1, 1}
	until := func(lends bool) (took time.Duration) {
		t.Helper()
		for from := h.now; ; {
			if d := h.run(interval); (d.Lend > 0) == lends {
				return h.now - from
			}
			if h.now-from > 2*time.Minute {
				t.Fatal("it does not come to that")
			}
		}
	}
	until(true)
	var waits []time.Duration
	for range 6 {
		h.v.Lent = []lending.Extent{{Worth: 0.001, Since: h.now}}
		h.v.Lacking, h.v.Free = 20, 5
		if d := h.run(interval); len(d.Return) != 1 {
			t.Fatalf("%+v: a request waits", d)
		}
		h.v.Lent, h.v.Lacking, h.v.Free = nil, 0, 1000
		waits = append(waits, until(true).Round(time.Second))
	}
	if want := []time.Duration{10 * time.Second, 20 * time.Second, 40 * time.Second, time.Minute, time.Minute, time.Minute}; !slices.Equal(waits, want) {
		t.Errorf("nothing is lent for %v, want %v", waits, want)
	}
}

// TestTarget: a target decides, whatever extents are worth, however lately they came, and whether
// requests wait; blocks that running sequences have or will need stay theirs.
func TestTarget(t *testing.T) {
	lent := func(free bool, worths ...float64) (all []lending.Extent) {
		for _, w := range worths {
			all = append(all, lending.Extent{Worth: w, Since: time.Minute, Free: free}) // just now
		}
		return all
	}
	for _, c := range []struct {
		name   string
		target int
		change func(h *history)
		lend   int
		back   []int
	}{
		{"reached", 4, func(*history) {}, 0, nil},
		{"above", 6, func(*history) {}, 2, nil},
		{"far above", 99, func(*history) {}, 8, nil},
		{"extents that are worth nothing to experts", 6, func(h *history) { h.v.Exposed, h.v.Next = 0, nil }, 2, nil},
		{"cached blocks that are found", 6, func(h *history) { h.v.Reuse.Cached, h.cold = 1000, 50 }, 2, nil},
		{"beside those that no expert has come to yet", 99, func(h *history) { h.v.Lent = append(h.v.Lent, lent(true, 0, 0, 0)...) }, 5, nil},
		{"as many as there are free blocks for", 9, func(h *history) { h.v.Free = 230 }, 3, nil}, // 770 used blocks may grow by 192
		{"not from sequences", 9, func(h *history) { h.v.Free, h.v.Least.Busy = 210, 9 }, 0, nil},
		{"while a request waits for others", 6, func(h *history) { h.v.Lacking, h.v.Free, h.v.Running = 900, 500, 3 }, 2, nil},
		{"below", 3, func(*history) {}, 0, []int{1}},
		{"those that are worth least first", 1, func(*history) {}, 0, []int{1, 0, 2}},
		{"one that no expert has come to before others", 3, func(h *history) { h.v.Lent = append(h.v.Lent, lent(true, 0)...) }, 0, []int{4, 1}},
		{"far below", 0, func(h *history) { h.v.Lent = append(h.v.Lent, lent(false, 1, 2, 3, 4, 5, 6)...) }, 0, []int{1, 0, 2, 3, 4, 5, 6, 7}},
		{"what was lost is worth more", 4, func(h *history) { h.v.Reuse.Lost, h.lost = 800, 3 }, 0, nil},
		{"an extent that no expert comes to", 5, func(h *history) { h.v.Lent = append(h.v.Lent, lending.Extent{Free: true}) }, 0, nil},
		{"a request that waits for others", 4, func(h *history) { h.v.Lacking, h.v.Free, h.v.Running = 25, 5, 1 }, 0, nil},
		{"a request that nobody would leave blocks", 4, func(h *history) { h.v.Lacking, h.v.Free = 25, 5 }, 0, []int{1, 0}},
		{"one that needs more than is lent", 4, func(h *history) { h.v.Lacking, h.v.Free = 900, 5 }, 0, []int{1, 0, 2, 3}},
		{"one that will run", 6, func(h *history) { h.v.Lacking = 25 }, 0, nil},
		{"one that will run, with fewer", 1, func(h *history) { h.v.Lacking = 25 }, 0, []int{1, 0, 2}},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := newHistory()
			h.v.Lent, h.v.Target = lent(false, 0.08, 0.01, 0.09, 0.1), &c.target
			c.change(h)
			if d := h.run(time.Minute); d.Lend != c.lend || !slices.Equal(d.Return, c.back) {
				t.Errorf("%+v, want %d lent and %v back", d, c.lend, c.back)
			}
		})
	}
}

// TestTargetAndBack: after a target the worth decides as if there had been none, without a delay.
func TestTargetAndBack(t *testing.T) {
	h, target := newHistory(), 3
	h.v.Reuse.Empty, h.v.Next = 900, []float64{1, 1, 1, 1}
	h.v.Lent = []lending.Extent{{Worth: 1}, {Worth: 1}}
	h.v.Target = &target
	if d := h.run(time.Minute); d.Lend != 1 {
		t.Errorf("%+v, want 1 lent", d)
	}
	target = 0
	if d := h.run(interval); len(d.Return) != 2 {
		t.Errorf("%+v, want 2 back", d)
	}
	h.v.Target, h.v.Lent = nil, nil
	if d := h.run(interval); d.Lend != 4 {
		t.Errorf("%+v, want 4 lent", d)
	}
}

// TestTargetIsReached: from any state the number of lent extents comes to the target and stays there,
// once sequences leave room for it.
func TestTargetIsReached(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const extents, rest = 12, 40
		core := lending.NewCore(lending.CoreOptions{ExtentBlocks: extentBlocks, Ahead: rapid.IntRange(1, 9).Draw(t, "ahead")})
		lent, target, now := rapid.IntRange(0, extents).Draw(t, "lent"), rapid.IntRange(0, extents).Draw(t, "target"), time.Duration(0)
		begun := lent
		decide := func(used, lacking, running int) {
			now += time.Duration(rapid.IntRange(0, 300).Draw(t, "ms")) * time.Millisecond
			v := lending.View{Target: &target, Lacking: lacking, Running: running, Lent: make([]lending.Extent, lent)}
			v.Present = rest + (extents-lent)*extentBlocks
			v.Free = max(v.Present-used, 0)
			for i := range v.Lent {
				v.Lent[i] = lending.Extent{Since: now, Free: rapid.Bool().Draw(t, "free") && used > 0}
			}
			d := core.Decide(v, now)
			stuck := lacking > v.Free && running == 0
			if after := lent + d.Lend - len(d.Return); d.Lend > 0 && after > target || len(d.Return) > 0 && after < target && !stuck {
				t.Fatalf("%d extents are lent, then %d, with a target of %d", lent, after, target)
			}
			lent += d.Lend - len(d.Return)
			if d.Lend*extentBlocks > v.Free {
				t.Fatalf("%d extents are lent of %d free blocks", d.Lend, v.Free)
			}
		}
		for range rapid.IntRange(0, 20).Draw(t, "busy") {
			decide(rapid.IntRange(1, 150).Draw(t, "used"), rapid.IntRange(0, 1).Draw(t, "lacks")*60, rapid.IntRange(0, 2).Draw(t, "running"))
		}
		for range extents {
			decide(0, 0, 0)
		}
		if lent != target {
			t.Fatalf("%d extents are lent, of %d before; want %d", lent, begun, target)
		}
	})
}

// TestDecisions: whatever the state, decisions can be carried out: extents are returned once, and
// no more is lent than is free, or useful; never both at once.
func TestDecisions(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		core := lending.NewCore(lending.CoreOptions{ExtentBlocks: extentBlocks})
		now, worth := time.Duration(0), rapid.SampledFrom([]float64{0, 0.001, 0.01, 0.1, 1, math.MaxFloat64})
		share := rapid.SampledFrom([]float64{0, 0.1, 1})
		var v lending.View
		for range rapid.IntRange(1, 30).Draw(t, "decisions") {
			now += time.Duration(rapid.IntRange(0, 3000).Draw(t, "ms")) * time.Millisecond
			blocks := rapid.IntRange(0, 200)
			v.Present = rapid.IntRange(0, 500).Draw(t, "present")
			v.Free = rapid.IntRange(0, v.Present).Draw(t, "free")
			v.Reuse.Empty = rapid.IntRange(0, v.Free).Draw(t, "empty")
			v.Reuse.Cached, v.Reuse.Lost, v.Reuse.MaxLost = v.Free-v.Reuse.Empty, blocks.Draw(t, "lost"), 200
			hits := int64(blocks.Draw(t, "hits"))
			v.Reuse.Hits, v.Reuse.ColdHits = v.Reuse.Hits+hits, v.Reuse.ColdHits+hits/3
			v.Reuse.LostHits += int64(blocks.Draw(t, "lost hits"))
			v.Lacking, v.Running = blocks.Draw(t, "lacking")*blocks.Draw(t, "waits")%7, blocks.Draw(t, "running")
			v.BlockSeconds, v.Fetch, v.Exposed, v.Load = worth.Draw(t, "block"), worth.Draw(t, "fetch"), share.Draw(t, "exposed"), share.Draw(t, "load")
			v.Next = rapid.SliceOfN(worth, 0, 9).Draw(t, "next")
			v.Lent, v.Target = nil, nil
			if rapid.Bool().Draw(t, "targeted") {
				n := rapid.IntRange(0, 9).Draw(t, "target")
				v.Target = &n
			}
			for range rapid.IntRange(0, 5).Draw(t, "lent") {
				v.Lent = append(v.Lent, lending.Extent{Worth: worth.Draw(t, "worth"), Since: now - now/2, Free: rapid.Bool().Draw(t, "free")})
			}
			d := core.Decide(v, now)
			useful := len(v.Next)
			if v.Target != nil {
				useful = max(0, *v.Target-len(v.Lent))
			}
			if d.Lend < 0 || d.Lend*extentBlocks > v.Free || d.Lend > useful || d.Lend > 0 && (len(d.Return) > 0 || v.Lacking > 0 && (v.Target == nil || v.Running == 0)) {
				t.Fatalf("%+v of %+v", d, v)
			}
			sorted := slices.Clone(d.Return)
			slices.Sort(sorted)
			if len(slices.Compact(sorted)) != len(d.Return) || len(sorted) > 0 && (sorted[0] < 0 || sorted[len(sorted)-1] >= len(v.Lent)) {
				t.Fatalf("%v of %d", d.Return, len(v.Lent))
			}
		}
	})
}
