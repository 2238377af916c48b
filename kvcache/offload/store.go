package offload

import (
	"slices"

	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/kvcache/tier"
	"github.com/moeserve/moeserve/transfer"
)

// store is a store under way, in one tier.
type store struct {
	level   *level
	account tier.Store
	// blocks of the GPU that are held, by block of the account; none for those refused.
	blocks [][]int32
	// members are those of each of the account's keys, where events name them: see level.members.
	members map[kvcache.Key][]kvcache.Key
	// prefix are the keys that were offered with those of the store.
	prefix []kvcache.Key
	// hurried: a sequence waits for it.
	hurried bool
}

// offered is a block that the tiers may store: the GPU's blocks that it is made of, and their keys.
type offered struct {
	keys   []kvcache.Key
	blocks []int32
}

// key is the tier's.
func (o *offered) key() kvcache.Key { return o.keys[len(o.keys)-1] }

// Store offers the sequence's blocks keys[from:from+len(src)], which are these blocks of the
// pool, full and final, to the tiers. It holds those that are being stored, and returns at
// once. Every tier from the fastest on gets what the policy wants and it lacks, until one
// that is lossy has taken a block. Blocks that do not make up a whole tier block are ignored.
func (t *Tiers) Store(keys []kvcache.Key, from int, src []int32, why Cause) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return
	}
	t.drop()
	all, prefix := make([]offered, 0, len(src)/t.factor), make([]kvcache.Key, 0, len(src)/t.factor)
	for i := (from + t.factor - 1) / t.factor * t.factor; i+t.factor <= min(from+len(src), len(keys)); i += t.factor {
		all = append(all, offered{keys[i : i+t.factor], src[i-from : i-from+t.factor]})
		prefix = append(prefix, keys[i+t.factor-1])
	}
	for _, level := range t.levels {
		// LRU evicts in the order of completion, so the beginning of a sequence that grew would
		// go before its end. For ARC it would be a second use.
		if why == Filled || t.lru() {
			level.account.Touch(prefix)
		}
	}
	t.stores.Offered(prefix, why)
	for _, level := range t.levels {
		n := min(max(t.stores.Stores(level.Name, prefix, why), 0), len(all))
		if n == 0 {
			continue
		}
		refused := t.storeIn(level, all[:n], prefix, why)
		level.counts.refused += int64(len(refused))
		if level.backed {
			continue
		}
		all = slices.Concat(refused, all[n:])
		prefix = make([]kvcache.Key, len(all))
		for i := range all {
			prefix[i] = all[i].key()
		}
	}
}

// storeIn starts to store blocks in one tier and returns those that it refuses. Where the
// medium has no memory for more than the Budget knew, blocks are evicted for those that it
// refuses, as if the tier were full; if that does not help, nothing is stored until the next
// report. mu is held.
func (t *Tiers) storeIn(level *level, all []offered, prefix []kvcache.Key, why Cause) (refused []offered) {
	if level.budget.closed {
		return all
	}
	refused, again := t.startStore(level, all, prefix, why)
	if len(again) == 0 {
		return refused
	}
	level.account.Withhold(level.account.Stats().Free)
	more, again := t.startStore(level, again, prefix, why)
	level.budget.closed = len(again) > 0
	return slices.Concat(refused, more, again)
}

// startStore starts to store blocks in one tier, and returns those that the account refuses
// and those for which the medium has no memory. mu is held.
func (t *Tiers) startStore(level *level, all []offered, prefix []kvcache.Key, why Cause) (refused, again []offered) {
	room := max(0, t.storeLimit()-level.storing) / t.factor
	var account tier.Store
	n, ok := t.fitting(level, all, room), false
	for ; n > 0; n /= 2 {
		keys := make([]kvcache.Key, n)
		for i := range keys {
			keys[i] = all[i].key()
		}
		if account, ok = level.account.PrepareStore(keys); ok {
			break
		}
	}
	refused = all[n:]
	if len(account.Evicted) > 0 {
		evicted := make([]kvcache.Key, len(account.Evicted))
		for i, e := range account.Evicted {
			evicted[i] = e.Key
		}
		level.Memory.Drop(evicted)
	}
	if len(account.Keys) == 0 {
		return refused, nil
	}
	level.account.Touch(account.Keys) // the end of a prefix is to be evicted before its beginning
	blockBytes := t.o.Pool.Shape().BlockBytes()
	s := &store{level: level, account: account, prefix: prefix, blocks: make([][]int32, len(account.Keys))}
	held := make([]int32, 0, len(account.Keys)*t.factor) // all of s.blocks
	pieces := make([]Piece, 0, len(account.Keys)*t.factor)
	job := &Job{Blocks: make([]Block, len(account.Keys)), Priority: transfer.KVStore, Label: label{"store", len(account.Keys), level.Name, 0}}
	if why == Preempted {
		job.Priority = transfer.KVLoad // the scheduler waits for the blocks
	}
	next := 0 // of all: the account's keys are some of them, in their order
	for i, k := range account.Keys {
		for all[next].key() != k {
			next++
		}
		from := len(held)
		for j, id := range all[next].blocks {
			pieces = append(pieces, Piece{GPU: t.o.Pool.Region(id), Offset: int64(j) * blockBytes})
		}
		held = append(held, all[next].blocks...)
		job.Blocks[i] = Block{Key: k, ID: account.IDs[i], Pieces: pieces[from:len(pieces):len(pieces)]}
		s.blocks[i] = held[from:len(held):len(held)]
	}
	if level.members != nil {
		s.members = membersOf(all, account.Keys)
	}
	run, places, err := t.start(route{GPU, level.Name}, job, s)
	t.completeStore(level, account, places, false)
	to := &refused
	if level.Budget != nil && noMemory(err) {
		to = &again
	}
	next = 0
	for _, i := range places {
		for all[next].key() != account.Keys[i] {
			next++
		}
		*to = append(*to, all[next])
		s.blocks[i] = nil
	}
	if run == nil {
		return refused, again
	}
	level.counts.storingBytes += run.bytes()
	for _, blocks := range s.blocks {
		t.o.Blocks.Hold(blocks)
		level.storing += len(blocks)
	}
	return refused, again
}

// storeLimit is the number of the GPU's blocks that the stores of one tier may hold. mu is held.
func (t *Tiers) storeLimit() int {
	if t.o.StoreLimit > 0 {
		return t.o.StoreLimit
	}
	return max(t.o.Blocks.Present()/4, t.factor)
}

// lru reports whether tiers evict what was used longest ago, whatever else.
func (t *Tiers) lru() bool { return t.o.Config.EvictionPolicy == tier.PolicyLRU }

// fitting is how many of the blocks, from the first on, need at most room new ones. mu is
// held.
func (t *Tiers) fitting(level *level, all []offered, room int) int {
	for i, o := range all {
		if level.account.Lookup(o.key()) != tier.Miss {
			continue
		}
		if room--; room < 0 {
			return i
		}
	}
	return len(all)
}

// completeStore completes these blocks of a store in a tier's account, the last one first;
// the medium drops what has failed. mu is held.
func (t *Tiers) completeStore(level *level, account tier.Store, blocks []int, ok bool) {
	if len(blocks) == 0 {
		return
	}
	part := account
	part.Keys, part.IDs = nil, nil
	for _, i := range slices.Backward(blocks) {
		part.Keys, part.IDs = append(part.Keys, account.Keys[i]), append(part.IDs, account.IDs[i])
	}
	if failed := level.account.CompleteStore(part, ok); len(failed) > 0 {
		level.Memory.Drop(failed)
	}
}

// finish implements owner.
func (s *store) finish(t *Tiers, run *running) {
	arrived, err := run.transfer.Result()
	t.drop() // what was lost meanwhile is not stored
	good, bad := run.blocks(arrived)
	level := s.level
	level.counts.stored(run, good)
	level.counts.failedStores += int64(len(bad))
	t.completeStore(level, s.account, good, true)
	if level.members != nil {
		level.members.apply(level.account.TakeEvents(), s.members)
	}
	t.completeStore(level, s.account, bad, false)
	if t.lru() {
		level.account.Touch(s.prefix) // other blocks of it were completed before
	}
	for _, blocks := range s.blocks {
		t.o.Blocks.Unhold(blocks)
		level.storing -= len(blocks)
	}
	if err != nil {
		t.log.Warn("kv blocks not stored", "in", level.Name, "blocks", len(bad), "err", err)
	}
}
