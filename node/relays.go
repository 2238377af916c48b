package node

import (
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/harvest"
	"github.com/moeserve/moeserve/node/observe"
	"github.com/moeserve/moeserve/transfer"
)

// relayRetry is the time between two attempts to get a relay's buffers again.
const relayRetry = 100 * time.Millisecond

// relays give the transfer engine buffers in borrowed memory of other GPUs, for copies between the host
// and the GPU that computes over these GPUs' links. When the memory is revoked, the engine uses the
// relay no more, and the memory is released once no copy is in it; later it is borrowed again.
type relays struct {
	engine  *transfer.Engine
	harvest *harvest.Runtime
	owner   *harvest.Owner
	// in and out are the sizes of buffers for copies from and to the host, in bytes.
	in, out int64
	log     *slog.Logger
	gpus    []device.Space

	// mu is taken with harvest's lock held, and the engine's is taken with it held.
	mu   sync.Mutex
	held map[device.Space]*harvest.Ref
	// retired are links that were reported as such. The loop alone uses it.
	retired map[device.Pair]bool
}

// open borrows the buffers of a relay that has none.
func (r *relays) open(gpu device.Space) error {
	h, err := r.harvest.Alloc(relayBuffers*(r.in+r.out), harvest.Hints{Client: observe.RelayClient, Label: "buffers of a relay", Peers: []device.Space{gpu}})
	if err != nil {
		return err
	}
	if err := r.use(gpu, h); err != nil {
		return errors.Join(err, r.harvest.Free(h))
	}
	return nil
}

// use gives the engine the buffers.
func (r *relays) use(gpu device.Space, h *harvest.Handle) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	ref, ok := h.Acquire(r.owner)
	if !ok {
		return fmt.Errorf("node: the buffers of %s are revoked already", gpu)
	}
	relay := transfer.Relay{GPU: gpu}
	for i := range relayBuffers {
		relay.In = append(relay.In, h.Region().Slice(int64(i)*r.in, r.in))
		relay.Out = append(relay.Out, h.Region().Slice(relayBuffers*r.in+int64(i)*r.out, r.out))
	}
	if err := r.engine.AddRelay(relay); err != nil {
		ref.Release()
		return err
	}
	r.held[gpu] = &ref
	return nil
}

// revoked is called when the release of a slab begins, with harvest's lock held: it ends the use of the
// relay that has it.
func (r *relays) revoked(i harvest.RevocationInfo) {
	if i.Client != observe.RelayClient || i.Ended {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	ref := r.held[i.Device]
	if ref == nil {
		return
	}
	delete(r.held, i.Device)
	unused, err := r.engine.RemoveRelay(i.Device)
	if err != nil {
		r.log.Error("a relay cannot be removed; its memory is released without waiting", "device", i.Device.String(), "err", err)
		ref.Release()
		return
	}
	ref.ReleaseAt(unused)
	r.log.Info("a GPU is no longer a relay for copies from and to the host: its memory is needed", "device", i.Device.String(), "reason", i.Reason.String())
}

// restore borrows the buffers of the relays that have none.
func (r *relays) restore() {
	for _, gpu := range r.gpus {
		r.mu.Lock()
		_, has := r.held[gpu]
		r.mu.Unlock()
		if has {
			continue
		}
		if err := r.open(gpu); err == nil {
			r.log.Info("a GPU is a relay for copies from and to the host again", "device", gpu.String())
		}
	}
}

// report logs links that carry copies of other GPUs no longer, since they fail.
func (r *relays) report() {
	for _, s := range r.engine.Stats() {
		pair := device.Pair{From: s.From, To: s.To}
		if s.Retired && !r.retired[pair] {
			r.log.Warn("a link fails and relays no more copies; others carry them", "src", s.From.String(), "dst", s.To.String(), "retries", s.Retries)
		}
		r.retired[pair] = s.Retired
	}
}

// openRelays starts to use relays, and the loop that restores them.
func (n *Node) openRelays(u *setup) error {
	if n.relays == nil {
		return nil
	}
	r := n.relays
	r.harvest = n.harvest
	for _, gpu := range r.gpus {
		err := r.open(gpu)
		switch {
		case err == nil:
			n.log.Debug("copies from and to the host also go over another GPU's link", "device", gpu.String(), "gpu", u.devices.Number(gpu), "buffer_bytes", relayBuffers*(r.in+r.out))
		case u.paths.soft:
			n.log.Warn("a GPU is not used as a relay for copies from and to the host", "gpu", u.devices.Number(gpu), "err", err)
		default:
			return fmt.Errorf("--host-paths is %s: GPU %d cannot be a relay: %w", u.settings.Device.HostPaths, u.devices.Number(gpu), err)
		}
	}
	tried := n.machine.Now()
	stop := n.machine.Loop(relayRetry, func(now time.Duration) time.Duration {
		if now-tried >= relayRetry {
			tried = now
			r.restore()
			r.report()
		}
		return relayRetry
	})
	n.started(func() error {
		stop()
		return nil
	})
	return nil
}
