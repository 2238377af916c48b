package node

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/trace"
	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/harvest"
	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/node/fault"
	"github.com/moeserve/moeserve/pipeline"
	"github.com/moeserve/moeserve/rebalancer"
)

// Beside steps, other tenants' memory use changes, borrowed memory is released, and experts
// are migrated. Each of these is a loop of the machine's clock: a goroutine on the wall
// clock; on a virtual clock all loops run before each step.

// openRebalancer makes the rebalancer, which decides where experts live. With
// --offload-tier=peer it promotes all offloaded experts to peers first.
func (n *Node) openRebalancer(ctx context.Context, u *setup) error {
	plan := &u.needs.Plan
	if n.harvest != nil && n.lending(u) == nil {
		n.readmitPeers()
	}
	if n.lending(u) == nil && !plan.Dynamic && !u.shares() {
		return nil
	}
	limit, err := u.settings.Harvest.ParseMigrationLimit()
	if err != nil {
		return fault.Of(fault.ErrConfig, err)
	}
	o := rebalancer.Options{
		Store: n.store, Harvest: n.lending(u), Clock: n.machine, Log: n.log,
		Core: rebalancer.CoreOptions{MigrationLimit: limit},
	}
	if u.shares() {
		o.Places = n.store
	}
	n.balance, err = rebalancer.New(o)
	if err != nil {
		return fault.Of(fault.ErrDevice, err)
	}
	if u.settings.Offload.Tier != configs.PeerTier {
		return nil
	}
	start := time.Now()
	switch err := n.balance.FillAll(ctx); {
	case err == nil:
		n.log.Info("all offloaded experts promoted to peer memory", "experts", plan.OffloadedExperts, "bytes", int64(plan.OffloadedExperts)*plan.Layout.Size, "took_s", time.Since(start).Seconds())
		return nil
	case ctx.Err() != nil:
		return fmt.Errorf("node: promote experts to peers: %w", err)
	case errors.Is(err, rebalancer.ErrDoesNotFit):
		return fault.Of(fault.ErrConfig, err)
	default:
		return fault.Of(fault.ErrDevice, err)
	}
}

// readmitPeers has peers of KV blocks readmitted some time after they were excluded because copies failed; a
// rebalancer of experts on peers does that itself.
func (n *Node) readmitPeers() {
	a := harvest.NewReadmission(n.harvest, harvest.ReadmitBackoff, n.log)
	stop := n.machine.Loop(time.Second, func(now time.Duration) time.Duration {
		for peer, unhealthy := range n.harvest.Health() {
			a.Look(peer, unhealthy, now)
		}
		return time.Second
	})
	n.started(func() error {
		stop()
		return nil
	})
}

// startUpkeep starts the loops that run beside steps.
func (n *Node) startUpkeep(others *playback) error {
	if others != nil {
		others.start(n.harvest)
		stop := n.machine.Loop(0, others.tick)
		n.started(func() error {
			stop()
			return nil
		})
	}
	if n.harvest != nil {
		if err := n.harvest.Start(); err != nil {
			return err
		}
	}
	if n.balance == nil {
		return nil
	}
	n.started(n.balance.Close)
	return n.balance.Start()
}

// traceInterval is as much of a trace as is lost where the process is killed.
const traceInterval = time.Second

// keepTrace writes out what there is of a trace while the node is open, and logs it where that fails.
func (n *Node) keepTrace(w *trace.Writer) {
	if w == nil {
		return
	}
	closing := make(chan struct{})
	var flushing sync.WaitGroup
	flushing.Go(func() {
		ticker := time.NewTicker(traceInterval)
		defer ticker.Stop()
		for {
			select {
			case <-closing:
				return
			case <-ticker.C:
			}
			if err := w.Flush(); err != nil {
				n.log.Error("the trace cannot be written any more", "err", err)
				return
			}
		}
	})
	n.started(func() error {
		close(closing)
		flushing.Wait()
		return nil
	})
}

// stepper lets the loops of a virtual clock run before each step.
type stepper struct {
	*pipeline.Pipeline
	clock device.Clock
	kv    *kvcache.Manager
	trace *trace.Writer
}

var _ engine.Stepper = stepper{}

// Step implements engine.Stepper.
func (s stepper) Step(ctx context.Context, step *pipeline.Step) (pipeline.Result, error) {
	s.clock.Turn()
	s.trace.Counter("KV blocks", "in use", s.clock.Now(), float64(s.kv.Present()-s.kv.Free()))
	return s.Pipeline.Step(ctx, step)
}
