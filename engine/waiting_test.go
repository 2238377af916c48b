package engine_test

import (
	"context"
	"errors"
	"slices"
	"testing"

	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/kvcache/offload"
	"github.com/moeserve/moeserve/pipeline"
)

// TestWaitingForALoad: sequences that wait for what another one loads are looked up once, not in every
// step, and run when it has arrived.
func TestWaitingForALoad(t *testing.T) {
	r := newRace(t, 40, 8, true)
	q := ask(1, 17, 3)
	want := r.finish(r.submit(t.Context(), q))
	r.tiers.lookups = 0
	var jobs []*engine.Job
	for i := range 5 {
		jobs = append(jobs, r.submit(t.Context(), q))
		if i == 0 {
			r.turns(1, false) // its load begins
		}
	}
	r.turns(20, false)
	if s := r.State(); s.Waiting != 5 || len(r.tiers.loads) != 1 || r.tiers.lookups != 5 {
		t.Errorf("%d sequences wait, %d loads, %d lookups of 5 sequences", s.Waiting, len(r.tiers.loads), r.tiers.lookups)
	}
	r.tiers.endAll()
	for i, j := range jobs {
		if got := r.finish(j); !slices.Equal(got, want) {
			t.Errorf("request %d: %v, want %v", i, got, want)
		}
		if u := j.Usage(); u.CachedTokens != 16 {
			t.Errorf("request %d found %d tokens", i, u.CachedTokens)
		}
	}
	if len(r.wrong) > 0 {
		t.Error(r.wrong)
	}
}

// during is a drawing that calls back when a step begins, and Meanwhile in the middle of it.
type during struct {
	*drawing
	begins, goesOn func(s *pipeline.Step)
}

func (d *during) Step(ctx context.Context, s *pipeline.Step) (pipeline.Result, error) {
	d.begins(s)
	s.Meanwhile()
	d.goesOn(s)
	return d.drawing.Step(ctx, s)
}

// TestStoresWhileTheDeviceComputes: what a step has filled is offered to the tiers in the middle of the
// next one, or at the end of its sequence if that comes before; all of it is there then.
func TestStoresWhileTheDeviceComputes(t *testing.T) {
	kv := smallBlocks(t, 40)
	step := &during{drawing: newDrawing(t, kv)}
	tiers := newMemoryTiers(step.drawing, 1)
	steps := 0
	step.begins = func(*pipeline.Step) {
		if n := len(tiers.causes); n != max(0, steps-1) {
			t.Errorf("step %d begins after %d stores", steps, n)
		}
	}
	step.goesOn = func(*pipeline.Step) {
		if n := len(tiers.causes); n != steps {
			t.Errorf("%d stores in the middle of step %d", n, steps)
		}
		steps++
	}
	e := newEngine(t, engine.Options{Pipeline: step, KV: kv, Offload: tiers, MaxModelLen: 160, MaxNumBatchedTokens: 8, LongAfter: longAfter, Vocab: 256})
	if _, err := e.Submit(t.Context(), ask(1, 33, 1)); err != nil { // five steps, of 2 blocks each but the last
		t.Fatal(err)
	}
	for range 5 {
		if _, err := engine.Turn(e, t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if want := append(slices.Repeat([]offload.Cause{offload.Filled}, 4), offload.Released); !slices.Equal(tiers.causes, want) {
		t.Errorf("stores: %v, want %v", tiers.causes, want)
	}
	tiers.endAll()
	if len(tiers.content) != 8 || kv.Free() != kv.Blocks() {
		t.Errorf("%d blocks are stored, %d of %d are free", len(tiers.content), kv.Free(), kv.Blocks())
	}
}

// TestLoadingWaits: sequences whose KV blocks are being loaded count as waiting, also for MaxQueued.
func TestLoadingWaits(t *testing.T) {
	r := newRace(t, 24, 64, true, func(o *engine.Options) { o.MaxNumSeqs, o.MaxQueued = 4, 1 })
	for i := range 4 {
		r.finish(r.submit(t.Context(), ask(i, 16, 1)))
	}
	for i := range 4 {
		r.submit(t.Context(), ask(i, 16, 1))
	}
	r.turns(1, false)
	if n := len(r.tiers.loads); n != 4 {
		t.Fatalf("%d loads", n)
	}
	if s := r.State(); s.Running+s.Waiting != 4 {
		t.Errorf("4 requests are loading: %d run, %d wait", s.Running, s.Waiting)
	}
	queued := 0
	for i := range 8 {
		_, err := r.Submit(t.Context(), ask(10+i, 16, 1))
		if errors.Is(err, engine.ErrQueueFull) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		queued++
	}
	if queued != 1 {
		t.Errorf("all 4 places are taken, and %d requests were queued, of at most 1", queued)
	}
	r.tiers.endAll()
}
