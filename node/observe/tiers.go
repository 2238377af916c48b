package observe

import (
	"github.com/moeserve/moeserve/kvcache/offload"
	"github.com/moeserve/moeserve/metrics"
)

// KVTiers are the tiers of KV blocks besides the GPU's KV cache: what they hold, and what was
// stored and loaded since the node was opened. They have a JSON form.
type KVTiers struct {
	// Tiers, fastest first.
	Tiers []KVTier `json:"tiers"`
	// Decisions of the cost model, which compares a load with computing the tokens again.
	Decisions KVDecisions `json:"decisions"`
}

// KVTier is one tier. Blocks are the tier's, of BlockBytes each.
type KVTier struct {
	// Medium is PEER_GPU, CPU or FILE, or one that was registered.
	Medium     string `json:"medium"`
	BlockBytes int64  `json:"block_bytes"`
	// Capacity, Used and Pinned blocks; pinned ones are read by loads.
	CapacityBlocks int `json:"capacity_blocks"`
	UsedBlocks     int `json:"used_blocks"`
	PinnedBlocks   int `json:"pinned_blocks"`
	// Blocks stored (offloaded) and loaded (reloaded), allocated for stores, evicted for others,
	// and freed for other causes.
	Offloaded int64 `json:"blocks_offloaded"`
	Reloaded  int64 `json:"blocks_reloaded"`
	Allocated int64 `json:"blocks_allocated"`
	Evicted   int64 `json:"blocks_evicted"`
	Freed     int64 `json:"blocks_freed"`
	// Refused blocks were not stored for lack of room. Lost ones were revoked or damaged.
	Refused      int64 `json:"blocks_refused"`
	Lost         int64 `json:"blocks_lost"`
	FailedStores int64 `json:"blocks_store_failed"`
	FailedLoads  int64 `json:"blocks_load_failed"`
	// Bytes copied.
	StoredBytes int64 `json:"stored_bytes"`
	LoadedBytes int64 `json:"loaded_bytes"`
	// LoadRate is the measured rate of loads, or the expected one before; 0: unknown.
	LoadRate float64 `json:"load_bytes_per_s"`
}

// KVDecisions count runs of blocks that a tier had when a sequence began.
type KVDecisions struct {
	// Loaded runs whole, Split ones in part, and Computed ones not at all.
	Loaded   int64 `json:"loaded"`
	Split    int64 `json:"split"`
	Computed int64 `json:"computed"`
	// Tokens that were loaded, and that were computed again though a tier had them.
	LoadedTokens   int64 `json:"loaded_tokens"`
	ComputedTokens int64 `json:"computed_tokens"`
}

// KVTiers reads the tiers of KV blocks; none: the zero KVTiers.
func (o *Observer) KVTiers() KVTiers {
	if o.p.Tiers == nil {
		return KVTiers{Tiers: []KVTier{}}
	}
	return readTiers(o.p.Tiers)
}

func readTiers(t *offload.Tiers) KVTiers {
	k := KVTiers{Tiers: []KVTier{}, Decisions: KVDecisions(t.Decisions())}
	for _, s := range t.Stats() {
		k.Tiers = append(k.Tiers, KVTier{
			Medium: s.Medium, BlockBytes: s.BlockBytes,
			CapacityBlocks: s.Capacity, UsedBlocks: s.Capacity - s.Free, PinnedBlocks: s.Pinned,
			Offloaded: s.Stored, Reloaded: s.Loaded, Allocated: s.Allocated, Evicted: s.Evicted, Freed: s.Freed,
			Refused: s.RefusedBlocks, Lost: s.LostBlocks, FailedStores: s.FailedStores, FailedLoads: s.FailedLoads,
			StoredBytes: s.StoredBytes, LoadedBytes: s.LoadedBytes, LoadRate: s.BytesPerSecond,
		})
	}
	return k
}

var (
	kvBlocks    = metrics.NewDesc("moeserve_kv_tier_blocks_total", "KV blocks of a tier that were offloaded (stored), reloaded (loaded), allocated for stores, evicted for others, and freed for other causes, as well as those refused for lack of room, lost (revoked or damaged), and whose copies failed.", "medium", "operation")
	kvBytes     = metrics.NewDesc("vllm:kv_offload_total_bytes_total", "Bytes of KV blocks copied between the GPU and a tier, by source and destination: GPU_to_CPU, PEER_GPU_to_GPU.", "transfer_type")
	kvCapacity  = metrics.NewDesc("moeserve_kv_tier_capacity_blocks", "KV blocks that a tier can hold.", "medium")
	kvUsed      = metrics.NewDesc("moeserve_kv_tier_used_blocks", "KV blocks of a tier that are allocated.", "medium")
	kvDecisions = metrics.NewDesc("moeserve_kv_load_decisions_total", "Runs of blocks that a tier had when a sequence began: loaded, split between loading and computing, or computed again.", "choice")
)

func (k KVTiers) collect(to *metrics.Sink) {
	if len(k.Tiers) == 0 {
		return
	}
	for _, t := range k.Tiers {
		for _, c := range []struct {
			operation string
			blocks    int64
		}{
			{"offloaded", t.Offloaded},
			{"reloaded", t.Reloaded},
			{"allocated", t.Allocated},
			{"evicted", t.Evicted},
			{"freed", t.Freed},
			{"refused", t.Refused},
			{"lost", t.Lost},
			{"store_failed", t.FailedStores},
			{"load_failed", t.FailedLoads},
		} {
			to.Counter(kvBlocks, float64(c.blocks), t.Medium, c.operation)
		}
		to.Counter(kvBytes, float64(t.StoredBytes), offload.GPU+"_to_"+t.Medium)
		to.Counter(kvBytes, float64(t.LoadedBytes), t.Medium+"_to_"+offload.GPU)
		to.Gauge(kvCapacity, float64(t.CapacityBlocks), t.Medium)
		to.Gauge(kvUsed, float64(t.UsedBlocks), t.Medium)
	}
	to.Counter(kvDecisions, float64(k.Decisions.Loaded), "loaded")
	to.Counter(kvDecisions, float64(k.Decisions.Split), "split")
	to.Counter(kvDecisions, float64(k.Decisions.Computed), "computed")
}
