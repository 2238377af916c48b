package node

import (
	"context"
	"slices"
	"time"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/harvest"
	"github.com/moeserve/moeserve/kvcache/offload"
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
	if len(u.lending()) == 0 {
		return nil
	}
	o, err := u.borrowing()
	if err != nil {
		return fault.Of(fault.ErrConfig, err)
	}
	monitor, err := u.devices.OpenMonitor(u.lending(), n.copying)
	if err != nil {
		return fault.Of(fault.ErrDevice, err)
	}
	o.Monitor = monitor
	o.Events = harvest.Tee(harvest.LogEvents(n.log), observe.HarvestEvents(u.o.Events))
	if len(u.paths.relays) > 0 {
		in, out := u.paths.buffers()
		n.relays = &relays{
			engine: n.transfer, owner: harvest.NewOwner("relayed copies"), in: in, out: out, log: n.log,
			gpus: u.paths.relays, held: map[device.Space]*harvest.Ref{}, retired: map[device.Pair]bool{},
		}
		o.Events = harvest.Tee(o.Events, harvest.EventListener{RevocationStarted: n.relays.revoked})
	}
	if n.harvest, err = harvest.New(o); err != nil {
		return fault.Of(fault.ErrDevice, err)
	}
	n.lenders = lendersOf(u)
	n.started(n.closeHarvest)
	if err := n.openRelays(u); err != nil {
		return fault.Of(fault.ErrConfig, err)
	}
	if len(u.borrowed()) == 0 {
		return nil
	}
	peers := n.harvest.Summary().Peers
	if why := u.inert(peers, monitor != nil); why != "" {
		n.log.Warn("the policy of --harvest-policy places as best-fit does", "policy", o.Policy.Name(), "reason", why)
	}
	for i, l := range u.peerDevices() {
		n.log.Debug("peer memory may be borrowed", "device", l.Device, "gpu", l.GPU, "name", l.Name, "uuid", l.UUID, "policy", o.Policy.Name(), "headroom_bytes", peers[i].Headroom)
	}
	return nil
}

// borrowing are the options of harvest by the settings.
func (u *setup) borrowing() (o harvest.Options, err error) {
	s := &u.settings.Harvest
	o = harvest.Options{Machine: u.devices.Machine, Peers: u.lending(), Reader: u.devices.Space}
	clients, err := s.ParseClients()
	if err != nil {
		return o, err
	}
	limits := map[string]harvest.ClientLimits{}
	for name, c := range clients {
		limits[name] = harvest.ClientLimits(c)
	}
	if o.Policy, err = harvest.NewPolicy(s.Policy, harvest.PolicyOptions{Clients: limits, EvacuateAt: s.EvacuateAt}); err != nil {
		return o, err
	}
	o.Weight = s.Weight
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
	ofExperts, ofKV := slab, slab
	if slab == 0 {
		ofExperts, ofKV = slabExperts*u.footprint.ExpertBytes(), slabKVBlocks*u.footprint.KV().BlockBytes()
	}
	o.Clients = map[string]harvest.ClientOptions{
		experts.HarvestClient: {SlabBytes: ofExperts, Peers: u.peers}, offload.HarvestClient: {SlabBytes: ofKV, Peers: u.kvPeers},
	}
	if relays := u.paths.relays; len(relays) > 0 {
		o.Clients[observe.RelayClient] = harvest.ClientOptions{Peers: relays, ReserveBytes: u.paths.relayBytes()}
	}
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

// copying is the total duration of copies from and to a peer so far.
func (n *Node) copying(peer device.Space) (d time.Duration) {
	for _, s := range n.transfer.Stats() {
		if s.From == peer || s.To == peer {
			d += s.Busy
		}
	}
	return d
}

// inert is why the policy has no effect that best-fit has not; empty if it has one. monitored:
// the devices' utilization is read.
func (u *setup) inert(peers []harvest.PeerUsage, monitored bool) string {
	s := &u.settings.Harvest
	switch s.Policy {
	case "fairness":
		if s.Clients == "" {
			return "experts are the only client, and --harvest-clients sets no limit"
		}
		return ""
	case "interference":
		busy := slices.ContainsFunc(peers, func(p harvest.PeerUsage) bool { return p.Reading.Bandwidth > 0 })
		switch {
		case !monitored && !busy && u.devices.Real():
			return "the bandwidth that others use is not known without NVML"
		case !busy && !u.devices.Real():
			return "no emulated peer is busy; set busy= of --emulate"
		}
	case "locality":
		path := func(p device.Space) device.Path {
			path, _ := u.devices.Machine.Topology().Path(p, u.devices.Space)
			return path
		}
		first := path(peers[0].Space)
		if !slices.ContainsFunc(peers, func(p harvest.PeerUsage) bool {
			at := path(p.Space)
			return at.BytesPerSecond != first.BytesPerSecond || at.Latency != first.Latency || len(at.Links) != len(first.Links)
		}) {
			return "all peers are equally near"
		}
	}
	if len(peers) == 1 && s.Policy != "best-fit" && s.EvacuateAt == 0 {
		return "there is one peer"
	}
	return ""
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
	for _, p := range u.borrowed() {
		info, _ := u.devices.Machine.Topology().Info(p)
		all = append(all, observe.Peer{Device: p.String(), GPU: u.devices.Number(p), Name: info.Name, UUID: info.UUID})
	}
	return all
}
