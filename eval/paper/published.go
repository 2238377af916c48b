package paper

import (
	"fmt"
	"strings"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/eval"
	"github.com/moeserve/moeserve/untrusted"
)

// The batch that the paper measures: micro-batches of MicroBatch sequences, and of each sequence
// NewTokens tokens (section 4.4).
const (
	Sequences  = 4536
	MicroBatch = 324
	NewTokens  = 32
	Warmup     = 50
	Trials     = 5
)

// Models are the presets of its models, in the order of its Table 1; Fractions are the offload fractions that
// Figure 6 is measured at here.
var (
	Models    = []string{"mixtral-8x7b", "phi-3.5-moe", "phi-tiny-moe", "qwen1.5-moe-a2.7b"}
	Fractions = []float64{0, 0.25, 0.5, 0.75, 1}
)

// harvest names the paper, machine what it measured on (section 2.2).
const (
	harvest = "Harvest paper"
	machine = "2 H100, 12 NVLinks, PCIe 5"
)

// share of the machines, 0 to 1, that use at most so much of their GPUs' memory: Figure 2.
type share struct{ memory, machines float64 }

var shares = []share{{0.2, 0.68}, {0.5, 0.87}}

// fetchRatios are the times to fetch an expert from the host over those from the peer: Figure 3. The
// names are those of eval.ExpertSizes.
var fetchRatios = map[string]float64{"Phi-tiny-MoE": 7.5, "Mixtral-8x7B": 9.5}

// The gain of peer over host memory with half of the experts offloaded: Figure 5, the least and
// the greatest of four models, as the text has them.
const (
	gainFraction = 0.5
	leastGain    = 0.48
	largestGain  = 1.10
)

// rates are tokens/s of a model with nothing offloaded or all from the peer, which are alike, and with all
// offloaded to the host: Figure 6. atMost: the text says only that it is below.
type rates struct {
	model      string
	peer, host float64
	atMost     bool
}

var throughput = []rates{{"Qwen2-MoE", 975, 810, false}, {"Mixtral", 740, 600, true}}

// differs is what the paper's setting has otherwise than what is measured here.
const differs = "The paper: " + machine + ", experts once per micro-batch, steps of 5 to 6 s, most likely bound by attention on the CPU."

// origin says where results are from.
func origin(run *eval.Run, m *eval.Machine) string {
	switch {
	case !m.Emulated:
		commit := run.Commit
		if len(commit) > 12 {
			commit = commit[:12]
		}
		if run.Modified {
			commit += " with changes"
		}
		if commit == "" {
			commit = "unknown commit"
		}
		return fmt.Sprintf("Measured on %s, %s", untrusted.Name(m.Device), commit)
	case m.Emulation != nil && m.Emulation.Rates == eval.RatesVirtual:
		return "Predicted, in virtual time, of " + rateText(m.Emulation.Spec)
	}
	return "Emulated devices: " + m.EmulatedNote()
}

// rateText are the rates in a value of --emulate.
func rateText(spec string) string {
	var rates []string
	for _, part := range strings.Split(spec, ",") {
		if strings.Contains(part, "/s") || strings.HasPrefix(part, "hbm") || strings.HasPrefix(part, "flops") || strings.HasPrefix(part, "cpuflops") || strings.Contains(part, "latency") {
			rates = append(rates, untrusted.Name(strings.TrimSpace(part)))
		}
	}
	return strings.Join(rates, ", ")
}

// common says of several results where they are from. They must be all measured, or all emulated alike.
func common(results []eval.Result) (string, error) {
	if len(results) == 0 {
		return "", eval.Inputf("paper: no results to draw")
	}
	first := origin(&results[0].Run, &results[0].Machine)
	for i := range results {
		if r := &results[i]; r.Emulated != results[0].Emulated || r.Unpaced() != results[0].Unpaced() {
			return "", eval.Inputf("paper: results of %s on %s stand beside some of %s on %s: draw measured and predicted ones apart",
				r.Model, origin(&r.Run, &r.Machine), results[0].Model, first)
		}
		if r := &results[i]; r.Unpaced() {
			return "", eval.Inputf("paper: emulated devices without rates copy as fast as this CPU does: give --emulate rates, with virtual or pace")
		}
	}
	return first, nil
}

// setting is how results ran, for the note.
func setting(r *eval.Result) string {
	where := "the GPU"
	if r.Attention == configs.OnCPU {
		where = "the CPU"
	}
	return fmt.Sprintf("batches of %d sequences in %d micro-batches, experts once per %s, attention on %s", r.Requests, r.NumMicroBatches, r.ExpertGrouping, where)
}
