package eval

import (
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
)

// WriteTable writes results for a person, a line each, and below what they share.
func WriteTable(out io.Writer, results []Result) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(w, "tier\toffloaded\tdecode tok/s\t±\tpredicted\tof floor\tbound\twhole run tok/s\t±\tprefill s\tdecode s\tMiB/step\t\n")
	for i := range results {
		r := &results[i]
		predicted, floor, bound := "-", "-", "-"
		if r.Prediction != nil {
			predicted = number(r.Prediction.DecodeTokS)
		}
		if r.Roofline != nil {
			floor, bound = fmt.Sprintf("%.1f %%", 100*r.Roofline.Fraction), r.Roofline.Bound
		}
		prefill, decode := r.means()
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%.4g\t%.4g\t%.1f\t\n",
			r.Tier, percent(r.OffloadFraction), number(r.DecodeTokS), number(r.DecodeStddevTokS), predicted, floor, bound,
			number(r.ThroughputTokS), number(r.StddevTokS), prefill, decode, float64(r.DecodeStepBytes.Host+r.DecodeStepBytes.Peer)/(1<<20))
	}
	if err := w.Flush(); err != nil {
		return err
	}
	return writeShared(out, results)
}

// writeShared tells what holds for all results.
func writeShared(out io.Writer, results []Result) error {
	if len(results) == 0 {
		return nil
	}
	r := &results[0]
	var b strings.Builder
	device := labeled(r.Device, r.Emulated)
	fmt.Fprintf(&b, "\n%s (%s) on %s: %d requests, %d prompt tokens, %d generated, %d trials\n", r.Model, r.DType, device, r.Requests, r.PromptTokens, r.GeneratedTokens, len(r.Trials))
	fmt.Fprintf(&b, "micro-batches %d of %d, experts per %s, attention on %s", r.NumMicroBatches, r.MicroBatchTokens, r.ExpertGrouping, r.Attention)
	if r.DistinctExperts > 0 {
		fmt.Fprintf(&b, "; %.1f experts of a layer in use, %.1f tokens each, %d at most", r.DistinctExperts, r.TokensPerExpert, r.MaxTokensPerExpert)
	}
	b.WriteString("\n")
	if r.TruncatedPrompts > 0 {
		fmt.Fprintf(&b, "prompts cut to the model's context: %d\n", r.TruncatedPrompts)
	}
	stalls := map[string]float64{}
	same := true
	for i := range results {
		for cause, s := range results[i].StallS {
			stalls[cause] += s
		}
		same = same && results[i].TokensSHA256 == r.TokensSHA256
	}
	for _, cause := range slices.Sorted(maps.Keys(stalls)) {
		fmt.Fprintf(&b, "stalled %.4g s for %s, in all trials\n", stalls[cause], cause)
	}
	for tier, fraction := range saturationPoints(results) {
		fmt.Fprintf(&b, "from %s copies stay hidden up to %.1f %% offloaded, by the planner\n", tier, 100*fraction)
	}
	for _, g := range Gains(results, gainFraction) {
		fmt.Fprintf(&b, "at %s, peer gives %+.0f %% over host decoding, %+.0f %% over the whole run\n", percent(g.Fraction), 100*g.Decode, 100*g.EndToEnd)
	}
	switch {
	case r.TokensSHA256 == "":
		b.WriteString("these devices keep no data: no tokens, and nothing of which experts were in use\n")
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

// labeled is a device's name, with a word where it is emulated and does not say so.
func labeled(device string, emulated bool) string {
	if emulated && device != emulatedLabel {
		device += ", " + emulatedLabel
	}
	return device
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

// number writes a rate or count with four digits or more, none behind the point where
// it is large.
func number(v float64) string {
	if v >= 1000 || v == 0 {
		return strconv.FormatFloat(v, 'f', 0, 64)
	}
	return strconv.FormatFloat(v, 'g', 4, 64)
}

// WriteCSV writes a line per result, without trials: the columns are the keys of the
// JSON objects.
func WriteCSV(out io.Writer, results []Result) error {
	w := csv.NewWriter(out)
	w.Write([]string{ //nolint:errcheck // Flush keeps the error
		"model", "device", "emulated", "dtype", "load_format", "tier", "offload_fraction", "micro_batch_tokens", "num_micro_batches",
		"expert_grouping", "attention", "requests", "prompt_tokens", "generated_tokens", "trials", "prefill_s", "decode_s",
		"throughput_tok_s", "stddev_tok_s", "decode_tok_s", "decode_stddev_tok_s", "bytes_fetched_host", "bytes_fetched_peer",
		"distinct_experts", "stall_s", "hbm_peak_bytes", "roofline_bound", "roofline_tok_s", "roofline_fraction",
		"predicted_decode_tok_s", "predicted_throughput_tok_s", "predicted_knee", "tokens_sha256",
	})
	f := func(v float64) string { return strconv.FormatFloat(v, 'g', 8, 64) }
	for i := range results {
		r := &results[i]
		prefill, decode := r.means()
		stalled := 0.0
		for _, s := range r.StallS {
			stalled += s
		}
		roofline, prediction := [3]string{}, [3]string{}
		if x := r.Roofline; x != nil {
			roofline = [3]string{x.Bound, f(x.TokS), f(x.Fraction)}
		}
		if x := r.Prediction; x != nil {
			prediction = [3]string{f(x.DecodeTokS), f(x.ThroughputTokS), ""}
			if x.SaturationPoint > 0 {
				prediction[2] = f(x.SaturationPoint)
			}
		}
		w.Write([]string{ //nolint:errcheck // as above
			r.Model, r.Device, strconv.FormatBool(r.Emulated), r.DType, r.LoadFormat.String(), r.Tier.String(), f(r.OffloadFraction),
			strconv.Itoa(r.MicroBatchTokens), strconv.Itoa(r.NumMicroBatches), r.ExpertGrouping.String(), r.Attention.String(),
			strconv.Itoa(r.Requests), strconv.Itoa(r.PromptTokens), strconv.Itoa(r.GeneratedTokens), strconv.Itoa(len(r.Trials)), f(prefill), f(decode),
			f(r.ThroughputTokS), f(r.StddevTokS), f(r.DecodeTokS), f(r.DecodeStddevTokS),
			strconv.FormatInt(r.FetchedBytes.Host, 10), strconv.FormatInt(r.FetchedBytes.Peer, 10),
			f(r.DistinctExperts), f(stalled), strconv.FormatInt(r.HBMPeakBytes, 10), roofline[0], roofline[1], roofline[2],
			prediction[0], prediction[1], prediction[2], r.TokensSHA256,
		})
	}
	w.Flush()
	return w.Error()
}

// ReadResults reads what a sweep or a single measurement wrote as JSON: an array, or
// one object. Errors wrap ErrInput.
func ReadResults(data []byte, name string) ([]Result, error) {
	var many []Result
	if err := json.Unmarshal(data, &many); err != nil {
		var one Result
		if json.Unmarshal(data, &one) != nil {
			return nil, inputf("%s has no results of bench sweep or bench throughput: %w", name, err)
		}
		many = []Result{one}
	}
	for i := range many {
		if many[i].Tier == configs.AnyTier || many[i].Requests == 0 {
			return nil, inputf("%s: entry %d is not a result of bench sweep or bench throughput", name, i+1)
		}
	}
	return many, nil
}
