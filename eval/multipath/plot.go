package multipath

import (
	"fmt"
	"io"

	"github.com/moeserve/moeserve/eval/figure"
)

// panelHeight of a figure's panels, in pixels.
const panelHeight = 200

// Chart is a figure.
type Chart interface {
	// Write writes it in a format of figure.Formats.
	Write(out io.Writer, format string) error
}

// Figures are those of the parts that were measured, by the names of their files without ending.
func (r *Result) Figures() map[string]Chart {
	on := r.Device
	if r.Emulated {
		on = r.EmulatedNote()
	}
	figures := map[string]Chart{}
	if r.Static != nil {
		figures["multipath-static"] = r.Static.figure(on)
	}
	if r.Relay != nil {
		figures["multipath-relay"] = r.Relay.figure(on)
	}
	if r.Sizes != nil {
		figures["multipath-sizes"] = r.Sizes.figure(on)
	}
	if r.GPUs != nil {
		figures["multipath-gpus"] = r.GPUs.figure(on)
	}
	if r.Traffic != nil {
		figures["multipath-traffic"] = r.Traffic.figure(on)
	}
	if r.CPU != nil {
		figures["multipath-cpu"] = r.CPU.figure(on)
	}
	if r.Chunks != nil {
		figures["multipath-chunks"] = r.Chunks.figure(on)
	}
	if r.Threshold != nil {
		figures["multipath-threshold"] = r.Threshold.figure(on)
	}
	if r.Direct != nil {
		figures["multipath-direct"] = r.Direct.figure(on)
	}
	return figures
}

func (s *Static) figure(on string) *figure.Lines {
	chart := &figure.Lines{
		Title: "Copies between host memory and one GPU by the number of paths",
		Note:  fmt.Sprintf("Static split of %s in chunks of %s, on %s", size(s.Bytes), size(s.ChunkBytes), on),
		X:     figure.Axis{Label: "paths (PCIe links)"},
	}
	for _, d := range directions {
		split := figure.Series{Name: "static split", Look: figure.LookA, Line: true, Marks: true}
		own := figure.Series{Name: "the same GPUs, each copying its own data", Look: figure.LookB, Line: true, Marks: true}
		for _, p := range s.of(d) {
			x := float64(p.Paths)
			split.Points = append(split.Points, figure.Point{X: x, Y: p.BytesPerSecond / 1e9})
			own.Points = append(own.Points, figure.Point{X: x, Y: p.Own / 1e9})
		}
		chart.Panels = append(chart.Panels, panel(len(chart.Panels), d, split, own))
	}
	return chart
}

func (x *RelayCopies) figure(on string) *figure.Lines {
	chart := &figure.Lines{
		Title: "Copies over one relay by chunk size",
		Note:  fmt.Sprintf("%s over %s alone, on %s", size(x.Bytes), x.Relay, on),
		X:     figure.Axis{Label: "size of a chunk (MiB)", Log: true},
	}
	for _, d := range directions {
		var series []figure.Series
		at := map[int]int{}
		for _, p := range x.Points {
			if p.Direction != d {
				continue
			}
			i, ok := at[p.Depth]
			if !ok {
				i = len(series)
				at[p.Depth] = i
				series = append(series, figure.Series{Name: fmt.Sprintf("buffers: %d", p.Depth), Look: looks[i%len(looks)], Line: true, Marks: true})
			}
			series[i].Points = append(series[i].Points, figure.Point{X: float64(p.ChunkBytes) / (1 << 20), Y: p.BytesPerSecond / 1e9})
		}
		chart.Panels = append(chart.Panels, panel(len(chart.Panels), d, series...))
	}
	return chart
}

var looks = []figure.Look{figure.LookA, figure.LookB, figure.LookC, figure.LookD, figure.LookPlain}

// panel has the rates of a direction; only the first panel of a chart names its series.
func panel(number int, d Direction, series ...figure.Series) figure.Panel {
	if number > 0 {
		for i := range series {
			series[i].Name = ""
		}
	}
	return figure.Panel{Title: d.words(), Y: figure.Axis{Label: "GB/s"}, Series: series, Height: panelHeight}
}
