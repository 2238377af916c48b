package offload

import (
	"time"

	"github.com/moeserve/moeserve/kvcache/tier"
)

// TierStats are the counters of one tier. Blocks are the tier's.
type TierStats struct {
	Medium string
	// BlockBytes is the size of a block.
	BlockBytes int64
	// Stats of the account: Stored is what vLLM's peer tier calls blocks offloaded, Loaded
	// blocks reloaded.
	tier.Stats
	// StoredBytes and LoadedBytes have been copied.
	StoredBytes, LoadedBytes int64
	// StoringBytes are in stores under way, LoadingBytes in loads.
	StoringBytes, LoadingBytes int64
	// RefusedBlocks were offered and not stored: the tier had no room, the medium no memory, or
	// stores held too many of the GPU's blocks.
	RefusedBlocks int64
	// FailedStores and FailedLoads are blocks whose copies failed, LostBlocks were lost by the
	// medium: revoked, or damaged.
	FailedStores, FailedLoads, LostBlocks int64
	// RaisedLoads are loads whose priority was raised, as they waited for long.
	RaisedLoads int64
	// BytesPerSecond is the measured rate of loads, before that the expected one; 0: unknown.
	BytesPerSecond float64
}

// levelCounts are the counters of a level.
type levelCounts struct {
	storedBytes, loadedBytes, storingBytes, loadingBytes int64
	refused, failedStores, failedLoads, lost, raised     int64

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
			Medium: l.Name, BlockBytes: int64(t.factor) * t.o.Pool.Shape().BlockBytes(), Stats: l.account.Stats(),
			StoredBytes: c.storedBytes, LoadedBytes: c.loadedBytes, StoringBytes: c.storingBytes, LoadingBytes: c.loadingBytes,
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

// rate is the rate of loads in bytes per second; 0: unknown.
func (l *level) rate() float64 {
	if r := l.counts.rate.bytesPerSecond(); r > 0 {
		return r
	}
	return l.BytesPerSecond()
}

// stored counts a store that has ended, with the blocks that have arrived.
func (c *levelCounts) stored(run *running, blocks []int) {
	c.storingBytes -= run.bytes()
	for _, i := range blocks {
		c.storedBytes += run.job.Blocks[i].bytes()
	}
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
	for _, i := range blocks {
		n := run.job.Blocks[i].bytes()
		c.loadedBytes += n
		c.rate.bytes += n
	}
	c.loadingBytes -= run.bytes()
	c.rate.ended(run.ended, c.loadingBytes == 0)
}

// loadRate measures the rate of loads over the times during which any was under way.
type loadRate struct {
	since time.Duration
	bytes int64
	// decayed sums.
	sumBytes, sumSeconds float64
}

const (
	// rateDecay is the weight of what was measured before in a new measurement.
	rateDecay = 0.7
	// minRateBytes is the least that is measured: less would show latency only.
	minRateBytes = 1 << 20
	// maxRateTime is the time after which a measurement ends though loads are under way.
	maxRateTime = time.Second
)

func (r *loadRate) begin(now time.Duration) { r.since, r.bytes = now, 0 }

func (r *loadRate) ended(now time.Duration, idle bool) {
	took := now - r.since
	if !idle && took < maxRateTime {
		return
	}
	if r.bytes >= minRateBytes && took > 0 {
		r.sumBytes = rateDecay*r.sumBytes + float64(r.bytes)
		r.sumSeconds = rateDecay*r.sumSeconds + took.Seconds()
	}
	r.begin(now)
}

func (r *loadRate) bytesPerSecond() float64 {
	if r.sumSeconds == 0 {
		return 0
	}
	return r.sumBytes / r.sumSeconds
}
