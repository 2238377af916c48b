package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/node/observe"
)

// soakSeed is the variable with the seed by which a soak draws its settings and requests.
const soakSeed = "MOESERVE_SOAK_SEED"

// kvBlocks are the sizes of the tiers of a soak, in blocks of the GPU, and a folder for files.
type kvBlocks struct {
	peer, host, file int
	folder           string
}

// drawKV draws how requests are scheduled, their KV blocks kept, in all tiers, and the GPU's memory
// shared with experts.
func drawKV(t *testing.T, rng *rand.Rand, set *settings, size kvBlocks) {
	t.Helper()
	pick := func(of ...string) string { return of[rng.IntN(len(of))] }
	factor := 1 + rng.IntN(2)
	extra := map[string]any{
		"num_gpu_blocks": size.peer / factor, "num_cpu_blocks": size.host / factor, "num_file_blocks": size.file / factor, "directory": size.folder,
		"eviction_policy": pick("lru", "arc"), "block_size_factor": factor,
		"durability": map[string]string{"PEER_GPU": pick("backed", "lossy"), "CPU": pick("backed", "lossy")},
	}
	text, err := json.Marshal(map[string]any{"kv_connector_extra_config": extra})
	if err != nil {
		t.Fatal(err)
	}
	set.KV.TransferConfig, set.KV.EnablePrefixCaching = string(text), rng.IntN(2) == 0
	set.Batch.SchedulingPolicy = configs.SchedulingPolicy(rng.IntN(3))
	set.Batch.FairGranularity = []int{2, 8, 32}[rng.IntN(3)]
	set.KV.ExpertsShare = []string{configs.StaticShare, configs.AutoShare}[rng.IntN(2)]
	set.Offload.DynamicResidency = rng.IntN(2) == 0
	set.Offload.Tier = []configs.Tier{configs.HostTier, configs.PeerTier}[rng.IntN(2)]
	t.Logf("scheduling %s of granularity %d, prefix caching %t, %s; experts on the %s, dynamic residency %t, memory shared: %s",
		set.Batch.SchedulingPolicy, set.Batch.FairGranularity, set.KV.EnablePrefixCaching, text, set.Offload.Tier, set.Offload.DynamicResidency, set.KV.ExpertsShare)
}

// soakRandom is what a soak is drawn from. Default: of seed 1.
func soakRandom(t *testing.T) *rand.Rand {
	t.Helper()
	seed := uint64(1)
	if v := os.Getenv(soakSeed); v != "" {
		var err error
		if seed, err = strconv.ParseUint(v, 10, 64); err != nil {
			t.Fatalf("%s is %q: give a whole number", soakSeed, v)
		}
	}
	return rand.New(rand.NewPCG(seed*0x9e3779b97f4a7c15, 1))
}

// aside are members of a request that change no answer: a salt, with which it shares its KV blocks
// with few others, and, where the policy has them, a priority.
func (s *soak) aside(rng *rand.Rand) string {
	text := ""
	if rng.IntN(4) == 0 {
		text = fmt.Sprintf(`, "cache_salt": %q`, []string{"a", "b"}[rng.IntN(2)])
	}
	if s.policy != configs.FCFSScheduling {
		text += fmt.Sprintf(`, "priority": %d`, rng.IntN(9)-4)
	}
	return text
}

// resetting drops cached prefixes now and then, at times those of tiers, too.
func (s *soak) resetting(ctx context.Context, rng *rand.Rand) {
	pause(ctx, time.Duration(rng.IntN(4000))*time.Millisecond)
	external := rng.IntN(4) == 0
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, fmt.Sprintf("%s/reset_prefix_cache?reset_external=%t", s.url, external), nil)
	if err != nil {
		s.t.Error(err)
		return
	}
	resp, err := s.client.Do(r)
	if err != nil {
		return // the end of the load
	}
	defer resp.Body.Close() //nolint:errcheck // only read from
	if data, _ := io.ReadAll(resp.Body); resp.StatusCode != http.StatusOK {
		s.t.Errorf("reset: status %d: %s", resp.StatusCode, data)
	}
	s.add("prefix cache reset")
}

// kvTiers reads the tiers of KV blocks.
func (s *soak) kvTiers() observe.KVTiers {
	r, err := s.client.Get(s.url + "/debug/kv")
	if err != nil {
		s.t.Fatal(err)
	}
	defer r.Body.Close() //nolint:errcheck // only read from
	var k observe.KVTiers
	if err := json.NewDecoder(r.Body).Decode(&k); err != nil {
		s.t.Errorf("/debug/kv: %v", err)
	}
	return k
}

// kvTable writes what has become of KV blocks. A soak of half a minute or more must have stored in each
// tier, and loaded.
func (s *soak) kvTable(length time.Duration, before, after observe.KVTiers) string {
	var b strings.Builder
	b.WriteString("\n| tier | stored | loaded | evicted | lost | copies failed, stores and loads |\n|---|---|---|---|---|---|\n")
	all := int64(0)
	for i, x := range after.Tiers {
		was := before.Tiers[i]
		stored, loaded := x.Offloaded-was.Offloaded, x.Reloaded-was.Reloaded
		fmt.Fprintf(&b, "| %s | %d | %d | %d | %d | %d, %d |\n", x.Medium, stored, loaded, x.Evicted-was.Evicted, x.Lost-was.Lost, x.FailedStores-was.FailedStores, x.FailedLoads-was.FailedLoads)
		if all += loaded; length >= 30*time.Second && stored == 0 {
			s.t.Errorf("nothing was stored in %s", x.Medium)
		}
		if x.PinnedBlocks > 0 {
			s.t.Errorf("%s: %d blocks are pinned by an idle server", x.Medium, x.PinnedBlocks)
		}
	}
	if length >= 30*time.Second && all == 0 {
		s.t.Error("nothing was loaded from any tier")
	}
	return b.String()
}
