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
// Each destination has one queue. A link takes chunks from the queue of its destination
// whenever fewer than Depth of its chunks are in flight, or behind the first of them less
// than WindowBytes. It takes them from
// the first request, by class and then by order of submission, that it can carry and whose
// points are all reached; requests that take turns share the link. So a request of a higher class overtakes at the next chunk, and
// a slow link takes fewer chunks. What a request waits for has at least its class: a
// request that waits for another one's Done passes its class on. A link carries requests from its own source to its own
// destination. A relay, which copies bytes part of the way for another link to continue,
// would change what links carry (link.carries) and what follows a landed chunk
// (Core.Landed); a chunk does not know its link.
//
// # Failure
//
// A chunk that fails stops its link: nothing more is launched until every chunk in flight
// has ended and the stream was recovered. Then the first chunk that failed is launched
// once more, on the same link (Core.Recovered could choose another), and with it the
// chunks behind it, which failed because of it. A chunk that fails a second time, or that
// the device refused, fails its request. A link whose device is lost fails every request
// that only this link can carry.
//
// # Invariants
//
//   - Each byte of a request is launched once, and again only if its chunk failed.
//   - No chunk is launched before all points of its request are reached.
//   - A request finishes once, when none of its chunks is in flight: without an error if
//     all its bytes have landed, or if it was skipped (Core.Skip).
package dispatch
