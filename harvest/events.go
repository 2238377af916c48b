package harvest

import (
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/moeserve/moeserve/device"
)

// Reason is why a slab is released.
type Reason uint8

const (
	// ReasonEmpty: the slab has no handles. This is not a revocation.
	ReasonEmpty Reason = iota
	// ReasonPressure: the peer's headroom is not met, because other processes use memory
	// there.
	ReasonPressure
	// ReasonPolicy: the policy evacuates the peer, another runtime has less than its share,
	// or another client of this one displaces the slab, since its need is worth more.
	ReasonPolicy
	// ReasonExternal: requested by Reclaim.
	ReasonExternal
	// ReasonUnhealthy: the peer is lost or excluded.
	ReasonUnhealthy
	// ReasonShutdown: the runtime is being closed or suspended.
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

// Revocation is the argument of a callback.
type Revocation struct {
	Handle *Handle
	Reason Reason
}

// EventListener receives what happens, in order. Any func may be nil. Funcs are called
// with the runtime's lock held, so they must be quick and must not call the runtime; they
// may read handles.
type EventListener struct {
	Allocated func(AllocInfo)
	// Refused receives each failed Alloc.
	Refused func(RefuseInfo)
	Freed   func(FreeInfo)
	// SlabAllocated and SlabReleased report device memory.
	SlabAllocated func(SlabInfo)
	SlabReleased  func(SlabInfo)
	// RevocationStarted and RevocationEnded report a slab; Revoked, between them, each
	// handle, before its callback.
	RevocationStarted func(RevocationInfo)
	Revoked           func(RevokeInfo)
	RevocationEnded   func(RevocationInfo)
	DeadlineMissed    func(DeadlineMissInfo)
	// CallbackPanicked: a handle's callback panicked, and counts as returned.
	CallbackPanicked func(PanicInfo)
	// PeerHealthChanged: a peer became unhealthy, or healthy again.
	PeerHealthChanged func(PeerInfo)
}

// AllocInfo is a successful Alloc.
type AllocInfo struct {
	Handle *Handle
	Slab   uint64
}

// RefuseInfo is a failed Alloc.
type RefuseInfo struct {
	Client string
	Bytes  int64
	Err    error
}

// FreeInfo is a handle that was freed and is drained.
type FreeInfo struct {
	Handle *Handle
	// Drain is the time from Free to the end of its readers.
	Drain time.Duration
	// Failed is the error of work that accessed it, if any.
	Failed error
}

// SlabInfo is a slab that was allocated or released.
type SlabInfo struct {
	Slab   uint64
	Device device.Space
	Bytes  int64
	// Released: the slab was released, for Reason.
	Released bool
	Reason   Reason
	// Scrubbed: its content was overwritten before its release; Err is why that failed,
	// if it was tried.
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
	// Client that has the slab for itself; empty: shared. For is the client that it is
	// displaced for; empty: none.
	Client, For string
	// Deadline and Took count from the start of the revocation; Drain is the part of Took
	// until its last reader was done. DeadlineMissed: Took exceeds Deadline.
	Deadline, Drain, Took time.Duration
	DeadlineMissed        bool
	// Ended: the memory is released.
	Ended bool
}

// RevokeInfo is a handle that was revoked and is drained.
type RevokeInfo struct {
	Handle *Handle
	Reason Reason
	// Drain is the time from the start of the revocation to the end of its readers.
	Drain time.Duration
	// Failed is the error of work that accessed it, if any.
	Failed error
}

// Hold is a reference, or pending work behind a released one: its owner and duration. The
// duration is as precise as calls of Tick are frequent.
type Hold struct {
	Owner    string
	Duration time.Duration
	// PendingWork: the reference was released at a fence value that is not
	// reached.
	PendingWork bool
}

func (h Hold) String() string {
	if h.PendingWork {
		return fmt.Sprintf("work of %q, for %v", h.Owner, h.Duration)
	}
	return fmt.Sprintf("%q, for %v", h.Owner, h.Duration)
}

// DeadlineMissInfo is what delayed the release of a slab past its deadline.
type DeadlineMissInfo struct {
	Slab   uint64
	Device device.Space
	Reason Reason
	// Handle that is held, and the owners that hold it; nil if the runtime's scrubbing is
	// late, or the device fails to free the memory.
	Handle *Handle
	Owners []Hold
	// Callback: only the handle's callback was slow; it took Took.
	Callback bool
	Took     time.Duration
	// Err is why scrubbing or freeing the slab fails.
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
	return fmt.Sprintf("slab %d on %s is still being scrubbed", i.Slab, i.Device)
}

// PanicInfo is a callback that panicked.
type PanicInfo struct {
	Handle *Handle
	Reason Reason
	// Value of the panic, and the stack.
	Value any
	Stack string
}

// PeerInfo is a change of a peer's health.
type PeerInfo struct {
	Device device.Space
	// Health is why the peer must not be used; nil if it may be used again.
	Health error
}

// EnsureDefaults returns l with a no-op for each func that is nil.
func (l EventListener) EnsureDefaults() EventListener {
	setNoop(&l.Allocated)
	setNoop(&l.Refused)
	setNoop(&l.Freed)
	setNoop(&l.SlabAllocated)
	setNoop(&l.SlabReleased)
	setNoop(&l.RevocationStarted)
	setNoop(&l.Revoked)
	setNoop(&l.RevocationEnded)
	setNoop(&l.DeadlineMissed)
	setNoop(&l.CallbackPanicked)
	setNoop(&l.PeerHealthChanged)
	return l
}

// emit passes an Info to its func.
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
			l.RevocationStarted(i)
		}
	case RevokeInfo:
		l.Revoked(i)
	case DeadlineMissInfo:
		l.DeadlineMissed(i)
	case PanicInfo:
		l.CallbackPanicked(i)
	case PeerInfo:
		l.PeerHealthChanged(i)
	default:
		panic(fmt.Sprintf("harvest: %T is not an event", info))
	}
}

func setNoop[T any](f *func(T)) {
	if *f == nil {
		*f = func(T) {}
	}
}

// Tee returns a listener that calls both.
func Tee(a, b EventListener) EventListener {
	a, b = a.EnsureDefaults(), b.EnsureDefaults()
	return EventListener{
		Allocated:         both(a.Allocated, b.Allocated),
		Refused:           both(a.Refused, b.Refused),
		Freed:             both(a.Freed, b.Freed),
		SlabAllocated:     both(a.SlabAllocated, b.SlabAllocated),
		SlabReleased:      both(a.SlabReleased, b.SlabReleased),
		RevocationStarted: both(a.RevocationStarted, b.RevocationStarted),
		Revoked:           both(a.Revoked, b.Revoked),
		RevocationEnded:   both(a.RevocationEnded, b.RevocationEnded),
		DeadlineMissed:    both(a.DeadlineMissed, b.DeadlineMissed),
		CallbackPanicked:  both(a.CallbackPanicked, b.CallbackPanicked),
		PeerHealthChanged: both(a.PeerHealthChanged, b.PeerHealthChanged),
	}
}

func both[T any](f, g func(T)) func(T) {
	return func(i T) { f(i); g(i) }
}

// LogEvents logs events that an operator can act on at warn and error; completed
// revocations, except at shutdown, and deadlines missed at shutdown at info; and others at
// debug.
func LogEvents(log *slog.Logger) EventListener {
	return EventListener{
		Allocated:         logEvent[AllocInfo](log),
		Refused:           logEvent[RefuseInfo](log),
		Freed:             logEvent[FreeInfo](log),
		SlabAllocated:     logEvent[SlabInfo](log),
		SlabReleased:      logEvent[SlabInfo](log),
		RevocationStarted: logEvent[RevocationInfo](log),
		Revoked:           logEvent[RevokeInfo](log),
		RevocationEnded:   logEvent[RevocationInfo](log),
		DeadlineMissed:    logEvent[DeadlineMissInfo](log),
		CallbackPanicked:  logEvent[PanicInfo](log),
		PeerHealthChanged: logEvent[PeerInfo](log),
	}
}

// logRecord is the log record of an event.
type logRecord struct {
	level slog.Level
	text  string
	attrs []any
}

// String is the text followed by key=value pairs.
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
	case !i.Scrubbed:
		return logRecord{slog.LevelWarn, "slab of a disabled peer released without scrubbing; its content may be readable there", about}
	}
	return logRecord{slog.LevelDebug, "slab released", append(about, "reason", i.Reason.String())}
}

func (i RevocationInfo) line() logRecord {
	about := []any{"slab", i.Slab, "device", i.Device.String(), "bytes", i.Bytes, "handles", i.Handles, "reason", i.Reason.String()}
	if i.For != "" {
		about = append(about, "client", i.Client, "for", i.For)
	}
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
	if i.Reason == ReasonShutdown { // no other process waits for the memory
		level = slog.LevelInfo
	}
	return logRecord{level, "deadline missed: " + i.String(), []any{"slab", i.Slab, "device", i.Device.String(), "reason", i.Reason.String()}}
}

func (i PanicInfo) line() logRecord {
	return logRecord{
		slog.LevelError, fmt.Sprintf("callback of %v panicked, and counts as returned", i.Handle),
		[]any{"device", i.Handle.Device().String(), "reason", i.Reason.String(), "panic", fmt.Sprint(i.Value), "stack", i.Stack},
	}
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
func (i PanicInfo) String() string      { return i.line().String() }
func (i PeerInfo) String() string       { return i.line().String() }
