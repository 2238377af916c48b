// Package dispatch decides which bytes of which copy go over which link next, and
// what follows when a chunk has landed or failed. It is the pure core of package
// transfer: events go in, actions come out; no goroutine, clock, device or IO here.
//
//	var c dispatch.Core
//	link := c.AddLink(dispatch.Link{From: device.Host, To: device.HBM(0), ChunkBytes: 8 << 20, Depth: 2})
//	err := c.Submit(&dispatch.Request{From: device.Host, To: device.HBM(0), Pieces: pieces, Class: 1}, after)
//	for a, ok := c.Next(); ok; a, ok = c.Next() {
//		switch a.Kind {
//		case dispatch.Launch: // give a.Chunk to the device; then c.Landed(a.Link, a.Slot), or c.Failed
//		case dispatch.Await:  // watch a.Point; then c.Reached(a.Point), or c.PointFailed
//		case dispatch.Finish: // a.Request has ended, with a.Err
//		…
//
// # Order
//
// There is one queue for each destination. A link takes chunks out of the queue of the
// memory that it leads to, whenever fewer than Depth of its chunks, or few bytes, are with
// the device: of the first request, by class and then by submission, that it can carry and whose
// points are all reached. So a request of a higher class overtakes at the next chunk,
// and a link that drains slowly takes less. A link carries what goes from its own
// source to its own target. One that brings bytes half the way, to be taken on from there
// by another, is one more case where links say what they carry (link.carries), and of what
// follows when a chunk has landed (Core.Landed); a chunk does not know its link.
//
// # Failure
//
// A chunk that fails stops its link: nothing more is launched until every chunk that is
// with the device has ended, and the stream was recovered. The first chunk that failed
// is launched once more, on the same link (Core.Recovered is where it could go elsewhere),
// and with it those behind it, which failed because it did. A
// chunk that fails for the second time, or that the device did not accept, fails its
// request. A link whose device is lost fails every request that only it can carry.
//
// # Invariants
//
//   - Each byte of a request is launched once, and again only where its chunk failed.
//   - No chunk is launched before all points of its request are reached.
//   - A request finishes once, when nothing of it is with the device: without an error
//     when all its bytes have landed (or nobody wants them any more, see Skip).
package dispatch
