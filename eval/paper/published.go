package paper

import (
	"fmt"
	"strings"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/eval"
	"github.com/moeserve/moeserve/untrusted"
)

// The batch that the paper measures: sequences, in micro-batches of so many (section 4.4). Its 32 new
// tokens, 50 warm-up tokens and 5 trials are the defaults of measurements.
const (
	Sequences  = 4536
	MicroBatch = 324
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
	if m.Emulated {
		return place(m)
	}
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
	return place(m) + ", " + commit
}

// place is what results were measured on, or predicted of.
func place(m *eval.Machine) string {
	switch {
	case !m.Emulated:
		return "Measured on " + untrusted.Name(m.Device)
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

// common says of several results where they are from, and how they ran. They must be all measured, or
// all predicted, or all of paced devices, of one machine, and have run in the same way.
func common(results []eval.Result) (string, error) {
	if len(results) == 0 {
		return "", eval.Inputf("paper: no results to draw")
	}
	first := &results[0]
	text := origin(&first.Run, &first.Machine)
	commits := false
	for i := range results {
		r := &results[i]
		switch {
		case r.Unpaced():
			return "", eval.Inputf("paper: emulated devices without rates copy as fast as this CPU does: give --emulate rates, with virtual or pace")
		case kind(&r.Machine) != kind(&first.Machine):
			return "", eval.Inputf("paper: %s (%s) stands beside %s (%s): draw measured and predicted ones apart", r.Model, origin(&r.Run, &r.Machine), first.Model, text)
		case place(&r.Machine) != place(&first.Machine):
			return "", eval.Inputf("paper: %s is of another machine (%s) than %s (%s): draw them apart", r.Model, place(&r.Machine), first.Model, place(&first.Machine))
		case setting(r) != setting(first):
			return "", eval.Inputf("paper: %s ran with %s, and %s with %s: draw them apart", r.Model, setting(r), first.Model, setting(first))
		}
		commits = commits || r.Run.Commit != first.Run.Commit
	}
	if commits {
		text += " and other commits"
	}
	return text + "; " + setting(first), nil
}

// kind is what the times of a machine are: "", those of a GPU.
func kind(m *eval.Machine) eval.Rates {
	if m.Emulation == nil {
		return ""
	}
	return m.Emulation.Rates
}

// setting is how results ran, for the note.
func setting(r *eval.Result) string {
	where := "the GPU"
	if r.Attention == configs.OnCPU {
		where = "the CPU"
	}
	text := fmt.Sprintf("batches of %d sequences in %d micro-batches, experts once per %s, attention on %s", r.Requests, r.NumMicroBatches, r.ExpertGrouping, where)
	if r.Setting != "" {
		text += ", " + untrusted.Name(r.Setting)
	}
	return text
}
