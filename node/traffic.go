package node

// Traffic says where experts are and what has moved since the node was opened. It
// may be read while requests run.
type Traffic struct {
	// Hits is how often an expert was where a layer needed it, Fetched the bytes of
	// experts that were fetched, and Resident how many experts are there now; by tier.
	Hits, Fetched, Resident map[string]int64
	// Copied bytes by pair of memories: "host>gpu0".
	Copied map[string]int64
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
	t := Traffic{Hits: byTier(stats.Hits[:]), Fetched: byTier(stats.Fetched[:]), Resident: byTier(resident), Copied: map[string]int64{}}
	for _, p := range n.transfer.Stats() {
		t.Copied[p.From.String()+">"+p.To.String()] += p.Bytes
	}
	return t
}
