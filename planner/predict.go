package planner

import (
	"cmp"
	"fmt"
	"math"
	"time"

	"github.com/moeserve/moeserve/configs"
)

// Problem is what to plan for.
type Problem struct {
	Model    Model
	Hardware Hardware
	Workload Workload
	Sizes    Sizes
	Shares   Shares
	// PromptsAlike: prefill runs as decode does, in micro-batches of as many tokens, with
	// attention in the same place. Otherwise a micro-batch has as many prompts as it has
	// decoded tokens, and the GPU computes their attention.
	PromptsAlike bool
	// BothLinks: experts in peer memory are fetched over the links of peers and host, cut
	// so that both end together, and not over the peers' alone.
	BothLinks bool
	// CPUExperts is the fraction of the experts missing from a decode step whose policy is
	// OnDemand, and that lie in host memory alone, that the CPU computes there; negative: as many as
	// let CPU and host link end together. Default: 0, all are fetched.
	CPUExperts float64
	// InPlaceTokens is the maximum of tokens of a decode step whose kernels may read offloaded experts
	// where they lie, in place of copies; 0: none. AlwaysInPlace: all these steps do, and not only those
	// that are faster so.
	InPlaceTokens int
	AlwaysInPlace bool
	// Routing is what is known of which experts steps use. Default: every expert is as likely as another.
	Routing Routing
	// HostBatch and PeerBatch are how many experts from the host, and from a peer, are copied by
	// one operation of the device, which has one latency. Default: 1.
	HostBatch, PeerBatch int
}

// Routing of steps that were measured; 0: unknown.
type Routing struct {
	// Decode and Prefill are the experts of a layer that have rows in a step, means over layers.
	Decode, Prefill float64
	// Fetched is the bytes of offloaded experts that a decode step copies, or reads in place.
	Fetched float64
}

// normalized checks the problem and fills in its defaults.
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
			return nil, fmt.Errorf("planner: shares of memory %+v: each must be above 0 and at most 1", p.Shares)
		}
	}
	return &p, nil
}

// Step is the time of a step, in seconds. GPU, CPU and links overlap: the step takes as
// long as the busiest of them.
type Step struct {
	Seconds float64
	Bound   Bound
	// GPU and CPU are the times of computing, the links' those of copying.
	GPU, CPU                    float64
	HostLink, D2HLink, PeerLink float64
	// Overhead (synchronization and launch overhead) is the time that the chain GPU,
	// link, CPU, link of one micro-batch imposes on a step, with as many micro-batches in
	// flight as the schedule has; 0 with attention on the GPU.
	Overhead float64
	// OnDemandFetch is the time of the copies that are not overlapped, since the experts
	// are known only after the router.
	OnDemandFetch float64
	// Phases of GPU, over all layers.
	Phases []Phase
}

// Prediction is the predicted performance and memory of a policy.
type Prediction struct {
	Policy Policy
	// Decode is one step that decodes a token of every sequence, at the mean context.
	Decode Step
	// Prefill is one of PrefillSteps equal steps over the prompts of the batch.
	Prefill      Step
	PrefillSteps int
	// PrefillSeconds is the time of all prefill steps, DecodeSeconds of all decode steps:
	// one fewer than the new tokens, since prefill generates the first.
	PrefillSeconds, DecodeSeconds float64
	// Throughput in tokens/s: PrefillTokS is prompt tokens over PrefillSeconds, DecodeTokS
	// a batch over a decode step, TokS (end-to-end) all generated tokens over prefill and
	// decode.
	PrefillTokS, DecodeTokS, TokS float64
	Memory                        Memory
}

// TTFT is the time to first token, in seconds, of the last sequence of a batch that arrives
// at once: the prefill of all its prompts.
func (r *Prediction) TTFT() float64 { return r.PrefillSeconds }

// TPOT is the time per output token, in seconds: a decode step of the batch.
func (r *Prediction) TPOT() float64 { return r.Decode.Seconds }

// Predict computes the performance and memory of a policy. A policy that does not fit has
// a prediction, too, with a *MisfitError beside it; any other error comes with none.
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
	decode, prefill := p.decodeTimes(&x), p.prefillTimes(&x)
	r := Prediction{Policy: x, Memory: p.memory(&x), PrefillSteps: p.prefillSteps(&x)}
	r.Decode = p.decode(&x, &decode)
	r.Prefill = p.prefill(&x, prefill.total())
	for _, s := range []struct {
		step  *Step
		times *stepTimes
	}{{&r.Decode, &decode}, {&r.Prefill, &prefill}} {
		phases, bound := s.times.list()
		s.step.Phases = phases
		if s.step.Bound == BoundGPUCompute {
			s.step.Bound = bound
		}
	}
	r.PrefillSeconds = float64(r.PrefillSteps) * r.Prefill.Seconds
	r.DecodeSeconds = float64(p.Workload.NewTokens-1) * r.Decode.Seconds
	r.PrefillTokS = float64(x.Batch) * float64(p.Workload.PromptTokens) / r.PrefillSeconds
	r.DecodeTokS = float64(x.Batch) / r.Decode.Seconds
	r.TokS = float64(x.Batch) * float64(p.Workload.NewTokens) / (r.PrefillSeconds + r.DecodeSeconds)
	return r
}

// groups is the number of parts in which a decode step's tokens go through projections and
// through experts, and the number of these parts in flight.
func (p *Policy) groups() (projections, experts, inFlight int) {
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

// decodeTimes are the times of the GPU in a decode step. It is a CUDA graph where nothing is fetched.
func (p *Problem) decodeTimes(x *Policy) stepTimes {
	t := p.decodeShape(x, x.ResidentExperts < p.Model.ExpertCount() || x.Attention == configs.OnCPU || x.Grouping == configs.PerMicroBatch)
	if !x.OnDemand {
		p.addCopies(&t, x)
	}
	return t
}

// addCopies adds the time that copies of offloaded experts take of the GPU's memory in a step, where what
// the GPU takes was measured without copies.
func (p *Problem) addCopies(t *stepTimes, x *Policy) {
	if bytes := float64(p.Model.ExpertCount()-x.ResidentExperts) * float64(p.Sizes.Expert); bytes > 0 && p.Hardware.Compute != nil {
		t[phaseCopies] = Phase{Name: phaseNames[phaseCopies], Bytes: bytes, Seconds: bytes / p.Hardware.GPUMemoryRate, Bound: BoundGPUMemory}
	}
}

func (p *Problem) decodeShape(x *Policy, enqueued bool) stepTimes {
	n, seen := float64(x.Batch), p.Model.seen(p.Workload.Context())
	projections, experts, _ := x.groups()
	return p.Hardware.times(&p.Model, stepShape{
		tokens: n, logits: n, pairs: n * seen, kvTokens: n * seen, context: p.Workload.Context() + 1, sequences: n / float64(projections), prompt: 1,
		projections: float64(projections), experts: float64(experts), hostAttention: x.Attention == configs.OnCPU, enqueued: enqueued,
		touched: p.Routing.Decode,
	})
}

// mispredicted is the share of the experts that a router selects by which copies on demand are more:
// those that were predicted and are not selected. See pipeline.AccessModel.
const mispredicted = 0.08

// decode is a decode step whose phases on the GPU take these times.
func (p *Problem) decode(x *Policy, gpu *stepTimes) Step {
	m, h := &p.Model, &p.Hardware
	n, seen := float64(x.Batch), m.seen(p.Workload.Context())
	kv := float64(m.KVBytesPerToken())
	s, cpu := Step{GPU: gpu.total()}, BoundCPUMemory
	var h2d, d2h float64 // bytes
	if x.Attention == configs.OnCPU {
		d2h, h2d, cpu = p.cpuAttention(&s, x, n, n*seen, n*seen)
	} else {
		d2h, h2d = n*kv*x.KVOnHost, n*seen*kv*x.KVOnHost
	}
	s.D2HLink = d2h / h.GPUToHost
	s.HostLink = h2d / h.HostToGPU[x.HostPaths-1]
	if x.HostPaths > 1 {
		s.PeerLink = p.relayed(x.HostPaths, h2d)
	}
	share := 1.0
	if x.OnDemand {
		share = p.missing(x)
		if h.Compute != nil && p.Routing.Fetched == 0 && p.CPUExperts == 0 {
			share *= 1 + mispredicted
		}
	}
	host, peer := p.fetch(x, share)
	computing := 0.0
	if x.OnDemand && x.ResidentExperts < m.ExpertCount() {
		if x.Attention == configs.OnGPU {
			computing, host = p.cpuExperts(x, n, share, host)
		}
		s.OnDemandFetch = max(host, peer, computing) + float64(m.MoELayers())*h.RoundTrip
	}
	s.HostLink += host
	s.PeerLink += peer
	s.finish(cpu)
	s.CPU += computing // beside the fetches, which have been counted with it
	if t, ok := p.inPlace(x, gpu); ok && (p.AlwaysInPlace || t.Seconds < s.Seconds) {
		return t
	}
	return s
}

// missing is the share of the offloaded experts that a decode step uses.
func (p *Problem) missing(x *Policy) float64 {
	if offloaded := p.Model.ExpertCount() - x.ResidentExperts; p.Routing.Fetched > 0 && offloaded > 0 {
		return p.Routing.Fetched / (float64(offloaded) * float64(p.Sizes.Expert))
	}
	return p.Model.Distinct(float64(x.Batch)) / float64(p.Model.Experts)
}

// maxHeld is the most time for which a step reads peers' memory in place, in seconds, unless it is told
// to: see pipeline.
const maxHeld = 0.05

// inPlace is a decode step that reads offloaded experts where they lie, if there can be one. gpu is
// its time with copies.
func (p *Problem) inPlace(x *Policy, gpu *stepTimes) (Step, bool) {
	m, h := &p.Model, &p.Hardware
	offloaded := m.ExpertCount() - x.ResidentExperts
	if x.Batch > p.InPlaceTokens || offloaded == 0 || h.HostReadRate == 0 || x.Attention != configs.OnGPU || gpu.total() == 0 {
		return Step{}, false
	}
	peers, peerRate := x.PeerExperts, h.PeerReadRate
	if peerRate == 0 {
		peers, peerRate = 0, 1
	}
	share := p.missing(x) * float64(p.Sizes.Expert)
	host, peer := share*float64(offloaded-peers)/h.HostReadRate, share*float64(peers)/peerRate
	if peers > 0 && max(host, peer) > maxHeld && !p.AlwaysInPlace {
		return Step{}, false
	}
	t := p.decodeShape(x, false)
	// Weights that are read over a link are not read from the GPU's memory.
	resident, reading := float64(x.ResidentExperts)/float64(m.ExpertCount()), 0.0
	for _, i := range []int{phaseUp, phaseDown} {
		t[i].Seconds *= resident
		reading += t[i].Seconds
	}
	s := Step{GPU: t.total(), HostLink: host, PeerLink: peer, Bound: BoundHostLink}
	if peer > host {
		s.Bound = BoundPeerLink
	}
	// A launch reads a layer's experts from all memories at once.
	s.Seconds = s.GPU - reading + max(reading, host, peer)
	return s, true
}

// CPUExpertsStart is the fixed time of the experts of a layer that the CPU computes, of starting its
// threads and of copies of rows there and back: 87 to 133 us were measured on a server with one H200.
const CPUExpertsStart = 100 * time.Microsecond

// cpuExperts is the time of the experts of a step of n tokens that the CPU computes, and that of the
// host link for the others, of which it would take host for all: what the store divides experts by
// (experts.CPUShare), with a fixed time for each layer and one for each expert. The CPU and the link read the
// same memory, so both together take at least as long as that needs for all of these experts.
func (p *Problem) cpuExperts(x *Policy, n, share, host float64) (computing, copying float64) {
	m, h := &p.Model, &p.Hardware
	missing := share * float64(x.HostExperts(*m))
	if p.CPUExperts == 0 || missing == 0 {
		return 0, host
	}
	rows := n * float64(m.TopK) / m.Distinct(n)
	each := max(float64(m.ExpertBytes())/h.HostMemoryRate, rows*6*float64(m.Hidden)*float64(m.ExpertWidth)/h.CPUFlops)
	start := min(missing, float64(m.MoELayers())) * CPUExpertsStart.Seconds() // layers that miss none have none
	fraction := p.CPUExperts
	if fraction < 0 {
		fraction = max(0, (host-start)/(host+missing*each))
	}
	if fraction == 0 {
		return 0, host
	}
	memory := float64(m.ExpertBytes()) / h.HostMemoryRate
	return start + missing*max(fraction*each, memory), (1 - fraction) * host
}

// cpuAttention adds the attention of a step's tokens over pairs of queries and keys to s,
// and returns the bytes of its D2H and H2D copies, and the CPU's bound.
func (p *Problem) cpuAttention(s *Step, x *Policy, tokens, pairs, kvTokens float64) (d2h, h2d float64, bound Bound) {
	m, h := &p.Model, &p.Hardware
	layers, a := float64(m.Layers), float64(m.ActivationBytes)
	q, v := float64(m.Heads*m.HeadDim), float64(2*m.KVHeads*m.HeadDim)
	// The GEMMs with keys and with values, and the softmax between.
	compute := pairs * layers * (4*q + 2*float64(m.Heads)) / cmp.Or(h.CPUAttentionFlops, h.CPUFlops)
	reading := kvTokens*float64(m.KVBytesPerToken())/cmp.Or(h.CPUAttentionRate, h.HostMemoryRate) + 2*a*tokens*q*layers/h.HostMemoryRate
	s.CPU, bound = max(compute, reading), BoundCPUMemory
	if compute > reading {
		bound = BoundCPU
	}
	d2h, h2d = tokens*(q+v)*a*layers, tokens*q*a*layers
	_, _, inFlight := x.groups()
	s.Overhead = (s.GPU + s.CPU + d2h/h.GPUToHost + h2d/h.HostToGPU[0]) / float64(inFlight)
	return d2h, h2d, bound
}

// finish sets the step's time and its bound: cpu, where the CPU is the busiest.
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

// relayed is the time on the peers' links of a number of bytes from the host: of those
// that do not take the direct path.
func (p *Problem) relayed(paths int, bytes float64) float64 {
	h := &p.Hardware
	return bytes * (1 - h.HostToGPU[0]/h.HostToGPU[paths-1]) / h.PeerToGPU
}

// fetch is the time on the links of a share of the offloaded experts.
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

// expertSeconds is the time of one expert on the host link, on the peers' links when it
// is fetched from a peer, and on these when it is fetched from the host.
func (p *Problem) expertSeconds(x *Policy) (fromHost, fromPeer, relayed float64) {
	h := &p.Hardware
	fromHost = h.HostCopySeconds(p.Sizes.Expert, x.HostPaths, p.HostBatch)
	if h.PeerToGPU > 0 {
		fromPeer = h.PeerCopySeconds(p.Sizes.Expert, p.PeerBatch)
	}
	if x.HostPaths > 1 {
		relayed = p.relayed(x.HostPaths, float64(p.Sizes.Expert))
	}
	return fromHost, fromPeer, relayed
}

// prefillSteps is the number of steps of a batch's prompts.
func (p *Problem) prefillSteps(x *Policy) int {
	return (x.Batch*p.Workload.PromptTokens + x.PrefillTokens - 1) / x.PrefillTokens
}

func (p *Problem) prefillTimes(x *Policy) stepTimes {
	n, tokens, pairs := p.prefillTokens(x)
	each := float64(x.MicroBatch)
	if !p.PromptsAlike || x.MicroBatch == x.Batch {
		each *= float64(p.Workload.PromptTokens)
	}
	projections := math.Ceil(tokens / each)
	shape := stepShape{
		tokens: tokens, logits: n, pairs: pairs, kvTokens: tokens, context: float64(p.Workload.PromptTokens), projections: projections, experts: 1,
		sequences: n, prompt: float64(p.Workload.PromptTokens), enqueued: true, touched: p.Routing.Prefill,
	}
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
	t := p.Hardware.times(&p.Model, shape)
	p.addCopies(&t, x)
	return t
}

// prefillTokens is the number of sequences and of tokens of a prefill step, and of pairs
// of a query and a key.
func (p *Problem) prefillTokens(x *Policy) (sequences, tokens, pairs float64) {
	prompt := float64(p.Workload.PromptTokens)
	sequences = float64(x.Batch) / float64(p.prefillSteps(x))
	return sequences, sequences * prompt, sequences * p.Model.pairs(prompt)
}

// prefill is one prefill step whose phases on the GPU take gpu seconds in total: all
// offloaded experts are fetched, and the host's share of the KV cache is copied there.
func (p *Problem) prefill(x *Policy, gpu float64) Step {
	s, cpu := Step{GPU: gpu}, BoundCPU
	_, tokens, pairs := p.prefillTokens(x)
	d2h, h2d := tokens*float64(p.Model.KVBytesPerToken())*x.KVOnHost, 0.0
	if p.PromptsAlike && x.Attention == configs.OnCPU {
		d2h, h2d, cpu = p.cpuAttention(&s, x, tokens, pairs, tokens)
	}
	s.D2HLink = d2h / p.Hardware.GPUToHost
	s.HostLink, s.PeerLink = p.fetch(x, 1)
	s.HostLink += h2d / p.Hardware.HostToGPU[x.HostPaths-1]
	if x.HostPaths > 1 {
		s.PeerLink += p.relayed(x.HostPaths, h2d)
	}
	s.finish(cpu)
	return s
}

func (p *Problem) has(tier configs.Tier) error {
	if tier > configs.PeerTier {
		return fmt.Errorf("planner: invalid tier %d", tier)
	}
	if tier == configs.PeerTier && p.Hardware.PeerMemory == 0 {
		return fmt.Errorf("planner: hardware %s has no peers to fetch experts from; name peers (--peers) or use another --offload-tier", p.Hardware.Name)
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
		return policy, fmt.Errorf("planner: offload fraction %v: must be from 0 to 1", fraction)
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

// MostResident is the maximum number of resident experts with which the policy fits,
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

// SaturationPoint is the maximum offload fraction at which a decode step's copies are fully
// overlapped: up to it the step takes as long as with all experts resident. It is above 1
// where the copies of all experts are overlapped.
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
	// What the GPU takes with the first offloaded expert, and how much more with all: copies take a
	// part of its memory's rate.
	first := n.decodeShape(&x, true)
	none := n.decode(&x, &first)
	x.ResidentExperts = 0
	x.PeerExperts = n.split(&x, tier)
	every := n.decodeTimes(&x)
	more := 0.0
	if none.Seconds == none.GPU {
		more = every.total() - first.total()
	}
	all := n.decode(&x, &stepTimes{})
	point := math.Inf(1)
	for _, l := range [][2]float64{{none.HostLink, all.HostLink}, {none.PeerLink, all.PeerLink}} {
		if l[1]-l[0] > more {
			point = min(point, (none.Seconds-l[0])/(l[1]-l[0]-more))
		}
	}
	return point, nil
}

// split is the number of offloaded experts to fetch from peers so that both links end
// together: about in the ratio of their rates, less the other traffic of the links.
func (p *Problem) split(x *Policy, tier configs.Tier) int {
	missing := p.Model.ExpertCount() - x.ResidentExperts
	limit := 0
	if p.Hardware.PeerMemory > 0 {
		limit = min(missing, p.peerRoom())
	}
	switch tier {
	case configs.HostTier:
		return 0
	case configs.PeerTier:
		return missing
	}
	if limit == 0 {
		return 0
	}
	y := *x
	y.ResidentExperts, y.PeerExperts = p.Model.ExpertCount(), 0
	base := p.decode(&y, &stepTimes{})
	fromHost, fromPeer, relayed := p.expertSeconds(x)
	// peers * fromPeer + (missing - peers) * relayed = (missing - peers) * fromHost,
	// with the other traffic of the links on either side.
	even := (float64(missing)*(fromHost-relayed) + base.HostLink - base.PeerLink) / (fromPeer + fromHost - relayed)
	longest := func(peers int) float64 {
		host := float64(missing - peers)
		return max(host*fromHost+base.HostLink, float64(peers)*fromPeer+host*relayed+base.PeerLink)
	}
	low := int(min(max(even, 0), float64(limit)))
	if high := min(low+1, limit); longest(high) < longest(low) {
		return high
	}
	return low
}
