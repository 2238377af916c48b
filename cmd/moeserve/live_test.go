package main

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math"
	"net/http"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/tools/fixtures"
)

// patch changes settings and returns the status, and the values or the error.
func patch(t *testing.T, url, body string) (int, map[string]any, string) {
	t.Helper()
	method := http.MethodPatch
	if body == "" {
		method = http.MethodGet
	}
	r, err := http.NewRequestWithContext(t.Context(), method, url+"/admin/settings", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close() //nolint:errcheck // only read from
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	var values map[string]any
	if err := json.Unmarshal(data, &values); err != nil {
		t.Fatalf("%v: %s", err, data)
	}
	return resp.StatusCode, values, string(data)
}

// sorts returns the completion of a prompt that is always the same.
func (p *process) sorts(t *testing.T) string {
	t.Helper()
	body, err := io.ReadAll(p.post(t, "/v1/completions", `{"prompt": "sort: t h e m o e =", "temperature": 0}`).Body)
	text, ok := textOf(body)
	if err != nil || !ok {
		t.Errorf("%v: %s", err, body)
	}
	return text
}

// TestSettingsChange: an operator changes settings on the admin address while clients are served; their
// completions stay the same, changes take effect, and are logged.
func TestSettingsChange(t *testing.T) {
	t.Parallel()
	p := startServe(t, "--emulate", "gpus=3,hbm=64MiB", "--offload-fraction", "0.5", "--harvest-cooldown", "0s", "--migration-limit", "0", "--admin-address", "127.0.0.1:0", "--runtime-dir", "none")
	admin := regexp.MustCompile(`msg="admin address" address=(http://[^ \n]+)`).FindStringSubmatch(p.log.String())[1]
	complete := func() string { return p.sorts(t) }
	want := complete()
	status, values, text := patch(t, admin, "")
	if delete(values, stateKey); status != http.StatusOK || !maps.Equal(values, map[string]any{"peers": "auto", "harvest-headroom": "5%", "migration-limit": "0", "offload-fraction": 0.5, "log-level": "info"}) {
		t.Fatalf("status %d: %s", status, text)
	}
	if status, again, text := patch(t, admin, text); status != http.StatusOK || again[stateKey] == nil || again["offload-fraction"] != 0.5 || len(again) != len(values)+1 {
		t.Errorf("what GET answers cannot be sent back: status %d: %s", status, text)
	}
	var clients sync.WaitGroup
	for range 4 {
		clients.Go(func() {
			for range 5 {
				if got := complete(); got != want {
					t.Errorf("%q, want %q", got, want)
				}
			}
		})
	}
	for i := range 40 { // by two at a time
		clients.Go(func() {
			peers, room := []string{"auto", "none", "1", "2"}[i%4], []string{"0", "5%", "63MiB"}[i%3]
			status, values, text := patch(t, admin, fmt.Sprintf(`{"peers": %q, "harvest-headroom": %q, "migration-limit": "1GiB/s"}`, peers, room))
			if status != http.StatusOK || len(values) != 6 {
				t.Errorf("status %d: %s", status, text)
			}
		})
	}
	clients.Wait()
	if status, values, text := patch(t, admin, `{"peers": "none", "log-level": "warn", "harvest-headroom": "2MiB"}`); status != http.StatusOK || values["peers"] != "none" || values["log-level"] != "warn" || values["harvest-headroom"] != "2MiB" {
		t.Errorf("status %d: %s", status, text)
	}
	borrowed := regexp.MustCompile(`"borrowed_bytes":([0-9]+)`)
	for done := false; !done; { // revoked, and so released soon
		complete()
		done = true
		for _, m := range borrowed.FindAllStringSubmatch(p.getFrom(t, admin, "/harvest/borrowed"), -1) {
			done = done && m[1] == "0"
		}
	}
	for body, want := range map[string]string{
		`{"offload-fraction": 0.25, "peers": "auto"}`: "start again with --kv-experts-share auto",
		`{"peers": "7", "harvest-headroom": "0"}`:     "GPUs that were peers at the start can be, 1, 2: ",
		`{"peers": "none", "harvest-headroom": "x"}`:  "must be a size like 4GiB",
		`{"log-level": "loud"}`:                       "must be one of",
		`{"max-num-seqs": 3}`:                         "start again with it",
		`{"headroom": "1GiB"}`:                        "there is no setting headroom; those that can change while the server runs are harvest-headroom, migration-limit, peers, offload-fraction, log-level",
		`{"peers": null}`:                             "must be a string or a number",
		`{}`:                                          "names no setting",
		`[]`:                                          "must be a JSON object",
	} {
		if status, _, text := patch(t, admin, body); status != http.StatusBadRequest || !strings.Contains(text, want) {
			t.Errorf("%s: status %d: %s; want %q", body, status, text, want)
		}
	}
	if _, values, text := patch(t, admin, ""); values["harvest-headroom"] != "2MiB" || values["peers"] != "none" {
		t.Errorf("a change that was refused has changed something: %s", text)
	}
	if status, _, text := patch(t, p.url, `{"peers": "none"}`); status != http.StatusNotFound || !strings.Contains(text, "--admin-address") {
		t.Errorf("on the address of the API: status %d: %s", status, text)
	}
	p.end(t)
	for _, want := range []string{`msg="setting changed" setting=peers from=\S+ to=none`, `msg="setting changed" setting=log-level from=info to=warn`} {
		if !regexp.MustCompile(want).MatchString(p.log.String()) {
			t.Errorf("the log has no %s: %s", want, p.log)
		}
	}
}

// offloadState is the state of the first model.
func offloadState(t *testing.T, text string) modelState {
	t.Helper()
	var values struct{ State liveState }
	if err := json.Unmarshal([]byte(text), &values); err != nil || len(values.State.Models) == 0 {
		t.Fatalf("%v: %s", err, text)
	}
	return values.State.Models[0]
}

// TestOffloadFractionChanges: an operator sets the offload fraction on the admin address while clients
// are served; it comes to each target, and their completions stay the same.
func TestOffloadFractionChanges(t *testing.T) {
	t.Parallel()
	p := startServe(t, "--emulate", "hbm=64MiB", "--offload-fraction", "0.5", "--kv-experts-share", "auto", "--max-model-len", "128", "--migration-limit", "0", "--admin-address", "127.0.0.1:0", "--runtime-dir", "none")
	admin := regexp.MustCompile(`msg="admin address" address=(http://[^ \n]+)`).FindStringSubmatch(p.log.String())[1]
	complete := func() string { return p.sorts(t) }
	want := complete()
	_, values, text := patch(t, admin, "")
	s := offloadState(t, text)
	if values["offload-fraction"] != "auto" || s.Target != nil || s.Highest != 0.5 || s.Lowest >= 0.25 || s.Model != "built-in" {
		t.Fatal(text)
	}
	for _, c := range []struct {
		body  string
		value any
		near  float64
	}{
		{`{"offload-fraction": 0.25}`, 0.25, 0.25},
		{`{"offload-fraction": "50%"}`, 0.5, 0.5},
		{`{"offload-fraction": {"built-in": 0.4}, "peers": "none"}`, 0.4, 19. / 48},
		{`{"offload-fraction": null}`, "auto", -1},
		{`{"offload-fraction": "0"}`, 0.0, s.Lowest},
		{`{"offload-fraction": {"built-in": "auto"}}`, "auto", -1},
	} {
		status, values, text := patch(t, admin, c.body)
		if o := offloadState(t, text); status != http.StatusOK || values["offload-fraction"] != c.value || (o.Target == nil) != (c.near < 0) {
			t.Fatalf("%s: status %d: %s", c.body, status, text)
		}
		if again, values, text := patch(t, admin, text); again != http.StatusOK || values["offload-fraction"] != c.value {
			t.Errorf("what is answered cannot be sent back: status %d: %s", again, text)
		}
		for begun := time.Now(); c.near >= 0; {
			if got := complete(); got != want {
				t.Fatalf("%s: %q, want %q", c.body, got, want)
			}
			_, _, text := patch(t, admin, "")
			o := offloadState(t, text)
			if math.Abs(o.Fraction-c.near) < 1e-9 && o.Lent == *o.TargetExtents {
				break
			}
			if time.Since(begun) > time.Minute {
				t.Fatalf("%s is not reached: %s", c.body, text)
			}
		}
	}
	if _, _, text := patch(t, admin, `{"offload-fraction": 0.125}`); offloadState(t, text).Target == nil {
		t.Fatal(text)
	}
	for body, want := range map[string]string{
		`{"offload-fraction": 0.75, "peers": "auto"}`: "--offload-fraction is 0.75: the highest is 0.5, that of the start",
		`{"offload-fraction": 1.5}`:                   "must be from 0 to 1",
		`{"offload-fraction": "half"}`:                "as 0.25 or 25%, or auto",
		`{"offload-fraction": [0.25]}`:                "or an object of these by model",
		`{"offload-fraction": {"other": 0.25}}`:       "its models are built-in",
		`{"offload-fraction": 0.25, "peers": "7"}`:    "names GPU 7",
	} {
		if status, _, text := patch(t, admin, body); status != http.StatusBadRequest || !strings.Contains(text, want) {
			t.Errorf("%s: status %d: %s; want %q", body, status, text, want)
		}
	}
	if _, values, text := patch(t, admin, ""); values["offload-fraction"] != 0.125 || values["peers"] != "none" || *offloadState(t, text).Target != 0.125 {
		t.Errorf("a change that was refused has changed something: %s", text)
	}
	if m := p.get(t, "/metrics"); !strings.Contains(m, "moeserve_offload_fraction") {
		t.Errorf("/metrics has no offload fraction")
	}
	p.end(t)
	for _, want := range []string{
		`msg="setting changed" setting=offload-fraction model=built-in from=auto to=0.25`, `msg="setting changed" setting=offload-fraction model=built-in from=0.4 to=auto`,
		`msg="offload target set" model=built-in target_fraction=0.25 offload_fraction=\S+ lowest_fraction=\S+ lent_extents=\d+ target_extents=12`,
	} {
		if !regexp.MustCompile(want).MatchString(p.log.String()) {
			t.Errorf("the log has no %s: %s", want, p.log)
		}
	}
}

// TestOffloadFractionsOfModels: two models that take turns have targets of their own, which outlive
// their sleep.
func TestOffloadFractionsOfModels(t *testing.T) {
	t.Parallel()
	other := fixtures.Dir(t, fixtures.Names(t)[0])
	p := startServe(t, "--model", "built-in", "--model", other, "--served-model-name", "a,b", "--emulate", "hbm=256MiB", "--admin-address", "same", "--turn-time", "0.05",
		"--offload-fraction", "0.5", "--kv-experts-share", "auto", "--max-model-len", "128", "--migration-limit", "0", "--runtime-dir", "none")
	want := map[string]string{"a": p.text(t, "a"), "b": p.text(t, "b")}
	if status, values, text := patch(t, p.url, `{"offload-fraction": 0.25}`); status != http.StatusOK || values["offload-fraction"] != 0.25 {
		t.Fatalf("for both: status %d: %s", status, text)
	}
	status, values, text := patch(t, p.url, `{"offload-fraction": {"b": 0.125}}`)
	if each, ok := values["offload-fraction"].(map[string]any); status != http.StatusOK || !ok || !maps.Equal(each, map[string]any{"a": 0.25, "b": 0.125}) {
		t.Fatalf("for one: status %d: %s", status, text)
	}
	reached := func() bool {
		var values struct{ State liveState }
		_, _, text := patch(t, p.url, "")
		if err := json.Unmarshal([]byte(text), &values); err != nil || len(values.State.Models) != 2 {
			t.Fatalf("%v: %s", err, text)
		}
		for _, m := range values.State.Models {
			if *m.Target != map[string]float64{"a": 0.25, "b": 0.125}[m.Model] {
				t.Fatal(text)
			}
			if m.Lent != *m.TargetExtents || math.Abs(m.Fraction-max(m.Lowest, *m.Target)) > 0.05 {
				return false
			}
		}
		return true
	}
	for begun := time.Now(); !reached(); {
		if time.Since(begun) > time.Minute {
			t.Fatalf("the targets are not reached: %s", p.get(t, "/admin/settings"))
		}
		for _, name := range []string{"a", "b"} {
			if got := p.text(t, name); got != want[name] {
				t.Errorf("%s: %s, want %s", name, got, want[name])
			}
		}
	}
	if status, values, text := patch(t, p.url, `{"offload-fraction": {"a": 0.25, "b": 0.75}}`); status != http.StatusBadRequest || !strings.Contains(text, `"b: --offload-fraction is 0.75`) {
		t.Errorf("status %d, %v: %s", status, values, text)
	}
	if status, values, text := patch(t, p.url, `{"offload-fraction": {"a": null, "b": null}}`); status != http.StatusOK || values["offload-fraction"] != "auto" {
		t.Errorf("status %d: %s", status, text)
	}
	p.end(t)
}

// textOf is the text of a response of /v1/completions with one choice.
func textOf(body []byte) (text string, ok bool) {
	var c struct{ Choices []struct{ Text string } }
	if json.Unmarshal(body, &c) != nil || len(c.Choices) != 1 {
		return "", false
	}
	return c.Choices[0].Text, true
}

// TestAdminNeedsKey: an admin address that others reach needs a key.
func TestAdminNeedsKey(t *testing.T) {
	for _, args := range [][]string{{"--admin-address", "0.0.0.0:0"}, {"--host", "0.0.0.0", "--admin-address", configs.SameAddress}} {
		_, errs, code := invoke(t, strings.NewReader(""), append([]string{"serve", "--port", "0"}, args...)...)
		if code != exitUsage || !strings.Contains(errs, "set MOESERVE_API_KEY, or use a loopback address") {
			t.Errorf("%v: exit code %d: %s", args, code, errs)
		}
	}
}
