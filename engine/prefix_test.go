package engine_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/kvcache/offload"
	"github.com/moeserve/moeserve/pipeline"
	"github.com/moeserve/moeserve/tools/fixtures"
	"github.com/moeserve/moeserve/tools/racedetector"
)

// conversations are requests that begin alike: turns of conversations under a few system prompts,
// each turn longer than the one before, some with salts, several samples and all parameters.
func conversations(count, vocab int) []engine.Request {
	var rs []engine.Request
	for i, r := range varied(count, vocab) {
		r.Prompt = slices.Concat(prompt(i%3, 20+16*(i%2), vocab), prompt(7+i%4, 4+i%37, vocab))
		if i%5 == 0 {
			r.CacheSalt = "tenant"
		}
		if i%4 == 1 {
			r.Params.N = 3
		}
		rs = append(rs, r)
	}
	return rs
}

// cacheCase is a way to keep the KV blocks of conversations.
type cacheCase struct {
	name, model, tiers string
	// local: the pool is a prefix cache.
	local  bool
	policy configs.SchedulingPolicy
	// fails is the chance of a copy from or to a tier to fail.
	fails float64
}

// TestPrefixCacheChangesNoToken runs the same conversations with prefix caching or KV tiers and
// without, in a tiny pool with preemptions, where some are canceled, and where another tenant
// takes and releases the peers' memory: all have the same tokens. So they have with fair scheduling,
// which preempts more often, and where copies of KV blocks fail.
func TestPrefixCacheChangesNoToken(t *testing.T) {
	longrope := fixtures.Dir(t, "phimoe") // long after 64 tokens
	files := func(blocks int) string {
		return fmt.Sprintf(`"num_file_blocks": %d, "directory": %q`, blocks, t.TempDir())
	}
	for _, c := range []cacheCase{
		{name: "built-in", local: true},
		{name: "longrope", model: longrope, local: true, policy: configs.FairScheduling},
		{name: "window", model: fixtures.Dir(t, "mixtral_window"), local: true},
		{name: "host", model: longrope, tiers: `"num_cpu_blocks": 30`, local: true, policy: configs.FairScheduling},
		{name: "host alone", tiers: `"num_cpu_blocks": 30, "eviction_policy": "arc"`, fails: 0.05},
		{name: "peers and host", model: longrope, tiers: `"num_gpu_blocks": 20, "num_cpu_blocks": 30`},
		{name: "peers and host, fair", model: longrope, tiers: `"num_gpu_blocks": 20, "num_cpu_blocks": 30, "block_size_factor": 2`, policy: configs.FairScheduling, fails: 0.05},
		{name: "lossy peers", tiers: `"num_gpu_blocks": 10, "block_size_factor": 2, "durability": {"PEER_GPU": "lossy"}`, local: true},
		{name: "files", model: longrope, tiers: files(40)},
		{name: "files, by priority", tiers: files(20) + `, "block_size_factor": 2`, policy: configs.PriorityScheduling, fails: 0.05},
		{name: "all tiers, fair", model: longrope, tiers: files(40) + `, "num_gpu_blocks": 8, "num_cpu_blocks": 12, "eviction_policy": "arc"`, local: true, policy: configs.FairScheduling, fails: 0.05},
	} {
		if racedetector.Enabled && (c.fails == 0 || c.name == "host alone") {
			continue // the others do the same and more
		}
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { testPrefixCacheChangesNoToken(t, c) })
		})
	}
}

// failKVCopies has copies of KV blocks from and to tiers fail, with that chance and the third for sure: how many there
// are differs from run to run. It returns a function that stops that and says how many have failed.
func failKVCopies(m *emulated.Machine, chance float64) (failed func() int) {
	match := func(p emulated.Point) bool {
		peer := p.To != device.Host && p.To != device.HBM(0)
		return p.Stream != "compute" && (strings.HasPrefix(p.Label, "kv ") || peer)
	}
	some := emulated.Fault{Kind: emulated.FailCopy, Times: -1, Chance: chance, Match: match}
	third := emulated.Fault{Kind: emulated.FailCopy, Skip: 2, Match: match}
	if chance == 0 {
		return func() int { return 0 }
	}
	m.Inject(&third)
	m.Inject(&some)
	return func() int { some.Release(); return some.Hits() + third.Hits() }
}

func testPrefixCacheChangesNoToken(t *testing.T, c cacheCase) {
	model, tiers, local := c.model, c.tiers, c.local
	n, _ := open(t, func(s *configs.Settings) { s.Model.Name, s.KV.EnablePrefixCaching = model, false })
	rs := conversations(48, n.Info().Config.Vocab)
	want := alone(t, n, rs)
	if s := n.Engine().State(); s.PrefixCacheQueries != 0 || s.PrefixCacheHits != 0 {
		t.Errorf("without prefix caching: %+v", s)
	}
	for _, blocks := range []int{12, 40}[:racedetector.Fewer(2, 1)] {
		var count steps
		tight, m := openWith(t, engine.Listener{StepFinished: func(engine.StepInfo) { count.step() }}, func(s *configs.Settings) {
			s.Model.Name, s.KV.EnablePrefixCaching = model, local
			if tiers != "" {
				s.KV.TransferConfig = `{"kv_connector_extra_config": {` + tiers + `}}`
			}
			s.KV.NumGPUBlocksOverride, s.KV.MaxModelLen, s.Batch.MaxNumBatchedTokens, s.Batch.MaxNumSeqs = blocks, 120, 50, 8
			s.Batch.SchedulingPolicy, s.Batch.FairGranularity = c.policy, 3
		})
		failed := failKVCopies(m, c.fails)
		stop := run(t, tight)
		tenant := &tenant{machine: m}
		random := rand.New(rand.NewPCG(uint64(blocks), 1))
		cached := 0
		var mu sync.Mutex
		var group sync.WaitGroup
		for i, r := range rs {
			if c.policy != configs.FCFSScheduling {
				r.Priority = i%5 - 2
			}
			cancelAfter := -1
			if i%9 == 4 {
				cancelAfter = random.IntN(12)
			}
			group.Go(func() {
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				count.await(i)
				switch i {
				case 10, 20:
					tenant.use(i == 10)
				case 30:
					tight.Engine().ResetPrefixCache(c.fails > 0)
				}
				j, err := tight.Engine().Submit(ctx, r)
				if err != nil {
					t.Error(err)
					return
				}
				if cancelAfter >= 0 {
					count.call(cancelAfter, cancel)
				}
				for k, got := range wait(t, j) {
					w := want[i][k]
					if got.Finish == engine.FinishAbort && cancelAfter >= 0 {
						w.TokenIDs, w.FinishReason = w.TokenIDs[:min(len(got.Tokens), len(w.TokenIDs))], engine.FinishAbort
					}
					if !slices.Equal(ids(got), w.TokenIDs) || got.Finish != w.FinishReason {
						t.Errorf("%d blocks, request %d, sample %d: %v (%s), without prefix caching %v (%s)", blocks, i, k, ids(got), got.Finish, w.TokenIDs, w.FinishReason)
					}
				}
				mu.Lock()
				defer mu.Unlock()
				if u := j.Usage(); u.CachedTokens >= u.PromptTokens || u.CachedTokens%16 != 0 {
					t.Errorf("request %d: %+v", i, u)
				}
				cached += j.Usage().CachedTokens
			})
		}
		group.Wait()
		if err := stop(); err != nil {
			t.Error(err)
		}
		s := tight.Engine().State()
		if s.PrefixCacheHits+s.ExternalHits != int64(cached) || local != (s.PrefixCacheHits > 0) || tiers == "" && s.ExternalHits > 0 || tiers != "" && blocks == 12 && s.ExternalHits == 0 {
			t.Errorf("%d blocks: %+v, and the requests had %d cached tokens", blocks, s, cached)
		}
		if blocks == 12 && s.Preemptions == 0 {
			t.Error("nothing was preempted: the cache is too large for this test")
		}
		if n := failed(); n == 0 && c.fails > 0 {
			t.Errorf("%d blocks: no copy has failed", blocks)
		}
		if s.KVUsedBlocks != tight.KV().Held() || tight.KV().Free()+s.KVUsedBlocks != s.KVBlocks {
			t.Errorf("%d blocks, after the last request: %+v, %d blocks free", blocks, s, tight.KV().Free())
		}
	}
}

// tenant is another process that uses the peers' memory.
type tenant struct {
	machine *emulated.Machine
	mu      sync.Mutex
	taken   [3]int64
}

// use takes what is free of the peers' memory, or releases it.
func (t *tenant) use(takes bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for gpu := 1; gpu < len(t.taken); gpu++ {
		at := device.HBM(gpu)
		if !takes {
			t.machine.Occupy(at, -t.taken[gpu]) //nolint:errcheck // it has them
			continue
		}
		if u, err := t.machine.Usage(at); err == nil && t.machine.Occupy(at, u.Free()) == nil {
			t.taken[gpu] = u.Free()
		}
	}
}

// cachedTokens runs requests one after the other, and returns how many tokens each found cached.
func cachedTokens(t *testing.T, e *engine.Engine, rs ...engine.Request) (cached []int) {
	t.Helper()
	for _, r := range rs {
		j, err := e.Submit(t.Context(), r)
		if err != nil {
			t.Fatal(err)
		}
		idle := 0
		for u := j.Usage(); u.CompletionTokens < r.Params.MaxTokens*r.Params.N; u = j.Usage() {
			if worked, err := engine.Turn(e, t.Context()); err != nil {
				t.Fatal(err)
			} else if worked {
				idle = 0
			} else if idle++; idle > 100 {
				t.Fatalf("a request waits without end, for a load perhaps: %+v", u)
			}
		}
		if _, err := engine.Turn(e, t.Context()); err != nil { // delivers the last token
			t.Fatal(err)
		}
		if _, err := j.Wait(t.Context()); err != nil {
			t.Fatal(err)
		}
		cached = append(cached, j.Usage().CachedTokens)
	}
	return cached
}

// TestCachedTokens: which tokens are found, in blocks of 4.
func TestCachedTokens(t *testing.T) {
	request := func(n, completion int, salt string) engine.Request {
		return engine.Request{Prompt: prompt(1, n, 250), Params: params(completion), CacheSalt: salt}
	}
	for _, c := range []struct {
		name     string
		requests []engine.Request
		want     []int
	}{
		{"full blocks, and not the last token", []engine.Request{request(11, 1, ""), request(11, 1, ""), request(8, 1, ""), request(9, 1, ""), request(3, 1, "")}, []int{0, 8, 4, 8, 0}},
		{"longer", []engine.Request{request(8, 1, ""), request(30, 1, ""), request(40, 1, "")}, []int{0, 8, 28}},
		{"salts", []engine.Request{request(11, 1, ""), request(11, 1, "a"), request(11, 1, "b"), request(11, 1, "a"), request(11, 1, "")}, []int{0, 0, 0, 8, 8}},
		// The boundary of longrope is at 40 tokens.
		{"longrope", []engine.Request{request(40, 1, ""), request(41, 1, ""), request(60, 1, ""), request(39, 1, "")}, []int{0, 0, 40, 36}},
		{"past longrope's boundary", []engine.Request{request(36, 12, ""), request(36, 1, ""), request(50, 1, "")}, []int{0, 0, 36}},
	} {
		kv := smallBlocks(t, 60)
		o := engine.Options{Pipeline: newDrawing(t, kv), KV: kv, MaxModelLen: 100, LongAfter: longAfter, Vocab: 256, PrefixCaching: true}
		if got := cachedTokens(t, newEngine(t, o), c.requests...); !slices.Equal(got, c.want) {
			t.Errorf("%s: %v cached tokens, want %v", c.name, got, c.want)
		}
		o.PrefixCaching = false
		if got := cachedTokens(t, newEngine(t, o), c.requests...); slices.Max(got) > 0 {
			t.Errorf("%s: %v cached tokens without prefix caching", c.name, got)
		}
	}
}

// TestGeneratedTokensAreCached: the next turn of a conversation finds the completion.
func TestGeneratedTokensAreCached(t *testing.T) {
	kv := smallBlocks(t, 60)
	e := newEngine(t, engine.Options{Pipeline: newDrawing(t, kv), KV: kv, MaxModelLen: 100, Vocab: 256, PrefixCaching: true})
	r := engine.Request{Prompt: prompt(1, 10, 250), Params: params(11)}
	outs, err := e.Generate(t.Context(), []engine.Request{r}, nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Prompt = slices.Concat(r.Prompt, outs[0].TokenIDs, prompt(3, 5, 250))
	if got := cachedTokens(t, e, r); got[0] != 20 { // of 10 + 10 computed ones
		t.Errorf("%v cached tokens, want 20", got)
	}
}

// TestResetPrefixCache: nothing is found after it.
func TestResetPrefixCache(t *testing.T) {
	kv := smallBlocks(t, 60)
	e := newEngine(t, engine.Options{Pipeline: newDrawing(t, kv), KV: kv, MaxModelLen: 100, Vocab: 256, PrefixCaching: true})
	r := engine.Request{Prompt: prompt(1, 10, 250), Params: params(1)}
	got := cachedTokens(t, e, r, r)
	e.ResetPrefixCache(false)
	if got = append(got, cachedTokens(t, e, r, r)...); !slices.Equal(got, []int{0, 8, 0, 8}) {
		t.Errorf("%v cached tokens", got)
	}
	if s := e.State(); s.PrefixCacheQueries != 40 || s.PrefixCacheHits != 16 {
		t.Errorf("%+v", s)
	}
}

// TestResetWhileRunning: what a request has computed before a reset, and what it stores of that later, is
// not found by a request that comes after the reset.
func TestResetWhileRunning(t *testing.T) {
	for _, external := range []bool{false, true} {
		kv := smallBlocks(t, 60)
		step := newDrawing(t, kv)
		o := engine.Options{Pipeline: step, KV: kv, MaxModelLen: 100, Vocab: 256, PrefixCaching: true}
		r := &race{T: t, kv: kv, step: step, tiers: newMemoryTiers(step, 1)}
		if external {
			o.Offload = r.tiers
		}
		r.Engine = newEngine(t, o)
		q := ask(1, 20, 8)
		running := r.submit(t.Context(), q)
		r.turns(3, true)
		r.ResetPrefixCache(external)
		want := r.finish(running)
		after := r.submit(t.Context(), q)
		if got := r.finish(after); !slices.Equal(got, want) || after.Usage().CachedTokens != 0 {
			t.Errorf("tiers %t: %v, want %v; %+v", external, got, want, after.Usage())
		}
		again := r.submit(t.Context(), q)
		if r.finish(again); again.Usage().CachedTokens != 16 {
			t.Errorf("tiers %t: %+v", external, again.Usage())
		}
	}
}

// TestFailedRequestsAreNotCached: what a request without a next token has computed is not found.
func TestFailedRequestsAreNotCached(t *testing.T) {
	kv := smallBlocks(t, 60)
	fails := true
	step := failingSteps{stepFunc(func(context.Context, *pipeline.Step) error { return nil }), func(*pipeline.Sequence) bool { return fails }}
	e := newEngine(t, engine.Options{Pipeline: step, KV: kv, MaxModelLen: 100, MaxNumBatchedTokens: 8, Vocab: 256, PrefixCaching: true})
	r := engine.Request{Prompt: prompt(1, 20, 250), Params: params(1)}
	if _, err := e.Generate(t.Context(), []engine.Request{r}, nil); err == nil {
		t.Fatal("the request succeeded")
	}
	fails = false
	if got := fmt.Sprint(cachedTokens(t, e, r, r)); got != "[0 16]" {
		t.Errorf("%v cached tokens", got)
	}
}

// TestFailedRequestsAreNotLoaded: nor do the tiers bring it back.
func TestFailedRequestsAreNotLoaded(t *testing.T) {
	kv := smallBlocks(t, 60)
	fails := true
	step := failingSteps{stepFunc(func(context.Context, *pipeline.Step) error { return nil }), func(*pipeline.Sequence) bool { return fails }}
	tiers := &endingTiers{newMemoryTiers(newDrawing(t, kv), 1)}
	e := newEngine(t, engine.Options{Pipeline: step, KV: kv, Offload: tiers, PrefixCaching: true, MaxModelLen: 100, MaxNumBatchedTokens: 8, Vocab: 256})
	r := engine.Request{Prompt: prompt(1, 20, 250), Params: params(1)}
	if _, err := e.Generate(t.Context(), []engine.Request{r}, nil); err == nil {
		t.Fatal("the request succeeded")
	}
	fails = false
	if got := fmt.Sprint(cachedTokens(t, e, r, r)); got != "[0 16]" {
		t.Errorf("%v cached tokens", got)
	}
}

// endingTiers are memoryTiers whose transfers end with the next poll after a wait.
type endingTiers struct{ *memoryTiers }

func (m *endingTiers) Busy() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.stores)+len(m.ended) > 0 || len(m.loads) > 0 && !m.early
}

func (m *endingTiers) Poll() []offload.Loaded {
	m.mu.Lock()
	if m.waited {
		m.endAll()
	}
	m.mu.Unlock()
	return m.memoryTiers.Poll()
}

// TestIdleEngineHoldsNothing: blocks whose stores end while there is no request become free.
func TestIdleEngineHoldsNothing(t *testing.T) {
	kv := smallBlocks(t, 60)
	step := newDrawing(t, kv)
	e := newEngine(t, engine.Options{Pipeline: step, KV: kv, Offload: &endingTiers{newMemoryTiers(step, 1)}, PrefixCaching: true, MaxModelLen: 100, Vocab: 256})
	ctx, cancel := context.WithCancel(t.Context())
	ran := make(chan error, 1)
	go func() { ran <- e.Run(ctx) }()
	j, err := e.Submit(t.Context(), ask(1, 20, 4))
	if err != nil {
		t.Fatal(err)
	}
	wait(t, j)
	for end := time.Now().Add(20 * time.Second); e.State().KVUsedBlocks > 0; runtime.Gosched() {
		if time.Now().After(end) {
			t.Errorf("%d blocks are used by nobody", e.State().KVUsedBlocks)
			break
		}
	}
	cancel()
	if err := <-ran; err != nil {
		t.Error(err)
	}
}

// TestWithoutTiers: a request that is kept from the tiers neither loads from them nor is stored there,
// and has the same tokens.
func TestWithoutTiers(t *testing.T) {
	for _, caching := range []bool{false, true} {
		kv := smallBlocks(t, 64)
		step := newDrawing(t, kv)
		tiers := newMemoryTiers(step, 1)
		e := newEngine(t, engine.Options{Pipeline: step, KV: kv, Offload: tiers, PrefixCaching: caching, MaxModelLen: 200, LongAfter: longAfter, Vocab: 256})
		run := func(i int, without bool) {
			t.Helper()
			q := ask(i, 17, 5)
			q.WithoutTiers = without
			outs, err := e.Generate(t.Context(), []engine.Request{q}, nil)
			if err != nil || !slices.Equal(outs[0].TokenIDs, plainTokens(t, q)) {
				t.Errorf("request %d: %v, %v", i, outs, err)
			}
			tiers.endAll()
		}
		run(1, true)
		if len(tiers.causes) > 0 || tiers.lookups > 0 {
			t.Errorf("caching %v: %d stores and %d lookups", caching, len(tiers.causes), tiers.lookups)
		}
		run(2, false)
		stored := len(tiers.content)
		e.ResetPrefixCache(false)
		run(2, true)
		if s := e.State(); s.ExternalHits != 0 || s.ExternalQueries != 17 || stored == 0 || len(tiers.content) != stored {
			t.Errorf("caching %v: %+v, %d blocks stored, then %d", caching, s, stored, len(tiers.content))
		}
	}
}

// TestResetOfShortRunning: what a running request has computed before a reset must not be found after it.
func TestResetOfShortRunning(t *testing.T) {
	kv := smallBlocks(t, 32) // 4 tokens
	d := newDrawing(t, kv)
	e := newEngine(t, engine.Options{Pipeline: d, KV: kv, PrefixCaching: true, MaxModelLen: 64, Vocab: 256})
	q := ask(1, 2, 13) // shorter than a block
	j, err := e.Submit(t.Context(), q)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := engine.Turn(e, t.Context()); err != nil { // computes the 2 tokens
		t.Fatal(err)
	}
	e.ResetPrefixCache(true)
	for j.Times().Finished.IsZero() {
		if _, err := engine.Turn(e, t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	all := append(append([]int32{}, q.Prompt...), ids(wait(t, j)[0])...)
	later := engine.Request{Prompt: all, Params: params(1)}
	o, err := e.Submit(t.Context(), later)
	if err != nil {
		t.Fatal(err)
	}
	for o.Times().Finished.IsZero() {
		if _, err := engine.Turn(e, t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if n := o.Usage().CachedTokens; n != 0 {
		t.Errorf("%d tokens, the first 2 of them computed before the reset, were found after it", n)
	}
}

// TestHitsOnce: a sequence that finds cached blocks hits each of them once, also where it waits for room in the
// steps of another prompt.
func TestHitsOnce(t *testing.T) {
	kv := smallBlocks(t, 256)
	e := newEngine(t, engine.Options{Pipeline: newDrawing(t, kv), KV: kv, PrefixCaching: true, MaxModelLen: 512, MaxNumBatchedTokens: 8, Vocab: 256, LongAfter: longAfter})
	turn := func(j *engine.Job) {
		for j.Times().Finished.IsZero() {
			if _, err := engine.Turn(e, t.Context()); err != nil {
				t.Fatal(err)
			}
		}
	}
	submit := func(r engine.Request) *engine.Job {
		j, err := e.Submit(t.Context(), r)
		if err != nil {
			t.Fatal(err)
		}
		return j
	}
	first := ask(1, 20, 1)
	turn(submit(first)) // 5 blocks of it are cached
	long := submit(ask(2, 400, 1))
	if _, err := engine.Turn(e, t.Context()); err != nil {
		t.Fatal(err)
	}
	again := first
	again.Prompt = append(append([]int32{}, first.Prompt...), prompt(9, 18, 250)...)
	before := kv.Reuse()
	j := submit(again)
	turn(j)
	turn(long)
	after := kv.Reuse()
	if got, want := after.Hits-before.Hits, int64(j.Usage().CachedTokens/4); got != want {
		t.Errorf("%d hits, and %d blocks were found", got, want)
	}
}
