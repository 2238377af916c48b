package kernels

import "github.com/moeserve/moeserve/device"

// maxPinnedCopy is the number of bytes up to which kernels copy from and to a Pinned: what steps of
// few tokens copy. For more, the copy engines are as fast, and leave the multiprocessors alone.
const maxPinnedCopy = 256 << 10

// Pinned is pinned memory that a device's stream copies a few KiB from or to. Where kernels of the
// device can access it, they make these copies. A copy of a copy engine would wait for all of a large
// one in the same direction, of KV blocks, say, though only some chunks of that are enqueued: the
// engine takes turns between streams, and not often.
//
// It is used by one goroutine at a time.
type Pinned struct {
	device.Memory
	// backend enqueues the copies; nil: kernels cannot access the memory. For those that can it begins
	// mapped behind its address.
	backend Backend
	mapped  device.Addr
	// byKernel: kernels make small copies. Where a copy may fail and the device goes on, as on emulated
	// devices by default, its engines make them, which tell.
	byKernel bool
	op       Copy
}

// NewPinned returns mem, pinned memory of m, for copies on a stream of a GPU on which the backend
// computes. mem must not be suspended. Where kernels cannot access it for any reason, copy engines do.
func NewPinned(m device.Machine, mem device.Memory, gpu device.Space, b Backend) *Pinned {
	p := &Pinned{Memory: mem}
	all := mem.Range(0, mem.Bytes())
	if at, err := m.KernelAddr(gpu, all); err == nil && b != nil {
		p.backend, p.mapped = b, at-all.Addr
		p.byKernel = m.Capabilities().CopyErrorsLoseDevice
	}
	return p
}

// Mapped reports whether kernels can access the memory, and how far behind its own address.
func (p *Pinned) Mapped() (behind device.Addr, ok bool) { return p.mapped, p.backend != nil }

// ToHost enqueues the copy of a dense tensor of the device to an offset.
func (p *Pinned) ToHost(s device.Stream, off int64, t Tensor) error {
	at := p.Range(off, t.Bytes())
	if !p.small(at, t.Range()) {
		return s.Copy(at, t.Range())
	}
	p.op = Copy{Src: t, Dst: t}
	p.op.Dst.Addr = at.Addr + p.mapped
	return p.backend.Enqueue(s, &p.op)
}

// ToDevice enqueues the copy of the bytes from an offset on to dst, memory of the device.
func (p *Pinned) ToDevice(s device.Stream, dst device.Range, off int64) error {
	src := p.Range(off, dst.Bytes)
	if !p.small(dst, src) {
		return s.Copy(dst, src)
	}
	words := int(dst.Bytes / copyUnit)
	p.op = Copy{Src: New(src.Addr+p.mapped, I32, words), Dst: New(dst.Addr, I32, words)}
	return p.backend.Enqueue(s, &p.op)
}

// ToHostBoth is ToHost of two tensors, by one kernel where kernels make both copies.
func (p *Pinned) ToHostBoth(s device.Stream, off int64, t Tensor, off2 int64, t2 Tensor) error {
	at, at2 := p.Range(off, t.Bytes()), p.Range(off2, t2.Bytes())
	if !p.small(at, t.Range()) || !p.small(at2, t2.Range()) {
		if err := p.ToHost(s, off, t); err != nil {
			return err
		}
		return p.ToHost(s, off2, t2)
	}
	p.op = Copy{Src: t, Dst: t, Src2: t2, Dst2: t2}
	p.op.Dst.Addr, p.op.Dst2.Addr = at.Addr+p.mapped, at2.Addr+p.mapped
	return p.backend.Enqueue(s, &p.op)
}

// ToDeviceWith is ToDevice, and copies src to another tensor of the device, outside of dst, by one kernel of b where
// kernels make both copies, else by two.
func (p *Pinned) ToDeviceWith(s device.Stream, dst device.Range, off int64, b Backend, src, to Tensor) error {
	from := p.Range(off, dst.Bytes)
	if !p.small(dst, from) {
		if err := p.ToDevice(s, dst, off); err != nil {
			return err
		}
		p.op = Copy{Src: src, Dst: to}
		return b.Enqueue(s, &p.op)
	}
	words := int(dst.Bytes / copyUnit)
	p.op = Copy{Src: New(from.Addr+p.mapped, I32, words), Dst: New(dst.Addr, I32, words), Src2: src, Dst2: to}
	return b.Enqueue(s, &p.op)
}

// small reports whether a kernel makes a copy.
func (p *Pinned) small(dst, src device.Range) bool {
	return p.byKernel && dst.Bytes <= maxPinnedCopy && (dst.Bytes|int64(dst.Addr)|int64(src.Addr))%copyUnit == 0
}
