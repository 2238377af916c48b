package eval_test

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/eval"
	"github.com/moeserve/moeserve/planner"
)

// fake is a node whose every step takes a time that the test knows.
type fake struct {
	now           time.Duration
	prefill, step time.Duration
	// fetched by each prefill and each step, from the host.
	bytes  int64
	counts eval.Counts
	closed bool
	// drift is added to all tokens of each later prefill.
	drift int32
	log   *[]string
	name  string
	// attention is where it runs. Default: gpu.
	attention configs.Place
	// onDemand and cpuExperts: see eval.Info.
	onDemand   int
	cpuExperts float64
	// alone: the hardware has no peers. otherHardware: it is not what is measured.
	alone, otherHardware bool
	// stepped, if set, is called after each step.
	stepped func()
}

func (f *fake) Info() eval.Info {
	peers, link := int64(1<<30), 1e9
	if f.alone {
		peers, link = 0, 0
	}
	return eval.Info{
		Model: "fake", DType: "bfloat16", KeepsData: true,
		MicroBatchTokens: 2, StepTokens: 64, Attention: f.attention, OnDemandTokens: f.onDemand, CPUExperts: f.cpuExperts,
		Shape: planner.Model{
			Name: "fake", Layers: 4, Hidden: 64, Heads: 4, KVHeads: 2, HeadDim: 16,
			Experts: 8, TopK: 2, ExpertWidth: 128, Vocab: 100,
		},
		Machine: eval.Machine{
			Device: "none", Emulated: true, Emulation: &eval.Emulation{Spec: "virtual", Rates: eval.RatesVirtual},
			Hardware: &eval.Hardware{Comparable: !f.otherHardware, Hardware: planner.Hardware{
				Name: "fake", GPUMemory: 1 << 30, GPUMemoryRate: 1e9, GPUFlops: 1e12, GPUAttentionFlops: 1e12,
				HostMemory: 1 << 30, HostMemoryRate: 1e9, CPUFlops: 1e9, HostToGPU: []float64{1e8}, GPUToHost: 1e8,
				PeerMemory: peers, PeerToGPU: link, Sources: map[string]string{"host_to_gpu_bytes_per_s": "made up"},
			}},
		},
	}
}

func (f *fake) Batch(prompts [][]int32, newTokens int) (eval.Batch, error) {
	return &fakeBatch{f: f, tokens: make([][]int32, len(prompts))}, nil
}

func (f *fake) Counts(context.Context) (eval.Counts, error) {
	c := f.counts
	c.Hits, c.Misses = 3*c.FetchedHost, c.FetchedHost
	c.Stalls = map[string]float64{"router-sync": float64(c.FetchedHost) / 100, "never": 0}
	c.RoutedTokens = [][]int64{slices.Clone(f.counts.RoutedTokens[0]), slices.Clone(f.counts.RoutedTokens[1])}
	return c, nil
}

func (f *fake) Now() time.Duration { return f.now }

func (f *fake) Close() error {
	f.closed = true
	return nil
}

type fakeBatch struct {
	f        *fake
	tokens   [][]int32
	prefills int32
}

func (b *fakeBatch) say(format string, args ...any) {
	if b.f.log != nil {
		*b.f.log = append(*b.f.log, b.f.name+" "+fmt.Sprintf(format, args...))
	}
}

func (b *fakeBatch) Prefill(context.Context) error {
	b.say("prefill")
	b.f.now += b.f.prefill
	b.f.counts.FetchedHost += b.f.bytes
	for i := range b.tokens {
		b.tokens[i] = append(b.tokens[i][:0], int32(i)+b.f.drift*b.prefills)
	}
	b.prefills++
	return nil
}

// Decode routes each token to expert 0 of the first layer, and to 0 or 1 of the second.
func (b *fakeBatch) Decode(ctx context.Context, from, to int) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	b.say("decode %d to %d", from, to)
	for at := from; at < to; at++ {
		b.f.now += b.f.step
		b.f.counts.FetchedHost += b.f.bytes
		if b.f.stepped != nil {
			b.f.stepped()
		}
		for i := range b.tokens {
			b.tokens[i] = append(b.tokens[i][:at], b.tokens[i][at-1]+1)
			b.f.counts.RoutedTokens[0][0]++
			b.f.counts.RoutedTokens[1][i%2]++
		}
	}
	return nil
}

func (b *fakeBatch) Tokens() [][]int32 { return b.tokens }
func (b *fakeBatch) Close()            { b.say("closed") }

func newFake(name string, step time.Duration, log *[]string) *fake {
	return &fake{
		name: name, prefill: 2 * time.Second, step: step, bytes: 10, log: log,
		counts: eval.Counts{RoutedTokens: [][]int64{make([]int64, 8), make([]int64, 8)}, PeakBytes: 77},
	}
}
