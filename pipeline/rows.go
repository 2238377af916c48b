package pipeline

import (
	"errors"
	"fmt"

	"github.com/moeserve/moeserve/configs"
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

// group is what runs a layer's experts together: some of a step's micro-batches, on a
// model of their own.
type group struct {
	model *forward.Model
	// attention is the device's, nil where the host attends.
	attention *forward.Attention
	// rows and logits of the step; logit is the first of all groups' logit rows.
	rows, logits, logit int
}

func (g *group) span() forward.Span { return forward.Span{Rows: g.rows} }

// mostBatches is the most micro-batches of a step of up to so many rows.
func (o *Options) mostBatches(rows int) int {
	size, groups := o.MicroBatchRows, o.Groups()
	if size <= 0 || size > rows {
		size = rows
	}
	n := max((rows+size-1)/size, o.MicroBatches)
	return min((n+groups-1)/groups*groups, rows)
}

// batches is into how many micro-batches so many rows are cut, and how many rows each
// has: as even as can be, none empty, and as many in each group as in the others, or
// one less.
func (o *Options) batches(rows int) (n, each int) {
	each = (rows + o.mostBatches(rows) - 1) / o.mostBatches(rows)
	return (rows + each - 1) / each, each
}

// RowDataBytes is what row data takes on the device, and again in pinned memory.
func (o Options) RowDataBytes(l forward.Limits) int64 {
	return forward.GroupBytes(l, o.mostBatches(l.MaxRows))
}

// GroupLimits are the limits of each group's model, for steps of limits l.
func (o Options) GroupLimits(l forward.Limits) forward.Limits {
	if o.Groups() > 1 {
		// Half of the micro-batches, each of which has up to a row more than its share.
		l.MaxRows = min(l.MaxRows, (l.MaxRows+o.mostBatches(l.MaxRows)+1)/2)
		l.MaxSeqs, l.MaxLogits = min(l.MaxSeqs, l.MaxRows), min(l.MaxLogits, l.MaxRows)
	}
	return l
}

// Groups is how many merge groups a step has: two where the host attends while the
// device runs experts over many rows, so that each has something to do while the other
// works.
func (o *Options) Groups() int {
	if o.HostAttention != nil && o.Grouping == configs.PerLayer {
		return 2
	}
	return 1
}

// rowsOf checks a step and counts its rows.
func (p *Pipeline) rowsOf(s *Step) (rows int, err error) {
	l := p.o.Limits
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
	case rows > l.MaxRows:
		return 0, fmt.Errorf("pipeline: a step of more than %d rows", l.MaxRows)
	case logits > l.MaxLogits:
		return 0, fmt.Errorf("pipeline: logits of more than %d rows", l.MaxLogits)
	case adjusts > l.MaxAdjust:
		return 0, fmt.Errorf("pipeline: a step with more than %d adjusted tokens", l.MaxAdjust)
	}
	return rows, nil
}

// cut packs the step's sequences into micro-batches, and these into groups. A sequence
// that does not fit goes on in the next micro-batch, where it finds the keys of its
// earlier rows in the cache: of the micro-batches of a layer the earlier attend first.
func (p *Pipeline) cut(s *Step) (shape Shape, err error) {
	total, err := p.rowsOf(s)
	if err != nil {
		return shape, err
	}
	shape, p.chosenOnly, p.decode = p.shape, total <= p.o.SmallBatchRows, total == len(s.Sequences)
	n, each := p.o.batches(total)
	shape.MicroBatches, p.cutInto = n, n
	shape.Groups = min(len(p.groups), n)
	if p.chosenOnly {
		shape.Groups = 1
	}
	for i := range p.groups {
		p.groups[i].rows, p.groups[i].logits, p.groups[i].logit = 0, 0, 0
	}
	p.uploaded, p.wanted = 0, p.wanted[:0]
	rows, at := 0, -1
	var b *microBatch
	var g *group
	for i := range s.Sequences {
		q := &s.Sequences[i]
		for from := 0; from < len(q.Tokens); {
			if at < 0 || b.host.Rows() == each {
				at++
				b = &p.batches[at]
				b.group, b.row, b.logit = shape.group(at), rows, len(p.wanted)
				g = &p.groups[b.group]
				if g.rows == 0 {
					g.logit = b.logit
				}
				b.host.Reset(g.rows, g.logits)
			}
			to := min(from+each-b.host.Rows(), len(q.Tokens))
			first, err := b.host.Append(&forward.Sequence{
				IDs: q.Tokens[from:to], Start: q.Start + from, Long: q.Long, Blocks: q.Table.Blocks(),
			})
			if err != nil {
				return shape, err
			}
			for r := max(from, len(q.Tokens)-q.LogitRows); r < to; r++ {
				d := q.Draw
				d.Position = int32(q.Start + r + 1)
				if r < len(q.Tokens)-1 {
					d.Adjust = nil
				}
				if _, err := b.host.Draw(first+r-from, &d); err != nil {
					return shape, fmt.Errorf("pipeline: sequence %d: %w", i, err)
				}
				p.wanted = append(p.wanted, d.LogProbs)
				g.logits++
			}
			rows += to - from
			g.rows += to - from
			from = to
		}
	}
	p.round()
	return shape, nil
}

// stepRows of all groups.
func (p *Pipeline) stepRows() (n int) {
	for i := range p.groups {
		n += p.groups[i].rows
	}
	return n
}

// upload packs a micro-batch's row data and sends it.
func (p *Pipeline) upload(i int) error {
	b := &p.batches[i]
	off, room := p.uploaded, p.pinned.Bytes()-p.uploaded
	base := p.rows.Range(off, room).Addr
	batch, bytes, err := b.host.Pack(p.pinned.Write(off, room), base)
	if err != nil {
		return err
	}
	b.batch, b.onHost = batch, batch.Attention.Moved(base, p.pinned.Range(off, room).Addr)
	p.uploaded += bytes
	return p.compute.Copy(p.rows.Range(off, bytes), p.pinned.Range(off, bytes))
}
