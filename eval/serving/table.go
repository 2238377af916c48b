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

// WriteTable writes a result for a person.
func WriteTable(out io.Writer, r *Result) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%s\ncommand: %s\nserver: %s, %s, model %s", &r.Run, r.Run.Command, r.BaseURL, r.Endpoint, r.Model)
	if r.ServerVersion != "" {
		fmt.Fprintf(&b, ", version %s", r.ServerVersion)
	}
	b.WriteString("\n\n")
	limit := "not limited"
	if r.MaxConcurrency > 0 {
		limit = strconv.Itoa(r.MaxConcurrency)
	}
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintf(w, "requests\t%d completed of %d, %d failed\n", r.Completed, r.NumPrompts, r.Failed)
	fmt.Fprintf(w, "request rate\t%s\nmax concurrency\t%s; peak %d\nduration\t%.4g s\n", r.arrived(), limit, r.PeakConcurrency, r.DurationSeconds)
	fmt.Fprintf(w, "tokens\t%d input, %d output\n", r.TotalInputTokens, r.TotalOutputTokens)
	fmt.Fprintf(w, "throughput\t%.4g requests/s, %.4g output tok/s, %.4g total tok/s\n", r.RequestThroughput, r.OutputThroughput, r.TotalThroughput)
	if r.Goodput != (Goodput{}) {
		fmt.Fprintf(w, "goodput\t%.4g requests/s within%s\n", r.RequestGoodput, r.Goodput.text())
	}
	w.Flush() //nolint:errcheck // writing to memory does not fail
	b.WriteString("\n")
	w = tabwriter.NewWriter(&b, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(w, "ms\tmean\t±\tmedian\t")
	for _, p := range r.TTFT.Percentiles {
		fmt.Fprintf(w, "p%v\t", p.P)
	}
	fmt.Fprintln(w)
	for _, d := range r.latencies() {
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t", d.name, ms(d.Mean), ms(d.Stddev), ms(d.Median))
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

// arrived says how requests arrived.
func (r *Result) arrived() string {
	a := r.Arrivals.EnsureDefaults()
	how := "Poisson"
	if a.Burstiness != 1 {
		how = fmt.Sprintf("gamma distribution of burstiness %v", a.Burstiness)
	}
	switch p := a.Ramp; {
	case r.Timed:
		return "as in the trace"
	case p.Strategy != "":
		return fmt.Sprintf("%v to %v requests/s, %s, %s", p.Start, p.End, p.Strategy, how)
	case a.Rate > 0:
		return fmt.Sprintf("%v requests/s, %s", a.Rate, how)
	}
	return "all at once"
}

// text lists the bounds.
func (g *Goodput) text() (s string) {
	for _, b := range []struct {
		name  string
		bound float64
	}{{"TTFT", g.TTFT}, {"TPOT", g.TPOT}, {"end-to-end", g.E2EL}} {
		if b.bound > 0 {
			s += fmt.Sprintf(" %s %.4g ms,", b.name, 1e3*b.bound)
		}
	}
	return strings.TrimSuffix(s, ",")
}

// WriteCSV writes a line with the columns of a run, and then those keys of the JSON object that
// are no lists or objects.
func WriteCSV(out io.Writer, r *Result) error {
	columns, values := append([]string{}, eval.RunColumns...), r.Run.Values()
	for _, f := range r.fields()[1:] { // the first is the date, which the run has
		columns = append(columns, f.key)
		switch v := f.value.(type) {
		case nil:
			values = append(values, "")
		case float64:
			values = append(values, strconv.FormatFloat(v, 'g', 8, 64))
		default:
			values = append(values, fmt.Sprint(v))
		}
	}
	w := csv.NewWriter(out)
	w.Write(columns) //nolint:errcheck // Flush keeps the error
	w.Write(values)  //nolint:errcheck // as above
	w.Flush()
	return w.Error()
}
