// Package cpu carries out the operations of package kernels in Go, on streams
// that run Go work: those of emulated devices, and host streams everywhere.
// Activations and the KV cache are float32; weights may be bf16, fp16 or
// float32.
//
// # What it is not
//
// It owns no device memory and no streams, keeps nothing between operations but
// its threads and scratch buffers, and knows nothing of models.
//
// # Invariants
//
//   - A row's result is the same, bit for bit, for any number of threads, of
//     other rows in the same operation, and of launches an operation is cut into.
//     A product's inner dimension is summed in runs of sumChunk elements, each in
//     order in one float32 sum, and the runs' sums are added in order. Attention
//     sums over positions in the same way, in runs that start at multiples of
//     attentionChunk. Products are rounded before they are added, so that no
//     compiler fuses them.
//   - What the data says (ids, slots, offsets, block tables) is checked before
//     memory is touched: bad data is an error of the operation, on its stream,
//     that names the value. Memory that only the data names is declared to the
//     stream (device.Access) before it is touched.
//   - Only memory.go turns addresses into slices.
//
// # Example
//
//	backend := cpu.New(cpu.Options{Threads: 4})
//	defer backend.Close()
//	stream, err := machine.NewStream(device.HBM(0), device.StreamOptions{Name: "compute"})
//	…
//	err = backend.Enqueue(stream, &kernels.MatMul{X: x, W: w, Out: y})
package cpu
