package tiny_test

import (
	"encoding/json"
	"os"
	"slices"
	"testing"
	"testing/fstest"

	"github.com/moeserve/moeserve/models/chat"
	"github.com/moeserve/moeserve/models/tokenizer"
)

// TestCalls checks that conversations with tools reach a model as tools/tiny/calls.py trains it on them: the template
// writes the same text as jinja2, and its tokens are the same where clients' parts of it are plain text.
func TestCalls(t *testing.T) {
	content, err := os.ReadFile("testdata/calls.json")
	if err != nil {
		t.Fatal(err)
	}
	var trained struct {
		Tokenizer json.RawMessage
		Template  string
		Cases     []struct {
			Messages []json.RawMessage
			Tools    json.RawMessage
			Text     string
			IDs      []int32
		}
	}
	if err := json.Unmarshal(content, &trained); err != nil {
		t.Fatal(err)
	}
	if len(trained.Cases) == 0 {
		t.Fatal("no conversations")
	}
	template, err := chat.Load(fstest.MapFS{"chat_template.jinja": {Data: []byte(trained.Template)}}, "")
	if err != nil {
		t.Fatal(err)
	}
	tokens, err := tokenizer.Parse(trained.Tokenizer, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range trained.Cases {
		var messages []chat.Message
		for _, m := range c.Messages {
			messages = append(messages, chat.Message{Extra: m})
		}
		prompt, err := template.Render(t.Context(), messages, chat.Options{Tools: c.Tools})
		if err != nil {
			t.Fatal(err)
		}
		if prompt.Text != c.Text {
			t.Errorf("the template writes %q, want %q", prompt.Text, c.Text)
			continue
		}
		ids, err := tokens.EncodeWith(prompt.Text, tokenizer.EncodeOptions{Plain: prompt.Client})
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(ids, c.IDs) {
			t.Errorf("%q has tokens %v, want %v", prompt.Text, ids, c.IDs)
		}
	}
}
