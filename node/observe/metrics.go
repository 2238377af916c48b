package observe

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/harvest"
	"github.com/moeserve/moeserve/node/sizing"
	"github.com/moeserve/moeserve/pipeline"
	"github.com/moeserve/moeserve/transfer"
)

// Experts says where experts are, and what was fetched and moved since the node was
// opened. It has a JSON form.
type Experts struct {
	// Where counts experts by the tier of their nearest copy now, Homes by where they
	// live between steps: local, peer or host.
	Where map[experts.Tier]int `json:"where"`
	Homes map[experts.Tier]int `json:"homes"`
	experts.Stats
}

func readExperts(s *experts.Store) Experts {
	e := Experts{Where: map[experts.Tier]int{}, Homes: map[experts.Tier]int{}, Stats: s.Stats()}
	for t := range e.Hits {
		e.Where[experts.Tier(t)] = 0
	}
	for _, layer := range s.Residency() {
		for _, tier := range layer {
			e.Where[tier]++
		}
	}
	for _, layer := range s.Homes() {
		for _, h := range layer {
			e.Homes[h.Tier]++
		}
	}
	return e
}

var (
	hits       = desc("moeserve_expert_hits_total", "How often an expert was where a layer needed it.", "tier")
	fetched    = desc("moeserve_expert_fetch_bytes_total", "Bytes of experts fetched.", "tier")
	resident   = desc("moeserve_expert_resident", "Experts that are in a tier.", "tier")
	moves      = desc("moeserve_expert_moves_total", "Changes of where experts live.", "move")
	rebalanced = desc("moeserve_rebalanced_bytes_total", "Bytes copied so that experts live elsewhere.")
	guesses    = desc("moeserve_expert_guesses_total", "Experts not in GPU memory for good that the next layer's router would have chosen, and so are fetched ahead.")
	right      = desc("moeserve_expert_guesses_right_total", "Those guessed experts that were then chosen.")

	expertDescs = []*prometheus.Desc{hits, fetched, resident, moves, rebalanced, guesses, right}
)

func (e Experts) collect(to sink) {
	for t := range e.Hits {
		tier := experts.Tier(t)
		to.counter(hits, float64(e.Hits[t]), tier.String())
		to.counter(fetched, float64(e.Fetched[t]), tier.String())
		to.gauge(resident, float64(e.Where[tier]), tier.String())
	}
	to.counter(moves, float64(e.Promoted), "promoted")
	to.counter(moves, float64(e.Demoted), "demoted")
	to.counter(moves, float64(e.Revoked), "revoked")
	to.counter(moves, float64(e.Swapped), "swapped")
	to.counter(rebalanced, float64(e.MovedBytes))
	to.counter(guesses, float64(e.Guessed))
	to.counter(right, float64(e.GuessedRight))
}

// Lines are a report's, a label and a text behind a tab. how says what was asked to be
// offloaded; with adaptive, what is local is so for now.
func (e *Experts) Lines(how string, adaptive bool, h *Harvest) []string {
	local, peer, host := e.Homes[experts.Local], e.Homes[experts.Peer], e.Homes[experts.Host]
	forGood := " for good"
	if adaptive {
		forGood = ""
	}
	where := ""
	if len(h.Peers) > 0 {
		where = fmt.Sprintf(", %d of them with peers", peer)
	}
	from := ""
	if n := e.Hits[experts.Peer]; n > 0 {
		from = fmt.Sprintf("%d from peers, %d from the host, ", n, e.Hits[experts.Host])
	}
	lines := []string{
		fmt.Sprintf("experts\t%d: %d local%s, %d offloaded (%s)%s", local+peer+host, local, forGood, peer+host, how, where),
		fmt.Sprintf("wanted\t%d times there (%d local, %d still in the ring), %d times fetched (%s%d ahead of need)",
			e.Hits[experts.Local]+e.Hits[experts.Ring], e.Hits[experts.Local], e.Hits[experts.Ring], e.Misses, from, e.Prefetched),
	}
	if e.Guessed > 0 {
		lines = append(lines, fmt.Sprintf("guessed\t%d by the next layer's router, %d of them right", e.Guessed, e.GuessedRight))
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

var (
	paths     = desc("moeserve_path_bytes_total", "Bytes copied between two memories.", "path")
	linkDescs = []*prometheus.Desc{paths}
)

func (l Links) collect(to sink) {
	for path, n := range l.Bytes() {
		to.counter(paths, float64(n), path)
	}
}

// Harvest is what is borrowed of each peer now, and how often what was is revoked, by
// reason.
type Harvest struct {
	Peers       []harvest.PeerUsage
	Revocations map[string]int64
}

var (
	harvested    = desc("moeserve_harvest_bytes", "Memory of a peer, by who has it.", "device", "state")
	revocations  = desc("moeserve_harvest_revocations_total", "Pieces of borrowed memory that were revoked.", "reason")
	harvestDescs = []*prometheus.Desc{harvested, revocations}
)

func (h Harvest) collect(to sink) {
	for _, p := range h.Peers {
		// Experts use it or leave it unused, it is leaving, others hold it, or it is free.
		peer := p.Space.String()
		to.gauge(harvested, float64(p.Used), peer, "used")
		to.gauge(harvested, float64(p.Unused), peer, "unused")
		to.gauge(harvested, float64(p.Leaving), peer, "leaving")
		to.gauge(harvested, float64(p.Reading.Other), peer, "other")
		to.gauge(harvested, float64(p.Free), peer, "free")
	}
	for reason, n := range h.Revocations {
		to.counter(revocations, float64(n), reason)
	}
}

// Loan is what is borrowed from one peer, in bytes. It has a JSON form.
type Loan struct {
	Device string `json:"device"`
	Bytes  int64  `json:"borrowed_bytes"`
}

// Borrowed from each peer.
func (h *Harvest) Borrowed() []Loan {
	loans := []Loan{}
	for _, p := range h.Peers {
		loans = append(loans, Loan{p.Space.String(), p.Used + p.Unused + p.Leaving})
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
	stalls        = desc("moeserve_pipeline_stall_seconds_total", "For how long the compute device stood still within steps.", "cause")
	captures      = desc("moeserve_pipeline_graph_captures_total", "Decode steps that were taken down as a CUDA graph.")
	launches      = desc("moeserve_pipeline_graph_launches_total", "Decode steps that ran as a CUDA graph.")
	pipelineDescs = []*prometheus.Desc{stalls, captures, launches}
)

func (p Pipeline) collect(to sink) {
	for cause, s := range p.Stalls.ByName() {
		to.counter(stalls, s, cause)
	}
	to.counter(captures, float64(p.Graphs.Captured))
	to.counter(launches, float64(p.Graphs.Launched))
}
