// Package kernels says what a backend computes: the operations of an MoE
// transformer as plain argument structs, their shapes, what each reads, writes
// and costs, and the layout of an expert's weights.
//
// Two backends carry them out, behind one conformance suite (package
// kernelstest): kernels/cpu, on the Executor streams of emulated devices, and
// kernels/cuda.
//
// # How an operation runs
//
// A caller fills an argument struct and gives its address to Backend.Enqueue,
// which checks it and returns at once; the operation runs in stream order. The
// struct may be changed and used again right away. An error of Enqueue means bad
// arguments, and nothing was enqueued.
//
//	rms := kernels.Norm{Kind: kernels.RMS, X: x, Weight: w, Eps: 1e-5, Out: y}
//	if err := backend.Enqueue(stream, &rms); err != nil { … }
//
// # Shapes
//
// The comments of arguments say N rows (tokens) of a step, S sequences, H hidden size, E
// experts, K experts per token, I expert intermediate size, V vocabulary, D head size.
// "act" is the backend's activation type, "weight" one of BF16, F16, F32. Rows may have
// gaps between them (strides) unless "dense" is said; the last dimension never has.
// Outputs share no memory with inputs unless it is said, nor with each other; addresses
// are multiples of the element's size. Ids, slots, offsets and block numbers must lie in
// their ranges; kernels/cpu checks them.
//
// # Files
//
// An operation's struct, Check and Declare stand together in the file of its family:
// rows.go, matmul.go, attention.go, routing.go, expert.go, combine.go, logits.go.
//
// # Random numbers
//
// Sampling noise and dummy weights come from one counter-based generator (package
// philox), described to the bit so that every backend has the same values. So is what
// cuts a distribution before a token is drawn (Exp, SampleWeight): from the same logits
// all backends draw the same tokens.
//
// # Invariants
//
//   - Arguments are tensors (an address with a shape, owning nothing) and scalars
//     known to the host, never Go slices. Per-row data (ids, positions, block
//     tables, sampling parameters) are device tensors.
//   - Counts known only on the device (rows per expert) stay there.
//   - Operations allocate nothing on the device.
//   - Activations and KV have the backend's dtype (CPU: float32, CUDA: 16 bit);
//     weights have 16 bit or float32; every sum is taken in float32, in an order
//     fixed by the shapes of weights and the length of the sequence, never by the
//     number of rows, by threads, or by arrival. Router, softmax and norms are
//     float32. The sums of Sample are integers, exact in any order.
//   - No operation depends on where an expert lies: expert products read
//     addresses from a slot table in device memory.
package kernels
