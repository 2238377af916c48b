// Package rebalancer decides which offloaded experts have a copy in peer memory and, with
// dynamic residency, which experts are resident: the Expert Rebalancer (Gopal and Kaffes,
// "Harvest: Opportunistic Peer-to-Peer GPU Caching for LLM Inference", section 4.3).
//
// A miss does not migrate an expert: the expert is fetched for its use only. The
// rebalancer watches how often experts are used and how much memory harvest can lend, and
// migrates the experts for which a copy pays.
//
//	rb, err := rebalancer.New(rebalancer.Options{Store: store, Harvest: rt, Clock: machine})
//	err = rb.FillAll(ctx)        // --offload-tier peer: all offloaded experts, or an error
//	err = rb.Start()             // ticks by the clock from now on
//	…
//	err = rb.Close()             // before the store and harvest are closed
//
// # Three layers
//
// Rates estimates use: a decaying mean per (layer, expert), which forgets an expert's past
// if its use has changed by more than chance explains. Plan computes moves from rates,
// placement, free memory and link rates, the most rewarding first; it is a pure function.
// Core combines the two, and limits the bytes per second and the number of copies in
// progress. All three are pure: time is passed in. Rebalancer connects a Core with a Store
// and a harvest.Runtime.
//
// # What a move is worth
//
// An expert that is used r times per second costs r × (seconds of a fetch from where it
// is). The benefit of a move is the reduction of that cost. All experts have the same
// size, so the order by benefit per byte is the same. Free memory goes to any expert that
// is used at all. An expert replaces another one only if its benefit is Hysteresis times
// as large, the difference of the rates is statistically significant, and the copy pays
// off within Horizon.
//
// If every step fetches whole layers, all rates are equal, and only the layers' shares
// matter: each layer gets the same fraction of its offloaded experts onto peers.
//
// The same benefit is passed to harvest as the cost of losing a copy (Store.SetCost,
// harvest.Cost), so that harvest revokes the cheapest slab. The next Tick finds the experts of
// revoked copies in host memory, where they compete for free memory like all others.
//
// Other clients, such as KV blocks, borrow from the same peers. Where experts find no room,
// Core.Demand is what they would be worth there, and harvest revokes slabs of others that are
// worth less. In turn harvest revokes experts' slabs for what is worth more: that memory is not
// free for experts, so the plan leaves it alone.
//
// # What it is not
//
// The package copies nothing (the store does), lends nothing (harvest does), and does not
// select among equally fast peers (harvest's policy does).
//
// # Invariants
//
//   - Plan's moves fit: moves to a class of equally fast peers are at most as many as have
//     room there, and each replacement frees its own room.
//   - Equal arguments give equal plans, and each move saves time. So migrations end, and
//     nothing moves until rates or free memory change.
//   - No expert is promoted to a peer that is slower than the host, except by FillAll.
//   - The migration limit is never exceeded, except for bursts of a quarter of a second.
//   - A replacement frees the room first: while it is still being read, the promotion waits
//     for a later Tick, for a second at most. An expert that moves from one peer to another
//     keeps its copy until the new one has landed.
//   - A Tick never waits. The loop of Start is the only goroutine, and Close waits for it.
package rebalancer
