package paper

import (
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/tenants"
	"github.com/moeserve/moeserve/eval"
	"github.com/moeserve/moeserve/eval/figure"
)

// Memory is the share of their GPU memory that machines use, over time. It has a JSON form.
type Memory struct {
	Name string `json:"name"`
	// Machines that the trace has, and Snapshots: one of each of them every EverySeconds.
	Machines     int     `json:"machines"`
	Snapshots    int     `json:"snapshots"`
	EverySeconds float64 `json:"every_s"`
	// AtMost20 and AtMost50 are the shares of the snapshots, 0 to 1, in which at most 20 and 50 % of the
	// memory are in use.
	AtMost20 float64 `json:"at_most_20_percent"`
	AtMost50 float64 `json:"at_most_50_percent"`
	// Over is the use over time.
	Over []MemoryAt `json:"over_time"`

	// Shares of the memory in all snapshots, 0 to 1, in ascending order.
	Shares []float64 `json:"-"`
}

// MemoryAt is the use of all machines at one time: shares of their memory, 0 to 1.
type MemoryAt struct {
	Seconds float64 `json:"at_s"`
	Mean    float64 `json:"mean"`
	Median  float64 `json:"median"`
	P90     float64 `json:"p90"`
}

// ReadMemory takes a snapshot of each machine of a trace every so often, from 0 to until. capacity is each
// machine's memory in bytes; more than that in use counts as all of it.
func ReadMemory(name string, t tenants.Trace, capacity map[device.Space]int64, every, until time.Duration) (*Memory, error) {
	if every <= 0 || until < 0 || until/every > 1<<20 {
		return nil, eval.Inputf("paper: snapshots every %v for %v: must be 1 to %d of them", every, until, 1<<20)
	}
	m := &Memory{Name: name, EverySeconds: every.Seconds()}
	level := map[device.Space]float64{}
	next := 0
	for at := time.Duration(0); at <= until; at += every {
		for ; next < len(t) && t[next].At <= at; next++ {
			s := t[next]
			all := capacity[s.Peer]
			if all <= 0 {
				return nil, eval.Inputf("paper: the memory of machine %v of %s is not known", s.Peer, name)
			}
			level[s.Peer] = min(float64(s.Bytes)/float64(all), 1)
		}
		now := make([]float64, 0, len(level))
		for _, x := range level {
			now = append(now, x)
		}
		if len(now) == 0 {
			return nil, eval.Inputf("paper: %s has no sample at its start", name)
		}
		slices.Sort(now) // so that the mean is the same each time
		x := MemoryAt{Seconds: at.Seconds(), Median: eval.Median(now), P90: eval.Percentile(now, 90)}
		for _, v := range now {
			x.Mean += v / float64(len(now))
		}
		m.Over, m.Shares, m.Machines = append(m.Over, x), append(m.Shares, now...), len(now)
	}
	slices.Sort(m.Shares)
	m.Snapshots = len(m.Shares)
	m.AtMost20, m.AtMost50 = m.atMost(0.2), m.atMost(0.5)
	return m, nil
}

// atMost is the share of the snapshots with at most so much in use.
func (m *Memory) atMost(share float64) float64 {
	n, _ := slices.BinarySearch(m.Shares, math.Nextafter(share, 2))
	return float64(n) / float64(len(m.Shares))
}

// looks of traces; the paper has the last.
var looks = []figure.Look{figure.LookA, figure.LookB, figure.LookC}

func checkMemories(of []*Memory) error {
	if len(of) == 0 || len(of) > len(looks) {
		return eval.Inputf("paper: %d traces to draw: must be 1 to %d", len(of), len(looks))
	}
	return nil
}

// Figure2 draws the distribution of the memory in use, beside the paper's two numbers.
func Figure2(of []*Memory) (*figure.Lines, error) {
	if err := checkMemories(of); err != nil {
		return nil, err
	}
	panel := figure.Panel{Y: figure.Axis{Label: "machines that use at most as much (% of all, over time)", From: 0, To: 100}}
	for i, m := range of {
		s := figure.Series{Name: m.Name, Look: looks[i], Line: true}
		for x := range 101 {
			s.Points = append(s.Points, figure.Point{X: float64(x), Y: 100 * m.atMost(float64(x)/100)})
		}
		panel.Series = append(panel.Series, s)
	}
	published := figure.Series{Name: "Harvest paper: Alibaba gpu-v2020, 959,080 snapshots", Look: figure.LookD, Marks: true}
	chart := &figure.Lines{
		Title: "GPU memory in use", Note: "Figure 2 of the Harvest paper. " + snapshots(of),
		X: figure.Axis{Label: "GPU memory in use (% of a machine's)", From: 0, To: 100},
	}
	for _, s := range shares {
		published.Points = append(published.Points, figure.Point{X: 100 * s.memory, Y: 100 * s.machines})
	}
	panel.Series = append(panel.Series, published)
	chart.Panels = []figure.Panel{panel}
	return chart, nil
}

// Figure2OverTime draws the memory in use over time, a panel for each trace.
func Figure2OverTime(of []*Memory) (*figure.Lines, error) {
	if err := checkMemories(of); err != nil {
		return nil, err
	}
	chart := &figure.Lines{Title: "GPU memory in use over time", Note: snapshots(of), X: figure.Axis{Label: "time (hours)"}}
	for i, m := range of {
		mean := figure.Series{Name: "mean of the machines", Look: figure.LookA, Line: true}
		median := figure.Series{Name: "median", Look: figure.LookB, Line: true}
		high := figure.Series{Name: "90th percentile", Look: figure.LookC, Line: true}
		for _, x := range m.Over {
			h := x.Seconds / 3600
			mean.Points = append(mean.Points, figure.Point{X: h, Y: 100 * x.Mean})
			median.Points = append(median.Points, figure.Point{X: h, Y: 100 * x.Median})
			high.Points = append(high.Points, figure.Point{X: h, Y: 100 * x.P90})
		}
		if i > 0 {
			mean.Name, median.Name, high.Name = "", "", "" // the legend has them
		}
		chart.Panels = append(chart.Panels, figure.Panel{
			Title: m.Name, Y: figure.Axis{Label: "memory in use (%)", From: 0, To: 100}, Series: []figure.Series{mean, median, high}, Height: 200,
		})
	}
	return chart, nil
}

// snapshots says what was looked at.
func snapshots(of []*Memory) string {
	text := ""
	for i, m := range of {
		if i > 0 {
			text += "; "
		}
		text += fmt.Sprintf("%s: %d machines every %v", m.Name, m.Machines, time.Duration(m.EverySeconds*float64(time.Second)))
	}
	return text
}
