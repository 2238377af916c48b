package emulated

import (
	"errors"
	"testing"
	"time"

	"github.com/moeserve/moeserve/device"
)

// batchRig is a machine with a stream and memory of three pieces on each side.
func batchRig(t *testing.T, o Options) (m *Machine, s device.BatchCopier, dst, src device.Memory) {
	t.Helper()
	o.Virtual, o.Check = true, true
	m, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	st, err := m.NewStream(device.HBM(0), device.StreamOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if src, err = m.Alloc(device.Host, 300, "source"); err != nil {
		t.Fatal(err)
	}
	if dst, err = m.Alloc(device.HBM(0), 300, "destination"); err != nil {
		t.Fatal(err)
	}
	for i := range src.Write(0, 300) {
		src.Write(0, 300)[i] = byte(1 + i/100)
	}
	t.Cleanup(func() {
		for _, f := range []func() error{st.Close, src.Free, dst.Free, m.Close} {
			if err := f(); err != nil {
				t.Error(err)
			}
		}
	})
	return m, st.(device.BatchCopier), dst, src
}

// TestBatchOverlaps: copies of a batch must not depend on each other, as they run in any order.
func TestBatchOverlaps(t *testing.T) {
	_, s, dst, src := batchRig(t, Options{})
	for name, c := range map[string]struct {
		dst, src [2]device.Range
		ok       bool
	}{
		"apart":           {[2]device.Range{dst.Range(0, 100), dst.Range(100, 100)}, [2]device.Range{src.Range(0, 100), src.Range(100, 100)}, true},
		"one source":      {[2]device.Range{dst.Range(0, 100), dst.Range(100, 100)}, [2]device.Range{src.Range(0, 100), src.Range(50, 100)}, true},
		"one destination": {[2]device.Range{dst.Range(0, 100), dst.Range(99, 100)}, [2]device.Range{src.Range(0, 100), src.Range(100, 100)}, false},
	} {
		if err := s.CopyBatch(c.dst[:], c.src[:]); (err == nil) != c.ok {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := s.Synchronize(t.Context()); err != nil {
		t.Fatal(err)
	}
	// What one copy writes another one reads.
	if err := s.CopyBatch([]device.Range{dst.Range(200, 100), dst.Range(100, 50)}, []device.Range{dst.Range(0, 100), dst.Range(250, 50)}); err == nil {
		t.Error("a batch that reads what it writes is accepted")
	}
}

// TestBatchFails: a batch in which one copy fails puts the stream into error as a whole, and may be
// made again.
func TestBatchFails(t *testing.T) {
	m, s, dst, src := batchRig(t, Options{})
	m.Inject(&Fault{Kind: FailCopy, Skip: 1})
	var to, from []device.Range
	for i := range int64(3) {
		to, from = append(to, dst.Range(100*i, 100)), append(from, src.Range(100*i, 100))
	}
	if err := s.CopyBatch(to, from); err != nil {
		t.Fatal(err)
	}
	if err := s.Recover(t.Context()); !errors.Is(err, device.ErrCopyFailed) {
		t.Errorf("the stream is in error %v", err)
	}
	back, err := m.Alloc(device.Host, 300, "back")
	if err != nil {
		t.Fatal(err)
	}
	if err := s.CopyBatch(to, from); err != nil { // the fault has passed
		t.Fatal(err)
	}
	if err := s.Copy(back.Range(0, 300), dst.Range(0, 300)); err != nil {
		t.Fatal(err)
	}
	if err := s.Synchronize(t.Context()); err != nil {
		t.Fatal(err)
	}
	for i, b := range back.Read(0, 300) {
		if b != byte(1+i/100) {
			t.Fatalf("byte %d is %d", i, b)
		}
	}
	if err := back.Free(); err != nil {
		t.Error(err)
	}
}

// TestBatchTime: a batch has the latency of one copy, copies by themselves have one each.
func TestBatchTime(t *testing.T) {
	m, s, dst, src := batchRig(t, Options{HostLink: Link{BytesPerSecond: 1e6, Latency: time.Millisecond}})
	var to, from []device.Range
	for i := range int64(3) {
		to, from = append(to, dst.Range(100*i, 100)), append(from, src.Range(100*i, 100))
	}
	took := func(enqueue func() error) time.Duration {
		began := m.Now()
		if err := errors.Join(enqueue(), s.Synchronize(t.Context())); err != nil {
			t.Fatal(err)
		}
		return m.Now() - began
	}
	batch := took(func() error { return s.CopyBatch(to, from) })
	each := took(func() error {
		return errors.Join(s.Copy(to[0], from[0]), s.Copy(to[1], from[1]), s.Copy(to[2], from[2]))
	})
	if batch != 1300*time.Microsecond || each != 3300*time.Microsecond {
		t.Errorf("a batch of 3 copies takes %v, 3 copies %v", batch, each)
	}
}

// TestNoBatches: a machine may have none, and the stream goes on.
func TestNoBatches(t *testing.T) {
	_, s, dst, src := batchRig(t, Options{NoBatches: true})
	if err := s.CopyBatch([]device.Range{dst.Range(0, 100)}, []device.Range{src.Range(0, 100)}); !errors.Is(err, device.ErrNoBatches) {
		t.Errorf("CopyBatch returns %v", err)
	}
	if err := errors.Join(s.Copy(dst.Range(0, 100), src.Range(0, 100)), s.Synchronize(t.Context())); err != nil {
		t.Error(err)
	}
}
