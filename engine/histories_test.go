package engine_test

import (
	"context"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/engine/scheduler"
	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/pipeline"
)

// failing steps fail when told so, after they have written.
type failing struct {
	*drawing
	fails bool
}

func (f *failing) Step(ctx context.Context, s *pipeline.Step) (pipeline.Result, error) {
	r, err := f.drawing.Step(ctx, s)
	if f.fails && err == nil {
		f.fails = false
		return pipeline.Result{}, pipeline.ErrStepFailed
	}
	return r, err
}

// TestHistories plays random histories of requests that begin alike, with several samples, salts,
// cancellations, failed steps, resets, and tiers whose transfers end or fail at any time: what each
// has drawn is what it draws alone, and in the end all blocks are free.
func TestHistories(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		size, blocks := rapid.IntRange(1, 5).Draw(rt, "block tokens"), rapid.IntRange(4, 24).Draw(rt, "blocks")
		kv, err := kvcache.NewManager(kvcache.ManagerOptions{Blocks: blocks, BlockTokens: size})
		if err != nil {
			rt.Fatal(err)
		}
		step := &failing{drawing: newDrawing(t, kv)}
		step.errorf = rt.Fatalf
		if rapid.Bool().Draw(rt, "ahead") {
			step.ahead = rand.New(rand.NewPCG(rapid.Uint64().Draw(rt, "ahead seed"), 2))
		}
		o := engine.Options{
			Pipeline: step, KV: kv, PrefixCaching: rapid.Bool().Draw(rt, "caching"), MaxModelLen: size * blocks, MaxNumSeqs: rapid.IntRange(1, 6).Draw(rt, "sequences"),
			MaxNumBatchedTokens: rapid.IntRange(1, 30).Draw(rt, "step tokens"), LongAfter: longAfter, Vocab: 256,
			Scheduling: rapid.SampledFrom([]scheduler.Policy{{}, {Order: scheduler.ByPriority}, {Order: scheduler.Fair, Granularity: 5}}).Draw(rt, "policy"),
			Pause:      func(ctx context.Context, _ time.Duration) error { return ctx.Err() },
		}
		var tiers *memoryTiers
		if rapid.IntRange(0, 3).Draw(rt, "tiers") > 0 {
			tiers = newMemoryTiers(step.drawing, rapid.IntRange(1, 3).Draw(rt, "factor"))
			tiers.random, tiers.turns = rand.New(rand.NewPCG(rapid.Uint64().Draw(rt, "seed"), 1)), rapid.SampledFrom([]int{1, 4, 20}).Draw(rt, "turns")
			tiers.most = rapid.SampledFrom([]int{0, 3}).Draw(rt, "most")
			o.Offload = tiers
		}
		e, err := engine.New(o)
		if err != nil {
			rt.Fatal(err)
		}
		type asked struct {
			engine.Request
			job    *engine.Job
			cancel func()
			got    [][]int32
		}
		var all []*asked
		turn := func() {
			worked, err := engine.Turn(e, context.Background())
			if err == nil && !worked && tiers != nil {
				err = tiers.Wait(context.Background())
			}
			if err != nil {
				rt.Fatal(err)
			}
		}
		rt.Repeat(map[string]func(*rapid.T){
			"submit": func(rt *rapid.T) {
				limit := kv.Capacity()
				n := rapid.IntRange(1, limit-1).Draw(rt, "prompt")
				q := ask(rapid.IntRange(0, 2).Draw(rt, "begins like"), n, rapid.IntRange(1, limit-n).Draw(rt, "completion"))
				q.Params.N, q.Params.Seed = rapid.SampledFrom([]int{1, 1, 2, 4}).Draw(rt, "samples"), uint64(len(all))
				for id := rapid.SampledFrom([]int32{256, 256, 10, 3}).Draw(rt, "stops"); id < 256; id += 9 {
					q.Params.StopIDs = append(q.Params.StopIDs, id)
				}
				if o.Scheduling.Order != scheduler.FCFS {
					q.Priority = rapid.IntRange(-2, 2).Draw(rt, "priority")
				}
				q.CacheSalt = rapid.SampledFrom([]string{"", "", "a"}).Draw(rt, "salt")
				ctx, cancel := context.WithCancel(context.Background())
				j, err := e.Submit(ctx, q)
				if err != nil {
					rt.Fatal(err)
				}
				all = append(all, &asked{q, j, cancel, make([][]int32, q.Params.N)})
			},
			"turn": func(*rapid.T) { turn() },
			"turns": func(*rapid.T) {
				for range 8 {
					turn()
				}
			},
			"fail": func(*rapid.T) { step.fails = true },
			"cancel": func(rt *rapid.T) {
				if len(all) > 0 && rapid.Bool().Draw(rt, "cancels") {
					rapid.SampledFrom(all).Draw(rt, "request").cancel()
					engine.NoteCanceled(e)
				}
			},
			"reset": func(rt *rapid.T) {
				if rapid.IntRange(0, 4).Draw(rt, "resets") == 0 {
					e.ResetPrefixCache(rapid.Bool().Draw(rt, "external"))
				}
			},
		})
		for range 50_000 {
			if !slices.ContainsFunc(all, func(a *asked) bool { return a.job.Times().Finished.IsZero() }) {
				break
			}
			turn()
		}
		for i, a := range all {
			if a.job.Times().Finished.IsZero() {
				rt.Fatalf("request %d does not end: %+v, %d blocks free, %d held", i, e.State(), kv.Free(), kv.Held())
			}
			us, err := a.job.Wait(context.Background())
			if err != nil {
				rt.Fatal(err)
			}
			for k, u := range us {
				got, want := ids(u), drawn(a.Request, k)
				if u.Finish == engine.FinishAbort && len(got) < len(want) {
					want = want[:len(got)]
				}
				if !slices.Equal(got, want) {
					rt.Fatalf("request %d, sample %d: %v (%s), want %v", i, k, got, u.Finish, want)
				}
			}
			a.cancel()
		}
		turn()
		if tiers != nil {
			tiers.endAll()
		}
		if len(step.enqueued) > 0 {
			rt.Fatal("a step was enqueued ahead, and neither used nor discarded")
		}
		if kv.Free() != kv.Blocks() {
			rt.Fatalf("%d of %d blocks are free, %d held", kv.Free(), kv.Blocks(), kv.Held())
		}
	})
}
