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

// resultOffsets are byte offsets of a step's results in pinned memory, behind the sampled
// ids: counts of routed tokens, ids of routed and of predicted experts, log-probabilities, those of
// targets, logits.
type resultOffsets struct {
	counts, routed, predicted, tokenLogProbs, topIDs, top, logits int64
	targets                                                       struct{ logProbs, ranks, topIDs, top int64 }
}

func newResultOffsets(c *models.Config, l forward.Limits, groups int) resultOffsets {
	var p resultOffsets
	end := device.Align(4 * int64(l.MaxLogits))
	place := func(at *int64, bytes int64) {
		*at = end
		end += device.Align(bytes)
	}
	if c.MoELayers() > 0 {
		place(&p.counts, 8*int64(groups)*int64(c.Layers)*int64(c.Experts))
		place(&p.routed, 4*int64(l.MaxTokens)*int64(c.TopK))
		place(&p.predicted, 4*int64(l.MaxTokens)*int64(c.TopK))
	}
	if n := int64(l.TopLogProbs(c)); n > 0 {
		place(&p.tokenLogProbs, 4*int64(l.MaxLogits))
		place(&p.topIDs, 4*int64(l.MaxLogits)*n)
		place(&p.top, 4*int64(l.MaxLogits)*n)
		place(&p.targets.logProbs, 4*int64(l.MaxTokens))
		place(&p.targets.ranks, 4*int64(l.MaxTokens))
		place(&p.targets.topIDs, 4*int64(l.MaxTokens)*n)
		place(&p.targets.top, 4*int64(l.MaxTokens)*n)
	}
	p.logits = end
	return p
}

// results copies a step's results to pinned memory, and reads them there.
type results struct {
	config *models.Config
	// numTop is the number of top log-probabilities per logit row.
	numTop    int
	executors []executor
	pinned    *kernels.Pinned
	offsets   resultOffsets
	// counts are the routed tokens of the latest read, [layers, experts]; empty for a dense
	// model.
	counts []int64

	// The memory of Results, reused by every step.
	sampled            []int32
	logits             []float32
	logitRows          [][]float32
	probs              []LogProb
	tokenLogProbs, top []float32
	topIDs             []int32
}

func newResults(o *Options, executors []executor) (r *results, err error) {
	c := o.config()
	r = &results{config: c, numTop: o.Limits.TopLogProbs(c), executors: executors, offsets: newResultOffsets(c, o.Limits, len(executors))}
	if c.MoELayers() > 0 {
		r.counts = make([]int64, c.Layers*c.Experts)
	}
	r.pinned, err = newPinned(o, o.ResultBytes(c, o.Limits), "sampled ids, pinned")
	return r, err
}

func (r *results) close() error { return freePinned(r.pinned) }

// enqueueCopies enqueues the copies of a step's results, each on the stream that computes it.
func (r *results) enqueueCopies(b *batcher, withLogits bool) error {
	if err := r.copyCounts(r.pinned, r.offsets.counts); err != nil {
		return err
	}
	for i := range b.groups {
		g, x := &b.groups[i], &r.executors[i]
		if g.logits == 0 {
			continue
		}
		all := forward.Span{Rows: g.logits}
		if err := r.copy(x.stream, 4*int64(g.firstLogit), x.model.Sampled(all)); err != nil {
			return err
		}
		if !withLogits {
			continue
		}
		if err := r.copy(x.stream, r.offsets.logits+4*int64(g.firstLogit)*int64(r.config.Vocab), x.model.Logits(all)); err != nil {
			return err
		}
	}
	for i := range b.used() {
		if err := r.copyTargets(&b.all[i]); err != nil {
			return err
		}
	}
	for i := range b.used() {
		mb := &b.all[i]
		if !mb.batch.Sampling.LogProbs {
			continue
		}
		x := &r.executors[mb.group]
		chosen, topIDs, top := x.model.LogProbs(mb.batch.Sampling.Span)
		row := 4 * int64(mb.firstLogit)
		for _, c := range [...]struct {
			off int64
			t   kernels.Tensor
		}{
			{r.offsets.tokenLogProbs + row, chosen}, {r.offsets.topIDs + row*int64(topIDs.Shape[1]), topIDs}, {r.offsets.top + row*int64(top.Shape[1]), top},
		} {
			if err := r.copy(x.stream, c.off, c.t); err != nil {
				return err
			}
		}
	}
	return nil
}

// copyTargets enqueues the copies of the results for a micro-batch's targets.
func (r *results) copyTargets(mb *microBatch) error {
	if mb.batch.Targets.Rows == 0 {
		return nil
	}
	x, at, row, n := &r.executors[mb.group], &r.offsets.targets, 4*int64(mb.firstTarget), int64(r.numTop)
	t := x.model.Targets(mb.batch.Targets.Span)
	for _, c := range [...]struct {
		off int64
		t   kernels.Tensor
	}{{at.logProbs + row, t.LogProbs}, {at.ranks + row, t.Ranks}, {at.topIDs + row*n, t.TopIDs}, {at.top + row*n, t.Top}} {
		if err := r.copy(x.stream, c.off, c.t); err != nil {
			return err
		}
	}
	return nil
}

// copyCounts enqueues the copies of the groups' counts of routed tokens to consecutive places
// in pinned memory.
func (r *results) copyCounts(to *kernels.Pinned, off int64) error {
	if len(r.counts) == 0 {
		return nil
	}
	for i := range r.executors {
		x := &r.executors[i]
		t := x.model.Counts()
		if err := to.ToHost(x.stream, off+int64(i)*t.Bytes(), t); err != nil {
			return fmt.Errorf("pipeline: copy counts of routed tokens: %w", err)
		}
	}
	return nil
}

// copyAhead enqueues the copies of the results of a step that is enqueued ahead, which has one group.
func (r *results) copyAhead(x *aheadSlot, s device.Stream, sampled kernels.Tensor) error {
	var err error
	if len(r.counts) == 0 {
		err = x.results.ToHost(s, 0, sampled)
	} else {
		err = x.results.ToHostBoth(s, x.counts, r.executors[0].model.Counts(), 0, sampled)
	}
	if err != nil {
		return fmt.Errorf("pipeline: copy results of the next step: %w", err)
	}
	return nil
}

// readCounts sums the groups' counts.
func (r *results) readCounts(from device.Memory, off int64) {
	clear(r.counts)
	raw := from.Read(off, 8*int64(len(r.counts)*len(r.executors)))
	for i := range len(r.counts) * len(r.executors) {
		r.counts[i%len(r.counts)] += int64(binary.LittleEndian.Uint64(raw[8*i:]))
	}
}

// copy enqueues the copy of a dense tensor to an offset in pinned memory.
func (r *results) copy(s device.Stream, off int64, t kernels.Tensor) error {
	if err := r.pinned.ToHost(s, off, t); err != nil {
		return fmt.Errorf("pipeline: copy results: %w", err)
	}
	return nil
}

// routedTokens returns the counts of a step that has ended, [layers, experts], valid until
// the next read.
func (r *results) routedTokens() []int64 {
	if len(r.counts) > 0 {
		r.readCounts(r.pinned, r.offsets.counts)
	}
	return r.counts
}

// read returns the result of a step that has ended.
func (r *results) read(b *batcher, withLogits bool) Result {
	rows := len(b.wantLogProbs)
	r.sampled = resized(r.sampled, rows)
	r.ints(r.sampled, 0)
	out := Result{Sampled: r.sampled}
	if slices.Contains(b.wantLogProbs, true) {
		out.LogProbs = r.logProbs(b.wantLogProbs)
	}
	out.Targets = r.readTargets(b.targets)
	if withLogits {
		vocab := r.config.Vocab
		r.logits, r.logitRows = resized(r.logits, rows*vocab), r.logitRows[:0]
		r.floats(r.logits, r.offsets.logits)
		for i := range rows {
			r.logitRows = append(r.logitRows, r.logits[i*vocab:][:vocab:vocab])
		}
		out.Logits = r.logitRows
	}
	return out
}

// resized returns a slice of n elements, in the memory of s where its capacity suffices.
func resized[T any](s []T, n int) []T { return slices.Grow(s[:0], n)[:n] }

// logProbs reads the log-probabilities of the rows for which they are requested.
func (r *results) logProbs(wanted []bool) []LogProb {
	n, rows := r.numTop, len(wanted)
	r.tokenLogProbs, r.topIDs, r.top = resized(r.tokenLogProbs, rows), resized(r.topIDs, rows*n), resized(r.top, rows*n)
	r.probs = resized(r.probs, rows)
	clear(r.probs)
	for i, wants := range wanted {
		if !wants {
			continue
		}
		topIDs, top := r.topIDs[i*n:][:n:n], r.top[i*n:][:n:n]
		r.floats(r.tokenLogProbs[i:i+1], r.offsets.tokenLogProbs+4*int64(i))
		r.ints(topIDs, r.offsets.topIDs+4*int64(i*n))
		r.floats(top, r.offsets.top+4*int64(i*n))
		r.probs[i] = LogProb{Sampled: r.tokenLogProbs[i], TopIDs: topIDs, Top: top}
	}
	return r.probs
}

// readTargets reads the results for a step's targets. They have memory of their own, since few steps
// have any, and some very many.
func (r *results) readTargets(rows int) []LogProb {
	n, at := r.numTop, &r.offsets.targets
	if rows == 0 {
		return nil
	}
	all := make([]LogProb, rows)
	logProbs, ranks, topIDs, top := make([]float32, rows), make([]int32, rows), make([]int32, rows*n), make([]float32, rows*n)
	r.floats(logProbs, at.logProbs)
	r.ints(ranks, at.ranks)
	r.ints(topIDs, at.topIDs)
	r.floats(top, at.top)
	for i := range all {
		all[i] = LogProb{Sampled: logProbs[i], Rank: ranks[i], TopIDs: topIDs[i*n:][:n:n], Top: top[i*n:][:n:n]}
	}
	return all
}

// ints and floats read values at an offset in pinned memory, in the byte order that host and
// device share.
func (r *results) ints(dst []int32, off int64) {
	n := 4 * len(dst)
	copy(unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(dst))), n), r.pinned.Read(off, int64(n)))
}

func (r *results) floats(dst []float32, off int64) {
	kernels.ToFloat32(dst, r.pinned.Read(off, 4*int64(len(dst))), kernels.F32)
}

// Counts reads how many tokens were routed to each expert since the model's constants were
// written: [layers][experts], zero in dense layers. The counts include what failed steps
// computed before they failed. No step may be running.
func (p *Pipeline) Counts(ctx context.Context) ([][]int64, error) {
	r := p.results
	if len(r.counts) == 0 {
		return nil, nil
	}
	mem, err := newPinned(&p.o, 8*int64(len(r.counts)*len(r.executors)), "counts of routed tokens, pinned")
	if err != nil {
		return nil, fmt.Errorf("pipeline: %w", err)
	}
	err = r.copyCounts(mem, 0)
	if err == nil {
		err = p.compute.Synchronize(ctx)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("pipeline: read counts of routed tokens: %w", err), mem.Free())
	}
	r.readCounts(mem, 0)
	c := r.config
	counts := make([][]int64, c.Layers)
	for l := range counts {
		counts[l] = slices.Clone(r.counts[l*c.Experts:][:c.Experts])
	}
	return counts, mem.Free()
}
