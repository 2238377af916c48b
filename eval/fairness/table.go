package fairness

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/eval"
	"github.com/moeserve/moeserve/untrusted"
)

// WriteTable writes a line for each point for a person.
func WriteTable(out io.Writer, r *Result) error {
	var b strings.Builder
	b.WriteString(eval.Header(&r.Run, &r.Machine))
	fmt.Fprintf(&b, "%s (%s): %d requests of %d tokens at the start, and %d of %d, %.4g s apart; prompts of %d tokens\n",
		untrusted.Name(r.Model), r.DType, r.Long, r.LongTokens, r.Short, r.ShortTokens, r.Interval, r.PromptTokens)
	whole := r.Long*blocks(r.PromptTokens+r.LongTokens, r.BlockTokens) + r.Short*blocks(r.PromptTokens+r.ShortTokens, r.BlockTokens)
	fmt.Fprintf(&b, "KV cache of %d blocks of %d tokens; all requests together need %d\n\n", r.KVBlocks, r.BlockTokens, whole)
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "KV tier\tpolicy\tgranularity\tJain's index\tTTFT p50 s\tp99\tshort p50\tp99\tTPOT p50 ms\tp99\tITL p99 ms\tmax\ttok/s\tpreemptions\trecomputed\t")
	for _, p := range r.Points {
		granularity := "-"
		if p.Policy == configs.FairScheduling {
			granularity = fmt.Sprint(p.Granularity)
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%.3f\t%.4g\t%.4g\t%.4g\t%.4g\t%.4g\t%.4g\t%.4g\t%.4g\t%.4g\t%d\t%d\t\n", p.Tier, p.Policy, granularity, p.Jain,
			p.TTFT50, p.TTFT99, p.ShortTTFT50, p.ShortTTFT99, 1e3*p.TPOT50, 1e3*p.TPOT99, 1e3*p.ITL99, 1e3*p.ITLMax, p.OutputThroughput, p.Preemptions, p.RecomputedTokens)
	}
	w.Flush() //nolint:errcheck // writing to memory does not fail
	b.WriteString("\nKV tier: where KV blocks of preempted sequences are kept; none: those that the GPU has no room for are computed again" +
		"\nJain's index of the requests' rates, tokens over the time from arrival to last token: 1 where all are the same" +
		"\nTTFT: time to first token, of all and of short requests; TPOT: mean time of a request's tokens after the first; ITL: time between two tokens" +
		"\nrecomputed: tokens computed in addition to those of the prompts\n")
	same := !slices.ContainsFunc(r.Points, func(p Point) bool { return p.TokensSHA256 != r.Points[0].TokensSHA256 })
	switch {
	case len(r.Points) == 0 || r.Points[0].TokensSHA256 == "":
	case same:
		fmt.Fprintf(&b, "the same tokens in all lines, sha256 %s\n", r.Points[0].TokensSHA256)
	default:
		b.WriteString("the generated tokens DIFFER between lines; on a GPU they may without --batch-invariant\n")
	}
	_, err := io.WriteString(out, b.String())
	return err
}

// blocks is the number of blocks for tokens.
func blocks(tokens, blockTokens int) int { return (tokens + blockTokens - 1) / max(1, blockTokens) }
