package node

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/harvest"
	"github.com/moeserve/moeserve/pipeline"
	"github.com/moeserve/moeserve/rebalancer"
)

// Beside steps, other tenants come and go, borrowed memory is given back, and experts
// move. On the wall clock each of these has a goroutine; on a virtual clock, which
// only goes on while somebody waits, all of them have their turn before each step.

// virtual says whether the machine's clock is a virtual one.
func virtual(m device.Machine) bool {
	v, ok := unwrapped(m).(interface{ Virtual() bool })
	return ok && v.Virtual()
}

// openRebalancer makes what decides which experts live where, and, where all that are
// offloaded have to be on peers, brings them there.
func (n *Node) openRebalancer(ctx context.Context) error {
	if n.harvest == nil && !n.plan.Adaptive {
		return nil
	}
	limit, err := n.settings.MigrationBytesPerSecond()
	if err != nil {
		return fail(ErrConfig, err)
	}
	n.balance, err = rebalancer.New(rebalancer.Options{
		Store: n.store, Harvest: n.harvest, Now: n.machine.Now, Log: n.log,
		Core: rebalancer.CoreOptions{MigrationLimit: limit},
	})
	if err != nil {
		return fail(ErrDevice, err)
	}
	n.closers = append(n.closers, n.balance.Close)
	if n.settings.OffloadTier != "peer" {
		return nil
	}
	start := time.Now()
	switch err := n.balance.FillAll(ctx); {
	case err == nil:
		n.log.Info("all offloaded experts are in peer memory", "experts", n.plan.OffloadedExperts, "bytes", int64(n.plan.OffloadedExperts)*n.plan.Layout.Size, "seconds", time.Since(start).Seconds())
		return nil
	case ctx.Err() != nil:
		return fmt.Errorf("node: bring experts to peers: %w", err)
	case errors.Is(err, rebalancer.ErrDoesNotFit):
		return fail(ErrConfig, err)
	default:
		return fail(ErrDevice, err)
	}
}

// startUpkeep starts what goes on beside steps, or has it done before each of them.
func (n *Node) startUpkeep() error {
	ctx, stop := context.WithCancel(context.Background())
	var loops sync.WaitGroup
	n.closers = append(n.closers, func() error {
		stop()
		loops.Wait()
		return nil
	})
	wall := !virtual(n.machine)
	if n.tenants != nil {
		n.tenants.start()
		if wall {
			loops.Go(func() { n.tenants.play(ctx) })
		} else {
			n.upkeep = append(n.upkeep, n.tenants.tick)
		}
	}
	if n.harvest != nil {
		if !wall {
			n.upkeep = append(n.upkeep, n.tickHarvest)
		} else if err := n.harvest.Start(ctx); err != nil {
			return err
		}
	}
	if n.balance != nil {
		if !wall {
			n.upkeep = append(n.upkeep, n.rebalance)
		} else if err := n.balance.Start(ctx); err != nil {
			return err
		}
	}
	return nil
}

// tickHarvest is nothing once the runtime is closed.
func (n *Node) tickHarvest() {
	if _, err := n.harvest.Tick(n.machine.Now()); err != nil && !errors.Is(err, harvest.ErrClosed) {
		n.log.Error("borrowed memory is not looked after", "err", err)
	}
}

// rebalance says once what goes wrong, until it does not or something else does.
func (n *Node) rebalance() {
	told := n.told
	n.told = ""
	if err := n.balance.Tick(n.machine.Now()); err != nil {
		if n.told = err.Error(); n.told != told {
			n.log.Warn("experts are not moved; those that are not in GPU memory come from host memory, slower", "err", err)
		}
	}
}

// stepper does the upkeep before each step.
type stepper struct {
	*pipeline.Pipeline
	upkeep []func()
}

var _ engine.Stepper = stepper{}

// Step implements engine.Stepper.
func (s stepper) Step(ctx context.Context, step *pipeline.Step) (pipeline.Result, error) {
	for _, f := range s.upkeep {
		f()
	}
	return s.Pipeline.Step(ctx, step)
}
