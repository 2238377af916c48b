package main

import (
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// TestCompletion: shells are offered the values of flags, presets and commands, by a script that they
// can load.
func TestCompletion(t *testing.T) {
	for _, c := range []struct {
		args []string
		want []string
	}{
		{[]string{"serve", "--device", ""}, []string{"auto", "cpu", "cuda"}},
		{[]string{"serve", "--device", "cu"}, []string{"cuda"}},
		{[]string{"serve", "--offload-tier", "p"}, []string{"peer"}},
		{[]string{"serve", "--admin-address", ""}, []string{"none", "same"}},
		{[]string{"plan", "--hardware", "h200"}, []string{"h200"}},
		{[]string{"serve", "mixtral"}, []string{"mixtral-8x7b"}},
		{[]string{"inspect", "built"}, []string{"built-in"}},
		{[]string{"man", "in"}, []string{"inspect"}},
		{[]string{"completion", ""}, shells},
	} {
		out, errs, code := invoke(t, strings.NewReader(""), append([]string{"__complete"}, c.args...)...)
		var got []string
		for line := range strings.Lines(out) {
			if word, _, _ := strings.Cut(strings.TrimSpace(line), "\t"); word != "" && word[0] != ':' {
				got = append(got, word)
			}
		}
		slices.Sort(got)
		want := slices.Sorted(slices.Values(c.want))
		if code != 0 || !slices.Equal(got, want) {
			t.Errorf("%q: exit code %d, %q, want %q; %s", c.args, code, got, want, errs)
		}
	}
	for _, shell := range shells {
		out, errs, code := invoke(t, strings.NewReader(""), "completion", shell)
		if code != 0 || !strings.Contains(out, "__complete") {
			t.Errorf("completion %s: exit code %d, %d bytes; %s", shell, code, len(out), errs)
		}
		path, err := exec.LookPath(shell)
		if err != nil || shell == "powershell" { // which only runs scripts
			t.Logf("no %s: its script is not read", shell)
			continue
		}
		read := exec.CommandContext(t.Context(), path, "-n")
		read.Stdin = strings.NewReader(out)
		if out, err := read.CombinedOutput(); err != nil || len(out) > 0 {
			t.Errorf("%s -n: %v: %s", shell, err, out)
		}
	}
}
