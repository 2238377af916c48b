package harvest

import (
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/moeserve/moeserve/device"
)

// Reason is why memory is given back.
type Reason uint8

const (
	// ReasonEmpty: no handle is left on the slab. That is no revocation.
	ReasonEmpty Reason = iota
	// ReasonPressure: others need memory there, and the headroom is not met.
	ReasonPressure
	// ReasonPolicy: the controller's policy leaves the peer.
	ReasonPolicy
	// ReasonExternal: somebody asked for it by Reclaim.
	ReasonExternal
	// ReasonUnhealthy: the peer is lost or must not be used.
	ReasonUnhealthy
	// ReasonShutdown: the runtime is being closed.
	ReasonShutdown

	reasons = iota
)

var reasonNames = [...]string{
	ReasonEmpty: "empty", ReasonPressure: "pressure", ReasonPolicy: "policy",
	ReasonExternal: "external", ReasonUnhealthy: "unhealthy", ReasonShutdown: "shutdown",
}

func (r Reason) String() string {
	if int(r) < len(reasonNames) {
		return reasonNames[r]
	}
	return fmt.Sprintf("Reason(%d)", int(r))
}

// MarshalText implements encoding.TextMarshaler.
func (r Reason) MarshalText() ([]byte, error) { return []byte(r.String()), nil }

// Revocation is what a callback is told.
type Revocation struct {
	Handle *Handle
	Reason Reason
	// Cause is the peer's trouble where it is unhealthy.
	Cause error
}

// EventListener is told what happens, in order. Any func may be nil. They are
// called with the runtime's lock held, so they must be quick and must not call the
// runtime; they may read handles.
type EventListener struct {
	Allocated func(AllocInfo)
	// Refused is told of each Alloc that failed.
	Refused func(RefuseInfo)
	Freed   func(FreeInfo)
	// SlabAllocated and SlabReleased tell of device memory.
	SlabAllocated func(SlabInfo)
	SlabReleased  func(SlabInfo)
	// RevocationBegan and RevocationEnded tell of a slab; Revoked, between them, of
	// each handle, before its callback.
	RevocationBegan func(RevocationInfo)
	Revoked         func(RevokeInfo)
	RevocationEnded func(RevocationInfo)
	DeadlineMissed  func(DeadlineMissInfo)
	// PeerHealthChanged is told when a peer becomes unhealthy, or healthy again.
	PeerHealthChanged func(PeerInfo)
}

// AllocInfo is one Alloc that succeeded.
type AllocInfo struct {
	Handle *Handle
	Slab   uint64
}

// RefuseInfo is one Alloc that failed.
type RefuseInfo struct {
	Client string
	Bytes  int64
	Err    error
}

// FreeInfo is one handle that was freed, and is drained.
type FreeInfo struct {
	Handle *Handle
	// Drain is how long its last work took after Free.
	Drain time.Duration
	// Failed is the error of work that touched it, if it ended in one.
	Failed error
}

// SlabInfo is one slab taken from a peer or given back to it.
type SlabInfo struct {
	Slab   uint64
	Device device.Space
	Bytes  int64
	// Released says that it was given back, Reason for what.
	Released bool
	Reason   Reason
	// Scrubbed says that its content was overwritten before; Err why that failed, if it
	// was tried.
	Scrubbed bool
	Err      error
}

// RevocationInfo is the revocation of one slab.
type RevocationInfo struct {
	Slab    uint64
	Device  device.Space
	Bytes   int64
	Handles int
	Reason  Reason
	Cause   error
	// Deadline and Took count from its beginning; Drain is the part of Took until
	// the last reader was gone. Late says that the deadline was missed.
	Deadline, Drain, Took time.Duration
	DeadlineMissed        bool
	// Ended says that the memory is given back.
	Ended bool
}

// RevokeInfo is one handle that became invalid.
type RevokeInfo struct {
	Handle *Handle
	Reason Reason
	// Drain is how long its readers took.
	Drain time.Duration
	// Failed is the error of work that touched it, if it ended in one.
	Failed error
}

// Hold is one holder of a reference, or of work behind one, and for how long. The
// time is as precise as the calls of Tick are frequent.
type Hold struct {
	Owner    string
	Duration time.Duration
	// PendingWork says that the reference was given back, and the point it was given back
	// for is not reached.
	PendingWork bool
}

func (h Hold) String() string {
	if h.PendingWork {
		return fmt.Sprintf("work of %q, for %v", h.Owner, h.Duration)
	}
	return fmt.Sprintf("%q, for %v", h.Owner, h.Duration)
}

// DeadlineMissInfo is something that kept memory from being given back in time.
type DeadlineMissInfo struct {
	Slab   uint64
	Device device.Space
	Reason Reason
	// Handle that is held, with its holders; nil where the runtime's own clearing is
	// late, or the device refuses to take the memory back.
	Handle *Handle
	Owners []Hold
	// Callback says that the handle's callback took Took, and no more.
	Callback bool
	Took     time.Duration
	// Err is why clearing or freeing the slab fails.
	Err error
}

func (i DeadlineMissInfo) String() string {
	switch {
	case i.Callback:
		return fmt.Sprintf("the callback of %v took %v", i.Handle, i.Took)
	case i.Handle != nil:
		var hs []string
		for _, h := range i.Owners {
			hs = append(hs, h.String())
		}
		return fmt.Sprintf("%v is held by %s", i.Handle, strings.Join(hs, ", "))
	case i.Err != nil:
		return fmt.Sprintf("slab %d on %s: %v", i.Slab, i.Device, i.Err)
	}
	return fmt.Sprintf("slab %d on %s is still being cleared", i.Slab, i.Device)
}

// PeerInfo is a change of a peer's health.
type PeerInfo struct {
	Device device.Space
	// Health is nil for a peer that may be used again.
	Health error
}

// EnsureDefaults returns l with a func that does nothing for each that is nil.
func (l EventListener) EnsureDefaults() EventListener {
	setNoop(&l.Allocated)
	setNoop(&l.Refused)
	setNoop(&l.Freed)
	setNoop(&l.SlabAllocated)
	setNoop(&l.SlabReleased)
	setNoop(&l.RevocationBegan)
	setNoop(&l.Revoked)
	setNoop(&l.RevocationEnded)
	setNoop(&l.DeadlineMissed)
	setNoop(&l.PeerHealthChanged)
	return l
}

// emit hands an Info to the func that it is for.
func (l *EventListener) emit(info any) {
	switch i := info.(type) {
	case AllocInfo:
		l.Allocated(i)
	case RefuseInfo:
		l.Refused(i)
	case FreeInfo:
		l.Freed(i)
	case SlabInfo:
		if i.Released {
			l.SlabReleased(i)
		} else {
			l.SlabAllocated(i)
		}
	case RevocationInfo:
		if i.Ended {
			l.RevocationEnded(i)
		} else {
			l.RevocationBegan(i)
		}
	case RevokeInfo:
		l.Revoked(i)
	case DeadlineMissInfo:
		l.DeadlineMissed(i)
	case PeerInfo:
		l.PeerHealthChanged(i)
	default:
		panic(fmt.Sprintf("harvest: %T is no event", info))
	}
}

func setNoop[T any](f *func(T)) {
	if *f == nil {
		*f = func(T) {}
	}
}

// Tee tells both.
func Tee(a, b EventListener) EventListener {
	a, b = a.EnsureDefaults(), b.EnsureDefaults()
	return EventListener{
		Allocated:         both(a.Allocated, b.Allocated),
		Refused:           both(a.Refused, b.Refused),
		Freed:             both(a.Freed, b.Freed),
		SlabAllocated:     both(a.SlabAllocated, b.SlabAllocated),
		SlabReleased:      both(a.SlabReleased, b.SlabReleased),
		RevocationBegan:   both(a.RevocationBegan, b.RevocationBegan),
		Revoked:           both(a.Revoked, b.Revoked),
		RevocationEnded:   both(a.RevocationEnded, b.RevocationEnded),
		DeadlineMissed:    both(a.DeadlineMissed, b.DeadlineMissed),
		PeerHealthChanged: both(a.PeerHealthChanged, b.PeerHealthChanged),
	}
}

func both[T any](f, g func(T)) func(T) {
	return func(i T) { f(i); g(i) }
}

// LogEvents logs what an operator can act on at warn and error, revocations but those at
// shutdown, and deadlines missed then, at info, and the rest at debug.
func LogEvents(log *slog.Logger) EventListener {
	return EventListener{
		Allocated:         logEvent[AllocInfo](log),
		Refused:           logEvent[RefuseInfo](log),
		Freed:             logEvent[FreeInfo](log),
		SlabAllocated:     logEvent[SlabInfo](log),
		SlabReleased:      logEvent[SlabInfo](log),
		RevocationBegan:   logEvent[RevocationInfo](log),
		Revoked:           logEvent[RevokeInfo](log),
		RevocationEnded:   logEvent[RevocationInfo](log),
		DeadlineMissed:    logEvent[DeadlineMissInfo](log),
		PeerHealthChanged: logEvent[PeerInfo](log),
	}
}

// logRecord is what an event says: how grave it is, its text, and what it is about.
type logRecord struct {
	level slog.Level
	text  string
	attrs []any
}

// String is the text, and the rest as in a log.
func (l logRecord) String() string {
	var b strings.Builder
	b.WriteString(l.text)
	for i := 0; i < len(l.attrs); i += 2 {
		fmt.Fprintf(&b, " %v=%v", l.attrs[i], l.attrs[i+1])
	}
	return b.String()
}

func logEvent[T interface{ line() logRecord }](log *slog.Logger) func(T) {
	return func(i T) {
		l := i.line()
		log.Log(background, l.level, "harvest: "+l.text, l.attrs...)
	}
}

func (i AllocInfo) line() logRecord {
	h := i.Handle
	return logRecord{slog.LevelDebug, "allocated", []any{"handle", h.ID(), "client", h.Client(), "device", h.Device().String(), "bytes", h.Bytes(), "slab", i.Slab}}
}

func (i RefuseInfo) line() logRecord {
	return logRecord{slog.LevelDebug, "refused", []any{"client", i.Client, "bytes", i.Bytes, "err", i.Err}}
}

func (i FreeInfo) line() logRecord {
	return logRecord{slog.LevelDebug, "freed", []any{"handle", i.Handle.ID(), "client", i.Handle.Client(), "drain", i.Drain}}
}

func (i SlabInfo) line() logRecord {
	about := []any{"slab", i.Slab, "device", i.Device.String(), "bytes", i.Bytes}
	switch {
	case !i.Released:
		return logRecord{slog.LevelDebug, "slab allocated on peer", about}
	case !i.Scrubbed && i.Reason != ReasonUnhealthy:
		return logRecord{
			slog.LevelError, "slab released without scrubbing; weights or KV may be readable by the next user of the memory",
			append(about, "err", i.Err),
		}
	}
	return logRecord{slog.LevelDebug, "slab released", append(about, "reason", i.Reason.String())}
}

func (i RevocationInfo) line() logRecord {
	about := []any{"slab", i.Slab, "device", i.Device.String(), "bytes", i.Bytes, "handles", i.Handles, "reason", i.Reason.String()}
	if !i.Ended {
		return logRecord{slog.LevelDebug, "revocation started", about}
	}
	level := slog.LevelInfo
	if i.Reason == ReasonShutdown { // of all slabs at once
		level = slog.LevelDebug
	}
	return logRecord{level, "peer memory released", append(about, "took", i.Took, "drain", i.Drain, "deadline_missed", i.DeadlineMissed)}
}

func (i RevokeInfo) line() logRecord {
	return logRecord{slog.LevelDebug, "revoked", []any{"handle", i.Handle.ID(), "client", i.Handle.Client(), "reason", i.Reason.String(), "drain", i.Drain}}
}

func (i DeadlineMissInfo) line() logRecord {
	level := slog.LevelWarn
	if i.Reason == ReasonShutdown { // nobody waits for the memory
		level = slog.LevelInfo
	}
	return logRecord{level, "deadline missed: " + i.String(), []any{"slab", i.Slab, "device", i.Device.String(), "reason", i.Reason.String()}}
}

func (i PeerInfo) line() logRecord {
	if i.Health != nil {
		return logRecord{slog.LevelError, "peer disabled; what it held is fetched from host memory", []any{"device", i.Device.String(), "err", i.Health}}
	}
	return logRecord{slog.LevelInfo, "peer enabled again", []any{"device", i.Device.String()}}
}

func (i AllocInfo) String() string      { return i.line().String() }
func (i RefuseInfo) String() string     { return i.line().String() }
func (i FreeInfo) String() string       { return i.line().String() }
func (i SlabInfo) String() string       { return i.line().String() }
func (i RevocationInfo) String() string { return i.line().String() }
func (i RevokeInfo) String() string     { return i.line().String() }
func (i PeerInfo) String() string       { return i.line().String() }
