//go:build cuda && amd64

package cuda

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/kernels/cuda/internal/simt"
	"github.com/moeserve/moeserve/kernels/kernelstest"
)

// simtRunner runs kernels on the CPU, on a device of an emulated machine.
type simtRunner struct {
	half bool
	seed uint64
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
	return s.(hidden).executor.Execute(device.Work{Name: kernel.name, Run: func(device.Access) error {
		return simt.Launch(r.half, kernel.name, copied, [3]int{g.x, g.y, g.z}, g.threads, g.shared, seed)
	}})
}

func (r *simtRunner) matmul(device.Stream, device.Range, *libraryProduct) (bool, error) {
	return false, nil
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
		{&op.Temperature, kernels.F32, one}, {&op.Seeds, kernels.U64, make([]byte, 8)}, {&op.Samples, kernels.I32, make([]byte, 4)},
		{&op.TopK, kernels.I32, []byte{1, 0, 0, 0}}, {&op.Out, kernels.I32, make([]byte, 4)}, {&op.Positions, kernels.I32, make([]byte, 4)},
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

// TestEmulatedFewRows holds products of few rows with deep rings to the bits of those
// with shallow ones, which the conformance suite checks: the order of sums is the same.
func TestEmulatedFewRows(t *testing.T) {
	m, b, s := emulate(t, Options{}, 3)
	random := rand.New(rand.NewPCG(1, 2))
	for _, c := range []struct{ rows, columns, inner int }{
		{1, 1, 8}, {1, 16, 64}, {2, 100, 1000}, {3, 49, 1024}, {5, 130, 3080}, {8, 200, 5632}, {1, 96, 8200}, {8, 17, 72},
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
				kernels.FillDummy(host.Write(0, to.Bytes()), kernels.BF16, random.Uint64(), "product", 0, 7)
			}
			if err := s.Copy(mem.Range(0, to.Bytes()), host.Range(0, to.Bytes())); err != nil {
				t.Fatal(err)
			}
		}
		out, host, n := mems[4], mems[5], op.Out.Bytes()
		var got [2][]byte
		for i := range got {
			b.deep = i == 1
			copy(host.Write(0, n), bytes.Repeat([]byte{0xff}, int(n)))
			err := errors.Join(s.Copy(out.Range(0, n), host.Range(0, n)), b.Enqueue(s, &op), s.Copy(host.Range(0, n), out.Range(0, n)), s.Synchronize(t.Context()))
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

// TestEmulated runs the conformance suite with kernels on the CPU, as on a small
// device and as on a large one, where grids and tiles are others.
func TestEmulated(t *testing.T) {
	for _, c := range []struct {
		act             kernels.DType
		multiprocessors int
		invariant       bool
	}{{kernels.BF16, 1, true}, {kernels.F16, 132, false}} {
		t.Run(c.act.String(), func(t *testing.T) {
			t.Parallel()
			kernelstest.Run(t, func(t *testing.T) (device.Machine, kernels.Backend, device.Stream) {
				m, b, s := emulate(t, Options{Activation: c.act, BatchInvariant: c.invariant}, c.multiprocessors)
				return m, b, s
			}, kernelstest.Options{BatchInvariant: c.invariant, Full: *full, Seed: *seed})
		})
	}
}
