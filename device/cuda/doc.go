// Package cuda is the device package on NVIDIA GPUs. Everything but this page
// needs the build tag cuda, gcc and a cuda.h of version 12 or 13; tools/cuda/go.sh
// runs the go command with the flags that this build requires. Open loads the driver
// at run time, so the same binary also starts on machines without one.
//
// # What it is
//
// Devices, primary contexts, streams, events, modules and copies are driven
// through gorgonia.org/cu. glue.c implements what that package lacks: pinned memory,
// mapped device memory, launches without allocation, graphs, batches of copies. Package
// kernels/cuda builds on what this package adds to the contract: Machine.LoadModule,
// Stream.Launch, Stream.Do, Stream.CopyBatch, and the packages nvrtc (compiling CUDA
// C++), dylib (finding CUDA's libraries) and nvml (readings of memory, load and
// health).
//
// # What it is not
//
// The package has no kernels, selects no device by itself, and does not order copies.
//
// # How the contract meets CUDA
//
//   - GPU memory is created and mapped by the driver's virtual memory calls, in
//     multiples of the device's granularity (2 MiB), and mapped for all peers that can
//     access it. Unlike cuMemFree, releasing it does not synchronize with the device: a
//     stream may be waiting for a fence that the caller of Free has yet to signal.
//     The accounts therefore match cuMemGetInfo exactly; memory used by contexts and
//     libraries is Usage.Other.
//   - Host memory is mapped in large pages, touched by many threads at once, and
//     then pinned for all devices; small pieces come from cuMemHostAlloc.
//   - A fence is a 32-bit word in pinned memory. Streams wait for it with
//     cuStreamWaitValue32 and signal it with cuStreamWriteValue32. An event recorded
//     on a host stream has such a word too.
//   - A host stream is one goroutine locked to its own thread. Host streams are device.Helpers.
//   - GPU streams are device.Capturers. A capture is local to its thread, so calls that
//     CUDA may refuse during a capture still succeed on other threads.
//   - CUDA has no error state per stream, only one per context, which ends the context.
//     This package keeps the error of a stream (a call that the driver refused, an event
//     or fence that failed) and drops every operation enqueued on the stream after it.
//     A GPU stream that waits for an event or fence whose failure the host detects only
//     later continues with undefined data; its Synchronize, and events recorded on it,
//     return the error. Of an event of another GPU that is lost after the wait was
//     enqueued they do not know; fences between GPUs tell.
//   - An error that ends the context loses the device: every later call on the device
//     returns device.ErrLost, and the fences that it had yet to signal fail.
//   - The host waits by polling the driver, at first without a pause and then at growing
//     intervals, so that every wait ends when its context is lost. A host stream does not
//     poll for watches before device.Due; its thread sleeps while none is due.
//
// # Environment
//
// Open sets CUDA_DEVICE_MAX_CONNECTIONS=32 and CUDA_DEVICE_MAX_COPY_CONNECTIONS=32,
// so that a waiting stream does not block others in a shared hardware queue (with
// fewer copy queues, copies between two GPUs on two streams deadlock if each waits for
// a fence that the other signals), and CUDA_MODULE_LOADING=EAGER, since lazy loading
// at a kernel's first launch may synchronize with the device. Open leaves variables
// that are already set unchanged. The driver gets the first operations of streams one
// at a time, as streams that several threads begin at once have been seen to share a
// queue; what Do enqueues is not among them.
// ---
//
// # Example
//
//	m, err := cuda.Open(cuda.Options{GPUs: []int{0, 1}})
//	if errors.Is(err, cuda.ErrUnavailable) {
//		// no driver, no GPU, or one that is too old: err says which, and what to do
//	}
package cuda
