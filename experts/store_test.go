package experts

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"go.uber.org/goleak"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/experts/load"
	"github.com/moeserve/moeserve/harvest"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/transfer"
)

const rowMajor = kernels.RowMajor

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// packer is a backend's packing alone: row-major as the CPU has it, or, for any
// other tag, with the rows of all matrices in reverse order, which no byte range of
// a matrix survives.
type packer struct{ kernels.Backend }

// Enqueue makes the only operation of a store: a small copy, by the stream's copies.
func (packer) Enqueue(s device.Stream, op kernels.Op) error {
	c := op.(*kernels.Copy)
	if err := c.Check(); err != nil {
		return err
	}
	return s.Copy(c.Dst.Range(), c.Src.Range())
}

func (packer) PackExpert(l kernels.ExpertLayout, part kernels.Part, row int, src, dst []byte) error {
	width := load.RowBytes(l.ExpertShape, part)
	for len(src) > 0 {
		copy(dst[packedAt(l, part, row):], src[:width])
		src, row = src[width:], row+1
	}
	return nil
}

func packedAt(l kernels.ExpertLayout, part kernels.Part, row int) int {
	at := row * load.RowBytes(l.ExpertShape, part)
	for p := range part {
		at += load.Rows(l.ExpertShape, p) * load.RowBytes(l.ExpertShape, p)
	}
	if l.Tag == rowMajor {
		return at
	}
	return int(l.Bytes()) - at - load.RowBytes(l.ExpertShape, part)
}

// model is what a test's store holds.
type model struct {
	layers  []int
	experts int
	layout  kernels.ExpertLayout
}

func small(tag string) model {
	s := kernels.ExpertShape{Hidden: 6, Intermediate: 11, DType: kernels.BF16}
	return model{
		layers: []int{0, 1, 3, 4, 7}, experts: 6,
		layout: kernels.ExpertLayout{ExpertShape: s, Tag: tag, Size: 512},
	}
}

// row is the content of one row of an expert.
func (m model) row(layer, expert int, part kernels.Part, row int) []byte {
	rng := rand.New(rand.NewPCG(uint64(layer*1000+expert), uint64(int(part)*100_000+row)))
	b := make([]byte, load.RowBytes(m.layout.ExpertShape, part))
	for i := range b {
		b[i] = byte(rng.Uint32())
	}
	return b
}

// sum is the checksum of an expert as it lies in its extent.
func (m model) sum(layer, expert int) uint32 {
	extent := make([]byte, m.layout.Bytes())
	for part := kernels.W1; part <= kernels.W2; part++ {
		for r := range load.Rows(m.layout.ExpertShape, part) {
			copy(extent[packedAt(m.layout, part, r):], m.row(layer, expert, part, r))
		}
	}
	return crc32.ChecksumIEEE(extent)
}

// piece is one call of Expert.
type piece struct {
	layer, expert int
	part          kernels.Part
	row, n        int
}

// pieces cuts all matrices into runs of rows, in the order of fused checkpoints.
func (m model) pieces(rows int) []piece {
	var all []piece
	for _, l := range m.layers {
		for _, parts := range [][]kernels.Part{{kernels.W1, kernels.W3}, {kernels.W2}} {
			for e := range m.experts {
				for _, p := range parts {
					for r := 0; r < load.Rows(m.layout.ExpertShape, p); r += rows {
						all = append(all, piece{l, e, p, r, min(rows, load.Rows(m.layout.ExpertShape, p)-r)})
					}
				}
			}
		}
	}
	return all
}

func (m model) give(s *Store, p piece) error {
	var data []byte
	for r := range p.n {
		data = append(data, m.row(p.layer, p.expert, p.part, p.row+r)...)
	}
	return s.Expert(p.layer, p.expert, p.part, p.row, data)
}

// machine is one of four kinds: on the wall clock, and virtual with each schedule.
func machine(n uint64) emulated.Options {
	if n%4 == 3 {
		return emulated.Options{Seed: n}
	}
	return emulated.Options{Virtual: true, Schedule: emulated.Schedule(n % 4), Seed: n}
}

// rig is a machine with an engine and a compute stream.
type rig struct {
	*testing.T
	model   model
	m       *emulated.Machine
	engine  *transfer.Engine
	compute device.Executor
	// last is the latest step.
	last Step
	// harvest lends to the stores opened later, and is closed with the first.
	harvest *harvest.Runtime
	// events listens to the stores opened later.
	events EventListener
	// cpu is the share of the CPU in the stores opened later.
	cpu *CPUShare
}

func newRig(t *testing.T, m model, mo emulated.Options, chunk int64) *rig {
	t.Helper()
	mo.Check = true
	return newBareRig(t, m, mo, chunk)
}

// newBareRig makes one on just that machine.
func newBareRig(t *testing.T, m model, mo emulated.Options, chunk int64) *rig {
	t.Helper()
	em, err := emulated.New(mo)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := em.Close(); err != nil {
			t.Error(err)
		}
	})
	e, err := transfer.New(transfer.Options{Machine: em, ChunkBytes: chunk})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	})
	c, err := em.NewStream(device.HBM(0), device.StreamOptions{Name: "compute"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return &rig{T: t, model: m, m: em, engine: e, compute: c.(device.Executor)}
}

// open makes a store that is still empty.
func (r *rig) open(c Config) *Store {
	r.Helper()
	c.Layers, c.Experts, c.Layout = r.model.layers, r.model.experts, r.model.layout
	plan, err := NewPlan(c)
	if err != nil {
		r.Fatal(err)
	}
	s, err := New(Options{Machine: r.m, Space: device.HBM(0), Backend: packer{}, Transfer: r.engine, Harvest: r.harvest, Plan: plan, SplitBytes: 256, CPU: r.cpu, Events: r.events})
	if err != nil {
		r.Fatal(err)
	}
	r.Cleanup(func() {
		// Nothing of the compute stream may run; its error has been dealt with.
		_ = r.compute.Synchronize(context.Background())
		if r.harvest != nil {
			if err := r.harvest.Close(context.Background()); err != nil {
				r.Error(err)
			}
		}
		if err := s.Close(); err != nil {
			r.Error(err)
		}
	})
	return s
}

// fill loads and seals the store.
func (r *rig) fill(s *Store, rows int) {
	r.Helper()
	for _, p := range r.model.pieces(rows) {
		if err := r.model.give(s, p); err != nil {
			r.Fatal(err)
		}
	}
	if err := s.Seal(r.Context()); err != nil {
		r.Fatal(err)
	}
}

func (r *rig) placed(fraction float64) Placement {
	r.Helper()
	p, err := Place(len(r.model.layers), r.model.experts, fraction)
	if err != nil {
		r.Fatal(err)
	}
	return p
}

// at is the n bytes at an address of the emulated machine, which is one of this
// process outside of Go's heap.
func at(a device.Addr, n int64) []byte {
	return unsafe.Slice(*(**byte)(unsafe.Pointer(&a)), n)
}

// gemms stands for the expert GEMMs of one wave: it reads the list, the slot
// table and every listed expert, and notes each expert's checksum.
func (r *rig) gemms(table kernels.Tensor, w Wave, flops int64, seen map[int]uint32) error {
	return r.compute.Execute(device.Work{
		Name: "gemms", Reads: []device.Range{w.Experts.Range(), table.Range()}, Flops: flops,
		Run: func(a device.Access) error {
			list, slots := at(w.Experts.Addr, w.Experts.Bytes()), at(table.Addr, table.Bytes())
			for i := range w.Experts.Shape[0] {
				e := int(binary.NativeEndian.Uint32(list[4*i:]))
				extent := device.Range{Addr: device.Addr(binary.NativeEndian.Uint64(slots[8*e:])), Bytes: r.model.layout.Bytes()}
				a.Read(extent)
				if _, twice := seen[e]; twice {
					return fmt.Errorf("expert %d is in two waves", e)
				}
				seen[e] = crc32.ChecksumIEEE(at(extent.Addr, extent.Bytes))
			}
			return nil
		},
	})
}

// begin begins a step.
func (r *rig) begin(s *Store) Step {
	r.Helper()
	st, err := s.BeginStep(r.Context(), r.compute)
	r.ok(err)
	return st
}

// step runs one step as the pipeline does and returns each layer's checksums, or
// the error for which the step must be dropped.
func (r *rig) step(s *Store, prefetch bool, flops int64) ([]map[int]uint32, error) {
	st, err := s.BeginStep(r.Context(), r.compute)
	if err != nil {
		return nil, err
	}
	r.last = st
	out, err := r.enqueue(s, st, prefetch, flops)
	if err != nil {
		return nil, err
	}
	return out, r.end(st)
}

// end waits for a step.
func (r *rig) end(st Step) error {
	if err := r.compute.Synchronize(r.Context()); err != nil {
		return err
	}
	return st.End()
}

// drop drops the latest step, which failed.
func (r *rig) drop() {
	r.Helper()
	_ = r.compute.Recover(context.Background()) // the error is the one at hand
	r.ok(r.last.Drop(r.Context()))
}

// enqueue does not wait for the layers it enqueues; their checksums are there when the
// stream has passed them.
func (r *rig) enqueue(s *Store, st Step, prefetch bool, flops int64) ([]map[int]uint32, error) {
	out := make([]map[int]uint32, len(r.model.layers))
	for i, l := range r.model.layers {
		out[i] = map[int]uint32{}
		u, err := st.Layer(r.Context(), l)
		if err != nil {
			return nil, err
		}
		if prefetch {
			if err := st.Prefetch(s.plan.Next(l)); err != nil {
				return nil, err
			}
		}
		for _, w := range u.Waves {
			if err := waitFor(r.compute, w); err != nil {
				return nil, err
			}
			if err := r.gemms(u.Slots, w, flops*int64(w.Experts.Shape[0]), out[i]); err != nil {
				return nil, err
			}
		}
		if err := u.Release(); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// verify compares a step's checksums with the model.
func (r *rig) verify(out []map[int]uint32) {
	r.Helper()
	for i, l := range r.model.layers {
		if len(out[i]) != r.model.experts {
			r.Errorf("layer %d: %d of %d experts were computed", l, len(out[i]), r.model.experts)
		}
		for e, sum := range out[i] {
			if sum != r.model.sum(l, e) {
				r.Errorf("layer %d expert %d: wrong bytes", l, e)
			}
		}
	}
}

func (r *rig) steps(s *Store, n int, prefetch bool) {
	r.Helper()
	for range n {
		out, err := r.step(s, prefetch, 0)
		if err != nil {
			r.Fatal(err)
		}
		r.verify(out)
	}
}

// TestSameBytes: whatever lies where, every wave reads the right bytes.
func TestSameBytes(t *testing.T) {
	variant := 0
	for _, fraction := range []float64{0, 0.3, 0.5, 1} {
		for _, cacheSize := range []float64{1, 1.5, 2, 9} {
			for _, tag := range []string{rowMajor, "reversed"} {
				variant++
				if fraction == 0 && cacheSize > 1 {
					continue
				}
				o := machine(uint64(variant))
				t.Run(fmt.Sprintf("fraction=%v/cache=%v/%s/virtual=%t/%s", fraction, cacheSize, tag, o.Virtual, o.Schedule), func(t *testing.T) {
					r := newRig(t, small(tag), o, int64(100+variant*37))
					place := r.placed(fraction)
					s := r.open(Config{Placement: place, CacheSlots: int(cacheSize * float64(place.MaxPerLayer())), Waves: 1 + variant%4, StagingBytes: 1024})
					r.fill(s, 1+variant%5)
					r.steps(s, 3, variant%5 != 0)
					stats := s.Stats()
					opened := int64(3 * len(r.model.layers) * r.model.experts)
					if got := stats.Uses[Resident] + stats.Uses[Cached] + stats.Misses; got != opened {
						t.Errorf("%d hits and misses for %d experts: %+v", got, opened, stats)
					}
					misses := 3 * int64(place.Offloaded())
					if cacheSize == 9 { // everything stays
						misses = int64(place.Offloaded())
					}
					if stats.Misses != misses {
						t.Errorf("%d misses, want %d", stats.Misses, misses)
					}
					var counted int64
					for _, l := range s.Fetches() {
						for _, n := range l {
							counted += n
						}
					}
					if prefetched := stats.Fetched[Host] / r.model.layout.Size; prefetched != counted {
						t.Errorf("%d experts' bytes fetched, and %d experts counted", prefetched, counted)
					}
				})
			}
		}
	}
}

// TestPrefetchAhead: with an expert cache for two layers every fetch but the first layer's is
// submitted ahead, and a step takes as long as the slower of copies and compute.
func TestPrefetchAhead(t *testing.T) {
	m := small(rowMajor)
	m.layers = layerNumbers(16)
	// One layer: 3 missing experts of 512 bytes at 1 MB/s: 1.536 ms; 6 experts' work
	// of 200 us: 1.2 ms.
	o := emulated.Options{
		Virtual: true, HostLink: emulated.Link{BytesPerSecond: 1e6},
		GPUs: []emulated.GPU{{FlopsPerSecond: 1e6}},
	}
	r := newRig(t, m, o, 128)
	s := r.open(Config{Placement: r.placed(0.5)})
	r.fill(s, 11)
	took := func() time.Duration {
		began := r.m.Now()
		out, err := r.step(s, true, 200)
		if err != nil {
			t.Fatal(err)
		}
		r.verify(out)
		return r.m.Now() - began
	}
	took()
	if d, want := took(), 16*1536*time.Microsecond; d < want || d > want*102/100 {
		t.Errorf("a step takes %v, its copies %v", d, want)
	}
	if st := s.Stats(); st.Misses != 2*16*3 || st.Prefetched != st.Misses-3 {
		t.Errorf("%+v", st)
	}
}

// TestHostAhead: the layers are enqueued several times over before the device is waited for.
func TestHostAhead(t *testing.T) {
	for n := range uint64(4) {
		r := newRig(t, small(rowMajor), machine(n), 200)
		s := r.open(Config{Placement: r.placed(0.6), CacheSlots: 7})
		r.fill(s, 11)
		var steps [][]map[int]uint32
		st := r.begin(s)
		for range 5 {
			out, err := r.enqueue(s, st, true, 0)
			if err != nil {
				t.Fatal(err)
			}
			steps = append(steps, out)
		}
		r.ok(r.end(st))
		for _, out := range steps {
			r.verify(out)
		}
	}
}

// TestFailure: a fetch fails now and then; no step whose End succeeds has wrong
// bytes, and once it was dropped the next attempt goes on.
func TestFailure(t *testing.T) {
	for seed := range uint64(24) {
		o := machine(seed)
		t.Run(fmt.Sprintf("seed=%d/virtual=%t/%s", seed, o.Virtual, o.Schedule), func(t *testing.T) {
			r := newRig(t, small(rowMajor), o, 300)
			s := r.open(Config{Placement: r.placed(0.6), CacheSlots: []int{4, 6, 8, 30}[seed%4], Waves: 2})
			r.fill(s, 4)
			for i := range 4 {
				fault := r.m.Inject(&emulated.Fault{
					Kind: emulated.FailCopy, Times: 2, Skip: int(seed)%7 + i,
					Match: func(p emulated.Point) bool { return p.Label == "expert cache" },
				})
				for attempt := 0; ; attempt++ {
					out, err := r.step(s, true, 0)
					if err == nil {
						r.verify(out)
						break
					}
					if !errors.Is(err, device.ErrCopyFailed) {
						t.Fatalf("dropped for %v", err)
					}
					if attempt > 3 {
						t.Fatalf("%d attempts fail: %v", attempt, err)
					}
					if err := r.last.Prefetch(0); err == nil && r.last.End() != nil {
						t.Error("a failed step takes a Prefetch")
					}
					r.drop()
				}
				fault.Release()
			}
		})
	}
}

// TestFailedComputeCascades: a step fails by itself while fetches wait for its
// fences; Drop leaves nothing hanging.
func TestFailedComputeCascades(t *testing.T) {
	for _, virtual := range []bool{true, false} {
		r := newRig(t, small(rowMajor), emulated.Options{Virtual: virtual}, 300)
		s := r.open(Config{Placement: r.placed(0.5)})
		r.fill(s, 11)
		r.steps(s, 1, true)
		boom := errors.New("boom")
		st := r.begin(s)
		for i, l := range r.model.layers {
			u, err := st.Layer(t.Context(), l)
			if err != nil {
				t.Log(err) // the failure may have reached the store
				break
			}
			if i == 1 {
				if err := r.compute.Execute(device.Work{Name: "boom", Run: func(device.Access) error { return boom }}); err != nil {
					t.Fatal(err)
				}
			}
			if err := st.Prefetch(s.plan.Next(l)); err != nil {
				t.Log(err)
				break
			}
			for _, w := range u.Waves {
				if err := waitFor(r.compute, w); err != nil {
					t.Fatal(err)
				}
			}
			if err := u.Release(); err != nil {
				t.Fatal(err)
			}
		}
		if err := r.compute.Recover(t.Context()); !errors.Is(err, boom) {
			t.Errorf("the stream is in error %v", err)
		}
		r.ok(st.Drop(t.Context()))
		r.steps(s, 2, true)
	}
}

// TestLost: the GPU is lost in the middle of a step; nothing hangs and
// everything is freed.
func TestLost(t *testing.T) {
	for n := range uint64(4) {
		r := newRig(t, small(rowMajor), machine(n), 100)
		s := r.open(Config{Placement: r.placed(0.5)})
		r.fill(s, 11)
		stall := r.m.Inject(&emulated.Fault{Kind: emulated.StallCopy, Skip: 20, Match: func(p emulated.Point) bool { return p.Label == "expert cache" }})
		st := r.begin(s)
		if _, err := r.enqueue(s, st, true, 0); err != nil {
			t.Fatal(err)
		}
		if err := r.m.Lose(0); err != nil {
			t.Fatal(err)
		}
		stall.Release()
		if err := r.compute.Synchronize(t.Context()); !errors.Is(err, device.ErrLost) {
			t.Errorf("the step ends with %v", err)
		}
		r.ok(st.Drop(t.Context()))
		if _, err := r.step(s, true, 0); !errors.Is(err, device.ErrLost) {
			t.Errorf("the next step ends with %v", err)
		}
		if err := r.last.End(); !errors.Is(err, device.ErrLost) {
			t.Errorf("the store's error is %v", err)
		}
	}
}

// TestMissingRow: Seal names the first matrix that is incomplete.
func TestMissingRow(t *testing.T) {
	r := newRig(t, small(rowMajor), emulated.Options{Virtual: true}, 100)
	s := r.open(Config{Placement: r.placed(0.5)})
	for _, p := range r.model.pieces(2) {
		if p == (piece{3, 4, kernels.W3, 4, 2}) || p == (piece{7, 5, kernels.W2, 0, 2}) {
			continue
		}
		if err := r.model.give(s, p); err != nil {
			t.Fatal(err)
		}
	}
	const want = "experts: layer 3 expert 4: received only 9 of 11 rows of w3 (4 rows are missing in total)"
	if err := s.Seal(t.Context()); err == nil || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
}

// TestDeterministic: the same steps use the same slots and waves, however copies
// are timed.
func TestDeterministic(t *testing.T) {
	var want string
	for seed := range uint64(4) {
		o := emulated.Options{Virtual: true, Schedule: emulated.Random, Seed: seed}
		if seed == 0 {
			o = emulated.Options{}
		}
		r := newRig(t, small(rowMajor), o, 64<<seed)
		s := r.open(Config{Placement: r.placed(0.6), CacheSlots: 7, Waves: 2})
		r.fill(s, 5)
		var log strings.Builder
		for range 3 {
			st := r.begin(s)
			for _, l := range r.model.layers {
				u, err := st.Layer(t.Context(), l)
				if err != nil {
					t.Fatal(err)
				}
				if err := st.Prefetch(s.plan.Next(l)); err != nil {
					t.Fatal(err)
				}
				var slots []int
				for e := range r.model.experts {
					slots = append(slots, s.fetch.slot(ID{s.steps.position[l], e}))
				}
				fmt.Fprintln(&log, l, slots, len(u.Waves))
				for _, w := range u.Waves {
					fmt.Fprintln(&log, w.Experts, len(w.WaitFor))
					if err := waitFor(r.compute, w); err != nil {
						t.Fatal(err)
					}
				}
				if err := u.Release(); err != nil {
					t.Fatal(err)
				}
			}
			r.ok(r.end(st))
		}
		if want == "" {
			want = log.String()
		}
		if log.String() != want {
			t.Errorf("seed %d:\n%s\nwant\n%s", seed, log.String(), want)
		}
	}
}

// TestOneCopyPerWave: a wave's experts come in one copy from each memory, wherever they lie
// there and in the expert cache.
func TestOneCopyPerWave(t *testing.T) {
	r := newRig(t, small(rowMajor), emulated.Options{Virtual: true}, 1<<20)
	r.lend(func(o *harvest.Options) { o.Peers = o.Peers[:1] })
	s := r.open(Config{Placement: r.placed(1), CacheSlots: 8, Waves: 2})
	r.fill(s, 11)
	copies := func(from device.Space) int64 { return r.engine.Path(device.Pair{From: from, To: device.HBM(0)}).Copies }
	before := copies(device.Host)
	r.steps(s, 1, false)
	// Five layers of two waves of three; the eight slots of the expert cache wrap around within some.
	if n := copies(device.Host) - before; n != 10 {
		t.Errorf("%d copies from the host", n)
	}
	for i := range r.model.layers { // the first and the last expert of each wave, last first
		for _, e := range []int{5, 3, 2, 0} {
			r.promote(s, ID{i, e})
		}
	}
	r.steps(s, 1, false) // cached experts stay for this one
	before, peers := copies(device.Host), copies(device.HBM(1))
	r.steps(s, 1, false)
	if h, p := copies(device.Host)-before, copies(device.HBM(1))-peers; h != 10 || p != 10 {
		t.Errorf("%d copies from the host, %d from the peer", h, p)
	}
}

func TestResidency(t *testing.T) {
	r := newRig(t, small(rowMajor), emulated.Options{Virtual: true}, 1<<20)
	list, err := byLayer(5, 6, []ID{{0, 1}, {0, 4}, {2, 0}, {4, 5}})
	if err != nil {
		t.Fatal(err)
	}
	s := r.open(Config{Placement: list, CacheSlots: 3})
	show := func() string {
		var b strings.Builder
		for _, l := range s.Residency() {
			for _, tier := range l {
				b.WriteByte(tier.String()[0])
			}
			b.WriteByte(' ')
		}
		return b.String()
	}
	if got, want := show(), "rhrrhr rrrrrr hrrrrr rrrrrr rrrrrh "; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	r.fill(s, 11)
	r.steps(s, 1, true)
	// Three slots: what was fetched last is there, the next step's layer 0 included.
	if got, want := show(), "rcrrcr rrrrrr hrrrrr rrrrrr rrrrrc "; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

// TestLayers: a store that misses nothing is used as a whole, as layer by layer, also once
// the tables have been forgotten. One that misses something, or is in use, says so.
func TestLayers(t *testing.T) {
	for n := range uint64(4) {
		r := newRig(t, small(rowMajor), machine(n), 300)
		s := r.open(Config{Placement: r.placed(0)})
		r.fill(s, 11)
		whole := func() {
			t.Helper()
			st := r.begin(s)
			r.ok(st.UseAllLayers(t.Context()))
			var waves, all []map[int]uint32
			for i, l := range r.model.layers {
				u, err := st.ForCapture().Layer(t.Context(), l)
				r.ok(err)
				waves, all = append(waves, map[int]uint32{}), append(all, map[int]uint32{})
				r.ok(r.gemms(u.Slots, u.Waves[0], 0, waves[i]))
				r.ok(r.gemms(u.Slots, Wave{Experts: u.All}, 0, all[i]))
				r.ok(u.Release())
				if len(u.Waves) != 1 || len(u.Waves[0].WaitFor) != 0 {
					t.Errorf("layer %d has waves %+v", l, u.Waves)
				}
			}
			r.ok(r.end(st))
			r.verify(waves)
			r.verify(all)
		}
		whole()
		r.steps(s, 1, true)
		whole()
		// Drop forgets what the device's tables hold, and they may hold anything.
		junk, err := r.m.Alloc(device.Host, s.plan.TableBytes, "junk")
		r.ok(err)
		for i, b := 0, junk.Write(0, junk.Bytes()); i < len(b); i++ {
			b[i] = 0xa5
		}
		r.ok(r.begin(s).Drop(t.Context()))
		r.ok(r.compute.Copy(s.tables.memory.Range(0, junk.Bytes()), junk.Range(0, junk.Bytes())))
		whole()
		r.ok(junk.Free())
		if st := s.Stats(); st.Uses != ([tiers]int64{Resident: 4 * 5 * 6}) || st.Misses != 0 {
			t.Errorf("%+v", st)
		}
		for _, uses := range s.Uses() {
			if !slices.Equal(uses, []int64{4, 4, 4, 4, 4, 4}) {
				t.Errorf("uses %v", uses)
			}
		}
		st := r.begin(s)
		_, err = st.Layer(t.Context(), 3)
		r.ok(err)
		r.wants(st.UseAllLayers(t.Context()), "use layer 0: layer 3 is open")
		r.ok(st.Drop(t.Context()))
		whole()
		_, err = st.ForCapture().Layer(t.Context(), 2)
		r.wants(err, "layer 2: the layer has no experts")
	}
	r := newRig(t, small(rowMajor), emulated.Options{Virtual: true}, 300)
	s := r.open(Config{Placement: r.placed(0.5)})
	r.fill(s, 11)
	st := r.begin(s)
	r.wants(st.UseAllLayers(t.Context()), "use layer 0: 3 of its experts are not resident")
	_, err := st.ForCapture().Layer(t.Context(), 0)
	r.wants(err, "layer 0: 3 of its experts are not resident")
}

func (r *rig) wants(err error, text string) {
	r.Helper()
	if err == nil || !strings.Contains(err.Error(), text) {
		r.Errorf("got %v, want %q", err, text)
	}
}

func TestNext(t *testing.T) {
	p := Plan{Config: Config{Layers: []int{1, 3, 4}}}
	for layer, want := range map[int]int{0: 1, 1: 3, 2: 3, 3: 4, 4: 1, 9: 1} {
		if got := p.Next(layer); got != want {
			t.Errorf("after layer %d comes %d, want %d", layer, got, want)
		}
	}
	if got := (Plan{}).Next(0); got != -1 {
		t.Errorf("without experts comes %d", got)
	}
}

// TestProtocol: misuse of the step interface is an error that says what is wrong.
func TestProtocol(t *testing.T) {
	r := newRig(t, small(rowMajor), emulated.Options{Virtual: true}, 1<<20)
	s := r.open(Config{Placement: r.placed(1), CacheSlots: 6})
	_, err := s.BeginStep(t.Context(), r.compute)
	r.wants(err, "not sealed")
	r.wants(s.Seal(t.Context()), "layer 0 expert 0: received only 0 of 11 rows of w1 (840 rows are missing in total)")
	r.fill(s, 11)
	r.wants(s.Seal(t.Context()), "sealed")
	r.wants(r.model.give(s, piece{0, 0, 0, 0, 1}), "sealed")

	st := r.begin(s)
	_, err = s.BeginStep(t.Context(), r.compute)
	r.wants(err, "the previous step was neither ended nor dropped")
	_, err = st.Layer(t.Context(), 2)
	r.wants(err, "layer 2: the layer has no experts")
	r.wants(Use{}.Release(), "no layer was opened")
	_, err = Unrouted{}.FetchChosen(t.Context(), nil)
	r.wants(err, "no layer was opened")
	first, err := st.Layer(t.Context(), 0)
	r.ok(err)
	_, err = st.Layer(t.Context(), 1)
	r.wants(err, "open layer 1: layer 0 is open and must be released first")
	_, err = st.LayerUnrouted(t.Context(), 1)
	r.wants(err, "open layer 1: layer 0 is open and must be released first")
	r.wants(st.End(), "layer 0 is still open")
	r.ok(first.Release())
	r.wants(first.Release(), "the layer was released")
	r.ok(st.Prefetch(2)) // it has no experts
	r.ok(st.Prefetch(1))
	_, err = st.Layer(t.Context(), 3)
	r.wants(err, "all 6 slots of the expert cache are held by layers")

	open, err := st.LayerUnrouted(t.Context(), 1)
	r.ok(err)
	r.wants(first.Release(), "the layer was released")
	_, err = open.FetchChosen(t.Context(), []int32{6})
	r.wants(err, "layer 1: invalid expert 6: the layer has 6")
	use, err := open.FetchChosen(t.Context(), []int32{5, 1})
	r.ok(err)
	_, err = open.FetchChosen(t.Context(), []int32{5, 1})
	r.wants(err, "was already called")
	r.ok(use.Release())
	r.ok(r.end(st))

	r.wants(st.End(), "the step has ended")
	r.wants(st.Prefetch(0), "the step has ended")
	r.wants(st.PrefetchPredicted(0, nil), "the step has ended")
	_, err = st.Layer(t.Context(), 0)
	r.wants(err, "the step has ended")
	next := r.begin(s)
	r.wants(st.End(), "the step has ended")
	open, err = next.LayerUnrouted(t.Context(), 0)
	r.ok(err)
	r.ok(st.Drop(t.Context())) // of a step that is over: nothing happens
	_, err = open.FetchChosen(t.Context(), nil)
	r.ok(err)
	r.ok(next.Drop(t.Context()))
	_, err = open.FetchChosen(t.Context(), nil)
	r.wants(err, "the layer was released")
	r.ok(Step{}.Drop(t.Context()))
	r.steps(s, 1, true)
}

func TestBadRows(t *testing.T) {
	r := newRig(t, small(rowMajor), emulated.Options{Virtual: true}, 1<<20)
	s := r.open(Config{Placement: r.placed(0.5)})
	w1 := make([]byte, 12)
	for want, call := range map[string]func() error{
		"layer 2 expert 0: this layer has no experts": func() error { return s.Expert(2, 0, kernels.W1, 0, w1) },
		"the layer has 6 experts":                     func() error { return s.Expert(0, 6, kernels.W1, 0, w1) },
		"invalid part 3":                              func() error { return s.Expert(0, 0, 3, 0, w1) },
		"w1, which has 11 rows of 12 bytes":           func() error { return s.Expert(0, 0, kernels.W1, 11, w1) },
		"13 bytes from row 0":                         func() error { return s.Expert(0, 0, kernels.W1, 0, make([]byte, 13)) },
		"w2, which has 6 rows of 22 bytes":            func() error { return s.Expert(0, 0, kernels.W2, 5, make([]byte, 44)) },
		"row 1 of w3 was received twice": func() error {
			return errors.Join(s.Expert(0, 0, kernels.W3, 1, w1), s.Expert(0, 0, kernels.W3, 0, make([]byte, 24)))
		},
	} {
		if err := call(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want an error with %q", err, want)
		}
	}
}

// TestConcurrentFill: pieces in any order from several goroutines.
func TestConcurrentFill(t *testing.T) {
	for seed, tag := range []string{rowMajor, "reversed"} {
		for _, virtual := range []bool{true, false} {
			r := newRig(t, small(tag), emulated.Options{Virtual: virtual}, 200)
			s := r.open(Config{Placement: r.placed(0.4), StagingBytes: 1536})
			all := r.model.pieces(3)
			rand.New(rand.NewPCG(uint64(seed), 0)).Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
			var wg sync.WaitGroup
			for part := range slices.Chunk(all, len(all)/4+1) {
				wg.Go(func() {
					for _, p := range part {
						if err := r.model.give(s, p); err != nil {
							t.Error(err)
						}
					}
				})
			}
			wg.Wait()
			if err := s.Seal(t.Context()); err != nil {
				t.Fatal(err)
			}
			r.steps(s, 2, true)
		}
	}
}

// TestSealAfterFailedCopy: an expert whose copy failed does not arrive later, so Seal fails again.
func TestSealAfterFailedCopy(t *testing.T) {
	for _, tag := range []string{rowMajor, "reversed"} {
		r := newRig(t, small(tag), emulated.Options{Virtual: true}, 4096)
		s := r.open(Config{Placement: r.placed(0.5), StagingBytes: 64 << 10})
		for _, p := range r.model.pieces(11) {
			r.ok(r.model.give(s, p))
		}
		r.m.Inject(&emulated.Fault{Kind: emulated.FailCopy, Times: 2, Match: func(p emulated.Point) bool { return p.To == device.HBM(0) }})
		for try := range 2 {
			if err := s.Seal(t.Context()); !errors.Is(err, device.ErrCopyFailed) {
				t.Errorf("%s, call %d: %v", tag, try, err)
			}
		}
	}
}

// TestSealCanceled: a Seal that is aborted leaves copies in progress that Close
// waits for.
func TestSealCanceled(t *testing.T) {
	for n := range uint64(4) {
		for _, tag := range []string{rowMajor, "reversed"} {
			for _, label := range []string{"resident experts", "expert tables"} {
				t.Run(fmt.Sprintf("%d/%s/%s", n, tag, label), func(t *testing.T) {
					r := newRig(t, small(tag), machine(n), 100)
					s := r.open(Config{Placement: r.placed(0.5)})
					for _, p := range r.model.pieces(11) {
						if err := r.model.give(s, p); err != nil {
							t.Fatal(err)
						}
					}
					r.m.Inject(&emulated.Fault{Kind: emulated.StallCopy, Times: -1, For: 20 * time.Millisecond, Match: func(p emulated.Point) bool { return p.Label == label }})
					ctx, cancel := context.WithCancel(t.Context())
					cancel()
					if err := s.Seal(ctx); !errors.Is(err, context.Canceled) {
						t.Errorf("got %v", err)
					}
				})
			}
		}
	}
}

// TestNoData: on a machine that keeps no bytes the rows are checked and counted, and
// the fetches cost their time.
func TestNoData(t *testing.T) {
	o := emulated.Options{
		Virtual: true, NoData: true, HostLink: emulated.Link{BytesPerSecond: 1e6},
		Report: func(f emulated.Finding) {
			if f.Kind != emulated.Uninitialized {
				t.Error(f)
			}
		},
	}
	r := newRig(t, small("reversed"), o, 1<<20)
	place := r.placed(0.5)
	plan, err := NewPlan(Config{Layers: r.model.layers, Experts: r.model.experts, Layout: r.model.layout, Placement: place})
	if err != nil {
		t.Fatal(err)
	}
	s, err := New(Options{Machine: r.m, Space: device.HBM(0), Backend: packer{}, Transfer: r.engine, Plan: plan})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	if err := s.Seal(t.Context()); err == nil {
		t.Error("sealed without rows")
	}
	r.fill(s, 11)
	began := r.m.Now()
	if _, err := r.step(s, false, 0); err != nil {
		t.Fatal(err)
	}
	want := time.Duration(int64(place.Offloaded())*r.model.layout.Size) * time.Microsecond
	if d := r.m.Now() - began; d < want || d > want*11/10 {
		t.Errorf("a step takes %v, its copies %v", d, want)
	}
}

// TestOutOfMemory: what does not fit leaves nothing behind (the machine's Close
// lists what was not freed).
func TestOutOfMemory(t *testing.T) {
	m := small(rowMajor)
	for _, o := range []emulated.Options{
		{Virtual: true, GPUs: []emulated.GPU{{MemoryBytes: 4096}}},
		{Virtual: true, Host: emulated.GPU{MemoryBytes: 4096}},
		{Virtual: true, Host: emulated.GPU{MemoryBytes: 11_000}},
	} {
		r := newRig(t, m, o, 100)
		plan, err := NewPlan(Config{Layers: m.layers, Experts: m.experts, Layout: m.layout, Placement: r.placed(0.5)})
		if err != nil {
			t.Fatal(err)
		}
		_, err = New(Options{Machine: r.m, Space: device.HBM(0), Backend: packer{}, Transfer: r.engine, Plan: plan})
		if !errors.Is(err, device.ErrOutOfMemory) {
			t.Errorf("got %v", err)
		}
	}
}

// TestCloseUnsealed: a loading that is aborted frees everything.
func TestCloseUnsealed(t *testing.T) {
	r := newRig(t, small("reversed"), emulated.Options{Virtual: true}, 100)
	s := r.open(Config{Placement: r.placed(0.5)})
	for _, p := range r.model.pieces(4)[:60] {
		if err := r.model.give(s, p); err != nil {
			t.Fatal(err)
		}
	}
}

// TestHarness: the checksums of experts differ, so that TestSameBytes can fail.
func TestHarness(t *testing.T) {
	m, seen := small(rowMajor), map[uint32]bool{}
	for _, l := range m.layers {
		for e := range m.experts {
			seen[m.sum(l, e)] = true
		}
	}
	if len(seen) != len(m.layers)*m.experts {
		t.Errorf("%d checksums for %d experts", len(seen), len(m.layers)*m.experts)
	}
	a, b := make([]byte, 512), make([]byte, 512)
	row := m.row(0, 0, kernels.W2, 1)
	if err := (packer{}).PackExpert(m.layout, kernels.W2, 1, row, a); err != nil {
		t.Fatal(err)
	}
	m.layout.Tag = "reversed"
	if err := (packer{}).PackExpert(m.layout, kernels.W2, 1, row, b); err != nil {
		t.Fatal(err)
	}
	if bytes.Equal(a, b) {
		t.Error("both layouts put a row in the same place")
	}
}

// TestPrefetchIsRaised: what was prefetched goes before other prefetches once its layer is
// opened.
func TestPrefetchIsRaised(t *testing.T) {
	r := newRig(t, small(rowMajor), emulated.Options{Virtual: true, HostLink: emulated.Link{BytesPerSecond: 1e6}}, 512)
	s := r.open(Config{Placement: r.placed(1), CacheSlots: 3 * r.model.experts})
	r.fill(s, 11)
	st, err := s.BeginStep(t.Context(), r.compute)
	r.ok(err)
	later, now := r.model.layers[2], r.model.layers[1]
	r.ok(st.Prefetch(later))
	r.ok(st.Prefetch(now))
	begin := r.m.Now()
	use, err := st.Layer(t.Context(), now)
	r.ok(err)
	for _, w := range use.Waves {
		for _, p := range w.WaitFor {
			r.ok(p.Wait(t.Context()))
		}
	}
	// Copies that are under way go first.
	layer := time.Duration(float64(r.model.experts) * float64(r.model.layout.Size) / 1e6 * float64(time.Second))
	if took := r.m.Now() - begin; took < layer || took > layer*7/4 {
		t.Errorf("the layer's experts are there after %v, want little more than %v", took, layer)
	}
	r.ok(use.Release())
	r.ok(st.Drop(t.Context()))
}

// TestHalfRound: a row of the tables, or a slot, that was used last when the fence of closed
// layers was more than half of its range behind can be used again.
func TestHalfRound(t *testing.T) {
	// The checker remembers the signals of half a round ago, so it does not look.
	r := newBareRig(t, small(rowMajor), emulated.Options{Virtual: true}, 200)
	s := r.open(Config{Placement: r.placed(0.6), CacheSlots: 7})
	r.fill(s, 11)
	r.steps(s, 4, false)                                // 18 experts through 7 slots: rows change in every step
	for _, n := range []uint32{1 << 30, 1 << 30, 100} { // so many layers are closed and change no row
		s.tables.value += n
		r.ok(s.tables.done.Signal(s.tables.value))
	}
	r.steps(s, 4, false)
}

// waitFor lets a stream wait until a wave's experts have arrived.
func waitFor(s device.Stream, w Wave) error {
	for _, p := range w.WaitFor {
		if err := s.WaitFence(p.Fence, p.Value); err != nil {
			return err
		}
	}
	return nil
}
