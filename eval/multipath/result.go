package multipath

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/moeserve/moeserve/eval"
)

// Result is a measurement; parts that were not measured are absent.
type Result struct {
	Run eval.Run `json:"run"`
	eval.Machine
	// GPU is the one that copies go to, Relays those of other GPUs whose links they may use.
	GPU    string   `json:"gpu"`
	Relays []string `json:"relays"`
	// Rounds whose median each figure is.
	Rounds int `json:"rounds"`

	Links     *Links       `json:"links,omitempty"`
	Roots     *Roots       `json:"roots,omitempty"`
	Static    *Static      `json:"static,omitempty"`
	Relay     *RelayCopies `json:"relay,omitempty"`
	Sizes     *Sizes       `json:"sizes,omitempty"`
	GPUs      *GPUs        `json:"gpus,omitempty"`
	Traffic   *Traffic     `json:"traffic,omitempty"`
	Engines   *Engines     `json:"engines,omitempty"`
	CPU       *CPU         `json:"cpu,omitempty"`
	Chunks    *Chunks      `json:"chunks,omitempty"`
	Threshold *Threshold   `json:"threshold,omitempty"`
	Direct    *Direct      `json:"direct,omitempty"`
	// Targets are what was to be reached.
	Targets []Target `json:"targets"`
}

// Target is a figure that is to be reached.
type Target struct {
	What string `json:"what"`
	// Value is what was measured, Want what it must be: at least, or at most where AtMost is set.
	Value  float64 `json:"value"`
	Want   float64 `json:"want"`
	AtMost bool    `json:"at_most"`
	// Unit of both; empty: a ratio.
	Unit    string `json:"unit"`
	Reached bool   `json:"reached"`
}

func atLeast(what string, value, want float64, unit string) Target {
	return Target{What: what, Value: value, Want: want, Unit: unit, Reached: value >= want}
}

func atMost(what string, value, want float64, unit string) Target {
	return Target{What: what, Value: value, Want: want, AtMost: true, Unit: unit, Reached: value <= want}
}

func (t *Target) String() string {
	limit, reached := "at least", "reached"
	if t.AtMost {
		limit = "at most"
	}
	if !t.Reached {
		reached = "not reached"
	}
	number := func(v float64) string { return strings.TrimSpace(strconv.FormatFloat(v, 'f', 2, 64) + " " + t.Unit) }
	return fmt.Sprintf("target %s: %s is %s, %s %s", reached, t.What, number(t.Value), limit, number(t.Want))
}

// Measure measures the parts of o into r. Where it ends early, r has the parts that were done.
func Measure(ctx context.Context, o Options, into *Result) (err error) {
	o = o.EnsureDefaults()
	into.GPU, into.Rounds, into.Relays, into.Targets = o.GPU.String(), o.Rounds, []string{}, []Target{}
	for _, s := range o.Relays {
		into.Relays = append(into.Relays, s.String())
	}
	r, err := openRig(ctx, o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.close()) }()
	for _, p := range o.Parts {
		var targets []Target
		switch p {
		case LinksPart:
			into.Links, err = r.links(ctx)
		case RootsPart:
			into.Roots, err = r.roots(ctx)
		case StaticPart:
			into.Static, err = r.static(ctx)
		case RelayPart:
			into.Relay, err = r.relay(ctx)
		case SizesPart:
			into.Sizes, err = r.sizes(ctx)
			targets = into.Sizes.targets()
		case GPUsPart:
			into.GPUs, err = r.gpus(ctx)
			targets = into.GPUs.targets()
		case TrafficPart:
			into.Traffic, err = r.traffic(ctx)
			targets = into.Traffic.targets()
		case EnginesPart:
			into.Engines, err = r.engines(ctx)
		case CPUPart:
			into.CPU, err = r.cpu(ctx)
			targets = into.CPU.targets()
		case ChunksPart:
			into.Chunks, err = r.chunks(ctx)
		case ThresholdPart:
			into.Threshold, err = r.threshold(ctx)
		case DirectPart:
			into.Direct, err = r.betweenGPUs(ctx)
		}
		if err != nil {
			return err
		}
		into.Targets = append(into.Targets, targets...)
	}
	return nil
}

// openRig opens the memory of a measurement.
func openRig(ctx context.Context, o Options) (*rig, error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	r := newRig(o)
	if err := r.open(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("multipath: %w", err), r.close())
	}
	return r, nil
}

// section is a part that was measured.
type section interface{ table(b *strings.Builder) }

// sections are the parts that were measured.
func (r *Result) sections() []section {
	var all []section
	add := func(there bool, s section) {
		if there {
			all = append(all, s)
		}
	}
	add(r.Links != nil, r.Links)
	add(r.Roots != nil, r.Roots)
	add(r.Static != nil, r.Static)
	add(r.Relay != nil, r.Relay)
	add(r.Sizes != nil, r.Sizes)
	add(r.GPUs != nil, r.GPUs)
	add(r.Traffic != nil, r.Traffic)
	add(r.Engines != nil, r.Engines)
	add(r.CPU != nil, r.CPU)
	add(r.Chunks != nil, r.Chunks)
	add(r.Threshold != nil, r.Threshold)
	add(r.Direct != nil, r.Direct)
	return all
}

// Empty reports whether no part has been measured.
func (r *Result) Empty() bool { return len(r.sections()) == 0 }

// paper is what tells figures from those of the MMA paper.
const paper = "the paper's machine: 8 x H20, 2 x AMD EPYC, four GPUs per NUMA node; 53 GB/s over one link, 245 over all; chunks of 5 MB, relays from 11.3 MB (h2d) and 13 MB (d2h) on"

// WriteTable writes all parts for a person.
func WriteTable(out io.Writer, r *Result) error {
	var b strings.Builder
	b.WriteString(eval.Header(&r.Run, &r.Machine))
	fmt.Fprintf(&b, "copies from and to %s, relays: %s; medians of %d rounds\n%s\n\n", r.GPU, list(r.Relays), r.Rounds, paper)
	for _, s := range r.sections() {
		s.table(&b)
	}
	for _, t := range r.Targets {
		fmt.Fprintln(&b, t.String())
	}
	if r.Unpaced() {
		b.WriteString("emulated devices without rates copy as fast as this CPU does: links do not compare; give --emulate rates, with virtual or pace\n")
	}
	_, err := io.WriteString(out, b.String())
	return err
}

func list(names []string) string {
	if len(names) == 0 {
		return "none"
	}
	return strings.Join(names, ", ")
}

// gb is a rate in GB/s.
func gb(rate float64) string { return strconv.FormatFloat(rate/1e9, 'f', 1, 64) }

// size is bytes for a person.
func size(n int64) string { return eval.Size(n) }
