package kernels

import (
	"github.com/moeserve/moeserve/device"
)

// Backend runs operations on one device.
type Backend interface {
	// Name is "cpu" or "cuda".
	Name() string
	// ActivationDType is the type of hidden states and of the KV cache.
	ActivationDType() DType
	// Enqueue checks op and enqueues it on s. It keeps no reference to op. A backend may
	// require exclusive use of a stream, from its first operation on the stream until Close.
	Enqueue(s device.Stream, op Op) error
	// ExpertLayout returns the backend's layout of an expert of this shape. It is the same in
	// every tier.
	ExpertLayout(shape ExpertShape) (ExpertLayout, error)
	// PackExpert writes rows [row, row+n) of one matrix, given row-major in layout.DType as in
	// checkpoints, to their places in the extent dst; n is len(src) / the bytes of a row.
	// Several goroutines may call it.
	PackExpert(layout ExpertLayout, part Part, row int, src, dst []byte) error
	// Close releases the backend's resources; none of its work may be outstanding.
	Close() error
}
