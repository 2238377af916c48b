package harvest

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/moeserve/moeserve/device"
)

// Policy decides where memory is allocated. Its methods are called one at a time and must
// not block. They depend only on the arguments of this call and of earlier ones.
type Policy interface {
	// Name of the policy, as in flags: "best-fit".
	Name() string
	// Choose returns the index of the candidate to use; there is at least one, and each
	// satisfies size and hints. An error refuses the request; it wraps ErrQuota or
	// ErrRate if these are the reason. from is valid during the call.
	Choose(r Request, from []Candidate) (int, error)
	// Granted is called after Choose for each request that succeeded.
	Granted(r Request)
	// Evacuate reports whether everything on the peer is to be revoked, for ReasonPolicy.
	// It is called at each Tick.
	Evacuate(p PeerState) bool
}

// Request is a client's request, with the client's account.
type Request struct {
	// Bytes, rounded up to the device's alignment.
	Bytes int64
	Hints Hints
	// Held is what the client already holds, in bytes.
	Held int64
	// Clients is the number of known clients, including this one; Total is the memory for
	// all of them: slabs in service, and borrowable memory.
	Clients int
	Total   int64
	// Now on the runtime's clock: the time of the latest Tick.
	Now time.Duration
}

// Candidate is memory that a request fits into: a free extent of a slab, or a new slab.
type Candidate struct {
	Peer PeerState
	// Slab is its number, or 0 for a new one.
	Slab uint64
	// FreeExtent is the size of the free extent; of a new slab, its size.
	FreeExtent int64
	// Leftover is what remains of the free extent.
	Leftover int64
	// Adjacent: it begins where Hints.After ends.
	Adjacent bool

	offset int64
	slab   *slab // nil: a new one
}

// PeerState is the state of a peer.
type PeerState struct {
	Space device.Space
	// Reading is the latest reading.
	Reading Reading
	// Borrowable is what may still be allocated from the device: free memory less
	// headroom; negative if the headroom is not met.
	Borrowable int64
	// Bandwidth is the decaying mean of Reading.Bandwidth (Options.HalfLife).
	Bandwidth float64
	// Churn is the fraction of the peer's memory that other processes allocate and free
	// per minute, as a decaying mean.
	Churn float64
	// Path from the peer to the reader.
	Path device.Path
}

// byFit orders candidates by smallest leftover, as the paper's prototype does (section
// 3.2): adjacent ones first, then existing slabs before new ones, then the tightest free
// extent, then, for new slabs, the peer with most borrowable memory.
func byFit(a, b Candidate) int {
	return cmp.Or(
		trueFirst(a.Adjacent, b.Adjacent), trueFirst(a.Slab != 0, b.Slab != 0),
		cmp.Compare(a.Leftover, b.Leftover), cmp.Compare(b.Peer.Borrowable, a.Peer.Borrowable),
		cmp.Compare(a.Peer.Space, b.Peer.Space), cmp.Compare(a.Slab, b.Slab),
	)
}

// trueFirst orders true before false.
func trueFirst(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return -1
	}
	return 1
}

// bestCandidate returns the index of the first candidate by keys, then by byFit.
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

// BestFit selects the candidate with the smallest leftover.
type BestFit struct{}

// Name implements Policy.
func (BestFit) Name() string { return "best-fit" }

// Choose implements Policy.
func (BestFit) Choose(_ Request, from []Candidate) (int, error) { return bestCandidate(from), nil }

// Granted implements Policy.
func (BestFit) Granted(Request) {}

// Evacuate implements Policy.
func (BestFit) Evacuate(PeerState) bool { return false }

// Locality selects the peer with the fastest path to the reader, among equals the one
// with the lowest latency, then the fewest links; on that peer, best fit.
type Locality struct{ BestFit }

// Name implements Policy.
func (Locality) Name() string { return "locality" }

// Choose implements Policy.
func (Locality) Choose(_ Request, from []Candidate) (int, error) {
	return bestCandidate(from,
		func(c Candidate) float64 {
			if c.Peer.Path.BytesPerSecond == 0 {
				return math.Inf(-1) // no limit
			}
			return -c.Peer.Path.BytesPerSecond
		},
		func(c Candidate) float64 { return float64(c.Peer.Path.Latency) },
		func(c Candidate) float64 { return float64(len(c.Peer.Path.Links)) },
	), nil
}

// Interference avoids peers whose own work uses their memory bandwidth: copies would slow
// both. It rounds utilization down to tenths, so that fit decides between similar peers.
type Interference struct {
	BestFit
	// EvacuateAt is the mean bandwidth utilization by others, 0 to 1, from which everything
	// on the peer is revoked. Default: never.
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

// Stability avoids peers where other processes allocate and free much memory: copies
// there would soon be revoked. It rounds churn down to twentieths of the memory per
// minute.
type Stability struct {
	BestFit
	// EvacuateAt is the churn from which everything on the peer is revoked, as a fraction
	// of its memory per minute. Default: never.
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

// FairnessOptions limit what each client may allocate.
type FairnessOptions struct {
	// Quota is what each client may hold, in bytes. Default: a share of Request.Total among
	// the clients known so far, by Weights.
	Quota int64
	// Quotas of single clients, in bytes; others have Quota.
	Quotas map[string]int64
	// Weights of clients' shares. Default: 1 each.
	Weights map[string]float64
	// Rate at which each client may allocate, in bytes per second. Default: no limit.
	Rate float64
	// Rates of single clients; others have Rate.
	Rates map[string]float64
	// Burst is how many bytes a client may allocate at once after a pause. A single
	// request may be larger after a pause long enough for it. Default: one second of its
	// rate.
	Burst int64
}

// Fairness refuses requests beyond a client's quota or rate; it places by best fit.
type Fairness struct {
	BestFit
	o       FairnessOptions
	clients map[string]*account
}

// account is what Fairness knows of a client: a token bucket of bytes that it may allocate
// now, which fills at its rate up to the burst; a request larger than that makes it negative.
type account struct {
	weight, rate, burst, bytes float64
	at                         time.Duration
}

// NewFairness makes the policy.
func NewFairness(o FairnessOptions) *Fairness { return &Fairness{o: o, clients: map[string]*account{}} }

// Name implements Policy.
func (*Fairness) Name() string { return "fairness" }

// Choose implements Policy.
func (p *Fairness) Choose(r Request, from []Candidate) (int, error) {
	a := p.account(r)
	if quota := p.quota(r, a); r.Held+r.Bytes > quota {
		return 0, fmt.Errorf("%d bytes held and %d requested, of a quota of %d: %w", r.Held, r.Bytes, quota, ErrQuota)
	}
	if need := min(float64(r.Bytes), a.burst); a.rate > 0 && a.bytes < need {
		return 0, fmt.Errorf("%d bytes requested at a limit of %.0f bytes/s; retry in %.3f s: %w", r.Bytes, a.rate, (need-a.bytes)/a.rate, ErrRate)
	}
	return bestCandidate(from), nil
}

// quota of the client.
func (p *Fairness) quota(r Request, a *account) int64 {
	if quota, ok := p.o.Quotas[r.Hints.Client]; ok {
		return quota
	}
	if p.o.Quota > 0 {
		return p.o.Quota
	}
	// Clients whose first request is yet to come weigh 1.
	all := float64(max(r.Clients-len(p.clients), 0))
	for _, b := range p.clients {
		all += b.weight
	}
	return int64(float64(r.Total) * a.weight / all)
}

// Granted implements Policy.
func (p *Fairness) Granted(r Request) {
	if a := p.account(r); a.rate > 0 {
		a.bytes -= float64(r.Bytes)
	}
}

// account returns the client's account at the time of the request.
func (p *Fairness) account(r Request) *account {
	name := r.Hints.Client
	a := p.clients[name]
	if a == nil {
		a = &account{weight: 1, rate: p.o.Rate, at: r.Now}
		if w, ok := p.o.Weights[name]; ok {
			a.weight = w
		}
		if rate, ok := p.o.Rates[name]; ok {
			a.rate = rate
		}
		if a.burst = float64(p.o.Burst); a.burst == 0 {
			a.burst = a.rate
		}
		a.bytes = a.burst
		p.clients[name] = a
	}
	if r.Now > a.at {
		a.bytes = min(a.burst, a.bytes+a.rate*(r.Now-a.at).Seconds())
		a.at = r.Now
	}
	return a
}

// PeerNeed is the input of Victims about a peer.
type PeerNeed struct {
	Space device.Space
	// Free is what could be allocated now, in bytes; negative if memory is overcommitted.
	Free int64
	// Draining is the size of slabs that are already being released.
	Draining int64
	// Headroom is what must be free.
	Headroom int64
	// Unhealthy or Evacuate: everything is revoked.
	Unhealthy, Evacuate bool
	// AboveShare is to be released for other runtimes: see Runtime.SetOthers.
	AboveShare int64
}

// mustRevoke reports whether anything must be revoked on the peer.
func (p PeerNeed) mustRevoke() bool {
	return p.Unhealthy || p.Evacuate || p.AboveShare > 0 || p.Free+p.Draining < p.Headroom
}

// SlabState is the input of Victims about a slab in service.
type SlabState struct {
	ID    uint64
	Peer  device.Space
	Bytes int64
	// Used is the size of its handles, Cost the cost of losing them.
	Used int64
	Cost time.Duration
	// References on its handles.
	References int
	// First: it goes before all others, whatever they cost (ClientOptions.ReserveBytes).
	First bool
}

// Victim is a slab to be revoked.
type Victim struct {
	Slab   uint64
	Reason Reason
}

// Victims decides which slabs to revoke: all on peers that are unhealthy or that the
// policy evacuates, and on others, those that go first and then cheapest first, as many as the
// headroom needs. It is pure; the result is in the order of the peers.
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
			pressure := p.Headroom - p.Free - p.Draining
			if p.AboveShare > pressure {
				reason = ReasonPolicy
			}
			there = toRelease(there, max(pressure, p.AboveShare))
		}
		for _, s := range there {
			vs = append(vs, Victim{s.ID, reason})
		}
	}
	return vs
}

// toRelease selects slabs of at least need bytes, or all if they have less: those that go first, and
// the cheapest of the others for what these lack.
func toRelease(slabs []SlabState, need int64) []SlabState {
	if need <= 0 {
		return nil
	}
	var first, others []SlabState
	for _, s := range slabs {
		if s.First {
			first = append(first, s)
			need -= s.Bytes
		} else {
			others = append(others, s)
		}
	}
	return append(first, Cheapest(others, need)...)
}

// referenceCost is what each reference adds to the cost of a slab: draining waits for it,
// and what is being read now is likely to be read again.
const referenceCost = time.Millisecond

// cost is the cost of losing the slab.
func (s SlabState) cost() time.Duration { return s.Cost + time.Duration(s.References)*referenceCost }

// costPerByte is the cost of losing the slab, in seconds per byte.
func (s SlabState) costPerByte() float64 { return s.cost().Seconds() / float64(s.Bytes) }

// Cheapest returns slabs with a total of at least need bytes, or all if they have less. They
// cost at most twice as much as the cheapest such slabs, none can be spared, and at the same
// cost a small slab goes before a large one.
func Cheapest(slabs []SlabState, need int64) []SlabState {
	if need <= 0 {
		return nil
	}
	order := slices.Clone(slabs)
	slices.SortFunc(order, func(a, b SlabState) int {
		return cmp.Or(cmp.Compare(a.costPerByte(), b.costPerByte()), cmp.Compare(a.Used, b.Used), cmp.Compare(b.ID, a.ID))
	})
	// By lowest cost per byte; a slab that covers the rest makes one solution, and those
	// behind it make others. The best of them costs at most twice the optimum (Csirik,
	// Frenk, Labbé and Zhang, "Heuristics for the 0-1 min-knapsack problem").
	var (
		begun, best []SlabState
		sum         total // of begun
		least       total // of best
	)
	for _, s := range order {
		with := sum.add(s)
		if with.bytes < need {
			begun, sum = append(begun, s), with
		} else if best == nil || with.cheaper(least) {
			best, least = append(slices.Clone(begun), s), with
		}
	}
	if best == nil {
		return order
	}
	// The last first.
	for i := len(best) - 1; i >= 0; i-- {
		if b := best[i].Bytes; least.bytes-b >= need {
			best = slices.Delete(best, i, i+1)
			least.bytes -= b
		}
	}
	return best
}

// total is of several slabs.
type total struct {
	cost  time.Duration
	bytes int64
}

func (t total) add(s SlabState) total { return total{t.cost + s.cost(), t.bytes + s.Bytes} }

// cheaper reports whether t costs less than u or, at the same cost, has fewer bytes.
func (t total) cheaper(u total) bool {
	return t.cost < u.cost || t.cost == u.cost && t.bytes < u.bytes
}
