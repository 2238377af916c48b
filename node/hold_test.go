package node

import (
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/node/sizing"
	"github.com/moeserve/moeserve/pipeline"
)

// TestWarnOfHold: steps that are told to read experts in place, and may hold peers' memory past the
// deadline, are named at the start.
func TestWarnOfHold(t *testing.T) {
	// 16 tokens of Mixtral miss 4 experts of 336 MiB in each of 32 layers: 0.87 s from the host.
	m := pipeline.AccessModel{
		Experts: 8, TopK: 2, Layers: 32, ExpertBytes: 336 << 20, Offloaded: 0.5, MemoryRate: 4e12,
		Host: pipeline.Link{CopyRate: 55e9, ReadRate: 51e9}, Peer: pipeline.Link{CopyRate: 390e9, ReadRate: 370e9},
	}
	for _, c := range []struct {
		access   configs.ExpertAccess
		deadline string
		peers    int
		says     bool
	}{
		{configs.DirectAccess, "100ms", 1, true},
		{configs.DirectAccess, "2s", 1, false},
		{configs.DirectAccess, "100ms", 0, false},
		{configs.AutoAccess, "100ms", 1, false},
		{configs.CopyAccess, "100ms", 1, false},
	} {
		var log strings.Builder
		u := setup{o: &Options{Log: slog.New(slog.NewTextHandler(&log, nil))}, settings: configs.Defaults(), peers: make([]device.Space, c.peers), needs: &sizing.Needs{}}
		u.settings.Batch.ExpertAccess, u.settings.Harvest.Deadline = c.access, c.deadline
		u.needs.Limits.MaxTokens = 2048
		u.warnOfHold(&m)
		if got := log.String(); strings.Contains(got, "--expert-access direct possibly after --harvest-deadline") != c.says || !c.says && got != "" {
			t.Errorf("%+v: %q", c, got)
		}
	}
	if hold := longestHold(&m, 2048); hold < 850*time.Millisecond || hold > 900*time.Millisecond || longestHold(&m, 1) > hold/3 {
		t.Errorf("a step of 16 tokens holds memory for %v, one of one token for %v", hold, longestHold(&m, 1))
	}
}
