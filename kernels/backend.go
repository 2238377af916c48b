package kernels

import (
	"github.com/moeserve/moeserve/device"
)

// Backend carries operations out on one device.
type Backend interface {
	// Name is "cpu" or "cuda".
	Name() string
	// ActivationDType is the type of hidden states and of the KV cache.
	ActivationDType() DType
	// Enqueue checks op and puts it on s. It keeps nothing of op. A backend may have a
	// stream to itself from its first operation there until it is closed.
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
