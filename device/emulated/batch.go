package emulated

import (
	"cmp"
	"slices"

	"github.com/moeserve/moeserve/device"
)

// part is one copy of a batch.
type part struct {
	dst, src       device.Range
	dstMem, srcMem *memory
}

// parts is the number of copies of the operation, part returns one of them.
func (o *op) parts() int { return max(1, len(o.batch)) }

func (o *op) part(i int) part {
	if len(o.batch) == 0 {
		return part{o.dst, o.src, o.dstMem, o.srcMem}
	}
	return o.batch[i]
}

// move copies the bytes.
func (p part) move() {
	copy(p.dstMem.data[p.dst.Addr-p.dstMem.base:][:p.dst.Bytes], p.srcMem.data[p.src.Addr-p.srcMem.base:][:p.src.Bytes])
}

// uses returns a range of the allocation that the copy accesses, if it does, and whether it
// writes there.
func (o *op) uses(mem *memory) (r device.Range, write, found bool) {
	for i := range o.parts() {
		switch p := o.part(i); mem {
		case p.dstMem:
			return p.dst, true, true
		case p.srcMem:
			return p.src, false, true
		}
	}
	return device.Range{}, false, false
}

// hold counts the operation as a user of its memory until unref.
func (m *Machine) hold(o *op) {
	for i := range o.parts() {
		p := o.part(i)
		p.dstMem.users++
		p.srcMem.users++
	}
}

// faultIn returns the fault of a copy, or nil. A batch in which one copy fails has made those
// that come after it: its copies are made in any order.
func (m *Machine) faultIn(o *op, kind FaultKind, s *stream) *Fault {
	for i := range o.parts() {
		f := m.fault(o.part(i).point(kind, s))
		if f == nil {
			continue
		}
		if kind == FailCopy && !m.o.NoData {
			for j := i + 1; j < o.parts(); j++ {
				if m.check != nil {
					m.check.copyPart(m.check.record(s.actor, "copy", s.name), o.part(j))
				}
				o.part(j).move()
			}
		}
		return f
	}
	return nil
}

var _ device.BatchCopier = (*stream)(nil)

// CopyBatch implements device.BatchCopier. A batch has the latency of one copy.
func (s *stream) CopyBatch(dst, src []device.Range) error {
	m := s.m
	m.mu.Lock()
	defer m.mu.Unlock()
	switch err := s.usable("copy"); {
	case err != nil:
		return err
	case m.o.NoBatches:
		return &device.Error{Op: "copy", Space: s.sp.id, Detail: s.String(), Err: device.ErrNoBatches}
	case len(dst) != len(src):
		return s.badCopy("a batch of %d destinations and %d sources", len(dst), len(src))
	}
	var all op
	var batch []part
	if n := len(s.batches); n > 0 {
		batch, s.batches = s.batches[n-1], s.batches[:n-1]
	}
	for i := range dst {
		o, err := s.copyOp(dst[i], src[i])
		switch {
		case err != nil:
			return err
		case dst[i].Bytes == 0:
			continue
		case o.dstMem.space.id == device.Host && o.srcMem.space.id == device.Host:
			return s.badCopy("pair %d of a batch is within host memory: use Copy", i)
		}
		if len(batch) == 0 {
			all = o
			all.bytes = 0
		}
		if from, to := o.srcMem.space.id, o.dstMem.space.id; from != all.srcMem.space.id || to != all.dstMem.space.id {
			return s.badCopy("pair %d of a batch is from %s to %s, others from %s to %s", i, from, to, all.srcMem.space.id, all.dstMem.space.id)
		}
		batch = append(batch, part{o.dst, o.src, o.dstMem, o.srcMem})
		all.bytes += o.bytes
	}
	if len(batch) == 0 {
		return nil
	}
	all.batch = batch
	if err := s.checkOverlaps(batch); err != nil {
		return err
	}
	m.hold(&all)
	s.enqueue(&all)
	return nil
}

// side is a range that a batch writes or reads.
type side struct {
	device.Range
	written bool
}

// checkOverlaps fails if a destination overlaps another range.
func (s *stream) checkOverlaps(batch []part) error {
	all := s.sides[:0]
	for _, p := range batch {
		all = append(all, side{p.dst, true}, side{p.src, false})
	}
	s.sides = all
	slices.SortFunc(all, func(a, b side) int { return cmp.Compare(a.Addr, b.Addr) })
	var end, written device.Addr // of the ranges so far, and of those that are written
	for _, r := range all {
		if r.written && r.Addr < end || r.Addr < written {
			return s.badCopy("destinations of a batch overlap other ranges at %v: its copies run in any order", r.Range)
		}
		if end = max(end, r.End()); r.written {
			written = max(written, r.End())
		}
	}
	return nil
}
