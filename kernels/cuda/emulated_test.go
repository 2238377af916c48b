//go:build cuda && amd64

package cuda

import (
	"context"
	"errors"
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

// TestEmulated runs the conformance suite with kernels on the CPU, as on a small
// device and as on a large one, where grids and tiles are others.
func TestEmulated(t *testing.T) {
	for act, multiprocessors := range map[kernels.DType]int{kernels.BF16: 1, kernels.F16: 132} {
		t.Run(act.String(), func(t *testing.T) {
			t.Parallel()
			kernelstest.Run(t, func(t *testing.T) (device.Machine, kernels.Backend, device.Stream) {
				m, b, s := emulate(t, Options{Activation: act}, multiprocessors)
				return m, b, s
			}, kernelstest.Options{BatchInvariant: true, Full: *full, Seed: *seed})
		})
	}
}
