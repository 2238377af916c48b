package checkpoint

import (
	"errors"
	"testing"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/node/fault"
)

func TestEncode(t *testing.T) {
	m, err := Open(configs.Defaults().Model, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close() //nolint:errcheck // only read from
	text, err := m.ReadText()
	if err != nil || text.Broken != nil {
		t.Fatal(err, text.Broken)
	}
	for _, c := range []struct {
		chat bool
		want string
	}{{false, "1+2="}, {true, "<|user|>1+2=<|assistant|>"}} {
		ids, err := text.Encode("1+2=", c.chat)
		if err != nil || text.Tokenizer.Decode(ids, false) != c.want {
			t.Errorf("chat %v: %q, %v", c.chat, text.Tokenizer.Decode(ids, false), err)
		}
	}
	text.Template = nil
	if _, err := text.Encode("x", true); !errors.Is(err, fault.ErrConfig) {
		t.Errorf("without a template: %v", err)
	}
	text.Tokenizer = nil
	if _, err := text.Encode("x", false); !errors.Is(err, fault.ErrConfig) {
		t.Errorf("without a tokenizer: %v", err)
	}
}

// A preset has neither files nor, but for dummy ones, weights.
func TestPreset(t *testing.T) {
	s := configs.Model{Name: "phi-tiny-moe", DummyRouting: "uniform"}
	if _, err := Open(s, 0); !errors.Is(err, fault.ErrConfig) {
		t.Errorf("a preset without a load format: %v", err)
	}
	s.LoadFormat = configs.LoadDummy
	m, err := Open(s, 0)
	if err != nil {
		t.Fatal(err)
	}
	if text, err := m.ReadText(); err != nil || text.Tokenizer != nil || text.Template != nil {
		t.Errorf("%+v, %v", text, err)
	}
	if _, err := m.Encoder(); !errors.Is(err, fault.ErrConfig) {
		t.Errorf("encoder of a preset: %v", err)
	}
	if err := m.Close(); err != nil {
		t.Error(err)
	}
	s.Name = "no-such-model"
	if _, err := Open(s, 0); !errors.Is(err, fault.ErrModel) {
		t.Errorf("no such model: %v", err)
	}
}
