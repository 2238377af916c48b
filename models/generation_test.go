package models

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestGeneration(t *testing.T) {
	dir := t.TempDir()
	if g, path, err := ReadGeneration(dir); err != nil || path != "" || len(g.Values()) != 0 {
		t.Errorf("without a file: %v %q %v", g.Values(), path, err)
	}
	file := filepath.Join(dir, "generation_config.json")
	for text, want := range map[string]string{
		`{"eos_token_id": 3, "do_sample": false}`: "map[]",
		`{"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0, "repetition_penalty": 1.05, "max_new_tokens": 2048, "x": []}`: "map[max_new_tokens:2048 min_p:0 repetition_penalty:1.05 temperature:0.6 top_k:20 top_p:0.95]",
		`{"temperature": null, "top_k": -1}`: "map[top_k:0]",
		`{"temperature": 0}`:                 "map[temperature:0]",
		`{"temperature": "hot"}`:             `field temperature: "hot": must be a number`,
		`{"temperature": -0.1}`:              "field temperature: -0.1: must be from 0 to 100",
		`{"top_p": 0}`:                       "field top_p: 0: must be above 0 and at most 1",
		`{"top_p": 1.5}`:                     "field top_p: 1.5: must be from 0 to 1",
		`{"min_p": 2}`:                       "field min_p: 2: must be from 0 to 1",
		`{"repetition_penalty": 0}`:          "field repetition_penalty: 0: must be above 0",
		`{"top_k": -2}`:                      "field top_k: -2: must be from -1 to",
		`{"top_k": 1.5}`:                     "field top_k: 1.5: must be a whole number",
		`{"max_new_tokens": 0}`:              "field max_new_tokens: 0: must be from 1 to",
		`{`:                                  "generation_config.json: ",
	} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		g, path, err := ReadGeneration(dir)
		if strings.HasPrefix(want, "map") {
			if got := fmt.Sprint(g.Values()); err != nil || got != want || path != file {
				t.Errorf("%s: %s %q %v, want %s", text, got, path, err, want)
			}
		} else if !errors.Is(err, ErrConfig) || !strings.Contains(err.Error(), file) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", text, err, want)
		}
	}
}

func TestGenerationOverride(t *testing.T) {
	base, err := Generation{}.Override([]byte(`{"temperature": 0.6, "top_p": 0.95, "top_k": 20}`), "base")
	if err != nil {
		t.Fatal(err)
	}
	for text, want := range map[string]string{
		`{}`: "map[temperature:0.6 top_k:20 top_p:0.95]",
		`{"temperature": null, "top_k": 5, "min_p": 0.1}`: "map[min_p:0.1 top_k:5 top_p:0.95]",
		`{"temprature": 1}`: "the option: field temprature: is none of max_new_tokens, min_p",
		`{"top_p": 2}`:      "the option: field top_p: 2: must be",
		`[]`:                "the option: ",
	} {
		g, err := base.Override([]byte(text), "the option")
		if strings.HasPrefix(want, "map") {
			if got := fmt.Sprint(g.Values()); err != nil || got != want {
				t.Errorf("%s: %s %v, want %s", text, got, err, want)
			}
		} else if !errors.Is(err, ErrConfig) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", text, err, want)
		}
	}
}
