package harvest

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/moeserve/moeserve/device"
)

// Options describe a Runtime.
type Options struct {
	// Machine whose peers lend memory.
	Machine device.Machine
	// Peers are the memories to borrow from.
	Peers []device.Space
	// Reader is the memory of the GPU that reads from peers; every peer must have a path
	// to it. Default: the first GPU's.
	Reader device.Space
	// Policy of placement. Default: BestFit.
	Policy Policy
	// Monitor of the peers. Default: a MachineMonitor, which the runtime closes.
	Monitor Monitor
	// SlabBytes is the size of a slab: the unit in which memory is allocated from a
	// device. Make it a few objects. Larger requests, and requests on peers that have room
	// for less than two whole slabs, get a slab of their own size, so that little has to be
	// revoked where little is missing. Default: 1 GiB.
	SlabBytes int64
	// Clients with options of their own, by name.
	Clients map[string]ClientOptions
	// HeadroomBytes stay free on each peer for other processes; negative: no headroom.
	// Default: HeadroomShare of the peer's memory, from 0 to 1, by default 0.05.
	HeadroomBytes int64
	HeadroomShare float64
	// Weight of the runtime's share of peers from which runtimes of other processes borrow,
	// too: see Runtime.SetOthers. Default: 1.
	Weight float64
	// Deadline of a revocation, from its start. Default: 100 ms.
	Deadline time.Duration
	// Cooldown is the time after a revocation during which no slab is allocated from the
	// peer, so that the process that needs the memory can allocate it, and memory does
	// not move back and forth; negative: none. Default: 1 s.
	Cooldown time.Duration
	// DisplaceFactor is how many times as much, per byte, a request must be worth as what
	// other clients hold, for their slabs to be displaced for it; negative: none are.
	// Default: 2.
	DisplaceFactor float64
	// Residence is the time for which a slab is in service before it may be displaced, and
	// for which a client that gave way to another does not displace that one in turn.
	// Default: 5 s.
	Residence time.Duration
	// Reserve is the time for which displaced memory is kept for the client that it was
	// displaced for. Default: 2 s.
	Reserve time.Duration
	// HalfLife of a peer's averages of bandwidth and churn. Default: 1 min.
	HalfLife time.Duration
	// CallbackLimit is the duration above which a callback is reported. Default: 10 ms.
	CallbackLimit time.Duration
	// Interval between ticks of the loop that Start starts, and so the maximum delay
	// until memory pressure is noticed; while memory drains, and for one Deadline after less
	// than the headroom was free, the loop ticks ten times as often. Default: 10 ms.
	Interval time.Duration
	// ScrubBytes is the size of the scrub buffer: pinned zeros that scrubbing starts
	// with. Default: 1 MiB.
	ScrubBytes int64
	// Events receives what happens. Default: none.
	Events EventListener
}

// ClientOptions are the options of one client.
type ClientOptions struct {
	// SlabBytes is the size of the client's own slabs, not shared with other clients:
	// small objects do not fragment the slabs of large ones, and are not revoked with
	// them. Default: the client shares slabs of Options.SlabBytes.
	SlabBytes int64
	// Peers that the client may use. Default: all.
	Peers []device.Space
	// ReserveBytes of each of its peers are kept for the client, in slabs of its own of that size:
	// no other client is given or displaces them, and no policy refuses them. In return they are the
	// first to be revoked when other processes need memory. Default: none.
	ReserveBytes int64
}

// EnsureDefaults returns o with defaults set.
func (o Options) EnsureDefaults() Options {
	setDefault(&o.Reader, device.HBM(0))
	setDefault(&o.SlabBytes, 1<<30)
	setDefault(&o.HeadroomShare, 0.05)
	setDefault(&o.Weight, 1)
	setDefault(&o.Deadline, 100*time.Millisecond)
	setDefault(&o.Cooldown, time.Second)
	setDefault(&o.DisplaceFactor, 2)
	setDefault(&o.Residence, 5*time.Second)
	setDefault(&o.Reserve, 2*time.Second)
	setDefault(&o.HalfLife, time.Minute)
	setDefault(&o.CallbackLimit, 10*time.Millisecond)
	setDefault(&o.Interval, 10*time.Millisecond)
	setDefault(&o.ScrubBytes, 1<<20)
	if o.Policy == nil {
		o.Policy = BestFit{}
	}
	o.Events = o.Events.EnsureDefaults()
	return o
}

func setDefault[T comparable](field *T, to T) {
	var zero T
	if *field == zero {
		*field = to
	}
}

// Validate reports the first invalid option; defaults must be set.
func (o Options) Validate() error {
	if o.Machine == nil {
		return errors.New("harvest: Options.Machine is not set")
	}
	top := o.Machine.Topology()
	for i, p := range o.Peers {
		switch _, ok := top.Info(p); {
		case !ok:
			return fmt.Errorf("harvest: no peer %s: the machine has %d GPUs, numbered from 0", p, len(top.GPUs))
		case p == device.Host:
			return errors.New("harvest: host memory cannot be a peer; name GPUs")
		case p == o.Reader:
			return fmt.Errorf("harvest: %s is the GPU that computes and cannot be its own peer; name another", p)
		case slices.Contains(o.Peers[:i], p):
			return fmt.Errorf("harvest: duplicate peer %s", p)
		}
		if _, err := top.Path(p, o.Reader); err != nil {
			return fmt.Errorf("harvest: no path from peer %s to %s; exclude the peer: %w", p, o.Reader, err)
		}
	}
	for name, c := range o.Clients {
		if c.SlabBytes < 0 {
			return fmt.Errorf("harvest: invalid slab size of %d bytes for client %s: must be positive", c.SlabBytes, name)
		}
		if c.ReserveBytes < 0 || c.ReserveBytes > 0 && c.SlabBytes > 0 {
			return fmt.Errorf("harvest: %d bytes are reserved for client %s, with slabs of %d: a reserve must be positive, and is one slab", c.ReserveBytes, name, c.SlabBytes)
		}
		for _, p := range c.Peers {
			if !slices.Contains(o.Peers, p) {
				return fmt.Errorf("harvest: client %s may use %s, which is not a peer", name, p)
			}
		}
	}
	switch {
	case o.SlabBytes < 0:
		return fmt.Errorf("harvest: invalid slab size of %d bytes: must be positive", o.SlabBytes)
	case !(o.HeadroomShare >= 0 && o.HeadroomShare <= 1):
		return fmt.Errorf("harvest: invalid headroom of %g of a peer's memory: must be from 0 to 1", o.HeadroomShare)
	case !(o.Weight > 0):
		return fmt.Errorf("harvest: invalid weight %g: must be positive", o.Weight)
	case o.DisplaceFactor > 0 && o.DisplaceFactor < 1, math.IsNaN(o.DisplaceFactor):
		return fmt.Errorf("harvest: invalid displacement factor %g: below 1 clients would displace what is worth more; set at least 1, or a negative one for none", o.DisplaceFactor)
	case o.ScrubBytes < 0:
		return fmt.Errorf("harvest: invalid scrub buffer of %d bytes: must be positive", o.ScrubBytes)
	case o.Deadline < 0 || o.Residence < 0 || o.Reserve < 0 || o.HalfLife < 0 || o.CallbackLimit < 0 || o.Interval < 0:
		return fmt.Errorf("harvest: durations must not be negative: deadline %v, residence %v, reserve %v, half-life %v, callback limit %v, interval %v", o.Deadline, o.Residence, o.Reserve, o.HalfLife, o.CallbackLimit, o.Interval)
	}
	return nil
}

// rules are the options that the controller decides by.
func (o Options) rules() rules {
	own, reserve := map[string]int64{}, map[string]int64{}
	for name, c := range o.Clients {
		if n := max(c.SlabBytes, c.ReserveBytes); n > 0 {
			own[name] = device.Align(n)
		}
		if c.ReserveBytes > 0 {
			reserve[name] = own[name]
		}
	}
	return rules{
		policy: o.Policy, reader: o.Reader, slabBytes: device.Align(o.SlabBytes), ownSlabBytes: own, reserve: reserve,
		deadline: o.Deadline, cooldown: max(o.Cooldown, 0), halfLife: o.HalfLife, callbackLimit: o.CallbackLimit,
		displaceFactor: max(o.DisplaceFactor, 0), residence: o.Residence, reserved: o.Reserve, displaceInterval: 5 * o.Interval,
	}
}

// Hints describe a request. The zero Hints are valid.
type Hints struct {
	// Client is the account of the allocation, Label its name in reports. Default:
	// "unnamed".
	Client, Label string
	// Peers that may be used. Default: all.
	Peers []device.Space
	// Reader is the memory of the GPU that will read the allocation: peers without a path
	// to it are excluded, and Locality refers to it. Default: Options.Reader.
	Reader device.Space
	// After requests the memory right behind that handle, so that one copy can read both,
	// if it is free and the policy agrees.
	After *Handle
	// Cost of losing the handle: see the function Cost. Cheap handles are revoked first, and
	// those of other clients give way to a request that is worth more than they are.
	// Handle.SetCost changes it; Runtime.SetUse sets it for all handles of a client.
	Cost time.Duration
}
