package engine

import (
	"errors"
	"fmt"
	"math"
	"time"
)

// FinishReason says why a sample ended, in the words of the OpenAI API.
type FinishReason string

// The reasons.
const (
	// FinishStop: a stop id was drawn, or a stop string was written.
	FinishStop FinishReason = "stop"
	// FinishLength: MaxTokens were generated, or the sequence is as long as the
	// engine allows.
	FinishLength FinishReason = "length"
	// FinishAbort: the request's context ended, or the engine stopped.
	FinishAbort FinishReason = "abort"
)

// Errors that callers decide on.
var (
	// ErrPromptTooLong: the prompt leaves no room for a new token.
	ErrPromptTooLong = errors.New("prompt too long")
	// ErrBadRequest: the request can never run as it is; a *ParamError says why.
	ErrBadRequest = errors.New("bad request")
	// ErrQueueFull: as many requests wait as the engine holds; try again later.
	ErrQueueFull = errors.New("too many requests are waiting")
	// ErrStopped: the engine takes no more requests.
	ErrStopped = errors.New("the engine is stopping")
)

// ParamError names the parameter of a request that cannot be.
type ParamError struct {
	// Param is the name in the OpenAI API ("top_p").
	Param string
	// Value given, and what would do.
	Value any
	Want  string
}

func (e *ParamError) Error() string {
	return fmt.Sprintf("%s is %v: it must be %s", e.Param, e.Value, e.Want)
}

// Is makes a ParamError an ErrBadRequest.
func (e *ParamError) Is(target error) bool { return target == ErrBadRequest }

// MaxTopLogProbs is the most alternatives whose log-probabilities are given.
const MaxTopLogProbs = 20

// Params say how tokens are drawn and when to stop. DefaultParams are neutral.
type Params struct {
	// MaxTokens ends a sample at the latest; at least 1. MinTokens keeps stop ids
	// from being drawn before.
	MaxTokens, MinTokens int
	// Temperature 0 is greedy.
	Temperature float32
	// TopK keeps the k likeliest tokens, 0: all. TopP keeps the likeliest whose
	// probabilities together reach it, 1: all. MinP keeps those at least MinP times
	// as likely as the likeliest, 0: all.
	TopK       int
	TopP, MinP float32
	// RepetitionPenalty divides positive logits of tokens seen in prompt or answer
	// and multiplies negative ones, 1: off. PresencePenalty is subtracted from
	// tokens in the answer, FrequencyPenalty once per occurrence, 0: off.
	RepetitionPenalty, PresencePenalty, FrequencyPenalty float32
	// LogitBias is added, by token id; -100 or less bans a token.
	LogitBias map[int32]float32
	// Seed of the draw; the samples of one request differ by their number.
	Seed uint64
	// Stop strings end a sample and are left out of its text, as is what follows,
	// unless IncludeStop.
	Stop        []string
	IncludeStop bool
	// StopIDs end a sample beside the model's own, which IgnoreEOS switches off.
	StopIDs   []int32
	IgnoreEOS bool
	// LogProbs gives the log-probability of each token drawn; TopLogProbs of that
	// many likeliest besides, at most MaxTopLogProbs.
	LogProbs    bool
	TopLogProbs int
	// N samples are drawn; at least 1.
	N int
}

// DefaultParams draw greedily, one sample of 16 tokens.
func DefaultParams() Params {
	return Params{MaxTokens: 16, TopP: 1, RepetitionPenalty: 1, N: 1}
}

// MaxN and MaxStop bound a request.
const (
	MaxN    = 128
	MaxStop = 16
)

// Validate reports the first parameter that cannot be, as a *ParamError. vocab is
// the number of ids the model knows.
func (p *Params) Validate(vocab int) error {
	bad := func(name string, value any, want string) error { return &ParamError{name, value, want} }
	in := func(v, lo, hi float32) bool { return v >= lo && v <= hi } // false for NaN
	switch {
	case p.MaxTokens < 1:
		return bad("max_tokens", p.MaxTokens, "at least 1")
	case p.MinTokens < 0 || p.MinTokens > p.MaxTokens:
		return bad("min_tokens", p.MinTokens, "from 0 to max_tokens")
	case !in(p.Temperature, 0, 100):
		return bad("temperature", p.Temperature, "from 0 to 100")
	case p.TopK < 0 || p.TopK > math.MaxInt32:
		return bad("top_k", p.TopK, "at least 0")
	case !(p.TopP > 0 && p.TopP <= 1):
		return bad("top_p", p.TopP, "above 0 and at most 1")
	case !in(p.MinP, 0, 1):
		return bad("min_p", p.MinP, "from 0 to 1")
	case !(p.RepetitionPenalty > 0 && p.RepetitionPenalty <= 100):
		return bad("repetition_penalty", p.RepetitionPenalty, "above 0 and at most 100")
	case !in(p.PresencePenalty, -2, 2):
		return bad("presence_penalty", p.PresencePenalty, "from -2 to 2")
	case !in(p.FrequencyPenalty, -2, 2):
		return bad("frequency_penalty", p.FrequencyPenalty, "from -2 to 2")
	case p.TopLogProbs < 0 || p.TopLogProbs > MaxTopLogProbs:
		return bad("top_logprobs", p.TopLogProbs, fmt.Sprintf("from 0 to %d", MaxTopLogProbs))
	case p.N < 1 || p.N > MaxN:
		return bad("n", p.N, fmt.Sprintf("from 1 to %d", MaxN))
	case len(p.Stop) > MaxStop:
		return bad("stop", fmt.Sprintf("a list of %d", len(p.Stop)), fmt.Sprintf("at most %d strings", MaxStop))
	}
	for id, b := range p.LogitBias {
		if id < 0 || int(id) >= vocab {
			return bad("logit_bias", fmt.Sprintf("for token %d", id), fmt.Sprintf("for tokens 0 to %d", vocab-1))
		}
		if !in(b, -100, 100) {
			return bad("logit_bias", b, "from -100 to 100")
		}
	}
	for _, id := range p.StopIDs {
		if id < 0 || int(id) >= vocab {
			return bad("stop_token_ids", id, fmt.Sprintf("from 0 to %d", vocab-1))
		}
	}
	for _, s := range p.Stop {
		if s == "" {
			return bad("stop", `""`, "without empty strings")
		}
	}
	return nil
}

// Request is one prompt to go on from.
type Request struct {
	// ID names it in logs; may be empty.
	ID     string
	Prompt []int32
	// Encoded says that a tokenizer has made Prompt of text: then it is to blame for ids
	// that the model does not know, else who gave them.
	Encoded bool
	Params  Params
}

// Token is one generated token.
type Token struct {
	ID int32
	// LogProb of the token, of the model's own distribution before temperature and
	// penalties, and Top, the likeliest tokens of that place; where asked for.
	LogProb float32
	Top     []TopLogProb
}

// TopLogProb is one of the likeliest tokens of a place.
type TopLogProb struct {
	ID      int32
	LogProb float32
}

// Update is what a step has brought to one sample of a request.
type Update struct {
	// Sample, from 0 to N-1.
	Sample int
	// Tokens drawn; empty in an update that only ends the sample.
	Tokens []Token
	// Text to show: what can no longer change. It may lag behind the tokens, until
	// characters and possible stop strings are complete.
	Text string
	// Finish is set in a sample's last update.
	Finish FinishReason
	// At is when the tokens were drawn.
	At time.Time
}

// Usage counts a request's tokens.
type Usage struct {
	PromptTokens, CompletionTokens int
}

// Times of a request, for its histograms. Zero where it has not come so far.
type Times struct {
	Arrived, Admitted, FirstToken, Finished time.Time
}
