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
