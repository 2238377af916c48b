package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-zeromq/zmq4"
	"github.com/vmihailenco/msgpack/v5"
)

// routed is a node as a router sees it: an address, its KV events, its metrics.
type routed struct {
	*process
	replay string
	cancel context.CancelFunc
	done   sync.WaitGroup

	mu sync.Mutex
	// prefixes of token ids by the node's own keys, and the mediums that have them.
	prefixes map[string]string
	held     map[string]map[string]bool
	next     uint64
}

// route starts a node, and follows its KV events as the endpoint picker of the Gateway API Inference Extension does: it
// subscribes, and asks for a replay of what it has missed.
func route(t *testing.T, args ...string) *routed {
	t.Helper()
	events, replay := "tcp://127.0.0.1:"+freePort(t), "tcp://127.0.0.1:"+freePort(t)
	config, err := json.Marshal(map[string]any{"enable_kv_cache_events": true, "endpoint": "@" + events, "replay_endpoint": "@" + replay})
	if err != nil {
		t.Fatal(err)
	}
	n := &routed{
		process: startServe(t, append([]string{"--kv-events-config", string(config)}, args...)...),
		replay:  replay, prefixes: map[string]string{}, held: map[string]map[string]bool{},
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	n.cancel = cancel
	sub := zmq4.NewSub(ctx)
	if err := sub.Dial(events); err != nil {
		t.Fatal(err)
	}
	if err := sub.SetOption(zmq4.OptionSubscribe, "kv@"); err != nil {
		t.Fatal(err)
	}
	n.done.Go(func() {
		defer sub.Close()
		for {
			m, err := sub.Recv()
			if err != nil {
				return // it has ended
			}
			if at := binary.BigEndian.Uint64(m.Frames[1]); at > n.expected() {
				n.catchUp(t)
			} else {
				n.apply(t, at, m.Frames[2])
			}
		}
	})
	t.Cleanup(n.forget)
	return n
}

// forget ends the subscription.
func (n *routed) forget() {
	n.cancel()
	n.done.Wait()
}

func (n *routed) expected() uint64 {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.next
}

// catchUp asks for all batches that have not been applied.
func (n *routed) catchUp(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 10*time.Second)
	defer cancel()
	s := zmq4.NewDealer(ctx)
	defer s.Close()
	if err := s.Dial(n.replay); err != nil {
		return // it has ended
	}
	if err := s.SendMulti(zmq4.NewMsgFrom(nil, binary.BigEndian.AppendUint64(nil, n.expected()))); err != nil {
		return
	}
	for {
		m, err := s.Recv()
		if err != nil || len(m.Frames) != 4 || binary.BigEndian.Uint64(m.Frames[2]) == math.MaxUint64 {
			return
		}
		n.apply(t, binary.BigEndian.Uint64(m.Frames[2]), m.Frames[3])
	}
}

// apply applies a batch, unless that was done before.
func (n *routed) apply(t *testing.T, at uint64, payload []byte) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if at != n.next {
		return
	}
	n.next++
	var b []any
	if err := msgpack.Unmarshal(payload, &b); err != nil {
		t.Errorf("batch %d: %v", at, err)
		return
	}
	for _, e := range b[1].([]any) {
		e := e.(map[string]any)
		medium, _ := e["medium"].(string)
		switch e["type"] {
		case "AllBlocksCleared":
			clear(n.held)
		case "BlockRemoved":
			for _, k := range e["block_hashes"].([]any) {
				delete(n.held[string(k.([]byte))], medium)
			}
		case "BlockStored":
			n.stored(medium, e)
		}
	}
}

func (n *routed) stored(medium string, e map[string]any) {
	parent, _ := e["parent_block_hash"].([]byte)
	prefix, tokens := n.prefixes[string(parent)], e["token_ids"].([]any)
	size, _ := strconv.Atoi(fmt.Sprint(e["block_size"]))
	for i, k := range e["block_hashes"].([]any) {
		k := string(k.([]byte))
		if len(tokens) > 0 {
			prefix += fmt.Sprint(tokens[i*size : (i+1)*size])
			n.prefixes[k] = prefix
		}
		if n.held[k] == nil {
			n.held[k] = map[string]bool{}
		}
		n.held[k][medium] = true
	}
}

// match is the share of a prompt's blocks that the node has.
func (n *routed) match(tokens []int) float64 {
	n.mu.Lock()
	defer n.mu.Unlock()
	have := map[string]bool{}
	for k, mediums := range n.held {
		if len(mediums) > 0 {
			have[n.prefixes[k]] = true
		}
	}
	blocks, prefix := len(tokens)/16, ""
	for i := range blocks {
		if prefix += fmt.Sprint(tokens[16*i : 16*i+16]); !have[prefix] {
			return float64(i) / float64(blocks)
		}
	}
	return 1
}

// waiting is what the node's metrics say of its queue; false: it cannot be reached.
func (n *routed) waiting() (requests float64, ok bool) {
	r, err := http.Get(n.url + "/metrics") //nolint:noctx // of a server of this test
	if err != nil {
		return 0, false
	}
	defer r.Body.Close() //nolint:errcheck // only read from
	for lines := bufio.NewScanner(r.Body); lines.Scan(); {
		if rest, found := strings.CutPrefix(lines.Text(), "vllm:num_requests_waiting{"); found {
			v, err := strconv.ParseFloat(rest[strings.LastIndexByte(rest, ' ')+1:], 64)
			return v, err == nil
		}
	}
	return 0, false
}

// pick scores the nodes as the endpoint picker's profile of a prefix cache scorer and a queue scorer, of weights 2 and 3,
// and returns the first of the best: nil if none can be reached.
func pick(nodes []*routed, tokens []int) (best *routed) {
	queue := make([]float64, len(nodes))
	most := 0.0
	for i, n := range nodes {
		w, ok := n.waiting()
		if !ok {
			w = math.Inf(1)
		} else {
			most = max(most, w)
		}
		queue[i] = w
	}
	top := math.Inf(-1)
	for i, n := range nodes {
		score := 2*n.match(tokens) + 3*(1-queue[i]/max(most, 1))
		if !math.IsInf(queue[i], 1) && score > top {
			best, top = n, score
		}
	}
	return best
}

// complete asks a node for a completion, and returns its text, and how many of the prompt's tokens were cached.
func (n *routed) complete(prompt []int, most int) (text string, cached int, err error) {
	body, err := json.Marshal(map[string]any{"prompt": prompt, "temperature": 0, "max_tokens": most, "ignore_eos": true})
	if err != nil {
		return "", 0, err
	}
	r, err := http.Post(n.url+"/v1/completions", "application/json", bytes.NewReader(body)) //nolint:noctx // ends with the server
	if err != nil {
		return "", 0, err
	}
	defer r.Body.Close() //nolint:errcheck // only read from
	answer, err := io.ReadAll(r.Body)
	if err != nil {
		return "", 0, err
	}
	var c struct {
		Choices []struct{ Text string }
		Usage   struct {
			Details struct {
				Cached int `json:"cached_tokens"`
			} `json:"prompt_tokens_details"`
		}
	}
	if err := json.Unmarshal(answer, &c); err != nil || len(c.Choices) != 1 {
		return "", 0, fmt.Errorf("%s: %v", answer, err) //nolint:errorlint // for the log
	}
	return c.Choices[0].Text, c.Usage.Details.Cached, nil
}

// TestManyNodes: three nodes behind a picker that follows their KV events and their metrics. Conversations stay where
// their prefix is, go elsewhere while that node is busy, and go on elsewhere, with the same answers, when it is killed.
func TestManyNodes(t *testing.T) {
	t.Parallel()
	args := []string{"--emulate", "hbm=64MiB", "--max-num-seqs", "1", "--kv-offloading-size", "0.01"}
	nodes := []*routed{route(t, args...), route(t, args...), route(t, args...)}
	conversation := func(i, turns int) (tokens []int) {
		for j := range 32 * turns {
			tokens = append(tokens, 5+(7*i+j*(i+1))%40)
		}
		return tokens
	}
	ask := func(n *routed, tokens []int) (text string, cached int) {
		t.Helper()
		text, cached, err := n.complete(tokens, 4)
		if err != nil {
			t.Fatal(err)
		}
		for turn := 0; n.match(tokens) < 1; turn++ { // until its events have come
			if t.Context().Err() != nil {
				t.Fatal("no event says that the prompt's blocks are there")
			}
			if time.Sleep(time.Millisecond); turn%100 == 99 {
				n.catchUp(t) // subscriptions take their time
			}
		}
		return text, cached
	}
	// Conversation i begins with node i, and stays there.
	const conversations = 6
	for i := range conversations {
		ask(nodes[i%3], conversation(i, 1))
	}
	for turns := 2; turns <= 4; turns++ {
		for i := range conversations {
			tokens := conversation(i, turns)
			n := pick(nodes, tokens)
			if n != nodes[i%3] {
				t.Fatalf("turn %d of conversation %d leaves its node", turns, i)
			}
			if _, cached := ask(n, tokens); cached < 32*(turns-1) {
				t.Errorf("turn %d of conversation %d: %d tokens are cached", turns, i, cached)
			}
		}
	}
	// While its node is busy a conversation goes elsewhere.
	stop := make(chan struct{})
	var load sync.WaitGroup
	for range 8 {
		load.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if _, _, err := nodes[0].complete(conversation(50, 1), 150); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	for {
		if w, ok := nodes[0].waiting(); w >= 4 || !ok {
			break
		}
	}
	if n := pick(nodes, conversation(0, 5)); n == nodes[0] {
		t.Error("a conversation waits behind 4 others, and two nodes are idle")
	}
	close(stop)
	load.Wait()
	if n := pick(nodes, conversation(0, 5)); n != nodes[0] {
		t.Error("a conversation does not come back to its node when that is idle")
	}
	// A killed node's conversations go on elsewhere.
	last := conversation(1, 5)
	want, _ := ask(nodes[2], last)
	if err := nodes[1].cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	nodes[1].rest.Wait()
	if err := nodes[1].cmd.Wait(); err == nil {
		t.Fatal("a killed server has ended well")
	}
	nodes[1].forget()
	n := pick(nodes, last)
	if n == nodes[1] || n == nil {
		t.Fatal("a killed node is picked")
	}
	if got, _ := ask(n, last); got != want {
		t.Errorf("another node answers %q, want %q", got, want)
	}
	for i := range conversations {
		n := pick(nodes, conversation(i, 5))
		if n == nodes[1] || i%3 != 1 && n != nodes[i%3] {
			t.Errorf("conversation %d goes to another node when node 1 is killed", i)
		}
	}
}
