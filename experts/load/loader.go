package load

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/transfer"
)

// Packer writes rows of an expert's matrix, row-major as in checkpoints, into its extent:
// kernels.Backend.
type Packer interface {
	PackExpert(l kernels.ExpertLayout, part kernels.Part, row int, src, dst []byte) error
}

// Options describe a loader.
type Options struct {
	// Machine that the experts are on. If it keeps no data, rows are checked and counted,
	// and nothing is copied.
	Machine  device.Machine
	Transfer *transfer.Engine
	Packer   Packer
	Layout   kernels.ExpertLayout
	// Layers with experts, by the model's numbers, ascending, and how many experts each has.
	Layers  []int
	Experts int
	// StagingBytes of pinned memory, as returned by StagingBytes; 0 if every place is in
	// host memory.
	StagingBytes int64
}

// buffers is the number of staging buffers of a row-major layout: one is filled while
// others are copied.
const buffers = 4

const (
	defaultStagingBytes = 16 << 20
	minExtents          = 2
)

// StagingBytes rounds about to the size of the staging buffers that a loader uses; 0: the
// default.
func StagingBytes(l kernels.ExpertLayout, about int64) int64 {
	const cut = buffers * device.Alignment
	switch {
	case l.Tag != kernels.RowMajor:
		return max(about/l.Size, minExtents) * l.Size
	case about == 0:
		return defaultStagingBytes
	}
	return max(about/cut, 1) * cut
}

// Place is where an expert's extent is.
type Place struct {
	Memory device.Memory
	Offset int64
}

// Loader receives the rows of a model's experts until Finish or Close. Rows may be called
// from several goroutines.
type Loader struct {
	o        Options
	place    func(layer, expert int) Place
	coverage *coverage
	staging  staging // nil if every place is in host memory
}

// New makes a loader. place returns where an expert is stored; layer is the position in
// Options.Layers.
func New(o Options, place func(layer, expert int) Place) (*Loader, error) {
	l := &Loader{o: o, place: place, coverage: newCoverage(o.Layout.ExpertShape, len(o.Layers)*o.Experts)}
	if o.StagingBytes == 0 || !o.Machine.Capabilities().KeepsData {
		return l, nil
	}
	if o.Layout.Tag == kernels.RowMajor {
		p, err := newPieces(o)
		if err != nil {
			return nil, err
		}
		l.staging = p
		return l, nil
	}
	x, err := newExtents(o)
	if err != nil {
		return nil, err
	}
	l.staging = x
	return l, nil
}

// Rows receives rows [row, row+n) of one matrix of one expert, row-major as in
// checkpoints, where n is len(data) / the row's bytes. layer is the model's number.
func (l *Loader) Rows(layer, expert int, part kernels.Part, row int, data []byte) error {
	position, ok := slices.BinarySearch(l.o.Layers, layer)
	if !ok {
		return errors.New("this layer has no experts")
	}
	if expert < 0 || expert >= l.o.Experts {
		return fmt.Errorf("the layer has %d experts", l.o.Experts)
	}
	if part > kernels.W2 {
		return fmt.Errorf("invalid part %d", uint8(part))
	}
	rows, bytes := Rows(l.o.Layout.ExpertShape, part), RowBytes(l.o.Layout.ExpertShape, part)
	n := len(data) / bytes
	if len(data)%bytes != 0 || row < 0 || row+n > rows {
		return fmt.Errorf("%d bytes from row %d do not fit %v, which has %d rows of %d bytes", len(data), row, part, rows, bytes)
	}
	of := id{position, expert}
	if err := l.coverage.add(of, part, row, n); err != nil {
		return err
	}
	if n == 0 || !l.o.Machine.Capabilities().KeepsData {
		return nil
	}
	at := l.place(position, expert)
	if at.Memory.Space() == device.Host {
		return l.o.Packer.PackExpert(l.o.Layout, part, row, data, at.Memory.Write(at.Offset, l.o.Layout.Size))
	}
	return l.staging.write(of, at.Memory.Region(at.Offset, l.o.Layout.Size), part, row, data)
}

// Finish fails if a row of an expert is missing, waits until all experts are at their
// places, and frees the staging buffers. After an error it may be called again.
func (l *Loader) Finish(ctx context.Context) error {
	if err := l.coverage.missing(l.o.Layers, l.o.Experts); err != nil {
		return err
	}
	if l.staging == nil {
		return nil
	}
	if err := l.staging.flush(ctx); err != nil {
		return fmt.Errorf("experts: copy resident experts to the device: %w", err)
	}
	return l.Close()
}

// Close frees the staging buffers of an aborted loading; after Finish it does nothing.
func (l *Loader) Close() error {
	if l == nil || l.staging == nil {
		return nil
	}
	err := l.staging.close()
	l.staging = nil
	if err != nil {
		return fmt.Errorf("experts: free staging buffers: %w", err)
	}
	return nil
}
