package sleep

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/moeserve/moeserve/eval"
	"github.com/moeserve/moeserve/untrusted"
)

// WriteTable writes a line for each measurement for a person.
func WriteTable(out io.Writer, r *Result) error {
	var b strings.Builder
	b.WriteString(eval.Header(&r.Run, &r.Machine))
	b.WriteByte('\n')
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "model\toffloaded\tlevel\tGPU GB\tcopied GB\tsleep s\tcopies\tGB/s\twake s\tcopies\tGB/s\tload s\t")
	line := func(p *Point, level string) {
		fmt.Fprintf(w, "%s\t%.0f %%\t%s\t%.4g\t%.4g\t%.4g\t%.0f %%\t%.4g\t%.4g\t%.0f %%\t%.4g\t%s\t\n", untrusted.Name(p.Model), 100*p.OffloadFraction, level,
			gb(p.Sleep.GPUBytes), gb(p.Wake.CopiedBytes), p.Sleep.Seconds, 100*p.Sleep.CopyShare(), p.Sleep.CopyRate()/1e9,
			p.Wake.Seconds, 100*p.Wake.CopyShare(), p.Wake.CopyRate()/1e9, loaded(p.Wake))
	}
	for i := range r.FirstSleeps {
		line(&r.FirstSleeps[i], "1, first")
	}
	for i := range r.Points {
		line(&r.Points[i], fmt.Sprint(r.Points[i].Level))
	}
	w.Flush() //nolint:errcheck // writing to memory does not fail
	if len(r.Switches) > 0 {
		b.WriteByte('\n')
		w = tabwriter.NewWriter(&b, 0, 0, 2, ' ', tabwriter.AlignRight)
		fmt.Fprintln(w, "switch from\tto\ts\tcopies\tsleep s\twake s\t")
		for _, s := range r.Switches {
			fmt.Fprintf(w, "%s\t%s\t%.4g\t%.0f %%\t%.4g\t%.4g\t\n", untrusted.Name(s.From), untrusted.Name(s.To), s.Seconds, 100*s.CopyShare, s.Sleep.Seconds, s.Wake.Seconds)
		}
		w.Flush() //nolint:errcheck // writing to memory does not fail
	}
	b.WriteString("\nmedians; copied GB: by the wake; copies: their share of the time, and their rate" +
		"\n1, first: the first sleep, which also allocates pinned host memory for the weights")
	if pinned := firstPin(r); pinned > 0 {
		fmt.Fprintf(&b, ": %.4g s of it", pinned)
	}
	b.WriteString("\nlevel 2 loads the weights from the checkpoint again\n")
	_, err := io.WriteString(out, b.String())
	return err
}

func gb(bytes int64) float64 { return float64(bytes) / 1e9 }

func loaded(p Phase) string {
	if p.LoadSeconds == 0 {
		return "-"
	}
	return fmt.Sprintf("%.4g", p.LoadSeconds)
}

// firstPin is how long the first sleep allocated host memory, in seconds.
func firstPin(r *Result) float64 {
	if len(r.FirstSleeps) == 0 {
		return 0
	}
	return r.FirstSleeps[0].Sleep.PinSeconds
}
