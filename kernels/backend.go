package kernels

import "github.com/moeserve/moeserve/device"

// Backend carries operations out on one device.
type Backend interface {
	// Name is "cpu" or "cuda".
	Name() string
	// ActivationDType is the type of hidden states and of the KV cache.
	ActivationDType() DType
	// Enqueue checks op and puts it on s. It keeps nothing of op.
	Enqueue(s device.Stream, op Op) error
	// ExpertLayout says how the backend lays out an expert of this shape. The same
	// bytes lie in every tier.
	ExpertLayout(shape ExpertShape) (ExpertLayout, error)
	// PackExpert writes rows [row, row+n) of one matrix, row-major in layout.DType
	// as checkpoints have them, to their places in the extent dst, n being
	// len(src) / the row's bytes. It may be called from several goroutines.
	PackExpert(layout ExpertLayout, part Part, row int, src, dst []byte) error
	// Close releases what the backend holds; no work of it may be outstanding.
	Close() error
}

// Op is one operation: a pointer to one of this package's argument structs.
type Op interface {
	// Name is the operation's, in lower case: "norm", "expert_up".
	Name() string
	// Check reports the first argument that does not fit, by field.
	Check() error
	// Declare adds what the operation reads and writes, as far as its arguments
	// say, and what it costs. What only the data says (experts behind a slot table,
	// KV blocks behind a block table) is left out of Reads and Writes but estimated
	// in Flops and Bytes.
	Declare(d *Decl)
}

// Decl is what an operation touches and costs.
type Decl struct {
	Reads, Writes []device.Range
	// Flops counts a multiply-add as two; Bytes counts memory traffic with every
	// input read once and every output written once.
	Flops, Bytes int64
}

// Reset empties d and keeps its room.
func (d *Decl) Reset() { *d = Decl{Reads: d.Reads[:0], Writes: d.Writes[:0]} }

// ExpertShape is the shape of one expert: w1 and w3 are [Intermediate, Hidden],
// w2 is [Hidden, Intermediate].
type ExpertShape struct {
	Hidden, Intermediate int
	DType                DType
}

// Bytes is the size of the three matrices.
func (s ExpertShape) Bytes() int64 {
	return 3 * int64(s.Hidden) * int64(s.Intermediate) * int64(s.DType.Size())
}

// Part is one of an expert's matrices, named as Mixtral names them.
type Part uint8

// The three matrices: the expert computes W2 (silu(W1 x) * W3 x).
const (
	W1 Part = iota // gate_proj
	W3             // up_proj
	W2             // down_proj
)

func (p Part) String() string { return [...]string{"w1", "w3", "w2"}[p] }

// ExpertLayout says where an expert's matrices lie in its one contiguous extent.
type ExpertLayout struct {
	ExpertShape
	// Tag names the inner layout: "row-major" has w1, w3, w2 one after another.
	Tag string
	// Size of the extent in bytes, a multiple of 256, at least Bytes().
	Size int64
}
