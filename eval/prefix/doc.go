// Package prefix measures what it is worth to have a prompt's KV cache: the time to first
// token with the prefix in the memory of the GPU, of a peer, of the host, in files, and
// nowhere; and the throughput of a batch by the fraction of its requests whose prompts are
// found there.
//
// # What it is not
//
// It opens no engine and reads no flags: its caller opens one for each place (Open). It reads
// no clock but the engine's devices'.
//
// # How it measures
//
// Time to first token: a prompt of random tokens runs once, which computes it (the miss). When
// its blocks have been stored, it runs again, repeatedly (hits); the median counts. One request
// runs at a time. Beside both stands the time of a decode step at that context, and, where the prefix
// is loaded, the share of the load in the time to first token: from its submission to its last byte, as
// the engine's tiers have measured it, over the time of the same request.
//
// Throughput: the prompts of a pool run. Then all requests are submitted at once; some have
// prompts of the pool in turn, evenly among new ones. A tier has room for what is stored
// between two uses of a prompt.
//
// How many tokens were found is the engine's count, and stands beside each time: an engine may
// find it faster to compute a prefix again.
//
// # Invariants
//
//   - The same options give the same prompts.
//   - No prompt but those that are meant to be found begins like another.
//
// # Example
//
//	r := &prefix.Result{Run: run}
//	err := prefix.TTFT(ctx, prefix.TTFTOptions{Open: open, Lengths: []int{1024, 32768}}, r, nil)
//	err = prefix.WriteTable(os.Stdout, r)
package prefix
