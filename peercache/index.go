package peercache

import (
	"hash/maphash"
	"sync/atomic"
)

// index finds values by key. Readers take no lock and allocate nothing; writers hold the
// cache's lock. Nodes are immutable: removing one copies the chain up to it.
type index[K comparable, V any] struct {
	seed    maphash.Seed
	buckets atomic.Pointer[[]atomic.Pointer[node[K, V]]]
	len     int
}

type node[K comparable, V any] struct {
	key   K
	value *V
	next  *node[K, V]
}

// firstBuckets is the initial number of buckets. There are at least as many as values.
const firstBuckets = 64

func newIndex[K comparable, V any]() *index[K, V] {
	x := &index[K, V]{seed: maphash.MakeSeed()}
	b := make([]atomic.Pointer[node[K, V]], firstBuckets)
	x.buckets.Store(&b)
	return x
}

func (x *index[K, V]) bucket(of []atomic.Pointer[node[K, V]], key K) *atomic.Pointer[node[K, V]] {
	return &of[maphash.Comparable(x.seed, key)%uint64(len(of))]
}

// get returns the key's value, or nil.
func (x *index[K, V]) get(key K) *V {
	for n := x.bucket(*x.buckets.Load(), key).Load(); n != nil; n = n.next {
		if n.key == key {
			return n.value
		}
	}
	return nil
}

// put adds the value of a key that has none.
func (x *index[K, V]) put(key K, value *V) {
	if old := *x.buckets.Load(); x.len == len(old) {
		grown := make([]atomic.Pointer[node[K, V]], 2*len(old))
		x.each(func(key K, value *V) { x.add(grown, key, value) })
		x.buckets.Store(&grown)
	}
	x.add(*x.buckets.Load(), key, value)
	x.len++
}

func (x *index[K, V]) add(to []atomic.Pointer[node[K, V]], key K, value *V) {
	b := x.bucket(to, key)
	b.Store(&node[K, V]{key, value, b.Load()})
}

// remove removes the value, if it is the key's.
func (x *index[K, V]) remove(key K, value *V) {
	b := x.bucket(*x.buckets.Load(), key)
	for n := b.Load(); n != nil; n = n.next {
		if n.key == key && n.value == value {
			b.Store(without(b.Load(), n))
			x.len--
			return
		}
	}
}

// without is the chain from first on without one of its nodes.
func without[K comparable, V any](first, removed *node[K, V]) *node[K, V] {
	if first == removed {
		return removed.next
	}
	return &node[K, V]{first.key, first.value, without(first.next, removed)}
}

// each calls f for every value, in no order.
func (x *index[K, V]) each(f func(K, *V)) {
	for i, of := 0, *x.buckets.Load(); i < len(of); i++ {
		for n := of[i].Load(); n != nil; n = n.next {
			f(n.key, n.value)
		}
	}
}
