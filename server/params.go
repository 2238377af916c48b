package server

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"unicode"

	"github.com/moeserve/moeserve/engine"
)

// common has the parameters that completions and chats share.
type common struct {
	model     string
	cacheSalt string
	priority  int
	params    engine.Params
	// maxTokens may be allThatFits; maxTokensParam is the member that set it, empty if the body has none.
	maxTokens      int
	maxTokensParam string
	stream         bool
	// usage requests a last chunk with the usage, and with usageSoFar each chunk has the usage
	// up to it, which is sent.
	usage, usageSoFar bool
	sent              usage
	structure         structure
	// tokenIDs requests the ids of prompt and completion.
	tokenIDs bool
	// promptLogProbs requests the log-probabilities of the prompt, with those of promptTop other tokens.
	// promptTokens have those of each prompt, once they are known.
	promptLogProbs bool
	promptTop      int
	promptTokens   [][]engine.PromptLogProb
}

// chunkUsage is the usage of a chunk that brings tokens more: omitted where it is not requested,
// and null where only the last chunk has it. Calls follow each other.
func (c *common) chunkUsage(tokens int) any {
	switch {
	case !c.usage:
		return nil
	case !c.usageSoFar:
		return (*usage)(nil)
	}
	c.sent.CompletionTokens += tokens
	c.sent.TotalTokens = c.sent.PromptTokens + c.sent.CompletionTokens
	u := c.sent
	return &u
}

// parseCommon parses the members that completions and chats share.
func parseCommon(o *object, m *Model) common {
	c := common{params: m.Defaults}
	p := &c.params
	o.settle(inBody)
	parseIdentity(o, &c)
	parseMaxTokens(o, &c, "max_tokens")
	parseSampling(o, p, m.vocab())
	if o.integer("n", &p.N) && (p.N < 1 || p.N > engine.MaxN) {
		o.fail("n", "invalid_value", "Invalid value for 'n': it must be from 1 to %d, and is %d.", engine.MaxN, p.N)
	}
	parseStop(o, p)
	parseEnd(o, p, m.vocab())
	skip := true
	o.flag("skip_special_tokens", &skip)
	p.SpecialTokens = !skip
	o.flag("return_token_ids", &c.tokenIDs)
	o.flag("stream", &c.stream)
	parseStreamOptions(o, &c)
	parsePromptLogProbs(o, &c)
	parseBadWords(o, p, m)
	parseAllowedIDs(o, p, m.vocab())
	parseResponseFormat(o, &c)
	parseStructuredOutputs(o, &c)
	return c
}

// parseIdentity parses for which model a request is, and how it stands to others.
func parseIdentity(o *object, c *common) {
	o.text("model", &c.model)
	var requestID string // which prepare has used
	if o.text("request_id", &requestID) && !goodID.MatchString(requestID) {
		o.fail("request_id", "invalid_value", "Invalid value for 'request_id': it must be 1 to 64 letters, digits, dots, dashes and underscores.")
	}
	parseCacheSalt(o, c)
	o.integer("priority", &c.priority)
}

// parseSampling parses how tokens are sampled.
func parseSampling(o *object, p *engine.Params, vocab int) {
	o.number("temperature", &p.Temperature)
	o.number("top_p", &p.TopP)
	if o.integer("top_k", &p.TopK) && p.TopK < -1 {
		o.fail("top_k", "invalid_value", "Invalid value for 'top_k': it must be at least 1, or 0 or -1 for all, and is %d.", p.TopK)
	}
	p.TopK = max(p.TopK, 0) // -1 is vLLM's word for all
	o.number("min_p", &p.MinP)
	o.number("repetition_penalty", &p.RepetitionPenalty)
	o.number("presence_penalty", &p.PresencePenalty)
	o.number("frequency_penalty", &p.FrequencyPenalty)
	p.Seed = rand.Uint64()
	if seed, ok := o.int64("seed"); ok {
		p.Seed = uint64(seed)
	}
	parseLogitBias(o, p, vocab)
}

// parseEnd parses where a completion ends, beside its maximum and the strings that stop it.
func parseEnd(o *object, p *engine.Params, vocab int) {
	o.integer("min_tokens", &p.MinTokens)
	o.ids("stop_token_ids", &p.StopIDs, vocab)
	o.flag("include_stop_str_in_output", &p.IncludeStop)
	o.flag("ignore_eos", &p.IgnoreEOS)
}

// parseCacheSalt parses cache_salt. An empty one is an error, as with vLLM: who sends it expects to
// be kept apart from others.
func parseCacheSalt(o *object, c *common) {
	if !o.text("cache_salt", &c.cacheSalt) {
		return
	}
	if n := len(c.cacheSalt); n == 0 || n > engine.MaxCacheSaltBytes {
		o.fail("cache_salt", "invalid_value", "Invalid value for 'cache_salt': it must have from 1 to %d bytes, and has %d.", engine.MaxCacheSaltBytes, n)
	}
}

// allThatFits is max_tokens, as clients of llama.cpp send it, for what is left of the context.
const allThatFits = -1

// parseMaxTokens parses the maximum number of completion tokens.
func parseMaxTokens(o *object, c *common, member string) {
	if !o.integer(member, &c.maxTokens) {
		return
	}
	c.maxTokensParam = member
	if c.maxTokens < 0 && c.maxTokens != allThatFits {
		o.fail(member, "invalid_value", "Invalid value for '%s': it must be at least 0, or -1 for all that fits, and is %d.", member, c.maxTokens)
	}
}

// someTokens refuses a maximum of 0, which is for prompts alone.
func (c *common) someTokens(o *object) {
	if c.maxTokensParam != "" && c.maxTokens == 0 {
		o.fail(c.maxTokensParam, "invalid_value", "Invalid value for '%s': it must be at least 1, or -1 for all that fits, and is 0.", c.maxTokensParam)
	}
}

// parsePromptLogProbs parses prompt_logprobs, which as with vLLM is not for streams.
func parsePromptLogProbs(o *object, c *common) {
	const member = "prompt_logprobs"
	if c.promptLogProbs = o.integer("prompt_logprobs", &c.promptTop); !c.promptLogProbs {
		return
	}
	if n := c.promptTop; n < 0 || n > engine.MaxTopLogProbs {
		o.fail(member, "invalid_value", "Invalid value for '%s': it must be from 0 to %d, and is %d.", member, engine.MaxTopLogProbs, n)
	}
	if c.stream {
		o.fail(member, "invalid_value", "The '%s' parameter is not available when 'stream' is enabled.", member)
	}
	c.params.PromptLogProbs, c.params.TopPromptLogProbs = true, c.promptTop
}

// parseBadWords parses bad_words. As with vLLM a word is banned as it is, and as it follows a space where
// that is another first token of as many.
func parseBadWords(o *object, p *engine.Params, m *Model) {
	const member = "bad_words"
	words, ok := o.list("bad_words", "an array of strings", engine.MaxBadWords/2)
	if !ok || len(words) == 0 {
		return
	}
	if m.Tokenizer == nil {
		o.fail(member, "invalid_value", "'%s' cannot be used: the model has no tokenizer.", member)
		return
	}
	for i, raw := range words {
		if kindOf(raw) != "a string" {
			o.wrongType(fmt.Sprintf("%s[%d]", member, i), "a string", raw)
			return
		}
		if len(raw) > len(`""`)+len(`\u0000`)*engine.MaxStopBytes {
			o.fail(member, "invalid_value", "Invalid value for '%s': a word must have at most %d bytes.", member, engine.MaxStopBytes)
			return
		}
		word := strings.TrimLeftFunc(unquote(raw), unicode.IsSpace)
		plain, err := m.Tokenizer.Encode(word, false)
		spaced, err2 := m.Tokenizer.Encode(" "+word, false)
		if err := errors.Join(err, err2); err != nil || len(plain) == 0 || len(plain) > engine.MaxBadWordTokens {
			o.fail(member, "invalid_value", "Invalid value for '%s': %s has %d tokens, and must have from 1 to %d.", member, strconv.Quote(truncate(word)), len(plain), engine.MaxBadWordTokens)
			return
		}
		p.BadWords = append(p.BadWords, plain)
		if len(spaced) == len(plain) && spaced[0] != plain[0] {
			p.BadWords = append(p.BadWords, spaced)
		}
	}
}

// parseAllowedIDs parses allowed_token_ids, of which an empty list would leave nothing.
func parseAllowedIDs(o *object, p *engine.Params, limit int) {
	if o.ids("allowed_token_ids", &p.AllowedIDs, limit) && len(p.AllowedIDs) == 0 {
		o.fail("allowed_token_ids", "invalid_value", "Invalid value for 'allowed_token_ids': it is empty, so that no token could be sampled.")
	}
}

// parseLogitBias parses logit_bias, an object of token ids. An id has one spelling, and is there
// once: of two biases of one token, neither is the right one.
func parseLogitBias(o *object, p *engine.Params, limit int) {
	const member = "logit_bias"
	raw, ok := o.pop("logit_bias")
	if !ok {
		return
	}
	if kind := kindOf(raw); kind != "an object" {
		o.fail(member, "invalid_type", "'%s' must be a JSON object, and is %s.", member, kind)
		return
	}
	p.LogitBias = map[int32]float32{}
	eachMember(raw, func(name string, value json.RawMessage) bool {
		id, ok := tokenID(json.RawMessage(name))
		if !ok || len(name) > 1 && name[0] == '0' {
			o.fail(member, "invalid_value", "Invalid key in '%s': %s is not a token id.", member, strconv.Quote(truncate(name)))
			return false
		}
		if _, ok := p.LogitBias[id]; ok {
			o.fail(member, "invalid_value", "Invalid value for '%s': it has token %d twice.", member, id)
			return false
		}
		if len(p.LogitBias) == limit {
			o.tooMany(member, limit, "token ids")
			return false
		}
		one := object{path: member, members: map[string]json.RawMessage{name: value}}
		var bias float32
		if !one.number(name, &bias) {
			if one.err == nil {
				one.wrongType(name, "a number", value)
			}
			o.err = one.err
			return false
		}
		p.LogitBias[id] = bias
		return true
	})
}

// parseStop parses stop: a string, or a list of them.
func parseStop(o *object, p *engine.Params) {
	const member = "stop"
	raw, ok := o.pop("stop")
	if !ok {
		return
	}
	var items []json.RawMessage
	switch kindOf(raw) {
	case "a string":
		items = append(items, raw)
	case "an array":
		eachItem(raw, func(item json.RawMessage) bool {
			items = append(items, item)
			return len(items) <= engine.MaxStop
		})
	default:
		o.wrongType(member, "a string or an array of strings", raw)
		return
	}
	p.Stop = make([]string, len(items))
	for i, item := range items {
		if kindOf(item) != "a string" {
			o.wrongType(fmt.Sprintf("%s[%d]", member, i), "a string", item)
			return
		}
		// The engine has these limits too; they are checked here before the string is built.
		if i == engine.MaxStop {
			o.fail(member, "invalid_value", "Invalid value for '%s': it must have at most %d strings.", member, engine.MaxStop)
			return
		}
		if len(item) > len(`""`)+len(`\u0000`)*engine.MaxStopBytes {
			o.fail(member, "invalid_value", "Invalid value for '%s': a string must have at most %d bytes.", member, engine.MaxStopBytes)
			return
		}
		p.Stop[i] = unquote(item)
	}
}

func parseStreamOptions(o *object, c *common) {
	s := o.sub("stream_options")
	if s == nil {
		return
	}
	if !c.stream {
		o.fail("stream_options", "invalid_value", "The 'stream_options' parameter is only allowed when 'stream' is enabled.")
	}
	s.flag("include_usage", &c.usage)
	s.flag("continuous_usage_stats", &c.usageSoFar)
	s.settle(inStream)
	o.close(s)
}

// limit sets MaxTokens from the request, the length of the prompt and the maximum length of a
// sequence. otherwise applies where the request gives none; 0: all that is left.
func (c *common) limit(prompt []int32, otherwise, maxModelLen int, promptParam string) error {
	room := maxModelLen - len(prompt)
	switch {
	case room < 0, room == 0 && (c.maxTokensParam == "" || c.maxTokens != 0):
		return promptTooLong(promptParam, maxModelLen, strconv.Itoa(len(prompt)))
	case c.maxTokens > room:
		return badRequest(c.maxTokensParam, "context_length_exceeded",
			"This model's maximum context length is %d tokens. The prompt has %d tokens and %s is %d: the maximum for it is %d.",
			maxModelLen, len(prompt), c.maxTokensParam, c.maxTokens, room)
	case c.maxTokensParam != "" && c.maxTokens != allThatFits:
		c.params.MaxTokens = c.maxTokens
	case c.maxTokensParam == "" && otherwise > 0:
		c.params.MaxTokens = min(otherwise, room)
	default:
		c.params.MaxTokens = room
	}
	return nil
}

// promptTooLong is the error for a prompt of that many tokens, as text.
func promptTooLong(member string, maxModelLen int, tokens string) *Error {
	return badRequest(member, "context_length_exceeded",
		"This model's maximum context length is %d tokens, at least one of them for the completion, and the prompt has %s tokens. Shorten the prompt.", maxModelLen, tokens)
}
