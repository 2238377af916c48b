package node_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/node"
)

// viewed is Perfetto's reading of a trace.
type viewed struct {
	Rows []struct {
		Process, Thread string
		Slices          int
	}
	Slices []struct {
		Name string
		N    int
	}
	// Counters by name, with their lowest and highest value.
	Counters []struct {
		Name      string
		Low, High float64
	}
	// Flows are arrows, by the names of the slices at either end.
	Flows []struct {
		Source, Target string
		N              int
	}
	// Args say how many slices of a name have an argument.
	Args []struct {
		Name, Arg string
		N         int
	}
}

// view opens a trace in Perfetto's own viewer: see tests/perfetto. The test is skipped
// where that is not installed.
func view(t *testing.T, path string) (v viewed) {
	t.Helper()
	var stderr bytes.Buffer
	cmd := exec.CommandContext(t.Context(), "../tests/perfetto/check.sh", path, filepath.Join(t.ArtifactDir(), "perfetto.png"))
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	const missing = 77
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) && exit.ExitCode() == missing {
		t.Skipf("Perfetto's viewer is not tried: %s", stderr.Bytes())
	}
	if err != nil {
		t.Fatalf("%v: %s", err, stderr.Bytes())
	}
	if err := json.Unmarshal(out, &v); err != nil {
		t.Fatalf("%v in %s", err, out)
	}
	return v
}

// TestTraceInPerfetto: Perfetto's viewer opens the trace of a run without an import error,
// and finds its tracks, steps and layers, the arguments of fetches and GEMMs, counters, and
// an arrow from each fetch that was waited for.
func TestTraceInPerfetto(t *testing.T) {
	s := configs.Defaults()
	s.Offload.Fraction, s.Output.Trace = 0.75, filepath.Join(t.TempDir(), "trace.json.gz")
	s.Device.Emulate, s.Device.Peers = "virtual,gpus=2,pcie=1GB/s,nvlink=2GB/s,bw=50GB/s", "1"
	n, err := node.Open(t.Context(), node.Options{Settings: s})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := n.Engine().Generate(t.Context(), requests(n.Info().Config.Vocab), nil); err != nil {
		t.Fatal(err)
	}
	report := n.Observe().Experts()
	layers := n.Info().Config.Layers
	if err := n.Close(); err != nil {
		t.Fatal(err)
	}
	v := view(t, s.Output.Trace)
	rows, slices, args := map[string]int{}, map[string]int{}, map[string]int{}
	for _, r := range v.Rows {
		rows[r.Process+": "+r.Thread] = r.Slices
	}
	for _, want := range []string{"gpu0: compute", "gpu0: copy host to gpu0", "gpu1: copy gpu1 to gpu0", "gpu0: upload"} {
		if rows[want] == 0 {
			t.Errorf("the viewer has no slices in row %q: %v", want, rows)
		}
	}
	for _, x := range v.Slices {
		slices[x.Name] = x.N
	}
	for _, a := range v.Args {
		args[a.Name+" "+a.Arg] = a.N
	}
	steps := slices["decode step"] + slices["prefill step"] + slices["prefill and decode step"]
	for l := range layers {
		if n := slices[fmt.Sprint("layer ", l)]; n < steps || steps == 0 {
			t.Errorf("%d slices of layer %d in %d steps", n, l, steps)
		}
	}
	for name, want := range map[string][]string{
		"fetch experts":     {"step", "layer", "experts", "tier", "priority", "bytes", "GB/s"},
		"prefetch experts":  {"step", "layer", "experts", "tier", "priority", "bytes", "GB/s"},
		"promote expert":    {"layer", "experts", "tier", "priority", "bytes"},
		"expert_up":         {"step", "layer", "stage", "experts", "m", "n", "k", "TFLOP/s"},
		"wait: expert-copy": {"step", "layer", "stage", "cause"},
		"matmul":            {"step", "stage", "m", "n", "k", "TFLOP/s"},
		"rope_attention":    {"step", "layer", "stage"},
		"prefill step":      {"step", "sequences", "prefill_tokens", "decode_tokens", "plan"},
	} {
		for _, arg := range want {
			if n := args[name+" "+arg]; n == 0 || n != slices[name] {
				t.Errorf("%d of %d slices %q have the argument %q", n, slices[name], name, arg)
			}
		}
	}
	counters := map[string]float64{}
	for _, c := range v.Counters {
		counters[c.Name] = c.High
	}
	for name, most := range map[string]float64{
		"batch sequences": 1e3, "batch tokens": 1e5, "KV blocks in use": 1e5, "copy host to gpu0 GB/s": 1.001, "copy gpu1 to gpu0 GB/s": 2.001,
	} {
		if c := counters[name]; c <= 0 || c > most {
			t.Errorf("counter %q reaches %v, want at most %v", name, c, most)
		}
	}
	arrows := map[string]int{}
	for _, f := range v.Flows {
		arrows[f.Source+" to "+f.Target] = f.N
	}
	for _, want := range []string{"fetch experts to expert_up", "prefetch experts to expert_up"} {
		if arrows[want] == 0 {
			t.Errorf("no arrow from %s: %v", want, arrows)
		}
	}
	t.Logf("%d steps, slices %v, arrows %v, experts %+v", steps, slices, arrows, report)
}
