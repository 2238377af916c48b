package forward

import (
	"encoding/binary"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/kernels/cpu"
	"github.com/moeserve/moeserve/models"
	"github.com/moeserve/moeserve/models/modelstest"
	"github.com/moeserve/moeserve/models/safetensors"
)

const fixtures = "../testdata/fixtures"

// rig runs a model on an emulated device, everything resident, one step at a
// time.
type rig struct {
	t       testing.TB
	machine device.Machine
	stream  device.Stream
	backend *cpu.Backend
	memory  []device.Memory

	model     *Model
	layout    kernels.ExpertLayout
	slots     []kernels.Tensor // per layer, [E] U64
	waves     []kernels.Tensor // lists that together name every expert once
	whole     []kernels.Tensor // one that does alone
	kv        views
	attention *Attention
	blocks    int
	// steps counts the steps, routedUps operations that route and compute gate/up of what they select.
	steps, routedUps int

	// routed, if set, is called behind PostAttention of all micro-batches of an MoE
	// layer.
	routed func(layer, rows int)
}

var testLimits = Limits{MaxTokens: 256, MaxSeqs: 8, MaxLogits: 256, MaxModelLen: 256, BlockTokens: 16, MaxAdjust: 4096, MaxTopLogProbs: 5}

func newRig(t testing.TB, c *models.Config, src models.Source) *rig {
	t.Helper()
	machine, err := emulated.Open(emulated.Options{Check: true})
	check(t, err)
	r := &rig{t: t, machine: machine, backend: cpu.New(cpu.Options{}), blocks: 40}
	r.stream, err = machine.NewStream(device.HBM(0), device.StreamOptions{Name: "compute"})
	check(t, err)
	t.Cleanup(r.close)

	l, err := models.NewLayout(c, src, nil)
	check(t, err)
	r.layout, err = r.backend.ExpertLayout(c.ExpertShape(l.ExpertDType))
	check(t, err)
	dense := r.alloc(device.Host, l.Bytes)
	experts := r.alloc(device.Host, int64(c.Layers*c.Experts)*r.layout.Size)
	to := &rigSink{rig: r, dense: dense, experts: experts, perLayer: c.Experts, pieces: map[int64]int64{}}
	check(t, models.Load(t.Context(), src, l, to, nil))
	arena := r.alloc(device.HBM(0), l.Bytes)
	for off, n := range to.pieces { // between them lies padding that nobody writes
		check(t, r.stream.Copy(arena.Range(off, n), dense.Range(off, n)))
	}
	resident := r.alloc(device.HBM(0), experts.Bytes())
	for layer, dense := range c.Dense {
		if !dense {
			n := int64(c.Experts) * r.layout.Size
			off := int64(layer) * n
			check(t, r.stream.Copy(resident.Range(off, n), experts.Range(off, n)))
		}
	}
	check(t, r.stream.Synchronize(t.Context()))

	limits := testLimits
	limits.MaxModelLen = min(limits.MaxModelLen, c.MaxPositions)
	need := WorkspaceBytes(c, r.backend, limits)
	ws := r.alloc(device.HBM(0), need)
	r.model, err = NewModel(c, l.Bind(arena.Range(0, l.Bytes).Addr), countingRouted{r.backend, &r.routedUps}, ws.Range(0, need), limits)
	check(t, err)
	check(t, r.model.Constants(r.upload))

	table := make([]byte, 8*c.Layers*c.Experts)
	for i := range c.Layers * c.Experts {
		binary.LittleEndian.PutUint64(table[8*i:], uint64(resident.Range(int64(i)*r.layout.Size, 1).Addr))
	}
	slots := r.tensor(table, kernels.U64, c.Layers, c.Experts)
	for i := range c.Layers {
		r.slots = append(r.slots, slots.Slice(i, i+1).View(c.Experts))
	}
	list := func(to *[]kernels.Tensor, first, step int) {
		var list []byte
		for e := first; e < c.Experts; e += step {
			list = binary.LittleEndian.AppendUint32(list, uint32(e))
		}
		if len(list) > 0 {
			*to = append(*to, r.tensor(list, kernels.I32, len(list)/4))
		}
	}
	// Two waves, of odd and of even experts.
	list(&r.waves, 1, 2)
	list(&r.waves, 0, 2)
	list(&r.whole, 0, 1)

	// A block has its keys and values of all layers, one after another.
	b := limits.BlockTokens
	cache := r.alloc(device.HBM(0), int64(r.blocks*b)*c.KVBytesPerToken(kernels.F32))
	all := kernels.New(cache.Range(0, cache.Bytes()).Addr, kernels.F32, r.blocks, 2*c.Layers, b, c.KVHeads*c.HeadDim)
	for i := range 2 * c.Layers {
		x := all.Narrow(1, i, i+1)
		view := kernels.New(x.Addr, x.DType, r.blocks, b, c.KVHeads, c.HeadDim)
		view.Stride[0] = x.Stride[0]
		if i%2 == 0 {
			r.kv.k = append(r.kv.k, view)
		} else {
			r.kv.v = append(r.kv.v, view)
		}
	}
	r.attention = r.model.Attention(&r.kv)
	return r
}

// countingRouted is a backend that counts as rig.routedUps says.
type countingRouted struct {
	kernels.Backend
	routedUps *int
}

func (c countingRouted) Enqueue(s device.Stream, op kernels.Op) error {
	if _, ok := op.(*kernels.RouteExpertUp); ok {
		*c.routedUps++
	}
	return c.Backend.Enqueue(s, op)
}

// views are the keys and values of a cache, by layer, [blocks, B, kv heads, D].
type views struct{ k, v []kernels.Tensor }

func (c *views) View(layer int) (k, v kernels.Tensor) { return c.k[layer], c.v[layer] }

func (r *rig) close() {
	check(r.t, r.stream.Close())
	for _, m := range r.memory {
		check(r.t, m.Free())
	}
	check(r.t, r.backend.Close())
	check(r.t, r.machine.Close())
}

// mustParse reads the config of modelstest.Config.
func mustParse(t testing.TB, kind string, edit map[string]any) *models.Config {
	t.Helper()
	c, err := models.ParseConfig(modelstest.Config(kind, edit), "config.json")
	check(t, err)
	return c
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func (r *rig) alloc(space device.Space, n int64) device.Memory {
	r.t.Helper()
	m, err := r.machine.Alloc(space, max(n, 1), "test")
	check(r.t, err)
	r.memory = append(r.memory, m)
	return m
}

// upload copies data to dst and waits.
func (r *rig) upload(dst device.Range, data []byte) error {
	m, err := r.machine.Alloc(device.Host, dst.Bytes, "upload")
	if err != nil {
		return err
	}
	copy(m.Write(0, dst.Bytes), data)
	if err := r.stream.Copy(dst, m.Range(0, dst.Bytes)); err != nil {
		return err
	}
	if err := r.stream.Synchronize(r.t.Context()); err != nil {
		return err
	}
	return m.Free()
}

func (r *rig) tensor(data []byte, t kernels.DType, shape ...int) kernels.Tensor {
	r.t.Helper()
	m := r.alloc(device.HBM(0), int64(len(data)))
	x := kernels.New(m.Range(0, 1).Addr, t, shape...)
	check(r.t, r.upload(x.Range(), data))
	return x
}

// download returns a dense tensor's bytes.
func (r *rig) download(x kernels.Tensor) []byte {
	r.t.Helper()
	n := x.Bytes()
	m, err := r.machine.Alloc(device.Host, n, "download")
	check(r.t, err)
	check(r.t, r.stream.Copy(m.Range(0, n), x.Range()))
	check(r.t, r.stream.Synchronize(r.t.Context()))
	data := slices.Clone(m.Read(0, n))
	check(r.t, m.Free())
	return data
}

func (r *rig) floats(x kernels.Tensor) []float32 {
	r.t.Helper()
	f := make([]float32, x.Elements())
	kernels.ToFloat32(f, r.download(x), kernels.F32)
	return f
}

// step runs micro-batches as one group and returns them on the device. Every other time the experts of few tokens are in
// one list.
func (r *rig) step(group ...*HostBatch) []Batch {
	r.t.Helper()
	m, s := r.model, r.stream
	var batches []Batch
	rows := 0
	for _, h := range group {
		data := make([]byte, StepUploadBytes(m.Limits, 1))
		up := r.alloc(device.HBM(0), int64(len(data)))
		b, n, err := h.Pack(data, up.Range(0, 1).Addr)
		check(r.t, err)
		check(r.t, r.upload(up.Range(0, n), data[:n]))
		batches = append(batches, b)
		rows += b.Rows
	}
	lists := r.waves
	if r.steps++; rows <= kernels.MaxRunRows && r.steps%2 == 0 {
		lists = r.whole
	}
	for i := range batches {
		check(r.t, m.Embed(s, &batches[i]))
	}
	for layer := range m.Config.Layers {
		shared := len(batches) == 1 && !m.Config.Dense[layer] && m.Config.SharedWidth > 0
		for i := range batches {
			b := &batches[i]
			check(r.t, m.Attend(s, layer, b, r.attention))
			if shared {
				check(r.t, m.PostAttentionShared(s, layer, b))
			} else {
				check(r.t, m.PostAttention(s, layer, b, len(batches) == 1, r.routed == nil && layer%2 == 0))
			}
		}
		if m.Config.Dense[layer] {
			check(r.t, m.MLP(s, layer, Span{Rows: rows}))
			continue
		}
		if r.routed != nil {
			r.routed(layer, rows)
		}
		if len(batches) > 1 {
			check(r.t, m.SortByExpert(s, layer, Span{Rows: rows}))
		}
		if !shared {
			check(r.t, m.SharedExpert(s, layer, Span{Rows: rows}))
		}
		for _, list := range lists {
			check(r.t, m.Experts(s, layer, Span{Rows: rows}, r.slots[layer], list, r.layout))
		}
		check(r.t, m.Combine(s, layer, Span{Rows: rows}))
	}
	for i, h := range group {
		if h.Masked() {
			data := make([]byte, MaskUploadBytes(m.Config, m.Limits, 1))
			up := r.alloc(device.HBM(0), int64(len(data)))
			n, err := h.PackMasks(data, up.Range(0, 1).Addr, &batches[i])
			check(r.t, err)
			check(r.t, r.upload(up.Range(0, n), data[:n]))
		}
		check(r.t, m.Head(s, &batches[i]))
	}
	return batches
}

// run feeds ids at positions from start on, through blocks from firstBlock on,
// and returns the logits of every row and the token drawn from the last.
func (r *rig) run(ids []int32, start int, long bool, firstBlock int32) ([]float32, int32) {
	r.t.Helper()
	h := NewHostBatch(r.model.Config, r.model.Limits)
	blocks := make([]int32, 16)
	for i := range blocks {
		// Not in order, so that the block table matters.
		blocks[i] = firstBlock + int32(i^1)
	}
	row, err := h.Append(&Sequence{IDs: ids, Start: start, Long: long, Blocks: blocks})
	check(r.t, err)
	for i := range ids {
		_, err = h.Sample(row+i, &SamplingParams{Position: int32(start + i + 1)})
		check(r.t, err)
	}
	b := r.step(&h)[0]
	sampled := r.download(r.model.Sampled(b.Sampling.Span))
	return r.floats(r.model.Logits(b.Sampling.Span)), int32(binary.LittleEndian.Uint32(sampled[len(sampled)-4:]))
}

// long says whether a sequence of n tokens takes the long factors.
func (r *rig) long(n int) bool {
	after := r.model.Config.RoPE.LongAfter
	return after > 0 && n > after
}

// generate draws n tokens behind prompt, the likeliest each.
func (r *rig) generate(prompt []int32, n int) []int32 {
	r.t.Helper()
	all := slices.Clone(prompt)
	done := 0
	for range n {
		if r.long(len(all)) != r.long(done) {
			done = 0 // the keys of the whole sequence change
		}
		_, next := r.run(all[done:], done, r.long(len(all)), 0)
		done = len(all)
		all = append(all, next)
	}
	return all[len(prompt):]
}

type rigSink struct {
	rig      *rig
	dense    device.Memory
	experts  device.Memory
	perLayer int

	mu     sync.Mutex
	pieces map[int64]int64 // bytes of the arena by offset
}

func (s *rigSink) Dense(off int64, data []byte) error {
	copy(s.dense.Write(off, int64(len(data))), data)
	s.mu.Lock()
	s.pieces[off] = int64(len(data))
	s.mu.Unlock()
	return nil
}

func (s *rigSink) Expert(layer, expert int, part kernels.Part, row int, data []byte) error {
	size := s.rig.layout.Size
	return s.rig.backend.PackExpert(s.rig.layout, part, row, data, s.experts.Write(int64(layer*s.perLayer+expert)*size, size))
}

// fixture opens a fixture's config and weights, and its expected results. One
// that has a file "base" takes from that fixture what it lacks itself.
func fixture(t testing.TB, name string) (*models.Config, models.Source, map[string]safetensors.Tensor) {
	t.Helper()
	dir := filepath.Join(fixtures, name)
	c, err := models.ReadConfig(dir)
	check(t, err)
	base := dir
	if text, err := os.ReadFile(filepath.Join(dir, "base")); err == nil {
		base = filepath.Join(fixtures, strings.TrimSpace(string(text)))
	}
	files, err := safetensors.Open(dir)
	if err != nil {
		files, err = safetensors.Open(base)
	}
	check(t, err)
	t.Cleanup(func() { check(t, files.Close()) })
	results, err := safetensors.OpenFile(filepath.Join(dir, "expected.safetensors"))
	if err != nil {
		results, err = safetensors.OpenFile(filepath.Join(base, "expected.safetensors"))
	}
	check(t, err)
	t.Cleanup(func() { check(t, results.Close()) })
	expected := map[string]safetensors.Tensor{}
	for _, n := range results.Names() {
		expected[n], _ = results.Tensor(n)
	}
	return c, models.NewCheckpoint(files), expected
}

func ints(t testing.TB, x safetensors.Tensor) []int32 {
	t.Helper()
	out := make([]int32, x.Elements())
	for i := range out {
		switch x.DType {
		case safetensors.I32:
			out[i] = int32(binary.LittleEndian.Uint32(x.Data[4*i:]))
		case safetensors.I64:
			out[i] = int32(binary.LittleEndian.Uint64(x.Data[8*i:]))
		default:
			t.Fatalf("%s has type %v", x.Name, x.DType)
		}
	}
	return out
}

// tolerance is the largest difference allowed between our logits and the
// reference's: both compute in float32, in different orders.
const tolerance = 5e-5

// Every fixture gives the reference's logits, prompt by prompt, and the
// reference's tokens.
func TestFixtures(t *testing.T) {
	entries, err := os.ReadDir(fixtures)
	check(t, err)
	tested := 0
	for _, e := range entries {
		if !e.IsDir() {
			continue
		}
		tested++
		t.Run(e.Name(), func(t *testing.T) {
			c, src, expected := fixture(t, e.Name())
			if base, older := strings.CutSuffix(e.Name(), "_old_config"); older {
				// The same weights: it is enough that it means the same.
				want, err := models.ReadConfig(filepath.Join(fixtures, base))
				check(t, err)
				if !reflect.DeepEqual(c, want) {
					t.Errorf("%+v, but with the newer names\n%+v", *c, *want)
				}
				return
			}
			r := newRig(t, c, src)
			prompts := 0
			for i := range 10 {
				n := string(rune('0' + i))
				x, ok := expected["ids"+n]
				if !ok {
					break
				}
				prompts++
				ids := ints(t, x)
				want := make([]float32, expected["logits"+n].Elements())
				check(t, expected["logits"+n].Float32s(want))
				got, _ := r.run(ids, 0, r.long(len(ids)), 0)
				if d := difference(got, want); !(d <= tolerance) {
					t.Errorf("prompt %s, %d tokens: logits differ by %g, at most %g is allowed", n, len(ids), d, tolerance)
				} else {
					t.Logf("prompt %s, %d tokens: logits differ by %.2g", n, len(ids), d)
				}
				greedy := ints(t, expected["greedy"+n])
				if got := r.generate(ids, len(greedy)); !slices.Equal(got, greedy) {
					t.Errorf("prompt %s: drew %v, the reference %v", n, got, greedy)
				}
			}
			if prompts < 4 {
				t.Errorf("%d prompts", prompts)
			}
			if c.SharedWidth == 0 && r.routedUps == 0 {
				t.Error("no experts have selected themselves")
			}
		})
	}
	if tested < 5 {
		t.Errorf("%d fixtures", tested)
	}
}

func difference(a, b []float32) float64 {
	if len(a) != len(b) {
		return math.Inf(1)
	}
	d := 0.0
	for i := range a {
		if x := math.Abs(float64(a[i]) - float64(b[i])); !(x <= d) {
			d = x
		}
	}
	return d
}
