package models

import (
	"github.com/moeserve/moeserve/kernels"
)

// Weights are views of all weights except routed experts.
type Weights struct {
	Embed                    kernels.Tensor // [V, H]
	FinalNorm, FinalNormBias kernels.Tensor // [H]
	Head                     kernels.Tensor // [V, H]
	HeadBias                 kernels.Tensor // [V], or none
	Layers                   []LayerWeights
}

// LayerWeights are the weights of one layer; none for those that the architecture or the layer
// does not have.
type LayerWeights struct {
	InputNorm, InputNormBias kernels.Tensor // [H]
	QKV                      kernels.Tensor // [(heads + 2 kv heads) D, H]: queries, keys, values
	QKVBias                  kernels.Tensor // [(heads + 2 kv heads) D]
	QNorm, KNorm             kernels.Tensor // [D], or [heads D] and [kv heads D]
	O                        kernels.Tensor // [H, heads D]
	OBias                    kernels.Tensor // [H]
	PostNorm, PostNormBias   kernels.Tensor // [H]

	// Router is [E, H], or with a shared expert [E+1, H]: its gate is the last row, so that both are
	// one GEMM. RouterBias has as many elements.
	Router, RouterBias kernels.Tensor

	SharedGateUp kernels.Tensor // [2 shared width, H]: gate, then up
	SharedDown   kernels.Tensor // [H, shared width]

	GateUp kernels.Tensor // [2 dense width, H]: gate, then up
	Down   kernels.Tensor // [H, dense width]
}

// Info describes a tensor of a Source.
type Info struct {
	// DType is one of BF16, F16 and F32; Invalid for a type that weights cannot
	// have, which TypeName then names.
	DType    kernels.DType
	TypeName string
	Shape    []int
	// File names where it comes from, for errors.
	File string
}

// Source is the source of weights. Its methods may be called from several goroutines.
type Source interface {
	// Origin names the source in errors: a directory.
	Origin() string
	// Names lists the tensors in the order in which reading them is cheapest.
	Names() []string
	Tensor(name string) (Info, bool)
	// Read passes the bytes [off, off+n) of a tensor, row-major and little-endian, to read,
	// which must not keep or change them.
	Read(name string, off, n int64, read func(data []byte) error) error
	// Prefetch announces that these bytes will be read soon. It reads none itself.
	Prefetch(name string, off, n int64)
	// Release announces that the tensor will not be read again.
	Release(name string)
}

// Sink receives weights. Load calls it from several goroutines at once, never twice for the
// same bytes. data is whole rows, valid during the call only.
type Sink interface {
	// Dense receives bytes at off of the Layout's arena.
	Dense(off int64, data []byte) error
	// Expert receives rows from row on of one matrix of an expert, in the Layout's ExpertDType.
	// layer counts all layers, dense ones too.
	Expert(layer, expert int, part kernels.Part, row int, data []byte) error
}
