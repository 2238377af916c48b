package pipeline

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/forward"
	"github.com/moeserve/moeserve/harvest"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/kernels/cpu"
	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/models"
	"github.com/moeserve/moeserve/models/safetensors"
	"github.com/moeserve/moeserve/tools/fixtures"
	"github.com/moeserve/moeserve/tools/racedetector"
	"github.com/moeserve/moeserve/transfer"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// reserve reserves KV blocks for a number of tokens.
func reserve(t testing.TB, table *kvcache.Table, tokens int) {
	t.Helper()
	if !table.Reserve(tokens) {
		t.Fatalf("too few KV blocks for %d tokens", tokens)
	}
}

// rig is a pipeline over a fixture's weights on an emulated machine.
type rig struct {
	// noLogits: generate wants no logits, and seldom more than sampled tokens. ahead: it allows the next step to be
	// enqueued ahead.
	noLogits, ahead bool
	*testing.T
	m     *emulated.Machine
	store *experts.Store
	kv    *kvcache.Manager
	p     *Pipeline
	// gateUps counts gate/up projections of experts.
	gateUps [gateUpKinds]int
	// capturing is the pipeline's machine if Options.Graphs is set.
	capturing *capturing

	// before, if set, is called before each step of run, with its number.
	before func(step int)
}

const space = device.Space(1) // gpu0

// host is the backend of attention on the host, without threads of its own.
var host = cpu.New(cpu.Options{Threads: 1})

// newRig offloads a fraction of the experts, and promotes the offloaded ones to peers, if
// any. Of o it uses the fields that select how steps run.
func newRig(t *testing.T, fixture string, fraction float64, mo emulated.Options, o Options, peers ...device.Space) *rig {
	t.Helper()
	m, err := emulated.New(mo)
	check(t, err)
	r := &rig{T: t, m: m}
	closers := []func() error{m.Close}
	t.Cleanup(func() {
		for _, c := range slices.Backward(closers) {
			if err := c(); err != nil && !errors.Is(err, device.ErrLost) {
				t.Error(err)
			}
		}
	})
	alloc := func(space device.Space, n int64) device.Memory {
		x, err := m.Alloc(space, n, "test")
		check(t, err)
		closers = append(closers, x.Free)
		return x
	}

	dir := fixtures.Dir(t, fixture)
	c, err := models.ReadConfig(dir)
	check(t, err)
	files, err := safetensors.Open(dir)
	check(t, err)
	closers = append(closers, files.Close)
	src := models.NewCheckpoint(files)
	layout, err := models.NewLayout(c, src, nil)
	check(t, err)
	backend := cpu.New(cpu.Options{})
	closers = append(closers, backend.Close)

	limits := forward.Limits{MaxTokens: 64, MaxSeqs: 8, MaxLogits: 64, MaxModelLen: 192, BlockTokens: 16, MaxAdjust: 64, MaxTopLogProbs: 3}
	var machine device.Machine = m
	var enqueuing kernels.Backend = countingBackend{backend, &r.gateUps}
	if l, ok := o.Machine.(*lax); ok {
		l.Machine = m
		machine = l
	}
	if o.Graphs > 0 {
		r.capturing = &capturing{Machine: m}
		machine, enqueuing = r.capturing, capturingBackend{enqueuing}
	}
	if _, ok := o.CPUExperts.(lateBackend); ok {
		enqueuing = lateBackend{enqueuing}
	}
	arena := alloc(space, layout.Bytes)
	group := o.GroupLimits(limits)
	weights := layout.Bind(arena.Range(0, 1).Addr)
	for range o.Groups() {
		ws := alloc(space, forward.WorkspaceBytes(c, backend, group))
		model, err := forward.NewModel(c, weights, enqueuing, ws.Range(0, ws.Bytes()), group)
		check(t, err)
		o.Executors = append(o.Executors, Executor{Space: space, Model: model})
	}

	engine, err := transfer.New(transfer.Options{Machine: m, ChunkBytes: 4096, Trace: o.Trace})
	check(t, err)
	closers = append(closers, engine.Close)
	var layers []int
	for l, dense := range c.Dense {
		if !dense {
			layers = append(layers, l)
		}
	}
	extent, err := backend.ExpertLayout(c.ExpertShape(layout.ExpertDType))
	check(t, err)
	placement, err := experts.Place(len(layers), c.Experts, fraction)
	check(t, err)
	plan, err := experts.NewPlan(experts.Config{Layers: layers, Experts: c.Experts, Layout: extent, Placement: placement, InPlace: o.ExpertAccess == configs.DirectAccess || o.AccessModel.Known()})
	check(t, err)
	so := experts.Options{Machine: m, Space: space, Backend: enqueuing, Transfer: engine, Plan: plan, CPU: o.CPUShare}
	if len(peers) > 0 {
		so.Harvest, err = harvest.New(harvest.Options{Machine: m, Peers: peers, SlabBytes: 256 << 10})
		check(t, err)
	}
	r.store, err = experts.New(so)
	check(t, err)
	closers = append(closers, r.store.Close)
	if len(peers) > 0 { // harvest is closed before the store
		closers = append(closers, func() error { return so.Harvest.Close(context.Background()) })
	}

	s, err := m.NewStream(space, device.StreamOptions{Name: "load"})
	check(t, err)
	to := &sink{m: m, stream: s, arena: arena, Store: r.store}
	check(t, models.Load(t.Context(), src, layout, to, nil))
	for _, x := range o.Executors {
		check(t, x.Model.Constants(to.put))
	}
	check(t, s.Close())
	check(t, r.store.Seal(t.Context()))
	for layer, homes := range r.store.Placed() {
		for e, home := range homes {
			if len(peers) > 0 && home.Tier == experts.Host {
				check(t, r.store.Promote(experts.ID{Layer: layer, Expert: e}, experts.PromoteOptions{}))
			}
		}
	}
	check(t, r.store.WaitMoves(t.Context()))

	kvSpace := space
	if o.HostAttention != nil {
		kvSpace = device.Host
	}
	pool, err := kvcache.NewPool(kvcache.PoolOptions{Machine: m, Space: kvSpace, Blocks: 96, Shape: kvcache.Shape{
		Layers: c.Layers, KVHeads: c.KVHeads, HeadDim: c.HeadDim, DType: backend.ActivationDType(), BlockTokens: limits.BlockTokens,
	}})
	check(t, err)
	closers = append(closers, pool.Close)
	r.kv, err = kvcache.NewManager(kvcache.ManagerOptions{Blocks: 96, BlockTokens: limits.BlockTokens})
	check(t, err)
	o.Machine, o.Limits = machine, limits
	o.Experts, o.KV, o.HostLogits = r.store, pool, true
	r.p, err = New(o)
	check(t, err)
	closers = append(closers, r.p.Close)
	return r
}

// sink loads weights, one extent at a time.
type sink struct {
	*experts.Store
	m      device.Machine
	arena  device.Memory
	mu     sync.Mutex
	stream device.Stream
}

func (s *sink) Dense(off int64, data []byte) error {
	return s.put(s.arena.Range(off, int64(len(data))), data)
}

func (s *sink) put(dst device.Range, data []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	x, err := s.m.Alloc(device.Host, dst.Bytes, "load")
	if err != nil {
		return err
	}
	copy(x.Write(0, dst.Bytes), data)
	if err := s.stream.Copy(dst, x.Range(0, dst.Bytes)); err != nil {
		return err
	}
	if err := s.stream.Synchronize(context.Background()); err != nil {
		return err
	}
	return x.Free()
}

// history is the output of a test's steps.
type history struct {
	tokens []int32
	logits []float32
}

func (h *history) add(r Result) {
	h.tokens = append(h.tokens, r.Sampled...)
	for _, l := range r.Logits {
		h.logits = append(h.logits, l...)
	}
}

func (h history) differs(from history) string {
	switch {
	case !slices.Equal(h.tokens, from.tokens):
		return fmt.Sprintf("tokens %v, want %v", h.tokens, from.tokens)
	case !slices.Equal(h.logits, from.logits):
		return "the logits differ"
	}
	return ""
}

// run generates tokens for three sequences: prompts of 1, 6 and 15 tokens in steps of one,
// two and three sequences, then two decode steps of all, then two of one. A step that failed
// is retried.
func (r *rig) run() history {
	r.Helper()
	c := r.p.o.config()
	var h history
	var seqs []Sequence
	steps := 0
	step := func(s *Step) {
		r.Helper()
		if r.before != nil {
			r.before(steps)
		}
		steps++
		s.Logits = true
		res, err := r.p.Step(r.Context(), s)
		for try := 0; errors.Is(err, ErrStepFailed) && try < 20; try++ {
			res, err = r.p.Step(r.Context(), s)
		}
		check(r, err)
		h.add(res)
		for i := range s.Sequences {
			q := &s.Sequences[i]
			q.Start += len(q.Tokens)
			q.Tokens = []int32{res.Sampled[i]}
		}
	}
	for i, n := range []int{1, 6, 15} {
		q := Sequence{LogitRows: 1, Table: r.kv.NewTable(), SamplingParams: SamplingParams{Seed: uint64(i), Temperature: float32(i)}}
		reserve(r, q.Table, 64)
		for j := range n {
			q.Tokens = append(q.Tokens, int32((7*i+13*j+j*j)%c.Vocab))
		}
		seqs = append(seqs, q)
		step(&Step{Sequences: seqs})
	}
	for range 2 {
		step(&Step{Sequences: seqs})
	}
	for range 2 {
		step(&Step{Sequences: seqs[1:2]})
	}
	for i := range seqs {
		seqs[i].Table.Release(false)
	}
	return h
}

// gateUpKind is what experts get from the router.
type gateUpKind int

const (
	noRuns   gateUpKind = iota // no runs
	withRuns                   // the runs that it has listed
	routing                    // they select themselves, in one operation with the router
	gateUpKinds
)

// countingBackend counts as rig.gateUps says.
type countingBackend struct {
	kernels.Backend
	gateUps *[gateUpKinds]int
}

func (b countingBackend) Enqueue(s device.Stream, op kernels.Op) error {
	switch o := op.(type) {
	case *kernels.RouteExpertUp:
		b.gateUps[routing]++
	case *kernels.ExpertUp:
		if o.Runs.None() {
			b.gateUps[noRuns]++
		} else {
			b.gateUps[withRuns]++
		}
	}
	return b.Backend.Enqueue(s, op)
}

// TestRuns: experts get the runs that the router has listed in steps of few tokens where all lie on the device, or
// are read in place, and where a layer's are launched together; not where some are computed before others. Where they
// wait for nothing, their operation includes the router's selection.
func TestRuns(t *testing.T) {
	for _, test := range []struct {
		name     string
		fraction float64
		options  Options
		tokens   int
		want     gateUpKind
	}{
		{"resident", 0, Options{}, 1, routing},
		{"resident, few tokens", 0, Options{}, 2, routing},
		{"resident, some tokens", 0, Options{}, kernels.MaxRunPairs + 1, routing},
		{"resident, many tokens of few experts", 0, Options{}, 64, noRuns},
		{"resident, micro-batches", 0, Options{MicroBatchTokens: 2}, 8, noRuns},
		{"resident, micro-batches of one token", 0, Options{MicroBatchTokens: 1}, 2, noRuns},
		{"none resident, layerwise", 1, Options{SmallBatchTokens: -1}, 1, withRuns},
		{"some resident, layerwise", 0.5, Options{SmallBatchTokens: -1}, 1, noRuns},
		{"some resident, on demand", 0.5, Options{SmallBatchTokens: 64}, 1, noRuns},
		{"in place", 0.5, Options{ExpertAccess: configs.DirectAccess}, 1, routing},
		{"in place, few tokens", 0.5, Options{ExpertAccess: configs.DirectAccess}, 2, routing},
	} {
		r := newRig(t, "mixtral", test.fraction, emulated.Options{Virtual: true}, test.options)
		table := r.kv.NewTable()
		reserve(t, table, test.tokens)
		_, err := r.p.Step(t.Context(), &Step{Sequences: []Sequence{{Tokens: make([]int32, test.tokens), Table: table, LogitRows: 1}}})
		check(t, err)
		for kind, n := range r.gateUps {
			if (n > 0) != (kind == int(test.want)) {
				t.Errorf("%s: gate/up projections of experts without runs, with them, and in one operation with the router: %v", test.name, r.gateUps)
				break
			}
		}
		table.Release(false)
	}
}

// lateBackend is a backend whose host enqueues slowly.
type lateBackend struct{ kernels.Backend }

func (b lateBackend) Enqueue(s device.Stream, op kernels.Op) error {
	time.Sleep(300 * time.Microsecond)
	return b.Backend.Enqueue(s, op)
}

// machines are options for machines that schedule their work in different ways: under the race detector
// those that have goroutines, and not those in virtual time.
func machines(t *testing.T) iter.Seq2[int, emulated.Options] {
	all := []emulated.Options{
		{Virtual: true, Check: true},
		{Virtual: true, Check: true, Schedule: emulated.Lazy},
		{Check: true},
	}
	for seed := range uint64(3) {
		all = append(all, emulated.Options{Virtual: true, Check: true, Schedule: emulated.Random, Seed: seed})
	}
	if testing.Short() {
		all = all[:3]
	}
	return func(yield func(int, emulated.Options) bool) {
		for i, o := range all {
			if racedetector.Enabled && o.Virtual {
				continue
			}
			if !yield(i, o) {
				return
			}
		}
	}
}

var sameOn = []string{"mixtral", "phimoe", "qwen2_moe_sparse_step"}

// TestOnDemandSameResults: a step gives the same bits whether all of a layer's missing
// experts are fetched or only the routed ones, wherever experts are and however the machine
// schedules its work.
func TestOnDemandSameResults(t *testing.T) {
	for _, name := range sameOn {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			want := newRig(t, name, 0, emulated.Options{Virtual: true}, Options{SmallBatchTokens: -1}).run()
			for i, mo := range machines(t) {
				for j, fraction := range [][]float64{{0.25, 1}, {0.5, 0.75}}[i%2] {
					o := Options{SmallBatchTokens: []int{64, 0, -1}[(i/2+j)%3], MicroBatchTokens: []int{0, 2, 7}[i%3]}
					r := newRig(t, name, fraction, mo, o)
					if d := r.run().differs(want); d != "" {
						t.Errorf("fraction %v, %+v, SmallBatchTokens %d: %s", fraction, mo, o.SmallBatchTokens, d)
					}
				}
			}
		})
	}
}

// TestPlansSameResults: a step gives the same bits with attention on the device or on the
// host, with experts run per layer or per micro-batch, however a step is split, wherever
// experts are and however the machine schedules its work.
func TestPlansSameResults(t *testing.T) {
	for _, name := range []string{"mixtral", "mixtral_window", "phimoe", "qwen2_moe_sparse_step"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			want := newRig(t, name, 0, emulated.Options{Virtual: true}, Options{SmallBatchTokens: -1}).run()
			var on []emulated.Options
			for _, mo := range machines(t) {
				on = append(on, mo)
			}
			i := 0
			for _, attention := range []kernels.Backend{nil, host} {
				for _, grouping := range []configs.Grouping{configs.PerLayer, configs.PerMicroBatch} {
					for _, o := range []Options{{}, {MicroBatches: 3}, {MicroBatchTokens: 2, SmallBatchTokens: -1}, {MicroBatchTokens: 7, MicroBatches: 5, SmallBatchTokens: -1}} {
						o.HostAttention, o.Grouping = attention, grouping
						mo, fraction := on[i%len(on)], float64(i%5)/4
						i++
						r := newRig(t, name, fraction, mo, o)
						if d := r.run().differs(want); d != "" {
							t.Errorf("host attention: %v, experts %v, %+v, fraction %v, %+v: %s", attention != nil, grouping, o, fraction, mo, d)
						}
					}
				}
			}
		})
	}
}

// TestOnDemandFetchesLess compares the fetched bytes of the plans on the same steps.
func TestOnDemandFetchesLess(t *testing.T) {
	fetched := func(smallBatch int) int64 {
		r := newRig(t, "mixtral", 1, emulated.Options{Virtual: true, Check: true}, Options{SmallBatchTokens: smallBatch})
		r.run()
		s := r.store.Stats()
		return s.Fetched[experts.Host]
	}
	all, byDefault, always := fetched(-1), fetched(0), fetched(64)
	t.Logf("bytes fetched layerwise: %d, by default %d, on demand in all steps %d", all, byDefault, always)
	if byDefault > all*2/3 {
		t.Errorf("%d bytes were fetched, %d layerwise", byDefault, all)
	}
}

// TestOnDemandOverlap: fetches of routed experts overlap the shared expert and the resident
// ones, and prefetches of predicted experts overlap the next layer's attention.
func TestOnDemandOverlap(t *testing.T) {
	for _, name := range []string{"mixtral", "qwen2_moe"} {
		// step returns the mean duration of a decode step of one token.
		step := func(gpu emulated.GPU, link emulated.Link) time.Duration {
			r := newRig(t, name, 0.5, emulated.Options{Virtual: true, GPUs: []emulated.GPU{gpu}, HostLink: link}, Options{})
			table := r.kv.NewTable()
			reserve(t, table, 64)
			defer table.Release(false)
			var began time.Duration
			for i := range 9 {
				if i == 1 {
					began = r.m.Now()
				}
				_, err := r.p.Step(t.Context(), &Step{Sequences: []Sequence{{Tokens: []int32{int32(5*i*i + 1)}, Start: i, Table: table, LogitRows: 1}}})
				check(t, err)
			}
			return (r.m.Now() - began) / 8
		}
		gpu, link := emulated.GPU{BytesPerSecond: 400e6}, emulated.Link{BytesPerSecond: 100e6}
		compute, copies, both := step(gpu, emulated.Link{}), step(emulated.GPU{}, link), step(gpu, link)
		t.Logf("%s: a step takes %v with compute alone, %v with copies alone, and %v with both", name, compute, copies, both)
		if hidden := compute + copies - both; hidden < copies/2 || both < compute {
			t.Errorf("%s: of %v of copies, %v overlap the compute of %v", name, copies, hidden, compute)
		}
	}
}

// TestPlanOfStep: which steps use the plan OnDemand.
func TestPlanOfStep(t *testing.T) {
	for _, c := range []struct {
		fraction  float64
		set, want int // Options.SmallBatchTokens, and the maximum tokens of a step on demand
	}{{0.5, 0, 4}, {0.5, -1, 0}, {0.5, 7, 7}, {0, 0, 0}, {0, 64, 0}} {
		r := newRig(t, "mixtral", c.fraction, emulated.Options{Virtual: true}, Options{SmallBatchTokens: c.set})
		for _, tokens := range []int{1, 4, 5, 7, 8, 64} {
			onDemand := slices.ContainsFunc(r.p.plans.get(tokens, byCopy, false).rest(), func(a Action) bool { return a.Kind == RouterToHost })
			if want := tokens <= c.want; onDemand != want {
				t.Errorf("fraction %v, SmallBatchTokens %d: a step of %d tokens runs on demand: %v, want %v", c.fraction, c.set, tokens, onDemand, want)
			}
		}
	}
}

// TestPlanWithoutData: on a machine that keeps no data steps run, and never use OnDemand.
func TestPlanWithoutData(t *testing.T) {
	r := newRig(t, "mixtral", 0.5, emulated.Options{Virtual: true, NoData: true}, Options{SmallBatchTokens: 64})
	table := r.kv.NewTable()
	reserve(t, table, 8)
	if _, err := r.p.Step(t.Context(), &Step{Sequences: []Sequence{{Tokens: []int32{1}, Table: table, LogitRows: 1}}}); err != nil {
		t.Error(err)
	}
	if s := r.store.Stats(); s.Misses == 0 || s.Misses != s.Uses[experts.Host] || r.p.plans.onDemand != 0 {
		t.Errorf("%+v, on demand up to %d tokens", s, r.p.plans.onDemand)
	}
	table.Release(false)
}

// fetch matches fetches of experts, own the copies on the compute stream.
func fetch(p emulated.Point) bool { return p.To == space && strings.HasPrefix(p.Stream, "copy ") }
func own(p emulated.Point) bool   { return p.Stream == "compute" }

// hostCopies matches copies to and from attention on the host.
func hostCopies(p emulated.Point) bool {
	return p.Stream == "q, k, v to host" || p.Stream == "attention from host"
}

// variants are ways to run steps, besides the default.
var variants = []Options{
	{SmallBatchTokens: 64},
	{HostAttention: host, SmallBatchTokens: -1},
	{HostAttention: host, Grouping: configs.PerMicroBatch, MicroBatches: 3, SmallBatchTokens: -1},
	{HostAttention: host, SmallBatchTokens: 64},
	{Grouping: configs.PerMicroBatch, MicroBatches: 2, SmallBatchTokens: -1},
}

// TestFaultsSameResults fails and stalls copies, in steps of all plans.
func TestFaultsSameResults(t *testing.T) {
	want := newRig(t, "mixtral", 0, emulated.Options{Virtual: true}, Options{SmallBatchTokens: -1}).run()
	for i, f := range []emulated.Fault{
		{Kind: emulated.FailCopy, Match: fetch, Skip: 3, Times: 2},
		{Kind: emulated.FailCopy, Match: fetch, Times: -1, Chance: 0.1},
		{Kind: emulated.FailCopy, Match: own, Skip: 5, Times: 3},
		{Kind: emulated.FailCopy, Match: own, Times: -1, Chance: 0.1},
		{Kind: emulated.StallCopy, Match: fetch, Times: -1, Chance: 0.2, For: time.Millisecond},
		{Kind: emulated.FailCopy, Match: hostCopies, Skip: 7, Times: 3},
		{Kind: emulated.FailCopy, Match: hostCopies, Times: -1, Chance: 0.1},
		{Kind: emulated.StallCopy, Match: hostCopies, Times: -1, Chance: 0.2, For: time.Millisecond},
	} {
		for k, mo := range machines(t) {
			if k%2 != i%2 {
				continue
			}
			o := variants[(i+k/2)%len(variants)]
			if i >= 5 {
				o = variants[1+(i+k/2)%3]
			}
			r := newRig(t, "mixtral", 0.75, mo, o)
			fault := f
			r.m.Inject(&fault)
			if d := r.run().differs(want); d != "" {
				t.Errorf("%+v, %+v, %+v: %s", f, mo, o, d)
			}
			if fault.Hits() == 0 {
				t.Errorf("%+v, %+v, %+v: no fault was injected", f, mo, o)
			}
			fault.Release()
		}
	}
}

// TestCanceled cancels a step while the host waits for the router; later steps give the same
// results.
func TestCanceled(t *testing.T) {
	want := newRig(t, "mixtral", 0, emulated.Options{Virtual: true}, Options{SmallBatchTokens: -1}).run()
	r := newRig(t, "mixtral", 0.75, emulated.Options{Check: true}, Options{SmallBatchTokens: 64})
	table := r.kv.NewTable()
	reserve(t, table, 8)
	// The first copy on the compute stream waits until the cancellation was seen.
	fault := r.m.Inject(&emulated.Fault{Kind: emulated.StallCopy, Match: own})
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	_, err := r.p.Step(&noticed{Context: ctx, do: sync.OnceFunc(func() { go fault.Release() })}, &Step{Sequences: []Sequence{{Tokens: []int32{1, 2}, Table: table, LogitRows: 1}}})
	if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "fetch-chosen layer=0") {
		t.Errorf("a step whose context ends: %v", err)
	}
	table.Release(false)
	if d := r.run().differs(want); d != "" {
		t.Error(d)
	}
}

// noticed is a context that calls do once its end is seen, maybe under a lock.
type noticed struct {
	context.Context
	do func()
}

func (n *noticed) Err() error {
	err := n.Context.Err()
	if err != nil {
		n.do()
	}
	return err
}

// TestPeersSameResults: a step gives the same bits if experts are fetched from peers. The
// loss of a peer fails a step, and the retry succeeds.
func TestPeersSameResults(t *testing.T) {
	want := newRig(t, "mixtral", 0, emulated.Options{Virtual: true}, Options{SmallBatchTokens: -1}).run()
	for i, mo := range machines(t) {
		for lose := range 3 { // 0: no peer, 1: one of two, 2: both
			o := variants[(i+lose)%len(variants)]
			r := newRig(t, "mixtral", 0.75, mo, o, device.HBM(1), device.HBM(2))
			r.before = func(step int) {
				if step < 2 || step >= 2+lose {
					return
				}
				if r.store.Stats().Fetched[experts.Peer] == 0 {
					t.Errorf("%+v: nothing was fetched from a peer", mo)
				}
				check(t, r.m.Lose(step-1))
			}
			if d := r.run().differs(want); d != "" {
				t.Errorf("SmallBatchTokens %d, %d peers lost, %+v: %s", o.SmallBatchTokens, lose, mo, d)
			}
			if s := r.store.Stats(); (s.Failed > 0) != (lose > 0) {
				t.Errorf("SmallBatchTokens %d, %d peers lost, %+v: %+v", o.SmallBatchTokens, lose, mo, s)
			}
		}
	}
}

// TestLostDevice: a step that fails on the compute stream may be retried after the loss of a
// peer, but not after that of the compute GPU.
func TestLostDevice(t *testing.T) {
	r := newRig(t, "mixtral", 0.5, emulated.Options{Virtual: true}, Options{})
	table := r.kv.NewTable()
	reserve(t, table, 8)
	step := &Step{Sequences: []Sequence{{Tokens: []int32{1, 2}, Table: table, LogitRows: 1}}}
	peer, err := r.m.Alloc(device.HBM(1), 256, "peer")
	check(t, err)
	mine, err := r.m.Alloc(space, 256, "mine")
	check(t, err)
	check(t, r.p.compute.Copy(mine.Range(0, 256), peer.Range(0, 256)))
	check(t, r.m.Lose(1))
	if _, err := r.p.Step(t.Context(), step); !errors.Is(err, ErrStepFailed) || !errors.Is(err, device.ErrLost) {
		t.Errorf("a step behind a copy from a lost peer: %v", err)
	}
	check(t, errors.Join(peer.Free(), mine.Free()))
	_, err = r.p.Step(t.Context(), step)
	check(t, err)
	check(t, r.m.Lose(0))
	if _, err := r.p.Step(t.Context(), step); errors.Is(err, ErrStepFailed) || !errors.Is(err, ErrDeviceLost) || !errors.Is(err, device.ErrLost) {
		t.Errorf("a step on a lost device: %v", err)
	}
	table.Release(false)
}

// TestSequenceErrors: an error of one sequence names it, before anything has run, and without
// that sequence the step runs.
func TestSequenceErrors(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*Sequence)
		says   string
	}{
		"no tokens":      {func(q *Sequence) { q.Tokens = nil }, "0 tokens"},
		"logit rows":     {func(q *Sequence) { q.LogitRows = 3 }, "LogitRows is 3"},
		"a token":        {func(q *Sequence) { q.Tokens = []int32{1, 512} }, "token id 512"},
		"blocks":         {func(q *Sequence) { q.Start = 40 }, "too few"},
		"a bias":         {func(q *Sequence) { q.SamplingParams.Adjust = []TokenAdjust{{ID: 512}} }, "id 512"},
		"a temperature":  {func(q *Sequence) { q.SamplingParams.Temperature = -1 }, "temperature -1"},
		"above a length": {func(q *Sequence) { q.Start = 300 }, "exceeds the maximum"},
	} {
		r := newRig(t, "mixtral", 0.5, emulated.Options{Virtual: true, Check: true}, Options{})
		step := &Step{}
		for range 3 {
			table := r.kv.NewTable()
			reserve(t, table, 8)
			defer table.Release(false)
			step.Sequences = append(step.Sequences, Sequence{Tokens: []int32{1, 2}, Table: table, LogitRows: 1})
		}
		want, err := r.p.Step(t.Context(), step)
		check(t, err)
		sampled := slices.Clone(want.Sampled)
		before := r.m.Now()
		c.change(&step.Sequences[1])
		_, err = r.p.Step(t.Context(), step)
		var own *SequenceError
		if !errors.As(err, &own) || own.Index != 1 || !strings.Contains(err.Error(), c.says) || r.m.Now() != before {
			t.Errorf("%s: %v after %v; want an error of sequence 1 that says %q", name, err, r.m.Now()-before, c.says)
		}
		step.Sequences = slices.Delete(step.Sequences, 1, 2)
		got, err := r.p.Step(t.Context(), step)
		check(t, err)
		if !slices.Equal(got.Sampled, slices.Delete(sampled, 1, 2)) {
			t.Errorf("%s: without that sequence %v are sampled, want %v", name, got.Sampled, sampled)
		}
	}
}

// TestRoutedTokens: after every step the store has the device's counts of routed tokens.
func TestRoutedTokens(t *testing.T) {
	for _, smallBatch := range []int{-1, 64} {
		r := newRig(t, "qwen2_moe_sparse_step", 0.5, emulated.Options{Virtual: true, Check: true}, Options{SmallBatchTokens: smallBatch})
		c := r.p.o.config()
		table := r.kv.NewTable()
		reserve(t, table, 64)
		// One of the steps samples no token.
		for i, n := range []int{1, 0, 1} {
			q := Sequence{Tokens: make([]int32, 3), Start: 3 * i, Table: table, LogitRows: n}
			_, err := r.p.Step(t.Context(), &Step{Sequences: []Sequence{q}})
			check(t, err)
			counts, err := r.p.Counts(t.Context())
			check(t, err)
			got := r.store.RoutedTokens()
			for position, layer := range r.store.Plan().Layers {
				sum := int64(0)
				for _, x := range got[position] {
					sum += x
				}
				if !slices.Equal(got[position], counts[layer]) || sum != int64(3*(i+1)*c.TopK) {
					t.Errorf("step %d, layer %d: the store has %v, the device has counted %v", i, layer, got[position], counts[layer])
				}
			}
		}
		table.Release(false)
	}
}
