package node_test

import (
	"fmt"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/node/sleeping"
)

// unmappable is a machine whose host memory kernels cannot read any more once that is refused.
type unmappable struct {
	*emulated.Machine
	refused atomic.Bool
}

func (m *unmappable) KernelAddr(reader device.Space, r device.Range) (device.Addr, error) {
	if s, ok := m.SpaceOf(r.Addr); ok && s == device.Host && m.refused.Load() {
		return 0, &device.Error{Op: "map", Space: reader, Detail: fmt.Sprintf("%d bytes on %s", r.Bytes, s), Err: device.ErrUnreachable}
	}
	return m.Machine.KernelAddr(reader, r)
}

// openDirect opens the built-in model with half of its experts on peers, or in host memory, to be
// read in place; the function returns the lines of the log that contain a text.
func openDirect(t *testing.T, o emulated.Options, tier configs.Tier) (*node.Node, *unmappable, func(containing string) []string) {
	t.Helper()
	var log strings.Builder
	s := configs.Defaults()
	s.Offload.Fraction, s.Offload.Tier, s.Batch.ExpertAccess, s.Batch.MaxNumBatchedTokens, s.Harvest.MigrationLimit = 0.5, tier, configs.DirectAccess, 192, "0"
	m := &unmappable{}
	n, err := node.Open(t.Context(), node.Options{
		// One layer's cache does not hold all offloaded experts: those that it lacks are read in place.
		Settings: s, CacheLayers: 1, Log: slog.New(slog.NewTextHandler(&log, nil)),
		OpenMachine: func() (_ device.Machine, err error) {
			m.Machine, err = emulated.New(o)
			return m, err
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	})
	return n, m, func(containing string) (found []string) {
		for line := range strings.Lines(log.String()) {
			if strings.Contains(line, containing) {
				found = append(found, line)
			}
		}
		return found
	}
}

const notInPlace = "experts are not read in place; steps of few tokens copy those that they need"

// says fails unless there is one line, with these words.
func says(t *testing.T, lines []string, words ...string) {
	t.Helper()
	if len(lines) != 1 {
		t.Fatalf("%d lines, want one: %q", len(lines), lines)
	}
	for _, w := range append(words, "level=WARN") {
		if !strings.Contains(lines[0], w) {
			t.Errorf("%q does not say %q", lines[0], w)
		}
	}
}

// TestHostNotMapped: where the GPU's kernels cannot read host memory, one line says which, and that
// experts are copied; tokens are the same.
func TestHostNotMapped(t *testing.T) {
	want := tokensOf(t, open(t, machine{options: linked(emulated.Random)}, nil))
	for _, tier := range []configs.Tier{configs.HostTier, configs.PeerTier} {
		o := linked(emulated.Random)
		o.NotMapped = []device.Space{device.Host}
		n, _, lines := openDirect(t, o, tier)
		if got := tokensOf(t, n); got != want {
			t.Errorf("%s: tokens %s, want %s", tier, got, want)
		}
		says(t, lines(notInPlace), "--expert-access direct", `\"offloaded experts\" on host`)
		if by := n.Pipeline().StepsByAccess(); by.Direct != 0 || by.Copied == 0 {
			t.Errorf("%s: %+v", tier, by)
		}
	}
}

// TestPeerNotMapped: where the GPU's kernels cannot read one peer's memory, one line says which, and
// what is there is read from host memory; other peers are read in place.
func TestPeerNotMapped(t *testing.T) {
	want := tokensOf(t, open(t, machine{options: linked(emulated.Random)}, nil))
	o := linked(emulated.Random)
	o.NotMapped = []device.Space{device.HBM(1)}
	// Experts lie on both peers, as one has no room for all, and the others in host memory.
	o.GPUs = []emulated.GPU{{MemoryBytes: 256 << 20}, {MemoryBytes: 4 << 20}, {MemoryBytes: 4 << 20}}
	n, _, lines := openDirect(t, o, configs.AnyTier)
	if got := tokensOf(t, n); got != want {
		t.Errorf("tokens %s, want %s", got, want)
	}
	says(t, lines("in place"), "kernels cannot read this peer's memory in place", "are read from host memory", "peer=gpu1")
	e := n.Observe().Experts()
	if by := n.Pipeline().StepsByAccess(); by.Direct == 0 || e.ReadInPlace[experts.Host] == 0 || e.ReadInPlace[experts.Peer] == 0 {
		t.Errorf("%+v, %v bytes read in place", by, e.ReadInPlace)
	}
}

// TestHostNotMappedAnyMore: where host memory is refused once the weights are back from sleep, the step
// that would have read it runs again with copies, and no request fails.
func TestHostNotMappedAnyMore(t *testing.T) {
	n, m, lines := openDirect(t, linked(emulated.Random), configs.HostTier)
	want := tokensOf(t, n)
	before := n.Pipeline().StepsByAccess()
	if before.Direct == 0 || len(lines(notInPlace)) > 0 {
		t.Fatalf("%+v, %q", before, lines(notInPlace))
	}
	if _, err := n.Sleep(t.Context(), sleeping.Copy, engine.PauseWait); err != nil {
		t.Fatal(err)
	}
	m.refused.Store(true)
	if _, err := n.Wake(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := tokensOf(t, n); got != want {
		t.Errorf("tokens %s, want %s", got, want)
	}
	says(t, lines(notInPlace), "--expert-access direct", "on host")
	if by, retried := n.Pipeline().StepsByAccess(), n.Engine().State().Retried; by.Direct != before.Direct || by.Copied == before.Copied || retried != 1 {
		t.Errorf("%+v, then %+v, %d steps retried", before, by, retried)
	}
}
