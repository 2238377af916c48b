package cpu_test

import (
	"crypto/sha256"
	"errors"
	"flag"
	"fmt"
	"math"
	"strings"
	"sync"
	"testing"
	"unsafe"

	"go.uber.org/goleak"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/kernels/cpu"
	"github.com/moeserve/moeserve/kernels/kernelstest"
	"github.com/moeserve/moeserve/tools/racedetector"
)

var full = flag.Bool("full", false, "test at the shapes of real models too: some GB, and minutes")

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// opener opens machines that check every access, and backends.
func opener(o cpu.Options) kernelstest.Open {
	return func(t *testing.T) (device.Machine, kernels.Backend, device.Stream) {
		t.Helper()
		m, b := openMachine(t, o, emulated.Options{Check: true})
		s, err := m.NewStream(device.HBM(0), device.StreamOptions{Name: "compute"})
		if err != nil {
			t.Fatal(err)
		}
		return m, b, s
	}
}

func open(t testing.TB, threads int) (device.Machine, *cpu.Backend) {
	t.Helper()
	return openMachine(t, cpu.Options{Threads: threads}, emulated.Options{Check: true})
}

func openMachine(t testing.TB, c cpu.Options, o emulated.Options) (device.Machine, *cpu.Backend) {
	t.Helper()
	m, err := emulated.Open(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	b := cpu.New(c)
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	})
	return m, b
}

func TestConformance(t *testing.T) {
	o, k := cpu.Options{}, kernelstest.Options{Full: *full, BatchInvariant: true}
	if racedetector.Enabled { // in place of TestThreads, too
		o.Threads, k.Weights = 8, []kernels.DType{kernels.BF16}
	}
	for _, o.ISA = range isas() {
		t.Run(string(o.ISA), func(t *testing.T) { kernelstest.Run(t, opener(o), k) })
	}
}

// isas are those that the processor has; under the race detector, which does not see assembly, one.
func isas() []cpu.ISA {
	all := cpu.ISAs()
	return all[:racedetector.Fewer(len(all), 1)]
}

// TestThreads holds every output of the suite to the same bits for any number of
// threads.
func TestThreads(t *testing.T) {
	if racedetector.Enabled {
		t.Skip("TestConformance has threads, and this compares bits only")
	}
	for _, isa := range isas() {
		t.Run(string(isa), func(t *testing.T) { testThreads(t, isa) })
	}
}

func testThreads(t *testing.T, isa cpu.ISA) {
	var want []string
	for _, threads := range []int{1, 7} {
		var got []string
		t.Run(fmt.Sprintf("threads=%d", threads), func(t *testing.T) {
			kernelstest.Run(t, opener(cpu.Options{Threads: threads, ISA: isa}), kernelstest.Options{
				Seed: 7, Weights: []kernels.DType{kernels.BF16},
				Output: func(test, tensor string, data []byte) {
					got = append(got, fmt.Sprintf("%s %s %x", strings.TrimPrefix(test, t.Name()), tensor, sha256.Sum256(data)))
				},
			})
		})
		if want == nil {
			want = got
		}
		if len(got) != len(want) || len(got) == 0 {
			t.Fatalf("%d threads: %d outputs, want %d", threads, len(got), len(want))
		}
		for i := range got {
			if got[i] != want[i] {
				t.Errorf("%d threads: %s, want %s", threads, got[i], want[i])
			}
		}
	}
}

// host holds tensors in host memory, for a host stream.
type host struct {
	testing.TB
	machine device.Machine
	backend *cpu.Backend
	stream  device.Stream
	memory  map[device.Addr]device.Memory // by tensor
}

func openHost(t testing.TB, threads int) *host {
	t.Helper()
	m, b := open(t, threads)
	return newHost(t, m, b)
}

func newHost(t testing.TB, m device.Machine, b *cpu.Backend) *host {
	t.Helper()
	s, err := m.NewStream(device.Host, device.StreamOptions{Name: "host"})
	if err != nil {
		t.Fatal(err)
	}
	return &host{t, m, b, s, map[device.Addr]device.Memory{}}
}

// tensor returns a dense tensor of the values, or of zeros where there are none.
func tensor[T float32 | int32 | int64 | uint64](h *host, t kernels.DType, values []T, shape ...int) kernels.Tensor {
	h.Helper()
	x := kernels.New(0, t, shape...)
	m, err := h.machine.Alloc(device.Host, x.Bytes(), "tensor")
	if err != nil {
		h.Fatal(err)
	}
	h.Cleanup(func() {
		if err := m.Free(); err != nil {
			h.Error(err)
		}
	})
	data := m.Write(0, x.Bytes())
	clear(data)
	if len(values) > 0 {
		copy(data, unsafe.Slice((*byte)(unsafe.Pointer(&values[0])), len(values)*int(unsafe.Sizeof(values[0]))))
	}
	x.Addr = m.Range(0, 0).Addr
	h.memory[x.Addr] = m
	return x
}

// read decodes a float32 tensor once nothing writes it any more.
func (h *host) read(x kernels.Tensor) []float32 {
	values := make([]float32, x.Elements())
	kernels.ToFloat32(values, h.memory[x.Addr].Read(0, x.Bytes()), kernels.F32)
	return values
}

func (h *host) floats(shape ...int) kernels.Tensor {
	h.Helper()
	return tensor[float32](h, kernels.F32, nil, shape...)
}

func (h *host) ints(values ...int32) kernels.Tensor {
	h.Helper()
	return tensor(h, kernels.I32, values, len(values))
}

// TestBadData gives operations data that would lead outside their tensors: each
// must fail with an error that names operation and value, and the stream must go
// on after Recover.
func TestBadData(t *testing.T) {
	h := openHost(t, 2)
	layout, err := h.backend.ExpertLayout(kernels.ExpertShape{Hidden: 16, Intermediate: 16, DType: kernels.F32})
	if err != nil {
		t.Fatal(err)
	}
	extent := uint64(h.floats(int(layout.Size / 4)).Addr)
	slots := []uint64{extent, extent, extent}
	up := func(offsets, order, experts []int32, slots []uint64) kernels.Op {
		return &kernels.ExpertUp{ExpertGEMM: kernels.ExpertGEMM{
			X: h.floats(2, 16), Offsets: h.ints(offsets...), Order: h.ints(order...), Experts: h.ints(experts...),
			Slots: tensor(h, kernels.U64, slots, len(slots)), Layout: layout, Out: h.floats(4, 16),
		}}
	}
	down := func(offsets, order, experts []int32, slots []uint64) kernels.Op {
		o := kernels.ExpertDown{ExpertGEMM: up(offsets, order, experts, slots).(*kernels.ExpertUp).ExpertGEMM}
		o.X, o.Out = o.Out, h.floats(4, 16)
		return &o
	}
	withRuns := func(op kernels.Op, runs ...int32) kernels.Op {
		p := &op.(*kernels.ExpertUp).ExpertGEMM
		p.Runs = tensor(h, kernels.I32, runs, len(runs)/kernels.RunColumns, kernels.RunColumns)
		return op
	}
	manyPairs := func() kernels.Op {
		const pairs = kernels.MaxRunPairs + 1
		var all []int32
		for i := range int32(pairs) {
			all = append(all, i)
		}
		return &kernels.ExpertDown{ExpertGEMM: kernels.ExpertGEMM{
			X: h.floats(pairs, 16), Offsets: h.ints(0, pairs, pairs), Order: h.ints(all...), Experts: h.ints(0, 1), Slots: tensor(h, kernels.U64, slots[:2], 2),
			Layout: layout, Out: h.floats(pairs, 16), Runs: tensor(h, kernels.I32, []int32{0, 0, pairs}, 2, kernels.RunColumns),
		}}
	}
	attention := func(starts, lens, table []int32) kernels.Op {
		s := len(lens)
		return &kernels.Attention{
			Q: h.floats(3, 2, 16), CacheK: h.floats(4, 16, 1, 16), CacheV: h.floats(4, 16, 1, 16),
			SeqStarts: h.ints(starts...), ContextLens: h.ints(lens...), BlockTable: tensor(h, kernels.I32, table, s, len(table)/s),
			Scale: 1, MaxContext: 32, MaxSeqTokens: 2, Out: h.floats(3, 2, 16),
		}
	}
	ropeKV := func(row, slot int32) kernels.Op {
		return &kernels.RoPEAppendKV{
			Q: h.floats(1, 1, 16), K: h.floats(1, 1, 16), V: h.floats(1, 1, 16), Table: h.floats(5, 16), Rows: h.ints(row),
			CacheK: h.floats(2, 16, 1, 16), CacheV: h.floats(2, 16, 1, 16), Slots: h.ints(slot),
		}
	}
	sample := func(temperature float32, logits ...float32) kernels.Op {
		return &kernels.Sample{
			Logits: tensor(h, kernels.F32, logits, 1, len(logits)), Temperature: tensor(h, kernels.F32, []float32{temperature}, 1),
			Seeds: tensor[uint64](h, kernels.U64, nil, 1), Samples: h.ints(0), Positions: h.ints(0), Out: h.ints(0),
		}
	}
	nan, inf := float32(math.NaN()), float32(math.Inf(1))
	good := []int32{0, 2, 2, 4}
	order := []int32{0, 3, 1, 2}
	for _, c := range []struct {
		op   kernels.Op
		want string
	}{
		{&kernels.Embed{IDs: h.ints(0, 9), Table: h.floats(9, 16), Out: h.floats(2, 16)}, "cpu: embed: IDs[1] is 9, want -1 to 8"},
		{&kernels.Embed{IDs: h.ints(-2), Table: h.floats(9, 16), Out: h.floats(1, 16)}, "cpu: embed: IDs[0] is -2"},
		{&kernels.Gather{X: h.floats(3, 16), Rows: h.ints(3), Out: h.floats(1, 16)}, "cpu: gather: Rows[0] is 3, want 0 to 2"},
		{&kernels.RoPE{Q: h.floats(1, 1, 16), K: h.floats(1, 1, 16), Table: h.floats(5, 16), Rows: h.ints(5)}, "cpu: rope: Rows[0] is 5, want 0 to 4"},
		{&kernels.AppendKV{K: h.floats(1, 1, 16), V: h.floats(1, 1, 16), CacheK: h.floats(2, 16, 1, 16), CacheV: h.floats(2, 16, 1, 16), Slots: h.ints(32)}, "cpu: append_kv: Slots[0] is 32, want less than 32"},
		{ropeKV(5, 0), "cpu: rope_append_kv: Rows[0] is 5, want 0 to 4"},
		{ropeKV(4, 32), "cpu: rope_append_kv: Slots[0] is 32, want less than 32"},
		{&kernels.SortByExpert{IDs: tensor(h, kernels.I32, []int32{0, 4}, 1, 2), Offsets: h.ints(0, 0, 0, 0, 0), Order: h.ints(0, 0)}, "cpu: group: IDs[1] is 4, want 0 to 3"},
		{up(good, order, []int32{3}, slots), "cpu: expert_up: Experts[0] is 3, want 0 to 2"},
		{up(good, order, []int32{0, -1}, slots), "cpu: expert_up: Experts[1] is -1"},
		{up(good, order, []int32{1, 0, 1}, slots), "cpu: expert_up: Experts[2] is 1, want each expert once"},
		{up([]int32{0, 5, 5, 4}, order, []int32{0}, slots), "cpu: expert_up: Offsets[1] is 5, want 0 to 4"},
		{up([]int32{-1, 2, 2, 4}, order, []int32{0}, slots), "cpu: expert_up: Offsets[0] is -1"},
		{up([]int32{0, 3, 2, 4}, order, []int32{1}, slots), "cpu: expert_up: Offsets[2] is 2, want 3 to 4"},
		{up(good, []int32{0, 4, 1, 2}, []int32{0}, slots), "cpu: expert_up: Order[1] is 4, want 0 to 3"},
		{up(good, order, []int32{2}, []uint64{extent, extent, 0}), "cpu: expert_up: Slots[2] is 0x0, want the address of expert 2, which has 2 pairs"},
		{withRuns(up(good, order, []int32{0, 1, 2}, slots), 0, 0, 2, 0, 2, 2, 1, 0, 0, 0, 0, 0), "cpu: expert_up: Runs[6] is 1, want 2 by Offsets"},
		{withRuns(up(good, order, []int32{0, 1, 2}, slots), 0, 0, 2, 0, 2, 2, 2, 0, 1, 4, 0, 0), "cpu: expert_up: Runs[8] is 1, want 0 by Offsets"},
		{down(good, order, []int32{2}, []uint64{extent, extent, 0}), "cpu: expert_down: Slots[2] is 0x0"},
		{down(good, []int32{0, -1, 1, 2}, []int32{0}, slots), "cpu: expert_down: Order[1] is -1"},
		{manyPairs(), "cpu: expert_down: Runs[2] is 17, want 16 by Offsets"},
		{attention([]int32{1, 2, 3}, []int32{16, 16}, []int32{0, 1, 2, 3}), "cpu: attention: SeqStarts[0] is 1, want 0"},
		{attention([]int32{0, 2, 4}, []int32{16, 16}, []int32{0, 1, 2, 3}), "cpu: attention: SeqStarts[2] is 4, want 3"},
		{attention([]int32{0, 4, 3}, []int32{16, 16}, []int32{0, 1, 2, 3}), "cpu: attention: SeqStarts[1] is 4"},
		{attention([]int32{0, 0, 3}, []int32{16, 16}, []int32{0, 1, 2, 3}), "cpu: attention: SeqStarts[2] is 3, want at most MaxSeqTokens (2)"},
		{attention([]int32{0, 2, 3}, []int32{1, 16}, []int32{0, 1, 2, 3}), "cpu: attention: ContextLens[0] is 1, want 2"},
		{attention([]int32{0, 2, 3}, []int32{16, 33}, []int32{0, 1, 2, 3}), "cpu: attention: ContextLens[1] is 33"},
		{attention([]int32{0, 2, 3}, []int32{16, 17}, []int32{0, 1, 2, 4}), "cpu: attention: BlockTable[1, 1] is 4, want 0 to 3"},
		{attention([]int32{0, 2, 3}, []int32{16, 17}, []int32{-1, 1, 2, 3}), "cpu: attention: BlockTable[0, 0] is -1"},
		{sample(-1, 1, 2), "cpu: sample: Temperature[0] is -1"},
		{sample(nan, 1, 2), "cpu: sample: Temperature[0] is NaN"},
		{sample(inf, 1, 2), "cpu: sample: Temperature[0] is +Inf"},
	} {
		if err := h.backend.Enqueue(h.stream, c.op); err != nil {
			t.Errorf("enqueue %s: %v, want the operation to fail", c.op.Name(), err)
			continue
		}
		if err := h.stream.Recover(t.Context()); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s gives %v, want %q", c.op.Name(), err, c.want)
		}
	}
	if err := h.backend.Enqueue(h.stream, up(good, order, []int32{0, 1, 2}, slots)); err != nil {
		t.Error(err)
	}
	if err := h.stream.Synchronize(t.Context()); err != nil {
		t.Error(err)
	}
}

// TestNotANumber holds routing and drawing to ids inside their range whatever the
// scores are.
func TestNotANumber(t *testing.T) {
	h := openHost(t, 1)
	nan, inf := float32(math.NaN()), float32(math.Inf(1))
	for _, scores := range [][]float32{{nan, nan, nan}, {nan, 1, nan}, {inf, inf, -inf}, {-inf, -inf, -inf}, {1, nan, 2}} {
		for method := kernels.Softmax; method <= kernels.SparseMixer; method++ {
			ids := h.ints(-1, -1)
			ids = ids.View(1, 2)
			err := h.backend.Enqueue(h.stream, &kernels.Route{
				Logits: tensor(h, kernels.F32, scores, 1, 3), Method: method, IDs: ids, Weights: h.floats(1, 2),
			})
			if err == nil {
				err = h.stream.Synchronize(t.Context())
			}
			if err != nil {
				t.Fatal(err)
			}
			// Grouping refuses whatever is no expert.
			err = h.backend.Enqueue(h.stream, &kernels.SortByExpert{IDs: ids, Offsets: h.ints(0, 0, 0, 0), Order: h.ints(0, 0)})
			if err == nil {
				err = h.stream.Synchronize(t.Context())
			}
			if err != nil {
				t.Errorf("scores %v, method %d: %v", scores, method, err)
			}
		}
	}
}

// onlyStream hides that a stream runs Go work.
type onlyStream struct{ device.Stream }

func TestEnqueueRefuses(t *testing.T) {
	h := openHost(t, 1)
	x := h.floats(2, 16)
	op := &kernels.Clamp{X: x, Limit: 1}
	if err := h.backend.Enqueue(onlyStream{h.stream}, op); err == nil || !strings.Contains(err.Error(), `stream "host" of host cannot run Go functions`) {
		t.Errorf("a stream without Execute gives %v", err)
	}
	half := *op
	half.X.DType = kernels.F16
	if err := h.backend.Enqueue(h.stream, &half); err == nil || !strings.Contains(err.Error(), "cpu: clamp: X is float16[2 16], want float32, the activation type") {
		t.Errorf("float16 activations give %v", err)
	}
	b := cpu.New(cpu.Options{Threads: 3})
	if err := b.Close(); err != nil {
		t.Error(err)
	}
	if err := b.Close(); !errors.Is(err, device.ErrClosed) {
		t.Errorf("a second Close gives %v", err)
	}
	if err := b.Enqueue(h.stream, op); !errors.Is(err, device.ErrClosed) {
		t.Errorf("Enqueue after Close gives %v", err)
	}
}

// TestStreams runs one backend on several streams at once.
func TestStreams(t *testing.T) {
	const streams, rows, columns = 4, 64, 256
	m, b := open(t, 3)
	var all sync.WaitGroup
	for i := range streams {
		h := newHost(t, m, b)
		ones := make([]float32, columns*columns)
		for j := range ones {
			ones[j] = 1
		}
		x, w, y := tensor(h, kernels.F32, ones, rows, columns), tensor(h, kernels.F32, ones, columns, columns), h.floats(rows, columns)
		all.Go(func() {
			for range 20 {
				if err := b.Enqueue(h.stream, &kernels.MatMul{X: x, W: w, Out: y}); err != nil {
					t.Error(err)
				}
			}
			if err := h.stream.Synchronize(t.Context()); err != nil {
				t.Error(err)
			}
			for j, v := range h.read(y) {
				if v != columns {
					t.Errorf("stream %d: element %d is %g, want %d", i, j, v, columns)
					return
				}
			}
		})
	}
	all.Wait()
}

// TestGarbage bounds what an operation allocates, that of the stream included,
// whatever its number of rows.
func TestGarbage(t *testing.T) {
	m, b := openMachine(t, cpu.Options{Threads: 1}, emulated.Options{})
	h := newHost(t, m, b)
	for _, rows := range []int{1, 300} {
		op := &kernels.MatMul{X: h.floats(rows, 64), W: h.floats(48, 64), Out: h.floats(rows, 48)}
		n := testing.AllocsPerRun(100, func() {
			if err := h.backend.Enqueue(h.stream, op); err != nil {
				t.Error(err)
			}
			if err := h.stream.Synchronize(t.Context()); err != nil {
				t.Error(err)
			}
		})
		if n > 20 {
			t.Errorf("%d rows: %g allocations per operation, want at most 20", rows, n)
		}
	}
}
