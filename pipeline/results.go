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

// places of what comes back from a step in pinned memory, in bytes, behind the sampled
// ids: activation counts, ids of a router's choice and of a prediction, log-probabilities,
// logits.
type places struct{ counts, choice, predicted, chosen, topIDs, top, logits int64 }

func placesOf(c *models.Config, l forward.Limits, groups int) places {
	var p places
	end := device.Align(4 * int64(l.MaxLogits))
	place := func(at *int64, bytes int64) {
		*at = end
		end += device.Align(bytes)
	}
	if c.MoELayers() > 0 {
		place(&p.counts, 8*int64(groups)*int64(c.Layers)*int64(c.Experts))
		place(&p.choice, 4*int64(l.MaxTokens)*int64(c.TopK))
		place(&p.predicted, 4*int64(l.MaxTokens)*int64(c.TopK))
	}
	if n := int64(l.TopLogProbs(c)); n > 0 {
		place(&p.chosen, 4*int64(l.MaxLogits))
		place(&p.topIDs, 4*int64(l.MaxLogits)*n)
		place(&p.top, 4*int64(l.MaxLogits)*n)
	}
	p.logits = end
	return p
}

// results brings what the device knows to pinned memory, and reads it there.
type results struct {
	config *models.Config
	// topLogProbs of each logit row.
	topLogProbs int
	executors   []executor
	back        device.Memory
	at          places
	// counts are the activations as the host reads them, [layers, experts]; empty for a
	// model without experts.
	counts []int64

	// The memory of Results, used again by every step.
	sampled     []int32
	logits      []float32
	rows        [][]float32
	probs       []LogProb
	chosen, top []float32
	topIDs      []int32
}

func newResults(o *Options, executors []executor) (r *results, err error) {
	c := o.config()
	r = &results{config: c, topLogProbs: o.Limits.TopLogProbs(c), executors: executors, at: placesOf(c, o.Limits, len(executors))}
	if c.MoELayers() > 0 {
		r.counts = make([]int64, c.Layers*c.Experts)
	}
	r.back, err = o.Machine.Alloc(device.Host, o.ResultBytes(c, o.Limits), "sampled ids, pinned")
	return r, err
}

func (r *results) close() error { return free(r.back) }

// bring enqueues the copies of what a step gives, each on the stream that computes it.
func (r *results) bring(b *batcher, withLogits bool) error {
	if err := r.bringCounts(r.back, r.at.counts); err != nil {
		return err
	}
	for i := range b.groups {
		g, x := &b.groups[i], &r.executors[i]
		if g.logits == 0 {
			continue
		}
		all := forward.Span{Rows: g.logits}
		if err := r.copy(x.stream, 4*int64(g.logit), x.model.Sampled(all)); err != nil {
			return err
		}
		if !withLogits {
			continue
		}
		if err := r.copy(x.stream, r.at.logits+4*int64(g.logit)*int64(r.config.Vocab), x.model.Logits(all)); err != nil {
			return err
		}
	}
	for i := range b.step() {
		mb := &b.all[i]
		if !mb.batch.Sampling.LogProbs {
			continue
		}
		x := &r.executors[mb.group]
		chosen, topIDs, top := x.model.LogProbs(mb.batch.Sampling.Span)
		row := 4 * int64(mb.logit)
		for _, c := range [...]struct {
			off int64
			t   kernels.Tensor
		}{
			{r.at.chosen + row, chosen}, {r.at.topIDs + row*int64(topIDs.Shape[1]), topIDs}, {r.at.top + row*int64(top.Shape[1]), top},
		} {
			if err := r.copy(x.stream, c.off, c.t); err != nil {
				return err
			}
		}
	}
	return nil
}

// bringCounts enqueues the copies of each group's activation counts to a place in
// pinned memory, one behind another.
func (r *results) bringCounts(to device.Memory, off int64) error {
	if len(r.counts) == 0 {
		return nil
	}
	for i := range r.executors {
		x := &r.executors[i]
		t := x.model.Counts()
		if err := x.stream.Copy(to.Range(off+int64(i)*t.Bytes(), t.Bytes()), t.Range()); err != nil {
			return fmt.Errorf("pipeline: bring activation counts: %w", err)
		}
	}
	return nil
}

// readCounts adds up the groups' counts.
func (r *results) readCounts(from device.Memory, off int64) {
	clear(r.counts)
	raw := from.Read(off, 8*int64(len(r.counts)*len(r.executors)))
	for i := range len(r.counts) * len(r.executors) {
		r.counts[i%len(r.counts)] += int64(binary.LittleEndian.Uint64(raw[8*i:]))
	}
}

// copy enqueues the copy of a dense tensor to its place in pinned memory.
func (r *results) copy(s device.Stream, off int64, t kernels.Tensor) error {
	if err := s.Copy(r.back.Range(off, t.Bytes()), t.Range()); err != nil {
		return fmt.Errorf("pipeline: bring results: %w", err)
	}
	return nil
}

// activations of a step that has ended, [layers, experts], valid until the next are read.
func (r *results) activations() []int64 {
	if len(r.counts) > 0 {
		r.readCounts(r.back, r.at.counts)
	}
	return r.counts
}

// read is the result of a step that has ended.
func (r *results) read(b *batcher, withLogits bool) Result {
	logits := len(b.wanted)
	r.sampled = room(r.sampled, logits)
	r.ints(r.sampled, 0)
	out := Result{Sampled: r.sampled}
	if slices.Contains(b.wanted, true) {
		out.LogProbs = r.logProbs(b.wanted)
	}
	if withLogits {
		vocab := r.config.Vocab
		r.logits, r.rows = room(r.logits, logits*vocab), r.rows[:0]
		r.floats(r.logits, r.at.logits)
		for i := range logits {
			r.rows = append(r.rows, r.logits[i*vocab:][:vocab:vocab])
		}
		out.Logits = r.rows
	}
	return out
}

// room returns n elements, where an earlier step has left so many in its own.
func room[T any](s []T, n int) []T { return slices.Grow(s[:0], n)[:n] }

// logProbs reads those of the rows that want them.
func (r *results) logProbs(wanted []bool) []LogProb {
	n, rows := r.topLogProbs, len(wanted)
	r.chosen, r.topIDs, r.top = room(r.chosen, rows), room(r.topIDs, rows*n), room(r.top, rows*n)
	r.probs = room(r.probs, rows)
	clear(r.probs)
	for i, wants := range wanted {
		if !wants {
			continue
		}
		topIDs, top := r.topIDs[i*n:][:n:n], r.top[i*n:][:n:n]
		r.floats(r.chosen[i:i+1], r.at.chosen+4*int64(i))
		r.ints(topIDs, r.at.topIDs+4*int64(i*n))
		r.floats(top, r.at.top+4*int64(i*n))
		r.probs[i] = LogProb{Chosen: r.chosen[i], TopIDs: topIDs, Top: top}
	}
	return r.probs
}

// ints and floats read what came back at a place in pinned memory, in the order of bytes
// that host and device have.
func (r *results) ints(dst []int32, off int64) {
	n := 4 * len(dst)
	copy(unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(dst))), n), r.back.Read(off, int64(n)))
}

func (r *results) floats(dst []float32, off int64) {
	kernels.ToFloat32(dst, r.back.Read(off, 4*int64(len(dst))), kernels.F32)
}

// Counts reads how many rows have chosen each expert since the model's constants
// were written: [layers][experts], zero in dense layers. Rows of a step that was
// dropped count as far as it came. No step may be running.
func (p *Pipeline) Counts(ctx context.Context) ([][]int64, error) {
	r := p.results
	if len(r.counts) == 0 {
		return nil, nil
	}
	mem, err := p.o.Machine.Alloc(device.Host, 8*int64(len(r.counts)*len(r.executors)), "activation counts, pinned")
	if err != nil {
		return nil, fmt.Errorf("pipeline: %w", err)
	}
	err = r.bringCounts(mem, 0)
	if err == nil {
		err = p.compute.Synchronize(ctx)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("pipeline: read activation counts: %w", err), mem.Free())
	}
	r.readCounts(mem, 0)
	c := r.config
	counts := make([][]int64, c.Layers)
	for l := range counts {
		counts[l] = slices.Clone(r.counts[l*c.Experts:][:c.Experts])
	}
	return counts, mem.Free()
}
