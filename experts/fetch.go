package experts

import (
	"context"
	"fmt"
	"slices"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/harvest"
	"github.com/moeserve/moeserve/peercache"
	"github.com/moeserve/moeserve/transfer"
)

// run is what one copy would bring if nothing of it came from elsewhere: experts that
// lie side by side where they are and in the ring.
type run struct {
	src     device.Region
	experts []int
	slot    int // the first
	after   []device.Point
	// copies in peers' memory that are read, and references on them.
	copies []*peercache.Copy[ID]
	refs   []harvest.Ref
}

// bring takes a reference on each of these offloaded experts of the layer: on its
// slot where it is still there, else on a free one, to which it is copied. Copies are cut
// for so many waves. False: some found no slot.
func (s *Store) bring(position int, missing []int, waves int, p transfer.Priority) (whole bool, err error) {
	l := &s.layers[position]
	for _, e := range missing {
		if id := (ID{position, e}); !l.refs[e].Held() && s.inRing(id) {
			if ref, ok := s.slots[l.slot[e]].cell.Acquire(); ok {
				l.refs[e] = ref
			}
		}
	}
	s.runs, whole = s.collect(position, missing, waves, p, s.runs[:0])
	for i, hostBytes := range s.fromHost() {
		r := &s.runs[i]
		if err == nil {
			if err = s.start(position, r, hostBytes, p); err == nil {
				continue
			}
			s.err = err
		}
		s.giveUp(r)
	}
	return whole, err
}

// collect gives free slots to the experts that have none and cuts them into runs,
// none of which goes over the border of a wave.
func (s *Store) collect(position int, missing []int, waves int, p transfer.Priority, runs []run) ([]run, bool) {
	l, size := &s.layers[position], s.plan.Layout.Size
	n := min(waves, len(missing))
	from := 0
	for w := range n {
		to := from + share(w, n, len(missing))
		fresh := true // the next one begins a run
		for _, e := range missing[from:to] {
			if l.refs[e].Held() {
				fresh = true
				continue
			}
			at, ok := s.freeSlot()
			if !ok {
				return runs, false
			}
			s.after = s.occupy(at, ID{position, e}, s.after[:0])
			l.refs[e], _ = s.slots[at].cell.Acquire()
			l.slot[e] = at
			src, copied, ref := s.resolve(ID{position, e})
			s.slots[at].fresh, s.slots[at].ahead, s.slots[at].from = true, p == transfer.Prefetch, Host
			if copied != nil {
				s.slots[at].from = Peer
			}
			if fresh || !runs[len(runs)-1].takes(src, copied, at) {
				runs = appendRun(runs, src, at)
				fresh = false
			}
			r := &runs[len(runs)-1]
			r.src.Bytes += size
			r.experts = append(r.experts, e)
			for _, a := range s.after {
				if !slices.Contains(r.after, a) {
					r.after = append(r.after, a)
				}
			}
			if copied != nil {
				r.copies, r.refs = append(r.copies, copied), append(r.refs, ref)
			}
		}
		from = to
	}
	return runs, true
}

// appendRun begins a run that reads from the address of src on, with no expert yet, in
// the room that an earlier one has left.
func appendRun(runs []run, src device.Region, slot int) []run {
	if n := len(runs); n < cap(runs) {
		runs = runs[:n+1]
	} else {
		runs = append(runs, run{})
	}
	r := &runs[len(runs)-1]
	*r = run{
		src: src.Slice(0, 0), slot: slot,
		experts: r.experts[:0], after: r.after[:0], copies: r.copies[:0], refs: r.refs[:0],
	}
	return runs
}

// takes says whether an expert that lies at src and goes to a slot prolongs the run.
// Peer copies do only within a slab: two of them may lie side by side, and are different
// allocations.
func (r *run) takes(src device.Region, copied *peercache.Copy[ID], slot int) bool {
	if r.src.Space != src.Space || r.src.End() != src.Addr || r.slot+len(r.experts) != slot {
		return false
	}
	return copied == nil || r.copies[len(r.copies)-1].Slab() == copied.Slab()
}

// resolve says where an offloaded expert is copied from, and, where that is a peer,
// by which copy, with a reference on it. It takes no lock and never waits. The step
// that is run again after a copy from a peer failed takes everything from the host.
func (s *Store) resolve(id ID) (device.Region, *peercache.Copy[ID], harvest.Ref) {
	if s.mistrust == 0 {
		if copied, ref, ok := s.peers.Acquire(id); ok {
			if s.without.noReference {
				ref.Release()
			}
			return copied.Region(), copied, ref
		}
	}
	return s.hostRegion(id), nil, harvest.Ref{}
}

// freeSlot is the first slot from s.next on that nobody holds.
func (s *Store) freeSlot() (int, bool) {
	for k := range s.slots {
		at := (s.next + k) % len(s.slots)
		if _, _, references := s.slots[at].cell.State(); references == 0 {
			return at, true
		}
	}
	return 0, false
}

// occupy makes a free slot that of id and adds to after until when it may still be read,
// or written by a copy that was made in vain.
func (s *Store) occupy(at int, id ID, after []device.Point) []device.Point {
	sl := &s.slots[at]
	exclusive, ok := sl.cell.BeginExclusive()
	if !ok {
		panic(fmt.Sprintf("experts: ring slot %d is held exclusively by somebody else", at))
	}
	after = append(after, exclusive.Points()...)
	if !sl.awaited {
		for _, f := range sl.copies {
			if !f.ticket.Ended() {
				after = append(after, f.done)
				continue
			}
			// It has ended, so this does not wait: it orders the next copy after this one,
			// whatever has become of it.
			_ = f.ticket.Wait(context.Background())
		}
	}
	if s.without.noReaders {
		after = after[:0]
	}
	exclusive.Replace()
	s.forgetCopies(sl)
	sl.holds, sl.awaited = id, false
	s.next = (at + 1) % len(s.slots)
	return after
}

// fromHost says how many bytes of each run come from the host, so that peers' links
// and the host's end together.
func (s *Store) fromHost() []int64 {
	s.loads = s.loads[:0]
	for i := range s.runs {
		s.loads = append(s.loads, transfer.Load{From: s.runs[i].src.Space, Bytes: s.runs[i].src.Bytes})
	}
	return s.links.Split(s.loads, s.o.SplitBytes)
}

// start submits the copies of a run: its last hostBytes come from the host.
func (s *Store) start(position int, r *run, hostBytes int64, p transfer.Priority) error {
	size := s.plan.Layout.Size
	dst := s.ring.Region(int64(r.slot)*size, r.src.Bytes)
	rest := r.src.Bytes - hostBytes
	for _, e := range r.experts {
		s.counts.fetches[position][e]++
	}
	f := s.newFetch(r.src.Space)
	f.copies = append(f.copies, r.copies...)
	err := s.submit(position, f, mainCopy, r, 0, dst.Slice(0, rest), r.src.Slice(0, rest), p)
	for k := range r.refs {
		if err == nil && r.refs[k].Held() {
			// Not at done, which the next copy into the slot may fail while this one reads.
			r.refs[k].ReleaseAt(f.ticket.End())
		}
	}
	// The rest, cut where the experts do not lie side by side in host memory.
	for off := rest; off < r.src.Bytes && err == nil; {
		first := off / size
		src := s.hostRegion(ID{position, r.experts[first]})
		src = src.Slice(off-first*size, size-(off-first*size))
		end := (first + 1) * size
		for end < r.src.Bytes {
			next := s.hostRegion(ID{position, r.experts[end/size]})
			if next.Addr != src.End() {
				break
			}
			src.Bytes, end = src.Bytes+size, end+size
		}
		err = s.submit(position, s.newFetch(device.Host), hostPart, r, off, dst.Slice(off, end-off), src, p)
		off = end
	}
	return err
}

// giveUp notes that a run is not, or not wholly, on its way.
func (s *Store) giveUp(r *run) {
	f := s.newFetch(r.src.Space)
	for k := range r.experts {
		f.slots = append(f.slots, r.slot+k)
	}
	s.keep(&s.fetches, f)
	for k := range r.refs {
		if r.refs[k].Held() {
			r.refs[k].Release()
		}
	}
}

// newFetch is one of which nothing is set but where it comes from.
func (s *Store) newFetch(from device.Space) *fetch {
	n := len(s.spent)
	if n == 0 {
		return &fetch{from: from}
	}
	f := s.spent[n-1]
	s.spent = s.spent[:n-1]
	*f = fetch{from: from, slots: f.slots[:0], copies: f.copies[:0]}
	return f
}

// keep puts a fetch into a list, letGo says that it was taken out of one: what is in none
// is used again.
func (s *Store) keep(list *[]*fetch, f *fetch) {
	*list = append(*list, f)
	f.refs++
}

func (s *Store) letGo(f *fetch) {
	if f.refs--; f.refs > 0 || f.ticket == nil || f.ticket.Err() != nil {
		return // or its name may still be asked for
	}
	f.ticket.Release()
	clear(f.copies)
	s.spent = append(s.spent, f)
}

// forgetCopies says that nothing brings what a slot holds.
func (s *Store) forgetCopies(sl *slot) {
	for _, f := range sl.copies {
		s.letGo(f)
	}
	sl.copies = sl.copies[:0]
}

// String names the copy.
func (f *fetch) String() string {
	return fmt.Sprintf("layer %d experts %d to %d", f.layer, f.first, f.last)
}

// submit starts one copy of a run, that of the bytes from off on.
func (s *Store) submit(position int, f *fetch, kind int, r *run, off int64, dst, src device.Region, p transfer.Priority) error {
	size := s.plan.Layout.Size
	first, last := int(off/size), int((off+dst.Bytes-1)/size)
	sl := &s.slots[r.slot+first]
	sl.values[kind]++
	f.done = device.Point{Fence: sl.landed[kind], Value: sl.values[kind]}
	for k := first; k <= last; k++ {
		at := r.slot + k
		f.slots = append(f.slots, at)
		s.keep(&s.slots[at].copies, f)
	}
	f.layer, f.first, f.last = s.plan.Layers[position], r.experts[first], r.experts[last]
	ticket, err := s.o.Transfer.Submit(transfer.Request{
		Src: src, Dst: dst,
		Priority: p, After: r.after, Done: f.done, Label: f,
	})
	if err != nil {
		return err
	}
	f.ticket, f.bytes = ticket, dst.Bytes
	s.keep(&s.fetches, f)
	s.stats.Fetched[f.tier()] += f.bytes
	return nil
}

// tier that the copy comes from.
func (f *fetch) tier() Tier {
	if f.from == device.Host {
		return Host
	}
	return Peer
}

// forgo ends those copies into a slot that have not begun, where nobody has references
// on what they bring any more: on a slow link a guess that was wrong would otherwise
// hold up those that are right.
func (s *Store) forgo(at int) {
	var copies [2]*fetch // of each kind
	for _, f := range copies[:copy(copies[:], s.slots[at].copies)] {
		if s.wanted(f) || !f.ticket.Forgo() {
			continue
		}
		s.stats.Fetched[f.tier()] -= f.bytes
		for _, at := range f.slots {
			sl := &s.slots[at]
			if sl.holds != nothing { // by another copy of the same expert that was forgone
				s.counts.fetches[sl.holds.Layer][sl.holds.Expert]--
			}
			sl.holds = nothing
			s.drop(&sl.copies, f)
		}
		s.drop(&s.fetches, f)
	}
}

// wanted says whether somebody has a reference on a slot that f goes to, or whether f is
// there for another expert.
func (s *Store) wanted(f *fetch) bool {
	for _, at := range f.slots {
		if _, _, references := s.slots[at].cell.State(); references > 0 || !slices.Contains(s.slots[at].copies, f) {
			return true
		}
	}
	return false
}

// drop takes a fetch out of a list.
func (s *Store) drop(list *[]*fetch, f *fetch) {
	if i := slices.Index(*list, f); i >= 0 {
		*list = slices.Delete(*list, i, i+1)
		s.letGo(f)
	}
}

// forgetEnded drops the fetches that have landed.
func (s *Store) forgetEnded() {
	left := s.fetches[:0]
	for _, f := range s.fetches {
		if f.ticket == nil || !f.ticket.Ended() || f.ticket.Err() != nil {
			left = append(left, f)
			continue
		}
		if f.from != device.Host {
			s.peers.ReadWorked(f.from)
		}
		s.letGo(f)
	}
	clear(s.fetches[len(left):])
	s.fetches = left
}

// cancel ends the fetches of which nothing is with the device yet.
func (s *Store) cancel() {
	for _, f := range s.fetches {
		if f.ticket != nil {
			f.ticket.Cancel()
		}
	}
}
