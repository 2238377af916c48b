package bench_test

import (
	"context"
	"testing"
	"time"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/eval/fairness"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/node/bench"
)

// TestFairness: with more sequences than the KV cache holds, fair scheduling gives them more alike
// rates, and short ones their first token sooner; less is computed again where tiers keep what was
// preempted. Requests have all their tokens, the same ones, at times of the virtual clock.
func TestFairness(t *testing.T) {
	o := fairness.Options{
		Lines: fairness.Lines([]int{16}, []fairness.Tier{fairness.None, fairness.Host, fairness.Peer}),
		Long:  6, LongTokens: 96, Short: 8, ShortTokens: 8, PromptTokens: 16, Interval: 10 * time.Millisecond,
		Open: func(ctx context.Context, l fairness.Line) (fairness.Engine, error) {
			s := configs.Defaults()
			s.Device.Emulate = "virtual,hbm=256MiB,pcie=55.3MB/s,nvlink=395MB/s,flops=78G,bw=3.9GB/s"
			s.Batch.SchedulingPolicy, s.KV.MaxModelLen, s.KV.NumGPUBlocksOverride = l.Policy, 112, 14
			switch l.Tier {
			case fairness.Host:
				s.KV.TransferConfig = `{"kv_connector_extra_config": {"num_cpu_blocks": 200}}`
			case fairness.Peer:
				s.KV.TransferConfig = `{"kv_connector_extra_config": {"num_gpu_blocks": 200}}`
			}
			if l.Granularity > 0 {
				s.Batch.FairGranularity = l.Granularity
			}
			return bench.OpenFairness(node.Options{Settings: s}, nil, func(o node.Options) (*node.Node, error) { return node.Open(ctx, o) })
		},
	}
	var r fairness.Result
	if err := fairness.Measure(t.Context(), o, &r); err != nil {
		t.Fatal(err)
	}
	for i := 0; i < len(r.Points); i += 2 {
		fcfs, fair := r.Points[i], r.Points[i+1]
		if fair.TokensSHA256 == "" || fair.TokensSHA256 != r.Points[0].TokensSHA256 || fcfs.TokensSHA256 != fair.TokensSHA256 {
			t.Errorf("%s: tokens %q and %q, and %q first", fair.Tier, fcfs.TokensSHA256, fair.TokensSHA256, r.Points[0].TokensSHA256)
		}
		if fair.Preemptions == 0 || fair.Jain < 1.2*fcfs.Jain || 2*fair.ShortTTFT99 > fcfs.ShortTTFT99 {
			t.Errorf("%s: fcfs %+v\nfair %+v", fair.Tier, fcfs, fair)
		}
	}
	if none, peer := r.Points[1], r.Points[5]; 2*peer.RecomputedTokens > none.RecomputedTokens || peer.OutputThroughput < none.OutputThroughput {
		t.Errorf("without a tier %+v\nwith peers %+v", none, peer)
	}
}
