package pipeline

import (
	"testing"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/forward"
	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/models"
)

// TestPastReady holds micro-batches to whether another one of the same step writes keys and values that theirs
// attend to: only where a sequence is continued.
func TestPastReady(t *testing.T) {
	const block, context = 16, 40
	text, _ := configs.Preset("phi-3.5-moe")
	c, err := models.ParseConfig(text, "config.json")
	check(t, err)
	l := forward.Limits{MaxTokens: 64, MaxSeqs: 8, MaxLogits: 8, MaxModelLen: 256, BlockTokens: block}
	for name, test := range map[string]struct {
		tokens []int // of each sequence
		want   []bool
	}{
		"decodes":             {[]int{1, 1, 1, 1}, []bool{true, true}},
		"a prompt is cut":     {[]int{6, 1, 1}, []bool{true, false}},
		"a prompt fits":       {[]int{4, 2, 2}, []bool{true, true}},
		"the last one is cut": {[]int{1, 7}, []bool{true, false}},
	} {
		t.Run(name, func(t *testing.T) {
			o := Options{Limits: l, MicroBatches: 2}
			batches := newBatcher(&o, func() forward.HostBatch { return forward.NewHostBatch(c, l) })
			kv, err := kvcache.NewManager(kvcache.ManagerOptions{Blocks: 64, BlockTokens: block})
			check(t, err)
			split := func(tokens ...int) {
				step, total := &Step{}, 0
				for _, n := range tokens {
					table := kv.NewTable()
					reserve(t, table, context+n)
					step.Sequences = append(step.Sequences, Sequence{Tokens: make([]int32, n), Start: context, Table: table, LogitRows: 1})
					total += n
				}
				check(t, batches.split(step, total, &Shape{MicroBatches: 2}))
			}
			split(8) // is cut, which must not count for the next step
			split(test.tokens...)
			if len(batches.used()) != len(test.want) {
				t.Fatalf("%d micro-batches, want %d", len(batches.used()), len(test.want))
			}
			for i := range batches.used() {
				batch, _, err := batches.all[i].host.Pack(make([]byte, o.StepMetadataBytes(c, l)), 256)
				check(t, err)
				if got := batch.Attention.PastReady; got != test.want[i] {
					t.Errorf("micro-batch %d: PastReady is %v, want %v", i, got, test.want[i])
				}
			}
		})
	}
}
