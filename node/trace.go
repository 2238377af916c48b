package node

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/tenants"
	"github.com/moeserve/moeserve/harvest"
	"github.com/moeserve/moeserve/node/devices"
	"github.com/moeserve/moeserve/untrusted"
)

const (
	// A generated trace lasts a day, or this many changes of each peer if that is shorter.
	traceDuration = 24 * time.Hour
	traceChanges  = 1e5
)

// playback replays the memory use of other tenants of emulated peers from a trace. As on
// GPUs, a tenant is refused more than is free; it then asks moeserve for the memory, as a
// job with `moeserve reclaim` in its prologue does, and tries again.
type playback struct {
	player  *tenants.Player
	machine device.Machine
	log     *slog.Logger
	// reclaim asks for memory; nil before start, and where nothing is borrowed.
	reclaim tenants.Ask
	// began is the start of the replay, on the machine's clock.
	began time.Duration
}

// openPlayback reads or generates the trace that the settings name, and applies its initial
// memory use; it returns nil without a trace. The replay continues from start on.
func openPlayback(d *devices.Devices, s configs.Harvest, log *slog.Logger) (*playback, error) {
	c, err := s.ParseTrace()
	if err != nil || !c.Generated && c.File == "" {
		return nil, err
	}
	if d.Occupier == nil {
		return nil, errors.New("--availability-trace is for emulated devices; remove it, or set --device cpu")
	}
	trace, err := readTrace(d, c)
	if err != nil {
		return nil, err
	}
	t := &playback{machine: d.Machine, log: log}
	t.player = tenants.NewPlayer(trace, d.Occupier, func(peer device.Space, bytes int64) {
		if t.reclaim != nil {
			t.reclaim(peer, bytes)
		}
	})
	return t, t.player.Advance(0)
}

func readTrace(d *devices.Devices, c configs.TraceChoice) (tenants.Trace, error) {
	var peers []device.Space
	var capacity []int64
	for i := range d.Machine.Topology().GPUs {
		p := device.HBM(i)
		if p == d.Space {
			continue
		}
		u, err := d.Machine.Usage(p)
		if err != nil {
			return nil, err
		}
		peers, capacity = append(peers, p), append(capacity, u.Capacity-u.OtherProcesses)
	}
	if c.Generated {
		seconds := min(traceDuration.Seconds(), traceChanges/c.Churn*60)
		return tenants.Generate(tenants.Options{
			Peers: peers, Capacity: capacity, Duration: time.Duration(seconds * float64(time.Second)), Churn: c.Churn, Seed: c.Seed,
		})
	}
	data, err := untrusted.ReadFile(c.File, untrusted.MaxSettings)
	if err != nil {
		return nil, fmt.Errorf("--availability-trace: %w", err)
	}
	trace, err := tenants.Read(bytes.NewReader(data), peers, 0)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", c.File, err)
	}
	return trace, nil
}

// retryInterval is the time after which a tenant tries again to allocate what was refused.
const retryInterval = time.Millisecond

// start starts the replay's clock; tenants ask h for memory, if it is not nil.
func (t *playback) start(h *harvest.Runtime) {
	t.began = t.machine.Now()
	if h == nil {
		return
	}
	t.reclaim = func(peer device.Space, bytes int64) {
		// Not every GPU of the machine is a peer.
		if _, err := h.Reclaim(peer, bytes, 0); err != nil {
			t.log.Debug("a tenant of the availability trace got no memory", "device", peer.String(), "bytes", bytes, "err", err)
		}
	}
}

// tick applies the changes that are due, until the trace has ended.
func (t *playback) tick(now time.Duration) (pause time.Duration) {
	if err := t.player.Advance(now - t.began); err != nil {
		// Only a trace that releases memory that is not in use could fail, and no trace does.
		t.log.Error("availability trace replay failed", "err", err)
	}
	next, ok := t.player.Next()
	pause = max(next-(now-t.began), 0)
	switch {
	case !ok && !t.player.Waiting():
		return -1
	case !ok:
		return retryInterval
	case t.player.Waiting():
		return min(pause, retryInterval)
	}
	return pause
}
