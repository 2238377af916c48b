package cuda

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"unsafe"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/kernels"
)

// listRunner notes what it is to launch.
type listRunner struct {
	kernels []kernelID
	grids   []grid
	// keep: args are kept.
	keep bool
	args [][]byte
	// library computes GEMMs, which are noted too.
	library  bool
	products []libraryGEMM
	closed   int
}

func (r *listRunner) launch(_ device.Stream, k kernelID, g grid, args []byte) error {
	r.kernels, r.grids = append(r.kernels, k), append(r.grids, g)
	if r.keep {
		r.args = append(r.args, slices.Clone(args))
	}
	return nil
}

func (r *listRunner) matmul(_ device.Stream, _ device.Range, p *libraryGEMM) (bool, error) {
	if r.library {
		r.products = append(r.products, *p)
	}
	return r.library, nil
}

func (r *listRunner) mapTiles(*tensorMap, *tileMap) error { return nil }

func (r *listRunner) close() error { r.closed++; return nil }

func (r *listRunner) reset() {
	r.kernels, r.grids, r.products = r.kernels[:0], r.grids[:0], r.products[:0]
}

func (r *listRunner) names() string {
	var names []string
	for _, k := range r.kernels {
		names = append(names, table[k].name)
	}
	return strings.Join(names, " ")
}

func list(t testing.TB, o Options) (*listRunner, *Backend, device.Stream) {
	t.Helper()
	m, err := emulated.Open(emulated.Options{})
	if err != nil {
		t.Fatal(err)
	}
	r := &listRunner{}
	b, err := newBackend(m, device.HBM(0), o, r)
	if err != nil {
		t.Fatal(err)
	}
	b.multiprocessors = 132
	s, err := m.NewStream(device.HBM(0), device.StreamOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(s.Close(), b.Close(), m.Close()); err != nil {
			t.Error(err)
		}
		if r.closed != 1 {
			t.Errorf("the runner was closed %d times", r.closed)
		}
	})
	return r, b, s
}

func TestTable(t *testing.T) {
	if len(table) != int(kernelCount) {
		t.Fatalf("%d kernels, want %d", len(table), kernelCount)
	}
	for id, name := range map[kernelID]string{
		embedKernel: "embed", combineNorm512Times3: "combine_norm_512_3", addBias: "add_bias", appendKV: "append_kv", normRopeAppendKV: "norm_rope_append_kv", groupKernel: "group", sampleMerge: "sample_merge", restoreKernel: "restore", maskKernel: "mask_logits", copyBlocksKernel: "copy_blocks", copySmallKernel: "copy_small", addRowsKernel: "add_rows",
		attentionJoin: "attention_join", attentionKernels + 2*3 + 1: "attention_128_4", gemmKernels: "matmul_16",
		gemmKernels + gateUpMode*kernelID(len(tiles)) + kernelID(anyTile): "up_any",
		gemmKernels + downMode*kernelID(len(tiles)):                       "down_16",
	} {
		if table[id].name != name {
			t.Errorf("kernel %d is %q, want %q", id, table[id].name, name)
		}
	}
	const most = 99 << 10 // bytes that a block may have on the smallest device, of compute capability 8.6
	for _, k := range table {
		if k.shared+1024 > most && onlyFor[k.file] == "" && onlyFor[k.name] == "" {
			t.Errorf("%s takes %d bytes of shared memory, and some devices have %d", k.name, k.shared, most)
		}
		if !strings.Contains(source(k.file), k.name) && !strings.Contains(k.name, "_") {
			t.Errorf("%s has no %s", k.file, k.name)
		}
	}
}

func tensor(t kernels.DType, shape ...int) kernels.Tensor { return kernels.New(1<<20, t, shape...) }

// at moves a tensor, so that operands do not overlap.
func at(n int, t kernels.Tensor) kernels.Tensor {
	t.Addr = device.Addr(n) << 32
	return t
}

func matmul(rows, columns, inner int, out kernels.DType) *kernels.MatMul {
	return &kernels.MatMul{
		X: at(1, tensor(kernels.BF16, rows, inner)), W: at(2, tensor(kernels.BF16, columns, inner)), Out: at(3, tensor(out, rows, columns)),
	}
}

func TestMatMulChoice(t *testing.T) {
	bias := at(4, tensor(kernels.BF16, 6144))
	odd := matmul(9, 6144, 4096, kernels.BF16)
	odd.X.Addr += 2
	withBias, floatBias, otherBias := matmul(9, 6144, 4096, kernels.BF16), matmul(9, 6144, 4096, kernels.F32), matmul(9, 6144, 4096, kernels.BF16)
	withBias.Bias, floatBias.Bias, otherBias.Bias = bias, bias, at(4, tensor(kernels.F32, 6144))
	f32 := matmul(9, 6144, 4096, kernels.BF16)
	f32.W = at(2, tensor(kernels.F32, 6144, 4096))
	for _, test := range []struct {
		name      string
		op        *kernels.MatMul
		library   int
		kernels   string
		invariant string // with BatchInvariant
	}{
		{"large", matmul(500, 4096, 4096, kernels.BF16), 1, "", "matmul_64"},
		{"larger", matmul(5000, 4096, 4096, kernels.BF16), 1, "", "matmul_128"},
		{"one row", matmul(1, 6144, 4096, kernels.F32), 0, "few_rows_2", "matmul_16"},
		{"router", matmul(500, 8, 4096, kernels.F32), 0, "few_columns_8", "few_columns_8"},
		{"wider router", matmul(500, 60, 4096, kernels.F32), 0, "few_columns_16", "few_columns_16"},
		{"router and gate", matmul(500, 65, 4096, kernels.F32), 0, "few_columns_16", "few_columns_16"},
		{"router and gate, many rows", matmul(5000, 65, 4096, kernels.F32), 0, "few_columns_64", "few_columns_64"},
		{"72 columns", matmul(9, 72, 4096, kernels.F32), 1, "", "matmul_16"},
		{"eight rows", matmul(8, 4096, 4096, kernels.BF16), 0, "few_rows_2", "matmul_16"},
		{"bias", withBias, 1, "", "matmul_16"},
		{"float32 with bias", floatBias, 1, "add_bias", "matmul_16"},
		{"bias of another type", otherBias, 0, "matmul_16", "matmul_16"},
		{"weights of another type", f32, 0, "matmul_any", "matmul_any"},
		{"not aligned", odd, 0, "matmul_any", "matmul_any"},
		{"inner of 12", matmul(5, 4096, 12, kernels.BF16), 0, "matmul_any", "matmul_any"},
		{"no rows", matmul(0, 4096, 4096, kernels.BF16), 0, "", ""},
	} {
		for _, invariant := range []bool{false, true} {
			r, b, s := list(t, Options{BatchInvariant: invariant})
			r.library = true
			if err := b.Enqueue(s, test.op); err != nil {
				t.Fatal(err)
			}
			products, want := test.library, test.kernels
			if invariant {
				products, want = 0, test.invariant
			}
			if len(r.products) != products || r.names() != want {
				t.Errorf("%s, invariant %v: %d GEMMs of the library and kernels %q, want %d and %q", test.name, invariant, len(r.products), r.names(), products, want)
			}
		}
	}
	for _, test := range []struct {
		rows, columns, inner, blocks, shared int
		kernel                               string
	}{
		{1, 6144, 4096, 132, 128 << 10, "few_rows_4"},
		{1, 2048, 2048, 128, 64 << 10, "few_rows_4"}, // a block loads one tile
		{1, 2048, 4096, 128, 96 << 10, "few_rows_3"}, // four loads
		{1, 4096, 2048, 132, 96 << 10, "few_rows_3"}, // the same of two tiles
		{1, 8, 4096, 1, 128 << 10, "few_rows_4"},     // there is room on other multiprocessors
		{1, 128, 2048, 8, 64 << 10, "few_rows_4"},
		{1, 151936, 2048, 132, 160 << 10, "few_rows_5"},
		{9, 2048, 2048, 128, 64 << 10, "sixteen_rows_4"},
		{16, 6144, 4096, 132, 128 << 10, "sixteen_rows_4"},
		{16, 132 * 16 * 4, 4096, 132, 128 << 10, "sixteen_rows_4"}, // 16 loads
	} {
		r, b, s := list(t, Options{})
		b.largeSmem = true
		if err := b.Enqueue(s, matmul(test.rows, test.columns, test.inner, kernels.BF16)); err != nil {
			t.Fatal(err)
		}
		if r.names() != test.kernel || r.grids[0].x != test.blocks || r.grids[0].shared != test.shared {
			t.Errorf("with many pipeline stages: %+v: kernels %q, %v", test, r.names(), r.grids)
		}
	}
}

// TestExpertGrid holds grids against what any routing needs.
func TestExpertGrid(t *testing.T) {
	r, b, s := list(t, Options{})
	random := rand.New(rand.NewPCG(1, 2))
	for range 300 {
		experts, k := 1+random.IntN(128), 1+random.IntN(8)
		n, listed := 1+random.IntN(3000), 1+random.IntN(experts)
		layout, err := b.ExpertLayout(kernels.ExpertShape{Hidden: 8 * (1 + random.IntN(600)), Intermediate: 8 * (1 + random.IntN(600)), DType: kernels.BF16})
		if err != nil {
			t.Fatal(err)
		}
		r.reset()
		op := kernels.ExpertUp{ExpertGEMM: kernels.ExpertGEMM{
			X: at(1, tensor(kernels.BF16, n, layout.Hidden)), Offsets: at(2, tensor(kernels.I32, experts+1)), Order: at(3, tensor(kernels.I32, n*k)),
			Slots: at(4, tensor(kernels.U64, experts)), Experts: at(5, tensor(kernels.I32, listed)), Layout: layout,
			Out: at(6, tensor(kernels.BF16, n*k, layout.Intermediate)),
		}}
		if err := b.Enqueue(s, &op); err != nil {
			t.Fatal(err)
		}
		tile := &tiles[(r.kernels[0]-gemmKernels)%kernelID(len(tiles))]
		across := (layout.Intermediate + tile.columns(gateUpMode) - 1) / tile.columns(gateUpMode)
		for range 10 {
			// Pairs dealt to experts in some uneven way, of which the listed are some.
			left, need := n*k, 0
			for range listed {
				rows := min(left, random.IntN(2*n*k/listed+2))
				left -= rows
				need += (rows + tile.rows - 1) / tile.rows * across
			}
			if need > r.grids[0].x {
				t.Fatalf("%d blocks for %d tiles (n %d, k %d, %d of %d experts, %s)", r.grids[0].x, need, n, k, listed, experts, tile.name)
			}
		}
	}
}

// TestTileLayout packs a row of each matrix and finds its chunks where the layout says
// they are.
func TestTileLayout(t *testing.T) {
	_, b, _ := list(t, Options{})
	shape := kernels.ExpertShape{Hidden: 128, Intermediate: 192, DType: kernels.BF16}
	if l, err := b.ExpertLayout(shape); err != nil || l.Tag != kernels.RowMajor {
		t.Errorf("without kernels for tiles: %+v, %v", l, err)
	}
	b.hopper = true
	for _, other := range []kernels.ExpertShape{{Hidden: 128, Intermediate: 96, DType: kernels.BF16}, {Hidden: 96, Intermediate: 128, DType: kernels.BF16}, {Hidden: 128, Intermediate: 128, DType: kernels.F32}} {
		if l, err := b.ExpertLayout(other); err != nil || l.Tag != kernels.RowMajor {
			t.Errorf("%+v: %+v, %v", other, l, err)
		}
	}
	l, err := b.ExpertLayout(shape)
	if err != nil || l.Tag != Tiles {
		t.Fatal(l, err)
	}
	const up = 2 * 128 * 192 * 2 // bytes of w1 and w3
	for _, test := range []struct {
		part       kernels.Part
		row, inner int
		start      int // of the row in its unit's first tile
	}{
		{kernels.W1, 0, 128, 0},
		{kernels.W3, 0, 128, 8 * 128},
		{kernels.W1, 13, 128, (16 + 5) * 128},
		{kernels.W3, 191, 128, 5*64*256 + 63*128},
		{kernels.W2, 1, 192, up + 128},
		{kernels.W2, 2, 192, up + 8*128},
		{kernels.W2, 4, 192, up + 2*128},
		{kernels.W2, 79, 192, up + 64*384 + 15*128},
	} {
		src, dst := make([]byte, 2*test.inner), make([]byte, l.Size)
		for i := range src {
			src[i] = byte(1 + i/16)
		}
		if err := b.PackExpert(l, test.part, test.row, src, dst); err != nil {
			t.Fatal(err)
		}
		for i := range len(src) / 16 {
			at := test.start + i/8*8192 + (i%8^test.start/128%8)*16
			if got := dst[at : at+16]; !bytes.Equal(got, src[16*i:][:16]) {
				t.Errorf("%s row %d chunk %d: %v at %d, want %v", test.part, test.row, i, got, at, src[16*i:][:16])
			}
			clear(dst[at : at+16])
		}
		if bytes.IndexFunc(dst, func(r rune) bool { return r != 0 }) >= 0 {
			t.Errorf("%s row %d: more was written", test.part, test.row)
		}
	}
}

func TestDenseShape(t *testing.T) {
	for _, test := range []struct {
		rows, columns int
		kernel        string
		tokens        int32
	}{
		{1, 4096, "dense_128", 16},
		{77, 6144, "dense_128", 48},
		{324, 6144, "dense_128", 176},
		{324, 2048, "dense_128", 96},
		{4536, 6144, "dense_256", 176},
	} {
		r, b, s := list(t, Options{BatchInvariant: true})
		r.keep, b.hopper = true, true
		if err := b.Enqueue(s, matmul(test.rows, test.columns, 4096, kernels.BF16)); err != nil {
			t.Fatal(err)
		}
		a := (*denseArgs)(unsafe.Pointer(&r.args[0][0]))
		if r.names() != test.kernel || a.maxTokens != test.tokens || a.stages < 3 || r.grids[0].shared > table[r.kernels[0]].shared {
			t.Errorf("%+v: %s, %d tokens, %d stages, %v", test, r.names(), a.maxTokens, a.stages, r.grids[0])
		}
	}
}

func TestExpertShape(t *testing.T) {
	for _, test := range []struct {
		n, hidden, intermediate, experts, k, listed int
		up, down                                    string
		tokens, stages                              int32 // of the way up
	}{
		{1, 4096, 14336, 8, 2, 8, "expert_up_alone", "expert_down_alone", 16, 11},
		{8, 4096, 14336, 8, 2, 8, "expert_up_256", "expert_down_64", 16, 6},
		{32, 4096, 14336, 8, 2, 8, "expert_up_256", "expert_down_64", 16, 6},
		{1, 4096, 6400, 16, 2, 16, "expert_up_64", "expert_down_alone", 16, 5},
		{1, 2048, 1408, 60, 4, 60, "expert_up_64", "expert_down_alone", 16, 5},
		{324, 4096, 14336, 8, 2, 8, "expert_up_256", "expert_down_256", 128, 4},
		{324, 4096, 14336, 8, 2, 1, "expert_up_256", "expert_down_64", 128, 4},
		{4536, 4096, 14336, 8, 2, 8, "expert_up_256", "expert_down_256", 160, 4},
		{324, 2048, 1408, 60, 4, 60, "expert_up_256", "expert_down_256", 48, 5},
		{4536, 2048, 1408, 60, 4, 2, "expert_up_64", "expert_down_64", 64, 3},
	} {
		r, b, s := list(t, Options{})
		r.keep, b.hopper = true, true
		layout, err := b.ExpertLayout(kernels.ExpertShape{Hidden: test.hidden, Intermediate: test.intermediate, DType: kernels.BF16})
		if err != nil {
			t.Fatal(err)
		}
		mid := at(6, tensor(kernels.BF16, test.n*test.k, test.intermediate))
		up := kernels.ExpertUp{ExpertGEMM: kernels.ExpertGEMM{
			X: at(1, tensor(kernels.BF16, test.n, test.hidden)), Offsets: at(2, tensor(kernels.I32, test.experts+1)), Order: at(3, tensor(kernels.I32, test.n*test.k)),
			Slots: at(4, tensor(kernels.U64, test.experts)), Experts: at(5, tensor(kernels.I32, test.listed)), Layout: layout, Out: mid,
		}}
		down := kernels.ExpertDown(up)
		down.X, down.Out = mid, at(7, tensor(kernels.BF16, test.n*test.k, test.hidden))
		if err := errors.Join(b.Enqueue(s, &up), b.Enqueue(s, &down)); err != nil {
			t.Fatal(err)
		}
		a := (*expertArgs)(unsafe.Pointer(&r.args[0][0]))
		if got, want := r.names(), test.up+" "+test.down; got != want || a.maxTokens != test.tokens || a.stages != test.stages {
			t.Errorf("%+v: %s, %d tokens, %d stages", test, got, a.maxTokens, a.stages)
		}
		// The way down starts early, and only right behind the way up of the same.
		elsewhere := down
		elsewhere.Experts = at(8, down.Experts)
		for i, op := range []kernels.Op{&down, &elsewhere, &up, &elsewhere, &up, &up, &down} {
			if err := b.Enqueue(s, op); err != nil {
				t.Fatal(err)
			}
			early := (*expertArgs)(unsafe.Pointer(&r.args[len(r.args)-1][0])).listsReady
			if want := b2i(i == 6); early != want {
				t.Errorf("%+v: operation %d: early is %d, want %d", test, i, early, want)
			}
		}
		if a := (*expertArgs)(unsafe.Pointer(&r.args[1][0])); a.listsReady != 1 {
			t.Errorf("%+v: the way down does not start early", test)
		}
		for i, g := range r.grids {
			if wide := strings.HasSuffix(table[r.kernels[i]].name, "_256"); g.noOverlap != wide {
				t.Errorf("%+v: %s starts apart: %v, want %v", test, table[r.kernels[i]].name, g.noOverlap, wide)
			}
			if g.shared > table[r.kernels[i]].shared {
				t.Errorf("%+v: %d bytes of shared memory, more than %d", test, g.shared, table[r.kernels[i]].shared)
			}
		}
		up.X.Addr += 2
		if err := b.Enqueue(s, &up); err == nil || !strings.Contains(err.Error(), "multiples of 16 bytes") {
			t.Errorf("rows that are not aligned: %v", err)
		}
	}
}

// TestRouteExpertUpChoice holds when expert GEMMs select the experts of their tokens themselves.
func TestRouteExpertUpChoice(t *testing.T) {
	for _, test := range []struct {
		n, hidden, intermediate, experts, k int
		edit                                func(o *kernels.RouteExpertUp)
		want                                string
	}{
		{1, 4096, 14336, 8, 2, nil, "expert_up_alone_routed expert_down_alone_routed"}, // Mixtral
		{1, 2048, 768, 128, 8, nil, "expert_up_64_routed expert_down_64_routed"},       // Qwen3-30B-A3B
		{2, 2048, 768, 128, 8, nil, "expert_up_64_routed_few expert_down_64_routed_few"},
		{8, 512, 64, 128, 8, nil, "expert_up_64_routed_few expert_down_64_routed_few"},
		{8, 512, 64, 128, 9, nil, "route_sort expert_up_64_few expert_down_64_few"}, // too many pairs
		{3, 2048, 768, 128, 8, nil, "expert_up_alone_routed_few expert_down_alone_routed_few"},
		{9, 512, 64, 128, 7, nil, "route_sort expert_up_64_few expert_down_64_few"}, // too many tokens
		{1, 512, 64, 128, 32, nil, "expert_up_alone_routed expert_down_64_routed"},
		{1, 512, 64, 128, 33, nil, "route group_few runs expert_up_64_few expert_down_64_few"},
		{5, 2048, 768, 128, 8, nil, "route_sort expert_up_256_few expert_down_256_few"},
		{1, 2048, 768, 129, 8, nil, "route group_few runs expert_up_64_few expert_down_64_few"},
		{1, 2048, 768, 128, 8, func(o *kernels.RouteExpertUp) { o.Route.Runs, o.Up.Runs = kernels.Tensor{}, kernels.Tensor{} }, "route_sort expert_up_64 expert_down_64"},
	} {
		r, b, s := list(t, Options{})
		r.keep, b.hopper = true, true
		layout, err := b.ExpertLayout(kernels.ExpertShape{Hidden: test.hidden, Intermediate: test.intermediate, DType: kernels.BF16})
		if err != nil {
			t.Fatal(err)
		}
		pairs := test.n * test.k
		route := kernels.Route{
			Logits: at(9, tensor(kernels.F32, test.n, test.experts)), IDs: at(10, tensor(kernels.I32, test.n, test.k)), Weights: at(11, tensor(kernels.F32, test.n, test.k)),
			Offsets: at(2, tensor(kernels.I32, test.experts+1)), Order: at(3, tensor(kernels.I32, pairs)), Runs: at(8, tensor(kernels.I32, kernels.MostRuns(test.experts, pairs), kernels.RunColumns)),
		}
		o := kernels.RouteExpertUp{Route: route, Up: kernels.ExpertUp{ExpertGEMM: kernels.ExpertGEMM{
			X: at(1, tensor(kernels.BF16, test.n, test.hidden)), Offsets: route.Offsets, Order: route.Order, Runs: route.Runs,
			Slots: at(4, tensor(kernels.U64, test.experts)), Experts: at(5, tensor(kernels.I32, test.experts)), Layout: layout, Out: at(6, tensor(kernels.BF16, pairs, test.intermediate)),
		}}}
		if test.edit != nil {
			test.edit(&o)
		}
		down := kernels.ExpertDown(o.Up)
		down.X, down.Out = o.Up.Out, at(7, tensor(kernels.BF16, pairs, test.hidden))
		if err := errors.Join(b.Enqueue(s, &o), b.Enqueue(s, &down)); err != nil {
			t.Fatal(err)
		}
		if r.names() != test.want {
			t.Errorf("%+v: %q, want %q", test, r.names(), test.want)
			continue
		}
		if !strings.Contains(test.want, "_routed") {
			continue
		}
		if a := (*routedExpertArgs)(unsafe.Pointer(&r.args[1][0])); a.expert.listsReady != 1 || a.route.route.logits != uint64(route.Logits.Addr) {
			t.Errorf("%+v: down begins with %+v", test, *a)
		}
		// Behind something else down reads the runs that the router's block has listed.
		err = errors.Join(b.Enqueue(s, &o), b.Enqueue(s, &kernels.Clamp{X: o.Up.Out, Limit: 1}), b.Enqueue(s, &down))
		last := table[r.kernels[len(r.kernels)-1]].name
		if a := (*expertArgs)(unsafe.Pointer(&r.args[len(r.args)-1][0])); err != nil || !strings.HasSuffix(last, "_few") || a.listsReady != 0 {
			t.Errorf("%+v: behind another operation: %v, %s", test, err, last)
		}
	}
}

// TestExpertUpBesideRouteDown holds when gate/up selects its experts itself, and runs beside the RouteDown in
// front: where that does not write what gate/up reads, nor touches what it writes.
func TestExpertUpBesideRouteDown(t *testing.T) {
	const experts, hidden, sharedWidth = 60, 2048, 5632 // Qwen1.5-MoE-A2.7B
	type ops struct {
		route *kernels.RouteDown
		up    kernels.ExpertUp
	}
	// relist has gate/up run lists at the same addresses that are of other tokens.
	relist := func(o *ops, n, k int) {
		o.up.X.Shape[0] = n
		o.up.Order.Shape[0], o.up.Out.Shape[0], o.up.Runs.Shape[0] = n*k, n*k, kernels.MostRuns(experts, n*k)
	}
	for _, test := range []struct {
		name, want         string
		n, k, intermediate int
		edit               func(o *ops)
	}{
		{"one token", "route_down expert_up_64_routed expert_down_alone_routed", 1, 4, 1408, nil},
		{"two tokens", "route_down expert_up_64_routed_few expert_down_64_routed_few", 2, 4, 1408, nil},
		{"eight tokens", "route_down expert_up_alone_routed_few expert_down_alone_routed_few", 8, 4, 1408, nil},
		{"other lists", "route_down expert_up_64_few expert_down_alone_few", 1, 4, 1408, func(o *ops) { o.up.Order = at(20, o.up.Order) }},
		{"other runs", "route_down expert_up_64_few expert_down_alone_few", 1, 4, 1408, func(o *ops) { o.up.Runs = at(21, o.up.Runs) }},
		{"other offsets", "route_down expert_up_64_few expert_down_alone_few", 1, 4, 1408, func(o *ops) { o.up.Offsets = at(22, o.up.Offsets) }},
		{"two experts of four", "route_down expert_up_64_few expert_down_alone_few", 2, 4, 1408, func(o *ops) { relist(o, 2, 2) }},
		{"one token of two", "route_down expert_up_64_few expert_down_alone_few", 2, 4, 1408, func(o *ops) { relist(o, 1, 4) }},
		{"too many pairs", "route_down expert_up_64_few expert_down_256_few", 8, 9, 64, nil},
		{"too many tokens", "sixteen_route_down expert_up_64_few expert_down_256_few", 9, 4, 64, nil},
		{"X is written", "route_down expert_up_64_few expert_down_alone_few", 1, 4, 1408, func(o *ops) { o.up.X = o.route.Down.Out }},
		{"slots are written", "route_down expert_up_64_few expert_down_alone_few", 1, 4, 1408, func(o *ops) { o.up.Slots.Addr = o.route.Route.Weights.Addr }},
		{"Out is read", "route_down expert_up_64_few expert_down_alone_few", 1, 4, 1408, func(o *ops) { o.up.Out.Addr = o.route.Down.X.Addr }},
		{"Out is written", "route_down expert_up_64_few expert_down_alone_few", 1, 4, 1408, func(o *ops) { o.up.Out.Addr = o.route.Down.Out.Addr }},
	} {
		r, b, s := list(t, Options{})
		r.keep, b.hopper, b.largeSmem = true, true, true
		layout, err := b.ExpertLayout(kernels.ExpertShape{Hidden: hidden, Intermediate: test.intermediate, DType: kernels.BF16})
		if err != nil {
			t.Fatal(err)
		}
		pairs := test.n * test.k
		o := ops{route: routingBesideDown(test.n, experts, test.k, hidden, sharedWidth)}
		o.route.Route.Runs = at(9, tensor(kernels.I32, kernels.MostRuns(experts, pairs), kernels.RunColumns))
		o.up.ExpertGEMM = kernels.ExpertGEMM{
			X: at(10, tensor(kernels.BF16, test.n, hidden)), Offsets: o.route.Route.Offsets, Order: o.route.Route.Order, Runs: o.route.Route.Runs,
			Slots: at(11, tensor(kernels.U64, experts)), Experts: at(12, tensor(kernels.I32, experts)), Layout: layout, Out: at(13, tensor(kernels.BF16, pairs, test.intermediate)),
		}
		if test.edit != nil {
			test.edit(&o)
		}
		down := kernels.ExpertDown(o.up)
		down.X, down.Out = o.up.Out, at(14, tensor(kernels.BF16, o.up.Out.Shape[0], hidden))
		if err := errors.Join(b.Enqueue(s, o.route), b.Enqueue(s, &o.up), b.Enqueue(s, &down)); err != nil {
			t.Fatal(err)
		}
		if r.names() != test.want {
			t.Errorf("%s: %q, want %q", test.name, r.names(), test.want)
			continue
		}
		up, last := (*expertArgs)(unsafe.Pointer(&r.args[1][0])), (*expertArgs)(unsafe.Pointer(&r.args[2][0]))
		if beside := strings.Contains(test.want, "_routed"); up.listsReady != b2i(beside) || last.listsReady != 1 {
			t.Errorf("%s: lists are ready for gate/up: %d, and for down: %d", test.name, up.listsReady, last.listsReady)
		}
		// Behind something else it waits: another operation, a GEMM of the library, or gate/up itself.
		clamp, large := &kernels.Clamp{X: o.up.Out, Limit: 1}, matmul(500, 4096, 4096, kernels.BF16)
		for i, between := range []kernels.Op{clamp, large, &o.up, &kernels.RouteExpertUp{Route: o.route.Route, Up: o.up}} {
			r.library = true
			if err := errors.Join(b.Enqueue(s, o.route), b.Enqueue(s, between), b.Enqueue(s, &o.up)); err != nil {
				if i == 3 && test.edit != nil { // lists or tensors that do not suit RouteExpertUp
					continue
				}
				t.Fatal(err)
			}
			if a := (*expertArgs)(unsafe.Pointer(&r.args[len(r.args)-1][0])); a.listsReady != 0 || !strings.HasSuffix(r.names(), "_few") {
				t.Errorf("%s: behind %T: %s, lists are ready: %d", test.name, between, r.names(), a.listsReady)
			}
		}
	}
}

// TestExpertRuns holds which kernels read the runs that a router has listed.
func TestExpertRuns(t *testing.T) {
	for _, test := range []struct {
		n, hidden, intermediate, experts, k int
		up, down                            string
		stages                              int32 // of the way up
	}{
		{1, 4096, 14336, 8, 2, "expert_up_alone_few", "expert_down_alone_few", 11}, // Mixtral
		{8, 4096, 14336, 8, 2, "expert_up_256_few", "expert_down_64_few", 6},
		{1, 2048, 1408, 60, 4, "expert_up_64_few", "expert_down_alone_few", 5}, // Qwen1.5-MoE
		{1, 2048, 768, 128, 8, "expert_up_64_few", "expert_down_64_few", 5},    // Qwen3-30B-A3B
		{2, 2048, 768, 128, 8, "expert_up_64_few", "expert_down_64_few", 5},
		{3, 2048, 768, 128, 8, "expert_up_alone_few", "expert_down_alone_few", 11},
		{8, 2048, 768, 128, 8, "expert_up_256_few", "expert_down_256_few", 6},
		{20, 4096, 14336, 8, 2, "expert_up_256_few", "expert_down_64_few", 6},
		{64, 2048, 768, 128, 8, "expert_up_256_few", "expert_down_256_few", 6},
	} {
		r, b, s := list(t, Options{})
		r.keep, b.hopper = true, true
		layout, err := b.ExpertLayout(kernels.ExpertShape{Hidden: test.hidden, Intermediate: test.intermediate, DType: kernels.BF16})
		if err != nil {
			t.Fatal(err)
		}
		pairs := test.n * test.k
		most, mid := kernels.MostRuns(test.experts, pairs), at(6, tensor(kernels.BF16, pairs, test.intermediate))
		up := kernels.ExpertUp{ExpertGEMM: kernels.ExpertGEMM{
			X: at(1, tensor(kernels.BF16, test.n, test.hidden)), Offsets: at(2, tensor(kernels.I32, test.experts+1)), Order: at(3, tensor(kernels.I32, pairs)),
			Slots: at(4, tensor(kernels.U64, test.experts)), Experts: at(5, tensor(kernels.I32, test.experts)), Layout: layout, Out: mid,
			Runs: at(8, tensor(kernels.I32, most, kernels.RunColumns)),
		}}
		down := kernels.ExpertDown(up)
		down.X, down.Out = mid, at(7, tensor(kernels.BF16, pairs, test.hidden))
		others := down
		others.Runs.Addr += 256
		if err := errors.Join(b.Enqueue(s, &up), b.Enqueue(s, &down), b.Enqueue(s, &up), b.Enqueue(s, &others)); err != nil {
			t.Fatal(err)
		}
		for i, args := range r.args {
			a, way := (*expertArgs)(unsafe.Pointer(&args[0])), test.up
			if i%2 == 1 {
				way = test.down
			}
			name, g := table[r.kernels[i]].name, r.grids[i]
			if runs := uint64(up.Runs.Addr) + 256*uint64(b2i(i == 3)); name != way || a.runs != runs || a.mostRuns != int32(most) || a.maxTokens != 16 {
				t.Errorf("%+v: operation %d is %s: %+v", test, i, name, *a)
			}
			if want := b2i(i == 1); a.listsReady != want {
				t.Errorf("%+v: operation %d: early is %d, want %d", test, i, a.listsReady, want)
			}
			if wide := strings.HasSuffix(name, "_256_few"); g.noOverlap != wide {
				t.Errorf("%+v: %s starts apart: %v, want %v", test, name, g.noOverlap, wide)
			}
			if i == 0 && a.stages != test.stages || g.shared > table[r.kernels[i]].shared {
				t.Errorf("%+v: %d stages, %v", test, a.stages, g)
			}
		}
		up.Runs.Addr += 8
		if err := b.Enqueue(s, &up); err == nil || !strings.Contains(err.Error(), "cuda: expert_up: Runs is at 0x") {
			t.Errorf("runs that are not aligned: %v", err)
		}
	}
}

// TestPromptPart holds into how long chunks contexts are split: such that all multiprocessors have as many tiles, where one
// sequence is long, and of equal length for all contexts that a graph is launched with.
func TestPromptPart(t *testing.T) {
	b := &Backend{multiprocessors: 132}
	for _, test := range []struct{ pairs, context, want int }{
		{8, 32768, 16},  // 128 chunks
		{4, 32768, 8},   // 128
		{8, 131072, 16}, // 512: four rounds
		{4, 16384, 4},   // 128
		{64, 32768, 16}, // not the 128 tiles of two rounds: other sequences may be shorter
		{256, 131072, 16},
		{1, 1 << 20, 16},
		{1000, 16384, 16},
		{8, 1, 1},
	} {
		if got := b.promptPart(test.pairs, test.context); got != test.want {
			t.Errorf("%+v: %d tiles", test, got)
		}
	}
	for context := 16<<10 + 1; context <= 16<<10+256; context++ {
		if b.promptPart(8, context) != b.promptPart(8, 16<<10+256) {
			t.Errorf("a context of %d has other chunks", context)
		}
	}
}

func TestAttentionChoice(t *testing.T) {
	attention := func(sequences, rows, maxRows, context, heads, kvHeads, d int) *kernels.Attention {
		return &kernels.Attention{
			Q: at(1, tensor(kernels.BF16, rows, heads, d)), CacheK: at(2, tensor(kernels.BF16, 10, 16, kvHeads, d)), CacheV: at(3, tensor(kernels.BF16, 10, 16, kvHeads, d)),
			SeqStarts: at(4, tensor(kernels.I32, sequences+1)), ContextLens: at(5, tensor(kernels.I32, sequences)),
			BlockTable: at(6, tensor(kernels.I32, sequences, 8192)), Scale: 1, MaxContext: context, MaxSeqTokens: maxRows, Out: at(7, tensor(kernels.BF16, rows, heads, d)),
		}
	}
	for _, test := range []struct {
		name string
		op   *kernels.Attention
		want string
		fail string
	}{
		{"decode", attention(324, 324, 1, 900, 32, 8, 128), "attention_128_1", ""},
		{"one, short", attention(1, 1, 1, 256, 32, 8, 128), "attention_128_1", ""},
		{"one, long", attention(1, 1, 1, 900, 32, 8, 128), "attention_128_1 attention_join", ""},
		{"32, long", attention(32, 32, 1, 8192, 32, 8, 128), "attention_128_1 attention_join", ""},
		{"60, longer", attention(60, 60, 1, 16000, 32, 8, 128), "attention_128_1 attention_join", ""},
		{"no room for partial results", attention(60, 240, 4, 16000, 32, 8, 128), "attention_128_1", ""},
		{"prompts", attention(2, 900, 600, 600, 32, 8, 128), "attention_128_1 attention_join attention_128_4", ""},
		{"one prompt", attention(1, 600, 600, 600, 32, 8, 128), "attention_128_4", ""},
		{"32 heads to one", attention(3, 3, 1, 300, 32, 1, 80), "attention_96_4", ""},
		{"head of 129", attention(1, 1, 1, 1, 1, 1, 129), "", "head size"},
		{"head of 12", attention(1, 1, 1, 1, 1, 1, 12), "", "head size"},
		{"65 heads to one", attention(1, 1, 1, 1, 65, 1, 64), "", "at most 64 heads"},
		{"no rows", attention(0, 0, 0, 0, 32, 8, 128), "", ""},
	} {
		r, b, s := list(t, Options{})
		err := b.Enqueue(s, test.op)
		if got := fmt.Sprint(err); (err != nil || test.fail != "") && (test.fail == "" || !strings.Contains(got, test.fail)) {
			t.Errorf("%s: error %q, want %q", test.name, got, test.fail)
		}
		if r.names() != test.want {
			t.Errorf("%s: kernels %q, want %q", test.name, r.names(), test.want)
		}
	}
	// On Hopper.
	strided := func(q, block int) *kernels.Attention {
		o := attention(1, 600, 600, 600, 32, 8, 128)
		o.Q.Stride[0] += q
		o.CacheK.Stride[0] += block
		return o
	}
	blocks := func(tokens int) *kernels.Attention {
		o := attention(1, 600, 600, 600, 32, 8, 128)
		o.CacheK, o.CacheV = at(2, tensor(kernels.BF16, 160/tokens, tokens, 8, 128)), at(3, tensor(kernels.BF16, 160/tokens, tokens, 8, 128))
		return o
	}
	const prompt, wide = "prompt_128", "attention_128_wide"
	for _, test := range []struct {
		name            string
		op              *kernels.Attention
		want, invariant string
	}{
		{"decode", attention(324, 324, 1, 900, 32, 8, 128), "attention_128_1", prompt},
		{"one, short", attention(1, 1, 1, 256, 32, 8, 128), wide, prompt},
		{"several, short", attention(16, 16, 1, 100, 32, 8, 128), wide, prompt},
		{"as many as fit twice", attention(33, 33, 1, 100, 32, 8, 128), wide, prompt},
		{"more", attention(34, 34, 1, 100, 32, 8, 128), "attention_128_1", prompt},
		{"one, long", attention(1, 1, 1, 900, 32, 8, 128), wide + " attention_join", "prompt_128 prompt_join"},
		{"one, longer", attention(1, 1, 1, 8448, 32, 8, 128), wide + " attention_join", "prompt_128 prompt_join"},
		{"one, longer still", attention(1, 1, 1, 8449, 32, 8, 128), "attention_128_1 attention_join", "prompt_128 prompt_join"},
		{"smaller heads", attention(1, 1, 1, 256, 32, 8, 96), "attention_96_1", "attention_96_1"},
		{"17 heads to one", attention(1, 1, 1, 256, 34, 2, 128), prompt, prompt},
		{"no room for partial results", attention(60, 240, 4, 16000, 32, 8, 128), "attention_128_1", prompt},
		{"prompts", attention(2, 900, 600, 600, 32, 8, 128), wide + " attention_join prompt_128", "prompt_128 prompt_join prompt_128"},
		{"one prompt", attention(1, 600, 600, 600, 32, 8, 128), prompt, prompt},
		{"one, very long", attention(1, 1, 1, 128<<10, 32, 8, 128), "prompt_128 prompt_join", "prompt_128 prompt_join"},
		{"several, long", attention(8, 8, 1, 16<<10, 32, 8, 128), "prompt_128 prompt_join", "prompt_128 prompt_join"},
		{"several, less long", attention(8, 8, 1, 15<<10, 32, 8, 128), "attention_128_1 attention_join", "prompt_128 prompt_join"},
		{"too many to split", attention(80, 80, 1, 16<<10, 32, 8, 128), prompt, prompt},
		{"other heads", attention(1, 600, 600, 600, 32, 8, 96), "attention_96_4", "attention_96_4"},
		{"blocks of 8", blocks(8), prompt, prompt},
		{"blocks of 5", blocks(5), "attention_128_4", "attention_128_4"},
		{"blocks of 4", blocks(4), "attention_128_4", "attention_128_4"},
		{"blocks no tokens apart", strided(0, 8), "attention_128_4", "attention_128_4"},
		{"blocks further apart", strided(0, 3*8*128), prompt, prompt},
		{"queries that are not aligned", strided(4, 0), "attention_128_4", "attention_128_4"},
	} {
		for _, invariant := range []bool{false, true} {
			r, b, s := list(t, Options{BatchInvariant: invariant})
			b.hopper, b.largeSmem = true, true
			if err := b.Enqueue(s, test.op); err != nil {
				t.Errorf("%s: %v", test.name, err)
			}
			want := test.want
			if invariant {
				want = test.invariant
			}
			if r.names() != want {
				t.Errorf("%s, batch-invariant %v: kernels %q, want %q", test.name, invariant, r.names(), want)
			}
		}
	}
}

func TestRouteChoice(t *testing.T) {
	for _, test := range []struct {
		rows, experts, k int
		sorts            bool
		want             string
		threads          int
	}{
		{1, 128, 8, true, "route_sort", 128},
		{8, 128, 8, true, "route_sort", 256},
		{9, 128, 8, true, "route_sort", 288},
		{9, 60, 4, true, "route_sort", 288},
		{17, 60, 4, true, "route_sort", 544},
		{32, 128, 32, true, "route_sort", 1024},
		{32, 128, 33, true, "route group", 0},
		{33, 60, 4, true, "route group", 0},
		{9, 129, 2, true, "route group_few", 0},
		{32, 8, 2, true, "route_sort", 1024},
		{1, 8, 2, false, "route", 0},
		{1, 2000, 8, true, "route group_few", 0},
		{0, 8, 2, true, "group_few", 0}, // offsets are set
	} {
		r, b, s := list(t, Options{})
		op := kernels.Route{
			Logits: at(1, tensor(kernels.F32, test.rows, test.experts)), IDs: at(2, tensor(kernels.I32, test.rows, test.k)), Weights: at(3, tensor(kernels.F32, test.rows, test.k)),
		}
		if test.sorts {
			op.Offsets, op.Order = at(4, tensor(kernels.I32, test.experts+1)), at(5, tensor(kernels.I32, test.rows*test.k))
		}
		if err := b.Enqueue(s, &op); err != nil {
			t.Errorf("%+v: %v", test, err)
		}
		if r.names() != test.want || test.threads > 0 && r.grids[0].threads != test.threads {
			t.Errorf("%+v: kernels %q, %v", test, r.names(), r.grids)
		}
		if !test.sorts || test.rows > kernels.MaxRunRows {
			continue
		}
		r, b, s = list(t, Options{})
		op.Runs = at(6, tensor(kernels.I32, kernels.MostRuns(test.experts, test.rows*test.k), kernels.RunColumns))
		if err := b.Enqueue(s, &op); err != nil {
			t.Errorf("%+v: with runs: %v", test, err)
		}
		want := test.want
		if want != "route_sort" {
			want += " runs"
		}
		if r.names() != want {
			t.Errorf("%+v: with runs: kernels %q, want %q", test, r.names(), want)
		}
		op.Runs.Addr += 4
		if err := b.Enqueue(s, &op); err == nil || !strings.Contains(err.Error(), "cuda: route: Runs is at 0x") {
			t.Errorf("%+v: runs that are not aligned: %v", test, err)
		}
	}
}

// sampling returns a draw from rows of logits, without cuts.
func sampling(rows, vocabulary int) *kernels.Sample {
	return &kernels.Sample{
		Logits: at(1, tensor(kernels.F32, rows, vocabulary)), Temperature: at(2, tensor(kernels.F32, rows)), Seeds: at(3, tensor(kernels.U64, rows)),
		Samples: at(4, tensor(kernels.I32, rows)), Positions: at(5, tensor(kernels.I32, rows)), Out: at(6, tensor(kernels.I32, rows)),
	}
}

// adjusting returns adjustments of entries logits in all.
func adjusting(rows, entries int) *kernels.Adjust {
	return &kernels.Adjust{
		Logits: at(1, tensor(kernels.F32, rows, 32000)), Starts: at(2, tensor(kernels.I32, rows+1)), IDs: at(3, tensor(kernels.I32, entries)),
		Seen: at(4, tensor(kernels.I32, entries)), Bias: at(5, tensor(kernels.F32, entries)), Repetition: at(6, tensor(kernels.F32, rows)),
		Presence: at(7, tensor(kernels.F32, rows)), Frequency: at(8, tensor(kernels.F32, rows)), Saved: at(9, tensor(kernels.F32, entries)),
	}
}

func restoring(a *kernels.Adjust) *kernels.Restore {
	return &kernels.Restore{Logits: a.Logits, Starts: a.Starts, IDs: a.IDs, Saved: a.Saved}
}

// masking returns a mask of some of the rows of logits.
func masking(rows, listed int) *kernels.Mask {
	return &kernels.Mask{
		Logits: at(1, tensor(kernels.F32, rows, 32000)), Rows: at(2, tensor(kernels.I32, listed)), Allowed: at(3, tensor(kernels.I32, listed, 1000)),
	}
}

func logProbs(rows, top int) *kernels.LogProbs {
	return &kernels.LogProbs{
		Logits: at(1, tensor(kernels.F32, rows, 32000)), Tokens: at(2, tensor(kernels.I32, rows)), Sampled: at(3, tensor(kernels.F32, rows)),
		TopIDs: at(4, tensor(kernels.I32, rows, top)), Top: at(5, tensor(kernels.F32, rows, top)), Ranks: at(6, tensor(kernels.I32, rows)),
	}
}

func TestLogitsChoice(t *testing.T) {
	topK, topP, minP := sampling(3, 32000), sampling(3, 32000), sampling(1, 100)
	topK.TopK, topP.TopP, minP.MinP = at(7, tensor(kernels.I32, 3)), at(7, tensor(kernels.F32, 3)), at(7, tensor(kernels.F32, 1))
	for _, test := range []struct {
		name  string
		op    kernels.Op
		want  string
		grids []grid
	}{
		{"many rows", sampling(324, 32000), "sample", []grid{{x: 324, y: 1, z: 1, threads: 512, shared: 0}}},
		{"few rows", sampling(1, 32000), "sample sample_merge", []grid{{x: 1, y: 8, z: 1, threads: 512, shared: 0}, {x: 1, y: 1, z: 1, threads: 32, shared: 0}}},
		{"no rows", sampling(0, 32000), "", nil},
		{"top-k", topK, "sample_cut", []grid{{x: 3, y: 1, z: 1, threads: 1024, shared: 0}}},
		{"top-p", topP, "sample_cut", []grid{{x: 3, y: 1, z: 1, threads: 1024, shared: 0}}},
		{"min-p", minP, "sample_cut", []grid{{x: 1, y: 1, z: 1, threads: 1024, shared: 0}}},
		{"one row's list", adjusting(1, 1000), "adjust", []grid{{x: 1, y: 4, z: 1, threads: 256, shared: 0}}},
		{"a long list", adjusting(1, 100000), "adjust", []grid{{x: 1, y: 264, z: 1, threads: 256, shared: 0}}},
		{"lists", adjusting(100, 5000), "adjust", []grid{{x: 100, y: 3, z: 1, threads: 256, shared: 0}}},
		{"empty lists", adjusting(100, 0), "", nil},
		{"lists back", restoring(adjusting(100, 5000)), "restore", []grid{{x: 100, y: 3, z: 1, threads: 256, shared: 0}}},
		{"a mask", masking(8, 1), "mask_logits", []grid{{x: 1, y: 32, z: 1, threads: 256, shared: 0}}},
		{"masks", masking(64, 64), "mask_logits", []grid{{x: 64, y: 5, z: 1, threads: 256, shared: 0}}},
		{"no mask", masking(8, 0), "", nil},
		{"log-probabilities", logProbs(7, 20), "log_probs", []grid{{x: 7, y: 1, z: 1, threads: 1024, shared: 0}}},
	} {
		r, b, s := list(t, Options{})
		if err := b.Enqueue(s, test.op); err != nil {
			t.Errorf("%s: %v", test.name, err)
		}
		if r.names() != test.want || !slices.Equal(r.grids, test.grids) {
			t.Errorf("%s: kernels %q on %v, want %q on %v", test.name, r.names(), r.grids, test.want, test.grids)
		}
	}
}

// TestNormChoice holds which kernel norms rows.
func TestNormChoice(t *testing.T) {
	norm := func(rows, d int, edit func(*kernels.Norm)) *kernels.Norm {
		o := &kernels.Norm{X: at(1, tensor(kernels.BF16, rows, d)), Residual: at(2, tensor(kernels.BF16, rows, d)), Weight: at(3, tensor(kernels.BF16, d)), Out: at(4, tensor(kernels.BF16, rows, d))}
		if edit != nil {
			edit(o)
		}
		return o
	}
	for _, test := range []struct {
		name string
		op   *kernels.Norm
		want string
	}{
		{"one row", norm(1, 2048, nil), "norm_few_256"},
		{"one short row", norm(1, 72, nil), "norm_few_256"},
		{"a row each", norm(132, 4096, nil), "norm_few_512"},
		{"more rows than multiprocessors", norm(133, 2048, nil), "norm_256"},
		{"more long ones", norm(133, 4096, nil), "norm_256_2"},
		{"longer rows", norm(1, 4104, nil), "norm_512_3"},
		{"70 elements", norm(1, 70, nil), "norm_head"},
		{"float32 weights", norm(1, 2048, func(o *kernels.Norm) { o.Weight = at(3, tensor(kernels.F32, 2048)) }), "norm_256"},
		{"a bias", norm(1, 4096, func(o *kernels.Norm) { o.Bias = at(5, tensor(kernels.BF16, 4096)) }), "norm_512"},
		{"LayerNorm", norm(1, 2048, func(o *kernels.Norm) { o.Kind = kernels.Layer }), "norm_256"},
		{"not aligned", norm(1, 2048, func(o *kernels.Norm) { o.Residual.Addr += 2 }), "norm_256"},
		{"heads", norm(1, 128, func(o *kernels.Norm) {
			o.X, o.Residual, o.Out = at(1, tensor(kernels.BF16, 1, 4, 128)), kernels.Tensor{}, at(4, tensor(kernels.BF16, 1, 4, 128))
		}), "norm_head"},
	} {
		r, b, s := list(t, Options{})
		if err := b.Enqueue(s, test.op); err != nil {
			t.Errorf("%s: %v", test.name, err)
		}
		if r.names() != test.want {
			t.Errorf("%s: kernels %q, want %s", test.name, r.names(), test.want)
		}
	}
}

// TestGatedChoice holds which kernel reads the weights of a gated MLP.
func TestGatedChoice(t *testing.T) {
	for _, test := range []struct {
		rows, columns, inner int
		want                 string
	}{
		{1, 5632, 2048, "few_rows_gated_once_5"},
		{1, 20480, 3584, "few_rows_gated_5"}, // 80 loads a block
		{8, 5632, 2048, "few_rows_gated_once_5"},
		{9, 5632, 2048, "sixteen_rows_gated_5"},
		{16, 1056 * 8, 2048, "sixteen_rows_gated_5"}, // 16 loads
		{16, 1056*8 + 8, 2048, "matmul_16 silu_mul"},
		{17, 5632, 2048, "matmul_16 silu_mul"},
	} {
		r, b, s := list(t, Options{})
		b.largeSmem = true
		op := kernels.GatedMatMul{X: at(1, tensor(kernels.BF16, test.rows, test.inner)), W: at(2, tensor(kernels.BF16, 2*test.columns, test.inner)), Out: at(3, tensor(kernels.BF16, test.rows, 2*test.columns))}
		if err := b.Enqueue(s, &op); err != nil {
			t.Fatal(err)
		}
		if few := !strings.HasPrefix(test.want, "matmul"); r.names() != test.want || few && (r.grids[0].x != 132 || r.grids[0].shared != 160<<10) {
			t.Errorf("%+v: kernels %q, %v", test, r.names(), r.grids)
		}
	}
}

// routingBesideGateUp has a router of scored columns and a gate/up projection of twice wide columns.
func routingBesideGateUp(rows, scored, wide, inner int) *kernels.RouterGateUp {
	x := at(1, tensor(kernels.BF16, rows, inner))
	return &kernels.RouterGateUp{
		Router: kernels.MatMul{X: x, W: at(2, tensor(kernels.BF16, scored, inner)), Out: at(3, tensor(kernels.F32, rows, scored))},
		GateUp: kernels.GatedMatMul{X: x, W: at(4, tensor(kernels.BF16, 2*wide, inner)), Out: at(5, tensor(kernels.BF16, rows, 2*wide))},
	}
}

// routingBesideDown routes to k experts, and has a down projection.
func routingBesideDown(rows, experts, k, columns, inner int) *kernels.RouteDown {
	return &kernels.RouteDown{
		Route: kernels.Route{
			Logits: at(1, tensor(kernels.F32, rows, experts)), IDs: at(2, tensor(kernels.I32, rows, k)), Weights: at(3, tensor(kernels.F32, rows, k)),
			Offsets: at(4, tensor(kernels.I32, experts+1)), Order: at(5, tensor(kernels.I32, rows*k)),
		},
		Down: kernels.MatMul{X: at(6, tensor(kernels.BF16, rows, inner)), W: at(7, tensor(kernels.BF16, columns, inner)), Out: at(8, tensor(kernels.BF16, rows, columns))},
	}
}

// TestRouterGateUpChoice holds when one kernel computes a router's scores and a gate/up projection.
func TestRouterGateUpChoice(t *testing.T) {
	one := routingBesideGateUp
	edited := func(edit func(o *kernels.RouterGateUp)) *kernels.RouterGateUp {
		o := one(8, 61, 5632, 2048)
		edit(o)
		return o
	}
	const apart = "few_rows_4 few_rows_gated_once_5"
	for _, test := range []struct {
		name   string
		op     *kernels.RouterGateUp
		want   string
		blocks int // of the first kernel
	}{
		{"one row", one(1, 61, 5632, 2048), "router_gate_up", 132},
		{"eight rows", one(8, 61, 5632, 2048), "router_gate_up", 132},
		{"few columns", one(8, 61, 100, 2048), "router_gate_up", 17},
		{"as many tiles as a block loads", one(8, 61, 8*128*8, 2048), "router_gate_up", 132},
		{"more", one(8, 61, 8*128*8+8, 2048), apart, 4},
		{"five tiles a block", one(8, 61, 8*128*5, 2048), "router_gate_up", 132},
		{"a sixth beside the router", one(8, 61, 8*128*5+8, 2048), apart, 4},
		{"a sixth without it, too", one(8, 61, 8*132*5+8, 2048), "router_gate_up", 132},
		{"many loads", one(8, 65, 20480, 3584), "few_rows_4 few_rows_gated_5", 5},
		{"router that takes all blocks", one(8, 132*16, 5632, 2048), "few_rows_4 few_rows_gated_once_5", 132},
		{"nine rows", one(9, 61, 5632, 2048), "sixteen_router_gate_up", 132},
		{"sixteen rows", one(16, 61, 5632, 2048), "sixteen_router_gate_up", 132},
		{"sixteen rows, many loads", one(16, 61, 20480, 3584), "sixteen_rows_4 matmul_16 silu_mul", 4},
		{"seventeen rows", one(17, 61, 5632, 2048), "few_columns_16 matmul_16 silu_mul", 2},
		{"float32 router", edited(func(o *kernels.RouterGateUp) { o.Router.W.DType = kernels.F32 }), "matmul_any few_rows_gated_once_5", 1},
		{"float32 projection", edited(func(o *kernels.RouterGateUp) { o.GateUp.W.DType = kernels.F32 }), "few_rows_4 matmul_any silu_mul", 4},
		{"router of no columns", one(8, 0, 5632, 2048), "few_rows_gated_once_5", 132},
		{"projection of no columns", one(8, 61, 0, 2048), "few_rows_4 silu_mul", 4},
		{"no rows", one(0, 61, 5632, 2048), "", 0},
	} {
		r, b, s := list(t, Options{})
		b.hopper, b.largeSmem = true, true
		if err := b.Enqueue(s, test.op); err != nil {
			t.Errorf("%s: %v", test.name, err)
		}
		if r.names() != test.want || test.blocks > 0 && r.grids[0].x != test.blocks {
			t.Errorf("%s: kernels %q on %v, want %q", test.name, r.names(), r.grids, test.want)
		}
		if strings.HasSuffix(test.want, "router_gate_up") && (r.grids[0].threads != 512 || r.grids[0].shared != 160<<10) {
			t.Errorf("%s: %v", test.name, r.grids)
		}
	}
	r, b, s := list(t, Options{BatchInvariant: true})
	b.hopper, b.largeSmem = true, true
	if err := b.Enqueue(s, one(8, 61, 5632, 2048)); err != nil || r.names() != "few_columns_16 dense_128 silu_mul" {
		t.Errorf("batch-invariant: %v, kernels %q", err, r.names())
	}
	r, b, s = list(t, Options{})
	if err := b.Enqueue(s, one(8, 61, 5632, 2048)); err != nil || r.names() != "few_rows_2 few_rows_gated_2" {
		t.Errorf("other GPUs: %v, kernels %q", err, r.names())
	}
	r, b, s = list(t, Options{Activation: kernels.F16})
	err := b.Enqueue(s, one(8, 61, 5632, 2048))
	if err == nil || !strings.Contains(err.Error(), "cuda: router_gate_up: Router.X is bfloat16[8 2048], want float16") || r.names() != "" {
		t.Errorf("another activation type: %v, kernels %q", err, r.names())
	}
}

// TestRouteDownChoice holds when one kernel routes and computes a down projection.
func TestRouteDownChoice(t *testing.T) {
	one := routingBesideDown
	edited := func(edit func(o *kernels.RouteDown)) *kernels.RouteDown {
		o := one(8, 60, 4, 2048, 5632)
		edit(o)
		return o
	}
	for _, test := range []struct {
		name           string
		op             *kernels.RouteDown
		want           string
		blocks, shared int // of the first kernel
	}{
		{"one row", one(1, 60, 4, 2048, 5632), "route_down", 129, 96 << 10},
		{"eight rows", one(8, 60, 4, 2048, 5632), "route_down", 129, 96 << 10},
		{"more tiles than blocks", one(8, 60, 4, 4096, 5632), "route_down", 132, 96 << 10},
		{"one load", one(8, 64, 8, 16, 64), "route_down", 2, 32 << 10},
		{"more loads", one(8, 60, 4, 3584, 20480), "route_sort few_rows_5", 1, 0},
		{"more experts", one(5, 128, 8, 2048, 5632), "route_down", 129, 96 << 10},
		{"too many experts", one(5, 129, 8, 2048, 5632), "route group_few few_rows_4", 2, 0},
		{"nine rows", one(9, 60, 4, 2048, 5632), "sixteen_route_down", 129, 128 << 10},
		{"sixteen rows", one(16, 60, 4, 2048, 5632), "sixteen_route_down", 129, 128 << 10},
		{"seventeen rows", one(17, 60, 4, 2048, 5632), "route_sort matmul_16", 1, 0},
		{"no sorting", edited(func(o *kernels.RouteDown) { o.Route.Offsets, o.Route.Order = kernels.Tensor{}, kernels.Tensor{} }), "route few_rows_4", 2, 0},
		{"float32 weights", edited(func(o *kernels.RouteDown) { o.Down.W.DType = kernels.F32 }), "route_sort matmul_any", 1, 0},
		{"no columns", one(8, 60, 4, 0, 5632), "route_sort", 1, 0},
		{"rows of one part only", edited(func(o *kernels.RouteDown) { o.Down.X, o.Down.Out = o.Down.X.Slice(0, 0), o.Down.Out.Slice(0, 0) }), "route_sort", 1, 0},
	} {
		r, b, s := list(t, Options{})
		b.hopper, b.largeSmem = true, true
		if err := b.Enqueue(s, test.op); err != nil {
			t.Errorf("%s: %v", test.name, err)
		}
		if r.names() != test.want || r.grids[0].x != test.blocks || test.shared > 0 && (r.grids[0].threads != 512 || r.grids[0].shared != test.shared) {
			t.Errorf("%s: kernels %q on %v, want %q", test.name, r.names(), r.grids, test.want)
		}
	}
	r, b, s := list(t, Options{BatchInvariant: true})
	b.hopper, b.largeSmem = true, true
	if err := b.Enqueue(s, one(8, 60, 4, 2048, 5632)); err != nil || r.names() != "route_sort dense_128" {
		t.Errorf("batch-invariant: %v, kernels %q", err, r.names())
	}
	r, b, s = list(t, Options{})
	if err := b.Enqueue(s, one(8, 60, 4, 2048, 5632)); err != nil || r.names() != "route_sort few_rows_2" {
		t.Errorf("other GPUs: %v, kernels %q", err, r.names())
	}
	_, b, s = list(t, Options{})
	unaligned := edited(func(o *kernels.RouteDown) {
		o.Route.Runs = at(9, tensor(kernels.I32, 32, kernels.RunColumns))
		o.Route.Runs.Addr += 8
	})
	if err := b.Enqueue(s, unaligned); err == nil || !strings.Contains(err.Error(), "cuda: route_down: Runs is at 0x") {
		t.Errorf("runs that are not aligned: %v", err)
	}
	_, b, s = list(t, Options{})
	if err := b.Enqueue(s, one(1, 4000, 4, 2048, 5632)); err == nil || !strings.Contains(err.Error(), "want at most 3072 experts") {
		t.Errorf("too many experts: %v", err)
	}
	r, b, s = list(t, Options{Activation: kernels.F16})
	err := b.Enqueue(s, one(8, 60, 4, 2048, 5632))
	if err == nil || !strings.Contains(err.Error(), "cuda: route_down: Down.X is bfloat16[8 5632], want float16") || r.names() != "" {
		t.Errorf("another activation type: %v, kernels %q", err, r.names())
	}
}

// combiningNorm combines k outputs of experts a row.
func combiningNorm(rows, k, hidden int) *kernels.CombineNorm {
	return &kernels.CombineNorm{
		X: at(1, tensor(kernels.BF16, rows*k, hidden)), Weights: at(2, tensor(kernels.F32, rows, k)), Residual: at(3, tensor(kernels.BF16, rows, hidden)),
		Weight: at(4, tensor(kernels.BF16, hidden)), Out: at(5, tensor(kernels.BF16, rows, hidden)),
	}
}

func TestCombineNormChoice(t *testing.T) {
	for _, test := range []struct {
		rows, k, hidden int
		want            string
		threads         int
	}{
		{1, 2, 2048, "combine_norm_few_256", 256},
		{4536, 8, 2048, "combine_norm_256", 256},
		{1, 2, 4096, "combine_norm_few_512", 512},
		{4536, 2, 4096, "combine_norm_512_few", 512},
		{4536, 8, 3584, "combine_norm_512", 512},
		{7, 2, 4104, "combine_norm_512_3", 512},
	} {
		r, b, s := list(t, Options{})
		if err := b.Enqueue(s, combiningNorm(test.rows, test.k, test.hidden)); err != nil {
			t.Errorf("%+v: %v", test, err)
		}
		if want := []grid{{x: test.rows, y: 1, z: 1, threads: test.threads}}; r.names() != test.want || !slices.Equal(r.grids, want) {
			t.Errorf("%+v: kernels %q on %v, want %v", test, r.names(), r.grids, want)
		}
	}
	r, b, s := list(t, Options{})
	if err := errors.Join(b.Enqueue(s, combiningNorm(0, 2, 64)), b.Enqueue(s, combiningNorm(3, 2, 0))); err != nil || len(r.kernels) > 0 {
		t.Errorf("without elements: %v, kernels %q", err, r.names())
	}
}

// appending returns a RoPEAppendKV without norms.
func appending(rows, heads, kvHeads, d int) *kernels.RoPEAppendKV {
	return &kernels.RoPEAppendKV{
		Q: at(1, tensor(kernels.BF16, rows, heads, d)), K: at(2, tensor(kernels.BF16, rows, kvHeads, d)), V: at(3, tensor(kernels.BF16, rows, kvHeads, d)),
		Table: at(4, tensor(kernels.F32, 100, d)), Rows: at(5, tensor(kernels.I32, rows)),
		CacheK: at(6, tensor(kernels.BF16, 10, 16, kvHeads, d)), CacheV: at(7, tensor(kernels.BF16, 10, 16, kvHeads, d)), Slots: at(8, tensor(kernels.I32, rows)),
	}
}

// normed adds norms.
func normed(o *kernels.RoPEAppendKV) *kernels.RoPEAppendKV {
	d := o.Q.Shape[2]
	o.QNorm, o.KNorm, o.Eps = at(9, tensor(kernels.BF16, d)), at(10, tensor(kernels.F32, d)), 1e-6
	return o
}

func TestRoPEAppendKVChoice(t *testing.T) {
	for _, test := range []struct {
		name  string
		op    *kernels.RoPEAppendKV
		want  string
		y     int
		lanes int32
	}{
		{"one row", appending(1, 32, 8, 128), "rope_append_kv_few", 3, 8},
		{"a wave", appending(176, 32, 8, 128), "rope_append_kv", 3, 8},
		{"more than a wave", appending(177, 32, 8, 128), "rope_append_kv", 1, 8},
		{"many rows", normed(appending(4536, 32, 4, 128)), "norm_rope_append_kv", 1, 8},
		{"many heads", normed(appending(4536, 64, 4, 128)), "norm_rope_append_kv", 2, 8},
		{"heads of 80", appending(1, 4, 4, 80), "rope_append_kv", 1, 8},
		{"heads of 16", appending(1, 4, 4, 16), "rope_append_kv", 1, 1},
		{"heads of 256", appending(1, 8, 4, 256), "rope_append_kv", 2, 16},
		{"no rows", appending(0, 4, 4, 64), "", 0, 0},
		{"heads of nothing", appending(5, 4, 4, 0), "", 0, 0},
	} {
		r, b, s := list(t, Options{})
		r.keep = true
		if err := b.Enqueue(s, test.op); err != nil {
			t.Errorf("%s: %v", test.name, err)
		}
		if r.names() != test.want {
			t.Errorf("%s: kernels %q, want %q", test.name, r.names(), test.want)
		}
		if test.want == "" {
			continue
		}
		a := (*ropeAppendKVArgs)(unsafe.Pointer(&r.args[0][0]))
		if g := (grid{x: test.op.Q.Shape[0], y: test.y, z: 1, threads: 128}); r.grids[0] != g || a.lanes != test.lanes {
			t.Errorf("%s: %+v and %d lanes, want %+v and %d", test.name, r.grids[0], a.lanes, g, test.lanes)
		}
	}
}

// TestRoPEAttentionChoice holds when one kernel rotates, appends and attends.
func TestRoPEAttentionChoice(t *testing.T) {
	const apart, normedApart = "rope_append_kv_few attention_128_wide", "norm_rope_append_kv_few attention_128_wide"
	one := func(edit func(*kernels.RoPEAppendKV, *kernels.Attention)) *kernels.RoPEAttention {
		r := appending(2, 16, 4, 128)
		a := kernels.Attention{
			SeqStarts: at(11, tensor(kernels.I32, 3)), ContextLens: at(12, tensor(kernels.I32, 2)), BlockTable: at(13, tensor(kernels.I32, 2, 8192)),
			Scale: 1, MaxContext: 100, MaxSeqTokens: 1, Out: at(14, tensor(kernels.BF16, 2, 16, 128)),
		}
		edit(r, &a)
		a.Q, a.CacheK, a.CacheV = r.Q, r.CacheK, r.CacheV
		return &kernels.RoPEAttention{Append: *r, Attention: a}
	}
	keep := func(*kernels.RoPEAppendKV, *kernels.Attention) {}
	for _, test := range []struct {
		name string
		edit func(r *kernels.RoPEAppendKV, a *kernels.Attention)
		want string
	}{
		{"decode", keep, "rope_attention_128_wide"},
		{"norms", func(r *kernels.RoPEAppendKV, _ *kernels.Attention) { normed(r).KNorm.DType = kernels.BF16 }, "norm_rope_attention_128_wide"},
		{"float32 weights", func(r *kernels.RoPEAppendKV, _ *kernels.Attention) { normed(r) }, normedApart},
		{"several chunks", func(_ *kernels.RoPEAppendKV, a *kernels.Attention) { a.MaxContext = 900 }, "rope_attention_128_wide attention_join"},
		{"more blocks than fit twice", func(_ *kernels.RoPEAppendKV, a *kernels.Attention) { a.MaxContext = 256 * 34 }, "rope_append_kv_few attention_128_1 attention_join"},
		{"as many tokens as a tile has", func(_ *kernels.RoPEAppendKV, a *kernels.Attention) { a.MaxSeqTokens = 4 }, "rope_attention_128_wide"},
		{"more", func(_ *kernels.RoPEAppendKV, a *kernels.Attention) { a.MaxSeqTokens = 5 }, apart + " prompt_128"},
		{"queries that are not aligned", func(r *kernels.RoPEAppendKV, _ *kernels.Attention) { r.Q.Stride[0] += 4 }, "rope_append_kv attention_128_wide"},
		{"values that are not aligned", func(r *kernels.RoPEAppendKV, _ *kernels.Attention) { r.V.Addr += 2 }, "rope_append_kv attention_128_wide"},
		{"output that is not aligned", func(_ *kernels.RoPEAppendKV, a *kernels.Attention) { a.Out.Addr += 2 }, "rope_attention_128_wide"},
		{"blocks of 24", func(r *kernels.RoPEAppendKV, _ *kernels.Attention) {
			r.CacheK, r.CacheV = at(6, tensor(kernels.BF16, 10, 24, 4, 128)), at(7, tensor(kernels.BF16, 10, 24, 4, 128))
		}, apart},
		{"no rows", func(r *kernels.RoPEAppendKV, a *kernels.Attention) {
			*r = *appending(0, 16, 4, 128)
			a.SeqStarts, a.ContextLens, a.BlockTable = a.SeqStarts.Slice(0, 1), a.ContextLens.Slice(0, 0), a.BlockTable.Slice(0, 0)
			a.Out = a.Out.Slice(0, 0)
		}, ""},
	} {
		r, b, s := list(t, Options{})
		b.hopper, b.largeSmem = true, true
		if err := b.Enqueue(s, one(test.edit)); err != nil {
			t.Errorf("%s: %v", test.name, err)
		}
		if r.names() != test.want {
			t.Errorf("%s: kernels %q, want %q", test.name, r.names(), test.want)
		}
	}
	r, b, s := list(t, Options{BatchInvariant: true})
	b.hopper, b.largeSmem = true, true
	if err := b.Enqueue(s, one(keep)); err != nil || r.names() != "rope_append_kv_few prompt_128" {
		t.Errorf("batch-invariant: %v, kernels %q", err, r.names())
	}
	r, b, s = list(t, Options{})
	if err := b.Enqueue(s, one(keep)); err != nil || r.names() != "rope_append_kv_few attention_128_1" {
		t.Errorf("other GPUs: %v, kernels %q", err, r.names())
	}
	r, b, s = list(t, Options{})
	wide := one(func(r *kernels.RoPEAppendKV, a *kernels.Attention) {
		*r, a.Out = *appending(2, 16, 4, 192), at(14, tensor(kernels.BF16, 2, 16, 192))
	})
	if err := b.Enqueue(s, wide); err == nil || !strings.Contains(err.Error(), "at most 128") || r.names() != "" {
		t.Errorf("heads of 192: %v, kernels %q; want none", err, r.names())
	}
}

// copying copies blocks on a limited number of thread blocks.
func copying(blocks int, size int64, threadBlocks int) *kernels.CopyBlocks {
	return &kernels.CopyBlocks{Src: at(1, tensor(kernels.U64, blocks)), Dst: at(2, tensor(kernels.U64, blocks)), BlockBytes: size, ThreadBlocks: threadBlocks}
}

func TestCopyBlocksChoice(t *testing.T) {
	for _, test := range []struct {
		op   *kernels.CopyBlocks
		want int
	}{
		{copying(1000, 4096, 1), 1},
		{copying(1000, 4096, 16), 16},
		{copying(1000, 4096, 200), 63}, // 64 KiB each
		{copying(1000, 1<<20, 0), 132},
		{copying(1000, 1<<20, 1000), 1000},
		{copying(1, 16, 64), 1},
		{copying(0, 16, 64), 0},
	} {
		r, b, s := list(t, Options{})
		if err := b.Enqueue(s, test.op); err != nil {
			t.Errorf("%+v: %v", test.op, err)
		}
		var want []grid
		if test.want > 0 {
			want = []grid{{x: test.want, y: 1, z: 1, threads: 512}}
		}
		if !slices.Equal(r.grids, want) {
			t.Errorf("%+v: kernels %q on %v, want %v", test.op, r.names(), r.grids, want)
		}
	}
}

func TestCopyChoice(t *testing.T) {
	for _, test := range []struct {
		words, offset  int
		chunks, blocks int
	}{
		{1, 0, 0, 1},
		{4096, 0, 1024, 4},
		{4099, 0, 1024, 4},
		{4096, 4, 0, 16},
		{1 << 20, 0, 1 << 18, 32},
		{0, 0, 0, 0},
	} {
		r, b, s := list(t, Options{})
		r.keep = true
		to := at(2, tensor(kernels.I32, test.words))
		to.Addr += device.Addr(test.offset)
		if err := b.Enqueue(s, &kernels.Copy{Src: at(1, tensor(kernels.I32, test.words)), Dst: to}); err != nil {
			t.Fatal(err)
		}
		if test.blocks == 0 {
			if len(r.grids) > 0 {
				t.Errorf("no words: kernels %q", r.names())
			}
			continue
		}
		// The kernel behind it reads before it waits.
		if want := (grid{x: test.blocks, y: 1, z: 1, threads: 256, noOverlap: true}); !slices.Equal(r.grids, []grid{want}) {
			t.Errorf("%+v: %q on %+v, want %+v", test, r.names(), r.grids, want)
			continue
		}
		a := (*copyArgs)(unsafe.Pointer(&r.args[0][0]))
		if int(a.first.chunks) != test.chunks || int(a.first.words) != test.words || int(a.blocks) != test.blocks || a.second != (copyPartArgs{}) {
			t.Errorf("%+v: %+v", test, *a)
		}
	}
	// Two copies are one launch, with blocks of their own.
	r, b, s := list(t, Options{})
	r.keep = true
	both := &kernels.Copy{
		Src: at(1, tensor(kernels.I32, 4096)), Dst: at(2, tensor(kernels.I32, 4096)), Src2: at(3, tensor(kernels.I32, 3)), Dst2: at(4, tensor(kernels.I32, 3)),
	}
	if err := b.Enqueue(s, both); err != nil {
		t.Fatal(err)
	}
	if want := (grid{x: 5, y: 1, z: 1, threads: 256, noOverlap: true}); !slices.Equal(r.grids, []grid{want}) {
		t.Fatalf("two copies: %q on %+v, want %+v", r.names(), r.grids, want)
	}
	if a := (*copyArgs)(unsafe.Pointer(&r.args[0][0])); a.blocks != 4 || a.second.words != 3 || a.second.dst != uint64(both.Dst2.Addr) {
		t.Errorf("two copies: %+v", *a)
	}
}

func TestRefusals(t *testing.T) {
	r, b, s := list(t, Options{})
	for name, op := range map[string]kernels.Op{
		"12288 elements":        &kernels.Norm{X: at(1, tensor(kernels.BF16, 1, 12296)), Weight: at(2, tensor(kernels.BF16, 12296)), Out: at(3, tensor(kernels.BF16, 1, 12296))},
		"rows of at most 12288": combiningNorm(1, 2, 12296),
		"256 elements":          appending(1, 1, 1, 258),
		"3072 experts":          &kernels.Route{Logits: at(1, tensor(kernels.F32, 1, 4000)), IDs: at(2, tensor(kernels.I32, 1, 2)), Weights: at(3, tensor(kernels.F32, 1, 2))},
		"2048 columns":          logProbs(1, 2049),
		"bfloat16":              &kernels.Clamp{X: at(1, tensor(kernels.F32, 1, 8)), Limit: 1},
		"multiples of 16 bytes": &kernels.Attention{
			Q: at(1, tensor(kernels.BF16, 1, 1, 16)), CacheK: tensor(kernels.BF16, 1, 16, 1, 16), CacheV: at(3, tensor(kernels.BF16, 1, 16, 1, 16)).Narrow(0, 0, 1),
			SeqStarts: at(4, tensor(kernels.I32, 2)), ContextLens: at(5, tensor(kernels.I32, 1)), BlockTable: at(6, tensor(kernels.I32, 1, 1)),
			Scale: 1, MaxContext: 1, MaxSeqTokens: 1, Out: at(7, tensor(kernels.BF16, 1, 1, 16)),
		},
	} {
		if o, ok := op.(*kernels.Attention); ok {
			o.CacheK.Addr += 2
		}
		if err := b.Enqueue(s, op); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v, want %q", op.Name(), err, name)
		}
	}
	if len(r.kernels) > 0 {
		t.Errorf("launched %s", r.names())
	}
}

func TestStreams(t *testing.T) {
	m, err := emulated.Open(emulated.Options{})
	if err != nil {
		t.Fatal(err)
	}
	b, err := newBackend(m, device.HBM(0), Options{Streams: 2, WorkspaceBytes: 1000}, &listRunner{})
	if err != nil {
		t.Fatal(err)
	}
	op := &kernels.Clamp{X: at(1, tensor(kernels.BF16, 1, 8)), Limit: 1}
	var streams []device.Stream
	for i := range 3 {
		s, err := m.NewStream(device.HBM(0), device.StreamOptions{Name: fmt.Sprint(i)})
		if err != nil {
			t.Fatal(err)
		}
		streams = append(streams, s)
	}
	other, err := m.NewStream(device.HBM(1), device.StreamOptions{Name: "of another GPU"})
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		for i, s := range streams {
			if err := b.Enqueue(s, op); (err != nil) != (i == 2) {
				t.Errorf("stream %d: %v", i, err)
			}
		}
	}
	if err := b.Enqueue(other, op); err == nil || !strings.Contains(err.Error(), "another GPU") {
		t.Errorf("a stream of another GPU: %v", err)
	}
	if b.states[streams[0]].work.End() > b.states[streams[1]].work.Addr {
		t.Error("two streams share a workspace")
	}
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	if err := b.Enqueue(streams[0], op); !errors.Is(err, device.ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
	if err := b.Close(); !errors.Is(err, device.ErrClosed) {
		t.Errorf("closed again: %v", err)
	}
	if err := m.Close(); err != nil {
		t.Error(err)
	}
	if _, err := newBackend(m, device.HBM(0), Options{Activation: kernels.F32}, &listRunner{}); err == nil || !strings.Contains(err.Error(), "Activation") {
		t.Errorf("float32 activations: %v", err)
	}
}

// TestStreamOfOneBackend: a stream that a backend has launched on is refused to others
// until that backend gives it up.
func TestStreamOfOneBackend(t *testing.T) {
	m, err := emulated.Open(emulated.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	s, err := m.NewStream(device.HBM(0), device.StreamOptions{Name: "compute"})
	if err != nil {
		t.Fatal(err)
	}
	var backends [3]*Backend
	var runners [3]listRunner
	for i := range backends {
		if backends[i], err = newBackend(m, device.HBM(0), Options{}, &runners[i]); err != nil {
			t.Fatal(err)
		}
	}
	op := &kernels.Clamp{X: at(1, tensor(kernels.BF16, 1, 8)), Limit: 1}
	refused := func(b *Backend) bool {
		err := b.Enqueue(s, op)
		return err != nil && strings.Contains(err.Error(), `cuda: clamp: stream "compute" is in use by another backend`)
	}
	first, second, third := backends[0], backends[1], backends[2]
	if err := errors.Join(first.Enqueue(s, op), first.Enqueue(s, op)); err != nil {
		t.Fatal(err)
	}
	if !refused(second) || !refused(third) || len(runners[1].kernels) > 0 {
		t.Error("a second backend launches on the stream")
	}
	// A refusal takes nothing: no lane, no workspace.
	if len(second.states) > 0 || len(second.free) != 1 {
		t.Errorf("%d lanes and %d workspaces behind a refusal, want 0 and 1", len(second.states), len(second.free))
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	if err := second.Enqueue(s, op); err != nil {
		t.Errorf("once the first is closed: %v", err)
	}
	if !refused(third) {
		t.Error("the second backend did not take the stream")
	}
	// Given up, the stream is free, and so is its workspace.
	second.states[s].release()
	if err := third.Enqueue(s, op); err != nil {
		t.Errorf("once the second gave the stream up: %v", err)
	}
	other, err := m.NewStream(device.HBM(0), device.StreamOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if err := second.Enqueue(other, op); err != nil {
		t.Errorf("another stream in the place of the one given up: %v", err)
	}
	if err := third.Enqueue(other, op); err == nil || !strings.Contains(err.Error(), "exceeds Options.Streams") {
		t.Errorf("a stream too many: %v", err)
	}
	if err := errors.Join(second.Close(), third.Close()); err != nil {
		t.Error(err)
	}
}

// TestStreamsThatCopy: streams on which only blocks are copied need no workspace, and get one with
// the first operation that does, as long as there are any.
func TestStreamsThatCopy(t *testing.T) {
	m, err := emulated.Open(emulated.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	b, err := newBackend(m, device.HBM(0), Options{Streams: 1, WorkspaceBytes: 256}, &listRunner{})
	if err != nil {
		t.Fatal(err)
	}
	var streams [3]device.Stream
	for i := range streams {
		if streams[i], err = m.NewStream(device.HBM(0), device.StreamOptions{}); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if err := b.Enqueue(streams[i], &kernels.CopyBlocks{Src: tensor(kernels.U64, 3), Dst: at(1, tensor(kernels.U64, 3)), BlockBytes: 16}); err != nil {
				t.Errorf("a copy on stream %d: %v", i, err)
			}
		}
	}
	op := &kernels.Norm{X: at(1, tensor(kernels.BF16, 3, 64)), Weight: at(2, tensor(kernels.BF16, 64)), Out: at(3, tensor(kernels.BF16, 3, 64))}
	if err := b.Enqueue(streams[1], op); err != nil {
		t.Error(err)
	}
	if err := b.Enqueue(streams[2], op); err == nil || !strings.Contains(err.Error(), "exceeds Options.Streams") {
		t.Errorf("a second workspace: %v", err)
	}
	if err := b.Close(); err != nil {
		t.Error(err)
	}
}

// TestStreamTakenOnce has backends take streams at the same time: each goes to one.
func TestStreamTakenOnce(t *testing.T) {
	m, err := emulated.Open(emulated.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	const streams, backends = 50, 4
	var all [streams]device.Stream
	for i := range all {
		if all[i], err = m.NewStream(device.HBM(0), device.StreamOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	var took [streams]atomic.Int32
	var group sync.WaitGroup
	for range backends {
		b, err := newBackend(m, device.HBM(0), Options{Streams: streams, WorkspaceBytes: 256}, &listRunner{})
		if err != nil {
			t.Fatal(err)
		}
		defer b.Close()
		group.Go(func() {
			for i, s := range all {
				if _, err := b.streamState(s, true); err == nil {
					took[i].Add(1)
				}
			}
		})
	}
	group.Wait()
	for i := range took {
		if n := took[i].Load(); n != 1 {
			t.Errorf("stream %d was taken %d times", i, n)
		}
	}
}

func TestEnqueueMakesNoGarbage(t *testing.T) {
	r, b, s := list(t, Options{})
	r.library = true
	b.hopper = true
	layout, err := b.ExpertLayout(kernels.ExpertShape{Hidden: 128, Intermediate: 64, DType: kernels.BF16})
	if err != nil {
		t.Fatal(err)
	}
	cut := sampling(3, 32000)
	cut.TopP = at(7, tensor(kernels.F32, 3))
	ops := []kernels.Op{
		matmul(5, 6144, 4096, kernels.BF16), matmul(5, 8, 4096, kernels.F32),
		&kernels.Norm{X: at(1, tensor(kernels.BF16, 3, 64)), Weight: at(2, tensor(kernels.BF16, 64)), Out: at(3, tensor(kernels.BF16, 3, 64))},
		&kernels.Route{Logits: at(1, tensor(kernels.F32, 3, 8)), IDs: at(2, tensor(kernels.I32, 3, 2)), Weights: at(3, tensor(kernels.F32, 3, 2))},
		appending(3, 4, 2, 64), normed(appending(3, 4, 2, 64)), combiningNorm(3, 2, 64), sampling(3, 32000), cut, adjusting(3, 100), restoring(adjusting(3, 100)), masking(3, 2), logProbs(3, 20), copying(9, 4096, 0),
		&kernels.ExpertDown{ExpertGEMM: kernels.ExpertGEMM{
			X: at(1, tensor(kernels.BF16, 6, 64)), Offsets: at(2, tensor(kernels.I32, 5)), Order: at(3, tensor(kernels.I32, 6)), Slots: at(4, tensor(kernels.U64, 4)),
			Experts: at(5, tensor(kernels.I32, 4)), Layout: layout, Out: at(6, tensor(kernels.BF16, 6, 128)),
		}},
	}
	own, invariant, other := list(t, Options{BatchInvariant: true})
	invariant.hopper = true
	dense := matmul(324, 6144, 4096, kernels.BF16)
	attention := &kernels.Attention{ // split, and prompts
		Q: at(1, tensor(kernels.BF16, 900, 32, 128)), CacheK: at(2, tensor(kernels.BF16, 10, 16, 8, 128)), CacheV: at(3, tensor(kernels.BF16, 10, 16, 8, 128)),
		SeqStarts: at(4, tensor(kernels.I32, 3)), ContextLens: at(5, tensor(kernels.I32, 2)),
		BlockTable: at(6, tensor(kernels.I32, 2, 100)), Scale: 1, MaxContext: 900, MaxSeqTokens: 600, Out: at(7, tensor(kernels.BF16, 900, 32, 128)),
	}
	wide, large, third := list(t, Options{})
	large.hopper, large.largeSmem = true, true
	together := &kernels.RoPEAttention{Append: *appending(900, 32, 8, 128), Attention: *attention}
	together.Append.Q, together.Append.CacheK, together.Append.CacheV = attention.Q, attention.CacheK, attention.CacheV
	few := *together
	few.Attention.MaxSeqTokens = 1
	besideGateUp, besideDown := routingBesideGateUp(8, 61, 5632, 2048), routingBesideDown(8, 60, 4, 2048, 5632)
	if n := testing.AllocsPerRun(100, func() {
		wide.reset()
		for _, op := range [...]kernels.Op{together, &few, besideGateUp, besideDown} {
			if err := large.Enqueue(third, op); err != nil {
				t.Fatal(err)
			}
		}
		r.reset()
		own.reset()
		for _, op := range ops {
			if err := b.Enqueue(s, op); err != nil {
				t.Fatal(err)
			}
		}
		for _, op := range [...]kernels.Op{dense, attention} {
			if err := invariant.Enqueue(other, op); err != nil {
				t.Fatal(err)
			}
		}
	}); n > 0 {
		t.Errorf("%v allocations", n)
	}
}
