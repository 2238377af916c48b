package tenancy

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/moeserve/moeserve/eval"
	"github.com/moeserve/moeserve/eval/figure"
	"github.com/moeserve/moeserve/untrusted"
)

// WriteTable writes the result for a person.
func WriteTable(out io.Writer, r *Result) error {
	if _, err := io.WriteString(out, eval.Header(&r.Run, &r.Machine)); err != nil {
		return err
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(w, "at s\ttenant holds\t\tfree before\tgot after s\tits call s\theadroom free after s\tmissing for s\tdecode tok/s\tof quiet\t\n")
	for i, c := range r.Changes {
		until := 0.0
		if i+1 < len(r.Changes) {
			until = r.Changes[i+1].Seconds
		}
		rate := r.mean(c.Seconds, until)
		call := "-"
		if c.CallSeconds > 0 {
			call = fmt.Sprintf("%.3f", c.CallSeconds)
		}
		got := text(c.GotSeconds)
		if c.Refused {
			got = "refused"
		}
		fmt.Fprintf(w, "%.3f\t%s\t%s\t%s\t%s\t%s\t%s\t%.3f\t%.4g\t%.0f %%\t\n",
			c.Seconds, c.Step, eval.Size(c.Bytes), eval.Size(c.FreeBytes), got, call, text(c.RestoredSeconds), c.ShortSeconds, rate, 100*rate/r.QuietTokS)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	var b strings.Builder
	fmt.Fprintf(&b, "\n%s (%s): %d requests, %.0f %% of the experts offloaded, --expert-access %s; beside nothing %.4g decode tok/s\n",
		untrusted.Name(r.Model), r.DType, r.Requests, 100*r.OffloadFraction, r.ExpertAccess, r.QuietTokS)
	fmt.Fprintf(&b, "peer %s: %s, of which %s stay free (headroom); %d slabs released, the slowest in %.4f s\n",
		untrusted.Name(r.Peer), eval.Size(r.CapacityBytes), eval.Size(r.HeadroomBytes), r.ReleasedSlabs, r.SlowestRelease)
	for _, t := range r.Targets() {
		verdict := "target met"
		if !t.Met {
			verdict = "target MISSED"
		}
		fmt.Fprintf(&b, "%s: %s\n", verdict, t.What)
	}
	if r.TokensSHA256 == "" {
		b.WriteString("these devices keep no data: no tokens are compared\n")
	}
	if r.Emulation != nil && r.Emulation.Rates == eval.RatesVirtual && r.LateSlabs > 0 {
		b.WriteString("on the virtual clock memory is released between decode steps only: steps longer than the deadline miss it\n")
	}
	if len(r.Work) == 0 {
		b.WriteString("the tenant does no work of its own on emulated devices: what it would lose is not measured\n")
	}
	_, err := io.WriteString(out, b.String())
	return err
}

func text(seconds *float64) string {
	if seconds == nil {
		return "-"
	}
	return fmt.Sprintf("%.3f", *seconds)
}

// mean is that of the throughput from a time to another; 0: to the end.
func (r *Result) mean(from, to float64) float64 {
	tokens, seconds, last := 0.0, 0.0, 0.0
	for _, s := range r.Samples {
		if s.Seconds > from && (to == 0 || s.Seconds <= to) {
			tokens += s.DecodeTokS * (s.Seconds - last)
			seconds += s.Seconds - last
		}
		last = s.Seconds
	}
	if seconds == 0 {
		return 0
	}
	return tokens / seconds
}

// Target is something that a result should have.
type Target struct {
	What string
	Met  bool
}

// Targets of a result: slabs released within the deadline, memory that the tenant gets, the headroom restored
// within the deadline (but on a virtual clock, where nothing happens in steps), tokens unchanged, and what its
// work loses.
func (r *Result) Targets() []Target {
	got, short := 0, 0.0
	for _, c := range r.Changes {
		short = max(short, c.ShortSeconds)
		if c.GotSeconds != nil && c.RestoredSeconds != nil {
			got++
		}
	}
	all := []Target{
		{fmt.Sprintf("%d of %d slabs released after the deadline of %g s", r.LateSlabs, r.ReleasedSlabs, r.DeadlineSeconds), r.LateSlabs == 0},
		{fmt.Sprintf("in %d of %d steps the tenant got its memory and the headroom was free again before the next", got, len(r.Changes)), got == len(r.Changes)},
	}
	if r.Emulation == nil || r.Emulation.Rates != eval.RatesVirtual {
		all = append(all, Target{fmt.Sprintf("less than the headroom was free for at most %.3f s, and may be for %g s", short, r.DeadlineSeconds), short <= r.DeadlineSeconds})
	}
	if r.TokensSHA256 != "" {
		all = append(all, Target{fmt.Sprintf("the same tokens in %d passes", r.Passes), r.Passes > 1})
	}
	for _, w := range r.Work {
		all = append(all, Target{fmt.Sprintf("%s: %.1f %% lost beside the engine (%.4g/s, alone %.4g/s), at most %.0f %%", w.Kind, 100*w.Loss, w.Beside, w.Alone, 100*w.Limit), w.Loss <= w.Limit})
	}
	return all
}

// Plot draws throughput over time, and beneath it the memory of the peer. format is one of
// eval.PlotFormats.
func Plot(out io.Writer, format string, r *Result) error {
	if !slices.Contains(eval.PlotFormats, format) {
		return eval.Inputf("plot format %q: must be %s", format, strings.Join(eval.PlotFormats, " or "))
	}
	if len(r.Samples) == 0 {
		return eval.Inputf("tenancy: nothing to plot")
	}
	return Figure(r).Write(out, format)
}

// Figure is the chart of Plot.
func Figure(r *Result) *figure.Lines {
	name := r.Device
	switch {
	case r.Emulation != nil && r.Emulation.Rates == eval.RatesVirtual:
		name = "predicted: emulated devices, virtual time"
	case r.Emulated:
		name = r.EmulatedNote()
	}
	rate := figure.Series{Name: "decode throughput", Look: figure.LookA, Line: true}
	quiet := figure.Series{Name: "beside nothing", Look: figure.LookPlain, Line: true, Points: []figure.Point{{Y: r.QuietTokS}, {X: r.Samples[len(r.Samples)-1].Seconds, Y: r.QuietTokS}}}
	others := figure.Series{Name: "held by others", Look: figure.LookB, Line: true}
	borrowed := figure.Series{Name: "borrowed", Look: figure.LookC, Line: true}
	free := figure.Series{Name: "free", Look: figure.LookD, Line: true}
	unit, scale := "GiB", float64(1<<30)
	if r.CapacityBytes < 4<<30 {
		unit, scale = "MiB", 1<<20
	}
	for _, s := range r.Samples {
		point := func(v float64) figure.Point { return figure.Point{X: s.Seconds, Y: v} }
		rate.Points = append(rate.Points, point(s.DecodeTokS))
		others.Points = append(others.Points, point(float64(s.OthersBytes)/scale))
		borrowed.Points = append(borrowed.Points, point(float64(s.BorrowedBytes)/scale))
		free.Points = append(free.Points, point(float64(s.FreeBytes)/scale))
	}
	return &figure.Lines{
		Title: "Throughput while another process uses the peer",
		Note: fmt.Sprintf("%s, batch of %d, %.0f %% of the experts offloaded to %s, %s; headroom %s",
			untrusted.Name(r.Model), r.Requests, 100*r.OffloadFraction, untrusted.Name(r.Peer), name, eval.Size(r.HeadroomBytes)),
		X: figure.Axis{Label: "time (s)"},
		Panels: []figure.Panel{
			{Y: figure.Axis{Label: "tokens/s"}, Series: []figure.Series{quiet, rate}, Height: 200},
			{Y: figure.Axis{Label: "memory of the peer (" + unit + ")"}, Series: []figure.Series{others, borrowed, free}, Height: 200},
		},
	}
}
