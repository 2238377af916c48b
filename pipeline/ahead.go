package pipeline

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/forward"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/models"
)

const (
	// MaxAheadSequences is the maximum number of sequences of a step that is enqueued ahead.
	MaxAheadSequences = 64
	// maxAheadStep is the longest step behind which one is enqueued ahead, divided by the number of its sequences that
	// may end. What is gained is what the host does between two steps, some 0.1 ms. A request that arrives meanwhile waits
	// for one step more, and where a sequence ends, a step was computed for nothing.
	maxAheadStep = 10 * time.Millisecond
)

// ahead enqueues decode steps before the tokens of the step in front are known to the host, so that the
// device need not wait for it between the two (Step.Ahead). The device itself copies the tokens that it has
// sampled to the next step's metadata; the host knows everything else.
//
// There is at most one such step, behind the one that Step waits for. Only steps that are one graph are enqueued
// ahead: their experts are resident, or read in place, so that the store has nothing to fetch for them.
type ahead struct {
	possible bool
	limits   forward.Limits
	// slots are the memory of two steps, used in turn: one that Step waits for, and the next.
	slots [2]aheadSlot
	// next is the slot of the next step to enqueue.
	next int
	// enqueued is the step ahead; nil: there is none.
	enqueued *aheadSlot
	batches  *batcher
	// took is the time of the latest successful step: of one that was enqueued ahead from the end of the one before.
	took, ended time.Duration
	// sampled and rows are memory that is reused.
	sampled []int32
	rows    []int

	used, discarded atomic.Int64
}

// aheadSlot is one step that is enqueued ahead.
type aheadSlot struct {
	// metadata and results are pinned: the step's metadata; its sampled ids, and at counts, the counts of routed tokens.
	metadata, results *kernels.Pinned
	counts            int64
	done              device.Event
	// sequences of the step. Their Tokens are those that the step in front sampled, once they are known.
	sequences []Sequence
	tokens    []int32
	// partial: the results of some of the sequences can be taken.
	partial bool
}

// aheadLimits are the limits of a step that is enqueued ahead, where those of all steps are l.
func aheadLimits(l forward.Limits) forward.Limits {
	l.MaxTokens = min(l.MaxTokens, MaxAheadSequences)
	l.MaxSeqs, l.MaxLogits, l.MaxAdjust = min(l.MaxSeqs, l.MaxTokens), min(l.MaxLogits, l.MaxTokens), 0
	return l
}

// aheadBytes is the pinned memory of the metadata of such a step, and of its results, of which the counts of
// routed tokens begin at counts.
func aheadBytes(c *models.Config, l forward.Limits) (metadata, results, counts int64) {
	counts = device.Align(4 * int64(l.MaxLogits))
	results = counts
	if c.MoELayers() > 0 {
		results += device.Align(8 * int64(c.Layers) * int64(c.Experts))
	}
	return forward.StepUploadBytes(l, 1), results, counts
}

func (a *ahead) open(o *Options) (err error) {
	a.possible, a.limits, a.took = true, aheadLimits(o.Limits), maxAheadStep+1 // until one was measured
	small := *o
	small.Limits = a.limits
	a.batches = newBatcher(&small, func() forward.HostBatch { return forward.NewHostBatch(o.config(), a.limits) })
	a.batches.roundContexts = true
	metadata, results, counts := aheadBytes(o.config(), a.limits)
	for i := range a.slots {
		x := &a.slots[i]
		x.counts = counts
		if x.metadata, err = newPinned(o, metadata, "metadata of a step ahead, pinned"); err != nil {
			return err
		}
		if x.results, err = newPinned(o, results, "results of a step ahead, pinned"); err != nil {
			return err
		}
		if x.done, err = o.Machine.NewEvent(); err != nil {
			return err
		}
	}
	return nil
}

func (a *ahead) close() error {
	var errs []error
	for i := range a.slots {
		x := &a.slots[i]
		errs = append(errs, freePinned(x.metadata), freePinned(x.results))
		if x.done != nil {
			errs = append(errs, x.done.Close())
		}
	}
	return errors.Join(errs...)
}

// follows sets the sequences of the slot to those of a step one token later, and reports whether that step can
// be enqueued ahead.
func (x *aheadSlot) follows(s *Step, l forward.Limits) bool {
	x.sequences, x.tokens = x.sequences[:0], resized(x.tokens, len(s.Sequences))
	if s.Logits || len(s.Sequences) > l.MaxTokens {
		return false
	}
	for i := range s.Sequences {
		q := s.Sequences[i]
		d := &q.SamplingParams
		if len(q.Tokens) != 1 || q.LogitRows != 1 || len(q.Targets) > 0 || len(d.Adjust) > 0 || d.Mask != nil || d.LogProbs {
			return false
		}
		q.Start++
		if q.Start >= l.MaxModelLen || len(q.Table.Blocks())*l.BlockTokens <= q.Start {
			return false
		}
		x.tokens[i] = 0
		q.Tokens = x.tokens[i : i+1 : i+1]
		x.sequences = append(x.sequences, q)
	}
	return true
}

// rowsOf appends the rows of the slot that a step has, if it is a part of what was enqueued.
func (x *aheadSlot) rowsOf(s *Step, rows []int) (_ []int, ok bool) {
	if s.Logits || len(s.Copies) > 0 || len(s.Wait) > 0 || len(s.Sequences) == 0 {
		return nil, false
	}
	at := 0
	for i := range s.Sequences {
		for at < len(x.sequences) && x.sequences[at].Table != s.Sequences[i].Table {
			at++
		}
		if at == len(x.sequences) || !x.sequences[at].equal(&s.Sequences[i]) {
			return nil, false
		}
		rows = append(rows, at)
		at++
	}
	return rows, true
}

// equal reports whether two sequences of the same table, of which q can be ahead, compute and sample the same.
func (q *Sequence) equal(other *Sequence) bool {
	a, b := q.SamplingParams, &other.SamplingParams
	if len(b.Adjust) > 0 || b.Mask != nil || b.LogProbs || len(other.Targets) > 0 {
		return false
	}
	a.Position = b.Position // both follow from Start
	return q.Start == other.Start && q.Long == other.Long && other.LogitRows == 1 && slices.Equal(q.Tokens, other.Tokens) &&
		a.Temperature == b.Temperature && a.Seed == b.Seed && a.Sample == b.Sample && a.TopK == b.TopK && a.TopP == b.TopP && a.MinP == b.MinP
}

// enqueueAhead enqueues the step behind s, which is enqueued itself, if s.Ahead asks for it and it is possible.
func (p *Pipeline) enqueueAhead(ctx context.Context, s *Step) error {
	a := &p.ahead
	ends, partial := s.MayEnd, s.Partial || p.o.BatchInvariant
	if partial {
		ends = 0
	}
	if !s.Ahead || !a.possible || a.took > maxAheadStep/time.Duration(max(1, ends)) {
		return nil
	}
	x := &a.slots[a.next]
	if !x.follows(s, a.limits) {
		return nil
	}
	n, way := len(x.sequences), byCopy
	if p.plans.anyOffloaded() {
		if way = inPlace; !p.access.again(n, 2*a.took) {
			return nil
		}
	}
	plan, step := p.plans.get(n, way, false), Step{Sequences: x.sequences}
	if plan.shape.MicroBatches != 1 || a.batches.split(&step, n, &plan.shape) != nil { // the step itself will tell
		return nil
	}
	b := &a.batches.all[0]
	packed, bytes, err := b.host.Pack(x.metadata.Write(0, x.metadata.Bytes()), p.metadata.device.Range(0, x.metadata.Bytes()).Addr)
	if err != nil {
		return err
	}
	b.batch = packed
	graph := p.graphs.keptFor(a.batches, plan)
	if graph == nil || plan.inPlace && !p.step.ContinueInPlace() {
		return nil
	}
	m := p.o.Executors[0].Model
	sampled := m.Sampled(forward.Span{Rows: n})
	ids := device.Align(packed.IDs.Bytes()) // in front of the rest, which the host knows
	if err := x.metadata.ToDeviceWith(p.compute, p.metadata.device.Range(ids, bytes-ids), ids, m.Backend(), sampled, packed.IDs); err != nil {
		return fmt.Errorf("pipeline: metadata and tokens of the next step: %w", err)
	}
	if err := p.launch(ctx, plan, graph); err != nil {
		return err
	}
	if err := p.results.copyAhead(x, p.compute, sampled); err != nil {
		return err
	}
	if err := p.compute.Record(x.done); err != nil {
		return err
	}
	x.partial = partial
	a.enqueued, a.next, p.step.continues = x, 1-a.next, true
	return nil
}

// collect is Step for a step that is enqueued already, of which s has these rows.
func (p *Pipeline) collect(ctx context.Context, s *Step, rows []int) (Result, error) {
	a := &p.ahead
	x := a.take(&p.step)
	p.meter.begin()
	p.meter.began = a.ended // when the device began
	p.kvLoads = nil
	var err error
	if len(rows) == len(x.sequences) { // else the device has tokens that the next step does not
		err = p.enqueueAhead(ctx, s)
	}
	if err == nil {
		if s.Meanwhile != nil {
			s.Meanwhile()
		}
		err = p.end(ctx, x.done)
	}
	if err == nil {
		err = signal(s.Done)
	}
	if err != nil {
		return Result{}, p.recover(ctx, err)
	}
	_, _ = p.meter.end() // it has measured no stalls
	now := p.o.Machine.Now()
	p.countAhead(x, now-a.ended)
	a.sampled = a.sampled[:0]
	raw := x.results.Read(0, 4*int64(len(x.sequences)))
	for _, row := range rows {
		a.sampled = append(a.sampled, int32(binary.LittleEndian.Uint32(raw[4*row:])))
	}
	a.used.Add(1)
	a.end(now, a.ended, a.sampled)
	clear(x.sequences) // their tables
	res := Result{Sampled: a.sampled}
	a.tell(&res)
	return res, nil
}

// countAhead counts the experts that a step ahead has used, which has taken so long; -1: it was discarded.
func (p *Pipeline) countAhead(x *aheadSlot, took time.Duration) {
	if p.o.Experts != nil && len(p.results.counts) > 0 {
		p.results.readCounts(x.results, x.counts)
		p.o.Experts.AddRoutedTokens(p.results.counts)
	}
	if !p.plans.anyOffloaded() {
		return
	}
	used := p.o.Experts.OffloadedUses()
	if took >= 0 {
		p.access.repeat()
		p.access.took(took, used-p.offloadedUses)
	}
	p.offloadedUses = used
}

// take takes the step that is enqueued, if there is one, for which the store's part of a step has gone on.
func (a *ahead) take(step *storeStep) *aheadSlot {
	x := a.enqueued
	a.enqueued, step.continues = nil, false
	return x
}

// drop is take of a step whose results are not used.
func (a *ahead) drop(step *storeStep) *aheadSlot {
	x := a.take(step)
	if x != nil {
		a.discarded.Add(1)
		clear(x.sequences)
	}
	return x
}

// tell says in the result of a step whether the next one is enqueued.
func (a *ahead) tell(r *Result) {
	if x := a.enqueued; x != nil {
		r.Ahead, r.AheadPartial = true, x.partial
	}
}

// end records a step that has taken from since to now. sampled are the tokens of the step behind it, if that is
// enqueued.
func (a *ahead) end(now, since time.Duration, sampled []int32) {
	a.took, a.ended = now-since, now
	if a.enqueued != nil {
		copy(a.enqueued.tokens, sampled)
	}
}

// Discard waits for the end of a step that was enqueued ahead, which Result.Ahead of the latest step has told, and drops
// its results: for a caller for whom there is no such step any more, or who needs that nothing runs. Without one it does
// nothing. The experts that it has used, and the tokens routed to them, are counted.
func (p *Pipeline) Discard(ctx context.Context) error {
	x := p.ahead.drop(&p.step)
	if x == nil {
		return nil
	}
	if err := p.end(ctx, x.done); err != nil {
		return p.recover(ctx, err)
	}
	p.countAhead(x, -1)
	return nil
}
