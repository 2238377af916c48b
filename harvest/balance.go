package harvest

import (
	"time"

	"github.com/moeserve/moeserve/device"
)

// Balance is what the runtime has of a peer, in brief.
type Balance struct {
	// Free bytes of the device by the latest reading, less slabs allocated and plus slabs
	// released since; Held is the size of all slabs, Draining of those being released.
	Free, Held, Draining int64
	// Wants: requests were refused lately because the peer had no room, or Want says so.
	Wants bool
}

// wantsFor is the time for which a refused request counts as wanting more: the rebalancer
// asks again after at most a second.
const wantsFor = 2 * time.Second

// Balance reads the account of a peer.
func (r *Runtime) Balance(s device.Space) (b Balance, err error) {
	err = r.update(func(c *controller) error {
		p, err := c.peers.find("read", s)
		if err == nil {
			b = p.balance(r.clock.now())
		}
		return err
	})
	return b, err
}

func (p *peer) balance(now time.Duration) Balance {
	return Balance{Free: p.free, Held: p.serving + p.draining, Draining: p.draining, Wants: p.wants(now)}
}

// wants reports whether a request was refused lately for lack of room.
func (p *peer) wants(now time.Duration) bool { return p.refused && now-p.refusedAt < wantsFor }
