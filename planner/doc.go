// Package planner says how fast a policy is, what it takes of which memory, and
// which policy is the fastest that fits: batch, micro-batches, where attention runs,
// how many experts are local, and over which links the rest come.
//
// It is arithmetic on shapes and rates. A step on the compute GPU is a sum of phases,
// each at its own bound, bytes / memory rate or flops / product rate; copies, CPU
// attention and the GPU overlap, so that a step takes as long as the busiest of
// them. What a link brings that the router must choose first overlaps with nothing.
//
// # What it is not
//
// It does no input or output, measures nothing and starts nothing: Hardware comes
// from a preset or from measurements, Model and Sizes from whoever has them. It
// predicts what the hardware allows, not what kernels reach of it: launches, skewed
// routing and contention for host memory between CPU and links are left out.
//
// # Parts
//
//   - Problem is what to plan for. Predict judges a policy, Search finds one, Offload
//     turns an offload fraction and a tier into a placement, MostResident says how many
//     experts fit, Knee up to which fraction copies stay hidden. Policies can be
//     written as JSON; ParsePolicy reads them.
//   - Floors gives the least that a decode step takes, for tables beside
//     measurements.
//
// # Terms
//
// N is the batch, s prompt and n new tokens, E experts of a layer, k of which a token
// takes. wg is the share of experts that are local; it stands for whole experts,
// spread over layers whose numbers differ by one at most. A batch of N rows touches
// E (1 - (1 - k/E)^N) experts of a layer. With rates B_h and B_p of the links from
// host and peers, misses are split r_p / r_h = B_p / B_h, so that both links end
// together.
//
// # Invariants
//
//   - The same arguments give the same result.
//   - What Search returns fits.
//   - No policy gets slower by a faster part of the hardware.
//
// # Example
//
//	hardware, err := planner.HardwarePreset("h200")
//	p := planner.Problem{Model: model, Hardware: hardware, Workload: planner.Workload{PromptTokens: 77, NewTokens: 32}}
//	best, err := p.Search(planner.Choices{MaxBatch: 4536})
//	fmt.Println(best.Policy.Batch, best.TokS, best.Decode.Bound)
//
//	half, err := p.Offload(best.Policy, 0.5, configs.PeerTier)
//	prediction, err := p.Predict(half)
//	var misfit *planner.MisfitError
//	if errors.As(err, &misfit) { … misfit.Nearest … }
package planner
