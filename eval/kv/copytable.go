package kv

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/moeserve/moeserve/eval"
	"github.com/moeserve/moeserve/eval/figure"
)

// group is the points of a tier and a direction.
type group struct {
	tier      string
	direction Direction
	points    []CopyPoint
}

// groups are those that there are points of, in the points' order.
func (s *Sizes) groups() []group {
	var all []group
	for _, p := range s.Copies {
		i := slices.IndexFunc(all, func(g group) bool { return g.tier == p.Tier && g.direction == p.Direction })
		if i < 0 {
			i = len(all)
			all = append(all, group{tier: p.Tier, direction: p.Direction})
		}
		all[i].points = append(all[i].points, p)
	}
	return all
}

// title names the copies of a group.
func (g *group) title() string {
	return map[Direction]string{
		LoadDirection: "loads from " + g.tier + " memory", StoreDirection: "stores to " + g.tier + " memory",
		BothDirections: "loads from and stores to " + g.tier + " memory at once",
	}[g.direction]
}

// methods that points have.
func (g *group) methods() []Method {
	var all []Method
	for _, p := range g.points {
		if !slices.Contains(all, p.Method) {
			all = append(all, p.Method)
		}
	}
	return all
}

// of are a group's points of a method, by size.
func (g *group) of(m Method) []CopyPoint {
	points := slices.DeleteFunc(slices.Clone(g.points), func(p CopyPoint) bool { return p.Method != m })
	slices.SortStableFunc(points, func(a, b CopyPoint) int { return cmp.Compare(a.BlockBytes, b.BlockBytes) })
	return points
}

// table writes a part for each tier and direction, with a line for each size. emulated: the
// devices are.
func (s *Sizes) table(b *strings.Builder, emulated bool) {
	for _, g := range s.groups() {
		methods := g.methods()
		fmt.Fprintf(b, "%s\n", g.title())
		w := tabwriter.NewWriter(b, 0, 0, 2, ' ', tabwriter.AlignRight)
		fmt.Fprint(w, "block\tblocks\t")
		for _, m := range methods {
			fmt.Fprintf(w, "%s ms\tGB/s\t", m)
		}
		fmt.Fprintln(w)
		for i, p := range g.of(methods[0]) {
			fmt.Fprintf(w, "%s\t%d\t", eval.Size(p.BlockBytes), p.Blocks)
			for _, m := range methods {
				q := g.of(m)[i]
				fmt.Fprintf(w, "%.4g\t%.4g\t", 1e3*q.Seconds, q.BytesPerSecond/1e9)
			}
			fmt.Fprintln(w)
		}
		w.Flush() //nolint:errcheck // writing to memory does not fail
		if i := slices.IndexFunc(s.Crossovers, func(c Crossover) bool { return c.Tier == g.tier && c.Direction == g.direction }); i >= 0 {
			fmt.Fprintf(b, "%s\n", s.Crossovers[i].words(g.of(methods[0])))
		}
		b.WriteString("\n")
	}
	b.WriteString("ms, GB/s (10^9 bytes/s): all blocks, scattered in both memories, median; of both directions GB/s is their sum\n" +
		"dma: a copy of the device for each block; batch: one call of the driver for all; kernel: one launch of a kernel that copies all of them")
	if s.ThreadBlocks > 0 {
		fmt.Fprintf(b, ", on %d thread blocks", s.ThreadBlocks)
	}
	b.WriteString("\n")
	if emulated && slices.ContainsFunc(s.Copies, func(p CopyPoint) bool { return p.Method == Kernel }) {
		b.WriteString(noLinks + "\n")
	}
}

// noLinks is why methods do not compare on emulated devices.
const noLinks = "emulated devices do not model a kernel's copies over links: its times are those of GPU memory, and do not compare with DMA"

// words say it to a person; points are those of the tier and direction.
func (c Crossover) words(points []CopyPoint) string {
	switch {
	case c.KernelBelowBytes == 0:
		return "the kernel pays at no size: it is never 1.5 times as fast as the copy engines"
	case c.KernelBelowBytes > points[len(points)-1].BlockBytes:
		return "the kernel pays up to the largest size"
	}
	return "the kernel pays below " + eval.Size(c.KernelBelowBytes) + ": it is at least 1.5 times as fast as the copy engines"
}

// csv are the columns and the values of each point.
func (s *Sizes) csv() (columns []string, rows [][]string) {
	columns = []string{"thread_blocks", "tier", "direction", "method", "block_bytes", "blocks", "bytes", "copy_s", "bytes_per_s"}
	for _, p := range s.Copies {
		rows = append(rows, []string{
			strconv.Itoa(s.ThreadBlocks), p.Tier, string(p.Direction), string(p.Method), strconv.FormatInt(p.BlockBytes, 10),
			strconv.Itoa(p.Blocks), strconv.FormatInt(p.Bytes, 10), float(p.Seconds), float(p.BytesPerSecond),
		})
	}
	return columns, rows
}

// figure is the rate of copies over the size of blocks, a line for each method, in a panel for
// each tier and direction. on names the devices; emulated: they are.
func (s *Sizes) figure(on string, emulated bool) *figure.Lines {
	most := 0
	for _, p := range s.Copies {
		most = max(most, p.Blocks)
	}
	chart := &figure.Lines{
		Title: "Rate of copies of KV blocks by block size",
		Note:  fmt.Sprintf("%d scattered blocks, fewer large ones, on %s", most, on),
		X:     figure.Axis{Label: "size of a block (KiB)", Log: true},
	}
	if emulated {
		chart.Note += "; " + noLinks
	}
	for _, g := range s.groups() {
		panel := figure.Panel{Title: g.title(), Y: figure.Axis{Label: "GB/s", Log: true}, Height: panelHeight}
		dma := figure.Series{Name: "DMA", Look: figure.LookA, Line: true, Marks: true}
		batch := figure.Series{Name: "batched DMA", Look: figure.LookC, Line: true, Marks: true}
		kernel := figure.Series{Name: "copy kernel", Look: figure.LookB, Line: true, Marks: true}
		for m, series := range map[Method]*figure.Series{DMA: &dma, Batch: &batch, Kernel: &kernel} {
			for _, p := range g.of(m) {
				series.Points = append(series.Points, figure.Point{X: float64(p.BlockBytes) / 1024, Y: p.BytesPerSecond / 1e9})
			}
		}
		panel.Series = legendOnce(len(chart.Panels), dma, batch, kernel)
		chart.Panels = append(chart.Panels, panel)
	}
	return chart
}
