package eval

import (
	"bytes"
	"encoding/csv"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/planner"
	"github.com/moeserve/moeserve/untrusted"
)

// WriteTable writes results for a person: above what they are of, then a line each, and
// below what they share.
func WriteTable(out io.Writer, results []Result) error {
	if len(results) == 0 {
		return nil
	}
	if _, err := io.WriteString(out, Header(&results[0].Run, &results[0].Machine)); err != nil {
		return err
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(w, "tier\toffloaded\tdecode tok/s\t±\tpredicted\t%% of roofline\tbound by\tprefill tok/s\tend-to-end tok/s\t±\thit rate\tfetched MiB/step\t\n")
	for i := range results {
		r := &results[i]
		predicted, share, bound, hits := "-", "-", "-", "-"
		if r.Prediction != nil {
			predicted = number(r.Prediction.DecodeTokS)
		}
		if r.Roofline != nil && r.comparable() {
			share, bound = fmt.Sprintf("%.1f %%", 100*r.Roofline.Fraction), planner.Bound(r.Roofline.Bound).Text()
		}
		if r.Hits+r.Misses > 0 {
			hits = fmt.Sprintf("%.1f %%", 100*r.HitRate)
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%.1f\t\n",
			r.Cell().Line(), percent(r.OffloadFraction), number(r.DecodeTokS), deviation(r.DecodeTokS, r.DecodeStddevTokS), predicted, share, bound,
			number(r.PrefillTokS), number(r.ThroughputTokS), deviation(r.ThroughputTokS, r.StddevTokS), hits, float64(r.DecodeStepBytes.Host+r.DecodeStepBytes.Peer)/(1<<20))
	}
	if err := w.Flush(); err != nil {
		return err
	}
	return writeShared(out, results)
}

// deviation writes a standard deviation with the decimals of its mean; nothing where there is
// none.
func deviation(mean float64, d *float64) string {
	if d == nil {
		return ""
	}
	_, decimals, _ := strings.Cut(number(mean), ".")
	return strconv.FormatFloat(*d, 'f', len(decimals), 64)
}

// writeShared writes what holds for all results.
func writeShared(out io.Writer, results []Result) error {
	r := &results[0]
	var b strings.Builder
	fmt.Fprintf(&b, "\n%s (%s): %s, %d prompt tokens, %d generated tokens, %s\n",
		untrusted.Name(r.Model), r.DType, requests(r.Requests), r.PromptTokens, r.GeneratedTokens, count(len(r.Trials), "trial"))
	fmt.Fprintf(&b, "a decode step has %s of %d tokens and runs experts once per %s (--expert-grouping %[3]s); attention on the %s",
		count(r.NumMicroBatches, "micro-batch"), r.MicroBatchTokens, r.ExpertGrouping, strings.ToUpper(r.Attention.String()))
	if r.DistinctExperts > 0 {
		fmt.Fprintf(&b, "\nin the last decode step a layer used %.1f experts on average, and each of these had %.1f tokens on average, %d at most", r.DistinctExperts, r.TokensPerExpert, r.MaxTokensPerExpert)
	}
	b.WriteString("\ntier: where offloaded experts are fetched from; bound by: what takes longest in a decode step; hit rate: uses of experts that needed no copy (resident or cached in the computing GPU's memory) / all uses" +
		"\nfetched MiB/step: experts copied to the GPU in a decode step" +
		"\npredicted: decode tok/s that the planner calculates before the run; roofline: decode tok/s at the shortest time that the rates allow, with as many experts as a uniform router selects")
	if len(r.Trials) > 1 {
		b.WriteString("; ±: standard deviation")
	}
	b.WriteString("\n")
	if r.TruncatedPrompts > 0 {
		fmt.Fprintf(&b, "prompts truncated to the model's context: %d\n", r.TruncatedPrompts)
	}
	stalls := map[string]float64{}
	same, builds := true, []string{r.Run.build()}
	for i := range results {
		if b := results[i].Run.build(); !slices.Contains(builds, b) {
			builds = append(builds, b)
		}
		for cause, s := range results[i].StallS {
			stalls[cause] += s
		}
		same = same && results[i].TokensSHA256 == r.TokensSHA256
	}
	clock := ""
	if r.Emulation != nil && r.Emulation.Rates == RatesVirtual {
		clock = ", on the virtual clock"
	}
	for _, cause := range slices.Sorted(maps.Keys(stalls)) {
		fmt.Fprintf(&b, "the GPU's compute stream was stalled %.4g s for %s, all lines and trials together%s\n", stalls[cause], cause, clock)
	}
	if len(builds) > 1 {
		b.WriteString("measured by other builds, too: " + strings.Join(builds[1:], "; ") + "\n")
	}
	if why := r.notComparable(); why != "" {
		b.WriteString(why + "\n")
	}
	for line, fraction := range saturationPoints(results) {
		if r.Setting != "" {
			break // there is one for each value
		}
		fmt.Fprintf(&b, "predicted saturation point, from %s: %.1f %% (maximum offload fraction with copies fully overlapped)\n", line.Line(), 100*fraction)
	}
	for _, g := range Gains(results, gainFraction) {
		if g.Unpaced {
			b.WriteString("no gain of peer over host memory: " + unpacedReason + "\n")
			continue
		}
		if g.Setting != "" {
			b.WriteString(g.Setting + ": ")
		}
		fmt.Fprintf(&b, "at %s offloaded, peer over host memory: %+.0f %% decode throughput, %+.0f %% end-to-end\n", percent(g.Fraction), 100*g.Decode, 100*g.EndToEnd)
	}
	switch {
	case r.TokensSHA256 == "":
		b.WriteString("these devices keep no data: no tokens, and no counts of experts per layer\n")
	case !same:
		b.WriteString("the generated tokens DIFFER between lines\n")
	case len(results) > 1:
		fmt.Fprintf(&b, "the same tokens in all lines, sha256 %s\n", r.TokensSHA256)
	default:
		fmt.Fprintf(&b, "tokens sha256 %s\n", r.TokensSHA256)
	}
	_, err := io.WriteString(out, b.String())
	return err
}

// unpacedReason is why no gain is stated of Machine.Unpaced.
const unpacedReason = "emulated devices without rates copy as fast as this CPU does; give --emulate rates, with virtual or pace"

// count writes a number of things.
func count(n int, thing string) string {
	switch {
	case n == 1:
		return "1 " + thing
	case strings.HasSuffix(thing, "ch"):
		return fmt.Sprintf("%d %ses", n, thing)
	}
	return fmt.Sprintf("%d %ss", n, thing)
}

// means are those of prefill and decode seconds over trials.
func (r *Result) means() (prefill, decode float64) {
	for _, t := range r.Trials {
		prefill += t.PrefillSeconds / float64(len(r.Trials))
		decode += t.DecodeSeconds / float64(len(r.Trials))
	}
	return prefill, decode
}

func percent(fraction float64) string { return strconv.FormatFloat(100*fraction, 'g', 4, 64) + " %" }

// number writes a rate or count with at least four digits, and no decimals where it is
// large.
func number(v float64) string {
	if v >= 1000 || v == 0 {
		return strconv.FormatFloat(v, 'f', 0, 64)
	}
	return strconv.FormatFloat(v, 'g', 4, 64)
}

// StallCauses are the causes of stalls that have a column each in CSV.
var StallCauses = []string{"expert-copy", "router-sync", "launch-bound", "cpu-attention", "kv-copy", "kv-load", "cpu-experts"}

// WriteCSV writes a line per result, without single trials. The columns are the keys of the
// JSON objects; those of objects inside are joined by an underscore.
func WriteCSV(out io.Writer, results []Result) error {
	w := csv.NewWriter(out)
	columns := slices.Concat(ProvenanceColumns, []string{
		"model", "dtype", "load_format", "tier", "offload_fraction", "host_paths", "all_host_paths", "setting", "micro_batch_tokens", "num_micro_batches",
		"expert_grouping", "attention", "requests", "prompt_tokens", "generated_tokens", "truncated_prompts", "warmup_tokens", "trials",
		"prefill_s", "decode_s", "throughput_tok_s", "stddev_tok_s", "prefill_tok_s", "decode_tok_s", "decode_stddev_tok_s",
		"hits", "misses", "hit_rate", "fetched_bytes_host", "fetched_bytes_peer", "decode_step_bytes_host", "decode_step_bytes_peer",
	})
	for _, cause := range StallCauses {
		columns = append(columns, "stall_s_"+strings.ReplaceAll(cause, "-", "_"))
	}
	columns = append(columns,
		"distinct_experts", "tokens_per_expert", "max_tokens_per_expert", "hbm_peak_bytes",
		"roofline_bound", "roofline_tok_s", "roofline_fraction",
		"prediction_prefill_s", "prediction_decode_s", "prediction_throughput_tok_s", "prediction_decode_tok_s", "prediction_bound", "prediction_saturation_fraction",
		"tokens_sha256",
	)
	w.Write(columns) //nolint:errcheck // Flush keeps the error
	for i := range results {
		w.Write(results[i].values()) //nolint:errcheck // as above
	}
	w.Flush()
	return w.Error()
}

// values are the result's columns of CSV.
func (r *Result) values() []string {
	f := func(v float64) string { return strconv.FormatFloat(v, 'g', 8, 64) }
	given := func(v float64) string { // absent where JSON has no such key
		if v == 0 {
			return ""
		}
		return f(v)
	}
	pointer := func(v *float64) string {
		if v == nil {
			return ""
		}
		return f(*v)
	}
	d := func(v int64) string { return strconv.FormatInt(v, 10) }
	flag := func(v bool) string {
		if !v {
			return "" // as given
		}
		return "true"
	}
	prefill, decode := r.means()
	values := append(Provenance(&r.Run, &r.Machine),
		r.Model, r.DType, r.LoadFormat.String(), r.Tier.String(), f(r.OffloadFraction), strconv.Itoa(r.HostPaths), flag(r.AllPaths), r.Setting, strconv.Itoa(r.MicroBatchTokens), strconv.Itoa(r.NumMicroBatches),
		r.ExpertGrouping.String(), r.Attention.String(), strconv.Itoa(r.Requests), strconv.Itoa(r.PromptTokens), strconv.Itoa(r.GeneratedTokens),
		strconv.Itoa(r.TruncatedPrompts), strconv.Itoa(r.WarmupTokens), strconv.Itoa(len(r.Trials)),
		f(prefill), f(decode), f(r.ThroughputTokS), pointer(r.StddevTokS), f(r.PrefillTokS), f(r.DecodeTokS), pointer(r.DecodeStddevTokS),
		d(r.Hits), d(r.Misses), f(r.HitRate), d(r.FetchedBytes.Host), d(r.FetchedBytes.Peer), d(r.DecodeStepBytes.Host), d(r.DecodeStepBytes.Peer),
	)
	for _, cause := range StallCauses {
		values = append(values, f(r.StallS[cause]))
	}
	values = append(values, f(r.DistinctExperts), f(r.TokensPerExpert), d(r.MaxTokensPerExpert), d(r.HBMPeakBytes))
	if x := r.Roofline; x != nil {
		values = append(values, x.Bound, f(x.TokS), given(x.Fraction))
	} else {
		values = append(values, "", "", "")
	}
	if x := r.Prediction; x != nil {
		values = append(values, f(x.PrefillSeconds), f(x.DecodeSeconds), f(x.ThroughputTokS), f(x.DecodeTokS), x.Bound, given(x.SaturationPoint))
	} else {
		values = append(values, "", "", "", "", "", "")
	}
	return append(values, r.TokensSHA256)
}

// ReadResults reads what a sweep or a single measurement wrote as JSON: an array, or
// one object. Errors wrap ErrInput.
func ReadResults(data []byte, name string) ([]Result, error) {
	many, err := parseResults(data)
	if err != nil {
		return nil, Inputf("%s has no results of bench sweep --json or bench throughput --json: %w", name, err)
	}
	return many, nil
}

// parseResults is ReadResults, whose errors do not say what the data should be.
func parseResults(data []byte) ([]Result, error) {
	var many []Result
	if err := json.Unmarshal(data, &many); err != nil {
		var one Result
		if e := json.Unmarshal(data, &one); e != nil {
			if bytes.HasPrefix(bytes.TrimSpace(data), []byte("{")) {
				err = e
			}
			return nil, untrusted.JSONError(data, err)
		}
		many = []Result{one}
	}
	for i := range many {
		if many[i].Tier == configs.AnyTier || many[i].Requests == 0 {
			return nil, fmt.Errorf("entry %d is not one", i+1)
		}
	}
	return many, nil
}
