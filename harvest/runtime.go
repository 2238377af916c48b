package harvest

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/moeserve/moeserve/device"
)

// Options describe a Runtime.
type Options struct {
	// Machine whose peers lend memory.
	Machine device.Machine
	// Peers are the memories to borrow from.
	Peers []device.Space
	// Reader is the compute GPU that reads what lies there; every peer must have a
	// path to it. Default: the first GPU.
	Reader device.Space
	// Policy of the controller. Default: BestFit.
	Policy Policy
	// Monitor of the peers. Default: a MachineMonitor, which the runtime closes.
	Monitor Monitor
	// SlabBytes is what is taken from a device at a time. Make it a few experts.
	// Larger requests, and requests where a whole slab does not fit any more, get a
	// slab of their own size. Default: 1 GiB.
	SlabBytes int64
	// HeadroomBytes stay free on each peer for others; under 0: nothing does.
	// Default: a twentieth of the peer's memory.
	HeadroomBytes int64
	// Deadline of a revocation, from its beginning. Default: 100 ms.
	Deadline time.Duration
	// Cooldown is how long no slab is taken from a peer after one was given back for
	// others' sake, so that they can take it, and memory does not go to and fro;
	// under 0: none. Default: 1 s.
	Cooldown time.Duration
	// HalfLife of a peer's averages of bandwidth and churn. Default: 1 min.
	HalfLife time.Duration
	// CallbackLimit is how long a callback may take before that is reported. Default:
	// 10 ms.
	CallbackLimit time.Duration
	// Interval between two ticks of the loop that Start begins, which is also how soon
	// pressure is noticed; while something drains it ticks ten times as often.
	// Default: 10 ms.
	Interval time.Duration
	// ClearBytes is the size of the pinned buffer of zeros that clearing begins with.
	// Default: 1 MiB.
	ClearBytes int64
	// Events is told what happens. Default: nobody.
	Events EventListener
}

// EnsureDefaults returns o with every unset field at its default.
func (o Options) EnsureDefaults() Options {
	def(&o.Reader, device.HBM(0))
	def(&o.SlabBytes, 1<<30)
	def(&o.Deadline, 100*time.Millisecond)
	def(&o.Cooldown, time.Second)
	def(&o.HalfLife, time.Minute)
	def(&o.CallbackLimit, 10*time.Millisecond)
	def(&o.Interval, 10*time.Millisecond)
	def(&o.ClearBytes, 1<<20)
	if o.Policy == nil {
		o.Policy = BestFit{}
	}
	o.Events = o.Events.EnsureDefaults()
	return o
}

func def[T comparable](field *T, to T) {
	var zero T
	if *field == zero {
		*field = to
	}
}

// Validate says what is wrong with o, whose defaults are set.
func (o Options) Validate() error {
	if o.Machine == nil {
		return errors.New("harvest: no machine")
	}
	top := o.Machine.Topology()
	for i, p := range o.Peers {
		switch _, ok := top.Info(p); {
		case !ok:
			return fmt.Errorf("harvest: there is no peer %s: the machine has %d GPUs, from 0 on", p, len(top.GPUs))
		case p == device.Host:
			return errors.New("harvest: host memory is no peer: name GPUs")
		case p == o.Reader:
			return fmt.Errorf("harvest: %s is the compute GPU and cannot be its own peer: name another", p)
		case slices.Contains(o.Peers[:i], p):
			return fmt.Errorf("harvest: peer %s is named twice", p)
		}
		if _, err := top.Path(p, o.Reader); err != nil {
			return fmt.Errorf("harvest: peer %s cannot be reached from %s, leave it out: %w", p, o.Reader, err)
		}
	}
	switch {
	case o.SlabBytes < 0:
		return fmt.Errorf("harvest: slabs of %d bytes: give them a size over 0", o.SlabBytes)
	case o.ClearBytes < 0:
		return fmt.Errorf("harvest: a clear buffer of %d bytes: give it a size over 0", o.ClearBytes)
	case o.Deadline < 0 || o.HalfLife < 0 || o.CallbackLimit < 0 || o.Interval < 0:
		return fmt.Errorf("harvest: a duration under 0: deadline %v, half-life %v, callback limit %v, interval %v", o.Deadline, o.HalfLife, o.CallbackLimit, o.Interval)
	}
	return nil
}

// Hints say more about a request. The zero Hints are fine.
type Hints struct {
	// Client is whose account it goes to, and Label what it is; both stand in
	// reports. Default: "unnamed".
	Client, Label string
	// Peers are the only ones to be used. Default: all.
	Peers []device.Space
	// Reader is the GPU that will read it: peers without a path to it are left out,
	// and locality is meant towards it. Default: Options.Reader.
	Reader device.Space
	// After asks for the place right behind that handle, so that one copy moves
	// both, if it is free and the policy has nothing against it.
	After *Handle
	// Cost is how much time the client loses if the handle is revoked: what is cheap
	// goes first. It may be changed by Handle.SetCost.
	Cost time.Duration
}

// Runtime borrows memory from peers and gives it back. Alloc, Free,
// RegisterCallback, Reclaim, Exclude, Readmit and Snapshot may be called from any
// goroutine, also from Work on a stream; Tick, Reclamation.Wait and Close from any
// goroutine, but not from Work.
//
// # Locks
//
// run is held by who ticks; readings, drains, callbacks, clearing and giving back
// happen under it, and so on one goroutine at a time: harvest's. mu guards the
// accounts, is taken for moments only, and never held while a callback runs or a
// fence is asked, which on a virtual machine may run other work. Taking and
// releasing references needs neither.
type Runtime struct {
	o Options
	// clock is the latest time that was passed in, in nanoseconds.
	clock atomic.Int64
	// calling is the goroutine that runs a callback, 0 for none.
	calling atomic.Uint64

	run   sync.Mutex
	zeros device.Memory
	// nudge is a fence that nobody raises: see Reclamation.Wait.
	nudge   device.Fence
	owned   *MachineMonitor
	stop    context.CancelFunc
	loop    sync.WaitGroup
	release bool // everything is

	mu      sync.Mutex
	closing bool
	peers   []*peer
	clients map[string]*client
	nextID  uint64 // of handles
	slabs   uint64 // numbers given
	// freeing are handles that are freed once drained, leaving slabs that are.
	freeing []*Handle
	leaving []*leaving
	counts  [reasons]int64 // of revoked slabs

	without safeguards
}

// safeguards can be taken away by tests, which show that this is found out. The zero
// value has all of them.
type safeguards struct{ noDrain bool }

// peer is one lender.
type peer struct {
	space  device.Space
	paths  map[device.Space]device.Path // by reader
	slabs  []*slab
	stream device.Stream // clears
	// cleared is raised behind each clearing, to clearValue by the last; outstanding
	// are not known to have ended, and after a failure the stream is broken. They belong
	// to who holds Runtime.run.
	cleared     device.Fence
	clearValue  uint32
	outstanding int
	broken      bool

	reading Reading
	// free is what is free on the device: the latest reading, and what was taken and
	// given back since. moves counts these.
	free     int64
	moves    int
	headroom int64
	// coming is what leaving slabs will give back.
	coming int64
	// stale is why there is no reading that counts.
	stale error
	// health is why the peer must not be used; excluded the part of that which came
	// by Exclude.
	health, excluded error
	cooldown         time.Duration // until then no slab is taken
	bandwidth        average
	churn            churn
	churnRate        float64
}

// slab is a piece of device memory that is divided among handles.
type slab struct {
	id       uint64
	peer     *peer
	mem      device.Memory
	segments segments
	handles  map[int64]*Handle // by offset
	leaving  *leaving
}

type client struct {
	held    int64
	handles int
}

// New takes the first readings. Nothing is borrowed before Alloc asks.
func New(o Options) (*Runtime, error) {
	o = o.EnsureDefaults()
	if err := o.Validate(); err != nil {
		return nil, err
	}
	r := &Runtime{o: o, clients: map[string]*client{}}
	if err := r.open(); err != nil {
		return nil, errors.Join(err, r.closeAll())
	}
	now := r.now()
	r.run.Lock()
	defer r.run.Unlock()
	r.observe(now)
	return r, nil
}

func (r *Runtime) open() (err error) {
	m := r.o.Machine
	if r.zeros, err = m.Alloc(device.Host, r.o.ClearBytes, "harvest zeros"); err != nil {
		return fmt.Errorf("harvest: %w", err)
	}
	clear(r.zeros.Write(0, r.o.ClearBytes))
	if r.nudge, err = m.NewFence("harvest nudge"); err != nil {
		return fmt.Errorf("harvest: %w", err)
	}
	top := m.Topology()
	for _, s := range r.o.Peers {
		p := &peer{space: s, paths: map[device.Space]device.Path{}, stale: errors.New("no reading yet")}
		r.peers = append(r.peers, p)
		for _, to := range top.Spaces() {
			if path, err := top.Path(s, to); err == nil {
				p.paths[to] = path
			}
		}
		info, _ := top.Info(s)
		p.headroom = max(r.o.HeadroomBytes, 0)
		if r.o.HeadroomBytes == 0 {
			p.headroom = info.MemoryBytes / 20
		}
		if p.stream, err = m.NewStream(s, device.StreamOptions{Name: "harvest clear " + s.String()}); err != nil {
			return fmt.Errorf("harvest: peer %s: %w", s, err)
		}
		if p.cleared, err = m.NewFence("harvest cleared " + s.String()); err != nil {
			return fmt.Errorf("harvest: peer %s: %w", s, err)
		}
	}
	if r.o.Monitor == nil {
		if r.owned, err = NewMachineMonitor(m, r.o.Peers); err != nil {
			return err
		}
		r.o.Monitor = r.owned
	}
	return nil
}

// closeAll releases everything but slabs, of which there are none.
func (r *Runtime) closeAll() error {
	var errs []error
	for _, p := range r.peers {
		if p.stream != nil {
			errs = append(errs, p.stream.Close())
		}
		if p.cleared != nil {
			errs = append(errs, p.cleared.Close())
		}
	}
	if r.owned != nil {
		errs = append(errs, r.owned.Close())
	}
	if r.nudge != nil {
		errs = append(errs, r.nudge.Close())
	}
	if r.zeros != nil {
		errs = append(errs, r.zeros.Free())
	}
	return errors.Join(errs...)
}

// now is the time of the latest tick, or the machine's if that is later.
func (r *Runtime) now() time.Duration {
	return max(time.Duration(r.clock.Load()), r.o.Machine.Now())
}

// refuseCallback fails op where a callback calls it.
func (r *Runtime) refuseCallback(op string) error {
	if g := r.calling.Load(); g != 0 && g == goroutine() {
		return fmt.Errorf("harvest: %s: %w", op, ErrInCallback)
	}
	return nil
}

// goroutine is the number of the calling goroutine. It is asked only around
// callbacks.
func goroutine() uint64 {
	var buf [64]byte
	b := bytes.TrimPrefix(buf[:runtime.Stack(buf[:], false)], []byte("goroutine "))
	id, _, _ := bytes.Cut(b, []byte(" "))
	n, err := strconv.ParseUint(string(id), 10, 64)
	if err != nil {
		panic("harvest: no goroutine number in " + string(b))
	}
	return n
}

// Alloc borrows bytes of a peer's memory, aligned to 256. It never waits for
// memory to be given back: where there is no room now it fails with ErrNoCapacity,
// where the policy refuses with what that says (ErrQuota, ErrRate).
func (r *Runtime) Alloc(bytes int64, hints Hints) (*Handle, error) {
	if err := r.refuseCallback("alloc"); err != nil {
		return nil, err
	}
	def(&hints.Client, unnamed.name)
	def(&hints.Label, unnamed.name)
	def(&hints.Reader, r.o.Reader)
	r.mu.Lock()
	defer r.mu.Unlock()
	h, err := r.alloc(bytes, hints)
	if err != nil {
		err = fmt.Errorf("harvest: alloc %d bytes for %s (%s): %w", bytes, hints.Client, hints.Label, err)
		r.o.Events.Refused(RefuseInfo{Client: hints.Client, Bytes: bytes, Err: err})
		return nil, err
	}
	return h, nil
}

func (r *Runtime) alloc(bytes int64, hints Hints) (*Handle, error) {
	switch {
	case bytes <= 0:
		return nil, errors.New("ask for more than 0")
	case bytes > 1<<60:
		return nil, ErrNoCapacity
	case r.closing:
		return nil, ErrClosed
	}
	c := r.clients[hints.Client]
	if c == nil {
		c = &client{}
		r.clients[hints.Client] = c
	}
	now := time.Duration(r.clock.Load())
	req := Request{Bytes: roundUp(bytes), Hints: hints, Held: c.held, Clients: len(r.clients), Now: now}
	for _, p := range r.peers {
		if p.health == nil {
			req.Total += p.inService() + max(p.spare(), 0)
		}
	}
	for {
		from := r.candidates(req)
		if len(from) == 0 {
			return nil, r.noCapacity(req)
		}
		i, err := r.o.Policy.Choose(req, from)
		if err != nil {
			return nil, err
		}
		s, err := r.slabOf(from[i])
		if err != nil {
			continue // that peer is no candidate any more
		}
		r.o.Policy.Granted(req)
		return r.place(s, from[i].offset, bytes, req, c), nil
	}
}

// spare is what may still be taken from the device.
func (p *peer) spare() int64 { return p.free - p.headroom }

// inService is what slabs hold that are not leaving.
func (p *peer) inService() (n int64) {
	for _, s := range p.slabs {
		if s.leaving == nil {
			n += s.segments.bytes
		}
	}
	return n
}

// closed is why nothing may be allocated on the peer, newSlabs why no slab may be
// taken from it.
func (p *peer) closed(req Request) string {
	switch _, path := p.paths[req.Hints.Reader]; {
	case len(req.Hints.Peers) > 0 && !slices.Contains(req.Hints.Peers, p.space):
		return "is not among those hinted at"
	case !path:
		return "cannot be reached from " + req.Hints.Reader.String()
	case p.health != nil:
		return "is unhealthy: " + p.health.Error()
	}
	return ""
}

func (p *peer) newSlabs(req Request) string {
	switch {
	case p.stale != nil:
		return p.stale.Error()
	case req.Now < p.cooldown:
		return fmt.Sprintf("gave memory back to others; ask again in %v", p.cooldown-req.Now)
	case p.spare() < req.Bytes:
		return fmt.Sprintf("has %d bytes free, of which %d are head-room", p.free, p.headroom)
	}
	return ""
}

func (r *Runtime) noCapacity(req Request) error {
	var why []string
	for _, p := range r.peers {
		w := p.closed(req)
		if w == "" {
			w = p.newSlabs(req)
		}
		why = append(why, p.space.String()+" "+w)
	}
	if len(why) == 0 {
		return fmt.Errorf("%w: there are no peers", ErrNoCapacity)
	}
	return fmt.Errorf("%w: %s", ErrNoCapacity, strings.Join(why, "; "))
}

func (r *Runtime) state(p *peer, reader device.Space) PeerState {
	return PeerState{
		Space: p.space, Reading: p.reading, Spare: p.spare(),
		Bandwidth: p.bandwidth.value, Churn: p.churnRate, Path: p.paths[reader],
	}
}

// candidates lists where the request fits.
func (r *Runtime) candidates(req Request) []Candidate {
	var cs []Candidate
	n := req.Bytes
	after := req.Hints.After
	for _, p := range r.peers {
		if p.closed(req) != "" {
			continue
		}
		state := r.state(p, req.Hints.Reader)
		for _, s := range p.slabs {
			if s.leaving != nil {
				continue
			}
			if h, ok := s.segments.best(n); ok {
				cs = append(cs, Candidate{Peer: state, Slab: s.id, Hole: h.bytes, Leftover: h.bytes - n, offset: h.off})
			}
			if after != nil && after.slab == s && after.state == live {
				if h, ok := s.segments.at(after.off+roundUp(after.r.Bytes), n); ok {
					cs = append(cs, Candidate{Peer: state, Slab: s.id, Hole: h.bytes, Leftover: h.bytes - n, Adjacent: true, offset: h.off})
				}
			}
		}
		if p.newSlabs(req) == "" {
			size := roundUp(r.o.SlabBytes)
			if n > size || p.spare() < size {
				size = n
			}
			cs = append(cs, Candidate{Peer: state, Hole: size, Leftover: size - n})
		}
	}
	return cs
}

// slabOf returns the candidate's slab, which it takes from the device if it is new.
func (r *Runtime) slabOf(c Candidate) (*slab, error) {
	i := slices.IndexFunc(r.peers, func(p *peer) bool { return p.space == c.Peer.Space })
	p := r.peers[i]
	if c.Slab != 0 {
		j := slices.IndexFunc(p.slabs, func(s *slab) bool { return s.id == c.Slab })
		return p.slabs[j], nil
	}
	id := r.slabs + 1
	mem, err := r.o.Machine.Alloc(p.space, c.Hole, fmt.Sprintf("harvest slab %d", id))
	if err != nil {
		p.stale = fmt.Errorf("refused a slab: %w", err)
		return nil, err
	}
	r.slabs = id
	s := &slab{id: id, peer: p, mem: mem, segments: newSegments(c.Hole), handles: map[int64]*Handle{}}
	p.slabs = append(p.slabs, s)
	p.free -= c.Hole
	p.moves++
	r.o.Events.SlabTaken(SlabInfo{Slab: id, Device: p.space, Bytes: c.Hole})
	return s, nil
}

// place makes the handle.
func (r *Runtime) place(s *slab, off, bytes int64, req Request, c *client) *Handle {
	s.segments.take(off, req.Bytes)
	r.nextID++
	h := &Handle{
		id: r.nextID, r: s.mem.Region(off, bytes),
		client: req.Hints.Client, label: req.Hints.Label, clock: &r.clock,
		runtime: r, slab: s, off: off,
	}
	h.SetCost(req.Hints.Cost)
	s.handles[off] = h
	c.held += req.Bytes
	c.handles++
	ex, _ := h.cell.BeginExclusive() // nobody else knows of the handle
	ex.Replace()
	r.o.Events.Allocated(AllocInfo{Handle: h, Slab: s.id})
	return h
}

// forget takes h out of the accounts.
func (r *Runtime) forget(h *Handle, end handleState) {
	h.ex.Invalidate()
	h.state = end
	n := h.slab.segments.used[h.off]
	h.slab.segments.put(h.off)
	delete(h.slab.handles, h.off)
	c := r.clients[h.client]
	c.held -= n
	c.handles--
}

func (r *Runtime) owns(op string, h *Handle) error {
	if h == nil || h.runtime != r {
		return fmt.Errorf("harvest: %s: the handle is not of this runtime", op)
	}
	return nil
}

// ended is the error for a handle that has ended, or is about to.
func (h *Handle) ended(op string) error {
	switch h.state {
	case freeing, freed:
		return fmt.Errorf("harvest: %s %v: %w", op, h, ErrFreed)
	case revoking, revoked:
		return fmt.Errorf("harvest: %s %v: %w", op, h, ErrRevoked)
	}
	return nil
}

// Free gives the memory back. It does not wait: new references fail from now on,
// and the memory is used again when those that are out, and the work behind them,
// are done. Once Free has returned nil, the handle's callback will not run.
// ErrRevoked means that the runtime was first: the callback has run or will, and
// nothing is left to do. ErrFreed means a second Free.
func (r *Runtime) Free(h *Handle) error {
	if err := cmp.Or(r.owns("free", h), r.refuseCallback("free")); err != nil {
		return err
	}
	r.mu.Lock()
	if err := h.ended("free"); err != nil {
		r.mu.Unlock()
		return err
	}
	h.state, h.callback = freeing, nil
	h.ex, _ = h.cell.BeginExclusive() // a live handle's cell is nobody's
	began := r.now()
	r.mu.Unlock()
	ok, failed := h.drained()
	r.mu.Lock()
	defer r.mu.Unlock()
	h.freedAt = began
	if ok {
		r.forget(h, freed)
		r.o.Events.Freed(FreeInfo{Handle: h, Failed: failed})
		return nil
	}
	r.freeing = append(r.freeing, h)
	return nil
}

// RegisterCallback has f called once if the handle is revoked, when nobody can
// acquire it any more and nobody reads it. A handle has one callback. ErrRevoked
// means that it is too late and f will not be called.
//
// f runs on the goroutine that ticks. It must not block, and must not call the
// runtime: calls fail with ErrInCallback.
func (r *Runtime) RegisterCallback(h *Handle, f func(Revocation)) error {
	if err := r.owns("register a callback", h); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if h.state != revoking { // its callback has not run
		if err := h.ended("register a callback"); err != nil {
			return err
		}
	}
	switch {
	case f == nil:
		return errors.New("harvest: register a callback: it is nil")
	case h.callback != nil:
		return fmt.Errorf("harvest: register a callback: %v has one", h)
	}
	h.callback = f
	return nil
}

func (r *Runtime) peer(op string, s device.Space) (*peer, error) {
	if i := slices.IndexFunc(r.peers, func(p *peer) bool { return p.space == s }); i >= 0 {
		return r.peers[i], nil
	}
	return nil, fmt.Errorf("harvest: %s: %s is no peer", op, s)
}

// Exclude says that a peer must not be used, because of what the caller saw: a copy
// that failed with device.ErrLost, say. Everything on it is revoked at once, without
// clearing. It holds until Readmit.
func (r *Runtime) Exclude(s device.Space, cause error) error {
	if cause == nil {
		return fmt.Errorf("harvest: exclude %s: say why", s)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	p, err := r.peer("exclude", s)
	if err != nil {
		return err
	}
	p.excluded = cause
	r.judge(p)
	r.decide(r.now())
	return nil
}

// Readmit takes back an Exclude. The peer is used again once its readings say that
// it is healthy.
func (r *Runtime) Readmit(s device.Space) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	p, err := r.peer("readmit", s)
	if err != nil {
		return err
	}
	p.excluded = nil
	r.judge(p)
	return nil
}

// Start begins a loop that ticks by itself, on the machine's clock, until ctx is
// done or Close. It is for machines on the wall clock; on a virtual one call Tick.
// Start is called at most once.
func (r *Runtime) Start(ctx context.Context) error {
	r.run.Lock()
	defer r.run.Unlock()
	if r.stop != nil || r.release {
		return errors.New("harvest: start: it was started, or closed, before")
	}
	ctx, r.stop = context.WithCancel(ctx)
	r.loop.Go(func() {
		timer := time.NewTimer(0)
		defer timer.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-timer.C:
			}
			pending, err := r.Tick(r.o.Machine.Now())
			if err != nil {
				return // closed
			}
			if pending > 0 {
				timer.Reset(max(r.o.Interval/10, time.Microsecond))
			} else {
				timer.Reset(r.o.Interval)
			}
		}
	})
	return nil
}

// Close revokes everything that is left, waits until it is given back, and
// releases the runtime. If ctx ends first, the error says who still holds what, and
// Close may be called again. A second Close after success does nothing.
func (r *Runtime) Close(ctx context.Context) error {
	if err := r.refuseCallback("close"); err != nil {
		return err
	}
	r.run.Lock()
	stop := r.stop
	r.run.Unlock()
	if stop != nil {
		stop()
		r.loop.Wait()
	}
	r.run.Lock()
	defer r.run.Unlock()
	if r.release {
		return nil
	}
	r.mu.Lock()
	r.closing = true
	now := r.now()
	for _, p := range r.peers {
		for _, s := range p.slabs {
			if s.leaving == nil {
				reason := ReasonShutdown
				if len(s.handles) == 0 {
					reason = ReasonEmpty
				}
				r.begin(s, reason, now, r.o.Deadline, nil)
			}
		}
	}
	r.mu.Unlock()
	for wait := (pause{r: r}); r.advance(r.now()) > 0; {
		wait.step()
		if err := wait.rest(ctx); err != nil {
			return fmt.Errorf("harvest: close: %s: %w", r.describe(nil), err)
		}
	}
	r.release = true
	return r.closeAll()
}
