package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/moeserve/moeserve/tools/fixtures"
)

// text is the text that a server completes a prompt with.
func (p *process) text(t *testing.T, model string) string {
	t.Helper()
	resp := p.post(t, "/v1/completions", fmt.Sprintf(`{"model": %q, "prompt": [5, 6, 7, 8], "temperature": 0, "max_tokens": 12, "ignore_eos": true, "return_token_ids": true}`, model))
	body, err := io.ReadAll(resp.Body)
	var answer struct {
		Model   string
		Choices []struct {
			TokenIDs []int32 `json:"token_ids"`
		}
	}
	if err == nil {
		err = json.Unmarshal(body, &answer)
	}
	if err != nil || resp.StatusCode != http.StatusOK || len(answer.Choices) != 1 || model != "" && answer.Model != model {
		t.Errorf("%s: status %d, %v: %s", model, resp.StatusCode, err, body)
		return ""
	}
	return fmt.Sprint(answer.Choices[0].TokenIDs)
}

// TestServeTurns: two models on one server are each found by name, answer as they do alone, and take
// turns; metrics and /debug/turns say so.
func TestServeTurns(t *testing.T) {
	t.Parallel()
	other := fixtures.Dir(t, fixtures.Names(t)[0])
	want := map[string]string{}
	for name, path := range map[string]string{"a": "built-in", "b": other} {
		p := startServe(t, "--model", path, "--served-model-name", name, "--emulate", "hbm=256MiB")
		want[name] = p.text(t, name)
		p.end(t)
	}
	for _, how := range [][]string{
		{"--offload-fraction", "0.5", "--offload-tier", "peer", "--kv-offloading-size", "0.01"},
		{"--sleep-memory", "release", "--host-paths", "2", "--host-paths-mode", "wait"},
	} {
		p := startServe(t, append([]string{"--model", "built-in", "--model", other, "--served-model-name", "a,b", "--emulate", "hbm=256MiB", "--admin-address", "same", "--turn-time", "0.05"}, how...)...)
		for range 2 {
			for _, name := range []string{"a", "b"} {
				if got := p.text(t, name); got != want[name] {
					t.Errorf("%s: %s, alone %s", name, got, want[name])
				}
			}
		}
		if got := p.text(t, ""); got != want["a"] {
			t.Errorf("without a model: %s, want %s", got, want["a"])
		}
		var clients sync.WaitGroup
		for i := range 6 {
			clients.Go(func() {
				name := string(rune('a' + i%2))
				for range 6 {
					if got := p.text(t, name); got != want[name] {
						t.Errorf("%s: %s, alone %s", name, got, want[name])
					}
				}
			})
		}
		clients.Wait()
		if all := p.get(t, "/v1/models"); !strings.Contains(all, `"id":"a"`) || !strings.Contains(all, `"id":"b"`) {
			t.Errorf("/v1/models: %s", all)
		}
		if r := p.post(t, "/v1/completions", `{"model": "c", "prompt": "x"}`); r.StatusCode != http.StatusNotFound {
			t.Errorf("a model that there is not: status %d", r.StatusCode)
		}
		if r := p.post(t, "/sleep", ""); r.StatusCode != http.StatusNotFound {
			t.Errorf("/sleep of models that take turns: status %d", r.StatusCode)
		}
		var s struct {
			Awake    string
			Switches int
			Failures int
		}
		if err := json.Unmarshal([]byte(p.get(t, "/debug/turns")), &s); err != nil || s.Switches < 4 || s.Failures > 0 {
			t.Errorf("/debug/turns: %+v, %v", s, err)
		}
		m := p.get(t, "/metrics")
		for _, want := range []string{`vllm:request_success_total{engine="0",finished_reason="length",model_name="a"}`, `moeserve_sleep_level{model_name="b"}`, "moeserve_model_switch_seconds_count"} {
			if !strings.Contains(m, want) {
				t.Errorf("/metrics has no %s", want)
			}
		}
		if got := p.get(t, "/debug/residency?model=b"); got == p.get(t, "/debug/residency?model=a") {
			t.Error("/debug/residency is the same for both models")
		}
		p.end(t)
	}
}

// TestServeEndsAsleep: a server whose model sleeps ends at a signal, and a request that waits for the
// wake is refused and not waited for.
func TestServeEndsAsleep(t *testing.T) {
	t.Parallel()
	p := startServe(t, "--emulate", "hbm=256MiB", "--admin-address", "same")
	if r := p.post(t, "/sleep?level=2", ""); r.StatusCode != http.StatusOK {
		t.Fatalf("/sleep: status %d", r.StatusCode)
	}
	answer := make(chan int, 1)
	go func() {
		answer <- p.post(t, "/v1/completions", `{"prompt": "1+2="}`).StatusCode
	}()
	for end := time.Now().Add(time.Minute); !strings.Contains(p.get(t, "/metrics"), `vllm:num_requests_waiting{engine="0",model_name="built-in"} 1`); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("no request waits for the wake after a minute")
		}
	}
	began := time.Now()
	p.end(t)
	if status := <-answer; status != http.StatusServiceUnavailable {
		t.Errorf("a request that waited for the wake: status %d", status)
	}
	if took := time.Since(began); took > 20*time.Second { // --drain-timeout is 30
		t.Errorf("the end took %v", took)
	}
}

// TestServedModels: names that do not fit the models are refused.
func TestServedModels(t *testing.T) {
	for want, args := range map[string][]string{
		"3 names for 2 models":           {"--model", "built-in", "--model", "other", "--served-model-name", "a,b,c"},
		"two models are called":          {"built-in", "--model", "/x/built-in"},
		"--trace records one model":      {"--trace", "t.json", "--model", "built-in", "--model", fixtures.Dir(t, fixtures.Names(t)[0]), "--trace", "t.json"},
		"built-in: --load-format is \"d": {"--model", "built-in", "--model", "phi-tiny-moe", "--load-format", "dummy"},
		"there is no model \"other\"":    {"--model", "built-in", "--model", "other"},
		"must be a name, or differe":     {"--served-model-name", "a,a"},
	} {
		_, errors, code := invoke(t, strings.NewReader(""), append([]string{"serve", "--port", "0", "--emulate", "hbm=256MiB"}, args...)...)
		if code == 0 || !strings.Contains(errors, want) {
			t.Errorf("%v: exit code %d: %s; want %q", args, code, errors, want)
		}
	}
}

// TestServedSettings: models that take turns have all settings but the model in common.
func TestServedSettings(t *testing.T) {
	set, err := read(t, []string{"--model", "mixtral-8x7b,phi-3.5-moe", "--load-format", "dummy", "--host-paths", "2", "--host-paths-mode", "wait"}, nil, "")
	if err != nil {
		t.Fatal(err)
	}
	all, err := servedModels(set)
	if err != nil || len(all) != 2 {
		t.Fatalf("%d models, %v", len(all), err)
	}
	for i, m := range all {
		want := set.Settings
		if want.Model.Name = []string{"mixtral-8x7b", "phi-3.5-moe"}[i]; m.set.Settings != want {
			t.Errorf("model %d: %+v, want %+v", i, m.set.Settings, want)
		}
	}
}
