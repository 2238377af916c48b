package configs

import (
	"encoding"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"
)

func TestPresets(t *testing.T) {
	want := []string{"mixtral-8x7b", "phi-3.5-moe", "phi-tiny-moe", "qwen1.5-moe-a2.7b", "qwen2-57b-a14b", "qwen3-30b-a3b"}
	if got := PresetNames(); !slices.Equal(got, want) {
		t.Fatalf("presets %v, want %v", got, want)
	}
	for _, name := range want {
		data, ok := Preset(name)
		if !strings.Contains(PresetRepository(name), "/") {
			t.Errorf("%s: repository %q", name, PresetRepository(name))
		}
		if !ok || !json.Valid(data) {
			t.Errorf("%s: there %v, valid JSON %v", name, ok, json.Valid(data))
		}
	}
	for _, name := range []string{"", "mixtral", "../settings", "mixtral-8x7b.json"} {
		if _, ok := Preset(name); ok {
			t.Errorf("there is a preset %q", name)
		}
	}
}

// Every field of a group has an entry of its kind, and every entry a field.
func TestSchemaMatchesSettings(t *testing.T) {
	kinds := map[Kind]reflect.Type{
		String: reflect.TypeFor[string](), Bool: reflect.TypeFor[bool](), Int: reflect.TypeFor[int](),
		Uint: reflect.TypeFor[uint64](), Float: reflect.TypeFor[float64](),
	}
	var tags []string
	for group := range reflect.TypeFor[Settings]().Fields() {
		for f := range group.Type.Fields() {
			tag := f.Tag.Get("mapstructure")
			tags = append(tags, tag)
			k, ok := Find(tag)
			if !ok {
				t.Errorf("field %s.%s: no entry %q", group.Name, f.Name, tag)
				continue
			}
			enum := k.Kind == String && reflect.PointerTo(f.Type).Implements(reflect.TypeFor[encoding.TextUnmarshaler]()) && f.Type.Implements(reflect.TypeFor[fmt.Stringer]())
			if f.Type != kinds[k.Kind] && !enum || reflect.TypeOf(k.Default) != kinds[k.Kind] {
				t.Errorf("%s: field has type %v, default %T, entry says %v", tag, f.Type, k.Default, k.Kind)
			}
		}
	}
	for _, k := range Schema {
		if !slices.Contains(tags, k.Name) {
			t.Errorf("entry %q has no field", k.Name)
		}
		if k.Help == "" || strings.HasSuffix(k.Help, ".") || len(k.Commands) == 0 || k.Name != strings.ToLower(k.Name) {
			t.Errorf("entry %q: help %q, commands %v", k.Name, k.Help, k.Commands)
		}
	}
	if len(tags) != len(Schema) {
		t.Errorf("%d fields, %d entries", len(tags), len(Schema))
	}
	// Groups have titles, and stand together.
	var groups []string
	for _, k := range Schema {
		if g := k.Group(); g == "" {
			t.Errorf("entry %q: no title", k.Name)
		} else if len(groups) == 0 || groups[len(groups)-1] != g {
			groups = append(groups, g)
		}
	}
	if slices.Sort(groups); len(slices.Compact(slices.Clone(groups))) != len(groups) {
		t.Errorf("groups %v", groups)
	}
}

// TestNumbers: of a setting with a few numbers no other is taken, also not between them.
func TestNumbers(t *testing.T) {
	for _, k := range Schema {
		for _, n := range k.Numbers {
			s := Defaults()
			if err := s.Put(map[string]any{k.Name: n}); err != nil || s.Values()[k.Name] != n {
				t.Errorf("%s %d: %v, %v", k.Name, n, err, s.Values()[k.Name])
			}
		}
	}
	for _, n := range []int{0, 1, 24, 256, -16} {
		s := Defaults()
		s.KV.BlockSize = n
		if err, want := s.Validate(), fmt.Sprintf("configs: --block-size is %d: must be 8, 16, 32, 64 or 128 tokens", n); err == nil || err.Error() != want {
			t.Errorf("%v, want %s", err, want)
		}
	}
}

// Each allowed value can be put, and reads as it was written; no other can.
func TestAllowed(t *testing.T) {
	for _, k := range Schema {
		if k.Allowed == nil {
			continue
		}
		for _, v := range k.Allowed {
			s := Defaults()
			s.Model.Name = "mixtral-8x7b" // which dummy weights need
			s.Device.Peers = "1"          // which tier peer needs
			if err := s.Put(map[string]any{k.Name: v}); err != nil || s.Values()[k.Name] != v || k.CheckText(v) != nil {
				t.Errorf("%s %s: %v, %v", k.Name, v, err, s.Values()[k.Name])
			}
		}
		s := Defaults()
		var bad *SettingError
		if err := k.CheckText("gguf"); !errors.As(err, &bad) || !strings.HasPrefix(err.Error(), fmt.Sprintf("configs: --%s is \"gguf\": must be %s", k.Name, alternatives(k.Allowed))) {
			t.Errorf("%s: got %v", k.Name, err)
		}
		if s.Put(map[string]any{k.Name: "gguf"}) == nil {
			t.Errorf("%s can be gguf", k.Name)
		}
	}
	s := Defaults()
	if s.Put(map[string]any{"offload-tier": "none"}) == nil {
		t.Error("a name that is for results only is taken as a setting")
	}
	if s.Put(map[string]any{"gpu": "1"}) == nil || s.Put(map[string]any{"model": 1}) == nil {
		t.Error("a value of another kind is taken")
	}
}

func TestDefaults(t *testing.T) {
	s := Defaults()
	if err := s.Validate(); err != nil {
		t.Error(err)
	}
	if s.Device.GPUMemoryUtilization != 0.9 || s.Model.LoadFormat != LoadAuto {
		t.Errorf("%+v", s)
	}
	values := s.Values()
	for _, k := range Schema {
		if values[k.Name] != k.Default {
			t.Errorf("%s is %v by default, want %v", k.Name, values[k.Name], k.Default)
		}
	}
}

func TestFor(t *testing.T) {
	all, run, serve, inspect := For("config"), For("run"), For("serve"), For("inspect")
	if len(all) != len(Schema) || len(inspect) == 0 || len(inspect) >= len(run) || len(inspect) > len(serve) || len(serve) >= len(all) {
		t.Errorf("%d settings for run, %d for serve, %d for inspect, %d for config, %d in all", len(run), len(serve), len(inspect), len(all), len(Schema))
	}
	if k, _ := Find("max-num-seqs"); k.Variable() != "MOESERVE_MAX_NUM_SEQS" {
		t.Errorf("variable %s", k.Variable())
	}
	if len(For("nothing")) != 0 {
		t.Error("a command that there is not takes settings")
	}
}

func TestValidate(t *testing.T) {
	for _, c := range []struct {
		change func(*Settings)
		want   string
	}{
		{func(s *Settings) { s.Offload.Fraction = 1.5 }, `configs: --offload-fraction is 1.5: must be from 0 to 1`},
		{func(s *Settings) { s.Offload.Fraction = math.NaN() }, `configs: --offload-fraction is NaN: must be from 0 to 1`},
		{func(s *Settings) { s.Model.LoadFormat = 7 }, `configs: --load-format is "configs.LoadFormat(7)": must be auto or dummy`},
		{func(s *Settings) { s.Output.LogLevel = 7 }, `configs: --log-level is "configs.LogLevel(7)": must be auto, debug, info, warn or error`},
		{func(s *Settings) { s.Batch.MaxNumSeqs = 0 }, `configs: --max-num-seqs is 0: must be from 1 to 65536 sequences`},
		{func(s *Settings) { s.Model.NumHiddenLayers = -1 }, `configs: --num-hidden-layers is -1: must be from 0 to 1024 layers`},
		{func(s *Settings) { s.Model.DummyRouting = "zipf:x" }, `configs: --dummy-routing is "zipf:x": must be uniform or zipf:S with S above 0 and up to 8`},
		{func(s *Settings) { s.Model.DummyRouting = "1.2" }, `configs: --dummy-routing is "1.2": must be uniform or zipf:S with S above 0 and up to 8`},
		{func(s *Settings) { s.Model.DummyRouting = "zipf:1.2" }, `configs: --dummy-routing is "zipf:1.2": needs --load-format dummy`},
		{func(s *Settings) { s.Model.LoadFormat = LoadDummy }, `configs: --load-format is "dummy": needs --model: a preset (`},
		{func(s *Settings) { s.Bench.InputLen, s.Bench.DatasetPath = 5, "f" }, `configs: --input-len is 5: is for generated prompts; leave out --dataset-path`},
		{func(s *Settings) { s.Bench.OutputLen = 1 }, `configs: --output-len is 1: must be from 2 to 2147483647 tokens`},
		{func(s *Settings) { s.Batch.MicroBatchSize = 4096 }, `configs: --micro-batch-size is 4096: must be at most --max-num-batched-tokens, 2048`},
	} {
		s := Defaults()
		c.change(&s)
		err := s.Validate()
		var bad *SettingError
		if !errors.As(err, &bad) || !strings.HasPrefix(err.Error(), c.want) {
			t.Errorf("got %v, want %s", err, c.want)
		}
	}
	s := Defaults()
	s.Model.LoadFormat, s.Model.Name, s.Model.DummyRouting, s.Generate.Seed = LoadDummy, "mixtral-8x7b", "zipf:1.2", math.MaxUint64
	if err := s.Validate(); err != nil {
		t.Error(err)
	}
	if skew, _ := s.Model.ParseRouting(); skew != 1.2 {
		t.Errorf("skew %v", skew)
	}
}
