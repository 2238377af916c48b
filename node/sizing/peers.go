package sizing

import (
	"fmt"
	"strings"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/experts"
)

// Headroom is the memory left free for other processes on a peer, in bytes.
func Headroom(h configs.Headroom, top *device.Topology, peer device.Space) int64 {
	if h.Share == 0 {
		return h.Bytes
	}
	info, _ := top.Info(peer)
	return int64(h.Share * float64(info.MemoryBytes))
}

// PeerBudget is the memory that can be borrowed from a peer, in bytes.
type PeerBudget struct {
	// Space of the machine: "gpu1".
	Space string
	// Capacity of it, of which Other is used by other processes and Headroom stays free.
	Capacity, Other, Headroom int64
	// Spare may be borrowed, and holds a number of Experts.
	Spare   int64
	Experts int
}

// NewPeerBudget is the budget of a peer for experts of a size, beside what is kept for other purposes.
func NewPeerBudget(peer device.Space, u device.Usage, headroom, kept, expertBytes int64) PeerBudget {
	b := PeerBudget{Space: peer.String(), Capacity: u.Capacity, Other: u.OtherProcesses, Headroom: headroom, Spare: max(u.Free()-headroom-kept, 0)}
	b.Experts = int(b.Spare / expertBytes)
	return b
}

// PeersHold returns an error where peers cannot hold copies of all offloaded experts.
func PeersHold(peers []PeerBudget, plan *experts.Plan) error {
	fit := 0
	var each []string
	for _, b := range peers {
		fit += b.Experts
		each = append(each, fmt.Sprintf("%s %d (%s of %s, after %s used by other processes and %s headroom)",
			b.Space, b.Experts, Bytes(b.Spare), Bytes(b.Capacity), Bytes(b.Other), Bytes(b.Headroom)))
	}
	if want := plan.OffloadedExperts; fit < want {
		return fmt.Errorf("out of memory on peers: need room for %d offloaded experts of %s each, and %d fit: %s; use --offload-tier auto, more --peers or a lower --harvest-headroom",
			want, Bytes(plan.Layout.Size), fit, strings.Join(each, ", "))
	}
	return nil
}
