package node_test

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/metrics"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/node/fault"
	"github.com/moeserve/moeserve/node/observe"
	"github.com/moeserve/moeserve/tools/fixtures"
)

// Settings of KV tiers that cannot work are refused at the start, with what to change.
func TestKVTierSettings(t *testing.T) {
	file := t.TempDir() + "/none"
	for name, x := range map[string]struct {
		change func(*configs.Settings)
		want   string
	}{
		"too large": {func(s *configs.Settings) { s.KV.OffloadingSize = 1 << 20 }, "lower --kv-offloading-size"},
		"too small": {func(s *configs.Settings) { s.KV.OffloadingSize = 1e-6 }, "--kv-offloading-size"},
		"no peers": {func(s *configs.Settings) {
			s.Device.Peers, s.KV.TransferConfig = "none", `{"kv_connector_extra_config": {"num_gpu_blocks": 8}}`
		}, "name GPUs whose memory may be borrowed, as --peers 1"},
		"another peer": {func(s *configs.Settings) {
			s.KV.TransferConfig = `{"kv_connector_extra_config": {"num_gpu_blocks": 8, "dest_gpu_id": 9}}`
		}, "dest_gpu_id is 9, and the peers are GPUs 1, 2; "},
		"no directory": {func(s *configs.Settings) {
			s.KV.TransferConfig = `{"kv_connector_extra_config": {"num_file_blocks": 8, "directory": "` + file + `"}}`
		}, "name a folder that exists"},
		"blocks beyond the context": {func(s *configs.Settings) {
			s.KV.TransferConfig = `{"kv_connector_extra_config": {"num_cpu_blocks": 8, "block_size_factor": 1000}}`
		}, "lower block_size or block_size_factor"},
		"not a multiple": {func(s *configs.Settings) {
			s.KV.TransferConfig = `{"kv_connector_extra_config": {"num_cpu_blocks": 8, "block_size": 24}}`
		}, "block_size is 24 tokens"},
		"two sizes": {func(s *configs.Settings) {
			s.KV.OffloadingSize, s.KV.TransferConfig = 0.25, `{"kv_connector_extra_config": {"cpu_bytes_to_use": 1e6}}`
		}, "--kv-offloading-size is 268435456 bytes, and cpu_bytes_to_use of --kv-transfer-config 1000000"},
		"size in bytes and blocks": {func(s *configs.Settings) {
			s.KV.OffloadingSize, s.KV.TransferConfig = 0.25, `{"kv_connector_extra_config": {"num_cpu_blocks": 8}}`
		}, "and num_cpu_blocks both set the size"},
		"attention on the CPU": {func(s *configs.Settings) {
			s.Batch.Attention, s.KV.OffloadingSize = configs.OnCPU, 0.01
		}, "use --attention gpu"},
	} {
		t.Run(name, func(t *testing.T) {
			s := configs.Defaults()
			x.change(&s)
			n, err := node.Open(t.Context(), node.Options{Settings: s})
			if err == nil {
				err = n.Close()
				t.Fatalf("it was opened, and closed with %v", err)
			}
			if !errors.Is(err, fault.ErrConfig) || !strings.Contains(err.Error(), x.want) {
				t.Errorf("%v; want %q", err, x.want)
			}
		})
	}
}

// TestKVOffloadingBackend: a backend without a size is an error, and a size is one of bytes however it
// is given.
func TestKVOffloadingBackend(t *testing.T) {
	for name, x := range map[string]struct {
		given  []string
		size   float64
		config string
		blocks int // 0: an error
	}{
		"alone":                     {[]string{"kv-offloading-backend"}, 0, "", 0},
		"with a size":               {[]string{"kv-offloading-backend", "kv-offloading-size"}, 0.001, "", 21},
		"with a configuration":      {[]string{"kv-offloading-backend", "kv-transfer-config"}, 0, `{"kv_connector_extra_config": {"cpu_bytes_to_use": 491520}}`, 10},
		"with a size of 0, or none": {[]string{"kv-offloading-backend", "kv-offloading-size"}, 0, "", -1},
		"the same size twice":       {[]string{"kv-offloading-size", "kv-transfer-config"}, 1.0 / 1024, `{"kv_connector_extra_config": {"cpu_bytes_to_use": 1048576}}`, 21},
	} {
		t.Run(name, func(t *testing.T) {
			s := configs.Defaults()
			s.KV.OffloadingSize, s.KV.TransferConfig = x.size, x.config
			n, err := node.Open(t.Context(), node.Options{Settings: s, Explicit: func(key string) bool { return slices.Contains(x.given, key) }})
			if x.blocks == 0 {
				if err == nil || !errors.Is(err, fault.ErrConfig) || !strings.Contains(err.Error(), "--kv-offloading-size is not") {
					t.Error(err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			blocks := -1
			for _, tier := range n.Observe().KVTiers().Tiers {
				blocks = tier.CapacityBlocks
			}
			if err := n.Close(); err != nil || blocks != x.blocks {
				t.Errorf("%d blocks, want %d: %v", blocks, x.blocks, err)
			}
		})
	}
}

// A node with tiers on peers, in host memory and in files, and too few blocks on the GPU, generates
// what one without tiers does, and loads what it has stored.
func TestKVTiersSameTokens(t *testing.T) {
	run := func(config string, local bool) (out []string, loaded int64) {
		s := configs.Defaults()
		s.KV.TransferConfig, s.KV.EnablePrefixCaching, s.KV.NumGPUBlocksOverride = config, local, 14
		n, err := node.Open(t.Context(), node.Options{Settings: s})
		if err != nil {
			t.Fatal(err)
		}
		defer func() {
			if err := n.Close(); err != nil {
				t.Error(err)
			}
		}()
		for round := range 6 {
			out = append(out, comeBack(t, n, round)...)
		}
		for _, tier := range n.Observe().KVTiers().Tiers {
			loaded += tier.Reloaded
		}
		return out, loaded
	}
	want, _ := run("", false)
	for _, config := range []string{
		`{"kv_connector_extra_config": {"load_policy": "always", "num_gpu_blocks": 40}}`,
		`{"kv_connector_extra_config": {"load_policy": "always", "num_cpu_blocks": 20, "block_size_factor": 2}}`,
		`{"kv_connector_extra_config": {"load_policy": "always", "num_file_blocks": 40, "directory": "` + t.TempDir() + `"}}`,
	} {
		for _, local := range []bool{false, true} {
			got, loaded := run(config, local)
			if strings.Join(got, "|") != strings.Join(want, "|") {
				t.Errorf("%s: %q, want %q", config, got, want)
			}
			if !local && loaded == 0 {
				t.Errorf("%s: nothing was loaded", config)
			}
		}
	}
}

// TestKVPeersReadmitted: peers of KV blocks whose copies failed for a while are used again, also where no experts
// are on peers.
func TestKVPeersReadmitted(t *testing.T) {
	t.Parallel()
	var m *emulated.Machine
	s := configs.Defaults()
	s.KV.TransferConfig = `{"kv_connector_extra_config": {"load_policy": "always", "num_gpu_blocks": 40}}`
	s.KV.EnablePrefixCaching, s.KV.NumGPUBlocksOverride = false, 14
	n, err := node.Open(t.Context(), node.Options{Settings: s, OpenMachine: func() (_ device.Machine, err error) {
		m, err = emulated.New(emulated.Options{})
		return m, err
	}})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	}()
	fault := m.Inject(&emulated.Fault{Kind: emulated.FailCopy, Times: -1, Match: func(p emulated.Point) bool {
		return p.From == device.HBM(0) && p.To != device.Host && p.To != device.HBM(0)
	}})
	excluded := func() (all int) {
		for _, p := range n.Observe().Harvest().Peers {
			if p.Health != nil {
				all++
			}
		}
		return all
	}
	for round := 0; excluded() < 2; round++ {
		if comeBack(t, n, round); round == 30 {
			t.Fatalf("copies fail, and %d peers are excluded", excluded())
		}
	}
	fault.Release()
	for begun := time.Now(); excluded() > 0; time.Sleep(50 * time.Millisecond) {
		if time.Since(begun) > time.Minute {
			t.Fatalf("copies work again, and %d peers are excluded", excluded())
		}
	}
	before := n.Observe().KVTiers().Tiers[0].Offloaded
	for round := range 6 {
		comeBack(t, n, round)
	}
	if n.Observe().KVTiers().Tiers[0].Offloaded == before {
		t.Error("no blocks are stored on peers that were readmitted")
	}
}

// comeBack completes a prompt of 70 tokens and its first 60, and returns the texts. Every third round
// has the same prompt, so that its KV blocks have gone to tiers meanwhile, where the GPU has 14.
func comeBack(t *testing.T, n *node.Node, round int) (texts []string) {
	t.Helper()
	p := engine.DefaultParams()
	p.MaxTokens, p.IgnoreEOS = 12, true
	ids := make([]int32, 70)
	for i := range ids {
		ids[i] = int32(3 + (i*7+round%3*5)%40)
	}
	outs, err := n.Engine().Generate(t.Context(), []engine.Request{{Prompt: ids, Params: p}, {Prompt: ids[:60], Params: p}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range outs {
		texts = append(texts, o.Text)
	}
	return texts
}

// tightKV has a pool of KV blocks for a third of what the conversations of converse need.
func tightKV(s *configs.Settings) {
	s.KV.NumGPUBlocksOverride, s.KV.MaxModelLen, s.Batch.MaxNumSeqs = 14, 160, 6
}

// converse runs the turns of six conversations, all at once, and returns the digest of their tokens.
// They begin with one of two system prompts, every other one is drawn with a seed, and one has two
// samples in its last turn. Each goes on with what it was answered.
func converse(t *testing.T, n *node.Node) string {
	t.Helper()
	vocab := n.Info().Config.Vocab
	ids := func(i, count int) (all []int32) {
		for j := range count {
			all = append(all, int32((7*i+13*j+j*j)%vocab))
		}
		return all
	}
	var outs []engine.Output
	said := make([][]int32, 6)
	for turn := range 3 {
		var rs []engine.Request
		for i := range said {
			if turn == 0 {
				said[i] = ids(i%2, 33)
			}
			said[i] = append(said[i], ids(11+6*turn+i, 3+5*i%17)...)
			r := request(slices.Clone(said[i]), 9+i)
			r.Params.Seed = uint64(10*turn + i)
			if i%2 == 1 {
				r.Params.Temperature = 0.8
			}
			if turn == 2 && i == 3 {
				r.Params.N = 2
			}
			rs = append(rs, r)
		}
		got, err := n.Engine().Generate(t.Context(), rs, nil)
		if err != nil {
			t.Fatal(err)
		}
		for i := range said {
			said[i] = append(said[i], got[i].TokenIDs...)
		}
		outs = append(outs, got...)
	}
	return digest(outs)
}

// TestInspectSaysKVTiers: the tiers that Inspect says will be there are those of a node, and take the
// host memory that it says.
func TestInspectSaysKVTiers(t *testing.T) {
	s := configs.Defaults()
	s.KV.TransferConfig = `{"kv_connector_extra_config": {"num_gpu_blocks": 8, "cpu_bytes_to_use": 50e6, "num_file_blocks": 9, "directory": "` + t.TempDir() + `", "block_size_factor": 2}}`
	in, err := node.Inspect(node.Options{Settings: s})
	if err != nil {
		t.Fatal(err)
	}
	taken := func(s configs.Settings) (host int64, tiers []observe.KVTier) {
		n, err := node.Open(t.Context(), node.Options{Settings: s})
		if err != nil {
			t.Fatal(err)
		}
		defer func() {
			if err := n.Close(); err != nil {
				t.Error(err)
			}
		}()
		memory, err := n.Observe().Memories()
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range memory {
			if m.Space == "host" {
				host = m.Allocated
			}
		}
		return host, n.Observe().KVTiers().Tiers
	}
	host, tiers := taken(s)
	var predicted int64
	if len(in.KVTiers) != 3 || len(tiers) != 3 {
		t.Fatalf("%+v, said to be %+v", tiers, in.KVTiers)
	}
	for i, k := range in.KVTiers {
		predicted += k.HostBytes
		if got := tiers[i]; got.Medium != k.Medium || got.CapacityBlocks != k.Blocks || got.BlockBytes != k.BlockBytes || got.BlockTokens != k.BlockTokens {
			t.Errorf("%+v, said to be %+v", got, k)
		}
	}
	s.KV.TransferConfig = `{"kv_connector_extra_config": {"num_gpu_blocks": 8}}`
	if without, _ := taken(s); host-without < predicted || host-without > predicted+1<<16 {
		t.Errorf("%d bytes of host memory, said to be %d", host-without, predicted)
	}
}

// TestKVTierCounters: the five counters of each tier add up, and are the same in Go and in the metrics.
// TestKVOverHTTP of package server has what /debug/kv shows.
func TestKVTierCounters(t *testing.T) {
	s := configs.Defaults()
	s.KV.TransferConfig = `{"kv_connector_extra_config": {"num_gpu_blocks": 12, "num_cpu_blocks": 7, "num_file_blocks": 20, "directory": "` + t.TempDir() + `", "eviction_policy": "arc", "load_policy": "always"}}`
	s.KV.EnablePrefixCaching, s.KV.NumGPUBlocksOverride = false, 14
	n, err := node.Open(t.Context(), node.Options{Settings: s})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	}()
	for round := range 9 {
		comeBack(t, n, round)
		if round == 5 {
			n.Engine().ResetPrefixCache(true)
		}
	}
	// Stores of the last request may be under way: nothing changes between two equal readings.
	var text strings.Builder
	var k observe.KVTiers
	for {
		k = n.Observe().KVTiers()
		text.Reset()
		if err := metrics.Write(&text, n.Observe().Collectors("m")...); err != nil {
			t.Fatal(err)
		}
		if reflect.DeepEqual(k, n.Observe().KVTiers()) {
			break
		}
	}
	var loaded int64
	for _, tier := range k.Tiers {
		for operation, blocks := range map[string]int64{
			"offloaded": tier.Offloaded, "reloaded": tier.Reloaded, "allocated": tier.Allocated, "evicted": tier.Evicted, "freed": tier.Freed,
		} {
			if want := fmt.Sprintf("moeserve_kv_tier_blocks_total{medium=%q,operation=%q} %d\n", tier.Medium, operation, blocks); !strings.Contains(text.String(), want) {
				t.Errorf("no metric %s", want)
			}
		}
		if tier.Allocated-tier.Evicted-tier.Freed != int64(tier.UsedBlocks) || tier.Offloaded > tier.Allocated || tier.Allocated == 0 || tier.Freed == 0 {
			t.Errorf("%+v", tier)
		}
		// Copies of before the reset that ended behind it have bytes, and no blocks.
		if tier.StoredBytes < tier.Offloaded*tier.BlockBytes || tier.LoadedBytes < tier.Reloaded*tier.BlockBytes {
			t.Errorf("bytes of other blocks: %+v", tier)
		}
		loaded += tier.Reloaded
	}
	if loaded == 0 || len(k.Tiers) != 3 {
		t.Errorf("%d blocks loaded, %d tiers", loaded, len(k.Tiers))
	}
}

// Conversations that go on while their KV blocks are preempted, stored and loaded have the same tokens with
// every tier and every scheduling policy; a longrope model changes its keys meanwhile.
func TestKVTiersConversations(t *testing.T) {
	opened := func(change func(*configs.Settings)) *node.Node {
		s := configs.Defaults()
		s.Model.Name, s.KV.EnablePrefixCaching = fixtures.Dir(t, "phimoe_longrope"), false
		change(&s)
		n, err := node.Open(t.Context(), node.Options{Settings: s})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := n.Close(); err != nil {
				t.Error(err)
			}
		})
		return n
	}
	want := converse(t, opened(func(*configs.Settings) {}))
	for _, policy := range []configs.SchedulingPolicy{configs.FCFSScheduling, configs.PriorityScheduling, configs.FairScheduling} {
		for _, extra := range []string{
			"",
			`"num_gpu_blocks": 60`,
			`"num_cpu_blocks": 60, "block_size_factor": 2`,
			`"num_gpu_blocks": 5, "num_cpu_blocks": 8, "num_file_blocks": 60, "eviction_policy": "arc", "directory": "` + t.TempDir() + `"`,
		} {
			n := opened(func(s *configs.Settings) {
				tightKV(s)
				s.Batch.SchedulingPolicy, s.Batch.FairGranularity = policy, 4
				if extra != "" {
					// Measured rates of a busy machine may say that to compute is faster.
					s.KV.TransferConfig = `{"kv_connector_extra_config": {"load_policy": "always", ` + extra + `}}`
				}
			})
			for round := range 2 {
				if got := converse(t, n); got != want {
					t.Errorf("%s, %s, round %d: tokens %s, want %s", policy, extra, round, got, want)
				}
			}
			if s := n.Engine().State(); s.Preemptions == 0 || (s.ExternalHits > 0) != (extra != "") {
				t.Errorf("%s, %s: %+v", policy, extra, s)
			}
		}
	}
}
