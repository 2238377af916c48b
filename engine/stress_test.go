package engine_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/engine/scheduler"
	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/models/tiny"
	"github.com/moeserve/moeserve/models/tokenizer"
	"github.com/moeserve/moeserve/pipeline"
)

var errDies = fmt.Errorf("%w: it fell off the bus", pipeline.ErrDeviceLost)

// drawing steps play attention: the memory of the KV blocks has a word for each token, made of
// all tokens before it, and what they draw depends on the words of all their sequence's
// positions. With a source of randomness some steps fail so that they may be run again. Step 60
// ends with what end says, if it is given.
type drawing struct {
	errorf func(format string, args ...any)
	random *rand.Rand
	count  steps
	steps  int
	end    func() error
	kv     *kvcache.Manager
	memory []word
	// ahead, if set, says whether to compute the step behind a step that allows it at once. enqueued is that step.
	// What it writes to the blocks that it found is there at once, and is written again until the engine has asked for it.
	ahead    *rand.Rand
	enqueued []aheadWrite
}

// aheadWrite is one sequence of a step ahead: its word, for a place in memory, and the token that it draws.
type aheadWrite struct {
	q      pipeline.Sequence
	at     int
	word   word
	sample int32
}

// word is what the memory of the KV blocks has of one token.
type word struct {
	hash uint64
	// long: by which of longrope's factors it was made.
	written, long bool
}

func newDrawing(t *testing.T, kv *kvcache.Manager) *drawing {
	return &drawing{errorf: t.Errorf, kv: kv, memory: make([]word, kv.Capacity())}
}

// mix adds a word to the hash of those before it.
func mix(hash, word uint64) uint64 {
	hash = (hash ^ word) * 0x9E3779B97F4A7C15
	return hash ^ hash>>29
}

// attend computes the tokens of q, and returns the hash of all its words.
func (d *drawing) attend(q *pipeline.Sequence) (hash uint64) {
	size, blocks := d.kv.BlockTokens(), q.Table.Blocks()
	for p := range q.Start + len(q.Tokens) {
		w := &d.memory[int(blocks[p/size])*size+p%size]
		if p >= q.Start {
			*w = word{mix(hash, uint64(q.Tokens[p-q.Start])+1), true, q.Long}
		} else if !w.written || w.long != q.Long {
			d.errorf("position %d of %d, long factors: %v, is %+v", p, q.Start, q.Long, *w)
		}
		hash = mix(hash, w.hash)
	}
	return hash
}

// longAfter is longrope's boundary.
const longAfter = 40

func (d *drawing) Step(ctx context.Context, s *pipeline.Step) (pipeline.Result, error) {
	r, ok := d.collect(s)
	if !ok {
		var err error
		if r, err = d.step(ctx, s); err != nil {
			return r, err
		}
	}
	d.computeAhead(s, &r)
	if s.Meanwhile != nil && d.ahead != nil {
		s.Meanwhile()
	}
	return r, ctx.Err()
}

// collect returns the result of a step that is enqueued, if s is of it. Else that is discarded.
func (d *drawing) collect(s *pipeline.Step) (r pipeline.Result, ok bool) {
	enqueued := d.enqueued
	_ = d.Discard(context.Background())
	at := 0
	for i := range s.Sequences {
		q := &s.Sequences[i]
		for at < len(enqueued) && enqueued[at].q.Table != q.Table {
			at++
		}
		if at == len(enqueued) || q.Start != enqueued[at].q.Start || !slices.Equal(q.Tokens, enqueued[at].q.Tokens) || q.Long != enqueued[at].q.Long {
			return r, false
		}
		r.Sampled = append(r.Sampled, enqueued[at].sample)
		at++
	}
	return r, true
}

// Discard implements engine.Stepper.
func (d *drawing) Discard(context.Context) error {
	for _, w := range d.enqueued {
		d.memory[w.at] = w.word
	}
	d.enqueued = nil
	return nil
}

// computeAhead computes the step behind s, if it may, and some of the time.
func (d *drawing) computeAhead(s *pipeline.Step, r *pipeline.Result) {
	if d.ahead == nil || !s.Ahead || d.ahead.IntN(4) == 0 {
		return
	}
	size := d.kv.BlockTokens()
	for i := range s.Sequences {
		q := s.Sequences[i]
		q.Start, q.Tokens = q.Start+1, []int32{r.Sampled[i]}
		hash, blocks := d.attend(&q), q.Table.Blocks()
		at := int(blocks[q.Start/size])*size + q.Start%size
		d.enqueued = append(d.enqueued, aheadWrite{q, at, d.memory[at], d.draw(&q, hash)})
	}
	r.Ahead = true
}

// draw is the token that a sequence samples.
func (d *drawing) draw(q *pipeline.Sequence, hash uint64) int32 {
	return rand.New(rand.NewPCG(q.SamplingParams.Seed<<8+uint64(q.SamplingParams.Sample), hash)).Int32N(250) + 3
}

func (d *drawing) step(ctx context.Context, s *pipeline.Step) (pipeline.Result, error) {
	if d.random != nil {
		defer d.count.step()
		for range d.random.IntN(20) {
			runtime.Gosched()
		}
		if d.random.IntN(8) == 0 {
			return pipeline.Result{}, pipeline.ErrStepFailed
		}
	}
	if d.steps++; d.steps == 60 && d.end != nil {
		if err := d.end(); err != nil {
			return pipeline.Result{}, err
		}
	}
	size := d.kv.BlockTokens()
	for _, c := range s.Copies {
		copy(d.memory[int(c.Dst)*size:int(c.Dst+1)*size], d.memory[int(c.Src)*size:int(c.Src+1)*size])
	}
	var r pipeline.Result
	for i := range s.Sequences {
		q := &s.Sequences[i]
		at := q.Start + len(q.Tokens)
		if at > longAfter && !q.Long {
			d.errorf("tokens %d to %d have the short factors", q.Start, at)
		}
		hash := d.attend(q)
		if q.LogitRows == 0 {
			continue
		}
		id := d.draw(q, hash)
		r.Sampled = append(r.Sampled, id)
		r.LogProbs = append(r.LogProbs, pipeline.LogProb{Sampled: -float32(id), TopIDs: []int32{id, id + 1}, Top: []float32{-1, -float32(at)}})
	}
	return r, ctx.Err()
}

// TestEveryUpdateOnceInOrder: whatever happens to an engine and to its requests, each reader
// has what the request brings alone, from its start, once and in order, and then its end.
func TestEveryUpdateOnceInOrder(t *testing.T) {
	files := map[string][]byte{}
	for _, name := range []string{"tokenizer.json", "tokenizer_config.json"} {
		b, err := fs.ReadFile(tiny.FS(), name)
		if err != nil {
			t.Fatal(err)
		}
		files[name] = b
	}
	tok, err := tokenizer.Parse(files["tokenizer.json"], files["tokenizer_config.json"])
	if err != nil {
		t.Fatal(err)
	}
	const length, requests = 96, 80
	options := engine.Options{Tokenizer: tok, MaxModelLen: length, MaxNumBatchedTokens: 60, MaxNumSeqs: 24, LongAfter: longAfter, Vocab: 256}
	var rs []engine.Request
	random := rand.New(rand.NewPCG(1, 2))
	for i := range requests {
		p := params(1 + random.IntN(60))
		p.Seed, p.N = uint64(i), 1+random.IntN(4)
		if i%3 == 0 {
			p.Stop = []string{"e", "th", " a"}[:1+random.IntN(3)]
			p.IncludeStop = i%2 == 0
		}
		if i%4 == 0 {
			p.StopIDs = []int32{random.Int32N(250) + 3, random.Int32N(250) + 3, random.Int32N(250) + 3}
		}
		if i%5 == 0 {
			p.LogProbs, p.TopLogProbs = true, 2
		}
		r := engine.Request{ID: fmt.Sprint(i), Prompt: prompt(i%6, 1+random.IntN(length/2-12), 250), Params: p}
		if i%7 == 0 {
			r.CacheSalt = "a"
		}
		rs = append(rs, r)
	}
	roomy := options
	roomy.KV = smallBlocks(t, 256)
	roomy.Pipeline = newDrawing(t, roomy.KV)
	e := newEngine(t, roomy)
	var want [][]engine.Output
	reasons := map[engine.FinishReason]int{}
	for _, r := range rs {
		o, err := e.Generate(t.Context(), []engine.Request{r}, nil)
		if err != nil {
			t.Fatal(err)
		}
		want = append(want, o)
		for i := range o {
			reasons[o[i].FinishReason]++
		}
	}
	if reasons[engine.FinishStop] < 10 || reasons[engine.FinishLength] < 10 {
		t.Fatalf("the requests end with %v", reasons)
	}
	for _, c := range []struct {
		ends    string
		caching bool
		factor  int // blocks in a block of another tier; 0: none
		policy  scheduler.Policy
	}{
		{"stopped", false, 0, scheduler.Policy{}},
		{"stopped", true, 0, scheduler.Policy{}},
		{"stopped", false, 0, scheduler.Policy{Order: scheduler.Fair, Granularity: 5}},
		{"stopped", true, 0, scheduler.Policy{Order: scheduler.Fair, Granularity: 5}},
		{"stopped", true, 0, scheduler.Policy{Order: scheduler.ByPriority}},
		{"canceled", true, 0, scheduler.Policy{}},
		{"dead", true, 0, scheduler.Policy{}},
		{"stopped", true, 1, scheduler.Policy{}},
		{"stopped", false, 1, scheduler.Policy{}},
		{"stopped", true, 2, scheduler.Policy{}},
		{"stopped", false, 1, scheduler.Policy{Order: scheduler.Fair, Granularity: 5}},
		{"canceled", true, 2, scheduler.Policy{}},
		{"canceled", true, 1, scheduler.Policy{Order: scheduler.Fair, Granularity: 1}},
		{"dead", false, 1, scheduler.Policy{}},
	} {
		ends := c.ends
		t.Run(fmt.Sprintf("%s, caching: %v, factor %d, %v", ends, c.caching, c.factor, c.policy.Order), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				o := options
				o.KV, o.PrefixCaching, o.Scheduling = smallBlocks(t, 80), c.caching, c.policy
				step := newDrawing(t, o.KV)
				step.random = rand.New(rand.NewPCG(3, 4))
				var tiers *memoryTiers
				if c.factor > 0 {
					tiers = newMemoryTiers(step, c.factor)
					tiers.random, tiers.turns = rand.New(rand.NewPCG(5, 6)), 5*c.factor
					o.Offload = tiers
				}
				switch ends {
				case "canceled":
					step.end = func() error { cancel(); return nil }
				case "dead":
					step.end = func() error { return errDies }
				}
				var mu sync.Mutex
				finished := map[string]engine.RequestInfo{}
				o.Pipeline = step
				o.Listener = engine.Listener{StepFinished: func(engine.StepInfo) {}, RequestFinished: func(i engine.RequestInfo) {
					mu.Lock()
					defer mu.Unlock()
					if _, again := finished[i.ID]; again {
						t.Errorf("request %s ends twice", i.ID)
					}
					finished[i.ID] = i
				}}
				e := newEngine(t, o)
				ran := make(chan error, 1)
				go func() { ran <- e.Run(ctx) }()
				var readers sync.WaitGroup
				var submitted sync.Map
				for i, r := range rs {
					if c.policy.Order != scheduler.FCFS {
						r.Priority = i%5 - 2
					}
					mode := random.IntN(4)
					after := random.IntN(40)
					wait := random.IntN(60)
					readers.Go(func() {
						step.count.await(wait)
						own, drop := context.WithCancel(t.Context())
						defer drop()
						j, err := e.Submit(own, r)
						if err != nil {
							if !errors.Is(err, engine.ErrStopped) || ends == "stopped" {
								t.Error(err)
							}
							return
						}
						submitted.Store(r.ID, true)
						if mode == 0 {
							step.count.call(after, drop)
						}
						if mode == 1 && i%2 == 0 {
							return // nobody reads; dropped
						}
						got := make([]engine.Output, r.Params.N)
						at := make([]time.Time, r.Params.N)
						var first time.Time
						n := 0
						for {
							u, err := j.Next(t.Context())
							if err != nil {
								if !errors.Is(err, io.EOF) && (ends != "dead" || !errors.Is(err, errDies)) {
									t.Errorf("request %d: %v", i, err)
								}
								break
							}
							if mode == 2 {
								for range 10 {
									runtime.Gosched()
								}
							}
							s := &got[u.Sample]
							if s.FinishReason != "" {
								t.Errorf("request %d, sample %d: %+v after its end", i, u.Sample, u)
							}
							if len(u.Tokens) > 0 && u.At.Before(at[u.Sample]) || len(u.Tokens) > 0 == u.At.IsZero() {
								t.Errorf("request %d, sample %d: %+v after one at %v", i, u.Sample, u, at[u.Sample])
							}
							if at[u.Sample] = u.At; n == 0 {
								first = u.At
							}
							s.Tokens = append(s.Tokens, u.Tokens...)
							s.Text += u.Text
							s.FinishReason = u.Finish
							n += len(u.Tokens)
							if j.Usage().CompletionTokens < n {
								t.Errorf("request %d: %+v, read %d", i, j.Usage(), n)
							}
							if mode == 3 && n == after {
								drop()
							}
						}
						if u := j.Usage(); u.CompletionTokens != n {
							t.Errorf("request %d: %+v, read %d", i, u, n)
						}
						if x := j.Times(); x.Finished.IsZero() || n > 0 && (!x.FirstToken.Equal(first) || x.Admitted.After(x.FirstToken) || x.FirstToken.After(x.Finished)) {
							t.Errorf("request %d: %+v", i, x)
						}
						for k := range got {
							g, w := &got[k], &want[i][k]
							if g.FinishReason == engine.FinishAbort && (mode == 0 || mode == 3 || ends != "stopped") && len(g.Tokens) <= len(w.Tokens) {
								w = &engine.Output{Tokens: w.Tokens[:len(g.Tokens)], Text: w.Text, FinishReason: g.FinishReason}
								// Text that was held back, since a stop string could begin there, comes too.
								for _, stop := range append(r.Params.Stop, "") {
									if strings.HasPrefix(want[i][k].Text+stop, g.Text) {
										w.Text = g.Text
									}
								}
							}
							if !slices.EqualFunc(g.Tokens, w.Tokens, func(a, b engine.Token) bool {
								return a.ID == b.ID && a.LogProb == b.LogProb && slices.Equal(a.Top, b.Top)
							}) || g.Text != w.Text || g.FinishReason != w.FinishReason {
								t.Errorf("request %d, sample %d: %v %q (%s), alone %v %q (%s)", i, k, g.Tokens, g.Text, g.FinishReason, w.Tokens, w.Text, w.FinishReason)
							}
						}
					})
				}
				readers.Wait()
				if err := errors.Join(e.Close(), <-ran); ends == "dead" != errors.Is(err, errDies) || ends != "dead" && err != nil {
					t.Errorf("the loop ends with %v", err)
				}
				submitted.Range(func(id, _ any) bool {
					if i, ok := finished[id.(string)]; !ok || slices.Contains(i.Finish, "") {
						t.Errorf("request %s ended with %+v", id, i)
					}
					return true
				})
				s := e.State()
				if s.Running != 0 || s.Waiting != 0 || s.KVUsedBlocks != o.KV.Held() || o.KV.Free()+o.KV.Held() != s.KVBlocks || s.Retried == 0 {
					t.Errorf("afterwards: %+v", s)
				}
				if tiers != nil {
					if ends == "stopped" && (tiers.loaded == 0 || tiers.failed == 0 || s.ExternalHits == 0) || s.ExternalHits > s.ExternalQueries {
						t.Errorf("%d blocks were loaded, %d loads have failed: %+v", tiers.loaded, tiers.failed, s)
					}
					tiers.endAll()
					if o.KV.Free() != s.KVBlocks {
						t.Errorf("%d of %d blocks are free when all transfers have ended", o.KV.Free(), s.KVBlocks)
					}
				}
				if c.caching && ends == "stopped" && s.PrefixCacheHits == 0 || !c.caching && s.PrefixCacheHits > 0 || s.PrefixCacheHits > s.PrefixCacheQueries {
					t.Errorf("caching: %v, and %+v", c.caching, s)
				}
				t.Logf("%+v, %d finished", s, len(finished))
			})
		})
	}
}

// TestStopBeforeMinTokens: min_tokens is the minimum before an end, also by a stop string, as with vLLM.
func TestStopBeforeMinTokens(t *testing.T) {
	tok, _ := builtIn(t)
	kv := smallBlocks(t, 64)
	e := newEngine(t, engine.Options{Pipeline: newDrawing(t, kv), KV: kv, MaxModelLen: 96, Vocab: 256, LongAfter: longAfter, Tokenizer: tok})
	q := ask(1, 3, 40)
	plain, err := e.Generate(t.Context(), []engine.Request{q}, nil)
	if err != nil {
		t.Fatal(err)
	}
	text := []rune(plain[0].Text)
	q.Params.Stop, q.Params.MinTokens = []string{string(text[3:5])}, 30
	o, err := e.Generate(t.Context(), []engine.Request{q}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if n := len(o[0].Tokens); n < 30 {
		t.Errorf("a sample with min_tokens 30 ends after %d tokens by stop string %q (%s)", n, q.Params.Stop, o[0].FinishReason)
	}
}
