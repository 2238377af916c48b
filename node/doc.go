// Package node assembles a running node: it opens the devices (package devices), reads
// the model's files (checkpoint), works out whether everything fits (sizing) and, where a
// policy is asked for, how it is to run (planning), takes the memory, loads the weights
// into their final places, and starts engine and pipeline. It alone knows the order in
// which all of it is taken down. What its parts count, package observe reads; package
// bench measures one.
//
// # Peers
//
// Where experts are offloaded and there are peers, harvest borrows their memory and a
// rebalancer moves experts there. Both are loops of the machine's clock, beside steps: in
// goroutines on the wall clock, before each step on a virtual one, which only goes on
// while somebody waits.
// On emulated devices a trace can say what others hold of the peers; all emulated
// memory is this machine's, so peers lend only what the rest leaves.
//
// The end comes in this order: the loops, the pipeline, the rebalancer, harvest, which
// takes every copy from the store and gives the peers their memory back cleared, then
// the store, whose host copies had everything all along, then transfers.
//
// # Planning
//
// Plan finds or judges a policy; with the setting policy, Open follows one: it changes
// those settings that nobody has given, and nothing else. Open, Inspect and Plan have the
// same beginning (setup): a model on open devices, of which no memory is taken.
//
// # What it is not
//
// It parses no flags and prints nothing (cmd/moeserve does), and runs no request
// itself (package engine does).
//
// # Invariants
//
//   - Open either returns a node that works or leaves nothing behind.
//   - Nothing allocates device or pinned memory after Open, but for readings and for
//     what is borrowed from peers.
//   - An error says which part failed by wrapping a kind of package fault.
//
// # Example
//
//	n, err := node.Open(ctx, node.Options{Settings: configs.Defaults()})
//	if err != nil { … }
//	defer n.Close()
//	ids, err := n.Text().Encode("sort: c a b")
//	outs, err := n.Engine().Generate(ctx, []engine.Request{{Prompt: ids, Params: engine.DefaultParams()}}, nil)
package node
