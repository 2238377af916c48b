package engine_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/models/tokenizer"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/pipeline"
	"github.com/moeserve/moeserve/tools/fixtures"
)

// open starts a node on the built-in model, half its experts offloaded, unless
// change says otherwise.
func open(t *testing.T, change func(*configs.Settings)) (*node.Node, *emulated.Machine) {
	t.Helper()
	return openWith(t, engine.Listener{}, change)
}

// openWith is open with a listener.
func openWith(t *testing.T, l engine.Listener, change func(*configs.Settings)) (*node.Node, *emulated.Machine) {
	t.Helper()
	s := configs.Defaults()
	s.Offload.Fraction = 0.5
	if change != nil {
		change(&s)
	}
	var m *emulated.Machine
	n, err := node.Open(t.Context(), node.Options{Settings: s, Listener: l, OpenMachine: func() (device.Machine, error) {
		x, err := emulated.Open(emulated.Options{LikeCUDA: true, TimeFailures: 0.2, FenceStart: 1<<32 - 100})
		if err == nil {
			m = x.(*emulated.Machine)
		}
		return x, err
	}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Close(); err != nil && !errors.Is(err, device.ErrLost) {
			t.Error(err)
		}
	})
	return n, m
}

// run starts the engine's loop; stop ends it and returns its error.
func run(t *testing.T, n *node.Node) (stop func() error) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- n.Engine().Run(ctx) }()
	stop = sync.OnceValue(func() error { cancel(); return <-done })
	t.Cleanup(func() { _ = stop() })
	return stop
}

func params(n int) engine.Params {
	p := engine.DefaultParams()
	p.MaxTokens, p.IgnoreEOS = n, true
	return p
}

// prompts of different lengths, deterministic.
func prompt(i, n, vocab int) []int32 {
	ids := make([]int32, n)
	for j := range ids {
		ids[j] = int32((11*i + 17*j + j*j) % vocab)
	}
	return ids
}

// varied are requests that use every parameter.
func varied(count, vocab int) []engine.Request {
	var rs []engine.Request
	for i := range count {
		p := params(3 + i%13)
		p.Seed = uint64(i)
		if i%4 != 0 {
			p.Temperature = 0.5 + float32(i%5)/4
		}
		switch i % 6 {
		case 1:
			p.TopK = 5
		case 2:
			p.TopP = 0.7
		case 3:
			p.MinP, p.RepetitionPenalty = 0.1, 1.3
		case 4:
			p.PresencePenalty, p.FrequencyPenalty, p.LogProbs, p.TopLogProbs = 0.7, 0.4, true, 3
		case 5:
			p.LogitBias = map[int32]float32{1: 5, 7: -100, 9: 2}
			p.MinTokens, p.IgnoreEOS = min(3, p.MaxTokens), false
		}
		rs = append(rs, engine.Request{ID: fmt.Sprint(i), Prompt: prompt(i, 1+(i*7)%30, vocab), Params: p})
	}
	return rs
}

// alone runs each request by itself.
func alone(t *testing.T, n *node.Node, rs []engine.Request) [][]engine.Output {
	t.Helper()
	var outs [][]engine.Output
	for _, r := range rs {
		o, err := n.Engine().Generate(t.Context(), []engine.Request{r}, nil)
		if err != nil {
			t.Fatal(err)
		}
		outs = append(outs, o)
	}
	return outs
}

func wait(t *testing.T, j *engine.Job) []engine.Update {
	t.Helper()
	u, err := j.Wait(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return u
}

func ids(u engine.Update) []int32 {
	var out []int32
	for _, x := range u.Tokens {
		out = append(out, x.ID)
	}
	return out
}

// TestNeighborsChangeNothing submits requests at odd moments, with room for few of
// them in the cache, so that they are preempted, and compares each with itself
// alone.
func TestNeighborsChangeNothing(t *testing.T) { synctest.Test(t, testNeighborsChangeNothing) }

func testNeighborsChangeNothing(t *testing.T) {
	n, _ := open(t, nil)
	rs := varied(48, n.Info().Config.Vocab)
	want := alone(t, n, rs)
	var prefill, generated int64
	for i, outs := range want {
		for _, o := range outs {
			prefill += int64(len(rs[i].Prompt))
			generated += int64(len(o.Tokens))
		}
	}
	if s := n.Engine().State(); s.PrefillTokens != prefill || s.GeneratedTokens != generated {
		t.Errorf("%+v, want %d prefill and %d generated tokens", s, prefill, generated)
	}
	var count steps
	tight, _ := openWith(t, engine.Listener{StepFinished: func(engine.StepInfo) { count.step() }}, func(s *configs.Settings) {
		s.KV.NumGPUBlocksOverride, s.KV.MaxModelLen, s.Batch.MaxNumBatchedTokens, s.Batch.MaxNumSeqs, s.Batch.MicroBatchSize = 9, 48, 40, 12, 17
	})
	run(t, tight)
	var group sync.WaitGroup
	for i, r := range rs {
		group.Go(func() {
			count.await(2 * (i % 7))
			j, err := tight.Engine().Submit(t.Context(), r)
			if err != nil {
				t.Error(err)
				return
			}
			got := wait(t, j)
			if len(got) != 1 || !slices.Equal(ids(got[0]), want[i][0].TokenIDs) || got[0].Finish != want[i][0].FinishReason || got[0].Text != want[i][0].Text {
				t.Errorf("request %d: %v %q (%v), alone %v %q (%v)", i, ids(got[0]), got[0].Text, got[0].Finish, want[i][0].TokenIDs, want[i][0].Text, want[i][0].FinishReason)
			}
			for k, x := range got[0].Tokens {
				if w := want[i][0].Tokens[k]; x.LogProb != w.LogProb || !slices.Equal(x.Top, w.Top) {
					t.Errorf("request %d, token %d: log-probabilities %+v, alone %+v", i, k, x, w)
				}
			}
			if u := j.Usage(); u.PromptTokens != len(r.Prompt) || u.CompletionTokens != len(got[0].Tokens) {
				t.Errorf("request %d: usage %+v", i, u)
			}
		})
	}
	group.Wait()
	s := tight.Engine().State()
	if s.PrefillTokens <= prefill || s.GeneratedTokens != generated { // preempted sequences are prefilled again
		t.Errorf("%+v, want more than %d prefill and %d generated tokens", s, prefill, generated)
	}
	if s.Preemptions == 0 {
		t.Error("nothing was preempted: the cache is too large for this test")
	}
	if s.Running != 0 || s.Waiting != 0 || s.KVUsedBlocks != 0 || tight.KV().Free() != s.KVBlocks {
		t.Errorf("after the last request: %+v, %d blocks free", s, tight.KV().Free())
	}
}

func TestSamples(t *testing.T) {
	n, _ := open(t, nil)
	p := params(6)
	p.N, p.Temperature, p.Seed = 4, 1.5, 3
	r := engine.Request{Prompt: prompt(1, 9, n.Info().Config.Vocab), Params: p}
	first := alone(t, n, []engine.Request{r})[0]
	again := alone(t, n, []engine.Request{r})[0]
	different := false
	for i := range first {
		if !slices.Equal(first[i].TokenIDs, again[i].TokenIDs) {
			t.Errorf("sample %d: %v, then %v", i, first[i].TokenIDs, again[i].TokenIDs)
		}
		different = different || !slices.Equal(first[i].TokenIDs, first[0].TokenIDs)
	}
	if len(first) != 4 || !different {
		t.Errorf("%d samples, different: %v", len(first), different)
	}
	r.Params.N = 1
	if single := alone(t, n, []engine.Request{r})[0]; !slices.Equal(single[0].TokenIDs, first[0].TokenIDs) {
		t.Errorf("one sample is %v, the first of four %v", single[0].TokenIDs, first[0].TokenIDs)
	}
}

func TestLogProbs(t *testing.T) {
	n, _ := open(t, nil)
	p := params(5)
	p.LogProbs, p.TopLogProbs = true, 20
	out := alone(t, n, []engine.Request{{Prompt: prompt(2, 7, n.Info().Config.Vocab), Params: p}})[0][0]
	for i, x := range out.Tokens {
		sum := 0.0
		for k, top := range x.Top {
			sum += math.Exp(float64(top.LogProb))
			if k > 0 && top.LogProb > x.Top[k-1].LogProb {
				t.Errorf("token %d: alternative %d is likelier than the one before", i, k)
			}
		}
		if len(x.Top) != 20 || x.Top[0].ID != x.ID || x.Top[0].LogProb != x.LogProb || sum > 1.0001 || sum < 0.1 {
			t.Errorf("token %d: %+v, probabilities sum to %v", i, x, sum)
		}
	}
}

func TestPenaltiesAndBiases(t *testing.T) {
	n, _ := open(t, nil)
	base := engine.Request{Prompt: encode(t, n.Text().Tokenizer, "sort: d a c b =", true), Params: params(12)}
	plain := alone(t, n, []engine.Request{base})[0][0].TokenIDs

	ban := base
	ban.Params.LogitBias = map[int32]float32{plain[0]: -100, plain[1]: -100}
	if got := alone(t, n, []engine.Request{ban})[0][0].TokenIDs; slices.Contains(got, plain[0]) || slices.Contains(got, plain[1]) {
		t.Errorf("banned %v and drew %v", plain[:2], got)
	}
	force := base
	force.Params.LogitBias = map[int32]float32{42: 100}
	if got := alone(t, n, []engine.Request{force})[0][0].TokenIDs; slices.ContainsFunc(got, func(id int32) bool { return id != 42 }) {
		t.Errorf("token 42 is favored and %v were drawn", got)
	}
	// The bias comes before the penalties, as in vLLM: (x+50)/100 is no favor.
	weak := engine.Request{Prompt: []int32{6}, Params: params(1)}
	weak.Params.RepetitionPenalty, weak.Params.LogitBias = 100, map[int32]float32{6: 50}
	if got := alone(t, n, []engine.Request{weak})[0][0].TokenIDs; got[0] == 6 {
		t.Errorf("token 6, whose biased logit is divided by 100, was drawn")
	}
	force.Params.FrequencyPenalty, force.Params.PresencePenalty = 2, 2
	force.Params.LogitBias[42] = 30
	if got := alone(t, n, []engine.Request{force})[0][0].TokenIDs; !slices.Contains(got, 42) || !slices.ContainsFunc(got, func(id int32) bool { return id != 42 }) {
		t.Errorf("token 42 loses 2 each time and %v were drawn", got)
	}
	least := base
	least.Params.IgnoreEOS, least.Params.MinTokens, least.Params.MaxTokens = false, 7, 16
	short := base
	short.Params.IgnoreEOS = false
	outs := alone(t, n, []engine.Request{short, least})
	if a, b := outs[0][0], outs[1][0]; a.FinishReason != engine.FinishStop || len(a.TokenIDs) >= 7 || len(b.TokenIDs) < 7 {
		t.Errorf("%d tokens by itself (%s), %d with at least 7", len(a.TokenIDs), a.FinishReason, len(b.TokenIDs))
	}
}

func TestStops(t *testing.T) {
	n, _ := open(t, nil)
	base := engine.Request{Prompt: encode(t, n.Text().Tokenizer, "sort: d a c b =", true), Params: engine.DefaultParams()}
	for _, c := range []struct {
		name   string
		change func(*engine.Params)
		text   string
		finish engine.FinishReason
	}{
		{"by itself", func(*engine.Params) {}, "a b c d", engine.FinishStop},
		{"a string", func(p *engine.Params) { p.Stop = []string{" c"} }, "a b", engine.FinishStop},
		{"a string over tokens", func(p *engine.Params) { p.Stop = []string{"b c"} }, "a ", engine.FinishStop},
		{"a string, included", func(p *engine.Params) { p.Stop, p.IncludeStop = []string{"b c"}, true }, "a b c", engine.FinishStop},
		{"a string that does not come", func(p *engine.Params) { p.Stop = []string{"d e"} }, "a b c d", engine.FinishStop},
		{"length", func(p *engine.Params) { p.MaxTokens = 2 }, "a b", engine.FinishLength},
		{"an id", func(p *engine.Params) { p.StopIDs = encode(t, n.Text().Tokenizer, " c", false) }, "a b", engine.FinishStop},
	} {
		r := base
		c.change(&r.Params)
		out := alone(t, n, []engine.Request{r})[0][0]
		if strings.TrimPrefix(out.Text, " ") != c.text || out.FinishReason != c.finish {
			t.Errorf("%s: %q (%s), want %q (%s)", c.name, out.Text, out.FinishReason, c.text, c.finish)
		}
	}
}

// TestCancel ends some requests in mid-run; the others must not notice.
func TestCancel(t *testing.T) {
	n, _ := open(t, nil)
	rs := varied(12, n.Info().Config.Vocab)
	for i := range rs {
		rs[i].Params.MaxTokens, rs[i].Params.IgnoreEOS = 60, true
	}
	want := alone(t, n, rs)
	run(t, n)
	var group sync.WaitGroup
	for i, r := range rs {
		group.Go(func() {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			j, err := n.Engine().Submit(ctx, r)
			if err != nil {
				t.Error(err)
				return
			}
			if i%3 == 0 {
				if _, err := j.Next(t.Context()); err != nil {
					t.Error(err)
				}
				cancel()
			}
			u := wait(t, j)
			if i%3 == 0 {
				if len(u) != 1 || u[0].Finish != engine.FinishAbort && u[0].Finish != engine.FinishLength {
					t.Errorf("canceled request %d ends with %+v", i, u)
				}
			} else if !slices.Equal(ids(u[0]), want[i][0].TokenIDs) {
				t.Errorf("request %d: %v, alone %v", i, ids(u[0]), want[i][0].TokenIDs)
			}
		})
	}
	group.Wait()
	if s := n.Engine().State(); s.KVUsedBlocks != 0 || s.Running != 0 {
		t.Errorf("after the last request: %+v", s)
	}
}

// TestCloseEndsWhatRuns: requests that were submitted run to their ends while Close waits.
func TestCloseEndsWhatRuns(t *testing.T) {
	n, _ := open(t, nil)
	r := engine.Request{Prompt: prompt(0, 5, n.Info().Config.Vocab), Params: params(40)}
	done := make(chan error, 1)
	go func() { done <- n.Engine().Run(t.Context()) }()
	var jobs []*engine.Job
	for range 5 {
		j, err := n.Engine().Submit(t.Context(), r)
		if err != nil {
			t.Fatal(err)
		}
		jobs = append(jobs, j)
	}
	if _, err := jobs[0].Next(t.Context()); err != nil { // so Run has begun
		t.Fatal(err)
	}
	if err := n.Engine().Close(); err != nil {
		t.Error(err)
	}
	if _, err := n.Engine().Submit(t.Context(), r); !errors.Is(err, engine.ErrStopped) {
		t.Errorf("submit to a closed engine: %v", err)
	}
	for i, j := range jobs {
		want := 40
		if i == 0 {
			want-- // which was read
		}
		if u := wait(t, j); u[0].Finish != engine.FinishLength || len(u[0].Tokens) != want {
			t.Errorf("ends with %s after %d tokens", u[0].Finish, len(u[0].Tokens))
		}
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// TestCloseEndsWhatNobodyRuns: requests that wait for a Run that does not come are aborted.
func TestCloseEndsWhatNobodyRuns(t *testing.T) {
	e := with(t, stepFunc(func(context.Context, *pipeline.Step) error { return nil }), 1, 64)
	j, err := e.Submit(t.Context(), engine.Request{Prompt: []int32{1}, Params: params(3)})
	if err != nil {
		t.Fatal(err)
	}
	if err := e.Close(); err != nil {
		t.Error(err)
	}
	if u := wait(t, j); len(u) != 1 || u[0].Finish != engine.FinishAbort || len(u[0].Tokens) != 0 {
		t.Errorf("ends with %+v", u)
	}
	if err := e.Run(t.Context()); err != nil {
		t.Errorf("Run of a closed engine: %v", err)
	}
}

func TestLostDeviceEndsEverything(t *testing.T) {
	n, m := open(t, nil)
	stop := run(t, n)
	j, err := n.Engine().Submit(t.Context(), engine.Request{Prompt: prompt(0, 5, n.Info().Config.Vocab), Params: params(200)})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := j.Next(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := m.Lose(0); err != nil {
		t.Fatal(err)
	}
	for err = nil; err == nil; {
		_, err = j.Next(t.Context())
	}
	if errors.Is(err, io.EOF) || !errors.Is(err, device.ErrLost) {
		t.Errorf("the request ends with %v", err)
	}
	if err := stop(); !errors.Is(err, device.ErrLost) {
		t.Errorf("the loop ends with %v", err)
	}
	if _, err := n.Engine().Submit(t.Context(), engine.Request{Prompt: []int32{1}, Params: params(1)}); !errors.Is(err, engine.ErrStopped) {
		t.Errorf("submit afterwards: %v", err)
	}
}

func TestBadRequests(t *testing.T) {
	n, _ := open(t, func(s *configs.Settings) {
		s.Model.Name = fixtures.Dir(t, "mixtral")
		s.KV.NumGPUBlocksOverride, s.KV.MaxModelLen = 4, 60
	})
	for _, c := range []struct {
		name   string
		change func(*engine.Request)
		is     error
		says   string
	}{
		{"no prompt", func(r *engine.Request) { r.Prompt = nil }, engine.ErrBadRequest, "no tokens"},
		{"unknown id", func(r *engine.Request) { r.Prompt = []int32{1, 512} }, engine.ErrBadRequest, "token 1 has id 512, the vocabulary is 0 to 511"},
		{"unknown id of a tokenizer", func(r *engine.Request) { r.Prompt, r.Encoded = []int32{512}, true }, engine.ErrBadRequest, "511; the tokenizer does not match the model"},
		{"too long", func(r *engine.Request) { r.Prompt = make([]int32, 60) }, engine.ErrPromptTooLong, "maximum model length is 60"},
		{"max_tokens", func(r *engine.Request) { r.Params.MaxTokens = -1 }, engine.ErrBadRequest, "max_tokens"},
		{"min_tokens", func(r *engine.Request) { r.Params.MinTokens = 17 }, engine.ErrBadRequest, "min_tokens"},
		{"temperature", func(r *engine.Request) { r.Params.Temperature = float32(math.NaN()) }, engine.ErrBadRequest, "temperature"},
		{"top_p", func(r *engine.Request) { r.Params.TopP = 0 }, engine.ErrBadRequest, "top_p"},
		{"top_k", func(r *engine.Request) { r.Params.TopK = -1 }, engine.ErrBadRequest, "top_k"},
		{"min_p", func(r *engine.Request) { r.Params.MinP = 1.1 }, engine.ErrBadRequest, "min_p"},
		{"repetition", func(r *engine.Request) { r.Params.RepetitionPenalty = 0 }, engine.ErrBadRequest, "repetition_penalty"},
		{"presence", func(r *engine.Request) { r.Params.PresencePenalty = 3 }, engine.ErrBadRequest, "presence_penalty"},
		{"frequency", func(r *engine.Request) { r.Params.FrequencyPenalty = -3 }, engine.ErrBadRequest, "frequency_penalty"},
		{"bias", func(r *engine.Request) { r.Params.LogitBias = map[int32]float32{512: 1} }, engine.ErrBadRequest, "logit_bias"},
		{"stop", func(r *engine.Request) { r.Params.Stop = []string{""} }, engine.ErrBadRequest, "stop"},
		{"stop ids", func(r *engine.Request) { r.Params.StopIDs = []int32{-1} }, engine.ErrBadRequest, "stop_token_ids"},
		{"n", func(r *engine.Request) { r.Params.N = 0 }, engine.ErrBadRequest, "n is 0"},
		{"top_logprobs", func(r *engine.Request) { r.Params.TopLogProbs = 21 }, engine.ErrBadRequest, "top_logprobs"},
		{"prompt_logprobs", func(r *engine.Request) { r.Params.TopPromptLogProbs = 21 }, engine.ErrBadRequest, "prompt_logprobs"},
		{"too long without a completion", func(r *engine.Request) { r.Prompt, r.Params.MaxTokens = make([]int32, 61), 0 }, engine.ErrPromptTooLong, "maximum model length is 60"},
		{"allowed ids", func(r *engine.Request) { r.Params.AllowedIDs = []int32{512} }, engine.ErrBadRequest, "allowed_token_ids is 512"},
		{"a bad word of nothing", func(r *engine.Request) { r.Params.BadWords = [][]int32{{}} }, engine.ErrBadRequest, "bad_words is a word of 0 tokens"},
		{"a bad word of unknown ids", func(r *engine.Request) { r.Params.BadWords = [][]int32{{1, 512}} }, engine.ErrBadRequest, "bad_words is with token 512"},
	} {
		r := engine.Request{Prompt: []int32{1, 2}, Params: engine.DefaultParams()}
		c.change(&r)
		_, err := n.Engine().Submit(t.Context(), r)
		if !errors.Is(err, c.is) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v, want %v that says %q", c.name, err, c.is, c.says)
		}
	}
}

// encode is the text's ids.
func encode(t testing.TB, tok tokenizer.Tokenizer, text string, special bool) []int32 {
	t.Helper()
	ids, err := tok.Encode(text, special)
	if err != nil {
		t.Fatal(err)
	}
	return ids
}
