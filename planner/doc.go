// Package planner predicts the latency, throughput and memory of a policy, and searches the
// policy of the highest throughput that fits: batch, micro-batches, where attention runs,
// how many experts are resident, and over which links the others are fetched.
//
// It is arithmetic on shapes and rates. A step on the GPU is a sum of phases. Each takes what
// kernels were measured to reach (Compute), or where the hardware has none of that its own bound,
// bytes / memory bandwidth or flops / GEMM rate; copies, CPU attention and the
// GPU overlap, so that a step takes as long as the busiest of them. On-demand fetches, which
// wait for the router, overlap with nothing.
//
// # What it is not
//
// It does no input or output, measures nothing and starts nothing: Hardware comes
// from a profile or from measurements, Model and Sizes from the caller. Without a Compute it
// predicts what the hardware allows, not what kernels reach of it. Skewed routing, unless it was
// counted (Routing), and contention for host memory between CPU and links are not modeled.
//
// # Parts
//
//   - Problem is what to plan for. Predict evaluates a policy, Search finds one, Offload
//     turns an offload fraction and a tier into a placement, MostResident is the number
//     of experts that fit, SaturationPoint the fraction up to which copies are fully
//     overlapped. Policies can be written as JSON; ParsePolicy reads them.
//   - Compute is what the engine reaches on a GPU; package eval/compute fits it to measured steps,
//     whose parts are Model.Terms.
//   - Rooflines gives the minimum time of a decode step, for tables beside measurements.
//
// # Terms
//
// N is the batch, s prompt and n new tokens, E experts of a layer, k of which a token
// is routed to. Resident experts are spread over layers whose numbers differ by one at
// most. A batch of N tokens is routed to E (1 - (1 - k/E)^N) experts of a layer. With
// rates B_h and B_p of the links from host and peers, misses are split r_p / r_h =
// B_p / B_h, so that both links end together.
//
// TTFT is the time to first token of the last sequence of a batch that arrives at once:
// all its prefill steps. TPOT is a decode step of the batch. Both grow with the batch.
//
// # Invariants
//
//   - The same arguments give the same result.
//   - The policy that Search returns fits, and keeps within the bounds of the choices.
//   - No policy gets slower by a faster part of the hardware.
//
// # Example
//
//	hardware, err := planner.HardwarePreset("h200")
//	p := planner.Problem{Model: model, Hardware: hardware, Workload: planner.Workload{PromptTokens: 77, NewTokens: 32}}
//	best, err := p.Search(planner.Choices{MaxBatch: 4536})
//	fmt.Println(best.Policy.Batch, best.TTFT(), best.TPOT(), best.TokS, best.Decode.Bound)
//
//	half, err := p.Offload(best.Policy, 0.5, configs.PeerTier)
//	prediction, err := p.Predict(half)
//	var misfit *planner.MisfitError
//	if errors.As(err, &misfit) { … misfit.Nearest … }
package planner
