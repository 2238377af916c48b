package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"sync"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/harvest"
	"github.com/moeserve/moeserve/harvest/reclaim"
	"github.com/moeserve/moeserve/node/fault"
	"github.com/moeserve/moeserve/node/observe"
	"github.com/moeserve/moeserve/node/sizing"
)

// lender releases borrowed memory for other processes that ask for it.
type lender struct {
	harvest *harvest.Runtime
	machine device.Machine
	peers   []observe.Peer
	spaces  []device.Space // of the peers
	weight  float64        // of this process's share
	// deadline of requests that name none.
	deadline time.Duration
}

var _ reclaim.Lender = (*lender)(nil)

// find returns the index of a peer by its number or UUID.
func (l *lender) find(name string) (int, error) {
	for i, p := range l.peers {
		if reclaim.Names(name, strconv.Itoa(p.GPU), p.UUID) {
			return i, nil
		}
	}
	return 0, fmt.Errorf("GPU %s: %w", name, reclaim.ErrNoPeer)
}

// Reclaim implements reclaim.Lender. It asks again where the device has less free memory
// after the release than the latest reading said.
func (l *lender) Reclaim(ctx context.Context, ask reclaim.Request) (reclaim.Answer, error) {
	i, err := l.find(ask.Device)
	if err != nil {
		return reclaim.Answer{}, err
	}
	s, begin := l.spaces[i], l.machine.Now()
	a := reclaim.Answer{Device: strconv.Itoa(l.peers[i].GPU), UUID: l.peers[i].UUID}
	within := ask.Within
	if within == 0 {
		within = l.deadline
	}
	for left := within; ; left = within - (l.machine.Now() - begin) {
		if left <= 0 {
			break
		}
		if _, err := l.harvest.Tick(l.machine.Now()); err != nil {
			return a, err
		}
		c, err := l.harvest.Reclaim(s, ask.Bytes, left)
		if err != nil {
			return a, err
		}
		planned := c.Planned()
		switch err := c.Wait(ctx); {
		case errors.Is(err, harvest.ErrDeadline):
			a.Late = err.Error()
		case err != nil:
			return a, err
		}
		a.Freed += c.Freed()
		if planned == 0 || a.Late != "" {
			break
		}
	}
	a.TookMS = float64(l.machine.Now()-begin) / float64(time.Millisecond)
	b, err := l.balance(s)
	a.Free, a.Borrowed = b.Free, b.Held
	if err == nil && a.Free < ask.Bytes && a.Late == "" {
		a.Late = "this process has borrowed no more of it"
		if u, err := l.machine.Usage(s); err == nil && ask.Bytes > u.Capacity {
			a.Late = "the total memory of the GPU is " + sizing.Bytes(u.Capacity)
		}
	}
	return a, err
}

// balance of a peer, with what the device says is free now.
func (l *lender) balance(s device.Space) (harvest.Balance, error) {
	b, err := l.harvest.Balance(s)
	if err != nil {
		return b, err
	}
	u, err := l.machine.Usage(s)
	b.Free = max(u.Free(), 0)
	return b, err
}

// Borrowed implements reclaim.Lender.
func (l *lender) Borrowed() (all []reclaim.Borrowed) {
	for i, s := range l.spaces {
		b, err := l.balance(s)
		if err != nil {
			continue // a device that is lost holds nothing that anybody could get
		}
		all = append(all, reclaim.Borrowed{
			Device: strconv.Itoa(l.peers[i].GPU), UUID: l.peers[i].UUID, Free: b.Free, Borrowed: b.Held, Wants: b.Wants, Weight: l.weight,
		})
	}
	return all
}

// openNeighbors listens to other processes that need memory of the peers.
func (n *Node) openNeighbors(u *setup) error {
	times, err := u.settings.Harvest.ParseTimes()
	if n.harvest == nil || err != nil {
		return err
	}
	n.lender = &lender{harvest: n.harvest, machine: n.machine, peers: u.peerDevices(), spaces: u.borrowed(), weight: u.settings.Harvest.Weight, deadline: times.Deadline}
	dir := u.o.RuntimeDir
	if dir == "" || dir == reclaim.None {
		return nil
	}
	l, err := reclaim.Listen(dir, reclaim.Handler(n.lender), u.o.Log)
	if err != nil && dir != reclaim.Dir() {
		return fault.Of(fault.ErrConfig, fmt.Errorf("--runtime-dir is %q: %w; make the directory, or set none", dir, err))
	}
	if err != nil {
		// It serves all the same; neighbors get what is free, and the headroom.
		u.o.Log.Warn("neighbors cannot ask for borrowed memory", "err", err)
		return nil
	}
	n.log.Debug("neighbors may ask for borrowed memory", "socket", l.Path())
	n.started(l.Close)
	if n.machine.Capabilities().Emulated {
		return nil // no other process has these devices
	}
	stop := n.lender.follow(reclaim.Client{Dir: dir, Except: l.Path()}, n.log)
	n.started(func() error {
		stop()
		return nil
	})
	return nil
}

// exchangeInterval is the time between two readings of what other processes of moeserve hold,
// and exchangeTimeout the limit of one.
const (
	exchangeInterval = 500 * time.Millisecond
	exchangeTimeout  = 2 * time.Second
)

// follow reports to harvest what other processes of moeserve hold, until stop is called.
func (l *lender) follow(c reclaim.Client, log *slog.Logger) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var loop sync.WaitGroup
	loop.Go(func() {
		for tick := time.Tick(exchangeInterval); ; {
			if err := l.exchange(ctx, c); err != nil && ctx.Err() == nil {
				log.Debug("other processes do not report what they have borrowed", "err", err)
			}
			select {
			case <-ctx.Done():
				return
			case <-tick:
			}
		}
	})
	return func() {
		cancel()
		loop.Wait()
	}
}

// exchange asks the other processes once.
func (l *lender) exchange(ctx context.Context, c reclaim.Client) error {
	ctx, cancel := context.WithTimeout(ctx, exchangeTimeout)
	defer cancel()
	all, failed := c.Borrowed(ctx)
	for i, s := range l.spaces {
		var others []harvest.Other
		for _, devices := range all {
			for _, d := range devices {
				if l.peers[i].UUID != "" && reclaim.Names(l.peers[i].UUID, "", d.UUID) {
					others = append(others, harvest.Other{Held: d.Borrowed, Wants: d.Wants, Weight: d.Weight})
				}
			}
		}
		failed = errors.Join(failed, l.harvest.SetOthers(s, others))
	}
	return failed
}

// Lender releases borrowed memory for other processes; nil where nothing is borrowed.
func (n *Node) Lender() reclaim.Lender {
	if n.lender == nil {
		return nil
	}
	return n.lender
}
