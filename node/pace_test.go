package node

import (
	"testing"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/engine/scheduler"
)

// TestPaceOfOffloadedExperts: before any step was measured, a step takes as long as the copies of the
// experts that it needs, by the rates of the machine; and --max-itl off leaves steps alone.
func TestPaceOfOffloadedExperts(t *testing.T) {
	for _, itl := range []string{"auto", "40ms", "off"} {
		o := Options{Settings: configs.Defaults(), WithoutTokenizer: true}
		s := &o.Settings
		s.Model.Name, s.Model.LoadFormat = "qwen1.5-moe-a2.7b", configs.LoadDummy
		s.Device.Emulate = "virtual,nodata,hbm=141GB,host=256GiB,pcie=50GB/s,flops=800T,bw=4.6TB/s"
		s.Offload.Fraction, s.Offload.Tier, s.Batch.MaxITL = 0.5, configs.HostTier, itl
		n, err := Open(t.Context(), o)
		if err != nil {
			t.Fatal(err)
		}
		if itl == "off" && n.pace != nil || itl != "off" && n.pace == nil {
			t.Fatalf("--max-itl %s: pace %v", itl, n.pace)
		}
		if itl != "off" {
			// Half of 24 layers of 60 experts, of 17.3 MB each, at 50 GB/s.
			copies := 0.5 * 24 * 60 * float64(n.info.Sizes.Expert) / 50e9
			if got := n.pace.Seconds(scheduler.Mix{Prompt: 2048}); got < 0.95*copies || got > 1.05*copies {
				t.Errorf("a step of 2048 tokens takes %v s, its copies %v", got, copies)
			}
			// All experts are copied for 64 tokens, too, so that more are nearly free.
			m := scheduler.Mix{Decodes: 32, DecodeContext: 3200}
			if got := n.pace.PromptTokens(m, 2000); got < 1500 {
				t.Errorf("%d prompt tokens of 2000, while copies take %v s whatever the step computes", got, copies)
			}
		}
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	}
}
