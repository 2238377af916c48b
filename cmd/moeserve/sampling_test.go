package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/engine"
)

// Requests that give no parameters are sampled as the checkpoint's authors recommend, unless the
// operator says otherwise.
func TestDefaultSampling(t *testing.T) {
	dir, other := t.TempDir(), t.TempDir()
	write := func(dir, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, "generation_config.json"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, d := range []string{dir, other} {
		if err := os.WriteFile(filepath.Join(d, "config.json"), []byte(`{"model_type": "mixtral"}`), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(dir, `{"eos_token_id": 0, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.1, "max_new_tokens": 500}`)
	write(other, `{"temperature": 0}`)
	own := engine.DefaultParams()
	own.Temperature = 1
	file := own
	file.Temperature, file.TopK, file.TopP, file.MinP, file.RepetitionPenalty = 0.6, 20, 0.95, 0.05, 1.1
	greedy, overridden := own, file
	greedy.Temperature = 0
	overridden.TopK = 5
	for _, c := range []struct {
		flags     []string
		want      engine.Params
		maxTokens int
		logged    string
	}{
		{nil, own, 0, ""},
		{[]string{"--model", dir}, file, 500, "generation_config.json max_new_tokens=500 min_p=0.05 repetition_penalty=1.1 temperature=0.6 top_k=20 top_p=0.95"},
		{[]string{"--model", dir, "--generation-config", "vllm"}, own, 0, ""},
		{[]string{"--model", dir, "--generation-config", other}, greedy, 0, "temperature=0"},
		{[]string{"--model", dir, "--override-generation-config", `{"top_k": 5, "max_new_tokens": null}`}, overridden, 0, "top_k=5"},
		{[]string{"--model", "qwen3-30b-a3b", "--load-format", "dummy"}, own, 0, ""},
		{[]string{"--override-generation-config", `{"temperature": 0}`}, greedy, 0, "source=--override-generation-config temperature=0"},
	} {
		set, err := read(t, c.flags, nil, "")
		if err != nil {
			t.Fatalf("%v: %v", c.flags, err)
		}
		got, err := defaultSampling(set)
		if err != nil {
			t.Fatalf("%v: %v", c.flags, err)
		}
		set.Output.LogLevel = configs.LogInfo
		var log strings.Builder
		got.log(newLogger(&log, &set.Output, set.Output.LogLevel.Level()))
		if fmt.Sprintf("%+v", got.params) != fmt.Sprintf("%+v", c.want) || got.maxTokens != c.maxTokens || !strings.Contains(log.String(), c.logged) || c.logged == "" != (log.Len() == 0) {
			t.Errorf("%v: %+v, %d tokens, logged %q", c.flags, got.params, got.maxTokens, log.String())
		}
	}
	for want, flags := range map[string][]string{
		"has no generation_config.json; give a directory that has one, auto or vllm": {"--generation-config", t.TempDir()},
		"--override-generation-config: field top_p: 2: must be from 0 to 1":          {"--override-generation-config", `{"top_p": 2}`},
		"--override-generation-config: field temp: is none of":                       {"--override-generation-config", `{"temp": 2}`},
	} {
		set, err := read(t, flags, nil, "")
		if err != nil {
			t.Fatalf("%v: %v", flags, err)
		}
		if _, err := defaultSampling(set); exitCode(err) != exitUsage || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: %v, want %s", flags, err, want)
		}
	}
	write(other, `{"temperature": "hot"}`)
	set, err := read(t, []string{"--model", other}, nil, "")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := defaultSampling(set); exitCode(err) != exitModel || !strings.Contains(err.Error(), `generation_config.json: field temperature: "hot": must be a number`) {
		t.Errorf("a bad file: %v", err)
	}
}

// The server samples by the file, and a request's own parameters go before it.
func TestServeSamplesByTheFile(t *testing.T) {
	dir := fixtureDir(t, "mixtral")
	if err := os.WriteFile(filepath.Join(dir, "generation_config.json"), []byte(`{"temperature": 1, "top_k": 1, "max_new_tokens": 3}`), 0o600); err != nil {
		t.Fatal(err)
	}
	p := startServe(t, "--model", dir, "--served-model-name", "a,b", "--allowed-origins", `["https://example.com"]`)
	post := func(more string) (texts []string) {
		r := p.post(t, "/v1/completions", `{"prompt": [5, 6, 7], "max_tokens": 8, "ignore_eos": true, "n": 4, "model": "b"`+more+`}`)
		var a struct{ Choices []struct{ Text string } }
		body, err := io.ReadAll(r.Body)
		if err != nil || r.StatusCode != http.StatusOK || json.Unmarshal(body, &a) != nil || len(a.Choices) != 4 {
			t.Fatalf("%d %v %s", r.StatusCode, err, body)
		}
		for _, c := range a.Choices {
			texts = append(texts, c.Text)
		}
		return texts
	}
	byFile, greedy, free := post(""), post(`, "temperature": 0`), post(`, "top_k": 0, "temperature": 5`)
	for i := range byFile {
		if byFile[i] != greedy[0] {
			t.Errorf("sample %d by the file: %q, want %q", i, byFile[i], greedy[0])
		}
	}
	if free[0] == free[1] && free[1] == free[2] {
		t.Errorf("with parameters of its own: %q", free)
	}
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, p.url+"/v1/models", nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Origin", "https://example.com")
	a, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Body.Close() //nolint:errcheck // only read from
	if body, err := io.ReadAll(a.Body); err != nil || a.Header.Get("Access-Control-Allow-Origin") != "https://example.com" || !strings.Contains(string(body), `"id":"b"`) {
		t.Errorf("%v %v %s", err, a.Header, body)
	}
}
