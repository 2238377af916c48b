package kv

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
)

// Result is a measurement of loads.
type Result struct {
	Run eval.Run `json:"run"`
	eval.Machine
	// BlockTokens is the number of tokens of a block.
	BlockTokens int `json:"block_tokens"`
	// Entries are the sizes of what is loaded, Reloads the points, ordered by entry, count
	// and layout.
	Entries []Entry       `json:"kv_entries"`
	Reloads []ReloadPoint `json:"reloads"`
}

// WriteTable writes a line for each point for a person.
func WriteTable(out io.Writer, r *Result) error {
	var b strings.Builder
	b.WriteString(eval.Header(&r.Run, &r.Machine))
	for i := range r.Entries {
		e := &r.Entries[i]
		points := r.of(e)
		if len(points) == 0 { // the measurement was interrupted
			continue
		}
		fmt.Fprintf(&b, "%s: %d bytes per token\n", strings.Join(e.Models, ", "), e.Bytes)
		for n, d := range e.Derivations {
			if !slices.Contains(e.Derivations[:n], d) {
				fmt.Fprintf(&b, "  %s\n", d)
			}
		}
		w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', tabwriter.AlignRight)
		head := "entries\tlayout\tsize\t"
		sources := points[0].sources()
		for _, s := range sources {
			head += s.name + " ms\tGB/s\tqueued\traw\t% of raw\t"
		}
		if len(sources) > 1 {
			head += "host/peer\tof raw rates\t"
		}
		fmt.Fprintln(w, head)
		for _, p := range points {
			fmt.Fprintf(w, "%d\t%s\t%s\t", p.Entries, p.Layout, eval.Size(p.Bytes))
			for _, s := range p.sources() {
				fmt.Fprintf(w, "%.4g\t%.4g\t%.4g\t%.4g\t%.1f\t", 1e3*s.Seconds, s.BytesPerSecond/1e9, s.QueuedBytesPerSecond/1e9, s.RawBytesPerSecond/1e9, 100*s.RawFraction)
			}
			if p.Peer != nil {
				fmt.Fprintf(w, "%.2fx\t%.2fx\t", p.Speedup, p.RawSpeedup)
			}
			fmt.Fprintln(w)
		}
		w.Flush() //nolint:errcheck // writing to memory does not fail
		b.WriteString("\n")
	}
	fmt.Fprintf(&b, "blocks of %d tokens; scattered: each block is elsewhere in both memories; contiguous: one run in both\n", r.BlockTokens)
	b.WriteString("ms, GB/s (10^9 bytes/s): one load alone, a request to the transfer engine, median; queued: GB/s of several such loads at once\n" +
		"raw: GB/s of the same copies queued on a stream, without the engine; % of raw: queued over raw\n" +
		"host/peer: time of a load from the host over that of one from a peer; of raw rates: the same ratio of raw copies\n")
	if r.Unpaced() {
		b.WriteString("emulated devices without rates copy as fast as this CPU does: host and peer do not compare; give --emulate rates, with virtual or pace\n")
	}
	_, err := io.WriteString(out, b.String())
	return err
}

// of are the points of an entry.
func (r *Result) of(e *Entry) []ReloadPoint {
	var points []ReloadPoint
	for _, p := range r.Reloads {
		if p.EntryBytes == e.Bytes {
			points = append(points, p)
		}
	}
	return points
}

// named is a load with the name of its source.
type named struct {
	name string
	*Load
}

// sources are the loads that a point has.
func (p *ReloadPoint) sources() []named {
	all := []named{{"host", p.Host}}
	if p.Peer != nil {
		all = append(all, named{"peer", p.Peer})
	}
	return all
}

// WriteCSV writes a line per point. The columns are the keys of the JSON objects, those of
// host and peer joined by an underscore.
func WriteCSV(out io.Writer, r *Result) error {
	w := csv.NewWriter(out)
	columns := append(slices.Clone(eval.ProvenanceColumns), "block_tokens", "models", "entry_bytes", "entries", "layout", "blocks", "bytes")
	for _, s := range []string{"host", "peer"} {
		for _, c := range []string{"load_s", "load_bytes_per_s", "queued_loads", "queued_bytes_per_s", "raw_bytes_per_s", "raw_fraction"} {
			columns = append(columns, s+"_"+c)
		}
	}
	w.Write(append(columns, "speedup", "raw_speedup")) //nolint:errcheck // Flush keeps the error
	f := func(v float64) string { return strconv.FormatFloat(v, 'g', 8, 64) }
	ratio := func(v float64) string { // absent where JSON has no such key
		if v == 0 {
			return ""
		}
		return f(v)
	}
	for _, p := range r.Reloads {
		values := append(eval.Provenance(&r.Run, &r.Machine), strconv.Itoa(r.BlockTokens), strings.Join(p.Models, ";"), strconv.FormatInt(p.EntryBytes, 10),
			strconv.Itoa(p.Entries), string(p.Layout), strconv.Itoa(p.Blocks), strconv.FormatInt(p.Bytes, 10))
		for _, l := range []*Load{p.Host, p.Peer} {
			if l == nil {
				values = append(values, "", "", "", "", "", "")
				continue
			}
			values = append(values, f(l.Seconds), f(l.BytesPerSecond), strconv.Itoa(l.QueuedLoads), f(l.QueuedBytesPerSecond), f(l.RawBytesPerSecond), f(l.RawFraction))
		}
		w.Write(append(values, ratio(p.Speedup), ratio(p.RawSpeedup))) //nolint:errcheck // as above
	}
	w.Flush()
	return w.Error()
}

// Plot draws the time of a load of scattered blocks over the number of entries, from the
// host and from a peer, in a panel for each size of entries. format is one of
// eval.PlotFormats.
func Plot(out io.Writer, format string, r *Result) error { return r.figure().Write(out, format) }

func (r *Result) figure() *figure.Lines {
	on := r.Device
	if r.Emulated {
		on = r.EmulatedNote()
	}
	chart := &figure.Lines{
		Title: "Time to load KV entries to the GPU",
		Note:  fmt.Sprintf("Single loads of scattered blocks of %d tokens, on %s", r.BlockTokens, on),
		X:     figure.Axis{Label: "KV entries (tokens)", Log: true},
	}
	for i := range r.Entries {
		e := &r.Entries[i]
		points := slices.DeleteFunc(r.of(e), func(p ReloadPoint) bool { return p.Layout != Scattered })
		slices.SortFunc(points, func(a, b ReloadPoint) int { return cmp.Compare(a.Entries, b.Entries) })
		if len(points) == 0 {
			continue
		}
		panel := figure.Panel{
			Title:  fmt.Sprintf("%s: %s per token", strings.Join(e.Models, ", "), eval.Size(e.Bytes)),
			Y:      figure.Axis{Label: "time of a load (ms)", Log: true},
			Height: 150,
		}
		host := figure.Series{Name: "host memory", Look: figure.LookB, Line: true, Marks: true}
		peer := figure.Series{Name: "peer memory", Look: figure.LookA, Line: true, Marks: true}
		for _, p := range points {
			host.Points = append(host.Points, figure.Point{X: float64(p.Entries), Y: 1e3 * p.Host.Seconds})
			if p.Peer != nil {
				peer.Points = append(peer.Points, figure.Point{X: float64(p.Entries), Y: 1e3 * p.Peer.Seconds})
			}
		}
		first, last := points[0], points[len(points)-1]
		if first.Peer != nil && !r.Unpaced() {
			panel.Title += fmt.Sprintf("; host / peer: %.1f× to %.1f×", first.Speedup, last.Speedup)
		}
		for _, s := range []figure.Series{host, peer} {
			if len(chart.Panels) > 0 {
				s.Name = "" // the legend has it from the first panel
			}
			if len(s.Points) > 0 {
				panel.Series = append(panel.Series, s)
			}
		}
		chart.Panels = append(chart.Panels, panel)
	}
	return chart
}
