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

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/server"
)

// Where a parameter of the API belongs.
const (
	onBoth        = "both"
	onCompletions = "/v1/completions"
	onChats       = "/v1/chat/completions"
	onMessages    = "/v1/messages"
	onResponses   = "/v1/responses"
)

// apiParameter is a member of a body that the server acts on: where it belongs, a value, and what it
// does. The page has what a server answers to that value; without one it is not tried, as the built-in
// model's template does not do it. A dot leads into an object.
type apiParameter struct{ on, name, value, does string }

// apiParameters are all of them; those that the server does nothing about are server.Members.
var apiParameters = []apiParameter{
	{onCompletions, "prompt", `"1+2="`, "text, token ids, or a list of either"},
	{onCompletions, "echo", `true`, "the prompt before the completion; with `logprobs` its tokens have theirs, too"},
	{onCompletions, "logprobs", `2`, "log-probabilities of the sampled token and of this many others"},
	{onCompletions, "best_of", `1`, "only as many as `n`"},
	{onCompletions, "best_of", `3`, ""},
	{onChats, "messages", `[{"role": "user", "content": "1+2="}]`, "the conversation: text, tool calls and their results"},
	{onChats, "max_completion_tokens", `1`, "maximum tokens to generate; goes before `max_tokens`"},
	{onChats, "logprobs", `true`, "log-probabilities of the sampled tokens"},
	{onChats, "top_logprobs", `2`, "log-probabilities of this many others; needs `logprobs`"},
	{onChats, "tools", "", "functions, each with a name; they go through the chat template; the model's calls are returned as `tool_calls`, with `strict` constrained to their schema ([guide](../guide/serving.md#tool-calls))"},
	{onChats, "tool_choice", `"auto"`, "`none`, `auto`, `required` or a function by name; the last two begin the call, which follows the schema of its tool ([what that guarantees](../guide/serving.md#tool-calls))"},
	{onChats, "parallel_tool_calls", `false`, "false: only the first call is returned"},
	{onChats, "include_reasoning", `false`, "false: reasoning is not returned (vLLM)"},
	{onChats, "enable_thinking", `false`, "the variable of the chat template that turns reasoning off, also as a member of `chat_template_kwargs`, as with vLLM"},
	{onChats, "add_generation_prompt", `true`, "end the prompt where the assistant's turn begins (vLLM)"},
	{onChats, "chat_template_kwargs", `{}`, "variables of the chat template (vLLM)"},
	{onChats, "reasoning_effort", `"low"`, "a variable of the chat template, as with vLLM; templates without it do not change"},
	{onBoth, "model", `"built-in"`, "a name of the served model; the completion has the same"},
	{onBoth, "request_id", `"a"`, "name of the request in the log and in `X-Request-Id` (vLLM)"},
	{onBoth, "cache_salt", `"a"`, "share cached prefixes only with requests of the same salt (vLLM)"},
	{onBoth, "priority", `0`, "with `--scheduling-policy priority` lower values come first (vLLM); with `fair` a nice level from -20 to 19, with 1.25 times the weight of the next; with `fcfs` only 0"},
	{onBoth, "priority", `5`, ""},
	{onBoth, "max_tokens", `1`, "maximum tokens to generate; -1: all that fits; in completions 0: only the prompt is computed"},
	{onBoth, "prompt_logprobs", `2`, "log-probabilities and ranks of the prompt's tokens, and of this many others at each position, up to 20; not in streams. Such a prompt is computed whole, whatever the prefix cache has of it (vLLM)"},
	{onBoth, "bad_words", `["x"]`, "words that are not generated, also of several tokens (vLLM)"},
	{onBoth, "allowed_token_ids", `[3, 5]`, "the only tokens that are generated (vLLM)"},
	{onBoth, "temperature", `0`, "sampling temperature; 0 is greedy; the default is the model's (`--generation-config`) or 1"},
	{onBoth, "top_p", `0.9`, "nucleus sampling"},
	{onBoth, "top_k", `4`, "sample from this many; -1 or 0: all (vLLM)"},
	{onBoth, "min_p", `0.1`, "drop tokens below this share of the best one's probability (vLLM)"},
	{onBoth, "repetition_penalty", `1.1`, "divide the logits of tokens already there (vLLM)"},
	{onBoth, "presence_penalty", `0.5`, "subtract from the logits of generated tokens"},
	{onBoth, "frequency_penalty", `0.5`, "the same, for each time that the token was generated"},
	{onBoth, "logit_bias", `{"5": 1}`, "added to the logits of these token ids"},
	{onBoth, "seed", `1`, "the same seed and request give the same tokens"},
	{onBoth, "min_tokens", `1`, "minimum tokens before an end (vLLM)"},
	{onBoth, "stop_token_ids", `[3]`, "end at one of these tokens (vLLM)"},
	{onBoth, "include_stop_str_in_output", `true`, "keep the stop string in the text (vLLM)"},
	{onBoth, "ignore_eos", `true`, "keep generating after EOS (vLLM)"},
	{onBoth, "stop", `["x"]`, "a string or a list of them"},
	{onBoth, "n", `2`, "completions of each prompt"},
	{onBoth, "skip_special_tokens", `false`, "false: special tokens are a part of the text (vLLM)"},
	{onBoth, "return_token_ids", `true`, "ids of prompt and completion (vLLM)"},
	{onBoth, "add_special_tokens", `true`, "special tokens around the prompt (vLLM)"},
	{onBoth, "stream", `false`, "server-sent events, a chunk for each token"},
	{onBoth, "stream_options.include_usage", `false`, "usage in a last chunk; needs `stream`"},
	{onBoth, "stream_options.continuous_usage_stats", `false`, "usage so far in every chunk; needs `include_usage` (vLLM)"},
	{onMessages, "messages", `[{"role": "user", "content": [{"type": "text", "text": "1+2="}]}]`, "the conversation: blocks of `text`, `thinking`, `tool_use` and `tool_result`; the last is the user's, or a `system` message behind it"},
	{onMessages, "max_tokens", `2`, "maximum tokens to generate, which must be given; -1: all that fits"},
	{onMessages, "system", `"Be right."`, "a text, or blocks of text, before the conversation"},
	{onMessages, "stop_sequences", `["x"]`, "as `stop`"},
	{onMessages, "stream", `false`, "Anthropic's events, a delta for each piece of text"},
	{onMessages, "thinking.type", `"disabled"`, "`enabled` or `disabled` set the chat template's `enable_thinking`; `budget_tokens` is not kept: reasoning is as long as the model makes it"},
	{onMessages, "output_config.effort", `"low"`, "as `reasoning_effort`"},
	{onMessages, "output_config.format", `{"type": "json_schema", "schema": {"type": "integer"}}`, "`text`, `json_object`, or `json_schema` with a `schema` ([guide](../guide/serving.md#structured-output))"},
	{onMessages, "tools", "", "functions with `name`, `description`, `input_schema` and, as in a chat, `strict`"},
	{onMessages, "tool_choice", `{"type": "auto"}`, "`auto`, `any`, `tool` with a `name`, or `none`; with `disable_parallel_tool_use` only the first call is returned"},
	{onResponses, "input", `[{"role": "user", "content": "1+2="}]`, "a text, or items: messages, `reasoning`, `function_call` and `function_call_output`"},
	{onResponses, "instructions", `"Be right."`, "a system message before the input"},
	{onResponses, "stop", `["x"]`, "as in chats (vLLM)"},
	{onResponses, "max_output_tokens", `2`, "maximum tokens to generate; -1: all that fits"},
	{onResponses, "stream", `false`, "the events of the Responses API"},
	{onResponses, "metadata", `{"a": "b"}`, "returned as it is"},
	{onResponses, "reasoning.effort", `"low"`, "as `reasoning_effort`; `summary` is ignored, since the response has the reasoning itself"},
	{onResponses, "text.format", `{"type": "json_schema", "name": "x", "schema": {"type": "integer"}}`, "`text`, `json_object`, or `json_schema` with a `schema` ([guide](../guide/serving.md#structured-output))"},
	{onResponses, "include", `["reasoning.encrypted_content"]`, "only this, which has no effect: reasoning is not encrypted"},
	{onResponses, "include", `["file_search_call.results"]`, ""},
	{onResponses, "tools", "", "of type `function`"},
	{onResponses, "tool_choice", `"auto"`, "as in chats; a function as `{\"type\": \"function\", \"name\": …}`"},
	{onResponses, "parallel_tool_calls", `false`, "false: only the first call is returned"},
	{onBoth, "response_format.type", `"json_object"`, "`text`, `json_object` or `json_schema`: the completion is JSON ([guide](../guide/serving.md#structured-output))"},
	{onBoth, "response_format.type", `"structural_tag"`, ""},
	{onBoth, "response_format.json_schema", `{"schema": {"type": "integer"}}`, "with `schema`; `name`, `description` and `strict` change nothing"},
	{onBoth, "response_format.json_schema.schema", "", "the JSON schema of the completion"},
	{onBoth, "response_format.json_schema.name", "", "accepted"},
	{onBoth, "response_format.json_schema.description", "", "accepted"},
	{onBoth, "response_format.json_schema.strict", "", "accepted: every schema is strict"},
	{onBoth, "structured_outputs.json", `{"type": "integer"}`, "a JSON schema (vLLM); one of `json`, `json_object`, `regex`, `choice` and `grammar`"},
	{onBoth, "structured_outputs.json_object", `true`, "a JSON object (vLLM)"},
	{onBoth, "structured_outputs.regex", `"[a-z]{2}"`, "a regular expression that matches the whole completion (vLLM)"},
	{onBoth, "structured_outputs.choice", `["yes", "no"]`, "one of these texts (vLLM)"},
	{onBoth, "structured_outputs.grammar", `"root ::= [a-z]+"`, "a grammar in GBNF (vLLM)"},
	{onBoth, "structured_outputs.disable_any_whitespace", `true`, "no white space in JSON (vLLM)"},
	{onBoth, "structured_outputs.whitespace_pattern", `" ?"`, "a regular expression for white space in JSON (vLLM)"},
	{onBoth, "structured_outputs.disable_additional_properties", `true`, "false: objects that declare properties may have others (vLLM)"},
}

// endpoints say what each path of the server is for.
var endpoints = map[string]string{
	"/v1/completions":             "POST: completions of prompts",
	"/v1/chat/completions":        "POST: completions of conversations, through the model's chat template",
	"/v1/responses":               "POST: completions of conversations in the form of OpenAI's Responses API; nothing is stored ([guide](../guide/serving.md#other-forms-of-a-chat))",
	"/v1/messages":                "POST: completions of conversations in the form of Anthropic's Messages API ([guide](../guide/serving.md#other-forms-of-a-chat))",
	"/v1/messages/count_tokens":   "POST: how many tokens the prompt of such a conversation has (Anthropic)",
	"/debug/node":                 "GET: what the node is doing: sequences, tokens, memory, links, stalls (what the admin address' page shows; [fields](json.md#debugnode)), of `?model=NAME` or the first model",
	"/tokenizer_info":             "GET: the tokenizer's configuration, with its special tokens and the chat template, of `?model=NAME` or the first model (vLLM)",
	"/v1/models":                  "GET: the served model, by each of its names; `/v1/models/NAME` too",
	"/v1/completions/render":      "POST: the token ids of each prompt of a completion request, which is not run (vLLM; routers look prefixes up by them)",
	"/v1/chat/completions/render": "POST: the token ids of the prompt of a chat completion request, which is not run (vLLM)",
	"/tokenize":                   "POST: text or a conversation into token ids (vLLM)",
	"/detokenize":                 "POST: token ids into text (vLLM)",
	"/":                           "GET: what this server is; needs no key",
	"/health":                     "GET: 200 while the model answers, with `status` `degraded` while steps fail; 503 while it loads; needs no key",
	"/health/live":                "GET: 200 from the start, 503 once the engine has failed; needs no key",
	"/health/ready":               "GET: 200 while requests are accepted and steps succeed, else 503, also during the drain; needs no key",
	"/ping":                       "GET, POST: as `/health` (vLLM)",
	"/load":                       "GET: number of requests that use the model now (vLLM); needs no key",
	"/version":                    "GET: version of this server; needs no key",
	"/metrics":                    "GET: [metrics](metrics.md) for Prometheus; needs no key",
	"/debug/residency":            "GET: where every expert is ([fields](json.md#debugresidency))",
	"/debug/kv":                   "GET: where KV blocks are ([fields](json.md#debugresidency), those of `kv`)",
	"/debug/turns":                "GET: how several models take turns: which is awake, what runs and waits for each, and how long the last switch took ([fields](json.md#debugturns)); 404 with one model. Of several models `/debug/residency` and `/debug/kv` show the first, or that of `?model=NAME`",
	"/debug/events":               "GET: changes of that, and steps, as server-sent events ([fields](json.md#debugevents))",
	"/harvest/reclaim":            "POST: releases borrowed memory of a GPU; only on `--admin-address` ([peers](../guide/peers.md#a-process-that-needs-more))",
	"/reset_prefix_cache":         "POST: drops the cached prefixes that no running request uses, with `?reset_external=true` those of other tiers, too (vLLM; `reset_running_requests` is accepted and changes nothing, as what running requests have is not found after a reset); only on `--admin-address`",
	"/sleep":                      "POST: puts the model to sleep: its GPU memory, and what it has borrowed of peers, is free for others. `?level=1` (the default): weights go to pinned host memory; `?level=2`: they are loaded again by the wake. `?mode=` says what becomes of running requests: `abort` (the default; they end with an error), `wait` (they finish first), `keep` (they go on after the wake). Requests that come later wait (vLLM); only on `--admin-address`",
	"/wake_up":                    "POST: wakes the model; with `?tags=weights` or `?tags=kv_cache` only that part of its memory, and requests run when all of it is awake (vLLM); only on `--admin-address`",
	"/is_sleeping":                "GET: `{\"is_sleeping\": true}` while any of the model's memory is released (vLLM); only on `--admin-address`",
	"/harvest/borrowed":           "GET: what is borrowed of each GPU; only on `--admin-address`",
	"/admin/settings":             "GET: the settings that can change while the server runs; PATCH: changes those in the body ([below](#settings-of-a-running-server)); only on `--admin-address`",
}

func TestReferenceAPI(t *testing.T) {
	p := startServe(t)
	known, paths := serverNames(t)
	var supported, refused []string
	for _, x := range apiParameters {
		top, sub, nested := strings.Cut(x.name, ".")
		last, value := x.name[strings.LastIndexByte(x.name, '.')+1:], x.value
		if nested {
			value = fmt.Sprintf("{%q: %s}", sub, x.value)
		}
		if !slices.Contains(known, last) {
			t.Errorf("the server reads no member %s", x.name)
		}
		path, body := onCompletions, fmt.Sprintf(`{"prompt": "1+2=", %q: %s}`, top, value)
		if x.on == onChats {
			path, body = onChats, fmt.Sprintf(`{"messages": [{"role": "user", "content": "1+2="}], %q: %s}`, top, value)
		}
		switch x.on {
		case onMessages:
			path, body = onMessages, fmt.Sprintf(`{"messages": [{"role": "user", "content": "1+2="}], "max_tokens": 4, %q: %s}`, top, value)
		case onResponses:
			path, body = onResponses, fmt.Sprintf(`{"input": "1+2=", %q: %s}`, top, value)
		}
		switch x.name {
		case "prompt":
			body = fmt.Sprintf(`{%q: %s}`, top, value)
		case "response_format.json_schema":
			body = strings.Replace(body, `"json_schema"`, `"type": "json_schema", "json_schema"`, 1)
		case "structured_outputs.disable_any_whitespace", "structured_outputs.whitespace_pattern", "structured_outputs.disable_additional_properties":
			body = strings.Replace(body, `"structured_outputs": {`, `"structured_outputs": {"json_object": true, `, 1)
		case "top_logprobs":
			body = strings.Replace(body, "{", `{"logprobs": true, `, 1)
		case "stream_options.include_usage", "stream_options.continuous_usage_stats":
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
			accepted := slices.IndexFunc(apiParameters, func(y apiParameter) bool { return y.name == x.name && y.on == x.on && y.does != "" })
			if x.does != "" || accepted < 0 {
				t.Errorf("%s %s: %s", path, body, message)
				continue
			}
			_, why, _ := strings.Cut(strings.TrimSuffix(message, "."), ": ")
			refused = append(refused, row+apiParameters[accepted].does+" | "+cell(why)+" |")
		case status != 200:
			t.Errorf("%s %s: status %d", path, body, status)
		default:
			supported = append(supported, row+x.does+" |")
		}
	}
	for _, name := range known {
		if !slices.ContainsFunc(apiParameters, func(x apiParameter) bool {
			return x.name == name || strings.HasSuffix(x.name, "."+name) || strings.HasPrefix(x.name, name+".")
		}) {
			t.Errorf("the server reads %s, and apiParameters does not have it", name)
		}
	}
	var unused []string
	for _, m := range server.Members() {
		in := map[string]string{"body": onBoth, "messages[]": "a message", "messages[].content[]": "a part of a message's content", "stream_options": "`stream_options`", "structured_outputs": "`structured_outputs`"}[m.In]
		if in == "" {
			in = strings.TrimPrefix(m.In, "/v1/")
		}
		row := fmt.Sprintf("| `%s` | %s | ", m.Name, in)
		if m.Ignored {
			unused = append(unused, row+m.Why+" |")
			continue
		}
		neutral := "no value"
		if len(m.Neutral) > 0 {
			neutral = "`" + strings.Join(m.Neutral, "`, `") + "`"
		}
		refused = append(refused, row+neutral+" | "+m.Why+" |")
	}
	var b strings.Builder
	b.WriteString("`serve` speaks the OpenAI API, and Anthropic's Messages API. A parameter that would change a completion, or the order of completions, and that it does not do is refused by name, with status 400 and OpenAI's error body ([errors](errors.md#http)); so is one that it does not know. What changes neither is ignored. `null` is the same as no parameter, also for a parameter that it does not know.\n\n## Endpoints\n\n| path | what it is for |\n|---|---|\n")
	for _, path := range paths {
		if endpoints[path] == "" {
			t.Errorf("endpoints does not say what %s is for", path)
		}
		fmt.Fprintf(&b, "| `%s` | %s |\n", path, endpoints[path])
	}
	b.WriteString(liveReference(t))
	b.WriteString("\n## Supported parameters\n\n\"Both\" are completions and chat/completions. Messages and responses also have those from `model` to `priority` and from `temperature` to `ignore_eos`.\n\n| parameter | endpoint | what it does |\n|---|---|---|\n" + strings.Join(supported, "\n"))
	b.WriteString("\n\n## Accepted and without effect\n\n| parameter | in | why |\n|---|---|---|\n" + strings.Join(unused, "\n"))
	b.WriteString("\n\n## Unsupported\n\n| parameter | in | accepted | why all else is refused |\n|---|---|---|---|\n" + strings.Join(refused, "\n") + "\n")
	reference(t, "api.md", "HTTP API", "those who write clients: endpoints, and the parameters that are supported, ignored and refused", b.String())
}

// liveEffects say what becomes of a setting that changes while the server runs.
var liveEffects = map[string]string{
	"harvest-headroom": "what is borrowed beyond it is revoked at once, as when other processes need the memory",
	"migration-limit":  "holds for the next migrations",
	"offload-fraction": "with `--kv-experts-share auto`: as much memory of the KV cache is lent to experts as brings the fraction of offloaded ones to this one, or as near to it as there is memory; `auto` or `null`: memory goes where it is worth more. An object sets it by model: `{\"offload-fraction\": {\"NAME\": 0.25}}` ([more](../guide/kv-cache.md#a-fraction-of-your-own))",
	"peers":            "of GPUs that are no longer in the list all is revoked, and nothing is borrowed; only GPUs that were peers at the start can be in it; `auto`: all of these",
	"log-level":        "holds for the next message; `auto` is `info`",
}

// liveReference is about the settings that can change while a server runs.
func liveReference(t *testing.T) string {
	var b strings.Builder
	b.WriteString("\n## Settings of a running server\n\n`PATCH /admin/settings` takes a JSON object of settings, named and written as flags are, such as `{\"peers\": \"1\", \"harvest-headroom\": \"8GiB\"}`. All are checked before any changes; one that is refused is named, with status 400, and none has changed. The answer, as that of GET, has all that can change, with their values now, and as `state` what has come of them ([fields](json.md#adminsettings-state)), which is ignored where it is sent back. Changes wait for each other, are logged, and end with the process. Requests run on, and get the same completions.\n\n| setting | what becomes of a change |\n|---|---|\n")
	for _, key := range liveKeys() {
		if liveEffects[key] == "" {
			t.Errorf("liveEffects does not say what becomes of a change of %s", key)
		}
		fmt.Fprintf(&b, "| `%s` | %s |\n", key, liveEffects[key])
	}
	b.WriteString("\nOther settings are refused by name, with what to do:\n\n| setting | why |\n|---|---|\n")
	for _, k := range configs.Schema {
		if why := atStart[k.Name]; why != "" {
			fmt.Fprintf(&b, "| `%s` | %s |\n", k.Name, why)
		}
	}
	return b.String()
}

// serverNames reads from the server's source which members of a body it acts on, and which paths it
// has.
func serverNames(t *testing.T) (known, paths []string) {
	t.Helper()
	reads := []string{"text", "flag", "integer", "number", "int64", "ids", "pop", "sub", "list", "blocks", "unsupported"}
	in := []string{
		"parseCommon", "parseCacheSalt", "parseStop", "parseLogitBias", "parseStreamOptions", "parseResponseFormat", "parseSchema", "parseStructuredOutputs", "parseCompletion", "parseChat", "parseConversation", "parseTemplateVariables", "parseTools",
		"parseIdentity", "parseSampling", "parseEnd", "parsePromptLogProbs", "parseBadWords", "parseAllowedIDs",
		"parseMessages", "parseOutputConfig", "parseSystem", "parseResponses", "parseInclude", "parseInput",
	}
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
			} else if f, ok := n.Fun.(*ast.Ident); ok && f.Name == "parseMaxTokens" {
				add(n.Args[2])
			} else if ok && f.Name == "parseFormat" {
				add(n.Args[1])
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
	for _, name := range []string{"params.go", "structured.go", "completions.go", "chat.go", "tools.go", "messages.go", "responses.go", "server.go", "admin.go"} {
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
				if d.Name.Name == "New" || d.Name.Name == "addAdmin" {
					ast.Inspect(d, func(n ast.Node) bool {
						if kv, ok := n.(*ast.KeyValueExpr); ok {
							if s, ok := literal(kv.Key); ok && strings.HasPrefix(s, "/") {
								paths = append(paths, s)
							}
						}
						return true
					})
				}
			}
		}
	}
	if len(known) < 30 || len(paths) < 10 {
		t.Fatalf("found %d members and %d paths: the source is written in another way", len(known), len(paths))
	}
	return known, paths
}

// stringElement says whether a type is of strings, or of arrays of them.
func stringElement(a *ast.ArrayType) (string, bool) {
	if a == nil {
		return "", false
	}
	id, ok := a.Elt.(*ast.Ident)
	return "string", ok && id.Name == "string"
}
