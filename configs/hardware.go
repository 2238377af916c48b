package configs

import (
	"embed"
	"fmt"
	"slices"
	"strings"
)

//go:embed hardware/*.json
var hardware embed.FS

// Hardware returns the profile of a machine by its name ("h200"), and false if there
// is none of that name. planner.Hardware has its fields and their units; "sources"
// says of each where the number is from.
func Hardware(name string) ([]byte, bool) {
	if !slices.Contains(HardwareNames(), name) {
		return nil, false
	}
	data, err := hardware.ReadFile("hardware/" + name + ".json")
	return data, err == nil
}

// HardwareNames lists the profiles in alphabetical order.
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

// FindHardware returns the name of the profile that a name stands for. Letter case,
// separators, words of the vendor and "GB" do not count: "RTX 4090", "rtx4090" and
// "4090" are "rtx-4090", "NVIDIA A100-SXM4-80GB" is "a100-80". The size of the memory
// may be missing where one profile has the product: "h100" is "h100-80".
func FindHardware(name string) (string, error) {
	names := HardwareNames()
	words := hardwareWords(name)
	plain := strings.Join(words, "")
	var products, keys []string
	for _, n := range names {
		known := hardwareWords(n)
		key := strings.Join(known, "")
		if key == plain {
			return n, nil
		}
		keys = append(keys, key)
		if len(words) == 1 && known[0] == words[0] {
			products = append(products, n)
		}
	}
	switch len(products) {
	case 0:
		similar := Similar(plain, keys)
		for i, key := range similar {
			similar[i] = names[slices.Index(keys, key)]
		}
		return "", fmt.Errorf("there is no hardware %q: known are %s%s", name, strings.Join(names, ", "), didYouMean(similar))
	case 1:
		return products[0], nil
	}
	return "", fmt.Errorf("hardware %q is ambiguous: give %s", name, alternatives(products))
}

// HardwareOf lists the profiles of the product that a device reports as its name
// ("NVIDIA A100-SXM4-80GB"): those with each size of memory. Cards of laptops are slower
// than those whose name they have, and have none.
func HardwareOf(device string) []string {
	words := hardwareWords(device)
	if slices.Contains(words, "laptop") || slices.Contains(words, "max") {
		return nil
	}
	var list []string
	for _, n := range HardwareNames() {
		if slices.Contains(words, hardwareWords(n)[0]) {
			list = append(list, n)
		}
	}
	return list
}

// hardwareWords are the words of a machine's name that tell it from others: the product
// and the size of its memory.
func hardwareWords(name string) []string {
	words := strings.FieldsFunc(strings.ToLower(name), func(r rune) bool { return strings.ContainsRune(" -_/.", r) })
	kept := words[:0]
	for _, w := range words {
		switch w {
		case "nvidia", "geforce", "tesla", "gpu", "sxm", "sxm2", "sxm4", "sxm5", "hbm2", "hbm2e", "hbm3", "hbm3e":
			continue
		}
		w = strings.TrimPrefix(strings.TrimPrefix(w, "geforce"), "rtx")
		if size := strings.TrimSuffix(strings.TrimSuffix(w, "b"), "g"); size != "" && strings.Trim(size, "0123456789") == "" {
			w = size
		}
		if w != "" {
			kept = append(kept, w)
		}
	}
	return kept
}
