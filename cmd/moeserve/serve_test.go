package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/node"
)

// process is a server in a process of its own.
type process struct {
	cmd *exec.Cmd
	url string
	// log is standard error, once it has ended.
	log *bytes.Buffer
	// rest is who reads it to its end.
	rest sync.WaitGroup
}

var servingAt = regexp.MustCompile(`"?msg"?[=:]"?serving"?[ ,]"?model"?[=:]"?([^" ]+)"?[ ,]"?address"?[=:]"?(https?://[^"]+)"?}?$`)

// startServe starts a server on a free port and waits until it serves. It is ended
// with the test, if it has not ended before.
func startServe(t *testing.T, args ...string) *process {
	t.Helper()
	p := &process{log: &bytes.Buffer{}, cmd: exec.CommandContext(context.WithoutCancel(t.Context()), "moeserve", append([]string{"serve", "--port", "0"}, args...)...)}
	p.cmd.Dir = t.TempDir()
	stderr, err := p.cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(stderr)
	for lines.Scan() {
		if m := servingAt.FindStringSubmatch(lines.Text()); m != nil {
			p.url = m[2]
			break
		}
		p.log.WriteString(lines.Text() + "\n")
	}
	if p.url == "" {
		t.Fatalf("it does not serve: %v; %s", p.cmd.Wait(), p.log)
	}
	p.rest.Go(func() {
		for lines.Scan() {
			p.log.WriteString(lines.Text() + "\n")
		}
	})
	t.Cleanup(func() {
		if p.cmd.ProcessState == nil {
			p.end(t)
		}
		p.rest.Wait()
	})
	return p
}

// end ends the server as a service manager does, and checks that it ends well.
func (p *process) end(t *testing.T) {
	t.Helper()
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	p.rest.Wait()
	if err := p.cmd.Wait(); err != nil {
		t.Errorf("ended with %v; %s", err, p.log)
	}
}

func (p *process) post(t *testing.T, path, body string) *http.Response {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, p.url+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { resp.Body.Close() }) //nolint:errcheck // only read from
	return resp
}

// With --log-format json every line on standard error is JSON: at the start, of requests, at the
// end, and of errors that end the command.
func TestServeLogsJSON(t *testing.T) {
	p := startServe(t, "--emulate", "hbm=256MiB", "--offload-fraction", "0.5", "--log-format", "json")
	if answer, err := io.ReadAll(p.post(t, "/v1/completions", `{"prompt": "1+2=", "temperature": 0}`).Body); err != nil {
		t.Fatalf("%v: %s", err, answer)
	}
	p.post(t, "/v1/completions", `{"prompt": "1+2=", "temperature": -1}`)
	port := p.url[strings.LastIndexByte(p.url, ':')+1:]
	_, taken, code := invoke(t, strings.NewReader(""), "serve", "--port", port, "--log-format", "json")
	if code != exitUsage {
		t.Errorf("on a port that is taken: exit code %d", code)
	}
	_, unknown, _ := invoke(t, strings.NewReader(""), "serve", "--log-format", "json", "--offload-fraction", "2")
	p.end(t)
	messages := map[string]int{}
	for line := range strings.Lines(p.log.String() + taken + unknown) {
		var m struct{ Msg, Level string }
		if err := json.Unmarshal([]byte(line), &m); err != nil || m.Msg == "" || m.Level == "" {
			t.Errorf("%v: %q", err, line)
		}
		messages[m.Msg]++
	}
	for _, want := range []string{"model loaded", "device", "experts", "peer", "KV cache"} {
		if messages[want] == 0 {
			t.Errorf("the log has no %q: %v", want, messages)
		}
	}
	if messages["request"] != 2 || !strings.Contains(taken, "cannot serve on") || !strings.Contains(unknown, "offload-fraction") {
		t.Errorf("%v; %s; %s", messages, taken, unknown)
	}
}

// SIGTERM lets what is under way finish, says so, and then the exit code is 0.
func TestServe(t *testing.T) {
	if _, err := os.FindProcess(os.Getpid()); err != nil {
		t.Skip(err)
	}
	p := startServe(t, "--emulate", "pace,latency=5ms", "--offload-fraction", "1", "--served-model-name", "small")
	r := p.post(t, "/v1/completions", `{"model": "small", "prompt": "1+2=", "temperature": 0, "ignore_eos": true, "max_tokens": 100, "stream": true}`)
	body := bufio.NewReader(r.Body)
	if _, err := body.ReadString('\n'); err != nil || r.StatusCode != http.StatusOK {
		t.Fatalf("status %d, %v", r.StatusCode, err)
	}
	p.end(t)
	rest, err := io.ReadAll(body)
	if err != nil || !strings.HasSuffix(string(rest), "data: [DONE]\n\n") || !strings.Contains(string(rest), `"finish_reason":"length"`) {
		t.Errorf("the answer under way ends with %v, %q", err, rest)
	}
	for _, want := range []string{
		`level=INFO msg="draining: new requests are refused, those under way finish; a second signal ends at once" running=1 timeout_s=30`,
		`level=INFO msg=request .* endpoint=/v1/completions .* status=200 .* prompt_tokens=4 completion_tokens=100 finish_reason=length`,
	} {
		if !regexp.MustCompile(want).MatchString(p.log.String()) {
			t.Errorf("standard error has no %s: %s", want, p.log)
		}
	}
}

// get is what a GET of a path answers.
func (p *process) get(t *testing.T, path string) string {
	t.Helper()
	return p.getFrom(t, p.url, path)
}

// getFrom is what a GET of a path of an address answers.
func (*process) getFrom(t *testing.T, url, path string) string {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url+path, http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close() //nolint:errcheck // only read from
	body, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("%s: status %d, %v: %s", path, resp.StatusCode, err, body)
	}
	return string(body)
}

// An operator sees where experts are, and hears of it when others take a peer's
// memory; clients get the same answers before and after.
func TestServePeers(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	// It begins when the model is loaded: others come 8 s later, by when a slow machine
	// has answered, too.
	trace := filepath.Join(dir, "others.csv")
	if err := os.WriteFile(trace, []byte("time_s,peer,bytes\n0,1,0\n0,2,0\n8,1,268435456\n8,2,0\n"), 0o666); err != nil {
		t.Fatal(err)
	}
	p := startServe(t, "--emulate", "hbm=256MiB", "--offload-fraction", "0.5", "--offload-tier", "peer", "--availability-trace", trace)
	const body = `{"prompt": "sort: t h e m o e =", "temperature": 0}`
	answers := func() {
		answer, err := io.ReadAll(p.post(t, "/v1/completions", body).Body)
		if err != nil || !strings.Contains(string(answer), "e e h m o t") {
			t.Errorf("%v: %s", err, answer)
		}
	}
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, p.url+"/debug/events", http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	events, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer events.Body.Close() //nolint:errcheck // only read from
	answers()
	type residency struct {
		Experts struct {
			Layers []struct {
				Experts []struct{ Tier, Peer string }
			}
		}
		Peers []struct {
			Device string
			GPU    int
		}
		Harvest struct {
			Peers []struct {
				Device string
				Used   int64 `json:"used_bytes"`
				Slabs  []struct{ Segments []struct{ Client string } }
			}
		}
	}
	// at counts the experts that have a copy on a peer.
	at := func() map[string]int {
		var v residency
		if err := json.Unmarshal([]byte(p.get(t, "/debug/residency")), &v); err != nil {
			t.Fatal(err)
		}
		n := map[string]int{}
		for _, l := range v.Experts.Layers {
			for _, e := range l.Experts {
				if e.Peer != "" {
					n[e.Peer]++
				}
				n[e.Tier]++
			}
		}
		for _, h := range v.Harvest.Peers {
			for _, s := range h.Slabs {
				n["segments"] += len(s.Segments)
			}
		}
		if len(v.Peers) != 2 || v.Peers[0].Device != "gpu1" || v.Peers[0].GPU != 1 || len(v.Harvest.Peers) != 2 {
			t.Errorf("%+v", v)
		}
		return n
	}
	if n := at(); n["gpu1"] == 0 || n["gpu1"]+n["gpu2"] != 24 || n["segments"] != 24 || n["resident"] != 24 || n["resident"]+n["peer"]+n["cached"] != 48 {
		t.Errorf("experts are %v", n)
	}
	heard := map[string]int{}
	for lines := bufio.NewScanner(events.Body); heard["harvest.revocation_ended"] == 0 && lines.Scan(); {
		if name, ok := strings.CutPrefix(lines.Text(), "event: "); ok {
			heard[name]++
		}
	}
	if heard["harvest.revocation_ended"] == 0 || heard["harvest.revoked"] == 0 || heard["experts.demoted"] == 0 {
		t.Errorf("heard of %v", heard)
	}
	answers()
	// The others, which were refused the memory, try again once they have asked for it.
	metrics := p.get(t, "/metrics")
	for range 1000 {
		if strings.Contains(metrics, `moeserve_harvest_bytes{device="gpu1",state="other_processes"} 2.68435456e+08`) {
			break
		}
		metrics = p.get(t, "/metrics")
	}
	for _, want := range []string{
		`(?m)^moeserve_harvest_revocations_total{client="experts",reason="external"} [1-9]`,
		`(?m)^moeserve_harvest_drain_seconds_count [1-9]`,
		`(?m)^moeserve_harvest_bytes{device="gpu2",state="used"} [1-9]`,
		`(?m)^moeserve_harvest_bytes{device="gpu1",state="other_processes"} 2.68435456e\+08$`,
		`(?m)^moeserve_expert_fetch_bytes_total{tier="peer"} [1-9]`,
		`(?m)^moeserve_expert_uses_total{tier="peer"} [1-9]`,
		`(?m)^moeserve_experts{tier="resident"} 24$`,
		`(?m)^moeserve_expert_moves_total{move="revoked"} [1-9]`,
		`(?m)^moeserve_expert_migration_bytes_total [1-9]`,
		`(?m)^moeserve_expert_prefetch_predicted_total [1-9]`,
		`(?m)^moeserve_copy_bytes_total{dst="gpu0",src="gpu2"} [1-9]`,
	} {
		if !regexp.MustCompile(want).MatchString(metrics) {
			t.Errorf("metrics have no %s: %s", want, metrics)
		}
	}
	p.end(t)
	if _, err := io.Copy(io.Discard, events.Body); err != nil {
		t.Errorf("the stream of events breaks off: %v", err)
	}
}

// A second signal does not wait for anything.
func TestServeSecondSignal(t *testing.T) {
	testSecondSignal(t, syscall.SIGTERM)
}

// So it is where the shell of a script has started the server behind &, with SIGINT ignored.
func TestServeSecondInterruptOfScript(t *testing.T) {
	signal.Ignore(syscall.SIGINT) // which the server inherits
	defer signal.Reset(syscall.SIGINT)
	testSecondSignal(t, syscall.SIGINT)
}

func testSecondSignal(t *testing.T, sig syscall.Signal) {
	p := startServe(t, "--emulate", "pace,latency=50ms", "--offload-fraction", "1")
	r := p.post(t, "/v1/completions", `{"prompt": "1+2=", "ignore_eos": true, "max_tokens": 200, "stream": true}`)
	if _, err := r.Body.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	var exit *exec.ExitError
	ended := make(chan error, 1)
	go func() { ended <- p.cmd.Wait() }()
	for waiting := true; waiting; {
		if err := p.cmd.Process.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
			t.Fatal(err)
		}
		select {
		case err := <-ended:
			waiting = false
			if !errors.As(err, &exit) {
				t.Errorf("ended with %v", err)
			}
		case <-time.After(50 * time.Millisecond):
		}
	}
	if d := time.Since(start); d > time.Minute {
		t.Errorf("took %v to end", d)
	}
}

// The name of a directory's model, a port that is taken, and an address that others
// can reach.
func TestServeNames(t *testing.T) {
	dir := fixtureDir(t, "mixtral")
	p := startServe(t, "--model", dir+"/.", "--host", "0.0.0.0")
	if !strings.Contains(p.log.String(), "without authentication; set MOESERVE_API_KEY") {
		t.Errorf("log: %s", p.log)
	}
	p.url = strings.Replace(p.url, "[::]", "127.0.0.1", 1)
	r := p.post(t, "/v1/completions", `{"model": "mixtral", "prompt": "a", "max_tokens": 1}`)
	if r.StatusCode != http.StatusOK {
		t.Errorf("status %d", r.StatusCode)
	}
	port := p.url[strings.LastIndexByte(p.url, ':')+1:]
	_, stderr, code := invoke(t, strings.NewReader(""), "serve", "--port", port)
	if code != exitUsage || !strings.Contains(stderr, "cannot serve on 127.0.0.1:"+port+": ") {
		t.Errorf("on a port that is taken: %d, %s", code, stderr)
	}
	_, stderr, code = invoke(t, strings.NewReader(""), "serve", "--port", "8765", "--admin-address", "127.0.0.1:8765")
	if code != exitUsage || !strings.Contains(stderr, "--admin-address is 127.0.0.1:8765, the address of the API: give same") {
		t.Errorf("with the admin address that is the API's: %d, %s", code, stderr)
	}
}

// A device that is lost ends the server with its exit code.
func TestServeLostDevice(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	var lose func() error
	o := node.Options{OpenMachine: func() (device.Machine, error) {
		m, err := emulated.Open(emulated.Options{})
		if m, ok := m.(*emulated.Machine); ok {
			lose = func() error { return m.Lose(0) }
		}
		return m, err
	}}
	set := &settings{Settings: configs.Defaults()}
	set.Serve.Port = 0
	out, in := io.Pipe()
	ended := make(chan error, 1)
	go func() {
		err := serve(t.Context(), &streams{err: in}, set, o)
		in.CloseWithError(io.EOF) //nolint:errcheck // never fails
		ended <- err
	}()
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		m := servingAt.FindStringSubmatch(lines.Text())
		if m == nil {
			continue
		}
		if err := lose(); err != nil {
			t.Error(err)
		}
		go func() {
			for lines.Scan() { // what is logged wants to be read
			}
		}()
		p := &process{url: m[2]}
		r := p.post(t, "/v1/completions", `{"prompt": "1+2="}`)
		if body, err := io.ReadAll(r.Body); err != nil || r.StatusCode != http.StatusInternalServerError {
			t.Errorf("status %d, %v: %s", r.StatusCode, err, body)
		}
		break
	}
	if err := <-ended; exitCode(err) != exitDevice {
		t.Errorf("ended with %v, exit code %d", err, exitCode(err))
	}
	http.DefaultClient.CloseIdleConnections()
}
