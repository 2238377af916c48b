// Package kv measures copies of KV blocks between the memory of the GPU that computes, a
// peer's, the host's and files: how long it takes to load the entries of a prefix (the Harvest
// paper, 5.3 and Figure 7), and at which rate blocks of a size are copied.
//
// # What it is not
//
// It has no KV cache of a model: blocks are places in memory, and nobody reads what is in them. It
// opens no devices, reads no flags, and reads no clock but the devices'.
//
// # How it measures
//
// An entry is what a model keeps for one token; blocks hold a number of tokens. A load is
// one request to the transfer engine: its blocks are scattered in the memory that they
// come from and in the pool on the GPU, or are one contiguous run in both. Host and peer
// take turns within each repetition, after one that does not count, and the median
// counts: what disturbs the machine disturbs both. Each cell is measured in several ways:
// one load alone, from its submission until the host sees that it has ended; several loads
// that are queued; both again with events around their chunks, which tell the copies' own
// time on the device, and where the rest goes; and the same copies on a stream of the device
// without the engine, queued one by one and batched. The faster of these is the most that
// copy engines can reach.
//
// Loads from files go the way of a server's: a tier in files is filled with random blocks, and
// offload.Tiers loads them. They take turns with host and peer. Before each the system is asked
// to drop the files' pages from its page cache, and asked whether it did; another load follows at
// once, from the page cache. Beside several loads that are queued, as many threads as the tier has
// readers read the same files without it, which is the most that loads can reach. On a virtual clock
// reading files takes no time, and has no rate.
//
// # Invariants
//
//   - The same options give the same blocks in the same order.
//   - No block is written by two loads at once.
//   - All memory is freed, and all files are removed, when a measurement ends, whichever way.
//
// # Example
//
//	points, err := kv.Reload(ctx, kv.ReloadOptions{
//		Machine: machine, Compute: device.HBM(0), Peer: device.HBM(1),
//		Entries: kv.Entries(configs.KVEntries()), BlockTokens: 16,
//	})
package kv
