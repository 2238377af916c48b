package checkpoint_test

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/node/checkpoint"
	"github.com/moeserve/moeserve/node/fault"
	"github.com/moeserve/moeserve/tools/fixtures"
)

// TestModelsWithoutExperts: a model whose layers are all dense, or of which only dense ones
// are left, is refused by what it lacks.
func TestModelsWithoutExperts(t *testing.T) {
	data, err := os.ReadFile(filepath.Join(fixtures.Dir(t, "qwen2_moe"), "config.json"))
	if err != nil {
		t.Fatal(err)
	}
	var config map[string]any
	if err := json.Unmarshal(data, &config); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		dense  []int
		layers int
		kind   error
		says   string
	}{
		{[]int{0, 1, 2, 3}, 0, fault.ErrModel, "no experts: all of its layers are dense"},
		{[]int{0}, 1, fault.ErrConfig, "--num-hidden-layers 1 leaves only dense layers"},
		{[]int{0}, 2, nil, ""},
		{[]int{1, 2, 3}, 0, nil, ""},
	} {
		dir := t.TempDir()
		config["mlp_only_layers"], config["num_hidden_layers"] = c.dense, 4
		delete(config, "layer_types")
		data, err := json.Marshal(config)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "config.json"), data, 0o600); err != nil {
			t.Fatal(err)
		}
		m, err := checkpoint.Open(configs.Model{Name: dir, LoadFormat: configs.LoadDummy, DummyRouting: "uniform", NumHiddenLayers: c.layers}, 1)
		if c.kind == nil {
			if err != nil {
				t.Errorf("%+v: %v", c, err)
			} else if err := m.Close(); err != nil {
				t.Error(err)
			}
			continue
		}
		if !errors.Is(err, c.kind) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%+v: %v", c, err)
		}
	}
}
