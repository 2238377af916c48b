package device_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/moeserve/moeserve/device"
)

func TestSpace(t *testing.T) {
	for i, want := range []string{"host", "gpu0", "gpu1"} {
		s := device.Space(i)
		if got := s.String(); got != want {
			t.Errorf("space %d is %q, want %q", i, got, want)
		}
		gpu, ok := s.GPU()
		if ok != (i > 0) || ok && device.HBM(gpu) != s {
			t.Errorf("space %q: GPU %d, %v", s, gpu, ok)
		}
	}
}

func TestRange(t *testing.T) {
	r := device.Range{Addr: 4096, Bytes: 100}
	if got, want := r.Slice(10, 20), (device.Range{Addr: 4106, Bytes: 20}); got != want {
		t.Errorf("slice %v, want %v", got, want)
	}
	if got := r.Slice(100, 0); got.Addr != r.End() || got.Bytes != 0 {
		t.Errorf("the empty slice at the end is %v", got)
	}
	if got := r.String(); got != "[0x1000,+100)" {
		t.Errorf("it prints as %q", got)
	}
	for _, c := range []struct{ off, n int64 }{{-1, 1}, {0, -1}, {0, 101}, {100, 1}, {1<<63 - 1, 1}, {1, 1<<63 - 1}} {
		t.Run(fmt.Sprint(c), func(t *testing.T) {
			defer func() {
				if recover() == nil {
					t.Errorf("[%d, +%d) of 100 bytes does not panic", c.off, c.n)
				}
			}()
			r.Slice(c.off, c.n)
		})
	}
}

func TestAlign(t *testing.T) {
	for n, want := range map[int64]int64{0: 0, 1: 256, 255: 256, 256: 256, 257: 512, 1<<62 + 1: 1<<62 + 256} {
		if got := device.Align(n); got != want {
			t.Errorf("%d bytes are rounded to %d, want %d", n, got, want)
		}
	}
}

func TestRegion(t *testing.T) {
	r := device.Region{Space: device.HBM(1), Range: device.Range{Addr: 4096, Bytes: 100}}
	if got, want := r.Slice(10, 20), (device.Region{Space: device.HBM(1), Range: device.Range{Addr: 4106, Bytes: 20}}); got != want {
		t.Errorf("slice %v, want %v", got, want)
	}
	if got := r.String(); got != "gpu1 [0x1000,+100)" {
		t.Errorf("it prints as %q", got)
	}
}

// counter is a fence that has a value, or an error for its waiters.
type counter struct {
	device.Fence
	value uint32
	err   error
}

func (c counter) Value() uint32                      { return c.value }
func (c counter) Wait(context.Context, uint32) error { return c.err }

// TestPoint: comparison is modulo 2^32.
func TestPoint(t *testing.T) {
	for _, c := range []struct {
		value, point uint32
		reached      bool
	}{
		{0, 0, true},
		{0, 1, false},
		{1, 1, true},
		{2, 1, true},
		{math.MaxUint32, 0, false},
		{0, math.MaxUint32, true},
		{5, math.MaxUint32 - 5, true},
		{math.MaxUint32 - 5, 5, false},
		{1<<31 - 1, 0, true},
		{1 << 31, 0, false},
	} {
		if got := (device.Point{Fence: counter{value: c.value}, Value: c.point}).Reached(); got != c.reached {
			t.Errorf("%d at %d: reached %v", c.point, c.value, got)
		}
		at, p := device.Point{Value: c.value}, device.Point{Value: c.point}
		if got := at.After(p); got != (c.reached && c.value != c.point) {
			t.Errorf("%d after %d: %v", c.value, c.point, got)
		}
	}
	if !(device.Point{}).None() || (device.Point{Fence: counter{}}).None() {
		t.Error("a point is none exactly where it has no fence")
	}
	if err := (device.Point{Fence: counter{err: io.EOF}}).Wait(t.Context()); !errors.Is(err, io.EOF) {
		t.Errorf("Wait returns %v", err)
	}
}

func TestError(t *testing.T) {
	for want, e := range map[string]*device.Error{
		"device: copy on gpu1: copy failed":                                  {Op: "copy", Space: device.HBM(1), Err: device.ErrCopyFailed},
		"device: alloc on host: 5 bytes requested: out of memory":            {Op: "alloc", Detail: "5 bytes requested", Err: device.ErrOutOfMemory},
		"device: launch on gpu0: gemm: CUDA_ERROR_ILLEGAL_ADDRESS (700)":     {Op: "launch", Space: device.HBM(0), Code: 700, Name: "CUDA_ERROR_ILLEGAL_ADDRESS", Detail: "gemm"},
		"device: launch on gpu0: CUDA_ERROR_DEVICE_UNAVAILABLE (46): closed": {Op: "launch", Space: device.HBM(0), Code: 46, Name: "CUDA_ERROR_DEVICE_UNAVAILABLE", Err: device.ErrClosed},
	} {
		if got := e.Error(); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	err := fmt.Errorf("experts: %w", &device.Error{Op: "copy", Err: fmt.Errorf("%w: %w", device.ErrLost, io.EOF)})
	var e *device.Error
	if !errors.Is(err, device.ErrLost) || !errors.Is(err, io.EOF) || !errors.As(err, &e) || e.Op != "copy" {
		t.Errorf("%v does not unwrap", err)
	}
}

func TestLostSpaces(t *testing.T) {
	lost := func(gpu int) error {
		return &device.Error{Op: "copy", Space: device.HBM(gpu), Err: device.ErrLost}
	}
	passedOn := &device.Error{Op: "wait", Space: device.HBM(0), Err: fmt.Errorf("fence: %w", lost(2))}
	for _, c := range []struct {
		err  error
		want []device.Space
	}{
		{nil, nil},
		{io.EOF, nil},
		{device.ErrLost, nil},
		{fmt.Errorf("step: %w", device.ErrLost), nil},
		{&device.Error{Op: "copy", Space: device.HBM(1), Err: device.ErrCopyFailed}, nil},
		{lost(1), []device.Space{device.HBM(1)}},
		{fmt.Errorf("step: %w", lost(1)), []device.Space{device.HBM(1)}},
		{passedOn, []device.Space{device.HBM(2)}},
		{errors.Join(io.EOF, lost(1), fmt.Errorf("%w, then %w", passedOn, lost(1))), []device.Space{device.HBM(1), device.HBM(2)}},
		{&device.Error{Op: "launch", Space: device.HBM(3), Err: errors.Join(io.EOF, device.ErrLost)}, []device.Space{device.HBM(3)}},
	} {
		if diff := cmp.Diff(c.want, device.LostSpaces(c.err)); diff != "" {
			t.Errorf("%v: %s", c.err, diff)
		}
	}
}

func TestTopology(t *testing.T) {
	top := &device.Topology{
		Host:  device.Info{Name: "host", MemoryBytes: 10},
		GPUs:  []device.Info{{Name: "a"}, {Name: "b"}},
		Paths: map[device.Pair]device.Path{{From: device.Host, To: device.HBM(1)}: {Links: []int{3}}},
	}
	if diff := cmp.Diff([]device.Space{device.Host, device.HBM(0), device.HBM(1)}, top.Spaces()); diff != "" {
		t.Error(diff)
	}
	for _, c := range []struct {
		space device.Space
		name  string
		ok    bool
	}{{device.Host, "host", true}, {device.HBM(1), "b", true}, {device.HBM(2), "", false}, {-1, "", false}} {
		if i, ok := top.Info(c.space); ok != c.ok || i.Name != c.name {
			t.Errorf("info of %d: %q, %v", c.space, i.Name, ok)
		}
	}
	if p, err := top.Path(device.Host, device.HBM(1)); err != nil || len(p.Links) != 1 {
		t.Errorf("path %+v, %v", p, err)
	}
	_, err := top.Path(device.HBM(1), device.Host)
	if !errors.Is(err, device.ErrUnreachable) || err.Error() != "device: from gpu1 to host: no path between these memory spaces" {
		t.Errorf("the way back: %v", err)
	}
}

func TestUsage(t *testing.T) {
	if got := (device.Usage{Capacity: 100, Allocated: 30, OtherProcesses: 90, Peak: 50}).Free(); got != -20 {
		t.Errorf("%d bytes free, want -20", got)
	}
}
