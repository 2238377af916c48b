package configs

import (
	"embed"
	"slices"
	"strings"
)

//go:embed presets/*.json
var presets embed.FS

// Preset returns the config.json of a model preset by its name ("mixtral-8x7b"),
// and false if there is none of that name.
func Preset(name string) ([]byte, bool) {
	if !slices.Contains(PresetNames(), name) {
		return nil, false
	}
	data, err := presets.ReadFile("presets/" + name + ".json")
	return data, err == nil
}

// repositories are the models on the Hugging Face Hub whose configurations the presets are.
var repositories = map[string]string{
	"mixtral-8x7b":      "mistralai/Mixtral-8x7B-v0.1",
	"phi-3.5-moe":       "microsoft/Phi-3.5-MoE-instruct",
	"phi-tiny-moe":      "microsoft/Phi-tiny-MoE-instruct",
	"qwen1.5-moe-a2.7b": "Qwen/Qwen1.5-MoE-A2.7B",
	"qwen2-57b-a14b":    "Qwen/Qwen2-57B-A14B",
	"qwen3-30b-a3b":     "Qwen/Qwen3-30B-A3B",
}

// PresetRepository is a preset's model on the Hugging Face Hub ("org/name"); empty for
// other names.
func PresetRepository(name string) string { return repositories[name] }

// PresetNames lists the presets in alphabetical order.
func PresetNames() []string {
	entries, err := presets.ReadDir("presets")
	if err != nil {
		panic("configs: presets are not embedded: " + err.Error())
	}
	names := make([]string, len(entries))
	for i, e := range entries {
		names[i] = strings.TrimSuffix(e.Name(), ".json")
	}
	return names
}
