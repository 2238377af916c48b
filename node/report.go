package node

import (
	"context"
	"time"

	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/models"
	"github.com/moeserve/moeserve/transfer"
)

// Report says where experts are and what has moved since the node was opened.
type Report struct {
	// Model, Device and Backend as the user would name them.
	Model, Device, Backend string
	// Memory of each space.
	Memory []SpaceReport
	// Layers that have experts, by the model's numbers.
	Layers []LayerReport
	// Experts counts hits, misses and bytes.
	Experts experts.Stats
	// Homes counts experts by where they live between steps: local, peer or host.
	Homes map[string]int
	// Adaptive says that other experts may become local.
	Adaptive bool
	// Peers that may be borrowed from, and Revocations of what was, by reason.
	Peers       []PeerReport
	Revocations map[string]int64
	// Paths are the copies by pair of memories.
	Paths []transfer.PathStats
	// Stalls is for how long, in seconds, the compute device has stood still within steps,
	// by cause: see pipeline.Cause.
	Stalls map[string]float64
	// Steps that ended; Retried of them were run again after a failed copy.
	Steps, Retried int64
	// LoadTime is how long taking memory and loading took.
	LoadTime time.Duration
}

// PeerReport is what is borrowed from one peer, in bytes.
type PeerReport struct {
	Device   string
	Borrowed int64
}

// SpaceReport is the account of one memory space, in bytes.
type SpaceReport struct {
	Space                     string
	Capacity, Allocated, Peak int64
}

// LayerReport says of one layer where its experts are.
type LayerReport struct {
	Layer int
	// Tiers of its experts, by their numbers.
	Tiers []experts.Tier
	// Activations is how many rows chose each expert, Fetches how often each was
	// fetched.
	Activations, Fetches []int64
}

// Report reads the counts. No request may be running.
func (n *Node) Report(ctx context.Context) (Report, error) {
	r := Report{
		Model: n.name, Backend: n.backend.Name(), Experts: n.store.Stats(), Paths: n.transfer.Stats(),
		LoadTime: n.loadTime, Stalls: n.pipe.Stalls().ByName(),
	}
	state := n.engine.State()
	r.Steps, r.Retried = state.Steps, state.Retried
	t := n.machine.Topology()
	if info, ok := t.Info(n.space); ok {
		r.Device = info.Name
	}
	for _, s := range t.Spaces() {
		u, err := n.machine.Usage(s)
		if err != nil {
			return r, err
		}
		r.Memory = append(r.Memory, SpaceReport{Space: s.String(), Capacity: u.Capacity, Allocated: u.Allocated, Peak: u.Peak})
	}
	counts, err := n.pipe.Counts(ctx)
	if err != nil {
		return r, err
	}
	r.Adaptive, r.Homes = n.plan.Adaptive, map[string]int{}
	for _, layer := range n.store.Homes() {
		for _, h := range layer {
			r.Homes[h.Tier.String()]++
		}
	}
	if n.harvest != nil {
		s := n.harvest.State()
		r.Revocations = byReason(s)
		for _, p := range s.Peers {
			r.Peers = append(r.Peers, PeerReport{p.Space.String(), p.Used + p.Unused + p.Leaving})
		}
	}
	where, fetches := n.store.Residency(), n.store.Fetches()
	for i, l := range n.store.Layers() {
		r.Layers = append(r.Layers, LayerReport{Layer: l, Tiers: where[i], Activations: counts[l], Fetches: fetches[i]})
	}
	return r, nil
}

// Where counts the experts by the name of the tier that they are in.
func (r *Report) Where() map[string]int {
	where := byTier(make([]int, len(r.Experts.Hits)))
	for _, l := range r.Layers {
		for _, t := range l.Tiers {
			where[t.String()]++
		}
	}
	return where
}

// Hits is how often an expert was where a layer needed it, by tier.
func (r *Report) Hits() map[string]int64 { return byTier(r.Experts.Hits[:]) }

// Fetched is the bytes of fetched experts by the tier that they came from.
func (r *Report) Fetched() map[string]int64 { return byTier(r.Experts.Fetched[:]) }

func byTier[T any](values []T) map[string]T {
	m := make(map[string]T, len(values))
	for t, v := range values {
		m[experts.Tier(t).String()] = v
	}
	return m
}

// Sizes are a model's, in bytes, as `inspect` shows them.
type Sizes struct {
	Parameters           int64
	ExpertCount          int
	ExpertBytes, Experts int64 // one, and all of them
	Other                int64
	KVPerToken           int64 // 16 bit
}

// SizesOf a model whose weights lie as l says.
func SizesOf(c *models.Config, l *models.Layout) Sizes {
	s := Sizes{
		Parameters: c.Parameters(), ExpertCount: c.ExpertCount(), Experts: l.ExpertBytes,
		Other: l.Bytes, KVPerToken: c.KVBytesPerToken(c.DType),
	}
	if s.ExpertCount > 0 {
		s.ExpertBytes = l.ExpertBytes / int64(s.ExpertCount)
	}
	return s
}
