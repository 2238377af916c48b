package observe

import (
	"fmt"
	"time"

	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/harvest"
)

// Event is something that happened to memory or experts, with a JSON form whose names are
// fixed: fields that an event does not have are omitted.
type Event struct {
	// Event is its name: "harvest.revoked".
	Event string    `json:"event"`
	Time  time.Time `json:"time"`
	// Device is a peer, Slab one borrowed from it, Handle an allocation in that.
	Device string `json:"device,omitempty"`
	Slab   uint64 `json:"slab,omitempty"`
	Handle uint64 `json:"handle,omitempty"`
	// Handles is how many there were on the slab.
	Handles int    `json:"handles,omitempty"`
	Client  string `json:"client,omitempty"`
	Bytes   int64  `json:"bytes,omitempty"`
	Reason  string `json:"reason,omitempty"`
	// For is the client that the memory gives way to.
	For string `json:"for,omitempty"`
	// Layer by the model's number, and Expert; In became resident in the place of Out.
	Layer  *int `json:"layer,omitempty"`
	Expert *int `json:"expert,omitempty"`
	In     *int `json:"in,omitempty"`
	Out    *int `json:"out,omitempty"`
	// Drain is how long readers took, Took how long all of it did.
	Drain time.Duration `json:"drain_ns,omitempty"`
	Took  time.Duration `json:"took_ns,omitempty"`
	// DeadlineMissed: the memory was not released by the revocation's deadline.
	DeadlineMissed bool   `json:"deadline_missed,omitempty"`
	Error          string `json:"error,omitempty"`
}

// The names of events.
const (
	HarvestAllocated         = "harvest.allocated"
	HarvestRefused           = "harvest.refused"
	HarvestFreed             = "harvest.freed"
	HarvestSlabAllocated     = "harvest.slab_allocated"
	HarvestSlabReleased      = "harvest.slab_released"
	HarvestRevocationStarted = "harvest.revocation_started"
	HarvestRevoked           = "harvest.revoked"
	HarvestRevocationEnded   = "harvest.revocation_ended"
	HarvestDeadlineMissed    = "harvest.deadline_missed"
	HarvestCallbackPanicked  = "harvest.callback_panicked"
	HarvestPeerUnhealthy     = "harvest.peer_unhealthy"
	HarvestPeerHealthy       = "harvest.peer_healthy"
	ExpertPromoted           = "experts.promoted"
	ExpertDemoted            = "experts.demoted"
	ExpertSwapped            = "experts.swapped"
	ExpertPeerFailed         = "experts.peer_failed"
)

func text(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// emitter puts name and time on events.
func emitter(to func(Event)) func(name string, e Event) {
	return func(name string, e Event) {
		e.Event, e.Time = name, time.Now()
		to(e)
	}
}

// HarvestEvents reports to to what harvest does; a nil to gets nothing.
func HarvestEvents(to func(Event)) harvest.EventListener {
	if to == nil {
		return harvest.EventListener{}
	}
	tell := emitter(to)
	handle := func(h *harvest.Handle) Event {
		return Event{Device: h.Device().String(), Handle: h.ID(), Client: h.Client(), Bytes: h.Bytes()}
	}
	slab := func(i harvest.SlabInfo) Event {
		return Event{Device: i.Device.String(), Slab: i.Slab, Bytes: i.Bytes, Error: text(i.Err)}
	}
	revocation := func(i harvest.RevocationInfo) Event {
		return Event{
			Device: i.Device.String(), Slab: i.Slab, Bytes: i.Bytes, Handles: i.Handles, Client: i.Client, Reason: i.Reason.String(), For: i.For,
			Drain: i.Drain, Took: i.Took, DeadlineMissed: i.DeadlineMissed, Error: text(i.Cause),
		}
	}
	return harvest.EventListener{
		Allocated: func(i harvest.AllocInfo) {
			e := handle(i.Handle)
			e.Slab = i.Slab
			tell(HarvestAllocated, e)
		},
		Refused: func(i harvest.RefuseInfo) {
			tell(HarvestRefused, Event{Client: i.Client, Bytes: i.Bytes, Error: text(i.Err)})
		},
		Freed: func(i harvest.FreeInfo) {
			e := handle(i.Handle)
			e.Drain, e.Error = i.Drain, text(i.Failed)
			tell(HarvestFreed, e)
		},
		SlabAllocated: func(i harvest.SlabInfo) { tell(HarvestSlabAllocated, slab(i)) },
		SlabReleased: func(i harvest.SlabInfo) {
			e := slab(i)
			e.Reason = i.Reason.String()
			tell(HarvestSlabReleased, e)
		},
		RevocationStarted: func(i harvest.RevocationInfo) { tell(HarvestRevocationStarted, revocation(i)) },
		Revoked: func(i harvest.RevokeInfo) {
			e := handle(i.Handle)
			e.Reason, e.Drain, e.Error = i.Reason.String(), i.Drain, text(i.Failed)
			tell(HarvestRevoked, e)
		},
		RevocationEnded: func(i harvest.RevocationInfo) { tell(HarvestRevocationEnded, revocation(i)) },
		DeadlineMissed: func(i harvest.DeadlineMissInfo) {
			tell(HarvestDeadlineMissed, Event{Device: i.Device.String(), Slab: i.Slab, Reason: i.Reason.String(), DeadlineMissed: true, Error: i.String()})
		},
		CallbackPanicked: func(i harvest.PanicInfo) {
			e := handle(i.Handle)
			e.Reason, e.Error = i.Reason.String(), fmt.Sprint(i.Value)
			tell(HarvestCallbackPanicked, e)
		},
		PeerHealthChanged: func(i harvest.PeerInfo) {
			name := HarvestPeerHealthy
			if i.Health != nil {
				name = HarvestPeerUnhealthy
			}
			tell(name, Event{Device: i.Device.String(), Error: text(i.Health)})
		},
	}
}

// ExpertEvents reports to to what happens to the experts' places; a nil to gets nothing.
func ExpertEvents(to func(Event)) experts.EventListener {
	if to == nil {
		return experts.EventListener{}
	}
	tell := emitter(to)
	move := func(name string) func(experts.MoveInfo) {
		return func(i experts.MoveInfo) {
			tell(name, Event{Device: i.Device.String(), Layer: &i.Layer, Expert: &i.Expert, Bytes: i.Bytes, Took: i.Took, Reason: i.Reason})
		}
	}
	return experts.EventListener{
		Promoted: move(ExpertPromoted),
		Demoted:  move(ExpertDemoted),
		Swapped: func(i experts.SwapInfo) {
			tell(ExpertSwapped, Event{Layer: &i.Layer, In: &i.In, Out: &i.Out})
		},
		PeerFailed: func(i experts.PeerInfo) {
			reason := ""
			if i.Excluded {
				reason = "excluded"
			}
			tell(ExpertPeerFailed, Event{Device: i.Device.String(), Reason: reason, Error: text(i.Err)})
		},
	}
}
