package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// What of run's arguments is the model, and what the prompt.
func TestSplitRun(t *testing.T) {
	dir := t.TempDir()
	t.Chdir(dir)
	t.Setenv("HOME", dir)
	if err := os.MkdirAll(filepath.Join(dir, "checkpoint", "sub"), 0o777); err != nil {
		t.Fatal(err)
	}
	const noDash = -1
	for _, c := range []struct {
		args  string // separated by |
		named bool
		dash  int
		want  string // model / prompt, ? where that is doubtful
	}{
		{"", false, noDash, "- / -"},
		{"1+2=", false, noDash, "- / 1+2="},
		{"Why is the sky blue?", false, noDash, "- / Why is the sky blue?"},
		{"hello", false, noDash, "- / hello ?"},
		{"llama3:8b", false, noDash, "- / llama3:8b ?"},
		{"x", false, noDash, "- / x"},
		{"-", false, noDash, "- / -"},
		{"", false, 0, "- / -"},
		{"mixtral-8x7b", false, noDash, "mixtral-8x7b / -"},
		{"mixtrall", false, noDash, "mixtrall / -"},
		{"Mixtral:8x7b", false, noDash, "Mixtral:8x7b / -"},
		{"built-in", false, noDash, "built-in / -"},
		{"checkpoint", false, noDash, "checkpoint / -"},
		{"checkpoint/sub", false, noDash, "checkpoint/sub / -"},
		{"~/checkpoint", false, noDash, "~/checkpoint / -"},
		{"./nowhere", false, noDash, "./nowhere / -"},
		{"/models/nowhere", false, noDash, "/models/nowhere / -"},
		{"mistralai/Mixtral-8x7B-v0.1", false, noDash, "mistralai/Mixtral-8x7B-v0.1 / -"},
		{"hf://a/b", false, noDash, "hf://a/b / -"},
		{"model.gguf", false, noDash, "model.gguf / -"},
		{"1/2 of it", false, noDash, "- / 1/2 of it"},
		{"/etc/passwd is what?", false, noDash, "- / /etc/passwd is what?"},
		{"checkpoint|hello", false, noDash, "checkpoint / hello"},
		{"checkpoint|-", false, noDash, "checkpoint / -"},
		{"mixtral-8x7b", true, noDash, "- / mixtral-8x7b"},
		{"checkpoint", true, noDash, "- / checkpoint"},
		{"hello", true, noDash, "- / hello"},
		{"mixtral-8x7b", false, 0, "- / mixtral-8x7b"},
		{"checkpoint|hello", false, 1, "checkpoint / hello"},
		{"anything|hello", false, 1, "anything / hello"},
		{"checkpoint", false, 1, "checkpoint / -"},
		{"one|two", false, noDash, "quotes"},
		{"mixtral|hello", false, noDash, "mixtral / hello"},
		{"why|is|it", false, noDash, "quotes"},
		{"checkpoint|is|it", false, noDash, "quotes"},
		{"checkpoint|hello", true, noDash, "quotes"},
		{"one|two", false, 0, "quotes"},
		{"one|two|three", false, 2, "quotes"},
	} {
		var args []string
		if c.args != "" {
			args = strings.Split(c.args, "|")
		}
		r, err := splitRun(args, c.named, c.dash)
		if c.want == "quotes" {
			if err == nil || !strings.Contains(err.Error(), "in quotes") || exitCode(err) != exitUsage {
				t.Errorf("%q, --model %v, -- at %d: %+v, %v", c.args, c.named, c.dash, r, err)
			}
			continue
		}
		text := func(s *string) string {
			if s == nil {
				return "-"
			}
			return *s
		}
		got := text(r.model) + " / " + text(r.prompt)
		if r.doubtful {
			got += " ?"
		}
		if err != nil || got != c.want {
			t.Errorf("%q, --model %v, -- at %d: %s, %v, want %s", c.args, c.named, c.dash, got, err, c.want)
		}
	}
}

func TestExpandHome(t *testing.T) {
	t.Setenv("HOME", "/home/me")
	for path, want := range map[string]string{
		"": "", "~": "/home/me", "~/a b": "/home/me/a b", "@~/x": "@/home/me/x", "@x": "@x",
		"a/~/b": "a/~/b", "~you/x": "~you/x", "./~": "./~",
	} {
		if got := expandHome(path); got != want {
			t.Errorf("%q: %q, want %q", path, got, want)
		}
	}
}

func TestTierRanges(t *testing.T) {
	layer := func(tiers ...string) layerTiers { return layerTiers{Tiers: tiers} }
	got := tierRanges([]layerTiers{layer("resident", "host", "host"), layer("resident", "resident", "host"), layer("resident", "host", "host")})
	if want := "1-2 resident, 1-2 host"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	if got := tierRanges([]layerTiers{layer("resident", "resident"), layer("resident", "resident")}); got != "2 resident" {
		t.Errorf("%q", got)
	}
}
