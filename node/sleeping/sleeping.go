package sleeping

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/transfer"
)

// Level is what becomes of the weights.
type Level int

const (
	// Awake: nothing is suspended.
	Awake Level = iota
	// Copy: weights that only the GPU has are copied to host memory.
	Copy
	// Drop: weights are in no memory, and loaded again.
	Drop
)

// Tag names a part of the memory.
type Tag string

// The tags have vLLM's names.
const (
	Weights Tag = "weights"
	KVCache Tag = "kv_cache"
)

// Contents are the memories of a model, and what is in them.
type Contents struct {
	// Weights has the GPU's memory of weights, activations and metadata, KV that of the KV cache.
	Weights, KV []device.Memory
	// Host is memory of experts in host memory, which is suspended where weights are dropped.
	Host []device.Memory
	// Alone are weights that only the GPU's memory has.
	Alone []device.Region
	// Lasting is content that is copied at any level.
	Lasting []device.Region
	// Copied bring back what host memory has, too.
	Copied []transfer.Piece
}

// Options of a Sleeper.
type Options struct {
	Machine  device.Machine
	Transfer *transfer.Engine
	// Release gives the host's memory for copies back after each wake. Otherwise the next sleep
	// has it at once: pinning memory takes longer than a copy to it.
	Release bool
}

// Times are how long the parts of a Sleep or a Wake took.
type Times struct {
	// Total is that of the whole, Copies of the copies, Pin of the allocation of host memory, Map
	// of giving the memory back or getting it, and Load of loading weights again.
	Total, Copies, Pin, Map, Load time.Duration
	// Bytes were copied, Freed were given back or gotten in the GPU.
	Bytes, Freed int64
}

// Sleeper sleeps and wakes the memory of one model. One goroutine at a time uses it.
type Sleeper struct {
	o Options
	// weights and lasting are the host's copies; nil: there is no memory for them.
	weights, lasting device.Memory
	done             device.Point

	level Level
	c     Contents
	// asleep are the tags that are suspended.
	asleep map[Tag]bool
}

// New makes a sleeper of a model that is awake.
func New(o Options) *Sleeper { return &Sleeper{o: o, asleep: map[Tag]bool{}} }

// Level is the present one. Awake: no memory is suspended.
func (s *Sleeper) Level() Level { return s.level }

// Asleep reports whether the memory of a tag is suspended.
func (s *Sleeper) Asleep(t Tag) bool { return s.asleep[t] }

// HostBytes is the host memory that the sleeper has allocated.
func (s *Sleeper) HostBytes() (n int64) {
	for _, m := range []device.Memory{s.weights, s.lasting} {
		if m != nil {
			n += m.Bytes()
		}
	}
	return n
}

// Reserve allocates the host memory for a sleep at level Copy.
func (s *Sleeper) Reserve(c Contents) error {
	if err := s.reserve(&s.lasting, c.Lasting, "tables of a sleeping model"); err != nil {
		return err
	}
	return s.reserve(&s.weights, c.Alone, "weights of a sleeping model")
}

// reserve makes *m have room for the regions.
func (s *Sleeper) reserve(m *device.Memory, regions []device.Region, label string) error {
	n := size(regions)
	if n == 0 || *m != nil && (*m).Bytes() >= n {
		return nil
	}
	if err := s.free(m); err != nil {
		return err
	}
	x, err := s.o.Machine.Alloc(device.Host, n, label)
	if errors.Is(err, device.ErrOutOfMemory) {
		return fmt.Errorf("sleeping: the host has no memory for a copy of the weights; free some, or sleep at level 2, which loads them again: %w", err)
	}
	if err != nil {
		return fmt.Errorf("sleeping: %w", err)
	}
	*m = x
	return nil
}

func (s *Sleeper) free(m *device.Memory) error {
	x := *m
	*m = nil
	if x == nil {
		return nil
	}
	return x.Free()
}

// size is the memory for a copy of regions, each aligned.
func size(regions []device.Region) (n int64) {
	for _, r := range regions {
		n += device.Align(r.Bytes)
	}
	return n
}

// Sleep copies what has to be copied, and suspends all memory. Of a model that sleeps it suspends
// what a partial wake has resumed, of which nothing has changed since, and at level Drop the weights
// that were copied.
func (s *Sleeper) Sleep(ctx context.Context, c Contents, level Level) (t Times, err error) {
	if s.level != Awake {
		return t, s.deepen(level)
	}
	clock := s.o.Machine.Now
	began := clock()
	defer func() { t.Total = clock() - began }()
	if level == Copy {
		err = s.Reserve(c)
	} else {
		err = s.reserve(&s.lasting, c.Lasting, "tables of a sleeping model")
	}
	t.Pin = clock() - began
	if err != nil {
		return t, err
	}
	s.c = c
	start := clock()
	if t.Bytes, err = s.copy(ctx, s.saved(level), "weights to host memory"); err != nil {
		return t, err
	}
	t.Copies = clock() - start
	start = clock()
	s.level = level
	for _, tag := range []Tag{Weights, KVCache} {
		s.asleep[tag] = true
		for _, m := range s.memories(tag) {
			// What fails to be suspended stays as it is, which wastes memory and nothing else.
			err = errors.Join(err, m.Suspend())
			if m.Space() != device.Host {
				t.Freed += m.Bytes()
			}
		}
	}
	t.Map = clock() - start
	return t, err
}

// deepen suspends what is awake of a model that sleeps, and drops its weights if the level says so.
func (s *Sleeper) deepen(level Level) (err error) {
	for _, tag := range []Tag{Weights, KVCache} {
		for _, m := range s.memories(tag) {
			err = errors.Join(err, m.Suspend()) // of what is suspended it does nothing
		}
		s.asleep[tag] = true
	}
	if level != Drop || s.level != Copy {
		return err
	}
	s.level = Drop
	err = errors.Join(err, s.free(&s.weights))
	for _, m := range s.c.Host {
		err = errors.Join(err, m.Suspend())
	}
	return err
}

// memories are those of a tag at the present level.
func (s *Sleeper) memories(t Tag) []device.Memory {
	switch {
	case t == KVCache:
		return s.c.KV
	case s.level == Drop:
		return append(append([]device.Memory{}, s.c.Weights...), s.c.Host...)
	}
	return s.c.Weights
}

// saved are the copies to host memory of a sleep at a level.
func (s *Sleeper) saved(level Level) (pieces []transfer.Piece) {
	pieces = into(pieces, s.lasting, s.c.Lasting)
	if level == Copy {
		pieces = into(pieces, s.weights, s.c.Alone)
	}
	return pieces
}

// into appends the copies of regions to host memory, each in another allocation than the last.
func into(pieces []transfer.Piece, m device.Memory, regions []device.Region) []transfer.Piece {
	at := int64(0)
	for _, r := range regions {
		pieces = append(pieces, transfer.Piece{Dst: m.Region(at, r.Bytes), Src: r, Separate: true})
		at += device.Align(r.Bytes)
	}
	return pieces
}

// restored are the copies that bring a tag's content back. What was in the memory of the KV cache comes
// back once both tags are awake: its host copies may be suspended with the weights.
func (s *Sleeper) restored(t Tag) (pieces []transfer.Piece) {
	for _, p := range s.saved(s.level) {
		pieces = append(pieces, transfer.Piece{Dst: p.Src, Src: p.Dst, Separate: true})
	}
	saved := len(pieces)
	pieces = append(pieces, s.c.Copied...)
	if len(pieces) > saved {
		pieces[saved].Separate = true
	}
	other := Weights
	if t == Weights {
		other = KVCache
	}
	var own []transfer.Piece
	for _, p := range pieces {
		if in := s.inKV(p.Dst); in && !s.asleep[other] || !in && t == Weights {
			own = append(own, p)
		}
	}
	return own
}

// inKV reports whether a region is in the memory of the KV cache, as experts in lent memory are.
func (s *Sleeper) inKV(r device.Region) bool {
	for _, m := range s.c.KV {
		all := m.Region(0, m.Bytes())
		if all.Space == r.Space && all.Addr <= r.Addr && r.Addr < all.End() {
			return true
		}
	}
	return false
}

// copy makes all copies as one request, and waits for it.
func (s *Sleeper) copy(ctx context.Context, pieces []transfer.Piece, label string) (bytes int64, err error) {
	if len(pieces) == 0 {
		return 0, nil
	}
	for _, p := range pieces {
		bytes += p.Src.Bytes
	}
	if s.done.None() {
		f, err := s.o.Machine.NewFence("sleep and wake")
		if err != nil {
			return 0, fmt.Errorf("sleeping: %w", err)
		}
		s.done = device.Point{Fence: f, Value: f.Value()}
	}
	s.done.Value++
	t, err := s.o.Transfer.Submit(transfer.Request{Pieces: pieces, Priority: transfer.Demand, Done: s.done, Label: transfer.Text(label)})
	if err == nil {
		if err = t.Wait(ctx); !t.Ended() {
			t.Cancel()
			_ = t.Wait(context.WithoutCancel(ctx)) // the memory is in use until then
		}
	}
	if err != nil {
		return 0, fmt.Errorf("sleeping: copy %s: %w", label, err)
	}
	return bytes, nil
}

// Wake gets the memory of these tags, of all where there are none, and brings back what was in it.
// Where weights were dropped load brings them back; weights are awake before the KV cache is.
// Without memory the error wraps device.ErrOutOfMemory. Waking what is awake does nothing.
func (s *Sleeper) Wake(ctx context.Context, tags []Tag, load func(context.Context) error) (t Times, err error) {
	began := s.o.Machine.Now()
	if len(tags) == 0 {
		tags = []Tag{Weights, KVCache}
	}
	for _, tag := range []Tag{Weights, KVCache} {
		if slices.Contains(tags, tag) && s.asleep[tag] && err == nil {
			err = s.wake(ctx, tag, load, &t)
		}
	}
	if err == nil && s.level != Awake && !s.asleep[Weights] && !s.asleep[KVCache] {
		s.level = Awake
		if s.o.Release {
			err = errors.Join(s.free(&s.weights), s.free(&s.lasting))
		}
	}
	t.Total = s.o.Machine.Now() - began
	return t, err
}

// wake wakes one tag. After an error its memory is suspended again.
func (s *Sleeper) wake(ctx context.Context, tag Tag, load func(context.Context) error, t *Times) (err error) {
	clock := s.o.Machine.Now
	start := clock()
	all := s.memories(tag)
	defer func() {
		if err != nil {
			for _, m := range all {
				err = errors.Join(err, m.Suspend())
			}
		}
	}()
	for _, m := range all {
		if err := m.Resume(); err != nil {
			return fmt.Errorf("sleeping: wake: %w", err)
		}
		if m.Space() != device.Host {
			t.Freed += m.Bytes()
		}
	}
	t.Map += clock() - start
	if tag == Weights && s.level == Drop {
		start = clock()
		if err := load(ctx); err != nil {
			return err
		}
		t.Load += clock() - start
	}
	start = clock()
	n, err := s.copy(ctx, s.restored(tag), "weights from host memory")
	if err != nil {
		return err
	}
	t.Copies += clock() - start
	t.Bytes += n
	s.asleep[tag] = false
	return nil
}

// Close frees the host's memory. Suspended memory stays its owner's, who may free it.
func (s *Sleeper) Close() error {
	errs := []error{s.free(&s.weights), s.free(&s.lasting)}
	if !s.done.None() {
		errs = append(errs, s.done.Fence.Close())
	}
	return errors.Join(errs...)
}
