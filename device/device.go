package device

import (
	"context"
	"fmt"
	"time"
)

// Space names one memory space of a machine: Host, or the HBM of one GPU.
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

// Addr is an address that every stream of a machine understands (unified
// addressing: it names the space as well as the place). Zero is no address.
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

// Slice returns the n bytes at offset off of r. It panics when they do not lie
// inside r: that is a programming error.
func (r Range) Slice(off, n int64) Range {
	if off < 0 || n < 0 || off > r.Bytes-n {
		panic(fmt.Sprintf("device: slice [%d, %d) of a range of %d bytes", off, off+n, r.Bytes))
	}
	return Range{Addr: r.Addr + Addr(off), Bytes: n}
}

// End is the first address behind r.
func (r Range) End() Addr { return r.Addr + Addr(r.Bytes) }

func (r Range) String() string { return fmt.Sprintf("[%#x,+%d)", uint64(r.Addr), r.Bytes) }

// Region is a Range with the space that its bytes are in. It owns nothing.
type Region struct {
	Space Space
	Range
}

// Slice returns the n bytes at offset off of r. It panics when they do not lie
// inside r: that is a programming error.
func (r Region) Slice(off, n int64) Region {
	return Region{Space: r.Space, Range: r.Range.Slice(off, n)}
}

func (r Region) String() string { return r.Space.String() + " " + r.Range.String() }

// Memory is one allocation. Its owner frees it exactly once.
type Memory interface {
	Space() Space
	Bytes() int64
	// Range returns the n bytes at offset off; it panics when they lie outside.
	// Region does so together with their space.
	Range(off, n int64) Range
	Region(off, n int64) Region
	// Read and Write return the n bytes at off for the host to read, or to
	// overwrite, until the host next enqueues something that touches them. They
	// panic for memory that the host cannot see (every space but Host) and
	// outside the allocation. Work on the device that touches the same bytes must
	// be ordered before, by an event, a fence or Synchronize.
	Read(off, n int64) []byte
	Write(off, n int64) []byte
	// Free gives the memory back. All work that touches it must have ended and be
	// known by the host to have ended. A second Free is an error.
	Free() error
}

// Machine is a host with its devices. All methods may be called from several
// goroutines; a Stream is used by one goroutine at a time.
type Machine interface {
	Clock
	Capabilities() Capabilities
	Topology() *Topology
	// Alloc returns memory of the space, aligned to Alignment, its content
	// undefined. label names it in accounts and errors. An allocation that does
	// not fit is an *Error that wraps ErrOutOfMemory and says what was asked and
	// what is free.
	Alloc(space Space, bytes int64, label string) (Memory, error)
	// SpaceOf says in which space an address lies: false where it is in no live
	// allocation of this machine. It neither blocks nor allocates.
	SpaceOf(a Addr) (Space, bool)
	// NewStream makes an in-order stream of a GPU, or, for Host, a host stream:
	// one that also implements Executor and Watcher.
	NewStream(space Space, o StreamOptions) (Stream, error)
	NewEvent() (Event, error)
	// NewFence makes a counter at 0.
	NewFence(label string) (Fence, error)
	// Usage accounts for a space: bytes allocated here, its capacity, and what
	// others hold.
	Usage(space Space) (Usage, error)
	// Close frees streams, events and fences, and fails with an error that lists
	// every allocation still alive, which it frees too.
	Close() error
}

// Capabilities say what a machine is, where that matters to those who use it. They do
// not change.
type Capabilities struct {
	// KeepsData: memory holds bytes. A machine without tells only how long everything
	// takes: copies move nothing, of Work only what says Host runs, and of memory
	// only the host's can be written.
	KeepsData bool
	// Emulated: the devices are none, and the memory of all spaces is this process's.
	Emulated bool
	// Timed: copies and work take the time that their devices need, or, where these
	// are emulated, that the topology's rates say, and not what this process needs.
	Timed bool
}

// StreamOptions describe a stream.
type StreamOptions struct {
	// Name stands in traces and errors. Default: "stream".
	Name string
	// Priority orders streams of one device where the hardware can: higher runs
	// first. Default: 0.
	Priority int
}

// Stream runs operations in the order given. Its methods return once the
// operation is enqueued; their errors mean that it was not (bad arguments, a
// lost device, a closed stream). What fails later puts the stream into error.
type Stream interface {
	Name() string
	Space() Space
	// Copy copies src to dst, which have the same size and do not overlap. Either
	// may lie in any space.
	Copy(dst, src Range) error
	// Record marks ev with everything enqueued so far. An event may be recorded
	// again once nobody waits for its earlier recording.
	Record(ev Event) error
	// Wait holds back what is enqueued later until ev's latest recording has
	// passed. ErrNotRecorded if ev was never recorded.
	Wait(ev Event) error
	// Raise sets f to value (which must be higher than its last, modulo 2^32)
	// once everything enqueued so far has ended.
	Raise(f Fence, value uint32) error
	// Await holds back what is enqueued later until f is at least value. It may
	// come before the Raise.
	Await(f Fence, value uint32) error
	// Synchronize waits until everything enqueued so far has ended, or ctx is
	// done. It returns the error the stream is in.
	Synchronize(ctx context.Context) error
	// Recover waits as Synchronize does, clears the stream's error and returns
	// it: nil where there was none. A lost device cannot be recovered from: its
	// error comes back at every call.
	Recover(ctx context.Context) error
	// Close waits for what is enqueued and releases the stream.
	Close() error
}

// Executor is a stream that runs Go work in order with its copies, events and
// fences: host streams everywhere, and the streams of emulated devices.
type Executor interface {
	Stream
	Execute(w Work) error
}

// Watcher is an Executor that executes work when something has happened elsewhere, and
// does other work meanwhile: one waits for many points, in whatever order they come.
// Host streams are Watchers everywhere.
//
// Work is watched for until it runs, and runs as if it were given to Execute at that
// moment. Where what it waits for fails, its Failed is called with the error in place of
// Run, which puts the stream into no error. Synchronize and Recover do not wait for work
// that is still watched for, and Close drops it: neither Run nor Failed is called.
type Watcher interface {
	Executor
	// Watch executes w once p is reached. Where it is reached already, without an error,
	// that is all it says, and w will not run.
	Watch(p Point, w Work) (reached bool, err error)
	// WatchEvent does so with the latest recording of ev.
	WatchEvent(ev Event, w Work) (passed bool, err error)
}

// Work is one operation that runs as Go code on an Executor.
type Work struct {
	// Name stands in traces and errors.
	Name string
	// Reads and Writes are the memory the operation touches, as far as the caller
	// knows when enqueueing. The slices may be used again once Execute returned.
	Reads, Writes []Range
	// Flops and Bytes (moved to or from memory) cost what they cost on the
	// emulated devices' compute model.
	Flops, Bytes int64
	// Run does it. It may touch the memory declared and what it declares through
	// the Access before it touches it. An error puts the stream into error. Nil
	// only costs time. Run may enqueue on other streams but must not wait for its
	// own. It is not called where the machine keeps no data.
	Run func(Access) error
	// Failed, if set, is called in place of Run where the stream is in error, with
	// that error: it tells whoever counts on Run. It may enqueue on other streams but
	// must not wait.
	Failed func(error)
	// Host says that Run acts on the host (submits copies, answers a channel) and
	// so runs even where the machine keeps no data.
	Host bool
}

// Access declares, while Work runs, the memory that only the data says will be
// touched (through a slot table, a block table, counts).
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

// Capturer is a stream that can take down what it is given, to be given all of it again
// at the cost of one operation. Which streams are Capturers is up to the machine.
type Capturer interface {
	Stream
	// Capture takes down the copies, and the kernels of a backend, that f enqueues on the
	// stream, with the addresses and arguments that they have then, and runs none of them.
	// Whatever else f gives the stream is refused. What was enqueued before may still be
	// running, and other streams are not held up. An error, of f or of the device, means
	// that there is no graph, and leaves the stream as it was.
	Capture(f func() error) (Graph, error)
	// LaunchGraph enqueues everything that the graph holds, in the order in which it was
	// taken down. The graph is of this stream, or of another of the same device.
	LaunchGraph(g Graph) error
}

// Graph is what a Capturer has taken down. The device keeps it in memory that no account
// has.
type Graph interface {
	// Nodes counts its operations.
	Nodes() int
	// Close gives it up; no launch of it may be under way.
	Close() error
}

// Event marks a point of a stream.
type Event interface {
	// Synchronize waits until the latest recording has passed, or ctx is done. It
	// returns the error of the stream it was recorded on, if that was in error
	// then, and ErrNotRecorded if there is no recording.
	Synchronize(ctx context.Context) error
	// Query says whether the latest recording has passed.
	Query() (bool, error)
	// Time is when the latest recording passed, on the machine's clock; valid once
	// Query is true.
	Time() (time.Duration, error)
	// Close releases the event; nobody may be waiting for it.
	Close() error
}

// Fence is a 32-bit counter that host and streams raise and await in any order.
// Comparison is modulo 2^32: v counts as reached while current - v, as int32, is
// not negative.
type Fence interface {
	// Raise sets the counter from the host.
	Raise(value uint32) error
	// Fail sets the counter to value and hands err to whoever awaits value or
	// less from then on, as far as the device can: the host always gets it;
	// streams go into error on emulated devices and run on over undefined data on
	// CUDA. So whoever raises by Fail must also tell the owner of the step.
	Fail(value uint32, err error) error
	// Await waits on the host until the counter is at least value, or ctx is done.
	Await(ctx context.Context, value uint32) error
	// Value is the counter now, or was when the fence was closed.
	Value() uint32
	// Close releases the fence; nobody may be waiting for it.
	Close() error
}

// Point is a moment in the life of a fence: when it has reached Value. The zero
// Point is none.
type Point struct {
	Fence Fence
	Value uint32
}

// None reports whether p is the zero Point.
func (p Point) None() bool { return p.Fence == nil }

// Reached says, without waiting, whether the fence is at p, or beyond it. A virtual
// machine may take the question as a poll and run work.
func (p Point) Reached() bool { return int32(p.Fence.Value()-p.Value) >= 0 }

// After says whether p comes later than q, a point of the same fence.
func (p Point) After(q Point) bool { return int32(p.Value-q.Value) > 0 }

// Await waits on the host until p is reached, or ctx is done, and returns the error
// that the fence has failed with there. What the caller does next is ordered behind
// whoever raised p.
func (p Point) Await(ctx context.Context) error { return p.Fence.Await(ctx, p.Value) }

// Usage is the account of one memory space, in bytes.
type Usage struct {
	// Capacity is what the space has in all.
	Capacity int64
	// Allocated is what this machine's Memory objects hold, rounded as the device
	// rounds.
	Allocated int64
	// OtherProcesses is what is taken by others: other processes, contexts, libraries,
	// other tenants.
	OtherProcesses int64
	// Peak is the largest Allocated so far.
	Peak int64
}

// Free is what could still be allocated.
func (u Usage) Free() int64 { return u.Capacity - u.Allocated - u.OtherProcesses }
