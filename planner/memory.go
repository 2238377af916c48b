package planner

import (
	"fmt"
	"strings"

	"github.com/moeserve/moeserve/configs"
)

// Sizes are bytes that only the engine knows. What is zero or nil is estimated.
type Sizes struct {
	// Expert is one expert as it is laid out. Default: Model.ExpertBytes.
	Expert int64
	// Other is all weights but those of routed experts. Default: Model.OtherBytes.
	Other int64
	// KVBlockTokens of a sequence lie in one block of KVBlock bytes. Defaults: 1,
	// and what their keys and values take.
	KVBlockTokens int
	KVBlock       int64
	// MinKVBlocks there are whatever the batch; 0: what the batch takes.
	MinKVBlocks int
	// ExpertCache is how many slots the ring of fetched experts has where a layer misses at
	// most so many. It must not fall when they rise. Default: twice as many.
	ExpertCache func(missing int) int
	// Beside is what experts take of the GPU's and the host's memory beside the ring,
	// the places of local ones and the host copies of the others, where so many are
	// local: spare places, further host copies, buffers for loading. On the GPU it is
	// the same for all numbers but none and all. Default: nothing.
	Beside func(local int) (gpu, host int64)
	// Workspace is what a policy's steps take of the GPU's and the host's memory:
	// activations, row data, and what goes to the CPU for attention and comes back. It
	// depends on batch, micro-batch, prefill tokens, attention and grouping alone, and
	// must not fall when batch or prefill tokens rise. Default: an estimate.
	Workspace func(x *Policy) (gpu, host int64)
	// GPUFixed, HostFixed and PeerFixed are whatever depends on none of it: tables,
	// relay buffers.
	GPUFixed, HostFixed, PeerFixed int64
}

// EnsureDefaults estimates what is not given, of a model with its own defaults.
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

// workspace estimates what steps take: a row of each of a layer's tensors per token,
// and of the output layer's per sequence; with attention on the CPU queries, keys and
// values on their way down, and what attention gives on its way up, once per sequence.
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

// Shares of the memories that may be used, 0 to 1.
type Shares struct {
	// Defaults: 0.9, 0.8, 0.9.
	GPU, Host, Peer float64
}

// EnsureDefaults fills in what is not given.
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

// Space is one memory and what a policy needs of it, in bytes.
type Space struct {
	// Name in messages: "gpu".
	Name string
	// Capacity, and how much of it may be used.
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

// Fits says whether the parts fit.
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
	return fmt.Sprintf("%s: %s needed (%s), %s of %s may be used", s.Name, binary(s.Need()), b.String(), binary(s.Usable), binary(s.Capacity))
}

// Memory is what a policy needs of each memory.
type Memory struct {
	GPU, Host, Peer Space
}

// MisfitError says which memory does not hold a policy, and what would fit.
type MisfitError struct {
	// Policy that does not fit into Space.
	Policy Policy
	Space  Space
	// Nearest are policies that fit: as many sequences with more experts offloaded;
	// fewer sequences with as many experts offloaded; or, where neither is enough,
	// fewer sequences with more offloaded. None: the model does not fit at all.
	Nearest []Policy
	total   int
}

func (e *MisfitError) Error() string {
	fits := "nothing fits; give it more memory or a smaller model"
	if len(e.Nearest) > 0 {
		var near []string
		for _, p := range e.Nearest {
			near = append(near, e.describe(p))
		}
		fits = "what fits: " + strings.Join(near, ", or ")
	}
	return fmt.Sprintf("planner: memory does not hold %s: %s; %s", e.describe(e.Policy), e.Space, fits)
}

func (e *MisfitError) describe(p Policy) string {
	offloaded := e.total - p.ResidentExperts
	text := fmt.Sprintf("a batch of %d with %d of %d experts offloaded (%.1f %%)", p.Batch, offloaded, e.total, 100*float64(offloaded)/float64(e.total))
	if p.PeerExperts > 0 {
		text += fmt.Sprintf(", %d of them in peers' memory", p.PeerExperts)
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

// usage works out what a normal policy takes.
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
		// One layer of a micro-batch is read while the next streams in.
		u.staging = int64(2 * x.KVOnHost * float64(x.MicroBatch) * float64(perSequence) * float64(s.KVBlock) / float64(m.Layers))
	}
	return u
}

// memory lists what a normal policy takes.
func (p *Problem) memory(x *Policy) Memory {
	u := p.usage(x)
	space := func(name string, capacity int64, share float64, parts ...Part) Space {
		return Space{Name: name, Capacity: capacity, Usable: usable(capacity, share), Parts: parts}
	}
	return Memory{
		GPU: space("gpu", p.Hardware.GPUMemory, p.Shares.GPU,
			Part{"weights but experts", u.other}, Part{"local experts", u.resident}, Part{"spare places of experts", u.beside},
			Part{"ring of fetched experts", u.expertCache}, Part{"keys and values", u.kv}, Part{"keys and values streaming in", u.staging},
			Part{"activations and row data", u.activations}, Part{"tables and the rest", u.fixed}),
		Host: space("host", p.Hardware.HostMemory, p.Shares.Host,
			Part{"offloaded experts", u.offloaded}, Part{"loading, and copies of local experts", u.hostBeside},
			Part{"keys and values", u.hostKV}, Part{"row data and rows of attention", u.hostActivations},
			Part{"tables and the rest", p.Sizes.HostFixed}),
		Peer: space("peers", p.Hardware.PeerMemory, p.Shares.Peer,
			Part{"offloaded experts", int64(x.PeerExperts) * p.Sizes.Expert}, Part{"the rest", p.Sizes.PeerFixed}),
	}
}

func usable(capacity int64, share float64) int64 { return int64(float64(capacity) * share) }

// fits says whether a normal policy fits.
func (p *Problem) fits(x *Policy) bool {
	u := p.usage(x)
	return u.gpu() <= usable(p.Hardware.GPUMemory, p.Shares.GPU) &&
		u.host(&p.Sizes) <= usable(p.Hardware.HostMemory, p.Shares.Host) &&
		(x.PeerExperts == 0 || u.peer <= usable(p.Hardware.PeerMemory, p.Shares.Peer))
}

// mostResident is the largest number of local experts with which a normal policy fits,
// and false if there is none. Peers are left out of it.
func (p *Problem) mostResident(x Policy) (int, bool) {
	m, s := &p.Model, &p.Sizes
	layers, total := m.MoELayers(), m.ExpertCount()
	x.ResidentExperts, x.PeerExperts = total, 0
	u := p.usage(&x)
	room := usable(p.Hardware.GPUMemory, p.Shares.GPU) - (u.gpu() - u.resident - u.expertCache)
	if p.fits(&x) {
		return total, true
	}
	// Between none and all, spare places are always as many.
	some := u.beside
	if total > 1 {
		some, _ = s.Beside(1)
	}
	room -= some - u.beside
	// The ring grows with the largest number that a layer misses, so try that number
	// upwards: the first that leaves room leaves the most.
	for missing := 1; missing <= m.Experts; missing++ {
		left := room - int64(s.ExpertCache(missing))*s.Expert
		if left < 0 {
			break
		}
		least, most := max(1, total-missing*layers), total-(missing-1)*layers-1
		if x.ResidentExperts = int(min(int64(most), left/s.Expert)); x.ResidentExperts < least {
			continue
		}
		if p.fits(&x) {
			return x.ResidentExperts, true
		}
		break // the host's memory does not hold the others
	}
	x.ResidentExperts = 0
	return 0, p.fits(&x)
}

// misfit explains why a normal policy does not fit; nil if it does.
func (p *Problem) misfit(x Policy) error {
	mem := p.memory(&x)
	spaces := []Space{mem.GPU, mem.Host}
	if x.PeerExperts > 0 {
		spaces = append(spaces, mem.Peer)
	}
	for _, s := range spaces {
		if !s.Fits() {
			return &MisfitError{Policy: x, Space: s, Nearest: p.nearest(x), total: p.Model.ExpertCount()}
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

// offloadMore keeps as many experts local as fit, but no more than x does.
func (p *Problem) offloadMore(x Policy) (Policy, bool) {
	local, ok := p.mostResident(x)
	if !ok {
		return x, false
	}
	x.ResidentExperts = min(local, x.ResidentExperts)
	x = p.fewerInPeers(x)
	return x, p.fits(&x)
}

// fewerInPeers leaves in peers' memory what it holds.
func (p *Problem) fewerInPeers(x Policy) Policy {
	x.PeerExperts = min(x.PeerExperts, p.peerRoom())
	return x
}

// peerRoom is how many experts peers' memory holds.
func (p *Problem) peerRoom() int {
	return int(max(0, usable(p.Hardware.PeerMemory, p.Shares.Peer)-p.Sizes.PeerFixed) / p.Sizes.Expert)
}

// shrink finds the largest batch, at most x's, that try makes something of.
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
