package pipeline

import (
	"errors"
	"testing"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
)

// late is a machine on which work of the host's attention fails behind a step's last
// fence: nobody but the stream itself knows of it.
type late struct {
	device.Executor
	// failAfter counts down the fences to be raised; under 1: nothing fails.
	failAfter int
}

var errLate = errors.New("the host has failed")

// Raise implements device.Stream.
func (s *late) Raise(f device.Fence, value uint32) error {
	err := s.Executor.Raise(f, value)
	if s.failAfter--; err != nil || s.failAfter != 0 {
		return err
	}
	return s.Execute(device.Work{Name: "fail", Run: func(device.Access) error { return errLate }})
}

// TestHostFails: a step is not believed where the host's attention has failed, even where
// no fence has handed that on; once it works again the same steps give the same.
func TestHostFails(t *testing.T) {
	want := newRig(t, "mixtral", 0, emulated.Options{Virtual: true}, Options{SmallBatchTokens: -1}).run()
	r := newRig(t, "mixtral", 0.5, emulated.Options{Virtual: true, Check: true}, Options{HostAttention: host, SmallBatchTokens: -1})
	table := r.kv.NewTable()
	reserve(t, table, 8)
	stream := &late{Executor: r.p.attention.host}
	r.p.attention.host = stream
	step := &Step{Sequences: []Sequence{{Tokens: []int32{1}, Table: table, LogitRows: 1}}}
	// The last layer's only chain is the last thing that the host does in a step.
	stream.failAfter = r.p.o.config().Layers
	if _, err := r.p.Step(t.Context(), step); !errors.Is(err, errLate) || errors.Is(err, ErrStepFailed) || stream.failAfter != 0 {
		t.Errorf("where the host fails: %v", err)
	}
	table.Release(false)
	if d := r.run().differs(want); d != "" {
		t.Error(d)
	}
}
