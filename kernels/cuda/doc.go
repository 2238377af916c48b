// Package cuda carries out the operations of package kernels on NVIDIA GPUs of
// compute capability 8.0 and up, on the streams of device/cuda. Activations and the
// KV cache are bfloat16 or, by option, half precision; sums are float32.
//
// # What it is
//
// Kernels are CUDA C++ in src/, embedded and compiled by NVRTC for the exact
// architecture when a Backend is made, and kept on disk. A Backend turns an
// operation into one or a few launches: lane.go has what a stream has to itself, and
// dispatches; rows.go, product.go, expert.go, dense.go, attention.go, routing.go and
// logits.go choose kernels, tiles and grids. The structs of arguments in arguments.go are
// generated from src/ (internal/arguments). Dense products go through cuBLASLt where its demands are
// met, and else (always with Options.BatchInvariant) through kernels of ours.
//
// On GPUs of compute capability 9.0, experts lie in tiles (layout.go) and they, and
// batch-invariant dense products, run on kernels for sm_90a alone.
//
// All of that is plain Go. What needs the build tag cuda stands in gpu.go and in
// internal/cublaslt: loading, launching, and the library. Where the tag is and a C++
// compiler, tests also run every kernel, those for sm_90a too, on the CPU
// (internal/simt), under the same conformance suite as on a GPU. docs/design/kernels.md says
// how to add a kernel.
//
// # What it is not
//
// It makes no streams and owns no device memory but one workspace per stream, taken
// when the Backend is made. It does not check what the data says: ids and slots
// outside of their tables are left out or become not-a-number, and an expert's slot
// is trusted to hold an address (a multiple of 16 bytes).
//
// # Invariants
//
//   - Launching allocates nothing, on the device or on Go's heap.
//   - One order of sums: a product's inner dimension in steps of 16 from the start
//     (routers: in pieces of 64 shared out over 16 warps);
//     attention in tiles of 32 positions inside of chunks of 256; norms and softmax
//     by the row's length, log-probabilities by the vocabulary. What decides which
//     tokens a draw leaves out is summed in integers, whose order does not count. So
//     results of these kernels depend neither on the tile that was chosen nor on other
//     rows. cuBLASLt, and products of up to eight rows of ours, do not promise that,
//     which is what Options.BatchInvariant is for; either way, the same operation on
//     the same data gives the same bits.
//   - Kernels overlap, from compute capability 9.0 on (unless Options.Serial): one may
//     start before the one in front has ended, and then waits for it. Before it waits it
//     reads nothing but weights and what says where things are (Rows of RoPE, Slots of
//     AppendKV, both of RoPEAppendKV, SeqStarts, ContextLens and BlockTable of Attention).
//     So no operation of a Backend may write those; copies may, and kernels launched
//     without Grid.Overlap.
//     A stream is used through one Backend of the process, which takes it at the first
//     operation and has it until it is closed (others are refused): the way down of experts
//     relies on the way up right in front of it.
//   - Weights may have any float type. Those of products that differ from the
//     activations' type are taken apart into two numbers of it as they are read,
//     which is slow: better cast them at load (Backend.WeightDType).
//
// # Limits
//
// A head size that is a multiple of 8, up to 128 (for RoPEAppendKV any up to 256); at
// most 64 heads of a query to one of the cache; rows of up to 12288 elements for
// norms; up to 3072 experts, and where they lie in tiles rows of X that start at
// multiples of 16 bytes and of Out at multiples of 8; the 2048 likeliest tokens of a
// row.
//
// # Example
//
//	backend, err := cuda.New(machine, device.HBM(0), cuda.Options{})
//	defer backend.Close()
//	stream, err := machine.NewStream(device.HBM(0), device.StreamOptions{Name: "compute"})
//	…
//	err = backend.Enqueue(stream, &kernels.MatMul{X: x, W: w, Out: y})
package cuda
