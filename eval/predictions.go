package eval

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"text/tabwriter"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/planner"
	"github.com/moeserve/moeserve/untrusted"
)

// Timing is the measured time of decode steps, or of the prefill, of a static batch.
type Timing struct {
	// Model is a preset or a directory, of whose layers there are so many; 0: all.
	Model  string `json:"model"`
	Layers int    `json:"layers"`
	// Fraction of the experts that is offloaded, Tier that they are fetched from, and Access how steps of
	// few tokens get at them. Default: auto.
	Fraction float64              `json:"fraction"`
	Tier     configs.Tier         `json:"tier"`
	Access   configs.ExpertAccess `json:"access"`
	// Kind is "decode" or "prefill"; timings of other kinds are not compared.
	Kind string `json:"kind"`
	// Sequences of a step; each has PromptTokens, and gets NewTokens. Defaults: 77 and 32. StepTokens is
	// the maximum of a prefill step. Default: 8192.
	Sequences    int `json:"sequences"`
	PromptTokens int `json:"prompt_tokens"`
	NewTokens    int `json:"new_tokens"`
	StepTokens   int `json:"step_tokens"`
	// ExpertsUsed is the experts of a layer that have rows in a step, a mean, and FetchedBytes those of offloaded
	// experts that a decode step copies or reads in place, where they were counted: the prediction is then for these,
	// and not for a router that selects every expert equally often.
	ExpertsUsed  float64 `json:"experts_used,omitempty"`
	FetchedBytes float64 `json:"fetched_bytes,omitempty"`
	// Seconds of a decode step, or of all prefill steps.
	Seconds float64 `json:"seconds"`
}

// The kinds of timings that are predicted.
const (
	DecodeKind  = "decode"
	PrefillKind = "prefill"
)

// EnsureDefaults fills in what is zero.
func (t Timing) EnsureDefaults() Timing {
	for _, f := range []struct {
		to    *int
		value int
	}{{&t.PromptTokens, 77}, {&t.NewTokens, 32}, {&t.StepTokens, 8192}} {
		if *f.to == 0 {
			*f.to = f.value
		}
	}
	return t
}

// ReadTimings reads timings, a JSON object a line (those of other kinds are left out), or the results of
// bench throughput and bench sweep, which have their predictions.
func ReadTimings(data []byte, name string) ([]Timing, []Predicted, error) {
	if lines, err := timingLines(data, name); err != nil || lines != nil {
		return lines, nil, err
	}
	results, err := parseResults(data)
	if err != nil {
		return nil, nil, Inputf("%s has neither timings, a JSON object with model, kind, sequences and seconds a line, nor results of bench sweep --json or bench throughput --json: %w", name, err)
	}
	var list []Predicted
	for i := range results {
		cells, err := results[i].predicted()
		if err != nil {
			return nil, nil, Inputf("%s: entry %d: %w", name, i+1, err)
		}
		list = append(list, cells...)
	}
	return nil, list, nil
}

// timingLines reads lines of timings; nil where the first line is none.
func timingLines(data []byte, name string) ([]Timing, error) {
	var list []Timing
	lines := bufio.NewScanner(bytes.NewReader(data))
	lines.Buffer(nil, untrusted.MaxData)
	n, first := 0, true
	for lines.Scan() {
		n++
		if len(bytes.TrimSpace(lines.Bytes())) == 0 {
			continue
		}
		var t Timing
		err := json.Unmarshal(lines.Bytes(), &t)
		switch {
		case first && (err != nil || t.Kind == ""):
			return nil, nil
		case err != nil:
			return nil, Inputf("%s: line %d: %w", name, n, untrusted.JSONError(lines.Bytes(), err))
		case t.Kind == "":
			return nil, Inputf("%s: line %d has no kind, which the lines before it have", name, n)
		}
		first = false
		if t.Kind == DecodeKind || t.Kind == PrefillKind {
			list = append(list, t.EnsureDefaults())
		}
	}
	return list, nil
}

// predicted is a result's mean decode step, and its prefill.
func (r *Result) predicted() ([]Predicted, error) {
	p := r.Prediction
	if p == nil {
		return nil, errors.New("it has no prediction, since the rates of its machine were not known; measure it with --hardware")
	}
	if !(r.DecodeTokS > 0) || !(r.PrefillTokS > 0) || r.steps() < 1 {
		return nil, errors.New("its steps take no time, or it has none: measure it on a GPU, or with rates in --emulate")
	}
	t := Timing{
		Model: r.Model, Fraction: r.OffloadFraction, Tier: r.Tier, Kind: DecodeKind,
		Sequences: r.Requests, PromptTokens: (r.PromptTokens + r.Requests/2) / r.Requests, NewTokens: r.steps() + 1, Seconds: float64(r.Requests) / r.DecodeTokS,
	}
	decode := newPredicted(&t, p.DecodeSeconds/float64(r.steps()), planner.Bound(p.Bound), p.GPUSeconds, p.LinkSeconds)
	t.Kind, t.Seconds = PrefillKind, float64(r.PromptTokens)/r.PrefillTokS
	prefill := newPredicted(&t, p.PrefillSeconds, planner.Bound(p.PrefillBound), 0, 0)
	decode.Machine, prefill.Machine = r.words(), r.words()
	return []Predicted{decode, prefill}, nil
}

// Predicted is a timing beside its prediction.
type Predicted struct {
	Timing
	// PredictedSeconds of the same, and Error by how much of the measured time it is longer.
	PredictedSeconds float64 `json:"predicted_s"`
	Error            float64 `json:"error"`
	// Machine is what a result's time is of, emulated devices named as such; empty for a timing.
	Machine string `json:"machine,omitempty"`
	// Bound of the predicted step. Apart: its compute and its copies differ by more than a factor of two.
	Bound planner.Bound `json:"bound"`
	Apart bool          `json:"apart"`
}

// Predictions are timings beside their predictions.
type Predictions struct {
	Run Run `json:"run"`
	// Hardware that timings are predicted for; empty where all cells are of results.
	Hardware string      `json:"hardware"`
	Cells    []Predicted `json:"cells"`
	// Errors of all cells, and of those that are apart.
	Errors      Errors `json:"errors"`
	ErrorsApart Errors `json:"errors_apart"`
}

// Errors are relative errors without their signs; 0 without cells.
type Errors struct {
	Cells  int     `json:"cells"`
	Median float64 `json:"median"`
	Worst  float64 `json:"worst"`
}

// newPredicted is a timing beside its prediction, of a step that takes so long on the GPU and on its
// busiest link.
func newPredicted(t *Timing, seconds float64, bound planner.Bound, gpu, link float64) Predicted {
	return Predicted{Timing: *t, PredictedSeconds: seconds, Error: seconds/t.Seconds - 1, Bound: bound, Apart: link > 2*gpu || gpu > 2*link}
}

// Predict compares timings with a planner's predictions of them.
func Predict(list []Timing, predict func(*Timing) (planner.Prediction, error)) ([]Predicted, error) {
	var cells []Predicted
	for i := range list {
		t := &list[i]
		if t.Sequences < 1 || !(t.Seconds > 0) {
			return nil, Inputf("timing %d, of %s: %d sequences take %v s: both must be above 0", i+1, untrusted.Name(t.Model), t.Sequences, t.Seconds)
		}
		r, err := predict(t)
		if err != nil {
			return nil, fmt.Errorf("timing %d, of %s with %d sequences: %w", i+1, untrusted.Name(t.Model), t.Sequences, err)
		}
		step, seconds := &r.Decode, r.Decode.Seconds
		if t.Kind == PrefillKind {
			step, seconds = &r.Prefill, r.PrefillSeconds
		}
		cells = append(cells, newPredicted(t, seconds, step.Bound, step.GPU, max(step.HostLink, step.PeerLink)))
	}
	return cells, nil
}

// NewPredictions sums up cells.
func NewPredictions(run Run, hardware string, cells []Predicted) *Predictions {
	p := &Predictions{Run: run, Hardware: hardware, Cells: cells}
	var all, apart []float64
	for i := range cells {
		e := math.Abs(cells[i].Error)
		all = append(all, e)
		if cells[i].Apart {
			apart = append(apart, e)
		}
	}
	p.Errors, p.ErrorsApart = errorsOf(all), errorsOf(apart)
	return p
}

func errorsOf(list []float64) Errors {
	if len(list) == 0 {
		return Errors{}
	}
	return Errors{Cells: len(list), Median: Median(list), Worst: slices.Max(list)}
}

// WritePredictions writes a line for each cell for a person.
func WritePredictions(out io.Writer, p *Predictions) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprint(w, "model\tlayers\toffloaded\tsequences\tstep\tmeasured, ms\tpredicted, ms\terror\tbound by\n")
	for i := range p.Cells {
		c := &p.Cells[i]
		layers, offloaded := "all", "-"
		if c.Layers > 0 {
			layers = strconv.Itoa(c.Layers)
		}
		if c.Fraction > 0 {
			offloaded = fmt.Sprintf("%.4g %% %s, %s", 100*c.Fraction, c.Tier, c.Access)
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%d\t%s\t%.4g\t%.4g\t%+.1f %%\t%s\n",
			untrusted.Name(c.Model), layers, offloaded, c.Sequences, c.Kind, 1e3*c.Seconds, 1e3*c.PredictedSeconds, 100*c.Error, c.Bound.Text())
	}
	if err := w.Flush(); err != nil {
		return err
	}
	var of []string
	for i := range p.Cells {
		if m := p.Cells[i].Machine; m != "" && !slices.Contains(of, m) {
			of = append(of, m)
		}
	}
	for _, m := range of {
		if _, err := fmt.Fprintf(out, "\nresults of: %s", untrusted.Line(m)); err != nil {
			return err
		}
	}
	hardware := p.Hardware
	if hardware == "" {
		hardware = "of the results"
	}
	_, err := fmt.Fprintf(out, "\nhardware: %s\nerrors of %d cells: median %.1f %%, worst %.1f %%; of %d whose compute and copies differ by more than a factor of two: median %.1f %%, worst %.1f %%\n",
		untrusted.Name(hardware), p.Errors.Cells, 100*p.Errors.Median, 100*p.Errors.Worst, p.ErrorsApart.Cells, 100*p.ErrorsApart.Median, 100*p.ErrorsApart.Worst)
	return err
}
