package router

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
)

// routedModel is the model of deploy/router/picker.yaml.
const routedModel = "mixtral-8x7b"

// cluster is three nodes behind the router's own endpoint picker, in a process of its own.
type cluster struct {
	envoy
	nodes []*node
	// endpoints is the path of the picker's file of nodes.
	endpoints string
}

// newCluster starts three nodes, each on an address of its own because the picker takes them to have their events on the
// same port, and the picker with the files of deploy/router.
func newCluster(t *testing.T) *cluster {
	t.Helper()
	program := os.Getenv("MOESERVE_PICKER")
	if program == "" {
		t.Skip("MOESERVE_PICKER is not set: it is the path of the llm-d router's endpoint picker, epp")
	}
	dir := t.TempDir()
	c := &cluster{endpoints: filepath.Join(dir, "endpoints.yaml")}
	hosts := []string{"127.0.0.1", "127.0.0.2", "127.0.0.3"}
	events, replays := freePort(t, hosts...), freePort(t, hosts...)
	for _, host := range hosts {
		n := &node{
			address: net.JoinHostPort(host, freePort(t, host)),
			events:  "tcp://" + net.JoinHostPort(host, events), replays: "tcp://" + net.JoinHostPort(host, replays),
		}
		n.serve(t, routedModel, "--max-num-seqs", "1", "--num-gpu-blocks-override", "400")
		c.nodes = append(c.nodes, n)
	}
	c.list(t, c.nodes...)
	config := filepath.Join(dir, "picker.yaml")
	write(t, config, replaced(t, "picker.yaml",
		"/etc/moeserve-router/endpoints.yaml", c.endpoints,
		"http://10.0.0.1:8000", "http://"+c.nodes[0].address,
		"socketPort: 5557, replaySocketPort: 5558", "socketPort: "+events+", replaySocketPort: "+replays))
	port := freePort(t, "127.0.0.1")
	picker := exec.Command(program, "--pool-name", "moeserve", "--pool-namespace", "local", "--config-file", config,
		"--grpc-port", port, "--grpc-health-port", freePort(t, "127.0.0.1"), "--metrics-port", freePort(t, "127.0.0.1"), "--tracing=false")
	var log bytes.Buffer
	picker.Stdout, picker.Stderr = &log, &log
	if err := picker.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = picker.Process.Signal(syscall.SIGTERM)
		_ = picker.Wait()
		logged(t, log.String())
	})
	// The picker makes its certificate itself.
	connection, err := grpc.NewClient("127.0.0.1:"+port, grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{InsecureSkipVerify: true})))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { connection.Close() })
	c.client = extprocv3.NewExternalProcessorClient(connection)
	return c
}

// logged fails the test where the picker could not look a prompt up, and has what else went wrong in the log of one that
// has failed.
func logged(t *testing.T, log string) {
	const (
		lines = 10
		most  = 1000 // bytes of a line, which may have a stack
	)
	shown := 0
	for line := range strings.Lines(log) {
		line = line[:min(len(line), most)]
		if strings.Contains(line, "failed to prepare per request data") && !t.Failed() {
			t.Error("the picker: ", line)
		}
		if strings.Contains(line, `"level":"error"`) && t.Failed() && shown < lines {
			t.Log("the picker: ", line)
			shown++
		}
	}
}

// freePort is one that is free on each of these addresses.
func freePort(t *testing.T, hosts ...string) string {
	t.Helper()
	for range 100 {
		_, port, err := net.SplitHostPort(freeAddress(t))
		if err != nil {
			t.Fatal(err)
		}
		free := !slices.ContainsFunc(hosts, func(host string) bool {
			l, err := net.Listen("tcp", net.JoinHostPort(host, port))
			if err == nil {
				l.Close()
			}
			return err != nil
		})
		if free {
			return port
		}
	}
	t.Fatalf("no port is free on %v", hosts)
	return ""
}

// list writes the picker's file of nodes, by renaming: it never finds half a file.
func (c *cluster) list(t *testing.T, nodes ...*node) {
	t.Helper()
	text := replaced(t, "endpoints.yaml")
	for i, n := range c.nodes {
		host, port, err := net.SplitHostPort(n.address)
		if err != nil {
			t.Fatal(err)
		}
		line := fmt.Sprintf("  - {name: node-%d, address: \"10.0.0.%d\", port: \"8000\"}\n", i+1, i+1)
		if strings.Count(text, line) != 1 {
			t.Fatalf("endpoints.yaml does not have %q", line)
		}
		mine := strings.NewReplacer(fmt.Sprintf("10.0.0.%d", i+1), host, "8000", port).Replace(line)
		if !slices.Contains(nodes, n) {
			mine = ""
		}
		text = strings.Replace(text, line, mine, 1)
	}
	write(t, c.endpoints+".new", text)
	if err := os.Rename(c.endpoints+".new", c.endpoints); err != nil {
		t.Fatal(err)
	}
}

// replaced is a file of deploy/router with texts, each of which it has once, replaced by others.
func replaced(t *testing.T, name string, pairs ...string) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("../../deploy/router", name))
	if err != nil {
		t.Fatal(err)
	}
	text := string(data)
	for pair := range slices.Chunk(pairs, 2) {
		if strings.Count(text, pair[0]) != 1 {
			t.Fatalf("%s does not have %q once", name, pair[0])
		}
		text = strings.Replace(text, pair[0], pair[1], 1)
	}
	return text
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// conversation is a chat of which the answers are streamed, or a text that goes on.
type conversation struct {
	number int
	chat   bool
}

// request is the one with so many turns of the conversation. The fourth turn is longer than those before it together.
func (c conversation) request(t *testing.T, turns int) (path string, body []byte) {
	t.Helper()
	var text strings.Builder
	var messages []map[string]string
	for turn := 1; turn <= turns; turn++ {
		said := fmt.Sprintf("%d, %d: %s", c.number, turn, story)
		if turn == 4 {
			said += strings.Repeat(story, 5)
		}
		if turn > 1 {
			messages = append(messages, map[string]string{"role": "assistant", "content": "Yes."})
		}
		messages = append(messages, map[string]string{"role": "user", "content": said})
		text.WriteString(said)
	}
	request := map[string]any{"model": routedModel, "max_tokens": 4, "ignore_eos": true, "temperature": 0}
	if c.chat {
		path, request["messages"] = "/v1/chat/completions", messages
		request["stream"], request["stream_options"] = true, map[string]bool{"include_usage": true}
	} else {
		path, request["prompt"] = "/v1/completions", text.String()
	}
	body, err := json.Marshal(request)
	if err != nil {
		t.Fatal(err)
	}
	return path, body
}

// said is a completion, and how long its prompt was.
type said struct {
	text string
	// node has said it.
	node           string
	prompt, cached int // tokens
}

// read reads an answer, streamed or not.
func read(t *testing.T, a answer) said {
	t.Helper()
	if a.status != http.StatusOK {
		t.Fatalf("%s answers %d: %s", a.node, a.status, a.body)
	}
	s := said{node: a.node}
	pieces := [][]byte{a.body}
	if rest, streamed := bytes.CutPrefix(a.body, []byte("data: ")); streamed {
		rest, ended := bytes.CutSuffix(rest, []byte("\n\ndata: [DONE]\n\n"))
		if !ended {
			t.Fatalf("%s has not ended its answer: %s", a.node, a.body)
		}
		pieces = bytes.Split(rest, []byte("\n\ndata: "))
	}
	for _, piece := range pieces {
		var c struct {
			Choices []struct {
				Text  string
				Delta struct{ Content string }
			}
			Usage *struct {
				Prompt  int `json:"prompt_tokens"`
				Details struct {
					Cached int `json:"cached_tokens"`
				} `json:"prompt_tokens_details"`
			}
		}
		if err := json.Unmarshal(piece, &c); err != nil {
			t.Fatalf("%s: %v: %s", a.node, err, piece)
		}
		for _, choice := range c.Choices {
			s.text += choice.Text + choice.Delta.Content
		}
		if c.Usage != nil {
			s.prompt, s.cached = c.Usage.Prompt, c.Usage.Details.Cached
		}
	}
	if s.text == "" || s.prompt == 0 {
		t.Fatalf("%s says nothing: %s", a.node, a.body)
	}
	return s
}

// ask sends the request with so many turns by way of the picker.
func (c *cluster) ask(t *testing.T, v conversation, turns int) said {
	t.Helper()
	path, body := v.request(t, turns)
	return read(t, c.post(t, path, body))
}

// askAt sends it to a node, past the picker.
func (c *cluster) askAt(t *testing.T, n *node, v conversation, turns int) said {
	t.Helper()
	path, body := v.request(t, turns)
	r, err := http.Post("http://"+n.address+path, "application/json", bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	answered, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	return read(t, answer{status: r.StatusCode, body: answered, node: n.address})
}

// inARow are more picks than chance makes alike: it picks one of three nodes 20 times in a row once in a billion times.
const inARow = 20

// settle waits until the picker names, time after time, only nodes that are right for a request. It returns the last one.
func (c *cluster) settle(t *testing.T, v conversation, turns int, what string, right func(node string) bool) (node string) {
	t.Helper()
	path, body := v.request(t, turns)
	eventually(t, func() string {
		for range inARow {
			if node = c.pick(t, path, body); !right(node) {
				return fmt.Sprintf("turn %d of conversation %d goes to %s, not %s", turns, v.number, node, what)
			}
		}
		return ""
	})
	return node
}

// stay waits until the picker names only this node for a request.
func (c *cluster) stay(t *testing.T, v conversation, turns int, n *node) {
	t.Helper()
	c.settle(t, v, turns, "to "+n.address, func(node string) bool { return node == n.address })
}

// spread waits until the picker has named each of these nodes for a request, and fails if it names another one.
func (c *cluster) spread(t *testing.T, v conversation, turns int, nodes ...*node) {
	t.Helper()
	path, body := v.request(t, turns)
	seen := map[string]bool{}
	eventually(t, func() string {
		named := c.pick(t, path, body)
		if !slices.ContainsFunc(nodes, func(n *node) bool { return n.address == named }) {
			t.Fatalf("turn %d of conversation %d goes to %s", turns, v.number, named)
		}
		if seen[named] = true; len(seen) < len(nodes) {
			return fmt.Sprintf("turn %d of conversation %d goes to none but %v", turns, v.number, seen)
		}
		return ""
	})
}

// busy keeps a node busy with more requests than it runs at a time, until the caller ends that.
func busy(t *testing.T, n *node) (end func()) {
	t.Helper()
	body, err := json.Marshal(map[string]any{"model": routedModel, "prompt": "Once", "max_tokens": 150, "ignore_eos": true, "temperature": 0})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	var load sync.WaitGroup
	for range 8 {
		load.Go(func() {
			for ctx.Err() == nil {
				r, err := http.Post("http://"+n.address+"/v1/completions", "application/json", bytes.NewReader(body))
				if err != nil {
					t.Error(err)
					return
				}
				_, err = io.Copy(io.Discard, r.Body)
				if r.Body.Close(); err != nil || r.StatusCode != http.StatusOK {
					t.Error(r.Status, err)
					return
				}
			}
		})
	}
	end = sync.OnceFunc(func() {
		cancel()
		load.Wait()
	})
	t.Cleanup(end)
	return end
}

// TestEndpointPicker: three nodes behind the llm-d router's endpoint picker, with the files of deploy/router. Conversations
// stay where their prefix is, leave a node that is busy, follow their blocks or come back, and go on elsewhere, with the
// same answers, when their node is killed and taken out of the file.
func TestEndpointPicker(t *testing.T) {
	c := newCluster(t)
	first, second, third := c.nodes[0], c.nodes[1], c.nodes[2]
	// The picker knows all nodes: a conversation that none has goes to any.
	c.spread(t, conversation{number: 90}, 1, c.nodes...)
	// Conversation i begins at node i, and stays there.
	const conversations = 6
	home := func(i int) *node { return c.nodes[i%3] }
	v := func(i int) conversation { return conversation{number: i, chat: i >= 3} }
	before := make([]said, conversations)
	for i := range conversations {
		before[i] = c.askAt(t, home(i), v(i), 1)
		c.stay(t, v(i), 1, home(i))
	}
	for turns := 2; turns <= 3; turns++ {
		for i := range conversations {
			s := c.ask(t, v(i), turns)
			if s.node != home(i).address {
				t.Errorf("turn %d of conversation %d leaves %s for %s", turns, i, home(i).address, s.node)
			}
			if whole := before[i].prompt / blockTokens * blockTokens; s.cached < whole {
				t.Errorf("turn %d of conversation %d has %d tokens, %d before, and %d of them cached", turns, i, s.prompt, before[i].prompt, s.cached)
			}
			before[i] = s
			c.stay(t, v(i), turns, home(i))
		}
	}
	// While the second node is busy, requests of which it has less than half go elsewhere. One of which it has all waits, as
	// the weights of deploy/router have it while there is room in the node's cache. Other conversations stay.
	stop := busy(t, second)
	const leaves, returns = 1, 4
	elsewhere := func(node string) bool { return node != second.address }
	for _, i := range []int{leaves, returns} {
		c.settle(t, v(i), 4, "elsewhere", elsewhere)
	}
	c.stay(t, v(returns), 3, second)
	left := c.ask(t, v(leaves), 4)
	if !elsewhere(left.node) {
		t.Error("a conversation waits for a busy node, and two nodes are idle")
	}
	if left.prompt < 2*before[leaves].prompt {
		t.Errorf("the long turn makes %d tokens of %d", left.prompt, before[leaves].prompt)
	}
	for _, i := range []int{0, 2} {
		c.stay(t, v(i), 4, home(i))
	}
	stop()
	// Then one comes back, and the other one follows its blocks: the node that it has left has fewer of them.
	c.stay(t, v(returns), 4, second)
	if s := c.ask(t, v(returns), 4); s.node != second.address {
		t.Errorf("a conversation that has waited comes back to %s, not %s", s.node, second.address)
	}
	follows := c.nodes[slices.IndexFunc(c.nodes, func(n *node) bool { return n.address == left.node })]
	c.stay(t, v(leaves), 5, follows)
	if s := c.ask(t, v(leaves), 5); s.node != left.node || s.cached < left.prompt/blockTokens*blockTokens {
		t.Errorf("a conversation of %d tokens goes on at %s, with %d of them cached, not at %s", left.prompt, s.node, s.cached, left.node)
	}
	// The third node is killed, and taken out of the file.
	const lost = 2
	want := c.ask(t, v(lost), 4)
	if want.node != third.address {
		t.Errorf("conversation %d leaves %s for %s", lost, third.address, want.node)
	}
	third.kill(t)
	c.list(t, first, second)
	for i := range conversations {
		c.settle(t, v(i), 4, "to a node that is there", func(node string) bool { return node != third.address })
	}
	c.spread(t, v(lost), 4, first, second) // nothing is left of what it had
	if got := c.ask(t, v(lost), 4); got.node == third.address || got.text != want.text {
		t.Errorf("%s answers %q, want %q", got.node, got.text, want.text)
	}
	for i := range conversations {
		for turns := 1; turns <= 4; turns++ {
			if s := c.ask(t, v(i), turns); s.node == third.address {
				t.Errorf("turn %d of conversation %d goes to a node that is not there", turns, i)
			}
		}
	}
	// It comes back with nothing in its caches, and the picker follows it again.
	third.start(t)
	c.list(t, c.nodes...)
	c.spread(t, conversation{number: 91}, 1, c.nodes...)
	c.askAt(t, third, conversation{number: 92}, 1)
	c.stay(t, conversation{number: 92}, 2, third)
}
