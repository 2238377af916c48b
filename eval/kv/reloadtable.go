package kv

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/moeserve/moeserve/eval"
	"github.com/moeserve/moeserve/eval/figure"
	"github.com/moeserve/moeserve/kvcache/offload"
)

// table writes a part for each size of entries, with a line for each point.
func (l *Loads) table(b *strings.Builder) {
	for i := range l.Entries {
		e := &l.Entries[i]
		points := l.of(e)
		if len(points) == 0 { // the measurement was interrupted
			continue
		}
		fmt.Fprintf(b, "%s: %d bytes per token\n", strings.Join(e.Models, ", "), e.Bytes)
		for n, d := range e.Derivations {
			if !slices.Contains(e.Derivations[:n], d) {
				fmt.Fprintf(b, "  %s\n", d)
			}
		}
		w := tabwriter.NewWriter(b, 0, 0, 2, ' ', tabwriter.AlignRight)
		l.rates(w, points)
		w.Flush() //nolint:errcheck // writing to memory does not fail
		b.WriteString("where the time of one load alone goes, µs:\n")
		w = tabwriter.NewWriter(b, 0, 0, 2, ' ', tabwriter.AlignRight)
		l.parts(w, points)
		w.Flush() //nolint:errcheck // as above
		b.WriteString("\n")
	}
	fmt.Fprintf(b, "blocks of %d tokens; scattered: each block is elsewhere in both memories; contiguous: one run in both\n", l.BlockTokens)
	b.WriteString("ms: one load alone, a request to the transfer engine, from its submission until the host goes on, median; plain ms: the same copies without the engine, by a thread that asks for their end without a pause; copy ms: the load's copies on the device\n" +
		"queued: GB/s (10^9 bytes/s) of several such loads at once, as the host sees them; raw: of the same copies without the engine, the faster of queued one by one and batched\n" +
		"% of raw: queued over raw, and the same rate as the device sees it: from the start of the first copy to the end of the last\n" +
		"host/peer: time of a load from the host over that of one from a peer; of plain: the same ratio without the engine; of copies: of their copies on the device; of raw rates: the same ratio of raw copies\n" +
		"queue: until the host enqueues the first chunk; launch: until the device begins; copy; notice: until the host has signaled the end; wake: until the goroutine that waits goes on\n")
	if l.hasFiles() {
		b.WriteString(l.filesText())
	}
}

// hasFiles reports whether loads from files were measured.
func (l *Loads) hasFiles() bool {
	return slices.ContainsFunc(l.Reloads, func(p ReloadPoint) bool { return p.File != nil })
}

// filesText explains the columns of files.
func (l *Loads) filesText() string {
	text := fmt.Sprintf("file ms: one load of the same blocks from files in directory %q, one for each, as a server loads them; cached ms: the same load at once again, from the operating system's page cache\n", l.FileDirectory)
	text += fmt.Sprintf("queued, raw and %% of raw behind file ms and cached ms: of several such loads at once; of the same files read without the engine, by %d threads as a server's tier in files has them, into as much pinned memory as its staging buffers, without verifying them or copying them to the GPU, the faster of one read for each file and of its header before the rest; queued over raw\n", offload.FileReaders)
	explained := map[PageCache]string{
		PagesDropped: "the system was asked to drop the files' pages from its page cache before each load but the cached ones, and had at most 2 % of them left: the disk was read",
		PagesAsked:   "the system was asked to drop the files' pages from its page cache before each load but the cached ones, and does not report whether it did: what was read may have been in memory",
		PagesKept:    "the system was asked to drop the files' pages from its page cache, and had them still: what was read was in memory, wholly or in part, and the disk was not measured",
	}
	for _, c := range pageCaches {
		if slices.ContainsFunc(l.Reloads, func(p ReloadPoint) bool { return p.File != nil && p.File.PageCache == c }) {
			text += fmt.Sprintf("pages %s: %s\n", c, explained[c])
		}
	}
	return text
}

// filesName is what the figure calls loads from files.
func (l *Loads) filesName() string {
	cache := PagesDropped
	for _, p := range l.Reloads {
		if p.File != nil {
			cache = worse(cache, p.File.PageCache)
		}
	}
	return map[PageCache]string{PagesDropped: "files", PagesAsked: "files, maybe in the page cache", PagesKept: "files, page cache not dropped"}[cache]
}

// rates writes a line for each point.
func (l *Loads) rates(w io.Writer, points []ReloadPoint) {
	head := "entries\tlayout\tsize\t"
	sources := points[0].sources()
	for _, s := range sources {
		head += s.name + " ms\tplain ms\tcopy ms\tqueued\traw\t% of raw\tcopies\t"
	}
	if l.hasFiles() {
		head += "file ms\tqueued\traw\t% of raw\tcached ms\tqueued\traw\t% of raw\tpages\t"
	}
	if len(sources) > 1 {
		head += "host/peer\tof plain\tof copies\tof raw rates\t"
	}
	fmt.Fprintln(w, head)
	for _, p := range points {
		fmt.Fprintf(w, "%d\t%s\t%s\t", p.Entries, p.Layout, eval.Size(p.Bytes))
		for _, s := range p.sources() {
			fmt.Fprintf(w, "%.4g\t%.4g\t%.4g\t%.4g\t%.4g\t%.1f\t%.1f\t", 1e3*s.Seconds, 1e3*s.PlainSeconds, 1e3*s.Copy, s.QueuedBytesPerSecond/1e9, s.best()/1e9, 100*s.RawFraction, 100*s.CopyFraction)
		}
		if f := p.File; f != nil {
			fmt.Fprintf(w, "%.4g\t%.4g\t%s\t", 1e3*f.Seconds, f.QueuedBytesPerSecond/1e9, rawText(f.RawBytesPerSecond, f.RawFraction))
			fmt.Fprintf(w, "%.4g\t%.4g\t%s\t%s\t", 1e3*f.CachedSeconds, f.CachedQueuedBytesPerSecond/1e9, rawText(f.CachedRawBytesPerSecond, f.CachedRawFraction), f.PageCache)
		} else if l.hasFiles() {
			fmt.Fprint(w, strings.Repeat("-\t", 9))
		}
		if p.Peer != nil {
			fmt.Fprintf(w, "%.2fx\t%.2fx\t%.2fx\t%.2fx\t", p.Speedup, p.PlainSpeedup, p.CopySpeedup, p.RawSpeedup)
		}
		fmt.Fprintln(w)
	}
}

// rawText is a raw rate of files and the share of it, as the table has them.
func rawText(rate, fraction float64) string {
	if rate == 0 {
		return "-\t-"
	}
	return fmt.Sprintf("%.4g\t%.1f", rate/1e9, 100*fraction)
}

// parts writes where the time of each point goes.
func (l *Loads) parts(w io.Writer, points []ReloadPoint) {
	head := "entries\tlayout\t"
	for _, s := range points[0].sources() {
		head += s.name + ": queue\tlaunch\tcopy\tnotice\twake\t"
	}
	fmt.Fprintln(w, head)
	for _, p := range points {
		fmt.Fprintf(w, "%d\t%s\t", p.Entries, p.Layout)
		for _, s := range p.sources() {
			for _, part := range []float64{s.Queue, s.Launch, s.Copy, s.Notice, s.Wake} {
				fmt.Fprintf(w, "%.1f\t", 1e6*part)
			}
		}
		fmt.Fprintln(w)
	}
}

// of are the points of an entry.
func (l *Loads) of(e *Entry) []ReloadPoint {
	var points []ReloadPoint
	for _, p := range l.Reloads {
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
	all := []named{{hostTier, p.Host}}
	if p.Peer != nil {
		all = append(all, named{peerTier, p.Peer})
	}
	return all
}

// loadColumns are the keys of a Load.
var loadColumns = []string{
	"load_s", "load_bytes_per_s", "queue_s", "launch_s", "copy_s", "notice_s", "wake_s", "queued_loads",
	"queued_bytes_per_s", "queued_copy_bytes_per_s", "raw_bytes_per_s", "batch_bytes_per_s", "raw_fraction", "copy_fraction", "plain_s", "plain_fraction",
}

// fileColumns are the keys of a FileLoad.
var fileColumns = []string{"page_cache", "load_s", "load_bytes_per_s", "cached_load_s", "cached_load_bytes_per_s", "queued_loads", "queued_bytes_per_s", "cached_queued_bytes_per_s", "raw_threads", "raw_bytes_per_s", "raw_fraction", "cached_raw_bytes_per_s", "cached_raw_fraction"}

// csv are the columns and the values of each point.
func (l *Loads) csv() (columns []string, rows [][]string) {
	columns = []string{"block_tokens", "models", "entry_bytes", "entries", "layout", "blocks", "bytes"}
	for _, s := range []string{hostTier, peerTier} {
		for _, c := range loadColumns {
			columns = append(columns, s+"_"+c)
		}
	}
	for _, c := range fileColumns {
		columns = append(columns, "file_"+c)
	}
	columns = append(columns, "file_directory", "speedup", "copy_speedup", "raw_speedup", "plain_speedup")
	ratio := func(v float64) string { // absent where JSON has no such key
		if v == 0 {
			return ""
		}
		return float(v)
	}
	for _, p := range l.Reloads {
		row := []string{strconv.Itoa(l.BlockTokens), strings.Join(p.Models, ";"), strconv.FormatInt(p.EntryBytes, 10), strconv.Itoa(p.Entries), string(p.Layout), strconv.Itoa(p.Blocks), strconv.FormatInt(p.Bytes, 10)}
		for _, x := range []*Load{p.Host, p.Peer} {
			if x == nil {
				row = append(row, make([]string, len(loadColumns))...)
				continue
			}
			row = append(row, float(x.Seconds), float(x.BytesPerSecond), float(x.Queue), float(x.Launch), float(x.Copy), float(x.Notice), float(x.Wake), strconv.Itoa(x.QueuedLoads),
				float(x.QueuedBytesPerSecond), float(x.QueuedCopyBytesPerSecond), float(x.RawBytesPerSecond), ratio(x.BatchBytesPerSecond), float(x.RawFraction), float(x.CopyFraction), float(x.PlainSeconds), float(x.PlainFraction))
		}
		if f := p.File; f != nil {
			row = append(row, string(f.PageCache), float(f.Seconds), float(f.BytesPerSecond), float(f.CachedSeconds), float(f.CachedBytesPerSecond), strconv.Itoa(f.QueuedLoads), float(f.QueuedBytesPerSecond),
				float(f.CachedQueuedBytesPerSecond), strconv.Itoa(f.RawThreads), ratio(f.RawBytesPerSecond), ratio(f.RawFraction), ratio(f.CachedRawBytesPerSecond), ratio(f.CachedRawFraction))
		} else {
			row = append(row, make([]string, len(fileColumns))...)
		}
		row = append(row, l.FileDirectory)
		rows = append(rows, append(row, ratio(p.Speedup), ratio(p.CopySpeedup), ratio(p.RawSpeedup), ratio(p.PlainSpeedup)))
	}
	return columns, rows
}

// figure is the time of a load of scattered blocks over the number of entries, from the host,
// from a peer and from files, in a panel for each size of entries. on names the devices; comparable: host
// and peer have rates.
func (l *Loads) figure(on string, comparable bool) *figure.Lines {
	chart := &figure.Lines{
		Title: "Time to load KV entries to the GPU",
		Note:  fmt.Sprintf("Single loads of scattered blocks of %d tokens, on %s", l.BlockTokens, on),
		X:     figure.Axis{Label: "KV entries (tokens)", Log: true},
	}
	for i := range l.Entries {
		e := &l.Entries[i]
		points := slices.DeleteFunc(l.of(e), func(p ReloadPoint) bool { return p.Layout != Scattered })
		slices.SortFunc(points, func(a, b ReloadPoint) int { return cmp.Compare(a.Entries, b.Entries) })
		if len(points) == 0 {
			continue
		}
		panel := figure.Panel{
			Title:  fmt.Sprintf("%s: %s per token", strings.Join(e.Models, ", "), eval.Size(e.Bytes)),
			Y:      figure.Axis{Label: "time of a load (ms)", Log: true},
			Height: panelHeight,
		}
		host := figure.Series{Name: "host memory", Look: figure.LookB, Line: true, Marks: true}
		peer := figure.Series{Name: "peer memory", Look: figure.LookA, Line: true, Marks: true}
		file := figure.Series{Name: l.filesName(), Look: figure.LookC, Line: true, Marks: true}
		cached := figure.Series{Name: "files in the page cache", Look: figure.LookD, Line: true, Marks: true}
		for _, p := range points {
			host.Points = append(host.Points, figure.Point{X: float64(p.Entries), Y: 1e3 * p.Host.Seconds})
			if p.Peer != nil {
				peer.Points = append(peer.Points, figure.Point{X: float64(p.Entries), Y: 1e3 * p.Peer.Seconds})
			}
			if f := p.File; f != nil {
				file.Points = append(file.Points, figure.Point{X: float64(p.Entries), Y: 1e3 * f.Seconds})
				cached.Points = append(cached.Points, figure.Point{X: float64(p.Entries), Y: 1e3 * f.CachedSeconds})
			}
		}
		first, last := points[0], points[len(points)-1]
		if first.Peer != nil && comparable {
			panel.Title += fmt.Sprintf("; host / peer: %.1f× to %.1f×", first.Speedup, last.Speedup)
		}
		panel.Series = legendOnce(len(chart.Panels), host, peer, file, cached)
		chart.Panels = append(chart.Panels, panel)
	}
	return chart
}

// panelHeight is that of one of several panels, in pixels.
const panelHeight = 150

// legendOnce are the series that have points, with names only in the first panel: the legend
// has them from there.
func legendOnce(panel int, series ...figure.Series) []figure.Series {
	series = slices.DeleteFunc(series, func(s figure.Series) bool { return len(s.Points) == 0 })
	for i := range series {
		if panel > 0 {
			series[i].Name = ""
		}
	}
	return series
}
