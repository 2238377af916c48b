package router

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/go-zeromq/zmq4"
	"github.com/llm-d/llm-d-kv-cache/pkg/kvevents"
)

// program builds moeserve once.
var program = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "router")
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, "moeserve")
	c := exec.Command("go", "build", "-o", path, "./cmd/moeserve")
	c.Dir, c.Env = "../..", append(os.Environ(), "CGO_ENABLED=0")
	if out, err := c.CombinedOutput(); err != nil {
		return path, fmt.Errorf("%w: %s", err, out)
	}
	return path, nil
})

func TestMain(m *testing.M) {
	code := m.Run()
	if path, _ := program(); path != "" {
		os.RemoveAll(filepath.Dir(path))
	}
	os.Exit(code)
}

// node is a server in a process of its own.
type node struct {
	args []string
	// address is that of its API, as the router knows the node.
	address, admin, events, replays string

	command *exec.Cmd
	// log is read to its end.
	log sync.WaitGroup
	// asked are the token ids of the sequences that it has run: prompts with their completions.
	asked [][]uint32
}

// newNode starts a node of the built-in model, which publishes KV events.
func newNode(t *testing.T, args ...string) *node {
	t.Helper()
	n := &node{address: freeAddress(t), events: "tcp://" + freeAddress(t), replays: "tcp://" + freeAddress(t)}
	n.serve(t, model, args...)
	return n
}

// serve starts the node under the name of a model, until the test ends. Nodes without an address for events publish none.
func (n *node) serve(t *testing.T, name string, args ...string) {
	t.Helper()
	host, port, err := net.SplitHostPort(n.address)
	if err != nil {
		t.Fatal(err)
	}
	n.admin = freeAddress(t)
	n.args = []string{"serve", "--host", host, "--port", port, "--admin-address", n.admin, "--served-model-name", name, "--emulate", "hbm=64MiB"}
	if n.events != "" {
		config, err := json.Marshal(map[string]any{
			"enable_kv_cache_events": true, "endpoint": "@" + n.events, "replay_endpoint": n.replays, "topic": "kv@" + n.address + "@" + name,
		})
		if err != nil {
			t.Fatal(err)
		}
		n.args = append(n.args, "--kv-events-config", string(config))
	}
	n.args = append(n.args, args...)
	n.start(t)
	t.Cleanup(func() { n.stop(t) })
}

func freeAddress(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

func (n *node) start(t *testing.T) {
	t.Helper()
	path, err := program()
	if err != nil {
		t.Fatal(err)
	}
	n.command = exec.Command(path, n.args...)
	for _, v := range os.Environ() {
		if !strings.HasPrefix(v, "MOESERVE_") { // settings, as it sees them
			n.command.Env = append(n.command.Env, v)
		}
	}
	log, err := n.command.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := n.command.Start(); err != nil {
		t.Fatal(err)
	}
	var said bytes.Buffer
	for lines := bufio.NewScanner(io.TeeReader(log, &said)); lines.Scan(); {
		if strings.Contains(lines.Text(), "msg=serving") {
			n.log.Go(func() { _, _ = io.Copy(io.Discard, log) })
			return
		}
	}
	t.Fatalf("it does not serve: %s", &said)
}

// kill ends the process as kill -9 does.
func (n *node) kill(t *testing.T) {
	t.Helper()
	if err := n.command.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	n.log.Wait()
	_ = n.command.Wait() // it was killed
}

// stop ends the process as a service manager does, if it has not ended.
func (n *node) stop(t *testing.T) {
	t.Helper()
	if n.command.ProcessState != nil {
		return
	}
	_ = n.command.Process.Signal(syscall.SIGTERM)
	n.log.Wait()
	if err := n.command.Wait(); err != nil {
		t.Error(err)
	}
}

// post posts a body, and reads the answer into to, unless that is nil.
func post(t *testing.T, url string, body, to any) {
	t.Helper()
	data, err := json.Marshal(body)
	if err != nil {
		t.Fatal(err)
	}
	r, err := http.Post(url, "application/json", bytes.NewReader(data))
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	answer, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	if r.StatusCode != http.StatusOK {
		t.Fatalf("%s: %s: %s", url, r.Status, answer)
	}
	if to == nil {
		return
	}
	if err := json.Unmarshal(answer, to); err != nil {
		t.Fatalf("%s: %v: %s", url, err, answer)
	}
}

// ask asks for a completion of 4 tokens. It returns the prompt's token ids, as a router gets them from the node, and how
// many of them the node found in its caches.
func (n *node) ask(t *testing.T, prompt any) (tokens []uint32, cached int) {
	t.Helper()
	body := map[string]any{"model": model, "prompt": prompt, "max_tokens": 4, "ignore_eos": true, "temperature": 0, "return_token_ids": true}
	var rendered []struct {
		Tokens []uint32 `json:"token_ids"`
	}
	post(t, "http://"+n.address+"/v1/completions/render", body, &rendered)
	var completion struct {
		Choices []struct {
			Prompt []uint32 `json:"prompt_token_ids"`
			Tokens []uint32 `json:"token_ids"`
		}
		Usage struct {
			Details struct {
				Cached int `json:"cached_tokens"`
			} `json:"prompt_tokens_details"`
		}
	}
	post(t, "http://"+n.address+"/v1/completions", body, &completion)
	if len(rendered) != 1 || len(completion.Choices) != 1 {
		t.Fatalf("%d prompts and %d completions of one", len(rendered), len(completion.Choices))
	}
	c := completion.Choices[0]
	n.asked = append(n.asked, append(c.Prompt, c.Tokens...))
	return rendered[0].Tokens, completion.Usage.Details.Cached
}

// replay asks for all batches that the node keeps, in the form in which the router's decoder takes them.
func (n *node) replay(t *testing.T) (messages []*kvevents.RawMessage) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	s := zmq4.NewDealer(ctx)
	defer s.Close()
	if err := s.Dial(n.replays); err != nil {
		t.Fatal(err)
	}
	if err := s.SendMulti(zmq4.NewMsgFrom(nil, make([]byte, 8))); err != nil {
		t.Fatal(err)
	}
	for {
		m, err := s.Recv()
		if err != nil {
			t.Fatal(err)
		}
		if len(m.Frames) != 4 || len(m.Frames[2]) != 8 {
			t.Fatalf("a replay has %d frames", len(m.Frames))
		}
		number := binary.BigEndian.Uint64(m.Frames[2])
		if number == math.MaxUint64 {
			return messages
		}
		if number != uint64(len(messages)) {
			t.Fatalf("batch %d follows %d others", number, len(messages))
		}
		messages = append(messages, &kvevents.RawMessage{Topic: string(m.Frames[1]), Sequence: number, Payload: m.Frames[3]})
	}
}

const patience = 30 * time.Second

// eventually waits until check returns nothing that is missing.
func eventually(t *testing.T, check func() (missing string)) {
	t.Helper()
	for end := time.Now().Add(patience); ; time.Sleep(5 * time.Millisecond) {
		missing := check()
		if missing == "" {
			return
		}
		if time.Now().After(end) {
			t.Fatal(missing)
		}
	}
}
