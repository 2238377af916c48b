// Package harvest borrows memory that peer GPUs do not use, and releases it when other
// processes need it: the Harvest runtime (Gopal and Kaffes, "Harvest: Opportunistic
// Peer-to-Peer GPU Caching for LLM Inference", section 3).
//
// Borrowed memory holds copies that may be revoked at any time. A client keeps another
// copy in host memory, or can compute it again; harvest never writes anything back, and
// knows nothing of the content.
//
//	rt, err := harvest.New(harvest.Options{Machine: m, Peers: []device.Space{device.HBM(1)}, SlabBytes: 4 * expertBytes})
//	h, err := rt.Alloc(expertBytes, harvest.Hints{Client: "experts", Cost: 40 * time.Millisecond})
//	if errors.Is(err, harvest.ErrNoCapacity) { … it stays in host memory … }
//	err = rt.RegisterCallback(h, func(harvest.Revocation) { … forget h … })
//
//	ref, ok := h.Acquire(fetcher) // no lock; also for the copy that fills it
//	if !ok { … read host memory instead … }
//	stream.Copy(slot, h.Region().Range)
//	stream.SignalFence(fence, 7)
//	ref.ReleaseAt(device.Point{Fence: fence, Value: 7})
//
//	pending, err := rt.Tick(m.Now()) // often, or rt.Start()
//
// # Slabs and segments
//
// Memory is allocated from a device in slabs of a few objects each. A slab is divided into
// segments, best fit, with coalescing. Releasing one segment would return no memory to the
// device, so whole slabs are released, when empty or revoked. The Policy places a request
// in a free extent of a slab in service, or in a new slab on a peer whose free memory
// exceeds the headroom. A client may have slabs of its own size, which it shares with no
// other client (Options.Clients).
//
// # Revocation
//
// A Tick reads every peer through the Monitor. If less than the headroom is free, slabs
// are revoked until it will be, cheapest first (Victims, a pure function). A slab is cheap
// if losing it costs its clients little per byte (Hints.Cost) and it has few references.
// What other processes take while the headroom is missing, they are expected to take again,
// and as much more is released. Reclaim (package reclaim has other processes call it) releases
// what is asked for and the headroom. The policy, an unhealthy peer and Close revoke slabs,
// too. A slab is released in these phases; ticks advance them, and none of them blocks:
//
//	in service ──► draining ──────────────► scrubbing ──► releasing ──► released
//	               refuse new references;   overwrite     Memory.Free
//	               per handle: wait for     with zeros
//	               references and the work
//	               behind them, invalidate,
//	               call back
//
// Owners that hold memory past the deadline are reported once per handle
// (DeadlineMissInfo). The memory is not freed under a reader for that: it is released
// late. Readers whose work has not begun can be told in time (Runtime.OnRelease). Slabs on an
// unhealthy peer are not scrubbed. An empty slab goes through the same
// phases, but does not count as revoked.
//
// # Readers
//
// A copy takes a reference on each handle that it reads (Handle.Acquire). A step whose kernels
// read many handles in place takes one for all of them: see StepReader.
//
// # Clients give way to each other
//
// What is borrowed is worth the time that it saves per second. Cost is that quantity for any
// client: the rebalancer sets it for each expert (Handle.SetCost), and a client of many
// objects for all of them at once (SetUse). A request that finds no free memory is refused. If
// it is worth more than DisplaceFactor times as much per byte as slabs of other clients, and
// more in all, the cheapest of these slabs are revoked, for ReasonPolicy (Displace, a pure
// function), and their memory is reserved for the client that asked: a later Alloc finds it.
// A slab is in service for Residence before it is displaced, and who was displaced does not
// displace the other in turn for as long. No more is displaced for a client before what was is
// released, and none where other processes need memory. A client that knows that there is no
// room asks by Want.
//
// # Controller and shell
//
// A pure controller makes all decisions: readings, requests, times and results of actions
// go in, actions come out (refuse, invalidate, call back, scrub, free, report). Runtime is
// the shell around it, with the lock, the clock, device memory, fences and streams. One
// goroutine at a time carries out actions; concurrent ticks leave them to it. Callbacks
// are among the actions and run without locks, so they may call the runtime. A callback
// that waits for the end of its own revocation waits forever; one that panics is reported
// and counts as returned.
//
// # What it is not
//
// The package copies nothing except zeros, keeps no other tier, and does not decide what is
// worth migrating (package rebalancer does). It does not import its users: a handle's
// state word says whether the handle is valid.
//
// # Invariants
//
//   - A handle ends once: either Free returned nil and its callback never runs, or it was
//     revoked and its callback runs exactly once, after its last reader.
//   - No memory is reused, scrubbed or freed while a reference on it is held or a fence
//     value passed to Ref.ReleaseAt is not reached, or while a step of a StepReader that began
//     before it was refused has not ended, regardless of the deadline.
//   - Two live handles never overlap.
//   - A peer whose readings say that it is lost, or whose Health is an error, is unhealthy,
//     also after Readmit. A peer without a reading lends nothing new.
//   - Acquire and Release take no lock, allocate nothing, and wait for nothing.
//   - Alloc and Free do not wait for memory or for readers.
//   - Callbacks, scrubbing and freeing run on one goroutine at a time, one that ticks;
//     events are reported in order. There is no other goroutine except the clock's after
//     Start.
//   - On healthy peers no slab that was used is released without being scrubbed, unless
//     scrubbing fails three times, which is an event.
//   - No slab is displaced for a request that is worth less per byte than DisplaceFactor
//     times the slab, or whose client's quota is used up.
//   - After New and each Tick, if readings are accurate and no other goroutine ticks: each
//     peer's headroom is met, or the missing memory is draining, or nothing is left to
//     revoke on that peer.
package harvest
