// Package eval measures: the throughput of a batch of MT-Bench's prompts, the same over
// offload fractions and tiers, and copies between memories. It writes what it finds as
// tables, JSON, CSV and plots, with what the planner expects beside it.
//
// # What it is not
//
// It opens no node and reads no flags: it is handed nodes (Node) or devices, and does
// not know what they are made of. It judges nothing: a floor or a prediction stands
// beside a measurement and never in its place.
//
// # How it measures
//
// All requests are one batch in lockstep: first all prompts, then a token of each a
// step, ends of answers ignored. Warm-up tokens come first, then trials. Every trial
// draws the same tokens, or the measurement fails. Times are those of the devices'
// clock, which is a virtual one on some emulated devices; whatever comes from emulated
// devices says so. Counts are read outside of what is timed.
//
// # Invariants
//
//   - The same arguments give the same prompts.
//   - A trial counts whole, or the measurement fails.
//   - A sweep that goes on from a journal has the results that it would have had
//     uncut, on devices that take the same time every time.
//   - A mistake in what the user gave is an error that wraps ErrInput.
//
// # Example
//
//	prompts, cut := eval.Repeat(eval.GeneratePrompts(324, 0, 32000, 1), 324, 480)
//	o := eval.Options{Prompts: prompts, Cut: cut, NewTokens: 32}
//	results, err := eval.Sweep(ctx, eval.SweepOptions{
//		Options: o, Open: open,
//		Cells: eval.Cells([]float64{0, 0.5, 1}, []configs.Tier{configs.HostTier, configs.PeerTier}),
//	})
//	err = eval.PlotSweep(file, "svg", results)
package eval
