package server

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/moeserve/moeserve/engine"
)

func TestSummarize(t *testing.T) {
	at := func(ms int) time.Time { return time.Unix(1, 0).Add(time.Duration(ms) * time.Millisecond) }
	two := jobLog{
		usage: engine.Usage{PromptTokens: 5, CompletionTokens: 22}, samples: 2, finish: []engine.FinishReason{"stop", "length"},
		times: engine.Times{Arrived: at(0), FirstToken: at(30), Finished: at(130)},
	}
	for name, c := range map[string]struct {
		jobs []jobLog
		want requestLog
	}{
		"samples run side by side": {[]jobLog{two}, requestLog{usage: usage{PromptTokens: 5, CompletionTokens: 22, TotalTokens: 27}, ttft: 30 * time.Millisecond, tpot: 10 * time.Millisecond, finish: []string{"stop", "length"}, times: two.times, samples: 2}},
		"of several prompts, the first token of all": {[]jobLog{two, {
			usage: engine.Usage{PromptTokens: 1, CompletionTokens: 1}, samples: 1, finish: []engine.FinishReason{"stop"},
			times: engine.Times{Arrived: at(0), FirstToken: at(20), Finished: at(20)},
		}}, requestLog{usage: usage{PromptTokens: 6, CompletionTokens: 23, TotalTokens: 29}, ttft: 20 * time.Millisecond, tpot: 10 * time.Millisecond, finish: []string{"stop", "length"}, times: engine.Times{Arrived: at(0), FirstToken: at(20), Finished: at(130)}, samples: 3}},
		"aborted before its first token": {[]jobLog{{
			usage: engine.Usage{PromptTokens: 3}, samples: 1, finish: []engine.FinishReason{"abort"}, times: engine.Times{Arrived: at(0)},
		}}, requestLog{usage: usage{PromptTokens: 3, TotalTokens: 3}, finish: []string{"abort"}, times: engine.Times{Arrived: at(0)}, samples: 1}},
		"aborted while it generates": {[]jobLog{{
			usage: engine.Usage{PromptTokens: 3, CompletionTokens: 4}, samples: 1, finish: []engine.FinishReason{"abort"}, times: engine.Times{Arrived: at(0), FirstToken: at(7)},
		}}, requestLog{usage: usage{PromptTokens: 3, CompletionTokens: 4, TotalTokens: 7}, ttft: 7 * time.Millisecond, finish: []string{"abort"}, times: engine.Times{Arrived: at(0), FirstToken: at(7)}, samples: 1}},
	} {
		if diff := cmp.Diff(c.want, summarize(c.jobs), cmp.AllowUnexported(requestLog{})); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
}
