package node_test

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/node/fault"
)

// TestTrace runs requests with a trace, on a machine that traces itself and on a wrapped one:
// the tracks are the streams by name, and their slices together are about as long as the run.
func TestTrace(t *testing.T) {
	const link = 1e9 // bytes/s
	for _, wrapped := range []bool{false, true} {
		path := filepath.Join(t.TempDir(), "trace.json")
		s := configs.Defaults()
		s.Offload.Fraction, s.Output.Trace, s.Batch.Attention = 0.5, path, configs.OnCPU
		s.Device.Emulate = "virtual,pcie=1GB/s,bw=50GB/s,cpubw=1GB/s"
		o := node.Options{Settings: s}
		if wrapped {
			o.OpenMachine = func() (device.Machine, error) {
				gpu := emulated.GPU{BytesPerSecond: 50e9}
				return emulated.New(emulated.Options{
					Virtual: true, HostLink: emulated.Link{BytesPerSecond: link}, GPUs: []emulated.GPU{gpu}, Host: emulated.GPU{BytesPerSecond: 1e9},
				})
			}
		}
		n, err := node.Open(t.Context(), o)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := n.Engine().Generate(t.Context(), requests(n.Info().Config.Vocab), nil); err != nil {
			t.Fatal(err)
		}
		stalls := n.Observe().Pipeline().Stalls.ByName()
		if err := n.Close(); err != nil {
			t.Fatal(err)
		}
		if len(stalls) != 7 || stalls["expert-copy"] == 0 || stalls["cpu-attention"] == 0 {
			t.Errorf("stalls %v", stalls)
		}
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		var f struct {
			TraceEvents []struct {
				Name, Ph, Cat string
				TS, Dur       float64 // microseconds
				PID, TID      int
				Args          map[string]any
			}
		}
		if err := json.Unmarshal(data, &f); err != nil {
			t.Fatal(err)
		}
		found, args := map[string]int{}, map[string][]string{
			"matmul": {"step", "stage", "m", "n", "k"}, "expert_up": {"step", "layer", "stage", "experts", "m", "n", "k"},
			"rope_attention": {"step", "layer"}, "fetch experts": {"step", "layer", "experts", "tier", "priority", "bytes"},
			"wait: expert-copy": {"step", "layer", "cause"},
		}
		names, ends, busy := map[int]string{}, map[int]float64{}, map[string]float64{}
		var last float64
		for _, e := range f.TraceEvents {
			if e.Ph == "M" {
				if e.Name == "thread_name" {
					names[e.TID] = e.Args["name"].(string)
				}
				continue
			}
			found[e.Ph+" "+strings.TrimRight(e.Name, "0123456789")]++
			if e.Ph != "X" || e.Cat == "" { // a counter, an arrow, a slice around others
				continue
			}
			for _, arg := range args[e.Name] {
				if e.Args[arg] == nil {
					t.Errorf("wrapped: %v: no argument %q in %+v", wrapped, arg, e)
				}
			}
			const rounding = 0.01
			if e.Dur <= 0 || e.TS < ends[e.TID]-rounding || names[e.TID] == "" {
				t.Fatalf("%+v on row %q, whose last ended at %v", e, names[e.TID], ends[e.TID])
			}
			if bytes, ok := e.Args["bytes"].(float64); ok && bytes/e.Dur > 1.01*link/1e6 && strings.HasPrefix(names[e.TID], "copy host") {
				t.Errorf("%+v is faster than its link", e)
			}
			ends[e.TID] = e.TS + e.Dur
			last = max(last, ends[e.TID])
			busy[names[e.TID]] += e.Dur
		}
		for _, row := range []string{"compute", "copy host to gpu0", "q, k, v to host", "attention from host"} {
			if busy[row] < last/1000 || busy[row] > last {
				t.Errorf("wrapped: %v: row %q is busy for %v of %v us; rows %v", wrapped, row, busy[row], last, busy)
			}
		}
		for _, what := range []string{
			"X decode step", "X layer ", "X matmul", "X expert_up", "X fetch experts", "X prefetch experts", "X wait: expert-copy",
			"C batch", "C KV blocks", "C copy host to gpu",
		} {
			if found[what] == 0 {
				t.Errorf("wrapped: %v: the trace has no %q: %v", wrapped, what, found)
			}
		}
		if found["s copy"] == 0 || found["s copy"] != found["f copy"] {
			t.Errorf("wrapped: %v: %d arrows begin and %d end", wrapped, found["s copy"], found["f copy"])
		}
		// Work of the host takes no time of a virtual clock while it runs: only the
		// machine itself knows how long.
		if !wrapped && busy["attention"] == 0 {
			t.Errorf("the host's attention is not there: %v", busy)
		}
	}
}

// TestTraceRefused: a trace file that cannot be created is an error of Open that names the
// file.
func TestTraceRefused(t *testing.T) {
	s := configs.Defaults()
	s.Output.Trace = filepath.Join(t.TempDir(), "none", "trace.json")
	_, err := node.Open(t.Context(), node.Options{Settings: s})
	if !errors.Is(err, fault.ErrConfig) || !strings.Contains(err.Error(), s.Output.Trace) {
		t.Errorf("a trace file that cannot be made: %v", err)
	}
}
