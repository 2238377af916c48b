package engine_test

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/engine/scheduler"
	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/pipeline"
)

// stepFunc runs a step; the tokens it draws are the sequences' places in the step.
type stepFunc func(context.Context, *pipeline.Step) error

func (f stepFunc) Discard(context.Context) error { return nil }

func (f stepFunc) Step(ctx context.Context, step *pipeline.Step) (pipeline.Result, error) {
	if err := f(ctx, step); err != nil {
		return pipeline.Result{}, err
	}
	var r pipeline.Result
	for i := range step.Sequences {
		if step.Sequences[i].LogitRows > 0 {
			r.Sampled = append(r.Sampled, int32(i))
		}
	}
	return r, nil
}

// cache accounts for so many blocks of 16 tokens.
func cache(tb testing.TB, blocks int) *kvcache.Manager {
	tb.Helper()
	kv, err := kvcache.NewManager(kvcache.ManagerOptions{Blocks: blocks, BlockTokens: 16})
	if err != nil {
		tb.Fatal(err)
	}
	return kv
}

// smallBlocks is a cache of blocks of 4 tokens.
func smallBlocks(tb testing.TB, blocks int) *kvcache.Manager {
	tb.Helper()
	kv, err := kvcache.NewManager(kvcache.ManagerOptions{Blocks: blocks, BlockTokens: 4})
	if err != nil {
		tb.Fatal(err)
	}
	return kv
}

// newEngine is an engine that is closed at the test's end.
func newEngine(tb testing.TB, o engine.Options) *engine.Engine {
	tb.Helper()
	e, err := engine.New(o)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := e.Close(); err != nil {
			tb.Error(err)
		}
	})
	return e
}

// with is an engine that steps by s, for up to so many sequences of so many tokens.
func with(tb testing.TB, s engine.Stepper, sequences, length int) *engine.Engine {
	tb.Helper()
	return newEngine(tb, engine.Options{Pipeline: s, KV: cache(tb, sequences*length/16), MaxModelLen: length, MaxNumSeqs: sequences, MaxNumBatchedTokens: 8192, Vocab: 1 << 15})
}

func TestOptions(t *testing.T) {
	good := engine.Options{Pipeline: stepFunc(nil), KV: cache(t, 1), MaxModelLen: 16, Vocab: 100}
	newEngine(t, good)
	for want, change := range map[string]func(*engine.Options){
		"Options.Pipeline is nil":   func(o *engine.Options) { o.Pipeline = nil },
		"Options.KV is nil":         func(o *engine.Options) { o.KV = nil },
		"MaxModelLen is 0":          func(o *engine.Options) { o.MaxModelLen = 0 },
		"MaxNumSeqs is -1":          func(o *engine.Options) { o.MaxNumSeqs = -1 },
		"MaxNumBatchedTokens is -1": func(o *engine.Options) { o.MaxNumBatchedTokens = -1 },
		"MaxAdjust is -1":           func(o *engine.Options) { o.MaxAdjust = -1 },
		"MaxQueued is -1":           func(o *engine.Options) { o.MaxQueued = -1 },
		"LongAfter is -1":           func(o *engine.Options) { o.LongAfter = -1 },
		"Granularity is -1": func(o *engine.Options) {
			o.Scheduling = scheduler.Policy{Order: scheduler.Fair, Granularity: -1}
		},
		"Vocab is 0":         func(o *engine.Options) { o.Vocab = 0 },
		"RetryTimeout is -1": func(o *engine.Options) { o.RetryTimeout = -1 },
	} {
		o := good
		change(&o)
		if _, err := engine.New(o); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want an error with %q", err, want)
		}
	}
}

// TestPriority: a request has a priority only where the policy knows one.
func TestPriority(t *testing.T) {
	for _, c := range []struct {
		order    scheduler.Order
		priority int
		want     string
	}{
		{scheduler.FCFS, 0, ""},
		{scheduler.FCFS, 1, "priority is 1: it must be 0: requests come first in the order in which they arrive (--scheduling-policy fcfs)"},
		{scheduler.ByPriority, -1000, ""},
		{scheduler.Fair, 19, ""},
		{scheduler.Fair, 20, "priority is 20: it must be from -20 to 19 (--scheduling-policy fair)"},
	} {
		e := newEngine(t, engine.Options{
			Pipeline: stepFunc(nil), KV: cache(t, 1), MaxModelLen: 16, Vocab: 100, Scheduling: scheduler.Policy{Order: c.order},
		})
		_, err := e.Submit(t.Context(), engine.Request{Prompt: []int32{1}, Params: params(1), Priority: c.priority})
		if c.want == "" && err != nil || c.want != "" && (!errors.Is(err, engine.ErrBadRequest) || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%v: got %v, want %q", c.order, err, c.want)
		}
	}
}

// TestToldWhileTheNextStepRuns: a reader has a step's token before the next step ends,
// and the last one though no step follows.
func TestToldWhileTheNextStepRuns(t *testing.T) {
	delivered := make(chan struct{}, 1)
	first := true
	e := with(t, stepFunc(func(ctx context.Context, _ *pipeline.Step) error {
		if first {
			first = false
			return nil
		}
		select {
		case <-delivered:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}), 1, 512)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	ran := make(chan error, 1)
	go func() { ran <- e.Run(ctx) }()
	j, err := e.Submit(ctx, engine.Request{Prompt: prompt(1, 4, 100), Params: params(5)})
	if err != nil {
		t.Fatal(err)
	}
	for n := range 5 {
		u, err := j.Next(ctx)
		if err != nil || len(u.Tokens) != 1 || (u.Finish != "") != (n == 4) {
			t.Fatalf("update %d: %+v, %v", n, u, err)
		}
		if n < 4 {
			delivered <- struct{}{}
		}
	}
	if err := errors.Join(e.Close(), <-ran); err != nil {
		t.Error(err)
	}
}

// TestNoGarbagePerToken: what a step allocates does not grow with its sequences, but for
// those whose tokens outgrow their memory.
func TestNoGarbagePerToken(t *testing.T) {
	const sequences, steps = 300, 64
	var jobs []*engine.Job
	e := with(t, stepFunc(func(context.Context, *pipeline.Step) error { return nil }), sequences, 512)
	for i := range sequences {
		j, err := e.Submit(t.Context(), engine.Request{Prompt: prompt(i, 65, 100), Params: params(400)})
		if err != nil {
			t.Fatal(err)
		}
		jobs = append(jobs, j)
	}
	read := 0
	turn := func() {
		if worked, err := engine.Turn(e, t.Context()); err != nil || !worked {
			t.Fatal(worked, err)
		}
		for _, j := range jobs {
			read += engine.Read(j)
		}
	}
	for read < 3*sequences {
		turn()
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	from := read
	for range steps {
		turn()
	}
	runtime.ReadMemStats(&after)
	// A step's own few, and one for a sequence whose tokens need more room.
	if n, most := after.Mallocs-before.Mallocs, uint64(20*steps+2*sequences); n > most || read-from != steps*sequences {
		t.Errorf("%d allocations for %d tokens, want at most %d", n, read-from, most)
	}
}

// TestGenerateDeliversAtOnce: before a step runs, all updates of the steps before were
// delivered; a call that fails has delivered the end of its requests, and the engine
// refers to none of their sequences.
func TestGenerateDeliversAtOnce(t *testing.T) {
	broken := errors.New("broken")
	for _, fails := range []bool{false, true} {
		steps, delivered := 0, 0
		var ended []engine.FinishReason
		e := newEngine(t, engine.Options{
			Pipeline: stepFunc(func(context.Context, *pipeline.Step) error {
				if delivered != 3*steps {
					t.Errorf("%d updates were delivered before step %d", delivered, steps)
				}
				if steps++; fails && steps == 3 {
					return broken
				}
				return nil
			}),
			KV: cache(t, 64), MaxModelLen: 64, Vocab: 100,
			Listener: engine.Listener{RequestFinished: func(i engine.RequestInfo) { ended = append(ended, i.Finish...) }},
		})
		rs := make([]engine.Request, 3)
		want := engine.FinishLength
		for i := range rs {
			rs[i] = engine.Request{Prompt: prompt(i, 4, 100), Params: params(5)}
		}
		_, err := e.Generate(t.Context(), rs, func(int, engine.Update) { delivered++ })
		if fails {
			want = engine.FinishAbort
		}
		if fails != errors.Is(err, broken) || len(ended) != 3 || slices.ContainsFunc(ended, func(r engine.FinishReason) bool { return r != want }) {
			t.Errorf("fails: %v: %v, ended with %v", fails, err, ended)
		}
		if n := engine.Held(e); n != 0 {
			t.Errorf("fails: %v: %d sequences are held", fails, n)
		}
	}
}

// TestAdjustmentsThatDoNotFitWait: of sequences whose adjustments do not go into one step together
// some wait for a later one, and lose nothing.
func TestAdjustmentsThatDoNotFitWait(t *testing.T) {
	steps := 0
	e := newEngine(t, engine.Options{
		Pipeline: stepFunc(func(_ context.Context, s *pipeline.Step) error {
			steps++
			n := 0
			for i := range s.Sequences {
				n += len(s.Sequences[i].SamplingParams.Adjust)
			}
			if n > 5 {
				t.Errorf("a step has %d adjustments, %d may be", n, 5)
			}
			return nil
		}),
		KV: cache(t, 64), MaxModelLen: 64, Vocab: 100, MaxAdjust: 5,
	})
	rs := make([]engine.Request, 3)
	for i := range rs {
		p := params(4)
		p.LogitBias = map[int32]float32{1: 1, 2: 1}
		rs[i] = engine.Request{Prompt: prompt(i, 4, 100), Params: p}
	}
	outs, err := e.Generate(t.Context(), rs, nil)
	if err != nil {
		t.Fatal(err)
	}
	for i := range outs {
		if len(outs[i].TokenIDs) != 4 {
			t.Errorf("output %d: %v", i, outs[i].TokenIDs)
		}
	}
	if n := engine.Held(e); n != 0 || steps <= 4 {
		t.Errorf("%d sequences are held after %d steps", n, steps)
	}
}

// listened is a context that counts who listens for its end.
type listened struct {
	context.Context
	done chan struct{}
	n    atomic.Int32
}

func (c *listened) Done() <-chan struct{} { return c.done }

func (c *listened) AfterFunc(func()) (stop func() bool) {
	c.n.Add(1)
	return func() bool { c.n.Add(-1); return true }
}

// TestEndedRequestsListenNoMore: a context that lives long keeps nothing of requests that
// ended.
func TestEndedRequestsListenNoMore(t *testing.T) {
	e := with(t, stepFunc(func(context.Context, *pipeline.Step) error { return nil }), 4, 64)
	ctx := &listened{Context: t.Context(), done: make(chan struct{})}
	for i := range 3 {
		p := params(2 + i)
		p.N = 1 + i
		if _, err := e.Submit(ctx, engine.Request{Prompt: prompt(i, 4, 100), Params: p}); err != nil {
			t.Fatal(err)
		}
	}
	if n := ctx.n.Load(); n != 3 {
		t.Fatalf("%d requests listen", n)
	}
	for worked := true; worked; {
		var err error
		if worked, err = engine.Turn(e, t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if n := ctx.n.Load(); n != 0 {
		t.Errorf("%d requests listen after their end", n)
	}
}
