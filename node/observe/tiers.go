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

// KVTier is one tier. Blocks are the tier's, of BlockBytes and BlockTokens each.
type KVTier struct {
	// Medium is PEER_GPU, CPU or FILE, or one that was registered.
	Medium      string `json:"medium"`
	BlockBytes  int64  `json:"block_bytes"`
	BlockTokens int    `json:"block_tokens"`
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
	// Seconds that stores and loads took, from start to end.
	StoreTime float64 `json:"store_s"`
	LoadTime  float64 `json:"load_s"`
	// LoadRate is the measured rate of loads, or the expected one before; 0: unknown.
	LoadRate float64 `json:"load_bytes_per_s"`

	// Stores and Loads have the sizes of transfers, for the metrics.
	Stores offload.Transfers `json:"-"`
	Loads  offload.Transfers `json:"-"`
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
			Medium: s.Medium, BlockBytes: s.BlockBytes, BlockTokens: s.BlockTokens,
			CapacityBlocks: s.Capacity, UsedBlocks: s.Capacity - s.Free, PinnedBlocks: s.Pinned,
			Offloaded: s.Stored, Reloaded: s.Loaded, Allocated: s.Allocated, Evicted: s.Evicted, Freed: s.Freed,
			Refused: s.RefusedBlocks, Lost: s.LostBlocks, FailedStores: s.FailedStores, FailedLoads: s.FailedLoads,
			StoredBytes: s.StoredBytes, LoadedBytes: s.LoadedBytes, LoadRate: s.BytesPerSecond,
			StoreTime: s.Stores.Seconds, LoadTime: s.Loads.Seconds, Stores: s.Stores, Loads: s.Loads,
		})
	}
	return k
}

var (
	kvBlocks    = metrics.NewDesc("moeserve_kv_tier_blocks_total", "KV blocks of a tier (PEER_GPU, CPU, FILE) that were offloaded (stored), reloaded (loaded), allocated for stores, evicted for others, and freed for other causes, as well as those refused for lack of room, lost (revoked or damaged), and whose copies failed (stores also where the place was revoked or reset meanwhile).", "medium", "operation")
	kvCapacity  = metrics.NewDesc("moeserve_kv_tier_capacity_blocks", "KV blocks that a tier can hold.", "medium")
	kvUsed      = metrics.NewDesc("moeserve_kv_tier_used_blocks", "KV blocks of a tier that are allocated.", "medium")
	kvDecisions = metrics.NewDesc("moeserve_kv_load_decisions_total", "Runs of blocks that a tier had when a sequence began: loaded, split between loading and computing, or computed again.", "choice")

	// vLLM's names: by transfer type, as all of its versions have them, and since 0.26 by direction.
	kvTypes = transferDescs{
		bytes: metrics.NewDesc("vllm:kv_offload_total_bytes_total", "Bytes of KV blocks copied between the GPU and a tier, by source and destination: GPU_to_CPU, PEER_GPU_to_GPU, FILE_to_GPU.", "transfer_type"),
		time:  metrics.NewDesc("vllm:kv_offload_total_time_total", "Seconds that copies of KV blocks between the GPU and a tier took, from start to end: those of several at a time add up.", "transfer_type"),
		size:  metrics.NewDesc("vllm:kv_offload_size", "Bytes of each such copy, of one or more blocks.", "transfer_type"),
	}
	kvStores = transferDescs{
		bytes: metrics.NewDesc("vllm:kv_offload_store_bytes_total", "Bytes of KV blocks stored in all tiers."),
		time:  metrics.NewDesc("vllm:kv_offload_store_time_total", "Seconds that stores of KV blocks took, in all tiers."),
		size:  metrics.NewDesc("vllm:kv_offload_store_size", "Bytes of each store, of one or more blocks."),
	}
	kvLoads = transferDescs{
		bytes: metrics.NewDesc("vllm:kv_offload_load_bytes_total", "Bytes of KV blocks loaded from all tiers."),
		time:  metrics.NewDesc("vllm:kv_offload_load_time_total", "Seconds that loads of KV blocks took, from all tiers."),
		size:  metrics.NewDesc("vllm:kv_offload_load_size", "Bytes of each load, of one or more blocks."),
	}
)

// transferDescs describe the metrics of transfers.
type transferDescs struct{ bytes, time, size *metrics.Desc }

// collect adds the metrics of a model's transfers, which have copied so many bytes.
func (d transferDescs) collect(to *metrics.Sink, model string, bytes int64, t offload.Transfers, labels ...string) {
	of := func(d *metrics.Desc) *metrics.Desc { return d.With("model_name", model).With("engine", "0") }
	to.Counter(of(d.bytes), float64(bytes), labels...)
	to.Counter(of(d.time), t.Seconds, labels...)
	to.Histogram(of(d.size), offload.SizeBounds[:], t.Sizes[:], float64(bytes), labels...)
}

// modelTiers are the tiers of a model, for the metrics.
type modelTiers struct {
	model string
	KVTiers
}

func (k modelTiers) collect(to *metrics.Sink) {
	if len(k.Tiers) == 0 {
		return
	}
	var storedBytes, loadedBytes int64
	var stores, loads offload.Transfers
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
		kvTypes.collect(to, k.model, t.StoredBytes, t.Stores, offload.GPU+"_to_"+t.Medium)
		kvTypes.collect(to, k.model, t.LoadedBytes, t.Loads, t.Medium+"_to_"+offload.GPU)
		to.Gauge(kvCapacity, float64(t.CapacityBlocks), t.Medium)
		to.Gauge(kvUsed, float64(t.UsedBlocks), t.Medium)
		storedBytes, loadedBytes = storedBytes+t.StoredBytes, loadedBytes+t.LoadedBytes
		stores.Add(t.Stores)
		loads.Add(t.Loads)
	}
	kvStores.collect(to, k.model, storedBytes, stores)
	kvLoads.collect(to, k.model, loadedBytes, loads)
	to.Counter(kvDecisions, float64(k.Decisions.Loaded), "loaded")
	to.Counter(kvDecisions, float64(k.Decisions.Split), "split")
	to.Counter(kvDecisions, float64(k.Decisions.Computed), "computed")
}
