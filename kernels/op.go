package kernels

import (
	"github.com/moeserve/moeserve/device"
)

// Op is one operation: a pointer to one of this package's argument structs.
type Op interface {
	// Name is the operation's name, in lower case: "norm", "expert_up".
	Name() string
	// Check returns an error for the first bad argument, naming its field.
	Check() error
	// Declare adds the memory that the operation reads and writes, as far as its arguments
	// determine it, and its cost. Memory that only device data determines (experts behind a
	// slot table, KV blocks behind a block table) is not in Reads and Writes, but is estimated
	// in Flops and Bytes.
	Declare(d *Decl)
}

// Decl is the memory that an operation accesses, and its cost.
type Decl struct {
	Reads, Writes []device.Range
	// Flops counts a multiply-add as two; Bytes counts memory traffic with every
	// input read once and every output written once.
	Flops, Bytes int64
}

// Reset empties d and keeps its memory.
func (d *Decl) Reset() { *d = Decl{Reads: d.Reads[:0], Writes: d.Writes[:0]} }

func (d *Decl) read(t *Tensor) {
	d.Reads = t.AppendRanges(d.Reads)
	d.Bytes += t.Bytes()
}

func (d *Decl) write(t *Tensor) {
	d.Writes = t.AppendRanges(d.Writes)
	d.Bytes += t.Bytes()
}

func (d *Decl) update(t *Tensor) {
	d.read(t)
	d.write(t)
}

// optional declares that t is read, unless it is none.
func (d *Decl) optional(t *Tensor) {
	if !t.None() {
		d.read(t)
	}
}
