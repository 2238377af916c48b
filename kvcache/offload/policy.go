package offload

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/moeserve/moeserve/kvcache"
)

// Cause is why blocks are offered to the tiers.
type Cause uint8

// The causes.
const (
	// Filled blocks have just been computed.
	Filled Cause = iota
	// Released blocks are no longer used by their sequence, Preempted ones will be used again.
	Released
	Preempted
)

func (c Cause) String() string { return [...]string{"filled", "released", "preempted"}[c] }

// StorePolicy decides which blocks that are offered are stored. The engine's goroutine asks it.
type StorePolicy interface {
	// Offered reports blocks of a sequence, in their order, once each time that they are
	// offered: when they are filled, and all together when the sequence ends or is preempted.
	// Keys are those of the tiers' blocks, and not kept.
	Offered(keys []kvcache.Key, why Cause)
	// Stores returns how many of them, from the first on, are stored in a tier, as far as it
	// lacks them. It is asked for each tier in turn, behind Offered.
	Stores(medium string, keys []kvcache.Key, why Cause) int
}

// LoadPolicy decides which blocks that a tier has are loaded, when a sequence begins. The engine's
// goroutine asks it.
type LoadPolicy interface {
	// Loads returns how many of the parts of a run, from the first on, are loaded; the others
	// are computed. costs is the choice of the cost model.
	Loads(run []Part, costs int) int
	// Waits returns whether a sequence waits for a block that is being stored, or loaded for
	// another: else it is computed.
	Waits() bool
}

// Names of the built-in policies.
const (
	// StoreFilled stores blocks as soon as they are filled, StoreReleased when their sequence ends
	// or is preempted, StorePreempted only when it is preempted.
	StoreFilled    = "filled"
	StoreReleased  = "released"
	StorePreempted = "preempted"
	// StoreReused stores blocks that as many sequences as Config.StoreThreshold had, and those of
	// preempted ones.
	StoreReused = "reused"

	// LoadCost loads what the cost model expects to be faster than computing it, LoadAlways
	// whatever the tiers have, LoadNever nothing.
	LoadCost   = "cost"
	LoadAlways = "always"
	LoadNever  = "never"
)

var storePolicies = registry[func(Config) (StorePolicy, error)]{key: "store_policy", by: map[string]func(Config) (StorePolicy, error){
	StoreFilled:    func(Config) (StorePolicy, error) { return causes{Filled, Released, Preempted}, nil },
	StoreReleased:  func(Config) (StorePolicy, error) { return causes{Released, Preempted}, nil },
	StorePreempted: func(Config) (StorePolicy, error) { return causes{Preempted}, nil },
	StoreReused:    newReused,
}}

var loadPolicies = registry[func(Config) (LoadPolicy, error)]{key: "load_policy", by: map[string]func(Config) (LoadPolicy, error){
	LoadCost:   func(Config) (LoadPolicy, error) { return byCost{}, nil },
	LoadAlways: func(Config) (LoadPolicy, error) { return always{}, nil },
	LoadNever:  func(Config) (LoadPolicy, error) { return never{}, nil },
}}

// RegisterStorePolicy adds a policy, which store_policy then selects. It panics if there is one of
// that name.
func RegisterStorePolicy(name string, construct func(Config) (StorePolicy, error)) {
	storePolicies.add(name, construct)
}

// RegisterLoadPolicy adds a policy, which load_policy then selects. It panics if there is one of
// that name.
func RegisterLoadPolicy(name string, construct func(Config) (LoadPolicy, error)) {
	loadPolicies.add(name, construct)
}

// registry has constructors by name, which a key of the configuration selects.
type registry[T any] struct {
	key string
	mu  sync.Mutex
	by  map[string]T
}

func (r *registry[T]) add(name string, construct T) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, ok := r.by[name]; ok || name == "" {
		panic(fmt.Sprintf("offload: %s %q is registered twice, or has no name", r.key, name))
	}
	r.by[name] = construct
}

func (r *registry[T]) find(name string) (T, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	construct, ok := r.by[name]
	if !ok {
		return construct, fmt.Errorf("%s is %q; it must be one of %s", r.key, name, strings.Join(slices.Sorted(maps.Keys(r.by)), ", "))
	}
	return construct, nil
}

// causes stores whatever is offered for one of them.
type causes []Cause

func (causes) Offered([]kvcache.Key, Cause) {}

func (c causes) Stores(_ string, keys []kvcache.Key, why Cause) int {
	if slices.Contains(c, why) {
		return len(keys)
	}
	return 0
}

// reused stores blocks that have been seen before, as vLLM's store_threshold does: of prompts that
// never come back nothing is copied. A block is seen once by each sequence that ends with it. It
// remembers those seen last, in two generations: when the younger is full, the older is forgotten.
type reused struct {
	threshold, limit int
	younger, older   map[kvcache.Key]int
}

const (
	defaultThreshold = 2
	// defaultTracked is vLLM's default of max_tracker_size.
	defaultTracked = 64_000
)

func newReused(c Config) (StorePolicy, error) {
	r := &reused{threshold: c.StoreThreshold, limit: c.MaxTrackerSize, younger: map[kvcache.Key]int{}}
	if r.threshold == 0 {
		r.threshold = defaultThreshold
	}
	if r.limit == 0 {
		r.limit = defaultTracked
	}
	return r, nil
}

func (r *reused) Offered(keys []kvcache.Key, why Cause) {
	if why != Released {
		return
	}
	for _, k := range keys {
		r.younger[k] = r.seen(k) + 1
		if len(r.younger) >= r.limit {
			r.younger, r.older = map[kvcache.Key]int{}, r.younger
		}
	}
}

func (r *reused) seen(k kvcache.Key) int {
	if n, ok := r.younger[k]; ok {
		return n
	}
	return r.older[k]
}

func (r *reused) Stores(_ string, keys []kvcache.Key, why Cause) int {
	threshold := r.threshold
	switch why {
	case Preempted:
		return len(keys)
	case Filled:
		threshold-- // the sequence itself has them, and is yet to end
	}
	for i, k := range keys {
		if r.seen(k) < threshold {
			return i
		}
	}
	return len(keys)
}

type byCost struct{}

func (byCost) Loads(_ []Part, costs int) int { return costs }
func (byCost) Waits() bool                   { return true }

type always struct{}

func (always) Loads(run []Part, _ int) int { return len(run) }
func (always) Waits() bool                 { return true }

type never struct{}

func (never) Loads([]Part, int) int { return 0 }
func (never) Waits() bool           { return false }
