package experts

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
)

// tables are what kernels find experts by: for each layer a row in device memory of
// [experts] U64 addresses and [experts] I32 expert ids, where ids stand in the order of the
// layer's waves, so that a wave's list is a slice of its row. Rows are updated in the order
// of the compute stream, from images in pinned memory, two for each.
type tables struct {
	memory, images device.Memory
	experts        int
	rows           []tableRow
	// address is where an expert of a layer is: 0 for one that has never been fetched.
	address func(ID) device.Addr
	// passed is raised on the compute stream, to value so far, when nothing that was
	// enqueued before reads a row, or a slot of the ring, any more.
	passed device.Fence
	value  uint32
}

// tableRow is the row of one layer.
type tableRow struct {
	// slots and ids are its two parts on the device.
	slots, ids kernels.Tensor
	// want is the row as it must be, have as the device has it; nil: that is not known.
	want, have []byte
	// stale says that what it has of local experts is out of date.
	stale bool
	// busy are until when each image is being read; turn is the next to be used, and sent
	// the one sent for this use, or -1.
	busy           [uploadRows]uint32
	turn, uploaded int
}

// bytes is the size of a row, and where it is.
func (t *tables) bytes() int64 { return t.memory.Bytes() / int64(len(t.rows)) }

// open makes the rows once the memory is there.
func (t *tables) open(p *Plan) {
	t.experts, t.rows = p.Experts, make([]tableRow, len(p.Layers))
	for i := range t.rows {
		r := &t.rows[i]
		at := t.memory.Range(int64(i)*t.bytes(), t.bytes())
		r.slots = kernels.New(at.Addr, kernels.U64, p.Experts)
		r.ids = kernels.New(at.Slice(int64(p.Experts)*slotBytes, int64(p.Experts)*idBytes).Addr, kernels.I32, p.Experts)
		r.want, r.uploaded = make([]byte, t.bytes()), -1
	}
}

// fill writes a row as it must be for this order of the layer's experts.
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

// first puts all rows into the first images, which go to the device in one copy.
func (t *tables) first(list func(position int) []int) (dst, src device.Region) {
	for i := range t.rows {
		r := t.fill(i, list(i))
		copy(t.images.Write(int64(i)*t.bytes(), t.bytes()), r.want)
		r.have = slices.Clone(r.want)
	}
	return t.memory.Region(0, t.memory.Bytes()), t.images.Region(0, t.memory.Bytes())
}

// current says whether the row needs no look: all experts of the layer are local, and the
// device has their addresses.
func (r *tableRow) current() bool { return r.have != nil && !r.stale }

// update puts the layer's addresses and list into its row on the device, if they are not
// there. ctx bounds a wait that only a host two uses of the layer ahead of the device can
// meet.
func (t *tables) update(ctx context.Context, compute device.Stream, position int, list []int) error {
	r := t.fill(position, list)
	if bytes.Equal(r.want, r.have) {
		r.stale = false
		return nil
	}
	turn := r.turn
	if v := r.busy[turn]; v != 0 {
		if err := t.passed.Await(ctx, v); err != nil {
			return fmt.Errorf("wait for an earlier update of the tables: %w", err)
		}
		r.busy[turn] = 0
	}
	size := t.bytes()
	at := int64(position) * size
	from := int64(turn)*t.memory.Bytes() + at
	copy(t.images.Write(from, size), r.want)
	if err := compute.Copy(t.memory.Range(at, size), t.images.Range(from, size)); err != nil {
		return fmt.Errorf("update the tables: %w", err)
	}
	r.have, r.stale = append(r.have[:0], r.want...), false
	r.uploaded, r.turn = turn, (turn+1)%uploadRows
	return nil
}

// pass marks on the compute stream that a layer's use is over, and returns the point.
func (t *tables) pass(compute device.Stream, position int) (device.Point, error) {
	if err := compute.Raise(t.passed, t.value+1); err != nil {
		return device.Point{}, err
	}
	t.value++
	if r := &t.rows[position]; r.uploaded >= 0 {
		r.busy[r.uploaded] = t.value
	}
	return device.Point{Fence: t.passed, Value: t.value}, nil
}

// settle says that nothing that was enqueued reads an image any more. Values of long ago
// would be taken for ones to come.
func (t *tables) settle() {
	for i := range t.rows {
		t.rows[i].busy = [uploadRows]uint32{}
	}
}

// reset forgets what the device has: nothing reads the rows.
func (t *tables) reset() {
	for i := range t.rows {
		r := &t.rows[i]
		r.have, r.uploaded, r.busy = nil, -1, [uploadRows]uint32{}
	}
}

func (t *tables) close() error {
	errs := []error{free(t.memory), free(t.images)}
	if t.passed != nil {
		errs = append(errs, t.passed.Close())
	}
	return errors.Join(errs...)
}
