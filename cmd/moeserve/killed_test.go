package main

import (
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// TestServeKilled: a server that is killed while it serves leaves sockets and files of KV blocks. The
// next one on the same paths and the same port removes them, and serves the same completions; at its
// end nothing is left.
func TestServeKilled(t *testing.T) {
	t.Parallel()
	sockets, kv := t.TempDir(), t.TempDir()
	port := freePort(t)
	args := []string{
		"--port", port, "--emulate", "gpus=3,hbm=64MiB", "--offload-fraction", "0.5", "--migration-limit", "0", "--runtime-dir", sockets, "--num-gpu-blocks-override", "64",
		"--kv-transfer-config", `{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"num_file_blocks": 64, "directory": "` + kv + `"}}`,
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
	const prompt = "Ann gave the red ball to Ben, and Ben gave the green cube to Dan. Who has the red ball?"
	body := `{"prompt": "` + prompt + `", "temperature": 0, "ignore_eos": true, "max_tokens": 24}`
	var want string
	for round := range 3 {
		p := startServe(t, args...)
		if got := left(); len(got) != 2 {
			t.Fatalf("start %d: one socket and one folder are expected: %v", round, got)
		}
		answer, err := io.ReadAll(p.post(t, "/v1/completions", body).Body)
		text, ok := textOf(answer)
		if err != nil || !ok || round > 0 && text != want {
			t.Fatalf("start %d: %v: %s; want %q", round, err, answer, want)
		}
		want = text
		if round == 2 {
			p.end(t)
			break
		}
		var clients sync.WaitGroup
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
		for len(blockFiles(t, kv)) == 0 {
			time.Sleep(time.Millisecond)
		}
		if err := p.cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		p.rest.Wait()
		if err := p.cmd.Wait(); err == nil {
			t.Fatal("a killed server has ended well")
		}
		clients.Wait()
	}
	if got := left(); len(got) > 0 {
		t.Errorf("left behind: %v", got)
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
