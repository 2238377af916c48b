package server_test

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"sync"
	"testing"
	"testing/fstest"
	"testing/synctest"
	"time"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/models/chat"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/server"
	"github.com/moeserve/moeserve/tools/fixtures"
)

// Bodies that cannot be, for any of the endpoints; each names what is wrong.
func TestBadBodies(t *testing.T) { synctest.Test(t, testBadBodies) }

func testBadBodies(t *testing.T) {
	h := start(t, options{pipes: true, server: server.Options{MaxSamples: 3}})
	long := strings.Repeat("1, ", 255) + "1"
	const (
		completions = "/v1/completions"
		chats       = "/v1/chat/completions"
		hi          = `"messages": [{"role": "user", "content": "1+2="}]`
		tool        = `, "tools": [{"type": "function", "function": {"name": "f"}}]`
	)
	for _, c := range []struct{ path, body, param, code, message string }{
		{completions, ``, "", "", "The body is empty"},
		{completions, " \n", "", "", "The body is empty"},
		{completions, `null`, "", "invalid_type", "must be a JSON object, and is null"},
		{completions, `[]`, "", "invalid_type", "must be a JSON object, and is an array"},
		{completions, `"x"`, "", "invalid_type", "is a string"},
		{completions, `{`, "", "", "not valid JSON"},
		{completions, `{"prompt": "x"} x`, "", "", "not valid JSON"},
		{completions, `{"prompt": "x"}{}`, "", "", "not valid JSON"},
		{completions, `{'prompt': 'x'}`, "", "", "not valid JSON"},
		{completions, "{\"prompt\": \"a\xffb\"}", "", "", "not valid UTF-8"},
		{completions, `{"prompt": NaN}`, "", "", "not valid JSON"},
		{completions, `{"prompt": "a\\\ud83d\n"}`, "", "invalid_value", `The body has \ud83d, an unpaired UTF-16 surrogate`},
		{completions, `{"prompt": "\udE00\ud83d"}`, "", "invalid_value", `The body has \udE00, an unpaired UTF-16 surrogate`},
		{"/tokenize", `{"prompt": "\ud83d\ud83d\ude00"}`, "", "invalid_value", "an unpaired UTF-16 surrogate: send whole"},
		{chats, `{"messages": [{"role": "user", "content": "\ud800"}]}`, "", "invalid_value", "an unpaired UTF-16 surrogate"},
		{completions, strings.Repeat("[", 20000), "", "", "not valid JSON"},
		{completions, `{}`, "prompt", "missing_required_parameter", "Missing required parameter: 'prompt'."},
		{completions, `{"prompt": null}`, "prompt", "missing_required_parameter", "Missing"},
		{completions, `{"prompt": "x", "promt": 1}`, "promt", "unknown_parameter", "Unrecognized request argument supplied: promt."},
		{completions, `{"prompt": "x", "b": 1, "a": 2, "c": null}`, "a", "unknown_parameter", "supplied: a, b."},
		{completions, `{"Prompt": "x", "prompt": "x"}`, "Prompt", "unknown_parameter", "supplied: Prompt."},
		{completions, `{"prompt": ""}`, "prompt", "invalid_value", "it is empty"},
		{completions, `{"prompt": []}`, "prompt", "invalid_value", "it is an empty array"},
		{completions, `{"prompt": [[]]}`, "prompt[0]", "invalid_value", "it is empty"},
		{completions, `{"prompt": ["x", ""]}`, "prompt[1]", "invalid_value", "'prompt[1]': it is empty"},
		{completions, `{"prompt": 7}`, "prompt", "invalid_type", "it must be a string, an array of strings"},
		{completions, `{"prompt": {"text": "x"}}`, "prompt", "invalid_type", "and is an object"},
		{completions, `{"prompt": ["x", null]}`, "prompt[1]", "invalid_type", "'prompt[1]': it must be a string or an array of token ids, and is null"},
		{completions, `{"prompt": ["x", 1]}`, "prompt[1]", "invalid_type", "it must be a string or an array of token ids, and is a number"},
		{completions, `{"prompt": ["x", [1, "y"]]}`, "prompt[1][1]", "invalid_type", "'prompt[1][1]': it must be a token id, from 0 to 2147483647, and is a string"},
		{completions, `{"prompt": [1, null]}`, "prompt[1]", "invalid_type", "'prompt[1]': it must be a token id, from 0 to 2147483647, and is null"},
		{completions, `{"prompt": [1, 2, 3, 4, "x"]}`, "prompt[4]", "invalid_type", "and is a string"},
		{completions, `{"prompt": [-1]}`, "prompt[0]", "invalid_type", "it must be a token id, from 0 to 2147483647, and is -1."},
		{completions, `{"prompt": [1.5]}`, "prompt[0]", "invalid_type", "and is 1.5."},
		{completions, `{"prompt": [[1, -2]]}`, "prompt[0][1]", "invalid_type", "from 0 to 2147483647, and is -2"},
		{completions, `{"prompt": [[1, 2147483648]]}`, "prompt[0][1]", "invalid_type", "and is 2147483648"},
		{completions, `{"prompt": [[1.5]]}`, "prompt[0][0]", "invalid_type", "and is 1.5"},
		{completions, `{"prompt": [894]}`, "prompt", "invalid_value", "Invalid value for 'prompt': prompt token 0 has id 894, the vocabulary is 0 to 893"},
		{completions, `{"prompt": [[1], [893, 894]]}`, "prompt[1]", "invalid_value", "Invalid value for 'prompt[1]': prompt token 1 has id 894, the vocabulary is 0 to 893."},
		{completions + "/render", `{"prompt": [894]}`, "prompt", "invalid_value", "prompt token 0 has id 894, the vocabulary is 0 to 893"},
		{completions, `{"prompt": ["a", "b", "c", "d"]}`, "prompt", "invalid_value", "it has more than 3 prompts. The number of prompts times n (here 1) may be at most 3 (the server's --max-queued-requests): send fewer"},
		{completions, `{"prompt": ["a", "b"], "n": 2}`, "prompt", "invalid_value", "it has more than 1 prompt. The number of prompts times n (here 2) may be at most 3"},
		{completions, `{"prompt": [` + long + `]}`, "prompt", "context_length_exceeded", "the prompt has 256"},
		{completions, `{"prompt": "x", "max_tokens": 256}`, "max_tokens", "context_length_exceeded", "the maximum for it is 25"},
		{completions, `{"prompt": "x", "max_tokens": 9223372036854775807}`, "max_tokens", "context_length_exceeded", "the maximum for it is 25"},
		{completions, `{"prompt": "x", "max_tokens": 9223372036854775808}`, "max_tokens", "invalid_value", "not a whole number in range"},
		{completions, `{"prompt": "x", "max_tokens": 1e999}`, "max_tokens", "invalid_value", "not a whole number in range"},
		{completions, `{"prompt": "x", "max_tokens": -2}`, "max_tokens", "invalid_value", "it must be at least 0, or -1 for all that fits, and is -2"},
		{completions, `{"prompt": "x", "max_tokens": 1.5}`, "max_tokens", "invalid_value", "1.5 is not a whole number"},
		{completions, `{"prompt": "x", "max_tokens": "16"}`, "max_tokens", "invalid_type", "it must be a whole number, and is a string"},
		{completions, `{"prompt": "x", "min_tokens": 17}`, "min_tokens", "invalid_value", "from 0 to max_tokens"},
		{completions, `{"prompt": "x", "temperature": -0.1}`, "temperature", "invalid_value", "Invalid value for 'temperature': it is -0.1, and must be from 0 to 100."},
		{completions, `{"prompt": "x", "temperature": 1e39}`, "temperature", "invalid_value", "1e39 is out of range"},
		{completions, `{"prompt": "x", "temperature": true}`, "temperature", "invalid_type", "a number, and is a boolean"},
		{completions, `{"prompt": "x", "top_p": 0}`, "top_p", "invalid_value", "above 0"},
		{completions, `{"prompt": "x", "top_k": -2}`, "top_k", "invalid_value", "it must be at least 1, or 0 or -1 for all, and is -2"},
		{completions, `{"prompt": "x", "top_k": 2147483648}`, "top_k", "invalid_value", "from 0 to 2147483647"},
		{completions, `{"prompt": "x", "min_p": 2}`, "min_p", "invalid_value", "from 0 to 1"},
		{completions, `{"prompt": "x", "repetition_penalty": 0}`, "repetition_penalty", "invalid_value", "above 0"},
		{completions, `{"prompt": "x", "presence_penalty": 3}`, "presence_penalty", "invalid_value", "from -2 to 2"},
		{completions, `{"prompt": "x", "frequency_penalty": []}`, "frequency_penalty", "invalid_type", "an array"},
		{completions, `{"prompt": "x", "seed": 1.5}`, "seed", "invalid_value", "not a whole number"},
		{completions, `{"prompt": "x", "n": 0}`, "n", "invalid_value", "from 1 to"},
		{completions, `{"prompt": "x", "n": 1000000000000}`, "n", "invalid_value", "from 1 to"},
		{completions, `{"prompt": "x", "n": 2, "best_of": 3}`, "best_of", "unsupported_parameter", "it must be n"},
		{completions, `{"prompt": "x", "suffix": "y"}`, "suffix", "unsupported_parameter", "not supported"},
		{completions, `{"prompt": "x", "echo": "yes"}`, "echo", "invalid_type", "true or false, and is a string"},
		{completions, `{"prompt": "x", "logprobs": 21}`, "logprobs", "invalid_value", "from 0 to 20, and is 21"},
		{completions, `{"prompt": "x", "logprobs": -1}`, "logprobs", "invalid_value", "from 0 to 20"},
		{completions, `{"prompt": "x", "logprobs": true}`, "logprobs", "invalid_type", "a boolean"},
		{completions, `{"prompt": "x", "logit_bias": {"894": 1}}`, "logit_bias", "invalid_value", "for tokens 0 to 893"},
		{completions, `{"prompt": "x", "logit_bias": {"x": 1}}`, "logit_bias", "invalid_value", `"x" is not a token id`},
		{completions, `{"prompt": "x", "logit_bias": {"1": "x"}}`, "logit_bias.1", "invalid_type", "a string"},
		{completions, `{"prompt": "x", "logit_bias": {"1": 101}}`, "logit_bias", "invalid_value", "from -100 to 100"},
		{completions, `{"prompt": "x", "logit_bias": [1]}`, "logit_bias", "invalid_type", "must be a JSON object"},
		{completions, `{"prompt": "x", "stop": ""}`, "stop", "invalid_value", "without empty strings"},
		{completions, `{"prompt": "x", "stop": ["a", null]}`, "stop[1]", "invalid_type", "'stop[1]': it must be a string, and is null"},
		{completions, `{"prompt": "x", "bad_words": ["a", 1]}`, "bad_words[1]", "invalid_type", "it must be a string, and is a number"},
		{completions, `{"prompt": "x", "stop": 1}`, "stop", "invalid_type", "it must be a string or an array of strings, and is a number"},
		{completions, `{"prompt": "x", "stop": [` + strings.Repeat(`"a",`, 16) + `"a"]}`, "stop", "invalid_value", "at most 16"},
		{completions, `{"prompt": "x", "stop_token_ids": [894]}`, "stop_token_ids", "invalid_value", "from 0 to 893"},
		{completions, `{"prompt": "x", "stop_token_ids": 0}`, "stop_token_ids", "invalid_type", "an array of token ids, and is a number"},
		{completions, `{"prompt": "x", "stop_token_ids": [1, "x"]}`, "stop_token_ids[1]", "invalid_type", "it must be a token id, from 0 to 2147483647, and is a string"},
		{completions, `{"prompt": "x", "allowed_token_ids": [99999]}`, "allowed_token_ids", "invalid_value", "Invalid value for 'allowed_token_ids': it is 99999, and must be from 0 to 893."},
		{completions, `{"prompt": "x", "priority": 5}`, "priority", "invalid_value", "Invalid value for 'priority': it is 5, and must be 0: requests come first in the order"},
		{completions, `{"prompt": "x", "temperature": "a", "stream_options": {"x": 1}, "response_format": {"type": 1}, "structured_outputs": {"x": 1}}`, "temperature", "invalid_type", "a number, and is a string"},
		{completions, `{"prompt": "x", "stream": 1}`, "stream", "invalid_type", "true or false"},
		{completions, `{"prompt": "x", "stream_options": {}}`, "stream_options", "invalid_value", "only allowed when 'stream'"},
		{completions, `{"prompt": "x", "stream": true, "stream_options": {"x": 1}}`, "stream_options.x", "unknown_parameter", "stream_options.x"},
		{completions, `{"prompt": "x", "stream": true, "stream_options": 1}`, "stream_options", "invalid_type", "must be a JSON object"},
		{completions, `{"prompt": "x", "response_format": {"type": "json"}}`, "response_format.type", "invalid_value", "json_object"},
		{completions, `{"prompt": "x", "response_format": {"type": "structural_tag"}}`, "response_format.type", "unsupported_parameter", "tools"},
		{completions, `{"prompt": "x", "structured_outputs": {"regex": "(?<=a)"}}`, "structured_outputs.regex", "invalid_value", "lookbehind"},
		{completions, `{"prompt": "x", "structured_outputs": {"regex": "a", "choice": ["b"]}}`, "structured_outputs.choice", "invalid_value", "regex and choice, not both"},
		{completions, `{"prompt": "x", "structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}`, "structured_outputs.regex", "invalid_value", "Give one of them"},
		{completions, `{"prompt": "x", "structured_outputs": {}}`, "structured_outputs", "invalid_value", "one of json, json_object, regex, choice and grammar"},
		{completions, `{"prompt": "x", "structured_outputs": {"json": null, "disable_any_whitespace": true}}`, "structured_outputs", "invalid_value", "one of json"},
		{completions, `{"prompt": "x", "structured_outputs": {"choice": []}}`, "structured_outputs.choice", "invalid_value", "empty"},
		{completions, `{"prompt": "x", "structured_outputs": {"choice": ["a", ""]}}`, "structured_outputs.choice", "invalid_value", "a choice is empty"},
		{completions, `{"prompt": "x", "structured_outputs": {"choice": ["a", 1]}}`, "structured_outputs.choice[1]", "invalid_type", "it must be a string, and is a number"},
		{completions, `{"prompt": "x", "structured_outputs": {"grammar": "start: x"}}`, "structured_outputs.grammar", "invalid_value", "expected ::="},
		{completions, `{"prompt": "x", "structured_outputs": {"structural_tag": "{}"}}`, "structured_outputs.structural_tag", "unsupported_parameter", "give tools"},
		{completions, `{"prompt": "x", "structured_outputs": {"json": {"not": {"multipleOf": 2}}}}`, "structured_outputs.json", "invalid_value", "multipleOf at #/not: it is not supported"},
		{completions, `{"prompt": "x", "structured_outputs": {"json": "{"}}`, "structured_outputs.json", "invalid_value", "not valid JSON"},
		{completions, `{"prompt": "x", "structured_outputs": {"json": {}, "whitespace_pattern": "x"}}`, "structured_outputs.json", "invalid_value", "whitespace_pattern: it matches what is no white space"},
		{completions, `{"prompt": "x", "structured_outputs": {"xml": {}}}`, "structured_outputs.xml", "unknown_parameter", "xml"},
		{completions, `{"prompt": "x", "guided_regex": "a"}`, "guided_regex", "unsupported_parameter", "structured_outputs"},
		{completions, `{"prompt": "x", "use_beam_search": true}`, "use_beam_search", "unsupported_parameter", "sampling only"},
		{completions, `{"prompt": "x", "skip_special_tokens": "no"}`, "skip_special_tokens", "invalid_type", "true or false"},
		{completions, `{"prompt": "x", "prompt_logprobs": 21}`, "prompt_logprobs", "invalid_value", "from 0 to 20, and is 21"},
		{completions, `{"prompt": "x", "` + strings.Repeat("é", 300) + `": 1}`, strings.Repeat("é", 50) + "…", "unknown_parameter", "…"},

		{chats, `{}`, "messages", "missing_required_parameter", "Missing required parameter: 'messages'."},
		{chats, `{"messages": []}`, "messages", "invalid_value", "it is empty"},
		{chats, `{"messages": {}}`, "messages", "invalid_type", "an array of messages, and is an object"},
		{chats, `{"messages": [1]}`, "messages[0]", "invalid_type", "must be a JSON object, and is a number"},
		{chats, `{"messages": [{"role": "user", "content": "x"}, null]}`, "messages[1]", "invalid_type", "is null"},
		{chats, `{"messages": [{"content": "x"}]}`, "messages[0].role", "missing_required_parameter", "'messages[0].role'"},
		{chats, `{` + hi + `, "tools": ["f"]}`, "tools[0]", "invalid_type", "'tools[0]' must be a JSON object, and is a string"},
		{chats, `{` + hi + `, "tools": [{"type": "function", "function": {"name": "f"}}, {"type": "function", "name": "g"}]}`, "tools[1].function", "missing_required_parameter", "'tools[1].function'"},
		{chats, `{` + hi + `, "tools": [{"function": "f"}]}`, "tools[0].function", "invalid_type", "and is a string"},
		{chats, `{` + hi + `, "tools": [{"function": {}}]}`, "tools[0].function.name", "missing_required_parameter", "'tools[0].function.name'"},
		{chats, `{` + hi + `, "tools": [{"function": {"name": 5}}]}`, "tools[0].function.name", "invalid_type", "and is a number"},
		{chats, `{` + hi + `, "tools": [{"function": {"name": ""}}]}`, "tools[0].function.name", "invalid_value", "'tools[0].function.name': it is empty."},
		{chats, `{` + hi + `, "tools": [{"type": "custom", "custom": {"name": "f"}}]}`, "tools[0].type", "unsupported_parameter", "\"custom\"; this server runs no tools"},
		{chats, `{"messages": [{"role": "robot", "content": "x"}]}`, "messages[0].role", "invalid_value", `one of system, developer, user, assistant, tool, function, and is "robot".`},
		{chats, `{"messages": [{"role": 1, "content": "x"}]}`, "messages[0].role", "invalid_type", "a string, and is a number"},
		{chats, `{"messages": [{"role": "user"}]}`, "messages[0].content", "missing_required_parameter", "'messages[0].content'"},
		{chats, `{"messages": [{"role": "user", "content": null}]}`, "messages[0].content", "missing_required_parameter", "Missing"},
		{chats, `{"messages": [{"role": "user", "content": 1}]}`, "messages[0].content", "invalid_type", "a string or an array of text parts"},
		{chats, `{"messages": [{"role": "user", "content": ["x"]}]}`, "messages[0].content[0]", "invalid_type", "is a string"},
		{chats, `{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}`, "messages[0].content[0].type", "invalid_value", `"image_url" is not supported`},
		{chats, `{"messages": [{"role": "user", "content": [{"type": "text"}]}]}`, "messages[0].content[0].text", "missing_required_parameter", "Missing"},
		{chats, `{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": {"name": "f"}}, {"type": "web_search"}]}`, "tools[1].type", "unsupported_parameter", "runs no tools"},
		{chats, `{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": 1, "function": {"name": "f"}}]}`, "tools[0].type", "invalid_type", "must be a string"},
		{chats, `{"messages": [{"role": "user", "content": "x", "to": "you"}]}`, "messages[0].to", "unknown_parameter", "messages[0].to"},
		{chats, `{"messages": [{"role": "assistant", "tool_calls": {}}]}`, "messages[0].tool_calls", "invalid_type", "an array of objects"},
		{chats, `{"messages": [{"role": "assistant", "tool_calls": [{}]}]}`, "messages[0].tool_calls", "invalid_type", "an object named function"},
		{chats, `{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}, 1]}]}`, "messages[0].tool_calls[1]", "invalid_type", "it must be an object, and is a number"},
		{chats, `{` + hi + tool + `, "temperature": "a", "stream_options": 1, "tool_choice": {"type": "function"}}`, "temperature", "invalid_type", "a number, and is a string"},
		{chats, `{"messages": [{"role": "assistant", "content": "x", "audio": {"id": "1"}}]}`, "messages[0].audio", "unsupported_parameter", "not supported"},
		{chats, `{` + hi + `, "prompt": "x"}`, "prompt", "unknown_parameter", "prompt"},
		{chats, `{` + hi + `, "max_completion_tokens": 0}`, "max_completion_tokens", "invalid_value", "at least 1"},
		{chats, `{` + hi + `, "max_completion_tokens": 1000}`, "max_completion_tokens", "context_length_exceeded", "max_completion_tokens is 1000"},
		{chats, `{` + hi + `, "top_logprobs": 2}`, "top_logprobs", "invalid_value", "needs 'logprobs'"},
		{chats, `{` + hi + `, "logprobs": true, "top_logprobs": 21}`, "top_logprobs", "invalid_value", "from 0 to 20"},
		{chats, `{` + hi + `, "logprobs": 1}`, "logprobs", "invalid_type", "true or false"},
		{chats, `{` + hi + `, "tools": 1}`, "tools", "invalid_type", "an array of objects"},
		{chats, `{` + hi + `, "tool_choice": "required"}`, "tool_choice", "invalid_value", "'tools' has no function"},
		{chats, `{` + hi + tool + `, "tool_choice": "required"}`, "tool_choice", "unsupported_parameter", "does not know how this model writes calls"},
		{chats, `{` + hi + tool + `, "tool_choice": "any"}`, "tool_choice", "invalid_value", `"required" or`},
		{chats, `{` + hi + tool + `, "tool_choice": 1}`, "tool_choice", "invalid_type", "a string or an object"},
		{chats, `{` + hi + tool + `, "tool_choice": {"type": "function"}}`, "tool_choice.function", "missing_required_parameter", "tool_choice.function"},
		{chats, `{` + hi + tool + `, "tool_choice": {"type": "function", "function": {}}}`, "tool_choice.function.name", "missing_required_parameter", "function.name"},
		{chats, `{` + hi + tool + `, "tool_choice": {"type": "allowed_tools"}}`, "tool_choice.type", "invalid_value", `"function"`},
		{chats, `{` + hi + tool + `, "tool_choice": {"type": "function", "function": {"name": "g"}}}`, "tool_choice", "invalid_value", `no tool "g"`},
		{chats, `{` + hi + `, "parallel_tool_calls": 1}`, "parallel_tool_calls", "invalid_type", "true or false"},
		{chats, `{` + hi + `, "enable_thinking": 1}`, "enable_thinking", "invalid_type", "true or false"},
		{chats, `{` + hi + `, "functions": [{}]}`, "functions", "unsupported_parameter", "give tools"},
		{chats, `{` + hi + `, "modalities": ["audio"]}`, "modalities", "unsupported_parameter", "completions are text"},
		{chats, `{` + hi + `, "chat_template": "x"}`, "chat_template", "unsupported_parameter", "own template"},
		{chats, `{` + hi + `, "chat_template_kwargs": 1}`, "chat_template_kwargs", "invalid_type", "an object"},
		{chats, `{` + hi + `, "continue_final_message": true}`, "continue_final_message", "unsupported_parameter", "a new message"},
		{chats, `{` + hi + `, "echo": true}`, "echo", "unsupported_parameter", "for completions"},
		{chats, `{` + hi + `, "response_format": {"type": "json_schema", "json_schema": {}}}`, "response_format.json_schema.schema", "missing_required_parameter", "Missing"},
		{chats, `{` + hi + `, "response_format": {"type": "json_schema"}}`, "response_format.json_schema", "missing_required_parameter", "Missing"},
		{chats, `{` + hi + `, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"properties": {"a": {"unevaluatedItems": false}}}}}}`, "response_format.json_schema.schema", "invalid_value", "unevaluatedItems at #/properties/a"},
		{chats, chatBody(strings.Repeat("1+2=", 100), ""), "messages", "context_length_exceeded", "maximum context length is 256"},

		{"/tokenize", `{}`, "prompt", "missing_required_parameter", "'prompt', a text, or 'messages'"},
		{"/tokenize", `{"prompt": ["x"]}`, "prompt", "invalid_type", "a string, and is an array"},
		{"/tokenize", `{"prompt": "x", "messages": []}`, "messages", "invalid_value", "empty"},
		{"/tokenize", `{"prompt": "x", "return_tokens": true}`, "return_tokens", "unknown_parameter", "return_tokens"},
		{"/detokenize", `{"tokens": "x"}`, "tokens", "invalid_type", "an array of token ids"},
		{"/detokenize", `{"tokens": [-1]}`, "tokens[0]", "invalid_type", "from 0 to 2147483647, and is -1"},
		{"/detokenize", `{"tokens": [1, 894, 2147483647]}`, "tokens", "invalid_value", "Invalid value for 'tokens': token 1 has id 894, the vocabulary is 0 to 893."},
		{"/detokenize", `{}`, "tokens", "missing_required_parameter", "tokens"},
	} {
		a := h.send(http.MethodPost, c.path, c.body)
		if a.status != http.StatusBadRequest {
			t.Errorf("%s %.100s: status %d: %s", c.path, c.body, a.status, a.body)
			continue
		}
		message, kind, param, code := failed(t, a)
		if param != c.param || code != c.code || kind != "invalid_request_error" || !strings.Contains(message, c.message) || strings.HasPrefix(message, "engine: ") {
			t.Errorf("%s %.100s:\n  %q, param %q, code %q\n  want %q, %q, %q", c.path, c.body, message, param, code, c.message, c.param, c.code)
		}
	}
	if got := h.post("/v1/completions", completionBody(`"1+2="`, "")); !strings.Contains(got, `"text":"3"`) {
		t.Errorf("after all these: %s", got)
	}
	h.idle()
}

// What a template refuses is the client's to mend.
func TestTemplateRefuses(t *testing.T) {
	for text, want := range map[string]string{
		`{{ raise_exception("roles must alternate") }}`: "refuses the messages: roles must alternate",
		`{{ messages[0].content.x.y() }}`:               "cannot render the messages",
		``:                                              "an empty prompt",
	} {
		tmpl, err := chat.Load(fstest.MapFS{"chat_template.jinja": {Data: []byte(text)}}, "test")
		if err != nil {
			t.Fatal(err)
		}
		h := start(t, options{change: func(m *server.Model) { m.Template = tmpl }})
		a := h.send(http.MethodPost, "/v1/chat/completions", chatBody("x", ""))
		if message, _, param, _ := failed(t, a); a.status != http.StatusBadRequest || param != "messages" || !strings.Contains(message, want) {
			t.Errorf("%s: %d %s", text, a.status, a.body)
		}
	}
}

// Tools are refused where a model's template would drop them.
func TestTemplateWithoutTools(t *testing.T) {
	tmpl, err := chat.Load(fstest.MapFS{"chat_template.jinja": {Data: []byte(`{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}`)}}, "test")
	if err != nil {
		t.Fatal(err)
	}
	h := start(t, options{change: func(m *server.Model) { m.Template = tmpl }})
	for _, more := range []string{
		`, "tools": [{"type": "function", "function": {"name": "f"}}]`,
		`, "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"`,
	} {
		a := h.send(http.MethodPost, "/v1/chat/completions", chatBody("1+2=", more))
		message, kind, param, code := failed(t, a)
		if a.status != http.StatusBadRequest || kind != "invalid_request_error" || param != "tools" || code != "unsupported_parameter" || !strings.Contains(message, "has no place for them") {
			t.Errorf("%s: %d %s", more, a.status, a.body)
		}
	}
}

func TestRoutes(t *testing.T) {
	h := start(t, options{server: server.Options{APIKey: "sésame", MaxRequestBytes: 100, Version: "v1.2.3"}})
	key := []string{"Authorization", "Bearer sésame"}
	body := completionBody(`"1+2="`, "")
	for _, c := range []struct {
		method, path, body string
		header             []string
		status             int
		code, want         string
	}{
		{"GET", "/x", "", nil, 404, "unknown_url", "GET /x."},
		{"POST", "/v1/embeddings", body, key, 404, "unknown_url", "Unknown request URL: POST /v1/embeddings. This server does not do embeddings."},
		{"GET", "/v1/responses/resp_1", "", key, 404, "unknown_url", "This server does not store responses."},
		{"POST", "/v1/messages/batches", body, nil, 404, "unknown_url", "does not do batches"},
		{"GET", "/harvest/borrowed", "", key, 404, "unknown_url", "Unknown request URL: GET /harvest/borrowed. It is on the admin address"},
		{"POST", "/harvest/reclaim", body, key, 404, "unknown_url", "It is on the admin address"},
		{"POST", "/chat/completions", body, nil, 404, "unknown_url", "ends with /v1"},
		{"POST", "/v1/v1/completions", body, nil, 404, "unknown_url", "ends with one /v1"},
		{"GET", "/v1/completions/", "", key, 404, "unknown_url", ""},
		{"GET", "/debug/pprof/", "", key, 404, "unknown_url", ""},
		{"GET", "/v1/models/other", "", key, 404, "model_not_found", `"other" does not exist; this server has`},
		{"GET", "/v1/models/", "", key, 404, "model_not_found", ""},
		{"POST", "/v1/completions", `{"prompt": "x", "model": "gpt"}`, key, 404, "model_not_found", `this server has "tiny"`},
		{"POST", "/v1/chat/completions", `{"messages": [{"role":"user","content":"x"}], "model": "gpt"}`, key, 404, "model_not_found", ""},
		{"POST", "/tokenize", `{"prompt": "x", "model": "gpt"}`, key, 404, "model_not_found", ""},
		{"POST", "/detokenize", `{"tokens": [1], "model": "gpt"}`, key, 404, "model_not_found", ""},
		{"GET", "/v1/completions", "", key, 405, "method_not_allowed", "use POST"},
		{"OPTIONS", "/v1/completions", "", nil, 405, "method_not_allowed", ""},
		{"DELETE", "/v1/models/tiny", "", key, 405, "method_not_allowed", "use GET or HEAD"},
		{"POST", "/health", "", nil, 405, "method_not_allowed", ""},
		{"POST", "/v1/completions", body, nil, 401, "invalid_api_key", "Bearer KEY"},
		{"POST", "/v1/completions", body, []string{"Authorization", "Bearer sésam"}, 401, "invalid_api_key", ""},
		{"POST", "/v1/completions", body, []string{"Authorization", "Basic sésame"}, 401, "invalid_api_key", ""},
		{"GET", "/v1/models", "", []string{"Authorization", "sésame"}, 401, "invalid_api_key", ""},
		{"POST", "/tokenize", `{"prompt": "x"}`, nil, 401, "invalid_api_key", ""},
		{"POST", "/v1/completions", strings.Repeat(" ", 101), key, 413, "request_too_large", "100 bytes"},
		{"POST", "/v1/completions", body, append([]string{"Content-Type", "application/x-www-form-urlencoded"}, key...), 415, "unsupported_media_type", "its Content-Type is application/x-www-form-urlencoded: add the header Content-Type: application/json"},
		{"POST", "/v1/completions", body, append([]string{"Content-Type", ""}, key...), 415, "unsupported_media_type", "its Content-Type is not given"},
		{"POST", "/v1/completions", body, append([]string{"Content-Encoding", "gzip"}, key...), 415, "unsupported_media_type", "compressed"},

		{"POST", "/v1/completions", body, append([]string{"Content-Type", "application/json; charset=utf-8"}, key...), 200, "", `"text":"3"`},
		{"POST", "/v1/completions", body, []string{"Authorization", "bearer sésame"}, 200, "", `"text":"3"`},
		{"GET", "/", "", nil, 200, "", `"name":"moeserve"`},
		{"POST", "/v1/completions", body, []string{"X-API-Key", "sésame"}, 200, "", `"text":"3"`},
		{"POST", "/v1/completions", body, []string{"api-key", "sésame"}, 200, "", `"text":"3"`},
		{"POST", "/v1/completions", body, []string{"Authorization", "Bearer none", "X-API-Key", "sésame"}, 200, "", `"text":"3"`},
		{"POST", "/v1/completions", body, []string{"X-API-Key", "sésam"}, 401, "invalid_api_key", "X-API-Key"},
		{"GET", "/health", "", nil, 200, "", "{}"},
		{"GET", "/health/live", "", nil, 200, "", "{}"},
		{"GET", "/ping", "", nil, 200, "", "{}"},
		{"POST", "/ping", "x", nil, 200, "", "{}"},
		{"GET", "/load", "", nil, 200, "", `{"server_load":0}`},
		{"GET", "/health/ready", "", nil, 200, "", "{}"},
		{"GET", "/version", "", nil, 200, "", `{"version":"v1.2.3"}`},
		{"GET", "/metrics", "", nil, 200, "", "vllm:num_requests_running"},
		{"HEAD", "/health", "", nil, 200, "", ""},
	} {
		a := h.send(c.method, c.path, c.body, c.header...)
		if a.status != c.status || !strings.Contains(a.body, c.want) {
			// The message's quotes are escaped in the body.
			if a.status != c.status || !strings.Contains(strings.ReplaceAll(a.body, `\"`, `"`), c.want) {
				t.Errorf("%s %s %v: status %d, want %d: %s", c.method, c.path, c.header, a.status, c.status, a.body)
			}
			continue
		}
		if c.status != 200 {
			if _, _, _, code := failed(t, a); code != c.code {
				t.Errorf("%s %s: code %q, want %q", c.method, c.path, code, c.code)
			}
		}
		if (c.status == 405) != (a.header.Get("Allow") != "") || (c.status == 401) != (a.header.Get("Www-Authenticate") != "") {
			t.Errorf("%s %s: header %v", c.method, c.path, a.header)
		}
	}
	// A body of unknown length is cut off as well.
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, h.url+"/tokenize", io.MultiReader(strings.NewReader(`{"prompt": "`), strings.NewReader(strings.Repeat("x", 200))))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set("Authorization", "Bearer sésame")
	resp, err := h.client.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	if resp.Body.Close(); resp.StatusCode != http.StatusRequestEntityTooLarge {
		t.Errorf("a long body without length: %d", resp.StatusCode)
	}
}

func TestRequestID(t *testing.T) {
	h := start(t, options{})
	for _, c := range []struct {
		sent string
		kept bool
	}{{"abc-1.2_3", true}, {"", false}, {"two words", false}, {strings.Repeat("x", 65), false}} {
		a := h.send(http.MethodPost, "/v1/completions", completionBody(`"1+2="`, ""), "X-Request-Id", c.sent)
		got := a.header.Get("X-Request-Id")
		if (got == c.sent) != c.kept || decode[reply](t, a.body).ID != "cmpl-"+got {
			t.Errorf("%q: %q, %s", c.sent, got, a.body)
		}
	}
}

// Before there is a model, the server lives, is not ready, and not healthy either: manifests for
// vLLM, which opens its port later, have /health as readinessProbe.
func TestLoading(t *testing.T) {
	h := start(t, options{loading: true})
	for path, want := range map[string]int{
		"/": 200, "/health/live": 200, "/version": 200, "/metrics": 200, "/load": 200,
		"/health": 503, "/ping": 503, "/health/ready": 503, "/v1/models": 503, "/v1/models/tiny": 503,
	} {
		if a := h.send(http.MethodGet, path, ""); a.status != want || (want == 503) != (a.header.Get("Retry-After") == "1") {
			t.Errorf("%s: %d, want %d: %v", path, a.status, want, a.header)
		}
	}
	a := h.send(http.MethodPost, "/v1/completions", "not JSON")
	if message, kind, _, _ := failed(t, a); a.status != 503 || kind != "service_unavailable" || !strings.Contains(message, "still loading") {
		t.Errorf("%d %s", a.status, a.body)
	}
	h.server.SetModels(h.model)
	for _, path := range []string{"/health", "/ping", "/health/ready"} {
		if a := h.send(http.MethodGet, path, ""); a.status != 200 {
			t.Errorf("%s, loaded: %d %s", path, a.status, a.body)
		}
	}
}

// long is a body whose completion takes a while on a slow engine.
const long = `{"prompt": [1, 2, 3], "ignore_eos": true, "max_tokens": 200, "stream": %v}`

// begin starts a long request and waits until its first event is there.
func (h *harness) begin(ctx context.Context) (*http.Response, *bufio.Reader) {
	h.t.Helper()
	r, err := h.do(ctx, http.MethodPost, "/v1/completions", fmt.Sprintf(long, true))
	if err != nil {
		h.t.Fatal(err)
	}
	b := bufio.NewReader(r.Body)
	if _, err := b.ReadString('\n'); err != nil || r.StatusCode != http.StatusOK {
		h.t.Fatalf("status %d: %v", r.StatusCode, err)
	}
	return r, b
}

// A client that leaves ends its request, streamed or not, running or waiting.
func TestClientLeaves(t *testing.T) { synctest.Test(t, testClientLeaves) }

func testClientLeaves(t *testing.T) {
	slow := slow()
	slow.Settings.Batch.MaxNumSeqs = 1
	h := start(t, options{pipes: true, node: slow})
	for _, stream := range []bool{true, false} {
		running, leave := context.WithCancel(t.Context())
		first, body := h.begin(running)
		waiting, leaveToo := context.WithCancel(t.Context())
		left := make(chan error, 1)
		go func() {
			r, err := h.do(waiting, http.MethodPost, "/v1/completions", fmt.Sprintf(long, stream))
			if err == nil {
				r.Body.Close() //nolint:errcheck // not read from
			}
			left <- err
		}()
		eventually(t, "one runs and one waits", func() bool { s := h.State(); return s.Running == 1 && s.Waiting == 1 })
		leaveToo()
		if err := <-left; err == nil {
			t.Error("a request that waits was answered")
		}
		eventually(t, "the one that waits is gone", func() bool { s := h.State(); return s.Running == 1 && s.Waiting == 0 })
		leave()
		if _, err := io.Copy(io.Discard, body); err == nil {
			t.Error("a response came to its end though its client left")
		}
		first.Body.Close() //nolint:errcheck // its end was an error already
		h.idle()
	}
	eventually(t, "four are counted as aborted", func() bool {
		return strings.Contains(h.send(http.MethodGet, "/metrics", "").body, `vllm:request_success_total{engine="0",finished_reason="abort",model_name="tiny"} 4`)
	})
}

// A client that reads nothing loses its request, and the others notice nothing.
func TestClientStopsReading(t *testing.T) { synctest.Test(t, testClientStopsReading) }

func testClientStopsReading(t *testing.T) {
	h := start(t, options{pipes: true, server: server.Options{WriteTimeout: 300 * time.Millisecond}})
	conn := h.connect()
	defer conn.Close() //nolint:errcheck // the server has closed it
	body := `{"prompt": [1, 2, 3], "ignore_eos": true, "max_tokens": 250, "n": 4, "logprobs": 20, "stream": true}`
	if _, err := fmt.Fprintf(conn, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(body), body); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it has come", func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		return len(h.requests) > 0
	})
	for range 5 {
		if got := texts(decode[reply](t, h.post("/v1/chat/completions", chatBody(ball, ""))))[0]; got != ballIs {
			t.Errorf("beside one who does not read: %q", got)
		}
	}
	h.idle()
	eventually(t, "it is counted as aborted", func() bool {
		return strings.Contains(h.send(http.MethodGet, "/metrics", "").body, `vllm:request_success_total{engine="0",finished_reason="abort",model_name="tiny"} 1`)
	})
}

// A client that stops sending gets 408, and its connection is closed.
func TestClientStopsSending(t *testing.T) { synctest.Test(t, testClientStopsSending) }

func testClientStopsSending(t *testing.T) {
	h := start(t, options{pipes: true, server: server.Options{ReadTimeout: time.Second}})
	for head, want := range map[string]string{
		"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{": "HTTP/1.1 408 ",
		"POST /tokenize HTTP/1.1\r\nHost:": "",
	} {
		conn := h.connect()
		if _, err := io.WriteString(conn, head); err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(conn) // until the server closes it
		if err != nil || !strings.HasPrefix(string(got), want) {
			t.Errorf("%q: %q, %v", head, got, err)
		}
		conn.Close() //nolint:errcheck // only read from
	}
}

// A request may take longer than a client had to send it.
func TestLongResponse(t *testing.T) { synctest.Test(t, testLongResponse) }

func testLongResponse(t *testing.T) {
	h := start(t, options{pipes: true, node: slow(), server: server.Options{ReadTimeout: time.Second, WriteTimeout: time.Second}})
	r := decode[reply](t, h.post("/v1/completions", completionBody(`"1+2="`, `, "ignore_eos": true, "max_tokens": 25`)))
	if r.Usage.CompletionTokens != 25 {
		t.Errorf("%+v", r)
	}
	if chunks := h.stream("/v1/completions", completionBody(`"1+2="`, `, "ignore_eos": true, "max_tokens": 25, "stream": true`)); *chunks[len(chunks)-1].Choices[0].FinishReason != "length" {
		t.Errorf("%+v", chunks)
	}
}

// A request that takes too long ends, and one that is streamed shows what it has until
// then: a first token at least, which a busy machine needs some time for.
func TestRequestTimeout(t *testing.T) { synctest.Test(t, testRequestTimeout) }

func testRequestTimeout(t *testing.T) {
	h := start(t, options{pipes: true, node: slow(), server: server.Options{RequestTimeout: 4 * time.Second}})
	a := h.send(http.MethodPost, "/v1/completions", fmt.Sprintf(long, false))
	if _, kind, _, code := failed(t, a); a.status != http.StatusGatewayTimeout || kind != "server_error" || code != "timeout" {
		t.Errorf("%d %s", a.status, a.body)
	}
	events := h.events("/v1/completions", fmt.Sprintf(long, true))
	if last := decode[failure](t, events[len(events)-1]); len(events) < 2 || *last.Error.Code != "timeout" {
		t.Errorf("%q", events)
	}
	h.idle()
}

// With a full queue, or too many requests, clients get 429 or 503 with Retry-After.
func TestTooMany(t *testing.T) { synctest.Test(t, testTooMany) }

func testTooMany(t *testing.T) {
	slow := slow()
	slow.Settings.Batch.MaxNumSeqs, slow.MaxQueued = 1, 1
	h := start(t, options{pipes: true, node: slow, server: server.Options{MaxConcurrent: 3}})
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	first, _ := h.begin(ctx)
	defer first.Body.Close() //nolint:errcheck // left in the middle
	waits := make(chan struct{}, 1)
	background := func() {
		r, err := h.do(ctx, http.MethodPost, "/v1/completions", fmt.Sprintf(long, false))
		if err == nil {
			r.Body.Close() //nolint:errcheck // not read from
		}
		waits <- struct{}{}
	}
	go background()
	eventually(t, "one waits", func() bool { return h.State().Waiting == 1 })
	for _, body := range []string{fmt.Sprintf(long, false), fmt.Sprintf(long, true), `{"prompt": ["1+2=", "3+4="]}`} {
		a := h.send(http.MethodPost, "/v1/completions", body)
		if _, kind, _, code := failed(t, a); a.status != http.StatusTooManyRequests || kind != "rate_limit_error" || code != "queue_full" || a.header.Get("Retry-After") != "1" {
			t.Errorf("%d %v %s", a.status, a.header, a.body)
		}
	}
	if a := h.send(http.MethodGet, "/health/ready", ""); a.status != 200 {
		t.Errorf("a busy server is not ready: %s", a.body)
	}
	leave()
	<-waits
	h.idle()
}

// Requests beyond the maximum are told to come again, without their bodies; those that are still
// being sent do not count.
func TestGate(t *testing.T) { synctest.Test(t, testGate) }

func testGate(t *testing.T) {
	h := start(t, options{pipes: true, node: slow(), server: server.Options{MaxConcurrent: 1}})
	for range 5 {
		conn := h.connect()
		defer conn.Close() //nolint:errcheck // never answered
		if _, err := io.WriteString(conn, "POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"); err != nil {
			t.Fatal(err)
		}
	}
	synctest.Wait()
	ctx, leave := context.WithCancel(t.Context())
	first, _ := h.begin(ctx)
	defer first.Body.Close() //nolint:errcheck // left in the middle
	a := h.send(http.MethodPost, "/detokenize", `{"tokens": []}`)
	if _, _, _, code := failed(t, a); a.status != http.StatusTooManyRequests || code != "too_many_requests" || a.header.Get("Retry-After") != "1" {
		t.Errorf("%d %v %s", a.status, a.header, a.body)
	}
	silent, never := io.Pipe()
	defer never.Close() //nolint:errcheck // never fails
	if r, err := http.NewRequestWithContext(ctx, http.MethodPost, h.url+"/tokenize", silent); err != nil {
		t.Fatal(err)
	} else if resp, err := h.client.Do(r); err != nil || resp.StatusCode != http.StatusTooManyRequests {
		t.Errorf("a request whose body does not come: %v, %v", resp, err)
	} else {
		resp.Body.Close() //nolint:errcheck // not read from
	}
	if a := h.send(http.MethodGet, "/health/ready", ""); a.status != 200 {
		t.Errorf("a busy server is not ready: %s", a.body)
	}
	leave()
	h.idle()
}

// lines are a log that is read while it is written.
type lines struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// Each request that works on the model has a line at info: how long its first token and the
// others took, and how it ended; others are logged at debug.
func TestRequestsAreLogged(t *testing.T) {
	var logged lines
	h := start(t, options{server: server.Options{Log: slog.New(slog.NewTextHandler(&logged, nil))}})
	h.post("/v1/completions", completionBody(`"1+2="`, `, "temperature": 0`))
	h.send(http.MethodPost, "/v1/chat/completions", `{"messages": [{"role": "user", "content": "1+2="}], "max_tokens": 4, "ignore_eos": true, "n": 2, "stream": true}`)
	h.post("/tokenize", `{"prompt": "1+2="}`)
	h.send(http.MethodPost, "/v1/completions", completionBody(`"1+2="`, `, "temperature": -1`))
	h.send(http.MethodGet, "/health", "")
	h.stop()
	if err := <-h.served; err != nil {
		t.Error(err)
	}
	h.served <- nil
	const common = `level=INFO msg=request request_id=[0-9a-f]+ method=POST endpoint=%s client=127\.0\.0\.1:\d+ status=%d duration_s=[\d.e-]+`
	const model = ` prompt_tokens=%d completion_tokens=%d finish_reason=%s ttft_s=[\d.e-]+ tpot_s=[\d.e-]+$`
	for _, want := range []string{
		fmt.Sprintf(common+model, "/v1/completions", 200, 4, 2, "stop"),
		fmt.Sprintf(common+model, "/v1/chat/completions", 200, 6, 8, "length"),
		fmt.Sprintf(common+"$", "/tokenize", 200),
		fmt.Sprintf(common+` err=".*temperature.*"$`, "/v1/completions", 400),
	} {
		if !regexp.MustCompile(`(?m)` + want).MatchString(logged.String()) {
			t.Errorf("the log has no %s:\n%s", want, logged.String())
		}
	}
	if strings.Contains(logged.String(), "/health") {
		t.Errorf("health checks are logged at info:\n%s", logged.String())
	}
}

// A server that is to end says so, lets requests finish, and then ends.
func TestDrain(t *testing.T) { synctest.Test(t, testDrain) }

func testDrain(t *testing.T) {
	// The request under way stands still until all has been looked at.
	held := make(chan struct{})
	release := sync.OnceFunc(func() { close(held) })
	var logged lines
	h := start(t, options{
		pipes:  true,
		node:   node.Options{Settings: configs.Defaults(), Listener: engine.Listener{StepFinished: func(engine.StepInfo) { <-held }}},
		server: server.Options{DrainTimeout: 10 * time.Minute, Log: slog.New(slog.NewTextHandler(&logged, nil))},
	})
	t.Cleanup(release)
	done := make(chan answer, 1)
	go func() {
		done <- h.send(http.MethodPost, "/v1/completions", completionBody(`"1+2="`, `, "ignore_eos": true, "max_tokens": 8`))
	}()
	eventually(t, "it runs", func() bool { return h.State().Running == 1 })
	h.stop()
	eventually(t, "it is not ready", func() bool { return h.send(http.MethodGet, "/health/ready", "").status == 503 })
	a := h.send(http.MethodPost, "/v1/completions", completionBody(`"1+2="`, ""))
	if message, kind, _, _ := failed(t, a); a.status != 503 || kind != "service_unavailable" || a.header.Get("Retry-After") == "" || !strings.Contains(message, "stopping") {
		t.Errorf("%d %s", a.status, a.body)
	}
	if a := h.send(http.MethodGet, "/health", ""); a.status != 200 {
		t.Errorf("a server that drains is not healthy: %s", a.body)
	}
	if want := `level=INFO msg="draining: new requests are refused, those under way finish; a second signal ends at once" running=1 timeout_s=600`; !strings.Contains(logged.String(), want) {
		t.Errorf("log: %s", logged.String())
	}
	release()
	if a := <-done; a.status != 200 || decode[reply](t, a.body).Usage.CompletionTokens != 8 {
		t.Errorf("the request under way: %d %s", a.status, a.body)
	}
	if err := <-h.served; err != nil {
		t.Error(err)
	}
	h.served <- nil
	if _, err := h.do(t.Context(), http.MethodGet, "/health", ""); err == nil {
		t.Error("the server still listens")
	}
}

// What has not finished by then is cut off, with an error.
func TestDrainTimeout(t *testing.T) { synctest.Test(t, testDrainTimeout) }

func testDrainTimeout(t *testing.T) {
	h := start(t, options{pipes: true, node: slow(), server: server.Options{DrainTimeout: 50 * time.Millisecond}})
	whole := make(chan answer, 1)
	go func() { whole <- h.send(http.MethodPost, "/v1/completions", fmt.Sprintf(long, false)) }()
	r, body := h.begin(t.Context())
	defer r.Body.Close() //nolint:errcheck // only read from
	eventually(t, "both run", func() bool { return h.State().Running == 2 })
	h.stop()
	events, err := readEvents(body)
	if err != nil || len(events) < 2 || events[len(events)-1] != "[DONE]" || decode[failure](t, events[len(events)-2]).Error.Type != "service_unavailable" {
		t.Errorf("%q, %v", events, err)
	}
	if a := <-whole; a.status != 503 || a.header.Get("Retry-After") == "" {
		t.Errorf("%d %s", a.status, a.body)
	}
	if err := <-h.served; err != nil {
		t.Error(err)
	}
	h.served <- nil
	h.idle()
}

// A device that is lost is the server's fault, and its health says so.
func TestDeviceLost(t *testing.T) {
	var machine *emulated.Machine
	var logged bytes.Buffer
	h := start(t, options{
		failing: true,
		server:  server.Options{Log: slog.New(slog.NewTextHandler(&logged, nil))},
		node: node.Options{Settings: configs.Defaults(), OpenMachine: func() (device.Machine, error) {
			m, err := emulated.Open(emulated.Options{})
			machine, _ = m.(*emulated.Machine)
			return m, err
		}},
	})
	h.post("/v1/completions", completionBody(`"1+2="`, ""))
	if err := machine.Lose(0); err != nil {
		t.Fatal(err)
	}
	a := h.send(http.MethodPost, "/v1/completions", completionBody(`"1+2="`, ""))
	if message, kind, _, _ := failed(t, a); a.status != http.StatusInternalServerError || kind != "server_error" || !strings.Contains(message, "lost") {
		t.Errorf("%d %s", a.status, a.body)
	}
	err := <-h.ran
	h.ran <- err
	h.server.Fail(err)
	for _, path := range []string{"/health", "/health/ready"} {
		if a := h.send(http.MethodGet, path, ""); a.status != http.StatusServiceUnavailable {
			t.Errorf("%s: %d", path, a.status)
		}
	}
	if a := h.send(http.MethodPost, "/v1/completions", completionBody(`"1+2="`, `, "stream": true`)); a.status != http.StatusInternalServerError {
		t.Errorf("%d %s", a.status, a.body)
	}
	h.stop()
	if err := <-h.served; err != nil {
		t.Error(err)
	}
	h.served <- nil
	if !strings.Contains(logged.String(), "request failed") {
		t.Errorf("log: %s", &logged)
	}
}

// A request for which the model computes no numbers fails alone, with a status or, where its
// stream has begun, an event.
func TestNoNumbers(t *testing.T) {
	s := configs.Defaults()
	s.Model.Name = fixtures.WithNaN(t, "mixtral", 500)
	h := start(t, options{node: node.Options{Settings: s}, server: server.Options{Log: slog.New(slog.DiscardHandler)}})
	body := func(prompt, more string) string {
		return fmt.Sprintf(`{"model": "tiny", "prompt": %s, "max_tokens": 8, "ignore_eos": true, "temperature": 0, "return_token_ids": true%s}`, prompt, more)
	}
	want := h.post("/v1/completions", body("[1, 2, 3]", ""))
	for _, more := range []string{"", `, "n": 3`, `, "stream": true`} {
		a := h.send(http.MethodPost, "/v1/completions", body("[1, 500]", more))
		message, kind, _, _ := failed(t, a)
		if a.status != http.StatusInternalServerError || kind != "server_error" || !strings.Contains(message, "after 2 tokens: no token can be sampled") {
			t.Errorf("%s: %d %s", more, a.status, a.body)
		}
	}
	// Token 500 is sampled first, so that the stream has begun.
	for _, more := range []string{"", `, "n": 2`} {
		got := h.send(http.MethodPost, "/v1/completions", body("[1, 2]", `, "stream": true, "logit_bias": {"500": 100}`+more))
		events := strings.Split(strings.TrimSpace(got.body), "\n\n")
		if n := len(events); got.status != http.StatusOK || n < 3 || !strings.Contains(events[0], `"token_ids":[500]`) ||
			!strings.Contains(events[n-2], `after 3 tokens: no token can be sampled`) || events[n-1] != "data: [DONE]" {
			t.Errorf("a stream: %d %s", got.status, got.body)
		}
	}
	for _, c := range []struct{ path, body, kind, last string }{
		{messagesPath, `{"max_tokens": 8, "messages": [{"role": "user", "content": "x"}]`, `"type":"api_error"`, "event: error\n"},
		{responsesPath, `{"max_output_tokens": 8, "input": "x"`, `"code":"server_error"`, "event: response.failed\n"},
	} {
		got := h.send(http.MethodPost, c.path, c.body+`, "temperature": 0, "stream": true, "logit_bias": {"500": 100}}`)
		events := strings.Split(strings.TrimSpace(got.body), "\n\n")
		last := events[len(events)-1]
		if got.status != http.StatusOK || len(events) < 3 || !strings.HasPrefix(last, c.last) || !strings.Contains(last, c.kind) || !strings.Contains(last, "no token can be sampled") {
			t.Errorf("%s: %d %s", c.path, got.status, got.body)
		}
	}
	type text struct{ Choices []struct{ Text string } }
	if got := h.post("/v1/completions", body("[1, 2, 3]", "")); decode[text](t, got).Choices[0] != decode[text](t, want).Choices[0] {
		t.Errorf("afterwards: %s, before: %s", got, want)
	}
}

// While copies fail, requests wait for half a minute and then get 503. The server takes others,
// and says how it is.
func TestFailingLink(t *testing.T) { synctest.Test(t, testFailingLink) }

func testFailingLink(t *testing.T) {
	var machine *emulated.Machine
	s := configs.Defaults()
	s.Offload.Fraction = 1
	h := start(t, options{pipes: true, node: node.Options{Settings: s, OpenMachine: func() (device.Machine, error) {
		m, err := emulated.Open(emulated.Options{})
		machine, _ = m.(*emulated.Machine)
		return m, err
	}}})
	fault := machine.Inject(&emulated.Fault{Kind: emulated.FailCopy, Times: -1, Match: func(p emulated.Point) bool {
		return p.To == device.HBM(0) && strings.HasPrefix(p.Stream, "copy ")
	}})
	answers := make(chan answer)
	for range 2 {
		go func() { answers <- h.send(http.MethodPost, "/v1/completions", completionBody(`"1+2="`, "")) }()
	}
	time.Sleep(10 * time.Second)
	if a := h.send(http.MethodGet, "/health", ""); a.status != http.StatusOK || !strings.Contains(a.body, `"status":"degraded"`) {
		t.Errorf("health while copies fail: %d %s", a.status, a.body)
	}
	if a := h.send(http.MethodGet, "/health/ready", ""); a.status != http.StatusServiceUnavailable || a.header.Get("Retry-After") == "" {
		t.Errorf("ready while copies fail: %d %s", a.status, a.body)
	}
	a := <-answers
	message, kind, _, _ := failed(t, a)
	if a.status != http.StatusServiceUnavailable || kind != "service_unavailable" || a.header.Get("Retry-After") == "" || !strings.Contains(message, "copies to the compute device fail; retry later") {
		t.Errorf("%d %s", a.status, a.body)
	}
	fault.Release()
	if a := <-answers; a.status != http.StatusServiceUnavailable && a.status != http.StatusOK { // it came before the first step, or after
		t.Errorf("%d %s", a.status, a.body)
	}
	h.post("/v1/completions", completionBody(`"1+2="`, ""))
	for _, path := range []string{"/health", "/health/ready"} {
		if a := h.send(http.MethodGet, path, ""); a.status != http.StatusOK || strings.Contains(a.body, "degraded") {
			t.Errorf("%s afterwards: %d %s", path, a.status, a.body)
		}
	}
}

// A bug in a handler ends its request and not the server.
func TestPanic(t *testing.T) {
	var logged bytes.Buffer
	s := server.New(server.Options{Log: slog.New(slog.NewTextHandler(&logged, nil))})
	s.SetModels(&server.Model{Names: []string{"x"}, Engine: broken{}, Defaults: engine.DefaultParams()})
	w := httptest.NewRecorder()
	r := httptest.NewRequest(http.MethodPost, "/v1/completions", strings.NewReader(`{"prompt": [1]}`))
	r.Header.Set("Content-Type", "application/json")
	s.ServeHTTP(w, r)
	if w.Code != http.StatusBadRequest { // a model without context
		t.Fatalf("%d %s", w.Code, w.Body)
	}
	s.SetModels(&server.Model{Names: []string{"x"}, Engine: broken{}, Defaults: engine.DefaultParams(), MaxModelLen: 10})
	w = httptest.NewRecorder()
	r.Body = io.NopCloser(strings.NewReader(`{"prompt": [1]}`))
	s.ServeHTTP(w, r)
	if _, kind, _, _ := failed(t, answer{w.Code, w.Header(), w.Body.String()}); w.Code != http.StatusInternalServerError || kind != "server_error" {
		t.Errorf("%d %s", w.Code, w.Body)
	}
	if !strings.Contains(logged.String(), "it is broken") {
		t.Errorf("log: %s", &logged)
	}
}

// broken is an engine with a bug.
type broken struct{}

func (broken) Submit(context.Context, engine.Request) (*engine.Job, error) { panic("it is broken") }
func (broken) State() engine.State                                         { return engine.State{} }
func (broken) ResetPrefixCache(bool)                                       {}
