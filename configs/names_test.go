package configs

import (
	"slices"
	"strings"
	"testing"
)

func TestNearest(t *testing.T) {
	known := []string{"--seed", "--offload-fraction", "--offload-tier", "--json"}
	for name, want := range map[string]string{
		"--ofload-fractoin": "--offload-fraction", "--sed": "--seed", "--offload-teir": "--offload-tier",
		"--temperature": "", "--": "", "--jsno": "--json", "--offload_fraction": "--offload-fraction",
	} {
		if got, ok := Nearest(name, known); got != want || ok != (want != "") {
			t.Errorf("%s: %q, %v, want %q", name, got, ok, want)
		}
	}
	// What all known names begin with brings none of them nearer.
	if got, ok := Nearest("MOESERVE_FOO", []string{"MOESERVE_GPU", "MOESERVE_POLICY"}); ok {
		t.Errorf("MOESERVE_FOO: %q", got)
	}
	if got, ok := Nearest("x", nil); ok {
		t.Errorf("%q of none", got)
	}
	for _, c := range []struct {
		a, b string
		want int
	}{{"", "", 0}, {"", "abc", 3}, {"abc", "", 3}, {"kitten", "sitting", 3}, {"flaw", "lawn", 2}} {
		if got := distance(c.a, c.b); got != c.want {
			t.Errorf("from %q to %q: %d edits, want %d", c.a, c.b, got, c.want)
		}
	}
}

func TestSimilar(t *testing.T) {
	for name, want := range map[string]string{
		"mixtral":                                "mixtral-8x7b",
		"Mixtral-8x7B":                           "mixtral-8x7b",
		"mixtral8x7b":                            "mixtral-8x7b",
		"mixtrall":                               "mixtral-8x7b",
		"mxtral":                                 "mixtral-8x7b",
		"mixtral-8x22b":                          "mixtral-8x7b",
		"mistralai/Mixtral-8x7B-Instruct-v0.1":   "mixtral-8x7b",
		"qwen3":                                  "qwen3-30b-a3b",
		"Qwen/Qwen3-30B-A3B":                     "qwen3-30b-a3b",
		"qwen":                                   "qwen1.5-moe-a2.7b qwen2-57b-a14b qwen3-30b-a3b",
		"phi":                                    "phi-3.5-moe phi-tiny-moe",
		"phi-tyni-moe":                           "phi-tiny-moe",
		"llama-3-8b":                             "",
		"":                                       "",
		"testdata/fixtures/a-checkpoint-of-mine": "",
	} {
		if got := strings.Join(Similar(name, PresetNames()), " "); got != want {
			t.Errorf("%q: %q, want %q", name, got, want)
		}
	}
	for name, want := range map[string]string{
		"phi":    "; did you mean phi-3.5-moe or phi-tiny-moe?",
		"qwen":   "; did you mean qwen1.5-moe-a2.7b, qwen2-57b-a14b or qwen3-30b-a3b?",
		"llama4": "",
	} {
		if got := DidYouMean(name, PresetNames()); got != want {
			t.Errorf("%q: %q, want %q", name, got, want)
		}
	}
}

func TestFindHardware(t *testing.T) {
	for name, want := range map[string]string{
		"h200": "h200", "H200": "h200", "nvidia h200": "h200", "H100": "h100-80", "h100-80GB": "h100-80", "NVIDIA H100 80GB HBM3": "h100-80",
		"A100-80": "a100-80", "a100-80gb": "a100-80", "a100_40": "a100-40", "NVIDIA A100-SXM4-40GB": "a100-40", "A100 40G": "a100-40", "a10040": "a100-40",
		"RTX 4090": "rtx-4090", "rtx4090": "rtx-4090", "4090": "rtx-4090", "GeForce RTX 3090": "rtx-3090", "RTX-5090": "rtx-5090",
		"A10": "a10", "L40S": "l40s", "Tesla T4": "t4", "NVIDIA L4": "l4", "B200": "b200", "h20": "h20",
	} {
		if got, err := FindHardware(name); err != nil || got != want {
			t.Errorf("%q: %q, %v, want %q", name, got, err, want)
		}
	}
	all := ": known are " + strings.Join(HardwareNames(), ", ")
	for name, want := range map[string]string{
		"a100":    `hardware "a100" is ambiguous: give a100-40 or a100-80`,
		"h300":    `there is no hardware "h300"` + all + `; did you mean h100-80 or h200?`,
		"rtx409":  `there is no hardware "rtx409"` + all + `; did you mean rtx-4090?`,
		"4090ti":  `there is no hardware "4090ti"` + all + `; did you mean rtx-4090?`,
		"a10g":    `there is no hardware "a10g"` + all + `; did you mean a10, a100-40 or a100-80?`,
		"l40":     `there is no hardware "l40"` + all + `; did you mean l40s?`,
		"tpu-v5e": `there is no hardware "tpu-v5e"` + all,
		"":        `there is no hardware ""` + all,
		"v100":    `there is no hardware "v100"` + all + `; did you mean a100-40, a100-80 or h100-80?`,
	} {
		if got, err := FindHardware(name); err == nil || err.Error() != want {
			t.Errorf("%q: %q, %v\nwant %s", name, got, err, want)
		}
	}
	for _, name := range HardwareNames() {
		if got, err := FindHardware(name); err != nil || got != name {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
}

func TestHardwareOf(t *testing.T) {
	for device, want := range map[string][]string{
		"NVIDIA A100-SXM4-80GB":              {"a100-40", "a100-80"},
		"NVIDIA GeForce RTX 4090":            {"rtx-4090"},
		"NVIDIA GeForce RTX 3090 Ti":         {"rtx-3090"},
		"NVIDIA GeForce RTX 4090 Laptop GPU": nil,
		"NVIDIA RTX A6000":                   nil,
		"NVIDIA A10G":                        nil,
		"NVIDIA H20":                         {"h20"},
		"NVIDIA L40S":                        {"l40s"},
		"NVIDIA L40":                         nil,
		"emulated":                           nil,
		"":                                   nil,
	} {
		if got := HardwareOf(device); !slices.Equal(got, want) {
			t.Errorf("%q: %v, want %v", device, got, want)
		}
	}
}
