// Package node assembles a running node: it opens the devices, reads the model's
// configuration, works out whether everything fits (Budget), takes the memory,
// loads the weights into their final places, and starts engine and pipeline. It
// alone picks between backends, and it alone knows the order in which all of it
// is taken down.
//
// # What it is not
//
// It parses no flags and prints nothing (cmd/moeserve does), and runs no request
// itself (package engine does).
//
// # Invariants
//
//   - Open either returns a node that works or leaves nothing behind.
//   - Nothing allocates device or pinned memory after Open, but for readings.
//   - An error says which part failed by wrapping ErrConfig, ErrModel or ErrDevice.
//
// # Example
//
//	n, err := node.Open(ctx, node.Options{Settings: configs.Defaults()})
//	if err != nil { … }
//	defer n.Close()
//	ids := n.Tokenizer().Encode("sort: c a b", true)
//	outs, err := n.Engine().Generate(ctx, []engine.Request{{Prompt: ids, Params: engine.DefaultParams()}}, nil)
package node
