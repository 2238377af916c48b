package engine_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/pipeline"
)

// fixedAhead is a device that draws token 7, but 3 for the first sequence of its step stopAt, and that always computes
// the next step at once where that is allowed. It runs that again where a sequence has ended, unless partial is set.
type fixedAhead struct {
	stopAt  int
	partial bool
	// steps of the device; ahead are the sequences of the one that is under way.
	steps, ahead, discarded int
	wait                    time.Duration
	before                  func(s *pipeline.Step)
	discard                 func() error
}

func (f *fixedAhead) Discard(context.Context) error {
	if f.ahead == 0 {
		return nil
	}
	f.ahead, f.discarded = 0, f.discarded+1
	if f.discard != nil {
		return f.discard()
	}
	return nil
}

func (f *fixedAhead) Step(ctx context.Context, s *pipeline.Step) (r pipeline.Result, err error) {
	if n := len(s.Sequences); f.ahead < n || f.ahead > n && !f.partial {
		_ = f.Discard(ctx)
		f.steps++
	}
	if f.before != nil {
		f.before(s)
	}
	time.Sleep(f.wait)
	for i := range s.Sequences {
		if s.Sequences[i].LogitRows == 1 {
			id := int32(7)
			if f.steps == f.stopAt && i == 0 {
				id = 3
			}
			r.Sampled = append(r.Sampled, id)
		}
	}
	if f.ahead = 0; s.Ahead {
		r.Ahead, r.AheadPartial, f.ahead = true, f.partial, len(s.Sequences)
		f.steps++
	}
	return r, nil
}

// stopsAt3 asks for tokens until 3 is drawn.
func stopsAt3(most int) engine.Request {
	p := engine.DefaultParams()
	p.StopIDs, p.MaxTokens = []int32{3}, most
	return engine.Request{Prompt: []int32{5, 6}, Params: p}
}

// running starts Run, and returns a function that ends it.
func running(t *testing.T, e *engine.Engine) (end func() error) {
	ctx, cancel := context.WithCancel(t.Context())
	ran := make(chan error, 1)
	go func() { ran <- e.Run(ctx) }()
	return func() error {
		cancel()
		return <-ran
	}
}

// TestAheadLastUpdate: a request gets its end before the step that nobody needs has ended, and an error of that ends neither
// Run nor later requests.
func TestAheadLastUpdate(t *testing.T) {
	hold := make(chan struct{})
	s := &fixedAhead{stopAt: 5, discard: func() error {
		<-hold
		return errors.New("broken")
	}}
	e := newEngine(t, engine.Options{Pipeline: s, KV: cache(t, 8), MaxModelLen: 64, Vocab: 100})
	end := running(t, e)
	j, err := e.Submit(t.Context(), stopsAt3(30))
	if err != nil {
		t.Fatal(err)
	}
	if u, err := j.Wait(t.Context()); err != nil || len(u) != 1 || len(u[0].Tokens) != 5 || u[0].Finish != engine.FinishStop {
		t.Errorf("%+v, %v", u, err)
	}
	close(hold)
	s.stopAt = 0
	if j, err = e.Submit(t.Context(), stopsAt3(4)); err != nil {
		t.Fatal(err)
	}
	if u, err := j.Wait(t.Context()); err != nil || len(u[0].Tokens) != 4 {
		t.Errorf("a request behind a discarded step that failed: %+v, %v", u, err)
	}
	if err := end(); err != nil {
		t.Error(err)
	}
	if s.discarded != 1 {
		t.Errorf("%d steps were discarded, want 1: the second request ends by its limit", s.discarded)
	}
}

// TestAheadNothingLeft: nothing is under way in a pause, nor behind Run or Generate, however they end.
func TestAheadNothingLeft(t *testing.T) {
	for _, mode := range []engine.PauseMode{engine.PauseKeep, engine.PauseAbort} {
		s := &fixedAhead{wait: time.Millisecond}
		e := newEngine(t, engine.Options{Pipeline: s, KV: cache(t, 1200), MaxModelLen: 6000, Vocab: 100})
		s.discard = func() error {
			if e.State().Paused {
				t.Errorf("%s: a step is under way in a pause", mode)
			}
			return nil
		}
		end := running(t, e)
		j, err := e.Submit(t.Context(), stopsAt3(5000))
		if err != nil {
			t.Fatal(err)
		}
		next := func(n int) {
			for range n {
				if _, err := j.Next(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
		}
		next(5)
		asked := e.State().Steps
		if err := e.Pause(t.Context(), mode); err != nil {
			t.Fatal(err)
		}
		if n := e.State().Steps - asked; s.ahead > 0 || n > 100 {
			t.Errorf("%s: %d sequences are under way in a pause, which %d steps have preceded", mode, s.ahead, n)
		}
		e.Resume()
		if mode == engine.PauseKeep {
			next(20)
		}
		if err := end(); err != nil || s.ahead > 0 {
			t.Errorf("%s: Run ends with %v and a step of %d sequences", mode, err, s.ahead)
		}
	}
	for _, stop := range []int{0, 9} {
		s := &fixedAhead{stopAt: stop}
		e := newEngine(t, engine.Options{Pipeline: s, KV: cache(t, 1200), MaxModelLen: 6000, Vocab: 100})
		ctx, cancel := context.WithCancel(t.Context())
		n := 0
		_, err := e.Generate(ctx, []engine.Request{stopsAt3(5000)}, func(int, engine.Update) {
			if n++; n == 20 {
				cancel()
			}
		})
		cancel()
		if (err == nil) != (stop > 0) || s.ahead > 0 || s.discarded != 1 {
			t.Errorf("stop at step %d: %v, %d sequences under way, %d steps discarded", stop, err, s.ahead, s.discarded)
		}
	}
}

// TestAheadArrival: a request that arrives while a step runs is in the one behind the next, also where a sequence ends
// with that step.
func TestAheadArrival(t *testing.T) {
	for _, c := range []struct{ stops, partial bool }{{}, {stops: true}, {stops: true, partial: true}} {
		var e *engine.Engine
		came, served := 0, 0
		s := &fixedAhead{partial: c.partial}
		if c.stops {
			s.stopAt = 5
		}
		s.before = func(x *pipeline.Step) {
			if s.steps == 5 && came == 0 {
				came = s.steps
				if _, err := e.Submit(context.Background(), engine.Request{Prompt: []int32{9, 9, 9}, Params: stopsAt3(12).Params}); err != nil {
					t.Error(err)
				}
			}
			for i := range x.Sequences {
				if x.Sequences[i].Tokens[0] == 9 && served == 0 {
					served = s.steps
				}
			}
		}
		e = newEngine(t, engine.Options{Pipeline: s, KV: cache(t, 40), MaxModelLen: 64, Vocab: 100})
		for range 2 {
			if _, err := e.Submit(t.Context(), stopsAt3(12)); err != nil {
				t.Fatal(err)
			}
		}
		for range 30 {
			if _, err := engine.Turn(e, t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		if came != 5 || served > came+2 || served == 0 {
			t.Errorf("%+v: what came during step %d of the device is taken into account in its step %d", c, came, served)
		}
	}
}

// turns counts a lender's turns.
type turns struct{ n int }

func (l *turns) Turn(int, int)         { l.n++ }
func (l *turns) Computed(int, float64) {}

// TestAheadLender: a lender has its turn between all steps.
func TestAheadLender(t *testing.T) {
	l, s := &turns{}, &fixedAhead{}
	e := newEngine(t, engine.Options{Pipeline: s, KV: cache(t, 1200), MaxModelLen: 6000, Vocab: 100, Lender: l})
	if _, err := e.Generate(t.Context(), []engine.Request{stopsAt3(300)}, nil); err != nil {
		t.Fatal(err)
	}
	if l.n < 300 {
		t.Errorf("%d turns of the lender in %d steps", l.n, s.steps)
	}
}
