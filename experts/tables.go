package experts

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
)

// tables are device memory in which kernels look experts up: for each layer a row of
// [experts] U64 addresses and [experts] I32 expert ids, in the order of the layer's
// waves, so that a wave's list is a slice of its row. Rows are updated in the order of
// the compute stream, from imagesPerRow images in pinned memory.
type tables struct {
	// mu is the owner's lock, which is released during waits.
	mu *sync.Mutex

	memory, images device.Memory
	// pinned are the images.
	pinned  *kernels.Pinned
	experts int
	rows    []tableRow
	// address of an expert's extent; 0 for one that was never fetched.
	address func(ID) device.Addr
	// done is signaled on the compute stream, up to value so far, behind the last reader
	// of a layer's row and slots.
	done  device.Fence
	value uint32
}

// tableRow is the row of one layer.
type tableRow struct {
	// slots and ids are its two parts on the device.
	slots, ids kernels.Tensor
	// want is the row as it must be, have as it is on the device; nil: unknown.
	want, have []byte
	// stale: the addresses of resident experts have changed.
	stale bool
	// busyUntil are the points of tables.done until which each image is being read; nextImage is the next one to use; uploaded is the one copied for this use, or
	// -1.
	busyUntil           [imagesPerRow]device.Point
	nextImage, uploaded int
}

// bytes is the size of a row.
func (t *tables) bytes() int64 { return t.memory.Bytes() / int64(len(t.rows)) }

// open creates the rows, once the memory is allocated.
func (t *tables) open(o *Options, p *Plan) {
	if t.images != nil {
		t.pinned = kernels.NewPinned(o.Machine, t.images, o.Space, o.Backend)
	}
	t.experts, t.rows = p.Experts, make([]tableRow, len(p.Layers))
	for i := range t.rows {
		r := &t.rows[i]
		at := t.memory.Range(int64(i)*t.bytes(), t.bytes())
		r.slots = kernels.New(at.Addr, kernels.U64, p.Experts)
		r.ids = kernels.New(at.Slice(int64(p.Experts)*slotBytes, int64(p.Experts)*idBytes).Addr, kernels.I32, p.Experts)
		r.want, r.uploaded = make([]byte, t.bytes()), -1
	}
}

// fill sets want for this order of the layer's experts.
func (t *tables) fill(position int, list []int) *tableRow {
	r := &t.rows[position]
	for e := range t.experts {
		binary.NativeEndian.PutUint64(r.want[e*slotBytes:], uint64(t.address(ID{position, e})))
	}
	ids := r.want[int64(t.experts)*slotBytes:]
	for n, e := range list {
		binary.NativeEndian.PutUint32(ids[n*idBytes:], uint32(e))
	}
	return r
}

// initialImage writes all rows to the first images, which are copied to the device
// together.
func (t *tables) initialImage(list func(position int) []int) (dst, src device.Region) {
	for i := range t.rows {
		r := t.fill(i, list(i))
		copy(t.images.Write(int64(i)*t.bytes(), t.bytes()), r.want)
		r.have = slices.Clone(r.want)
	}
	return t.memory.Region(0, t.memory.Bytes()), t.images.Region(0, t.memory.Bytes())
}

// upToDate reports, for a layer whose experts are all resident, whether the device has
// their addresses.
func (r *tableRow) upToDate() bool { return r.have != nil && !r.stale }

// update copies the layer's addresses and list to its row on the device, if they have
// changed. It waits, at most until ctx is done, only if the host is two uses of the layer
// ahead of the device.
func (t *tables) update(ctx context.Context, compute device.Stream, position int, list []int) error {
	r := t.fill(position, list)
	if bytes.Equal(r.want, r.have) {
		r.stale = false
		return nil
	}
	turn := r.nextImage
	if p := r.busyUntil[turn]; !p.None() {
		t.mu.Unlock()
		err := p.Wait(ctx)
		t.mu.Lock()
		if err != nil {
			return fmt.Errorf("wait for an earlier update of the tables: %w", err)
		}
		r.busyUntil[turn] = device.Point{}
	}
	size := t.bytes()
	at := int64(position) * size
	from := int64(turn)*t.memory.Bytes() + at
	copy(t.images.Write(from, size), r.want)
	if err := t.pinned.ToDevice(compute, t.memory.Range(at, size), from); err != nil {
		return fmt.Errorf("update the tables: %w", err)
	}
	r.have, r.stale = append(r.have[:0], r.want...), false
	r.uploaded, r.nextImage = turn, (turn+1)%imagesPerRow
	return nil
}

// signalDone enqueues a signal of done on the compute stream, behind the layer's use, and
// returns its fence value.
func (t *tables) signalDone(compute device.Stream, position int) (device.Point, error) {
	if err := compute.SignalFence(t.done, t.value+1); err != nil {
		return device.Point{}, err
	}
	t.value++
	passed := device.Point{Fence: t.done, Value: t.value}
	if r := &t.rows[position]; r.uploaded >= 0 {
		r.busyUntil[r.uploaded] = passed
	}
	return passed, nil
}

// forgetReads records that no enqueued copy reads an image any more. Fence values wrap
// around: very old ones would count as not reached.
func (t *tables) forgetReads() {
	for i := range t.rows {
		t.rows[i].busyUntil = [imagesPerRow]device.Point{}
	}
}

// reset forgets what is on the device. Nothing reads the rows.
func (t *tables) reset() {
	for i := range t.rows {
		r := &t.rows[i]
		r.have, r.uploaded, r.busyUntil = nil, -1, [imagesPerRow]device.Point{}
	}
}

func (t *tables) close() error {
	errs := []error{free(t.memory), free(t.images)}
	if t.done != nil {
		errs = append(errs, t.done.Close())
	}
	return errors.Join(errs...)
}
