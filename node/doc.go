// Package node assembles a running node: it opens the devices (package devices), reads the
// model's files (checkpoint), checks that everything fits (sizing), selects a policy if
// one is requested (planning), allocates memory, loads the weights into their final
// places, and starts engine and pipeline. It closes its parts in the reverse order.
// Package observe reads the counters of its parts; package bench measures a node.
//
// # Peers
//
// With offloaded experts and peers, harvest borrows the peers' memory and a rebalancer
// promotes experts to it. Both are loops of the machine's clock: goroutines on the wall
// clock; on a virtual clock, which advances only while something waits for it, they run
// before each step. On emulated devices a trace can set the peers' memory used by other
// processes. All emulated memory is this machine's, so peers lend only what the rest leaves.
//
// Close stops the parts in this order: the loops, the pipeline, the rebalancer, harvest
// (which revokes every peer copy from the store and releases the peers' memory scrubbed),
// the store (whose host copies are authoritative), transfers.
//
// # Planning
//
// Plan finds or evaluates a policy. With the setting policy, Open applies one: it changes
// only settings that are not set explicitly. Open, Inspect and Plan start with the same
// setup: a model on open devices, with no memory allocated.
//
// # What it is not
//
// The package parses no flags and prints nothing (cmd/moeserve does), and runs no requests
// itself (package engine does).
//
// # Invariants
//
//   - Open either returns a working node or releases everything.
//   - Nothing allocates device or pinned memory after Open, except for measurements and for
//     memory borrowed from peers.
//   - An error wraps the kind of package fault that names the failed part.
//
// # Example
//
//	n, err := node.Open(ctx, node.Options{Settings: configs.Defaults()})
//	if err != nil { … }
//	defer n.Close()
//	ids, err := n.Text().Encode("sort: c a b")
//	outs, err := n.Engine().Generate(ctx, []engine.Request{{Prompt: ids, Params: engine.DefaultParams()}}, nil)
package node
