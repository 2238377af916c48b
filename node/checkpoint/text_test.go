package checkpoint

import (
	"errors"
	"strings"
	"testing"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/models/chat"
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
	ids, err := text.Encode("1+2=")
	if got := text.Tokenizer.Decode(ids, false); err != nil || got != "1+2=" {
		t.Errorf("as it is: %q, %v", got, err)
	}
	ids, err = text.EncodeChat([]chat.Message{{Role: "user", Content: "1+2="}})
	if got := text.Tokenizer.Decode(ids, false); err != nil || got != "<|user|>1+2=<|assistant|>" {
		t.Errorf("as a message: %q, %v", got, err)
	}
	if err := text.Check(TemplateNeeded); err != nil {
		t.Error(err)
	}
	text.Template = nil
	if _, err := text.EncodeChat(nil); !errors.Is(err, fault.ErrConfig) {
		t.Errorf("without a template: %v", err)
	}
	if text.Check(TemplateIfAny) != nil || !errors.Is(text.Check(TemplateNeeded), fault.ErrConfig) {
		t.Errorf("without a template: %v, needed: %v", text.Check(TemplateIfAny), text.Check(TemplateNeeded))
	}
	text.Broken = fault.Of(fault.ErrModel, errors.New("broken"))
	if text.Check(NoTemplate) != nil || !errors.Is(text.Check(TemplateIfAny), fault.ErrModel) {
		t.Errorf("with a broken template: %v, needed: %v", text.Check(NoTemplate), text.Check(TemplateIfAny))
	}
	text.Tokenizer = nil
	if _, err := text.Encode("x"); !errors.Is(err, fault.ErrConfig) {
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
	if _, err := m.Encoder(); !errors.Is(err, fault.ErrConfig) || !strings.Contains(err.Error(), "name a folder") {
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
