package engine_test

import (
	"context"
	"runtime"
	"testing"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/pipeline"
)

// stepFunc runs a step; the tokens it draws are the sequences' places in the step.
type stepFunc func(context.Context, *pipeline.Step) error

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

// with is an engine that steps by s, for up to so many sequences of so many tokens.
func with(tb testing.TB, s engine.Stepper, sequences, length int) *engine.Engine {
	tb.Helper()
	m, err := emulated.Open(emulated.Options{})
	if err != nil {
		tb.Fatal(err)
	}
	kv, err := kvcache.New(kvcache.Options{Machine: m, Space: device.HBM(0), Blocks: sequences * length / 16, Shape: kvcache.Shape{
		Layers: 1, KVHeads: 1, HeadDim: 8, DType: kernels.F32, BlockTokens: 16,
	}})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := kv.Close(); err != nil {
			tb.Error(err)
		}
		if err := m.Close(); err != nil {
			tb.Error(err)
		}
	})
	return engine.New(engine.Options{Pipeline: s, KV: kv, MaxModelLen: length, MaxNumSeqs: sequences, MaxNumBatchedTokens: 8192, Vocab: 1 << 15})
}

// TestToldWhileTheNextStepRuns: a reader has a step's token before the next step ends,
// and the last one though no step follows.
func TestToldWhileTheNextStepRuns(t *testing.T) {
	told := make(chan struct{}, 1)
	first := true
	e := with(t, stepFunc(func(ctx context.Context, _ *pipeline.Step) error {
		if first {
			first = false
			return nil
		}
		select {
		case <-told:
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
			told <- struct{}{}
		}
	}
	e.Stop()
	if err := <-ran; err != nil {
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
