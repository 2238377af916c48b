package main

import (
	"slices"
	"strings"
	"testing"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/models/chat/output"
)

// The settings name the formats that there are.
func TestParsers(t *testing.T) {
	for name, formats := range map[string][]string{"tool-call-parser": output.Names(), "reasoning-parser": output.ReasoningNames()} {
		k, ok := configs.Find(name)
		if want := append([]string{configs.AutoParser, configs.NoParser}, formats...); !ok || !slices.Equal(k.Allowed, want) {
			t.Errorf("--%s is one of %v, want %v", name, k.Allowed, want)
		}
	}
	for _, c := range []struct {
		calls, reasoning, template string
		wantCalls                  *output.Format
		wantReasoning              *output.ReasoningFormat
	}{
		{"auto", "auto", "tools <tool_call> </think>", output.Hermes, output.Qwen3},
		{"auto", "auto", "tools [TOOL_CALLS]", output.Mistral, nil},
		{"none", "none", "<tool_call> </think>", nil, nil},
		{"mistral", "deepseek_r1", "<tool_call>", output.Mistral, output.DeepSeekR1},
	} {
		calls, reasoning := parsers(&configs.Serve{ToolCallParser: c.calls, ReasoningParser: c.reasoning}, func(s string) bool { return strings.Contains(c.template, s) })
		if calls != c.wantCalls || reasoning != c.wantReasoning {
			t.Errorf("%+v: %v, %v", c, calls, reasoning)
		}
	}
}
