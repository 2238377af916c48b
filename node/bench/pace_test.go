package bench_test

import (
	"context"
	"testing"
	"time"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/eval/fairness"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/node/bench"
	"github.com/moeserve/moeserve/tools/racedetector"
)

// TestMaxITL: a whole engine, on a virtual clock with an H200's rates. Prompts of 1,024 tokens come
// while other sequences decode. By default they lengthen the time between two tokens to about twice what it
// is without them, with a bound to less than that, and without either to several times as much; the
// throughput is the same, and so are prompts computed once.
func TestMaxITL(t *testing.T) {
	if racedetector.Enabled {
		t.Skip("it compares latencies on a virtual clock; TestFairness runs engines in the same way")
	}
	measure := func(itl string) fairness.Point {
		o := fairness.Options{
			Lines: fairness.Lines(nil, []fairness.Tier{fairness.None}),
			Long:  48, LongTokens: 128, Short: 48, ShortTokens: 128, PromptTokens: 1024, Interval: 30 * time.Millisecond,
			Open: func(ctx context.Context, _ fairness.Line) (fairness.Engine, error) {
				s := configs.Defaults()
				s.Device.Emulate = "virtual,nodata,hbm=141GB,host=128GiB,pcie=55.3GB/s,flops=800T,bw=4.6TB/s"
				s.Model.Name, s.Model.LoadFormat, s.Batch.MaxITL, s.Batch.MaxNumBatchedTokens = "qwen1.5-moe-a2.7b", configs.LoadDummy, itl, 8192
				s.KV.NumGPUBlocksOverride, s.Batch.MaxNumSeqs = 8000, 96
				return bench.OpenFairness(node.Options{Settings: s, WithoutTokenizer: true}, nil, func(o node.Options) (*node.Node, error) { return node.Open(ctx, o) })
			},
		}
		var r fairness.Result
		if err := fairness.Measure(t.Context(), o, &r); err != nil {
			t.Fatal(err)
		}
		p := r.Points[0]
		t.Logf("--max-itl %s: TPOT p50 %.1f ms, ITL p99 %.1f ms, longest %.1f ms, TTFT p99 %.0f ms, %.0f tokens/s", itl, 1e3*p.TPOT50, 1e3*p.ITL99, 1e3*p.ITLMax, 1e3*p.TTFT99, p.OutputThroughput)
		if p.Preemptions > 0 || p.RecomputedTokens != 0 {
			t.Errorf("--max-itl %s: %d preemptions, %d tokens computed again", itl, p.Preemptions, p.RecomputedTokens)
		}
		return p
	}
	off, auto, bound := measure("off"), measure("auto"), measure("18ms")
	if off.ITL99 < 2*auto.ITL99 || auto.ITL99 > 2.6*auto.TPOT50 || bound.ITLMax > 0.018 {
		t.Error("the bounds do not hold, or nothing needs them")
	}
	if auto.OutputThroughput < 0.97*off.OutputThroughput || bound.OutputThroughput < 0.95*off.OutputThroughput {
		t.Error("the bounds cost throughput")
	}
}
