// Package emulated implements device.Machine as any number of GPUs inside this process:
// real memory, real copies, kernels that run as Go code, and optional timing models of
// links and processors.
//
// The machine is stricter than hardware: it enforces capacities, reports leaks as errors,
// and, with Options.Check, checks that every access an operation declares is ordered after
// the accesses it conflicts with (see Finding). It can inject failures (see Fault,
// Machine.Lose, Machine.Occupy).
//
// # Modes
//
// By default each stream is a goroutine, so copies and work really overlap. They run as
// fast as they can or, with Options.Pace, no faster than the models allow.
//
// With Options.Virtual one operation runs at a time, in an order chosen by
// Options.Schedule, on a virtual clock that only the models advance. A goroutine that waits
// (Synchronize, Recover, Close, Event.Synchronize, Fence.Wait) drives the machine; while no
// goroutine waits, or while Work runs, no other operation runs and no time passes. A
// program with one goroutine beside its streams therefore runs in the same order and with
// the same times on every run. A wait that can never end returns ErrDeadlock, which names
// every blocked stream and what blocks it. Polling also makes progress: two consecutive
// calls of Event.Query or Fence.Value advance the machine by one step, as each
// Machine.Yield does. Machine.Loop has no goroutine: Machine.Turn makes its calls.
//
// With Options.NoData in addition, memory is address space only, so models of hundreds of
// gigabytes run in their true shapes: copies take their modeled time but move nothing, and
// only Work with Host set runs. Host memory can still be written; only the pages touched
// use real memory.
//
// Options.LikeCUDA makes streams as lax as CUDA's, Options.TimeFailures lets times of events
// fail, and with Options.FenceStart counters wrap around early: programs that are right on
// emulated devices in these modes too do not depend on what CUDA does not promise.
//
// # Models
//
// A copy takes its path's latency, then transfers its bytes over all links of the path at
// once; concurrent copies share a link's rate fairly. Work takes max(flops/rate,
// bytes/rate) of its processor, which concurrent Work shares. Copies and work do not share
// memory bandwidth. Each GPU has a link of its own to the host, in each direction, and sets of
// GPUs may share a rate behind it (Options.HostRoots). Other programs' copies take their share of a
// link (Options.Traffic), and a link may slow down or fail for some time (Options.HostRates).
//
// # What it is not
//
// The package holds no figures of real hardware: those come from Options, a device.Topology
// or a specification (ParseSpec).
//
// # Invariants
//
//   - A Memory is one mapping outside Go's heap. Its addresses are valid in this
//     process, so kernels on the CPU can dereference them. Memory.Read and Memory.Write
//     access host memory only.
//   - Streams run operations strictly in order. A stream in error skips operations (with
//     Options.LikeCUDA only those enqueued once the host knows of a failed wait); the
//     events it would record and the fences it would signal carry the error, so no
//     waiter blocks forever.
//   - Goroutines belong to streams; Stream.Close and Machine.Close wait for them.
//
// # Example
//
//	m, err := emulated.Open(emulated.Options{Virtual: true, Check: true})
//	…
//	s, _ := m.NewStream(device.HBM(0), device.StreamOptions{Name: "compute"})
//	err = s.(device.Executor).Execute(device.Work{Name: "double", Flops: 1e9, Run: double})
package emulated
