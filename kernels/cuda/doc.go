// Package cuda implements the operations of package kernels on NVIDIA GPUs of compute
// capability 8.0 and up, on the streams of device/cuda. Activations and the KV cache are
// bfloat16 or, by option, half precision; sums are float32.
//
// # What it is
//
// The kernels are CUDA C++ in src/, embedded, compiled by NVRTC for the exact architecture when
// a Backend is created, and cached on disk. A Backend turns an operation into one or a few
// launches: streamstate.go has the state of a stream and the dispatch; rows.go, gemm.go,
// expert.go, dense.go, attention.go, prompt.go, routing.go, beside.go, logits.go and copy.go select
// kernels, tiles and grids.
// The argument structs in arguments.go are generated from src/ (internal/arguments). Dense
// GEMMs of more than a few rows go through cuBLASLt if it supports them, otherwise (with Options.BatchInvariant always)
// through kernels of this package.
//
// On GPUs of compute capability 9.0, experts are stored in tiles (layout.go); expert GEMMs, and
// batch-invariant dense GEMMs, run on kernels for sm_90a only.
//
// All of that is plain Go. Loading, launching and cuBLASLt need the build tag cuda (gpu.go,
// internal/cublaslt). With that tag and a C++ compiler, tests also run every kernel, including
// those for sm_90a, on the CPU (internal/simt), with the same conformance suite as on a GPU.
// docs/design/kernels.md describes how to add a kernel.
//
// # What it is not
//
// It creates no streams, and owns no device memory except one workspace per stream, allocated
// when the Backend is created. It does not check device data: ids and slots outside of their
// tables are skipped or give NaN, and an expert's slot must hold a valid address (a multiple of
// 16 bytes).
//
// # Invariants
//
//   - Launching allocates nothing, on the device or on Go's heap.
//   - Sums have one order: a GEMM's inner dimension in steps of 16 from the start
//     (routers and gates: split in pieces of 64 over 16 warps);
//     attention in tiles of 32 positions inside chunks of 256; norms and softmax
//     by the row's length, log-probabilities by the vocabulary. The sums that decide which
//     tokens top-k and top-p keep are integers, exact in any order. So the
//     results of these kernels depend neither on the tile that was selected nor on other
//     tokens of the batch. cuBLASLt, and the GEMMs of up to 16 rows of this package, do not
//     guarantee that; hence Options.BatchInvariant. In either case the same operation on
//     the same data gives the same bits.
//   - Kernels overlap (programmatic dependent launch), from compute capability 9.0 on, unless
//     Options.Serial is set: one may start before the preceding one has ended, and then waits for
//     it. Before this wait it reads only weights and index data (Rows of RoPE, Slots of
//     AppendKV, both of RoPEAppendKV, SeqStarts, ContextLens and BlockTable of Attention, those of
//     RoPEAttention's parts, and Slots of ExpertUp and ExpertDown with Runs), and with
//     Attention.PastReady keys and values of earlier steps.
//     So no operation of a Backend may write weights and index data, slot tables of experts among them, but
//     Copy; a stream's copies by copy engines may, and kernels launched without Grid.Overlap, as Copy's is.
//     A stream is used by one Backend of the process, from its first operation until Close
//     (others get an error): the down projection of experts relies on the gate/up projection
//     being the preceding kernel.
//   - Weights may have any float type. In GEMMs, weights of another type than the
//     activations are split into two numbers of the activation type as they are read,
//     which is slow: convert them at load instead (Backend.WeightDType).
//
// # Limits
//
// A head size that is a multiple of 8, up to 128 (for RoPEAppendKV any up to 256); at most 64
// heads of Q per KV head; rows of up to 12288 elements for norms; up to 3072 experts; with
// experts in tiles, rows of X that start at multiples of 16 bytes and of Out at multiples of 8; Runs
// at a multiple of 16 bytes; log-probabilities of up to 2048 top tokens per row.
//
// # Example
//
//	backend, err := cuda.New(machine, device.HBM(0), cuda.Options{})
//	defer backend.Close()
//	stream, err := machine.NewStream(device.HBM(0), device.StreamOptions{Name: "compute"})
//	…
//	err = backend.Enqueue(stream, &kernels.MatMul{X: x, W: w, Out: y})
package cuda
