package node

import (
	"bytes"
	"log/slog"
	"strings"
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

// TestLargerSteps: a server whose steps of prompts are bound by copies of experts says how many tokens they
// should have, unless they were given, experts come from a peer, or no prompt is longer.
func TestLargerSteps(t *testing.T) {
	const devices = "virtual,nodata,hbm=141GB,host=256GiB,pcie=55GB/s,nvlink=395GB/s,flops=800T,bw=4.6TB/s"
	for _, c := range []struct {
		change func(*configs.Settings)
		want   string
	}{
		// Half of Mixtral's experts are 45 GB, 0.82 s; 8,192 tokens are computed in 0.3 s, 32,768 in 1.2.
		{func(*configs.Settings) {}, "--max-num-batched-tokens 32768"},
		{func(s *configs.Settings) { s.Offload.Fraction = 0.1 }, "--max-num-batched-tokens 8192"},
		{func(s *configs.Settings) { s.KV.MaxModelLen = 4096 }, ""},
		{func(s *configs.Settings) { s.Batch.MaxNumBatchedTokens = 4096 }, ""},
		{func(s *configs.Settings) { s.Offload.Fraction = 0 }, ""},
		{func(s *configs.Settings) { s.Device.Peers, s.Offload.Tier = "1", configs.PeerTier }, ""},
	} {
		var log bytes.Buffer
		o := Options{Settings: configs.Defaults(), WithoutTokenizer: true, Log: slog.New(slog.NewTextHandler(&log, nil))}
		s := &o.Settings
		s.Model.Name, s.Model.LoadFormat, s.Device.Emulate = "mixtral-8x7b", configs.LoadDummy, devices
		s.Offload.Fraction, s.Offload.Tier, s.Batch.MaxNumSeqs = 0.5, configs.HostTier, 8
		c.change(s)
		n, err := Open(t.Context(), o)
		if err != nil {
			t.Fatal(err)
		}
		_, said, _ := strings.Cut(log.String(), "setting=\"--max-num")
		said, _, _ = strings.Cut(said, "\"")
		if said != strings.TrimPrefix(c.want, "--max-num") {
			t.Errorf("want %q:\n%s", c.want, log.String())
		}
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	}
}
