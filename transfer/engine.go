package transfer

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/moeserve/moeserve/device"
)

// Options describe an engine.
type Options struct {
	// Machine whose memories are copied between.
	Machine device.Machine
	// ChunkBytes is the size of a chunk. Default: what the path moves in 160 us, by its
	// rate in the topology, at least 8 MiB: then its start costs little, and an urgent
	// copy waits about as long on every path.
	ChunkBytes int64
	// Depth is how many chunks of one link are with the device at a time. Default: 2.
	Depth int
	// Logger hears of chunks tried again and copies that failed. Default: none.
	Logger *slog.Logger
}

const (
	leastChunkBytes  = 8 << 20
	defaultChunkTime = 160 * time.Microsecond
	defaultDepth     = 2
)

// EnsureDefaults returns o with its defaults filled in, but for ChunkBytes, whose
// default each path has for itself.
func (o Options) EnsureDefaults() Options {
	if o.Depth == 0 {
		o.Depth = defaultDepth
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	return o
}

// Validate reports the first option that makes no sense.
func (o Options) Validate() error {
	switch {
	case o.Machine == nil:
		return errors.New("transfer: Options.Machine is not set")
	case o.ChunkBytes < 0:
		return fmt.Errorf("transfer: chunks of %d bytes; they must have at least one", o.ChunkBytes)
	case o.Depth <= 0:
		return fmt.Errorf("transfer: depth %d; at least one chunk must be under way", o.Depth)
	}
	return nil
}

// Engine copies between the memories of one machine. Its methods may be called
// from any goroutine.
type Engine struct {
	o Options

	mu     sync.Mutex
	links  map[device.Pair]*link
	closed bool
}

// New starts an engine. Links come into being with their first request.
func New(o Options) (*Engine, error) {
	o = o.EnsureDefaults()
	if err := o.Validate(); err != nil {
		return nil, err
	}
	return &Engine{o: o, links: map[device.Pair]*link{}}, nil
}

// Submit queues a copy and returns at once. An error means that nothing was
// queued and Done will not be raised: bad arguments, no path
// (device.ErrUnreachable), a lost device (device.ErrLost), a closed engine
// (device.ErrClosed).
func (e *Engine) Submit(r Request) (*Ticket, error) {
	err := r.validate()
	if err == nil {
		err = e.placed(&r)
	}
	if err != nil {
		return nil, fmt.Errorf("transfer: %s: %w", r.name(), err)
	}
	l, err := e.link(device.Pair{From: r.Src.Space, To: r.Dst.Space})
	if err != nil {
		return nil, fmt.Errorf("transfer: %s: %w", r.name(), err)
	}
	t, err := l.submit(r)
	if err != nil {
		return nil, fmt.Errorf("transfer: %s: %w", r.name(), err)
	}
	return t, nil
}

func (r *Request) validate() error {
	switch {
	case r.Src.Bytes != r.Dst.Bytes:
		return fmt.Errorf("%d bytes into %d", r.Src.Bytes, r.Dst.Bytes)
	case r.Src.Bytes <= 0:
		return fmt.Errorf("%d bytes; a copy has at least one", r.Src.Bytes)
	case r.Src.Addr < r.Dst.End() && r.Dst.Addr < r.Src.End():
		return fmt.Errorf("source %v and destination %v overlap", r.Src, r.Dst)
	case int(r.Priority) >= priorities:
		return fmt.Errorf("there is no %v", r.Priority)
	case r.Done.None():
		return errors.New("no Done point, so nobody would learn of its end")
	case slices.ContainsFunc(r.After, device.Point.None):
		return errors.New("an After point without a fence")
	}
	return nil
}

// placed says whether the bytes of a request are in the spaces that it names, which
// choose the link.
func (e *Engine) placed(r *Request) error {
	for i, at := range [...]device.Region{r.Src, r.Dst} {
		space, ok := e.o.Machine.SpaceOf(at.Addr)
		if ok && space == at.Space {
			continue
		}
		side := [...]string{"source", "destination"}[i]
		if !ok {
			return fmt.Errorf("%s %v is in no live allocation", side, at)
		}
		return fmt.Errorf("%s %v is on %s", side, at, space)
	}
	return nil
}

func (r *Request) name() string {
	if r.Label == nil {
		return fmt.Sprintf("copy of %d bytes from %s to %s", r.Src.Bytes, r.Src.Space, r.Dst.Space)
	}
	return fmt.Sprintf("%s (%d bytes from %s to %s)", r.Label, r.Src.Bytes, r.Src.Space, r.Dst.Space)
}

// link returns the link of the pair, and makes it where it is new.
func (e *Engine) link(pair device.Pair) (*link, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return nil, device.ErrClosed
	}
	if l := e.links[pair]; l != nil {
		return l, nil
	}
	path, err := e.o.Machine.Topology().Path(pair.From, pair.To)
	if err != nil {
		return nil, err
	}
	o := e.o
	if o.ChunkBytes == 0 {
		o.ChunkBytes = max(leastChunkBytes, int64(path.BytesPerSecond*defaultChunkTime.Seconds())>>20<<20)
	}
	l, err := newLink(o, pair)
	if err != nil {
		return nil, err
	}
	e.links[pair] = l
	return l, nil
}

// PathStats is what one link has done.
type PathStats struct {
	From, To device.Space
	// Copies and Bytes that have landed.
	Copies, Bytes int64
	// Retries of chunks, and copies that Failed or were canceled.
	Retries, Failed int64
	// Busy is for how long a chunk was with the device, on the machine's clock.
	Busy time.Duration
}

// Path says what the link of one pair of memories has done so far.
func (e *Engine) Path(pair device.Pair) PathStats {
	e.mu.Lock()
	l := e.links[pair]
	e.mu.Unlock()
	if l == nil {
		return PathStats{From: pair.From, To: pair.To}
	}
	return l.snapshot()
}

// Stats says what every link has done so far, in the order of (From, To).
func (e *Engine) Stats() []PathStats {
	var stats []PathStats
	for _, l := range e.sorted() {
		stats = append(stats, l.snapshot())
	}
	return stats
}

func (e *Engine) sorted() []*link {
	e.mu.Lock()
	defer e.mu.Unlock()
	var links []*link
	for _, l := range e.links {
		links = append(links, l)
	}
	slices.SortFunc(links, func(a, b *link) int {
		return cmp.Or(cmp.Compare(a.pair.From, b.pair.From), cmp.Compare(a.pair.To, b.pair.To))
	})
	return links
}

// Close fails what was not started, with device.ErrClosed, waits for what was, and
// releases the streams. Every After point must have been reached or failed, or be
// about to: the streams that wait for them end with them.
func (e *Engine) Close() error {
	e.mu.Lock()
	closed := e.closed
	e.closed = true
	e.mu.Unlock()
	if closed {
		return fmt.Errorf("transfer: %w", device.ErrClosed)
	}
	var errs []error
	for _, l := range e.sorted() {
		errs = append(errs, l.close())
	}
	return errors.Join(errs...)
}
