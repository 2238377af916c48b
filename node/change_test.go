package node_test

import (
	"errors"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/node"
)

// changed is settings with these values, given as pairs.
func changed(t *testing.T, n *node.Node, values map[string]any) (*configs.Settings, []string) {
	t.Helper()
	s := n.Info().Settings
	var keys []string
	for key := range values {
		keys = append(keys, key)
	}
	if err := s.Put(values); err != nil {
		t.Error(err)
	}
	return &s, keys
}

// peerCopies counts experts by the peer that has a copy.
func peerCopies(t *testing.T, n *node.Node) map[string]int {
	t.Helper()
	all := map[string]int{}
	for _, layer := range n.Store().Placed() {
		for _, e := range layer {
			if e.Tier == experts.Peer {
				all[e.Device.String()]++
			}
		}
	}
	return all
}

// TestChange: peers, headroom and the migration limit change between requests; experts leave and come
// back, and the tokens stay the same.
func TestChange(t *testing.T) {
	want := generate(t, open(t, machine{options: emulated.Options{}}, nil))
	n := open(t, machine{fraction: 0.5, options: linked(emulated.Random)}, func(s *configs.Settings) { s.Harvest.MigrationLimit, s.Harvest.Cooldown = "0", "0s" })
	for _, c := range []struct {
		values map[string]any
		peers  []string // that have copies afterwards
		copies int
	}{
		{nil, []string{"gpu1", "gpu2"}, 24},
		{map[string]any{node.PeersKey: "2"}, []string{"gpu2"}, 24},
		{map[string]any{node.PeersKey: "none"}, nil, 0},
		{map[string]any{node.PeersKey: "auto", node.HeadroomKey: "255MiB"}, []string{"gpu1", "gpu2"}, 14},
		{map[string]any{node.HeadroomKey: "100%"}, nil, 0},
		{map[string]any{node.HeadroomKey: "5%", node.MigrationLimitKey: "1B/s"}, nil, 1},
		{map[string]any{node.MigrationLimitKey: "0"}, []string{"gpu1", "gpu2"}, 24},
	} {
		s, keys := changed(t, n, c.values)
		if err := n.Change(s, keys...); err != nil {
			t.Fatalf("%v: %v", c.values, err)
		}
		for range 3 { // what is revoked is released, and experts come, while steps run
			if got := generate(t, n); got != want {
				t.Errorf("%v: tokens %s, want %s", c.values, got, want)
			}
		}
		got, sum := peerCopies(t, n), 0
		for _, peer := range c.peers {
			sum += got[peer]
			delete(got, peer)
		}
		if len(got) > 0 && c.peers != nil || c.peers != nil && sum != c.copies || c.peers == nil && len(got) > c.copies {
			t.Errorf("%v: %d copies on %v, others on %v; want %d", c.values, sum, c.peers, got, c.copies)
		}
	}
}

// TestChangeMeanwhile: the same while requests run, on devices that run concurrently.
func TestChangeMeanwhile(t *testing.T) {
	want := generate(t, open(t, machine{options: emulated.Options{}}, nil))
	n := open(t, machine{fraction: 0.5, options: emulated.Options{Check: true, GPUs: linked(0).GPUs}}, func(s *configs.Settings) { s.Harvest.MigrationLimit, s.Harvest.Cooldown = "0", "0s" })
	stop, done := make(chan struct{}), make(chan int)
	go func() {
		rng, changes := rand.New(rand.NewPCG(3, 5)), 0
		pick := func(all ...string) any { return all[rng.IntN(len(all))] }
		for {
			select {
			case <-stop:
				done <- changes
				return
			default:
			}
			s, keys := changed(t, n, map[string]any{
				node.PeersKey: pick("auto", "none", "1", "2"), node.HeadroomKey: pick("0", "5%", "255MiB", "90%"), node.MigrationLimitKey: pick("auto", "0", "1MiB/s"),
			})
			if err := n.Change(s, keys...); err != nil {
				t.Error(err)
			}
			changes++
		}
	}()
	for range 5 {
		if got := generate(t, n); got != want {
			t.Errorf("tokens %s, want %s", got, want)
		}
	}
	close(stop)
	t.Logf("%d changes", <-done)
}

// TestChangeRefused: what cannot change is refused by name, and then nothing changes.
func TestChangeRefused(t *testing.T) {
	alone := open(t, machine{fraction: 0.5}, func(s *configs.Settings) { s.Device.Peers = "none" })
	peers := open(t, machine{fraction: 0.5, options: linked(emulated.Random)}, func(s *configs.Settings) { s.Offload.Tier = configs.PeerTier })
	for _, c := range []struct {
		n      *node.Node
		values map[string]any
		key    string
		want   string
	}{
		{alone, map[string]any{node.HeadroomKey: "1GiB"}, node.HeadroomKey, "start again with --peers"},
		{alone, map[string]any{node.MigrationLimitKey: "0"}, node.MigrationLimitKey, "--dynamic-residency"},
		{alone, map[string]any{node.PeersKey: "1"}, node.PeersKey, "names GPU 1"},
		{alone, map[string]any{node.PeersKey: "auto"}, node.PeersKey, "start again with --peers"},
		{peers, map[string]any{node.PeersKey: "1,7", node.HeadroomKey: "100%"}, node.PeersKey, "names GPU 7; only GPUs that were peers at the start can be, 1, 2: start again"},
		{peers, map[string]any{"offload-fraction": 0.25, node.HeadroomKey: "100%"}, "offload-fraction", "start again with it"},
	} {
		s, keys := changed(t, c.n, c.values)
		err := c.n.Change(s, keys...)
		var refused *configs.SettingError
		if !errors.As(err, &refused) || refused.Key != c.key || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v: %v", c.values, err)
		}
	}
	s := peers.Info().Settings
	s.Device.Peers = "none" // which --offload-tier peer refuses
	if err := peers.Change(&s, node.PeersKey); err == nil {
		t.Error("--offload-tier peer without peers is accepted")
	}
	generate(t, peers)
	if got := peerCopies(t, peers); got["gpu1"]+got["gpu2"] != 24 {
		t.Errorf("copies %v after changes that were refused", got)
	}
}
