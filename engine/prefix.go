package engine

import (
	"context"
	"encoding/binary"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/moeserve/moeserve/engine/scheduler"
	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/kvcache/offload"
)

// Offloader keeps KV blocks in other tiers and brings them back. *offload.Tiers is one. The
// engine's goroutine calls its methods, Store and Poll also while a step runs; Wait is also called from
// another one, while none of the others is.
type Offloader interface {
	// Factor is the number of blocks in a block of the tiers, which store only whole ones.
	Factor() int
	// Lookup returns how many of a sequence's blocks from block from on can be loaded, in a
	// row, of those within its first tokens; keys are those of all its full blocks. wait: the
	// next block is on its way, ask again later.
	Lookup(keys []kvcache.Key, from, tokens int) (blocks int, wait bool)
	// OnItsWay reports whether block i of a sequence, for which Lookup said wait, still is.
	OnItsWay(keys []kvcache.Key, i int) bool
	// Load starts to load the sequence's blocks from block from on into dst, which it copies
	// and holds until Poll reports the end, whatever becomes of the sequence.
	Load(seq int64, keys []kvcache.Key, from int, dst []int32) error
	// Store offers the sequence's blocks from block from on, which are src, full and final. It
	// holds those that are stored meanwhile, and keeps neither slice.
	Store(keys []kvcache.Key, from int, src []int32, why offload.Cause)
	// Poll returns the loads that have ended.
	Poll() []offload.Loaded
	// Busy reports whether a load or a store is under way, or has ended and Poll has not seen it.
	Busy() bool
	// Wait waits until Poll has something to do, nothing is under way, or ctx is done.
	Wait(ctx context.Context) error
	// Computed reports that so many tokens of prompts took so many seconds.
	Computed(tokens int, seconds float64)
	// Drop drops the content of a sequence's blocks, also of those that are being stored.
	Drop(keys []kvcache.Key)
	// Reset drops all content.
	Reset()
	// OnLost sets a function that is called, on any goroutine, when content was lost that Poll is to
	// take into account. It returns at once.
	OnLost(f func())
	// TakeEvents returns what the tiers stored and removed since the last call.
	TakeEvents() []kvcache.Event
}

var _ Offloader = (*offload.Tiers)(nil)

// prefixes find what the KV cache and the tiers behind it have of sequences. The engine's goroutine
// uses them; keys are computed by any.
type prefixes struct {
	kv *kvcache.Manager
	// local: sequences share blocks of the pool.
	local bool
	tiers Offloader // nil: none
	// factor is the number of blocks in one of the tiers.
	factor int
	// loading has the first block of each load that is planned or under way, whose content
	// others share when it has arrived.
	loading map[kvcache.Key]struct{}
	// last: no request comes after those that end now, so that nothing is stored for it.
	last bool
	// filled are blocks to be offered to the tiers while the next step runs.
	filled []filledBlocks
	// loaded are loads that Poll has reported meanwhile.
	loaded []offload.Loaded
	// prompts are groups that have, or had, blocks of their own.
	prompts []*group
	// salt is Options.KeySalt, longAfter Options.LongAfter.
	salt      string
	longAfter int
	// recent are keys of prompts.
	recent promptKeys
	// resets are part of all keys: what running requests have, or stores under way, is not
	// found by those that come after a reset.
	resets atomic.Uint64
}

func newPrefixes(o *Options) *prefixes {
	p := &prefixes{
		kv: o.KV, local: o.PrefixCaching, tiers: o.Offload,
		loading: map[kvcache.Key]struct{}{}, salt: o.KeySalt, longAfter: o.LongAfter, recent: promptKeys{blockTokens: o.KV.BlockTokens()},
	}
	if p.tiers != nil {
		p.factor = p.tiers.Factor()
	}
	return p
}

// keyed reports whether a request's sequences have keys.
func (p *prefixes) keyed(q *Request) bool { return p.local || !p.alone(q) }

// alone reports whether the tiers have nothing to do with a request.
func (p *prefixes) alone(q *Request) bool { return p.tiers == nil || q.WithoutTiers }

// long reports whether a sequence of so many tokens has longrope's long factors.
func (p *prefixes) long(tokens int) bool { return p.longAfter > 0 && tokens > p.longAfter }

// root is the parent of the keys of a sequence's first blocks.
func (p *prefixes) root(salt string, resets uint64, long bool) kvcache.Key {
	b := binary.LittleEndian.AppendUint32(nil, uint32(p.kv.BlockTokens()))
	b = binary.LittleEndian.AppendUint32(b, uint32(len(p.salt)))
	b = append(b, p.salt...)
	b = binary.LittleEndian.AppendUint64(b, resets)
	if long {
		b = append(b, 1)
	} else {
		b = append(b, 0)
	}
	return kvcache.RootKey(append(b, salt...))
}

// promptKeys are the keys of a prompt's full blocks, with room for so many more tokens.
func (p *prefixes) promptKeys(salt string, resets uint64, prompt []int32, room int) []kvcache.Key {
	root := p.root(salt, resets, p.long(len(prompt)))
	keys := p.recent.begin(make([]kvcache.Key, 0, (len(prompt)+room)/p.kv.BlockTokens()), root, prompt)
	begun := len(keys)
	keys = p.appendKeys(keys, root, prompt)
	p.recent.add(root, prompt, keys, begun)
	return keys
}

// moreKeys are the keys of a sequence's full blocks, those that it has and of more tokens.
func (p *prefixes) moreKeys(q *sequence) []kvcache.Key {
	var root kvcache.Key
	if len(q.blocks.keys) == 0 {
		root = p.root(q.sub.req.CacheSalt, q.sub.resets, q.long)
	}
	return p.appendKeys(q.blocks.keys, root, q.tokens)
}

// appendKeys appends the keys of the full blocks of tokens to those of the first of them, which follow
// from root.
func (p *prefixes) appendKeys(keys []kvcache.Key, root kvcache.Key, tokens []int32) []kvcache.Key {
	size := p.kv.BlockTokens()
	for n := len(keys); (n+1)*size <= len(tokens); n++ {
		parent := root
		if n > 0 {
			parent = keys[n-1]
		}
		keys = append(keys, parent.Next(tokens[n*size:(n+1)*size]))
	}
	return keys
}

// blocks are the KV blocks of one sequence, with what the prefix cache and the tiers had of it.
type blocks struct {
	*kvcache.Table
	in *prefixes
	// keys of the full blocks of the known tokens. Empty where blocks have none.
	keys []kvcache.Key
	// local and load are the result of the last Match: tokens in blocks of the pool, and more
	// that must be loaded.
	local, load int
	// waits: the last Match found that block waitsFor is on its way.
	waits    bool
	waitsFor int
	// claim is this sequence's in prefixes.loading.
	claim kvcache.Key
	// admitted: the scheduler has admitted the sequence, and not released its blocks since.
	admitted bool
	// ended: the next Release is the last.
	ended bool
	// alone: the tiers have none of its blocks, nor get them.
	alone bool
	// group is that of its request's samples; nil: there are no others, or it has other content
	// than they have.
	group *group
	// prompt are the log-probabilities that must be computed of its prompt; nil: none.
	prompt *promptLogProbs
}

// group are the samples of a request, which have the same prompt. One of them computes it, and
// the others fork its blocks.
type group struct {
	// tokens of the prompt.
	tokens int
	// leader computes the prompt; nil: the next sample that is admitted does.
	leader *blocks
	// prompt has the blocks of the prompt of a leader that has ended before all samples were
	// admitted; empty: there are none.
	prompt *kvcache.Table
	// left is the number of samples that were never admitted.
	left int
}

// source is the table that has the prompt but for its last token; nil: none has.
func (g *group) source() *kvcache.Table {
	switch {
	case g.leader != nil && g.leader.Filled() >= g.tokens-1:
		return g.leader.Table
	case g.prompt.Filled() >= g.tokens-1:
		return g.prompt
	}
	return nil
}

// start records that one more of the samples was admitted. The last one releases the prompt.
func (g *group) start() {
	if g.left--; g.left == 0 {
		g.prompt.Release(true)
	}
}

// resign ends the part that a sample plays for the others. With keep they can still fork its
// prompt.
func (b *blocks) resign(keep bool) {
	g := b.group
	if g == nil || g.leader != b {
		return
	}
	if keep && g.left > 0 && g.source() == b.Table {
		g.prompt.Fork(b.Table, g.tokens-1)
		b.in.prompts = append(slices.DeleteFunc(b.in.prompts, func(g *group) bool { return g.left == 0 }), g)
	}
	g.leader = nil
}

// fork shares the blocks of the prompt, which another sample has computed. wait: one is about to.
func (b *blocks) fork() (done, wait bool) {
	g := b.group
	from := g.source()
	switch {
	case from == b.Table:
		return false, false
	case from != nil:
		b.Fork(from, g.tokens-1)
		b.local = g.tokens - 1
		return true, false
	case g.leader == nil:
		g.leader = b
	}
	return false, g.leader != b
}

// identify sets the keys of a sequence's first blocks.
func (b *blocks) identify(keys []kvcache.Key) {
	b.keys, b.waits = keys, false
	if b.in.local {
		b.Identify(keys)
	}
}

// events are those of the pool's blocks and of the tiers', since the last call.
func (p *prefixes) events() []kvcache.Event {
	e := p.kv.TakeEvents()
	if p.tiers != nil {
		e = append(e, p.tiers.TakeEvents()...)
	}
	return e
}

// Match implements scheduler.Blocks.
func (b *blocks) Match(maxTokens int) (tokens int, at scheduler.Cached) {
	b.local, b.load = 0, 0
	if b.group != nil && maxTokens < b.group.tokens {
		switch done, wait := b.fork(); {
		case done:
			return b.local, scheduler.Ready
		case wait:
			return 0, scheduler.MustWait
		}
	}
	maxTokens = b.prompt.cacheable(maxTokens)
	if b.waits && b.in.onItsWay(b.keys, b.waitsFor) {
		return 0, scheduler.MustWait
	}
	b.waits = false
	if b.in.local {
		b.local = b.Table.Match(maxTokens)
	}
	size := b.in.kv.BlockTokens()
	from := b.local / size
	if b.alone || from >= min(len(b.keys), maxTokens/size) {
		return b.local, scheduler.Ready
	}
	n := 0
	if _, b.waits = b.in.loading[b.keys[from]]; !b.waits {
		n, b.waits = b.in.tiers.Lookup(b.keys, from, maxTokens)
	}
	switch {
	case b.waits:
		b.waitsFor = from + n
		b.Table.Release(true)
		return 0, scheduler.MustWait
	case n == 0:
		return b.local, scheduler.Ready
	}
	b.load = n * size
	if b.in.local {
		b.claim = b.keys[from]
		b.in.loading[b.claim] = struct{}{}
	}
	return b.local + b.load, scheduler.MustLoad
}

// onItsWay reports whether block i of a sequence is being loaded for another one, or stored.
func (p *prefixes) onItsWay(keys []kvcache.Key, i int) bool {
	if _, ok := p.loading[keys[i]]; ok {
		return true
	}
	return p.tiers.OnItsWay(keys, i)
}

// unclaim lets others load what this sequence has, or has not, loaded.
func (b *blocks) unclaim() {
	delete(b.in.loading, b.claim)
	b.claim = kvcache.Key{}
}

// filled are the blocks from block from on that are full.
func (b *blocks) filled(from int) []int32 { return b.Blocks()[from : b.Filled()/b.in.kv.BlockTokens()] }

// Release implements scheduler.Blocks. The tiers are offered what the sequence has computed.
func (b *blocks) Release(keep bool) {
	b.unclaim()
	b.in.filled = slices.DeleteFunc(b.in.filled, func(f filledBlocks) bool { return f.of == b })
	if full := b.filled(0); b.admitted && keep && !b.alone && !b.in.last && len(full) > 0 {
		why := offload.Preempted
		if b.ended {
			why = offload.Released
		}
		b.in.tiers.Store(b.keys, 0, full, why)
	}
	b.admitted = false
	b.Table.Release(keep)
}

// filledBlocks are those of a sequence from block first on that are full.
type filledBlocks struct {
	of    *blocks
	first int
}

// store has the tiers be offered the blocks that a step has filled, of tokens [from, to).
func (b *blocks) store(from, to int) {
	if b.alone {
		return
	}
	if unit := b.in.kv.BlockTokens() * b.in.factor; from/unit < to/unit {
		b.in.filled = append(b.in.filled, filledBlocks{b, from / unit * b.in.factor})
	}
}

// storeFilled offers the tiers what steps have filled.
func (p *prefixes) storeFilled() {
	if p.tiers == nil {
		return
	}
	for _, f := range p.filled {
		p.tiers.Store(f.of.keys, f.first, f.of.filled(f.first), offload.Filled)
	}
	clear(p.filled)
	p.filled = p.filled[:0]
}

// meanwhile does for the tiers, while the device computes, what the next step does not depend on.
// Nothing else uses the account of blocks then.
func (p *prefixes) meanwhile() {
	if p.tiers != nil {
		p.storeFilled()
		p.loaded = append(p.loaded, p.tiers.Poll()...)
	}
}

// poll returns the loads that have ended.
func (p *prefixes) poll() []offload.Loaded {
	ended := append(p.loaded, p.tiers.Poll()...)
	p.loaded = p.loaded[:0]
	return ended
}

// drop has the tiers drop what they have of a sequence that failed.
func (b *blocks) drop() {
	if !b.alone && !b.in.last {
		b.in.tiers.Drop(b.keys)
	}
}

// startLoad starts to load what the last Match has found in the tiers.
func (p *prefixes) startLoad(id scheduler.ID, b *blocks) error {
	size := p.kv.BlockTokens()
	from := b.local / size
	return p.tiers.Load(int64(id), b.keys, from, b.Blocks()[from:from+b.load/size])
}

// releasePrompts releases all blocks of prompts that no sequence has, and reports whether there
// were any.
func (p *prefixes) releasePrompts() (released bool) {
	for _, g := range p.prompts {
		released = released || len(g.prompt.Blocks()) > 0
		g.prompt.Release(true)
	}
	clear(p.prompts)
	p.prompts = p.prompts[:0]
	return released
}

// wait waits until a transfer between the tiers has ended.
func (p *prefixes) wait(ctx context.Context) error {
	if err := p.tiers.Wait(ctx); err != nil && ctx.Err() == nil {
		return fmt.Errorf("engine: wait for KV blocks: %w", err)
	}
	return nil
}
