package pipeline

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/models"
)

// ErrStepFailed marks an error of Step after which the same step may be run
// again: a copy failed, or a device other than the compute device was lost.
var ErrStepFailed = errors.New("step failed")

// Options are the parts a pipeline works with. It owns none of them but its
// stream and its own buffers.
type Options struct {
	Machine device.Machine
	// Space is the compute device's memory.
	Space device.Space
	Model *models.Model
	// Experts is the store of the model's experts, nil for a model without.
	Experts *experts.Store
	KV      *kvcache.Pool
	// MicroBatchRows is how many rows attention takes at a time. Default and at
	// most: the model's Limits.MaxRows.
	MicroBatchRows int
	// SmallBatchRows is the most rows of a step for which only chosen experts are
	// fetched (the plan ChosenOnly). Default: what SmallBatch says; negative: none.
	// On a machine that keeps no data there are none, since no choice comes back.
	SmallBatchRows int
	// HostLogits keeps room in pinned memory for the logits of a step, for those
	// who ask for them. Default: off.
	HostLogits bool
}

// Sequence is one sequence's part of a step.
type Sequence struct {
	// Tokens to compute, at positions Start, Start+1, …
	Tokens []int32
	Start  int
	// Table holds the places of the sequence's keys and values, with room for
	// Start + len(Tokens).
	Table *kvcache.Table
	// Long takes the long factors of longrope.
	Long bool
	// LogitRows is how many of the last Tokens have their logits computed and a
	// token drawn behind them: 0 for a chunk that does not end its prompt, 1 to go
	// on generating, more where the logits are wanted.
	LogitRows int
	// Draw says how tokens are drawn; its Position is left out, as Start says it. Its
	// Adjust counts for the last logit row only: what it says of a token's
	// occurrences holds behind the last token.
	Draw Draw
}

// Draw says how a token is drawn, TokenAdjust how a token's logit is changed
// before.
type (
	Draw        = models.Draw
	TokenAdjust = models.TokenAdjust
)

// Step is a set of rows that runs as one.
type Step struct {
	Sequences []Sequence
	// Logits asks for the logits; the pipeline must have been made with HostLogits.
	Logits bool
}

// Result is what a step gives, in the order of its sequences and, within one,
// of its logit rows.
type Result struct {
	// Sampled tokens, one per logit row.
	Sampled []int32
	// Logits, a row of the vocabulary's size per logit row, where asked for: the
	// model's own, without penalties, biases and temperature.
	Logits [][]float32
	// LogProbs, one per logit row, where a Draw asks for them: the zero LogProb for
	// rows whose Draw does not; nil where none does.
	LogProbs []LogProb
}

// LogProb is how likely tokens were behind one logit row, by the model's own
// logits, without penalties, biases and temperature.
type LogProb struct {
	// Chosen is the log-probability of the token drawn.
	Chosen float32
	// TopIDs are the likeliest tokens, by falling probability, the lower id of equal
	// ones first, and Top their log-probabilities: Limits.TopLogProbs of them.
	TopIDs []int32
	Top    []float32
}

// Pipeline carries steps out on one compute stream. One goroutine uses it.
type Pipeline struct {
	o       Options
	compute device.Stream
	done    device.Event
	shape   Shape

	// Row data goes through pinned memory to its place on the device: that of a
	// step's micro-batches lies one behind another, uploaded bytes so far.
	pinned, rows device.Memory
	uploaded     int64
	// back is where what the device knows lands in pinned memory: see places.
	back device.Memory

	batches []microBatch
	// wanted says of each logit row of the step whether log-probabilities are asked.
	wanted []bool
	plans  map[planKey][]Action

	// answered is raised when a choice or a guess has come back: the step's latest
	// are the values choice and guess, the last of all is answers.
	answered               device.Fence
	choice, guess, answers uint32
	// ids are a choice or a guess as the host reads it.
	ids []int32
	// counts are the activations as the host reads them, [layers, experts]; empty for a
	// model without experts.
	counts []int64
}

// planKey is what the plan of a step depends on, beside the shape.
type planKey struct {
	microBatches int
	chosenOnly   bool
}

// microBatch is one of a step's: what the host packed, and where it is.
type microBatch struct {
	host  models.HostBatch
	batch models.Batch
}

// New takes its buffers and its stream.
func New(o Options) (_ *Pipeline, err error) {
	l := o.Model.Limits
	if o.MicroBatchRows <= 0 || o.MicroBatchRows > l.MaxRows {
		o.MicroBatchRows = l.MaxRows
	}
	c := o.Model.Config
	shape := Shape{SharedExpert: c.SharedWidth > 0}
	for layer, dense := range c.Dense {
		shape.MoE = append(shape.MoE, !dense)
		// How many of a layer's experts are local stays the same, whichever they are.
		shape.Missing = append(shape.Missing, !dense && o.Experts != nil && o.Experts.Missing(layer) > 0)
	}
	machine, ok := o.Machine.(interface{ KeepsData() bool })
	switch {
	case o.SmallBatchRows < 0, ok && !machine.KeepsData(), !slices.Contains(shape.Missing, true):
		o.SmallBatchRows = 0
	case o.SmallBatchRows == 0:
		o.SmallBatchRows = SmallBatch(c.Experts, c.TopK)
	}
	p := &Pipeline{o: o, shape: shape, plans: map[planKey][]Action{}}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.Close())
		}
	}()
	if o.Experts != nil && c.MoELayers() > 0 {
		p.counts = make([]int64, c.Layers*c.Experts)
	}
	p.batches = make([]microBatch, mostBatches(l, o.MicroBatchRows))
	bytes := RowDataBytes(l, o.MicroBatchRows)
	if p.pinned, err = o.Machine.Alloc(device.Host, bytes, "row data, pinned"); err != nil {
		return p, fmt.Errorf("pipeline: %w", err)
	}
	if p.rows, err = o.Machine.Alloc(o.Space, bytes, "row data"); err != nil {
		return p, fmt.Errorf("pipeline: %w", err)
	}
	if p.back, err = o.Machine.Alloc(device.Host, BackBytes(c, l, o.HostLogits), "sampled ids, pinned"); err != nil {
		return p, fmt.Errorf("pipeline: %w", err)
	}
	if p.compute, err = o.Machine.NewStream(o.Space, device.StreamOptions{Name: "compute", Priority: 1}); err != nil {
		return p, fmt.Errorf("pipeline: %w", err)
	}
	if p.done, err = o.Machine.NewEvent(); err != nil {
		return p, fmt.Errorf("pipeline: %w", err)
	}
	if p.answered, err = o.Machine.NewFence("router's answers"); err != nil {
		return p, fmt.Errorf("pipeline: %w", err)
	}
	return p, nil
}

// mostBatches is the most micro-batches of a step. Sequences are not cut between
// them below a row, and none is empty: at most one per microBatchRows rows, and one
// for the rest.
func mostBatches(l models.Limits, microBatchRows int) int {
	return (l.MaxRows + microBatchRows - 1) / microBatchRows
}

// RowDataBytes is what row data takes on the device, and again in pinned memory.
func RowDataBytes(l models.Limits, microBatchRows int) int64 {
	if microBatchRows <= 0 || microBatchRows > l.MaxRows {
		microBatchRows = l.MaxRows
	}
	return models.GroupBytes(l, mostBatches(l, microBatchRows))
}

// BackBytes is the pinned memory for what comes back from a step.
func BackBytes(c *models.Config, l models.Limits, logits bool) int64 {
	n := placesOf(c, l).logits
	if logits {
		n += 4 * int64(l.MaxLogits) * int64(c.Vocab)
	}
	return n
}

// places of what comes back from a step in pinned memory, in bytes, behind the sampled
// ids: activation counts, ids of a router's choice and of a guess, log-probabilities,
// logits.
type places struct{ counts, choice, guess, chosen, topIDs, top, logits int64 }

func placesOf(c *models.Config, l models.Limits) places {
	var p places
	end := align(4 * int64(l.MaxLogits))
	place := func(at *int64, bytes int64) {
		*at = end
		end += align(bytes)
	}
	if c.MoELayers() > 0 {
		place(&p.counts, 8*int64(c.Layers)*int64(c.Experts))
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

func align(n int64) int64 { return (n + 255) / 256 * 256 }

// Compute is the stream on which steps run; nothing else may be enqueued on it
// while one does.
func (p *Pipeline) Compute() device.Stream { return p.compute }

// Step runs s to its end. An error that wraps ErrStepFailed leaves everything as
// it was before the step but for keys and values that the step computes again, and
// for activation counts.
func (p *Pipeline) Step(ctx context.Context, s *Step) (Result, error) {
	if s.Logits && !p.o.HostLogits {
		return Result{}, errors.New("pipeline: logits asked of a pipeline made without HostLogits")
	}
	n, logits, err := p.cut(s)
	if err != nil {
		return Result{}, err
	}
	rows := 0
	for i := range n {
		rows += p.batches[i].host.Rows()
	}
	if p.o.Experts != nil {
		err = p.o.Experts.Begin()
	}
	if err == nil {
		err = p.carryOut(ctx, p.plan(n, rows), n, rows)
	}
	if err == nil {
		err = p.bring(n, logits, s.Logits)
	}
	return p.finish(ctx, logits, s.Logits, err)
}

// plan of a step of so many micro-batches and rows.
func (p *Pipeline) plan(batches, rows int) []Action {
	key := planKey{microBatches: batches, chosenOnly: rows <= p.o.SmallBatchRows}
	plan, ok := p.plans[key]
	if ok {
		return plan
	}
	shape := p.shape
	shape.MicroBatches = batches
	if key.chosenOnly {
		plan = ChosenOnly(shape)
	} else {
		plan = LayerByLayer(shape)
	}
	p.plans[key] = plan
	return plan
}

// cut packs the step's sequences into micro-batches of at most MicroBatchRows
// rows. A sequence with more rows goes on in the next one, where it finds the keys
// of its earlier rows in the cache.
func (p *Pipeline) cut(s *Step) (batches, logits int, err error) {
	l := p.o.Model.Limits
	rows, adjusts := 0, 0
	p.uploaded, p.wanted = 0, p.wanted[:0]
	b := &p.batches[0]
	b.host.Reset(0, 0)
	for i := range s.Sequences {
		q := &s.Sequences[i]
		if len(q.Tokens) == 0 || q.LogitRows > len(q.Tokens) {
			return 0, 0, fmt.Errorf("pipeline: sequence %d has %d rows and wants logits of %d", i, len(q.Tokens), q.LogitRows)
		}
		if rows+len(q.Tokens) > l.MaxRows {
			return 0, 0, fmt.Errorf("pipeline: a step of more than %d rows", l.MaxRows)
		}
		if logits+q.LogitRows > l.MaxLogits {
			return 0, 0, fmt.Errorf("pipeline: logits of more than %d rows", l.MaxLogits)
		}
		if q.LogitRows > 0 {
			adjusts += len(q.Draw.Adjust)
		}
		if adjusts > l.MaxAdjust {
			return 0, 0, fmt.Errorf("pipeline: a step with more than %d adjusted tokens", l.MaxAdjust)
		}
		for from := 0; from < len(q.Tokens); {
			room := p.o.MicroBatchRows - b.host.Rows()
			if room == 0 {
				batches++
				b = &p.batches[batches]
				b.host.Reset(rows, logits)
				room = p.o.MicroBatchRows
			}
			to := min(from+room, len(q.Tokens))
			first, err := p.o.Model.Append(&b.host, models.Sequence{
				IDs: q.Tokens[from:to], Start: q.Start + from, Long: q.Long, Blocks: q.Table.Blocks(),
			})
			if err != nil {
				return 0, 0, err
			}
			for r := max(from, len(q.Tokens)-q.LogitRows); r < to; r++ {
				d := q.Draw
				d.Position = int32(q.Start + r + 1)
				if r < len(q.Tokens)-1 {
					d.Adjust = nil
				}
				if _, err := p.o.Model.Draw(&b.host, first+r-from, d); err != nil {
					return 0, 0, fmt.Errorf("pipeline: sequence %d: %w", i, err)
				}
				p.wanted = append(p.wanted, d.LogProbs)
				logits++
			}
			rows += to - from
			from = to
		}
	}
	if rows == 0 {
		return 0, 0, errors.New("pipeline: a step without rows")
	}
	return batches + 1, logits, nil
}

// carryOut enqueues the plan.
func (p *Pipeline) carryOut(ctx context.Context, plan []Action, n, rows int) error {
	m, s, kv := p.o.Model, p.compute, p.o.KV
	at := placesOf(m.Config, m.Limits)
	var use experts.Use
	var fetched []experts.Wave
	for _, a := range plan {
		var err error
		b := &p.batches[a.MicroBatch].batch
		switch a.Kind {
		case Upload:
			err = p.upload(a.MicroBatch)
		case Embed:
			err = m.Embed(s, b)
		case Resolve:
			use, err = p.o.Experts.Open(ctx, a.Layer, s)
		case Open:
			use, err = p.o.Experts.OpenLocal(ctx, a.Layer, s)
		case Prefetch:
			err = p.o.Experts.Prefetch(a.Layer)
		case Attend:
			k, v := kv.View(a.Layer)
			if err = m.PreAttention(s, a.Layer, b, k, v); err == nil {
				err = m.Attention(s, a.Layer, b, k, v)
			}
		case Route:
			err = m.PostAttention(s, a.Layer, b)
		case Ask:
			ids, _ := m.Routing(rows)
			p.choice, err = p.ask(at.choice, ids)
		case Guess:
			if err = m.Guess(s, a.Layer, rows); err == nil {
				p.guess, err = p.ask(at.guess, m.Guessed(rows))
			}
		case Shared:
			err = m.Shared(s, a.Layer, rows)
		case Experts:
			if err = p.local(a.Layer, rows, &use); err == nil {
				err = p.combine(a.Layer, rows)
			}
		case Local:
			err = p.local(a.Layer, rows, &use)
		case Choose:
			if err = p.answer(ctx, p.choice, at.choice, rows); err == nil {
				fetched, err = p.o.Experts.Choose(ctx, a.Layer, p.ids, s)
			}
		case Fetched:
			if err = p.waves(a.Layer, rows, use.Slots, fetched); err == nil {
				err = p.combine(a.Layer, rows)
			}
		case Hint:
			if err = p.answer(ctx, p.guess, at.guess, rows); err == nil {
				err = p.o.Experts.Guess(a.Layer, p.ids)
			}
		case MLP:
			err = m.MLP(s, a.Layer, rows)
		case Head:
			err = m.Head(s, b)
		}
		if err != nil {
			return fmt.Errorf("pipeline: %s: %w", a, err)
		}
	}
	return nil
}

// local groups the layer's rows by expert and runs the waves that came with its
// opening.
func (p *Pipeline) local(layer, rows int, use *experts.Use) error {
	if err := p.o.Model.Group(p.compute, layer, rows); err != nil {
		return err
	}
	return p.waves(layer, rows, use.Slots, use.Waves)
}

// waves enqueues experts, each wave behind its own copies.
func (p *Pipeline) waves(layer, rows int, slots kernels.Tensor, waves []experts.Wave) error {
	for i := range waves {
		w := &waves[i]
		if err := w.Wait(p.compute); err != nil {
			return err
		}
		if err := p.o.Model.Experts(p.compute, layer, rows, slots, w.Experts, p.o.Experts.Layout()); err != nil {
			return err
		}
	}
	return nil
}

// combine ends a layer whose experts are all enqueued.
func (p *Pipeline) combine(layer, rows int) error {
	if err := p.o.Experts.Done(layer, p.compute); err != nil {
		return err
	}
	return p.o.Model.Combine(p.compute, layer, rows)
}

// ask enqueues the way of expert ids to the host, and returns the value of answered
// that says that they are there.
func (p *Pipeline) ask(off int64, ids kernels.Tensor) (uint32, error) {
	if err := p.copyBack(off, ids); err != nil {
		return 0, err
	}
	p.answers++
	return p.answers, p.compute.Raise(p.answered, p.answers)
}

// answer waits until answered is at value, and reads the ids of so many rows.
func (p *Pipeline) answer(ctx context.Context, value uint32, off int64, rows int) error {
	if err := p.answered.Await(ctx, value); err != nil {
		return err
	}
	n := rows * p.o.Model.Config.TopK
	p.ids = slices.Grow(p.ids[:0], n)[:n]
	p.ints(p.ids, off)
	return nil
}

// upload packs a micro-batch's row data and sends it.
func (p *Pipeline) upload(i int) error {
	b := &p.batches[i]
	off, room := p.uploaded, p.pinned.Bytes()-p.uploaded
	batch, bytes, err := models.PackBatch(&b.host, p.pinned.Write(off, room), p.rows.Range(off, room).Addr)
	if err != nil {
		return err
	}
	b.batch = batch
	p.uploaded += bytes
	return p.compute.Copy(p.rows.Range(off, bytes), p.pinned.Range(off, bytes))
}

// bring enqueues the copies of what n micro-batches give, and marks their end.
func (p *Pipeline) bring(n, logits int, withLogits bool) error {
	m, all := p.o.Model, models.Batch{Logits: logits}
	at := placesOf(m.Config, m.Limits)
	if len(p.counts) > 0 {
		if err := p.copyBack(at.counts, m.Counts()); err != nil {
			return err
		}
	}
	if logits == 0 {
		return p.compute.Record(p.done)
	}
	if err := p.copyBack(0, m.Sampled(&all)); err != nil {
		return err
	}
	if withLogits {
		if err := p.copyBack(at.logits, m.Logits(&all)); err != nil {
			return err
		}
	}
	for i := range n {
		b := &p.batches[i].batch
		if !b.LogProbs {
			continue
		}
		chosen, topIDs, top := m.LogProbs(b)
		row := 4 * int64(b.FirstLogit)
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

// copyBack enqueues the copy of a dense tensor to its place in pinned memory.
func (p *Pipeline) copyBack(off int64, t kernels.Tensor) error {
	if err := p.compute.Copy(p.back.Range(off, t.Bytes()), t.Range()); err != nil {
		return fmt.Errorf("pipeline: bring results: %w", err)
	}
	return nil
}

// finish waits for the step and reads what it gave, or, where anything failed,
// clears stream and store so that the step can be run again.
func (p *Pipeline) finish(ctx context.Context, logits int, withLogits bool, err error) (Result, error) {
	if err == nil {
		err = p.done.Synchronize(ctx)
	}
	if err == nil && p.o.Experts != nil {
		err = p.o.Experts.Err()
	}
	if err != nil {
		return Result{}, p.drop(ctx, err)
	}
	if len(p.counts) > 0 {
		p.activated()
	}
	r := Result{Sampled: make([]int32, logits)}
	if logits == 0 {
		return r, nil
	}
	p.ints(r.Sampled, 0)
	c, at := p.o.Model.Config, placesOf(p.o.Model.Config, p.o.Model.Limits)
	if slices.Contains(p.wanted, true) {
		r.LogProbs = p.logProbs(at)
	}
	if withLogits {
		all := make([]float32, logits*c.Vocab)
		p.floats(all, at.logits)
		for i := range logits {
			r.Logits = append(r.Logits, all[i*c.Vocab:][:c.Vocab:c.Vocab])
		}
	}
	return r, nil
}

// activated hands the activation counts to the store.
func (p *Pipeline) activated() {
	raw := p.back.Read(placesOf(p.o.Model.Config, p.o.Model.Limits).counts, 8*int64(len(p.counts)))
	for i := range p.counts {
		p.counts[i] = int64(binary.LittleEndian.Uint64(raw[8*i:]))
	}
	p.o.Experts.Activated(p.counts)
}

// logProbs reads those of the rows that want them.
func (p *Pipeline) logProbs(at places) []LogProb {
	n := p.o.Model.Limits.TopLogProbs(p.o.Model.Config)
	rows := make([]LogProb, len(p.wanted))
	for i, wanted := range p.wanted {
		if !wanted {
			continue
		}
		var chosen [1]float32
		l := LogProb{TopIDs: make([]int32, n), Top: make([]float32, n)}
		p.floats(chosen[:], at.chosen+4*int64(i))
		p.ints(l.TopIDs, at.topIDs+4*int64(i*n))
		p.floats(l.Top, at.top+4*int64(i*n))
		l.Chosen = chosen[0]
		rows[i] = l
	}
	return rows
}

// ints and floats read what came back at a place in pinned memory.
func (p *Pipeline) ints(dst []int32, off int64) {
	raw := p.back.Read(off, 4*int64(len(dst)))
	for i := range dst {
		dst[i] = int32(binary.LittleEndian.Uint32(raw[4*i:]))
	}
}

func (p *Pipeline) floats(dst []float32, off int64) {
	kernels.ToFloat32(dst, p.back.Read(off, 4*int64(len(dst))), kernels.F32)
}

// drop clears what a failed step has left. It goes on where ctx is done already,
// since nothing may be left running on memory that will be used again. A lost device
// whose memory only held copies fails the step like a copy; without the compute device
// there is no other.
func (p *Pipeline) drop(ctx context.Context, cause error) error {
	ctx = context.WithoutCancel(ctx)
	broken := p.compute.Recover(ctx)
	var reset error
	if p.o.Experts != nil {
		reset = p.o.Experts.Reset(ctx)
	}
	if errors.Is(cause, context.Canceled) || errors.Is(cause, context.DeadlineExceeded) {
		return cause
	}
	again := false
	for _, err := range []error{cause, broken, reset} {
		switch lost := device.LostSpaces(err); {
		case slices.Contains(lost, p.o.Space), len(lost) == 0 && errors.Is(err, device.ErrLost):
			return fmt.Errorf("pipeline: %w", err)
		case len(lost) > 0, errors.Is(err, device.ErrCopyFailed):
			again = true
		}
	}
	if reset != nil {
		return fmt.Errorf("pipeline: after %w: %w", cause, reset)
	}
	if again {
		return fmt.Errorf("%w: %w", ErrStepFailed, cause)
	}
	return cause
}

// Counts reads how many rows have chosen each expert since the model's constants
// were written: [layers][experts], zero in dense layers. Rows of a step that was
// dropped count as far as it came. No step may be running.
func (p *Pipeline) Counts(ctx context.Context) ([][]int64, error) {
	t := p.o.Model.Counts()
	if t.None() {
		return nil, nil
	}
	mem, err := p.o.Machine.Alloc(device.Host, t.Bytes(), "activation counts, pinned")
	if err != nil {
		return nil, fmt.Errorf("pipeline: %w", err)
	}
	err = p.compute.Copy(mem.Range(0, t.Bytes()), t.Range())
	if err == nil {
		err = p.compute.Synchronize(ctx)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("pipeline: read activation counts: %w", err), mem.Free())
	}
	raw := mem.Read(0, t.Bytes())
	counts := make([][]int64, t.Shape[0])
	for l := range counts {
		counts[l] = make([]int64, t.Shape[1])
		for e := range counts[l] {
			counts[l][e] = int64(binary.LittleEndian.Uint64(raw[8*(l*t.Shape[1]+e):]))
		}
	}
	return counts, mem.Free()
}

// Close releases stream and buffers. No step may be running.
func (p *Pipeline) Close() error {
	var errs []error
	if p.compute != nil {
		errs = append(errs, p.compute.Close())
	}
	if p.done != nil {
		errs = append(errs, p.done.Close())
	}
	if p.answered != nil {
		errs = append(errs, p.answered.Close())
	}
	for _, m := range []device.Memory{p.pinned, p.rows, p.back} {
		if m != nil {
			errs = append(errs, m.Free())
		}
	}
	return errors.Join(errs...)
}
