package configs

import (
	"embed"
	"slices"
	"strings"
)

//go:embed hardware/*.json
var hardware embed.FS

// Hardware returns the description of a machine by its name ("h200"), and false if
// there is none of that name. planner.Hardware has its fields and their units;
// "sources" says of each where the number is from.
func Hardware(name string) ([]byte, bool) {
	if !slices.Contains(HardwareNames(), name) {
		return nil, false
	}
	data, err := hardware.ReadFile("hardware/" + name + ".json")
	return data, err == nil
}

// HardwareNames lists the machines in alphabetical order.
func HardwareNames() []string {
	entries, err := hardware.ReadDir("hardware")
	if err != nil {
		panic("configs: hardware is not embedded: " + err.Error())
	}
	names := make([]string, len(entries))
	for i, e := range entries {
		names[i] = strings.TrimSuffix(e.Name(), ".json")
	}
	return names
}
