// Package emulated is a machine of any number of GPUs inside this process: real
// memory, real copies, kernels that run as Go code, and models of links and
// processors that can slow them.
//
// It is stricter than hardware: capacities are enforced, leaks are errors, and
// with Options.Check every access that an operation declares is checked to be
// ordered after those it conflicts with (see Finding). It fails on demand (see
// Fault, Machine.Lose, Machine.Occupy).
//
// # Modes
//
// By default each stream is a goroutine, so copies and work really overlap, as fast
// as they can or, with Options.Pace, no faster than the models say.
//
// With Options.Virtual one operation runs at a time, in an order chosen by
// Options.Schedule, on a virtual clock that the models alone advance. Whoever waits
// (Synchronize, Recover, Close, Event.Synchronize, Fence.Await) drives the machine;
// nothing runs, and no time passes, while nobody waits or while Work runs. A
// program with one goroutine beside its streams therefore runs the same way every
// time, at the same times. A wait that nothing can end is ErrDeadlock, which names
// every stream that is held up and by what. Polling works too: asking Event.Query or
// Fence.Value twice in a row lets the machine go on by one step, as Machine.Yield does
// each time. Machine.Loop has no goroutine: its calls are made by Machine.Turn.
//
// With Options.NoData besides, memory is address space only, so that models of
// hundreds of gigabytes run in their true shapes: copies take their time and move
// nothing, and only Work that says Host runs. Host memory can still be written; it
// costs what is touched.
//
// # Models
//
// A copy takes its path's latency, then drains its bytes over all links of the path
// at once; links share their rate fairly among the copies on them. Work takes
// max(flops/rate, bytes/rate) of its processor, which concurrent Work shares.
// Memory bandwidth is not shared between copies and work.
//
// # What it is not
//
// It holds no figures of real hardware: those come in by Options, a device.Topology
// or a specification (ParseSpec).
//
// # Invariants
//
//   - A Memory is one mapping outside Go's heap; its addresses are those of this
//     process, so kernels on the CPU reach it. Only host memory can be had through
//     Memory.Read and Memory.Write.
//   - Streams take operations strictly in order. A stream in error skips, and
//     whatever it was to record or raise carries the error: nobody waits for it in
//     vain.
//   - Goroutines belong to streams; Stream.Close and Machine.Close wait for them.
//
// # Example
//
//	m, err := emulated.Open(emulated.Options{Virtual: true, Check: true})
//	…
//	s, _ := m.NewStream(device.HBM(0), device.StreamOptions{Name: "compute"})
//	err = s.(device.Executor).Execute(device.Work{Name: "double", Flops: 1e9, Run: double})
package emulated
