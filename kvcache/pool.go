package kvcache

import (
	"errors"
	"fmt"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
)

// DefaultBlockTokens is the number of tokens per block where Shape.BlockTokens is 0.
const DefaultBlockTokens = 16

// Shape describes a block: the model's heads and layers, in the backend's data type.
type Shape struct {
	// Layers is the number of layers with attention.
	Layers int
	// KVHeads is the number of key (and of value) heads.
	KVHeads int
	// HeadDim is the number of elements of one head.
	HeadDim int
	// DType is the backend's activation type.
	DType kernels.DType
	// BlockTokens is the number of tokens per block. Default: 16.
	BlockTokens int
}

// EnsureDefaults returns s with its defaults filled in.
func (s Shape) EnsureDefaults() Shape {
	if s.BlockTokens == 0 {
		s.BlockTokens = DefaultBlockTokens
	}
	return s
}

// Validate reports the first invalid field.
func (s Shape) Validate() error {
	for _, f := range []struct {
		name  string
		value int
	}{{"Layers", s.Layers}, {"KVHeads", s.KVHeads}, {"HeadDim", s.HeadDim}, {"BlockTokens", s.BlockTokens}, {"DType", s.DType.Size()}} {
		if f.value <= 0 {
			return fmt.Errorf("kvcache: %s is %d; it must be positive", f.name, f.value)
		}
	}
	return nil
}

// BlockBytes is the size of one block: K and V of all layers.
func (s Shape) BlockBytes() int64 { return int64(s.EnsureDefaults().blockElements() * s.DType.Size()) }

// BlocksFor is the number of blocks for the given number of tokens.
func (s Shape) BlocksFor(tokens int) int {
	b := s.EnsureDefaults().BlockTokens
	return (tokens + b - 1) / b
}

// BytesFor is the memory in bytes for the given number of tokens of one sequence, in
// whole blocks.
func (s Shape) BytesFor(tokens int) int64 { return int64(s.BlocksFor(tokens)) * s.BlockBytes() }

// planeElements is the number of elements of K, or of V, of one layer in one block.
func (s Shape) planeElements() int { return s.BlockTokens * s.KVHeads * s.HeadDim }

func (s Shape) blockElements() int { return s.Layers * 2 * s.planeElements() }

// PoolOptions describe a pool.
type PoolOptions struct {
	// Machine and Space to allocate in.
	Machine device.Machine
	Space   device.Space
	// Shape of a block.
	Shape Shape
	// Blocks is the number of blocks.
	Blocks int
}

// EnsureDefaults returns o with its defaults filled in.
func (o PoolOptions) EnsureDefaults() PoolOptions {
	o.Shape = o.Shape.EnsureDefaults()
	return o
}

// Validate reports the first invalid option.
func (o PoolOptions) Validate() error {
	if o.Machine == nil {
		return errors.New("kvcache: PoolOptions.Machine is nil")
	}
	if err := o.Shape.Validate(); err != nil {
		return err
	}
	if o.Blocks < 1 {
		return fmt.Errorf("kvcache: Blocks is %d; a pool needs at least one block of %d bytes", o.Blocks, o.Shape.BlockBytes())
	}
	return nil
}

// Pool is the device memory of all blocks. Which blocks are used is the Manager's to
// know.
type Pool struct {
	shape  Shape
	blocks int
	memory device.Memory
	base   device.Addr
}

// NewPool allocates the blocks; their content is undefined. The error wraps
// device.ErrOutOfMemory where they do not fit.
func NewPool(o PoolOptions) (*Pool, error) {
	o = o.EnsureDefaults()
	if err := o.Validate(); err != nil {
		return nil, err
	}
	bytes := int64(o.Blocks) * o.Shape.BlockBytes()
	memory, err := o.Machine.Alloc(o.Space, bytes, "kv cache")
	if err != nil {
		return nil, fmt.Errorf("kvcache: allocate %d blocks of %d bytes: %w", o.Blocks, o.Shape.BlockBytes(), err)
	}
	return &Pool{shape: o.Shape, blocks: o.Blocks, memory: memory, base: memory.Range(0, bytes).Addr}, nil
}

// Shape is the shape of a block, with defaults filled in.
func (p *Pool) Shape() Shape { return p.shape }

// Memory is that of all blocks, which its user may suspend while no block is used, and resumes.
func (p *Pool) Memory() device.Memory { return p.memory }

// Region is the memory of one block: K and V of all its layers.
func (p *Pool) Region(block int32) device.Region {
	n := p.shape.BlockBytes()
	return p.memory.Region(int64(block)*n, n)
}

// Run is the memory of so many blocks with successive ids.
func (p *Pool) Run(first int32, blocks int) device.Region {
	n := p.shape.BlockBytes()
	return p.memory.Region(int64(first)*n, int64(blocks)*n)
}

// View returns K and V of one layer, each a strided tensor of shape [blocks, block
// tokens, kv heads, head dim].
func (p *Pool) View(layer int) (k, v kernels.Tensor) {
	s := p.shape
	if layer < 0 || layer >= s.Layers {
		panic(fmt.Sprintf("kvcache: view of layer %d of %d", layer, s.Layers))
	}
	plane := func(i int) kernels.Tensor {
		offset := (2*layer + i) * s.planeElements() * s.DType.Size()
		t := kernels.New(p.base+device.Addr(offset), s.DType, p.blocks, s.BlockTokens, s.KVHeads, s.HeadDim)
		t.Stride[0] = s.blockElements()
		return t
	}
	return plane(0), plane(1)
}

// Close frees the memory. The caller has waited for all work that uses it.
func (p *Pool) Close() error { return p.memory.Free() }
