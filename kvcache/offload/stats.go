package offload

import (
	"slices"
	"time"

	"github.com/moeserve/moeserve/kvcache/tier"
)

// TierStats are the counters of one tier. Blocks are the tier's.
type TierStats struct {
	Medium string
	// BlockBytes is the size of a block, BlockTokens its number of tokens.
	BlockBytes  int64
	BlockTokens int
	// Stats of the account: Stored is what vLLM's peer tier calls blocks offloaded, Loaded
	// blocks reloaded.
	tier.Stats
	// StoredBytes and LoadedBytes have been copied.
	StoredBytes, LoadedBytes int64
	// Stores and Loads are the transfers that copied these.
	Stores, Loads Transfers
	// StoringBytes are in stores under way, LoadingBytes in loads.
	StoringBytes, LoadingBytes int64
	// RefusedBlocks were offered and not stored: the tier had no room, the medium no memory, or
	// stores held too many of the GPU's blocks.
	RefusedBlocks int64
	// FailedStores and FailedLoads are blocks whose copies failed; of stores also those whose place
	// was revoked or reset before they ended. LostBlocks were lost by the medium: revoked, or damaged.
	FailedStores, FailedLoads, LostBlocks int64
	// RaisedLoads are loads whose priority was raised, as they waited for long.
	RaisedLoads int64
	// BytesPerSecond is the mean rate of loads as measured, latency included, before that the
	// expected one; 0: unknown.
	BytesPerSecond float64
}

// Transfers are counters of those in one direction that have ended, of which blocks have arrived.
type Transfers struct {
	// Seconds from their starts to their ends, also while they waited for others.
	Seconds float64
	// Sizes are the numbers of transfers by the bytes that they copied: up to each of SizeBounds
	// and more than the one before, and more than all.
	Sizes [len(SizeBounds) + 1]uint64
}

// SizeBounds are the limits of sizes of transfers in bytes: vLLM's.
var SizeBounds = [...]float64{1e6, 5e6, 10e6, 20e6, 40e6, 60e6, 80e6, 100e6, 150e6, 200e6}

// Add adds the counters of others.
func (t *Transfers) Add(o Transfers) {
	t.Seconds += o.Seconds
	for i, n := range o.Sizes {
		t.Sizes[i] += n
	}
}

// ended counts a transfer that has copied so many bytes.
func (t *Transfers) ended(run *running, bytes int64) {
	if bytes > 0 {
		t.Seconds += (run.ended - run.began).Seconds()
		i, _ := slices.BinarySearch(SizeBounds[:], float64(bytes))
		t.Sizes[i]++
	}
}

// levelCounts are the counters of a level.
type levelCounts struct {
	storedBytes, loadedBytes, storingBytes, loadingBytes int64
	refused, failedStores, failedLoads, lost, raised     int64
	stores, loads                                        Transfers

	rate loadRate
}

// Stats returns the counters of all tiers, fastest first.
func (t *Tiers) Stats() []TierStats {
	t.mu.Lock()
	defer t.mu.Unlock()
	var all []TierStats
	for _, l := range t.levels {
		c := &l.counts
		all = append(all, TierStats{
			Medium: l.Name, BlockBytes: int64(t.factor) * t.o.Pool.Shape().BlockBytes(), BlockTokens: t.factor * t.o.Blocks.BlockTokens(), Stats: l.account.Stats(),
			StoredBytes: c.storedBytes, LoadedBytes: c.loadedBytes, StoringBytes: c.storingBytes, LoadingBytes: c.loadingBytes,
			Stores: c.stores, Loads: c.loads,
			RefusedBlocks: c.refused, FailedStores: c.failedStores, FailedLoads: c.failedLoads, LostBlocks: c.lost,
			RaisedLoads: c.raised, BytesPerSecond: l.rate(),
		})
	}
	return all
}

// Decisions returns what the cost model has decided.
func (t *Tiers) Decisions() Decisions {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.costs.decisions
}

// rate is the mean rate of loads in bytes per second; 0: unknown.
func (l *level) rate() float64 {
	if r := l.counts.rate.bytesPerSecond(); r > 0 {
		return r
	}
	return l.BytesPerSecond()
}

// stored counts a store that has ended, with the blocks that have arrived.
func (c *levelCounts) stored(run *running, blocks []int) {
	c.storingBytes -= run.bytes()
	n := run.bytesOf(blocks)
	c.storedBytes += n
	c.stores.ended(run, n)
}

// loading counts a load that begins at a time.
func (c *levelCounts) loading(bytes int64, now time.Duration) {
	if c.loadingBytes == 0 {
		c.rate.begin(now)
	}
	c.loadingBytes += bytes
}

// loaded counts a load that has ended, with the blocks that have arrived.
func (c *levelCounts) loaded(run *running, blocks []int) {
	n := run.bytesOf(blocks)
	c.loadedBytes += n
	c.loads.ended(run, n)
	c.rate.bytes += n
	c.loadingBytes -= run.bytes()
	c.rate.ended(run.ended, c.loadingBytes == 0)
}

// loadRate fits the time of loads to their bytes: a latency, and a time for each byte. What it
// measures are times during which loads were under way, and how many bytes arrived; so small loads
// teach it, too.
type loadRate struct {
	since time.Duration
	bytes int64
	times line
}

const (
	// rateDecay is the weight of what was measured before in a new measurement.
	rateDecay = 0.9
	// maxRateTime is the time after which a measurement ends though loads are under way.
	maxRateTime = time.Second
)

func (r *loadRate) begin(now time.Duration) { r.since, r.bytes = now, 0 }

func (r *loadRate) ended(now time.Duration, idle bool) {
	took := now - r.since
	if !idle && took < maxRateTime {
		return
	}
	if r.bytes > 0 && took > 0 {
		r.times.add(rateDecay, float64(r.bytes), took.Seconds())
	}
	r.begin(now)
}

// bytesPerSecond is the mean of what was measured, latency included; 0: nothing.
func (r *loadRate) bytesPerSecond() float64 {
	if r.times.n == 0 {
		return 0
	}
	return r.times.x / r.times.y
}

// cost is what a load is expected to take: a latency in seconds, and a rate, in bytes per second
// (0: unknown). expected is the rate of the path, 0: unknown. No load is faster than that; and while
// all loads were of about one size, which does not show both, what is more than its time is latency.
func (r *loadRate) cost(expected float64) (latency, bytesPerSecond float64) {
	if r.times.n == 0 {
		return 0, expected
	}
	bytes, seconds := r.times.x/r.times.n, r.times.y/r.times.n
	each, varied := r.times.slope()
	if expected > 0 && (!varied || each < 1/expected) {
		each = min(1/expected, seconds/bytes)
	}
	if expected <= 0 { // a larger load that was faster by chance shows no rate
		each = max(each, seconds/bytes/1000)
	}
	return max(0, seconds-each*bytes), 1 / each
}
