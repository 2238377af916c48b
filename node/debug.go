package node

import (
	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/harvest"
)

// Residency says where every expert is and whose memory is borrowed for it, for
// people who look into a running node. It has a JSON form.
type Residency struct {
	Experts experts.Snapshot `json:"experts"`
	// Peers that may be borrowed from; Harvest is what is.
	Peers   []Lender       `json:"peers"`
	Harvest *harvest.State `json:"harvest"`
	// Rebalancer is what it has done; nil where nothing can move.
	Rebalancer *RebalancerCounts `json:"rebalancer"`
}

// RebalancerCounts are the moves that the rebalancer has begun: to free peer memory,
// to that of another expert, to local memory. Refused were those that there was no
// room for after all, and Readmitted peers that were tried again.
type RebalancerCounts struct {
	Promoted   int64 `json:"promoted"`
	Replaced   int64 `json:"replaced"`
	Swapped    int64 `json:"swapped"`
	Refused    int64 `json:"refused"`
	Readmitted int64 `json:"peers_readmitted"`
}

// Residency takes stock. It may be called while requests run.
func (n *Node) Residency() Residency {
	r := Residency{Experts: n.store.Snapshot(), Peers: n.lenders()}
	if n.harvest != nil {
		s := n.harvest.State()
		r.Harvest = &s
	}
	if n.balance != nil {
		c := RebalancerCounts(n.balance.Counts())
		r.Rebalancer = &c
	}
	return r
}
