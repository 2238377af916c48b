//go:build cuda && amd64

package cuda

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/kernels/cuda/internal/simt"
	"github.com/moeserve/moeserve/kernels/kernelstest"
	"github.com/moeserve/moeserve/kernels/philox"
)

// simtRunner runs kernels on the CPU, on a device of an emulated machine.
type simtRunner struct {
	half bool
	seed uint64
	// op is what is enqueued, if what it waits for is to be hidden from kernels before they
	// wait.
	op   kernels.Op
	work device.Range
	// launched, if set, gets the names of kernels; with " early" those of experts that read before they wait what
	// others find by then (expertArgs.listsReady).
	launched map[string]bool
}

// overlapping is a backend whose kernels start before those in front have written.
type overlapping struct {
	*Backend
	r *simtRunner
}

func (b overlapping) Enqueue(s device.Stream, op kernels.Op) error {
	b.r.op = op
	return b.Backend.Enqueue(s, op)
}

// readEarly is what a kernel of experts reads before it waits: lists, if it is the way down right behind the way
// up, which reads the same ones, or all but lists, if it is the way up beside RouteDown; slots, which only copies write, and
// no kernel overlaps these. routed: it selects experts itself.
type readEarly struct{ lists, slots, routed bool }

// awaited is what a kernel may read only once it has waited: all that operations write.
func awaited(op kernels.Op, early readEarly) (all []device.Range) {
	add := func(tensors ...*kernels.Tensor) {
		for _, t := range tensors {
			if t.None() || t.Elements() == 0 {
				continue
			}
			last := 0
			for i := range t.Rank {
				last += (t.Shape[i] - 1) * t.Stride[i]
			}
			all = append(all, device.Range{Addr: t.Addr, Bytes: int64(last+1) * int64(t.DType.Size())})
		}
	}
	switch o := op.(type) {
	case *kernels.Embed:
		add(&o.IDs, &o.Out)
	case *kernels.Norm:
		add(&o.X, &o.Residual, &o.Out)
	case *kernels.MatMul:
		add(&o.X, &o.Out)
	case *kernels.GatedMatMul:
		add(&o.X, &o.Out)
	case *kernels.Clamp:
		add(&o.X)
	case *kernels.RoPE:
		add(&o.Q, &o.K)
	case *kernels.AppendKV:
		add(&o.K, &o.V, &o.CacheK, &o.CacheV)
	case *kernels.RoPEAppendKV:
		add(&o.Q, &o.K, &o.V, &o.CacheK, &o.CacheV)
	case *kernels.Attention:
		add(&o.Q, &o.Out)
		if !o.PastReady { // else see appended
			add(&o.CacheK, &o.CacheV)
		}
	case *kernels.RoPEAttention:
		add(&o.Append.K, &o.Append.V)
		all = append(all, awaited(&o.Attention, early)...)
	case *kernels.Route:
		add(&o.Logits, &o.IDs, &o.Weights, &o.Counts, &o.Offsets, &o.Order, &o.Runs)
	case *kernels.RouterGateUp:
		all = append(awaited(&o.Router, early), awaited(&o.GateUp, early)...)
	case *kernels.RouteDown:
		all = append(awaited(&o.Route, early), awaited(&o.Down, early)...)
	case *kernels.RouteExpertUp:
		// What Route writes, Up does not read.
		all = append(awaited(&o.Route, early), awaited(&o.Up, early)...)
	case *kernels.SortByExpert:
		add(&o.IDs, &o.Offsets, &o.Order)
	case *kernels.ExpertUp:
		add(&o.Offsets, &o.Order, &o.Runs)
		if early.lists { // beside RouteDown, which writes these alone
			break
		}
		add(&o.X, &o.Experts, &o.Out)
		if !early.slots {
			add(&o.Slots)
		}
	case *kernels.ExpertDown:
		add(&o.X, &o.Out)
		switch {
		case !early.lists:
			add(&o.Offsets, &o.Order, &o.Experts, &o.Runs)
			if !early.slots {
				add(&o.Slots)
			}
		case early.routed: // gate/up makes these
			add(&o.Offsets, &o.Order, &o.Runs)
		}
	case *kernels.Combine:
		add(&o.X, &o.Weights, &o.Shared, &o.SharedGate, &o.Out)
	case *kernels.CombineNorm:
		add(&o.X, &o.Weights, &o.Shared, &o.SharedGate, &o.Residual, &o.Out)
	case *kernels.SiluMul:
		add(&o.Gate, &o.Up, &o.Out)
	case *kernels.Gather:
		add(&o.X, &o.Rows, &o.Out)
	case *kernels.CopyBlocks:
		add(&o.Src, &o.Dst)
	case *kernels.AddRows:
		add(&o.Src, &o.Dst)
	case *kernels.Copy:
		add(&o.Src, &o.Dst, &o.Src2, &o.Dst2)
	case *kernels.Sample:
		add(&o.Logits, &o.Temperature, &o.Seeds, &o.Samples, &o.Positions, &o.TopK, &o.TopP, &o.MinP, &o.Out)
	case *kernels.Adjust:
		add(&o.Logits, &o.Starts, &o.IDs, &o.Seen, &o.Bias, &o.Repetition, &o.Presence, &o.Frequency, &o.Saved)
	case *kernels.Restore:
		add(&o.Logits, &o.Starts, &o.IDs, &o.Saved)
	case *kernels.Mask:
		add(&o.Logits, &o.Rows, &o.Allowed)
	case *kernels.LogProbs:
		add(&o.Logits, &o.Tokens, &o.Sampled, &o.TopIDs, &o.Top, &o.Ranks)
	default:
		panic(op.Name())
	}
	return all
}

// appended is where the cache holds the keys and values of a step's own tokens.
func appended(o *kernels.Attention) (all []device.Range) {
	ints := func(t *kernels.Tensor) []int32 {
		return unsafe.Slice(*(**int32)(unsafe.Pointer(&t.Addr)), t.Elements())
	}
	starts, lens, table := ints(&o.SeqStarts), ints(&o.ContextLens), ints(&o.BlockTable)
	tokens, width := o.CacheK.Shape[1], o.BlockTable.Shape[1]
	for s, context := range lens {
		for p := int(context - starts[s+1] + starts[s]); p < int(context); p++ {
			block := int(table[s*width+p/tokens])
			for _, cache := range []*kernels.Tensor{&o.CacheK, &o.CacheV} {
				for head := range cache.Shape[2] {
					row := cache.Narrow(0, block, block+1).Narrow(1, p%tokens, p%tokens+1).Narrow(2, head, head+1)
					all = append(all, device.Range{Addr: row.Addr, Bytes: int64(cache.Shape[3] * cache.DType.Size())})
				}
			}
		}
	}
	return all
}

// hidden keeps an Executor from being seen as one: kernels here declare nothing.
type hidden struct {
	device.Stream
	executor device.Executor
}

func (r *simtRunner) launch(s device.Stream, k kernelID, g grid, args []byte) error {
	copied := append([]byte(nil), args...)
	kernel := table[k]
	if g.shared > kernel.shared {
		return errors.New("more shared memory than the kernel is allowed")
	}
	r.seed++
	seed := r.seed
	if name := kernel.name; r.launched != nil {
		if kernel.file == "expert.cu" && (*expertArgs)(unsafe.Pointer(&copied[0])).listsReady != 0 {
			name += " early"
		}
		r.launched[name] = true
	}
	var ranges []device.Range
	var early readEarly
	if r.op != nil {
		if kernel.file == "expert.cu" {
			early.lists = (*expertArgs)(unsafe.Pointer(&copied[0])).listsReady != 0
			early.routed = strings.Contains(kernel.name, "_routed")
			early.slots = early.routed || strings.HasSuffix(kernel.name, "_few")
		}
		ranges = append(awaited(r.op, early), r.work)
	}
	attention, _ := r.op.(*kernels.Attention)
	if o, ok := r.op.(*kernels.RoPEAttention); ok {
		attention = &o.Attention
	}
	return s.(hidden).executor.Execute(device.Work{Name: kernel.name, Run: func(device.Access) error {
		if attention != nil && attention.PastReady {
			ranges = append(ranges, appended(attention)...)
		}
		launched, err := simt.Launch(r.half, kernel.name, copied, [3]int{g.x, g.y, g.z}, g.threads, g.shared, seed, ranges...)
		if err == nil && launched && (kernel.file == "expert.cu" && !early.lists || kernel.name == "route_down") {
			// The kernel behind may read lists or scores before its wait: they must be complete when it starts.
			err = fmt.Errorf("%s calls launch_dependents before it has waited", kernel.name)
		}
		return err
	}})
}

func (r *simtRunner) matmul(device.Stream, device.Range, *libraryGEMM) (bool, error) {
	return false, nil
}

func (r *simtRunner) mapTiles(to *tensorMap, of *tileMap) error {
	*to = tensorMap{uint64(of.at), uint64(of.rows), uint64(of.columns), 2 * uint64(of.stride), uint64(of.tileRows)}
	return nil
}

func (r *simtRunner) close() error { return nil }

// emulate returns a machine with one device, a backend whose kernels run on the CPU,
// and a stream of it.
func emulate(t testing.TB, o Options, multiprocessors int) (device.Machine, *Backend, device.Stream) {
	t.Helper()
	m, err := emulated.Open(emulated.Options{})
	if err != nil {
		t.Fatal(err)
	}
	b, err := newBackend(m, device.HBM(0), o, &simtRunner{half: o.Activation == kernels.F16})
	if err != nil {
		t.Fatal(err)
	}
	b.multiprocessors = multiprocessors
	s, err := m.NewStream(device.HBM(0), device.StreamOptions{Name: "compute"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(s.Synchronize(context.Background()), s.Close(), b.Close(), m.Close()); err != nil {
			t.Error(err)
		}
	})
	return m, b, hidden{s, s.(device.Executor)}
}

// TestEmulatedLargeVocabulary draws the likeliest token, the lowest of equal ones,
// where ids have more than 21 bits.
func TestEmulatedLargeVocabulary(t *testing.T) {
	const vocabulary, want = 1<<21 + 5, 3
	m, b, s := emulate(t, Options{}, 1)
	logits := make([]byte, 4*vocabulary)
	for i := range logits {
		logits[i] = 0xff // no number
	}
	for _, id := range []int{want, 9000, 20000, vocabulary - 1} {
		clear(logits[4*id:][:4])
	}
	one := binary.LittleEndian.AppendUint32(nil, math.Float32bits(1))
	var op kernels.Sample
	var out, position device.Memory
	host, err := m.Alloc(device.Host, int64(len(logits)), "staging")
	if err != nil {
		t.Fatal(err)
	}
	mems := []device.Memory{host}
	write := func(to device.Memory, data []byte) {
		n := int64(len(data))
		copy(host.Write(0, n), data)
		if err := errors.Join(s.Copy(to.Range(0, n), host.Range(0, n)), s.Synchronize(t.Context())); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		tensor *kernels.Tensor
		t      kernels.DType
		data   []byte
	}{
		{&op.Temperature, kernels.F32, one},
		{&op.Seeds, kernels.U64, make([]byte, 8)},
		{&op.Samples, kernels.I32, make([]byte, 4)},
		{&op.TopK, kernels.I32, []byte{1, 0, 0, 0}},
		{&op.Out, kernels.I32, make([]byte, 4)},
		{&op.Positions, kernels.I32, make([]byte, 4)},
		{&op.Logits, kernels.F32, logits},
	} {
		mem, err := m.Alloc(device.HBM(0), int64(len(c.data)), "tensor")
		if err != nil {
			t.Fatal(err)
		}
		mems = append(mems, mem)
		*c.tensor = kernels.New(mem.Range(0, mem.Bytes()).Addr, c.t, len(c.data)/c.t.Size())
		write(mem, c.data)
		switch c.tensor {
		case &op.Out:
			out = mem
		case &op.Positions:
			position = mem
		case &op.Logits:
			op.Logits = op.Logits.View(1, vocabulary)
		}
	}
	for i := range byte(8) {
		write(position, []byte{i, 0, 0, 0})
		if err := errors.Join(b.Enqueue(s, &op), s.Copy(host.Range(0, 4), out.Range(0, 4)), s.Synchronize(t.Context())); err != nil {
			t.Fatal(err)
		}
		if got := int32(binary.LittleEndian.Uint32(host.Read(0, 4))); got != want {
			t.Errorf("position %d draws %d, want %d", i, got, want)
		}
	}
	for _, mem := range mems {
		if err := mem.Free(); err != nil {
			t.Error(err)
		}
	}
}

// TestEmulatedOutside holds rows whose place or slot is out of range to what Norm, RoPE
// and AppendKV make of them: they are not rotated, or not appended.
func TestEmulatedOutside(t *testing.T) {
	const heads, kvHeads, places, blocks, tokens = 4, 2, 9, 2, 16
	for _, c := range []struct {
		d     int
		norms bool
	}{{128, false}, {128, true}, {80, false}, {80, true}} {
		m, b, s := emulate(t, Options{}, 1)
		x := &bench{TB: t, m: m, b: b, s: s, random: rand.New(rand.NewPCG(1, 2)), exponent: 6}
		rows, slots := x.ints(-1, places, 3, 4, places+5, 0, math.MaxInt32), x.ints(0, 7, blocks*tokens, -1, -1, 31, math.MaxInt32)
		n := rows.Shape[0]
		table, qNorm, kNorm := x.weights(kernels.F32, places, c.d), x.act(c.d), x.act(c.d)
		in, blank := x.act(n, heads+2*kvHeads, c.d), x.act(2, blocks*tokens, kvHeads*c.d)
		all, cache := x.act(n, heads+2*kvHeads, c.d), x.act(2*blocks, tokens, kvHeads, c.d)
		q, k, v := all.Narrow(1, 0, heads), all.Narrow(1, heads, heads+kvHeads), all.Narrow(1, heads+kvHeads, heads+2*kvHeads)
		host, err := m.Alloc(device.Host, cache.Bytes()+all.Bytes(), "results")
		if err != nil {
			t.Fatal(err)
		}
		// run returns queries, keys and values, and the cache.
		run := func(ops ...kernels.Op) (projected, cached []byte) {
			err := errors.Join(s.Copy(all.Range(), in.Range()), s.Copy(cache.Range(), blank.Range()))
			for _, op := range ops {
				err = errors.Join(err, b.Enqueue(s, op))
			}
			at := all.Bytes()
			if err := errors.Join(err, s.Copy(host.Range(0, at), all.Range()), s.Copy(host.Range(at, cache.Bytes()), cache.Range()), s.Synchronize(t.Context())); err != nil {
				t.Fatal(err)
			}
			return bytes.Clone(host.Read(0, at)), bytes.Clone(host.Read(at, cache.Bytes()))
		}
		keys, values := cache.Slice(0, blocks), cache.Slice(blocks, 2*blocks)
		together := kernels.RoPEAppendKV{Q: q, K: k, V: v, Table: table, Rows: rows, CacheK: keys, CacheV: values, Slots: slots}
		var apart []kernels.Op
		if c.norms {
			together.QNorm, together.KNorm, together.Eps = qNorm, kNorm, 1e-6
			apart = append(apart, &kernels.Norm{X: q, Weight: qNorm, Eps: 1e-6, Out: q}, &kernels.Norm{X: k, Weight: kNorm, Eps: 1e-6, Out: k})
		}
		apart = append(apart, &kernels.RoPE{Q: q, K: k, Table: table, Rows: rows}, &kernels.AppendKV{K: k, V: v, CacheK: keys, CacheV: values, Slots: slots})
		before, blankCache := run()
		got, gotCache := run(&together)
		want, wantCache := run(apart...)
		if bytes.Equal(wantCache, blankCache) || !bytes.Equal(gotCache, wantCache) {
			t.Errorf("%+v: the cache is not as of norm, rope and append_kv one after the other", c)
		}
		row, queries := len(got)/n, 2*heads*c.d
		for i := range n {
			if !bytes.Equal(got[i*row:][:queries], want[i*row:][:queries]) {
				t.Errorf("%+v: row %d: queries are not as of norm, rope and append_kv one after the other", c, i)
			}
			if !bytes.Equal(got[i*row+queries:(i+1)*row], before[i*row+queries:(i+1)*row]) {
				t.Errorf("%+v: row %d: keys or values have changed", c, i)
			}
		}
		x.free()
		if err := host.Free(); err != nil {
			t.Error(err)
		}
	}
}

// TestEmulatedRopedOutside holds attention with RoPE before it, of rows whose place or slot is out of
// range, to what both make of them one after the other: they are not rotated, or not appended.
func TestEmulatedRopedOutside(t *testing.T) {
	const heads, kvHeads, d, places, tokens = 4, 2, 128, 9, 16
	for _, norms := range []bool{false, true} {
		m, b, s := emulate(t, Options{}, 132)
		b.hopper, b.largeSmem = true, true
		x := &bench{TB: t, m: m, b: b, s: s, random: rand.New(rand.NewPCG(1, 2)), exponent: 6}
		rows := x.ints(-1, places, 3, 4, 0, math.MaxInt32)
		n := rows.Shape[0]
		// Sequence i has block i, and its last position is i+3.
		slots := x.ints(3, 1*tokens+4, -1, int32(n*tokens), math.MaxInt32, 5*tokens+8)
		op := kernels.RoPEAttention{
			Append: kernels.RoPEAppendKV{K: x.act(n, kvHeads, d), V: x.act(n, kvHeads, d), Table: x.weights(kernels.F32, places, d), Rows: rows, Slots: slots},
			Attention: kernels.Attention{
				Q: x.act(n, heads, d), SeqStarts: x.ints(0, 1, 2, 3, 4, 5, 6), ContextLens: x.ints(4, 5, 6, 7, 8, 9), BlockTable: x.ints(0, 1, 2, 3, 4, 5).View(n, 1),
				Scale: 0.1, MaxContext: tokens, MaxSeqTokens: 1,
			},
		}
		if norms {
			op.Append.QNorm, op.Append.KNorm, op.Append.Eps = x.act(d), x.act(d), 1e-6
		}
		all, blank := x.act(2*n, tokens, kvHeads, d), x.act(2*n, tokens, kvHeads, d)
		q, out := op.Attention.Q, x.act(n, heads, d)
		op.Attention.Out, op.Append.Q, op.Append.CacheK, op.Append.CacheV = out, q, all.Slice(0, n), all.Slice(n, 2*n)
		op.Attention.CacheK, op.Attention.CacheV = op.Append.CacheK, op.Append.CacheV
		host, err := m.Alloc(device.Host, all.Bytes()+out.Bytes(), "results")
		if err != nil {
			t.Fatal(err)
		}
		run := func(ops ...kernels.Op) []byte {
			err := s.Copy(all.Range(), blank.Range())
			for _, op := range ops {
				err = errors.Join(err, b.Enqueue(s, op))
			}
			at := all.Bytes()
			if err := errors.Join(err, s.Copy(host.Range(0, at), all.Range()), s.Copy(host.Range(at, out.Bytes()), out.Range()), s.Synchronize(t.Context())); err != nil {
				t.Fatal(err)
			}
			return bytes.Clone(host.Read(0, at+out.Bytes()))
		}
		before, got := run(), run(&op) // which leaves the queries as they are
		want := run(&op.Append, &op.Attention)
		if size := int(all.Bytes()); !bytes.Equal(got[:size], want[:size]) || bytes.Equal(got[:size], before[:size]) {
			t.Errorf("norms %v: the cache is not as of rope_append_kv", norms)
		}
		if size := int(all.Bytes()); !bytes.Equal(got[size:], want[size:]) || bytes.Equal(got[size:], before[size:]) {
			t.Errorf("norms %v: attention is not as of rope_append_kv and attention", norms)
		}
		x.free()
		if err := host.Free(); err != nil {
			t.Error(err)
		}
	}
}

// TestEmulatedFewRows holds GEMMs of few rows with many pipeline stages to the bits of those
// with shallow ones, or of eight rows at a time, which the conformance suite checks: the order of sums is the same.
func TestEmulatedFewRows(t *testing.T) {
	m, b, s := emulate(t, Options{}, 3)
	random := rand.New(rand.NewPCG(1, 2))
	for _, c := range []struct{ rows, columns, inner int }{
		{1, 1, 8}, {1, 16, 64}, {2, 100, 1000}, {3, 49, 1024}, {5, 130, 3080}, {8, 200, 5632}, {1, 96, 8200}, {8, 17, 72},
		{9, 49, 1024}, {16, 130, 3080}, {13, 90, 5000},
	} {
		op := kernels.MatMul{X: kernels.New(0, kernels.BF16, c.rows, c.inner), W: kernels.New(0, kernels.BF16, c.columns, c.inner), Out: kernels.New(0, kernels.F32, c.rows, c.columns)}
		var mems []device.Memory
		for _, to := range []*kernels.Tensor{&op.X, &op.W, &op.Out} {
			mem, err := m.Alloc(device.HBM(0), to.Bytes(), "tensor")
			if err != nil {
				t.Fatal(err)
			}
			host, err := m.Alloc(device.Host, to.Bytes(), "staging")
			if err != nil {
				t.Fatal(err)
			}
			mems = append(mems, mem, host)
			to.Addr = mem.Range(0, to.Bytes()).Addr
			if to != &op.Out {
				philox.FillDummy(host.Write(0, to.Bytes()), kernels.BF16, random.Uint64(), "product", 0, 7)
			}
			if err := s.Copy(mem.Range(0, to.Bytes()), host.Range(0, to.Bytes())); err != nil {
				t.Fatal(err)
			}
		}
		out, host, n := mems[4], mems[5], op.Out.Bytes()
		var got [2][]byte
		for i := range got {
			b.largeSmem = i == 1
			copy(host.Write(0, n), bytes.Repeat([]byte{0xff}, int(n)))
			parts := []kernels.MatMul{op}
			if i == 0 && c.rows > 8 { // eight rows at a time
				parts = []kernels.MatMul{op, op}
				parts[0].X, parts[0].Out = op.X.Slice(0, 8), op.Out.Slice(0, 8)
				parts[1].X, parts[1].Out = op.X.Slice(8, c.rows), op.Out.Slice(8, c.rows)
			}
			err := s.Copy(out.Range(0, n), host.Range(0, n))
			for j := range parts {
				err = errors.Join(err, b.Enqueue(s, &parts[j]))
			}
			err = errors.Join(err, s.Copy(host.Range(0, n), out.Range(0, n)), s.Synchronize(t.Context()))
			if err != nil {
				t.Fatal(err)
			}
			got[i] = bytes.Clone(host.Read(0, n))
		}
		if !bytes.Equal(got[0], got[1]) || bytes.Contains(got[0], []byte{0xff, 0xff, 0xff, 0xff}) {
			t.Errorf("%+v: deep and shallow rings give other bits, or results are missing", c)
		}
		for _, mem := range mems {
			if err := mem.Free(); err != nil {
				t.Error(err)
			}
		}
	}
}

// TestEmulatedTiles is testExpertTiles, testExpertRuns and testDenseTiles on the CPU.
func TestEmulatedTiles(t *testing.T) {
	t.Parallel()
	m, b, s := emulate(t, Options{}, 1)
	b.hopper = true
	testExpertTiles(t, m, b, s)
	testExpertRuns(t, m, b, s)
	testDenseTiles(t, m, b, s)
}

// TestEmulatedLayers runs layers whose kernels find what those in front write only once
// they have waited, on sequences here and there in turn: all bits are as without.
func TestEmulatedLayers(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		hopper                      bool
		multiprocessors, sequences  int
		model                       string
		d, intermediate, experts, k int
		method                      kernels.RouteMethod
		kernels                     []string // some of those that run
	}{
		{false, 3, 5, "small", 32, 64, 4, 2, kernels.SoftmaxRenorm, nil},
		{true, 3, 5, "small", 32, 64, 4, 2, kernels.SoftmaxRenorm, []string{"expert_up_64_routed_few", "expert_down_64_routed_few early"}},
		{true, 60, 8, "more pairs", 32, 64, 9, 9, kernels.SoftmaxRenorm, []string{"expert_up_64_few", "expert_down_64_few early"}},
		{true, 60, 5, "heads of 128", 128, 64, 4, 2, kernels.SoftmaxRenorm, []string{"rope_attention_128_wide"}},
		{true, 6, 5, "shared expert", 32, 64, 4, 2, kernels.Softmax, []string{"router_gate_up", "route_down", "expert_up_64_routed_few early", "expert_down_64_routed_few early"}},
		{true, 6, 12, "shared expert", 32, 64, 8, 4, kernels.Softmax, []string{"sixteen_router_gate_up", "sixteen_route_down"}},
		{true, 3, 24, "small", 32, 64, 16, 2, kernels.SoftmaxRenorm, []string{"route_sort", "expert_up_256_few", "expert_down_256_few early"}},
		{true, 3, 40, "small", 32, 64, 16, 2, kernels.SoftmaxRenorm, []string{"route", "runs"}},
		{true, 3, 30, "small", 32, 64, 4, 2, kernels.SoftmaxRenorm, []string{"route_sort", "expert_up_64"}},
		// Expert GEMMs that select their experts: gate/up routes, or runs beside what does.
		{true, 3, 1, "small", 32, 64, 4, 2, kernels.SoftmaxRenorm, []string{"expert_up_64_routed", "expert_down_64_routed early"}},
		{true, 6, 1, "shared expert", 32, 64, 8, 4, kernels.Softmax, []string{"route_down", "expert_up_64_routed early", "expert_down_64_routed early"}},
		{true, 6, 1, "shared expert", 32, 64, 4, 2, kernels.Softmax, []string{"route_down", "expert_up_alone_routed early", "expert_down_alone_routed early"}},
	} {
		m, b, s := emulate(t, Options{}, c.multiprocessors)
		hopper := c.hopper
		b.hopper, b.largeSmem = hopper, hopper
		model := &benchModel{c.model, 128, 4, 2, c.d, c.intermediate, c.experts, c.k, 64, c.method}
		r := b.run.(*simtRunner)
		r.work = b.work.Range(0, 1<<16)
		x := &bench{TB: t, m: m, b: b, s: s, random: rand.New(rand.NewPCG(1, 2)), exponent: 9}
		d := x.decoder(model, 2, c.sequences, 300)
		size := d.hidden.Bytes()
		in := x.act(c.sequences, 128)
		host, err := m.Alloc(device.Host, size, "hidden")
		if err != nil {
			t.Fatal(err)
		}
		run := func(b kernels.Backend, i int) []byte {
			hidden := device.Range{Addr: d.hidden.Addr, Bytes: size}
			if err := errors.Join(s.Copy(hidden, device.Range{Addr: in.Addr, Bytes: size}), d.goTo(s, i)); err != nil {
				t.Fatal(err)
			}
			if err := errors.Join(d.enqueue(b, s), s.Copy(host.Range(0, size), hidden), s.Synchronize(t.Context())); err != nil {
				t.Fatal(err)
			}
			return bytes.Clone(host.Read(0, size))
		}
		var want [2][]byte
		for i := range want {
			want[i] = run(b, i)
		}
		if bytes.Equal(want[0], want[1]) {
			t.Errorf("%s, sm_90a %v: here and there are the same", model.name, hopper)
		}
		r.launched = map[string]bool{}
		for i := range 4 {
			if !bytes.Equal(run(overlapping{b, r}, i%2), want[i%2]) {
				t.Errorf("%s, sm_90a %v, turn %d: kernels that overlap give other bits", model.name, hopper, i)
			}
			r.op = nil
		}
		for _, name := range c.kernels {
			if !r.launched[name] {
				t.Errorf("%s, %d sequences: no %s among %v", model.name, c.sequences, name, slices.Sorted(maps.Keys(r.launched)))
			}
		}
		x.free()
		if err := host.Free(); err != nil {
			t.Error(err)
		}
	}
}

// TestEmulated runs the conformance suite with kernels on the CPU, as on a small
// device and as on a large one, where grids and tiles are others, and with those for
// sm_90a. Before kernels wait, what others write is not there.
//
// Experts of other types than the activations have the same kernels for sm_90a as without, and those
// of float16 have the kernels of float32 with the conversion that matmul has: -full has them everywhere.
func TestEmulated(t *testing.T) {
	t.Parallel()
	bf16, f16, f32 := kernels.BF16, kernels.F16, kernels.F32
	for _, c := range []struct {
		name            string
		act             kernels.DType
		multiprocessors int
		invariant       bool
		hopper          bool
		only            string
		weights         []kernels.DType // default: all
		experts         []kernels.DType // default: weights
	}{
		// The longest first.
		{"bf16", bf16, 1, true, false, "", nil, []kernels.DType{bf16, f32}},
		{"bf16-sm_90a", bf16, 1, true, true, "", []kernels.DType{bf16, f32}, []kernels.DType{bf16}},
		{"f16-sm_90a", f16, 132, true, true, "", []kernels.DType{f16}, nil},
		{"f16", f16, 132, false, false, "", []kernels.DType{f16}, nil},
		{"f16-sm_90a-experts", f16, 132, false, true, "experts", []kernels.DType{f16}, nil},
		{"bf16-sm_90a-attention", bf16, 7, false, true, "attention", nil, nil},
		{"bf16-sm_90a-rope", bf16, 132, false, true, "rope_attention", []kernels.DType{bf16, f32}, nil},
		{"f16-sm_90a-rope", f16, 6, false, true, "rope_attention", []kernels.DType{f16}, nil},
		{"bf16-sm_90a-router", bf16, 132, false, true, "router_gate_up", []kernels.DType{bf16, f32}, nil},
		{"f16-sm_90a-router", f16, 24, false, true, "router_gate_up", []kernels.DType{f16}, nil},
		{"bf16-sm_90a-route", bf16, 132, false, true, "route_down", []kernels.DType{bf16, f32}, nil},
		{"f16-sm_90a-route", f16, 4, false, true, "route_down", []kernels.DType{f16}, nil},
		{"bf16-sm_90a-routed", bf16, 132, false, true, "route_expert_up", []kernels.DType{bf16}, nil},
		{"f16-sm_90a-routed", f16, 6, false, true, "route_expert_up", []kernels.DType{f16}, nil},
		{"bf16-sm_90a-experts", bf16, 3, false, true, "experts", []kernels.DType{bf16}, nil},
		{"bf16-sm_90a-matmul", bf16, 3, false, true, "matmul", []kernels.DType{bf16}, nil},
		{"f16-sm_90a-gated", f16, 3, false, true, "gated_matmul", []kernels.DType{f16}, nil},
	} {
		if *full {
			c.experts = nil
		}
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			kernelstest.Run(t, func(t *testing.T) (device.Machine, kernels.Backend, device.Stream) {
				m, b, s := emulate(t, Options{Activation: c.act, BatchInvariant: c.invariant}, c.multiprocessors)
				b.hopper, b.largeSmem = c.hopper, c.hopper
				r := b.run.(*simtRunner)
				r.work = b.work.Range(0, min(b.work.Bytes(), 1<<16))
				return m, overlapping{b, r}, s
			}, kernelstest.Options{BatchInvariant: c.invariant, Full: *full, Seed: *seed, Only: c.only, Weights: c.weights, ExpertWeights: c.experts})
		})
	}
}

// TestEmulatedArguments holds the structs of arguments to what a C++ compiler makes of
// the sources.
func TestEmulatedArguments(t *testing.T) {
	for _, half := range []bool{false, true} {
		checkArguments(t, simt.Arguments(half))
	}
}
