package experts

import (
	"log/slog"
	"time"

	"github.com/moeserve/moeserve/device"
)

// MoveInfo describes an expert that got a peer copy, or lost it.
type MoveInfo struct {
	// Layer by the model's number.
	Layer, Expert int
	Device        device.Space
	Bytes         int64
	// Took is the time from Promote to the Poll that found the copy complete, if it was
	// promoted.
	Took time.Duration
	// Reason for a demotion: "demoted", "revoked", "copy failed".
	Reason string
}

// SwapInfo describes an expert that became resident in place of another of the layer.
type SwapInfo struct{ Layer, In, Out int }

// LentInfo describes an expert that became resident in lent memory, or had to leave it.
type LentInfo struct {
	// Layer by the model's number.
	Layer, Expert int
	Resident      bool
}

// PeerInfo describes a peer whose copies failed.
type PeerInfo struct {
	Device device.Space
	Err    error
	// Excluded: nothing is fetched from the peer any more.
	Excluded bool
}

// EventListener receives changes of where experts live. Any func may be nil. Funcs are
// called from several goroutines, must be quick, and must not call the store.
type EventListener struct {
	// Promoted: fetches read the peer from now on.
	Promoted func(MoveInfo)
	// Demoted: fetches read host memory again.
	Demoted func(MoveInfo)
	Swapped func(SwapInfo)
	// Lent: an expert became resident in lent memory, or is no longer.
	Lent func(LentInfo)
	// PeerFailed: copies from or to a peer failed.
	PeerFailed func(PeerInfo)
}

// EnsureDefaults returns l with a no-op for each func that is nil.
func (l EventListener) EnsureDefaults() EventListener {
	if l.Promoted == nil {
		l.Promoted = func(MoveInfo) {}
	}
	if l.Demoted == nil {
		l.Demoted = func(MoveInfo) {}
	}
	if l.Swapped == nil {
		l.Swapped = func(SwapInfo) {}
	}
	if l.Lent == nil {
		l.Lent = func(LentInfo) {}
	}
	if l.PeerFailed == nil {
		l.PeerFailed = func(PeerInfo) {}
	}
	return l
}

// Tee returns a listener that calls both.
func Tee(a, b EventListener) EventListener {
	a, b = a.EnsureDefaults(), b.EnsureDefaults()
	return EventListener{
		Promoted:   func(i MoveInfo) { a.Promoted(i); b.Promoted(i) },
		Demoted:    func(i MoveInfo) { a.Demoted(i); b.Demoted(i) },
		Swapped:    func(i SwapInfo) { a.Swapped(i); b.Swapped(i) },
		Lent:       func(i LentInfo) { a.Lent(i); b.Lent(i) },
		PeerFailed: func(i PeerInfo) { a.PeerFailed(i); b.PeerFailed(i) },
	}
}

// LogEvents logs events that an operator can act on at warn and error, others at debug.
func LogEvents(log *slog.Logger) EventListener {
	return EventListener{
		Promoted: func(i MoveInfo) {
			log.Debug("expert promoted to peer memory", "layer", i.Layer, "expert", i.Expert, "device", i.Device.String(), "took", i.Took)
		},
		Demoted: func(i MoveInfo) {
			log.Debug("peer copy of an expert dropped", "layer", i.Layer, "expert", i.Expert, "device", i.Device.String(), "reason", i.Reason)
		},
		Swapped: func(i SwapInfo) {
			log.Debug("expert swapped", "layer", i.Layer, "in", i.In, "out", i.Out)
		},
		Lent: func(i LentInfo) {
			log.Debug("expert in memory lent by the KV cache", "layer", i.Layer, "expert", i.Expert, "resident", i.Resident)
		},
		PeerFailed: func(i PeerInfo) {
			if i.Excluded {
				log.Error("peer disabled after repeated copy failures; its experts are fetched from host memory", "device", i.Device.String(), "err", i.Err)
				return
			}
			log.Warn("copy from or to a peer failed; its expert is fetched from host memory", "device", i.Device.String(), "err", i.Err)
		},
	}
}
