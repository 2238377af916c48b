package server

import (
	"encoding/json"
	"math/rand/v2"
	"strconv"

	"github.com/moeserve/moeserve/engine"
)

// common has the parameters that completions and chats share.
type common struct {
	model, requestID string
	params           engine.Params
	// maxTokens is 0 if the body has none, and may be allThatFits; maxTokensParam is the member
	// that set it.
	maxTokens      int
	maxTokensParam string
	stream         bool
	// usage requests a last chunk with the usage, and with usageSoFar each chunk has the usage
	// up to it, which is sent.
	usage, usageSoFar bool
	sent              usage
	// tokenIDs requests the ids of prompt and completion.
	tokenIDs bool
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
func parseCommon(o *object, defaults engine.Params) common {
	c := common{params: defaults}
	p := &c.params
	o.settle(inBody)
	o.text("model", &c.model)
	o.text("request_id", &c.requestID)
	parseMaxTokens(o, &c, "max_tokens")
	o.integer("min_tokens", &p.MinTokens)
	o.number("temperature", &p.Temperature)
	o.number("top_p", &p.TopP)
	if o.integer("top_k", &p.TopK) && p.TopK == -1 {
		p.TopK = 0 // vLLM's word for all
	}
	o.number("min_p", &p.MinP)
	o.number("repetition_penalty", &p.RepetitionPenalty)
	o.number("presence_penalty", &p.PresencePenalty)
	o.number("frequency_penalty", &p.FrequencyPenalty)
	p.Seed = rand.Uint64()
	if seed, ok := o.int64("seed"); ok {
		p.Seed = uint64(seed)
	}
	if o.integer("n", &p.N) && (p.N < 1 || p.N > engine.MaxN) {
		o.fail("n", "invalid_value", "Invalid value for 'n': it must be from 1 to %d, and is %d.", engine.MaxN, p.N)
	}
	parseLogitBias(o, p)
	parseStop(o, p)
	o.ids("stop_token_ids", &p.StopIDs)
	o.flag("include_stop_str_in_output", &p.IncludeStop)
	o.flag("ignore_eos", &p.IgnoreEOS)
	o.flag("return_token_ids", &c.tokenIDs)
	o.flag("stream", &c.stream)
	parseStreamOptions(o, &c)
	parseResponseFormat(o)
	return c
}

// allThatFits is max_tokens, as clients of llama.cpp send it, for what is left of the context.
const allThatFits = -1

// parseMaxTokens parses the maximum number of completion tokens.
func parseMaxTokens(o *object, c *common, member string) {
	if !o.integer(member, &c.maxTokens) {
		return
	}
	c.maxTokensParam = member
	if c.maxTokens < 1 && c.maxTokens != allThatFits {
		o.fail(member, "invalid_value", "Invalid value for '%s': it must be at least 1, or -1 for all that fits, and is %d.", member, c.maxTokens)
	}
}

// parseLogitBias parses logit_bias, an object of token ids.
func parseLogitBias(o *object, p *engine.Params) {
	bias := o.sub("logit_bias")
	if bias == nil {
		return
	}
	p.LogitBias = make(map[int32]float32, len(bias.members))
	ids := make([]string, 0, len(bias.members))
	for id := range bias.members {
		ids = append(ids, id)
	}
	for _, name := range ids {
		id, err := strconv.ParseInt(name, 10, 32)
		if err != nil || id < 0 {
			o.fail("logit_bias", "invalid_value", "Invalid key in 'logit_bias': %s is not a token id.", strconv.Quote(truncate(name)))
			return
		}
		var b float32
		if bias.number(name, &b) {
			p.LogitBias[int32(id)] = b
		}
	}
	o.close(bias)
}

// parseStop parses stop: a string, or a list of them.
func parseStop(o *object, p *engine.Params) {
	raw, ok := o.pop("stop")
	if !ok {
		return
	}
	if kindOf(raw) == "a string" {
		p.Stop = make([]string, 1)
		if json.Unmarshal(raw, &p.Stop[0]) == nil {
			return
		}
	}
	var stop []*string // pointers, as null would be read as ""
	if json.Unmarshal(raw, &stop) != nil {
		o.wrongType("stop", "a string or an array of strings", raw)
		return
	}
	p.Stop = make([]string, len(stop))
	for i, s := range stop {
		if s == nil {
			o.fail("stop", "invalid_type", "Invalid type for 'stop': it must be a string or an array of strings.")
			return
		}
		p.Stop[i] = *s
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

// parseResponseFormat refuses all but text: guided decoding is not supported.
func parseResponseFormat(o *object) {
	f := o.sub("response_format")
	if f == nil {
		return
	}
	var kind string
	if f.text("type", &kind); kind != "text" {
		o.unsupported("response_format", "only {\"type\": \"text\"} is")
		return
	}
	o.close(f)
}

// limit sets MaxTokens from the request, the length of the prompt and the maximum length of a
// sequence. otherwise applies where the request gives none; 0: all that is left.
func (c *common) limit(prompt []int32, otherwise, maxModelLen int, promptParam string) error {
	room := maxModelLen - len(prompt)
	switch {
	case room < 1:
		return badRequest(promptParam, "context_length_exceeded",
			"This model's maximum context length is %d tokens, at least one of them for the completion, and the prompt has %d tokens. Shorten the prompt.", maxModelLen, len(prompt))
	case c.maxTokens > room:
		return badRequest(c.maxTokensParam, "context_length_exceeded",
			"This model's maximum context length is %d tokens. The prompt has %d tokens and %s is %d: the maximum for it is %d.",
			maxModelLen, len(prompt), c.maxTokensParam, c.maxTokens, room)
	case c.maxTokens > 0:
		c.params.MaxTokens = c.maxTokens
	case c.maxTokens == 0 && otherwise > 0:
		c.params.MaxTokens = min(otherwise, room)
	default:
		c.params.MaxTokens = room
	}
	return nil
}
