package planner

import (
	"encoding/json"
	"math"
	"strings"
	"testing"

	"github.com/moeserve/moeserve/configs"
)

// presetModel reads the shapes of a preset from its config.json.
func presetModel(t testing.TB, name string) Model {
	t.Helper()
	data, ok := configs.Preset(name)
	if !ok {
		t.Fatalf("no preset %s", name)
	}
	var c struct {
		Hidden      int  `json:"hidden_size"`
		Layers      int  `json:"num_hidden_layers"`
		Heads       int  `json:"num_attention_heads"`
		KVHeads     int  `json:"num_key_value_heads"`
		HeadDim     int  `json:"head_dim"`
		Width       int  `json:"intermediate_size"`
		MoEWidth    int  `json:"moe_intermediate_size"`
		SharedWidth int  `json:"shared_expert_intermediate_size"`
		Experts     int  `json:"num_experts"`
		Local       int  `json:"num_local_experts"`
		TopK        int  `json:"num_experts_per_tok"`
		Vocab       int  `json:"vocab_size"`
		Tied        bool `json:"tie_word_embeddings"`
	}
	if err := json.Unmarshal(data, &c); err != nil {
		t.Fatal(err)
	}
	m := Model{
		Name: name, Layers: c.Layers, Hidden: c.Hidden, Heads: c.Heads, KVHeads: c.KVHeads, HeadDim: c.HeadDim,
		Experts: max(c.Experts, c.Local), TopK: c.TopK, ExpertWidth: c.Width, SharedWidth: c.SharedWidth,
		Vocab: c.Vocab, TiedEmbeddings: c.Tied,
	}
	if c.MoEWidth > 0 {
		m.ExpertWidth = c.MoEWidth
	}
	if m.HeadDim == 0 {
		m.HeadDim = c.Hidden / c.Heads
	}
	return m
}

func near(got, want, share float64) bool { return math.Abs(got-want) <= share*math.Abs(want) }

// The sizes that other places of the project count.
func TestPresetSizes(t *testing.T) {
	for _, c := range []struct {
		name       string
		expert     int64 // bytes
		count      int
		otherGiB   float64
		kvPerToken int64 // bytes
	}{
		{"mixtral-8x7b", 352_321_536, 256, 2.99, 131072},
		{"phi-3.5-moe", 157_286_400, 512, 2.99, 131072},
		{"phi-tiny-moe", 11_010_048, 512, 1.74, 65536},
		{"qwen1.5-moe-a2.7b", 17_301_504, 1440, 3.46, 196608},
		{"qwen2-57b-a14b", 55_050_240, 1792, 15.06, 57344},
		{"qwen3-30b-a3b", 9_437_184, 6144, 2.87, 98304},
	} {
		m := presetModel(t, c.name)
		if err := m.Validate(); err != nil {
			t.Error(err)
		}
		if m.ExpertBytes() != c.expert || m.ExpertCount() != c.count || m.KVBytesPerToken() != c.kvPerToken {
			t.Errorf("%s: %d experts of %d bytes, %d bytes of KV per token; want %d of %d, %d", c.name, m.ExpertCount(), m.ExpertBytes(), m.KVBytesPerToken(), c.count, c.expert, c.kvPerToken)
		}
		if got := float64(m.OtherBytes()) / (1 << 30); math.Abs(got-c.otherGiB) > 0.0051 {
			t.Errorf("%s: %.3f GiB of other weights, want %.2f", c.name, got, c.otherGiB)
		}
	}
}

func TestDistinct(t *testing.T) {
	m := Model{Experts: 8, TopK: 2}
	for _, c := range []struct{ rows, want float64 }{{0, 0}, {1, 2}, {2, 3.5}, {1000, 8}} {
		if got := m.Distinct(c.rows); !near(got, c.want, 1e-9) {
			t.Errorf("%v rows touch %v experts, want %v", c.rows, got, c.want)
		}
	}
	if got := m.Offloaded(0.5); got != 0 {
		t.Errorf("%d experts of a model without layers", got)
	}
	m.Layers = 3
	if got := m.Offloaded(0.1); got != 2 {
		t.Errorf("a tenth of 24 experts is %d, want 2", got)
	}
}

func TestModelValidate(t *testing.T) {
	for _, c := range []struct {
		change func(*Model)
		want   string
	}{
		{func(m *Model) { m.Layers = 0 }, "Layers is 0"},
		{func(m *Model) { m.TopK = 9 }, "TopK is 9, there are 8 experts"},
		{func(m *Model) { m.DenseLayers = 32 }, "32 of 32 layers are dense"},
		{func(m *Model) { m.DenseLayers = 1 }, "without a DenseWidth"},
		{func(m *Model) { m.Window = -1 }, "Window is -1"},
	} {
		m := presetModel(t, "mixtral-8x7b")
		c.change(&m)
		if err := m.Validate(); err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), "mixtral-8x7b") {
			t.Errorf("got %v, want %s", err, c.want)
		}
	}
	for _, w := range []Workload{{0, 1, 0}, {1, 0, 0}, {1, 1, -1}} {
		if w.Validate() == nil {
			t.Errorf("%+v is valid", w)
		}
	}
	if got := (Workload{PromptTokens: 77, NewTokens: 32}).Context(); got != 93 {
		t.Errorf("mean context %v, want 93", got)
	}
}

// TestOffloadFraction: a number of experts is the same when its fraction is read again.
func TestOffloadFraction(t *testing.T) {
	for _, all := range []int{1, 3, 48, 256, 1440, 6144} {
		m := Model{Layers: 1, Experts: all}
		for n := range all + 1 {
			f := m.OffloadFraction(n)
			if got := m.Offloaded(f); got != n {
				t.Fatalf("%d of %d is %v, which is %d", n, all, f, got)
			}
		}
	}
	if f := (Model{Layers: 32, Experts: 8}).OffloadFraction(128); f != 0.5 {
		t.Errorf("half is %v", f)
	}
}
