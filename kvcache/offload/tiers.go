package offload

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/harvest"
	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/kvcache/tier"
	"github.com/moeserve/moeserve/transfer"
)

// Options describe the tiers of one GPU's KV blocks.
type Options struct {
	// Machine, and Space of the GPU that computes.
	Machine device.Machine
	Space   device.Space
	// Pool has the GPU's blocks, and Blocks their account, in which transfers hold them.
	Pool     *kvcache.Pool
	Blocks   *kvcache.Manager
	Transfer *transfer.Engine
	// Harvest lends the peers' memory. It is closed before the tiers. Default: no peers.
	Harvest *harvest.Runtime
	Config  Config
	// Patience is the time after which a load is raised to the priority of prefetches, and
	// after four times of which to that of on-demand fetches. Default: 100 ms.
	Patience time.Duration
	// StoreLimit is the number of the GPU's blocks that the stores of one tier hold at a time;
	// what is offered beyond is not stored there. Default: a quarter of the pool's blocks that are
	// not withdrawn, at least one tier block.
	StoreLimit int
	// Events keeps what is stored and removed for TakeEvents, which must then be called.
	Events bool
	// Log of failed transfers. Default: discarded.
	Log *slog.Logger
}

const defaultPatience = 100 * time.Millisecond

// EnsureDefaults returns o with its defaults set.
func (o Options) EnsureDefaults() Options {
	o.Config = o.Config.EnsureDefaults()
	if o.Patience == 0 {
		o.Patience = defaultPatience
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return o
}

// Validate reports the first invalid option.
func (o Options) Validate() error {
	switch {
	case o.Machine == nil:
		return errors.New("Options.Machine is not set")
	case o.Pool == nil:
		return errors.New("Options.Pool is not set")
	case o.Blocks == nil:
		return errors.New("Options.Blocks is not set")
	case o.Transfer == nil:
		return errors.New("Options.Transfer is not set")
	case o.Patience < 0:
		return fmt.Errorf("invalid Patience %v: must be positive", o.Patience)
	case o.StoreLimit < 0:
		return fmt.Errorf("invalid StoreLimit %d: must be positive", o.StoreLimit)
	}
	return o.Config.Validate()
}

// Tiers keep KV blocks outside of the GPU's pool, and bring them back. One goroutine uses
// them, except for Wait, Locate, TakeEvents, Stats and Decisions, which any may call.
//
// # Locks
//
// mu guards everything below it. It is not held while Wait waits. What other goroutines
// report (ends of transfers, revocations) goes into lists with locks of their own, which the
// engine's goroutine empties.
type Tiers struct {
	o Options
	// factor is the number of the GPU's blocks in a tier's block.
	factor int
	worker *worker
	stores StorePolicy
	reads  LoadPolicy
	// onLost is OnLost's function.
	onLost atomic.Pointer[func()]

	mu     sync.Mutex
	levels []*level // fastest first
	costs  costs
	// counted is the first key of the last run that costs has counted, of one sequence: others that
	// begin alike have keys of their own.
	counted *kvcache.Key
	// behind is the point that whatever the engine has enqueued reaches, see Behind.
	behind []device.Point
	// loads have not been reported; loading counts them by the keys of the GPU's blocks.
	loads   []*load
	loading map[kvcache.Key]int
	jobs    map[*running]owner
	log     *limitedLog
	closed  bool
}

// owner finishes a job: a part of a load, or a store.
type owner interface {
	finish(t *Tiers, run *running)
}

// level is one tier: a medium and its account.
type level struct {
	Medium
	account *tier.Manager
	// backed: what is stored here is stored in the next tier, too.
	backed bool
	// storing is the number of the GPU's blocks that stores hold.
	storing int
	counts  levelCounts
	budget  budget
	// members are those of the account's blocks, for events; nil: there are none, or a block is one of the GPU's.
	members *members
}

// takeEvents returns what was stored and removed since the last call, in blocks of the GPU.
func (l *level) takeEvents() []kvcache.Event {
	if l.members == nil {
		return l.account.TakeEvents()
	}
	l.members.apply(l.account.TakeEvents(), nil) // store.finish has applied those with Stored
	return l.members.take()
}

// New opens the tiers that the configuration asks for.
func New(o Options) (*Tiers, error) {
	o = o.EnsureDefaults()
	if err := o.Validate(); err != nil {
		return nil, fmt.Errorf("offload: %w", err)
	}
	t := &Tiers{o: o, loading: map[kvcache.Key]int{}, jobs: map[*running]owner{}, log: newLimitedLog(o)}
	if err := t.open(); err != nil {
		return nil, fmt.Errorf("offload: %w", errors.Join(err, t.release()))
	}
	return t, nil
}

func (t *Tiers) open() (err error) {
	c := t.o.Config
	if t.factor, err = c.factor(t.o.Blocks.BlockTokens()); err != nil {
		return err
	}
	spec, err := newSpec(c)
	if err != nil {
		return err
	}
	if _, err := c.Tiers(t.o.Pool.Shape().BlockBytes(), t.o.Blocks.BlockTokens()); err != nil {
		return err
	}
	if t.stores, t.reads, err = c.policies(); err != nil {
		return err
	}
	if t.worker, err = newWorker(t.o.Machine); err != nil {
		return err
	}
	mediums, err := spec.Open(Env{
		Machine: t.o.Machine, Space: t.o.Space, Transfer: t.o.Transfer, Harvest: t.o.Harvest,
		BlockBytes: int64(t.factor) * t.o.Pool.Shape().BlockBytes(), Log: t.o.Log, ContentLost: t.contentLost,
	})
	for _, m := range mediums {
		account, failed := tier.New(tier.Options{Blocks: m.Blocks, Medium: m.Name, Policy: c.EvictionPolicy, DiscardEvents: !t.o.Events})
		err = errors.Join(err, failed)
		l := &level{Medium: *m, account: account, backed: c.Durability[m.Name] != Lossy}
		if t.o.Events && t.factor > 1 {
			l.members = newMembers(t.factor)
		}
		t.levels = append(t.levels, l)
		t.worker.handlers[route{GPU, m.Name}], t.worker.handlers[route{m.Name, GPU}] = m.Store, m.Load
	}
	return err
}

// Factor is the number of the GPU's blocks in a tier's block. Store ignores blocks that do
// not make up a whole one: what is offered should begin at a multiple of Factor.
func (t *Tiers) Factor() int { return t.factor }

// Behind sets the points that work which the engine has enqueued will reach: transfers that
// are started from now on wait for them. It is not needed where the host has waited for that
// work itself.
func (t *Tiers) Behind(points ...device.Point) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.behind = slices.Clone(points)
}

// Computed reports the time of a step that has computed these tokens of prompts: see the
// cost model.
func (t *Tiers) Computed(tokens int, seconds float64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.costs.computed(tokens, seconds)
}

// OnLost sets a function that is called when a medium has lost content, which the next call of a method
// takes into account. It is called on any goroutine, maybe with locks held, and must return at once.
func (t *Tiers) OnLost(f func()) { t.onLost.Store(&f) }

func (t *Tiers) contentLost() {
	if f := t.onLost.Load(); f != nil {
		(*f)()
	}
}

// drop removes the keys that mediums have lost from their accounts. mu is held.
func (t *Tiers) drop() {
	for _, l := range t.levels {
		for _, k := range l.Memory.Lost() {
			l.lose(k)
		}
	}
}

// lose removes a key from a tier.
func (l *level) lose(k kvcache.Key) {
	if l.account.Lookup(k) == tier.Hit {
		l.counts.lost++
	}
	l.account.Lose(k)
	l.Memory.Drop([]kvcache.Key{k})
}

// tierBlock returns the key of the tier's block that has block i of a sequence; false: the
// sequence does not fill it.
func (t *Tiers) tierBlock(keys []kvcache.Key, i int) (kvcache.Key, bool) {
	last := (i/t.factor+1)*t.factor - 1
	if last >= len(keys) {
		return kvcache.Key{}, false
	}
	return keys[last], true
}

// find returns the fastest tier that has a key; pending: none has, and one is storing it.
func (t *Tiers) find(k kvcache.Key) (l *level, pending bool) {
	for _, l := range t.levels {
		switch l.account.Lookup(k) {
		case tier.Hit:
			return l, false
		case tier.HitPending:
			pending = true
		}
	}
	return nil, pending
}

// Lookup returns how many of a sequence's blocks from block from on the tiers have in a row,
// and should be loaded; keys are those of all its full blocks, in a slice that no other sequence's
// call has. The blocks end within the sequence's first tokens. wait: the next block is being stored, or loaded for another
// sequence; ask again later.
func (t *Tiers) Lookup(keys []kvcache.Key, from, tokens int) (blocks int, wait bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.drop()
	run, wait := t.run(keys, from, tokens)
	wait = wait && t.reads.Waits()
	if len(run) == 0 {
		return 0, wait
	}
	n := min(max(t.reads.Loads(run, t.costs.choose(run)), 0), len(run))
	if t.counted != &keys[from] { // the scheduler asks again until there is room
		t.counted = &keys[from]
		t.costs.count(run, n)
	}
	for _, p := range run[:n] {
		blocks += p.Blocks
	}
	return blocks, wait && n == len(run)
}

// run divides the blocks that the tiers have in a row by tier. mu is held.
func (t *Tiers) run(keys []kvcache.Key, from, tokens int) (run []Part, wait bool) {
	blockBytes, blockTokens := t.o.Pool.Shape().BlockBytes(), t.o.Blocks.BlockTokens()
	for i := from; i < min(len(keys), tokens/blockTokens); i++ {
		if t.loading[keys[i]] > 0 {
			return run, true
		}
		k, ok := t.tierBlock(keys, i)
		if !ok {
			break
		}
		l, pending := t.find(k)
		if l == nil {
			if pending {
				t.hurry(k)
			}
			return run, pending
		}
		if n := len(run); n == 0 || run[n-1].Medium != l.Name {
			latency, rate := l.counts.rate.cost(l.BytesPerSecond())
			run = append(run, Part{Medium: l.Name, Latency: latency, BytesPerSecond: rate, QueuedBytes: l.counts.loadingBytes})
		}
		p := &run[len(run)-1]
		p.Blocks, p.Tokens, p.Bytes = p.Blocks+1, p.Tokens+blockTokens, p.Bytes+blockBytes
	}
	return run, false
}

// OnItsWay reports whether block i of a sequence, for which Lookup said wait, is still being stored,
// or loaded for another sequence; keys are those of all its full blocks.
func (t *Tiers) OnItsWay(keys []kvcache.Key, i int) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.loading[keys[i]] > 0 {
		return true
	}
	k, ok := t.tierBlock(keys, i)
	if !ok {
		return false
	}
	_, pending := t.find(k)
	return pending
}

// hurry raises the priority of the store that a sequence waits for. mu is held.
func (t *Tiers) hurry(k kvcache.Key) {
	for run, o := range t.jobs {
		if s, ok := o.(*store); ok && !s.hurried && slices.Contains(s.account.Keys, k) {
			s.hurried = true
			run.transfer.RaisePriority(transfer.KVLoad)
		}
	}
}

// Pending is the number of loads that Poll has not reported.
func (t *Tiers) Pending() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.loads)
}

// Busy reports whether a load or a store is under way, or has ended and Poll has not seen it.
func (t *Tiers) Busy() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.jobs) > 0
}

// Wait waits until a load or a store has ended that Poll has not seen, none is under way, or
// ctx is done, whose error it returns.
func (t *Tiers) Wait(ctx context.Context) error { return t.worker.wait(ctx) }

// Poll finishes the transfers that have ended, and returns the loads among them.
func (t *Tiers) Poll() []Loaded {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.drop()
	t.collect()
	t.shareMemory()
	var all []Loaded
	t.loads = slices.DeleteFunc(t.loads, func(l *load) bool {
		if l.left > 0 {
			t.raise(l)
			return false
		}
		all = append(all, t.loaded(l))
		return true
	})
	return all
}

// collect finishes the jobs that have ended. mu is held.
func (t *Tiers) collect() {
	for _, run := range t.worker.collect() {
		o := t.jobs[run]
		delete(t.jobs, run)
		o.finish(t, run)
	}
}

// start starts a job of a level. mu is held.
func (t *Tiers) start(r route, job *Job, o owner) (run *running, refused []int, err error) {
	t.behind = slices.DeleteFunc(t.behind, func(p device.Point) bool {
		ended, err := p.Ended()
		return ended && err == nil
	})
	job.After = slices.Clone(t.behind)
	run, refused, err = t.worker.start(r, job)
	if run != nil {
		t.jobs[run] = o
	}
	if err != nil && !noFailure(err) {
		t.log.Warn("kv transfer not started", "from", r.from, "to", r.to, "blocks", len(refused), "err", err)
	}
	return run, refused, err
}

// noMemory reports whether a store was refused as the medium has no memory for more blocks.
func noMemory(err error) bool {
	return errors.Is(err, harvest.ErrNoCapacity) || errors.Is(err, harvest.ErrQuota)
}

// noFailure reports whether a store was refused for a reason that is no failure.
func noFailure(err error) bool {
	return noMemory(err) || errors.Is(err, harvest.ErrRate) || errors.Is(err, harvest.ErrRevoked)
}

// Drop drops what the tiers have of a sequence's blocks, also those that are being stored; keys
// are those of all its full blocks. Loads under way end as usual.
func (t *Tiers) Drop(keys []kvcache.Key) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return
	}
	for i := t.factor - 1; i < len(keys); i += t.factor {
		for _, l := range t.levels {
			if l.account.Lose(keys[i]) {
				l.Memory.Drop(keys[i : i+1])
			}
		}
	}
}

// Reset drops the content of all tiers. Loads under way end as usual.
func (t *Tiers) Reset() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, l := range t.levels {
		l.account.Reset()
		l.Memory.Reset()
	}
}

// Locate is where a key's content lies, outside of the GPU's pool. With a Factor above 1 the
// key is that of the last of a tier block's blocks.
func (t *Tiers) Locate(k kvcache.Key) Place {
	t.mu.Lock()
	defer t.mu.Unlock()
	l, _ := t.find(k)
	if l == nil {
		return Place{}
	}
	return Place{Medium: l.Name, Space: l.Memory.Locate(k)}
}

// TakeEvents returns what was stored and removed since the last call, by tier, if
// Options.Events is set. Keys are those of the GPU's blocks: each is stored with the first of a
// tier's blocks that has it, and removed with the last.
func (t *Tiers) TakeEvents() []kvcache.Event {
	t.mu.Lock()
	defer t.mu.Unlock()
	var all []kvcache.Event
	for _, l := range t.levels {
		all = append(all, l.takeEvents()...)
	}
	return all
}

// Close waits for the transfers under way, and frees all memory. No goroutine waits any
// more. A second Close does nothing.
func (t *Tiers) Close() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return nil
	}
	t.closed = true
	var errs []error
	for len(t.jobs) > 0 {
		t.mu.Unlock()
		err := t.worker.wait(context.Background())
		t.mu.Lock()
		if err != nil {
			errs = append(errs, err)
			break
		}
		t.collect()
	}
	for _, l := range t.loads {
		t.loaded(l)
	}
	t.loads = nil
	return errors.Join(append(errs, t.release())...)
}

// release frees what was opened.
func (t *Tiers) release() error {
	var errs []error
	for _, l := range t.levels {
		errs = append(errs, l.Memory.Close())
	}
	if t.worker != nil {
		errs = append(errs, t.worker.close())
	}
	return errors.Join(errs...)
}
