package router

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/llm-d/llm-d-kv-cache/pkg/kvcache"
	"github.com/llm-d/llm-d-kv-cache/pkg/kvcache/kvblock"
	"sigs.k8s.io/yaml"
)

// producerConfig is the configuration of the router's precise-prefix-cache-producer.
type producerConfig struct {
	TokenProcessorConfig *kvblock.TokenProcessorConfig `json:"tokenProcessorConfig"`
	IndexerConfig        *kvcache.Config               `json:"indexerConfig"`
	// KVEventsConfig has keys of that plugin's which these packages do not have.
	KVEventsConfig json.RawMessage `json:"kvEventsConfig"`
}

// pickerFiles are the files of deploy/router with a picker's configuration.
var pickerFiles = []string{"picker.yaml", "kubernetes.yaml"}

// readProducerConfig reads a file of deploy/router as the router does: over the defaults, and no key may be unknown.
func readProducerConfig(t *testing.T, name string) (c producerConfig) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("../../deploy/router", name))
	if err != nil {
		t.Fatal(err)
	}
	for object := range strings.SplitSeq(string(text), "\n---\n") {
		var o struct {
			Kind string            `json:"kind"`
			Data map[string]string `json:"data"`
		}
		if err := yaml.Unmarshal([]byte(object), &o); err != nil {
			t.Fatal(err)
		}
		if o.Kind == "ConfigMap" {
			text = []byte(o.Data["picker.yaml"])
		}
	}
	var picker struct {
		Plugins []struct {
			Type       string          `json:"type"`
			Parameters json.RawMessage `json:"parameters"`
		} `json:"plugins"`
	}
	if err := yaml.Unmarshal(text, &picker); err != nil {
		t.Fatal(err)
	}
	if c.IndexerConfig, err = kvcache.NewDefaultConfig(); err != nil {
		t.Fatal(err)
	}
	for _, p := range picker.Plugins {
		if p.Type != "precise-prefix-cache-producer" {
			continue
		}
		d := json.NewDecoder(bytes.NewReader(p.Parameters))
		d.DisallowUnknownFields()
		if err := d.Decode(&c); err != nil {
			t.Fatal(err)
		}
		return c
	}
	t.Fatalf("%s has no producer of prefixes", name)
	return c
}

// TestWeights: with the configuration of each file, a block counts less the slower the medium is that has it, and as
// much as on the fastest one that has it.
func TestWeights(t *testing.T) {
	for _, name := range pickerFiles {
		t.Run(name, func(t *testing.T) {
			c := readProducerConfig(t, name)
			keys, err := kvblock.NewChunkedTokenDatabase(c.TokenProcessorConfig)
			if err != nil {
				t.Fatal(err)
			}
			indexer, err := kvcache.NewKVCacheIndexer(t.Context(), c.IndexerConfig, keys)
			if err != nil {
				t.Fatal(err)
			}
			prompt := numbered(1, 3*blockTokens)
			blocks, err := keys.TokensToKVBlockKeys(kvblock.EmptyBlockHash, prompt, model, nil)
			if err != nil {
				t.Fatal(err)
			}
			nodes := map[string][]string{
				"gpu": {"gpu"}, "peer": {"peer_gpu"}, "host": {"cpu"}, "files": {"file"},
				"host and files": {"file", "cpu"}, "all": {"cpu", "gpu", "file", "peer_gpu"},
			}
			for node, mediums := range nodes {
				for _, m := range mediums {
					if err := indexer.KVBlockIndex().Add(t.Context(), nil, blocks, []kvblock.PodEntry{{PodIdentifier: node, DeviceTier: m}}); err != nil {
						t.Fatal(err)
					}
				}
			}
			got, err := indexer.ScoreTokens(t.Context(), prompt, model, nil, nil)
			if err != nil {
				t.Fatal(err)
			}
			for node, mediums := range nodes {
				best := 0.0
				for _, m := range mediums {
					best = max(best, weights[m])
				}
				if want := score(3, best); got[node] != want {
					t.Errorf("a node with 3 blocks in %v has the score %v, want %v", mediums, got[node], want)
				}
			}
			if got["gpu"] <= got["peer"] || got["peer"] <= got["host"] || got["host"] <= got["files"] || got["files"] <= 0 {
				t.Errorf("scores %v", got)
			}
		})
	}
}

// weights are what blocks count by medium, in the files of deploy/router.
var weights = map[string]float64{"gpu": 1, "peer_gpu": 0.9, "cpu": 0.8, "file": 0.5}

// scoreIn is that of blocks in these mediums: as on the fastest of each, up to the first block that none has.
func scoreIn(where []string) (sum float64) {
	for _, mediums := range where {
		best := 0.0
		for m := range strings.FieldsSeq(mediums) {
			best = max(best, weights[m])
		}
		if best == 0 {
			break
		}
		sum += best
	}
	return sum
}

// score is that of so many blocks, added up as the router does.
func score(blocks int, weight float64) (sum float64) {
	for range blocks {
		sum += weight
	}
	return sum
}
