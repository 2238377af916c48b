package bench_test

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/eval/fairness"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/node/bench"
)

// TestFairness: with more sequences than the KV cache holds, fair scheduling gives them more alike
// rates, and short ones their first token sooner. Requests have all their tokens, at times of the
// virtual clock, which are the same in each run.
func TestFairness(t *testing.T) {
	o := fairness.Options{
		Lines: fairness.Lines([]int{16}, []fairness.Tier{fairness.None}),
		Long:  6, LongTokens: 96, Short: 8, ShortTokens: 8, PromptTokens: 16, Interval: 10 * time.Millisecond,
		Open: func(ctx context.Context, l fairness.Line) (fairness.Engine, error) {
			s := configs.Defaults()
			s.Device.Emulate = "virtual,hbm=256MiB,flops=78G,bw=3.9GB/s"
			s.Batch.SchedulingPolicy, s.KV.MaxModelLen, s.KV.NumGPUBlocksOverride = l.Policy, 112, 14
			if l.Granularity > 0 {
				s.Batch.FairGranularity = l.Granularity
			}
			return bench.OpenFairness(node.Options{Settings: s}, nil, func(o node.Options) (*node.Node, error) { return node.Open(ctx, o) })
		},
	}
	var runs [2]fairness.Result
	for i := range runs {
		if err := fairness.Measure(t.Context(), o, &runs[i]); err != nil {
			t.Fatal(err)
		}
	}
	if !slices.Equal(runs[0].Points, runs[1].Points) {
		t.Errorf("%+v\n%+v", runs[0].Points, runs[1].Points)
	}
	fcfs, fair := runs[0].Points[0], runs[0].Points[1]
	if fair.TokensSHA256 == "" || fair.TokensSHA256 != fcfs.TokensSHA256 {
		t.Errorf("tokens %q and %q", fcfs.TokensSHA256, fair.TokensSHA256)
	}
	if fair.Preemptions == 0 || fair.Jain < 1.2*fcfs.Jain || 2*fair.ShortTTFT99 > fcfs.ShortTTFT99 {
		t.Errorf("fcfs %+v\nfair %+v", fcfs, fair)
	}
}
