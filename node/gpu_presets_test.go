//go:build cuda

package node_test

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/models"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/node/observe"
	"github.com/moeserve/moeserve/node/sizing"
	"github.com/moeserve/moeserve/pipeline"
)

var (
	whole     = flag.String("whole", "", "presets of TestGPUPresets with offload fractions: qwen1.5-moe-a2.7b@0,0.5,1 mixtral-8x7b@0,0a,0.5pd; p: in the memory of -peer, a: with kernels that do not overlap, c and d: --expert-access copy and direct")
	batches   = flag.String("batches", "1,32,324", "sequences that TestGPUPresets decodes at once")
	cut       = flag.Int("layers", 0, "layers that TestGPUPresets cuts presets to; 0: none")
	hostGiB   = flag.Float64("host-gib", 0, "memory of the host, where the system does not say all it has")
	eager     = flag.Bool("eager", false, "TestGPUPresets enqueues every kernel by itself, without graphs")
	ahead     = flag.Bool("ahead", true, "TestGPUPresets has decode steps be enqueued before the tokens of the step in front are known, as the engine has")
	stepsFile = flag.String("steps", "", "file to which TestGPUPresets appends its times, a JSON object a line")
)

// timing is one line of -steps.
type timing struct {
	Model    string  `json:"model"`
	Layers   int     `json:"layers"`
	Fraction float64 `json:"fraction"`
	// Tier of what is offloaded.
	Tier configs.Tier `json:"tier"`
	// Apart reports that kernels did not overlap.
	Apart bool `json:"apart,omitempty"`
	// Access is --expert-access, and Direct the share of a batch's decode steps that read experts
	// in place.
	Access configs.ExpertAccess `json:"access"`
	Direct float64              `json:"direct,omitempty"`
	// Kind is load, prefill or decode.
	Kind string `json:"kind"`
	// Sequences of a step, and its tokens.
	Sequences int `json:"sequences,omitempty"`
	Rows      int `json:"rows,omitempty"`
	// ExpertsUsed is the experts of a layer that had rows in the last step, FetchedBytes the mean of the
	// offloaded experts that a decode step copied or read in place.
	ExpertsUsed  float64 `json:"experts_used,omitempty"`
	FetchedBytes float64 `json:"fetched_bytes,omitempty"`
	// Seconds of one step, or of the loading; Roofline is what memory, GEMMs and the
	// link to host memory would take at their measured rates.
	Seconds  float64 `json:"seconds"`
	Roofline float64 `json:"roofline_s,omitempty"`
	// MissingBytes is the expected size of the offloaded experts that the tokens of a decode
	// step are routed to, with a uniform router.
	MissingBytes float64 `json:"missing_bytes,omitempty"`
}

const (
	presetPrompt = 77 // tokens, the mean of MTBench
	presetRows   = 8192
	// Steps that are decoded, of few sequences and of many; the first are not timed, since
	// they are captured.
	presetFew, presetSteps, presetManySteps, presetFirst = 32, 24, 12, 3
)

// decodes is the number of steps that a batch of n sequences decodes.
func decodes(sequences int) int {
	if sequences <= presetFew {
		return presetSteps
	}
	return presetManySteps
}

// presetBlocks is the number of KV blocks of n sequences.
func presetBlocks(sequences int) int {
	return (presetPrompt + decodes(sequences) + kvcache.DefaultBlockTokens) / kvcache.DefaultBlockTokens
}

// TestGPUPresets runs whole presets with dummy weights and experts in host memory or
// on a peer: tokens are the same at every fraction. It times steps.
func TestGPUPresets(t *testing.T) {
	if *whole == "" {
		t.Skip("give -whole, with presets")
	}
	needGPU(t)
	out := io.Discard
	if *stepsFile != "" {
		f, err := os.OpenFile(*stepsFile, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close() //nolint:errcheck // every line is written by itself
		out = f
	}
	for _, p := range strings.Fields(*whole) {
		name, fractions, _ := strings.Cut(p, "@")
		t.Run(name, func(t *testing.T) {
			first := ""
			for _, f := range strings.Split(fractions, ",") {
				number, apart := strings.CutSuffix(f, "a")
				number, access := accessOf(number)
				number, tier := tierOf(number)
				fraction, err := strconv.ParseFloat(number, 64)
				if err != nil {
					t.Fatal(err)
				}
				if tier == configs.PeerTier {
					needPeer(t)
				}
				got := runPreset(t, name, fraction, tier, access, !apart && *overlap, func(x timing) {
					line, err := json.Marshal(x)
					if err == nil {
						_, err = fmt.Fprintf(out, "%s\n", line)
					}
					if err != nil {
						t.Error(err)
					}
					t.Logf("fraction %v in %s, access %s, %.0f %% direct: %s of %d sequences, %d tokens: %.2f ms, roofline %.2f ms", fraction, tier, access, 100*x.Direct, x.Kind, x.Sequences, x.Rows, 1e3*x.Seconds, 1e3*x.Roofline)
				})
				if first == "" {
					first = got
				}
				t.Logf("%s (fraction %v in %s): tokens %s", f, fraction, tier, got)
				if got != first {
					t.Errorf("%s (fraction %v in %s): tokens %s, want %s", f, fraction, tier, got, first)
				}
			}
		})
	}
}

// runPreset loads a preset, runs prompts and decoding at several batch sizes, and
// returns the digest of all tokens.
func runPreset(t *testing.T, name string, fraction float64, tier configs.Tier, access configs.ExpertAccess, overlaps bool, note func(timing)) string {
	t.Helper()
	var sizes []int
	for _, text := range strings.Split(*batches, ",") {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 {
			t.Fatalf("-batches has %q", text)
		}
		sizes = append(sizes, n)
	}
	most, blocks := slices.Max(sizes), 0
	for _, n := range sizes {
		blocks = max(blocks, n*presetBlocks(n))
	}
	start := time.Now()
	n, err := node.Open(t.Context(), node.Options{Settings: gpuSettings(func(s *configs.Settings) {
		s.Model.Name, s.Model.LoadFormat, s.Offload.Fraction, s.Model.NumHiddenLayers = name, configs.LoadDummy, fraction, *cut
		s.Device.HostMemoryGiB, s.Offload.Tier, s.Kernels.EnforceEager, s.Kernels.Overlap = *hostGiB, tier, *eager, overlaps
		if tier == configs.PeerTier {
			s.Device.Peers, s.Harvest.MigrationLimit = *peer, "0"
		}
		s.Batch.ExpertAccess = access
		s.Batch.MaxNumBatchedTokens, s.Batch.MaxNumSeqs, s.KV.MaxModelLen = presetRows, most, presetBlocks(1)*kvcache.DefaultBlockTokens
		s.KV.NumGPUBlocksOverride, s.Device.GPUMemoryUtilization = blocks, 0.98
	})})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	}()
	c := n.Info().Config
	rate := hostRate
	if tier == configs.PeerTier {
		rate = peerRate + hostRate
	}
	x := timing{Model: name, Layers: c.Layers, Fraction: fraction, Tier: tier, Apart: !overlaps, Access: access, Kind: "load", Seconds: time.Since(start).Seconds()}
	note(x)
	report, err := n.Observe().Report(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range report.Memory {
		t.Logf("%s: %s of %s", m.Space, sizing.Bytes(m.Allocated), sizing.Bytes(m.Capacity))
	}
	h := sha256.New()
	for _, batch := range sizes {
		b := newPresetBatch(t, n, batch)
		x.Sequences = batch
		x.Kind, x.Rows = "prefill", batch*presetPrompt
		x.Seconds = 0
		x.Roofline = 0
		per := presetRows / presetPrompt
		used := usedExperts(t, n)
		for from := 0; from < batch; from += per {
			some := b.sequences[from:min(from+per, batch)]
			used() // of the last step alone
			x.Seconds += b.step(some, h, false).Seconds()
			x.Roofline += rooflineSeconds(c, len(some)*presetPrompt, len(some), presetPrompt, fraction, rate)
		}
		x.ExpertsUsed = used()
		note(x)
		x.Kind, x.Rows = "decode", batch
		x.MissingBytes = fraction * float64(c.MoELayers()) * touched(c, batch) * expertBytes(c)
		var took []time.Duration
		before, began := n.Observe().Experts(), time.Now()
		stalls := n.Pipeline().Stalls()
		steps, graphs, by := decodes(batch), n.Pipeline().Graphs(), n.Pipeline().StepsByAccess()
		for i := range steps {
			if i == steps-1 {
				used() // of the last step alone, in front of which none is enqueued ahead
			}
			if d := b.step(b.sequences, h, i < steps-2); i >= presetFirst {
				took = append(took, d)
			}
		}
		slices.Sort(took)
		x.Seconds = took[len(took)/2].Seconds()
		now := n.Pipeline().Graphs()
		t.Logf("fraction %v in %s, %d sequences: %d of %d steps were graphs, %d of them enqueued ahead; %d were captured in %v",
			fraction, tier, batch, now.Launched-graphs.Launched, steps, now.Ahead-graphs.Ahead, now.Captured-graphs.Captured, now.CaptureTime-graphs.CaptureTime)
		logTraffic(t, fmt.Sprintf("fraction %v in %s, %d sequences", fraction, tier, batch), before, n.Observe().Experts(), time.Since(began))
		for cause, s := range n.Pipeline().Stalls().ByName() {
			if s -= stalls.ByName()[cause]; s > 0 {
				t.Logf("fraction %v in %s, %d sequences: stalls of %s %.2f ms a step", fraction, tier, batch, cause, 1e3*s/float64(steps))
			}
		}
		x.Roofline = rooflineSeconds(c, batch, batch, presetPrompt+steps/2, fraction, rate)
		x.ExpertsUsed, x.FetchedBytes = used(), fetched(before, n.Observe().Experts())/float64(steps)
		x.Direct = float64(n.Pipeline().StepsByAccess().Direct-by.Direct) / float64(steps)
		note(x)
		x.MissingBytes, x.Direct, x.FetchedBytes = 0, 0, 0
		b.free()
	}
	return fmt.Sprintf("%x", h.Sum(nil)[:8])
}

// usedExperts returns a function that counts the experts of a layer that had rows since its last call, a mean
// over the layers.
func usedExperts(t *testing.T, n *node.Node) func() float64 {
	var before [][]int64
	return func() float64 {
		r, err := n.Observe().Report(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		used, now := 0, [][]int64{}
		for l, layer := range r.Layers {
			now = append(now, layer.RoutedTokens)
			for e, rows := range layer.RoutedTokens {
				if before == nil || rows > before[l][e] {
					used++
				}
			}
		}
		before = now
		return float64(used) / float64(len(now))
	}
}

// fetched is the bytes of experts that were copied, or read in place.
func fetched(before, after observe.Experts) float64 {
	bytes := int64(0)
	for tier := range after.Fetched {
		bytes += after.Fetched[tier] - before.Fetched[tier] + after.ReadInPlace[tier] - before.ReadInPlace[tier]
	}
	return float64(bytes)
}

// presetBatch is sequences that go on step by step.
type presetBatch struct {
	t         *testing.T
	n         *node.Node
	sequences []pipeline.Sequence
	// ended is when the latest step did, ahead whether the next one was enqueued then.
	ended time.Time
	ahead bool
}

func newPresetBatch(t *testing.T, n *node.Node, batch int) *presetBatch {
	b := &presetBatch{t: t, n: n}
	for i := range batch {
		q := pipeline.Sequence{Table: n.KV().NewTable(), LogitRows: 1, SamplingParams: pipeline.SamplingParams{Seed: uint64(i)}}
		for j := range presetPrompt {
			q.Tokens = append(q.Tokens, int32((7919*i+104729*j+j*j)%n.Info().Config.Vocab))
		}
		b.sequences = append(b.sequences, q)
	}
	return b
}

// step runs one step of some of the sequences and appends what is drawn to them. goesOn: the next one is of the same,
// and may be enqueued ahead, as the engine allows it. A step that was takes from the end of the one before.
func (b *presetBatch) step(some []pipeline.Sequence, h io.Writer, goesOn bool) time.Duration {
	b.t.Helper()
	goesOn = goesOn && *ahead
	for i := range some {
		q := &some[i]
		tokens := q.Start + len(q.Tokens)
		if goesOn {
			tokens++
		}
		if !q.Table.Reserve(tokens) {
			b.t.Fatal("too few KV blocks")
		}
	}
	ctx, cancel := context.WithTimeout(b.t.Context(), time.Minute)
	defer cancel()
	start := time.Now()
	if b.ahead {
		start = b.ended
	}
	res, err := b.n.Pipeline().Step(ctx, &pipeline.Step{Sequences: some, Ahead: goesOn})
	b.ended = time.Now()
	took := b.ended.Sub(start)
	if err != nil {
		b.t.Fatal(err)
	}
	b.ahead = res.Ahead
	for i := range some {
		q := &some[i]
		q.Start += len(q.Tokens)
		q.Tokens = []int32{res.Sampled[i]}
		_ = binary.Write(h, binary.LittleEndian, res.Sampled[i]) // a hash takes everything
	}
	return took
}

func (b *presetBatch) free() {
	for _, q := range b.sequences {
		q.Table.Release(false)
	}
}

// Rates of the roofline: reading memory, dense GEMMs in bfloat16, and copies from pinned host
// memory and from a peer, measured on one H200; and those assumed of attention, with contexts of
// less than longContext tokens and with longer ones.
const (
	memoryRate        = 4.6e12
	gemmRate          = 800e12
	attentionRate     = 60e12
	longAttentionRate = 600e12
	longContext       = 2048
	hostRate          = 55.3e9
	peerRate          = 395e9
)

// rooflineSeconds is the minimum duration of a step: tokens of seqs sequences that are
// context tokens long behind the step. Every phase of a layer is at its own bound, and copies
// of offloaded experts, at rate, overlap with all of it.
func rooflineSeconds(c *models.Config, rows, seqs, context int, fraction, rate float64) float64 {
	n, ctx := float64(rows), float64(context)
	hidden, q, v := float64(c.Hidden), float64(c.Heads*c.HeadDim), float64(2*c.KVHeads*c.HeadDim)
	e, k, i, s, vocab := float64(c.Experts), float64(c.TopK), float64(c.ExpertWidth), float64(c.SharedWidth), float64(c.Vocab)
	phase := func(bytes, flops, rate float64) float64 { return max(bytes/memoryRate, flops/rate) }
	touched := touched(c, rows)
	layer := phase(2*hidden*(q+v)+2*n*(hidden+q+v), 2*n*hidden*(q+v), gemmRate) +
		phase(2*q*hidden+2*n*(hidden+q), 2*n*q*hidden, gemmRate) +
		phase(2*hidden*e+2*n*hidden+4*n*e, 2*n*hidden*e, gemmRate) +
		2*n*(2*hidden+2*(q+v)+4*hidden+(k+2)*hidden)/memoryRate +
		phase(4*touched*hidden*i+2*n*k*(hidden+i), 4*n*k*hidden*i, gemmRate) +
		phase(2*touched*hidden*i+2*n*k*(hidden+i), 2*n*k*hidden*i, gemmRate)
	if s > 0 {
		layer += phase(6*hidden*s+2*n*(2*hidden+2*s), 6*n*hidden*s, gemmRate)
	}
	// A token attends to those before it: in a prompt to half of them on average.
	seen := ctx
	if rows > seqs {
		seen = ctx / 2
	}
	layers, flops := float64(c.Layers), attentionRate
	if context >= longContext {
		flops = longAttentionRate
	}
	attention := phase(float64(seqs)*ctx*layers*v*2+4*layers*n*q, 4*n*seen*q*layers, flops)
	head := phase(2*hidden*vocab+2*float64(seqs)*hidden+4*float64(seqs)*vocab, 2*float64(seqs)*hidden*vocab, gemmRate)
	compute := layer*layers + attention + head
	return max(compute, fraction*layers*touched*expertBytes(c)/rate)
}

// touched is the expected number of experts that rows tokens are routed to by a uniform router.
func touched(c *models.Config, rows int) float64 {
	e := float64(c.Experts)
	return e * (1 - math.Pow(1-float64(c.TopK)/e, float64(rows)))
}

// expertBytes is the size of one expert, of 16 bit.
func expertBytes(c *models.Config) float64 { return 6 * float64(c.Hidden) * float64(c.ExpertWidth) }

// TestRoofline holds the formula to one of the published table's: Mixtral at 324
// sequences of 93 tokens decodes at 14,500 tokens/s.
func TestRoofline(t *testing.T) {
	data, ok := configs.Preset("mixtral-8x7b")
	if !ok {
		t.Fatal("no preset")
	}
	c, err := models.ParseConfig(data, "preset")
	if err != nil {
		t.Fatal(err)
	}
	if got := 324 / rooflineSeconds(c, 324, 324, 93, 0, hostRate); math.Abs(got-14500) > 100 {
		t.Errorf("%.0f tokens/s, want 14500", got)
	}
	if got := 324 / rooflineSeconds(c, 324, 324, 93, 0.5, hostRate); math.Abs(got-397) > 3 {
		t.Errorf("%.0f tokens/s with half the experts in host memory, want 397", got)
	}
	if got := 324 / rooflineSeconds(c, 324, 324, 93, 1, peerRate+hostRate); math.Abs(got-1620) > 10 {
		t.Errorf("%.0f tokens/s with all experts on a peer and both links, want 1620", got)
	}
	// Attention of one token less of context is at the lower rate: a prompt of 2,047 tokens has
	// 1,098 GFLOP of it, 18.3 ms at 60 TFLOP/s and 1.8 at 600.
	short, long := rooflineSeconds(c, 2047, 1, 2047, 0, hostRate), rooflineSeconds(c, 2048, 1, 2048, 0, hostRate)
	if got := short - long; math.Abs(got-16.5e-3) > 0.1e-3 {
		t.Errorf("a prompt of 2,047 tokens takes %.3g s more than one of 2,048, want 16.5e-3", got)
	}
}
