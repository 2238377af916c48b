package engine_test

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/pipeline"
)

// clocked runs steps that compute nothing, in which readers take what the step before has
// brought them. It sums up the time between its steps.
type clocked struct {
	sampled []int32
	jobs    []*engine.Job
	unread  int // tokens of the step before
	between time.Duration
	ended   time.Time
}

func (s *clocked) Discard(context.Context) error { return nil }

func (s *clocked) Step(_ context.Context, step *pipeline.Step) (pipeline.Result, error) {
	if !s.ended.IsZero() {
		s.between += time.Since(s.ended)
	}
	s.sampled = s.sampled[:0]
	for i := range step.Sequences {
		if step.Sequences[i].LogitRows > 0 {
			s.sampled = append(s.sampled, int32(i))
		}
	}
	for s.unread > 0 {
		for _, j := range s.jobs {
			s.unread -= engine.Read(j)
		}
		runtime.Gosched()
	}
	s.unread = len(s.sampled)
	s.ended = time.Now()
	return pipeline.Result{Sampled: s.sampled}, nil
}

// BenchmarkBetweenSteps is what the engine does between one decode step and the next,
// while the device has nothing to do.
func BenchmarkBetweenSteps(b *testing.B) {
	for _, c := range []struct {
		sequences int
		caching   bool
	}{{1, false}, {1, true}, {324, false}, {324, true}, {4536, false}, {4536, true}} {
		b.Run(fmt.Sprintf("sequences=%d/caching=%v", c.sequences, c.caching), func(b *testing.B) {
			const length = 2048
			step := &clocked{}
			sequences := c.sequences
			e := newEngine(b, engine.Options{
				Pipeline: step, KV: cache(b, sequences*length/16), PrefixCaching: c.caching,
				MaxModelLen: length, MaxNumSeqs: sequences, MaxNumBatchedTokens: 8192, Vocab: 1 << 15,
			})
			ctx, cancel := context.WithCancel(b.Context())
			b.ReportAllocs()
			steps := 0
			for b.Loop() {
				if steps == 0 {
					b.StopTimer()
					// Those before may have some steps to go.
					step.jobs = slices.Clone(step.jobs[max(0, len(step.jobs)-sequences):])
					for range sequences {
						p := params(length - 16)
						j, err := e.Submit(ctx, engine.Request{Prompt: prompt(len(step.jobs), 16, 1<<15), Params: p})
						if err != nil {
							b.Fatal(err)
						}
						step.jobs = append(step.jobs, j)
					}
					steps = length - 16
					if _, err := engine.Turn(e, ctx); err != nil {
						b.Fatal(err)
					}
					steps--
					step.ended = time.Time{}
					b.StartTimer()
				}
				if _, err := engine.Turn(e, ctx); err != nil {
					b.Fatal(err)
				}
				steps--
			}
			b.ReportMetric(float64(step.between.Nanoseconds())/float64(b.N), "ns-between/op")
			cancel()
		})
	}
}
