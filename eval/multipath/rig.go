package multipath

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"

	"github.com/moeserve/moeserve/device"
)

// shift is how far, in bytes, what lies in memory before a checked copy is from what the copy
// writes there: no byte's word is in its place.
const shift = device.Alignment

// rig is the memory and the streams of a measurement.
type rig struct {
	o Options
	// source is read and back is written by copies from and to the host, local is the GPU's. The
	// source has shift bytes more.
	source, back device.Memory
	local        device.Memory
	// buffers are a part of each GPU's memory: for its own copies, or a relay's.
	buffers map[device.Space]device.Memory
	// streams by space and name, opened by their first use.
	streams map[streamKey]device.Stream
	// events that are not timed, for the order of two streams; spare ones are not in use.
	untimed []device.Event
	// marks are timed events.
	marks   []device.Event
	closers []func() error
}

type streamKey struct {
	space device.Space
	name  string
}

func newRig(o Options) *rig {
	return &rig{o: o, buffers: map[device.Space]device.Memory{}, streams: map[streamKey]device.Stream{}}
}

// open allocates the memory, and writes all that is read: the source has words that differ from
// each other.
func (r *rig) open(ctx context.Context) error {
	memory := func(to *device.Memory, s device.Space, n int64, label string) error {
		m, err := r.o.Machine.Alloc(s, n, "paths measured, "+label)
		if err == nil {
			*to = m
			r.closers = append(r.closers, m.Free)
		}
		return err
	}
	n := r.o.copyBytes()
	err := errors.Join(
		memory(&r.source, device.Host, n+shift, "source"),
		memory(&r.back, device.Host, n, "destination"),
		memory(&r.local, r.o.GPU, n, "of the GPU"),
	)
	for _, s := range r.o.gpus() {
		var m device.Memory
		err = errors.Join(err, memory(&m, s, r.o.bufferBytes(), "buffers"))
		r.buffers[s] = m
	}
	if err != nil {
		return err
	}
	if r.keepsData() {
		spread(n+shift, func(from, to int64) {
			fill(r.source.Write(from, to-from), uint64(from))
			clear(r.back.Write(min(from, n), min(to, n)-min(from, n)))
		})
	}
	for _, m := range r.buffers {
		for at := int64(0); at < m.Bytes(); at += n {
			bytes := min(n, m.Bytes()-at)
			if err := r.direct(ctx, m.Range(at, bytes), r.source.Range(0, bytes)); err != nil {
				return err
			}
		}
	}
	return nil
}

// close releases everything.
func (r *rig) close() error {
	var errs []error
	for _, s := range r.streams {
		errs = append(errs, s.Close())
	}
	for _, e := range slices.Concat(r.untimed, r.marks) {
		errs = append(errs, e.Close())
	}
	for _, f := range slices.Backward(r.closers) {
		errs = append(errs, f())
	}
	return errors.Join(errs...)
}

func (r *rig) keepsData() bool { return r.o.Machine.Capabilities().KeepsData }

// stream is that of a GPU and a name.
func (r *rig) stream(s device.Space, name string) (device.Stream, error) {
	key := streamKey{s, name}
	if x, ok := r.streams[key]; ok {
		return x, nil
	}
	x, err := r.o.Machine.NewStream(s, device.StreamOptions{Name: name})
	if err == nil {
		r.streams[key] = x
	}
	return x, err
}

// event is the untimed event of a number, timed the timed one. An event may be recorded again
// when the streams that used it are idle.
func (r *rig) event(n int) (device.Event, error) {
	return grow(&r.untimed, n, r.o.Machine.NewUntimedEvent)
}
func (r *rig) timed(n int) (device.Event, error) { return grow(&r.marks, n, r.o.Machine.NewEvent) }

func grow(all *[]device.Event, n int, create func() (device.Event, error)) (device.Event, error) {
	for len(*all) <= n {
		e, err := create()
		if err != nil {
			return nil, err
		}
		*all = append(*all, e)
	}
	return (*all)[n], nil
}

// ownBuffer is where a GPU's own copies go in, or come from.
func (r *rig) ownBuffer(s device.Space, d Direction) device.Region {
	n := device.Align(r.o.LinkBytes)
	return r.buffers[s].Region(int64(slices.Index(directions, d))*n, r.o.LinkBytes)
}

// relayBuffer is buffer i of a GPU as a relay of an engine, each of so many bytes.
func (r *rig) relayBuffer(s device.Space, engine int, d Direction, i int, bytes int64) device.Region {
	of := int64(engine*len(directions) + slices.Index(directions, d))
	return r.buffers[s].Region(2*device.Align(r.o.LinkBytes)+of*r.o.relayBytes()+int64(i)*device.Align(bytes), bytes)
}

// target is where a copy to a GPU beside others goes, or comes from.
func (r *rig) target(s device.Space) device.Region {
	n := r.o.targetBytes()
	return r.buffers[s].Region(r.o.bufferBytes()-n, n)
}

// ends are the two sides of a copy of n bytes between host and GPU.
func (r *rig) ends(d Direction, n int64) (dst, src device.Region) {
	if d == FromGPU {
		return r.back.Region(0, n), r.local.Region(0, n)
	}
	return r.local.Region(0, n), r.source.Region(0, n)
}

// check makes a copy of n bytes once, and compares every byte of its destination with the
// source. Before it, the destination has other bytes.
func (r *rig) check(ctx context.Context, d Direction, n int64, run func() error) error {
	if !r.keepsData() {
		return run()
	}
	other := int64(shift)
	if d == FromGPU {
		other = 0 // what the copy reads
		spread(n, func(from, to int64) { clear(r.back.Write(from, to-from)) })
	}
	if err := r.direct(ctx, r.local.Range(0, n), r.source.Range(other, n)); err != nil {
		return err
	}
	if err := run(); err != nil {
		return err
	}
	if d == ToGPU {
		if err := r.direct(ctx, r.back.Range(0, n), r.local.Range(0, n)); err != nil {
			return err
		}
	}
	var wrong wrongBytes
	spread(n, func(from, to int64) {
		want, got := r.source.Read(from, to-from), r.back.Read(from, to-from)
		if !bytes.Equal(want, got) {
			wrong.note(from + int64(firstDifference(want, got)))
		}
	})
	if wrong.found {
		return fmt.Errorf("multipath: a copy of %d bytes, %s, is wrong from byte %d on", n, d.words(), wrong.first)
	}
	return nil
}

// direct copies over the GPU's own link, and waits for it.
func (r *rig) direct(ctx context.Context, dst, src device.Range) error {
	s, err := r.stream(r.o.GPU, "check")
	if err != nil {
		return err
	}
	if err := s.Copy(dst, src); err != nil {
		return err
	}
	return s.Synchronize(ctx)
}

// wrongBytes is the first place where bytes differ.
type wrongBytes struct {
	mu    sync.Mutex
	found bool
	first int64
}

func (w *wrongBytes) note(at int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.found || at < w.first {
		w.found, w.first = true, at
	}
}

func firstDifference(a, b []byte) int {
	for i := range a {
		if a[i] != b[i] {
			return i
		}
	}
	return len(a)
}

// spread runs f on all processors for the parts of n bytes; parts begin at multiples of 8.
func spread(n int64, f func(from, to int64)) {
	workers := int64(runtime.GOMAXPROCS(0))
	part := max((n+workers-1)/workers/8*8+8, 1<<20)
	var wg sync.WaitGroup
	for from := int64(0); from < n; from += part {
		wg.Go(func() { f(from, min(from+part, n)) })
	}
	wg.Wait()
}

// fill writes words that tell their place; at is the offset of the first, a multiple of 8. Words
// that are shift apart differ in their first byte.
func fill(b []byte, at uint64) {
	var word [8]byte
	for i := 0; i < len(b); i += len(word) {
		// Multiples of an odd number differ from each other (Knuth's multiplicative hash).
		binary.LittleEndian.PutUint64(word[:], ((at+uint64(i))/8+1)*0x9E3779B97F4A7C15)
		copy(b[i:], word[:])
	}
}
