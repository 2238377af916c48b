package prefix

import (
	"cmp"
	"encoding/csv"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/moeserve/moeserve/eval"
	"github.com/moeserve/moeserve/eval/figure"
	"github.com/moeserve/moeserve/untrusted"
)

// WriteTable writes a line for each point for a person.
func WriteTable(out io.Writer, r *Result) error {
	var b strings.Builder
	b.WriteString(eval.Header(&r.Run, &r.Machine))
	fmt.Fprintf(&b, "%s (%s), KV blocks of %d tokens\n\n", untrusted.Name(r.Model), r.DType, r.BlockTokens)
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', tabwriter.AlignRight)
	if len(r.TTFT) > 0 {
		fmt.Fprintln(w, "prefix in\tprefix\tfound\trecomputed\tTTFT ms\tload\tmiss ms\tdecode step ms\tnowhere/TTFT\t")
		for _, x := range r.TTFT {
			fmt.Fprintf(w, "%s\t%d\t%d\t%d\t%.4g\t%s\t%.4g\t%.4g\t%s\t\n", x.Place, x.PrefixTokens, x.CachedTokens, x.RecomputedTokens, 1e3*x.Seconds, percent(x.LoadShare), 1e3*x.MissSeconds, 1e3*x.DecodeStepSeconds, times(x.Speedup))
		}
		w.Flush() //nolint:errcheck // writing to memory does not fail
		b.WriteString("\nprefix: tokens of the prompt but the last, which is always computed; found: those whose KV entries were there and were used; recomputed: there too, but computing them was expected to be faster\nTTFT: time to first token, median; load: share of it from the submission of the prefix's load to its last byte, measured, median; miss: TTFT of the request that computed the prompt\n" +
			"decode step: mean time of a token after the first; nowhere/TTFT: how many times as long the first token takes without the prefix\n")
	}
	if len(r.Hits) > 0 {
		if len(r.TTFT) > 0 {
			b.WriteString("\n")
		}
		fmt.Fprintln(w, "prefixes in\thits\tfound\trecomputed\trequests/s\tprompt tok/s\ts\tto no hits\t")
		for _, x := range r.Hits {
			fmt.Fprintf(w, "%s\t%.4g %%\t%.4g %%\t%.4g %%\t%.4g\t%.4g\t%.4g\t%s\t\n", x.Place, 100*x.HitFraction, share(x.CachedTokens, x.PromptTokens), share(x.RecomputedTokens, x.PromptTokens), x.RequestThroughput, ratio(float64(x.PromptTokens), x.Seconds), x.Seconds, times(x.Speedup))
		}
		w.Flush() //nolint:errcheck // as above
		x := r.Hits[0]
		fmt.Fprintf(&b, "\n%d requests of %d prompt tokens, all submitted at once; hits: those whose prompts have run before; found: share of all prompt tokens whose KV entries were there and were used; recomputed: of those that were there too, but computing them was expected to be faster\n", x.Requests, x.PromptTokens/x.Requests)
	}
	if len(r.Misses) > 0 {
		r.writeMisses(&b, w)
	}
	if len(r.Decodes) > 0 {
		r.writeDecodes(&b, w)
	}
	if r.files() {
		text := "files that were written just now are read from the system's page cache, where there is room"
		if r.Emulation != nil && r.Emulation.Rates == eval.RatesVirtual {
			text = "the virtual clock does not count reading and writing files"
		}
		b.WriteString(text + "\n")
	}
	_, err := io.WriteString(out, b.String())
	return err
}

// writeMisses writes the lines of misses; w writes to b.
func (r *Result) writeMisses(b *strings.Builder, w *tabwriter.Writer) {
	fmt.Fprintln(w, "tier\tprompt\tTTFT ms\twith tier ms\tfirst ms\tcost\t")
	for _, x := range r.Misses {
		fmt.Fprintf(w, "%s\t%d\t%.4g\t%.4g\t%.4g\t%+.2f %%\t\n", x.Place, x.PromptTokens, 1e3*x.PlainSeconds, 1e3*x.Seconds, 1e3*x.FirstSeconds, 100*x.Cost)
	}
	w.Flush() //nolint:errcheck // writing to memory does not fail
	b.WriteString("\nTTFT: time to first token of new prompts that have nothing to do with the tier, with tier: that of those that are looked up and stored in it,\nin turn in the same engine, medians; first: the first of the latter; cost: what the tier adds\n")
}

// writeDecodes writes the lines of decode steps; w writes to b.
func (r *Result) writeDecodes(b *strings.Builder, w *tabwriter.Writer) {
	fmt.Fprintln(w, "tier\tbeside\tdecode step ms\tcost\thost ms\tGB/s\t")
	for _, x := range r.Decodes {
		fmt.Fprintf(w, "%s\t%s\t%.4g\t%+.2f %%\t%.4g\t%.4g\t\n", x.Place, x.Traffic, 1e3*x.StepSeconds, 100*x.Cost, 1e3*x.HostSeconds, x.BytesPerSecond/1e9)
	}
	w.Flush() //nolint:errcheck // as above
	x := r.Decodes[0]
	fmt.Fprintf(b, "\n%d sequences of %d tokens decode; beside: what is copied meanwhile: own stores: as many KV blocks as they fill; stores, loads: one transfer after the other\ncost: what that adds to the steps of the same round without, median of the rounds; host: its time for the copies of a step, while the device computes; GB/s: copied\n", x.Sequences, x.ContextTokens)
}

// files reports whether any prefix was in files.
func (r *Result) files() bool {
	return slices.ContainsFunc(r.TTFT, func(x TTFTPoint) bool { return x.Place == File }) || slices.ContainsFunc(r.Misses, func(x MissPoint) bool { return x.Place == File }) || slices.ContainsFunc(r.Decodes, func(x DecodePoint) bool { return x.Place == File }) || slices.ContainsFunc(r.Hits, func(x HitsPoint) bool { return x.Place == File })
}

// share is a part in per cent; 0 of nothing.
func share(part, all int) float64 { return 100 * ratio(float64(part), float64(all)) }

// percent writes a part of a whole in per cent; nothing where there is none.
func percent(part float64) string {
	if part == 0 {
		return ""
	}
	return fmt.Sprintf("%.1f %%", 100*part)
}

// times writes a ratio; nothing where there is none.
func times(ratio float64) string {
	if ratio == 0 {
		return ""
	}
	return fmt.Sprintf("%.2fx", ratio)
}

// WriteCSV writes a line per point: of time to first token, misses, decodes, and throughput by hits, in
// columns that are the keys of JSON.
func WriteCSV(out io.Writer, r *Result) error {
	w := csv.NewWriter(out)
	w.Write(slices.Concat(eval.ProvenanceColumns, []string{ //nolint:errcheck // Flush keeps the error
		"model", "dtype", "load_format", "block_tokens", "place", "prompt_tokens", "cached_tokens", "recomputed_tokens",
		"ttft_s", "miss_ttft_s", "decode_step_s", "ttft_speedup", "load_s", "load_share", "hit_fraction", "requests", "duration_s", "request_throughput", "hits_speedup",
		"first_miss_ttft_s", "plain_ttft_s", "miss_cost", "kv_traffic", "sequences", "step_cost", "kv_host_s", "kv_bytes_per_s",
	}))
	f := func(v float64) string { return strconv.FormatFloat(v, 'g', 8, 64) }
	optional := func(v float64) string { // absent where JSON has no such key
		if v == 0 {
			return ""
		}
		return f(v)
	}
	write := func(p Place, prompt, cached, recomputed int, values ...string) {
		w.Write(slices.Concat(eval.Provenance(&r.Run, &r.Machine), []string{ //nolint:errcheck // as above
			r.Model, r.DType, r.LoadFormat, strconv.Itoa(r.BlockTokens), string(p), strconv.Itoa(prompt), strconv.Itoa(cached), strconv.Itoa(recomputed),
		}, values, make([]string, 19-len(values))))
	}
	for _, x := range r.TTFT {
		write(x.Place, x.PrefixTokens+1, x.CachedTokens, x.RecomputedTokens, f(x.Seconds), f(x.MissSeconds), f(x.DecodeStepSeconds), optional(x.Speedup), optional(x.LoadSeconds), optional(x.LoadShare))
	}
	for _, x := range r.Misses {
		write(x.Place, x.PromptTokens, 0, 0, "", f(x.Seconds), "", "", "", "", "", "", "", "", "", f(x.FirstSeconds), f(x.PlainSeconds), f(x.Cost))
	}
	for _, x := range r.Decodes {
		write(x.Place, x.ContextTokens, 0, 0, "", "", f(x.StepSeconds), "", "", "", "", "", "", "", "", "", "", "", string(x.Traffic), strconv.Itoa(x.Sequences), f(x.Cost), f(x.HostSeconds), f(x.BytesPerSecond))
	}
	for _, x := range r.Hits {
		write(x.Place, x.PromptTokens, x.CachedTokens, x.RecomputedTokens, "", "", "", "", "", "", f(x.HitFraction), strconv.Itoa(x.Requests), f(x.Seconds), f(x.RequestThroughput), optional(x.Speedup))
	}
	w.Flush()
	return w.Error()
}

// looks of places, and their names in legends.
var looks = map[Place]struct {
	name string
	look figure.Look
}{
	HBM: {"GPU memory", figure.LookC}, Peer: {"peer memory", figure.LookA}, Host: {"host memory", figure.LookB}, File: {"files", figure.LookD},
	Nowhere: {"nowhere: computed", figure.LookPlain},
}

// PlotTTFT draws the time to first token over the length of the prompt, a line for each
// place. format is one of eval.PlotFormats.
func PlotTTFT(out io.Writer, format string, r *Result) error {
	if len(r.TTFT) == 0 {
		return eval.Inputf("prefix: no times to first token to plot")
	}
	panel := figure.Panel{Y: figure.Axis{Label: "time to first token (ms)", Log: true}}
	for _, p := range Places {
		s := figure.Series{Name: looks[p].name, Look: looks[p].look, Line: true, Marks: true}
		for _, x := range r.TTFT {
			if x.Place == p {
				s.Points = append(s.Points, figure.Point{X: float64(x.PrefixTokens), Y: 1e3 * x.Seconds})
			}
		}
		slices.SortFunc(s.Points, func(a, b figure.Point) int { return cmp.Compare(a.X, b.X) })
		if len(s.Points) > 0 {
			panel.Series = append(panel.Series, s)
		}
	}
	chart := &figure.Lines{
		Title: "Time to first token by where the prefix is", Note: r.note("one request at a time"),
		X: figure.Axis{Label: "prefix (tokens)", Log: true}, Panels: []figure.Panel{panel},
	}
	return chart.Write(out, format)
}

// PlotHits draws the throughput over the fraction of hits, a line for each place. format is
// one of eval.PlotFormats.
func PlotHits(out io.Writer, format string, r *Result) error {
	if len(r.Hits) == 0 {
		return eval.Inputf("prefix: no throughput by hits to plot")
	}
	panel := figure.Panel{Y: figure.Axis{Label: "requests/s"}}
	for _, p := range Places {
		s := figure.Series{Name: looks[p].name, Look: looks[p].look, Line: true, Marks: true}
		for _, x := range r.Hits {
			if x.Place == p {
				s.Points = append(s.Points, figure.Point{X: 100 * x.HitFraction, Y: x.RequestThroughput})
			}
		}
		slices.SortFunc(s.Points, func(a, b figure.Point) int { return cmp.Compare(a.X, b.X) })
		if len(s.Points) > 0 {
			panel.Series = append(panel.Series, s)
		}
	}
	x := r.Hits[0]
	chart := &figure.Lines{
		Title: "Throughput by requests whose prefix is found", Note: r.note(fmt.Sprintf("%d requests of %d prompt tokens", x.Requests, x.PromptTokens/x.Requests)),
		X: figure.Axis{Label: "requests whose prefix is found (%)", From: 0, To: 100}, Panels: []figure.Panel{panel},
	}
	return chart.Write(out, format)
}

// note says what a figure is of.
func (r *Result) note(how string) string {
	on := r.Device
	if r.Emulated {
		on = r.EmulatedNote()
	}
	return fmt.Sprintf("%s, %s, %s", untrusted.Name(r.Model), how, on)
}
