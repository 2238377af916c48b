package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"
)

// TestReclaim: a job asks for memory of a peer that a server has borrowed, on its socket and on
// its admin address; on the address of the API nobody does, unless they are the same.
func TestReclaim(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("MOESERVE_RUNTIME_DIR", dir)
	t.Setenv("MOESERVE_API_KEY", "secret")
	args := []string{"--emulate", "gpus=2,hbm=64MiB", "--offload-fraction", "0.5", "--offload-tier", "peer", "--harvest-headroom", "1MiB"}
	p := startServe(t, append(args, "--admin-address", "127.0.0.1:0")...)
	at := regexp.MustCompile(`msg="admin address" address=(http://[^ \n]+)`).FindStringSubmatch(p.log.String())
	if at == nil {
		t.Fatalf("the log does not say where the admin address is: %s", p.log)
	}
	reclaim := func(args ...string) (out, errs string, code int) {
		return invoke(t, strings.NewReader(""), append([]string{"reclaim"}, args...)...)
	}
	const all = "0.0625" // 64 MiB
	for _, c := range []struct {
		args  string
		code  int
		wants string
	}{
		{"--device 1 --gib 0.01", exitDone, `^GPU 1: 6\d\.\d+ MiB free, 0 B released by 1 in \d+ ms, 3\.\d+ MiB still borrowed\n$`},
		{"--device 7 --gib 1", exitDone, `^no moeserve process borrows memory of GPU 7; its free memory was not checked\n$`},
		{"--device banana --gib 1", exitUsage, "--device is banana: must be the number of a GPU, as in --peers, or its UUID"},
		{"--device -1 --gib 1", exitUsage, "--device is -1: must be the number"},
		{"--device 1 --gib 0.01 --url " + at[1], exitDone, `^GPU 1: .* 0 B released by 1 `},
		{"--device emulated-1 --deadline 30s --gib " + all, exitDone, `^GPU 1: 64\.00 MiB free, 3\.\d+ MiB released by 1 in \d+ ms, 0 B still borrowed\n$`},
		{"--device 1 --gib 1", exitFailed, `(?s)still borrowed\n.*reclaim: 64\.00 MiB of 1\.00 GiB are free on GPU 1: the total memory of the GPU is 64\.00 MiB\n$`},
		{"--device 1 --gib 1 --url " + p.url, exitFailed, "Unknown request URL: GET /harvest/borrowed"},
		{"--gib 1", exitUsage, "--device is not set"},
		{"--device 1", exitUsage, "moeserve: --gib is not set: how much memory is to be free on GPU 1, in GiB"},
		{"--device 1 --gib -1", exitUsage, "--gib is -1: must be above 0"},
		{"--device 1 --gib 1 --deadline 0s", exitUsage, "--deadline is 0s"},
		{"--device 1 --gib 1 --runtime-dir /no/such/dir", exitFailed, "moeserve: reclaim: open /no/such/dir: no such file or directory"},
	} {
		out, errs, code := reclaim(strings.Fields(c.args)...)
		if code != c.code || !regexp.MustCompile(c.wants).MatchString(out+errs) {
			t.Errorf("%s: exit code %d, %s%s, want %s", c.args, code, out, errs, c.wants)
		}
	}
	const body = `{"device": 1, "bytes": 1}`
	for _, c := range []struct {
		url, key string
		status   int
	}{{at[1], "secret", 200}, {at[1], "wrong", 401}, {at[1], "", 401}, {p.url, "secret", 404}} {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, c.url+"/harvest/reclaim", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Content-Type", "application/json")
		r.Header.Set("Authorization", "Bearer "+c.key)
		resp, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(resp.Body)
		resp.Body.Close() //nolint:errcheck // only read from
		if err != nil || resp.StatusCode != c.status || !json.Valid(text) {
			t.Errorf("%s, key %q: status %d, %s", c.url, c.key, resp.StatusCode, text)
		}
	}
	if err := os.Unsetenv("MOESERVE_API_KEY"); err != nil { // which the end of the test undoes, as it was set above
		t.Fatal(err)
	}
	if _, errs, code := reclaim("--device", "1", "--gib", "1", "--url", at[1]); code != exitFailed || !strings.Contains(errs, "API key is missing or wrong") {
		t.Errorf("without the key: exit code %d, %s", code, errs)
	}
	p.end(t)
	if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
		t.Errorf("the server leaves %v behind, %v", left, err)
	}
	p = startServe(t, append(args, "--admin-address", "same", "--runtime-dir", "none")...)
	out, errs, code := reclaim("--device", "1", "--gib", "0.01", "--url", p.url)
	if code != exitDone || !strings.HasPrefix(out, "GPU 1: ") {
		t.Errorf("on the address of the API: exit code %d, %s%s", code, out, errs)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
		t.Errorf("it listens on %v, %v", left, err)
	}
	_, errs, code = invoke(t, strings.NewReader(""), "serve", "--port", "0", "--admin-address", strings.TrimPrefix(p.url, "http://"))
	if code != exitUsage || !strings.Contains(errs, "choose another --admin-address") {
		t.Errorf("on an address that is in use: %s", fmt.Sprint(code, " ", errs))
	}
}

// TestReclaimEncrypted: with a certificate the admin address speaks HTTPS alone, as the API's does.
func TestReclaimEncrypted(t *testing.T) {
	t.Setenv("MOESERVE_RUNTIME_DIR", "none")
	cert, key := certificate(t)
	p := startServe(t, "--emulate", "gpus=2,hbm=64MiB", "--offload-fraction", "0.5", "--admin-address", "127.0.0.1:0", "--ssl-certfile", cert, "--ssl-keyfile", key)
	at := regexp.MustCompile(`msg="admin address" address=https://([^ \n]+)`).FindStringSubmatch(p.log.String())
	if at == nil {
		t.Fatalf("the log does not say where the admin address is: %s", p.log)
	}
	for scheme, want := range map[string]int{"https://": exitDone, "http://": exitFailed} {
		c := exec.CommandContext(t.Context(), "moeserve", "reclaim", "--device", "1", "--gib", "0.01", "--url", scheme+at[1])
		c.Env = append(os.Environ(), "SSL_CERT_FILE="+cert)
		if out, err := c.CombinedOutput(); c.ProcessState.ExitCode() != want {
			t.Errorf("%s: %v, %s", scheme, err, out)
		}
	}
}
