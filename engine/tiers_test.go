package engine_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"

	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/kvcache/offload"
)

// memoryTiers is an engine.Offloader that copies the words of a drawing's blocks, when a
// transfer ends and not before: so it finds whether blocks were used for something else
// meanwhile. Loads write garbage first. Transfers end at random or, without a source of
// randomness, by end.
type memoryTiers struct {
	mu     sync.Mutex // for Wait
	of     *drawing
	factor int
	random *rand.Rand
	holds  bool
	// early: Poll reports a load as ended while its copy is still to come: a negative control.
	early   bool
	content map[kvcache.Key][]word
	storing map[kvcache.Key]bool
	loading map[kvcache.Key]int
	stores  []*memoryStore
	loads   []*memoryLoad
	// ended are loads that Poll reports next.
	ended []offload.Loaded
	// turns is the mean number of polls until a transfer ends.
	turns int
	// waited: the next Poll ends something.
	waited bool
	// most is the maximum of content; 0: none.
	most int
	// causes of stores, tokens that Computed was told of, blocks loaded, loads failed, and calls of
	// Lookup.
	causes                            []offload.Cause
	computed, loaded, failed, lookups int
}

type memoryStore struct {
	keys   []kvcache.Key
	blocks [][]int32
}

type memoryLoad struct {
	seq  int64
	keys []kvcache.Key
	from int
	dst  []int32
	// content of the blocks, which the tier keeps until the load has ended.
	content [][]word
}

var _ engine.Offloader = (*memoryTiers)(nil)

func newMemoryTiers(of *drawing, factor int) *memoryTiers {
	return &memoryTiers{
		of: of, factor: factor, holds: true, turns: 5,
		content: map[kvcache.Key][]word{}, storing: map[kvcache.Key]bool{}, loading: map[kvcache.Key]int{},
	}
}

func (m *memoryTiers) words(block int32) []word {
	size := m.of.kv.BlockTokens()
	return m.of.memory[int(block)*size : int(block+1)*size]
}

func (m *memoryTiers) hold(blocks []int32) {
	if m.holds {
		m.of.kv.Hold(blocks)
	}
}

func (m *memoryTiers) unhold(blocks []int32) {
	if m.holds {
		m.of.kv.Unhold(blocks)
	}
}

// chance is true once in n times, and never without randomness.
func (m *memoryTiers) chance(n int) bool { return m.random != nil && m.random.IntN(n) == 0 }

func (m *memoryTiers) Factor() int { return m.factor }

func (m *memoryTiers) TakeEvents() []kvcache.Event { return nil }

// unit is the key of the tier's block that has block i.
func (m *memoryTiers) unit(keys []kvcache.Key, i int) (kvcache.Key, bool) {
	last := (i/m.factor+1)*m.factor - 1
	if last >= len(keys) {
		return kvcache.Key{}, false
	}
	return keys[last], true
}

func (m *memoryTiers) Lookup(keys []kvcache.Key, from, tokens int) (blocks int, wait bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.lookups++
	if m.chance(8) {
		return 0, false // not worth it
	}
	for i := from; i < min(len(keys), tokens/m.of.kv.BlockTokens()); i++ {
		k, ok := m.unit(keys, i)
		switch {
		case !ok:
			return blocks, false
		case m.loading[keys[i]] > 0 || m.storing[k]:
			return blocks, true
		case m.content[k] == nil:
			return blocks, false
		}
		blocks++
	}
	return blocks, false
}

func (m *memoryTiers) OnItsWay(keys []kvcache.Key, i int) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	k, _ := m.unit(keys, i)
	return m.loading[keys[i]] > 0 || m.storing[k]
}

var errRefused = errors.New("the load is refused")

func (m *memoryTiers) Load(seq int64, keys []kvcache.Key, from int, dst []int32) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.of.enqueued) > 0 {
		m.of.errorf("a load begins while a step ahead is under way")
	}
	if m.chance(20) {
		return errRefused
	}
	m.hold(dst)
	l := &memoryLoad{seq: seq, keys: slices.Clone(keys), from: from, dst: slices.Clone(dst)}
	for i, id := range dst {
		m.loading[keys[from+i]]++
		clear(m.words(id))
		k, _ := m.unit(keys, from+i)
		l.content = append(l.content, m.content[k][(from+i)%m.factor*m.of.kv.BlockTokens():])
	}
	m.loads = append(m.loads, l)
	if m.early {
		m.ended = append(m.ended, offload.Loaded{Seq: seq, Blocks: len(dst)})
	}
	return nil
}

func (m *memoryTiers) Store(keys []kvcache.Key, from int, src []int32, why offload.Cause) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.causes = append(m.causes, why)
	if m.chance(8) {
		return
	}
	var s memoryStore
	for i := (from + m.factor - 1) / m.factor * m.factor; i+m.factor <= from+len(src); i += m.factor {
		k := keys[i+m.factor-1]
		if m.storing[k] || m.content[k] != nil {
			continue
		}
		m.storing[k] = true
		blocks := slices.Clone(src[i-from : i-from+m.factor])
		m.hold(blocks)
		s.keys, s.blocks = append(s.keys, k), append(s.blocks, blocks)
	}
	if len(s.keys) > 0 {
		m.stores = append(m.stores, &s)
	}
}

// endStore ends the i-th store, which may fail.
func (m *memoryTiers) endStore(i int) {
	s := m.stores[i]
	m.stores = slices.Delete(m.stores, i, i+1)
	for n, k := range s.keys {
		dropped := !m.storing[k]
		delete(m.storing, k)
		if !dropped && !m.chance(8) {
			var all []word
			for _, id := range s.blocks[n] {
				all = append(all, m.words(id)...)
			}
			m.content[k] = all
		}
		m.unhold(s.blocks[n])
	}
	for k := range m.content {
		if m.most == 0 || len(m.content) <= m.most {
			break
		}
		delete(m.content, k)
	}
}

// endLoad ends the i-th load, which may fail after some of its blocks.
func (m *memoryTiers) endLoad(i int) offload.Loaded {
	l := m.loads[i]
	m.loads = slices.Delete(m.loads, i, i+1)
	good := len(l.dst)
	if m.chance(4) {
		good = m.random.IntN(len(l.dst))
		m.failed++
	}
	for n, id := range l.dst {
		if n < good {
			copy(m.words(id), l.content[n])
		}
		k := l.keys[l.from+n]
		if m.loading[k]--; m.loading[k] == 0 {
			delete(m.loading, k)
		}
	}
	m.loaded += good
	m.unhold(l.dst)
	return offload.Loaded{Seq: l.seq, Blocks: good}
}

func (m *memoryTiers) Poll() (all []offload.Loaded) {
	m.mu.Lock()
	defer m.mu.Unlock()
	all, m.ended = m.ended, nil
	for i := len(m.stores) - 1; i >= 0; i-- {
		if m.chance(m.turns) || m.waited && i == 0 && m.random != nil {
			m.endStore(i)
		}
	}
	for i := len(m.loads) - 1; i >= 0; i-- {
		if m.chance(m.turns) || m.waited && i == 0 && m.random != nil {
			all = append(all, m.endLoad(i))
		}
	}
	m.waited = false
	return all
}

// Busy: without a source of randomness waiting ends nothing.
func (m *memoryTiers) Busy() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.ended) > 0 || m.random != nil && len(m.stores)+len(m.loads) > 0
}

func (m *memoryTiers) Wait(context.Context) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.waited = true
	return nil
}

func (m *memoryTiers) Computed(tokens int, seconds float64) {
	if tokens < 1 || seconds < 0 {
		panic("a step without tokens")
	}
	m.computed += tokens
}

func (m *memoryTiers) Drop(keys []kvcache.Key) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, k := range keys {
		delete(m.content, k)
		delete(m.storing, k)
	}
}

func (m *memoryTiers) OnLost(func()) {}

func (m *memoryTiers) Reset() {
	m.mu.Lock()
	defer m.mu.Unlock()
	clear(m.content)
}

// endAll ends all transfers.
func (m *memoryTiers) endAll() {
	for len(m.stores) > 0 {
		m.endStore(0)
	}
	for len(m.loads) > 0 {
		if l := m.endLoad(0); !m.early {
			m.ended = append(m.ended, l)
		}
	}
}
