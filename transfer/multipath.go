package transfer

import (
	"cmp"
	"errors"
	"fmt"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/transfer/dispatch"
)

// Multipath is how copies between the host and a GPU use relays; it has no effect before
// Engine.AddRelay.
type Multipath struct {
	// ChunkIn and ChunkOut are the maximum sizes of chunks of copies from and to the host that relays
	// carry too, in bytes. Relays' buffers that are smaller are what limits their own chunks. Default: 8 MiB.
	ChunkIn, ChunkOut int64
	// ThresholdIn and ThresholdOut are the numbers of bytes that wait for a GPU's own link, in one
	// request or in several, from which on relays carry some. Default: 11.3 and 13 MB; -1: never.
	ThresholdIn, ThresholdOut int64
	// Depth is the number of chunks in flight on each link with the host. Default: Options.Depth.
	Depth int
	// Wait: a relay whose link others use, too, leaves chunks to other links for a while.
	// Default: it takes what it can.
	Wait bool
	// Preferred is the GPU whose copies are relayed before others of their priority. Default: that
	// for which most waits.
	Preferred device.Space
	// NoDirectFirst: a GPU's own copies have no precedence on its link over others' of their priority that are
	// relayed: that goes first of which most waits. To measure what the precedence is worth. Default: they have it.
	NoDirectFirst bool
}

const (
	defaultRelayChunk   = 8 << 20
	defaultThresholdIn  = 11_300_000
	defaultThresholdOut = 13_000_000
	// minRelayedPiece is the mean size of pieces below which the copy kernel, where there is one,
	// is preferred to relays: copy engines need partTime for each piece, on every link.
	minRelayedPiece = 64 << 10
)

func (p Multipath) ensureDefaults(depth int) Multipath {
	p.ChunkIn = cmp.Or(p.ChunkIn, defaultRelayChunk)
	p.ChunkOut = cmp.Or(p.ChunkOut, defaultRelayChunk)
	p.ThresholdIn = cmp.Or(p.ThresholdIn, defaultThresholdIn)
	p.ThresholdOut = cmp.Or(p.ThresholdOut, defaultThresholdOut)
	p.Depth = cmp.Or(p.Depth, depth)
	return p
}

func (p *Multipath) validate() error {
	switch {
	case p.ChunkIn < 1 || p.ChunkOut < 1:
		return fmt.Errorf("transfer: relayed chunks of %d and %d bytes: must be at least 1", p.ChunkIn, p.ChunkOut)
	case p.Depth < 1:
		return fmt.Errorf("transfer: invalid depth %d of links with relays: must be at least 1", p.Depth)
	case p.Preferred < 0:
		return fmt.Errorf("transfer: invalid preferred GPU %d", p.Preferred)
	}
	return nil
}

// describe completes the description of a link with the host.
func (p *Multipath) describe(d *dispatch.Link, pair device.Pair, rate float64) {
	d.BytesPerSecond = rate
	switch {
	case pair.From == device.Host && pair.To != device.Host:
		d.Depth, d.RelayFrom, d.RelayChunkBytes = p.Depth, max(0, p.ThresholdIn), p.ChunkIn
	case pair.To == device.Host && pair.From != device.Host:
		d.Depth, d.RelayFrom, d.RelayChunkBytes = p.Depth, max(0, p.ThresholdOut), p.ChunkOut
	}
}

// Relay is a GPU through whose memory copies between the host and other GPUs go, over its own
// PCIe link.
type Relay struct {
	GPU device.Space
	// In and Out are buffers in its memory for copies from and to the host, of which all in one
	// direction have one size: Multipath.ChunkIn or ChunkOut is best. With two of each a link waits
	// where the host needs more than 40 us to learn of the end of a copy; three are better. Without
	// buffers in one direction nothing is relayed in that direction. They belong to the engine until the
	// point that RemoveRelay returns is reached.
	In, Out []device.Region
}

// relay is the relay of one link with the host.
type relay struct {
	link    *link
	gpu     device.Space
	buffers []device.Range
	// hops connect the buffers with other GPUs.
	hops []*link
	// removed is signaled when the relay, which was removed, is drained; both directions share it.
	removed *removal
}

// removal is the removal of a GPU's relays, of which left are not drained.
type removal struct {
	end  device.Point
	left int
}

// AddRelay lets copies between the host and other GPUs go through a GPU's memory, too. A relay that
// was removed may be added again when its point is reached. An error changes nothing.
func (e *Engine) AddRelay(r Relay) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if err := e.addRelay(&r); err != nil {
		return fmt.Errorf("transfer: add %s as a relay: %w", r.GPU, err)
	}
	return nil
}

func (e *Engine) addRelay(r *Relay) error {
	if e.closed {
		return device.ErrClosed
	}
	if err := r.validate(e.o.Machine); err != nil {
		return err
	}
	in, out := device.Pair{From: device.Host, To: r.GPU}, device.Pair{From: r.GPU, To: device.Host}
	for _, pair := range []device.Pair{in, out} {
		if b := e.relays[pair]; b != nil && (b.removed == nil || b.removed.left > 0) {
			return errors.New("it is one already, or its buffers are still in use: remove it, and wait for the point")
		}
	}
	// What can fail comes first, so that no chunk is in the buffers after an error.
	if err := e.prepareDirection(in, r.In); err != nil {
		return err
	}
	if err := e.prepareDirection(out, r.Out); err != nil {
		return err
	}
	e.tick()
	if err := errors.Join(e.addDirection(in, r.In), e.addDirection(out, r.Out)); err != nil {
		return err
	}
	return e.doActions()
}

// prepareDirection makes what the relay of a pair's link needs beside so many buffers.
func (e *Engine) prepareDirection(pair device.Pair, buffers []device.Region) error {
	if len(buffers) == 0 {
		return nil
	}
	l, err := e.link(pair)
	if err != nil {
		return err
	}
	if l.relay == nil {
		gpu := pair.From
		if gpu == device.Host {
			gpu = pair.To
		}
		l.relay = &relay{link: l, gpu: gpu, removed: &removal{}}
		if e.relays == nil {
			e.relays = map[device.Pair]*relay{}
		}
		e.relays[pair] = l.relay
	}
	for _, h := range l.relay.hops {
		if err := h.addSlots(len(buffers)); err != nil {
			return err
		}
	}
	l.relay.buffers = l.relay.buffers[:0]
	for _, r := range buffers {
		l.relay.buffers = append(l.relay.buffers, r.Range)
	}
	for _, o := range e.links {
		if err := e.addHop(l.relay, o); err != nil {
			return err
		}
	}
	return nil
}

// addDirection makes the link of a pair, which is prepared, a relay through these buffers.
func (e *Engine) addDirection(pair device.Pair, buffers []device.Region) error {
	if len(buffers) == 0 {
		return nil
	}
	b := e.relays[pair]
	if err := e.core.AddRelay(dispatch.Relay{Link: b.link.number, Buffers: len(buffers), BufferBytes: buffers[0].Bytes}); err != nil {
		return err
	}
	b.removed, b.link.stats.Retired = nil, false
	return nil
}

// addHop connects a relay with the GPU of a link with the host in the same direction, unless it is
// the relay's own, is connected already, or there is no path.
func (e *Engine) addHop(b *relay, o *link) error {
	pair := device.Pair{From: b.gpu, To: o.pair.To}
	if b.link.pair.From != device.Host {
		pair = device.Pair{From: o.pair.From, To: b.gpu}
	}
	inbound := b.link.pair.From == device.Host
	if o.hop || o == b.link || inbound != (o.pair.From == device.Host) || inbound == (o.pair.To == device.Host) || pair.From == pair.To {
		return nil
	}
	for _, h := range b.hops {
		if h.pair == pair {
			return nil
		}
	}
	path, err := e.o.Machine.Topology().Path(pair.From, pair.To)
	if errors.Is(err, device.ErrUnreachable) {
		return nil
	}
	if err != nil {
		return err
	}
	d := e.o.dispatched(pair, path.BytesPerSecond)
	h, err := newHop(e, b, pair, d)
	if err != nil {
		return err
	}
	if h.number, err = e.core.AddHop(b.link.number, d); err != nil {
		return errors.Join(err, h.release())
	}
	e.links, b.hops = append(e.links, h), append(b.hops, h)
	return nil
}

// connect connects all relays with the GPU of a new link. Without those for which that fails, since they
// are lost, the link copies all the same.
func (e *Engine) connect(l *link) {
	for _, b := range e.relays {
		if err := e.addHop(b, l); err != nil {
			e.o.Log.Warn("a relay carries nothing for a link", "relay", b.gpu.String(), "path", fmt.Sprintf("%s to %s", l.pair.From, l.pair.To), "err", err)
		}
	}
}

// RemoveRelay ends the use of a relay: no further chunk takes it. The point is reached when its
// buffers are not in use.
func (e *Engine) RemoveRelay(gpu device.Space) (device.Point, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return device.Point{}, fmt.Errorf("transfer: remove the relay %s: %w", gpu, device.ErrClosed)
	}
	pairs := []device.Pair{{From: device.Host, To: gpu}, {From: gpu, To: device.Host}}
	for _, pair := range pairs {
		if b := e.relays[pair]; b != nil && b.removed != nil && b.removed.left > 0 {
			return b.removed.end, nil
		}
	}
	left := 0
	for _, pair := range pairs {
		if b := e.relays[pair]; b != nil && b.removed == nil {
			left++
		}
	}
	if left == 0 {
		return device.Point{}, fmt.Errorf("transfer: remove the relay %s: it is none", gpu)
	}
	end, err := e.endPoint()
	if err != nil {
		return device.Point{}, fmt.Errorf("transfer: remove the relay %s: %w", gpu, err)
	}
	e.tick()
	r := &removal{end: end}
	for _, pair := range pairs {
		e.removeDirection(pair, r)
	}
	return end, e.doActions()
}

func (e *Engine) removeDirection(pair device.Pair, r *removal) {
	if b := e.relays[pair]; b != nil && b.removed == nil {
		r.left++
		b.removed = r
		e.core.RemoveRelay(b.link.number)
	}
}

// drained notes that the relay of a link is not used any longer.
func (e *Engine) drained(l *link) error {
	r := l.relay.removed
	if r.left--; r.left > 0 || r.end.None() {
		return nil
	}
	err := r.end.Fence.Signal(r.end.Value)
	e.releaseDoneFence(r.end)
	return err
}

// retired reports a relay, or a hop of one, that is used no longer.
func (e *Engine) retired(l *link, err error) {
	at := l
	if l.hop {
		at = l.relay.link
	}
	at.stats.Retired = true
	e.o.Log.Warn("a relay is no longer used; copies take other links", "relay", l.relay.gpu.String(), "path", fmt.Sprintf("%s to %s", l.pair.From, l.pair.To), "err", err)
}

// tick tells the core the time, which only relays need.
func (e *Engine) tick() {
	if len(e.relays) > 0 {
		e.core.At(e.o.Machine.Now())
	}
}

// shares reports whether relays could carry chunks of a request, were it large enough.
func (e *Engine) shares(l *link, bytes int64) bool {
	if len(e.relays) == 0 {
		return false
	}
	from := max(e.o.Multipath.ThresholdOut, 0)
	if l.pair.From == device.Host {
		from = max(e.o.Multipath.ThresholdIn, 0)
	}
	if from == 0 || bytes < from {
		return false
	}
	for _, b := range e.relays {
		if b.removed != nil {
			continue
		}
		for _, h := range b.hops {
			if b.link.pair.From == device.Host && l.pair.From == device.Host && h.pair.To == l.pair.To ||
				b.link.pair.To == device.Host && l.pair.To == device.Host && h.pair.From == l.pair.From {
				return true
			}
		}
	}
	return false
}

func (r *Relay) validate(m device.Machine) error {
	if _, ok := r.GPU.GPU(); !ok {
		return errors.New("only a GPU can be one")
	}
	if len(r.In)+len(r.Out) == 0 {
		return errors.New("it has no buffers")
	}
	var before []device.Region
	for _, buffers := range [][]device.Region{r.In, r.Out} {
		for i, b := range buffers {
			if b.Bytes < 1 || b.Bytes != buffers[0].Bytes {
				return fmt.Errorf("buffer %v has %d bytes: all in one direction have one size, at least 1", b, b.Bytes)
			}
			if b.Space != r.GPU {
				return fmt.Errorf("buffer %v is not in its memory", b)
			}
			if err := checkSpace(m, "buffer", b); err != nil {
				return err
			}
			for _, o := range append(before, buffers[:i]...) {
				if b.Addr < o.End() && o.Addr < b.End() {
					return fmt.Errorf("buffers %v and %v overlap", o, b)
				}
			}
		}
		before = append(before, buffers...)
	}
	return nil
}
