//go:build cuda

package experts

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"slices"
	"testing"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/cuda"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/transfer"
)

// gpuRig is a rig on a GPU, whose streams run no Go: what lies in a slot is copied
// back to be looked at.
type gpuRig struct {
	*testing.T
	model   model
	m       device.Machine
	compute device.Stream
	back    device.Memory
}

func (r *gpuRig) ok(err error) {
	r.Helper()
	if err != nil {
		r.Fatal(err)
	}
}

// read returns what lies in device memory once the compute stream gets there.
func (r *gpuRig) read(src device.Range) []byte {
	r.Helper()
	r.ok(r.compute.Copy(r.back.Range(0, src.Bytes), src))
	r.ok(r.compute.Synchronize(r.Context()))
	return slices.Clone(r.back.Read(0, src.Bytes))
}

// step runs one step as the pipeline does and looks at every expert of every wave.
func (r *gpuRig) step(s *Store) {
	r.Helper()
	st, err := s.BeginStep(r.Context(), r.compute)
	r.ok(err)
	for _, l := range r.model.layers {
		u, err := st.Layer(r.Context(), l)
		r.ok(err)
		r.ok(st.Prefetch(s.plan.Next(l)))
		seen := 0
		for _, w := range u.Waves {
			r.ok(waitFor(r.compute, w))
			list, slots := r.read(w.Experts.Range()), r.read(u.Slots.Range())
			for i := range w.Experts.Shape[0] {
				e := int(binary.NativeEndian.Uint32(list[4*i:]))
				extent := device.Range{Addr: device.Addr(binary.NativeEndian.Uint64(slots[8*e:])), Bytes: r.model.layout.Bytes()}
				if sum := crc32.ChecksumIEEE(r.read(extent)); sum != r.model.sum(l, e) {
					r.Errorf("layer %d expert %d: wrong bytes", l, e)
				}
				seen++
			}
		}
		if seen != r.model.experts {
			r.Errorf("layer %d: %d of %d experts are in waves", l, seen, r.model.experts)
		}
		r.ok(u.Release())
	}
	r.ok(st.End())
}

// TestGPUSameBytes: on a GPU too, every wave finds the right bytes, whatever lies
// where: experts of 132 bytes in slots of 512, and of 3 MiB.
func TestGPUSameBytes(t *testing.T) {
	large := small(rowMajor)
	large.layout.ExpertShape = kernels.ExpertShape{Hidden: 1024, Intermediate: 512, DType: kernels.BF16}
	large.layout.Size = large.layout.Bytes()
	for name, m := range map[string]model{"small": small("reversed"), "large": large} {
		for _, fraction := range []float64{0, 0.3, 1} {
			for _, cacheSize := range []float64{1, 2} {
				t.Run(fmt.Sprintf("%s/fraction=%v/cache=%v", name, fraction, cacheSize), func(t *testing.T) {
					machine, err := cuda.Open(cuda.Options{})
					if errors.Is(err, cuda.ErrUnavailable) && os.Getenv("MOESERVE_CUDA_TEST") != "gpu" {
						t.Skip(err)
					}
					r := &gpuRig{T: t, model: m, m: machine}
					r.ok(err)
					defer func() { r.ok(machine.Close()) }()
					engine, err := transfer.New(transfer.Options{Machine: machine, ChunkBytes: 1 << 20})
					r.ok(err)
					defer func() { r.ok(engine.Close()) }()
					r.compute, err = machine.NewStream(device.HBM(0), device.StreamOptions{Name: "compute"})
					r.ok(err)
					defer func() { r.ok(r.compute.Close()) }()
					r.back, err = machine.Alloc(device.Host, max(m.layout.Size, 4096), "read back")
					r.ok(err)
					defer func() { r.ok(r.back.Free()) }()
					place, err := Place(len(m.layers), m.experts, fraction)
					r.ok(err)
					plan, err := NewPlan(Config{
						Layers: m.layers, Experts: m.experts, Layout: m.layout, Placement: place,
						CacheSlots: int(cacheSize * float64(place.MaxPerLayer())), Waves: 2,
					})
					r.ok(err)
					s, err := New(Options{Machine: machine, Space: device.HBM(0), Backend: packer{}, Transfer: engine, Plan: plan})
					r.ok(err)
					defer func() { r.ok(s.Close()) }()
					for _, p := range m.pieces(97) {
						r.ok(m.give(s, p))
					}
					r.ok(s.Seal(t.Context()))
					for range 3 {
						r.step(s)
					}
				})
			}
		}
	}
}
