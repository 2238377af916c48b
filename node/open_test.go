package node_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/node/fault"
	"github.com/moeserve/moeserve/tools/racedetector"
)

var errRefused = errors.New("refused by the test")

// stingy is a machine that refuses one resource: memory, a stream, an event or a fence; the
// n-th, counted from 1, or the first with a name.
type stingy struct {
	device.Machine
	virtual bool
	n       int
	name    string

	mu    sync.Mutex
	asked int
	names map[string]bool
	what  string // that was refused
}

func (s *stingy) refuses(what string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	first := !s.names[what]
	if s.names == nil {
		s.names = map[string]bool{}
	}
	s.names[what] = true
	if s.asked++; s.asked == s.n || first && what == s.name {
		s.what = what
		return &device.Error{Op: "refuse", Detail: what, Err: errRefused}
	}
	return nil
}

func (s *stingy) Alloc(space device.Space, bytes int64, label string) (device.Memory, error) {
	if err := s.refuses(label); err != nil {
		return nil, err
	}
	return s.Machine.Alloc(space, bytes, label)
}

func (s *stingy) NewStream(space device.Space, o device.StreamOptions) (device.Stream, error) {
	if err := s.refuses("stream " + o.Name); err != nil {
		return nil, err
	}
	return s.Machine.NewStream(space, o)
}

func (s *stingy) NewEvent() (device.Event, error) {
	if err := s.refuses("event"); err != nil {
		return nil, err
	}
	return s.Machine.NewEvent()
}

func (s *stingy) NewUntimedEvent() (device.Event, error) {
	if err := s.refuses("event"); err != nil {
		return nil, err
	}
	return s.Machine.NewUntimedEvent()
}

func (s *stingy) NewFence(label string) (device.Fence, error) {
	if err := s.refuses("fence " + label); err != nil {
		return nil, err
	}
	return s.Machine.NewFence(label)
}

// TestOpenRefused refuses, one after the other, each resource that Open requests from the
// machine. Open returns that error and releases everything: closing the machine, which lists
// live allocations, adds no error.
func TestOpenRefused(t *testing.T) {
	open := func(m *stingy) error {
		s := configs.Defaults()
		s.Offload.Fraction, s.Batch.MaxNumBatchedTokens, s.KV.NumGPUBlocksOverride, s.Batch.Attention = 0.5, 64, 64, configs.OnCPU
		n, err := node.Open(t.Context(), node.Options{Settings: s, OpenMachine: func() (_ device.Machine, err error) {
			m.Machine, err = emulated.Open(emulated.Options{Virtual: m.virtual})
			return m, err
		}})
		if err == nil {
			return n.Close()
		}
		if !errors.Is(err, errRefused) || !errors.Is(err, fault.ErrDevice) || errors.Is(err, fault.ErrModel) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s refused: %v", m.what, err)
		}
		return err
	}
	for _, what := range []string{
		"weights", "activations", "resident experts", "expert cache", "expert tables", "offloaded experts", "expert table images",
		"expert staging", "kv cache", "step metadata, pinned", "step metadata", "sampled ids, pinned", "stream compute",
		"harvest zeros", "stream harvest scrub gpu1", "stream harvest probe gpu2",
		"attention, pinned", "stream attention", "stream q, k, v to host", "stream attention from host",
	} {
		for _, virtual := range []bool{false, true}[:racedetector.Fewer(2, 1)] {
			if err := open(&stingy{virtual: virtual, name: what}); err == nil {
				t.Errorf("%q was never requested, or Open succeeded without it", what)
			}
		}
	}
	// On a virtual machine the order is always the same.
	for n := 1; !racedetector.Enabled; n++ {
		m := &stingy{virtual: true, n: n}
		if err := open(m); err != nil {
			continue
		}
		if m.what != "" {
			t.Errorf("%s was refused and Open went on", m.what)
			continue
		}
		break
	}
}

// TestOpenCanceled cancels the loading at each quarter.
func TestOpenCanceled(t *testing.T) {
	for part := range int64(5) {
		for _, fraction := range []float64{0, 0.5, 1} {
			ctx, cancel := context.WithCancel(t.Context())
			if part == 0 {
				cancel()
			}
			s := configs.Defaults()
			s.Offload.Fraction = fraction
			_, err := node.Open(ctx, node.Options{
				Settings:    s,
				OpenMachine: func() (device.Machine, error) { return emulated.Open(emulated.Options{}) },
				Progress: func(done, total int64) {
					if 4*done >= part*total {
						cancel()
					}
				},
			})
			cancel()
			if !errors.Is(err, context.Canceled) || errors.Is(err, fault.ErrModel) || strings.Contains(err.Error(), "\n") {
				t.Errorf("canceled at %d of 4, fraction %v: %v", part, fraction, err)
			}
		}
	}
}

// TestOpenFaults fails copies, and loses the device, during loading.
func TestOpenFaults(t *testing.T) {
	for _, virtual := range []bool{true, false} {
		for _, stream := range []string{"upload", "copy host to gpu0"} {
			for _, fraction := range []float64{0, 0.5} {
				for _, lose := range []bool{false, true} {
					var m *emulated.Machine
					injected := &emulated.Fault{
						Kind: emulated.FailCopy, Skip: 3, Times: -1,
						Match: func(p emulated.Point) bool { return p.Stream == stream },
					}
					s := configs.Defaults()
					s.Offload.Fraction = fraction
					opened, err := node.Open(t.Context(), node.Options{
						Settings: s,
						OpenMachine: func() (_ device.Machine, err error) {
							if m, err = emulated.New(emulated.Options{Virtual: virtual}); err == nil && !lose {
								m.Inject(injected)
							}
							return m, err
						},
						Progress: func(done, total int64) {
							if lose && 2*done >= total {
								_ = m.Lose(0)
							}
						},
					})
					what := fmt.Sprintf("virtual %v, %s, fraction %v, lost %v", virtual, stream, fraction, lose)
					cause := device.ErrCopyFailed
					if lose {
						cause = device.ErrLost
					}
					switch {
					case err == nil:
						t.Errorf("%s: Open goes on", what)
						_ = opened.Close()
					case !errors.Is(err, cause) || !errors.Is(err, fault.ErrDevice) || errors.Is(err, fault.ErrModel):
						t.Errorf("%s: %v", what, err)
					case strings.Contains(err.Error(), "was not freed"):
						t.Errorf("%s leaks: %v", what, err)
					}
				}
			}
		}
	}
}
