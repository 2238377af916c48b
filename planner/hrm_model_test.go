package planner

import (
	"fmt"
	"math"
)

// hrm is MoE-Lightning's own cost model and search: attention on the CPU, experts per
// micro-batch on the GPU, a fraction of each layer's expert weights local, everything
// else streamed from the host. With the presets' rates it gives what was published, which
// is how these are known to be those of the machines that were measured; it leaves out
// what Problem adds.
type hrm struct {
	Model    Model
	Hardware Hardware
	Workload Workload
}

// hrmPrediction is what hrm says of a policy.
type hrmPrediction struct {
	// MicroBatch rows in each of MicroBatches.
	MicroBatch, MicroBatches int
	// LocalShare of the expert weights is on the GPU: wg, the largest that fits.
	LocalShare float64
	// CPU, GPU and Link are the seconds that attention, experts and the copies of
	// weights take per layer; StepSeconds those of a decode step of all layers.
	CPU, GPU, Link float64
	StepSeconds    float64
	// GPUBytes and HostBytes are peaks, Intermediate the part of GPUBytes that the
	// products of experts take.
	GPUBytes, HostBytes, Intermediate float64
	// TokS is N n / (T (n-1) L).
	TokS float64
}

// Shares of the memories that the reference uses.
const (
	hrmGPUShare  = 0.86
	hrmHostShare = 0.8
)

// evaluate evaluates a policy, and says false where it does not fit. The formulas are
// those of the reference planner, for 16 bit: per layer, with N rows, s prompt and n
// new tokens, hkv = h / (heads / kv heads), wi = 6 h I E:
//
//	CPU    max(N (s+n) heads (2d+2) / P_cpu, N (4 heads d + 4 (s+n) kvheads d) / B_cpu)
//	GPU    per micro-batch of u rows: max(6 u h I k / P_gpu, (2uh + 2uI + wi) / B_gpu)
//	Link   wi (1-wg) / B_link
//	GPU memory   other + wi L wg + 4hus + 2hNs + 8 s hkv u + 2 wi (1-wg) + inter,
//	             inter = 2.4 u k s (h + 3I)
//	Host memory  wi L (1-wg) + 4 (s+n) hkv N L + 2hNs + 2 wi (1-wg)
func (m hrm) evaluate(microBatch, microBatches int) (hrmPrediction, bool, error) {
	if err := m.validate(); err != nil {
		return hrmPrediction{}, false, err
	}
	if microBatch < 1 || microBatches < 1 {
		return hrmPrediction{}, false, fmt.Errorf("planner: %d micro-batches of %d rows; there must be at least one of one", microBatches, microBatch)
	}
	p, ok := m.predict(microBatch, microBatches)
	return p, ok, nil
}

func (m *hrm) validate() error {
	if err := m.Model.Validate(); err != nil {
		return err
	}
	if err := m.Hardware.Validate(); err != nil {
		return err
	}
	if err := m.Workload.Validate(); err != nil {
		return err
	}
	if m.Workload.NewTokens < 2 {
		return fmt.Errorf("planner: %d new tokens; MoE-Lightning's model needs two, since it counts decode steps alone", m.Workload.NewTokens)
	}
	return nil
}

func (m *hrm) predict(microBatch, microBatches int) (hrmPrediction, bool) {
	h, i := float64(m.Model.Hidden), float64(m.Model.ExpertWidth)
	heads, kvHeads := float64(m.Model.Heads), float64(m.Model.KVHeads)
	e, k, layers := float64(m.Model.Experts), float64(m.Model.TopK), float64(m.Model.Layers)
	s, n := float64(m.Workload.PromptTokens), float64(m.Workload.NewTokens)
	u := float64(microBatch)
	rows := u * float64(microBatches)
	d, hkv := h/heads, h/(heads/kvHeads)
	wi, other := 6*h*i*e, (4*h*h+4*h*hkv)*layers

	p := hrmPrediction{MicroBatch: microBatch, MicroBatches: microBatches}
	p.Intermediate = 2.4 * u * k * s * (h + 3*i)
	// Both memories are linear in wg: what they take at wg = 0, and what wg adds.
	gpu := other + 4*h*u*s + 2*h*rows*s + 8*s*hkv*u + 2*wi + p.Intermediate
	gpuSlope := wi*layers - 2*wi
	host := wi*layers + 4*(s+n)*hkv*rows*layers + 2*h*rows*s + 2*wi
	hostSlope := -(wi*layers + 2*wi)
	most := (hrmGPUShare*float64(m.Hardware.GPUMemory) - gpu) / gpuSlope
	least := (hrmHostShare*float64(m.Hardware.HostMemory) - host) / hostSlope
	if layers <= 2 {
		// The buffers for streaming outweigh the weights: wg makes no room.
		return p, false
	}
	p.LocalShare = min(1, most)
	if p.LocalShare < max(0, least) {
		return p, false
	}
	p.GPUBytes, p.HostBytes = gpu+gpuSlope*p.LocalShare, host+hostSlope*p.LocalShare
	p.CPU = max(rows*(s+n)*heads*(2*d+2)/m.Hardware.CPUFlops, rows*(4*heads*d+4*(s+n)*kvHeads*d)/m.Hardware.HostMemoryRate)
	p.GPU = float64(microBatches) * max(6*u*h*i*k/m.Hardware.GPUFlops, (2*u*h+2*u*i+wi)/m.Hardware.GPUMemoryRate)
	p.Link = wi * (1 - p.LocalShare) / m.Hardware.HostToGPU[0]
	step := max(p.CPU, p.GPU, p.Link)
	p.StepSeconds = step * layers
	p.TokS = rows * n / (p.StepSeconds * (n - 1))
	return p, true
}

// search goes through micro-batches of 1, 2, 3, 4 and then every 32nd more, and
// through their number until the throughput falls or memory ends. Of equal policies
// the last wins, as in the reference. It says false where nothing fits.
func (m hrm) search() (hrmPrediction, bool, error) {
	if err := m.validate(); err != nil {
		return hrmPrediction{}, false, err
	}
	const largestMicroBatch = 1 << 20
	var best hrmPrediction
	found := false
	for u := 1; u < largestMicroBatch; {
		last := 0.0
		any := false
		for count := 1; ; count++ {
			p, ok := m.predict(u, count)
			if !ok || p.TokS*better < last {
				break
			}
			any = true
			last = math.Max(last, p.TokS)
			if !found || p.TokS*better >= best.TokS {
				best, found = p, true
			}
		}
		if !any {
			break
		}
		if u < 4 {
			u++
		} else {
			u += 32
		}
	}
	return best, found, nil
}
