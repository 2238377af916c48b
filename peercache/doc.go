// Package peercache keeps copies of a client's objects in the memory of peer GPUs: what
// of it harvest lends, transfer fills, and readers find without a lock. Experts and KV
// blocks are such objects; a client has a cache of its own, with its own account, quota
// and weight at harvest, and names its objects by keys of its choice.
//
//	c, err := peercache.New(peercache.Options[ID]{
//		Machine: m, Harvest: rt, Transfer: engine, Client: "experts", Reader: device.HBM(0), Name: name,
//	})
//	err = c.Put(id, hostRegion, peercache.PutOptions[ID]{Cost: 40 * time.Millisecond})
//	if errors.Is(err, harvest.ErrNoCapacity) { … it stays in host memory alone … }
//	c.Settle()                             // often: copies that have landed are found from now on
//
//	if copy, ref, ok := c.Acquire(id); ok { // no lock
//		… submit a copy from copy.Region() …
//		ref.ReleaseAt(ticket.End())
//	} else { … read host memory instead … }
//
//	err = c.Drop(id)                        // its memory goes back once its readers are gone
//	err = c.Close()
//
// # The life of a copy
//
//	Put ──► moving ──Settle──► found by Acquire ──► gone: dropped, revoked, or unreadable
//	           │
//	           └──► gone, where the copy fails or is dropped on its way
//
// A copy is never the only one: the client keeps the object elsewhere, or can compute it
// again. It is never written back, and harvest may revoke it at any moment: then Acquire
// fails for it, at once, and nobody has to be told.
//
// # Peers that fail
//
// Failures of copies to a peer, and of those from it that readers tell of (ReadFailed),
// are counted by peer until one succeeds. A peer that fails three times in a row, or is
// lost, is excluded from harvest, which tries it again later.
//
// # What it is not
//
// It decides nothing: what is worth a place is for its client, which peer has room for
// harvest. It knows neither experts nor KV, has no goroutine, and nothing of it waits
// but Wait and Close.
//
// # Invariants
//
//   - A copy is found by Acquire only after its last byte has landed.
//   - Every copy to a peer's memory holds a reference on it until it has ended; so must
//     whoever reads it, which is what Acquire's reference is for.
//   - Acquire takes no lock and allocates nothing.
//   - A key has one copy at most, on its way or landed.
//   - Memory is given back once: by Drop, by a failure, by Close, or by harvest.
package peercache
