package observe

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/harvest"
	"github.com/moeserve/moeserve/metrics"
	"github.com/moeserve/moeserve/node/sizing"
	"github.com/moeserve/moeserve/pipeline"
	"github.com/moeserve/moeserve/transfer"
)

// Experts says where experts are, and what was fetched and moved since the node was
// opened. It has a JSON form.
type Experts struct {
	// Tiers counts experts by the tier of their nearest copy now, Homes by where they
	// live between steps: local, peer or host.
	Tiers  map[experts.Tier]int `json:"tiers"`
	Placed map[experts.Tier]int `json:"homes"`
	experts.Stats
}

func readExperts(s *experts.Store) Experts {
	e := Experts{Tiers: map[experts.Tier]int{}, Placed: map[experts.Tier]int{}, Stats: s.Stats()}
	for t := range e.Uses {
		e.Tiers[experts.Tier(t)] = 0
	}
	for _, layer := range s.Residency() {
		for _, tier := range layer {
			e.Tiers[tier]++
		}
	}
	for _, layer := range s.Placed() {
		for _, h := range layer {
			e.Placed[h.Tier]++
		}
	}
	return e
}

var (
	uses              = desc("moeserve_expert_uses_total", "How often an expert was where a layer needed it.", "tier")
	fetched           = desc("moeserve_expert_fetch_bytes_total", "Bytes of experts fetched.", "tier")
	resident          = desc("moeserve_experts", "Experts that are in a tier.", "tier")
	moves             = desc("moeserve_expert_moves_total", "Changes of where experts live.", "move")
	migrated          = desc("moeserve_expert_migration_bytes_total", "Bytes copied so that experts live elsewhere.")
	prefetchPredicted = desc("moeserve_expert_prefetch_predicted_total", "Experts not in GPU memory for good that the next layer's router would have chosen, and so are fetched ahead.")
	prefetchUsed      = desc("moeserve_expert_prefetch_used_total", "Those guessed experts that were then chosen.")
)

func (e Experts) collect(to *metrics.Sink) {
	for t := range e.Uses {
		tier := experts.Tier(t)
		to.Counter(uses, float64(e.Uses[t]), tier.String())
		to.Counter(fetched, float64(e.Fetched[t]), tier.String())
		to.Gauge(resident, float64(e.Tiers[tier]), tier.String())
	}
	to.Counter(moves, float64(e.Promoted), "promoted")
	to.Counter(moves, float64(e.Demoted), "demoted")
	to.Counter(moves, float64(e.Revoked), "revoked")
	to.Counter(moves, float64(e.Swapped), "swapped")
	to.Counter(migrated, float64(e.MigratedBytes))
	to.Counter(prefetchPredicted, float64(e.PrefetchPredicted))
	to.Counter(prefetchUsed, float64(e.PrefetchUsed))
}

// Lines are a report's, a label and a text behind a tab. how says what was asked to be
// offloaded; with adaptive, what is local is so for now.
func (e *Experts) Lines(how string, adaptive bool, h *Harvest) []string {
	local, peer, host := e.Placed[experts.Resident], e.Placed[experts.Peer], e.Placed[experts.Host]
	forGood := " for good"
	if adaptive {
		forGood = ""
	}
	where := ""
	if len(h.Peers) > 0 {
		where = fmt.Sprintf(", %d of them with peers", peer)
	}
	from := ""
	if n := e.Uses[experts.Peer]; n > 0 {
		from = fmt.Sprintf("%d from peers, %d from the host, ", n, e.Uses[experts.Host])
	}
	lines := []string{
		fmt.Sprintf("experts\t%d: %d local%s, %d offloaded (%s)%s", local+peer+host, local, forGood, peer+host, how, where),
		fmt.Sprintf("wanted\t%d times there (%d local, %d still in the ring), %d times fetched (%s%d ahead of need)",
			e.Uses[experts.Resident]+e.Uses[experts.Cached], e.Uses[experts.Resident], e.Uses[experts.Cached], e.Misses, from, e.Prefetched),
	}
	if e.PrefetchPredicted > 0 {
		lines = append(lines, fmt.Sprintf("predicted\t%d by the next layer's router, %d of them right", e.PrefetchPredicted, e.PrefetchUsed))
	}
	if e.Swapped > 0 {
		lines = append(lines, fmt.Sprintf("swapped\t%d experts became local in place of others", e.Swapped))
	}
	if e.Promoted > 0 {
		lines = append(lines, fmt.Sprintf("peers\t%s borrowed; %d copies came, %d were given back, %d revoked", h.borrowed(), e.Promoted, e.Demoted, e.Revoked))
		lines = append(lines, h.lines()...)
	}
	return lines
}

// Links are the copies by pair of memories.
type Links []transfer.PathStats

// Bytes copied so far from one memory to another, by their names: "host>gpu0".
func (l Links) Bytes() map[string]int64 {
	m := map[string]int64{}
	for _, p := range l {
		m[p.From.String()+">"+p.To.String()] += p.Bytes
	}
	return m
}

var copied = desc("moeserve_path_bytes_total", "Bytes copied between two memories.", "path")

func (l Links) collect(to *metrics.Sink) {
	for path, n := range l.Bytes() {
		to.Counter(copied, float64(n), path)
	}
}

// Harvest is what is borrowed of each peer now, and how often what was is revoked, by
// reason.
type Harvest struct {
	Peers       []harvest.PeerUsage
	Revocations map[string]int64
}

var (
	harvested   = desc("moeserve_harvest_bytes", "Memory of a peer, by who has it.", "device", "state")
	revocations = desc("moeserve_harvest_revocations_total", "Pieces of borrowed memory that were revoked.", "reason")
)

func (h Harvest) collect(to *metrics.Sink) {
	for _, p := range h.Peers {
		// Experts use it or leave it unused, it is leaving, others hold it, or it is free.
		peer := p.Space.String()
		to.Gauge(harvested, float64(p.Used), peer, "used")
		to.Gauge(harvested, float64(p.FreeInSlabs), peer, "unused")
		to.Gauge(harvested, float64(p.Draining), peer, "leaving")
		to.Gauge(harvested, float64(p.Reading.OtherProcesses), peer, "other")
		to.Gauge(harvested, float64(p.Free), peer, "free")
	}
	for reason, n := range h.Revocations {
		to.Counter(revocations, float64(n), reason)
	}
}

// Borrowed is what is borrowed from one peer, in bytes. It has a JSON form.
type Borrowed struct {
	Device string `json:"device"`
	Bytes  int64  `json:"borrowed_bytes"`
}

// Borrowed from each peer.
func (h *Harvest) Borrowed() []Borrowed {
	loans := []Borrowed{}
	for _, p := range h.Peers {
		loans = append(loans, Borrowed{p.Space.String(), p.Used + p.FreeInSlabs + p.Draining})
	}
	return loans
}

// borrowed tells how much of which peer.
func (h *Harvest) borrowed() string {
	var lent []string
	for _, l := range h.Borrowed() {
		lent = append(lent, fmt.Sprintf("%s of %s", sizing.Bytes(l.Bytes), l.Device))
	}
	return strings.Join(lent, ", ")
}

// lines tell what was revoked, where anything was.
func (h *Harvest) lines() []string {
	var why []string
	for _, reason := range slices.Sorted(maps.Keys(h.Revocations)) {
		if n := h.Revocations[reason]; n > 0 {
			why = append(why, fmt.Sprintf("%d for %s", n, reason))
		}
	}
	if len(why) == 0 {
		return nil
	}
	return []string{"revoked\tpieces of borrowed memory: " + strings.Join(why, ", ")}
}

// Pipeline is for how long the compute device has stood still within steps, by cause, and
// how many decode steps were captured as CUDA graphs, and ran as one.
type Pipeline struct {
	Stalls pipeline.Stalls
	Graphs pipeline.GraphStats
}

var (
	stalls   = desc("moeserve_stall_seconds_total", "For how long the compute device stood still within steps.", "cause")
	captures = desc("moeserve_graph_captures_total", "Decode steps that were taken down as a CUDA graph.")
	launches = desc("moeserve_graph_launches_total", "Decode steps that ran as a CUDA graph.")
)

func (p Pipeline) collect(to *metrics.Sink) {
	for cause, s := range p.Stalls.ByName() {
		to.Counter(stalls, s, cause)
	}
	to.Counter(captures, float64(p.Graphs.Captured))
	to.Counter(launches, float64(p.Graphs.Launched))
}
