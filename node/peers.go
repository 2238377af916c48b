package node

import (
	"context"
	"time"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/harvest"
	"github.com/moeserve/moeserve/node/fault"
	"github.com/moeserve/moeserve/node/observe"
)

const (
	// slabExperts is the number of experts of a slab where no size is set: few enough that
	// the release of one frees memory without emptying a peer.
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
	o, err := u.borrowing()
	if err != nil {
		return fault.Of(fault.ErrConfig, err)
	}
	monitor, err := u.devices.OpenMonitor(u.peers)
	if err != nil {
		return fault.Of(fault.ErrDevice, err)
	}
	o.Monitor = monitor
	o.Events = harvest.Tee(harvest.LogEvents(n.log), observe.HarvestEvents(u.o.Events))
	if n.harvest, err = harvest.New(o); err != nil {
		return fault.Of(fault.ErrDevice, err)
	}
	n.started(n.closeHarvest)
	peers := n.harvest.State().Peers
	for i, l := range u.peerDevices() {
		n.log.Debug("peer memory may be borrowed", "device", l.Device, "gpu", l.GPU, "name", l.Name, "uuid", l.UUID, "policy", o.Policy.Name(), "headroom_bytes", peers[i].Headroom)
	}
	return nil
}

// borrowing are the options of harvest by the settings.
func (u *setup) borrowing() (o harvest.Options, err error) {
	s := &u.settings.Harvest
	o = harvest.Options{Machine: u.devices.Machine, Peers: u.peers, Reader: u.devices.Space}
	if o.Policy, err = harvest.NewPolicy(s.Policy); err != nil {
		return o, err
	}
	room, err := s.ParseHeadroom()
	if err != nil {
		return o, err
	}
	o.HeadroomBytes, o.HeadroomShare = room.Bytes, room.Share
	if room == (configs.Headroom{}) {
		o.HeadroomBytes = -1
	}
	slab, err := s.ParseSlabSize()
	if err != nil {
		return o, err
	}
	if slab == 0 {
		slab = slabExperts * u.footprint.ExpertBytes()
	}
	o.Clients = map[string]harvest.ClientOptions{experts.HarvestClient: {SlabBytes: slab}}
	times, err := s.ParseTimes()
	if err != nil {
		return o, err
	}
	o.Deadline, o.Interval, o.Cooldown = times.Deadline, times.PollInterval, times.Cooldown
	if o.Cooldown == 0 {
		o.Cooldown = -1
	}
	return o, nil
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
