package pipeline

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/models"
)

// ErrStepFailed marks an error of Step after which the same step may be run
// again: a copy failed, or the stream was put into error by one.
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
	// Temperature, Seed and Sample say how a token is drawn: see kernels.Sample.
	Temperature float32
	Seed        uint64
	Sample      int32
}

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
	// Logits, a row of the vocabulary's size per logit row, where asked for.
	Logits [][]float32
}

// Pipeline carries steps out on one compute stream. One goroutine uses it.
type Pipeline struct {
	o       Options
	compute device.Stream
	done    device.Event
	shape   Shape

	// Row data goes through pinned memory to its place on the device: one area per
	// micro-batch of a step.
	pinned, rows device.Memory
	area         int64
	// back is where sampled ids (and behind them, logits) land in pinned memory.
	back device.Memory

	batches []microBatch
	// plans by number of micro-batches.
	plans map[int][]Action
}

// microBatch is one of a step's: what the host packed, and where it is.
type microBatch struct {
	host  models.HostBatch
	batch models.Batch
	bytes int64
}

// New takes its buffers and its stream.
func New(o Options) (_ *Pipeline, err error) {
	l := o.Model.Limits
	if o.MicroBatchRows <= 0 || o.MicroBatchRows > l.MaxRows {
		o.MicroBatchRows = l.MaxRows
	}
	p := &Pipeline{o: o, area: align(models.BatchBytes(l)), plans: map[int][]Action{}}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.Close())
		}
	}()
	c := o.Model.Config
	for _, dense := range c.Dense {
		p.shape.MoE = append(p.shape.MoE, !dense)
	}
	p.shape.SharedExpert = c.SharedWidth > 0

	// Sequences are not cut between micro-batches below a row, and no micro-batch
	// is empty: at most one per MicroBatchRows rows, and one for the rest.
	most := (l.MaxRows + o.MicroBatchRows - 1) / o.MicroBatchRows
	p.batches = make([]microBatch, most)
	if p.pinned, err = o.Machine.Alloc(device.Host, p.area*int64(most), "row data, pinned"); err != nil {
		return p, fmt.Errorf("pipeline: %w", err)
	}
	if p.rows, err = o.Machine.Alloc(o.Space, p.area*int64(most), "row data"); err != nil {
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
	return p, nil
}

// RowDataBytes is what row data takes on the device, and again in pinned memory.
func RowDataBytes(l models.Limits, microBatchRows int) int64 {
	if microBatchRows <= 0 || microBatchRows > l.MaxRows {
		microBatchRows = l.MaxRows
	}
	return align(models.BatchBytes(l)) * int64((l.MaxRows+microBatchRows-1)/microBatchRows)
}

// BackBytes is the pinned memory for what comes back from a step.
func BackBytes(c *models.Config, l models.Limits, logits bool) int64 {
	n := align(4 * int64(l.MaxLogits))
	if logits {
		n += 4 * int64(l.MaxLogits) * int64(c.Vocab)
	}
	return n
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
	plan, ok := p.plans[n]
	if !ok {
		shape := p.shape
		shape.MicroBatches = n
		plan = LayerByLayer(shape)
		p.plans[n] = plan
	}
	rows := 0
	for i := range n {
		rows += p.batches[i].host.Rows()
	}
	err = p.carryOut(ctx, plan, n, rows)
	if err == nil {
		err = p.bring(logits, s.Logits)
	}
	return p.finish(ctx, logits, s.Logits, err)
}

// cut packs the step's sequences into micro-batches of at most MicroBatchRows
// rows. A sequence with more rows goes on in the next one, where it finds the keys
// of its earlier rows in the cache.
func (p *Pipeline) cut(s *Step) (batches, logits int, err error) {
	l := p.o.Model.Limits
	rows := 0
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
				b.host.Draw(first+r-from, models.Draw{
					Temperature: q.Temperature, Seed: q.Seed, Sample: q.Sample, Position: int32(q.Start + r + 1),
				})
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
	var use experts.Use
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
		case Prefetch:
			err = p.o.Experts.Prefetch(a.Layer)
		case Attend:
			k, v := kv.View(a.Layer)
			if err = m.PreAttention(s, a.Layer, b, k, v); err == nil {
				err = m.Attention(s, a.Layer, b, k, v)
			}
		case Route:
			err = m.PostAttention(s, a.Layer, b)
		case Shared:
			err = m.Shared(s, a.Layer, rows)
		case Experts:
			err = p.experts(a.Layer, rows, &use)
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

func (p *Pipeline) experts(layer, rows int, use *experts.Use) error {
	m, s := p.o.Model, p.compute
	if err := m.Group(s, layer, rows); err != nil {
		return err
	}
	for i := range use.Waves {
		w := &use.Waves[i]
		if err := w.Wait(s); err != nil {
			return err
		}
		if err := m.Experts(s, layer, rows, use.Slots, w.Experts, p.o.Experts.Layout()); err != nil {
			return err
		}
	}
	if err := p.o.Experts.Done(layer, s); err != nil {
		return err
	}
	return m.Combine(s, layer, rows)
}

// upload packs a micro-batch's row data and sends it.
func (p *Pipeline) upload(i int) error {
	b := &p.batches[i]
	off := int64(i) * p.area
	var err error
	b.batch, b.bytes, err = models.PackBatch(&b.host, p.pinned.Write(off, p.area), p.rows.Range(off, p.area).Addr)
	if err != nil {
		return err
	}
	return p.compute.Copy(p.rows.Range(off, b.bytes), p.pinned.Range(off, b.bytes))
}

// bring enqueues the copies of what the step gives, and marks its end.
func (p *Pipeline) bring(logits int, withLogits bool) error {
	if logits > 0 {
		all := models.Batch{Logits: logits}
		ids := p.o.Model.Sampled(&all)
		if err := p.compute.Copy(p.back.Range(0, ids.Bytes()), ids.Range()); err != nil {
			return fmt.Errorf("pipeline: bring sampled ids: %w", err)
		}
		if withLogits {
			x := p.o.Model.Logits(&all)
			if err := p.compute.Copy(p.back.Range(p.logitsAt(), x.Bytes()), x.Range()); err != nil {
				return fmt.Errorf("pipeline: bring logits: %w", err)
			}
		}
	}
	return p.compute.Record(p.done)
}

func (p *Pipeline) logitsAt() int64 { return align(4 * int64(p.o.Model.Limits.MaxLogits)) }

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
	r := Result{Sampled: make([]int32, logits)}
	if logits == 0 {
		return r, nil
	}
	raw := p.back.Read(0, 4*int64(logits))
	for i := range r.Sampled {
		r.Sampled[i] = int32(binary.LittleEndian.Uint32(raw[4*i:]))
	}
	if withLogits {
		v := p.o.Model.Config.Vocab
		raw = p.back.Read(p.logitsAt(), 4*int64(logits)*int64(v))
		for i := range logits {
			row := make([]float32, v)
			for j := range row {
				row[j] = math.Float32frombits(binary.LittleEndian.Uint32(raw[4*(i*v+j):]))
			}
			r.Logits = append(r.Logits, row)
		}
	}
	return r, nil
}

// drop clears what a failed step has left. It goes on where ctx is done already,
// since nothing may be left running on memory that will be used again.
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
	for _, err := range []error{cause, broken, reset} {
		if errors.Is(err, device.ErrLost) {
			return fmt.Errorf("pipeline: %w", err)
		}
	}
	if reset != nil {
		return fmt.Errorf("pipeline: after %w: %w", cause, reset)
	}
	if errors.Is(cause, device.ErrCopyFailed) || errors.Is(broken, device.ErrCopyFailed) {
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
	for _, m := range []device.Memory{p.pinned, p.rows, p.back} {
		if m != nil {
			errs = append(errs, m.Free())
		}
	}
	return errors.Join(errs...)
}
