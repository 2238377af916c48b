package observe

import (
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/harvest"
	"github.com/moeserve/moeserve/metrics"
	"github.com/moeserve/moeserve/pipeline"
	"github.com/moeserve/moeserve/transfer"
)

// Experts are where experts are now, and what was used, fetched and moved since the node was
// opened. They have a JSON form.
type Experts struct {
	// Tiers counts experts by the tier of their nearest copy now.
	Tiers map[experts.Tier]int `json:"tiers"`
	// ResidentExperts counts those pinned in the compute GPU's memory, PeerCopies the offloaded
	// ones that have a copy in peer memory.
	ResidentExperts int `json:"resident_experts"`
	PeerCopies      int `json:"peer_copies"`
	experts.Stats
}

func readExperts(s *experts.Store) Experts {
	e := Experts{Tiers: map[experts.Tier]int{}, Stats: s.Stats()}
	for t := range e.Uses {
		e.Tiers[experts.Tier(t)] = 0
	}
	for _, layer := range s.Residency() {
		for _, tier := range layer {
			e.Tiers[tier]++
		}
	}
	for _, layer := range s.Placed() {
		for _, p := range layer {
			switch p.Tier {
			case experts.Resident:
				e.ResidentExperts++
			case experts.Peer:
				e.PeerCopies++
			}
		}
	}
	return e
}

// All is the number of experts of all layers.
func (e *Experts) All() int {
	n := 0
	for _, of := range e.Tiers {
		n += of
	}
	return n
}

// OffloadFraction is the share of the experts that are not resident, from 0 to 1.
func (e *Experts) OffloadFraction() float64 {
	n := e.All()
	return float64(n-e.ResidentExperts) / float64(max(n, 1))
}

var (
	uses              = metrics.NewDesc("moeserve_expert_uses_total", "Uses of experts (one expert needed by one layer of one step), by the tier where the expert was found.", "tier")
	hits              = metrics.NewDesc("moeserve_expert_hits_total", "Uses of experts that were resident or cached in GPU memory.")
	misses            = metrics.NewDesc("moeserve_expert_misses_total", "Uses of experts that had to be fetched from peer or host memory, were read there, or were computed on the CPU.")
	onCPU             = metrics.NewDesc("moeserve_expert_cpu_uses_total", "Misses that the CPU computed, where the expert lies in host memory, so that it was not fetched.")
	prefetches        = metrics.NewDesc("moeserve_expert_prefetches_total", "Misses whose fetch was started before the layer needed the expert.")
	fetched           = metrics.NewDesc("moeserve_expert_fetch_bytes_total", "Bytes of experts fetched, by the tier they came from.", "tier")
	readInPlace       = metrics.NewDesc("moeserve_expert_read_in_place_bytes_total", "Bytes of experts that kernels read where they lie, by the tier.", "tier")
	tiers             = metrics.NewDesc("moeserve_experts", "Experts by the tier of their nearest copy.", "tier")
	offloadFraction   = metrics.NewDesc("moeserve_offload_fraction", "Share of the experts that are offloaded (not resident in GPU memory), from 0 to 1.")
	moves             = metrics.NewDesc("moeserve_expert_moves_total", "Experts promoted to peer memory, demoted or revoked from it, swapped with resident ones, made resident in memory lent by the KV cache, and offloaded from it again.", "move")
	migrated          = metrics.NewDesc("moeserve_expert_migration_bytes_total", "Bytes copied by moves of experts: promotions, swaps, and those made resident.")
	prefetchPredicted = metrics.NewDesc("moeserve_expert_prefetch_predicted_total", "Offloaded experts predicted by the router of the next layer.")
	prefetchUsed      = metrics.NewDesc("moeserve_expert_prefetch_used_total", "Predicted offloaded experts that the layer then used.")
)

func (e Experts) collect(to *metrics.Sink) {
	for t := range e.Uses {
		tier := experts.Tier(t)
		to.Counter(uses, float64(e.Uses[t]), tier.String())
		to.Gauge(tiers, float64(e.Tiers[tier]), tier.String())
	}
	for _, tier := range []experts.Tier{experts.Peer, experts.Host} {
		to.Counter(fetched, float64(e.Fetched[tier]), tier.String())
		to.Counter(readInPlace, float64(e.ReadInPlace[tier]), tier.String())
	}
	to.Counter(hits, float64(e.Hits))
	to.Counter(misses, float64(e.Misses))
	to.Counter(onCPU, float64(e.OnCPU))
	to.Counter(prefetches, float64(e.Prefetched))
	to.Gauge(offloadFraction, e.OffloadFraction())
	to.Counter(moves, float64(e.Promoted), "promoted")
	to.Counter(moves, float64(e.Demoted), "demoted")
	to.Counter(moves, float64(e.Revoked), "revoked")
	to.Counter(moves, float64(e.Swapped), "swapped")
	to.Counter(moves, float64(e.MadeResident), "made_resident")
	to.Counter(moves, float64(e.Offloaded), "offloaded")
	to.Counter(migrated, float64(e.MigratedBytes))
	to.Counter(prefetchPredicted, float64(e.PrefetchPredicted))
	to.Counter(prefetchUsed, float64(e.PrefetchUsed))
}

// Link is what was copied from one memory to another.
type Link struct {
	transfer.PathStats
	// BytesPerSecond is the rate of the link; 0 where it is not known or not limited.
	BytesPerSecond float64
}

// Links are the copies by pair of memories.
type Links []Link

var (
	copied  = metrics.NewDesc("moeserve_copy_bytes_total", "Bytes copied from one memory to another.", "src", "dst")
	purpose = metrics.NewDesc("moeserve_copy_purpose_bytes_total", "Bytes copied from one memory to another, by purpose: what is waited for, such as experts of the layer that runs and weights that are loaded (demand), experts of later layers (prefetch), KV blocks (kv-load, kv-store), moves of experts (migration). Copies whose priority was raised count by the priority that they had in the end.", "src", "dst", "purpose")
	relayed = metrics.NewDesc("moeserve_relayed_bytes_total", "Bytes that the link between the host and a GPU has carried for copies of other GPUs, through its memory.", "src", "dst")
	retired = metrics.NewDesc("moeserve_relay_retired", "1 where a link no longer carries copies of other GPUs, since it failed.", "src", "dst")
	busy    = metrics.NewDesc("moeserve_copy_busy_seconds_total", "Time with a copy under way from one memory to another.", "src", "dst")
)

func (l Links) collect(to *metrics.Sink) {
	for _, p := range l {
		to.Counter(copied, float64(p.Bytes), p.From.String(), p.To.String())
		for class, bytes := range p.ByPriority {
			if c := transfer.Priority(class); c <= transfer.Demand || bytes > 0 {
				to.Counter(purpose, float64(bytes), p.From.String(), p.To.String(), c.String())
			}
		}
		to.Counter(busy, p.Busy.Seconds(), p.From.String(), p.To.String())
		if p.From == device.Host || p.To == device.Host {
			to.Counter(relayed, float64(p.RelayedBytes), p.From.String(), p.To.String())
			value := 0.0
			if p.Retired {
				value = 1
			}
			to.Gauge(retired, value, p.From.String(), p.To.String())
		}
	}
}

// Memory is the account of one memory space, in bytes. It has a JSON form.
type Memory struct {
	Space     string `json:"space"`
	Capacity  int64  `json:"capacity_bytes"`
	Allocated int64  `json:"allocated_bytes"`
	Peak      int64  `json:"peak_bytes"`
}

// Memories are those of all spaces, the host's first.
type Memories []Memory

var (
	memoryUsed     = metrics.NewDesc("moeserve_memory_used_bytes", "Memory that the server has allocated on a device; of the host, pinned memory.", "device")
	memoryCapacity = metrics.NewDesc("moeserve_memory_capacity_bytes", "Memory of a device.", "device")
)

func (m Memories) collect(to *metrics.Sink) {
	for _, s := range m {
		to.Gauge(memoryUsed, float64(s.Allocated), s.Space)
		to.Gauge(memoryCapacity, float64(s.Capacity), s.Space)
	}
}

// Harvest is what is borrowed from each peer now, and how many slabs were revoked, by reason.
type Harvest struct {
	Peers       []harvest.PeerUsage
	Clients     map[string]harvest.ClientUsage
	Revocations map[string]int64
}

var (
	harvested   = metrics.NewDesc("moeserve_harvest_bytes", "Memory of a peer: borrowed and used, free within borrowed slabs, draining before its release, used by other processes, or free.", "device", "state")
	revocations = metrics.NewDesc("moeserve_harvest_revocations_total", "Slabs of peer memory revoked that held objects of the client.", "client", "reason")
	clientBytes = metrics.NewDesc("moeserve_harvest_client_bytes", "Peer memory that a client holds.", "client")
	displaced   = metrics.NewDesc("moeserve_harvest_displaced_bytes_total", "Peer memory of the client that gave way to another client, in whole slabs.", "client")
)

func (h Harvest) collect(to *metrics.Sink) {
	for _, p := range h.Peers {
		peer := p.Space.String()
		to.Gauge(harvested, float64(p.Used), peer, "used")
		to.Gauge(harvested, float64(p.FreeInSlabs), peer, "slab_free")
		to.Gauge(harvested, float64(p.Draining), peer, "draining")
		to.Gauge(harvested, float64(p.Reading.OtherProcesses), peer, "other_processes")
		to.Gauge(harvested, float64(p.Free), peer, "free")
	}
	for name, c := range h.Clients {
		to.Gauge(clientBytes, float64(c.Bytes), name)
		to.Counter(displaced, float64(c.Displaced), name)
		for reason := harvest.ReasonPressure; reason <= harvest.ReasonShutdown; reason++ {
			to.Counter(revocations, float64(c.Revocations[reason]), name, reason.String())
		}
	}
}

// Borrowed is what is borrowed from one peer, in bytes. It has a JSON form.
type Borrowed struct {
	Device string `json:"device"`
	Bytes  int64  `json:"borrowed_bytes"`
}

// Borrowed from each peer.
func (h *Harvest) Borrowed() []Borrowed {
	from := []Borrowed{}
	for _, p := range h.Peers {
		from = append(from, Borrowed{p.Space.String(), p.Used + p.FreeInSlabs + p.Draining})
	}
	return from
}

// Pipeline is how long the compute stream has stalled within steps, by cause, how many decode
// steps were captured as CUDA graphs, and launched as one, and how steps of a model with
// offloaded experts got at these.
type Pipeline struct {
	Stalls pipeline.Stalls
	Graphs pipeline.GraphStats
	Steps  pipeline.StepsByAccess
}

var (
	stalls   = metrics.NewDesc("moeserve_stall_seconds_total", "Stall time of the compute stream within steps, by cause.", "cause")
	captures = metrics.NewDesc("moeserve_graph_captures_total", "Decode steps captured as a CUDA graph.")
	launches = metrics.NewDesc("moeserve_graph_launches_total", "Decode steps launched as a CUDA graph.")
	aheads   = metrics.NewDesc("moeserve_steps_ahead_total", "Decode steps enqueued before the tokens of the step in front were known, by whether their tokens were used or discarded.", "result")
	steps    = metrics.NewDesc("moeserve_steps_total", "Steps of a model with offloaded experts, by how they got at these: copied to the GPU (copy), read by kernels where they lie (direct), or those in host memory computed by the CPU alone (cpu).", "access")
)

func (p Pipeline) collect(to *metrics.Sink) {
	for cause, s := range p.Stalls.ByName() {
		to.Counter(stalls, s, cause)
	}
	to.Counter(captures, float64(p.Graphs.Captured))
	to.Counter(launches, float64(p.Graphs.Launched))
	to.Counter(aheads, float64(p.Graphs.Ahead), "used")
	to.Counter(aheads, float64(p.Graphs.Discarded), "discarded")
	to.Counter(steps, float64(p.Steps.Copied), "copy")
	to.Counter(steps, float64(p.Steps.Direct), "direct")
	to.Counter(steps, float64(p.Steps.OnCPU), "cpu")
}
