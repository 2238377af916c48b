package configs

import (
	_ "embed"
	"encoding/json"
	"fmt"
)

//go:embed kv.json
var kvModels []byte

// KVEntry is what a model keeps in the KV cache of one token, in 16 bit. Layers with
// multi-head latent attention (MLA) keep one compressed vector and one rotated key, both
// shared by all heads; the others keep a key and a value of each KV head.
type KVEntry struct {
	// Name of the model, for flags and tables. Repository on the Hugging Face Hub.
	Name       string `json:"name"`
	Repository string `json:"repository"`
	// Layers with attention.
	Layers int `json:"num_hidden_layers"`
	// LoRARank is the length of the compressed vector, RoPEHeadDim that of the rotated
	// key; 0: no MLA.
	LoRARank    int `json:"kv_lora_rank"`
	RoPEHeadDim int `json:"qk_rope_head_dim"`
	// KVHeads and HeadDim; 0: MLA.
	KVHeads int `json:"num_key_value_heads"`
	HeadDim int `json:"head_dim"`
	// Source of these numbers.
	Source string `json:"source"`
}

// kvElementBytes is the size of an element: 16 bit, as the Harvest paper assumes (5.3).
const kvElementBytes = 2

// Bytes of the entry.
func (e KVEntry) Bytes() int64 {
	if e.LoRARank > 0 {
		return int64(e.Layers) * int64(e.LoRARank+e.RoPEHeadDim) * kvElementBytes
	}
	return int64(e.Layers) * 2 * int64(e.KVHeads) * int64(e.HeadDim) * kvElementBytes
}

// Derivation is how Bytes comes about.
func (e KVEntry) Derivation() string {
	if e.LoRARank > 0 {
		return fmt.Sprintf("%d layers x (%d kv_lora_rank + %d qk_rope_head_dim) x %d bytes", e.Layers, e.LoRARank, e.RoPEHeadDim, kvElementBytes)
	}
	return fmt.Sprintf("%d layers x 2 x %d KV heads x %d head_dim x %d bytes", e.Layers, e.KVHeads, e.HeadDim, kvElementBytes)
}

// KVEntries are those of the models of the Harvest paper's Figure 7, then those of the
// presets.
func KVEntries() []KVEntry {
	var all []KVEntry
	if err := json.Unmarshal(kvModels, &all); err != nil {
		panic("configs: kv.json: " + err.Error())
	}
	for _, name := range PresetNames() {
		data, _ := Preset(name)
		e := KVEntry{Name: name, Repository: PresetRepository(name), Source: "config.json"}
		whole := struct {
			*KVEntry
			HiddenSize int `json:"hidden_size"`
			Heads      int `json:"num_attention_heads"`
		}{KVEntry: &e}
		if err := json.Unmarshal(data, &whole); err != nil {
			panic("configs: preset " + name + ": " + err.Error())
		}
		if e.HeadDim == 0 {
			e.HeadDim = whole.HiddenSize / whole.Heads
		}
		all = append(all, e)
	}
	return all
}
