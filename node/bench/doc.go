// Package bench measures a node: it makes of one what package eval measures, with batches
// of sequences that go in lockstep beside the engine.
//
//	n, err := node.Open(ctx, o)
//	m := bench.New(n, nil)
//	defer m.Close()
//	result, err := eval.Throughput(ctx, m, cell, options)
package bench
