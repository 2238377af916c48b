package pipeline

import (
	"errors"
	"fmt"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/forward"
)

// microBatch is one of a step's: what the host packed, and where it is.
type microBatch struct {
	host  forward.HostBatch
	batch forward.Batch
	// group it belongs to; row and logit are its first of the step, not of the group.
	group      int
	row, logit int
	// onHost is what attention needs of batch, in pinned memory; chain is its last
	// turn there, sent the event behind what came to the host for it, and attended that
	// behind its work.
	onHost         forward.AttentionMetadata
	chain          uint32
	sent, attended device.Event
}

// group is a merge group of a step: so many rows and logit rows; logit is the first of all
// groups' logit rows.
type group struct{ rows, logits, logit int }

func (g *group) span() forward.Span { return forward.Span{Rows: g.rows} }

// batcher cuts steps into micro-batches, and these into merge groups.
type batcher struct {
	cutting cutting
	limits  forward.Limits
	// rounds says that decode steps are made to look as others do, for graphs.
	rounds bool

	all    []microBatch
	groups []group
	// n of all are the step's.
	n int
	// decode says that each of the step's sequences has one row.
	decode bool
	// wanted says of each logit row of the step whether log-probabilities are asked.
	wanted []bool
}

func newBatcher(o *Options, batch func() forward.HostBatch) *batcher {
	c := o.cutting()
	b := &batcher{cutting: c, limits: o.Limits, all: make([]microBatch, c.most(o.Limits.MaxTokens)), groups: make([]group, c.groups)}
	for i := range b.all {
		b.all[i].host = batch()
	}
	return b
}

// step are the step's micro-batches.
func (b *batcher) step() []microBatch { return b.all[:b.n] }

// rowsOf checks a step and counts its rows.
func (b *batcher) rowsOf(s *Step) (rows int, err error) {
	l := b.limits
	logits, adjusts := 0, 0
	for i := range s.Sequences {
		q := &s.Sequences[i]
		if len(q.Tokens) == 0 || q.LogitRows > len(q.Tokens) {
			return 0, fmt.Errorf("pipeline: sequence %d has %d rows and wants logits of %d", i, len(q.Tokens), q.LogitRows)
		}
		rows += len(q.Tokens)
		logits += q.LogitRows
		if q.LogitRows > 0 {
			adjusts += len(q.Draw.Adjust)
		}
	}
	switch {
	case rows == 0:
		return 0, errors.New("pipeline: a step without rows")
	case rows > l.MaxTokens:
		return 0, fmt.Errorf("pipeline: a step of more than %d rows", l.MaxTokens)
	case logits > l.MaxLogits:
		return 0, fmt.Errorf("pipeline: logits of more than %d rows", l.MaxLogits)
	case adjusts > l.MaxAdjust:
		return 0, fmt.Errorf("pipeline: a step with more than %d adjusted tokens", l.MaxAdjust)
	}
	return rows, nil
}

// cut packs the sequences of a step of so many rows into micro-batches, and these into
// the groups of its shape. A sequence that does not fit goes on in the next micro-batch,
// where it finds the keys of its earlier rows in the cache: of the micro-batches of a layer
// the earlier attend first.
func (b *batcher) cut(s *Step, total int, shape *Shape) error {
	var each int
	b.n, each = b.cutting.of(total)
	b.decode = total == len(s.Sequences)
	clear(b.groups)
	b.wanted = b.wanted[:0]
	rows, at := 0, -1
	var mb *microBatch
	var g *group
	for i := range s.Sequences {
		q := &s.Sequences[i]
		for from := 0; from < len(q.Tokens); {
			if at < 0 || mb.host.Rows() == each {
				at++
				mb = &b.all[at]
				mb.group, mb.row, mb.logit = shape.group(at), rows, len(b.wanted)
				g = &b.groups[mb.group]
				if g.rows == 0 {
					g.logit = mb.logit
				}
				mb.host.Reset(g.rows, g.logits)
			}
			to := min(from+each-mb.host.Rows(), len(q.Tokens))
			first, err := mb.host.Append(&forward.Sequence{
				IDs: q.Tokens[from:to], Start: q.Start + from, Long: q.Long, Blocks: q.Table.Blocks(),
			})
			if err != nil {
				return err
			}
			for r := max(from, len(q.Tokens)-q.LogitRows); r < to; r++ {
				d := q.Draw
				d.Position = int32(q.Start + r + 1)
				if r < len(q.Tokens)-1 {
					d.Adjust = nil
				}
				if _, err := mb.host.Draw(first+r-from, &d); err != nil {
					return fmt.Errorf("pipeline: sequence %d: %w", i, err)
				}
				b.wanted = append(b.wanted, d.LogProbs)
				g.logits++
			}
			rows += to - from
			g.rows += to - from
			from = to
		}
	}
	if b.rounds && b.decode {
		for i := range b.step() {
			h := &b.all[i].host
			h.Widen(roundContext(h.MaxContext()))
		}
	}
	return nil
}

// stepMetadata is where micro-batches' row data lies on the device, and the pinned memory that
// it goes there through, at the same places: that of a step's micro-batches one behind
// another, used bytes so far.
type stepMetadata struct {
	pinned, device device.Memory
	used           int64
}

func newStepMetadata(o *Options) (d *stepMetadata, err error) {
	d = &stepMetadata{}
	bytes := o.StepMetadataBytes(o.Limits)
	if d.pinned, err = o.Machine.Alloc(device.Host, bytes, "row data, pinned"); err != nil {
		return d, err
	}
	d.device, err = o.Machine.Alloc(o.space(), bytes, "row data")
	return d, err
}

// upload packs a micro-batch's row data and sends it.
func (d *stepMetadata) upload(s device.Stream, b *microBatch) error {
	off, room := d.used, d.pinned.Bytes()-d.used
	base := d.device.Range(off, room).Addr
	batch, bytes, err := b.host.Pack(d.pinned.Write(off, room), base)
	if err != nil {
		return err
	}
	b.batch, b.onHost = batch, batch.Attention.Moved(base, d.pinned.Range(off, room).Addr)
	d.used += bytes
	return s.Copy(d.device.Range(off, bytes), d.pinned.Range(off, bytes))
}

func (d *stepMetadata) close() error { return errors.Join(free(d.pinned), free(d.device)) }

func free(m device.Memory) error {
	if m == nil {
		return nil
	}
	return m.Free()
}
