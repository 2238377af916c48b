// Package eval measures: the throughput of a batch of MT-Bench's prompts, the same over
// offload fractions and tiers, and copies between memories. It writes tables, JSON, CSV and
// plots, with the planner's predictions beside measurements.
//
// # What it is not
//
// It opens no node and reads no flags: its caller passes nodes (Node) or devices. It reads
// no clock but the devices'. A roofline or a prediction stands beside a measurement and
// never in its place.
//
// # How it measures
//
// All requests are one batch in lockstep: first all prompts, then a token of each a
// step; end-of-sequence tokens are ignored. Warm-up tokens come first, then trials. Every
// trial samples the same tokens, or the measurement fails. Times are those of the devices'
// clock, which is virtual on some emulated devices. Counts are read outside of what is
// timed.
//
// # What a result is of
//
// A result carries the program's version and commit, the date and the command line (Run),
// the device, its driver or how it is emulated, and the rates that predictions are computed
// from, with their sources (Machine). Where these rates are not those of the devices that
// were measured, no share of the roofline is stated; and no gain of one tier over another
// where emulated devices have no rates.
//
// # Invariants
//
//   - The same arguments give the same prompts.
//   - A trial counts whole, or the measurement fails.
//   - An interrupted sweep that goes on from a journal has the results of one that was
//     not interrupted, on devices that take the same time every time.
//   - An error in the user's input wraps ErrInput.
//
// # Example
//
//	prompts, cut := eval.Repeat(eval.GeneratePrompts(324, 0, 32000, 1), 324, 480)
//	o := eval.Options{Prompts: prompts, Cut: cut, NewTokens: 32}
//	results, err := eval.Sweep(ctx, eval.SweepOptions{
//		Options: o, Open: open,
//		Cells: eval.Cells([]float64{0, 0.5, 1}, []configs.Tier{configs.HostTier, configs.PeerTier}, 1),
//	})
//	err = eval.PlotSweep(file, "svg", results)
package eval
