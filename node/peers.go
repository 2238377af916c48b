package node

import (
	"context"
	"time"

	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/harvest"
	"github.com/moeserve/moeserve/node/fault"
	"github.com/moeserve/moeserve/node/observe"
)

const (
	// slabExperts is the number of experts of a slab: few enough that the release of one
	// frees memory without emptying a peer.
	slabExperts = 4
	// releaseTimeout bounds the wait at the end of a node for the release of borrowed
	// memory.
	releaseTimeout = 30 * time.Second
)

// openHarvest starts borrowing.
func (n *Node) openHarvest(u *setup) error {
	if len(u.peers) == 0 {
		return nil
	}
	policy, err := harvest.NewPolicy(u.settings.Harvest.Policy)
	if err != nil {
		return fault.Of(fault.ErrConfig, err)
	}
	room, err := u.headroom()
	if err != nil {
		return fault.Of(fault.ErrConfig, err)
	}
	if room == 0 {
		room = -1
	}
	monitor, err := u.devices.OpenMonitor(u.peers)
	if err != nil {
		return fault.Of(fault.ErrDevice, err)
	}
	n.harvest, err = harvest.New(harvest.Options{
		Machine: n.machine, Peers: u.peers, Reader: u.devices.Space, Policy: policy, Monitor: monitor,
		Clients:       map[string]harvest.ClientOptions{experts.HarvestClient: {SlabBytes: slabExperts * u.footprint.ExpertBytes()}},
		HeadroomBytes: room,
		Events:        harvest.Tee(harvest.LogEvents(n.log), observe.HarvestEvents(u.o.Events)),
	})
	if err != nil {
		return fault.Of(fault.ErrDevice, err)
	}
	n.started(n.closeHarvest)
	for _, l := range u.peerDevices() {
		n.log.Debug("peer memory may be borrowed", "device", l.Device, "gpu", l.GPU, "name", l.Name, "uuid", l.UUID, "policy", policy.Name(), "headroom_bytes", max(room, 0))
	}
	return nil
}

// closeHarvest releases all borrowed memory. After the first call it does nothing.
func (n *Node) closeHarvest() error {
	ctx, cancel := context.WithTimeout(context.Background(), releaseTimeout)
	defer cancel()
	return n.harvest.Close(ctx)
}

// peerDevices are the peers that may be borrowed from.
func (u *setup) peerDevices() []observe.Peer {
	all := []observe.Peer{}
	for _, p := range u.peers {
		info, _ := u.devices.Machine.Topology().Info(p)
		i, _ := p.GPU()
		l := observe.Peer{Device: p.String(), GPU: i, Name: info.Name, UUID: info.UUID}
		if u.devices.Real() {
			l.GPU = u.devices.GPUs[i]
		}
		all = append(all, l)
	}
	return all
}
