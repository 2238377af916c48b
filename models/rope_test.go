package models

import (
	"encoding/json"
	"maps"
	"math"
	"os"
	"path/filepath"
	"testing"

	"github.com/moeserve/moeserve/models/modelstest"
)

// TestRoPE compares inverse frequencies and scales with the reference's
// (testdata/make_rope.py), spelled the newer way and the older one, in all architectures.
func TestRoPE(t *testing.T) {
	data, err := os.ReadFile(filepath.Join("testdata", "rope.json"))
	if err != nil {
		t.Fatal(err)
	}
	var cases []struct {
		HeadDim  int            `json:"head_dim"`
		Theta    float64        `json:"theta"`
		RoPE     map[string]any `json:"rope"`
		Original *int           `json:"original"`
		Inverse  []float32      `json:"inverse"`
		Scale    float64        `json:"scale"`
	}
	if err := json.Unmarshal(data, &cases); err != nil {
		t.Fatal(err)
	}
	if len(cases) < 50 {
		t.Fatalf("only %d cases", len(cases))
	}
	for _, c := range cases {
		edit := map[string]any{
			"head_dim": c.HeadDim, "max_position_embeddings": 131072, "rope_theta": modelstest.Absent{},
			"rope_scaling": modelstest.Absent{}, "rope_parameters": modelstest.With(c.RoPE, "rope_theta", c.Theta),
		}
		if c.Original != nil {
			edit["original_max_position_embeddings"] = *c.Original
		}
		older := maps.Clone(edit)
		older["rope_parameters"], older["rope_theta"], older["rope_scaling"] = modelstest.Absent{}, c.Theta, modelstest.With(modelstest.With(c.RoPE, "type", c.RoPE["rope_type"]), "rope_type", nil)
		both := maps.Clone(edit)
		both["rope_scaling"] = older["rope_scaling"]
		for _, a := range architectures {
			for spelling, edit := range map[string]map[string]any{"newer": edit, "older": older, "both": both} {
				got, err := ParseConfig(modelstest.Config(a.kind, edit), "config.json")
				if err != nil {
					t.Errorf("%s, %v, %s: %v", a.kind, c.RoPE, spelling, err)
					continue
				}
				f := got.RoPE.Frequencies(c.HeadDim)
				if len(f) != 1 || len(f[0].Inverse) != len(c.Inverse) || f[0].Scale != float32(c.Scale) {
					t.Errorf("%s, %v, %s: scale %v, want %v", a.kind, c.RoPE, spelling, f[0].Scale, c.Scale)
					continue
				}
				for i, x := range f[0].Inverse {
					// The reference's vectorized power is off by a unit in the last place at times.
					if math.Abs(float64(x/c.Inverse[i])-1) > 3e-7 {
						t.Errorf("%s, %v, %s: inverse frequency %d is %v, want %v", a.kind, c.RoPE, spelling, i, x, c.Inverse[i])
					}
				}
			}
		}
	}
}
