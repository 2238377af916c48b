package engine_test

import (
	"context"
	"errors"
	"io"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/node"
)

// started is a request that has its first token.
func started(t *testing.T, n *node.Node, r engine.Request) (*engine.Job, []int32) {
	t.Helper()
	j, err := n.Engine().Submit(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	u, err := j.Next(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return j, ids(u)
}

// rest reads a job to its end.
func rest(t *testing.T, j *engine.Job) (tokens []int32, finish engine.FinishReason) {
	t.Helper()
	for {
		u, err := j.Next(t.Context())
		if errors.Is(err, io.EOF) {
			return tokens, finish
		}
		if err != nil {
			t.Fatal(err)
		}
		tokens = append(tokens, ids(u)...)
		if u.Finish != "" {
			finish = u.Finish
		}
	}
}

// until waits until something holds, for a minute at most.
func until(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !holds(); time.Sleep(100 * time.Microsecond) {
		if time.Now().After(end) {
			t.Errorf("never: %s", what)
			return
		}
	}
}

// TestPause: what each mode does to a running request, and that requests which come during the
// pause wait for its end; tokens are those of a run without a pause.
func TestPause(t *testing.T) {
	for _, tiers := range []bool{false, true} {
		// Some steps into the long request the engine waits until a pause is asked for, so that it has not ended by then.
		var n *node.Node
		var left atomic.Int64 // steps until then
		l := engine.Listener{StepFinished: func(engine.StepInfo) {
			if left.Add(-1) == 0 {
				until(t, "a pause is asked for", func() bool { return engine.Asked(n.Engine()) })
			}
		}}
		n, _ = openWith(t, l, func(s *configs.Settings) {
			s.KV.MaxModelLen = 256
			if tiers {
				s.KV.OffloadingSize = 1.0 / 64
			}
		})
		long := engine.Request{ID: "long", Prompt: prompt(1, 40, 100), Params: params(150)}
		short := engine.Request{ID: "short", Prompt: prompt(2, 20, 100), Params: params(5)}
		want := alone(t, n, []engine.Request{long, short})
		run(t, n)
		for _, mode := range []engine.PauseMode{engine.PauseKeep, engine.PauseWait, engine.PauseAbort} {
			left.Store(20)
			j, got := started(t, n, long)
			if err := n.Engine().Pause(t.Context(), mode); err != nil {
				t.Fatal(mode, err)
			}
			left.Store(0)
			s := n.Engine().State()
			if !s.Paused || s.Running != 0 || s.KVUsedBlocks != 0 {
				t.Errorf("%s, tiers %t: paused with state %+v", mode, tiers, s)
			}
			if mode == engine.PauseKeep && s.Waiting != 1 {
				t.Errorf("%d samples wait after a pause that keeps one", s.Waiting)
			}
			later, err := n.Engine().Submit(t.Context(), short)
			if err != nil {
				t.Fatal(err)
			}
			time.Sleep(5 * time.Millisecond) // in which an engine that runs would have ended it
			if after := n.Engine().State(); after.Steps != s.Steps || after.Waiting != s.Waiting+1 {
				t.Errorf("%s: %d steps ran in a pause, and %d samples wait, %d before", mode, after.Steps-s.Steps, after.Waiting, s.Waiting)
			}
			n.Engine().Resume()
			if tokens, _ := rest(t, later); !slices.Equal(tokens, want[1][0].TokenIDs) {
				t.Errorf("%s, tiers %t: a request that came in the pause has tokens %v, want %v", mode, tiers, tokens, want[1][0].TokenIDs)
			}
			if mode == engine.PauseAbort {
				if _, err := j.Wait(t.Context()); !errors.Is(err, engine.ErrPaused) {
					t.Errorf("a request that a pause has aborted: %v", err)
				}
				continue
			}
			if more, _ := rest(t, j); !slices.Equal(append(got, more...), want[0][0].TokenIDs) {
				t.Errorf("%s, tiers %t: tokens differ from those of a run without a pause", mode, tiers)
			}
		}
	}
}

// TestPauseIsPublished: when Pause returns, the state and the events are those of the pause, also where whoever gets the
// events is slow.
func TestPauseIsPublished(t *testing.T) {
	kv, err := kvcache.NewManager(kvcache.ManagerOptions{Blocks: 6000, BlockTokens: 4, Events: true})
	if err != nil {
		t.Fatal(err)
	}
	var held atomic.Int64 // blocks, by the events
	var slow atomic.Bool
	e := newEngine(t, engine.Options{
		Pipeline: newDrawing(t, kv), KV: kv, PrefixCaching: true, MaxModelLen: 24000, MaxNumSeqs: 4, MaxNumBatchedTokens: 40, LongAfter: longAfter, Vocab: 256,
		KVEvents: func(events []kvcache.Event) {
			if slow.Load() {
				time.Sleep(20 * time.Millisecond)
			}
			for _, x := range events {
				held.Add(int64(len(x.Stored) - len(x.Removed)))
			}
		},
	})
	ctx, cancel := context.WithCancel(t.Context())
	ran := make(chan error, 1)
	go func() { ran <- e.Run(ctx) }()
	j, err := e.Submit(t.Context(), ask(1, 16, 20_000))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := j.Next(t.Context()); err != nil {
		t.Fatal(err)
	}
	until(t, "an event comes", func() bool { return held.Load() > 0 }) // events are published behind the token
	slow.Store(true)
	if err := e.Pause(t.Context(), engine.PauseKeep); err != nil {
		t.Fatal(err)
	}
	if s := e.State(); !s.Paused || s.Running != 0 || s.Waiting != 1 || s.KVUsedBlocks != 0 || held.Load() != 0 {
		t.Errorf("paused with state %+v; by the events %d blocks are cached", s, held.Load())
	}
	slow.Store(false)
	e.Resume()
	if _, err := j.Next(t.Context()); err != nil {
		t.Error(err)
	}
	cancel()
	<-ran
}

// TestPauseAlone: an engine that nobody runs pauses at once, and twice, and what is submitted then
// runs after the pause.
func TestPauseAlone(t *testing.T) {
	n, _ := open(t, nil)
	for range 2 {
		if err := n.Engine().Pause(t.Context(), engine.PauseWait); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	r := engine.Request{Prompt: prompt(1, 4, 100), Params: params(3)}
	if _, err := n.Engine().Generate(ctx, []engine.Request{r}, nil); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Generate in a pause: %v", err)
	}
	n.Engine().Resume()
	n.Engine().Resume() // nothing happens
	if outs, err := n.Engine().Generate(t.Context(), []engine.Request{r}, nil); err != nil || len(outs[0].TokenIDs) != 3 {
		t.Errorf("after the pause: %v, %v", outs, err)
	}
	if err := n.Engine().Pause(t.Context(), "nap"); err == nil {
		t.Error("an unknown mode is accepted")
	}
}

// TestPauseInTwoModes: a pause that aborts, behind one that has kept a request, returns when that request has ended.
func TestPauseInTwoModes(t *testing.T) {
	n, _ := open(t, nil)
	run(t, n)
	for range 20 {
		j, _ := started(t, n, engine.Request{Prompt: prompt(1, 40, 100), Params: params(150)})
		for _, mode := range []engine.PauseMode{engine.PauseKeep, engine.PauseAbort} {
			if err := n.Engine().Pause(t.Context(), mode); err != nil {
				t.Fatal(mode, err)
			}
		}
		if s := n.Engine().State(); !s.Paused || s.Waiting != 0 {
			t.Errorf("behind a pause that aborts: %+v", s)
		}
		n.Engine().Resume()
		if _, err := j.Wait(t.Context()); !errors.Is(err, engine.ErrPaused) {
			t.Errorf("a request that was kept and then aborted: %v", err)
		}
	}
}

// TestPauseOfOthers: a Pause whose context is done does not end one that was reached for another caller, who
// uses the memory.
func TestPauseOfOthers(t *testing.T) {
	n, _ := open(t, nil)
	run(t, n)
	if err := n.Engine().Pause(t.Context(), engine.PauseWait); err != nil {
		t.Fatal(err)
	}
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	for i := range 50 {
		if err := n.Engine().Pause(canceled, engine.PauseWait); !n.Engine().State().Paused {
			t.Fatalf("call %d: %v; the engine runs on, and who had paused it does not know", i, err)
		}
	}
}

// TestPauseEnds: a pause whose context ends, or that is taken back, leaves the engine running; one
// that is reached ends with the engine, whose waiting requests are aborted.
func TestPauseEnds(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	goOn := make(chan struct{})
	// However they are scheduled, the request runs at each call of the test.
	var n *node.Node
	steps := 0
	asked := func() bool { return engine.Asked(n.Engine()) }
	n, _ = openWith(t, engine.Listener{StepFinished: func(engine.StepInfo) {
		switch steps++; steps {
		case 10:
			until(t, "the first pause is asked for", asked)
		case 20: // in which the engine has tried to pause
			cancel()
			until(t, "the first pause is taken back", func() bool { return !asked() })
			select {
			case <-goOn:
			case <-t.Context().Done(): // the test has failed
			}
		case 30:
			until(t, "the second pause is asked for", asked)
		}
	}}, nil)
	run(t, n)
	j, _ := started(t, n, engine.Request{Prompt: prompt(1, 8, 100), Params: params(200)})
	if err := n.Engine().Pause(ctx, engine.PauseWait); !errors.Is(err, context.Canceled) {
		t.Fatalf("a pause whose context ends: %v", err)
	}
	before := n.Engine().State().Steps
	close(goOn)
	if _, err := j.Next(t.Context()); err != nil || n.Engine().State().Paused {
		t.Errorf("after a canceled pause: %v, %+v", err, n.Engine().State())
	}
	until(t, "a step after the canceled pause", func() bool { return n.Engine().State().Steps > before })
	if err := n.Engine().Pause(t.Context(), engine.PauseKeep); err != nil {
		t.Fatal(err)
	}
	if err := n.Engine().Close(); err != nil {
		t.Fatal(err)
	}
	if _, finish := rest(t, j); finish != engine.FinishAbort {
		t.Errorf("a request that waited for the end of a pause ends with %q", finish)
	}
	if err := n.Engine().Pause(t.Context(), engine.PauseWait); !errors.Is(err, engine.ErrStopped) {
		t.Errorf("Pause of a closed engine: %v", err)
	}
}

// TestPausedState: from Submit on the state has a request that waits for the end of a pause: who
// decides by it what is woken would otherwise wait for ever.
func TestPausedState(t *testing.T) {
	n, _ := open(t, nil)
	run(t, n)
	if err := n.Engine().Pause(t.Context(), engine.PauseWait); err != nil {
		t.Fatal(err)
	}
	for i := range 50 {
		if _, err := n.Engine().Submit(t.Context(), engine.Request{Prompt: prompt(i, 200, 100), Params: params(1)}); err != nil {
			t.Fatal(err)
		}
		for range 2000 {
			if s := n.Engine().State(); s.Waiting != i+1 {
				t.Fatalf("%d requests were submitted in a pause, and the state has %d", i+1, s.Waiting)
			}
		}
	}
}
