package kv

import (
	"context"
	"errors"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/eval"
	"github.com/moeserve/moeserve/transfer"
)

// Load is how fast loads from one memory are.
type Load struct {
	// Seconds of one load alone, from Submit until Wait returns, and BytesPerSecond of it.
	Seconds        float64 `json:"load_s"`
	BytesPerSecond float64 `json:"load_bytes_per_s"`
	Parts
	// PlainSeconds is the time of the same copies without the engine, as the host sees them:
	// enqueued on a stream, as one batch where it has those, by a thread that then asks for their
	// end without a pause. PlainFraction is PlainSeconds over Seconds.
	PlainSeconds  float64 `json:"plain_s"`
	PlainFraction float64 `json:"plain_fraction"`
	// QueuedBytesPerSecond is the rate of QueuedLoads loads that are queued at once, as the
	// host sees it; QueuedCopyBytesPerSecond from the start of the first copy to the end of the
	// last, on the device.
	QueuedLoads              int     `json:"queued_loads"`
	QueuedBytesPerSecond     float64 `json:"queued_bytes_per_s"`
	QueuedCopyBytesPerSecond float64 `json:"queued_copy_bytes_per_s"`
	// RawBytesPerSecond is the rate of the same copies queued on a stream,
	// BatchBytesPerSecond of a batch for each load; 0 where the device has none, or a load is
	// one copy.
	RawBytesPerSecond   float64 `json:"raw_bytes_per_s"`
	BatchBytesPerSecond float64 `json:"batch_bytes_per_s,omitempty"`
	// RawFraction is QueuedBytesPerSecond over the faster one of these rates, CopyFraction
	// QueuedCopyBytesPerSecond over it.
	RawFraction  float64 `json:"raw_fraction"`
	CopyFraction float64 `json:"copy_fraction"`
}

// Parts are where the time of one load alone goes, in seconds: medians of another series of
// loads, with timed events around their chunks.
type Parts struct {
	// Queue is from Submit until the host begins to enqueue the first chunk, Launch from there
	// until the device comes to it.
	Queue  float64 `json:"queue_s"`
	Launch float64 `json:"launch_s"`
	// Copy is from there to the end of the last chunk, on the device.
	Copy float64 `json:"copy_s"`
	// Notice is from there until the host has signaled that the load is done, Wake from there
	// until the goroutine that waits goes on.
	Notice float64 `json:"notice_s"`
	Wake   float64 `json:"wake_s"`
}

// best is the faster rate of raw copies.
func (l *Load) best() float64 { return max(l.RawBytesPerSecond, l.BatchBytesPerSecond) }

// samples are the times of a cell from one source.
type samples struct {
	single, plain, queued, copied, raw, batch []time.Duration
	// parts are those of timed single loads.
	parts [5][]time.Duration
}

// point measures a cell: sources take turns.
func (r *reloads) point(ctx context.Context, c *cell) (ReloadPoint, error) {
	p := ReloadPoint{Models: c.entry.Models, EntryBytes: c.entry.Bytes, Entries: c.count, Layout: c.layout, Blocks: c.blocks, Bytes: c.bytes()}
	all, requests := make([]samples, len(r.sources)), make([][][]transfer.Piece, len(r.sources))
	for i, s := range r.sources {
		requests[i] = r.requests(c, s)
	}
	var fromFiles fileSamples
	if c.fromFiles(&r.o) {
		if err := r.openFiles(ctx, c.entry); err != nil {
			return p, err
		}
	}
	for n := range r.o.Repetitions + 1 {
		for i, s := range r.sources {
			into := &all[i]
			if n == 0 {
				into = &samples{} // the first is slower
			}
			if err := r.sample(ctx, s, requests[i], into); err != nil {
				return p, err
			}
		}
		if c.fromFiles(&r.o) {
			into := &fromFiles
			if n == 0 {
				into = &fileSamples{}
			}
			if err := r.files.sample(ctx, c, into); err != nil {
				return p, err
			}
		}
	}
	if c.fromFiles(&r.o) {
		p.File = fromFiles.load(c)
	}
	p.Host = all[0].load(c)
	if len(all) > 1 {
		p.Peer = all[1].load(c)
		p.Speedup, p.CopySpeedup, p.RawSpeedup = p.Host.Seconds/p.Peer.Seconds, p.Host.Copy/p.Peer.Copy, p.Peer.best()/p.Host.best()
		p.PlainSpeedup = p.Host.PlainSeconds / p.Peer.PlainSeconds
	}
	return p, nil
}

// load is what the samples say.
func (x *samples) load(c *cell) *Load {
	took, plain, bytes := eval.Median(x.single), eval.Median(x.plain), int64(c.loads)*c.bytes()
	l := &Load{
		Seconds: took.Seconds(), BytesPerSecond: rate(c.bytes(), took), QueuedLoads: c.loads,
		QueuedBytesPerSecond: rate(bytes, eval.Median(x.queued)), QueuedCopyBytesPerSecond: rate(bytes, eval.Median(x.copied)),
		RawBytesPerSecond: rate(bytes, eval.Median(x.raw)), PlainSeconds: plain.Seconds(), PlainFraction: plain.Seconds() / took.Seconds(),
	}
	for i, part := range []*float64{&l.Queue, &l.Launch, &l.Copy, &l.Notice, &l.Wake} {
		*part = eval.Median(x.parts[i]).Seconds()
	}
	if len(x.batch) > 0 {
		l.BatchBytesPerSecond = rate(bytes, eval.Median(x.batch))
	}
	l.RawFraction, l.CopyFraction = l.QueuedBytesPerSecond/l.best(), l.QueuedCopyBytesPerSecond/l.best()
	return l
}

// sample measures loads from a source once, in each way.
func (r *reloads) sample(ctx context.Context, s *source, requests [][]transfer.Piece, into *samples) error {
	single, _, err := load(ctx, r.engine, s, requests[:1])
	if err != nil {
		return err
	}
	plain, err := s.copyPlain(ctx, requests[0])
	if err != nil {
		return err
	}
	queued, _, err := load(ctx, r.engine, s, requests)
	if err != nil {
		return err
	}
	_, one, err := load(ctx, r.timed, s, requests[:1])
	if err != nil {
		return err
	}
	_, many, err := load(ctx, r.timed, s, requests)
	if err != nil {
		return err
	}
	raw, err := s.copyRaw(ctx, requests)
	if err != nil {
		return err
	}
	if len(requests[0]) > 1 {
		batch, err := s.copyBatches(ctx, requests)
		switch {
		case err == nil:
			into.batch = append(into.batch, batch)
		case !errors.Is(err, device.ErrNoBatches):
			return err
		}
	}
	into.single, into.queued, into.raw = append(into.single, single), append(into.queued, queued), append(into.raw, raw)
	into.plain = append(into.plain, plain)
	into.copied = append(into.copied, max(many.Landed-many.Started, 1))
	t := one.Times
	for i, part := range [...]time.Duration{t.Enqueued - t.Submitted, t.Started - t.Enqueued, t.Landed - t.Started, t.Done - t.Landed, one.woken - t.Done} {
		into.parts[i] = append(into.parts[i], max(part, 1))
	}
	return nil
}

// spanned are the times of loads together: from the first of each kind to the last.
type spanned struct {
	transfer.Times
	woken time.Duration
}

// load submits loads at once, waits for all of them, and returns how long it took, and the
// times that a timed engine has.
func load(ctx context.Context, e *transfer.Engine, s *source, requests [][]transfer.Piece) (took time.Duration, at spanned, err error) {
	tickets := make([]*transfer.Ticket, len(requests))
	began := s.machine.Now()
	for i, pieces := range requests {
		// As a server's loads: the load before with this fence has ended.
		s.landed[i].Value++
		if tickets[i], err = e.Submit(transfer.Request{
			Pieces: pieces, Priority: transfer.KVLoad, Done: s.landed[i], DoneInOrder: true, Label: transfer.Text("KV load measured"),
		}); err != nil {
			return 0, at, err
		}
	}
	for _, t := range tickets {
		if err := t.Wait(ctx); err != nil {
			return 0, at, err
		}
	}
	at.woken = s.machine.Now()
	for i, t := range tickets {
		if e.Timed() {
			x, err := t.Times()
			if err != nil {
				return 0, at, err
			}
			if i == 0 {
				at.Times = x
			}
			at.Started, at.Landed = min(at.Started, x.Started), max(at.Landed, x.Landed)
		}
		t.Release()
	}
	return max(at.woken-began, 1), at, nil
}

// copyPlain copies pieces on the stream, and returns how long it took as the host sees it.
func (s *source) copyPlain(ctx context.Context, pieces []transfer.Piece) (time.Duration, error) {
	began := s.machine.Now()
	err := device.ErrNoBatches
	if len(pieces) > 1 {
		err = copyBatch(s.raw.Stream, pieces)
	}
	if errors.Is(err, device.ErrNoBatches) {
		err = copyEach(s.raw.Stream, pieces)
	}
	if err == nil {
		err = s.raw.Stream.Record(s.copied)
	}
	if err == nil {
		err = s.await(ctx)
	}
	return max(s.machine.Now()-began, 1), err
}

// await waits until what was enqueued before copied was recorded has ended.
func (s *source) await(ctx context.Context) error {
	if s.machine.Capabilities().Emulated { // where asking again and again ends nothing
		return s.copied.Synchronize(ctx)
	}
	for ctx.Err() == nil {
		if over, err := s.copied.Query(); over || err != nil {
			return err
		}
	}
	return ctx.Err()
}

// copyRaw copies pieces on the stream, and returns how long it took on the device.
func (s *source) copyRaw(ctx context.Context, requests [][]transfer.Piece) (time.Duration, error) {
	lanes := []*eval.Lane{s.raw}
	err := eval.Enqueue(lanes, 1, func(int, int) error {
		for _, pieces := range requests {
			if err := copyEach(s.raw.Stream, pieces); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return 0, err
	}
	return eval.Span(ctx, lanes)
}

// copyEach enqueues each piece by itself.
func copyEach(on device.Stream, pieces []transfer.Piece) error {
	for i := range pieces {
		if err := on.Copy(pieces[i].Dst.Range, pieces[i].Src.Range); err != nil {
			return err
		}
	}
	return nil
}

// copyBatches copies pieces on the stream by one operation for each load, and returns how long
// it took on the device.
func (s *source) copyBatches(ctx context.Context, requests [][]transfer.Piece) (time.Duration, error) {
	lanes := []*eval.Lane{s.raw}
	if err := eval.Enqueue(lanes, len(requests), func(_, i int) error { return copyBatch(s.raw.Stream, requests[i]) }); err != nil {
		return 0, err
	}
	return eval.Span(ctx, lanes)
}
