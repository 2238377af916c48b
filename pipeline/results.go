package pipeline

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"unsafe"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/forward"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/models"
)

// BackBytes is the pinned memory for what comes back from a step of limits l.
func (o Options) BackBytes(c *models.Config, l forward.Limits) int64 {
	n := placesOf(c, l, o.Groups()).logits
	if o.HostLogits {
		n += 4 * int64(l.MaxLogits) * int64(c.Vocab)
	}
	return n
}

// StagingBytes is the pinned memory through which the host attends for steps of limits l,
// with activations of type act.
func (o Options) StagingBytes(c *models.Config, act kernels.DType, l forward.Limits) int64 {
	if o.HostAttention == nil {
		return 0
	}
	return forward.NewAttentionBuffers(&c.Attention, act, l.MaxRows, 0).Bytes()
}

// places of what comes back from a step in pinned memory, in bytes, behind the sampled
// ids: activation counts, ids of a router's choice and of a guess, log-probabilities,
// logits.
type places struct{ counts, choice, guess, chosen, topIDs, top, logits int64 }

func placesOf(c *models.Config, l forward.Limits, groups int) places {
	var p places
	end := device.Align(4 * int64(l.MaxLogits))
	place := func(at *int64, bytes int64) {
		*at = end
		end += device.Align(bytes)
	}
	if c.MoELayers() > 0 {
		place(&p.counts, 8*int64(groups)*int64(c.Layers)*int64(c.Experts))
		place(&p.choice, 4*int64(l.MaxRows)*int64(c.TopK))
		place(&p.guess, 4*int64(l.MaxRows)*int64(c.TopK))
	}
	if n := int64(l.TopLogProbs(c)); n > 0 {
		place(&p.chosen, 4*int64(l.MaxLogits))
		place(&p.topIDs, 4*int64(l.MaxLogits)*n)
		place(&p.top, 4*int64(l.MaxLogits)*n)
	}
	p.logits = end
	return p
}

// bring enqueues the copies of what n micro-batches give, and marks their end.
func (p *Pipeline) bring(n int, withLogits bool) error {
	at := &p.at
	if err := p.bringCounts(p.back, at.counts); err != nil {
		return err
	}
	for i := range p.groups {
		g := &p.groups[i]
		if g.logits == 0 {
			continue
		}
		all := forward.Span{Rows: g.logits}
		if err := p.copyBack(4*int64(g.logit), g.model.Sampled(all)); err != nil {
			return err
		}
		if !withLogits {
			continue
		}
		if err := p.copyBack(at.logits+4*int64(g.logit)*int64(g.model.Config.Vocab), g.model.Logits(all)); err != nil {
			return err
		}
	}
	for i := range n {
		b := &p.batches[i]
		if !b.batch.Sampling.LogProbs {
			continue
		}
		chosen, topIDs, top := p.groups[b.group].model.LogProbs(b.batch.Sampling.Span)
		row := 4 * int64(b.logit)
		for _, c := range [...]struct {
			off int64
			t   kernels.Tensor
		}{{at.chosen + row, chosen}, {at.topIDs + row*int64(topIDs.Shape[1]), topIDs}, {at.top + row*int64(top.Shape[1]), top}} {
			if err := p.copyBack(c.off, c.t); err != nil {
				return err
			}
		}
	}
	return p.compute.Record(p.done)
}

// bringCounts enqueues the copies of each group's activation counts to a place in
// pinned memory, one behind another.
func (p *Pipeline) bringCounts(to device.Memory, off int64) error {
	if len(p.counts) == 0 {
		return nil
	}
	for i := range p.groups {
		t := p.groups[i].model.Counts()
		if err := p.compute.Copy(to.Range(off+int64(i)*t.Bytes(), t.Bytes()), t.Range()); err != nil {
			return fmt.Errorf("pipeline: bring activation counts: %w", err)
		}
	}
	return nil
}

// readCounts adds up the groups' counts.
func (p *Pipeline) readCounts(from device.Memory, off int64) {
	clear(p.counts)
	raw := from.Read(off, 8*int64(len(p.counts)*len(p.groups)))
	for i := range len(p.counts) * len(p.groups) {
		p.counts[i%len(p.counts)] += int64(binary.LittleEndian.Uint64(raw[8*i:]))
	}
}

// copyBack enqueues the copy of a dense tensor to its place in pinned memory.
func (p *Pipeline) copyBack(off int64, t kernels.Tensor) error {
	if err := p.compute.Copy(p.back.Range(off, t.Bytes()), t.Range()); err != nil {
		return fmt.Errorf("pipeline: bring results: %w", err)
	}
	return nil
}

// finish waits for the step and reads what it gave, or, where anything failed,
// clears stream and store so that the step can be run again.
func (p *Pipeline) finish(ctx context.Context, withLogits bool, err error) (Result, error) {
	if err == nil {
		err = p.done.Synchronize(ctx)
	}
	if err == nil && p.attention != nil {
		err = p.attention.err(ctx)
	}
	if err == nil && p.o.Experts != nil {
		err = p.step.End()
	}
	if err != nil {
		return Result{}, p.drop(ctx, err)
	}
	stalls, err := p.meter.end()
	if err != nil {
		return Result{}, err
	}
	p.pace.end(p.o.Machine.Now(), stalls[ExpertCopy])
	if len(p.counts) > 0 {
		p.readCounts(p.back, p.at.counts)
		p.o.Experts.Activated(p.counts)
	}
	o, logits := &p.out, len(p.wanted)
	o.sampled = room(o.sampled, logits)
	p.ints(o.sampled, 0)
	r := Result{Sampled: o.sampled}
	if slices.Contains(p.wanted, true) {
		r.LogProbs = p.logProbs()
	}
	if withLogits {
		vocab := p.o.Model.Config.Vocab
		o.logits, o.rows = room(o.logits, logits*vocab), o.rows[:0]
		p.floats(o.logits, p.at.logits)
		for i := range logits {
			o.rows = append(o.rows, o.logits[i*vocab:][:vocab:vocab])
		}
		r.Logits = o.rows
	}
	return r, nil
}

// out is the memory of Results, used again by every step.
type out struct {
	sampled     []int32
	logits      []float32
	rows        [][]float32
	probs       []LogProb
	chosen, top []float32
	topIDs      []int32
}

// room returns n elements, where an earlier step has left so many in its own.
func room[T any](s []T, n int) []T { return slices.Grow(s[:0], n)[:n] }

// logProbs reads those of the rows that want them.
func (p *Pipeline) logProbs() []LogProb {
	o, n, rows := &p.out, p.o.Model.Limits.TopLogProbs(p.o.Model.Config), len(p.wanted)
	o.chosen, o.topIDs, o.top = room(o.chosen, rows), room(o.topIDs, rows*n), room(o.top, rows*n)
	o.probs = room(o.probs, rows)
	clear(o.probs)
	for i, wanted := range p.wanted {
		if !wanted {
			continue
		}
		topIDs, top := o.topIDs[i*n:][:n:n], o.top[i*n:][:n:n]
		p.floats(o.chosen[i:i+1], p.at.chosen+4*int64(i))
		p.ints(topIDs, p.at.topIDs+4*int64(i*n))
		p.floats(top, p.at.top+4*int64(i*n))
		o.probs[i] = LogProb{Chosen: o.chosen[i], TopIDs: topIDs, Top: top}
	}
	return o.probs
}

// ints and floats read what came back at a place in pinned memory, in the order of bytes
// that host and device have.
func (p *Pipeline) ints(dst []int32, off int64) {
	n := 4 * len(dst)
	copy(unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(dst))), n), p.back.Read(off, int64(n)))
}

func (p *Pipeline) floats(dst []float32, off int64) {
	kernels.ToFloat32(dst, p.back.Read(off, 4*int64(len(dst))), kernels.F32)
}

// Counts reads how many rows have chosen each expert since the model's constants
// were written: [layers][experts], zero in dense layers. Rows of a step that was
// dropped count as far as it came. No step may be running.
func (p *Pipeline) Counts(ctx context.Context) ([][]int64, error) {
	if len(p.counts) == 0 {
		return nil, nil
	}
	mem, err := p.o.Machine.Alloc(device.Host, 8*int64(len(p.counts)*len(p.groups)), "activation counts, pinned")
	if err != nil {
		return nil, fmt.Errorf("pipeline: %w", err)
	}
	err = p.bringCounts(mem, 0)
	if err == nil {
		err = p.compute.Synchronize(ctx)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("pipeline: read activation counts: %w", err), mem.Free())
	}
	p.readCounts(mem, 0)
	c := p.o.Model.Config
	counts := make([][]int64, c.Layers)
	for l := range counts {
		counts[l] = slices.Clone(p.counts[l*c.Experts:][:c.Experts])
	}
	return counts, mem.Free()
}
