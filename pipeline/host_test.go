package pipeline

import (
	"errors"
	"testing"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
)

// late is the host attention's stream; its work fails behind a step's last fence, so that
// only the stream itself reports the error.
type late struct {
	device.Executor
	// failAfter counts down the signaled fences; under 1: nothing fails.
	failAfter int
}

var errLate = errors.New("host attention failed")

// SignalFence implements device.Stream.
func (s *late) SignalFence(f device.Fence, value uint32) error {
	err := s.Executor.SignalFence(f, value)
	if s.failAfter--; err != nil || s.failAfter != 0 {
		return err
	}
	return s.Execute(device.Work{Name: "fail", Run: func(device.Access) error { return errLate }})
}

// TestHostAttentionFails: a step fails if host attention has failed, even if no fence reports
// it. Afterwards the same steps give the same results.
func TestHostAttentionFails(t *testing.T) {
	want := newRig(t, "mixtral", 0, emulated.Options{Virtual: true}, Options{SmallBatchTokens: -1}).run()
	r := newRig(t, "mixtral", 0.5, emulated.Options{Virtual: true, Check: true}, Options{HostAttention: host, SmallBatchTokens: -1})
	table := r.kv.NewTable()
	reserve(t, table, 8)
	stream := &late{Executor: r.p.attention.host}
	r.p.attention.host = stream
	step := &Step{Sequences: []Sequence{{Tokens: []int32{1}, Table: table, LogitRows: 1}}}
	// The last layer's only round trip is the host's last work of a step.
	stream.failAfter = r.p.o.config().Layers
	if _, err := r.p.Step(t.Context(), step); !errors.Is(err, errLate) || errors.Is(err, ErrStepFailed) || stream.failAfter != 0 {
		t.Errorf("host attention fails: %v", err)
	}
	table.Release(false)
	if d := r.run().differs(want); d != "" {
		t.Error(d)
	}
}
