// Package tenancy measures what an engine and a tenant of a peer cost each other: the engine decodes
// with experts that it has copied to the peer, while the tenant takes the peer's memory and returns
// it in steps, also more than is free. It gives the throughput over time with the memory beneath it,
// how soon the memory was there, whether tokens stay the same, and what the tenant's own work loses.
//
// # What it is not
//
// It opens nothing, and takes no memory itself: its caller passes the engine (Node) and the tenant
// (Tenant): on emulated devices one that is played, on GPUs a process of its own (StartProcess).
//
// # How it measures
//
// A batch decodes the same positions again and again, so every pass samples the same tokens, or the
// measurement fails. The first pass runs beside nothing. Then a change of what the tenant holds is
// due every Every, and what happens is looked at before each decode step: that is how exact times of
// changes are. How long the release of each slab took comes from the engine's own events. The tenant's
// work is measured beside an idle engine and beside one that decodes, in turn.
//
// # Invariants
//
//   - Times are those of the node's clock, which is virtual on some emulated devices; those that a
//     process reports are its own.
//   - Tokens that differ from those of the first pass are an error.
//   - An error in the user's input wraps eval.ErrInput.
//
// # Example
//
//	r := &tenancy.Result{}
//	err := tenancy.Measure(ctx, tenancy.Options{Node: n, Tenant: t, Prompts: prompts, Steps: steps, Every: time.Second}, r)
//	err = tenancy.Plot(file, "svg", r)
package tenancy
