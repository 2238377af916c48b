package tenancy

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/moeserve/moeserve/eval"
)

// Memory is that of the peer now, in bytes.
type Memory struct {
	// Capacity is all of it; Others is what other processes hold, Borrowed what the engine does, Free the rest.
	Capacity, Others, Borrowed, Free int64
	// Headroom is what the engine leaves free.
	Headroom int64
}

// Release is a slab of borrowed memory that was released because others need it.
type Release struct {
	// Took is from the start of its revocation to the end; Missed: that is beyond the deadline.
	Took   time.Duration
	Missed bool
}

// Node is an engine that borrows from the peer.
type Node interface {
	eval.Node
	// Peer is the memory of the peer.
	Peer() (Memory, error)
	// Released are the slabs that have been released since the last call.
	Released() []Release
	// Borrowing describes what is borrowed how.
	Borrowing() Borrowing
	// Watch calls f beside steps, each time after the pause that f returned, until stop, which waits for a
	// call in progress. It is not called on a virtual clock, which stands still but in steps.
	Watch(f func(now time.Duration) time.Duration) (stop func())
}

// Borrowing describes a node's loans. It has a JSON form.
type Borrowing struct {
	// Peer is its memory space; OffloadFraction of the experts are offloaded, and steps of few tokens get at
	// them by ExpertAccess.
	Peer            string  `json:"peer"`
	OffloadFraction float64 `json:"offload_fraction"`
	ExpertAccess    string  `json:"expert_access"`
	// DeadlineSeconds is the time in which memory that others need is to be released.
	DeadlineSeconds float64 `json:"deadline_s"`
}

// ErrNoWork: a tenant that is played computes nothing.
var ErrNoWork = errors.New("the tenant does no work of its own")

// Tenant is another user of the peer's memory. One goroutine at a time uses it.
type Tenant interface {
	// Hold asks for so many bytes in all.
	Hold(bytes int64) error
	// Advance reports whether it holds what it was last asked to, how long its own call took (0: not known),
	// and whether that was refused.
	Advance() (done bool, took time.Duration, refused bool, err error)
	// Work computes for a while, and returns the rate of it, in the unit of the kind; ErrNoWork: it cannot.
	Work(ctx context.Context, kind string, d time.Duration) (rate float64, err error)
	Close() error
}

// Options of a measurement.
type Options struct {
	Node   Node
	Tenant Tenant
	// Prompts that run as one batch, and NewTokens of each (at least 2).
	Prompts   [][]int32
	NewTokens int
	// Steps of what the tenant holds, one every Every; the last one also lasts that long.
	Steps []Step
	Every time.Duration
	// WorkTime is for how long each kind of the tenant's work is measured at a time, Rounds how often. Default: 2 s, 3.
	WorkTime time.Duration
	Rounds   int
	// Samples of the result, at most. Default: 300.
	Samples int
	// Progress, if set, is called with the steps of the tenant that are done.
	Progress func(done, total int64)
}

// Sample is the mean over a short time of the throughput, and the memory of the peer at its end.
type Sample struct {
	Seconds       float64 `json:"at_s"`
	DecodeTokS    float64 `json:"decode_tok_s"`
	OthersBytes   int64   `json:"others_bytes"`
	BorrowedBytes int64   `json:"borrowed_bytes"`
	FreeBytes     int64   `json:"free_bytes"`
}

// Change is one step of the tenant.
type Change struct {
	Seconds float64 `json:"at_s"`
	Step    string  `json:"step"`
	Bytes   int64   `json:"bytes"`
	// FreeBytes is what was free when it began.
	FreeBytes int64 `json:"free_bytes"`
	// GotSeconds is when the tenant held all of it, and RestoredSeconds when the headroom was free again, or
	// nothing is borrowed any more; both from its beginning, and seen within lookEvery, on a virtual clock
	// before the next decode step; null: not before the next change.
	GotSeconds      *float64 `json:"got_s"`
	RestoredSeconds *float64 `json:"restored_s"`
	// ShortSeconds is the longest time for which less than the headroom was free, until it was restored.
	ShortSeconds float64 `json:"short_s"`
	// CallSeconds is how long the tenant's own call took, where it says so; Refused: it got nothing.
	CallSeconds float64 `json:"call_s"`
	Refused     bool    `json:"refused"`
}

// Work is what a tenant's work loses beside the engine.
type Work struct {
	Kind string `json:"kind"`
	// Alone and Beside are the medians of its rates beside an idle engine and beside one that decodes.
	Alone  float64 `json:"alone_per_s"`
	Beside float64 `json:"beside_per_s"`
	// Loss is the share that is lost, Limit what it should not exceed, 0 to 1.
	Loss  float64 `json:"loss"`
	Limit float64 `json:"loss_limit"`
}

// Result of a measurement. It has a JSON form.
type Result struct {
	Run eval.Run `json:"run"`
	eval.Machine
	Model    string `json:"model"`
	DType    string `json:"dtype"`
	Requests int    `json:"requests"`
	Borrowing
	CapacityBytes int64 `json:"capacity_bytes"`
	HeadroomBytes int64 `json:"headroom_bytes"`
	// QuietTokS is the decode throughput of the first pass, beside nothing.
	QuietTokS float64  `json:"quiet_decode_tok_s"`
	Samples   []Sample `json:"samples"`
	Changes   []Change `json:"changes"`
	// ReleasedSlabs were released, the slowest in SlowestRelease seconds; LateSlabs of them after the deadline.
	ReleasedSlabs  int     `json:"released_slabs"`
	LateSlabs      int     `json:"late_slabs"`
	SlowestRelease float64 `json:"slowest_release_s"`
	// Work is what the tenant's own work loses; empty where it does none.
	Work []Work `json:"work"`
	// Passes over the same positions have sampled the same tokens, of this SHA-256 (empty on devices that
	// keep no data).
	Passes       int    `json:"passes"`
	TokensSHA256 string `json:"tokens_sha256"`
}

// kinds of work with the shares that they may lose: a bf16 GEMM loses multiprocessors to nothing, but shares power and
// memory; a loop over HBM shares its bandwidth with copies from it.
var kinds = []struct {
	name  string
	limit float64
}{{"bf16 product", 0.06}, {"HBM loop", 0.18}}

// run is a measurement under way.
type run struct {
	o      Options
	r      *Result
	batch  eval.Batch
	at     int // the position that is decoded next
	digest [32]byte
	first  bool // the first pass is not over

	mu     sync.Mutex // guards what follows, the tenant and the changes of r
	began  time.Duration
	failed error // of watch
	held   int64 // by the tenant, once it has got it
	peer   Memory
	seen   time.Duration  // when peer was read
	short  *time.Duration // since when less than the headroom is free
}

// Measure measures, and adds what is done to r, also where it returns an error.
func Measure(ctx context.Context, o Options, r *Result) error {
	if o.WorkTime == 0 {
		o.WorkTime = 2 * time.Second
	}
	if o.Rounds == 0 {
		o.Rounds = 3
	}
	if o.Samples == 0 {
		o.Samples = 300
	}
	if len(o.Prompts) == 0 || o.NewTokens < 2 || len(o.Steps) == 0 || o.Every <= 0 {
		return eval.Inputf("tenancy: %d prompts, %d new tokens, %d steps every %v: must be at least 1, 2 and 1, and the time above 0", len(o.Prompts), o.NewTokens, len(o.Steps), o.Every)
	}
	i := o.Node.Info()
	r.Machine, r.Model, r.DType, r.Requests, r.Borrowing = i.Machine, i.Model, i.DType, len(o.Prompts), o.Node.Borrowing()
	batch, err := o.Node.Batch(o.Prompts, o.NewTokens)
	if err != nil {
		return err
	}
	defer batch.Close()
	m := &run{o: o, r: r, batch: batch, at: 1, first: true}
	if err := m.quiet(ctx); err != nil {
		return err
	}
	if err := m.work(ctx); err != nil {
		return err
	}
	o.Node.Released() // what came before does not count
	if err := m.changes(ctx); err != nil {
		return err
	}
	for _, x := range o.Node.Released() {
		r.ReleasedSlabs++
		if x.Missed {
			r.LateSlabs++
		}
		r.SlowestRelease = max(r.SlowestRelease, x.Took.Seconds())
	}
	return nil
}

// quiet computes the prompts, and the first pass.
func (m *run) quiet(ctx context.Context) error {
	peer, err := m.o.Node.Peer()
	if err != nil {
		return err
	}
	m.r.CapacityBytes, m.r.HeadroomBytes = peer.Capacity, peer.Headroom
	if err := m.batch.Prefill(ctx); err != nil {
		return err
	}
	// Once before, as first steps are slower.
	if err := m.batch.Decode(ctx, 1, m.o.NewTokens); err != nil {
		return err
	}
	began := m.o.Node.Now()
	for m.first {
		if err := m.step(ctx); err != nil {
			return err
		}
	}
	took := (m.o.Node.Now() - began).Seconds()
	if took <= 0 {
		return eval.Inputf("tenancy: the virtual clock did not advance: give --emulate rates, as pcie=55.3MB/s,nvlink=395MB/s,flops=78G,bw=3.9GB/s")
	}
	m.r.QuietTokS = float64(m.r.Requests*(m.o.NewTokens-1)) / took
	return nil
}

// step decodes one position; behind the last one it compares tokens.
func (m *run) step(ctx context.Context) error {
	if err := m.batch.Decode(ctx, m.at, m.at+1); err != nil {
		return err
	}
	if m.at++; m.at < m.o.NewTokens {
		return nil
	}
	m.at = 1
	digest := eval.Digest(m.batch.Tokens())
	if m.first {
		m.digest, m.first = digest, false
		if m.o.Node.Info().KeepsData {
			m.r.TokensSHA256 = hex.EncodeToString(digest[:])
		}
	}
	if digest != m.digest {
		return fmt.Errorf("tenancy: pass %d: %w", m.r.Passes+1, eval.ErrTokens)
	}
	m.r.Passes++
	return nil
}

// changes lets the tenant take and give, and decodes meanwhile.
func (m *run) changes(ctx context.Context) (err error) {
	node, total := m.o.Node, m.o.Every*time.Duration(len(m.o.Steps))
	m.began = node.Now()
	if e := m.r.Emulation; e == nil || e.Rates != eval.RatesVirtual {
		defer node.Watch(m.watch)()
	}
	bucket, bucketBegan, tokens := total/time.Duration(m.o.Samples), m.began, 0
	next := 0
	for {
		now := node.Now() - m.began
		due := next < len(m.o.Steps) && now >= m.o.Every*time.Duration(next)
		if err := m.between(due, now); err != nil {
			return err
		}
		if due {
			if next++; m.o.Progress != nil {
				m.o.Progress(int64(next), int64(len(m.o.Steps)))
			}
		}
		if took := node.Now() - bucketBegan; tokens > 0 && took >= bucket || now >= total {
			peer, err := m.look(true)
			if err != nil {
				return err
			}
			if tokens > 0 && took > 0 {
				m.r.Samples = append(m.r.Samples, Sample{
					Seconds: now.Seconds(), DecodeTokS: float64(tokens) / took.Seconds(), OthersBytes: peer.Others, BorrowedBytes: peer.Borrowed, FreeBytes: peer.Free,
				})
			}
			tokens, bucketBegan = 0, node.Now()
		}
		if now >= total {
			return nil
		}
		if err := m.step(ctx); err != nil {
			return err
		}
		tokens += m.r.Requests
	}
}

// between follows the latest change of the tenant, and begins the next one where it is due.
func (m *run) between(due bool, now time.Duration) error {
	if due {
		if _, err := m.look(true); err != nil {
			return err
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.failed != nil {
		return m.failed
	}
	if due {
		if err := m.change(&m.o.Steps[len(m.r.Changes)], now); err != nil {
			return err
		}
	}
	return m.follow(now)
}

// watch follows the latest change beside decode steps, which may take longer than what it leads to.
func (m *run) watch(now time.Duration) time.Duration {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.failed == nil {
		m.failed = m.follow(now - m.began)
	}
	return lookEvery
}

// lookEvery is the least time between two readings of the peer's memory, which the driver takes time for, but
// where something has just changed.
const lookEvery = 2 * time.Millisecond

// look reads the peer's memory, where the last reading is old or now is set.
func (m *run) look(now bool) (Memory, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	err := m.lookLocked(now)
	return m.peer, err
}

func (m *run) lookLocked(now bool) (err error) {
	if at := m.o.Node.Now(); now || at-m.seen >= lookEvery {
		m.seen = at
		m.peer, err = m.o.Node.Peer()
	}
	return err
}

// change begins a step of the tenant. mu is held.
func (m *run) change(s *Step, now time.Duration) error {
	bytes := s.bytes(&m.peer, m.held)
	if err := m.o.Tenant.Hold(bytes); err != nil {
		return err
	}
	m.r.Changes = append(m.r.Changes, Change{Seconds: now.Seconds(), Step: s.Text, Bytes: bytes, FreeBytes: m.peer.Free})
	m.short = nil
	return nil
}

// follow looks whether the latest change is done, and the headroom restored. mu is held.
func (m *run) follow(now time.Duration) error {
	if len(m.r.Changes) == 0 {
		return nil
	}
	c := &m.r.Changes[len(m.r.Changes)-1]
	if c.RestoredSeconds != nil {
		return nil
	}
	since := now.Seconds() - c.Seconds
	done := false
	if c.GotSeconds == nil && !c.Refused {
		var took time.Duration
		var err error
		if done, took, c.Refused, err = m.o.Tenant.Advance(); err != nil {
			return err
		}
		if done {
			m.held, c.GotSeconds, c.CallSeconds = c.Bytes, &since, took.Seconds()
		}
	}
	if err := m.lookLocked(done); err != nil {
		return err
	}
	short := m.peer.Free < m.peer.Headroom && m.peer.Borrowed > 0
	if short && m.short == nil {
		m.short = &now
	}
	if m.short != nil {
		c.ShortSeconds = max(c.ShortSeconds, (now - *m.short).Seconds())
	}
	if !short {
		m.short = nil
		if c.GotSeconds != nil {
			c.RestoredSeconds = &since
		}
	}
	return nil
}

// work measures what the tenant's own work loses.
func (m *run) work(ctx context.Context) error {
	for _, k := range kinds {
		var alone, beside []float64
		for range m.o.Rounds {
			rate, err := m.o.Tenant.Work(ctx, k.name, m.o.WorkTime)
			if errors.Is(err, ErrNoWork) {
				return nil
			}
			if err != nil {
				return err
			}
			alone = append(alone, rate)
			if rate, err = m.besideSteps(ctx, k.name); err != nil {
				return err
			}
			beside = append(beside, rate)
		}
		w := Work{Kind: k.name, Alone: eval.Median(alone), Beside: eval.Median(beside), Limit: k.limit}
		if w.Alone > 0 {
			w.Loss = 1 - w.Beside/w.Alone
		}
		m.r.Work = append(m.r.Work, w)
	}
	return nil
}

// besideSteps is the rate of the tenant's work while the engine decodes.
func (m *run) besideSteps(ctx context.Context, kind string) (rate float64, err error) {
	var failed error
	done := make(chan struct{})
	go func() {
		defer close(done)
		rate, failed = m.o.Tenant.Work(ctx, kind, m.o.WorkTime)
	}()
	for working := true; working; {
		select {
		case <-done:
			working = false
		default:
			if err == nil {
				err = m.step(ctx)
			}
			if err != nil {
				<-done
			}
		}
	}
	return rate, errors.Join(err, failed)
}
