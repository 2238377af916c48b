package device

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"
)

// Space is one memory space of a machine: Host, or the HBM of one GPU.
type Space int

// Host is pinned host memory, which every device can read and write.
const Host Space = 0

// HBM returns the memory space of GPU i (i from 0, in the machine's order).
func HBM(i int) Space { return Space(i + 1) }

// GPU returns the index of the GPU whose memory the space is, and false for Host.
func (s Space) GPU() (int, bool) { return int(s) - 1, s > 0 }

func (s Space) String() string {
	if i, ok := s.GPU(); ok {
		return fmt.Sprintf("gpu%d", i)
	}
	return "host"
}

// Addr is an address that is valid on every stream of a machine (unified addressing: it
// identifies the space too). Zero is no address.
type Addr uint64

// Alignment of every allocation, in bytes: that of the widest loads of a GPU.
const Alignment = 256

// Align rounds n bytes up to the next multiple of Alignment.
func Align(n int64) int64 { return (n + Alignment - 1) &^ (Alignment - 1) }

// Range is Bytes bytes from Addr on. It owns nothing.
type Range struct {
	Addr  Addr
	Bytes int64
}

// Slice returns the n bytes at offset off of r. It panics if they are outside of r.
func (r Range) Slice(off, n int64) Range {
	if off < 0 || n < 0 || off > r.Bytes-n {
		panic(fmt.Sprintf("device: slice [%d, %d) of a range of %d bytes", off, off+n, r.Bytes))
	}
	return Range{Addr: r.Addr + Addr(off), Bytes: n}
}

// End is the first address after r.
func (r Range) End() Addr { return r.Addr + Addr(r.Bytes) }

// Overlaps reports whether both have a byte in common.
func (r Range) Overlaps(s Range) bool {
	return r.Bytes > 0 && s.Bytes > 0 && r.Addr < s.End() && s.Addr < r.End()
}

func (r Range) String() string { return fmt.Sprintf("[%#x,+%d)", uint64(r.Addr), r.Bytes) }

// Region is a Range with the space that its bytes are in. It owns nothing.
type Region struct {
	Space Space
	Range
}

// Slice returns the n bytes at offset off of r. It panics if they are outside of r.
func (r Region) Slice(off, n int64) Region {
	return Region{Space: r.Space, Range: r.Range.Slice(off, n)}
}

func (r Region) String() string { return r.Space.String() + " " + r.Range.String() }

// Memory is one allocation. Its owner frees it exactly once.
type Memory interface {
	Space() Space
	Bytes() int64
	// Range returns the n bytes at offset off; it panics if they are outside of the allocation.
	// Region returns them with their space.
	Range(off, n int64) Range
	Region(off, n int64) Region
	// Read and Write return the n bytes at off for the host to read, or to overwrite, until the
	// host next enqueues work that accesses them. They panic outside of the allocation and for
	// memory that the host cannot access (every space but Host). Previous work on a device that
	// accesses these bytes must be ordered before, by an event, a fence or Synchronize.
	Read(off, n int64) []byte
	Write(off, n int64) []byte
	// Suspend gives the memory back to the device until Resume, and keeps its addresses, so that
	// whatever contains them (tables, captured graphs) is valid again after Resume. The content is
	// lost, and Usage no longer counts the memory. As before Free, all work that accesses it must
	// have ended. Host memory may stay as it is where the driver cannot keep its addresses. A
	// Suspend of suspended memory does nothing.
	Suspend() error
	// Resume gets memory for the addresses again, with undefined content. Errors are those of
	// Alloc; after one the memory is still suspended, and Resume may be called again. A Resume of
	// memory that is not suspended does nothing.
	Resume() error
	// Free releases the memory, suspended or not. All work that accesses it must have ended, and the host must
	// have synchronized with it. A second Free is an error.
	Free() error
}

// Machine is a host with its devices. Its methods may be called from several goroutines; a
// Stream is used by one goroutine at a time.
type Machine interface {
	Clock
	Capabilities() Capabilities
	Topology() *Topology
	// Alloc allocates memory of the space, aligned to Alignment, with undefined content. label
	// names it in accounts and errors. If the space has too little free memory, the error is an
	// *Error that wraps ErrOutOfMemory and has the bytes requested and free.
	Alloc(space Space, bytes int64, label string) (Memory, error)
	// SpaceOf returns the space of an address, and false if the address is in no live
	// allocation of this machine. It neither blocks nor allocates.
	SpaceOf(a Addr) (Space, bool)
	// KernelAddr returns the address at which kernels on a GPU read and write r in place, and may do so
	// until its memory is freed or suspended: r is in memory of that GPU, in pinned host memory,
	// or in that of a peer. The error wraps ErrUnreachable where kernels cannot access that memory:
	// host memory that is not mapped for them, a peer that the GPU has no access to.
	KernelAddr(reader Space, r Range) (Addr, error)
	// NewStream creates an in-order stream of a GPU, or, for Host, a host stream, which also
	// implements Executor and Watcher.
	NewStream(space Space, o StreamOptions) (Stream, error)
	NewEvent() (Event, error)
	// NewUntimedEvent creates an event whose Time is an error: recording it and waiting for it
	// costs a device less.
	NewUntimedEvent() (Event, error)
	// NewFence creates a counter. All fences of a machine begin at the same value: 0 on real
	// devices, any on emulated ones, so users count from Fence.Value on.
	NewFence(label string) (Fence, error)
	// Usage returns the memory usage of a space: its capacity, the bytes allocated by this
	// machine, and those of other processes.
	Usage(space Space) (Usage, error)
	// Close releases streams, events and fences. It returns an error that lists every
	// allocation still alive, which it frees too.
	Close() error
}

// Capabilities are the properties of a machine that its users depend on. They are constant.
type Capabilities struct {
	// KeepsData: memory holds data. A machine without only computes durations: copies move
	// nothing, Work runs only if its Host is set, and only host memory can be written.
	KeepsData bool
	// Emulated: there are no real devices; the memory of all spaces is this process's.
	Emulated bool
	// Timed: copies and work take the time that the devices need, or, of emulated devices, the
	// time computed from the topology's rates, not the time that this process needs.
	Timed bool
	// CopyErrorsLoseDevice: a copy that was enqueued fails only with its device, so that what is
	// enqueued behind it may tell others that it has landed.
	CopyErrorsLoseDevice bool
}

// StreamOptions describe a stream.
type StreamOptions struct {
	// Name is used in traces and errors. Default: "stream".
	Name string
	// Priority orders streams of one device where the hardware can: higher runs
	// first. Default: 0.
	Priority int
	// Spin is how long the thread of a host stream polls after its last operation before it sleeps:
	// waking it takes some 10 us. It keeps a core busy. Default: 0.
	Spin time.Duration
}

// Stream runs operations in order. Its methods return once the operation is enqueued; an error
// means that it was not (bad arguments, a lost device, a closed stream). Later failures put the
// stream into the error state.
type Stream interface {
	Name() string
	Space() Space
	// Copy copies src to dst, which have the same size and do not overlap. Both may be in any
	// space.
	Copy(dst, src Range) error
	// Record records ev after everything enqueued so far. An event may be recorded again when
	// nothing waits for its previous recording.
	Record(ev Event) error
	// Wait makes operations enqueued later wait for ev's latest recording. ErrNotRecorded if ev
	// was never recorded.
	Wait(ev Event) error
	// SignalFence sets f to value (which must be higher than its previous value, modulo 2^32) once
	// everything enqueued so far has ended.
	SignalFence(f Fence, value uint32) error
	// WaitFence makes operations enqueued later wait until f is at least value. It may be enqueued
	// before the signal.
	WaitFence(f Fence, value uint32) error
	// Synchronize waits until everything enqueued so far has ended, or ctx is done. It returns
	// the stream's error, if any.
	Synchronize(ctx context.Context) error
	// Recover waits as Synchronize does, clears the stream's error and returns it, or nil. A
	// lost device cannot be recovered: every call returns its error.
	Recover(ctx context.Context) error
	// Close waits for enqueued operations and releases the stream.
	Close() error
}

// BatchCopier is a stream that copies many ranges by one operation, which costs less than one
// for each. The machine determines which streams are BatchCopiers.
type BatchCopier interface {
	Stream
	// CopyBatch copies src[i] to dst[i] for all i. As a whole it runs in the stream's order,
	// its copies in any order and at the same time: no dst may overlap any other range of the
	// batch, which real devices do not check. All sources are in one space and all destinations
	// in one, not both in the host's; otherwise each pair is as for Copy. Where a batch fails,
	// any of its copies may have been made. The slices may be reused once CopyBatch has
	// returned. The error wraps ErrNoBatches, and the stream is unchanged, where the machine
	// turns out to have no batches.
	CopyBatch(dst, src []Range) error
}

// Executor is a stream that runs Go functions in order with its copies, events and fences: host
// streams everywhere, and the streams of emulated devices.
type Executor interface {
	Stream
	Execute(w Work) error
}

// Watcher is an Executor that runs work when a fence or an event is reached, and other work
// meanwhile: one stream waits for many points, reached in any order. Host streams are Watchers
// everywhere.
//
// Watched work runs as if it were passed to Execute when its point is reached. If the point
// fails, its Failed is called with the error instead of Run, and the stream does not enter the
// error state. Synchronize and Recover do not wait for work that is still watched, and Close
// drops it: neither Run nor Failed is called. Work.Due spares a machine that polls looks in vain.
type Watcher interface {
	Executor
	// Watch runs w once p is reached. If p is already reached, without an error, Watch returns
	// true and w will not run; where w.Due.NotBefore is ahead it may return false all the same, and run w.
	Watch(p Point, w Work) (reached bool, err error)
	// WatchEvent is Watch for the latest recording of ev.
	WatchEvent(ev Event, w Work) (passed bool, err error)
}

// Helper is a Watcher that can run watched work on a goroutine that waits. The machine determines
// which streams are Helpers.
type Helper interface {
	Watcher
	// Await waits as p.Wait does. While it waits, and the stream has nothing to run and sleeps, the
	// caller's goroutine runs the work of watches whose points are reached, so that the stream need
	// not wake first. The caller must hold no lock that watched work may take.
	Await(ctx context.Context, p Point) error
}

// Work is one operation that runs as a Go function on an Executor.
type Work struct {
	// Name is used in traces and errors.
	Name string
	// Reads and Writes are the memory that the operation accesses, as far as it is known when
	// it is enqueued. The slices may be reused once Execute has returned.
	Reads, Writes []Range
	// Flops and Bytes (memory traffic) determine its duration in the compute model of emulated
	// devices.
	Flops, Bytes int64
	// Run executes the operation. It may access the memory declared above, and other memory
	// after declaring it through the Access. An error puts the stream into the error state. If
	// Run is nil, the work only takes time. Run may enqueue on other streams but must not wait
	// for its own. It is not called if the machine keeps no data.
	Run func(Access) error
	// Failed, if set, is called instead of Run, with the stream's error, if the stream is in
	// the error state. It may enqueue on other streams but must not wait.
	Failed func(error)
	// Host: Run acts on the host (submits copies, sends on a channel), and so runs even if the
	// machine keeps no data.
	Host bool
	// Due is of the point of a watch; nil: nothing is known of it.
	Due *Due
}

// Due is what is known of when a point is reached: its times are in nanoseconds on the machine's clock.
type Due struct {
	// NotBefore is when it can be reached at the earliest; 0: that is unknown. A machine that polls need
	// not look before, so that work runs late whose point is reached sooner. It may be changed while the
	// work is watched.
	NotBefore atomic.Int64
	// Pending is when a machine that polls has last seen that it was not reached; 0: never. The
	// submitter resets it.
	Pending atomic.Int64
}

// Access declares, while Work runs, accesses to memory that only device data determines (a slot
// table, a block table, counts).
type Access interface {
	Read(Range)
	Write(Range)
}

// Annotator is a stream of a machine whose operations are recorded in a trace.
type Annotator interface {
	Stream
	// Annotate gives what is enqueued from now on a note, which is recorded with each
	// operation, and returns the note before. The stream keeps the note as it is, and does
	// not look at it; nil is none.
	Annotate(note any) (before any)
}

// Capturer is a stream that can capture operations into a graph, which is then launched at the
// cost of one operation. The machine determines which streams are Capturers.
type Capturer interface {
	Stream
	// Capture captures the copies, and the kernels of a backend, that f enqueues on the stream,
	// with their addresses and arguments, without running them. All other operations of f on
	// the stream are errors. Work enqueued before may still be running, and other streams are
	// not blocked. On an error, of f or of the device, there is no graph, and the stream is
	// unchanged.
	Capture(f func() error) (Graph, error)
	// LaunchGraph enqueues the operations of the graph, in the order of their capture. The
	// graph is of this stream, or of another of the same device.
	LaunchGraph(g Graph) error
}

// Graph is a captured sequence of operations. The device memory that it uses is not in any
// Usage.
type Graph interface {
	// Nodes is the number of its operations.
	Nodes() int
	// Close releases the graph; no launch of it may be in progress.
	Close() error
}

// Event marks a point of a stream.
type Event interface {
	// Synchronize waits until the latest recording has passed, or ctx is done. It returns the
	// error of the recording's stream if that was in the error state, and ErrNotRecorded
	// without a recording.
	Synchronize(ctx context.Context) error
	// Query reports whether the latest recording has passed.
	Query() (bool, error)
	// Time is the time, on the machine's clock, at which the latest recording passed; valid
	// once Query returns true. It is an error of an untimed event.
	Time() (time.Duration, error)
	// Close releases the event; nothing may be waiting for it.
	Close() error
}

// Fence is a 32-bit counter (a timeline semaphore) that host and streams signal and wait for in
// any order. Comparison is modulo 2^32: v is reached if current - v, as int32, is not negative.
type Fence interface {
	// Signal sets the counter from the host.
	Signal(value uint32) error
	// Fail sets the counter to value and returns err to waiters for value or less from then on,
	// as far as the device can: waits on the host always return it; waiting streams enter the
	// error state on emulated devices, and continue with undefined data on CUDA. So a caller of
	// Fail must also report the error to the owner of the step.
	Fail(value uint32, err error) error
	// Wait waits on the host until the counter is at least value, or ctx is done.
	Wait(ctx context.Context, value uint32) error
	// Value is the current value, or the value when the fence was closed.
	Value() uint32
	// Close releases the fence; nothing may be waiting for it.
	Close() error
}

// Point is a value of a fence that will be reached. The zero Point is none.
type Point struct {
	Fence Fence
	Value uint32
}

// None reports whether p is the zero Point.
func (p Point) None() bool { return p.Fence == nil }

// Reached reports, without waiting, whether the fence has reached p. A virtual machine may
// treat the call as a poll and run work.
func (p Point) Reached() bool { return int32(p.Fence.Value()-p.Value) >= 0 }

// Ended reports whether the fence has reached p, and the error that it has failed with at
// p. It neither waits nor, on a virtual machine, runs work.
func (p Point) Ended() (bool, error) {
	// A wait whose context is done only looks, on every machine, and counts as another call
	// between two polls of a virtual one.
	if p.Wait(doneContext) == nil {
		return true, nil
	}
	if !p.Reached() {
		return false, nil
	}
	return true, p.Wait(context.Background())
}

var doneContext = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

// After reports whether p is later than q, a point of the same fence.
func (p Point) After(q Point) bool { return int32(p.Value-q.Value) > 0 }

// Wait waits on the host until p is reached, or ctx is done, and returns the error that the
// fence has failed with at p. It orders what the caller does next after p was signaled.
func (p Point) Wait(ctx context.Context) error { return p.Fence.Wait(ctx, p.Value) }

// Usage is the usage of one memory space, in bytes.
type Usage struct {
	// Capacity is the total memory of the space.
	Capacity int64
	// Allocated is the total of this machine's live Memory objects, rounded as the device
	// rounds.
	Allocated int64
	// OtherProcesses is memory in use by anything else: other processes, CUDA contexts,
	// libraries.
	OtherProcesses int64
	// Peak is the maximum of Allocated so far.
	Peak int64
}

// Free is the memory that can still be allocated.
func (u Usage) Free() int64 { return u.Capacity - u.Allocated - u.OtherProcesses }
