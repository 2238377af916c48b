package experts

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/trace"
	"github.com/moeserve/moeserve/experts/cache"
	"github.com/moeserve/moeserve/harvest"
	"github.com/moeserve/moeserve/lease"
	"github.com/moeserve/moeserve/peercache"
	"github.com/moeserve/moeserve/transfer"
)

// fetcher copies offloaded experts into the expert cache. Its owner's lock guards it.
type fetcher struct {
	// mu is the owner's lock, which is released during waits.
	mu     *sync.Mutex
	engine *transfer.Engine
	plan   *Plan
	// memory of the expert cache, the state of its slots, and the latest fetch into each.
	memory device.Memory
	cache  *cache.Slots
	slots  []slotFetch
	// source selects where an expert is copied from; hostRegion is its host copy.
	source     func(ID) source
	hostRegion func(ID) device.Region
	peers      *peercache.Cache[ID]
	splitBytes int64
	links      *transfer.Inbound
	counts     *counts
	log        *slog.Logger

	// fetches not yet known to have ended, and the first failure of one.
	fetches []*fetch
	err     error
	// changes counts changes of which expert is in which slot.
	changes uint64
	// peerBackoff is the number of steps until fetches use peers again.
	peerBackoff int
	// Scratch space of acquire, and a freelist of fetches.
	groups      []copyGroup
	after       []device.Point
	loads       []transfer.Load
	pieces      []transfer.Piece
	freeFetches []*fetch
}

// source is where an offloaded expert is copied from. If that is a peer, ref is a reference
// on peerCopy.
type source struct {
	region   device.Region
	peerCopy *peercache.Copy[ID]
	ref      harvest.Ref
}

// slotFetch is the latest fetch into a slot.
type slotFetch struct {
	// copies into the slot, at most one of each kind; none once the host knows that the
	// expert has arrived. A slot without an expert has those of which the rest was skipped.
	copies []*fetch
	// awaited: the compute stream has waited for the copies, or will.
	awaited bool
	// from is the source tier. uncounted: no use has counted the fetch yet; prefetched:
	// it was submitted before the layer needed it.
	from                  Tier
	uncounted, prefetched bool
	// unused: a prefetch filled the slot, and no layer has used it; passed: its layer ran without it.
	unused, passed bool
	// doneFences are signaled by the copies whose first expert goes to this slot;
	// doneValues are their latest values.
	doneFences [2]device.Fence
	doneValues [2]uint32
}

// The kinds of copies into a slot: from the expert's source, and of the part that the
// host sends at the same time.
const (
	mainCopy = iota
	hostCopy
)

// fetch is one copy into the expert cache: of the experts of a copyGroup, or of the part
// of them that the host sends. It is the label of the copy.
type fetch struct {
	// layer by the model's number, its position, and the experts copied.
	layer, position int
	experts         []int
	// refs counts the lists that contain the fetch: fetcher.fetches and slotFetch.copies.
	refs int
	// ticket is nil if the copy was not submitted.
	ticket *transfer.Ticket
	done   device.Point
	from   device.Space
	// bytes that are copied: of a fetch whose rest was skipped only those before.
	bytes   int64
	skipped bool
	slots   []int
	// copies are the peer copies that are read.
	copies []*peercache.Copy[ID]
}

// open creates the slots' fences, once the memory of the expert cache is allocated.
func (f *fetcher) open(p *Plan, o Options, peers *peercache.Cache[ID], hostRegion func(ID) device.Region, c *counts) (err error) {
	f.engine, f.plan, f.peers, f.hostRegion, f.counts, f.splitBytes = o.Transfer, p, peers, hostRegion, c, o.SplitBytes
	f.log = o.Log
	f.cache, f.slots = cache.New(p.CacheSlots, len(p.Layers)*p.Experts), make([]slotFetch, p.CacheSlots)
	f.source, f.links = f.nearest, o.Transfer.Inbound(o.Space)
	for i := range f.slots {
		for k := range f.slots[i].doneFences {
			if f.slots[i].doneFences[k], err = o.Machine.NewFence(fmt.Sprintf("expert cache slot %d", i)); err != nil {
				return err
			}
			f.slots[i].doneValues[k] = f.slots[i].doneFences[k].Value()
		}
	}
	return nil
}

// close frees the memory and the fences. No copy is in progress.
func (f *fetcher) close() error {
	errs := []error{free(f.memory)}
	for i := range f.slots {
		for _, fence := range f.slots[i].doneFences {
			if fence != nil {
				errs = append(errs, fence.Close())
			}
		}
	}
	return errors.Join(errs...)
}

// key is an expert's number in the expert cache.
func (f *fetcher) key(id ID) int { return id.Layer*f.plan.Experts + id.Expert }

// has reports whether an expert is cached, or being fetched.
func (f *fetcher) has(id ID) bool { return f.cache.Has(f.key(id)) }

// slot is the slot of an expert's last fetch, or -1.
func (f *fetcher) slot(id ID) int { return f.cache.LastSlot(f.key(id)) }

// slotFetch is the fetch of a cached expert.
func (f *fetcher) slotFetch(id ID) *slotFetch { return &f.slots[f.slot(id)] }

// copyGroup is experts of one wave that are copied together from one memory. The part
// that the host sends instead is its end.
type copyGroup struct {
	from    device.Space
	experts []int
	// slots that the experts are copied to, and their sources.
	slots   []int
	sources []source
	after   []device.Point
}

// acquire takes a reference for each of these offloaded experts of the layer at a
// position, in refs by expert: on its slot if it is cached, otherwise on a free slot,
// into which it is copied. The experts of each of so many waves are copied together; with
// waves = 0 each expert is a copy of its own, so that it can be skipped. False: some
// experts found no free slot.
func (f *fetcher) acquire(position int, refs []lease.Ref, missing []int, waves int, p transfer.Priority) (whole bool, err error) {
	for _, e := range missing {
		if !refs[e].Held() {
			if ref, ok := f.cache.Acquire(f.key(ID{position, e})); ok {
				refs[e] = ref
			}
		}
	}
	f.groups, whole = f.planGroups(position, refs, missing, waves, p, f.groups[:0])
	for i, hostBytes := range f.hostShares() {
		r := &f.groups[i]
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

// planGroups assigns free slots to the experts that have none and divides them into copy
// groups.
func (f *fetcher) planGroups(position int, refs []lease.Ref, missing []int, waves int, p transfer.Priority, groups []copyGroup) ([]copyGroup, bool) {
	n := min(waves, len(missing))
	if waves == 0 {
		n = len(missing)
	}
	from := 0
	for w := range n {
		to, first := from+share(w, n, len(missing)), len(groups)
		for _, e := range missing[from:to] {
			if refs[e].Held() {
				continue
			}
			at, ok := f.cache.NextFree()
			if !ok {
				return groups, false
			}
			id := ID{position, e}
			refs[e], f.after = f.assignSlot(at, id, f.after[:0])
			src := f.source(id)
			a := &f.slots[at]
			a.uncounted, a.prefetched, a.from = true, p == transfer.Prefetch, Host
			a.unused = a.prefetched
			if src.peerCopy != nil {
				a.from = Peer
			}
			k := first
			for k < len(groups) && groups[k].from != src.region.Space {
				k++
			}
			if k == len(groups) {
				groups = appendGroup(groups, src.region.Space)
			}
			r := &groups[k]
			r.experts, r.slots, r.sources = append(r.experts, e), append(r.slots, at), append(r.sources, src)
			for _, a := range f.after {
				if !slices.Contains(r.after, a) {
					r.after = append(r.after, a)
				}
			}
		}
		from = to
	}
	return groups, true
}

// appendGroup appends an empty group, reusing the capacity of an earlier one.
func appendGroup(groups []copyGroup, from device.Space) []copyGroup {
	if n := len(groups); n < cap(groups) {
		groups = groups[:n+1]
	} else {
		groups = append(groups, copyGroup{})
	}
	r := &groups[len(groups)-1]
	clear(r.sources) // drop references to peer copies
	*r = copyGroup{from: from, experts: r.experts[:0], slots: r.slots[:0], sources: r.sources[:0], after: r.after[:0]}
	return groups
}

// nearest is the peer copy, if there is one, otherwise the host copy. It takes no lock
// and never waits. A step that is retried after a failed copy from a peer reads
// everything from the host.
func (f *fetcher) nearest(id ID) source {
	if f.peerBackoff == 0 {
		if copied, ref, ok := f.peers.Acquire(id); ok {
			return source{copied.Region(), copied, ref}
		}
	}
	return source{region: f.hostRegion(id)}
}

// assignSlot gives a free slot to id and appends to after the fence values until which
// the slot may still be read, or written by a copy that no step waited for.
func (f *fetcher) assignSlot(at int, id ID, after []device.Point) (lease.Ref, []device.Point) {
	a := &f.slots[at]
	f.changes++
	if !a.awaited {
		for _, c := range a.copies {
			if !c.ticket.Ended() {
				after = append(after, c.done)
				continue
			}
			// The copy has ended, so this does not wait: it orders the next copy after
			// this one, which may have failed.
			_ = c.ticket.Wait(context.Background())
		}
	}
	f.countUnused(at)
	f.dropCopies(a)
	a.awaited = false
	return f.cache.Assign(at, f.key(id), after)
}

// countUnused counts the prefetch into a slot that another expert gets, or that becomes empty, if no layer has used it.
func (f *fetcher) countUnused(at int) {
	a := &f.slots[at]
	if key := f.cache.Expert(at); a.unused && key >= 0 { // -1: skipped, failed or forgotten
		f.counts.unused[key/f.plan.Experts][key%f.plan.Experts]++
	}
	a.unused, a.passed = false, false
}

// used marks what is in an expert's slot as used by a layer.
func (f *fetcher) used(id ID) {
	a := f.slotFetch(id)
	a.unused, a.passed = false, false
}

// hostShares returns how many bytes of each group the host sends, so that the copies over
// all links end at the same time.
func (f *fetcher) hostShares() []int64 {
	f.loads = f.loads[:0]
	for i := range f.groups {
		f.loads = append(f.loads, transfer.Load{From: f.groups[i].from, Bytes: int64(len(f.groups[i].experts)) * f.plan.Layout.Size})
	}
	return f.links.Split(f.loads, f.splitBytes)
}

// start submits the copies of a group; the host sends its last hostBytes.
func (f *fetcher) start(position int, r *copyGroup, hostBytes int64, p transfer.Priority) error {
	size := f.plan.Layout.Size
	for _, e := range r.experts {
		f.counts.fetches[position][e]++
	}
	// An expert at the border is copied in two parts, one by each copy.
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
		if bytes == 0 { // the host sends all of it
			f.slots[r.slots[k]].from = Host
			continue
		}
		// Peer copies in different slabs are in different allocations.
		separate := k > 0 && src.peerCopy != nil && src.peerCopy.Slab() != r.sources[k-1].peerCopy.Slab()
		f.pieces = append(f.pieces, transfer.Piece{Dst: f.region(r.slots[k]).Slice(0, bytes), Src: src.region.Slice(0, bytes), Separate: separate})
		if src.peerCopy != nil {
			main.copies = append(main.copies, src.peerCopy)
		}
	}
	if len(f.pieces) > 0 {
		if err := f.submit(position, main, mainCopy, r, 0, p); err != nil {
			r.release()
			f.readFailed(main, err)
			return err
		}
		for k := range main.copies {
			// Not at done: the next copy into the slot may fail that fence while this one
			// still reads.
			if ref := &r.sources[k].ref; ref.Held() {
				ref.ReleaseAt(main.ticket.End())
			}
		}
	} else {
		f.recycle(main)
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
	return f.submit(position, f.newFetch(device.Host), hostCopy, r, n, p)
}

// release releases the remaining references on peer copies.
func (r *copyGroup) release() {
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

// abort records that not all copies of a group were submitted.
func (f *fetcher) abort(r *copyGroup) {
	c := f.newFetch(r.from)
	c.slots = append(c.slots, r.slots...)
	f.addTo(&f.fetches, c)
	r.release()
}

// newFetch returns an empty fetch with its source memory set.
func (f *fetcher) newFetch(from device.Space) *fetch {
	n := len(f.freeFetches)
	if n == 0 {
		return &fetch{from: from}
	}
	c := f.freeFetches[n-1]
	f.freeFetches = f.freeFetches[:n-1]
	*c = fetch{from: from, experts: c.experts[:0], slots: c.slots[:0], copies: c.copies[:0]}
	return c
}

// addTo appends a fetch to a list; unref records its removal from one. A fetch in no list
// goes to the freelist.
func (f *fetcher) addTo(list *[]*fetch, c *fetch) {
	*list = append(*list, c)
	c.refs++
}

func (f *fetcher) unref(c *fetch) {
	if c.refs--; c.refs > 0 || c.ticket == nil || c.ticket.Err() != nil {
		return // in use, or failed: errors may still need its label
	}
	c.ticket.Release()
	f.recycle(c)
}

// recycle puts a fetch on the freelist.
func (f *fetcher) recycle(c *fetch) {
	clear(c.copies)
	f.freeFetches = append(f.freeFetches, c)
}

// dropCopies empties the slot's list of copies.
func (f *fetcher) dropCopies(a *slotFetch) {
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
func (f *fetch) Describe(n *trace.Note) { f.describe(n, f.tier()) }

func (f *fetch) describe(n *trace.Note, from Tier) {
	n.Name, n.Layer, n.Experts, n.Tier = "fetch experts", f.layer, slices.Clone(f.experts), from.String()
	if n.Priority == transfer.Prefetch.String() {
		n.Name = "prefetch experts"
	}
}

// submit starts one copy of a group: of f.pieces, into the group's slots from the first
// on.
func (f *fetcher) submit(position int, c *fetch, kind int, r *copyGroup, first int, p transfer.Priority) error {
	last := first + len(f.pieces) - 1
	a := &f.slots[r.slots[first]]
	a.doneValues[kind]++
	c.done = device.Point{Fence: a.doneFences[kind], Value: a.doneValues[kind]}
	for _, at := range r.slots[first : last+1] {
		c.slots = append(c.slots, at)
		f.addTo(&f.slots[at].copies, c)
	}
	c.layer, c.position, c.experts = f.plan.Layers[position], position, append(c.experts, r.experts[first:last+1]...)
	for i := range f.pieces {
		c.bytes += f.pieces[i].Src.Bytes
	}
	ticket, err := f.engine.Submit(transfer.Request{Pieces: f.pieces, Priority: p, After: r.after, Done: c.done, DoneInOrder: true, Label: c})
	if err != nil {
		return err
	}
	c.ticket = ticket
	f.addTo(&f.fetches, c)
	f.counts.Fetched[c.tier()] += c.bytes
	return nil
}

// raisePriority gives the copies of these experts demand priority.
func (f *fetcher) raisePriority(position int, experts []int) {
	var last [2]*fetch // by kind
	for _, e := range experts {
		for i, c := range f.slotFetch(ID{position, e}).copies {
			if c != last[0] && c != last[1] {
				c.ticket.RaisePriority(transfer.Demand)
				last[i%2] = c
			}
		}
	}
}

// tier is the source tier of the copy.
func (f *fetch) tier() Tier {
	if f.from == device.Host {
		return Host
	}
	return Peer
}

// skip ends the copies of an expert of which not all chunks were launched, if none of the slots that
// they fill has references: a wrong prediction would delay the experts that are needed. What is in flight still
// lands, so the next copy into such a slot goes behind it (assignSlot). A copy of several experts that has begun
// goes on: some of them may have arrived.
func (f *fetcher) skip(id ID) {
	var copies [2]*fetch // by kind
	for _, c := range copies[:copy(copies[:], f.slotFetch(id).copies)] {
		if f.inUse(c) || len(c.slots) > 1 && c.ticket.Landed()+c.ticket.InFlight() > 0 {
			continue
		}
		left := c.ticket.Skip()
		if left == 0 {
			continue
		}
		f.counts.Fetched[c.tier()] -= left
		c.bytes -= left
		for _, at := range c.slots {
			if key := f.cache.Expert(at); c.bytes > 0 {
				f.countUnused(at)
			} else if key >= 0 { // -1: the other copy of this expert was skipped before
				f.counts.fetches[key/f.plan.Experts][key%f.plan.Experts]--
			}
			f.cache.Clear(at)
			f.changes++
		}
		if c.skipped = true; c.bytes > 0 {
			continue // what is in flight
		}
		for _, at := range c.slots {
			f.removeFrom(&f.slots[at].copies, c)
		}
		f.removeFrom(&f.fetches, c)
	}
}

// leave redirects the fetches that would read a slab, and of which nothing was launched yet, to
// host memory.
func (f *fetcher) leave(slab uint64) {
	for _, c := range f.fetches {
		if c.ticket == nil || c.skipped || !slices.ContainsFunc(c.copies, func(x *peercache.Copy[ID]) bool { return x.Slab() == slab }) {
			continue
		}
		f.pieces = f.pieces[:0]
		for k, left := 0, c.bytes; left > 0; k++ {
			n := min(left, f.plan.Layout.Size) // of the last expert the host may send a part already
			src := f.hostRegion(ID{c.position, c.experts[k]})
			f.pieces = append(f.pieces, transfer.Piece{Dst: f.region(c.slots[k]).Slice(0, n), Src: src.Slice(0, n)})
			left -= n
		}
		redirected, err := c.ticket.Redirect(f.pieces, &fetchFromHost{c})
		if err != nil {
			f.log.Error("a fetch from a peer whose memory is needed cannot be redirected", "copy", c.String(), "err", err)
		}
		if !redirected {
			continue
		}
		f.counts.Fetched[Peer] -= c.bytes
		f.counts.Fetched[Host] += c.bytes
		for _, at := range c.slots {
			if a := &f.slots[at]; slices.Contains(a.copies, c) {
				a.from = Host
			}
		}
		clear(c.copies)
		c.from, c.copies = device.Host, c.copies[:0]
	}
}

// fetchFromHost is the label of a fetch that was redirected: the transfer engine may have read the
// fetch's own source before.
type fetchFromHost struct{ *fetch }

// Describe implements trace.Describer.
func (f *fetchFromHost) Describe(n *trace.Note) { f.describe(n, Host) }

// inUse reports whether a slot that c fills has references, or belongs to another fetch
// by now.
func (f *fetcher) inUse(c *fetch) bool {
	for _, at := range c.slots {
		if f.cache.References(at) > 0 || !slices.Contains(f.slots[at].copies, c) {
			return true
		}
	}
	return false
}

// removeFrom removes a fetch from a list.
func (f *fetcher) removeFrom(list *[]*fetch, c *fetch) {
	if i := slices.Index(*list, c); i >= 0 {
		*list = slices.Delete(*list, i, i+1)
		f.unref(c)
	}
}

// removeCompleted removes the fetches that have completed without an error.
func (f *fetcher) removeCompleted() {
	left := f.fetches[:0]
	for _, c := range f.fetches {
		if c.ticket == nil || !c.ticket.Ended() || c.ticket.Err() != nil {
			left = append(left, c)
			continue
		}
		switch {
		case c.skipped: // a chunk that was in flight may have failed
			f.counts.Fetched[c.tier()] -= c.bytes - c.ticket.Landed()
		case c.from != device.Host:
			f.peers.ReadSucceeded(c.from)
		}
		f.unref(c)
	}
	clear(f.fetches[len(left):])
	f.fetches = left
}

// failure is the first failure of a fetch.
func (f *fetcher) failure() error {
	for _, c := range f.fetches {
		if f.err != nil {
			break
		}
		f.err = c.ticket.Err()
	}
	return f.err
}

// cancel cancels the fetches of which nothing was launched yet, and waits for the others.
// An error means that ctx was done.
func (f *fetcher) cancel(ctx context.Context) error {
	for _, c := range f.fetches {
		if c.ticket != nil {
			c.ticket.Cancel()
		}
	}
	all := slices.Clone(f.fetches) // only the goroutine that waits changes it
	f.mu.Unlock()
	defer f.mu.Lock()
	for _, c := range all {
		if c.ticket == nil {
			continue
		}
		if err := c.ticket.Wait(ctx); !c.ticket.Ended() {
			return err
		}
	}
	return nil
}

// reset drops experts that did not arrive completely and returns their number. No fetch
// is in progress and no slot has references.
func (f *fetcher) reset() (lost int) {
	lost = f.clearFailed()
	if f.peerBackoff > 0 {
		f.peerBackoff = 2 // counted down by BeginStep of the retried step and of the one after it
	}
	f.cache.Reset()
	for i := range f.slots {
		f.dropCopies(&f.slots[i])
	}
	for _, c := range f.fetches {
		f.unref(c)
	}
	clear(f.fetches)
	f.fetches, f.err = f.fetches[:0], nil
	return lost
}

// clearFailed clears the slots of failed copies.
func (f *fetcher) clearFailed() (lost int) {
	for _, c := range f.fetches {
		if c.ticket != nil && c.ticket.Err() == nil {
			continue
		}
		f.counts.Failed++
		for _, at := range c.slots {
			if f.cache.Expert(at) >= 0 {
				f.cache.Clear(at)
				lost++
			}
		}
		if c.ticket != nil {
			f.readFailed(c, c.ticket.Err())
		}
	}
	return lost
}

// readFailed reports that a copy of a peer's memory failed, or that its link is lost and refused it, as it
// does where what was in flight was skipped when the peer was lost. The retry reads nothing of peers.
func (f *fetcher) readFailed(c *fetch, err error) {
	if c.from != device.Host && f.peers.ReadFailed(c.copies, err) {
		f.peerBackoff = max(f.peerBackoff, 1)
	}
}
