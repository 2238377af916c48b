package engine

import (
	"time"

	"github.com/moeserve/moeserve/engine/scheduler"
)

// start records that a sample was admitted, or never will be.
func (q *sequence) start() {
	if q.started {
		return
	}
	q.started = true
	if g := q.blocks.group; g != nil {
		g.start()
	}
}

// leave prepares a sample's end. Where its request goes on, others may still need its prompt.
func (q *sequence) leave(goesOn bool) {
	q.start()
	q.blocks.resign(goesOn)
	q.blocks.ended = true
}

// admitted records that a sequence was admitted.
func (e *Engine) admitted(q *sequence, now time.Time) {
	q.start()
	q.blocks.admitted = true
	q.first = q.sub.job.admit(now, q.blocks.local)
	if !q.first || !e.prefixes.keyed(&q.sub.req) {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	tokens := int64(len(q.tokens))
	if e.prefixes.local {
		e.state.PrefixCacheQueries += tokens
		e.state.PrefixCacheHits += int64(q.blocks.local)
	}
	if !q.blocks.alone {
		e.state.ExternalQueries += tokens - int64(q.blocks.local)
	}
}

// startLoad starts to load an admitted sequence's blocks.
func (e *Engine) startLoad(id scheduler.ID) {
	q := e.seqs[id]
	if err := e.prefixes.startLoad(id, &q.blocks); err != nil {
		e.o.Log.Warn("kv blocks not loaded, and computed again", "request", q.sub.req.ID, "sample", q.sample, "tokens", q.blocks.load, "err", err)
		e.loaded(id, 0)
	}
}

// takeLoaded lets the sequences run whose loads have ended. Those that were aborted are gone.
func (e *Engine) takeLoaded() {
	if e.prefixes.tiers == nil {
		return
	}
	for _, l := range e.prefixes.poll() {
		if id := scheduler.ID(l.Seq); e.seqs[id] != nil {
			e.loaded(id, l.Blocks*e.o.KV.BlockTokens())
		}
	}
}

// loaded ends a sequence's load, of which so many tokens have arrived. The others are computed.
func (e *Engine) loaded(id scheduler.ID, tokens int) {
	q := e.seqs[id]
	q.blocks.unclaim()
	e.sched.Loaded(id, q.blocks.local+tokens)
	if !q.first || tokens == 0 {
		return
	}
	q.sub.job.load(tokens)
	e.mu.Lock()
	defer e.mu.Unlock()
	e.state.ExternalHits += int64(tokens)
}

// ResetPrefixCache drops the cached prefixes and, with external, those of other tiers: requests
// submitted later find none of them, nor what requests have computed that run now. Without
// external these may still store their blocks, and others load them, where there are tiers.
func (e *Engine) ResetPrefixCache(external bool) {
	e.mu.Lock()
	e.reset, e.resetExternal = true, e.resetExternal || external
	if external || e.prefixes.tiers == nil {
		e.prefixes.resets.Add(1)
	}
	e.mu.Unlock()
	e.wakeUp()
}
