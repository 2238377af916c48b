package observe

import (
	"context"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
)

// There is a line for each interval with work: requests that run or wait, or tokens; rates are
// those of the interval.
func TestLogStatus(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var text strings.Builder
		log := slog.New(slog.NewTextHandler(&text, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
			if a.Key == slog.TimeKey {
				return slog.Duration("at", a.Value.Time().Sub(time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)))
			}
			return a
		}}))
		readings := []Status{
			{PrefillTokens: 500, Hits: 90},
			{Running: 3, Waiting: 2, KVUsage: .1234, PrefillTokens: 1500, GeneratedTokens: 1, Hits: 120, Misses: 10},
			{Running: 3, KVUsage: .5, PrefillTokens: 1500, GeneratedTokens: 1235, Hits: 120, Misses: 30},
			{PrefillTokens: 1500, GeneratedTokens: 1240, Hits: 124, Misses: 30},
			{PrefillTokens: 1500, GeneratedTokens: 1240, Hits: 124, Misses: 30},
			{Waiting: 1, PrefillTokens: 1500, GeneratedTokens: 1240, Hits: 124, Misses: 30},
		}
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			LogStatus(ctx, log, 10*time.Second, func() Status {
				s := readings[0]
				s.Time = time.Now()
				readings = readings[1:]
				if len(readings) == 0 {
					stop()
				}
				return s
			})
			close(ended)
		}()
		<-ended
		want := `at=10s level=INFO msg=status running=3 waiting=2 prefill_tok_s=100 decode_tok_s=0.1 kv_cache_usage_percent=12.3 expert_hit_rate_percent=75
at=20s level=INFO msg=status running=3 waiting=0 prefill_tok_s=0 decode_tok_s=123.4 kv_cache_usage_percent=50 expert_hit_rate_percent=0
at=30s level=INFO msg=status running=0 waiting=0 prefill_tok_s=0 decode_tok_s=0.5 kv_cache_usage_percent=0 expert_hit_rate_percent=100
at=50s level=INFO msg=status running=0 waiting=1 prefill_tok_s=0 decode_tok_s=0 kv_cache_usage_percent=0
`
		if diff := cmp.Diff(want, text.String()); diff != "" {
			t.Error(diff)
		}
	})
}
