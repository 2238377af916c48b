// Package dispatch schedules copies: which bytes of which request go over which link next,
// and what follows when a chunk has landed or failed. It is the pure core of package
// transfer: events go in, actions come out; it has no goroutine, clock, device or IO.
//
//	var c dispatch.Core
//	link := c.AddLink(dispatch.Link{From: device.Host, To: device.HBM(0), ChunkBytes: 8 << 20, WindowBytes: 4 << 20, Depth: 2})
//	err := c.Submit(&dispatch.Request{From: device.Host, To: device.HBM(0), Pieces: pieces, Class: 1}, after)
//	for a, ok := c.Next(); ok; a, ok = c.Next() {
//		switch a.Kind {
//		case dispatch.Launch: // launch a.Chunk on the device; then c.Landed(a.Link, a.Slot), or c.Failed
//		case dispatch.Await:  // watch a.Point; then c.Reached(a.Point), or c.PointFailed
//		case dispatch.Finish: // a.Request has ended, with a.Err
//		…
//
// # Order
//
// Each destination has one queue. A link takes chunks from the queue of its destination whenever
// fewer than Depth of its chunks are in flight, or behind the first of them less than
// WindowBytes. It takes them from the first request, by class and then by order of submission,
// that it can carry and whose points are all reached; requests that take turns share the link. So
// a request of a higher class overtakes at the next chunk, and a slow link takes fewer chunks.
// What a request waits for has at least its class: a request that waits for another one's Done
// passes its class on. A link carries requests from its own source to its own destination.
//
// # Relays
//
// A link between the host and a GPU may be a relay (Core.AddRelay): through buffers in the GPU's
// memory it carries chunks of other GPUs' requests, too. A hop (Core.AddHop) connects the buffers
// with another GPU; it is launched on like a link, and takes what arrives. A chunk that has
// landed in a buffer, from the host or over the hop, is launched on the rest of its way then, and
// the link's slot is free as soon as its own part has ended.
//
// Which link takes what is a pull, as in MMA (section 3.4.2 of the paper: outstanding queues that
// pull from micro-task queues, direct path first): a link with room takes a chunk of its own
// requests, or, if it is a relay, has a free buffer, and has none of that class or a higher one,
// of another GPU's: of the highest class, of the preferred GPU, of the longest queue. Chunks that
// others use the link for, too, end later, so that it takes fewer. A relay is not used for less
// than RelayFrom bytes, which are those of the request or of all that wait for the same link:
// many small ones count as a large one.
//
// With Core.NoDirectFirst a link's own requests have no precedence over others' of their class, unless
// relays do not carry them: the same rules choose among all, and of queues of one length that of which
// the link took a chunk longest ago. That is to measure what direct first is worth (Table 2 of the paper).
//
// Near the end of a queue a fixed chunk is too coarse: a link that has just taken one would copy
// it while the others idle. So the chunks become smaller: half of what is left for the link if
// all links ended at the same time (Core.share), between a quarter of RelayChunkBytes and all of
// it. This is guided self-scheduling (Polychronopoulos and Kuck, 1987) for links of different
// rates. Rates are measured by the chunks that land; the second hop, and until the host knows of
// it, count as time of the relay. A relay whose part is less than half of the smallest chunk
// takes none: the others end sooner.
//
// With Core.Yields a relay whose link copies at less than 3/4 of its rate, because others use it,
// takes nothing for as long as its last chunk took (the paper's mode that prefers background
// traffic); by default it goes on.
//
// # Failure
//
// A chunk that fails stops its link: nothing more is launched until every chunk in flight has
// ended and the stream was recovered. Then the first chunk that failed is launched once more, and
// with it the chunks behind it, which failed because of it: on the same link, but a relayed chunk
// on the request's own. A chunk that fails a second time, or that the device refused, fails its
// request; one that a relay failed or refused does not. A link whose device is lost fails every
// request that only this link can carry, those with chunks in flight once it has recovered. A relay, or one of its hops, is retired (Retire) by the
// second failure within 256 chunks, or when its device is lost, and what it had taken goes back
// to the requests' own links.
//
// A chunk that a link has taken stays there until it lands or fails, however slow that is: the
// device reads and writes the caller's memory until then.
//
// # Invariants
//
//   - Each byte of a request is launched once, and again only if its chunk failed.
//   - No chunk is launched before all points of its request are reached.
//   - A request finishes once, when none of its chunks is in flight: without an error if
//     all its bytes have landed, or if the rest of them was skipped (Core.Skip), whatever becomes of
//     those in flight.
//   - A relay's buffer has one chunk at a time, from the launch of its first part until the second has
//     ended; a relay that was removed is Drained once no chunk is in its buffers.
//   - Request.Landed is a prefix of the request's bytes, over all links.
package dispatch
