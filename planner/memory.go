package planner

import (
	"fmt"
	"strings"

	"github.com/moeserve/moeserve/configs"
)

// Sizes are bytes that only the engine knows. Fields that are zero or nil are estimated.
type Sizes struct {
	// Expert is one expert in the engine's layout. Default: Model.ExpertBytes.
	Expert int64
	// Other is the non-expert (dense) weights. Default: Model.OtherBytes.
	Other int64
	// KVBlockTokens of a sequence are in one KV block of KVBlock bytes. Defaults: 1, and
	// Model.KVBytesPerToken of each.
	KVBlockTokens int
	KVBlock       int64
	// MinKVBlocks is the minimum of the KV cache, whatever the batch; 0: as the batch needs.
	MinKVBlocks int
	// ExpertCache is the number of slots of the expert cache for a maximum of missing
	// experts of a layer. It must not fall when that rises. Default: twice as many.
	ExpertCache func(missing int) int
	// Beside is the memory of experts on GPU and host beside the expert cache, the slots
	// of resident experts and the host copies of offloaded ones: spare slots, further
	// host copies, the load staging buffer. On the GPU it is the same for all numbers of
	// resident experts but none and all. Default: 0.
	Beside func(resident int) (gpu, host int64)
	// Workspace is the memory of a policy's steps on GPU and host: activations, per-step
	// metadata, and the staging buffers of attention on the CPU. It depends on batch,
	// micro-batch, prefill tokens, attention and grouping alone, and must not fall when
	// batch or prefill tokens rise. Default: an estimate.
	Workspace func(x *Policy) (gpu, host int64)
	// GPUFixed, HostFixed and PeerFixed depend on none of these: tables, relay buffers.
	GPUFixed, HostFixed, PeerFixed int64
}

// EnsureDefaults estimates the fields that are zero or nil, of a model with its own
// defaults.
func (s Sizes) EnsureDefaults(m *Model) Sizes {
	if s.Expert == 0 {
		s.Expert = m.ExpertBytes()
	}
	if s.Other == 0 {
		s.Other = m.OtherBytes()
	}
	if s.KVBlockTokens == 0 {
		s.KVBlockTokens = 1
	}
	if s.KVBlock == 0 {
		s.KVBlock = int64(s.KVBlockTokens) * m.KVBytesPerToken()
	}
	if s.ExpertCache == nil {
		s.ExpertCache = func(missing int) int { return 2 * missing }
	}
	if s.Beside == nil {
		s.Beside = func(int) (gpu, host int64) { return 0, 0 }
	}
	if s.Workspace == nil {
		s.Workspace = m.workspace
	}
	return s
}

// workspace estimates the memory of steps: a row of each of a layer's tensors per token,
// and of the output layer's per sequence; with attention on the CPU also, per sequence,
// the staging of queries, keys and values (D2H) and of attention's result (H2D).
func (m *Model) workspace(x *Policy) (gpu, host int64) {
	a := int64(m.ActivationBytes)
	h, q, v := int64(m.Hidden), int64(m.Heads*m.HeadDim), int64(2*m.KVHeads*m.HeadDim)
	k := int64(m.TopK)
	row := a*(3*h+2*q+v) + 4*int64(m.Experts) + 12*k + a*k*(int64(m.ExpertWidth)+h)
	row += 2 * a * int64(max(m.SharedWidth, m.DenseWidth))
	if m.SharedWidth > 0 {
		row += a*h + 4
	}
	if x.Attention == configs.OnCPU {
		host = int64(x.Batch) * a * (2*q + v)
	}
	return int64(x.MicroBatchTokens())*row + int64(x.Batch)*(2*a*h+4*int64(m.Vocab)), host
}

// Shares are the usable parts of the memories, 0 to 1.
type Shares struct {
	// Defaults: 0.9, 0.8, 0.9.
	GPU, Host, Peer float64
}

// EnsureDefaults fills in the fields that are 0.
func (s Shares) EnsureDefaults() Shares {
	for _, d := range []struct {
		share *float64
		value float64
	}{{&s.GPU, 0.9}, {&s.Host, 0.8}, {&s.Peer, 0.9}} {
		if *d.share == 0 {
			*d.share = d.value
		}
	}
	return s
}

// Part is one share of a memory, in bytes.
type Part struct {
	Name  string
	Bytes int64
}

// Space is one memory and a policy's need of it, in bytes.
type Space struct {
	// Name in messages: "gpu".
	Name string
	// Capacity, and the part of it that is usable.
	Capacity, Usable int64
	Parts            []Part
}

// Need is the sum of the parts.
func (s Space) Need() int64 {
	var n int64
	for _, p := range s.Parts {
		n += p.Bytes
	}
	return n
}

// Fits reports whether the parts fit.
func (s Space) Fits() bool { return s.Need() <= s.Usable }

func (s Space) String() string {
	var b strings.Builder
	for _, p := range s.Parts {
		if p.Bytes == 0 {
			continue
		}
		if b.Len() > 0 {
			b.WriteString(", ")
		}
		fmt.Fprintf(&b, "%s %s", p.Name, binary(p.Bytes))
	}
	return fmt.Sprintf("%s: need %s (%s), usable %s of %s", s.Name, binary(s.Need()), b.String(), binary(s.Usable), binary(s.Capacity))
}

// Memory is a policy's need of each memory.
type Memory struct {
	GPU, Host, Peer Space
}

// MisfitError reports the memory that does not hold a policy, and policies that fit.
type MisfitError struct {
	// Policy that does not fit into Space.
	Policy Policy
	Space  Space
	// Nearest are policies that fit: as many sequences with more experts offloaded;
	// fewer sequences with as many experts offloaded; or, where neither is enough,
	// fewer sequences with more offloaded. None: the model does not fit at all.
	Nearest []Policy
	model   Model
}

func (e *MisfitError) Error() string {
	fits := "no policy fits; use more " + e.Space.Name + " memory or a smaller model"
	if len(e.Nearest) > 0 {
		var near []string
		for _, p := range e.Nearest {
			near = append(near, e.describe(p))
		}
		fits = "use " + strings.Join(near, ", or ")
	}
	return fmt.Sprintf("planner: out of memory with %s: %s; %s", e.describe(e.Policy), e.Space, fits)
}

func (e *MisfitError) describe(p Policy) string {
	total := e.model.ExpertCount()
	offloaded := total - p.ResidentExperts
	text := fmt.Sprintf("a batch of %d with %d of %d experts offloaded (--offload-fraction %v)", p.Batch, offloaded, total, e.model.OffloadFraction(offloaded))
	if p.PeerExperts > 0 {
		text += fmt.Sprintf(", %d of them in peer memory", p.PeerExperts)
	}
	return text
}

// binary prints a number of bytes.
func binary(n int64) string {
	v, unit := float64(n), "B"
	for _, next := range []string{"KiB", "MiB", "GiB"} {
		if v < 1024 {
			break
		}
		v, unit = v/1024, next
	}
	if unit == "B" {
		return fmt.Sprintf("%d B", n)
	}
	return fmt.Sprintf("%.2f %s", v, unit)
}

// usage is Memory in the making.
type usage struct {
	other, resident, beside, expertCache, kv, staging, activations, fixed int64 // GPU
	offloaded, hostBeside, hostKV, hostActivations                        int64 // host
	peer                                                                  int64
}

func (u *usage) gpu() int64 {
	return u.other + u.resident + u.beside + u.expertCache + u.kv + u.staging + u.activations + u.fixed
}

func (u *usage) host(s *Sizes) int64 {
	return u.offloaded + u.hostBeside + u.hostKV + u.hostActivations + s.HostFixed
}

// usage computes the memory of a normal policy.
func (p *Problem) usage(x *Policy) usage {
	m, s := &p.Model, &p.Sizes
	missing := m.ExpertCount() - x.ResidentExperts
	largest := (missing + m.MoELayers() - 1) / m.MoELayers()
	tokens := p.Workload.PromptTokens + p.Workload.NewTokens
	perSequence := (tokens + s.KVBlockTokens - 1) / s.KVBlockTokens
	blocks := int64(x.Batch) * int64(perSequence)
	onHost := int64(x.KVOnHost * float64(blocks))
	u := usage{
		other: s.Other, resident: int64(x.ResidentExperts) * s.Expert, expertCache: int64(s.ExpertCache(largest)) * s.Expert,
		kv: max(blocks-onHost, int64(s.MinKVBlocks)) * s.KVBlock, fixed: s.GPUFixed,
		offloaded: int64(missing) * s.Expert, hostKV: onHost * s.KVBlock,
		peer: int64(x.PeerExperts)*s.Expert + s.PeerFixed,
	}
	u.beside, u.hostBeside = s.Beside(x.ResidentExperts)
	u.activations, u.hostActivations = s.Workspace(x)
	switch {
	case x.Attention == configs.OnCPU:
		u.kv, u.hostKV = 0, max(blocks, int64(s.MinKVBlocks))*s.KVBlock
	case x.KVOnHost > 0:
		// One layer of a micro-batch is read while the next is copied.
		u.staging = int64(2 * x.KVOnHost * float64(x.MicroBatch) * float64(perSequence) * float64(s.KVBlock) / float64(m.Layers))
	}
	return u
}

// memory lists the memory of a normal policy, part by part.
func (p *Problem) memory(x *Policy) Memory {
	u := p.usage(x)
	space := func(name string, capacity int64, share float64, parts ...Part) Space {
		return Space{Name: name, Capacity: capacity, Usable: usable(capacity, share), Parts: parts}
	}
	return Memory{
		GPU: space("gpu", p.Hardware.GPUMemory, p.Shares.GPU,
			Part{"non-expert weights", u.other}, Part{"resident experts", u.resident}, Part{"spare expert slots", u.beside},
			Part{"expert cache", u.expertCache}, Part{"KV cache", u.kv}, Part{"KV staging buffer", u.staging},
			Part{"activations, per-step metadata", u.activations}, Part{"expert tables, misc", u.fixed}),
		Host: space("host", p.Hardware.HostMemory, p.Shares.Host,
			Part{"offloaded experts", u.offloaded}, Part{"load staging buffer, host copies of resident experts", u.hostBeside},
			Part{"KV cache", u.hostKV}, Part{"per-step metadata, attention staging", u.hostActivations},
			Part{"expert tables, misc", p.Sizes.HostFixed}),
		Peer: space("peers", p.Hardware.PeerMemory, p.Shares.Peer,
			Part{"peer copies of experts", int64(x.PeerExperts) * p.Sizes.Expert}, Part{"misc", p.Sizes.PeerFixed}),
	}
}

func usable(capacity int64, share float64) int64 { return int64(float64(capacity) * share) }

// fits reports whether a normal policy fits.
func (p *Problem) fits(x *Policy) bool {
	u := p.usage(x)
	return u.gpu() <= usable(p.Hardware.GPUMemory, p.Shares.GPU) &&
		u.host(&p.Sizes) <= usable(p.Hardware.HostMemory, p.Shares.Host) &&
		(x.PeerExperts == 0 || u.peer <= usable(p.Hardware.PeerMemory, p.Shares.Peer))
}

// mostResident is the maximum number of resident experts with which a normal policy fits,
// and false if there is none. The memory of peers is not considered.
func (p *Problem) mostResident(x Policy) (int, bool) {
	m, s := &p.Model, &p.Sizes
	layers, total := m.MoELayers(), m.ExpertCount()
	x.ResidentExperts, x.PeerExperts = total, 0
	u := p.usage(&x)
	room := usable(p.Hardware.GPUMemory, p.Shares.GPU) - (u.gpu() - u.resident - u.expertCache)
	if p.fits(&x) {
		return total, true
	}
	// Between none and all resident, the number of spare slots is constant.
	some := u.beside
	if total > 1 {
		some, _ = s.Beside(1)
	}
	room -= some - u.beside
	// The expert cache grows with the maximum that a layer misses, so try that maximum
	// upwards: the first that leaves room leaves the maximum.
	for missing := 1; missing <= m.Experts; missing++ {
		left := room - int64(s.ExpertCache(missing))*s.Expert
		if left < 0 {
			break
		}
		low, high := max(1, total-missing*layers), total-(missing-1)*layers-1
		if x.ResidentExperts = int(min(int64(high), left/s.Expert)); x.ResidentExperts < low {
			continue
		}
		if p.fits(&x) {
			return x.ResidentExperts, true
		}
		break // host memory does not hold the others
	}
	x.ResidentExperts = 0
	return 0, p.fits(&x)
}

// misfit is the error of a normal policy that does not fit; nil if it does.
func (p *Problem) misfit(x Policy) error {
	mem := p.memory(&x)
	spaces := []Space{mem.GPU, mem.Host}
	if x.PeerExperts > 0 {
		spaces = append(spaces, mem.Peer)
	}
	for _, s := range spaces {
		if !s.Fits() {
			return &MisfitError{Policy: x, Space: s, Nearest: p.nearest(x), model: p.Model}
		}
	}
	return nil
}

// nearest looks for policies close to x that fit.
func (p *Problem) nearest(x Policy) []Policy {
	var near []Policy
	if y, ok := p.offloadMore(x); ok {
		near = append(near, y)
	}
	if y, ok := p.shrink(x, func(y Policy) (Policy, bool) {
		y = p.fewerInPeers(y)
		return y, p.fits(&y)
	}); ok {
		near = append(near, y)
	}
	if len(near) > 0 {
		return near
	}
	if y, ok := p.shrink(x, p.offloadMore); ok {
		near = append(near, y)
	}
	return near
}

// offloadMore keeps as many experts resident as fit, but no more than x does.
func (p *Problem) offloadMore(x Policy) (Policy, bool) {
	resident, ok := p.mostResident(x)
	if !ok {
		return x, false
	}
	x.ResidentExperts = min(resident, x.ResidentExperts)
	x = p.fewerInPeers(x)
	return x, p.fits(&x)
}

// fewerInPeers limits the experts in peer memory to what that holds.
func (p *Problem) fewerInPeers(x Policy) Policy {
	x.PeerExperts = min(x.PeerExperts, p.peerRoom())
	return x
}

// peerRoom is the number of experts that peer memory holds.
func (p *Problem) peerRoom() int {
	return int(max(0, usable(p.Hardware.PeerMemory, p.Shares.Peer)-p.Sizes.PeerFixed) / p.Sizes.Expert)
}

// shrink finds the maximum batch, at most x's, of which try makes a policy.
func (p *Problem) shrink(x Policy, try func(Policy) (Policy, bool)) (Policy, bool) {
	var best Policy
	found := false
	for low, high := 1, x.Batch; low <= high; {
		y := x
		y.Batch = low + (high-low)/2
		y.MicroBatch = min(y.MicroBatch, y.Batch)
		y.PrefillTokens = min(y.PrefillTokens, y.Batch*p.Workload.PromptTokens)
		if z, ok := try(y); ok {
			best, found, low = z, true, y.Batch+1
		} else {
			high = y.Batch - 1
		}
	}
	return best, found
}
