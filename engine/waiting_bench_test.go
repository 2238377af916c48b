package engine_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/engine/scheduler"
	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/kvcache/offload"
	"github.com/moeserve/moeserve/pipeline"
)

// idleStepper runs steps that compute nothing: what is left is the engine's own time.
type idleStepper struct{ sampled []int32 }

func (s *idleStepper) Discard(context.Context) error { return nil }

func (s *idleStepper) Step(_ context.Context, step *pipeline.Step) (pipeline.Result, error) {
	s.sampled = s.sampled[:0]
	for i := range step.Sequences {
		if step.Sequences[i].LogitRows > 0 {
			s.sampled = append(s.sampled, int32(i))
		}
	}
	return pipeline.Result{Sampled: s.sampled}, nil
}

// BenchmarkHit is what the engine does for a request of one token whose prefix is in the GPU's
// memory, from Submit to its end.
func BenchmarkHit(b *testing.B) {
	for _, tokens := range []int{4096, 32000} {
		b.Run(fmt.Sprintf("tokens=%d", tokens), func(b *testing.B) {
			e := newEngine(b, engine.Options{
				Pipeline: &idleStepper{}, KV: cache(b, 2*tokens/16), PrefixCaching: true,
				MaxModelLen: tokens + 2, MaxNumBatchedTokens: tokens + 1, Vocab: 1 << 15,
			})
			r := []engine.Request{{Prompt: prompt(1, tokens+1, 1<<15), Params: params(1)}}
			run := func() {
				if _, err := e.Generate(b.Context(), r, nil); err != nil {
					b.Fatal(err)
				}
			}
			run()
			b.ReportAllocs()
			for b.Loop() {
				run()
			}
			if s := e.State(); s.PrefixCacheHits != int64(b.N)*int64(tokens) {
				b.Errorf("%d tokens found", s.PrefixCacheHits)
			}
		})
	}
}

// endless is a tier that has the first blocks of every sequence, and whose loads do not end.
type endless struct {
	engine.Offloader
	blocks  int
	loading map[kvcache.Key]bool
}

func (t *endless) Lookup(keys []kvcache.Key, from, _ int) (blocks int, wait bool) {
	if len(keys) < t.blocks {
		return 0, false
	}
	for i := from; i < t.blocks; i++ {
		if t.loading[keys[i]] {
			return i - from, true
		}
	}
	return max(0, t.blocks-from), false
}

func (t *endless) OnItsWay(keys []kvcache.Key, i int) bool { return t.loading[keys[i]] }

func (t *endless) Load(_ int64, keys []kvcache.Key, from int, dst []int32) error {
	for i := range dst {
		t.loading[keys[from+i]] = true
	}
	return nil
}

func (*endless) Factor() int                                      { return 1 }
func (*endless) Store([]kvcache.Key, int, []int32, offload.Cause) {}
func (*endless) Poll() []offload.Loaded                           { return nil }
func (*endless) OnLost(func())                                    {}
func (*endless) Busy() bool                                       { return false }
func (*endless) Drop([]kvcache.Key)                               {}
func (*endless) Computed(int, float64)                            {}

// BenchmarkWaiting is what the engine does in a decode step of 32 sequences while 1,024 prompts of
// 8,192 tokens wait: for room, or for KV blocks that are being loaded. All begin with the same 4,000
// tokens, which are in the GPU's memory.
func BenchmarkWaiting(b *testing.B) {
	for _, reason := range []string{"none", "room", "load"} {
		for _, order := range []scheduler.Order{scheduler.FCFS, scheduler.Fair} {
			b.Run(fmt.Sprintf("for=%s/%v", reason, order), func(b *testing.B) {
				b.ReportAllocs()
				left := 0
				var e *engine.Engine
				for b.Loop() {
					if left == 0 {
						b.StopTimer()
						e, left = crowded(b, reason, order), 100
						b.StartTimer()
					}
					if _, err := engine.Turn(e, b.Context()); err != nil {
						b.Fatal(err)
					}
					left--
				}
			})
		}
	}
}

// crowded is an engine of BenchmarkWaiting, whose sequences go on for 100 steps.
func crowded(b *testing.B, reason string, order scheduler.Order) *engine.Engine {
	const tokens, same, running, waiting = 8192, 4000, 32, 1024
	o := engine.Options{
		Pipeline: &idleStepper{}, KV: cache(b, (same+running*(tokens-same))/16), PrefixCaching: true, MaxNumSeqs: 2 * waiting, MaxModelLen: tokens,
		MaxNumBatchedTokens: running * tokens, Vocab: 1 << 15, Scheduling: scheduler.Policy{Order: order, Granularity: 1000},
	}
	if reason == "load" {
		o.Offload = &endless{blocks: 500, loading: map[kvcache.Key]bool{}}
	}
	e := newEngine(b, o)
	submit := func(i, length, n int) {
		p := append(prompt(0, same, 1<<15), prompt(i, length-same, 1<<15)...)
		if _, err := e.Submit(b.Context(), engine.Request{Prompt: p, Params: params(n)}); err != nil {
			b.Fatal(err)
		}
	}
	turn := func() {
		if _, err := engine.Turn(e, b.Context()); err != nil {
			b.Fatal(err)
		}
	}
	length := same + 8
	if reason == "room" {
		length = tokens - 120 // so that few blocks are left for others
	}
	submit(0, length, 119)
	turn() // the others find what it has computed
	for i := range running - 1 {
		submit(1+i, length, 118)
	}
	turn()
	for i := range waiting {
		switch reason {
		case "room":
			submit(running+i, tokens-100, 99)
		case "load": // all wait for what the first of them loads
			submit(running, tokens-100, 99)
		}
	}
	turn()
	turn()
	if s := e.State(); s.Running != running || reason != "none" && s.Waiting < waiting-1 {
		b.Fatalf("%+v", s)
	}
	return e
}
