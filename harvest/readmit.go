package harvest

import (
	"log/slog"
	"time"

	"github.com/moeserve/moeserve/device"
)

// ReadmitBackoff is the usual first back-off of a Readmission, maxReadmitBackoff the longest.
const (
	ReadmitBackoff    = 5 * time.Second
	maxReadmitBackoff = 5 * time.Minute
)

// Readmission readmits peers that were excluded because copies failed, each when its back-off has
// ended, which doubles with every further exclusion, up to 5 min. One goroutine at a time uses it.
type Readmission struct {
	runtime *Runtime
	backoff time.Duration
	log     *slog.Logger
	peers   map[device.Space]*exclusion
}

// exclusion is what is known of a peer.
type exclusion struct {
	// excluded since a call, the time at which it is readmitted, and the delay until then.
	excluded            bool
	retryAt, retryDelay time.Duration
	// unhealthy is the error of the peer's readings, if it stayed unhealthy when readmitted.
	unhealthy string
	// readmittedAt is the time of the last readmission.
	readmittedAt time.Duration
}

// NewReadmission makes one whose first back-off is that.
func NewReadmission(r *Runtime, backoff time.Duration, log *slog.Logger) *Readmission {
	return &Readmission{runtime: r, backoff: backoff, log: log, peers: map[device.Space]*exclusion{}}
}

// Look readmits a peer if that is due; unhealthy is its Health. A peer that is unhealthy by its own
// readings stays excluded. The result is why the peer must not be used, nil if it may, and whether it was
// readmitted now.
func (a *Readmission) Look(peer device.Space, unhealthy error, now time.Duration) (why error, readmitted bool) {
	x := a.peers[peer]
	if x == nil {
		x = &exclusion{}
		a.peers[peer] = x
	}
	switch {
	case unhealthy == nil:
		if x.retryDelay > 0 && !x.excluded && now-x.readmittedAt > 2*x.retryDelay {
			x.retryDelay = 0 // it was healthy for twice as long as it was excluded
		}
		x.excluded, x.unhealthy = false, ""
		return nil, false
	case unhealthy.Error() == x.unhealthy:
		return unhealthy, false
	case !x.excluded:
		x.excluded, x.unhealthy = true, ""
		x.retryDelay = min(max(2*x.retryDelay, a.backoff), maxReadmitBackoff)
		x.retryAt = now + x.retryDelay
		return unhealthy, false
	case now < x.retryAt:
		return unhealthy, false
	}
	x.excluded = false
	if err := a.runtime.Readmit(peer); err != nil {
		x.unhealthy = unhealthy.Error()
		return unhealthy, false
	}
	if again := a.runtime.Health()[peer]; again != nil {
		x.unhealthy = again.Error()
		return again, false
	}
	x.readmittedAt = now
	a.log.Info("retrying a disabled peer", "device", peer.String(), "after", x.retryDelay, "cause", unhealthy.Error())
	return nil, true
}
