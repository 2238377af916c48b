package router

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/go-logr/logr"
	"github.com/llm-d/llm-d-kv-cache/pkg/kvcache"
	"github.com/llm-d/llm-d-kv-cache/pkg/kvcache/kvblock"
	"github.com/llm-d/llm-d-kv-cache/pkg/kvevents"
	"github.com/llm-d/llm-d-kv-cache/pkg/kvevents/engineadapter"
	"sigs.k8s.io/controller-runtime/pkg/log"
)

// picker is that part of the router which knows what nodes have.
type picker struct {
	ctx         context.Context
	indexer     *kvcache.Indexer
	keys        kvblock.TokenProcessor
	pool        *kvevents.Pool
	subscribers *kvevents.SubscriberManager
	decoder     *decoder
}

// newPicker wires the packages as the router does, with the configuration of deploy/router. Errors that they log are the
// test's.
func newPicker(t *testing.T) *picker {
	t.Helper()
	logged := &errorLog{}
	ctx, cancel := context.WithCancel(log.IntoContext(context.WithoutCancel(t.Context()), logr.New(logged)))
	config := readProducerConfig(t, "picker.yaml")
	keys, err := kvblock.NewChunkedTokenDatabase(config.TokenProcessorConfig)
	if err != nil {
		t.Fatal(err)
	}
	indexer, err := kvcache.NewKVCacheIndexer(ctx, config.IndexerConfig, keys)
	if err != nil {
		t.Fatal(err)
	}
	p := &picker{ctx: ctx, indexer: indexer, keys: keys, decoder: &decoder{VLLMAdapter: engineadapter.NewVLLMAdapter(), came: map[string]uint64{}}}
	p.pool = kvevents.NewPool(kvevents.DefaultConfig(), indexer.KVBlockIndex(), keys, p.decoder)
	p.pool.Start(ctx)
	p.subscribers = kvevents.NewSubscriberManager(p.pool)
	t.Cleanup(func() {
		p.subscribers.Shutdown(ctx)
		p.pool.Shutdown(ctx)
		cancel()
		for _, e := range logged.all() {
			t.Error(e)
		}
	})
	return p
}

// errorLog keeps the errors that are logged, and nothing else.
type errorLog struct {
	mu     sync.Mutex
	errors []string
}

func (l *errorLog) Init(logr.RuntimeInfo)          {}
func (l *errorLog) Enabled(int) bool               { return false }
func (l *errorLog) Info(int, string, ...any)       {}
func (l *errorLog) WithValues(...any) logr.LogSink { return l }
func (l *errorLog) WithName(string) logr.LogSink   { return l }
func (l *errorLog) Error(err error, message string, values ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.errors = append(l.errors, fmt.Sprint(message, ": ", err, " ", values))
}

func (l *errorLog) all() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.errors)
}

// decoder is the router's decoder of vLLM's events, which also knows how far each node's have come.
type decoder struct {
	*engineadapter.VLLMAdapter

	mu sync.Mutex
	// came is the number behind that of a node's last batch.
	came map[string]uint64
}

func (d *decoder) ParseMessage(m *kvevents.RawMessage) (string, string, kvevents.EventBatch, error) {
	node, model, batch, err := d.VLLMAdapter.ParseMessage(m)
	if err == nil {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.came[node] = m.Sequence + 1
	}
	return node, model, batch, err
}

func (d *decoder) next(n *node) uint64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.came[n.address]
}

// follow subscribes to a node's events, and applies before what the node replays: the router asks for that when it
// connects, the subscriber of this version does not.
func (p *picker) follow(t *testing.T, n *node) {
	t.Helper()
	batches := n.replay(t)
	for _, m := range batches {
		p.pool.AddTask(m)
	}
	replayed := uint64(len(batches))
	eventually(t, func() string {
		if p.decoder.next(n) != replayed {
			return "the replay does not come to the decoder"
		}
		return ""
	})
	t.Cleanup(func() { p.forget(n) }) // before the node ends
	if err := p.subscribers.EnsureSubscriber(p.ctx, n.address, n.events, "kv@", true); err != nil {
		t.Fatal(err)
	}
	// A subscription takes its time: until it is there, events of prompts that nobody looks up are missed.
	unseen := uint32(1000)
	eventually(t, func() string {
		if p.decoder.next(n) > replayed {
			return ""
		}
		n.ask(t, numbered(unseen, blockTokens))
		unseen++
		return "no events come"
	})
}

// forget ends the subscription to a node.
func (p *picker) forget(n *node) { p.subscribers.RemoveSubscriber(p.ctx, n.address) }

// scores are those of the nodes that have a prefix of a prompt: how many of its blocks, weighted by where they are.
func (p *picker) scores(t *testing.T, tokens []uint32) map[string]float64 {
	t.Helper()
	s, err := p.indexer.ScoreTokens(p.ctx, tokens, model, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// await waits for the scores of a prompt.
func (p *picker) await(t *testing.T, tokens []uint32, want map[string]float64) {
	t.Helper()
	eventually(t, func() string {
		if got := p.scores(t, tokens); !maps.Equal(got, want) {
			return fmt.Sprintf("a prompt of %d blocks has the scores %v, want %v", len(tokens)/blockTokens, got, want)
		}
		return ""
	})
}

// where are the mediums in which the index has each block of a prompt at a node.
func (p *picker) where(t *testing.T, n *node, tokens []uint32) []string {
	t.Helper()
	keys, err := p.keys.TokensToKVBlockKeys(kvblock.EmptyBlockHash, tokens, model, nil)
	if err != nil {
		t.Fatal(err)
	}
	all := make([]string, len(keys))
	for i, k := range keys {
		found, err := p.indexer.KVBlockIndex().Lookup(p.ctx, []kvblock.BlockHash{k}, nil)
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, e := range found[k] {
			if e.PodIdentifier == n.address {
				names = append(names, e.DeviceTier)
			}
		}
		slices.Sort(names)
		all[i] = strings.Join(names, " ")
	}
	return all
}
