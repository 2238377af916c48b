// Package fairness measures what a scheduling policy gives each request when the KV cache is too
// small for all: how evenly they progress (Jain's index), how long the slowest wait for tokens,
// and what that costs in throughput, by where the blocks of preempted sequences are kept.
//
// # What it is not
//
// It opens no engine and reads no flags: its caller opens one for each line (Open). It reads no
// clock but the engine's devices'.
//
// # How it measures
//
// Long requests come at the start, and short ones one after the other while these run. All
// policies and tiers have the same requests. Each line has an engine of its own, whose KV cache
// the caller makes smaller than the requests need together.
//
// A request's rate is its tokens over the time from its arrival to its last token. Jain's index
// of n rates is the square of their sum over n times the sum of their squares: 1 where all are
// the same, 1/n where one has everything.
//
// # Invariants
//
//   - The same options give the same requests, and on a virtual clock the same times.
//   - A line counts all requests, or the measurement fails.
//
// # Example
//
//	r := &fairness.Result{Run: run}
//	err := fairness.Measure(ctx, fairness.Options{Open: open, Lines: fairness.Lines(granularities, tiers)}, r)
//	err = fairness.WriteTable(os.Stdout, r)
package fairness
