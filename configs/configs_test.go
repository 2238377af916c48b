package configs

import (
	"encoding/json"
	"errors"
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

// Every field has an entry of the same type, and every entry a field.
func TestSchemaMatchesSettings(t *testing.T) {
	kinds := map[Kind]reflect.Type{
		String: reflect.TypeFor[string](), Bool: reflect.TypeFor[bool](), Int: reflect.TypeFor[int](),
		Uint: reflect.TypeFor[uint64](), Float: reflect.TypeFor[float64](),
	}
	typ := reflect.TypeFor[Settings]()
	var tags []string
	for i := range typ.NumField() {
		f := typ.Field(i)
		tag := f.Tag.Get("mapstructure")
		tags = append(tags, tag)
		k, ok := Find(tag)
		if !ok {
			t.Errorf("field %s: no entry %q", f.Name, tag)
			continue
		}
		if f.Type != kinds[k.Kind] || reflect.TypeOf(k.Default) != kinds[k.Kind] {
			t.Errorf("%s: field has type %v, default %T, entry says %v", tag, f.Type, k.Default, k.Kind)
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
}

func TestDefaults(t *testing.T) {
	s := Defaults()
	if err := s.Validate(); err != nil {
		t.Error(err)
	}
	if s.GPUMemoryUtilization != 0.9 || s.LoadFormat != "auto" {
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
		{func(s *Settings) { s.OffloadFraction = 1.5 }, `configs: offload-fraction is 1.5: must be from 0 to 1`},
		{func(s *Settings) { s.OffloadFraction = math.NaN() }, `configs: offload-fraction is NaN: must be from 0 to 1`},
		{func(s *Settings) { s.LoadFormat = "gguf" }, `configs: load-format is "gguf": must be auto or dummy`},
		{func(s *Settings) { s.LogLevel = "loud" }, `configs: log-level is "loud": must be debug, info, warn or error`},
		{func(s *Settings) { s.MaxNumSeqs = 0 }, `configs: max-num-seqs is 0: must be from 1 to 65536 sequences`},
		{func(s *Settings) { s.NumHiddenLayers = -1 }, `configs: num-hidden-layers is -1: must be from 0 to 1024 layers`},
		{func(s *Settings) { s.DummyRouting = "zipf:x" }, `configs: dummy-routing is "zipf:x": must be uniform or zipf:S, S above 0 and at most 8`},
		{func(s *Settings) { s.DummyRouting = "1.2" }, `configs: dummy-routing is "1.2": must be uniform or zipf:S, S above 0 and at most 8`},
		{func(s *Settings) { s.DummyRouting = "zipf:1.2" }, `configs: dummy-routing is "zipf:1.2": only goes with load-format dummy`},
		{func(s *Settings) { s.LoadFormat = "dummy" }, `configs: load-format is "dummy": needs model: a preset (`},
		{func(s *Settings) { s.InputLen, s.Prompts = 5, "f" }, `configs: input-len is 5: is for generated prompts, and prompts names a file`},
		{func(s *Settings) { s.OutputLen = 1 }, `configs: output-len is 1: must be from 2 to 2147483647 tokens`},
		{func(s *Settings) { s.MicroBatchSize = 4096 }, `configs: micro-batch-size is 4096: must be at most max-num-batched-tokens, 2048`},
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
	s.LoadFormat, s.Model, s.DummyRouting, s.Seed = "dummy", "mixtral-8x7b", "zipf:1.2", math.MaxUint64
	if err := s.Validate(); err != nil {
		t.Error(err)
	}
	if skew, _ := s.RoutingSkew(); skew != 1.2 {
		t.Errorf("skew %v", skew)
	}
}
