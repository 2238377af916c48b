package sizing

import (
	"fmt"
	"strings"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/experts"
)

// Headroom is what stays free on each peer, in bytes: a share is one of the largest.
func Headroom(h configs.Headroom, top *device.Topology, peers []device.Space) int64 {
	if h.Share == 0 {
		return h.Bytes
	}
	var most int64
	for _, p := range peers {
		info, _ := top.Info(p)
		most = max(most, info.MemoryBytes)
	}
	return int64(h.Share * float64(most))
}

// PeerBudget is what a peer can lend, in bytes.
type PeerBudget struct {
	// Space of the machine: "gpu1".
	Space string
	// Capacity of it, of which Other is taken by others and Headroom stays free.
	Capacity, Other, Headroom int64
	// Spare may be borrowed, and holds so many Experts.
	Spare   int64
	Experts int
}

// Lent is what a peer can lend to experts of a size.
func Lent(peer device.Space, u device.Usage, headroom, expertBytes int64) PeerBudget {
	b := PeerBudget{Space: peer.String(), Capacity: u.Capacity, Other: u.OtherProcesses, Headroom: headroom, Spare: max(u.Free()-headroom, 0)}
	b.Experts = int(b.Spare / expertBytes)
	return b
}

// PeersHold says whether peers can hold all offloaded experts.
func PeersHold(peers []PeerBudget, plan *experts.Plan) error {
	fit := 0
	var each []string
	for _, b := range peers {
		fit += b.Experts
		each = append(each, fmt.Sprintf("%s %d (%s of %s, after %s of others and %s of head-room)",
			b.Space, b.Experts, Bytes(b.Spare), Bytes(b.Capacity), Bytes(b.Other), Bytes(b.Headroom)))
	}
	if want := plan.OffloadedExperts; fit < want {
		return fmt.Errorf("the peers' memory does not hold the offloaded experts: %d of %s each, and %d fit: %s; offload fewer (offload-fraction), name more peers, lower harvest-headroom, or take offload-tier auto",
			want, Bytes(plan.Layout.Size), fit, strings.Join(each, ", "))
	}
	return nil
}
