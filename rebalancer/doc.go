// Package rebalancer decides which experts lie in borrowed peer memory, and, where
// the store is adaptive, which are local: the Expert Rebalancer (Gopal and Kaffes,
// "Harvest: Opportunistic Peer-to-Peer GPU Caching for LLM Inference", section 4.3).
//
// A miss never moves an expert by itself: it is fetched for its use and forgotten. The
// rebalancer watches how often experts are used and what harvest has to lend, and
// moves those for whom a copy pays.
//
//	rb, err := rebalancer.New(rebalancer.Options{Store: store, Harvest: rt, Clock: machine})
//	err = rb.FillAll(ctx)        // --offload-tier peer: all experts there, or an error
//	err = rb.Start()             // ticks by the clock from now on
//	…
//	err = rb.Close()             // before the store and harvest are closed
//
// # Three layers
//
// Rates is what is known of use: a decaying mean per (layer, expert), which forgets an
// expert's past where its use has changed by more than chance explains. Plan is what
// follows from that: a pure function of rates, homes, room and links to moves, the
// most rewarding first. Core puts the two together behind a limit on bytes per second
// and on copies under way. All three are pure: time is passed in. Rebalancer connects
// a Core with a Store and a harvest.Runtime.
//
// # What a move is worth
//
// An expert that is used r times a second costs r × (seconds of a fetch from where it
// is). The benefit of a copy is what that falls by; all experts have one size, so the
// order by benefit per byte is the same. Free memory is given to whatever is used at
// all. An expert takes another's place only if its benefit is Hysteresis times as
// large, the difference of the rates is no chance, and the copy is earned back within
// Horizon.
//
// Where every step fetches whole layers, all rates are the same, and only the shares
// of the layers matter: each gets the same part of its offloaded experts onto peers.
//
// The same worth is what harvest is told a copy's loss costs (Store.SetCost), so that
// it revokes the cheapest slab. What is revoked is found in host memory by the next
// Tick and competes for room like everything else.
//
// # What it is not
//
// It copies nothing (the store does), lends nothing (harvest does), and chooses no
// peer among equally fast ones (harvest's policy does).
//
// # Invariants
//
//   - Plan's moves fit: those that name a class of equally fast peers are no more than
//     are free there, and each replacement brings its own room.
//   - Equal arguments give equal plans, each move of which saves time; so plans come to
//     an end, and nothing moves until rates or room change.
//   - No expert goes to a peer that is slower than the host, except by FillAll.
//   - Never more than the migration limit, and a quarter of a second of it at once.
//   - A Tick never waits. The loop of Start is the only goroutine, and Close waits for
//     it.
package rebalancer
