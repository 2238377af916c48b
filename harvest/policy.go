package harvest

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/moeserve/moeserve/device"
)

// Policy is the controller's: it decides where memory is taken. Its methods are
// called one at a time, must not block, and see nothing but their arguments; so a
// policy is a pure function of them and of what it was told before.
type Policy interface {
	// Name as in flags: "best-fit".
	Name() string
	// Choose returns the index of the candidate to use; there is at least one, and
	// each satisfies size and hints. An error refuses the request: it wraps ErrQuota
	// or ErrRate where these are the reason.
	Choose(r Request, from []Candidate) (int, error)
	// Granted is told of each request that was granted, after Choose.
	Granted(r Request)
	// Evacuate says whether everything on the peer is to be revoked, for
	// ReasonPolicy. It is asked at each Tick.
	Evacuate(p PeerState) bool
}

// Request is what a client asks for, with what is known of the client.
type Request struct {
	// Bytes as rounded by the device.
	Bytes int64
	Hints Hints
	// Held is what the client holds already, in bytes.
	Held int64
	// Clients is how many clients are known, with this one; Total is what they can
	// have together: slabs in service, and what may still be taken from peers.
	Clients int
	Total   int64
	// Now on the runtime's clock: the time of the latest Tick.
	Now time.Duration
}

// Candidate is a place that a request fits into: a hole of a slab, or a new slab.
type Candidate struct {
	Peer PeerState
	// Slab is its number, or 0 for one that would be taken from the device.
	Slab uint64
	// FreeExtent is the size of the hole, of the whole slab if it is new.
	FreeExtent int64
	// Leftover is what stays of the hole.
	Leftover int64
	// Adjacent says that it begins where Hints.After ends.
	Adjacent bool

	offset int64
}

// PeerState is what the controller knows of a peer.
type PeerState struct {
	Space device.Space
	// Reading is the latest one.
	Reading Reading
	// Borrowable is what may still be taken from the device: what is free, less the
	// headroom; under 0 where the headroom is not met.
	Borrowable int64
	// Bandwidth is Reading.Bandwidth averaged over the past (Options.HalfLife).
	Bandwidth float64
	// Churn is how much memory others take and give back: the share of the peer's
	// memory that changes hands per minute, averaged over the past.
	Churn float64
	// Path is the way from the peer to the reader.
	Path device.Path
}

// NewPolicy returns the policy of that name with default settings.
func NewPolicy(name string) (Policy, error) {
	ps := []Policy{BestFit{}, Locality{}, NewFairness(FairnessOptions{}), Interference{}, Stability{}}
	var names []string
	for _, p := range ps {
		if p.Name() == name {
			return p, nil
		}
		names = append(names, p.Name())
	}
	return nil, fmt.Errorf("harvest: there is no policy %q; choose one of %s", name, strings.Join(names, ", "))
}

// byFit orders candidates as the paper's prototype does (section 3.2), which
// leaves the smallest rest: what lies beside its neighbor first, then slabs that
// are there before new ones, then the tightest hole, then, for new slabs, the peer
// with most to spare.
func byFit(a, b Candidate) int {
	return cmp.Or(
		trueFirst(a.Adjacent, b.Adjacent), trueFirst(a.Slab != 0, b.Slab != 0),
		cmp.Compare(a.Leftover, b.Leftover), cmp.Compare(b.Peer.Borrowable, a.Peer.Borrowable),
		cmp.Compare(a.Peer.Space, b.Peer.Space), cmp.Compare(a.Slab, b.Slab),
	)
}

// trueFirst orders what has the property before what has not.
func trueFirst(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return -1
	}
	return 1
}

// bestCandidate returns the index of the first candidate in the order of keys, by fit among
// equals.
func bestCandidate(from []Candidate, keys ...func(Candidate) float64) int {
	order := func(a, b Candidate) int {
		for _, k := range keys {
			if c := cmp.Compare(k(a), k(b)); c != 0 {
				return c
			}
		}
		return byFit(a, b)
	}
	best := 0
	for i := range from {
		if order(from[i], from[best]) < 0 {
			best = i
		}
	}
	return best
}

// BestFit takes the place that leaves the smallest rest.
type BestFit struct{}

// Name implements Policy.
func (BestFit) Name() string { return "best-fit" }

// Choose implements Policy.
func (BestFit) Choose(_ Request, from []Candidate) (int, error) { return bestCandidate(from), nil }

// Granted implements Policy.
func (BestFit) Granted(Request) {}

// Evacuate implements Policy.
func (BestFit) Evacuate(PeerState) bool { return false }

// Locality takes the peer with the fastest path to the reader, among equals the
// one with the lowest latency, then the fewest links; there, best fit.
type Locality struct{ BestFit }

// Name implements Policy.
func (Locality) Name() string { return "locality" }

// Choose implements Policy.
func (Locality) Choose(_ Request, from []Candidate) (int, error) {
	return bestCandidate(from,
		func(c Candidate) float64 {
			if c.Peer.Path.BytesPerSecond == 0 {
				return math.Inf(-1) // not limited
			}
			return -c.Peer.Path.BytesPerSecond
		},
		func(c Candidate) float64 { return float64(c.Peer.Path.Latency) },
		func(c Candidate) float64 { return float64(len(c.Peer.Path.Links)) },
	), nil
}

// Interference avoids peers whose own work uses their memory's bandwidth: copies
// would slow both. It tells use in steps of a tenth, so that fit still decides
// between peers that are much alike.
type Interference struct {
	BestFit
	// EvacuateAt is the average use of bandwidth, 0 to 1, from which everything on the
	// peer is revoked. Our own copies count in what a device reports, so leave room
	// for them. Default: never.
	EvacuateAt float64
}

// Name implements Policy.
func (Interference) Name() string { return "interference" }

// Choose implements Policy.
func (Interference) Choose(_ Request, from []Candidate) (int, error) {
	return bestCandidate(from, func(c Candidate) float64 {
		return math.Floor(10 * max(c.Peer.Reading.Bandwidth, c.Peer.Bandwidth))
	}), nil
}

// Evacuate implements Policy.
func (p Interference) Evacuate(s PeerState) bool {
	return p.EvacuateAt > 0 && s.Bandwidth >= p.EvacuateAt
}

// Stability avoids peers where others take and give back much memory: what lies
// there would soon be revoked. It tells churn in steps of a twentieth of the
// memory per minute.
type Stability struct {
	BestFit
	// EvacuateAt is the churn from which everything on the peer is revoked, as the
	// share of its memory per minute. Default: never.
	EvacuateAt float64
}

// Name implements Policy.
func (Stability) Name() string { return "stability" }

// Choose implements Policy.
func (Stability) Choose(_ Request, from []Candidate) (int, error) {
	return bestCandidate(from, func(c Candidate) float64 { return math.Floor(20 * c.Peer.Churn) }), nil
}

// Evacuate implements Policy.
func (p Stability) Evacuate(s PeerState) bool { return p.EvacuateAt > 0 && s.Churn >= p.EvacuateAt }

// FairnessOptions limit what one client may have.
type FairnessOptions struct {
	// Quota is what each client may hold, in bytes. Default: an equal share, among
	// the clients known so far, of what all peers offer.
	Quota int64
	// Quotas of single clients, in bytes; others have Quota.
	Quotas map[string]int64
	// Rate at which each client may allocate, in bytes per second. Default: no limit.
	Rate float64
	// Burst is how many bytes a client may allocate at once after a pause. A single
	// request may be larger after a pause long enough for it. Default: one second of
	// Rate.
	Burst int64
}

// Fairness refuses clients more than their quota, and more than their rate; it
// places by best fit.
type Fairness struct {
	BestFit
	o       FairnessOptions
	buckets map[string]*bucket
}

// bucket holds what a client may still allocate now: it fills at the rate up to
// the burst, and a request larger than that leaves it in debt.
type bucket struct {
	bytes float64
	at    time.Duration
}

// NewFairness makes the policy.
func NewFairness(o FairnessOptions) *Fairness {
	if o.Burst == 0 {
		o.Burst = int64(o.Rate)
	}
	return &Fairness{o: o, buckets: map[string]*bucket{}}
}

// Name implements Policy.
func (*Fairness) Name() string { return "fairness" }

// Choose implements Policy.
func (p *Fairness) Choose(r Request, from []Candidate) (int, error) {
	quota, ok := p.o.Quotas[r.Hints.Client]
	switch {
	case ok:
	case p.o.Quota > 0:
		quota = p.o.Quota
	default:
		quota = r.Total / int64(max(r.Clients, 1))
	}
	if r.Held+r.Bytes > quota {
		return 0, fmt.Errorf("%d bytes held and %d asked for, of %d: %w", r.Held, r.Bytes, quota, ErrQuota)
	}
	if p.o.Rate > 0 {
		if b := p.bucket(r); b.bytes < float64(min(r.Bytes, p.o.Burst)) {
			wait := (float64(min(r.Bytes, p.o.Burst)) - b.bytes) / p.o.Rate
			return 0, fmt.Errorf("%d bytes asked for at %.0f bytes/s; ask again in %.3f s: %w", r.Bytes, p.o.Rate, wait, ErrRate)
		}
	}
	return bestCandidate(from), nil
}

// Granted implements Policy.
func (p *Fairness) Granted(r Request) {
	if p.o.Rate > 0 {
		p.bucket(r).bytes -= float64(r.Bytes)
	}
}

func (p *Fairness) bucket(r Request) *bucket {
	b := p.buckets[r.Hints.Client]
	if b == nil {
		b = &bucket{bytes: float64(p.o.Burst), at: r.Now}
		p.buckets[r.Hints.Client] = b
	}
	if r.Now > b.at {
		b.bytes = min(float64(p.o.Burst), b.bytes+p.o.Rate*(r.Now-b.at).Seconds())
		b.at = r.Now
	}
	return b
}

// PeerNeed is what Victims knows of a peer.
type PeerNeed struct {
	Space device.Space
	// Free is what could be allocated there now, in bytes; under 0 where others hold
	// more than there is.
	Free int64
	// Draining is what slabs that are leaving already will give back.
	Draining int64
	// Headroom is what must be free.
	Headroom int64
	// Unhealthy and Leave revoke everything.
	Unhealthy, Evacuate bool
}

// mustRevoke says whether anything must be revoked there.
func (p PeerNeed) mustRevoke() bool {
	return p.Unhealthy || p.Evacuate || p.Free+p.Draining < p.Headroom
}

// SlabState is what Victims knows of a slab in service.
type SlabState struct {
	ID    uint64
	Peer  device.Space
	Bytes int64
	// Used is what handles hold of it, Cost what losing them costs their clients.
	Used int64
	Cost time.Duration
	// References are under way.
	References int
}

// Victim is a slab to be revoked.
type Victim struct {
	Slab   uint64
	Reason Reason
}

// Victims decides which slabs to revoke: everything on peers that are unhealthy or
// that the policy leaves, and elsewhere, cheapest first, as many as the headroom
// needs. It is pure; the result is in the order of the peers.
func Victims(peers []PeerNeed, slabs []SlabState) []Victim {
	var vs []Victim
	for _, p := range peers {
		there := slices.DeleteFunc(slices.Clone(slabs), func(s SlabState) bool { return s.Peer != p.Space })
		reason := ReasonPressure
		switch {
		case p.Unhealthy:
			reason = ReasonUnhealthy
		case p.Evacuate:
			reason = ReasonPolicy
		default:
			there = Cheapest(there, p.Headroom-p.Free-p.Draining)
		}
		for _, s := range there {
			vs = append(vs, Victim{s.ID, reason})
		}
	}
	return vs
}

// referenceCost is what one reference under way adds to the price of a slab: the
// drain waits for it, and what is being read now is likely to be read again.
const referenceCost = time.Millisecond

// costPerByte of giving the slab up, in seconds per byte.
func (s SlabState) costPerByte() float64 {
	return (s.Cost + time.Duration(s.References)*referenceCost).Seconds() / float64(s.Bytes)
}

// Cheapest returns slabs of at least need bytes together, or all if there are not
// that many: the lowest price per byte first, and none that could be spared.
func Cheapest(slabs []SlabState, need int64) []SlabState {
	order := slices.Clone(slabs)
	slices.SortFunc(order, func(a, b SlabState) int {
		return cmp.Or(cmp.Compare(a.costPerByte(), b.costPerByte()), cmp.Compare(a.Used, b.Used), cmp.Compare(b.ID, a.ID))
	})
	n, sum := 0, int64(0)
	for n < len(order) && sum < need {
		sum += order[n].Bytes
		n++
	}
	chosen := order[:n]
	for i := len(chosen) - 1; i >= 0; i-- {
		if b := chosen[i].Bytes; sum-b >= need {
			chosen = slices.Delete(chosen, i, i+1)
			sum -= b
		}
	}
	return chosen
}
