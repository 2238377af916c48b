package server

import (
	"bytes"
	"encoding/json"
	"slices"
	"strings"
)

// Places that a Member may be in.
const (
	inBody         = "body"
	inCompletion   = "/v1/completions"
	inChat         = "/v1/chat/completions"
	inMessages     = "/v1/messages"
	inResponses    = "/v1/responses"
	inText         = "`text` of responses"
	inConversation = "a conversation" // of chats and of /tokenize
	inStream       = "stream_options"
	inStructured   = "structured_outputs"
	inMessage      = "messages[]"
	inPart         = "messages[].content[]"
)

// Member is one that clients send and this server does nothing about: it is ignored where that
// changes neither a response nor the order of responses, and else refused.
type Member struct {
	// In is where it belongs.
	In, Name string
	// Ignored: whatever its value. Else only the values of Neutral, as JSON, are accepted.
	Ignored bool
	Neutral []string
	// Why it is ignored, or refused.
	Why string
}

// Members lists them by place.
func Members() []Member { return slices.Clone(members) }

func ignored(in, why string, names ...string) []Member {
	all := make([]Member, len(names))
	for i, name := range names {
		all[i] = Member{In: in, Name: name, Ignored: true, Why: why}
	}
	return all
}

func refused(in, name, why string, neutral ...string) []Member {
	return []Member{{In: in, Name: name, Neutral: neutral, Why: why}}
}

var members = slices.Concat(
	ignored(inBody, "about the client, not the completion", "user", "metadata", "safety_identifier", "session_id"),
	ignored(inBody, "nothing is stored", "store"),
	ignored(inBody, "prefixes are cached by their content; cache_salt keeps users apart", "prompt_cache_key"),
	ignored(inBody, "cached prefixes stay until their place is needed", "prompt_cache_retention"),
	ignored(inBody, "the text is as the tokenizer decodes it", "spaces_between_special_tokens"),
	ignored(inBody, "of beam search", "length_penalty"),
	refused(inBody, "use_beam_search", "there is sampling only; give n for more completions than one", "false"),
	refused(inBody, "service_tier", "there is one tier", `"auto"`, `"default"`),
	refused(inBody, "truncate_prompt_tokens", "prompts are not shortened"),
	refused(inBody, "guided_json", `give structured_outputs: {"json": …}`),
	refused(inBody, "guided_regex", `give structured_outputs: {"regex": …}`),
	refused(inBody, "guided_choice", `give structured_outputs: {"choice": …}`),
	refused(inBody, "guided_grammar", `give structured_outputs: {"grammar": …}`),
	refused(inBody, "guided_json_object", `give structured_outputs: {"json_object": true}`, "false"),
	refused(inBody, "guided_decoding_backend", "there is one"),
	refused(inBody, "guided_whitespace_pattern", `give structured_outputs: {"whitespace_pattern": …}`),
	refused(inBody, "structural_tag", "give tools, which constrain calls, or structured_outputs"),
	refused(inBody, "logprob_token_ids", "log-probabilities are those of the most probable tokens"),
	refused(inBody, "return_tokens_as_token_ids", "ask for return_token_ids", "false"),

	refused(inCompletion, "suffix", "the model writes behind a prompt only", `""`),

	refused(inChat, "echo", "it is for completions", "false"),
	refused(inChat, "functions", "give tools", "[]"),
	refused(inChat, "function_call", "give tools", `"none"`),
	refused(inChat, "modalities", "completions are text", `["text"]`),
	refused(inChat, "audio", "completions are text"),
	refused(inChat, "prediction", "this server does not speculate"),
	refused(inChat, "web_search_options", "this server searches nothing"),
	refused(inChat, "verbosity", "ask for it in a message", `"medium"`),
	refused(inChat, "thinking_token_budget", "reasoning is as long as the model makes it; max_tokens limits it with the rest", "-1"),

	refused(inConversation, "chat_template", "chats go through the model's own template"),
	refused(inConversation, "continue_final_message", "a completion is a new message", "false"),
	refused(inConversation, "documents", "put them into a message", "[]"),

	ignored(inMessages, "about the client, not the completion", "metadata"),
	ignored(inMessages, "every prefix is cached", "cache_control"),
	ignored(inMessages, "conversations are not shortened", "context_management"),
	refused(inMessages, "service_tier", "there is one tier", `"auto"`, `"standard_only"`),
	refused(inMessages, "output_format", "give output_config.format"),
	refused(inMessages, "container", "this server runs nothing"),
	refused(inMessages, "mcp_servers", "this server connects to none", "[]"),
	refused(inMessages, "inference_geo", "the model runs where this server is"),
	refused(inMessages, "speed", "there is one speed", `"standard"`),

	ignored(inResponses, "about the client, not the completion", "user", "safety_identifier"),
	ignored(inResponses, "nothing is stored, and responses say so", "store"),
	ignored(inResponses, "prefixes are cached by their content; cache_salt keeps users apart", "prompt_cache_key"),
	ignored(inResponses, "cached prefixes stay until their place is needed", "prompt_cache_retention"),
	refused(inResponses, "service_tier", "there is one tier", `"auto"`, `"default"`),
	refused(inResponses, "previous_response_id", "nothing is stored: send the conversation as input"),
	refused(inResponses, "conversation", "nothing is stored: send the conversation as input"),
	refused(inResponses, "prompt", "nothing is stored: send the prompt as instructions and input"),
	refused(inResponses, "background", "nothing is stored that could be asked for later", "false"),
	refused(inResponses, "truncation", "conversations are not shortened", `"disabled"`),
	refused(inResponses, "context_management", "conversations are not shortened", "[]"),
	refused(inResponses, "max_tool_calls", "this server runs no tools"),
	refused(inResponses, "top_logprobs", "log-probabilities are those of /v1/chat/completions", "0"),
	refused(inText, "verbosity", "ask for it in a message", `"medium"`),

	refused(inStructured, "structural_tag", "give tools, which constrain calls, or a grammar"),

	ignored(inStream, "chunks are not padded", "include_obfuscation"),

	// What clients keep beside the text of a completion, and send back with it.
	ignored(inMessage, "about a completion that is sent back; the model reads its text", "id", "parsed", "annotations", "provider_specific_fields"),
	ignored(inMessage, "the text is that of reasoning_content", "thinking_blocks"),
	ignored(inMessage, "every prefix is cached", "cache_control"),
	refused(inMessage, "prefix", "a completion is a new message", "false"),
	refused(inMessage, "refusal", "messages are text and tool calls"),
	refused(inMessage, "audio", "messages are text and tool calls"),
	refused(inMessage, "function_call", "give tool_calls"),

	ignored(inPart, "every prefix is cached", "cache_control"),
)

// membersIn are the members of each place.
var membersIn = func() map[string][]Member {
	in := map[string][]Member{}
	for _, m := range members {
		in[m.In] = append(in[m.In], m)
	}
	return in
}()

// settle deals with the members of a place: it removes those that change nothing, and refuses
// others.
func (o *object) settle(place string) {
	for i := range membersIn[place] {
		m := &membersIn[place][i]
		raw, ok := o.pop(m.Name)
		if !ok || m.Ignored || m.neutral(raw) {
			continue
		}
		why := m.Why
		if len(m.Neutral) > 0 {
			why += "; leave it out, or send " + strings.Join(m.Neutral, " or ")
		}
		o.unsupported(m.Name, why)
	}
}

// neutral says whether a value is one that changes nothing.
func (m *Member) neutral(raw json.RawMessage) bool {
	var compact bytes.Buffer
	if json.Compact(&compact, raw) != nil {
		return false
	}
	return slices.ContainsFunc(m.Neutral, func(n string) bool {
		want, isNumber := wholeNumber(json.RawMessage(n))
		got, same := wholeNumber(compact.Bytes())
		return compact.String() == n || isNumber && same && got == want // 0.0 is 0
	})
}
