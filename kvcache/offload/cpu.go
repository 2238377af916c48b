package offload

import (
	"errors"
	"fmt"
	"slices"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/transfer"
)

// cpuMemory is the tier in pinned host memory: one allocation, block i at i times its size.
type cpuMemory struct {
	env    Env
	memory device.Memory
	points points
	// underWay are the transfers that have not ended; after a Reset, others wait for old.
	underWay []*cpuTransfer
	old      []device.Point
}

// openCPU allocates the blocks. setting is the name of the size's setting, for errors.
func openCPU(e Env, blocks int, setting string) (*Medium, error) {
	bytes := int64(blocks) * e.BlockBytes
	memory, err := e.Machine.Alloc(device.Host, bytes, "kv cpu tier")
	if err != nil {
		return nil, fmt.Errorf("%d blocks of %d bytes in pinned host memory: %w; lower %s", blocks, e.BlockBytes, err, setting)
	}
	c := &cpuMemory{env: e, memory: memory, points: points{machine: e.Machine, name: "kv cpu tier"}}
	up := device.Pair{From: device.Host, To: e.Space}
	return &Medium{
		Name: CPU, Blocks: blocks, Memory: c, Store: cpuHandler{c, true}, Load: cpuHandler{c, false},
		BytesPerSecond: func() float64 { return e.Transfer.Rate(up) },
	}, nil
}

// Drop implements Memory: a block's place is its id's.
func (c *cpuMemory) Drop([]kvcache.Key) {}

// Lost implements Memory: nothing is ever lost.
func (c *cpuMemory) Lost() []kvcache.Key { return nil }

// Locate implements Memory.
func (c *cpuMemory) Locate(kvcache.Key) device.Space { return device.Host }

// Reset implements Memory.
func (c *cpuMemory) Reset() {
	c.old = slices.DeleteFunc(c.old, func(p device.Point) bool { ended, _ := p.Ended(); return ended })
	for _, t := range c.underWay {
		c.old = append(c.old, t.ticket.End())
	}
}

// Close implements Memory.
func (c *cpuMemory) Close() error { return errors.Join(c.points.close(), c.memory.Free()) }

// cpuHandler copies to the tier (store) or back.
type cpuHandler struct {
	*cpuMemory
	store bool
}

// Start implements Handler: one request for all blocks.
func (h cpuHandler) Start(job *Job) (Transfer, []int, error) {
	var pieces []transfer.Piece
	for i := range job.Blocks {
		b := &job.Blocks[i]
		at := h.memory.Region(int64(b.ID)*h.env.BlockBytes, h.env.BlockBytes)
		for _, p := range b.Pieces {
			pieces = append(pieces, piece(p, at, h.store))
		}
	}
	h.old = slices.DeleteFunc(h.old, func(p device.Point) bool { ended, _ := p.Ended(); return ended })
	done, err := h.points.take()
	if err != nil {
		return nil, nil, err
	}
	ticket, err := h.env.Transfer.Submit(transfer.Request{
		Pieces: pieces, Priority: job.Priority, After: slices.Concat(job.After, h.old), Done: done, DoneInOrder: true, Label: job.Label,
	})
	if err != nil {
		h.points.cancel(done)
		return nil, nil, err
	}
	t := &cpuTransfer{cpuMemory: h.cpuMemory, job: job, ticket: ticket, done: done}
	h.underWay = append(h.underWay, t)
	return t, nil, nil
}

// piece is the copy of one block of the GPU to a tier's block, or from it.
func piece(p Piece, tier device.Region, store bool) transfer.Piece {
	at := tier.Slice(p.Offset, p.GPU.Bytes)
	if store {
		return transfer.Piece{Dst: at, Src: p.GPU}
	}
	return transfer.Piece{Dst: p.GPU, Src: at}
}

// cpuTransfer is a request under way.
type cpuTransfer struct {
	*cpuMemory
	job    *Job
	ticket *transfer.Ticket
	done   device.Point
}

// Ends implements Transfer.
func (t *cpuTransfer) Ends() []device.Point { return []device.Point{t.ticket.End()} }

// RaisePriority implements Transfer.
func (t *cpuTransfer) RaisePriority(p transfer.Priority) { t.ticket.RaisePriority(p) }

// Result implements Transfer.
func (t *cpuTransfer) Result() ([]bool, error) {
	t.points.put(t.done)
	t.underWay = slices.DeleteFunc(t.underWay, func(o *cpuTransfer) bool { return o == t })
	arrived, err := t.job.landed(t.ticket.Landed()), t.ticket.Err()
	t.ticket.Release()
	return arrived, err
}
