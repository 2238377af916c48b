package paper

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/eval"
	"github.com/moeserve/moeserve/eval/figure"
	"github.com/moeserve/moeserve/untrusted"
)

// Figure3 draws how many times as long one expert of each model takes from the host as from the peer,
// beside the paper's two numbers.
func Figure3(r *eval.TransferResult) (*figure.Bars, error) {
	chart := &figure.Bars{
		Title:  "Time to fetch one expert: host over peer",
		Note:   "Figure 3 of the Harvest paper: single copies of the size of an expert in 16 bit. " + origin(&r.Run, &r.Machine),
		X:      figure.Axis{Label: "time from host memory / time from a peer (×)"},
		Series: []string{"moeserve", harvest + " (" + machine + ")"},
		Value:  func(v float64) string { return strconv.FormatFloat(v, 'f', 1, 64) + "×" },
	}
	drawn := 0
	models, bytes := eval.ExpertSizes()
	for i, model := range models {
		ours, ok := r.Ratio(bytes[i])
		published, has := fetchRatios[model]
		if !ok && !has {
			continue
		}
		if ok {
			drawn++
		} else {
			ours = math.NaN()
		}
		if !has {
			published = math.NaN()
		}
		chart.Groups = append(chart.Groups, figure.Group{Name: model + ", " + eval.Size(bytes[i]), Values: []float64{ours, published}})
	}
	if drawn == 0 {
		return nil, eval.Inputf("paper: no copies of the size of an expert from host and peer, or emulated devices without rates: give --emulate rates, with virtual or pace")
	}
	return chart, nil
}

// Figure5 draws the gain of peer over host memory with half of the experts offloaded, by model, and
// the range that the paper states.
func Figure5(results []eval.Result) (*figure.Bars, error) {
	from, err := common(results)
	if err != nil {
		return nil, err
	}
	chart := &figure.Bars{
		Title:  "Gain of peer over host memory, half of the experts offloaded",
		Note:   fmt.Sprintf("Figure 5 of the Harvest paper. %s. %s", from, differs),
		X:      figure.Axis{Label: "gain in tokens/s (%)"},
		Series: []string{"decode", "end to end", harvest},
		Value:  func(v float64) string { return strings.Replace(fmt.Sprintf("%+.0f %%", v), "-", "−", 1) },
	}
	for _, g := range eval.Gains(results, gainFraction) {
		chart.Groups = append(chart.Groups, figure.Group{Name: untrusted.Name(g.Model), Values: []float64{100 * g.Decode, 100 * g.EndToEnd, math.NaN()}})
	}
	if len(chart.Groups) == 0 {
		return nil, eval.Inputf("paper: Figure 5 needs results at fraction %v from host and peer", gainFraction)
	}
	for _, x := range []struct {
		name string
		gain float64
	}{{harvest + ", least of four models", leastGain}, {harvest + ", most", largestGain}} {
		chart.Groups = append(chart.Groups, figure.Group{Name: x.name, Values: []float64{math.NaN(), math.NaN(), 100 * x.gain}})
	}
	return chart, nil
}

// Figure6 draws decode throughput over the offload fraction, a panel for each model, and one with the
// paper's numbers.
func Figure6(results []eval.Result) (*figure.Lines, error) {
	from, err := common(results)
	if err != nil {
		return nil, err
	}
	chart := &figure.Lines{
		Title: "Decode throughput over the offload fraction",
		Note:  fmt.Sprintf("Figure 6 of the Harvest paper. %s. %s", from, differs),
		X:     figure.Axis{Label: "experts offloaded (% of all)", From: 0, To: 100},
	}
	var models []string
	for _, r := range results {
		if !slices.Contains(models, r.Model) {
			models = append(models, r.Model)
		}
	}
	for i, model := range models {
		panel := figure.Panel{Title: untrusted.Name(model), Y: figure.Axis{Label: "tokens/s", From: 0}, Height: panelHeight}
		for _, tier := range []struct {
			tier configs.Tier
			look figure.Look
		}{{configs.PeerTier, figure.LookA}, {configs.HostTier, figure.LookB}} {
			s := figure.Series{Look: tier.look, Line: true, Marks: true}
			if i == 0 {
				s.Name = "from " + tier.tier.String()
			}
			for _, r := range results {
				if r.Model == model && !r.AllPaths && (r.Tier == tier.tier || r.Tier == configs.NoTier) {
					p := figure.Point{X: 100 * r.OffloadFraction, Y: r.DecodeTokS}
					if r.DecodeStddevTokS != nil {
						p.Deviation = *r.DecodeStddevTokS
					}
					s.Points = append(s.Points, p)
				}
			}
			slices.SortStableFunc(s.Points, func(a, b figure.Point) int { return cmp.Compare(a.X, b.X) })
			if len(s.Points) > 0 {
				panel.Series = append(panel.Series, s)
			}
		}
		chart.Panels = append(chart.Panels, panel)
	}
	for _, r := range throughput {
		title := fmt.Sprintf("%s: %s", harvest, r.model)
		if r.atMost {
			title += fmt.Sprintf(" (from the host: below %g)", r.host)
		}
		chart.Panels = append(chart.Panels, figure.Panel{
			Title: title, Y: figure.Axis{Label: "tokens/s", From: 0}, Height: panelHeight,
			Series: []figure.Series{
				{Look: figure.LookA, Marks: true, Points: []figure.Point{{X: 0, Y: r.peer}, {X: 100, Y: r.peer}}},
				{Look: figure.LookB, Marks: true, Points: []figure.Point{{X: 100, Y: r.host}}},
			},
		})
	}
	return chart, nil
}

const panelHeight = 130
