package harvest

import (
	"fmt"

	"github.com/moeserve/moeserve/device"
)

// SetHeadroom changes how many bytes of a peer stay free for other processes. What is held beyond that
// is revoked from now on, as when other processes need the memory.
func (r *Runtime) SetHeadroom(s device.Space, bytes int64) error {
	if bytes < 0 {
		return fmt.Errorf("harvest: set headroom: invalid headroom of %d bytes: must not be negative", bytes)
	}
	return r.update(func(c *controller) error {
		p, err := c.peers.find("set headroom", s)
		if err == nil {
			p.headroom = bytes
			c.revokeNeeded(r.now())
		}
		return err
	})
}

// Withdraw stops borrowing from a peer, until it is called with false: what is held there is revoked,
// for ReasonPolicy, and requests pass the peer by. It does not wait for the release.
func (r *Runtime) Withdraw(s device.Space, withdrawn bool) error {
	return r.update(func(c *controller) error {
		p, err := c.peers.find("withdraw", s)
		if err == nil {
			p.withdrawn = withdrawn
			c.revokeNeeded(r.now())
		}
		return err
	})
}
