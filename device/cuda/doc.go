// Package cuda is the device package on NVIDIA GPUs. Everything but this page
// needs the build tag cuda, gcc and a cuda.h of version 12 or 13; tools/cuda/go.sh
// runs the go command with the flags that takes. The driver is opened when Open
// is called and not before: the same binary runs where there is none.
//
// # What it is
//
// Devices, primary contexts, streams, events, modules and copies are driven
// through gorgonia.org/cu. What that lacks stands in glue.c: pinned memory,
// mapped device memory, launches that allocate nothing, graphs. Package kernels/cuda
// builds on what this package adds to the contract: Machine.LoadModule,
// Stream.Launch, Stream.Do, and the packages nvrtc (compiling CUDA
// C++), dylib (finding CUDA's libraries) and nvml (readings of memory, load and
// health).
//
// # What it is not
//
// It has no kernels, picks no device by itself, and does not order copies.
//
// # How the contract meets CUDA
//
//   - GPU memory is created and mapped by the driver's virtual memory calls, in
//     pieces of the device's granularity (2 MiB), and mapped for all peers that can
//     reach it. Unlike cuMemFree, giving it back does not wait for the device: a
//     stream may stand before a fence that the caller of Free is still to raise.
//     Accounts are therefore exact against cuMemGetInfo; what contexts and
//     libraries take is Usage.Other.
//   - Host memory is mapped in large pages, touched by many threads at once, and
//     then pinned for all devices; small pieces come from cuMemHostAlloc.
//   - A fence is a 32-bit word in pinned memory that streams await and raise by
//     cuStreamWaitValue32 and cuStreamWriteValue32. An event recorded on a host
//     stream has such a word too.
//   - A host stream is one goroutine on a thread of its own.
//   - Streams of GPUs are device.Capturers. A capture belongs to its thread, so that calls
//     from others, which may be refused during one, are not.
//   - CUDA keeps no error of a stream, only one of a whole context, which ends it.
//     The error of a stream (a call that the driver refused, an event or fence that
//     came with an error) is kept here: what is given to the stream from then on is
//     dropped. A stream that runs behind another's failure on the GPU's own side,
//     by an event or fence whose failure the host learns only later, runs on over
//     undefined data; its Synchronize, and events recorded on it, tell.
//   - An error that ends the context loses the device: every call on it says
//     device.ErrLost from then on, and the fences it was to raise fail.
//   - The host waits by asking the driver again and again, fast at first and then
//     with growing pauses, so that every wait ends with its context.
//
// # Environment
//
// Open sets CUDA_DEVICE_MAX_CONNECTIONS=32 and CUDA_DEVICE_MAX_COPY_CONNECTIONS=32,
// so that streams that wait do not hold back others in a shared hardware queue (with
// fewer copy queues, copies between two GPUs on two streams, each behind a fence
// that the other raises, never end), and CUDA_MODULE_LOADING=EAGER, since loading a
// kernel at its first launch may wait for the device; all only where the variable is
// unset.
//
// # Example
//
//	m, err := cuda.Open(cuda.Options{GPUs: []int{0, 1}})
//	if errors.Is(err, cuda.ErrUnavailable) {
//		// no driver, no GPU, or one that is too old: err says which, and what to do
//	}
package cuda
