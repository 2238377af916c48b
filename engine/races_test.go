package engine_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"

	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/engine/scheduler"
	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/kvcache/offload"
)

// race is an engine with tiers whose transfers end when the test says so.
type race struct {
	*testing.T
	*engine.Engine
	kv    *kvcache.Manager
	step  *drawing
	tiers *memoryTiers
	// wrong is what the steps have found.
	wrong []string
}

// newRace makes the engine over so many blocks of 4 tokens, without a local cache, with steps of
// so many tokens, unless change says otherwise.
func newRace(t *testing.T, blocks, tokens int, holds bool, change ...func(*engine.Options)) *race {
	r := &race{T: t, kv: smallBlocks(t, blocks)}
	r.step = newDrawing(t, r.kv)
	r.step.errorf = func(format string, args ...any) { r.wrong = append(r.wrong, fmt.Sprintf(format, args...)) }
	r.tiers = newMemoryTiers(r.step, 1)
	r.tiers.holds = holds
	o := engine.Options{Pipeline: r.step, KV: r.kv, Offload: r.tiers, MaxModelLen: 4 * blocks, MaxNumBatchedTokens: tokens, LongAfter: longAfter, Vocab: 256}
	for _, f := range change {
		f(&o)
	}
	r.Engine = newEngine(t, o)
	return r
}

func (r *race) submit(ctx context.Context, q engine.Request) *engine.Job {
	r.Helper()
	j, err := r.Submit(ctx, q)
	if err != nil {
		r.Fatal(err)
	}
	return j
}

// turns runs so many steps; they compute something or not.
func (r *race) turns(n int, works bool) {
	r.Helper()
	for range n {
		worked, err := engine.Turn(r.Engine, r.Context())
		if err != nil {
			r.Fatal(err)
		}
		if worked != works {
			r.Fatalf("worked: %v, want %v", worked, works)
		}
	}
}

// finish runs steps, with transfers that end at once, until a job has ended, and returns its
// tokens.
func (r *race) finish(j *engine.Job) []int32 {
	r.Helper()
	for range 200 {
		if !j.Times().Finished.IsZero() {
			return ids(wait(r.T, j)[0])
		}
		if _, err := engine.Turn(r.Engine, r.Context()); err != nil {
			r.Fatal(err)
		}
		r.tiers.endAll()
	}
	r.Fatal("the job does not end")
	return nil
}

// abort cancels a request, and runs steps until it has ended, at once.
func (r *race) abort(cancel func(), j *engine.Job) {
	r.Helper()
	cancel()
	engine.NoteCanceled(r.Engine) // which another goroutine does, perhaps only when the request has finished
	for j.Times().Finished.IsZero() {
		if _, err := engine.Turn(r.Engine, r.Context()); err != nil {
			r.Fatal(err)
		}
		runtime.Gosched()
	}
	if u := wait(r.T, j); u[len(u)-1].Finish != engine.FinishAbort {
		r.Errorf("the aborted request: %+v", u)
	}
}

// plainTokens are a request's tokens without any cache.
func plainTokens(t *testing.T, q engine.Request) []int32 {
	t.Helper()
	kv := smallBlocks(t, 64)
	e := newEngine(t, engine.Options{Pipeline: newDrawing(t, kv), KV: kv, MaxModelLen: 200, LongAfter: longAfter, Vocab: 256})
	outs, err := e.Generate(t.Context(), []engine.Request{q}, nil)
	if err != nil {
		t.Fatal(err)
	}
	return outs[0].TokenIDs
}

func ask(i, prompted, completion int) engine.Request {
	return engine.Request{ID: fmt.Sprint(i), Prompt: prompt(i, prompted, 250), Params: params(completion)}
}

// abortDuringLoad aborts a request whose blocks are being loaded. The next request needs them.
func abortDuringLoad(t *testing.T, holds bool) (r *race, got, want []int32) {
	r = newRace(t, 6, 8, holds)
	first := ask(1, 16, 1)
	r.finish(r.submit(t.Context(), first))
	ctx, cancel := context.WithCancel(t.Context())
	aborted := r.submit(ctx, first)
	r.turns(1, false)
	if len(r.tiers.loads) != 1 {
		t.Fatalf("%d loads", len(r.tiers.loads))
	}
	r.abort(cancel, aborted)
	next := ask(2, 16, 4)
	j := r.submit(t.Context(), next)
	r.turns(1, !holds)
	if holds && r.kv.Held() != 3 {
		t.Errorf("%d blocks are held", r.kv.Held())
	}
	return r, r.finish(j), plainTokens(t, next)
}

// abortDuringStore aborts a request whose blocks are being stored. The next one needs them,
// and the one after loads what was stored.
func abortDuringStore(t *testing.T, holds bool) (r *race, got, want []int32) {
	r = newRace(t, 6, 8, holds)
	first := ask(1, 16, 4)
	ctx, cancel := context.WithCancel(t.Context())
	aborted := r.submit(ctx, first)
	r.turns(3, true) // what a step has filled is stored while the next one runs
	if len(r.tiers.stores) != 2 {
		t.Fatalf("%d stores", len(r.tiers.stores))
	}
	r.abort(cancel, aborted)
	j := r.submit(t.Context(), ask(2, 16, 4))
	r.turns(1, !holds)
	r.finish(j)
	j = r.submit(t.Context(), first)
	got = r.finish(j)
	if u := j.Usage(); u.CachedTokens != 12 || u.LoadedTokens != 12 {
		t.Errorf("%+v", u)
	}
	return r, got, plainTokens(t, first)
}

// resumeDuringStore preempts a request while its blocks are being stored, and resumes it.
func resumeDuringStore(t *testing.T, holds bool) (r *race, got, want []int32) {
	r = newRace(t, 5, 20, holds)
	// Both have full blocks and need another when none is free.
	old, young := ask(1, 7, 13), ask(2, 11, 9)
	first, second := r.submit(t.Context(), old), r.submit(t.Context(), young)
	r.turns(2, true)
	r.turns(1, !holds)
	if !slices.Contains(r.tiers.causes, offload.Preempted) || len(r.tiers.stores) == 0 {
		t.Fatalf("%d stores, of %v", len(r.tiers.stores), r.tiers.causes)
	}
	if holds {
		// The older request waits for the blocks, and is not preempted for lack of them.
		r.turns(3, false)
	} else {
		r.turns(3, true)
	}
	if n := r.State().Preemptions; n != 1 {
		t.Errorf("%d preemptions", n)
	}
	got = append(r.finish(first), r.finish(second)...)
	return r, got, append(plainTokens(t, old), plainTokens(t, young)...)
}

// lackDuringLoad has a request lack a block while a later one, which would be preempted for it, loads. It
// waits for the load, of which only the end lets the other run, and be preempted. If the engine is told of the
// end too early, the load writes into blocks that the first has got.
func lackDuringLoad(t *testing.T, holds bool) (r *race, got, want []int32) {
	r = newRace(t, 5, 20, holds)
	r.tiers.early = !holds
	old, young := ask(1, 7, 13), ask(2, 11, 9)
	r.finish(r.submit(t.Context(), young))
	first := r.submit(t.Context(), old)
	r.turns(1, true)
	second := r.submit(t.Context(), young)
	for worked := true; worked && r.State().Preemptions == 0; {
		var err error
		if worked, err = engine.Turn(r.Engine, t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if s := r.State(); len(r.tiers.loads) != 1 || holds != (s.Preemptions == 0) || !first.Times().Finished.IsZero() {
		t.Fatalf("%d loads, %+v", len(r.tiers.loads), s)
	}
	if holds {
		r.turns(3, false)
	} else {
		r.turns(8, true) // until the first has all blocks
	}
	got = r.finish(first)
	if n := r.State().Preemptions; n != 1 {
		t.Errorf("%d preemptions", n)
	}
	return r, append(got, r.finish(second)...), append(plainTokens(t, old), plainTokens(t, young)...)
}

// pauseDuringLoad pauses, which preempts whatever runs, while a request loads: the pause is reached when
// the load has ended. If the engine is told of the end too early, it is reached while the load still
// writes, into blocks that the next request gets.
func pauseDuringLoad(t *testing.T, holds bool) (r *race, got, want []int32) {
	r = newRace(t, 5, 20, holds, func(o *engine.Options) { o.Offload = &endingTiers{o.Offload.(*memoryTiers)} })
	r.tiers.early = !holds
	q, next := ask(1, 11, 4), ask(2, 7, 4)
	r.finish(r.submit(t.Context(), q))
	paused := r.submit(t.Context(), q)
	r.turns(1, false)
	if len(r.tiers.loads) != 1 {
		t.Fatalf("%d loads", len(r.tiers.loads))
	}
	if err := r.Pause(t.Context(), engine.PauseKeep); err != nil {
		t.Fatal(err)
	}
	if s := r.State(); holds != (len(r.tiers.loads) == 0) || s.Waiting != 1 || s.KVUsedBlocks != 0 {
		t.Errorf("paused with %d loads, %+v", len(r.tiers.loads), s)
	}
	r.Resume()
	other := r.submit(t.Context(), next)
	r.turns(1, true)
	got = r.finish(other)
	return r, append(got, r.finish(paused)...), append(plainTokens(t, next), plainTokens(t, q)...)
}

// takeTurns has two requests preempt each other at token granularity, while what they have computed is
// being stored: the one preempted is resumed when its own store has ended.
func takeTurns(t *testing.T, holds bool) (r *race, got, want []int32) {
	r = newRace(t, 6, 20, holds, func(o *engine.Options) { o.Scheduling = scheduler.Policy{Order: scheduler.Fair, Granularity: 3} })
	a, b := ask(1, 7, 13), ask(2, 7, 13)
	first, second := r.submit(t.Context(), a), r.submit(t.Context(), b)
	for range 40 {
		if _, err := engine.Turn(r.Engine, t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	// Stores have not ended, so whoever was preempted is not resumed.
	if s := r.State(); s.Preemptions != 1 || s.Waiting != 1 || !slices.Contains(r.tiers.causes, offload.Preempted) || len(r.tiers.loads) > 0 {
		t.Fatalf("%+v, %d loads, stores of %v", s, len(r.tiers.loads), r.tiers.causes)
	}
	got = append(r.finish(first), r.finish(second)...)
	return r, got, append(plainTokens(t, a), plainTokens(t, b)...)
}

// everyoneWaits has stores that read all blocks but one, whose content is cached: there is plenty to
// evict, and little is free. Everyone waits until one of the stores has ended.
func everyoneWaits(t *testing.T, holds bool) (r *race, got, want []int32) {
	r = newRace(t, 6, 8, holds, func(o *engine.Options) { o.PrefixCaching = true })
	first := ask(1, 20, 4)
	j := r.submit(t.Context(), first)
	for j.Times().Finished.IsZero() {
		if _, err := engine.Turn(r.Engine, t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if free := r.kv.Free(); len(r.tiers.stores) != 3 || holds && free != 1 {
		t.Fatalf("%d stores, %d blocks free", len(r.tiers.stores), free)
	}
	var others []*engine.Job
	for i := range 3 {
		q := ask(2+i, 7, 2)
		others = append(others, r.submit(t.Context(), q))
		want = append(want, plainTokens(t, q)...)
	}
	r.turns(1, !holds)
	if holds {
		r.turns(2, false)
	}
	r.tiers.endStore(0)
	r.turns(1, true) // what is free now is used at once
	for _, j := range others {
		got = append(got, r.finish(j)...)
	}
	if n := r.State().Preemptions; n > 0 {
		t.Errorf("%d preemptions", n)
	}
	r.ResetPrefixCache(false)
	return r, append(got, r.finish(r.submit(t.Context(), first))...), append(want, plainTokens(t, first)...)
}

// TestRaces: transfers that end after their sequence was aborted or preempted (races 3 and 6), or while
// all others wait for their blocks (race 5), read and write no block of another; a sequence whose load is
// under way is not preempted. Where transfers do not hold their blocks, and loads are said to have ended
// too early, they do: each history finds it.
func TestRaces(t *testing.T) {
	for name, history := range map[string]func(t *testing.T, holds bool) (r *race, got, want []int32){
		"abort during load":                 abortDuringLoad,
		"abort during store":                abortDuringStore,
		"preempt and resume during a store": resumeDuringStore,
		"lack a block during a load":        lackDuringLoad,
		"pause during a load":               pauseDuringLoad,
		"take turns during stores":          takeTurns,
		"everyone waits for stores":         everyoneWaits,
	} {
		for _, holds := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, holds: %v", name, holds), func(t *testing.T) {
				r, got, want := history(t, holds)
				if right := slices.Equal(got, want) && len(r.wrong) == 0; right != holds {
					t.Errorf("tokens %v, want %v, and %q", got, want, r.wrong)
				}
				if r.tiers.endAll(); holds && r.kv.Free() != r.kv.Blocks() {
					t.Errorf("%d of %d blocks are free", r.kv.Free(), r.kv.Blocks())
				}
			})
		}
	}
}

// TestOneLoadForAll: of requests that begin alike, one loads their common blocks, and the
// others share them; others pass them meanwhile.
func TestOneLoadForAll(t *testing.T) {
	kv := smallBlocks(t, 40)
	step := newDrawing(t, kv)
	tiers := newMemoryTiers(step, 1)
	e := newEngine(t, engine.Options{Pipeline: step, KV: kv, Offload: tiers, PrefixCaching: true, MaxModelLen: 64, Vocab: 256})
	r := &race{T: t, Engine: e, kv: kv, step: step, tiers: tiers}
	q := ask(1, 17, 2)
	r.finish(r.submit(t.Context(), q))
	e.ResetPrefixCache(false)
	var jobs []*engine.Job
	for range 3 {
		jobs = append(jobs, r.submit(t.Context(), q))
	}
	r.turns(1, false)
	other := r.submit(t.Context(), ask(2, 5, 1))
	r.turns(1, true)
	r.turns(1, false)
	if len(tiers.loads) != 1 || other.Usage().CompletionTokens != 1 {
		t.Errorf("%d loads; the other request: %+v", len(tiers.loads), other.Usage())
	}
	want := plainTokens(t, q)
	for i, j := range jobs {
		if got := r.finish(j); !slices.Equal(got, want) {
			t.Errorf("request %d: %v, want %v", i, got, want)
		}
		if u := j.Usage(); u.CachedTokens != 16 || u.LoadedTokens != []int{16, 0, 0}[i] {
			t.Errorf("request %d: %+v", i, u)
		}
	}
	if s := e.State(); s.ExternalQueries != 17+17+1+1+5 || s.ExternalHits != 16 || s.PrefixCacheHits != 2*16 {
		t.Errorf("%+v", s)
	}
	if tiers.computed != 17+5 {
		t.Errorf("%d computed tokens were reported", tiers.computed)
	}
	e.ResetPrefixCache(true)
	j := r.submit(t.Context(), q)
	if r.finish(j); j.Usage().CachedTokens != 0 {
		t.Errorf("after the reset: %+v", j.Usage())
	}
}

// TestAbortedLoadForAll: where the request that loads for others is aborted, they do not wait for it.
func TestAbortedLoadForAll(t *testing.T) {
	r := newRace(t, 40, 20, true, func(o *engine.Options) { o.PrefixCaching = true })
	q := ask(1, 17, 2)
	want := r.finish(r.submit(t.Context(), q))
	r.ResetPrefixCache(false)
	ctx, cancel := context.WithCancel(t.Context())
	loads := r.submit(ctx, q)
	r.turns(1, false)
	waits := r.submit(t.Context(), q)
	r.turns(1, false)
	if len(r.tiers.loads) != 1 {
		t.Fatalf("%d loads", len(r.tiers.loads))
	}
	r.abort(cancel, loads)
	if got := r.finish(waits); !slices.Equal(got, want) || waits.Usage().CachedTokens != 16 {
		t.Errorf("%v, want %v; %+v", got, want, waits.Usage())
	}
}

// TestTiersChangeNoToken plays the same requests in the caller's goroutine over pools and tiers
// of several sizes. Without holds the same histories have wrong tokens.
func TestTiersChangeNoToken(t *testing.T) {
	var rs []engine.Request
	var want [][]int32
	for i := range 40 {
		q := ask(i%7, 3+i*11%60, 1+i*7%40)
		q.ID, q.Params.Seed = fmt.Sprint(i), uint64(i)
		rs, want = append(rs, q), append(want, plainTokens(t, q))
	}
	found := false
	for seed := range uint64(24) {
		holds := seed%3 != 0
		kv := smallBlocks(t, []int{26, 40, 80}[seed/3%3])
		step := newDrawing(t, kv)
		wrong := 0
		step.errorf = func(format string, args ...any) {
			if wrong++; holds {
				t.Errorf(format, args...)
			}
		}
		tiers := newMemoryTiers(step, 1+int(seed%4))
		tiers.random, tiers.holds, tiers.most = rand.New(rand.NewPCG(seed, 1)), holds, []int{0, 30}[seed%2]
		e := newEngine(t, engine.Options{
			Pipeline: step, KV: kv, Offload: tiers, PrefixCaching: seed%2 == 0, MaxModelLen: 104, MaxNumSeqs: 12, MaxNumBatchedTokens: 40, LongAfter: longAfter, Vocab: 256,
		})
		outs, err := e.Generate(t.Context(), rs, nil)
		if err != nil {
			t.Fatal(err)
		}
		for i := range rs {
			if slices.Equal(outs[i].TokenIDs, want[i]) {
				continue
			}
			if wrong++; holds {
				t.Errorf("seed %d, request %d: %v, want %v", seed, i, outs[i].TokenIDs, want[i])
			}
		}
		found = found || wrong > 0
		if s := e.State(); tiers.loaded == 0 || s.Preemptions == 0 && seed/3%3 == 0 {
			t.Errorf("seed %d: %d blocks were loaded, %+v", seed, tiers.loaded, s)
		}
		if tiers.endAll(); kv.Free() != kv.Blocks() {
			t.Errorf("seed %d: %d of %d blocks are free", seed, kv.Free(), kv.Blocks())
		}
	}
	if !found {
		t.Error("nothing goes wrong without holds: the histories test too little")
	}
}
