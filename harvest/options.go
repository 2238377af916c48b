package harvest

import (
	"errors"
	"fmt"
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
	// Reader is the compute GPU that reads what lies there; every peer must have a
	// path to it. Default: the first GPU.
	Reader device.Space
	// Policy of the controller. Default: BestFit.
	Policy Policy
	// Monitor of the peers. Default: a MachineMonitor, which the runtime closes.
	Monitor Monitor
	// SlabBytes is what is taken from a device at a time. Make it a few objects.
	// Larger requests, and requests where a whole slab does not fit any more, get a
	// slab of their own size. Default: 1 GiB.
	SlabBytes int64
	// Clients that differ from the rest, by name.
	Clients map[string]ClientOptions
	// HeadroomBytes stay free on each peer for others; under 0: nothing does.
	// Default: a twentieth of the peer's memory.
	HeadroomBytes int64
	// Deadline of a revocation, from its beginning. Default: 100 ms.
	Deadline time.Duration
	// Cooldown is how long no slab is taken from a peer after one was given back for
	// others' sake, so that they can take it, and memory does not go to and fro;
	// under 0: none. Default: 1 s.
	Cooldown time.Duration
	// HalfLife of a peer's averages of bandwidth and churn. Default: 1 min.
	HalfLife time.Duration
	// CallbackLimit is how long a callback may take before that is reported. Default:
	// 10 ms.
	CallbackLimit time.Duration
	// Interval between two ticks of the loop that Start begins, which is also how soon
	// pressure is noticed; while something drains it ticks ten times as often.
	// Default: 10 ms.
	Interval time.Duration
	// ScrubBytes is the size of the pinned buffer of zeros that clearing begins with.
	// Default: 1 MiB.
	ScrubBytes int64
	// Events is told what happens. Default: nobody.
	Events EventListener
}

// ClientOptions are one client's.
type ClientOptions struct {
	// SlabBytes is the size of the client's slabs, which it shares with nobody: small
	// objects do not fragment the slabs of large ones, and are not revoked with them.
	// Default: it shares slabs of Options.SlabBytes with all clients that have none of
	// their own.
	SlabBytes int64
}

// EnsureDefaults returns o with every unset field at its default.
func (o Options) EnsureDefaults() Options {
	setDefault(&o.Reader, device.HBM(0))
	setDefault(&o.SlabBytes, 1<<30)
	setDefault(&o.Deadline, 100*time.Millisecond)
	setDefault(&o.Cooldown, time.Second)
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

// Validate says what is wrong with o, whose defaults are set.
func (o Options) Validate() error {
	if o.Machine == nil {
		return errors.New("harvest: no machine")
	}
	top := o.Machine.Topology()
	for i, p := range o.Peers {
		switch _, ok := top.Info(p); {
		case !ok:
			return fmt.Errorf("harvest: there is no peer %s: the machine has %d GPUs, from 0 on", p, len(top.GPUs))
		case p == device.Host:
			return errors.New("harvest: host memory is no peer: name GPUs")
		case p == o.Reader:
			return fmt.Errorf("harvest: %s is the compute GPU and cannot be its own peer: name another", p)
		case slices.Contains(o.Peers[:i], p):
			return fmt.Errorf("harvest: peer %s is named twice", p)
		}
		if _, err := top.Path(p, o.Reader); err != nil {
			return fmt.Errorf("harvest: peer %s cannot be reached from %s, leave it out: %w", p, o.Reader, err)
		}
	}
	for name, c := range o.Clients {
		if c.SlabBytes < 0 {
			return fmt.Errorf("harvest: slabs of %d bytes for client %s: give them a size over 0", c.SlabBytes, name)
		}
	}
	switch {
	case o.SlabBytes < 0:
		return fmt.Errorf("harvest: slabs of %d bytes: give them a size over 0", o.SlabBytes)
	case o.ScrubBytes < 0:
		return fmt.Errorf("harvest: a clear buffer of %d bytes: give it a size over 0", o.ScrubBytes)
	case o.Deadline < 0 || o.HalfLife < 0 || o.CallbackLimit < 0 || o.Interval < 0:
		return fmt.Errorf("harvest: a duration under 0: deadline %v, half-life %v, callback limit %v, interval %v", o.Deadline, o.HalfLife, o.CallbackLimit, o.Interval)
	}
	return nil
}

// rules are the part of the options that the controller decides by.
func (o Options) rules() rules {
	own := map[string]int64{}
	for name, c := range o.Clients {
		if c.SlabBytes > 0 {
			own[name] = device.Align(c.SlabBytes)
		}
	}
	return rules{
		policy: o.Policy, reader: o.Reader, slabBytes: device.Align(o.SlabBytes), ownSlabBytes: own,
		deadline: o.Deadline, cooldown: max(o.Cooldown, 0), halfLife: o.HalfLife, callbackLimit: o.CallbackLimit,
	}
}

// Hints say more about a request. The zero Hints are fine.
type Hints struct {
	// Client is whose account it goes to, and Label what it is; both stand in
	// reports. Default: "unnamed".
	Client, Label string
	// Peers are the only ones to be used. Default: all.
	Peers []device.Space
	// Reader is the GPU that will read it: peers without a path to it are left out,
	// and locality is meant towards it. Default: Options.Reader.
	Reader device.Space
	// After asks for the place right behind that handle, so that one copy moves
	// both, if it is free and the policy has nothing against it.
	After *Handle
	// Cost is how much time the client loses if the handle is revoked: what is cheap
	// goes first. It may be changed by Handle.SetCost.
	Cost time.Duration
}
