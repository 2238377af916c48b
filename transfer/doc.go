// Package transfer copies between the memories of a machine: in chunks, by
// priority, each copy starting when what it must wait for has happened, and
// raising a fence when its last byte has landed.
//
// # How a copy goes
//
// Submit gives a request to the core (package dispatch), which decides what goes when,
// and returns. There is a link for each pair of memories: a device stream that does the
// copies. Depth chunks of at most ChunkBytes are with the device at a time on each, more
// where they are small; the rest waits in the queue of its destination, so that a more urgent request overtakes at
// the next chunk. Among requests of one priority the first submitted goes first. A request
// whose After points are not all reached is passed over, not waited for: nothing queued
// behind it is held up, so a stream that must see one copy land before it raises the fence
// another one waits for is no deadlock.
//
// One host stream, which watches (device.Watcher), learns of the ends of chunks and of
// After points for all links: it gives the device the next chunk, and raises Done. What
// takes no waiting happens in the caller of Submit: a request whose points are reached
// goes to an idle link at once.
//
//	engine, _ := transfer.New(transfer.Options{Machine: m})
//	ticket, err := engine.Submit(transfer.Request{
//		Src: weights.Region(0, n), // of host memory, say
//		Dst: slot.Region(0, n),    // of a GPU's
//		Priority: transfer.Prefetch,
//		After:    []device.Point{lastReader},
//		Done:     device.Point{Fence: landed, Value: 7},
//		Label:    transfer.Text("layer 3 wave 1"),
//	})
//	…
//	compute.Await(landed, 7)             // the consumer's stream waits by itself
//	ticket.Promote(transfer.Demand)      // it is needed sooner than thought
//
// # Many pieces
//
// A request may have many Pieces, scattered on both sides, with one ticket and one Done.
// Small ones share a chunk, and with it an event: a thousand blocks are 16 chunks.
//
// # Failure
//
// A chunk that fails is tried once more. When it fails again its ticket fails: the
// Done fence is failed with the error, so nobody waits for ever, and Ticket.Err
// says it. Other requests of the link go on. A request that waits for a point that
// fails, fails with it. A lost device fails every request
// that only its links carry, and Submit refuses new ones. A stream that waits for a failed fence
// goes into error on some devices and runs on on others, so whoever submitted
// asks Ticket.Err before he believes what was computed.
//
// # What it is not
//
// It owns no memory that it copies, keeps nobody from overlapping requests (each
// must be ordered by After and Done), and knows neither experts nor KV. There is
// one path for each pair of memories: a second one, over a relay, would be one more link
// that takes chunks out of the queue of the destination.
//
// # Invariants
//
//   - Submit and Promote never wait for a copy.
//   - Done is raised once per request, after its last byte has landed, or failed.
//     Nothing is ever raised with a byte missing, unless whoever wanted the bytes has
//     said by Ticket.Skip that nobody does any more.
//   - Nothing of a request is written before all of its After points.
//   - Host work runs as Work on host streams or in the caller's goroutine, so that a
//     machine with virtual time sees all of it.
package transfer
