package models

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/models/modelstest"
	"github.com/moeserve/moeserve/models/safetensors"
	"github.com/moeserve/moeserve/models/safetensors/write"
)

// memorySource is a Source of tensors in memory.
type memorySource struct {
	names    []string
	tensors  map[string]memoryTensor
	mu       sync.Mutex
	released map[string]int
	ahead    map[string][][2]int64 // ranges that were announced
}

type memoryTensor struct {
	Info
	data []byte
}

func newMemorySource() *memorySource {
	return &memorySource{tensors: map[string]memoryTensor{}, released: map[string]int{}, ahead: map[string][][2]int64{}}
}

// set puts a tensor in, or another in its place. Its elements count from first,
// in steps that every type holds exactly.
func (s *memorySource) set(name string, t kernels.DType, first int, shape ...int) {
	if _, ok := s.tensors[name]; !ok {
		s.names = append(s.names, name)
	}
	n := 1
	for _, x := range shape {
		n *= x
	}
	f := make([]float32, n)
	for i := range f {
		f[i] = float32((first+i)%251 - 125)
	}
	data := make([]byte, n*t.Size())
	kernels.FromFloat32(data, f, t)
	s.tensors[name] = memoryTensor{Info{DType: t, TypeName: t.String(), Shape: shape, File: "weights/" + name[:1] + ".safetensors"}, data}
}

func (s *memorySource) drop(name string) {
	delete(s.tensors, name)
	s.names = slices.DeleteFunc(s.names, func(n string) bool { return n == name })
}

func (s *memorySource) Origin() string  { return "weights" }
func (s *memorySource) Names() []string { return s.names }

func (s *memorySource) Tensor(name string) (Info, bool) {
	t, ok := s.tensors[name]
	return t.Info, ok
}

func (s *memorySource) Read(name string, off, n int64, read func([]byte) error) error {
	s.mu.Lock()
	announced := slices.Contains(s.ahead[name], [2]int64{off, n})
	s.mu.Unlock()
	if !announced {
		return fmt.Errorf("bytes %d to %d of %s are read that nobody has announced", off, off+n, name)
	}
	return read(s.tensors[name].data[off : off+n])
}

func (s *memorySource) Prefetch(name string, off, n int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ahead[name] = append(s.ahead[name], [2]int64{off, n})
}

func (s *memorySource) Release(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.released[name]++
}

// fill gives src all tensors of c in t, each with other values; fused puts the
// experts of a layer into one tensor, under block.
func fill(src *memorySource, c *Config, t kernels.DType, block string, fused bool) {
	n := 0
	set := func(name string, shape ...int) {
		n += 7
		src.set(name, t, n, shape...)
	}
	for _, p := range denseTensors(c, new(Weights)) {
		set(p.names[0], p.shape()...)
	}
	for layer, dense := range c.Dense {
		if dense {
			continue
		}
		at := fmt.Sprintf("model.layers.%d.%s.experts.", layer, block)
		if fused {
			set(at+"gate_up_proj", c.Experts, 2*c.ExpertWidth, c.Hidden)
			set(at+"down_proj", c.Experts, c.Hidden, c.ExpertWidth)
			continue
		}
		for e := range c.Experts {
			for part, name := range expertLayouts(c, layer)[0].parts {
				shape := []int{c.ExpertWidth, c.Hidden}
				if kernels.Part(part) == kernels.W2 {
					shape = []int{c.Hidden, c.ExpertWidth}
				}
				set(fmt.Sprintf("%s%d.%s.weight", at, e, name), shape...)
			}
		}
	}
}

// collector is a Sink that keeps everything.
type collector struct {
	layout *Layout
	config *Config
	mu     sync.Mutex
	arena  []byte
	writes [][2]int64        // parts of the arena, from and to
	parts  map[string][]byte // experts' matrices
	fail   error
}

func newCollector(l *Layout, c *Config) *collector {
	return &collector{layout: l, config: c, arena: make([]byte, l.Bytes), parts: map[string][]byte{}}
}

func (s *collector) Dense(off int64, data []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	copy(s.arena[off:], data)
	s.writes = append(s.writes, [2]int64{off, off + int64(len(data))})
	return s.fail
}

func (s *collector) Expert(layer, expert int, part kernels.Part, row int, data []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	cols, rows := s.config.Hidden, s.config.ExpertWidth
	if part == kernels.W2 {
		cols, rows = rows, cols
	}
	key := fmt.Sprintf("%d/%d/%v", layer, expert, part)
	size := cols * s.layout.ExpertDType.Size()
	if s.parts[key] == nil {
		s.parts[key] = make([]byte, rows*size)
	}
	if len(data)%size != 0 || row*size+len(data) > rows*size {
		return fmt.Errorf("%s: %d bytes at row %d are no rows of %d bytes", key, len(data), row, size)
	}
	copy(s.parts[key][row*size:], data)
	return s.fail
}

// expert returns a matrix of an expert.
func (s *collector) expert(layer, expert int, part kernels.Part) []float32 {
	data := s.parts[fmt.Sprintf("%d/%d/%v", layer, expert, part)]
	f := make([]float32, len(data)/s.layout.ExpertDType.Size())
	kernels.ToFloat32(f, data, s.layout.ExpertDType)
	return f
}

// values of a tensor of the arena.
func (s *collector) values(x kernels.Tensor) []float32 {
	f := make([]float32, x.Elements())
	kernels.ToFloat32(f, s.arena[x.Addr:][:x.Bytes()], x.DType)
	return f
}

func (s *memorySource) values(name string) []float32 {
	t := s.tensors[name]
	f := make([]float32, len(t.data)/t.DType.Size())
	kernels.ToFloat32(f, t.data, t.DType)
	return f
}

func collect(t testing.TB, c *Config, src Source, cast func(kernels.DType) kernels.DType) *collector {
	t.Helper()
	l, err := NewLayout(c, src, cast)
	check(t, err)
	s := newCollector(l, c)
	var last int64
	check(t, Load(t.Context(), src, l, s, func(done, total int64) {
		if done <= last || done > total || total != c.ExpertParameters()*int64(l.ExpertDType.Size())+s.denseBytes() {
			t.Errorf("progress %d of %d after %d", done, total, last)
		}
		last = done
	}))
	if want := c.ExpertParameters()*int64(l.ExpertDType.Size()) + s.denseBytes(); last != want {
		t.Errorf("progress ends at %d of %d bytes", last, want)
	}
	return s
}

// arenaPieces are the tensors of the arena: between them lies padding that
// nobody writes.
func arenaPieces(l *Layout) []struct{ off, n int64 } {
	var all []struct{ off, n int64 }
	for _, p := range l.plan {
		for _, s := range p.parts {
			if s.off >= 0 {
				all = append(all, struct{ off, n int64 }{s.off, int64(s.rows) * p.rowBytes()})
			}
		}
	}
	return all
}

func (s *collector) denseBytes() int64 {
	var n int64
	for _, p := range arenaPieces(s.layout) {
		n += p.n
	}
	return n
}

// Every weight comes to its place, once, whichever way the checkpoint is made.
func TestLoad(t *testing.T) {
	for _, kind := range modelstest.Kinds {
		for _, c := range []struct {
			name  string
			block string // of the MoE block; "" for the published one
			fused bool
			t     kernels.DType
		}{{"published", "", false, kernels.BF16}, {"fused", "", true, kernels.F16}, {"fused mlp", "mlp", true, kernels.F32}, {"fused sparse", "block_sparse_moe", true, kernels.BF16}} {
			t.Run(kind+" "+c.name, func(t *testing.T) {
				config := mustParse(t, kind, modelstest.DenseLayer(kind))
				if c.block == "" {
					c.block = blocks(config)[0]
				}
				src := newMemorySource()
				fill(src, config, c.t, c.block, c.fused)
				s := collect(t, config, src, nil)
				checkWeights(t, config, src, s, c.block, c.fused)
				for _, name := range src.names {
					if src.released[name] != 1 {
						t.Errorf("%s released %d times", name, src.released[name])
					}
				}
			})
		}
	}
}

func checkWeights(t *testing.T, c *Config, src *memorySource, s *collector, block string, fused bool) {
	t.Helper()
	w := s.layout.Bind(0)
	same := func(what string, got []float32, names ...string) {
		t.Helper()
		var want []float32
		for _, n := range names {
			want = append(want, src.values(n)...)
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s is not %v", what, names)
		}
	}
	same("embedding", s.values(w.Embed), "model.embed_tokens.weight")
	same("head", s.values(w.Head), "lm_head.weight")
	same("final norm", s.values(w.FinalNorm), "model.norm.weight")
	for i, l := range w.Layers {
		at := fmt.Sprintf("model.layers.%d.", i)
		same("qkv", s.values(l.QKV), at+"self_attn.q_proj.weight", at+"self_attn.k_proj.weight", at+"self_attn.v_proj.weight")
		same("o", s.values(l.O), at+"self_attn.o_proj.weight")
		if c.QKVBias {
			same("qkv bias", s.values(l.QKVBias), at+"self_attn.q_proj.bias", at+"self_attn.k_proj.bias", at+"self_attn.v_proj.bias")
		}
		if c.OBias {
			same("o bias", s.values(l.OBias), at+"self_attn.o_proj.bias")
		}
		if c.NormBias {
			same("norm bias", s.values(l.PostNormBias), at+"post_attention_layernorm.bias")
		}
		if c.QKNorm != NoQKNorm {
			same("k norm", s.values(l.KNorm), at+"self_attn.k_norm.weight")
		}
		same("input norm", s.values(l.InputNorm), at+"input_layernorm.weight")
		if c.Dense[i] {
			same("dense gate and up", s.values(l.GateUp), at+"mlp.gate_proj.weight", at+"mlp.up_proj.weight")
			same("dense down", s.values(l.Down), at+"mlp.down_proj.weight")
			continue
		}
		router := []string{at + blocks(c)[0] + ".gate.weight"}
		if c.SharedWidth > 0 {
			router = append(router, at+"mlp.shared_expert_gate.weight")
		}
		same("router", s.values(l.Router), router...)
		if c.SharedWidth > 0 {
			same("shared gate and up", s.values(l.SharedGateUp), at+"mlp.shared_expert.gate_proj.weight", at+"mlp.shared_expert.up_proj.weight")
		}
		at += block + ".experts."
		for e := range c.Experts {
			var want [3][]float32
			if fused {
				n := c.ExpertWidth * c.Hidden
				gateUp, down := src.values(at+"gate_up_proj"), src.values(at+"down_proj")
				want = [3][]float32{kernels.W1: gateUp[2*e*n:][:n], kernels.W3: gateUp[(2*e+1)*n:][:n], kernels.W2: down[e*n:][:n]}
			} else {
				for part, name := range expertLayouts(c, i)[0].parts {
					want[part] = src.values(fmt.Sprintf("%s%d.%s.weight", at, e, name))
				}
			}
			for part := range want {
				if got := s.expert(i, e, kernels.Part(part)); !slices.Equal(got, want[part]) {
					t.Errorf("layer %d expert %d %v is wrong", i, e, kernels.Part(part))
				}
			}
		}
	}
	if len(s.parts) != 3*c.ExpertCount() {
		t.Errorf("%d matrices of experts, want %d", len(s.parts), 3*c.ExpertCount())
	}
	slices.SortFunc(s.writes, func(a, b [2]int64) int { return cmp.Compare(a[0], b[0]) })
	var written, end int64
	for _, w := range s.writes {
		if w[0] < end {
			t.Errorf("bytes [%d, %d) of the arena were written twice", w[0], end)
		}
		written, end = written+w[1]-w[0], w[1]
	}
	if want := c.OtherParameters() * int64(w.Embed.DType.Size()); written != want {
		t.Errorf("%d bytes of the arena were written, want %d", written, want)
	}
}

// Bind moves every view by the arena's address, and ties the head.
func TestBind(t *testing.T) {
	c := mustParse(t, "qwen2_moe", map[string]any{"tie_word_embeddings": true, "mlp_only_layers": []int{1}})
	src := newMemorySource()
	fill(src, c, kernels.BF16, "mlp", false)
	l, err := NewLayout(c, src, nil)
	check(t, err)
	const base = 1 << 20
	w := l.Bind(base)
	if w.Head != w.Embed {
		t.Errorf("head %v, embedding %v", w.Head, w.Embed)
	}
	var last kernels.Tensor
	for _, x := range []kernels.Tensor{
		w.Embed, w.FinalNorm, w.Layers[0].QKV, w.Layers[0].QKVBias, w.Layers[0].Router, w.Layers[0].SharedGateUp,
		w.Layers[1].GateUp, w.Layers[1].Down, w.Layers[3].O,
	} {
		if x.Addr < base || x.Range().End() > base+device.Addr(l.Bytes) || x.Addr%device.Alignment != 0 || x.Addr == last.Addr {
			t.Errorf("%v at %#x", x, x.Addr)
		}
		last = x
	}
	if !w.HeadBias.None() || !w.Layers[1].Router.None() || !w.Layers[0].QNorm.None() {
		t.Error("there are weights that this architecture does not have")
	}
	if again := l.Bind(0); again.Layers[0].QKV.Addr != w.Layers[0].QKV.Addr-base {
		t.Error("binding twice moves twice")
	}
}

// Types that differ are made one where weights are stacked; cast says in which
// type weights are kept.
func TestTypes(t *testing.T) {
	c := mustParse(t, "mixtral", nil)
	src := newMemorySource()
	fill(src, c, kernels.BF16, "block_sparse_moe", false)
	src.set("model.layers.0.self_attn.k_proj.weight", kernels.F16, 3, 32, 64)
	src.set("model.layers.1.block_sparse_moe.experts.2.w2.weight", kernels.F16, 5, 64, 96)
	src.set("model.norm.weight", kernels.F32, 5, 64)
	s := collect(t, c, src, nil)
	w := s.layout.Bind(0)
	if w.Layers[0].QKV.DType != kernels.F32 || w.Layers[1].QKV.DType != kernels.BF16 || s.layout.ExpertDType != kernels.F32 || w.FinalNorm.DType != kernels.F32 {
		t.Errorf("types %v %v %v %v", w.Layers[0].QKV.DType, w.Layers[1].QKV.DType, s.layout.ExpertDType, w.FinalNorm.DType)
	}
	want := slices.Concat(src.values("model.layers.0.self_attn.q_proj.weight"), src.values("model.layers.0.self_attn.k_proj.weight"), src.values("model.layers.0.self_attn.v_proj.weight"))
	if !slices.Equal(s.values(w.Layers[0].QKV), want) {
		t.Error("mixed queries, keys and values are wrong")
	}
	if got := s.expert(1, 2, kernels.W2); !slices.Equal(got, src.values("model.layers.1.block_sparse_moe.experts.2.w2.weight")) {
		t.Error("an expert of another type is wrong")
	}

	s = collect(t, c, src, func(kernels.DType) kernels.DType { return kernels.F16 })
	w = s.layout.Bind(0)
	if w.FinalNorm.DType != kernels.F16 || s.layout.ExpertDType != kernels.F16 || !slices.Equal(s.values(w.Layers[0].QKV), want) {
		t.Error("weights are not cast as asked")
	}
}

func TestLayoutErrors(t *testing.T) {
	for _, c := range []struct {
		name string
		edit func(*memorySource)
		want []string
	}{
		{"missing", func(s *memorySource) { s.drop("model.layers.2.self_attn.o_proj.weight") }, []string{`weights: lacks tensor "model.layers.2.self_attn.o_proj.weight"`}},
		{"missing expert", func(s *memorySource) { s.drop("model.layers.2.block_sparse_moe.experts.7.w3.weight") }, []string{`lacks tensor "model.layers.2.block_sparse_moe.experts.7.w3.weight"`}},
		{"missing head", func(s *memorySource) { s.drop("lm_head.weight") }, []string{`lacks tensor "lm_head.weight"`}},
		{"unexpected", func(s *memorySource) { s.set("model.layers.0.mystery", kernels.F32, 0, 1) }, []string{`unexpected tensor "model.layers.0.mystery"`}},
		{"layer too many", func(s *memorySource) { s.set("model.layers.4.input_layernorm.weight", kernels.F32, 0, 64) }, []string{`unexpected tensor "model.layers.4.input_layernorm.weight"`}},
		{"shape", func(s *memorySource) { s.set("model.layers.0.self_attn.k_proj.weight", kernels.BF16, 0, 64, 64) }, []string{`tensor "model.layers.0.self_attn.k_proj.weight"`, "shape [64 64], but the config asks for [32 64]", "weights/m.safetensors"}},
		{"rank", func(s *memorySource) { s.set("model.norm.weight", kernels.BF16, 0, 64, 1) }, []string{`tensor "model.norm.weight"`, "shape [64 1], but the config asks for [64]"}},
		{"type", func(s *memorySource) {
			t := s.tensors["lm_head.weight"]
			t.DType, t.TypeName = kernels.Invalid, "F8_E4M3"
			s.tensors["lm_head.weight"] = t
		}, []string{`tensor "lm_head.weight"`, "type F8_E4M3 cannot be used for weights", "weights/l.safetensors"}},
	} {
		config := mustParse(t, "mixtral", nil)
		src := newMemorySource()
		fill(src, config, kernels.BF16, "block_sparse_moe", false)
		c.edit(src)
		_, err := NewLayout(config, src, nil)
		if !errors.Is(err, safetensors.ErrMismatch) {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		for _, want := range c.want {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %v\nlacks %s", c.name, err, want)
			}
		}
	}
}

// What follows from the config, or was cut off, may be there.
func TestHarmlessExtras(t *testing.T) {
	c := mustParse(t, "mixtral", map[string]any{"tie_word_embeddings": true})
	src := newMemorySource()
	fill(src, c, kernels.BF16, "block_sparse_moe", false)
	src.set("lm_head.weight", kernels.BF16, 0, 512, 64)
	src.set("model.layers.0.self_attn.rotary_emb.inv_freq", kernels.F32, 0, 8)
	if _, err := NewLayout(c, src, nil); err != nil {
		t.Error(err)
	}
	cut, err := c.WithLayers(2)
	check(t, err)
	l, err := NewLayout(cut, src, nil)
	if err != nil || len(l.Bind(0).Layers) != 2 {
		t.Errorf("cut to 2 layers: %v", err)
	}
}

func TestLoadEnds(t *testing.T) {
	c := mustParse(t, "mixtral", nil)
	src := newMemorySource()
	fill(src, c, kernels.BF16, "block_sparse_moe", false)
	l, err := NewLayout(c, src, nil)
	check(t, err)
	s := newCollector(l, c)
	s.fail = errors.New("no room")
	if err := Load(t.Context(), src, l, s, nil); !errors.Is(err, s.fail) || !strings.Contains(err.Error(), "of weights: no room") {
		t.Errorf("failing sink: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	s = newCollector(l, c)
	calls := 0
	err = Load(ctx, src, l, s, func(int64, int64) {
		if calls++; calls == 3 {
			cancel()
		}
	})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("canceled: %v", err)
	}
}

// save writes a dummy model as a checkpoint.
func save(t testing.TB, c *Config, shardBytes int64) string {
	t.Helper()
	dir := t.TempDir()
	src := NewDummy(c, 1)
	var specs []write.Spec
	types := map[kernels.DType]safetensors.DType{kernels.BF16: safetensors.BF16, kernels.F16: safetensors.F16, kernels.F32: safetensors.F32}
	for _, name := range src.Names() {
		info, _ := src.Tensor(name)
		specs = append(specs, write.Spec{Name: name, DType: types[info.DType], Shape: info.Shape})
	}
	check(t, write.Save(dir, specs, shardBytes, func(s write.Spec) (io.Reader, error) {
		n, err := s.Bytes()
		if err != nil {
			return nil, err
		}
		var data []byte
		err = src.Read(s.Name, 0, n, func(b []byte) error {
			data = bytes.Clone(b)
			return nil
		})
		return bytes.NewReader(data), err
	}))
	return dir
}

// A checkpoint loads as the source that it was written from, and loading
// allocates next to nothing.
func TestCheckpoint(t *testing.T) {
	c := mustParse(t, "qwen2_moe", map[string]any{"hidden_size": 256, "vocab_size": 20480})
	dir := save(t, c, 4<<20)
	files, err := safetensors.Open(dir)
	check(t, err)
	defer func() { check(t, files.Close()) }()
	src := NewCheckpoint(files)

	want, got := collect(t, c, NewDummy(c, 1), nil), collect(t, c, src, nil)
	if !bytes.Equal(want.arena, got.arena) {
		t.Error("the arenas differ")
	}
	for key, part := range want.parts {
		if !bytes.Equal(got.parts[key], part) {
			t.Errorf("%s differs", key)
		}
	}

	l, err := NewLayout(c, src, nil)
	check(t, err)
	sink := &toucher{}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	check(t, Load(t.Context(), src, l, sink, nil))
	runtime.ReadMemStats(&after)
	if n := after.TotalAlloc - before.TotalAlloc; n > 1<<19 {
		t.Errorf("loading %d bytes allocated %d", l.Bytes+l.ExpertBytes, n)
	}

	shards, err := filepath.Glob(filepath.Join(dir, "*-of-*.safetensors"))
	check(t, err)
	if len(shards) < 3 {
		t.Fatalf("%d shards", len(shards))
	}
	check(t, os.Truncate(shards[1], 4096))
	if err := Load(t.Context(), src, l, sink, nil); !errors.Is(err, safetensors.ErrChanged) || !strings.Contains(err.Error(), filepath.Base(shards[1])) {
		t.Errorf("shard truncated under the loader: %v", err)
	}
}

// toucher is a Sink that keeps nothing, but reads every page.
type toucher struct{ sum atomic.Int64 }

func (s *toucher) Dense(_ int64, data []byte) error {
	for i := 0; i < len(data); i += 512 {
		s.sum.Add(int64(data[i]))
	}
	return nil
}

func (s *toucher) Expert(_, _ int, _ kernels.Part, _ int, data []byte) error {
	return s.Dense(0, data)
}

// Dummy weights do not depend on how they are cut.
func TestDummyPieces(t *testing.T) {
	c := mustParse(t, "phimoe", nil)
	c, err := c.WithRoutingSkew(1.2)
	check(t, err)
	d := NewDummy(c, 7)
	names := d.Names()
	read := func(rt *rapid.T, name string, off, n int64) []byte {
		var data []byte
		if err := d.Read(name, off, n, func(b []byte) error {
			data = bytes.Clone(b)
			return nil
		}); err != nil {
			rt.Fatal(err)
		}
		return data
	}
	rapid.Check(t, func(rt *rapid.T) {
		name := rapid.SampledFrom(names).Draw(rt, "name")
		info, _ := d.Tensor(name)
		n := int64(info.DType.Size())
		for _, x := range info.Shape {
			n *= int64(x)
		}
		cut := rapid.Int64Range(0, n/2).Draw(rt, "cut") * 2
		whole := read(rt, name, 0, n)
		if parts := append(read(rt, name, 0, cut), read(rt, name, cut, n-cut)...); !bytes.Equal(parts, whole) {
			rt.Errorf("%s differs when cut at %d", name, cut)
		}
	})
	if info, ok := d.Tensor("model.norm.weight"); !ok || info.DType != kernels.BF16 {
		t.Errorf("%+v, %v", info, ok)
	}
	if _, ok := d.Tensor("model.norm"); ok {
		t.Error("there is a tensor of an unknown name")
	}
}

// Layouts of all presets, made of dummy weights, add up.
func TestPresetLayouts(t *testing.T) {
	for _, name := range []string{"mixtral-8x7b", "phi-tiny-moe", "qwen2-57b-a14b"} {
		c := preset(t, name)
		l, err := NewLayout(c, NewDummy(c, 0), nil)
		check(t, err)
		params := l.ExpertBytes/2 + func() int64 {
			var n int64
			for _, p := range arenaPieces(l) {
				n += p.n / 2
			}
			return n
		}()
		if params != c.Parameters() || l.Bytes-2*c.OtherParameters() > int64(device.Alignment*20*c.Layers) {
			t.Errorf("%s: %d weights, want %d; arena of %d bytes", name, params, c.Parameters(), l.Bytes)
		}
	}
}

func TestExponentFor(t *testing.T) {
	for _, deviation := range []float64{1, 1.0 / 64, 0.02} {
		got := 73.9 * math.Exp2(-float64(exponentFor(deviation)))
		if got < deviation/1.5 || got > deviation*1.5 {
			t.Errorf("deviation %g instead of %g", got, deviation)
		}
	}
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }
