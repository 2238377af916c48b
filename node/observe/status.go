package observe

import (
	"context"
	"log/slog"
	"math"
	"time"

	"github.com/moeserve/moeserve/experts"
)

// Status is what a server does at a moment, with counts since it was started.
type Status struct {
	Time time.Time
	// Running and Waiting samples.
	Running, Waiting int
	// KVUsage is the share of the KV blocks in use, from 0 to 1.
	KVUsage float64
	// PrefillTokens computed and GeneratedTokens sampled.
	PrefillTokens, GeneratedTokens int64
	// Hits and Misses of experts.
	Hits, Misses int64
}

// Status reads it. It may be called while requests run.
func (o *Observer) Status() Status {
	e, x := o.p.Engine.State(), o.p.Store.Stats()
	return Status{
		Time: time.Now(), Running: e.Running, Waiting: e.Waiting, KVUsage: float64(e.KVUsedBlocks) / float64(max(e.KVBlocks, 1)),
		PrefillTokens: e.PrefillTokens, GeneratedTokens: e.GeneratedTokens, Hits: x.Hits, Misses: x.Misses,
	}
}

// since is what the log says of the time since an earlier status; nil where there was no work.
func (s Status) since(before Status) []slog.Attr {
	prefill, generated := s.PrefillTokens-before.PrefillTokens, s.GeneratedTokens-before.GeneratedTokens
	if s.Running+s.Waiting == 0 && prefill+generated == 0 {
		return nil
	}
	seconds := s.Time.Sub(before.Time).Seconds()
	attrs := []slog.Attr{
		slog.Int("running", s.Running), slog.Int("waiting", s.Waiting),
		slog.Float64("prefill_tok_s", tenths(float64(prefill)/seconds)),
		slog.Float64("decode_tok_s", tenths(float64(generated)/seconds)),
		slog.Float64("kv_cache_usage_percent", tenths(100*s.KVUsage)),
	}
	if hits, misses := s.Hits-before.Hits, s.Misses-before.Misses; hits+misses > 0 {
		attrs = append(attrs, slog.Float64("expert_hit_rate_percent", tenths(100*experts.HitRate(hits, misses))))
	}
	return attrs
}

// tenths rounds to one digit behind the point.
func tenths(x float64) float64 { return math.Round(10*x) / 10 }

// LogStatus logs a line at info, at the end of each interval in which there was work, until ctx
// is done. Rates and the hit rate are those of the interval.
func LogStatus(ctx context.Context, log *slog.Logger, interval time.Duration, read func() Status) {
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for before := read(); ; {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		now := read()
		if attrs := now.since(before); attrs != nil {
			log.LogAttrs(ctx, slog.LevelInfo, "status", attrs...)
		}
		before = now
	}
}
