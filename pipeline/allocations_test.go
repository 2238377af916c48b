package pipeline

import (
	"fmt"
	"runtime"
	"strings"
	"testing"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/tools/racedetector"
)

const module = "github.com/moeserve/moeserve/"

// allocations runs f a number of times and returns the number of heap allocations per line of
// the module, except lines of the packages that stand in for a GPU in tests.
func allocations(times int, f func()) map[string]int64 {
	was := runtime.MemProfileRate
	runtime.MemProfileRate = 1
	defer func() { runtime.MemProfileRate = was }()
	before := allocated()
	for range times {
		f()
	}
	lines := allocated()
	for line, n := range before {
		if lines[line] -= n; lines[line] == 0 {
			delete(lines, line)
		}
	}
	return lines
}

// allocated counts heap allocations so far, by the innermost line of the module.
func allocated() map[string]int64 {
	runtime.GC() // the profile holds allocations up to the last but one collection
	runtime.GC()
	var records []runtime.MemProfileRecord
	for {
		n, ok := runtime.MemProfile(records, true)
		if ok {
			records = records[:n]
			break
		}
		records = make([]runtime.MemProfileRecord, n+50)
	}
	lines := map[string]int64{}
	for _, r := range records {
		frames := runtime.CallersFrames(r.Stack())
		for more := true; more; {
			var f runtime.Frame
			f, more = frames.Next()
			name, ours := strings.CutPrefix(f.Function, module)
			if !ours {
				continue
			}
			if !strings.HasPrefix(name, "kernels") && !strings.HasPrefix(name, "device/emulated.") && !strings.HasSuffix(f.File, "_test.go") {
				lines[fmt.Sprintf("%s:%d", name, f.Line)] += r.AllocObjects
			}
			break
		}
	}
	return lines
}

// TestNoAllocations: continued decoding allocates nothing on the heap, with graphs and
// without, with offloaded experts and without.
func TestNoAllocations(t *testing.T) {
	if racedetector.Enabled {
		t.Skip("the race detector allocates memory itself; other tests run such steps")
	}
	for _, c := range []struct {
		o        Options
		fraction float64
		ahead    bool
	}{
		{Options{Graphs: 16}, 0, false},
		{Options{Graphs: 16}, 0, true},
		{Options{MicroBatches: 2}, 0, false},
		{Options{SmallBatchTokens: -1}, 0.5, false},
		{Options{SmallBatchTokens: 64}, 0.5, false},
		{Options{ExpertAccess: configs.DirectAccess, Graphs: 16}, 0.5, false},
		{Options{ExpertAccess: configs.DirectAccess, Graphs: 16}, 0.5, true},
		{Options{ExpertAccess: configs.DirectAccess, MicroBatches: 2}, 1, false},
		{Options{SmallBatchTokens: 64, CPUExperts: host, CPUShare: cpuShare(1)}, 0.5, false},
		{Options{Grouping: configs.PerMicroBatch, MicroBatches: 2, SmallBatchTokens: -1}, 1, false},
	} {
		const from, steps = 5, 50
		r := newRig(t, "mixtral", c.fraction, emulated.Options{}, c.o)
		r.ahead = c.ahead
		step := r.decoding(5)
		for at := range from + 2*steps {
			step(at)
		}
		// A slice that grows, or on a busy machine the wait of a link's stream, allocates in one
		// measurement; what every step allocates is in all of them.
		var minimum map[string]int64
		for range 3 {
			at := from
			lines := allocations(steps, func() { step(at); at++ })
			if minimum == nil {
				minimum = lines
			}
			for line, n := range minimum {
				minimum[line] = min(n, lines[line])
			}
		}
		for line, n := range minimum {
			if n >= steps/10 {
				t.Errorf("%d graphs, %v, %d small batch tokens: %d allocations in %d steps by %s", c.o.Graphs, c.fraction, c.o.SmallBatchTokens, n, steps, line)
			}
		}
		if s := r.p.Graphs(); (s.Launched > 0) != (c.o.Graphs > 0) || (s.Ahead > 3*steps) != c.ahead {
			t.Errorf("%d graphs: %+v", c.o.Graphs, s)
		}
	}
}

// decoding returns a function that runs a decode step of n sequences at a position.
func (r *rig) decoding(n int) func(at int) {
	step := &Step{}
	for i := range n {
		q := Sequence{Tokens: []int32{int32(i)}, Table: r.kv.NewTable(), LogitRows: 1, SamplingParams: SamplingParams{Seed: uint64(i), LogProbs: i == 1 && !r.ahead}}
		reserve(r, q.Table, 128)
		r.Cleanup(func() { q.Table.Release(false) })
		step.Sequences = append(step.Sequences, q)
	}
	return func(at int) {
		step.Ahead = r.ahead
		for i := range step.Sequences {
			step.Sequences[i].Start = at
		}
		res, err := r.p.Step(r.Context(), step)
		check(r, err)
		for i := range step.Sequences {
			step.Sequences[i].Tokens[0] = res.Sampled[i]
		}
	}
}
