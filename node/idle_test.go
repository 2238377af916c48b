package node_test

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/kvcache/offload"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/node/observe"
)

// TestSettingsWithoutEffect: the log names settings that were given and change nothing, and no others.
func TestSettingsWithoutEffect(t *testing.T) {
	for _, c := range []struct {
		change func(*configs.Settings)
		want   string // none: nothing is said
	}{
		{func(s *configs.Settings) { s.Batch.CPUExperts, s.Offload.Tier = "1", configs.PeerTier }, `settings="--cpu-experts --offload-tier"`},
		{func(s *configs.Settings) { s.Batch.CPUExperts, s.Offload.Fraction = "1", 0.5 }, ""},
		{func(s *configs.Settings) {
			s.Batch.CPUExperts, s.Offload.Fraction, s.Batch.Attention = "auto", 0.5, configs.OnCPU
		}, "beside --attention cpu"},
		{func(*configs.Settings) {}, ""},
	} {
		var log bytes.Buffer
		s := configs.Defaults()
		c.change(&s)
		n, err := node.Open(t.Context(), node.Options{Settings: s, Explicit: func(string) bool { return true }, Log: slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelWarn}))})
		if err != nil {
			t.Fatal(err)
		}
		if err := n.Close(); err != nil {
			t.Error(err)
		}
		if got := log.String(); !strings.Contains(got, c.want) || strings.Contains(got, "effect") != strings.Contains(c.want, "settings") || strings.Contains(got, "beside") != strings.Contains(c.want, "beside") {
			t.Errorf("want %q: %s", c.want, got)
		}
	}
}

// TestHarvestClientsAreKnown: --harvest-clients takes the names of all that borrow memory.
func TestHarvestClientsAreKnown(t *testing.T) {
	for _, name := range []string{experts.HarvestClient, offload.HarvestClient, observe.RelayClient} {
		h := configs.Defaults().Harvest
		h.Policy, h.Clients = "fairness", name+"=weight:2"
		if _, err := h.ParseClients(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}
