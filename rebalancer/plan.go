package rebalancer

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/moeserve/moeserve/experts"
)

// Stats is what is known of the experts.
type Stats struct {
	// Bytes of one expert.
	Bytes int64
	// Rates at which each is used, [position of the layer][expert], per second; One is
	// the rate that a single use makes. See Rates.
	Rates     [][]float64
	SingleUse float64
	// Placed says where each is.
	Placed [][]experts.Placed
	// Dynamic says that local experts may be swapped.
	Dynamic bool
}

// Capacity is what there is to move experts to.
type Capacity struct {
	// Host is the link that experts in host memory are read through.
	Host experts.Link
	// Peers that may be used.
	Peers []Peer
}

// Peer lends memory.
type Peer struct {
	// Link that experts on it are read through.
	experts.Link
	// Free is how many experts fit beside those that are there.
	Free int
	// NotBefore is until when nothing is moved to it: it has refused.
	NotBefore time.Duration
}

// Tuning says what is worth a move.
type Tuning struct {
	// Hysteresis is how many times the benefit of the expert that goes the one that
	// comes must have. At least 1. Default: 1.25.
	Hysteresis float64
	// Horizon is how long a rate is believed in: a move must have earned its own copy
	// back by then. Default: 10 s.
	Horizon time.Duration
	// Deviations is by how many standard deviations of counts the rates of the two
	// must differ; under 0: any difference will do. Default: 2.
	Deviations float64
}

// EnsureDefaults returns t with every unset field at its default.
func (t Tuning) EnsureDefaults() Tuning {
	setDefault(&t.Hysteresis, 1.25)
	setDefault(&t.Horizon, 10*time.Second)
	setDefault(&t.Deviations, 2)
	return t
}

func setDefault[T comparable](field *T, to T) {
	var zero T
	if *field == zero {
		*field = to
	}
}

// Kind is what a move does.
type Kind uint8

const (
	// Promote gives In, which is in host memory alone, a copy in free peer memory.
	Promote Kind = iota
	// Replace gives back the peer copy of Out, then gives In one. They are the same
	// where an expert goes to a faster peer.
	Replace
	// Swap makes In local in place of Out, which is of the same layer.
	Swap
)

func (k Kind) String() string { return [...]string{"promote", "replace", "swap"}[k] }

// Move is one expert's.
type Move struct {
	Kind Kind
	In   experts.ID
	// Out makes room, except for Promote.
	Out experts.ID
	// To are the peers to choose from for a copy, as indices into Capacity.Peers: they
	// are equally fast, and together have room for all moves that name them.
	To []int
	// Gain is the expected benefit: seconds of copying saved per second, per byte
	// moved.
	Gain float64
}

func (m Move) String() string {
	s := fmt.Sprintf("%v %d/%d", m.Kind, m.In.Layer, m.In.Expert)
	if m.Kind != Promote {
		s += fmt.Sprintf(" for %d/%d", m.Out.Layer, m.Out.Expert)
	}
	if m.Kind != Swap {
		s += fmt.Sprint(" to ", m.To)
	}
	return s
}

const (
	// Rates that differ by less than alike are taken as equal where free memory is given
	// away; among links that differ by less than similarLinks, which are measured while other
	// copies run, harvest's policy chooses.
	similarGains, similarLinks = 1.1, 1.3
	// A link whose rate nobody knows is taken for one of a common machine: 16 lanes of
	// PCIe 5 to the host, and NVLink, seven times as fast, to peers.
	nominalHost = 55e9
	nominalPeer = 7
)

// Plan says which experts to move, the most rewarding first. Any number from the
// front may be carried out. It is pure, and equal arguments give equal plans.
//
// An expert in host memory costs its rate times the seconds that its fetch takes;
// one on a peer, times the seconds from there. Free peer memory, the fastest first,
// goes to the experts that gain most by it: all that are used at all, as far as it
// reaches. Among those that gain about the same, each layer gets the same share of
// its offloaded experts, which is all there is to decide where every step fetches
// whole layers. Where nothing has been used yet, all experts count the same.
//
// An expert takes the place of another only if its benefit is Hysteresis times as
// large, if the difference is no chance (Deviations), and if it is worth more than
// the copy within Horizon.
func Plan(s Stats, c Capacity, t Tuning, now time.Duration) []Move {
	return newPlanner(s, c, t, now, false).plan()
}

// item is one expert that may move.
type item struct {
	id   experts.ID
	rate float64
	// at is the class of peers that it is on, hostMemory or residentMemory.
	at int
	// peer that it is on.
	peer int
	// moves: what does stays where it is for the rest of the plan.
	planned bool
	// gain of the copy that is looked at, in seconds per second; rank is that of the
	// first of those that are alike, and share the part of its layer's offloaded
	// experts on peers if it and those before it in the layer go there.
	gain, rank, share float64
}

const (
	hostMemory     = math.MaxInt
	residentMemory = -1
)

// class is peers that are equally fast.
type class struct {
	// peers, and those of them that do not refuse now.
	peers, open []int
	// seconds that a fetch takes.
	seconds float64
	free    int
}

type planner struct {
	stats Stats
	t     Tuning
	host  float64 // seconds that a fetch from host memory takes
	// classes, the fastest first.
	classes []class
	peers   []Peer
	items   []*item
	// onPeers and offloaded experts of each layer.
	onPeers, offloaded []int
	moves              []*move
}

// move is a Move with what it is sorted by.
type move struct {
	Move
	rank float64
}

// newPlanner looks at the arguments. force uses peers that are slower than the host,
// too.
func newPlanner(s Stats, c Capacity, t Tuning, now time.Duration, force bool) *planner {
	p := &planner{stats: s, t: t.EnsureDefaults(), peers: c.Peers}
	rate := c.Host.BytesPerSecond
	if rate <= 0 {
		rate = nominalHost
	}
	p.host = float64(s.Bytes) / rate
	p.classify(rate, now, force)
	on := map[int]int{} // peer to class
	for i, cl := range p.classes {
		for _, k := range cl.peers {
			on[k] = i
		}
	}
	p.onPeers, p.offloaded = make([]int, len(s.Placed)), make([]int, len(s.Placed))
	for l, homes := range s.Placed {
		for e, h := range homes {
			it := &item{id: experts.ID{Layer: l, Expert: e}, rate: s.Rates[l][e], at: hostMemory}
			switch h.Tier {
			case experts.Resident:
				it.at = residentMemory
			case experts.Peer:
				p.onPeers[l]++
				p.offloaded[l]++
				k := slices.IndexFunc(c.Peers, func(p Peer) bool { return p.From == h.Device })
				cl, ok := on[k]
				if !ok {
					continue // on a peer that is being given up
				}
				it.at, it.peer = cl, k
			default:
				p.offloaded[l]++
				if h.Moving {
					p.onPeers[l]++
				}
			}
			if !h.Moving {
				p.items = append(p.items, it)
			}
		}
	}
	return p
}

// classify sorts peers into classes.
func (p *planner) classify(host float64, now time.Duration, force bool) {
	seconds := func(k int) float64 {
		rate := p.peers[k].BytesPerSecond
		if rate <= 0 {
			rate = nominalPeer * host
		}
		return float64(p.stats.Bytes) / rate
	}
	var order []int
	for k := range p.peers {
		if force || seconds(k) < p.host {
			order = append(order, k)
		}
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(seconds(a), seconds(b)) })
	var first float64
	for _, k := range order {
		s := seconds(k)
		if len(p.classes) == 0 || s > similarLinks*first {
			p.classes = append(p.classes, class{})
			first = s
		}
		cl := &p.classes[len(p.classes)-1]
		cl.peers, cl.seconds = append(cl.peers, k), s
		if now >= p.peers[k].NotBefore {
			cl.free += max(p.peers[k].Free, 0)
			cl.open = append(cl.open, k)
		}
	}
	for _, cl := range p.classes {
		slices.Sort(cl.open)
	}
}

func (p *planner) plan() []Move {
	if p.stats.Dynamic {
		p.swap()
	}
	for k := range p.classes {
		p.fill(k)
		p.replace(k)
	}
	slices.SortStableFunc(p.moves, func(a, b *move) int { return cmp.Compare(b.rank, a.rank) })
	moves := make([]Move, len(p.moves))
	for i, m := range p.moves {
		moves[i] = m.Move
	}
	return moves
}

// seconds that a fetch of it takes from where it is, which is not local memory.
func (p *planner) seconds(it *item) float64 {
	if it.at == hostMemory {
		return p.host
	}
	return p.classes[it.at].seconds
}

// worthwhile says whether in should take the place of out (nil: a free one), which gains
// and loses so many seconds per second.
func (p *planner) worthwhile(in, out *item, gain, loss float64) bool {
	if gain <= loss*p.t.Hysteresis || (gain-loss)*p.t.Horizon.Seconds() < p.host {
		return false
	}
	if out == nil {
		return true
	}
	// The variance of a rate is half of what as many uses would make at once.
	chance := math.Sqrt((in.rate + out.rate) * p.stats.SingleUse / 2)
	return in.rate-out.rate > p.t.Deviations*chance
}

func (p *planner) add(kind Kind, in, out *item, to []int, gain, rank float64) {
	m := Move{Kind: kind, In: in.id, To: to, Gain: gain / float64(p.stats.Bytes)}
	if out != nil {
		m.Out = out.id
	}
	p.moves = append(p.moves, &move{m, rank})
	in.planned = true
	if out != nil {
		out.planned = true
	}
}

// swap makes the hottest of each layer local.
func (p *planner) swap() {
	for l := range p.stats.Placed {
		var local, away []*item
		for _, it := range p.items {
			switch {
			case it.id.Layer != l || it.planned:
			case it.at == residentMemory:
				local = append(local, it)
			default:
				it.gain = it.rate * p.seconds(it)
				away = append(away, it)
			}
		}
		byID := func(a, b *item) int { return cmp.Compare(a.id.Expert, b.id.Expert) }
		slices.SortFunc(local, func(a, b *item) int { return cmp.Or(cmp.Compare(a.rate, b.rate), byID(a, b)) })
		slices.SortFunc(away, func(a, b *item) int { return cmp.Or(cmp.Compare(b.gain, a.gain), byID(a, b)) })
		for i := range min(len(local), len(away)) {
			in, out := away[i], local[i]
			loss := out.rate * p.host
			if !p.worthwhile(in, out, in.gain, loss) {
				break
			}
			p.add(Swap, in, out, nil, in.gain-loss, in.gain-loss)
		}
	}
}

// candidates for the class, in the order in which they should go there.
func (p *planner) candidates(k int) []*item {
	var cs []*item
	for _, it := range p.items {
		if it.at > k && !it.planned {
			it.gain = it.rate * (p.seconds(it) - p.classes[k].seconds)
			cs = append(cs, it)
		}
	}
	byID := func(a, b *item) int {
		return cmp.Or(cmp.Compare(a.id.Layer, b.id.Layer), cmp.Compare(a.id.Expert, b.id.Expert))
	}
	slices.SortFunc(cs, func(a, b *item) int { return cmp.Or(cmp.Compare(b.gain, a.gain), byID(a, b)) })
	there := slices.Clone(p.onPeers)
	one := p.stats.SingleUse * (p.host - p.classes[k].seconds)
	for from := 0; from < len(cs); {
		to := from
		for to < len(cs) && (cs[to].gain > 0) == (cs[from].gain > 0) && (cs[to].gain+one)*similarGains >= cs[from].gain {
			it := cs[to]
			it.rank = cs[from].gain
			if it.at == hostMemory {
				there[it.id.Layer]++
			}
			it.share = float64(there[it.id.Layer]) / float64(p.offloaded[it.id.Layer])
			to++
		}
		slices.SortFunc(cs[from:to], func(a, b *item) int { return cmp.Or(cmp.Compare(a.share, b.share), byID(a, b)) })
		from = to
	}
	return cs
}

// noneUsed says that no expert has been used.
func (p *planner) noneUsed() bool {
	for _, rates := range p.stats.Rates {
		for _, r := range rates {
			if r > 0 {
				return false
			}
		}
	}
	return true
}

// fill gives the class's free memory away.
func (p *planner) fill(k int) {
	cl := &p.classes[k]
	if cl.free == 0 {
		return
	}
	all := p.noneUsed()
	for _, it := range p.candidates(k) {
		if cl.free == 0 {
			return
		}
		switch {
		case it.at == hostMemory && (it.rate > 0 || all):
			p.onPeers[it.id.Layer]++
			p.add(Promote, it, nil, cl.open, it.gain, it.rank)
		case it.at != hostMemory && p.worthwhile(it, nil, it.gain, 0):
			p.add(Replace, it, it, cl.open, it.gain, it.rank)
		default:
			continue
		}
		cl.free--
	}
}

// replace gives the places of the coldest in the class to the hottest beyond it.
func (p *planner) replace(k int) {
	var there []*item
	for _, it := range p.items {
		if it.at == k && !it.planned && slices.Contains(p.classes[k].open, it.peer) {
			there = append(there, it)
		}
	}
	slices.SortStableFunc(there, func(a, b *item) int { return cmp.Compare(a.rate, b.rate) })
	coming := p.candidates(k)
	for i := range min(len(there), len(coming)) {
		in, out := coming[i], there[i]
		loss := out.rate * (p.host - p.classes[k].seconds)
		if !p.worthwhile(in, out, in.gain, loss) {
			break
		}
		p.add(Replace, in, out, p.classes[k].open, in.gain-loss, in.rank-loss)
	}
}
