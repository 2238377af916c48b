package node_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/tools/fixtures"
	"github.com/moeserve/moeserve/tools/racedetector"
)

// stressed are requests that use every parameter, and what each gives alone with nothing
// offloaded.
type stressed struct {
	requests []engine.Request
	want     [][]engine.Output
}

// stressLength is the maximum length of a sequence.
const stressLength = 80

// newStressed draws requests of a model. A third has stop strings: parts of the text that they
// generate without them.
func newStressed(t *testing.T, model string, rng *rand.Rand) *stressed {
	t.Helper()
	n := open(t, machines()[0], func(s *configs.Settings) { s.Model.Name, s.Offload.Fraction = fixtures.Dir(t, model), 0 })
	x := &stressed{}
	vocab := n.Info().Config.Vocab
	for i := range 40 {
		r := request(make([]int32, 1+rng.IntN(stressLength/2)), 1+rng.IntN(stressLength/3))
		for j := range r.Prompt {
			r.Prompt[j] = rng.Int32N(int32(vocab))
		}
		r.ID = fmt.Sprint(i)
		p := &r.Params
		p.Seed, p.N, p.IgnoreEOS = rng.Uint64(), 1+rng.IntN(3), i%4 != 0
		if i%3 != 0 {
			p.Temperature = 0.5 + rng.Float32()
		}
		switch i % 5 {
		case 1:
			p.TopK, p.LogProbs, p.TopLogProbs = 40, true, 2
		case 2:
			p.TopP, p.RepetitionPenalty = 0.9, 1.2
		case 3:
			p.PresencePenalty, p.FrequencyPenalty, p.LogitBias = 0.5, 0.3, map[int32]float32{rng.Int32N(int32(vocab)): 5}
		case 4:
			p.StopIDs, p.MinTokens = []int32{rng.Int32N(int32(vocab)), rng.Int32N(int32(vocab))}, min(2, p.MaxTokens)
		}
		out, err := n.Engine().Generate(t.Context(), []engine.Request{r}, nil)
		if err != nil {
			t.Fatal(err)
		}
		if text := out[0].Text; i%3 == 1 && len(text) > 4 {
			p.Stop, p.IncludeStop = []string{strings.ToValidUTF8(text[len(text)/2:len(text)/2+2], "e")}, i%2 == 0
			if out, err = n.Engine().Generate(t.Context(), []engine.Request{r}, nil); err != nil {
				t.Fatal(err)
			}
		}
		x.requests, x.want = append(x.requests, r), append(x.want, out)
	}
	return x
}

// stressCase is how a case of TestStress runs.
type stressCase struct {
	settings configs.Settings
	layers   int
	machine  emulated.Options
	faults   []emulated.Fault
	// reclaim is the pause between two reclaims of peer memory; 0: none.
	reclaim time.Duration
	// stop ends the engine once so many requests have ended; 0: when all have.
	stop int
}

func anyStressCase(t *testing.T, model string, rng *rand.Rand) stressCase {
	t.Helper()
	chance := func(n int) bool { return rng.IntN(n) == 0 }
	s := configs.Defaults()
	s.Model.Name = fixtures.Dir(t, model)
	s.Offload.Fraction = []float64{0.25, 0.5, 0.75, 1}[rng.IntN(4)]
	s.Offload.DynamicResidency = s.Offload.Fraction < 1 && chance(3)
	s.Device.Peers, s.Harvest.Headroom = "auto", "1KiB"
	s.Harvest.Policy = []string{"best-fit", "locality", "fairness", "interference", "stability"}[rng.IntN(5)]
	if chance(3) {
		s.Harvest.AvailabilityTrace = fmt.Sprintf("generated:%d", rng.IntN(100))
	}
	s.Batch.MaxNumBatchedTokens, s.Batch.MaxNumSeqs = 5+rng.IntN(188), 1+rng.IntN(24)
	s.KV.MaxModelLen, s.KV.NumGPUBlocksOverride = stressLength, 6+rng.IntN(40)
	if chance(3) {
		s.Batch.Attention = configs.OnCPU
	}
	if chance(3) {
		s.Batch.MicroBatchSize = 1 + rng.IntN(s.Batch.MaxNumBatchedTokens)
	}
	if chance(3) {
		s.Batch.Grouping = configs.PerMicroBatch
	}
	c := stressCase{settings: s, layers: 1 + rng.IntN(2), machine: emulated.Options{
		Seed: rng.Uint64(),
		GPUs: []emulated.GPU{{MemoryBytes: 1 << 30}, {MemoryBytes: peerBytes}, {MemoryBytes: peerBytes}},
	}}
	c.machine.LikeCUDA, c.machine.Check = chance(2), true
	if chance(3) {
		c.machine.TimeFailures = 0.02
	}
	if chance(2) {
		c.machine.FenceStart = []uint32{1<<31 - 100, 1<<32 - 100}[rng.IntN(2)]
	}
	peer := func(s device.Space) bool { return s != device.Host && s != device.HBM(0) }
	if chance(2) {
		c.faults = append(c.faults, emulated.Fault{Kind: emulated.FailCopy, Times: -1, Chance: 0.02, Match: fetch})
	}
	if chance(3) {
		c.faults = append(c.faults, emulated.Fault{Kind: emulated.FailCopy, Times: -1, Chance: 0.02, Match: own})
	}
	if chance(2) {
		c.faults = append(c.faults, emulated.Fault{Kind: emulated.StallCopy, Times: -1, Chance: 0.05, For: time.Duration(1+rng.IntN(2000)) * time.Microsecond, Match: func(p emulated.Point) bool { return fetch(p) || peer(p.To) }})
	}
	if chance(3) {
		c.faults = append(c.faults, emulated.Fault{Kind: emulated.RefuseAlloc, Times: -1, Chance: 0.5, Match: func(p emulated.Point) bool { return peer(p.Space) }})
	}
	if chance(2) {
		c.reclaim = time.Duration(1+rng.IntN(3000)) * time.Microsecond
	}
	if chance(5) {
		c.stop = 1 + rng.IntN(20)
	}
	return c
}

// TestStress runs requests that come and go at any moment, in little room, while links fail,
// copies stall and borrowed memory is revoked: every sample has the tokens that it has alone,
// or, where its request was canceled or the engine stopped, the first of them.
// MOESERVE_STRESS_CASES is how many cases to draw, MOESERVE_STRESS_SEED from where.
func TestStress(t *testing.T) {
	number := func(name string, otherwise int) int {
		text, ok := os.LookupEnv(name)
		if !ok {
			return otherwise
		}
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 {
			t.Fatalf("%s is %q and must be a number over 0", name, text)
		}
		return n
	}
	cases, seed := number("MOESERVE_STRESS_CASES", racedetector.Fewer(12, 5)), number("MOESERVE_STRESS_SEED", 1)
	all := map[string]*stressed{}
	var preempted, retried, revoked int64
	for i := range cases {
		rng := rand.New(rand.NewPCG(uint64(seed), uint64(i)))
		model := sameOn[i%len(sameOn)]
		if all[model] == nil {
			all[model] = newStressed(t, model, rand.New(rand.NewPCG(7, 7)))
		}
		synctest.Test(t, func(t *testing.T) {
			c := anyStressCase(t, model, rng)
			n := runStress(t, c, all[model], rng)
			if t.Failed() {
				t.Fatalf("seed %d, case %d: %+v", seed, i, c)
			}
			s := n.Engine().State()
			preempted += s.Preemptions
			retried += s.Retried
			for _, k := range n.Observe().Harvest().Revocations {
				revoked += k
			}
		})
	}
	t.Logf("%d cases: %d preemptions, %d steps run again, %d slabs revoked", cases, preempted, retried, revoked)
	if preempted == 0 || retried == 0 || revoked == 0 {
		t.Error("nothing was preempted, run again, or revoked")
	}
}

func runStress(t *testing.T, c stressCase, x *stressed, rng *rand.Rand) *node.Node {
	t.Helper()
	m, err := emulated.New(c.machine)
	if err != nil {
		t.Fatal(err)
	}
	n, err := node.Open(t.Context(), node.Options{Settings: c.settings, CacheLayers: c.layers, OpenMachine: func() (device.Machine, error) { return m, nil }})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	}()
	for i := range c.faults {
		defer m.Inject(&c.faults[i]).Release()
	}
	running, stop := context.WithCancel(t.Context())
	defer stop()
	ran := make(chan error, 1)
	go func() { ran <- n.Engine().Run(running) }()
	var reclaims sync.WaitGroup
	if c.reclaim > 0 {
		peer, bytes := device.HBM(1+rng.IntN(2)), int64(1+rng.IntN(peerBytes))
		reclaims.Go(func() {
			for m.Yield(running, c.reclaim) == nil {
				_, _ = n.Harvest().Reclaim(peer, bytes, 0)
			}
		})
	}
	var readers sync.WaitGroup
	ended := make(chan struct{}, len(x.requests))
	for i := range x.requests {
		delay := time.Duration(rng.IntN(20000)) * time.Microsecond
		cancelAt := -1
		if rng.IntN(4) == 0 {
			cancelAt = rng.IntN(8)
		}
		readers.Go(func() {
			defer func() { ended <- struct{}{} }()
			time.Sleep(delay)
			x.read(t, n.Engine(), i, cancelAt, c.stop > 0)
		})
	}
	for range len(x.requests) - c.stop {
		<-ended
	}
	if c.stop > 0 {
		stop()
	}
	readers.Wait()
	stop()
	reclaims.Wait()
	if err := <-ran; err != nil {
		t.Error(err)
	}
	if s := n.Engine().State(); s.Running+s.Waiting+s.KVUsedBlocks != 0 {
		t.Errorf("afterwards: %+v", s)
	}
	return n
}

// read runs a request and compares what comes. It is canceled with its cancelAt-th update, -1:
// never. stops: the engine may be stopped.
func (x *stressed) read(t *testing.T, e *engine.Engine, i, cancelAt int, stops bool) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	job, err := e.Submit(ctx, x.requests[i])
	if err != nil {
		if !stops || !errors.Is(err, engine.ErrStopped) {
			t.Errorf("request %d: %v", i, err)
		}
		return
	}
	got := make([]engine.Output, len(x.want[i]))
	for updates := 0; ; updates++ {
		if updates == cancelAt {
			cancel()
		}
		u, err := job.Next(t.Context())
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Errorf("request %d: %v", i, err)
			return
		}
		o := &got[u.Sample]
		o.Text += u.Text
		o.Tokens = append(o.Tokens, u.Tokens...)
		o.FinishReason = u.Finish
	}
	for k, w := range x.want[i] {
		g := &got[k]
		// Text that was held back, since a stop string could begin there, comes too.
		whole := w.Text
		if p := &x.requests[i].Params; len(p.Stop) > 0 && w.FinishReason == engine.FinishStop {
			whole += p.Stop[0]
		}
		if g.FinishReason == engine.FinishAbort && (cancelAt >= 0 || stops) && len(g.Tokens) <= len(w.Tokens) && strings.HasPrefix(whole, g.Text) {
			w.Tokens, w.Text, w.FinishReason = w.Tokens[:len(g.Tokens)], g.Text, engine.FinishAbort
		}
		if !slices.EqualFunc(g.Tokens, w.Tokens, func(a, b engine.Token) bool {
			return a.ID == b.ID && a.LogProb == b.LogProb && slices.Equal(a.Top, b.Top)
		}) || g.Text != w.Text || g.FinishReason != w.FinishReason {
			t.Errorf("request %d, sample %d: %v %q (%s), alone %v %q (%s)", i, k, g.Tokens, g.Text, g.FinishReason, w.Tokens, w.Text, w.FinishReason)
		}
	}
}
