package bench

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/moeserve/moeserve/eval/tenancy"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/node/fault"
	"github.com/moeserve/moeserve/node/observe"
	"github.com/moeserve/moeserve/planner"
)

// Borrower is a node as package tenancy measures it.
type Borrower struct {
	*Node
	deadline time.Duration

	mu       sync.Mutex
	peer     string // whose releases are kept; empty before the node is open
	released []tenancy.Release
}

var _ tenancy.Node = (*Borrower)(nil)

// OpenBorrower opens a node with open, and takes it over. Its first peer is the one that is looked at.
// hardware is as in New.
func OpenBorrower(o node.Options, hardware *planner.Hardware, open func(node.Options) (*node.Node, error)) (*Borrower, error) {
	b := &Borrower{}
	o.Events = func(e observe.Event) {
		b.mu.Lock()
		defer b.mu.Unlock()
		if e.Event == observe.HarvestRevocationEnded && e.Device == b.peer {
			b.released = append(b.released, tenancy.Release{Took: e.Took, Missed: e.DeadlineMissed})
		}
	}
	times, err := o.Settings.Harvest.ParseTimes()
	if err != nil {
		return nil, fault.Of(fault.ErrConfig, err)
	}
	b.deadline = times.Deadline
	n, err := open(o)
	if err != nil {
		return nil, err
	}
	b.Node = New(n, hardware)
	peers := n.Observe().Harvest().Peers
	if len(peers) == 0 {
		return nil, errors.Join(fault.Of(fault.ErrConfig, errors.New("nothing is borrowed of a peer: name peers with --peers, and leave experts to offload to them")), n.Close())
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.peer = peers[0].Space.String()
	return b, nil
}

// Peer implements tenancy.Node.
func (b *Borrower) Peer() (tenancy.Memory, error) {
	p := b.n.Observe().Harvest().Peers[0]
	u, err := b.n.Machine().Usage(p.Space)
	return tenancy.Memory{
		Capacity: u.Capacity, Others: u.OtherProcesses, Borrowed: p.Used + p.FreeInSlabs + p.Draining, Free: max(u.Free(), 0), Headroom: p.Headroom,
	}, err
}

// Released implements tenancy.Node.
func (b *Borrower) Released() []tenancy.Release {
	b.mu.Lock()
	defer b.mu.Unlock()
	r := b.released
	b.released = nil
	return r
}

// Borrowing implements tenancy.Node.
func (b *Borrower) Borrowing() tenancy.Borrowing {
	s := &b.n.Info().Settings
	e := b.n.Observe().Experts()
	return tenancy.Borrowing{
		Peer: b.peer, OffloadFraction: e.OffloadFraction(), ExpertAccess: s.Batch.ExpertAccess.String(), DeadlineSeconds: b.deadline.Seconds(),
	}
}

// Watch implements tenancy.Node.
func (b *Borrower) Watch(f func(now time.Duration) time.Duration) (stop func()) {
	return b.n.Machine().Loop(0, f)
}

// Tenant is one that is played on emulated devices. Its caller closes it before the node.
func (b *Borrower) Tenant() (*Tenant, error) {
	t, err := b.n.OpenTenant(b.n.Observe().Harvest().Peers[0].Space)
	if err != nil {
		return nil, fault.Of(fault.ErrConfig, err)
	}
	return &Tenant{t}, nil
}

// Tenant is a node's tenant as package tenancy uses it.
type Tenant struct{ t *node.Tenant }

var _ tenancy.Tenant = (*Tenant)(nil)

// Hold implements tenancy.Tenant.
func (t *Tenant) Hold(bytes int64) error { return t.t.Hold(bytes) }

// Advance implements tenancy.Tenant.
func (t *Tenant) Advance() (done bool, took time.Duration, refused bool, err error) {
	done, err = t.t.Advance()
	return done, 0, false, err
}

// Work implements tenancy.Tenant.
func (t *Tenant) Work(context.Context, string, time.Duration) (float64, error) {
	return 0, tenancy.ErrNoWork
}

// Close implements tenancy.Tenant.
func (t *Tenant) Close() error { return t.t.Close() }
