// Package reclaim is how other processes get memory back that harvest has borrowed: each
// process that borrows listens on a unix socket in a directory of the machine (Listen),
// and a neighbor that needs memory of a GPU asks all of them (Client).
//
//	l, err := reclaim.Listen(dir, reclaim.Handler(lender)) // in the process that borrows
//	defer l.Close()
//
//	c := reclaim.Client{Dir: dir} // in the job that needs memory
//	report, err := c.Reclaim(ctx, reclaim.Request{Device: "1", Bytes: 30 << 30, Within: 500 * time.Millisecond})
//
// The protocol is HTTP with JSON, so that curl and a preloaded library of a few lines speak
// it, too:
//
//	POST /harvest/reclaim {"device": 1, "bytes": 32212254720, "deadline_ms": 500}
//	GET  /harvest/borrowed
//
// A request says how many bytes are to be free, not how many are to be released: what is
// free counts, so a request may be repeated, and sent to one process after the other.
//
// # What it is not
//
// It decides nothing about what is revoked (package harvest does), and it reserves nothing:
// the first process that allocates has the memory. Processes that were asked borrow none of it for
// their cool-down.
//
// # Who may ask
//
// Who may connect to a socket may have borrowed memory released: that slows the process
// down, and reveals nothing but sizes. The default directory (Dir) is its user's alone; for
// jobs of other users name a directory whose permissions let them in.
//
// # Invariants
//
//   - Each answer comes within the request's time, or a little later; what is released later
//     than that is not in it.
//   - Sockets of processes that have ended are skipped, and removed by the next process of the same
//     user.
//   - The default directory is used only if it belongs to this user, and nobody else may
//     write to it.
package reclaim
