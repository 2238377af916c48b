package emulated_test

import (
	"errors"
	"testing"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
)

// TestLikeCUDA: with LikeCUDA a GPU stream runs on behind a failed fence, until the host
// knows of the failure; otherwise it stops there.
func TestLikeCUDA(t *testing.T) {
	for _, lax := range []bool{false, true} {
		m, err := emulated.New(emulated.Options{Virtual: true, LikeCUDA: lax, Check: true})
		if err != nil {
			t.Fatal(err)
		}
		ok := func(err error) {
			t.Helper()
			if err != nil {
				t.Fatal(err)
			}
		}
		gpu, err := m.NewStream(device.HBM(0), device.StreamOptions{Name: "gpu"})
		ok(err)
		other, err := m.NewStream(device.HBM(0), device.StreamOptions{Name: "other"})
		ok(err)
		f, err := m.NewFence("in")
		ok(err)
		out, err := m.NewFence("out")
		ok(err)
		ev, err := m.NewEvent()
		ok(err)
		ran := 0
		work := device.Work{Name: "count", Run: func(device.Access) error { ran++; return nil }}
		cause := errors.New("the copy failed")
		ok(f.Fail(1, cause))
		ok(gpu.WaitFence(f, 1))
		ok(gpu.(device.Executor).Execute(work))
		ok(gpu.SignalFence(out, 1))
		ok(gpu.Record(ev))
		ok(other.Wait(ev))
		ok(other.(device.Executor).Execute(work))
		want := 0
		if lax {
			want = 2
		}
		if err := out.Wait(t.Context(), 1); lax == errors.Is(err, cause) {
			t.Errorf("lax %t: the fence behind the failed one: %v", lax, err)
		}
		for _, s := range []device.Stream{gpu, other} {
			if err := s.Synchronize(t.Context()); !errors.Is(err, cause) {
				t.Errorf("lax %t: %s: %v", lax, s.Name(), err)
			}
		}
		if err := ev.Synchronize(t.Context()); !errors.Is(err, cause) {
			t.Errorf("lax %t: the event: %v", lax, err)
		}
		// The host knows now.
		ok(gpu.(device.Executor).Execute(work))
		ok(gpu.SignalFence(out, 2))
		if err := out.Wait(t.Context(), 2); !errors.Is(err, cause) {
			t.Errorf("lax %t: a fence signaled after the failure was detected: %v", lax, err)
		}
		if ran != want {
			t.Errorf("lax %t: %d works ran, want %d", lax, ran, want)
		}
		for _, s := range []device.Stream{gpu, other} {
			if err := s.Recover(t.Context()); !errors.Is(err, cause) {
				t.Errorf("lax %t: recover %s: %v", lax, s.Name(), err)
			}
			ok(s.(device.Executor).Execute(work))
			ok(s.Synchronize(t.Context()))
		}
		if ran != want+2 {
			t.Errorf("lax %t: %d works ran after recovery", lax, ran-want)
		}
		ok(m.Close())
	}
}

// TestLostGPUHasNoUsage: as on CUDA, there is no reading of a lost GPU.
func TestLostGPUHasNoUsage(t *testing.T) {
	m, err := emulated.New(emulated.Options{Virtual: true})
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Lose(1); err != nil {
		t.Fatal(err)
	}
	if _, err := m.Usage(device.HBM(1)); !errors.Is(err, device.ErrLost) {
		t.Errorf("usage of a lost GPU: %v", err)
	}
	if _, err := m.Usage(device.HBM(2)); err != nil {
		t.Errorf("usage of another one: %v", err)
	}
	if err := m.Close(); err != nil {
		t.Error(err)
	}
}

// TestTimesFail: with TimeFailures times of events of GPU streams fail now and then, and
// others never.
func TestTimesFail(t *testing.T) {
	m, err := emulated.New(emulated.Options{Virtual: true, TimeFailures: 0.5})
	if err != nil {
		t.Fatal(err)
	}
	for _, space := range []device.Space{device.Host, device.HBM(0)} {
		s, err := m.NewStream(space, device.StreamOptions{})
		if err != nil {
			t.Fatal(err)
		}
		ev, err := m.NewEvent()
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(s.Record(ev), s.Synchronize(t.Context())); err != nil {
			t.Fatal(err)
		}
		failed := 0
		for range 100 {
			if _, err := ev.Time(); err != nil {
				failed++
			}
		}
		if gpu := space != device.Host; gpu != (failed > 20 && failed < 80) || !gpu && failed > 0 {
			t.Errorf("%d of 100 times failed on %s", failed, space)
		}
	}
	if err := m.Close(); err != nil {
		t.Error(err)
	}
}
