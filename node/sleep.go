package node

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"sync"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/forward"
	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/models"
	"github.com/moeserve/moeserve/node/checkpoint"
	"github.com/moeserve/moeserve/node/fault"
	"github.com/moeserve/moeserve/node/observe"
	"github.com/moeserve/moeserve/node/sleeping"
)

// sleeper puts a node to sleep and wakes it.
type sleeper struct {
	// turn is held by one Sleep or Wake at a time.
	turn chan struct{}
	*sleeping.Sleeper
	settings   configs.Settings
	reopen     func() (*checkpoint.Model, *models.Layout, error)
	arena      device.Memory
	workspaces []device.Memory
	groups     []*forward.Model
	pool       *kvcache.Pool
	layout     *models.Layout

	mu    sync.Mutex // guards state
	state observe.Sleep
}

// openSleeper makes the node ready for sleep. Where the settings ask for it, the host's memory for a
// copy of the weights is allocated now.
func (n *Node) openSleeper(ctx context.Context, u *setup, arena device.Memory, groups []*forward.Model, pool *kvcache.Pool) error {
	s := &n.sleep
	s.turn = make(chan struct{}, 1)
	s.Sleeper = sleeping.New(sleeping.Options{
		Machine: n.machine, Transfer: n.transfer, Release: u.settings.Device.SleepMemory == configs.ReleasedSleepMemory,
	})
	n.started(s.Close)
	s.settings, s.arena, s.groups, s.pool, s.layout = u.settings, arena, groups, pool, u.layout
	s.state.Level = sleeping.Awake
	cast := u.devices.Cast()
	s.reopen = func() (*checkpoint.Model, *models.Layout, error) {
		m, err := checkpoint.Open(s.settings.Model, s.settings.Generate.Seed)
		if err != nil {
			return nil, nil, err
		}
		l, err := models.NewLayout(m.Config, m.Source, cast)
		if err != nil {
			return nil, nil, errors.Join(fault.Of(fault.ErrModel, err), m.Close())
		}
		return m, l, nil
	}
	if u.settings.Device.SleepMemory != configs.ReservedSleepMemory {
		return nil
	}
	c, err := n.contents(ctx)
	if err != nil {
		return err
	}
	return s.Reserve(c)
}

// contents prepares all memory for suspension. No step runs, and no expert is moved.
func (n *Node) contents(ctx context.Context) (c sleeping.Contents, err error) {
	s := &n.sleep
	x, err := n.store.Suspend(ctx)
	if err != nil {
		return c, err
	}
	metadata, err := n.pipe.Suspend()
	if err != nil {
		return c, err
	}
	c.Weights = append(append([]device.Memory{s.arena, metadata}, s.workspaces...), x.GPU...)
	if m := s.pool.Memory(); m.Space() != device.Host {
		c.KV = append(c.KV, m) // else it is not the GPU's that is to be freed
	}
	c.Host, c.Copied = x.Host, x.Copied
	c.Alone = append([]device.Region{s.arena.Region(0, s.layout.Bytes)}, x.Alone...)
	for _, g := range s.groups {
		for _, r := range g.Lasting() {
			c.Lasting = append(c.Lasting, device.Region{Space: s.arena.Space(), Range: r})
		}
	}
	return c, nil
}

// take waits until no other Sleep or Wake runs.
func (s *sleeper) take(ctx context.Context) error {
	select {
	case s.turn <- struct{}{}:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("node: wait for another sleep or wake: %w", ctx.Err())
	}
}

func (s *sleeper) leave() { <-s.turn }

// Sleep stops the engine and gives the GPU's memory, and all memory of peers, to others. mode says
// what becomes of running requests; requests that come later wait for Wake. At level Copy the weights
// go to pinned host memory, at level Drop they are loaded again by Wake. The GPU's KV cache is
// dropped; what KV tiers in host memory and in files have stays at level Copy. After an error
// the node is awake as before, unless Sleeping says otherwise. Putting a node to sleep that sleeps
// does nothing, but for Drop after Copy.
func (n *Node) Sleep(ctx context.Context, level sleeping.Level, mode engine.PauseMode) (t sleeping.Times, err error) {
	if level != sleeping.Copy && level != sleeping.Drop {
		return t, fault.Of(fault.ErrConfig, fmt.Errorf("node: sleep level %d; it must be 1 or 2", level))
	}
	s := &n.sleep
	if err := s.take(ctx); err != nil {
		return t, err
	}
	defer s.leave()
	asleep := s.Level()
	if asleep != sleeping.Awake {
		if level == sleeping.Drop && asleep == sleeping.Copy {
			n.engine.ResetPrefixCache(true)
		}
		_, err = s.Sleeper.Sleep(ctx, sleeping.Contents{}, level)
		s.publish(nil)
		return t, sleepError("sleep", err)
	}
	began := n.machine.Now()
	if err := n.engine.Pause(ctx, mode); err != nil {
		return t, err
	}
	drained := n.machine.Now() - began
	if n.balance != nil {
		n.balance.Pause()
	}
	c, err := n.contents(ctx)
	if err == nil {
		t, err = s.Sleeper.Sleep(ctx, c, level)
	}
	if s.Level() == sleeping.Awake {
		n.rise()
		return t, sleepError("sleep", err)
	}
	if level == sleeping.Drop {
		n.engine.ResetPrefixCache(true) // the weights may be others by then
	}
	n.returnPeers()
	s.publish(func(st *observe.Sleep) {
		st.Sleeps++
		st.SleepSeconds += t.Total.Seconds()
		st.CopySeconds += t.Copies.Seconds()
		st.CopiedBytes += t.Bytes
	})
	n.log.Info("model asleep", "model", n.info.Name, "level", int(level), "freed_bytes", t.Freed, "copied_bytes", t.Bytes,
		"drain_s", drained.Seconds(), "copy_s", t.Copies.Seconds(), "pin_s", t.Pin.Seconds(), "took_s", t.Total.Seconds())
	return t, sleepError("sleep", err)
}

// returnPeers gives all memory of peers back. What their readers still hold is released later.
func (n *Node) returnPeers() {
	if n.harvest == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), releaseTimeout)
	defer cancel()
	if err := n.harvest.Suspend(ctx); err != nil {
		n.log.Warn("peers' memory is not released yet", "err", err)
	}
}

// rise lets experts be moved and steps run again.
func (n *Node) rise() {
	if n.harvest != nil {
		n.harvest.Resume()
	}
	if n.balance != nil {
		n.balance.Resume()
	}
	n.engine.Resume()
}

// Wake gets the memory of these tags, of all where there are none, and what was in it; when all
// memory is awake the engine runs on. After an error what slept sleeps on, and Wake can be called
// again: where it wraps device.ErrOutOfMemory, once others have freed memory. Waking a node that
// is awake does nothing.
func (n *Node) Wake(ctx context.Context, tags ...sleeping.Tag) (t sleeping.Times, err error) {
	s := &n.sleep
	if err := s.take(ctx); err != nil {
		return t, err
	}
	defer s.leave()
	if s.Level() == sleeping.Awake {
		return t, nil
	}
	if n.harvest != nil {
		n.harvest.Resume() // copies may go over peers
	}
	if n.relays != nil {
		n.relays.restore()
	}
	t, err = s.Sleeper.Wake(ctx, tags, n.reloadWeights)
	awake := s.Level() == sleeping.Awake
	s.publish(func(st *observe.Sleep) {
		st.WakeSeconds += t.Total.Seconds()
		st.CopySeconds += t.Copies.Seconds()
		st.CopiedBytes += t.Bytes
		if awake {
			st.Wakes++
		}
	})
	if !awake {
		n.returnPeers()
		return t, sleepError("wake", err)
	}
	n.rise()
	n.refillPeers(ctx)
	n.log.Info("model awake", "model", n.info.Name, "copied_bytes", t.Bytes, "copy_s", t.Copies.Seconds(), "load_s", t.Load.Seconds(), "took_s", t.Total.Seconds())
	return t, sleepError("wake", err)
}

// refillPeers promotes all offloaded experts again where they are to be in peers' memory.
func (n *Node) refillPeers(ctx context.Context) {
	if n.info.Settings.Offload.Tier != configs.PeerTier || n.balance == nil {
		return
	}
	if err := n.balance.FillAll(ctx); err != nil {
		n.log.Warn("experts are in host memory until peers have room for all", "err", err)
	}
}

// reloadWeights loads all weights from the checkpoint again.
func (n *Node) reloadWeights(ctx context.Context) (err error) {
	s := &n.sleep
	m, layout, err := s.reopen()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, fault.Of(fault.ErrModel, m.Close())) }()
	if !reflect.DeepEqual(m.Config, n.info.Config) || layout.Bytes != s.layout.Bytes {
		return fault.Of(fault.ErrModel, fmt.Errorf("node: the checkpoint of %s has another architecture than the one that went to sleep; restart the server to serve it", n.info.Name))
	}
	if err := n.store.Reload(); err != nil {
		return fault.Of(fault.ErrDevice, err)
	}
	if err := checkpoint.Load(ctx, checkpoint.LoadOptions{
		Machine: n.machine, Space: s.arena.Space(), Arena: s.arena, Layout: layout, Source: m.Source, Store: n.store,
	}); err != nil {
		return errors.Join(err, n.store.EndReload())
	}
	return nil
}

// sleepError is an error of sleep or wake, of a kind of package fault.
func sleepError(what string, err error) error {
	if err == nil || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	err = fmt.Errorf("node: %s: %w", what, err)
	for _, kind := range []error{fault.ErrConfig, fault.ErrModel, fault.ErrDevice} {
		if errors.Is(err, kind) {
			return err
		}
	}
	return fault.Of(fault.ErrDevice, err)
}

// publish notes what State returns.
func (s *sleeper) publish(change func(*observe.Sleep)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if change != nil {
		change(&s.state)
	}
	s.state.Level = s.Level()
	s.state.Weights, s.state.KVCache = s.Asleep(sleeping.Weights), s.Asleep(sleeping.KVCache)
	s.state.HostBytes = s.HostBytes()
}

// Sleeping is the present state, from any goroutine.
func (n *Node) Sleeping() observe.Sleep {
	s := &n.sleep
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.state
}
