package models

import (
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/models/safetensors"
)

// Checkpoint is the Source of an open safetensors checkpoint, which it does not
// own.
type Checkpoint struct{ files *safetensors.Checkpoint }

// NewCheckpoint returns the Source of c, which stays open as long as it is used.
func NewCheckpoint(c *safetensors.Checkpoint) Checkpoint { return Checkpoint{files: c} }

// Origin is the checkpoint's directory, or the name of what was parsed from memory.
func (c Checkpoint) Origin() string {
	if names := c.files.Names(); c.files.Dir() == "" && len(names) > 0 {
		t, _ := c.files.Tensor(names[0])
		return t.File
	}
	return c.files.Dir()
}

// Names lists the tensors in file order.
func (c Checkpoint) Names() []string { return c.files.Names() }

// Tensor describes a tensor.
func (c Checkpoint) Tensor(name string) (Info, bool) {
	t, ok := c.files.Tensor(name)
	if !ok {
		return Info{}, false
	}
	info := Info{TypeName: t.DType.String(), Shape: t.Shape, File: t.File}
	switch t.DType {
	case safetensors.BF16:
		info.DType = kernels.BF16
	case safetensors.F16:
		info.DType = kernels.F16
	case safetensors.F32:
		info.DType = kernels.F32
	}
	return info, true
}

// Read passes bytes of the file's mapping to read. If the file was truncated meanwhile, the
// error wraps safetensors.ErrChanged.
func (c Checkpoint) Read(name string, off, n int64, read func(data []byte) error) error {
	t, _ := c.files.Tensor(name)
	return t.Read(func(data []byte) error { return read(data[off : off+n : off+n]) })
}

// Prefetch makes the system read the bytes into the page cache.
func (c Checkpoint) Prefetch(name string, off, n int64) {
	t, _ := c.files.Tensor(name)
	t.Prefetch(off, n)
}

// Release drops the tensor's pages from this process's resident set.
func (c Checkpoint) Release(name string) {
	t, _ := c.files.Tensor(name)
	t.Release()
}
