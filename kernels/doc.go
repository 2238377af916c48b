// Package kernels defines what a backend computes: the operations of an MoE transformer as
// argument structs, their shapes, what each reads, writes and costs, and the layout of an
// expert's weights.
//
// Two backends implement them, and pass one conformance suite (package kernelstest):
// kernels/cpu, on the Executor streams of emulated devices, and kernels/cuda.
//
// # How an operation runs
//
// A caller fills an argument struct and passes its address to Backend.Enqueue, which checks it
// and returns at once; the operation runs in stream order. The struct may be reused as soon as
// Enqueue returns. An error of Enqueue means that the arguments are bad and nothing was
// enqueued.
//
//	rms := kernels.Norm{Kind: kernels.RMS, X: x, Weight: w, Eps: 1e-5, Out: y}
//	if err := backend.Enqueue(stream, &rms); err != nil { … }
//
// # Shapes
//
// Shapes in the comments of arguments: N tokens of a step (rows of its matrices), S sequences,
// H hidden size, E experts, K experts per token, I expert intermediate size, V vocabulary, D
// head size. "act" is the backend's activation type, "weight" one of BF16, F16, F32. Rows may
// have gaps between them (strides) unless "dense" is noted; the last dimension never has gaps.
// Unless noted, outputs share no memory with inputs or with each other. Addresses are multiples
// of the element's size. Ids, slots, offsets and block numbers must be in range; kernels/cpu
// checks them.
//
// # Files
//
// An operation's struct, Check and Declare are in the file of its family: rows.go, matmul.go,
// attention.go, routing.go, expert.go, combine.go, logits.go, copy.go; beside.go has those of a router
// and a shared expert side by side. Pinned (pinned.go) is memory that the host and the device's kernels
// share, and makes small copies by Copy or by the copy engines.
//
// # Random numbers
//
// Sampling noise and dummy weights come from one counter-based generator (package philox),
// specified to the bit so that every backend has the same values. The functions that decide
// which tokens TopP and MinP remove (Exp, SampleWeight) are specified to the bit as well: all
// backends sample the same tokens from the same logits.
//
// # Invariants
//
//   - Arguments are tensors (an address with a shape, owning nothing) and scalars
//     known to the host, never Go slices. Per-token data (ids, positions, block
//     tables, sampling parameters) are device tensors.
//   - Counts known only on the device (tokens per expert) stay there.
//   - Operations allocate nothing on the device.
//   - Activations and the KV cache have the backend's dtype (CPU: float32, CUDA: 16 bits);
//     weights have 16 bits or float32. Every sum is taken in float32, in an order that
//     depends only on the shapes of weights and the length of the sequence, never on the
//     number of tokens, on threads, or on timing. Router, softmax and norms are
//     float32. The sums of Sample are integers, exact in any order.
//   - No operation depends on where an expert is: expert GEMMs read its address
//     from a slot table in device memory.
package kernels
