// Package harvest borrows memory that peer GPUs do not use, and gives it back when
// anybody wants it: the Harvest runtime (Gopal and Kaffes, "Harvest: Opportunistic
// Peer-to-Peer GPU Caching for LLM Inference", section 3).
//
// What lies in borrowed memory is a copy that may vanish at any moment. A client
// keeps another copy in host memory or can compute it again; harvest never writes
// anything back, and knows nothing of what it holds.
//
//	rt, err := harvest.New(harvest.Options{Machine: m, Peers: []device.Space{device.HBM(1)}, SlabBytes: 4 * expertBytes})
//	h, err := rt.Alloc(expertBytes, harvest.Hints{Client: "experts", Cost: 40 * time.Millisecond})
//	if errors.Is(err, harvest.ErrNoCapacity) { … it stays in host memory … }
//	err = rt.RegisterCallback(h, func(harvest.Revocation) { … forget h … })
//
//	ref, ok := h.Acquire(fetcher) // no lock; also for the copy that fills it
//	if !ok { … read host memory instead … }
//	stream.Copy(slot, h.Region().Range)
//	stream.Raise(fence, 7)
//	ref.ReleaseAt(device.Point{Fence: fence, Value: 7})
//
//	pending, err := rt.Tick(m.Now()) // often, or rt.Start()
//
// # Slabs and segments
//
// Memory is taken from a device in slabs of a few objects each, which are divided
// best-fit, with coalescing; giving back one segment would return nothing to
// anybody, so whole slabs are given back, when empty or revoked. Where a request
// goes is the Policy's choice among the holes of slabs in service and, on peers
// whose free memory exceeds the headroom, a new slab. A client may have slabs of its
// own size, which it shares with nobody (Options.Clients).
//
// # Revocation
//
// A Tick reads every peer through the Monitor. Where less than the headroom is free,
// slabs are revoked until it will be, cheapest first (Victims, a pure function):
// cheap is what clients say they can best do without (Hints.Cost) and what few
// references are out for, per byte. Reclaim, the policy, a sick peer and Close revoke
// too. One slab goes through these steps, each of which is carried on by ticks and
// none of which blocks:
//
//	in service ──► draining ──────────────► clearing ──► returning ──► gone
//	               refuse new references;   overwrite    Memory.Free
//	               per handle: wait for     with zeros
//	               references and the work
//	               behind them, invalidate,
//	               call back
//
// Whoever keeps memory past the deadline is reported (DeadlineMissInfo names holders and
// times), once per handle. The memory is never freed under a reader for that: it
// goes back late. Slabs on an unhealthy peer are not cleared. An empty slab takes the
// same way, without being called revoked.
//
// # Controller and shell
//
// What to do is decided by a pure controller: readings, requests, times and the ends of
// work go in, actions come out (refuse, invalidate, call back, overwrite, free, report).
// Runtime is the shell around it, with the lock, the clock, device memory, fences and
// streams. One goroutine at a time carries actions out; whoever ticks meanwhile leaves
// them to it. Callbacks are among them, and run with nothing locked, so they may call the
// runtime; what waits in one for the end of its own revocation waits in vain.
//
// # What it is not
//
// It copies nothing but the zeros it clears with, keeps no other tier, and decides
// nothing about what is worth moving (package rebalancer does). It does not import
// its users: a handle's own state word is the truth about it.
//
// # Invariants
//
//   - A handle ends once: Free returned nil and its callback never runs, or it was
//     revoked and its callback runs exactly once, after its last reader.
//   - No memory is used again, cleared or given back while a reference on it is held
//     or a point given to Ref.ReleaseAt is not reached, whatever the deadline.
//   - Two live handles never overlap.
//   - Acquire and Release take no lock and allocate nothing; they never wait for
//     anything that harvest does.
//   - Alloc and Free do not wait for memory or for readers.
//   - Callbacks, clearing and giving back run on one goroutine at a time, one that
//     ticks; events are told in order. There is no other goroutine unless Start is
//     called, and then it is the clock's.
//   - On healthy peers nothing that was handed out is given back with its content,
//     unless clearing fails three times, which is an event.
//   - After New and each Tick, as far as readings are true and nobody else ticks:
//     headroom is met, or what is missing is on its way, or nothing is left to revoke
//     on that peer.
package harvest
