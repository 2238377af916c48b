package load

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"unsafe"

	"go.uber.org/goleak"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/transfer"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// reversed packs the rows of all matrices in reverse order, which no byte range of a
// matrix survives.
type reversed struct{}

func (reversed) PackExpert(l kernels.ExpertLayout, part kernels.Part, row int, src, dst []byte) error {
	for width := RowBytes(l.ExpertShape, part); len(src) > 0; src, row = src[width:], row+1 {
		at := row * width
		for p := range part {
			at += Rows(l.ExpertShape, p) * RowBytes(l.ExpertShape, p)
		}
		copy(dst[int(l.Bytes())-at-width:], src[:width])
	}
	return nil
}

var shape = kernels.ExpertShape{Hidden: 6, Intermediate: 11, DType: kernels.BF16}

const (
	experts    = 4
	extentSize = 512
)

// rig is a loader of two layers, 3 and 5, whose experts with an even number go to a device
// and whose others go to host memory.
type rig struct {
	*testing.T
	l            *Loader
	device, host device.Memory
}

func newRig(t *testing.T, tag string, staging int64) *rig {
	r := &rig{T: t}
	m, err := emulated.New(emulated.Options{Virtual: true, Check: true})
	r.ok(err)
	e, err := transfer.New(transfer.Options{Machine: m, ChunkBytes: 100})
	r.ok(err)
	r.device, err = m.Alloc(device.HBM(0), 2*experts*extentSize, "device")
	r.ok(err)
	r.host, err = m.Alloc(device.Host, 2*experts*extentSize, "host")
	r.ok(err)
	layout := kernels.ExpertLayout{ExpertShape: shape, Tag: tag, Size: extentSize}
	r.l, err = New(Options{
		Machine: m, Transfer: e, Packer: reversed{}, Layout: layout, Layers: []int{3, 5}, Experts: experts,
		StagingBytes: StagingBytes(layout, staging),
	}, r.place)
	r.ok(err)
	t.Cleanup(func() { r.ok(errors.Join(r.l.Close(), r.device.Free(), r.host.Free(), e.Close(), m.Close())) })
	return r
}

func (r *rig) ok(err error) {
	r.Helper()
	if err != nil {
		r.Fatal(err)
	}
}

func (r *rig) place(layer, expert int) Place {
	p := Place{Memory: r.device, Offset: int64(layer*experts+expert) * extentSize}
	if expert%2 == 1 {
		p.Memory = r.host
	}
	return p
}

func row(layer, expert int, part kernels.Part, row int) []byte {
	rng := rand.New(rand.NewPCG(uint64(layer*1000+expert), uint64(int(part)*100_000+row)))
	b := make([]byte, RowBytes(shape, part))
	for i := range b {
		b[i] = byte(rng.Uint32())
	}
	return b
}

// give hands in one row.
func (r *rig) give(layer, expert int, part kernels.Part, n int) error {
	return r.l.Rows(layer, expert, part, n, row(layer, expert, part, n))
}

type oneRow struct {
	layer, expert int
	part          kernels.Part
	row           int
}

func rows() (all []oneRow) {
	for _, layer := range []int{3, 5} {
		for part := kernels.W1; part <= kernels.W2; part++ {
			for expert := range experts {
				for n := range Rows(shape, part) {
					all = append(all, oneRow{layer, expert, part, n})
				}
			}
		}
	}
	return all
}

// TestPlaces: rows in any order, from several goroutines, end at their places, however
// few the buffers are.
func TestPlaces(t *testing.T) {
	for tag, layout := range map[string]kernels.ExpertLayout{
		"row-major": {ExpertShape: shape, Tag: kernels.RowMajor}, "reversed": {ExpertShape: shape, Tag: "reversed"},
	} {
		t.Run(tag, func(t *testing.T) {
			r := newRig(t, layout.Tag, 1024)
			all := rows()
			rand.New(rand.NewPCG(1, 2)).Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
			var wg sync.WaitGroup
			for part := range 4 {
				wg.Go(func() {
					for i := part; i < len(all); i += 4 {
						if p := all[i]; r.give(p.layer, p.expert, p.part, p.row) != nil {
							t.Errorf("%+v: %v", p, r.give(p.layer, p.expert, p.part, p.row))
						}
					}
				})
			}
			wg.Wait()
			r.ok(r.l.Finish(t.Context()))
			r.ok(r.l.Finish(t.Context()))
			for position, layer := range []int{3, 5} {
				for expert := range experts {
					want := make([]byte, layout.Bytes())
					at := 0
					for part := kernels.W1; part <= kernels.W2; part++ {
						for n := range Rows(shape, part) {
							b := row(layer, expert, part, n)
							if layout.Tag == kernels.RowMajor && expert%2 == 0 {
								copy(want[at:], b)
							} else {
								copy(want[len(want)-at-len(b):], b)
							}
							at += len(b)
						}
					}
					p := r.place(position, expert)
					a := p.Memory.Range(p.Offset, int64(len(want))).Addr
					if got := unsafe.Slice(*(**byte)(unsafe.Pointer(&a)), len(want)); !bytes.Equal(got, want) {
						t.Errorf("layer %d expert %d: wrong bytes", layer, expert)
					}
				}
			}
		})
	}
}

// TestCoverage: a row that is missing, comes twice or is none is an error.
func TestCoverage(t *testing.T) {
	r := newRig(t, kernels.RowMajor, 0)
	for _, p := range rows() {
		if p != (oneRow{5, 2, kernels.W3, 7}) {
			r.ok(r.give(p.layer, p.expert, p.part, p.row))
		}
	}
	const want = "layer 5 expert 2: received only 10 of 11 rows of w3 (1 rows are missing in total)"
	if err := r.l.Finish(t.Context()); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("got %v, want %s", err, want)
	}
	for want, err := range map[string]error{
		"row 6 of w3 was received twice": r.give(5, 2, kernels.W3, 6),
		"this layer has no experts":      r.give(4, 2, kernels.W3, 7),
		"the layer has 4 experts":        r.give(5, 4, kernels.W3, 7),
		"invalid part 3":                 r.l.Rows(5, 2, 3, 0, nil),
		"w3, which has 11 rows":          r.give(5, 2, kernels.W3, 11),
	} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %s", err, want)
		}
	}
	r.ok(r.give(5, 2, kernels.W3, 7))
	r.ok(r.l.Finish(t.Context()))
}

// TestStagingKeepsOrder: while an expert is on its way from staging memory to its
// place, more of it waits: it would be brought back before it is there.
func TestStagingKeepsOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, "reversed", 2*extentSize)
		x, of := r.l.staging.(*extents), id{1, 0}
		x.mu.Lock()
		x.storing[of] = true
		x.mu.Unlock()
		took := false
		go func() {
			if err := r.give(5, 0, kernels.W3, 2); err != nil {
				t.Error(err)
			}
			x.mu.Lock()
			took = true
			x.mu.Unlock()
		}()
		synctest.Wait()
		x.mu.Lock()
		if took || x.find(of) != nil {
			t.Error("an expert on its way to its place was taken up again")
		}
		delete(x.storing, of)
		x.changed.Broadcast()
		x.mu.Unlock()
		synctest.Wait()
		if !took {
			t.Error("an expert that is in its place is not taken up")
		}
	})
}

// TestStagingBytes: whole extents where a layout is the backend's own, whole aligned
// buffers otherwise.
func TestStagingBytes(t *testing.T) {
	plain := kernels.ExpertLayout{ExpertShape: shape, Tag: kernels.RowMajor, Size: extentSize}
	own := plain
	own.Tag = "own"
	for _, c := range []struct {
		l           kernels.ExpertLayout
		about, want int64
	}{{plain, 0, 16 << 20}, {plain, 1, 1024}, {plain, 5000, 4096}, {own, 0, 2 * extentSize}, {own, 5 * extentSize, 5 * extentSize}} {
		if got := StagingBytes(c.l, c.about); got != c.want {
			t.Errorf("about %d: %d, want %d", c.about, got, c.want)
		}
	}
}
