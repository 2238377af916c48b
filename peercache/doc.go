// Package peercache keeps copies of a client's objects in the memory of peer GPUs. Harvest
// lends the memory, transfer fills it, and readers find copies without a lock. Experts and
// KV blocks are such objects. A client has a cache of its own, with its own account, quota
// and weight in harvest, and names its objects by keys of its choice.
//
//	c, err := peercache.New(peercache.Options[ID]{
//		Machine: m, Harvest: rt, Transfer: engine, Client: "experts", Reader: device.HBM(0), Name: name,
//	})
//	err = c.Put(id, hostRegion, peercache.PutOptions[ID]{Cost: 40 * time.Millisecond})
//	if errors.Is(err, harvest.ErrNoCapacity) { … it stays in host memory only … }
//	started, err := c.PutAll(objects, o)   // many: one transfer for each peer
//	c.Poll()                               // often: completed copies are found from now on
//
//	if copy, ref, ok := c.Acquire(id); ok { // no lock
//		… submit a copy from copy.Region() …
//		ref.ReleaseAt(ticket.End())
//	} else { … read host memory instead … }
//
//	version := c.BeginStep()                // many in place, for a step: no lock either
//	… if version has changed: copy := c.Readable(id) for each, …
//	again := c.ContinueStep(version)        // they may be read once more within the step
//	c.EndStep()
//
//	err = c.Drop(id)                        // its memory is freed once its readers are done
//	err = c.Close()
//
// # The life of a copy
//
//	Put ──► moving ──Poll──► found by Acquire ──► removed: dropped, revoked, or unreadable
//	           │
//	           └──► removed, if its transfer fails or it is dropped before
//
// A copy is never the only one: the client keeps the object elsewhere, or can compute it
// again. It is never written back, and harvest may revoke it at any time: then Acquire
// fails at once, and the client need not be notified. Its memory is released when nothing reads
// or writes it any more: the cache aborts transfers into it, and Options.Releasing lets the client
// take back reads that have not begun.
//
// # Failing peers
//
// Each peer has a count of consecutive failures, of transfers to it and of those from it
// that readers report (ReadFailed). A peer that fails three times in a row, or is lost, is
// excluded from harvest, until its harvest.Readmission readmits it.
//
// # What it is not
//
// The package makes no decisions: the client decides which objects get a copy, and harvest
// which peer has room. It knows neither experts nor KV and has no goroutine. Only Wait and
// Close wait.
//
// # Invariants
//
//   - Acquire finds a copy only after its last byte has landed.
//   - Every transfer to a peer copy holds a reference on it until the transfer has ended;
//     so must every reader, by the reference that Acquire returns.
//   - Acquire takes no lock and allocates nothing.
//   - A key has at most one copy that has landed and one that is moving; both only while
//     the object moves to another place (PutOptions.Move).
//   - Memory is freed once: by Drop, by a failure, by Close, or by harvest.
package peercache
