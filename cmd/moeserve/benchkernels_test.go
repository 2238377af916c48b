package main

import (
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/moeserve/moeserve/eval"
	"github.com/moeserve/moeserve/eval/compute"
	"github.com/moeserve/moeserve/planner"
	"github.com/moeserve/moeserve/tools/racedetector"
)

// bench kernels calibrates emulated devices, whose figures predict the built-in model: bench predict
// has the errors of a sweep over it, and of times of steps in a file.
func TestBenchKernels(t *testing.T) {
	if racedetector.Enabled {
		t.Skip("minutes: its engines run as those of other tests")
	}
	dir := t.TempDir()
	file := func(name string) string { return filepath.Join(dir, name) }
	const devices = "virtual,hbm=2GiB,host=2GiB,pcie=55.3MB/s,nvlink=395MB/s,flops=78G,bw=3.9GB/s"
	run := func(args ...string) string {
		t.Helper()
		stdout, stderr, code := invoke(t, strings.NewReader(""), args...)
		if code != exitDone {
			t.Fatalf("%s: exit code %d, %s", args, code, stderr)
		}
		return stdout
	}
	table := run("bench", "kernels", "--emulate", devices, "--repetitions", "1", "--calibrate", file("here.json"), "--json", file("kernels.json"), "--csv", file("kernels.csv"))
	var r compute.Result
	readJSON(t, file("kernels.json"), &r)
	if r.Fitted.Median > 0.05 || len(r.Points) < 50 || !strings.Contains(table, "experts: rows of one expert") {
		t.Errorf("%d points, errors %+v: %s", len(r.Points), r.Fitted, table)
	}
	if data, err := os.ReadFile(file("kernels.csv")); err != nil || strings.Count(string(data), "\n") != 1+len(r.Points) {
		t.Errorf("%v: %s", err, data)
	}
	var h planner.Hardware
	readJSON(t, file("here.json"), &h)
	if h.Compute == nil || !strings.HasPrefix(h.Sources["compute"], eval.EmulatedBy+"kernels: ") {
		t.Fatalf("%+v", h)
	}
	// Steps no larger than those that were measured.
	run("bench", "sweep", "--emulate", devices, "--hardware", file("here.json"), "--input-len", "40", "--num-prompts", "64", "--max-num-batched-tokens", "256", "--fractions", "0,0.5,1", "--trials", "1", "--warmup-tokens", "4", "--json", file("sweep.json"))
	text := run("bench", "predict", file("sweep.json"), "--json", file("predicted.json"))
	var p eval.Predictions
	readJSON(t, file("predicted.json"), &p)
	if len(p.Cells) != 10 || p.Errors.Cells != 10 || p.Errors.Median > 0.1 || p.Errors.Worst > 0.25 || p.ErrorsApart.Cells == 0 {
		t.Errorf("%d cells, errors %+v, of those apart %+v: %s", len(p.Cells), p.Errors, p.ErrorsApart, text)
	}
	for _, c := range p.Cells {
		if math.Abs(c.PredictedSeconds/c.Seconds-1-c.Error) > 1e-9 {
			t.Errorf("%+v", c)
		}
	}
	if !strings.Contains(text, "errors of 10 cells: median") {
		t.Error(text)
	}
	// Times of steps are predicted for named hardware: with the rates alone, rooflines.
	lines := `{"model":"mixtral-8x7b","layers":8,"kind":"load","seconds":1}
{"model":"mixtral-8x7b","layers":8,"kind":"decode","sequences":324,"seconds":0.0064}

{"model":"qwen1.5-moe-a2.7b","kind":"decode","fraction":0.5,"tier":"host","sequences":324,"seconds":0.235}
{"model":"qwen1.5-moe-a2.7b","kind":"prefill","sequences":324,"seconds":0.2}
`
	if err := os.WriteFile(file("steps.jsonl"), []byte(lines), 0o600); err != nil {
		t.Fatal(err)
	}
	run("bench", "predict", "--hardware", "h200", file("steps.jsonl"), "--json", file("predicted.json"))
	readJSON(t, file("predicted.json"), &p)
	if len(p.Cells) != 3 || p.Hardware != "h200" || p.Cells[1].Bound != planner.BoundHostLink || !p.Cells[1].Apart || math.Abs(p.Cells[1].Error) > 0.05 {
		t.Errorf("%+v", p)
	}
	for _, c := range []struct{ args, want string }{
		{"kernels --repetitions 0", "--repetitions is 0: must be at least 1"},
		{"kernels", "moeserve: bench kernels needs the rates and memory sizes of the hardware, and those of emulated devices are not known; name similar hardware with --hardware\n"},
		{"kernels --calibrate " + dir, "is a directory; name a file"},
		{"predict", "bench predict needs a FILE: "},
		{"predict " + file("none"), "no such file"},
		{"predict " + file("kernels.csv"), "has neither timings"},
		{"predict " + file("steps.jsonl"), "name it with --hardware"},
	} {
		if stdout, stderr, code := invoke(t, strings.NewReader(""), append([]string{"bench"}, strings.Fields(c.args)...)...); code != exitUsage || stdout != "" || !strings.Contains(stderr, c.want) {
			t.Errorf("bench %s: exit code %d, %q, want %q", c.args, code, stderr, c.want)
		}
	}
}

// readJSON reads a JSON file.
func readJSON(t *testing.T, path string, to any) {
	t.Helper()
	data, err := os.ReadFile(path)
	if err == nil {
		err = json.Unmarshal(data, to)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// The profile of the H200 predicts steps that were measured on these GPUs, in the run of its calibration and in others:
// docs/log/planner-accuracy.md.
func TestPredictionsOfMeasuredSteps(t *testing.T) {
	racedetector.SkipSequential(t)
	for _, c := range []struct {
		file          string
		cells         int
		median, worst float64
	}{
		// All are of kernels before the calibration.
		{"planner-cells-guard-5f6254f2.jsonl", 84, 0.03, 0.21},
		{"planner-cells-guard-2f332c3f.jsonl", 84, 0.03, 0.19},
		{"planner-cells-guard-e6c59e44.jsonl", 84, 0.03, 0.17},
		{"planner-cells-h200.jsonl", 46, 0.03, 0.29},
		{"planner-cells-performance.jsonl", 31, 0.05, 0.33},
		{"planner-cells-two-gpus.jsonl", 148, 0.035, 0.29},
		{"planner-cells-guard.jsonl", 84, 0.03, 0.23},
		{"planner-cells-guard-8cd63e83.jsonl", 83, 0.03, 0.18},
		{"planner-cells-guard-396f0a7d.jsonl", 84, 0.03, 0.16},
	} {
		stdout, stderr, code := invoke(t, strings.NewReader(""), "bench", "predict", "--hardware", "h200", filepath.Join("..", "..", "docs", "log", c.file), "--json", "-")
		var p eval.Predictions
		if err := json.Unmarshal([]byte(stdout), &p); err != nil || code != exitDone {
			t.Fatalf("%s: exit code %d, %v: %s", c.file, code, err, stderr)
		}
		if p.Errors.Cells != c.cells || p.Errors.Median > c.median || p.Errors.Worst > c.worst || p.ErrorsApart.Median > 0.05 {
			t.Errorf("%s: errors %+v, of those apart %+v; a median of %v and at most %v are allowed", c.file, p.Errors, p.ErrorsApart, c.median, c.worst)
		}
	}
}

// --policy auto is never more than 5 % slower than the best of the settings that it chooses from.
func TestPolicyAutoIsNearTheBest(t *testing.T) {
	if racedetector.Enabled {
		t.Skip("a minute: its engines run as those of other tests")
	}
	for _, links := range []string{"hbm=12MiB,pcie=100MB/s,gpus=1", "hbm=8.5MiB,pcie=55.3MB/s,nvlink=395MB/s"} {
		run := func(args ...string) (eval.Result, bool) {
			args = append([]string{
				"bench", "throughput", "--emulate", "virtual,host=1GiB,flops=78G,bw=3.9GB/s,cpuflops=20G,cpubw=0.5GB/s," + links, "--input-len", "40", "--num-prompts", "64",
				"--output-len", "16", "--trials", "1", "--warmup-tokens", "0", "--json", "-",
			}, args...)
			stdout, stderr, code := invoke(t, strings.NewReader(""), args...)
			var r eval.Result
			switch err := json.Unmarshal([]byte(stdout), &r); {
			case code == exitUsage && (strings.Contains(stderr, "out of memory") || strings.Contains(stderr, "there is room for")):
				return r, false
			case code != exitDone || err != nil:
				t.Fatalf("%s: exit code %d, %v: %s", args, code, err, stderr)
			}
			return r, true
		}
		auto, ok := run("--policy", "auto")
		if !ok {
			t.Fatalf("%s: the policy does not fit", links)
		}
		fit := 0
		for _, attention := range []string{"gpu", "cpu"} {
			for _, fraction := range []string{"0", "0.5", "1"} {
				for _, tokens := range []string{"64", "640"} {
					r, ok := run("--attention", attention, "--offload-fraction", fraction, "--max-num-batched-tokens", tokens)
					if !ok {
						continue
					}
					if fit++; auto.ThroughputTokS < 0.95*r.ThroughputTokS {
						t.Errorf("%s: auto reaches %.1f tokens/s, and attention on the %s, %s offloaded and steps of %s tokens %.1f", links, auto.ThroughputTokS, attention, fraction, tokens, r.ThroughputTokS)
					}
				}
			}
		}
		if fit < 3 {
			t.Errorf("%s: only %d settings fit", links, fit)
		}
	}
}
