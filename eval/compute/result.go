package compute

import (
	"encoding/csv"
	"fmt"
	"io"
	"slices"
	"strconv"
	"text/tabwriter"

	"github.com/moeserve/moeserve/eval"
	"github.com/moeserve/moeserve/planner"
)

// Result is a measurement with what was fitted to it.
type Result struct {
	Run eval.Run `json:"run"`
	eval.Machine
	Points []Point `json:"points"`
	// Compute is the fit, Fitted its errors at the points.
	Compute *planner.Compute `json:"compute"`
	Fitted  Fitted           `json:"fitted"`
}

// Fit fits the points, of a GPU whose rates are those of the base.
func (r *Result) Fit(base *planner.Hardware) (err error) {
	r.Compute, r.Fitted, err = Fit(r.Points, base)
	return err
}

// Calibrate is the hardware with what was measured.
func Calibrate(r *Result, c eval.Calibration) (planner.Hardware, error) {
	h := c.Start(&r.Machine)
	by := eval.MeasuredBy
	if r.Emulated {
		by = eval.EmulatedBy
	}
	h.Compute = r.Compute
	h.Sources["compute"] = fmt.Sprintf("%skernels: %d steps of models of generic shapes, which the fit describes with a median error of %.1f %%", by, len(r.Points), 100*r.Fitted.Median)
	if err := h.Validate(); err != nil {
		return h, fmt.Errorf("eval: %w", err)
	}
	return h, nil
}

// rate is what takes seconds in 10^12 a second.
func rate(what, seconds float64) string {
	if seconds == 0 {
		return "-"
	}
	return strconv.FormatFloat(what/seconds/1e12, 'g', 3, 64)
}

// WriteTable writes what was fitted, by rows, for a person.
func WriteTable(out io.Writer, r *Result) error {
	if _, err := io.WriteString(out, eval.Header(&r.Run, &r.Machine)); err != nil {
		return err
	}
	c, weight := r.Compute, 0.0
	for i := range r.Points {
		weight = float64(r.Points[i].Model.EnsureDefaults().WeightBytes)
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(w, "rows\tlayer, µs\tenqueued, µs\tdense TB/s\tTFLOP/s\texperts TB/s\tTFLOP/s\toutput TB/s\tTFLOP/s\t\n")
	for _, n := range c.Dense.At {
		fmt.Fprintf(w, "%v\t%.1f\t%.1f\t", n, 1e6*c.Decode.Layer.Value(n), 1e6*c.Enqueued.Layer.Value(n))
		for _, x := range []planner.Curve{c.Dense, c.Experts, c.Head} {
			fmt.Fprintf(w, "%s\t%s\t", rate(weight, x.Value(n)), rate(2*n, x.Value(n)))
		}
		fmt.Fprintln(w)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	_, err := fmt.Fprintf(out, `
layer: fixed cost of a layer of a decode step that is a CUDA graph; enqueued: of one whose kernels the host enqueues;
TB/s and TFLOP/s: of weights, each read once, and of their operations; experts: rows of one expert;
%d steps were measured, which this describes with a median error of %.1f %%, at most %.1f %%
`, len(r.Points), 100*r.Fitted.Median, 100*r.Fitted.Worst)
	return err
}

// WriteCSV writes a line per step that was measured.
func WriteCSV(out io.Writer, r *Result) error {
	w := csv.NewWriter(out)
	w.Write(append(slices.Clone(eval.ProvenanceColumns), "model", "layers", "hidden", "heads", "kv_heads", "experts", "top_k", "expert_width", "shared_width", "vocab", //nolint:errcheck // Flush keeps the error
		"sequences", "tokens", "context", "distinct_experts", "seconds"))
	for i := range r.Points {
		p := &r.Points[i]
		line := append(eval.Provenance(&r.Run, &r.Machine), p.Model.Name)
		for _, n := range []int{
			p.Model.Layers, p.Model.Hidden, p.Model.Heads, p.Model.KVHeads, p.Model.Experts, p.Model.TopK, p.Model.ExpertWidth, p.Model.SharedWidth, p.Model.Vocab,
			p.Step.Sequences, p.Step.Tokens, p.Step.Context,
		} {
			line = append(line, strconv.Itoa(n))
		}
		for _, v := range []float64{p.Step.Used, p.Seconds} {
			line = append(line, strconv.FormatFloat(v, 'g', 8, 64))
		}
		w.Write(line) //nolint:errcheck // as above
	}
	w.Flush()
	return w.Error()
}
