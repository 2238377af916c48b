package pipeline

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/forward"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/models"
)

// cpuExperts computes experts on the host, where they lie in its memory. In each layer of an
// OnDemand step the compute stream copies the router's input to pinned memory, before the router's
// selection. The host, which waits for the selection, enqueues its experts on a host
// stream. The compute stream waits for them when the experts that were fetched instead have run,
// copies their outputs to the rows where the device's experts write theirs, and combines all.
//
// Of one expert kernels may compute the first columns, whose weights they read in host memory meanwhile:
// then the host's part of the output is added to theirs.
//
// The memory is used again by the next layer: its copies follow the wait on the compute stream, and
// the host writes once it has seen the next selection.
type cpuExperts struct {
	backend kernels.Backend
	share   *experts.CPUShare
	layout  kernels.ExpertLayout
	topK    int
	memory  *kernels.Pinned
	buffers cpuBuffers
	host    device.Executor
	tracer  *tracer

	// computed is signaled after each layer's experts, with a value one higher.
	computed device.Fence
	value    uint32
	// ended is recorded behind the latest layer's experts; work are these, none once their time has been
	// read. decided is when the share had divided that layer.
	ended   device.Event
	work    []experts.ComputedExpert
	decided time.Duration
	// read is recorded behind the kernels of the divided expert, whose bytes they read; 0: there is none.
	read      device.Event
	readBytes int64
	// fetched is recorded behind the kernels of the experts that the link copied, if fetching.
	fetched  device.Event
	fetching bool
	// pairs are the (token, k) pairs of the layer's experts on the host, added those of the divided one,
	// which are not among them.
	pairs, added []int
	// inPlace: kernels copy the rows of outputs, from where they lie in the pinned memory and mapped behind
	// that: small copies of the copy engine would wait for the experts on the same link.
	inPlace bool
	mapped  device.Addr
	// Scratch space of await.
	dst, src []device.Range
	ffn      kernels.ExpertFFN
	copyRows kernels.CopyBlocks
	addRows  kernels.AddRows
}

// cpuExpertSpin is how long the thread of the host stream polls for experts of the next layer before it
// sleeps: longer than attention of a layer takes, and what is between two steps.
const cpuExpertSpin = 2 * time.Millisecond

// cpuExpertRows is the mean number of rows of experts up to which the host takes part: so few rows
// take the time of reading weights,
// and even a layer of which all experts are needed gains by it.
const cpuExpertRows = 4

// cpuBuffers are the tensors in pinned memory, for N tokens.
type cpuBuffers struct {
	input  kernels.Tensor // [N, H]
	output kernels.Tensor // [N*K, H]

	offsets kernels.Tensor // [E+1] I32
	order   kernels.Tensor // [N*K] I32
	slots   kernels.Tensor // [E] U64
	list    kernels.Tensor // [E] I32
	first   kernels.Tensor // [E] I32
	// readSlots and readList are for the kernels of the divided expert.
	readSlots kernels.Tensor // [E] U64
	readList  kernels.Tensor // [1] I32
	// from and to are the addresses of rows of output and of the device's.
	from, to kernels.Tensor // [N*K] U64
	bytes    int64
}

func newCPUBuffers(c *models.Config, act kernels.DType, tokens int, base device.Addr) cpuBuffers {
	var b cpuBuffers
	place := func(t kernels.DType, shape ...int) kernels.Tensor {
		x := kernels.New(base+device.Addr(b.bytes), t, shape...)
		b.bytes += device.Align(x.Bytes())
		return x
	}
	pairs := tokens * c.TopK
	b.input, b.output = place(act, tokens, c.Hidden), place(act, pairs, c.Hidden)
	b.offsets, b.order = place(kernels.I32, c.Experts+1), place(kernels.I32, pairs)
	b.slots, b.list, b.first = place(kernels.U64, c.Experts), place(kernels.I32, c.Experts), place(kernels.I32, c.Experts)
	b.readSlots, b.readList = place(kernels.U64, c.Experts), place(kernels.I32, 1)
	b.from, b.to = place(kernels.U64, pairs), place(kernels.U64, pairs)
	return b
}

func newCPUExperts(o *Options) (h *cpuExperts, err error) {
	c, act := o.config(), o.KV.Shape().DType
	h = &cpuExperts{backend: o.CPUExperts, share: o.CPUShare, layout: o.Experts.Layout(), topK: c.TopK}
	bytes := o.CPUExpertBytes(c, act, o.Limits)
	if h.memory, err = newPinned(o, bytes, "experts on the CPU, pinned"); err != nil {
		return h, err
	}
	h.buffers = newCPUBuffers(c, act, o.onDemandTokens(c, o.Limits), h.memory.Range(0, bytes).Addr)
	h.mapped, h.inPlace = h.memory.Mapped()
	if h.inPlace = h.inPlace && c.Hidden*act.Size()%copyWord == 0; h.inPlace {
		h.share.Divide()
	}
	s, err := o.Machine.NewStream(device.Host, device.StreamOptions{Name: "experts", Spin: cpuExpertSpin})
	if err != nil {
		return h, err
	}
	var ok bool
	if h.host, ok = s.(device.Executor); !ok {
		return h, errors.Join(errors.New("host streams of this machine cannot run Go functions"), s.Close())
	}
	if h.ended, err = o.Machine.NewEvent(); err != nil {
		return h, err
	}
	if h.read, err = o.Machine.NewEvent(); err != nil {
		return h, err
	}
	if h.fetched, err = o.Machine.NewEvent(); err != nil {
		return h, err
	}
	if h.computed, err = o.Machine.NewFence("experts on the CPU computed"); err == nil {
		h.value = h.computed.Value()
	}
	return h, err
}

// copyInput enqueues the copy of the router's input to the host.
func (h *cpuExperts) copyInput(x *executor, tokens forward.Span) error {
	if err := h.memory.ToHost(x.stream, 0, x.model.ExpertInput(tokens)); err != nil { // the input lies first
		return fmt.Errorf("copy the input of experts to the host: %w", err)
	}
	return nil
}

// enqueue starts the computation of a layer's experts on the host. ids are the router's selection,
// of K experts for each token, which the host has waited for. The latest layer's are done, and measured.
func (h *cpuExperts) enqueue(ids []int32, list []experts.HostExpert) error {
	h.decided = h.share.Decided()
	h.pairs, h.added = h.pairs[:0], h.added[:0]
	if len(list) == 0 {
		return nil
	}
	h.writeTables(ids, list)
	h.value++
	b, n := &h.buffers, len(ids)
	h.ffn.First = b.first.Slice(0, len(list))
	h.ffn.ExpertGEMM = kernels.ExpertGEMM{
		X: b.input.Slice(0, n/h.topK), Offsets: b.offsets, Order: b.order.Slice(0, n), Slots: b.slots, Experts: b.list.Slice(0, len(list)),
		Layout: h.layout, Out: b.output.Slice(0, n),
	}
	h.tracer.hostWork(h.host, "")
	if err := h.backend.Enqueue(h.host, &h.ffn); err != nil {
		return err
	}
	if err := h.host.Record(h.ended); err != nil {
		return err
	}
	return h.host.SignalFence(h.computed, h.value)
}

// writeTables writes the arguments of the GEMMs: the listed experts' pairs follow one another in
// order, and other experts have none.
func (h *cpuExperts) writeTables(ids []int32, list []experts.HostExpert) {
	b, base := &h.buffers, h.buffers.input.Addr
	write := func(t *kernels.Tensor) []byte { return h.memory.Write(int64(t.Addr-base), t.Bytes()) }
	offsets, order, slots, listed, begin := write(&b.offsets), write(&b.order), write(&b.slots), write(&b.list), write(&b.first)
	clear(slots)
	end, next := 0, 0
	h.work = h.work[:0]
	for e := range b.slots.Shape[0] {
		binary.NativeEndian.PutUint32(offsets[4*e:], uint32(end))
		if next == len(list) || list[next].Expert != e {
			continue
		}
		binary.NativeEndian.PutUint64(slots[8*e:], uint64(list[next].Addr))
		binary.NativeEndian.PutUint32(listed[4*next:], uint32(e))
		binary.NativeEndian.PutUint32(begin[4*next:], uint32(list[next].First))
		pairs, first := &h.pairs, end
		if list[next].First > 0 {
			pairs = &h.added
		}
		for pair, id := range ids {
			if int(id) == e {
				binary.NativeEndian.PutUint32(order[4*end:], uint32(pair))
				*pairs = append(*pairs, pair)
				end++
			}
		}
		h.work = append(h.work, experts.ComputedExpert{Rows: end - first, Share: 1 - float64(list[next].First)/float64(h.layout.Intermediate)})
		next++
	}
	binary.NativeEndian.PutUint32(offsets[4*b.slots.Shape[0]:], uint32(end))
	clear(order[4*end:])
}

// readDivided enqueues the kernels of the divided expert, if there is one. The layer's pairs have been
// sorted.
func (h *cpuExperts) readDivided(x *executor, layer int, tokens forward.Span, list []experts.HostExpert) error {
	i := slices.IndexFunc(list, func(e experts.HostExpert) bool { return e.First > 0 })
	if i < 0 {
		return nil
	}
	e, b, base := &list[i], &h.buffers, h.buffers.input.Addr
	binary.NativeEndian.PutUint64(h.memory.Write(int64(b.readSlots.Addr-base), b.readSlots.Bytes())[8*e.Expert:], uint64(e.ReadAt))
	binary.NativeEndian.PutUint32(h.memory.Write(int64(b.readList.Addr-base), b.readList.Bytes()), uint32(e.Expert))
	if x.tracer != nil {
		x.tracer.beforeExperts(experts.Wave{IDs: []int{e.Expert}})
		defer x.tracer.afterExperts()
	}
	slots, one := b.readSlots, b.readList
	slots.Addr += h.mapped
	one.Addr += h.mapped
	if err := x.model.ExpertColumns(x.stream, layer, tokens, slots, one, h.layout, kernels.Columns{End: e.First}); err != nil {
		return fmt.Errorf("compute with a part of an expert in host memory: %w", err)
	}
	h.readBytes = h.layout.Bytes() * int64(e.First) / int64(h.layout.Intermediate)
	return x.stream.Record(h.read)
}

// await makes the compute stream wait for the layer's experts on the host, if there are any, and
// copies their outputs to the device.
func (h *cpuExperts) await(x *executor, tokens forward.Span, m *meter) error {
	if len(h.pairs)+len(h.added) == 0 {
		return nil
	}
	done := device.Point{Fence: h.computed, Value: h.value}
	h.tracer.wait(CPUExperts, done)
	if err := m.wait(CPUExperts, nil, nil, func() error { return x.stream.WaitFence(done.Fence, done.Value) }); err != nil {
		return err
	}
	outputs := x.model.ExpertOutputs(tokens)
	slices.Sort(h.pairs)
	if h.inPlace {
		if err := h.outputsByKernels(x.stream, x.model.Backend(), &outputs); err != nil {
			return fmt.Errorf("copy the outputs of experts from the host: %w", err)
		}
		return nil
	}
	h.dst, h.src = h.dst[:0], h.src[:0]
	for i := 0; i < len(h.pairs); { // one copy for rows that follow one another
		first, end := h.pairs[i], h.pairs[i]
		for ; i < len(h.pairs) && h.pairs[i] == end; i++ {
			end++
		}
		h.dst = append(h.dst, outputs.Slice(first, end).Range())
		h.src = append(h.src, h.buffers.output.Slice(first, end).Range())
	}
	if err := copyAll(x.stream, h.dst, h.src); err != nil {
		return fmt.Errorf("copy the outputs of experts from the host: %w", err)
	}
	return nil
}

// copyWord is the unit of kernels.CopyBlocks, in bytes.
const copyWord = 16

// outputsByKernels copies the rows of the layer's pairs to outputs, and adds those of the divided expert.
func (h *cpuExperts) outputsByKernels(s device.Stream, backend kernels.Backend, outputs *kernels.Tensor) error {
	b, base, n := &h.buffers, h.buffers.input.Addr, len(h.pairs)
	bytes := int64(outputs.Shape[1] * outputs.DType.Size())
	from, to := h.memory.Write(int64(b.from.Addr-base), b.from.Bytes()), h.memory.Write(int64(b.to.Addr-base), b.to.Bytes())
	h.pairs = append(h.pairs, h.added...)
	for i, pair := range h.pairs {
		binary.NativeEndian.PutUint64(from[8*i:], uint64(b.output.Addr+h.mapped)+uint64(pair)*uint64(bytes))
		binary.NativeEndian.PutUint64(to[8*i:], uint64(outputs.Addr)+uint64(pair)*uint64(bytes))
	}
	src, dst := b.from, b.to
	src.Addr += h.mapped
	dst.Addr += h.mapped
	if n > 0 {
		h.copyRows = kernels.CopyBlocks{Src: src.Slice(0, n), Dst: dst.Slice(0, n), BlockBytes: bytes}
		if err := backend.Enqueue(s, &h.copyRows); err != nil {
			return err
		}
	}
	if all := len(h.pairs); all > n {
		h.addRows = kernels.AddRows{Src: src.Slice(n, all), Dst: dst.Slice(n, all), Columns: outputs.Shape[1], DType: outputs.DType}
		return backend.Enqueue(s, &h.addRows)
	}
	return nil
}

// fewCopies is the number of copies up to which a batch costs more than it saves.
const fewCopies = 3

// copyAll copies ranges by one operation, where the stream can.
func copyAll(s device.Stream, dst, src []device.Range) error {
	if b, ok := s.(device.BatchCopier); ok && len(dst) > fewCopies {
		if err := b.CopyBatch(dst, src); !errors.Is(err, device.ErrNoBatches) {
			return err
		}
	}
	for i := range dst {
		if err := s.Copy(dst[i], src[i]); err != nil {
			return err
		}
	}
	return nil
}

// recordFetched is called behind the kernels of a layer's experts that the link copies.
func (h *cpuExperts) recordFetched(s device.Stream) error {
	h.fetching = true
	return s.Record(h.fetched)
}

// measure tells the share when the latest layer's experts were computed, which they are.
func (h *cpuExperts) measure() {
	took := func(e device.Event) (time.Duration, bool) {
		at, err := e.Time()
		return at - h.decided, err == nil
	}
	if len(h.work) > 0 {
		if took, ok := took(h.ended); ok {
			h.share.Computed(&h.layout, h.work, took)
		}
	}
	if h.readBytes > 0 {
		if took, ok := took(h.read); ok {
			h.share.ReadInPlace(h.readBytes, took)
		}
	}
	if h.fetching {
		if took, ok := took(h.fetched); ok {
			h.share.Fetched(took)
		}
	}
	h.forgetTimes()
}

// forgetTimes forgets what measure would read.
func (h *cpuExperts) forgetTimes() { h.work, h.readBytes, h.fetching = h.work[:0], 0, false }

// Err implements source: it returns the stream's error.
func (h *cpuExperts) Err(ctx context.Context) error {
	if err := h.host.Synchronize(ctx); err != nil {
		return fmt.Errorf("pipeline: experts on the CPU: %w", err)
	}
	return nil
}

// Reset implements source.
func (h *cpuExperts) Reset(ctx context.Context) error {
	h.forgetTimes()
	h.pairs, h.added = h.pairs[:0], h.added[:0]
	return h.host.Recover(ctx)
}

func (h *cpuExperts) close() error {
	var errs []error
	if h.host != nil {
		errs = append(errs, h.host.Close())
	}
	for _, e := range []device.Event{h.ended, h.read, h.fetched} {
		if e != nil {
			errs = append(errs, e.Close())
		}
	}
	if h.computed != nil {
		errs = append(errs, h.computed.Close())
	}
	return errors.Join(append(errs, freePinned(h.memory))...)
}
