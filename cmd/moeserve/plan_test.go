package main

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/moeserve/moeserve/tools/racedetector"
)

// The last lines of plan are a command that a shell runs: inspect with the same flags fits,
// with the planned context.
func TestPlanPrintsTheCommandThatServes(t *testing.T) {
	racedetector.SkipSequential(t)
	dir := t.TempDir()
	for _, args := range [][]string{
		{"--emulate", "hbm=6MiB,host=1GiB,virtual"},
		{"--emulate", "hbm=6MiB,host=1GiB,virtual", "--max-num-seqs", "1", "--peers", "none"},
		{"--emulate", "hbm=8MiB,host=1GiB,virtual", "--max-num-seqs", "4", "--offload-tier", "peer", "--peers", "1,2", "--dynamic-residency", "--harvest-headroom", "5%"},
		{"--model", "mixtral-8x7b", "--emulate", "hbm=24GiB,host=100000GiB,virtual,nodata"},
	} {
		cmd := exec.CommandContext(t.Context(), "moeserve", append([]string{"plan"}, args...)...)
		cmd.Dir = dir
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("%v: %v", args, err)
		}
		at := strings.LastIndex(string(out), "\n  moeserve serve ")
		if at < 0 {
			t.Fatalf("%v: no command in %s", args, out)
		}
		command := strings.TrimSpace(string(out)[at:])
		for line := range strings.Lines(command) {
			if len(strings.TrimSuffix(line, "\n")) > 80 {
				t.Errorf("%d columns: %s", len(line), line)
			}
		}
		inspect := exec.CommandContext(t.Context(), "sh", "-c", strings.Replace(command, " serve ", " inspect --json - ", 1))
		inspect.Dir = dir
		report, err := inspect.Output()
		if err != nil || !strings.Contains(string(report), `"fits": true`) {
			t.Errorf("%s\n%v: %s", command, err, report)
		}
		for i := 0; i+1 < len(args); i++ {
			if strings.HasPrefix(args[i], "--") && !strings.Contains(command, args[i]) {
				t.Errorf("%s\nlacks %s", command, args[i])
			}
		}
	}
	if files, err := filepath.Glob(filepath.Join(dir, "*")); err != nil || len(files) > 0 {
		t.Errorf("left behind: %v, %v", files, err)
	}
}

func TestShellQuote(t *testing.T) {
	for _, word := range []string{"", "plain-1.5", "two words", "it's", `a"b`, "$HOME", `back\slash`, "*", "~/x", "0:1;2:3"} {
		out, err := exec.CommandContext(t.Context(), "sh", "-c", "printf %s "+shellQuote(word)).Output()
		if err != nil || string(out) != word {
			t.Errorf("%q is %s, which is %q to a shell: %v", word, shellQuote(word), out, err)
		}
	}
	if got := shellQuote("hbm=6MiB,host=1GiB"); got != "hbm=6MiB,host=1GiB" {
		t.Errorf("quoted without need: %s", got)
	}
}

func TestParseLatency(t *testing.T) {
	for text, want := range map[string]float64{"": 0, "2": 2, "0.5": 0.5, "500ms": 0.5, "1m": 60, "1e-3": 1e-3} {
		if got, err := parseLatency("max-ttft", text); err != nil || got != want {
			t.Errorf("%q: %v, %v", text, got, err)
		}
	}
	for _, text := range []string{"0", "-1", "soon", "5 s", "inf", "NaN", "-3s"} {
		if _, err := parseLatency("max-ttft", text); err == nil || !strings.Contains(err.Error(), "--max-ttft is ") {
			t.Errorf("%q: %v", text, err)
		}
	}
}

func TestTookHasThreeDigits(t *testing.T) {
	for s, want := range map[float64]string{0.0009994: "999 µs", 0.0009996: "1 ms", 0.9994: "999 ms", 0.9996: "1.00 s", 9.86: "9.86 s"} {
		if got := took(s); got != want {
			t.Errorf("%v s: %q, want %q", s, got, want)
		}
	}
}
