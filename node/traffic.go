package node

import "github.com/moeserve/moeserve/harvest"

// Traffic says where experts are and what has moved since the node was opened. It
// may be read while requests run.
type Traffic struct {
	// Hits is how often an expert was where a layer needed it, Fetched the bytes of
	// experts that were fetched, and Resident how many experts are there now; by tier.
	Hits, Fetched, Resident map[string]int64
	// Moves counts changes of where experts live, by what they were, and MovedBytes
	// what was copied for them.
	Moves      map[string]int64
	MovedBytes int64
	// Guesses are experts fetched because the next layer's router would have chosen
	// them, GuessesRight those that it then did.
	Guesses, GuessesRight int64
	// Copied bytes by pair of memories: "host>gpu0".
	Copied map[string]int64
	// Harvest has the bytes of each peer's memory by who has them: experts use them or
	// leave them unused, they are leaving, others hold them, or they are free.
	Harvest map[string]map[string]int64
	// Revocations counts pieces of borrowed memory that were revoked, by reason.
	Revocations map[string]int64
	// GraphCaptures and GraphLaunches count decode steps that were taken down as CUDA
	// graphs, and that ran as one.
	GraphCaptures, GraphLaunches int64
	// Stalls is for how long, in seconds, the compute device has stood still within
	// steps, by cause: see pipeline.Cause.
	Stalls map[string]float64
}

// Traffic reads the counts.
func (n *Node) Traffic() Traffic {
	stats := n.store.Stats()
	resident := make([]int64, len(stats.Hits))
	for _, layer := range n.store.Residency() {
		for _, tier := range layer {
			resident[tier]++
		}
	}
	graphs := n.pipe.Graphs()
	t := Traffic{
		Hits: byTier(stats.Hits[:]), Fetched: byTier(stats.Fetched[:]), Resident: byTier(resident),
		Moves: map[string]int64{
			"promoted": stats.Promoted, "demoted": stats.Demoted, "revoked": stats.Revoked, "swapped": stats.Swapped,
		},
		MovedBytes: stats.MovedBytes, Guesses: stats.Guessed, GuessesRight: stats.GuessedRight,
		Copied: map[string]int64{}, Harvest: map[string]map[string]int64{}, Revocations: map[string]int64{},
		Stalls: n.pipe.Stalls().ByName(), GraphCaptures: graphs.Captured, GraphLaunches: graphs.Launched,
	}
	for _, p := range n.transfer.Stats() {
		t.Copied[p.From.String()+">"+p.To.String()] += p.Bytes
	}
	if n.harvest == nil {
		return t
	}
	s := n.harvest.State()
	t.Revocations = byReason(s)
	for _, p := range s.Peers {
		t.Harvest[p.Space.String()] = map[string]int64{"used": p.Used, "unused": p.Unused, "leaving": p.Leaving, "other": p.Reading.Other, "free": p.Free}
	}
	return t
}

// byReason is how many slabs were revoked, by the name of the reason.
func byReason(s harvest.State) map[string]int64 {
	counts := map[string]int64{}
	for reason, n := range s.Revocations {
		counts[reason.String()] = n
	}
	return counts
}
