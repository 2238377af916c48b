package transfer_test

import (
	"testing"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/transfer"
)

// dueMachine notes when the chunks that a host stream watches were due, and when they have landed.
type dueMachine struct {
	device.Machine
	// notice is how much later than that the stream learns of it.
	notice time.Duration
	all    []dueChunk
}

// dueChunk is a chunk that landed so long after it was due; told: that was known.
type dueChunk struct {
	after time.Duration
	told  bool
}

type dueStream struct {
	device.Watcher
	m *dueMachine
}

func (m *dueMachine) NewStream(space device.Space, o device.StreamOptions) (device.Stream, error) {
	s, err := m.Machine.NewStream(space, o)
	if w, ok := s.(device.Watcher); ok && err == nil && space == device.Host {
		return &dueStream{w, m}, nil
	}
	return s, err
}

func (s *dueStream) noted(w device.Work) device.Work {
	run, due := w.Run, w.Due
	if due == nil {
		return w
	}
	w.Run = func(a device.Access) error {
		at, landed := time.Duration(due.NotBefore.Load()), s.m.Now()-s.m.notice
		s.m.all = append(s.m.all, dueChunk{landed - at, at > 0})
		due.Pending.Store(int64(landed - 1)) // it looks all the time
		return run(a)
	}
	return w
}

func (s *dueStream) Watch(p device.Point, w device.Work) (bool, error) {
	return s.Watcher.Watch(p, s.noted(w))
}

func (s *dueStream) WatchEvent(e device.Event, w device.Work) (bool, error) {
	return s.Watcher.WatchEvent(e, s.noted(w))
}

// TestDue: behind the first one, chunks of PCIe links and large ones of others are due shortly before they land,
// and never after that, whatever is copied beside them. When small ones and those from relays to other GPUs are, is not known.
func TestDue(t *testing.T) {
	const (
		large  = 256 << 20
		notice = 2 * time.Microsecond
	)
	for _, c := range []struct {
		name     string
		from, to device.Space
		bytes    int64
		relays   bool
		// told is the fraction of chunks that are due at a known time, at least or at most.
		least, most float64
		early       time.Duration
	}{
		{"from the host", device.Host, device.HBM(0), large, false, 0.96, 1, 25 * time.Microsecond},
		{"to the host", device.HBM(0), device.Host, large, false, 0.96, 1, 25 * time.Microsecond},
		{"between GPUs", device.HBM(1), device.HBM(0), large, false, 0.8, 1, 25 * time.Microsecond},
		{"over relays", device.Host, device.HBM(0), large, true, 0.4, 0.7, 60 * time.Microsecond},
		{"small", device.Host, device.HBM(0), 1 << 20, false, 0, 0, 0},
		{"small between GPUs", device.HBM(1), device.HBM(0), 16 << 20, false, 0, 0, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			o := emulated.Options{
				Virtual: true, NoData: true, NoticeLatency: notice, Report: func(emulated.Finding) {},
				HostLink: emulated.Link{BytesPerSecond: 55e9}, PeerLink: emulated.Link{BytesPerSecond: 400e9},
			}
			inner, err := emulated.New(o)
			if err != nil {
				t.Fatal(err)
			}
			m := &dueMachine{Machine: inner, notice: notice}
			r := rigOn(t, inner, m, transfer.Options{})
			src, dst := r.alloc(c.from, c.bytes), r.alloc(c.to, c.bytes)
			if c.relays {
				r.relay(device.HBM(1), 3, 8<<20)
				r.relay(device.HBM(2), 3, 8<<20)
			}
			r.wait(r.submit(transfer.Request{Src: src.Region(0, c.bytes), Dst: dst.Region(0, c.bytes), Priority: transfer.Demand, Done: r.point()}))
			told := 0
			for _, chunk := range m.all {
				if chunk.told {
					told++
				}
				if chunk.told && (chunk.after < 0 || chunk.after > c.early) {
					t.Errorf("a chunk landed %v after it was due, want at most %v", chunk.after, c.early)
				}
			}
			if part := float64(told) / float64(len(m.all)); len(m.all) == 0 || part < c.least || part > c.most {
				t.Errorf("it is known of %d of %d chunks when they were due, want %v to %v", told, len(m.all), c.least, c.most)
			}
		})
	}
}
