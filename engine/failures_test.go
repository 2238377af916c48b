package engine_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/models/tokenizer"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/pipeline"
	"github.com/moeserve/moeserve/tools/fixtures"
)

// failingSteps runs steps by fail until it returns nil; see stepFunc.
type failingSteps struct {
	stepFunc
	noToken func(*pipeline.Sequence) bool
}

func (f failingSteps) Step(ctx context.Context, s *pipeline.Step) (pipeline.Result, error) {
	r, err := f.stepFunc.Step(ctx, s)
	row := 0
	for i := range s.Sequences {
		if s.Sequences[i].LogitRows == 0 {
			continue
		}
		if err == nil && f.noToken != nil && f.noToken(&s.Sequences[i]) {
			r.Sampled[row] = -1
		}
		row++
	}
	return r, err
}

// bad says whether a sequence's prompt begins with token 99.
func bad(q *pipeline.Sequence) bool { return q.Start == 0 && q.Tokens[0] == 99 }

// TestOneRequestFailsAlone: a sequence that has no token to sample, or cannot be a part of a
// step, ends its request with the reason; the others, and the engine, do not notice.
func TestOneRequestFailsAlone(t *testing.T) {
	packing := errors.New("cannot be packed")
	for name, step := range map[string]failingSteps{
		"no token": {stepFunc(func(context.Context, *pipeline.Step) error { return nil }), bad},
		"packing": {stepFunc(func(_ context.Context, s *pipeline.Step) error {
			for i := range s.Sequences {
				if bad(&s.Sequences[i]) {
					return &pipeline.SequenceError{Index: i, Err: packing}
				}
			}
			return nil
		}), nil},
	} {
		t.Run(name, func(t *testing.T) {
			e := with(t, step, 8, 64)
			ctx, cancel := context.WithCancel(t.Context())
			ran := make(chan error, 1)
			go func() { ran <- e.Run(ctx) }()
			var jobs []*engine.Job
			for i := range 5 {
				p := params(6)
				p.N = 1 + i%2
				r := engine.Request{ID: fmt.Sprint(i), Prompt: prompt(i, 4, 90), Params: p}
				if i == 3 { // of two samples
					r.Prompt[0] = 99
				}
				j, err := e.Submit(t.Context(), r)
				if err != nil {
					t.Fatal(err)
				}
				jobs = append(jobs, j)
			}
			for i, j := range jobs {
				u, err := j.Wait(t.Context())
				if i != 3 {
					if err != nil || len(u) != 1+i%2 || len(u[0].Tokens) != 6 || u[0].Finish != engine.FinishLength {
						t.Errorf("request %d: %+v, %v", i, u, err)
					}
					continue
				}
				want := packing
				if name == "no token" {
					want = engine.ErrNoToken
				}
				if !errors.Is(err, want) || slices.ContainsFunc(u, func(u engine.Update) bool { return u.Finish != engine.FinishAbort }) {
					t.Errorf("the bad request: %+v, %v", u, err)
				}
			}
			cancel()
			if err := <-ran; err != nil {
				t.Error(err)
			}
			if s := e.State(); s.Running != 0 || s.KVUsedBlocks != 0 {
				t.Errorf("afterwards: %+v", s)
			}
			if n := engine.Held(e); n != 0 {
				t.Errorf("%d sequences are held", n)
			}
		})
	}
}

// notANumber runs requests of which some have token 500, whose embedding is NaN, beside
// others: these alone fail, and not the engine.
func notANumber(t *testing.T, n *node.Node) {
	t.Helper()
	rs := varied(18, 500)
	for i := range rs {
		p := &rs[i].Params
		p.MaxTokens, p.IgnoreEOS = 20, true
		if p.LogitBias == nil {
			p.LogitBias = map[int32]float32{}
		}
		p.LogitBias[500] = -100 // or it may be sampled
	}
	want := alone(t, n, rs)
	stop := run(t, n)
	for _, turn := range []int{0, 1} { // in the second, blocks of bad sequences are used again
		jobs := make([]*engine.Job, len(rs))
		for i, r := range rs {
			if i%6 == 1 {
				r.Prompt = append(slices.Clone(r.Prompt), 500)
				r.Params.N, r.Params.LogProbs = 2, true
			}
			var err error
			if jobs[i], err = n.Engine().Submit(t.Context(), r); err != nil {
				t.Fatal(err)
			}
		}
		for i, j := range jobs {
			u, err := j.Wait(t.Context())
			switch {
			case i%6 == 1:
				if !errors.Is(err, engine.ErrNoToken) || len(u) != 2 || len(u[0].Tokens)+len(u[1].Tokens) != 0 {
					t.Errorf("turn %d, request %d: %+v, %v; want that no token can be sampled", turn, i, u, err)
				}
			case err != nil || !slices.Equal(ids(u[0]), want[i][0].TokenIDs):
				t.Errorf("turn %d, request %d: %+v, %v; alone %v", turn, i, u, err, want[i][0].TokenIDs)
			}
		}
	}
	if err := stop(); err != nil {
		t.Error(err)
	}
	if s := n.Engine().State(); s.KVUsedBlocks != 0 {
		t.Errorf("afterwards: %+v", s)
	}
}

func TestNotANumber(t *testing.T) {
	n, _ := open(t, func(s *configs.Settings) {
		s.Model.Name = fixtures.WithNaN(t, "mixtral", 500)
		s.KV.NumGPUBlocksOverride, s.KV.MaxModelLen = 40, 64
	})
	notANumber(t, n)
}

// TestEOSOutsideVocabulary: ids of the model's configuration that no step can sample are
// dropped, and said to be; min_tokens, which bans the others, works.
func TestEOSOutsideVocabulary(t *testing.T) {
	var log strings.Builder
	e := newEngine(t, engine.Options{
		Pipeline: stepFunc(func(_ context.Context, s *pipeline.Step) error {
			for i := range s.Sequences {
				for _, a := range s.Sequences[i].SamplingParams.Adjust {
					if a.ID != 2 {
						t.Errorf("token %d is adjusted", a.ID)
					}
				}
			}
			return nil
		}),
		KV: cache(t, 8), MaxModelLen: 64, Vocab: 100, StopIDs: []int32{2, 100, -1}, Log: slog.New(slog.NewTextHandler(&log, nil)),
	})
	if !strings.Contains(log.String(), "eos_token_id=\"[2 100 -1]\" vocab_size=100") {
		t.Errorf("log: %s", &log)
	}
	p := engine.DefaultParams()
	p.MinTokens = 3
	if _, err := e.Generate(t.Context(), []engine.Request{{Prompt: []int32{3}, Params: p}}, nil); err != nil {
		t.Error(err)
	}
}

// TestStepThatFailsForItself: after an error that is neither of copies nor of the device the
// step's requests end with it, and later ones run.
func TestStepThatFailsForItself(t *testing.T) {
	broken := errors.New("broken")
	steps := 0
	e := with(t, stepFunc(func(context.Context, *pipeline.Step) error {
		if steps++; steps == 3 {
			return broken
		}
		return nil
	}), 4, 64)
	r := engine.Request{Prompt: prompt(1, 4, 90), Params: params(6)}
	if _, err := e.Generate(t.Context(), []engine.Request{r, r}, nil); !errors.Is(err, broken) {
		t.Errorf("the requests of the step end with %v", err)
	}
	if out, err := e.Generate(t.Context(), []engine.Request{r}, nil); err != nil || len(out[0].TokenIDs) != 6 {
		t.Errorf("the next: %+v, %v", out, err)
	}
}

// TestRetries: a step whose copies fail is tried again after pauses that double up to 2 s, for
// 30 s together. Its requests then end, and requests that came meanwhile run.
func TestRetries(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		var at []time.Duration
		var works atomic.Bool
		e := with(t, stepFunc(func(context.Context, *pipeline.Step) error {
			at = append(at, time.Since(start))
			if works.Load() {
				return nil
			}
			return fmt.Errorf("%w: a link", pipeline.ErrStepFailed)
		}), 4, 64)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		ran := make(chan error, 1)
		go func() { ran <- e.Run(ctx) }()
		r := engine.Request{Prompt: prompt(1, 4, 90), Params: params(3)}
		first, err := e.Submit(t.Context(), r)
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(900 * time.Millisecond)
		if s := e.State(); s.Failing != nil || s.Running != 1 {
			t.Errorf("after 0.9 s: %+v", s)
		}
		time.Sleep(10 * time.Second)
		if s := e.State(); !errors.Is(s.Failing, pipeline.ErrStepFailed) {
			t.Errorf("after 11 s: %+v", s)
		}
		second, err := e.Submit(t.Context(), r)
		if err != nil {
			t.Fatal(err)
		}
		_, err = first.Wait(t.Context())
		works.Store(true)
		if took := time.Since(start); !errors.Is(err, engine.ErrUnavailable) || !errors.Is(err, pipeline.ErrStepFailed) || took != 30*time.Second {
			t.Errorf("the first request ends after %v: %v", took, err)
		}
		if u, err := second.Wait(t.Context()); err != nil || len(u[0].Tokens) != 3 {
			t.Errorf("the second request: %+v, %v", u, err)
		}
		cancel()
		if err := <-ran; err != nil {
			t.Error(err)
		}
		for i, want := range []time.Duration{5, 10, 20, 40, 80, 160, 320, 640, 1280, 2000, 2000} {
			if got := at[i+1] - at[i]; got != want*time.Millisecond {
				t.Errorf("pause %d is %v, want %d ms", i, got, want)
			}
		}
		if s := e.State(); s.Failing != nil || s.KVUsedBlocks != 0 {
			t.Errorf("afterwards: %+v", s)
		}
	})
}

// TestCancelDuringRetries: while a step waits to run again its requests can be canceled. It
// runs without them, or not at all where none is left; the engine can be stopped too.
func TestCancelDuringRetries(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		var sizes []int
		e := with(t, stepFunc(func(_ context.Context, s *pipeline.Step) error {
			sizes = append(sizes, len(s.Sequences))
			return pipeline.ErrStepFailed
		}), 4, 64)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		ran := make(chan error, 1)
		go func() { ran <- e.Run(ctx) }()
		r := engine.Request{Prompt: prompt(1, 4, 90), Params: params(3)}
		submit := func() (*engine.Job, func()) {
			own, drop := context.WithCancel(t.Context())
			j, err := e.Submit(own, r)
			if err != nil {
				t.Fatal(err)
			}
			return j, drop
		}
		canceled := func(j *engine.Job, what string) {
			before := time.Since(start)
			if u, err := j.Wait(t.Context()); err != nil || u[0].Finish != engine.FinishAbort || time.Since(start)-before > 50*time.Millisecond {
				t.Errorf("%s: %+v after %v, %v", what, u, time.Since(start)-before, err)
			}
		}
		a, dropA := submit()
		b, dropB := submit()
		time.Sleep(8 * time.Second)
		synctest.Wait()
		if sizes[0] != 1 && sizes[0] != 2 { // b came before the first step, or after it
			t.Fatalf("steps of %d sequences", sizes[0])
		}
		dropA()
		canceled(a, "the first request")
		dropB()
		canceled(b, "the second request")
		synctest.Wait()
		steps := len(sizes)
		time.Sleep(time.Minute)
		synctest.Wait()
		if len(sizes) != steps || e.State().KVUsedBlocks != 0 {
			t.Errorf("%d steps more without requests; %+v", len(sizes)-steps, e.State())
		}
		c, _ := submit()
		time.Sleep(5 * time.Second)
		cancel()
		canceled(c, "a request of an engine that is stopped")
		if err := <-ran; err != nil {
			t.Error(err)
		}
	})
}

// TestLinkThatComesBack: the host link fails for some seconds; every request has the tokens
// that it has alone.
func TestLinkThatComesBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n, m := open(t, nil)
		rs := varied(6, n.Info().Config.Vocab)
		want := alone(t, n, rs)
		run(t, n)
		fault := m.Inject(&emulated.Fault{Kind: emulated.FailCopy, Times: -1, Match: func(p emulated.Point) bool {
			return p.To == device.HBM(0) && strings.HasPrefix(p.Stream, "copy ")
		}})
		var jobs []*engine.Job
		for _, r := range rs {
			j, err := n.Engine().Submit(t.Context(), r)
			if err != nil {
				t.Fatal(err)
			}
			jobs = append(jobs, j)
		}
		time.Sleep(7 * time.Second)
		if s := n.Engine().State(); s.Failing == nil || !errors.Is(s.Failing, device.ErrCopyFailed) {
			t.Errorf("while the link fails: %+v", s)
		}
		fault.Release()
		for i, j := range jobs {
			if u := wait(t, j); !slices.Equal(ids(u[0]), want[i][0].TokenIDs) {
				t.Errorf("request %d: %v, alone %v", i, ids(u[0]), want[i][0].TokenIDs)
			}
		}
	})
}

// hooked is a tokenizer whose NewStream calls a function.
type hooked struct {
	tokenizer.Tokenizer
	call func()
}

func (h *hooked) NewStream(skip bool) *tokenizer.Stream {
	h.call()
	return h.Tokenizer.NewStream(skip)
}

// TestCancelWhileRequestsAreTakenIn: a request that is submitted and canceled while the
// engine takes in others ends as any other that is canceled.
func TestCancelWhileRequestsAreTakenIn(t *testing.T) {
	synctest.Test(t, testCancelWhileRequestsAreTakenIn)
}

func testCancelWhileRequestsAreTakenIn(t *testing.T) {
	n, _ := open(t, nil)
	var e *engine.Engine
	var late *engine.Job
	ctx, cancel := context.WithCancel(t.Context())
	h := &hooked{Tokenizer: n.Text().Tokenizer}
	e = newEngine(t, engine.Options{
		Pipeline: stepFunc(func(context.Context, *pipeline.Step) error { return nil }), Tokenizer: h,
		KV: cache(t, 64), MaxModelLen: 640, Vocab: 100,
	})
	r := engine.Request{Prompt: []int32{5, 6}, Params: params(400)}
	h.call = func() {
		if late != nil {
			return
		}
		var err error
		if late, err = e.Submit(ctx, r); err != nil {
			t.Error(err)
		}
		cancel()
		synctest.Wait() // so the engine has been notified
	}
	if _, err := e.Submit(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if _, err := engine.Turn(e, t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if s := e.State(); s.Running != 1 || s.Waiting != 0 {
		t.Errorf("%+v, want the first request alone", s)
	}
	for {
		u, err := late.Next(t.Context())
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil || u.Finish != engine.FinishAbort {
			t.Fatalf("%+v, %v", u, err)
		}
	}
}

// TestAbortDeliversTextHeldBack: text that could have become a stop string is delivered where
// the request is aborted.
func TestAbortDeliversTextHeldBack(t *testing.T) {
	n, _ := open(t, nil)
	ids, err := n.Text().Tokenizer.Encode("sort: d a c b =", true)
	if err != nil {
		t.Fatal(err)
	}
	base := engine.Request{Prompt: ids, Params: engine.DefaultParams()}
	whole := alone(t, n, []engine.Request{base})[0][0]
	base.Params.Stop = []string{whole.Text[1:] + "!"} // held back from the second character on
	ctx, cancel := context.WithCancel(t.Context())
	e := newEngine(t, engine.Options{
		Pipeline: replay{whole.TokenIDs, len(base.Prompt), cancel}, Tokenizer: n.Text().Tokenizer,
		KV: cache(t, 64), MaxModelLen: 640, Vocab: 1 << 15,
	})
	j, err := e.Submit(t.Context(), base)
	if err != nil {
		t.Fatal(err)
	}
	if err := e.Run(ctx); err != nil {
		t.Fatal(err)
	}
	want := n.Text().Tokenizer.Decode(whole.TokenIDs[:3], true)
	if u := wait(t, j); u[0].Text != want || len(u[0].Tokens) != 3 || u[0].Finish != engine.FinishAbort {
		t.Errorf("aborted after %d tokens with %q (%s), want %q", len(u[0].Tokens), u[0].Text, u[0].Finish, want)
	}
}

// replay samples given tokens, and cancels with the fourth.
type replay struct {
	tokens []int32
	prompt int
	cancel func()
}

func (r replay) Discard(context.Context) error { return nil }

func (r replay) Step(ctx context.Context, s *pipeline.Step) (pipeline.Result, error) {
	q := &s.Sequences[0]
	at := q.Start + len(q.Tokens) - r.prompt
	if at == 3 {
		r.cancel()
		return pipeline.Result{}, ctx.Err()
	}
	return pipeline.Result{Sampled: []int32{r.tokens[at]}}, nil
}
