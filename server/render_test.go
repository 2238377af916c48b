package server_test

import (
	"net/http"
	"slices"
	"strings"
	"testing"
)

// TestRender: the ids that a router looks up are those that the engine runs, of the same body.
func TestRender(t *testing.T) {
	h := start(t, options{})
	type prompt struct {
		TokenIDs []int32 `json:"token_ids"`
	}
	completion := `{"prompt": ["1+2=", [5, 6, 7]], "temperature": 0, "max_tokens": 1, "return_token_ids": true, "add_special_tokens": false}`
	all := decode[[]prompt](t, h.post("/v1/completions/render", completion))
	run := decode[struct {
		Choices []struct {
			Prompt []int32 `json:"prompt_token_ids"`
		}
	}](t, h.post("/v1/completions", completion))
	if len(all) != 2 || !slices.Equal(all[1].TokenIDs, []int32{5, 6, 7}) || !slices.Equal(all[0].TokenIDs, encode(t, h.node.Text().Tokenizer, "1+2=", false)) {
		t.Errorf("%v", all)
	}
	for i, c := range run.Choices {
		if !slices.Equal(c.Prompt, all[i].TokenIDs) {
			t.Errorf("prompt %d is run with %v, rendered as %v", i, c.Prompt, all[i].TokenIDs)
		}
	}
	body := chatBody("1+2=", `, "max_tokens": 1, "return_token_ids": true`)
	one := decode[prompt](t, h.post("/v1/chat/completions/render", body))
	ran := decode[struct {
		Prompt []int32 `json:"prompt_token_ids"`
	}](t, h.post("/v1/chat/completions", body))
	if len(one.TokenIDs) == 0 || !slices.Equal(one.TokenIDs, ran.Prompt) {
		t.Errorf("run with %v, rendered as %v", ran.Prompt, one.TokenIDs)
	}
	for path, c := range map[string][2]string{
		"/v1/completions/render":      {`{}`, "Missing required parameter: 'prompt'"},
		"/v1/chat/completions/render": {`{"messages": [], "model": "tiny"}`, "messages"},
	} {
		if a := h.send(http.MethodPost, path, c[0]); a.status != http.StatusBadRequest || !strings.Contains(a.body, c[1]) {
			t.Errorf("%s: %d %s", path, a.status, a.body)
		}
	}
}
