package main

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/moeserve/moeserve/configs"
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

// TestSettingsChange: an operator changes settings on the admin address while clients are served; their
// completions stay the same, changes take effect, and are logged.
func TestSettingsChange(t *testing.T) {
	t.Parallel()
	p := startServe(t, "--emulate", "gpus=3,hbm=64MiB", "--offload-fraction", "0.5", "--harvest-cooldown", "0s", "--migration-limit", "0", "--admin-address", "127.0.0.1:0", "--runtime-dir", "none")
	admin := regexp.MustCompile(`msg="admin address" address=(http://[^ \n]+)`).FindStringSubmatch(p.log.String())[1]
	complete := func() string {
		body, err := io.ReadAll(p.post(t, "/v1/completions", `{"prompt": "sort: t h e m o e =", "temperature": 0}`).Body)
		text, ok := textOf(body)
		if err != nil || !ok {
			t.Errorf("%v: %s", err, body)
		}
		return text
	}
	want := complete()
	status, values, text := patch(t, admin, "")
	if status != http.StatusOK || !maps.Equal(values, map[string]any{"peers": "auto", "harvest-headroom": "5%", "migration-limit": "0", "log-level": "info"}) {
		t.Fatalf("status %d: %s", status, text)
	}
	if status, again, text := patch(t, admin, text); status != http.StatusOK || !maps.Equal(values, again) {
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
			if status != http.StatusOK || len(values) != 4 {
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
		`{"offload-fraction": 0.25}`:                 "--kv-experts-share auto",
		`{"peers": "7", "harvest-headroom": "0"}`:    "GPUs that were peers at the start can change, [1 2]",
		`{"peers": "none", "harvest-headroom": "x"}`: "must be a size like 4GiB",
		`{"log-level": "loud"}`:                      "must be one of",
		`{"max-num-seqs": 3}`:                        "start again with it",
		`{"headroom": "1GiB"}`:                       "there is no setting headroom; those that can change while the server runs are harvest-headroom, migration-limit, peers, log-level",
		`{"peers": null}`:                            "must be a string or a number",
		`{}`:                                         "names no setting",
		`[]`:                                         "must be a JSON object",
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
