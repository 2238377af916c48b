package node

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/harvest"
)

const (
	// slabExperts is how many experts a piece of borrowed memory holds: few enough
	// that giving one back frees memory without emptying a peer.
	slabExperts = 4
	// giveBack is how long the end of a node waits until peers have their memory back.
	giveBack = 30 * time.Second
)

// borrows says whether offloaded experts may lie with peers, as far as the settings
// tell: a policy may yet offload some.
func borrows(s *configs.Settings) bool {
	return s.Offload.Tier != configs.HostTier && (s.Offload.Fraction > 0 || s.Offload.LocalExperts != "")
}

// choosePeers works out which memories of the machine may be borrowed from. Where it
// turns out that nothing is offloaded, none is.
func (n *Node) choosePeers(s *configs.Settings) error {
	c, err := s.Device.ParsePeers()
	if err != nil {
		return err
	}
	top := n.machine.Topology()
	var peers []device.Space
	switch {
	case n.opened != nil: // of real GPUs, just those that were named
		for i := range n.opened[1:] {
			peers = append(peers, device.HBM(i+1))
		}
	case c.Auto:
		for i := range top.GPUs {
			if p := device.HBM(i); p != n.space && reach(top, p, n.space) {
				peers = append(peers, p)
			}
		}
	default:
		for _, i := range c.GPUs {
			peers = append(peers, device.HBM(i))
		}
	}
	// What is named must be right, whether or not it is used.
	if err := (harvest.Options{Machine: n.machine, Peers: peers, Reader: n.space}).EnsureDefaults().Validate(); err != nil {
		return err
	}
	if s.Offload.Tier == configs.HostTier {
		return nil
	}
	if borrows(s) && s.Offload.Tier == configs.PeerTier && len(peers) == 0 {
		if n.opened != nil {
			return errors.New("offload-tier is peer and peers names no GPU: name those whose memory may be borrowed")
		}
		return fmt.Errorf("offload-tier is peer, and there is no GPU but %s to lend memory", n.space)
	}
	n.peers = peers
	n.policy, err = harvest.NewPolicy(s.Harvest.Policy)
	return err
}

// reach says whether copies go from a to b and back, and from the host to a.
func reach(top *device.Topology, a, b device.Space) bool {
	for _, pair := range []device.Pair{{From: a, To: b}, {From: device.Host, To: a}} {
		if _, err := top.Path(pair.From, pair.To); err != nil {
			return false
		}
	}
	return true
}

// headroom is what stays free on each peer, in bytes.
func (n *Node) headroom() (int64, error) {
	h, err := n.settings.Harvest.ParseHeadroom()
	if err != nil {
		return 0, err
	}
	if h.Share == 0 {
		return h.Bytes, nil
	}
	var most int64
	for _, p := range n.peers {
		info, _ := n.machine.Topology().Info(p)
		most = max(most, info.MemoryBytes)
	}
	return int64(h.Share * float64(most)), nil
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

// peerBudgets says what each peer can lend to experts of a size.
func (n *Node) peerBudgets(size int64) ([]PeerBudget, error) {
	room, err := n.headroom()
	if err != nil {
		return nil, err
	}
	var all []PeerBudget
	for _, p := range n.peers {
		u, err := n.machine.Usage(p)
		if err != nil {
			return nil, err
		}
		b := PeerBudget{Space: p.String(), Capacity: u.Capacity, Other: u.Other, Headroom: room, Spare: max(u.Free()-room, 0)}
		b.Experts = int(b.Spare / size)
		all = append(all, b)
	}
	return all, nil
}

// peersHold says whether peers can hold all offloaded experts, where they must.
func (n *Node) peersHold(peers []PeerBudget) error {
	if n.settings.Offload.Tier != configs.PeerTier {
		return nil
	}
	fit := 0
	var each []string
	for _, b := range peers {
		fit += b.Experts
		each = append(each, fmt.Sprintf("%s %d (%s of %s, after %s of others and %s of head-room)",
			b.Space, b.Experts, Bytes(b.Spare), Bytes(b.Capacity), Bytes(b.Other), Bytes(b.Headroom)))
	}
	if want := n.plan.OffloadedExperts; fit < want {
		return fmt.Errorf("the peers' memory does not hold the offloaded experts: %d of %s each, and %d fit: %s; offload fewer (offload-fraction), name more peers, lower harvest-headroom, or take offload-tier auto",
			want, Bytes(n.plan.Layout.Size), fit, strings.Join(each, ", "))
	}
	return nil
}

// shareMemory leaves emulated peers only as much memory as this machine has beside
// what the compute device and the host take of it: it is all the same memory. The
// rest is accounted for as taken by others.
func (n *Node) shareMemory(w *needs, fit KVFit) error {
	if n.taker == nil || !n.machine.Capabilities().KeepsData || len(n.peers) == 0 {
		return nil
	}
	have, ok := availableMemory()
	if !ok {
		return nil
	}
	left := max(have-w.device.Need()-w.host.Need(), 0)
	// A cache is taken page by page as sequences grow; it has a right to half.
	left -= min(int64(fit.Blocks)*w.kv.BlockBytes(), left/2)
	for _, p := range n.peers {
		u, err := n.machine.Usage(p)
		if err != nil {
			return err
		}
		if over := u.Free() - left/int64(len(n.peers)); over > 0 {
			if err := n.taker.Take(p, over); err != nil {
				return err
			}
		}
	}
	return nil
}

// openHarvest starts borrowing.
func (n *Node) openHarvest(events func(Event)) error {
	if len(n.peers) == 0 {
		return nil
	}
	room, err := n.headroom()
	if err != nil {
		return fail(ErrConfig, err)
	}
	if room == 0 {
		room = -1
	}
	monitor, err := n.openMonitor()
	if err != nil {
		return fail(ErrDevice, err)
	}
	n.harvest, err = harvest.New(harvest.Options{
		Machine: n.machine, Peers: n.peers, Reader: n.space, Policy: n.policy, Monitor: monitor,
		Clients:       map[string]harvest.ClientOptions{experts.HarvestClient: {SlabBytes: slabExperts * n.plan.Layout.Size}},
		HeadroomBytes: room,
		Events:        harvest.Tee(harvest.LogEvents(n.log), harvestEvents(events)),
	})
	if err != nil {
		return fail(ErrDevice, err)
	}
	n.closers = append(n.closers, n.closeHarvest)
	for _, l := range n.lenders() {
		n.log.Info("memory of a peer may be borrowed", "device", l.Device, "gpu", l.GPU, "name", l.Name, "uuid", l.UUID, "policy", n.policy.Name(), "headroom_bytes", max(room, 0))
	}
	return nil
}

// closeHarvest gives everything back. Once that is done, it does nothing.
func (n *Node) closeHarvest() error {
	ctx, cancel := context.WithTimeout(context.Background(), giveBack)
	defer cancel()
	return n.harvest.Close(ctx)
}

// Lender is a peer as the outside knows it.
type Lender struct {
	// Device is what it is called here: "gpu1".
	Device string `json:"device"`
	// GPU is the driver's number.
	GPU  int    `json:"gpu"`
	Name string `json:"name"`
	UUID string `json:"uuid"`
}

func (n *Node) lenders() []Lender {
	all := []Lender{}
	for _, p := range n.peers {
		info, _ := n.machine.Topology().Info(p)
		i, _ := p.GPU()
		l := Lender{Device: p.String(), GPU: i, Name: info.Name, UUID: info.UUID}
		if n.opened != nil {
			l.GPU = n.opened[i]
		}
		all = append(all, l)
	}
	return all
}
