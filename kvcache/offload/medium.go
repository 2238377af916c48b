package offload

import (
	"fmt"
	"log/slog"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/harvest"
	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/transfer"
)

// Names of the mediums, as in events and statistics. GPU is where the engine's blocks lie.
const (
	GPU     = "GPU"
	PeerGPU = "PEER_GPU"
	CPU     = "CPU"
	File    = "FILE"
)

// Medium is what one tier's blocks lie in: all that has to be written to add a tier. New asks
// a Spec for the mediums, and keeps the account of their blocks.
type Medium struct {
	// Name of the medium, in events and statistics.
	Name string
	// Blocks is the capacity, in blocks of Env.BlockBytes.
	Blocks int
	// BytesPerSecond is the expected rate of loads, until some are measured; 0: unknown. It may
	// be called from any goroutine.
	BytesPerSecond func() float64
	// Store copies blocks from the GPU to the medium, Load back.
	Store, Load Handler
	Memory      Memory
	// Budget is for memory that others want, too. Default: there is memory for Blocks, always.
	Budget Budget
}

// Memory is the memory of a medium. The engine's goroutine uses it.
type Memory interface {
	// Drop says that the content of these keys is not needed any more: they were evicted, lost,
	// or their stores failed. Loads of lost ones may be under way.
	Drop(keys []kvcache.Key)
	// Lost returns the keys whose content the medium has lost since the last call.
	Lost() []kvcache.Key
	// Locate is the memory space in which a key's content lies.
	Locate(key kvcache.Key) device.Space
	// Reset drops all content. Transfers may be under way: the ids of their blocks are used
	// again, and what is started from now on waits for them.
	Reset()
	// Close frees the memory. No transfer is under way.
	Close() error
}

// Handler starts the transfers from one medium to another: one of them is the GPU.
type Handler interface {
	// Start starts to copy the blocks of a job and returns at once. Those that it refuses, by
	// their index and in ascending order, are not copied; the error is why. A load without an
	// error refuses those that the medium does not have: they are lost. Where it refuses all,
	// there is no Transfer. The job is not changed any more.
	Start(job *Job) (t Transfer, refused []int, err error)
}

// Transfer is a job under way.
type Transfer interface {
	// Ends are fence values that are all reached, and never fail, when the transfer has ended:
	// nothing of it reads or writes memory any more.
	Ends() []device.Point
	// Result says, once it has ended, which of the job's blocks have arrived; the error is why
	// others have not. What it says of those refused does not matter. It is called once.
	Result() (arrived []bool, err error)
	// RaisePriority raises the priority of what has not started.
	RaisePriority(p transfer.Priority)
}

// Job is a transfer of blocks between the GPU and a tier.
type Job struct {
	Blocks   []Block
	Priority transfer.Priority
	// After are fence values that must be reached before anything is read or written.
	After []device.Point
	Label fmt.Stringer
}

// Block is a block of a tier.
type Block struct {
	Key kvcache.Key
	// ID of the block in the tier's account.
	ID int32
	// Pieces are the blocks of the GPU that it holds: all in a store, and in a load those that
	// are needed.
	Pieces []Piece
}

// Piece is one block of the GPU, and where it lies within the tier's block.
type Piece struct {
	GPU    device.Region
	Offset int64
}

// bytes is the number of bytes that are copied.
func (j *Job) bytes() (n int64) {
	for i := range j.Blocks {
		n += j.Blocks[i].bytes()
	}
	return n
}

func (b *Block) bytes() (n int64) {
	for _, p := range b.Pieces {
		n += p.GPU.Bytes
	}
	return n
}

// landed returns which blocks have arrived if the first bytes of the job have.
func (j *Job) landed(bytes int64) []bool {
	arrived := make([]bool, len(j.Blocks))
	for i := range j.Blocks {
		if bytes -= j.Blocks[i].bytes(); bytes < 0 {
			break
		}
		arrived[i] = true
	}
	return arrived
}

// Env is what mediums are made of.
type Env struct {
	Machine device.Machine
	// Space is the GPU's memory.
	Space    device.Space
	Transfer *transfer.Engine
	// Harvest is nil without peers.
	Harvest *harvest.Runtime
	// BlockBytes is the size of a block of a tier.
	BlockBytes int64
	Log        *slog.Logger
	// ContentLost is to be called when Memory.Lost has more to return, on any goroutine.
	ContentLost func()
}

// Place is where the content of a key lies.
type Place struct {
	// Medium is the fastest that has it; empty: none.
	Medium string
	Space  device.Space
}

func (p Place) String() string {
	switch {
	case p.Medium == "":
		return "nowhere"
	case p.Medium == PeerGPU:
		return fmt.Sprintf("%s %s", p.Medium, p.Space)
	}
	return p.Medium
}
