package engine

import (
	"encoding/binary"
	"time"

	"github.com/moeserve/moeserve/engine/scheduler"
	"github.com/moeserve/moeserve/kvcache"
)

// blocks are the KV blocks of one sequence, with what the prefix cache had of it.
type blocks struct {
	*kvcache.Table
	// keys of the full blocks of the known tokens. Empty without prefix caching.
	keys []kvcache.Key
	// cached is the result of the last Match.
	cached int
}

// Match implements scheduler.Blocks.
func (b *blocks) Match(maxTokens int) (tokens int, at scheduler.Cached) {
	b.cached = b.Table.Match(maxTokens)
	return b.cached, scheduler.Ready
}

// long reports whether a sequence of so many tokens has longrope's long factors.
func (e *Engine) long(tokens int) bool { return e.o.LongAfter > 0 && tokens > e.o.LongAfter }

// root is the parent of the keys of a sequence's first blocks.
func (e *Engine) root(salt string, long bool) kvcache.Key {
	b := binary.LittleEndian.AppendUint32(nil, uint32(e.o.KV.BlockTokens()))
	b = binary.LittleEndian.AppendUint32(b, uint32(len(e.o.KeySalt)))
	b = append(b, e.o.KeySalt...)
	if long {
		b = append(b, 1)
	} else {
		b = append(b, 0)
	}
	return kvcache.RootKey(append(b, salt...))
}

// appendKeys appends the keys of the full blocks of tokens to those of the first of them.
func (e *Engine) appendKeys(keys []kvcache.Key, salt string, tokens []int32, long bool) []kvcache.Key {
	size := e.o.KV.BlockTokens()
	for n := len(keys); (n+1)*size <= len(tokens); n++ {
		var parent kvcache.Key
		if n > 0 {
			parent = keys[n-1]
		} else {
			parent = e.root(salt, long)
		}
		keys = append(keys, parent.Next(tokens[n*size:(n+1)*size]))
	}
	return keys
}

// identify adds the keys of blocks that a sequence's latest tokens complete.
func (e *Engine) identify(q *sequence) {
	if e.o.PrefixCaching && (len(q.blocks.keys)+1)*e.o.KV.BlockTokens() <= len(q.tokens) {
		q.blocks.keys = e.appendKeys(q.blocks.keys, q.sub.req.CacheSalt, q.tokens, q.long)
		q.blocks.Identify(q.blocks.keys)
	}
}

// admitted records that a sequence was admitted.
func (e *Engine) admitted(q *sequence, now time.Time) {
	if !q.sub.job.admit(now, q.blocks.cached) || !e.o.PrefixCaching {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.state.PrefixCacheQueries += int64(len(q.tokens))
	e.state.PrefixCacheHits += int64(q.blocks.cached)
}

// ResetPrefixCache drops the cached prefixes that no running request uses: requests submitted
// later find none of them.
func (e *Engine) ResetPrefixCache() {
	e.mu.Lock()
	e.reset = true
	e.mu.Unlock()
	e.wakeUp()
}
