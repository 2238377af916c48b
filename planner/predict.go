package planner

import (
	"fmt"
	"math"

	"github.com/moeserve/moeserve/configs"
)

// Problem is what to plan for.
type Problem struct {
	Model    Model
	Hardware Hardware
	Workload Workload
	Sizes    Sizes
	Shares   Shares
	// PromptsAlike says that prompts run as decoded tokens do: in micro-batches of as
	// many rows, with attention in the same place. Otherwise a micro-batch has as many
	// prompts as it has rows of decoded tokens, and the GPU attends to them.
	PromptsAlike bool
	// BothLinks says that what lies with peers comes over their links and the host's,
	// cut so that both end together, and not over the peers' alone.
	BothLinks bool
}

// normalized fills in defaults, once for all that is asked of a problem.
func (p Problem) normalized() (*Problem, error) {
	if err := p.Model.Validate(); err != nil {
		return nil, err
	}
	if err := p.Hardware.Validate(); err != nil {
		return nil, err
	}
	if err := p.Workload.Validate(); err != nil {
		return nil, err
	}
	p.Model = p.Model.EnsureDefaults()
	p.Sizes = p.Sizes.EnsureDefaults(&p.Model)
	p.Shares = p.Shares.EnsureDefaults()
	for _, s := range []float64{p.Shares.GPU, p.Shares.Host, p.Shares.Peer} {
		if !(s > 0 && s <= 1) {
			return nil, fmt.Errorf("planner: shares of memory %+v; each must be above 0 and at most 1", p.Shares)
		}
	}
	return &p, nil
}

// Step is what a step takes, in seconds. All that is busy overlaps: the step takes
// as long as the busiest.
type Step struct {
	Seconds float64
	Bound   Bound
	// GPU and CPU are busy computing for so long, the links copying.
	GPU, CPU                    float64
	HostLink, D2HLink, PeerLink float64
	// Overhead is what the chain GPU, link, CPU, link of one micro-batch makes a step
	// last, with as many micro-batches under way as the schedule has; 0 with
	// attention on the GPU.
	Overhead float64
	// OnDemandFetch is the part of the copies that nothing overlaps with, since the experts
	// are known only when the router has chosen.
	OnDemandFetch float64
	// Phases of GPU, over all layers.
	Phases []Phase
}

// Prediction is what a policy should give.
type Prediction struct {
	Policy Policy
	// Decode is one step that decodes a token of every sequence, at the mean context.
	Decode Step
	// Prefill is one of PrefillSteps equal steps over the prompts of the batch.
	Prefill      Step
	PrefillSteps int
	// PrefillSeconds are those of all prefill steps, DecodeSeconds of all decode
	// steps: one fewer than the new tokens, since prefill gives the first.
	PrefillSeconds, DecodeSeconds float64
	// DecodeTokS is a batch over a decode step, TokS all generated tokens over prefill
	// and decode, both in tokens/s.
	DecodeTokS, TokS float64
	Memory           Memory
}

// Predict works out what a policy takes and gives. A policy that does not fit is
// predicted all the same, with a *MisfitError beside it; any other error comes with
// no prediction.
func (p Problem) Predict(policy Policy) (Prediction, error) {
	n, err := p.normalized()
	if err != nil {
		return Prediction{}, err
	}
	x, err := n.normal(policy)
	if err != nil {
		return Prediction{}, err
	}
	return n.predict(x), n.misfit(x)
}

func (p *Problem) predict(x Policy) Prediction {
	decodeWork, prefillWork := p.decodeWork(&x), p.prefillWork(&x)
	r := Prediction{Policy: x, Memory: p.memory(&x), PrefillSteps: p.prefillSteps(&x)}
	r.Decode = p.decode(&x, p.Hardware.total(&decodeWork))
	r.Prefill = p.prefill(&x, p.Hardware.total(&prefillWork))
	for _, s := range []struct {
		step *Step
		work *work
	}{{&r.Decode, &decodeWork}, {&r.Prefill, &prefillWork}} {
		phases, most := p.Hardware.phases(s.work)
		s.step.Phases = phases
		if s.step.Bound == BoundGPUCompute {
			s.step.Bound = most
		}
	}
	r.PrefillSeconds = float64(r.PrefillSteps) * r.Prefill.Seconds
	r.DecodeSeconds = float64(p.Workload.NewTokens-1) * r.Decode.Seconds
	r.DecodeTokS = float64(x.Batch) / r.Decode.Seconds
	r.TokS = float64(x.Batch) * float64(p.Workload.NewTokens) / (r.PrefillSeconds + r.DecodeSeconds)
	return r
}

// groups is in how many parts a decode step's rows go through projections and
// through experts, and how many of the parts are under way at once.
func (p *Policy) groups() (projections, experts, underWay int) {
	n := p.MicroBatches()
	switch {
	case p.Grouping == configs.PerMicroBatch:
		// CGOPipe looks two micro-batches ahead.
		return n, n, min(n, 3)
	case p.Attention == configs.OnCPU:
		halves := min(2, p.Batch)
		return max(n, halves), halves, halves
	}
	return n, 1, 1
}

func (p *Problem) decodeWork(x *Policy) work {
	n, seen := float64(x.Batch), p.Model.seen(p.Workload.Context())
	projections, experts, _ := x.groups()
	return p.Model.work(stepShape{
		rows: n, logits: n, pairs: n * seen, kvTokens: n * seen,
		projections: float64(projections), experts: float64(experts), hostAttention: x.Attention == configs.OnCPU,
	})
}

// decode is a decode step whose phases on the GPU take gpu seconds.
func (p *Problem) decode(x *Policy, gpu float64) Step {
	m, h := &p.Model, &p.Hardware
	n, seen := float64(x.Batch), m.seen(p.Workload.Context())
	kv := float64(m.KVBytesPerToken())
	s, cpu := Step{GPU: gpu}, BoundCPUMemory
	var up, down float64 // bytes
	if x.Attention == configs.OnCPU {
		down, up, cpu = p.attendOnCPU(&s, x, n, n*seen, n*seen)
	} else {
		down, up = n*kv*x.KVOnHost, n*seen*kv*x.KVOnHost
	}
	s.D2HLink = down / h.GPUToHost
	s.HostLink = up / h.HostToGPU[x.HostPaths-1]
	if x.HostPaths > 1 {
		s.PeerLink = p.relayed(x.HostPaths, up)
	}
	share := 1.0
	if x.OnDemand {
		share = m.Distinct(n) / float64(m.Experts)
	}
	host, peer := p.fetch(x, share)
	if x.OnDemand && x.ResidentExperts < m.ExpertCount() {
		s.OnDemandFetch = max(host, peer) + float64(m.MoELayers())*h.RoundTrip
	}
	s.HostLink += host
	s.PeerLink += peer
	s.finish(cpu)
	return s
}

// attendOnCPU adds a step's attention over pairs of rows and keys to s, and says how
// many bytes go down for it and come up, and what bounds it.
func (p *Problem) attendOnCPU(s *Step, x *Policy, rows, pairs, kvTokens float64) (down, up float64, bound Bound) {
	m, h := &p.Model, &p.Hardware
	layers, a := float64(m.Layers), float64(m.ActivationBytes)
	q, v := float64(m.Heads*m.HeadDim), float64(2*m.KVHeads*m.HeadDim)
	// Products with keys and with values, and the softmax between.
	products := pairs * layers * (4*q + 2*float64(m.Heads)) / h.CPUFlops
	reading := (kvTokens*float64(m.KVBytesPerToken()) + 2*a*rows*q*layers) / h.HostMemoryRate
	s.CPU, bound = max(products, reading), BoundCPUMemory
	if products > reading {
		bound = BoundCPU
	}
	down, up = rows*(q+v)*a*layers, rows*q*a*layers
	_, _, underWay := x.groups()
	s.Overhead = (s.GPU + s.CPU + down/h.GPUToHost + up/h.HostToGPU[0]) / float64(underWay)
	return down, up, bound
}

// finish says how long the step takes, and what bounds it: cpu, where the CPU does.
func (s *Step) finish(cpu Bound) {
	s.Seconds, s.Bound = s.GPU, BoundGPUCompute
	longer := func(t float64, b Bound) {
		if t > s.Seconds {
			s.Seconds, s.Bound = t, b
		}
	}
	longer(s.CPU, cpu)
	longer(s.HostLink, BoundHostLink)
	longer(s.PeerLink, BoundPeerLink)
	longer(s.D2HLink, BoundD2HLink)
	longer(s.Overhead, BoundOverhead)
	if s.OnDemandFetch > 0 {
		longer(max(s.GPU, s.CPU, s.Overhead)+s.OnDemandFetch, BoundOnDemandFetch)
	}
}

// relayed is the time that a number of bytes from the host keep the peers' links
// busy: those that do not take the direct path.
func (p *Problem) relayed(paths int, bytes float64) float64 {
	h := &p.Hardware
	return bytes * (1 - h.HostToGPU[0]/h.HostToGPU[paths-1]) / h.PeerToGPU
}

// fetch is how long the links are busy with a share of the offloaded experts.
func (p *Problem) fetch(x *Policy, share float64) (host, peer float64) {
	fromHost, fromPeer, relayed := p.expertSeconds(x)
	n := share * float64(x.HostExperts(p.Model))
	host, peer = n*fromHost, share*float64(x.PeerExperts)*fromPeer+n*relayed
	if p.BothLinks && peer > host && fromPeer > relayed {
		cut := min((peer-host)/(fromHost+fromPeer-relayed), share*float64(x.PeerExperts))
		host, peer = host+cut*fromHost, peer-cut*(fromPeer-relayed)
	}
	return host, peer
}

// expertSeconds is how long one expert keeps the host link busy, the peers' links
// where it comes from a peer, and these where it comes from the host.
func (p *Problem) expertSeconds(x *Policy) (fromHost, fromPeer, relayed float64) {
	h := &p.Hardware
	fromHost = h.HostCopySeconds(p.Sizes.Expert, x.HostPaths)
	if h.PeerToGPU > 0 {
		fromPeer = h.PeerCopySeconds(p.Sizes.Expert)
	}
	if x.HostPaths > 1 {
		relayed = p.relayed(x.HostPaths, float64(p.Sizes.Expert))
	}
	return fromHost, fromPeer, relayed
}

// prefillSteps is the number of steps that a batch's prompts take.
func (p *Problem) prefillSteps(x *Policy) int {
	return (x.Batch*p.Workload.PromptTokens + x.PrefillTokens - 1) / x.PrefillTokens
}

func (p *Problem) prefillWork(x *Policy) work {
	n, rows, pairs := p.prefillRows(x)
	each := float64(x.MicroBatch)
	if !p.PromptsAlike || x.MicroBatch == x.Batch {
		each *= float64(p.Workload.PromptTokens)
	}
	projections := math.Ceil(rows / each)
	shape := stepShape{rows: rows, logits: n, pairs: pairs, kvTokens: rows, projections: projections, experts: 1}
	if x.Grouping == configs.PerMicroBatch {
		shape.experts = projections
	}
	if p.PromptsAlike && x.Attention == configs.OnCPU {
		shape.hostAttention = true
		if x.Grouping == configs.PerLayer {
			halves := float64(min(2, x.Batch))
			shape.experts, shape.projections = halves, max(halves, projections)
		}
	}
	return p.Model.work(shape)
}

// prefillRows is how many sequences and rows a prefill step has, and how many pairs of
// a query and a key.
func (p *Problem) prefillRows(x *Policy) (sequences, rows, pairs float64) {
	prompt := float64(p.Workload.PromptTokens)
	sequences = float64(x.Batch) / float64(p.prefillSteps(x))
	// A query sees its own token and those before it: prompt/2 on average, and no
	// more than the window.
	each := prompt * (prompt + 1) / 2
	if w := float64(p.Model.Window); w > 0 && prompt > w {
		each = w*(w+1)/2 + (prompt-w)*w
	}
	return sequences, sequences * prompt, sequences * each
}

// prefill is one prefill step whose phases on the GPU take gpu seconds: all
// offloaded experts are fetched, and what belongs on the host of the new keys and
// values goes there.
func (p *Problem) prefill(x *Policy, gpu float64) Step {
	s, cpu := Step{GPU: gpu}, BoundCPU
	_, rows, pairs := p.prefillRows(x)
	down, up := rows*float64(p.Model.KVBytesPerToken())*x.KVOnHost, 0.0
	if p.PromptsAlike && x.Attention == configs.OnCPU {
		down, up, cpu = p.attendOnCPU(&s, x, rows, pairs, rows)
	}
	s.D2HLink = down / p.Hardware.GPUToHost
	s.HostLink, s.PeerLink = p.fetch(x, 1)
	s.HostLink += up / p.Hardware.HostToGPU[x.HostPaths-1]
	if x.HostPaths > 1 {
		s.PeerLink += p.relayed(x.HostPaths, up)
	}
	s.finish(cpu)
	return s
}

func (p *Problem) has(tier configs.Tier) error {
	if tier > configs.PeerTier {
		return fmt.Errorf("planner: invalid tier %d", tier)
	}
	if tier == configs.PeerTier && p.Hardware.PeerMemory == 0 {
		return fmt.Errorf("planner: hardware %s has no peers to fetch experts from", p.Hardware.Name)
	}
	return nil
}

// Offload returns the policy with a fraction of the experts offloaded, all of them
// fetched from one tier, or split so that both links end together.
func (p Problem) Offload(policy Policy, fraction float64, tier configs.Tier) (Policy, error) {
	n, err := p.normalized()
	if err != nil {
		return policy, err
	}
	if !(fraction >= 0 && fraction <= 1) {
		return policy, fmt.Errorf("planner: offload fraction %v; it must be from 0 to 1", fraction)
	}
	if err := n.has(tier); err != nil {
		return policy, err
	}
	policy.ResidentExperts, policy.PeerExperts = n.Model.ExpertCount()-n.Model.Offloaded(fraction), 0
	x, err := n.normal(policy)
	if err != nil {
		return policy, err
	}
	policy.PeerExperts = n.split(&x, tier)
	return policy, nil
}

// MostResident is the largest number of local experts with which the policy fits,
// whatever its own, and false where it fits with none.
func (p Problem) MostResident(policy Policy) (int, bool) {
	n, err := p.normalized()
	if err != nil {
		return 0, false
	}
	policy.ResidentExperts, policy.PeerExperts = 0, 0
	x, err := n.normal(policy)
	if err != nil {
		return 0, false
	}
	return n.mostResident(x)
}

// SaturationPoint is the offload fraction up to which a decode step takes as long as with all
// experts local: there copies take as long as all else. It is above 1 where even
// fetching all of them stays hidden.
func (p Problem) SaturationPoint(policy Policy, tier configs.Tier) (float64, error) {
	n, err := p.normalized()
	if err != nil {
		return 0, err
	}
	if err := n.has(tier); err != nil {
		return 0, err
	}
	policy.ResidentExperts, policy.PeerExperts, policy.OnDemand = n.Model.ExpertCount(), 0, false
	x, err := n.normal(policy)
	if err != nil {
		return 0, err
	}
	w := n.decodeWork(&x)
	none := n.decode(&x, n.Hardware.total(&w))
	x.ResidentExperts = 0
	x.PeerExperts = n.split(&x, tier)
	all := n.decode(&x, none.GPU)
	knee := math.Inf(1)
	for _, l := range [][2]float64{{none.HostLink, all.HostLink}, {none.PeerLink, all.PeerLink}} {
		if l[1] > l[0] {
			knee = min(knee, (none.Seconds-l[0])/(l[1]-l[0]))
		}
	}
	return knee, nil
}

// split is how many offloaded experts to fetch from peers so that both links end
// together: about in the ratio of their rates, less what else the links carry.
func (p *Problem) split(x *Policy, tier configs.Tier) int {
	missing := p.Model.ExpertCount() - x.ResidentExperts
	most := 0
	if p.Hardware.PeerMemory > 0 {
		most = min(missing, p.peerRoom())
	}
	switch tier {
	case configs.HostTier:
		return 0
	case configs.PeerTier:
		return missing
	}
	if most == 0 {
		return 0
	}
	y := *x
	y.ResidentExperts, y.PeerExperts = p.Model.ExpertCount(), 0
	base := p.decode(&y, 0)
	fromHost, fromPeer, relayed := p.expertSeconds(x)
	// peers * fromPeer + (missing - peers) * relayed = (missing - peers) * fromHost,
	// with what the links carry anyway on either side.
	even := (float64(missing)*(fromHost-relayed) + base.HostLink - base.PeerLink) / (fromPeer + fromHost - relayed)
	longest := func(peers int) float64 {
		host := float64(missing - peers)
		return max(host*fromHost+base.HostLink, float64(peers)*fromPeer+host*relayed+base.PeerLink)
	}
	low := int(min(max(even, 0), float64(most)))
	if high := min(low+1, most); longest(high) < longest(low) {
		return high
	}
	return low
}
