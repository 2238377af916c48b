package tier

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/moeserve/moeserve/kvcache"
)

// State is what a tier has of a key.
type State uint8

// The states of a key.
const (
	Miss       State = iota // the tier has no block of the key
	Hit                     // the block is ready: it can be loaded
	HitPending              // a store is filling the block: ask again later
)

func (s State) String() string {
	switch s {
	case Miss:
		return "miss"
	case Hit:
		return "hit"
	case HitPending:
		return "pending"
	}
	return fmt.Sprintf("State(%d)", uint8(s))
}

// Options describe a tier.
type Options struct {
	// Blocks is the tier's capacity; its ids are [0, Blocks).
	Blocks int
	// Medium is the tier's name in events: GPU, PEER_GPU, CPU, FILE or another.
	Medium string
	// Policy names the eviction policy: PolicyLRU, PolicyARC or a registered one. Default:
	// PolicyLRU.
	Policy string
	// NewEviction makes the eviction policy of a tier of so many blocks, with none in use. It
	// is called by New and by every Reset. Default: that of Policy.
	NewEviction func(blocks int) Eviction
	// DiscardEvents is for tiers whose events nobody takes: TakeEvents returns none.
	DiscardEvents bool
}

// EnsureDefaults returns o with its defaults filled in.
func (o Options) EnsureDefaults() Options {
	if o.Policy == "" {
		o.Policy = PolicyLRU
	}
	if o.NewEviction == nil {
		policies.Lock()
		defer policies.Unlock()
		o.NewEviction = policies.by[o.Policy]
	}
	return o
}

// Validate reports the first invalid option.
func (o Options) Validate() error {
	switch {
	case o.Blocks < 1 || o.Blocks > math.MaxInt32-1:
		return fmt.Errorf("tier: Blocks is %d; it must be from 1 to %d", o.Blocks, math.MaxInt32-1)
	case o.Medium == "":
		return errors.New("tier: Medium is empty; it must name the tier in events")
	case o.EnsureDefaults().NewEviction == nil:
		return fmt.Errorf("tier: eviction policy %q is unknown; it must be one of %s", o.Policy, strings.Join(Policies(), ", "))
	}
	return nil
}

// ErrNotReady is the error of a load of a key whose block is missing, or still being stored.
var ErrNotReady = errors.New("the block is not ready")

// Load is a read of blocks under way. A part of it may be completed before the rest: as a Load
// with some of its IDs.
type Load struct {
	// IDs are the blocks of the keys, in their order.
	IDs   []int32
	epoch uint64
}

// Store is a write of blocks under way. A part of it may be completed before the rest: as a
// Store with some of its IDs.
type Store struct {
	// Keys are the keys that have to be stored: of those asked for, the ones that the tier did
	// not have. IDs are their blocks. Both are the caller's.
	Keys []kvcache.Key
	IDs  []int32
	// Evicted are the blocks that made room, in the order of their eviction. Their ids may be
	// among IDs.
	Evicted []Evicted
	number  uint64 // as block.number
}

// Evicted is a block that left the tier, as its place was needed.
type Evicted struct {
	Key kvcache.Key
	ID  int32
}

// Stats are numbers of blocks. Free, Evictable, Pinned, Pending and Quarantined add up to
// Capacity, and Allocated - Evicted - Freed is Capacity - Free.
type Stats struct {
	Capacity int
	Free     int
	// Evictable blocks are ready, and no load reads them.
	Evictable int
	// Pinned blocks are read by loads.
	Pinned int
	// Pending blocks are filled by stores.
	Pending int
	// Quarantined blocks were lost while a load or store was under way: they have no key, and
	// are freed when it ends.
	Quarantined int

	// The rest only counts up, also over Reset.

	// Allocated blocks were prepared for stores.
	Allocated int64
	// Evicted blocks made room for others.
	Evicted int64
	// Freed blocks left the tier for other causes: a failed store, a loss, a reset.
	Freed int64
	// Stored blocks became ready; Loaded blocks were read, each once for every load.
	Stored, Loaded int64
}

// Manager is the account of a tier's blocks. Its methods take time in proportion to the keys that
// they are given (ARC: times the logarithm of the number of blocks), except for Reset, which takes
// it in proportion to the blocks.
type Manager struct {
	medium      string
	discard     bool
	newEviction func(blocks int) Eviction
	eviction    Eviction

	blocks []block
	byKey  map[kvcache.Key]int32 // blocks with a key; unallocated within PrepareStore
	free   []int32               // blocks that were in use before; the last is allocated first
	fresh  int32                 // the first block that was never used
	epoch  uint64                // number of resets
	stores uint64                // number of stores
	marks  uint64                // number of marks
	// withheld free blocks are not allocated, see Withhold.
	withheld int
	stats    Stats
	events   []kvcache.Event

	// Reused between calls.
	missing []kvcache.Key
	victims []int32
	marked  func(id int32) bool
}

// block is a block of the tier. The zero block is free.
type block struct {
	key kvcache.Key
	// number is of the store that allocated the block. Numbers start at 1 and never repeat.
	number uint64
	mark   uint64 // that of the last PrepareStore whose keys had the block's
	refs   int32  // pending, or the number of loads that read the block
	lost   bool   // the medium lost the content: the key is no longer the block's
}

const (
	pending     = -1 // refs of a block that a store is filling
	unallocated = -1 // id of a key that PrepareStore is about to allocate a block for
)

// New returns the account of a tier whose blocks are all free.
func New(o Options) (*Manager, error) {
	o = o.EnsureDefaults()
	if err := o.Validate(); err != nil {
		return nil, err
	}
	m := &Manager{
		medium: o.Medium, discard: o.DiscardEvents, newEviction: o.NewEviction, eviction: o.NewEviction(o.Blocks),
		blocks: make([]block, o.Blocks), byKey: map[kvcache.Key]int32{},
		stats: Stats{Capacity: o.Blocks, Free: o.Blocks},
	}
	m.marked = func(id int32) bool { return m.blocks[id].mark == m.marks }
	return m, nil
}

// Lookup returns what the tier has of a key.
func (m *Manager) Lookup(k kvcache.Key) State {
	id, ok := m.byKey[k]
	return m.state(id, ok)
}

func (m *Manager) state(id int32, ok bool) State {
	switch {
	case !ok:
		return Miss
	case m.blocks[id].refs == pending:
		return HitPending
	}
	return Hit
}

// PrepareLoad pins the blocks of keys, which must all be ready: otherwise it pins none and
// returns ErrNotReady. A block that several loads read is pinned until all of them are
// completed.
func (m *Manager) PrepareLoad(keys []kvcache.Key) (Load, error) {
	l := Load{IDs: make([]int32, len(keys)), epoch: m.epoch}
	for i, k := range keys {
		id, ok := m.byKey[k]
		if s := m.state(id, ok); s != Hit {
			return Load{}, fmt.Errorf("tier: load block %d of %d from %s, key %x (%v): %w", i, len(keys), m.medium, k[:4], s, ErrNotReady)
		}
		l.IDs[i] = id
	}
	for _, id := range l.IDs {
		b := &m.blocks[id]
		if b.refs == 0 {
			m.stats.Evictable--
			m.stats.Pinned++
			m.eviction.SetEvictable(id, false)
		}
		b.refs++
	}
	return l, nil
}

// CompleteLoad ends a load, ok or failed: its blocks, in their order, become evictable where no
// other load reads them. A load from before Reset is ignored. A block that no load reads is an
// error, and then nothing changes.
func (m *Manager) CompleteLoad(l Load, ok bool) error {
	if l.epoch != m.epoch {
		return nil
	}
	// All references are dropped before the first consequence, so that an error, also of a block
	// that is in the load more often than it is read, can be undone.
	for i, id := range l.IDs {
		if m.blocks[id].refs <= 0 {
			for _, id := range l.IDs[:i] {
				m.blocks[id].refs++
			}
			return fmt.Errorf("tier: complete a load from %s: block %d, the load's %d of %d, is not being read", m.medium, id, i, len(l.IDs))
		}
		m.blocks[id].refs--
	}
	for _, id := range l.IDs {
		m.blocks[id].refs++
	}
	for _, id := range l.IDs {
		b := &m.blocks[id]
		if ok {
			m.stats.Loaded++
		}
		if b.refs--; b.refs > 0 {
			continue
		}
		if b.lost {
			m.stats.Quarantined--
			m.release(id)
			continue
		}
		m.stats.Pinned--
		m.stats.Evictable++
		m.eviction.SetEvictable(id, true)
	}
	return nil
}

// PrepareStore allocates blocks for those of keys that the tier does not have, ready or pending,
// and evicts others where too few are free: never blocks of keys, blocks that are read, or
// blocks that are being filled. A Store without keys says that all are there. ok is false where
// there are too few blocks, or the policy refuses; then nothing has changed.
func (m *Manager) PrepareStore(keys []kvcache.Key) (s Store, ok bool) {
	m.marks++
	m.missing = m.missing[:0]
	keep := 0 // evictable blocks that are marked
	for _, k := range keys {
		id, found := m.byKey[k]
		switch {
		case !found:
			m.missing = append(m.missing, k)
			m.byKey[k] = unallocated // k may come twice
		case id == unallocated || m.marked(id):
		default:
			b := &m.blocks[id]
			b.mark = m.marks
			if b.refs == 0 {
				keep++
			}
		}
	}
	if len(m.missing) == 0 {
		return Store{}, true
	}
	s.Evicted, ok = m.evict(len(m.missing)-max(0, m.stats.Free-m.withheld), keep)
	if !ok {
		for _, k := range m.missing {
			delete(m.byKey, k)
		}
		return Store{}, false
	}
	m.stores++
	s.number = m.stores
	s.Keys, s.IDs = slices.Clone(m.missing), make([]int32, len(m.missing))
	for i, k := range s.Keys {
		id := m.allocate()
		m.blocks[id] = block{key: k, number: s.number, refs: pending}
		m.byKey[k] = id
		s.IDs[i] = id
		m.eviction.Insert(id, k)
	}
	n := len(s.IDs)
	m.stats.Pending += n
	m.stats.Allocated += int64(n)
	return s, true
}

// Withhold keeps that number of free blocks, now and later, from being allocated: the medium
// has no memory for them at present. Stores evict blocks instead. Stats.Free counts them
// nevertheless, and Reset keeps the number.
func (m *Manager) Withhold(blocks int) { m.withheld = max(blocks, 0) }

// evict frees n blocks, none of them marked, or none at all. keep is the number of evictable
// blocks that are marked.
func (m *Manager) evict(n, keep int) (evicted []Evicted, ok bool) {
	if n <= 0 {
		return nil, true
	}
	if n > m.stats.Evictable-keep {
		return nil, false
	}
	victims, ok := m.eviction.Evict(m.victims[:0], n, m.marked)
	if !ok {
		return nil, false
	}
	m.victims = victims
	if len(victims) != n {
		panic(fmt.Sprintf("tier: the eviction policy of %s returned %d blocks, not %d", m.medium, len(victims), n))
	}
	evicted = make([]Evicted, n)
	removed := make([]kvcache.Key, n)
	for i, id := range victims {
		b := &m.blocks[id]
		if b.number == 0 || b.refs != 0 || m.marked(id) {
			panic(fmt.Sprintf("tier: the eviction policy of %s returned block %d, which is not evictable", m.medium, id))
		}
		evicted[i], removed[i] = Evicted{b.key, id}, b.key
		delete(m.byKey, b.key)
		m.toFree(id)
	}
	m.stats.Evictable -= n
	m.stats.Evicted += int64(n)
	m.event(kvcache.Event{Removed: removed})
	return evicted, true
}

// CompleteStore ends a store. Where it is ok its blocks become ready and evictable, in their
// order; where it failed they are freed, and it returns their keys: what the medium has of these
// is not needed. Blocks that were lost meanwhile are freed in either case. It changes nothing about
// blocks of the store that were completed before, or if Reset was called meanwhile: their keys may
// have other blocks by now.
func (m *Manager) CompleteStore(s Store, ok bool) (failed []kvcache.Key) {
	var stored []kvcache.Key
	for _, id := range s.IDs {
		b := &m.blocks[id]
		if b.number != s.number || b.refs != pending {
			continue
		}
		if b.lost {
			m.stats.Quarantined--
			m.release(id)
			continue
		}
		m.stats.Pending--
		if !ok {
			m.eviction.Remove(id)
			delete(m.byKey, b.key)
			failed = append(failed, b.key)
			m.release(id)
			continue
		}
		b.refs = 0
		m.stats.Evictable++
		m.stats.Stored++
		m.eviction.SetEvictable(id, true)
		if stored == nil {
			stored = make([]kvcache.Key, 0, len(s.IDs))
		}
		stored = append(stored, b.key)
	}
	if len(stored) > 0 {
		m.event(kvcache.Event{Stored: stored})
	}
	return failed
}

// Touch reports that keys are used, those that the tier does not have included. It goes from the
// last key to the first, so that the end of a prefix is evicted before its beginning.
func (m *Manager) Touch(keys []kvcache.Key) {
	for _, k := range slices.Backward(keys) {
		id, ok := m.byKey[k]
		if !ok {
			id = unallocated
		}
		m.eviction.Touch(id, k, m.state(id, ok))
	}
}

// Lose reports that the medium lost the block of a key: its peer revoked the memory, its file is
// damaged. The key is a miss from now on, and may be stored again. A block that is being read or
// filled is not used again until its loads or its store are completed; such a store cannot make
// it ready any more. Lose returns whether there was such a block.
func (m *Manager) Lose(k kvcache.Key) bool {
	id, ok := m.byKey[k]
	if !ok {
		return false
	}
	b := &m.blocks[id]
	delete(m.byKey, k)
	m.eviction.Remove(id)
	if b.refs != pending {
		m.event(kvcache.Event{Removed: []kvcache.Key{k}})
	}
	switch {
	case b.refs == 0:
		m.stats.Evictable--
		m.release(id)
		return true
	case b.refs == pending:
		m.stats.Pending--
	default:
		m.stats.Pinned--
	}
	b.lost = true
	m.stats.Quarantined++
	return true
}

// LoseRead is Lose for the blocks of a load under way, which the medium could not read, and returns
// their keys: of those that were not lost before. After a Reset there are none: their keys may have
// other blocks by now.
func (m *Manager) LoseRead(l Load) (lost []kvcache.Key) {
	if l.epoch != m.epoch {
		return nil
	}
	for _, id := range l.IDs {
		if b := &m.blocks[id]; b.refs > 0 && !b.lost {
			lost = append(lost, b.key)
			m.Lose(b.key)
		}
	}
	return lost
}

// Reset frees all blocks. Ids start at 0 again, whatever loads and stores are under way: their
// completion is ignored, and it is the caller who has the copies of new ones wait for theirs.
func (m *Manager) Reset() {
	var removed []kvcache.Key
	for id := range m.fresh {
		if b := &m.blocks[id]; b.number != 0 && b.refs != pending && !b.lost {
			removed = append(removed, b.key)
		}
	}
	if len(removed) > 0 {
		m.event(kvcache.Event{Removed: removed})
	}
	m.epoch++
	m.eviction = m.newEviction(len(m.blocks))
	clear(m.blocks[:m.fresh])
	clear(m.byKey)
	m.free, m.fresh = m.free[:0], 0
	s := &m.stats
	s.Freed += int64(s.Capacity - s.Free)
	s.Free, s.Evictable, s.Pinned, s.Pending, s.Quarantined = s.Capacity, 0, 0, 0, 0
}

// TakeEvents returns the events since the last call. Who applies all events of a tier in their
// order, from New on, has the set of its ready keys.
func (m *Manager) TakeEvents() []kvcache.Event {
	e := m.events
	m.events = nil
	return e
}

// Stats returns the numbers of blocks.
func (m *Manager) Stats() Stats { return m.stats }

func (m *Manager) event(e kvcache.Event) {
	if m.discard {
		return
	}
	e.Medium = m.medium
	m.events = append(m.events, e)
}

// allocate returns a free block. The caller has checked that there is one.
func (m *Manager) allocate() int32 {
	m.stats.Free--
	if int(m.fresh) < len(m.blocks) {
		m.fresh++
		return m.fresh - 1
	}
	last := len(m.free) - 1
	id := m.free[last]
	m.free = m.free[:last]
	return id
}

// release frees a block that was not evicted.
func (m *Manager) release(id int32) {
	m.stats.Freed++
	m.toFree(id)
}

func (m *Manager) toFree(id int32) {
	m.blocks[id] = block{}
	m.free = append(m.free, id)
	m.stats.Free++
}
