package main

import (
	"errors"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// TestServeKilled: a server that is killed, at any moment of its life, leaves sockets and files of KV blocks. The next one
// on the same paths and the same port removes them, and serves the same completions; at its end nothing is left.
func TestServeKilled(t *testing.T) {
	t.Parallel()
	sockets, kv := t.TempDir(), t.TempDir()
	args := []string{
		"--port", freePort(t), "--admin-address", "same", "--emulate", "gpus=3,hbm=64MiB", "--offload-fraction", "0.5", "--migration-limit", "0",
		"--runtime-dir", sockets, "--num-gpu-blocks-override", "64", "--kv-transfer-config",
		`{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"num_file_blocks": 64, "directory": "` + kv + `"}}`,
	}
	left := func() (all []string) {
		for _, pattern := range []string{filepath.Join(sockets, "*"), filepath.Join(kv, "*")} {
			found, err := filepath.Glob(pattern)
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, found...)
		}
		return all
	}
	const prompt = `{"prompt": "Ann gave the red ball to Ben, and Ben gave the green cube to Dan. Who has the red ball?", "temperature": 0, "ignore_eos": true, `
	body := prompt + `"max_tokens": 24}`
	var want string
	begin := func(moment string) *process {
		p := startServe(t, args...)
		if got := left(); len(got) != 2 {
			t.Fatalf("%s: one socket and one folder are expected: %v", moment, got)
		}
		answer, err := io.ReadAll(p.post(t, "/v1/completions", body).Body)
		text, ok := textOf(answer)
		if err != nil || !ok || want != "" && text != want {
			t.Fatalf("%s: %v: %s; want %q", moment, err, answer, want)
		}
		want = text
		return p
	}
	// ask has clients that ask again and again until the server is killed.
	ask := func(p *process, clients *sync.WaitGroup) {
		for range 8 {
			clients.Go(func() {
				for {
					r, err := http.Post(p.url+"/v1/completions", "application/json", strings.NewReader(body)) //nolint:noctx // ends with the server
					if err != nil {
						return // it was killed
					}
					_, _ = io.Copy(io.Discard, r.Body)
					r.Body.Close() //nolint:errcheck // only read from
				}
			})
		}
	}
	for _, m := range []struct {
		moment string
		wait   func(p *process, clients *sync.WaitGroup)
		// ends: by itself it ends at that moment, and may have done so before it is killed.
		ends bool
	}{
		{"while it stores KV blocks", func(p *process, clients *sync.WaitGroup) {
			ask(p, clients)
			for end := time.Now().Add(time.Minute); len(blockFiles(t, kv)) == 0; time.Sleep(time.Millisecond) {
				if time.Now().After(end) {
					t.Fatalf("no file of KV blocks after a minute; %s", p.log)
				}
			}
		}, false},
		{"in the middle of a stream", func(p *process, _ *sync.WaitGroup) {
			stream := p.post(t, "/v1/completions", prompt+`"max_tokens": 100, "stream": true}`).Body
			if _, err := io.ReadFull(stream, make([]byte, 512)); err != nil {
				t.Fatal(err)
			}
		}, false},
		{"as it goes to sleep", func(p *process, clients *sync.WaitGroup) {
			ask(p, clients)
			clients.Go(func() {
				r, err := http.Post(p.url+"/sleep?level=1", "", nil) //nolint:noctx // ends with the server
				if err == nil {
					r.Body.Close() //nolint:errcheck // only read from
				}
			})
			time.Sleep(20 * time.Millisecond)
		}, false},
		{"asleep", func(p *process, _ *sync.WaitGroup) {
			if r := p.post(t, "/sleep?level=2", ""); r.StatusCode != http.StatusOK {
				t.Fatalf("/sleep: status %d", r.StatusCode)
			}
		}, false},
		{"as it ends", func(p *process, clients *sync.WaitGroup) {
			ask(p, clients)
			time.Sleep(50 * time.Millisecond)
			if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Millisecond)
		}, true},
	} {
		p := begin(m.moment)
		var clients sync.WaitGroup
		m.wait(p, &clients)
		kill(t, p.cmd, m.moment, m.ends)
		p.rest.Wait()
		clients.Wait()
		// And as it starts again: at once, when it has made or removed a file, and when it has a port.
		was := left()
		for _, ready := range []func() bool{
			func() bool { return true },
			func() bool { return !slices.Equal(left(), was) },
			func() bool { _, err := http.Get(p.url + "/health"); return err == nil }, //nolint:noctx,bodyclose // a server that is killed
		} {
			again := exec.CommandContext(t.Context(), "moeserve", append([]string{"serve"}, args...)...)
			again.Dir = t.TempDir()
			if err := again.Start(); err != nil {
				t.Fatal(err)
			}
			for began := time.Now(); !ready() && time.Since(began) < 2*time.Second; {
				time.Sleep(time.Millisecond)
			}
			kill(t, again, m.moment+", started again", false)
		}
	}
	begin("at the end").end(t)
	if got := left(); len(got) > 0 {
		t.Errorf("left behind: %v", got)
	}
}

// kill kills a server, which has not ended before unless it may have.
func kill(t *testing.T, server *exec.Cmd, moment string, mayHaveEnded bool) {
	t.Helper()
	if err := server.Process.Kill(); err != nil && !(mayHaveEnded && errors.Is(err, os.ErrProcessDone)) {
		t.Fatalf("%s: %v", moment, err)
	}
	if err := server.Wait(); err == nil && !mayHaveEnded {
		t.Fatalf("%s: a killed server has ended well", moment)
	}
}

// blockFiles are the files of KV blocks in a directory.
func blockFiles(t *testing.T, directory string) []string {
	t.Helper()
	var all []string
	err := filepath.WalkDir(directory, func(path string, d os.DirEntry, err error) error {
		if err == nil && !d.IsDir() && !strings.HasPrefix(d.Name(), "lock") {
			all = append(all, path)
		}
		if os.IsNotExist(err) {
			return nil // removed meanwhile
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// TestServeTrace: a server that is killed leaves its trace but for the last second, and one that cannot be
// written is told while the server runs.
func TestServeTrace(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "trace.json")
	full, kept := startServe(t, "--trace", "/dev/full"), startServe(t, "--trace", path)
	for _, p := range []*process{full, kept} {
		p.post(t, "/v1/completions", `{"prompt": "1+2=", "max_tokens": 2}`)
	}
	for end := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
		if text, err := os.ReadFile(path); err == nil && strings.Contains(string(text), "traceEvents") {
			break
		} else if time.Now().After(end) {
			t.Fatalf("%v: %q", err, text)
		}
	}
	time.Sleep(time.Second)
	for _, p := range []*process{full, kept} {
		if err := p.cmd.Process.Kill(); err != nil {
			t.Error(err)
		}
		p.rest.Wait()
		p.cmd.Wait() //nolint:errcheck // it was killed
	}
	if n := strings.Count(full.log.String(), `level=ERROR msg="the trace cannot be written any more" err="write /dev/full: no space left on device"`); n != 1 {
		t.Errorf("told %d times: %s", n, full.log)
	}
}
