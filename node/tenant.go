package node

import (
	"errors"
	"fmt"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/tenants"
)

// Tenant is another user of an emulated peer's memory, as a measurement plays one. Where more is to be
// held than is free it asks for borrowed memory, as a job with `moeserve reclaim` in its prologue does.
// One goroutine at a time uses it, on a virtual clock between steps.
type Tenant struct {
	player *tenants.Player
	peer   device.Space
	node   *Node
}

// OpenTenant opens one on a peer; it holds nothing yet. The devices must be emulated.
func (n *Node) OpenTenant(peer device.Space) (*Tenant, error) {
	if n.occupier == nil {
		return nil, errors.New("node: only emulated devices have a tenant that is played; on GPUs it is a process of its own")
	}
	if n.harvest == nil {
		return nil, errors.New("node: nothing is borrowed that a tenant could get")
	}
	t := &Tenant{peer: peer, node: n}
	t.player = tenants.NewPlayer(nil, n.occupier, func(peer device.Space, bytes int64) {
		if _, err := n.harvest.Reclaim(peer, bytes, 0); err != nil {
			n.log.Debug("a tenant got no memory", "device", peer.String(), "bytes", bytes, "err", err)
		}
	})
	return t, nil
}

// Hold tries to hold so many bytes in all, from now on.
func (t *Tenant) Hold(bytes int64) error {
	t.player.Want(t.peer, bytes)
	_, err := t.Advance()
	return err
}

// Advance tries again what was refused, and reports whether the tenant holds what it is to.
func (t *Tenant) Advance() (done bool, err error) {
	if err := t.player.Advance(t.node.machine.Now()); err != nil {
		return false, fmt.Errorf("node: %w", err)
	}
	return !t.player.Waiting(), nil
}

// Close releases what is held.
func (t *Tenant) Close() error { return t.player.Stop() }
