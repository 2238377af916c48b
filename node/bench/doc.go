// Package bench adapts a node to package eval: batches of sequences that run in lockstep
// without the engine, and what results state of the node's machine.
//
//	n, err := node.Open(ctx, o)
//	m := bench.New(n, nil)
//	defer m.Close()
//	result, err := eval.Throughput(ctx, m, cell, options)
package bench
