// Package transfer copies between the memories of a machine: in chunks and by priority.
// Each copy starts once the fence values that it depends on are reached, and signals a
// fence when its last byte has landed.
//
// # How a copy proceeds
//
// Submit passes a request to the core (package dispatch), which schedules all copies, and
// returns. Each pair of memories has a link: a device stream that makes the copies. Depth chunks
// of at most ChunkBytes are in flight on each link, more if they are small, so that the device
// has work for at least Window while the host learns of the end of one. The rest waits in the
// queue of its destination, so that a request of higher priority overtakes at the next chunk.
// Requests of equal priority go in order of submission, except that those of KV blocks take
// turns: none waits for another longer than its share of the link. A request whose Done another
// one has among its After points gets the other one's priority, if that is higher. A request
// whose After points are not all reached is passed over and does not block the queue. So there is
// no deadlock when a stream must see one copy land before it signals the fence that another copy
// waits for.
//
// One host stream, which watches events and fences (device.Watcher), learns of completed
// chunks and reached After points of all links: it launches the next chunk, and signals
// Done. Submit itself does what needs no waiting: a request whose points are reached goes
// to an idle link at once.
//
//	engine, _ := transfer.New(transfer.Options{Machine: m})
//	ticket, err := engine.Submit(transfer.Request{
//		Src: weights.Region(0, n), // in host memory, say
//		Dst: slot.Region(0, n),    // in a GPU's
//		Priority: transfer.Prefetch,
//		After:    []device.Point{lastReader},
//		Done:     device.Point{Fence: landed, Value: 7},
//		Label:    transfer.Text("layer 3 wave 1"),
//	})
//	…
//	compute.WaitFence(landed, 7)         // the consumer's stream waits by itself
//	ticket.RaisePriority(transfer.Demand) // the copy is needed now
//
// # Many pieces
//
// A request may have many Pieces, scattered in both memories, with one ticket and one
// Done. Small pieces share a chunk, and with it an event: a thousand blocks are 16 chunks. The
// pieces of a chunk, if they are small (Options.BatchBelow), are one operation of the device
// where its streams have batched copies (device.BatchCopier): it copies them in any order, so
// none may depend on another.
//
// A copy kernel is faster than the copy engines where pieces are smaller still, and takes
// multiprocessors from other work. With Options.Kernel it copies KV blocks and migrations of
// less than the calibrated size, on a stream of its own; fetches of experts, which steps wait
// for, never use it: that was not measured to pay.
//
// # Several PCIe links
//
// A copy between the host and a GPU is limited by that GPU's PCIe link. With AddRelay other GPUs
// lend it theirs: chunks go from the host over a relay's link into a buffer in its memory, and
// over NVLink into the destination, or the other way round.
//
//	err := engine.AddRelay(transfer.Relay{GPU: device.HBM(1), In: inBuffers, Out: outBuffers})
//	…
//	drained, err := engine.RemoveRelay(device.HBM(1)) // in the middle of copies, if need be
//	err = drained.Wait(ctx)                           // the buffers may be freed
//
// Requests do not name relays: every copy of at least Multipath.ThresholdIn or ThresholdOut bytes
// uses them, and so do many small ones that wait for one link. A GPU's own copies go first on its
// link, except before those of a higher priority. Requests have one Done, whatever the links: a
// consumer's stream waits for it as before. Copies between GPUs take their own links.
//
// Both parts of a chunk's way have streams of the relay. The second is enqueued when the host
// stream has learned of the end of the first. So a chunk takes two launches of a copy (or of a
// batch, for small pieces) and two events, a direct one one each; the host stream needs some
// microseconds for each, and one thread for all links.
//
// # Latency
//
// A load over an idle link takes, beside its copies: Submit, which checks the pieces and
// enqueues the first chunks in the caller's goroutine; the start of the device; the time until
// the host stream, which polls without pause at first, sees the last chunk's event and signals
// Done; and the time until the one who waits sees that. No other goroutine takes part. Where host
// streams are device.Helpers, Ticket.Wait need not wait until the stream's thread is awake: it runs
// in its place what completed chunks call for.
//
// The host stream does not look before a chunk can have landed: the link tells it when that is at the
// earliest (device.Due), by the chunk's bytes, what is in flight before it, and somewhat more than the
// rate of the topology or, if that is higher, of recent chunks, once one was seen to take as long as that.
// Until then its thread sleeps, where nothing else is due, and so does one who waits in its place, who
// notices what no chunk brings about (Cancel, Skip, the end of a context, a lost device) by so much later, a
// millisecond at most. Of chunks that land soon, as
// small ones and those of relays over NVLink, and on links whose rate is unknown, no such time is told, nor
// is one of After points: while such a wait is pending, the stream polls as without the others.
//
// Options.Timed measures each part (Ticket.Times).
//
// Done is signaled by the host: a chunk that fails is made again, which a fence that its stream
// has failed would not know of. Where a copy fails only with its device, as on CUDA, and the request
// says that its fence counts in order (Request.DoneInOrder), the link's stream signals Done behind
// the last chunk, and what waits for it on a device does not wait for the host. The end of the
// ticket comes from the host as before.
//
// # Failure
//
// A chunk that fails is retried once. If it fails again, its ticket fails: the Done fence is
// failed with the error, so that nothing waits forever, and Ticket.Err returns it. Other requests
// of the link continue. A request whose After point fails, fails with it. A lost device fails
// every request that only its links carry and that was not skipped, and Submit refuses new ones. What
// fails over a relay is copied over the GPU's own link, and a relay that fails again is retired, with a
// warning: no copy fails because of a relay. On some devices a stream that waits for a failed fence goes into
// error, on others it continues; so the submitter of a copy checks Ticket.Err before using
// results.
//
// # What it is not
//
// The package owns no memory that it copies, does not prevent requests from overlapping
// (After and Done must order them), and knows neither experts nor KV. It does not choose the
// relays: which links pay is measured, and buffers are memory of GPUs that others use too.
//
// # Invariants
//
//   - Submit and RaisePriority never wait for a copy.
//   - Done is signaled or failed once per request. It is signaled after the last byte has
//     landed, or after Ticket.Skip, which declares that the others are not needed.
//   - What Ticket.Redirect takes back is not read once it has returned; what Ticket.Abort takes back
//     is neither read nor written once the ticket has ended.
//   - Nothing of a request is written before all of its After points are reached.
//   - Host work runs as Work on host streams or in the caller's goroutine, so that a
//     machine with virtual time sees all of it.
package transfer
