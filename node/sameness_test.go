package node_test

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/pipeline"
	"github.com/moeserve/moeserve/tools/fixtures"
	"github.com/moeserve/moeserve/tools/racedetector"
)

// requests are prompts of different lengths, some greedy and some drawn, one of
// which crosses the longrope boundary of phimoe_longrope (48 tokens).
func requests(vocab int) []engine.Request {
	var rs []engine.Request
	for i, n := range []int{1, 5, 17, 40, 47, 90} {
		r := request(nil, 6+i)
		r.Params.Seed = uint64(i)
		if i%2 == 1 {
			r.Params.Temperature = 0.8
		}
		for j := range n {
			r.Prompt = append(r.Prompt, int32((7*i+13*j+j*j)%vocab))
		}
		rs = append(rs, r)
	}
	return rs
}

// digest is over all generated ids, in request order.
func digest(outs []engine.Output) string {
	h := sha256.New()
	for _, o := range outs {
		for _, id := range o.TokenIDs {
			_ = binary.Write(h, binary.LittleEndian, id)
		}
		_ = binary.Write(h, binary.LittleEndian, int32(-1))
	}
	return fmt.Sprintf("%x", h.Sum(nil)[:8])
}

func generate(t *testing.T, n *node.Node) string {
	t.Helper()
	outs, err := n.Engine().Generate(t.Context(), requests(n.Info().Config.Vocab), nil)
	if err != nil {
		t.Fatal(err)
	}
	return digest(outs)
}

var sameOn = []string{"mixtral", "phimoe_longrope", "qwen2_moe_sparse_step"}

// TestSameTokens runs the same requests over fractions, schedules and faults (level 1), and
// over step budgets, micro-batches and batch compositions (level 2, which the CPU backend
// guarantees): the tokens are always the same.
func TestSameTokens(t *testing.T) {
	for _, name := range sameOn[:racedetector.Fewer(len(sameOn), 1)] { // all but the first run is in virtual time, where streams are no goroutines
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := fixtures.Dir(t, name)
			model := func(s *configs.Settings) { s.Model.Name = dir }
			want := generate(t, open(t, machines()[0], model))

			for _, f := range []float64{0, 0.25, 0.5, 0.75, 1} {
				for seed := range uint64(2) {
					m := machine{"", f, emulated.Options{Virtual: true, Check: true, Schedule: emulated.Random, Seed: seed, FenceStart: fenceStarts[1+seed]}}
					if got := generate(t, open(t, m, model)); got != want {
						t.Errorf("fraction %v, schedule %d: tokens %s, want %s", f, seed, got, want)
					}
				}
			}
			for _, c := range []struct{ batched, micro, seqs int }{{1, 0, 64}, {7, 3, 64}, {64, 16, 2}, {192, 1, 64}, {192, 50, 1}} {
				change := func(s *configs.Settings) {
					model(s)
					s.Batch.MaxNumBatchedTokens, s.Batch.MicroBatchSize, s.Batch.MaxNumSeqs = c.batched, c.micro, c.seqs
				}
				m := machine{"", 0.5, emulated.Options{Virtual: true, Check: true}}
				if got := generate(t, open(t, m, change)); got != want {
					t.Errorf("%+v: tokens %s, want %s", c, got, want)
				}
			}
			for i, change := range []func(*configs.Settings){
				func(s *configs.Settings) { s.Batch.Attention = configs.OnCPU },
				func(s *configs.Settings) { s.Batch.Grouping = configs.PerMicroBatch },
				func(s *configs.Settings) { s.Batch.CPUExperts, s.Batch.MaxNumBatchedTokens = "50%", 4 },
				func(s *configs.Settings) { s.Batch.CPUExperts, s.Batch.Attention = "1", configs.OnCPU },
				func(s *configs.Settings) { s.Batch.CPUExperts, s.Batch.MaxNumBatchedTokens = "auto", 4 },
				func(s *configs.Settings) {
					s.Batch.Attention, s.Batch.Grouping, s.Batch.NumMicroBatches = configs.OnCPU, configs.PerMicroBatch, 5
				},
				func(s *configs.Settings) {
					s.Batch.Attention, s.Batch.NumMicroBatches, s.Batch.MicroBatchSize = configs.OnCPU, 4, 24
				},
				func(s *configs.Settings) {
					s.Batch.Attention, s.Batch.MaxNumBatchedTokens, s.Batch.MaxNumSeqs = configs.OnCPU, 9, 4
				},
			} {
				m := machine{"", []float64{0.5, 1}[i%2], emulated.Options{Virtual: true, Check: true, Schedule: emulated.Random, Seed: uint64(i), HostLink: emulated.Link{BytesPerSecond: 1e7}}}
				n := open(t, m, func(s *configs.Settings) { model(s); change(s) })
				if got := generate(t, n); got != want {
					t.Errorf("attention, grouping and micro-batches %d: tokens %s, want %s", i, got, want)
				}
				if e := n.Observe().Experts(); (e.OnCPU > 0) != (n.Info().Settings.Batch.CPUExperts != "off") {
					t.Errorf("--cpu-experts %s: the CPU computed %d of %d misses", n.Info().Settings.Batch.CPUExperts, e.OnCPU, e.Misses)
				}
			}
			alone := open(t, machines()[2], model)
			var outs []engine.Output
			for _, r := range requests(alone.Info().Config.Vocab) {
				o, err := alone.Engine().Generate(t.Context(), []engine.Request{r}, nil)
				if err != nil {
					t.Fatal(err)
				}
				outs = append(outs, o...)
			}
			if got := digest(outs); got != want {
				t.Errorf("one request at a time: tokens %s, want %s", got, want)
			}
		})
	}
}

// TestBlockSizes runs the same requests with KV blocks of all sizes, and attention on either
// side: the tokens are those of the default.
func TestBlockSizes(t *testing.T) {
	key, _ := configs.Find("block-size")
	for _, name := range fixtures.Names(t) {
		t.Run(name, func(t *testing.T) {
			if name != sameOn[0] { // all but the first run is in virtual time
				racedetector.SkipSequential(t)
			}
			t.Parallel()
			dir := fixtures.Dir(t, name)
			model := func(s *configs.Settings) { s.Model.Name = dir }
			want := generate(t, open(t, machines()[0], model))
			for i, size := range key.Numbers {
				for _, attention := range []configs.Place{configs.OnGPU, configs.OnCPU} {
					m := machine{"", 0.5, emulated.Options{Virtual: true, Check: true, Schedule: emulated.Random, Seed: uint64(i)}}
					n := open(t, m, func(s *configs.Settings) { model(s); s.KV.BlockSize, s.Batch.Attention = size, attention })
					if got := n.Engine().State().BlockTokens; got != size {
						t.Fatalf("blocks of %d tokens, want %d", got, size)
					}
					if got := generate(t, n); got != want {
						t.Errorf("blocks of %d tokens, attention on %v: tokens %s, want %s", size, attention, got, want)
					}
				}
			}
		})
	}
}

// faulty opens a node on a machine that it returns too.
func faulty(t *testing.T, o emulated.Options, change func(*configs.Settings)) (*node.Node, *emulated.Machine) {
	t.Helper()
	s := configs.Defaults()
	s.Offload.Fraction, s.Batch.MaxNumBatchedTokens = 0.75, 192
	change(&s)
	var m *emulated.Machine
	n, err := node.Open(t.Context(), node.Options{Settings: s, OpenMachine: func() (device.Machine, error) {
		x, err := emulated.Open(o)
		if err == nil {
			m = x.(*emulated.Machine)
		}
		return x, err
	}})
	if err != nil {
		t.Fatal(err)
	}
	return n, m
}

// fetch matches copies of experts to the compute device, wherever they lie.
func fetch(p emulated.Point) bool {
	return p.To == device.HBM(0) && strings.HasPrefix(p.Stream, "copy ")
}

// own matches copies on the compute stream: step metadata, addresses of
// experts, sampled ids.
func own(p emulated.Point) bool { return p.Stream == "compute" }

// TestSameTokensDespiteFaults fails and stalls fetches while the requests run.
func TestSameTokensDespiteFaults(t *testing.T) {
	for _, name := range sameOn[:racedetector.Fewer(len(sameOn), 1)] { // as TestSameTokens
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := fixtures.Dir(t, name)
			model := func(s *configs.Settings) { s.Model.Name = dir }
			want := generate(t, open(t, machines()[0], model))
			for _, c := range []struct {
				name    string
				fault   emulated.Fault
				retried bool
			}{
				{"one chunk fails", emulated.Fault{Kind: emulated.FailCopy, Match: fetch, Skip: 1}, false},
				{"a copy fails", emulated.Fault{Kind: emulated.FailCopy, Match: fetch, Skip: 1, Times: 2}, true},
				{"copies fail twice in a step", emulated.Fault{Kind: emulated.FailCopy, Match: fetch, Skip: 0, Times: 4}, true},
				{"copies fail by chance", emulated.Fault{Kind: emulated.FailCopy, Match: fetch, Times: 8, Chance: 0.8}, false},
				{"the step's own copies fail", emulated.Fault{Kind: emulated.FailCopy, Match: own, Skip: 9, Times: 3}, true},
				{"copies stall", emulated.Fault{Kind: emulated.StallCopy, Match: fetch, Times: -1, Chance: 0.7, For: time.Millisecond}, false},
			} {
				hits := 0
				for i := range 6 {
					schedule, lax := emulated.Schedule(i%3), i >= 3
					n, m := faulty(t, emulated.Options{Virtual: true, Check: true, Schedule: schedule, Seed: 5, LikeCUDA: lax, TimeFailures: 0.2 * float64(i/3), FenceStart: fenceStarts[i%3]}, model)
					fault := c.fault
					m.Inject(&fault)
					if got := generate(t, n); got != want {
						t.Errorf("%s, %v, lax %t: tokens %s, want %s", c.name, schedule, lax, got, want)
					}
					hits += fault.Hits()
					if fault.Hits() == 0 && c.fault.Chance == 0 { // with a chance all of the few copies may be spared
						t.Errorf("%s, %v, lax %t: nothing was hit", c.name, schedule, lax)
					}
					if retried := n.Engine().State().Retried > 0; c.retried && !retried {
						t.Errorf("%s, %v, lax %t: no step was run again", c.name, schedule, lax)
					}
					fault.Release()
					if err := n.Close(); err != nil {
						t.Errorf("%s, %v, lax %t: %v", c.name, schedule, lax, err)
					}
				}
				if hits == 0 {
					t.Errorf("%s: nothing was hit", c.name)
				}
			}
		})
	}
}

// TestLostDevice: the loss of the device ends requests with an error that reports it, and
// everything is released.
func TestLostDevice(t *testing.T) {
	n, m := faulty(t, emulated.Options{Virtual: true}, func(s *configs.Settings) { s.Model.Name = fixtures.Dir(t, "mixtral") })
	if err := m.Lose(0); err != nil {
		t.Fatal(err)
	}
	_, err := n.Engine().Generate(t.Context(), requests(n.Info().Config.Vocab), nil)
	if !errors.Is(err, device.ErrLost) {
		t.Errorf("error %v, want one that says that the device is lost", err)
	}
	if err := n.Close(); err != nil && !errors.Is(err, device.ErrLost) {
		t.Error(err)
	}
}

// machinesWithFaults are those that tests of faults run on.
func machinesWithFaults() []emulated.Options {
	concurrent := []emulated.Options{{Check: true}, {Check: true, LikeCUDA: true, FenceStart: fenceStarts[2]}}
	if racedetector.Enabled {
		return concurrent
	}
	return append(concurrent, []emulated.Options{
		{Virtual: true, Check: true},
		{Virtual: true, Check: true, Schedule: emulated.Lazy},
		{Virtual: true, Check: true, Schedule: emulated.Random, Seed: 5},
		{Virtual: true, Check: true, LikeCUDA: true, TimeFailures: 0.2, FenceStart: fenceStarts[1]},
	}...)
}

// free fails the test where a KV block is still taken.
func free(t *testing.T, n *node.Node) {
	t.Helper()
	if a := n.KV(); a.Free() != a.Blocks() {
		t.Errorf("%d of %d KV blocks are free", a.Free(), a.Blocks())
	}
}

// TestRetryTimeout lets every fetch fail until the engine gives up, several times: each time
// the requests end with that error, and without the fault the same requests generate the same
// tokens.
func TestRetryTimeout(t *testing.T) { synctest.Test(t, testRetryTimeout) }

func testRetryTimeout(t *testing.T) {
	model := func(s *configs.Settings) { s.Model.Name = fixtures.Dir(t, "mixtral") }
	want := generate(t, open(t, machines()[0], model))
	for _, match := range []func(emulated.Point) bool{fetch, own} {
		for i, o := range machinesWithFaults() {
			n, m := faulty(t, o, model)
			for round := range 2 {
				before := n.Engine().State().Retried
				fault := m.Inject(&emulated.Fault{Kind: emulated.FailCopy, Match: match, Skip: 7 * (i + round), Times: -1})
				_, err := n.Engine().Generate(t.Context(), requests(n.Info().Config.Vocab), nil)
				if !errors.Is(err, engine.ErrUnavailable) || !errors.Is(err, pipeline.ErrStepFailed) || !errors.Is(err, device.ErrCopyFailed) {
					t.Errorf("round %d: error %v, want one of a copy that failed", round, err)
				}
				if got := n.Engine().State().Retried - before; got < 20 || got > 25 {
					t.Errorf("round %d: steps were run again %d times, want those of 30 s", round, got)
				}
				free(t, n)
				fault.Release()
			}
			if got := generate(t, n); got != want {
				t.Errorf("%v: once copies work again: tokens %s, want %s", o.Schedule, got, want)
			}
			free(t, n)
			if err := n.Close(); err != nil {
				t.Error(err)
			}
		}
	}
}

// TestGenerateCanceled cancels requests at some of their tokens, during copies: they end with
// that error, and the same requests then generate the same tokens.
func TestGenerateCanceled(t *testing.T) {
	t.Parallel()
	model := func(s *configs.Settings) { s.Model.Name = fixtures.Dir(t, "mixtral") }
	want := generate(t, open(t, machines()[0], model))
	for _, o := range machinesWithFaults() {
		n, m := faulty(t, o, model)
		m.Inject(&emulated.Fault{Kind: emulated.StallCopy, Match: fetch, Times: -1, Chance: 0.1, For: time.Millisecond})
		for _, after := range []int{0, 1, 7, 20} {
			ctx, cancel := context.WithCancel(t.Context())
			if after == 0 {
				cancel()
			}
			drawn := 0
			_, err := n.Engine().Generate(ctx, requests(n.Info().Config.Vocab), func(_ int, u engine.Update) {
				if drawn += len(u.Tokens); drawn == after {
					cancel()
				}
			})
			cancel()
			most := after
			if after > 0 { // the tokens of one step come together
				most += len(requests(2)) - 1
			}
			if !errors.Is(err, context.Canceled) || drawn > most {
				t.Errorf("%d tokens were drawn, canceled at %d: %v", drawn, after, err)
			}
			free(t, n)
		}
		if got := generate(t, n); got != want {
			t.Errorf("%v: after cancellations: tokens %s, want %s", o.Schedule, got, want)
		}
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	}
}
