package serving

import (
	"encoding/csv"
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/moeserve/moeserve/eval"
)

// latencies are the measured ones, in the order of the table.
func (r *Result) latencies() []struct {
	key, name string
	*Distribution
} {
	return []struct {
		key, name string
		*Distribution
	}{
		{"ttft_s", "TTFT (time to first token)", &r.TTFT},
		{"tpot_s", "TPOT (time per output token)", &r.TPOT},
		{"itl_s", "ITL (inter-token latency)", &r.ITL},
		{"e2el_s", "end-to-end latency", &r.E2EL},
	}
}

// WriteTable writes a result for a person.
func WriteTable(out io.Writer, r *Result) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%s\ncommand: %s\nserver: %s, %s, model %s", &r.Run, r.Run.Command, r.BaseURL, r.Endpoint, r.Model)
	if r.ServerVersion != "" {
		fmt.Fprintf(&b, ", version %s", r.ServerVersion)
	}
	b.WriteString("\n\n")
	rate, limit := "all at once", "not limited"
	if r.RequestRate != nil {
		rate = fmt.Sprintf("%v requests/s, Poisson", *r.RequestRate)
	}
	if r.MaxConcurrency != nil {
		limit = strconv.Itoa(*r.MaxConcurrency)
	}
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintf(w, "requests\t%d completed of %d, %d failed\n", r.Completed, r.NumPrompts, r.Failed)
	fmt.Fprintf(w, "request rate\t%s\nmax concurrency\t%s; peak %d\nduration\t%.4g s\n", rate, limit, r.PeakConcurrency, r.DurationSeconds)
	fmt.Fprintf(w, "tokens\t%d input, %d output\n", r.TotalInputTokens, r.TotalOutputTokens)
	fmt.Fprintf(w, "throughput\t%.4g requests/s, %.4g output tok/s, %.4g total tok/s\n", r.RequestThroughput, r.OutputThroughput, r.TotalTokenThroughput)
	w.Flush() //nolint:errcheck // writing to memory does not fail
	b.WriteString("\n")
	w = tabwriter.NewWriter(&b, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(w, "ms\tmean\t±\t")
	for _, p := range r.TTFT.Percentiles {
		fmt.Fprintf(w, "p%v\t", p.P)
	}
	fmt.Fprintln(w)
	for _, d := range r.latencies() {
		fmt.Fprintf(w, "%s\t%s\t", d.name, ms(d.Mean))
		if d.Stddev != nil {
			fmt.Fprint(w, ms(*d.Stddev))
		}
		fmt.Fprint(w, "\t")
		for _, p := range d.Percentiles {
			fmt.Fprintf(w, "%s\t", ms(p.Value))
		}
		fmt.Fprintln(w)
	}
	w.Flush() //nolint:errcheck // as above
	if r.Failed > 0 {
		fmt.Fprintf(&b, "\nfailed: %s\n", r.reasons())
	}
	_, err := io.WriteString(out, b.String())
	return err
}

// ms writes seconds in milliseconds.
func ms(seconds float64) string { return strconv.FormatFloat(1e3*seconds, 'f', 2, 64) }

// WriteCSV writes a line with the keys of the JSON object as columns; those of objects inside
// are joined by an underscore, and percentiles are named by their number: ttft_s_p99.
func WriteCSV(out io.Writer, r *Result) error {
	f := func(v float64) string { return strconv.FormatFloat(v, 'g', 8, 64) }
	columns, values := append([]string{}, eval.RunColumns...), r.Run.Values()
	add := func(column, value string) { columns, values = append(columns, column), append(values, value) }
	add("base_url", r.BaseURL)
	add("endpoint", r.Endpoint)
	add("model", r.Model)
	add("server_version", r.ServerVersion)
	rate, limit := "", ""
	if r.RequestRate != nil {
		rate = f(*r.RequestRate)
	}
	if r.MaxConcurrency != nil {
		limit = strconv.Itoa(*r.MaxConcurrency)
	}
	add("request_rate", rate)
	add("max_concurrency", limit)
	for _, x := range []struct {
		column string
		n      int
	}{
		{"num_prompts", r.NumPrompts},
		{"completed", r.Completed},
		{"failed", r.Failed},
		{"peak_concurrency", r.PeakConcurrency},
		{"total_input_tokens", r.TotalInputTokens},
		{"total_output_tokens", r.TotalOutputTokens},
	} {
		add(x.column, strconv.Itoa(x.n))
	}
	add("duration_s", f(r.DurationSeconds))
	add("request_throughput", f(r.RequestThroughput))
	add("output_throughput", f(r.OutputThroughput))
	add("total_token_throughput", f(r.TotalTokenThroughput))
	for _, d := range r.latencies() {
		add(d.key+"_mean", f(d.Mean))
		deviation := ""
		if d.Stddev != nil {
			deviation = f(*d.Stddev)
		}
		add(d.key+"_stddev", deviation)
		for _, p := range d.Percentiles {
			add(fmt.Sprintf("%s_p%v", d.key, p.P), f(p.Value))
		}
	}
	w := csv.NewWriter(out)
	w.Write(columns) //nolint:errcheck // Flush keeps the error
	w.Write(values)  //nolint:errcheck // as above
	w.Flush()
	return w.Error()
}
