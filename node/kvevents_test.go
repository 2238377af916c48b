package node_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math"
	"strings"
	"testing"

	"github.com/go-zeromq/zmq4"
	"github.com/vmihailenco/msgpack/v5"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/kvcache/offload"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/node/fault"
	"github.com/moeserve/moeserve/node/sleeping"
)

// heldBlocks are the keys of each medium, by the events of a node.
type heldBlocks map[string]map[kvcache.Key]bool

// blockChains are the keys before those that a node's GPU has stored, by its events.
type blockChains map[kvcache.Key]kvcache.Key

// position of the block of a key in its sequence, from 0.
func (c blockChains) position(t *testing.T, k kvcache.Key) (n int) {
	t.Helper()
	for ; ; n++ {
		before, ok := c[k]
		if !ok {
			t.Fatalf("the GPU has never stored key %x", k[:4])
		}
		if before == (kvcache.Key{}) {
			return n
		}
		k = before
	}
}

// followEvents applies all events that a node has published so far: behind them it publishes one of its own, of this name,
// as batches are encoded later than they are published.
func followEvents(t *testing.T, n *node.Node, name string) (heldBlocks, blockChains) {
	t.Helper()
	const medium = "TEST"
	last := kvcache.RootKey([]byte(name))
	n.KVEvents().Publish([]kvcache.Event{{Medium: medium, Stored: []kvcache.Key{last}}})
	for {
		if held, chains := replayEvents(t, n); held[medium][last] {
			return held, chains
		}
	}
}

// replayEvents asks a node for all batches, and applies them.
func replayEvents(t *testing.T, n *node.Node) (heldBlocks, blockChains) {
	t.Helper()
	s := zmq4.NewDealer(t.Context())
	defer s.Close()
	if err := s.Dial("tcp://" + n.KVEvents().Addrs()[1].String()); err != nil {
		t.Fatal(err)
	}
	if err := s.SendMulti(zmq4.NewMsgFrom(nil, make([]byte, 8))); err != nil {
		t.Fatal(err)
	}
	held, chains := heldBlocks{}, blockChains{}
	for next := uint64(0); ; next++ {
		m, err := s.Recv()
		if err != nil {
			t.Fatal(err)
		}
		number := binary.BigEndian.Uint64(m.Frames[2])
		if number == math.MaxUint64 {
			if next < 2 {
				t.Fatalf("%d batches", next)
			}
			return held, chains
		}
		if number != next {
			t.Fatalf("batch %d comes after batch %d", number, next-1)
		}
		var b []any
		if err := msgpack.Unmarshal(m.Frames[3], &b); err != nil {
			t.Fatal(err)
		}
		for _, e := range b[1].([]any) {
			held.apply(t, chains, e.(map[string]any))
		}
	}
}

func (h heldBlocks) apply(t *testing.T, chains blockChains, e map[string]any) {
	t.Helper()
	if e["type"] == "AllBlocksCleared" {
		clear(h)
		return
	}
	medium := e["medium"].(string)
	if h[medium] == nil {
		h[medium] = map[kvcache.Key]bool{}
	}
	before := kvcache.Key{}
	if parent, ok := e["parent_block_hash"].([]byte); ok {
		before = kvcache.Key(parent)
	}
	for i, k := range e["block_hashes"].([]any) {
		k := kvcache.Key(k.([]byte))
		if stored := e["type"] == "BlockStored"; stored == h[medium][k] {
			t.Fatalf("%v: key %x, which %s has: %v", e["type"], k[:4], medium, h[medium][k])
		} else if !stored {
			delete(h[medium], k)
			continue
		}
		h[medium][k] = true
		if medium != kvcache.MediumGPU {
			continue
		}
		// A block is found only behind its parent, which is removed later than it, if at all.
		if i == 0 && before != (kvcache.Key{}) && !h[medium][before] {
			t.Errorf("key %x is stored behind key %x, which is not", k[:4], before[:4])
		}
		chains[k], before = before, k
	}
}

// TestKVEvents: who follows the events of a node knows which blocks its pool and its tiers have, also after
// revocations, a reset and sleep, and where a tier's blocks hold several of the GPU's.
func TestKVEvents(t *testing.T) {
	for factor := 1; factor <= 3; factor++ {
		t.Run(fmt.Sprintf("factor=%d", factor), func(t *testing.T) { testKVEvents(t, factor) })
	}
}

func testKVEvents(t *testing.T, factor int) {
	s := configs.Defaults()
	tightKV(&s)
	s.KV.TransferConfig = fmt.Sprintf(`{"kv_connector_extra_config": {"num_gpu_blocks": %d, "num_cpu_blocks": %d, "num_file_blocks": %d, "block_size_factor": %d, "directory": %q}}`,
		12/factor, 30/factor, 60/factor, factor, t.TempDir())
	s.KV.EventsConfig = `{"enable_kv_cache_events": true, "endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*"}`
	n, err := node.Open(t.Context(), node.Options{Settings: s})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	}()
	check := func(what string) heldBlocks {
		t.Helper()
		for n.KVTiers().Busy() { // what is stored while nothing runs is published with the next step
			converse1(t, n)
		}
		converse1(t, n)
		held, chains := followEvents(t, n, what)
		for _, tier := range n.Observe().KVTiers().Tiers {
			blocks, parts := 0, map[kvcache.Key]bool{}
			for k := range held[tier.Medium] {
				if chains.position(t, k)%factor < factor-1 {
					continue
				}
				blocks++
				if n.KVTiers().Locate(k) == (offload.Place{}) {
					t.Errorf("%s: key %x is in no tier, by the events in %s", what, k[:4], tier.Medium)
				}
				for range factor {
					parts[k] = true
					k = chains[k]
				}
			}
			if blocks != tier.UsedBlocks {
				t.Errorf("%s: by the events %s has %d blocks; it has %d", what, tier.Medium, blocks, tier.UsedBlocks)
			}
			if !maps.Equal(held[tier.Medium], parts) {
				t.Errorf("%s: by the events %s has %d blocks of the GPU; it has %d", what, tier.Medium, len(held[tier.Medium]), len(parts))
			}
		}
		return held
	}
	converse(t, n)
	held := check("conversations")
	for _, medium := range []string{"GPU", "PEER_GPU", "CPU", "FILE"} {
		if len(held[medium]) == 0 {
			t.Errorf("%s has no blocks", medium)
		}
	}
	if free := n.KV().Free(); len(held["GPU"]) > n.KV().Blocks() || free != n.KV().Blocks() {
		t.Errorf("%d keys of %d blocks, %d of them free", len(held["GPU"]), n.KV().Blocks(), free)
	}

	if _, err := n.Sleep(t.Context(), sleeping.Copy, engine.PauseWait); err != nil {
		t.Fatal(err)
	}
	if _, err := n.Wake(t.Context()); err != nil {
		t.Fatal(err)
	}
	before := len(held["GPU"])
	if held = check("sleep"); len(held["GPU"]) >= before || len(held["FILE"]) == 0 {
		t.Errorf("after sleep the GPU has %d blocks, %d before, and files %d", len(held["GPU"]), before, len(held["FILE"]))
	}

	n.Engine().ResetPrefixCache(true)
	if held = check("reset"); len(held["CPU"]) > 4 || len(held["FILE"]) > 4 || len(held["GPU"]) > 4 {
		t.Errorf("after a reset %d, %d and %d blocks are left", len(held["GPU"]), len(held["CPU"]), len(held["FILE"]))
	}
}

// converse1 runs a request too short to fill a block.
func converse1(t *testing.T, n *node.Node) {
	t.Helper()
	if _, err := n.Engine().Generate(t.Context(), []engine.Request{request([]int32{5, 6, 7}, 2)}, nil); err != nil {
		t.Fatal(err)
	}
}

// TestKVEventSettings: settings of KV events that cannot work are refused at the start.
func TestKVEventSettings(t *testing.T) {
	for name, c := range map[string]struct {
		config string
		cache  bool
		want   string
	}{
		"not JSON":        {`zmq`, true, "--kv-events-config: invalid character"},
		"no prefix cache": {`{"enable_kv_cache_events": true}`, false, "leave out --no-enable-prefix-caching"},
		"no such address": {`{"enable_kv_cache_events": true, "endpoint": "@tcp://192.0.2.1:5557"}`, true, "endpoint: listen tcp 192.0.2.1:5557"},
	} {
		t.Run(name, func(t *testing.T) {
			s := configs.Defaults()
			s.KV.EventsConfig, s.KV.EnablePrefixCaching = c.config, c.cache
			n, err := node.Open(t.Context(), node.Options{Settings: s})
			if err == nil {
				t.Fatal("opened", n.Close())
			}
			if !errors.Is(err, fault.ErrConfig) || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v, want %q", err, c.want)
			}
		})
	}
}
