package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// Where a parameter of the API belongs.
const (
	onBoth        = "both"
	onCompletions = "/v1/completions"
	onChats       = "/v1/chat/completions"
)

// apiParameters are the members of a body: where each belongs, a value, and what it does. The page
// has what a server answers to that value; without one it is not tried, as the built-in model's template
// does not do it. A dot leads into an object. A parameter that is known
// and changes nothing is ignored; the server's own list must have it.
var apiParameters = []struct {
	on, name, value, does string
	ignored               bool
}{
	{onCompletions, "prompt", `"1+2="`, "text, token ids, or a list of either", false},
	{onCompletions, "echo", `true`, "the prompt before the completion", false},
	{onCompletions, "logprobs", `2`, "log-probabilities of the sampled token and of this many others", false},
	{onCompletions, "best_of", `1`, "only as many as `n`", false},
	{onCompletions, "best_of", `3`, "", false},
	{onCompletions, "suffix", `"x"`, "", false},
	{onChats, "messages", `[{"role": "user", "content": "1+2="}]`, "the conversation: text, tool calls and their results", false},
	{onChats, "max_completion_tokens", `1`, "maximum tokens to generate; goes before `max_tokens`", false},
	{onChats, "logprobs", `true`, "log-probabilities of the sampled tokens", false},
	{onChats, "top_logprobs", `2`, "log-probabilities of this many others; needs `logprobs`", false},
	{onChats, "tools", "", "go through the chat template; the model's calls are returned as text", false},
	{onChats, "tool_choice", `"auto"`, "`none` or `auto`", false},
	{onChats, "tool_choice", `"required"`, "", false},
	{onChats, "modalities", `["text"]`, "text only", false},
	{onChats, "modalities", `["audio"]`, "", false},
	{onChats, "add_generation_prompt", `true`, "end the prompt where the assistant's turn begins (vLLM)", false},
	{onChats, "chat_template_kwargs", `{}`, "variables of the chat template (vLLM)", false},
	{onChats, "chat_template", `"x"`, "", false},
	{onChats, "continue_final_message", `true`, "", false},
	{onChats, "functions", `[]`, "", false},
	{onChats, "function_call", `"auto"`, "", false},
	{onChats, "audio", `{}`, "", false},
	{onChats, "prediction", `{}`, "", false},
	{onChats, "web_search_options", `{}`, "", false},
	{onBoth, "model", `"built-in"`, "the served model's name", false},
	{onBoth, "request_id", `"a"`, "name of the request in the log and in `X-Request-Id` (vLLM)", false},
	{onBoth, "max_tokens", `1`, "maximum tokens to generate", false},
	{onBoth, "min_tokens", `1`, "minimum tokens before an end (vLLM)", false},
	{onBoth, "temperature", `0`, "sampling temperature; 0 is greedy; the default is 1", false},
	{onBoth, "top_p", `0.9`, "nucleus sampling", false},
	{onBoth, "top_k", `4`, "sample from this many; -1 or 0: all (vLLM)", false},
	{onBoth, "min_p", `0.1`, "drop tokens below this share of the best one's probability (vLLM)", false},
	{onBoth, "repetition_penalty", `1.1`, "divide the logits of tokens already there (vLLM)", false},
	{onBoth, "presence_penalty", `0.5`, "subtract from the logits of generated tokens", false},
	{onBoth, "frequency_penalty", `0.5`, "the same, for each time that the token was generated", false},
	{onBoth, "logit_bias", `{"5": 1}`, "added to the logits of these token ids", false},
	{onBoth, "seed", `1`, "the same seed and request give the same tokens", false},
	{onBoth, "n", `2`, "completions of each prompt", false},
	{onBoth, "stop", `["x"]`, "a string or a list of them", false},
	{onBoth, "stop_token_ids", `[3]`, "end at one of these tokens (vLLM)", false},
	{onBoth, "include_stop_str_in_output", `true`, "keep the stop string in the text (vLLM)", false},
	{onBoth, "ignore_eos", `true`, "keep generating after EOS (vLLM)", false},
	{onBoth, "return_token_ids", `true`, "ids of prompt and completion (vLLM)", false},
	{onBoth, "add_special_tokens", `true`, "special tokens around the prompt (vLLM)", false},
	{onBoth, "stream", `false`, "server-sent events, a chunk for each step", false},
	{onBoth, "stream_options.include_usage", `false`, "usage in a last chunk; needs `stream`", false},
	{onBoth, "stream_options.include_obfuscation", `false`, "", true},
	{onBoth, "response_format.type", `"text"`, "text only", false},
	{onBoth, "response_format.type", `"json_object"`, "", false},
	{onBoth, "skip_special_tokens", `true`, "special tokens are always skipped", false},
	{onBoth, "skip_special_tokens", `false`, "", false},
	{onBoth, "use_beam_search", `true`, "", false},
	{onBoth, "prompt_logprobs", `1`, "", false},
	{onBoth, "truncate_prompt_tokens", `4`, "", false},
	{onBoth, "user", `"a"`, "", true},
	{onBoth, "metadata", `{}`, "", true},
	{onBoth, "store", `false`, "", true},
	{onBoth, "service_tier", `"auto"`, "", true},
	{onBoth, "safety_identifier", `"a"`, "", true},
	{onBoth, "prompt_cache_key", `"a"`, "", true},
	{onBoth, "prompt_cache_retention", `"24h"`, "", true},
	{onBoth, "parallel_tool_calls", `true`, "", true},
	{onBoth, "reasoning_effort", `"low"`, "", true},
	{onBoth, "verbosity", `"low"`, "", true},
	{onBoth, "spaces_between_special_tokens", `true`, "", true},
	{onBoth, "priority", `1`, "", true},
}

// endpoints say what each path of the server is for.
var endpoints = map[string]string{
	"/v1/completions":      "POST: completions of prompts",
	"/v1/chat/completions": "POST: completions of conversations, through the model's chat template",
	"/v1/models":           "GET: the served model; `/v1/models/NAME` too",
	"/tokenize":            "POST: text or a conversation into token ids (vLLM)",
	"/detokenize":          "POST: token ids into text (vLLM)",
	"/health":              "GET: 200 while the process is alive; needs no key",
	"/health/ready":        "GET: 200 while requests are accepted, else 503; needs no key",
	"/version":             "GET: version of this server; needs no key",
	"/metrics":             "GET: [metrics](metrics.md) for Prometheus; needs no key",
	"/debug/residency":     "GET: where every expert is ([fields](json.md#debugresidency))",
	"/debug/events":        "GET: changes of that, as server-sent events ([fields](json.md#debugevents))",
}

func TestReferenceAPI(t *testing.T) {
	p := startServe(t)
	known, ignored, paths := serverNames(t)
	var supported, unused, refused []string
	for _, x := range apiParameters {
		top, sub, nested := strings.Cut(x.name, ".")
		last, value := top, x.value
		if nested {
			last, value = sub, fmt.Sprintf("{%q: %s}", sub, x.value)
		}
		if !slices.Contains(known, last) {
			t.Errorf("the server reads no member %s", x.name)
		}
		path, body := onCompletions, fmt.Sprintf(`{"prompt": "1+2=", %q: %s}`, top, value)
		if x.on == onChats {
			path, body = onChats, fmt.Sprintf(`{"messages": [{"role": "user", "content": "1+2="}], %q: %s}`, top, value)
		}
		switch x.name {
		case "prompt", "messages":
			body = fmt.Sprintf(`{%q: %s}`, top, value)
		case "top_logprobs":
			body = strings.Replace(body, "{", `{"logprobs": true, `, 1)
		case "stream_options.include_usage", "stream_options.include_obfuscation":
			body = strings.Replace(body, "{", `{"stream": true, `, 1)
		case "ignore_eos", "temperature", "min_tokens":
			body = strings.Replace(body, "{", `{"max_tokens": 2, `, 1)
		}
		status, message := 200, ""
		if x.value != "" {
			status, _, message = requestFails(t, p, path, body)
		}
		row := fmt.Sprintf("| `%s` | %s | ", x.name, strings.ReplaceAll(x.on, "/v1/", ""))
		switch {
		case status == 400:
			refused = append(refused, fmt.Sprintf("%s`%s` | %s |", row, cell(x.value), cell(message)))
			if x.does != "" {
				t.Errorf("%s %s: %s", path, body, message)
			}
		case status != 200:
			t.Errorf("%s %s: status %d", path, body, status)
		case slices.Contains(ignored, last) != x.ignored:
			t.Errorf("%s: ignored %v, the server says %v", x.name, x.ignored, !x.ignored)
		case x.ignored:
			unused = append(unused, "`"+x.name+"`")
		default:
			supported = append(supported, row+x.does+" |")
		}
	}
	for _, name := range known {
		if !slices.ContainsFunc(apiParameters, func(x struct {
			on, name, value, does string
			ignored               bool
		},
		) bool {
			return x.name == name || strings.HasSuffix(x.name, "."+name) || strings.HasPrefix(x.name, name+".")
		}) {
			t.Errorf("the server reads %s, and apiParameters does not have it", name)
		}
	}
	var b strings.Builder
	b.WriteString("`serve` speaks the OpenAI API. What it does not know or does not do is refused by name, with status 400 and OpenAI's error body ([errors](errors.md#http)).\n\n## Endpoints\n\n| path | what it is for |\n|---|---|\n")
	for _, path := range paths {
		if endpoints[path] == "" {
			t.Errorf("endpoints does not say what %s is for", path)
		}
		fmt.Fprintf(&b, "| `%s` | %s |\n", path, endpoints[path])
	}
	b.WriteString("\n## Supported parameters\n\n| parameter | endpoint | what it does |\n|---|---|---|\n" + strings.Join(supported, "\n"))
	b.WriteString("\n\n## Accepted and without effect\n\n" + strings.Join(unused, ", ") + ".")
	b.WriteString("\n\n## Unsupported\n\n| parameter | endpoint | value | error |\n|---|---|---|---|\n" + strings.Join(refused, "\n") + "\n")
	reference(t, "api.md", "HTTP API", "those who write clients: endpoints, and the parameters that are supported, ignored and refused", b.String())
}

// serverNames reads from the server's source which members it takes out of a body, which of them it
// ignores, and which paths it has.
func serverNames(t *testing.T) (known, ignored, paths []string) {
	t.Helper()
	reads := []string{"text", "flag", "integer", "number", "int64", "ids", "pop", "sub", "list", "unsupported", "ignore"}
	in := []string{"parseCommon", "parseStop", "parseLogitBias", "parseStreamOptions", "parseResponseFormat", "parseCompletion", "parseChat", "parseConversation", "parseTools"}
	plain := regexp.MustCompile(`^[a-z][a-z_]*$`)
	found := map[string]bool{}
	literal := func(e ast.Expr) (string, bool) {
		l, ok := e.(*ast.BasicLit)
		if !ok || l.Kind != token.STRING {
			return "", false
		}
		s, err := strconv.Unquote(l.Value)
		return s, err == nil
	}
	add := func(e ast.Expr) {
		if s, ok := literal(e); ok && plain.MatchString(s) && !found[s] {
			found[s], known = true, append(known, s)
		}
	}
	inspect := func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.CallExpr:
			if m, ok := n.Fun.(*ast.SelectorExpr); ok && slices.Contains(reads, m.Sel.Name) && len(n.Args) > 0 {
				add(n.Args[0])
				if m.Sel.Name == "ignore" {
					if s, ok := literal(n.Args[0]); ok {
						ignored = append(ignored, s)
					}
				}
			} else if f, ok := n.Fun.(*ast.Ident); ok && f.Name == "parseMaxTokens" {
				add(n.Args[2])
			}
		case *ast.CompositeLit:
			if a, ok := n.Type.(*ast.ArrayType); ok || n.Type == nil {
				if _, strings := stringElement(a); strings || n.Type == nil {
					for i, e := range n.Elts {
						if n.Type != nil || i == 0 { // of pairs the first
							add(e)
						}
					}
				}
			}
		}
		return true
	}
	for _, name := range []string{"params.go", "completions.go", "chat.go", "server.go"} {
		f, err := parser.ParseFile(token.NewFileSet(), filepath.Join("..", "..", "server", name), nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range f.Decls {
			switch d := d.(type) {
			case *ast.FuncDecl:
				if slices.Contains(in, d.Name.Name) {
					ast.Inspect(d, inspect)
				}
				if name == "server.go" {
					ast.Inspect(d, func(n ast.Node) bool {
						if kv, ok := n.(*ast.KeyValueExpr); ok {
							if s, ok := literal(kv.Key); ok && strings.HasPrefix(s, "/") {
								paths = append(paths, s)
							}
						}
						return true
					})
				}
			case *ast.GenDecl:
				for _, s := range d.Specs {
					if v, ok := s.(*ast.ValueSpec); ok && v.Names[0].Name == "unused" {
						for _, e := range v.Values[0].(*ast.CompositeLit).Elts {
							add(e)
							s, _ := literal(e)
							ignored = append(ignored, s)
						}
					}
				}
			}
		}
	}
	if len(known) < 40 || len(ignored) < 10 || len(paths) < 10 {
		t.Fatalf("found %d members, %d that are ignored, %d paths: the source is written in another way", len(known), len(ignored), len(paths))
	}
	return known, ignored, paths
}

// stringElement says whether a type is of strings, or of arrays of them.
func stringElement(a *ast.ArrayType) (string, bool) {
	if a == nil {
		return "", false
	}
	id, ok := a.Elt.(*ast.Ident)
	return "string", ok && id.Name == "string"
}
