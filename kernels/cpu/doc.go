// Package cpu carries out the operations of package kernels in Go, on streams
// that run Go work: those of emulated devices, and host streams everywhere.
// Activations and the KV cache are float32; weights may be bf16, fp16 or
// float32. AppendKV and Attention also take activations and caches of bf16 or fp16,
// since they serve GPUs whose keys and values lie in host memory; their arithmetic
// is in float32 all the same.
//
// # What it is not
//
// It owns no device memory and no streams, keeps nothing between operations but
// its threads and scratch buffers, and knows nothing of models.
//
// # Instruction sets
//
// Nearly all arithmetic is done by one of three sets of functions, chosen when a
// backend is made: AVX-512, AVX2, or Go that every machine runs (ISA). The first
// two are assembly that gen writes. Weights of 16 bits are widened to float32,
// exactly, before they are multiplied. One row, or a few, read weights where they
// lie, as fast as memory gives them; more rows share float32 copies of six weight
// rows at a time, which stay in the first cache.
//
// # Invariants
//
//   - A row's result is the same, bit for bit, for any number of threads, of
//     other rows in the same operation, and of launches an operation is cut into.
//     Each set sums in one order. A product's inner dimension is cut into runs (of
//     256 elements in Go, of 1024 otherwise), whose sums are added in order. In a
//     run, each lane of a vector adds every 8th or 16th element in order, fused,
//     and the lanes are added up by one tree; in Go there is one lane, and products
//     are rounded before they are added, so that no compiler fuses them. Attention
//     sums over positions in runs that start at multiples of attentionChunk;
//     log-probabilities sum runs in float32 and their sums, in order, in float64.
//   - Between sets results differ in rounding.
//   - e^x, in attention, is off by at most one unit in the last place, and silu by
//     two where the result is not below 1e-37, where it may be 0. Go rounds
//     float64's once.
//   - What the data says (ids, slots, offsets, block tables) is checked before
//     memory is touched: bad data is an error of the operation, on its stream,
//     that names the value. Memory that only the data names is declared to the
//     stream (device.Access) before it is touched.
//   - Only memory.go turns addresses into slices; assembly takes them as they are.
//
// # Measuring
//
// BenchmarkDecode and BenchmarkPrefill report products as shares of what the
// machine reads and computes at the same moment:
//
//	go test -run '^$' -bench 'Decode|Prefill' -benchtime 64x ./kernels/cpu
//
// # Example
//
//	backend := cpu.New(cpu.Options{Threads: 4})
//	defer backend.Close()
//	stream, err := machine.NewStream(device.HBM(0), device.StreamOptions{Name: "compute"})
//	…
//	err = backend.Enqueue(stream, &kernels.MatMul{X: x, W: w, Out: y})
package cpu
