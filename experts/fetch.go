package experts

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/trace"
	"github.com/moeserve/moeserve/experts/ring"
	"github.com/moeserve/moeserve/harvest"
	"github.com/moeserve/moeserve/lease"
	"github.com/moeserve/moeserve/peercache"
	"github.com/moeserve/moeserve/transfer"
)

// fetcher brings offloaded experts into the ring. Its owner's lock is held while it is
// used.
type fetcher struct {
	engine *transfer.Engine
	plan   *Plan
	// memory of the ring, and which slot holds what; slots say what brings it there.
	memory device.Memory
	cache  *ring.Ring
	slots  []arrival
	// source says where an expert is copied from, hostRegion where its host copy is.
	source     func(ID) source
	hostRegion func(ID) device.Region
	peers      *peercache.Cache[ID]
	splitBytes int64
	links      *transfer.Inbound
	counts     *counts

	// fetches that have not been seen to end, and the first failure of one.
	fetches []*fetch
	err     error
	// peerBackoff is after how many steps fetches use peers again.
	peerBackoff int
	// What acquire works with, and fetches that nobody refers to, to be used again.
	runs   []run
	after  []device.Point
	loads  []transfer.Load
	pieces []transfer.Piece
	spare  []*fetch
}

// source is where an offloaded expert is copied from; where that is a peer, copied is
// what is read there, with a reference on it.
type source struct {
	region device.Region
	copied *peercache.Copy[ID]
	ref    harvest.Ref
}

// arrival is how what a slot holds comes there.
type arrival struct {
	// copies bring it, at most one of each kind; none where the host knows that it is
	// here.
	copies []*fetch
	// awaited says that the compute stream has waited for the copies, or will.
	awaited bool
	// from is the tier it came from. fresh: no use has counted that yet; ahead: it was
	// submitted ahead of need.
	from         Tier
	fresh, ahead bool
	// landed are raised by the copies whose first expert goes here, values their last.
	landed [2]device.Fence
	values [2]uint32
}

// The kinds of copies into a slot: the one from where the expert is, and the part
// that comes from the host at the same time.
const (
	mainCopy = iota
	hostPart
)

// fetch is one copy into the ring, of the experts of a run, or of the part of them that
// comes from the host. It names the copy.
type fetch struct {
	// layer by the model's number, and the experts copied.
	layer   int
	experts []int
	// refs counts the lists that have it: fetcher.fetches, and arrival.copies.
	refs int
	// ticket is nil where the copy was not submitted.
	ticket *transfer.Ticket
	done   device.Point
	from   device.Space
	bytes  int64
	slots  []int
	// copies in peers' memory that are read.
	copies []*peercache.Copy[ID]
}

// open makes the ring's slots, once their memory is there.
func (f *fetcher) open(p *Plan, o Options, peers *peercache.Cache[ID], hostRegion func(ID) device.Region, c *counts) (err error) {
	f.engine, f.plan, f.peers, f.hostRegion, f.counts, f.splitBytes = o.Transfer, p, peers, hostRegion, c, o.SplitBytes
	f.cache, f.slots = ring.New(p.CacheSlots, len(p.Layers)*p.Experts), make([]arrival, p.CacheSlots)
	f.source, f.links = f.nearest, o.Transfer.Inbound(o.Space)
	for i := range f.slots {
		for k := range f.slots[i].landed {
			if f.slots[i].landed[k], err = o.Machine.NewFence(fmt.Sprintf("expert ring slot %d", i)); err != nil {
				return err
			}
		}
	}
	return nil
}

// close frees the slots, to which nothing is under way.
func (f *fetcher) close() error {
	errs := []error{free(f.memory)}
	for i := range f.slots {
		for _, fence := range f.slots[i].landed {
			if fence != nil {
				errs = append(errs, fence.Close())
			}
		}
	}
	return errors.Join(errs...)
}

// key is an expert's number in the ring.
func (f *fetcher) key(id ID) int { return id.Layer*f.plan.Experts + id.Expert }

// has says whether an expert is in the ring, or on its way there.
func (f *fetcher) has(id ID) bool { return f.cache.Has(f.key(id)) }

// slot is where the last fetch of an expert went, or -1.
func (f *fetcher) slot(id ID) int { return f.cache.Last(f.key(id)) }

// arrival is how an expert that the ring has comes there.
func (f *fetcher) arrival(id ID) *arrival { return &f.slots[f.slot(id)] }

// run is experts that are copied together: from one memory, for one wave. What the host
// link takes over of it is its end.
type run struct {
	from    device.Space
	experts []int
	// slots they go to, and extents they are copied from.
	slots   []int
	sources []source
	after   []device.Point
}

// acquire takes a reference on each of these offloaded experts of the layer at a position,
// in refs by expert: on its slot where it is still there, else on a free one, to which it
// is copied. Experts of each of so many waves are copied together, or, with no waves, each
// by itself, so that it can be forgone. False: some found no slot.
func (f *fetcher) acquire(position int, refs []lease.Ref, missing []int, waves int, p transfer.Priority) (whole bool, err error) {
	for _, e := range missing {
		if !refs[e].Held() {
			if ref, ok := f.cache.Acquire(f.key(ID{position, e})); ok {
				refs[e] = ref
			}
		}
	}
	f.runs, whole = f.cut(position, refs, missing, waves, p, f.runs[:0])
	for i, hostBytes := range f.fromHost() {
		r := &f.runs[i]
		if err == nil {
			if err = f.start(position, r, hostBytes, p); err == nil {
				continue
			}
			f.err = err
		}
		f.abort(r)
	}
	return whole, err
}

// cut gives free slots to the experts that have none and cuts them into runs.
func (f *fetcher) cut(position int, refs []lease.Ref, missing []int, waves int, p transfer.Priority, runs []run) ([]run, bool) {
	n := min(waves, len(missing))
	if waves == 0 {
		n = len(missing)
	}
	from := 0
	for w := range n {
		to, first := from+share(w, n, len(missing)), len(runs)
		for _, e := range missing[from:to] {
			if refs[e].Held() {
				continue
			}
			at, ok := f.cache.Free()
			if !ok {
				return runs, false
			}
			id := ID{position, e}
			refs[e], f.after = f.occupy(at, id, f.after[:0])
			src := f.source(id)
			a := &f.slots[at]
			a.fresh, a.ahead, a.from = true, p == transfer.Prefetch, Host
			if src.copied != nil {
				a.from = Peer
			}
			k := first
			for k < len(runs) && runs[k].from != src.region.Space {
				k++
			}
			if k == len(runs) {
				runs = appendRun(runs, src.region.Space)
			}
			r := &runs[k]
			r.experts, r.slots, r.sources = append(r.experts, e), append(r.slots, at), append(r.sources, src)
			for _, a := range f.after {
				if !slices.Contains(r.after, a) {
					r.after = append(r.after, a)
				}
			}
		}
		from = to
	}
	return runs, true
}

// appendRun begins a run, with no expert yet, in the room that an earlier one has left.
func appendRun(runs []run, from device.Space) []run {
	if n := len(runs); n < cap(runs) {
		runs = runs[:n+1]
	} else {
		runs = append(runs, run{})
	}
	r := &runs[len(runs)-1]
	clear(r.sources) // they refer to copies in peers' memory
	*r = run{from: from, experts: r.experts[:0], slots: r.slots[:0], sources: r.sources[:0], after: r.after[:0]}
	return runs
}

// nearest is a peer's copy, if there is one, or else the host's. It takes no lock and never
// waits. The step that is run again after a copy from a peer failed takes everything from
// the host.
func (f *fetcher) nearest(id ID) source {
	if f.peerBackoff == 0 {
		if copied, ref, ok := f.peers.Acquire(id); ok {
			return source{copied.Region(), copied, ref}
		}
	}
	return source{region: f.hostRegion(id)}
}

// occupy makes a free slot that of id and adds to after until when it may still be read,
// or written by a copy that was made in vain.
func (f *fetcher) occupy(at int, id ID, after []device.Point) (lease.Ref, []device.Point) {
	a := &f.slots[at]
	if !a.awaited {
		for _, c := range a.copies {
			if !c.ticket.Ended() {
				after = append(after, c.done)
				continue
			}
			// It has ended, so this does not wait: it orders the next copy after this one,
			// whatever has become of it.
			_ = c.ticket.Wait(context.Background())
		}
	}
	f.forgetCopies(a)
	a.awaited = false
	return f.cache.Put(at, f.key(id), after)
}

// fromHost says how many bytes of each run come from the host, so that peers' links
// and the host's end together.
func (f *fetcher) fromHost() []int64 {
	f.loads = f.loads[:0]
	for i := range f.runs {
		f.loads = append(f.loads, transfer.Load{From: f.runs[i].from, Bytes: int64(len(f.runs[i].experts)) * f.plan.Layout.Size})
	}
	return f.links.Split(f.loads, f.splitBytes)
}

// start submits the copies of a run: its last hostBytes come from the host.
func (f *fetcher) start(position int, r *run, hostBytes int64, p transfer.Priority) error {
	size := f.plan.Layout.Size
	for _, e := range r.experts {
		f.counts.fetches[position][e]++
	}
	// Of the expert at the border, if there is one, each brings a part.
	border := int64(len(r.experts))*size - hostBytes
	n, part := int(border/size), border%size
	main := f.newFetch(r.from)
	f.pieces = f.pieces[:0]
	for k := range r.experts {
		src, bytes := &r.sources[k], size
		switch {
		case k == n:
			bytes = part
		case k > n:
			bytes = 0
		}
		if bytes == 0 { // all of it comes from the host, now
			f.slots[r.slots[k]].from = Host
			continue
		}
		// Copies in peers' memory of different slabs are different allocations.
		apart := k > 0 && src.copied != nil && src.copied.Slab() != r.sources[k-1].copied.Slab()
		f.pieces = append(f.pieces, transfer.Piece{Dst: f.region(r.slots[k]).Slice(0, bytes), Src: src.region.Slice(0, bytes), Apart: apart})
		if src.copied != nil {
			main.copies = append(main.copies, src.copied)
		}
	}
	if len(f.pieces) > 0 {
		if err := f.submit(position, main, mainCopy, r, 0, p); err != nil {
			return err
		}
		for k := range main.copies {
			// Not at done, which the next copy into the slot may fail while this one reads.
			if ref := &r.sources[k].ref; ref.Held() {
				ref.ReleaseAt(main.ticket.End())
			}
		}
	} else {
		f.unused(main)
	}
	r.release()
	if hostBytes == 0 {
		return nil
	}
	f.pieces = f.pieces[:0]
	for k := n; k < len(r.experts); k++ {
		from := int64(0)
		if k == n {
			from = part
		}
		src := f.hostRegion(ID{position, r.experts[k]})
		f.pieces = append(f.pieces, transfer.Piece{Dst: f.region(r.slots[k]).Slice(from, size-from), Src: src.Slice(from, size-from)})
	}
	return f.submit(position, f.newFetch(device.Host), hostPart, r, n, p)
}

// release gives the references on copies back that are left.
func (r *run) release() {
	for k := range r.sources {
		if ref := &r.sources[k].ref; ref.Held() {
			ref.Release()
		}
	}
}

// region is a slot's memory.
func (f *fetcher) region(slot int) device.Region {
	return f.memory.Region(int64(slot)*f.plan.Layout.Size, f.plan.Layout.Size)
}

// abort notes that a run is not, or not wholly, on its way.
func (f *fetcher) abort(r *run) {
	c := f.newFetch(r.from)
	c.slots = append(c.slots, r.slots...)
	f.keep(&f.fetches, c)
	r.release()
}

// newFetch is one of which nothing is set but where it comes from.
func (f *fetcher) newFetch(from device.Space) *fetch {
	n := len(f.spare)
	if n == 0 {
		return &fetch{from: from}
	}
	c := f.spare[n-1]
	f.spare = f.spare[:n-1]
	*c = fetch{from: from, experts: c.experts[:0], slots: c.slots[:0], copies: c.copies[:0]}
	return c
}

// keep puts a fetch into a list, unref says that it was taken out of one: what is in none
// is used again.
func (f *fetcher) keep(list *[]*fetch, c *fetch) {
	*list = append(*list, c)
	c.refs++
}

func (f *fetcher) unref(c *fetch) {
	if c.refs--; c.refs > 0 || c.ticket == nil || c.ticket.Err() != nil {
		return // or its name may still be asked for
	}
	c.ticket.Release()
	f.unused(c)
}

// unused takes back what nothing refers to.
func (f *fetcher) unused(c *fetch) {
	clear(c.copies)
	f.spare = append(f.spare, c)
}

// forgetCopies says that nothing brings what a slot holds.
func (f *fetcher) forgetCopies(a *arrival) {
	for _, c := range a.copies {
		f.unref(c)
	}
	a.copies = a.copies[:0]
}

// String names the copy.
func (f *fetch) String() string {
	return fmt.Sprintf("layer %d experts %d to %d", f.layer, f.experts[0], f.experts[len(f.experts)-1])
}

// Describe implements trace.Describer.
func (f *fetch) Describe(n *trace.Note) {
	n.Name, n.Layer, n.Experts, n.Tier = "fetch experts", f.layer, slices.Clone(f.experts), f.tier().String()
	if n.Priority == transfer.Prefetch.String() {
		n.Name = "prefetch experts"
	}
}

// submit starts one copy of a run: of f.pieces, which go to its slots from the first on.
func (f *fetcher) submit(position int, c *fetch, kind int, r *run, first int, p transfer.Priority) error {
	last := first + len(f.pieces) - 1
	a := &f.slots[r.slots[first]]
	a.values[kind]++
	c.done = device.Point{Fence: a.landed[kind], Value: a.values[kind]}
	for _, at := range r.slots[first : last+1] {
		c.slots = append(c.slots, at)
		f.keep(&f.slots[at].copies, c)
	}
	c.layer, c.experts = f.plan.Layers[position], append(c.experts, r.experts[first:last+1]...)
	for i := range f.pieces {
		c.bytes += f.pieces[i].Src.Bytes
	}
	ticket, err := f.engine.Submit(transfer.Request{Pieces: f.pieces, Priority: p, After: r.after, Done: c.done, Label: c})
	if err != nil {
		return err
	}
	c.ticket = ticket
	f.keep(&f.fetches, c)
	f.counts.Fetched[c.tier()] += c.bytes
	return nil
}

// promote makes the copies of these experts urgent.
func (f *fetcher) promote(position int, experts []int) {
	var last [2]*fetch // of either kind
	for _, e := range experts {
		for i, c := range f.arrival(ID{position, e}).copies {
			if c != last[0] && c != last[1] {
				c.ticket.Promote(transfer.Demand)
				last[i%2] = c
			}
		}
	}
}

// tier that the copy comes from.
func (f *fetch) tier() Tier {
	if f.from == device.Host {
		return Host
	}
	return Peer
}

// skip ends those copies of an expert that have not begun, where nobody has references
// on what they bring any more: on a slow link a guess that was wrong would otherwise
// hold up those that are right.
func (f *fetcher) skip(id ID) {
	var copies [2]*fetch // of each kind
	for _, c := range copies[:copy(copies[:], f.arrival(id).copies)] {
		if f.wanted(c) || !c.ticket.Skip() {
			continue
		}
		f.counts.Fetched[c.tier()] -= c.bytes
		for _, at := range c.slots {
			if key := f.cache.Holds(at); key >= 0 { // else by another copy of the same expert that was forgone
				f.counts.fetches[key/f.plan.Experts][key%f.plan.Experts]--
			}
			f.cache.Forget(at)
			f.drop(&f.slots[at].copies, c)
		}
		f.drop(&f.fetches, c)
	}
}

// wanted says whether somebody has a reference on a slot that c goes to, or whether c is
// there for another expert.
func (f *fetcher) wanted(c *fetch) bool {
	for _, at := range c.slots {
		if f.cache.References(at) > 0 || !slices.Contains(f.slots[at].copies, c) {
			return true
		}
	}
	return false
}

// drop takes a fetch out of a list.
func (f *fetcher) drop(list *[]*fetch, c *fetch) {
	if i := slices.Index(*list, c); i >= 0 {
		*list = slices.Delete(*list, i, i+1)
		f.unref(c)
	}
}

// forgetEnded drops the fetches that have landed.
func (f *fetcher) forgetEnded() {
	left := f.fetches[:0]
	for _, c := range f.fetches {
		if c.ticket == nil || !c.ticket.Ended() || c.ticket.Err() != nil {
			left = append(left, c)
			continue
		}
		if c.from != device.Host {
			f.peers.ReadWorked(c.from)
		}
		f.unref(c)
	}
	clear(f.fetches[len(left):])
	f.fetches = left
}

// failure is the first of a fetch.
func (f *fetcher) failure() error {
	for _, c := range f.fetches {
		if f.err != nil {
			break
		}
		f.err = c.ticket.Err()
	}
	return f.err
}

// cancel ends the fetches of which nothing is with the device yet, and waits for the
// others. An error means that ctx was done.
func (f *fetcher) cancel(ctx context.Context) error {
	for _, c := range f.fetches {
		if c.ticket != nil {
			c.ticket.Cancel()
		}
	}
	for _, c := range f.fetches {
		if c.ticket == nil {
			continue
		}
		if err := c.ticket.Wait(ctx); !c.ticket.Ended() {
			return err
		}
	}
	return nil
}

// reset forgets what did not arrive whole, once no fetch is under way and nobody refers to
// a slot, and says how many slots that were.
func (f *fetcher) reset() (lost int) {
	lost = f.dropFailed()
	if f.peerBackoff > 0 {
		f.peerBackoff = 2 // BeginStep of the step's next try, and that of the step after it
	}
	f.cache.Reset()
	for i := range f.slots {
		f.forgetCopies(&f.slots[i])
	}
	for _, c := range f.fetches {
		f.unref(c)
	}
	clear(f.fetches)
	f.fetches, f.err = f.fetches[:0], nil
	return lost
}

// dropFailed forgets what failed copies should have brought.
func (f *fetcher) dropFailed() (lost int) {
	for _, c := range f.fetches {
		if c.ticket != nil && c.ticket.Err() == nil {
			continue
		}
		f.counts.Failed++
		for _, at := range c.slots {
			if f.cache.Holds(at) >= 0 {
				f.cache.Forget(at)
				lost++
			}
		}
		if c.from != device.Host && c.ticket != nil && f.peers.ReadFailed(c.copies, c.ticket.Err()) {
			f.peerBackoff = max(f.peerBackoff, 1)
		}
	}
	return lost
}
