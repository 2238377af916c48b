package engine

import (
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/moeserve/moeserve/models/grammar"
)

// FinishReason is why a sample ended, as in the OpenAI API.
type FinishReason string

// The reasons.
const (
	// FinishStop: a stop id was sampled, the text ends with a stop string, or nothing may follow it by Params.Grammar.
	FinishStop FinishReason = "stop"
	// FinishLength: MaxTokens were generated, or the sequence has the maximum length.
	FinishLength FinishReason = "length"
	// FinishAbort: the request's context ended, the request failed, or the engine stopped.
	FinishAbort FinishReason = "abort"
)

// Errors that callers distinguish.
var (
	// ErrPromptTooLong: prompt and completion exceed the maximum length.
	ErrPromptTooLong = errors.New("prompt too long")
	// ErrBadRequest: the request is invalid; a *ParamError names the parameter.
	ErrBadRequest = errors.New("bad request")
	// ErrQueueFull: the queue has its maximum length; retry later.
	ErrQueueFull = errors.New("too many requests are waiting")
	// ErrStopped: the engine accepts no more requests.
	ErrStopped = errors.New("the engine is stopping")
	// ErrPaused: Pause has ended the request.
	ErrPaused = errors.New("the model was put to sleep before the request had finished")
	// ErrNoToken: every logit of the next token is NaN or -Inf. The request fails alone.
	ErrNoToken = errors.New("no token can be sampled: the model computes no numbers for this sequence, or every token is banned")
	// ErrUnavailable: copies failed until Options.RetryTimeout ended. Later requests may
	// succeed.
	ErrUnavailable = errors.New("copies to the compute device fail")
)

// ParamError is an invalid parameter of a request.
type ParamError struct {
	// Param is the name in the OpenAI API ("top_p").
	Param string
	// Value of the request, and what it must be.
	Value any
	Want  string
}

func (e *ParamError) Error() string {
	return fmt.Sprintf("%s is %v: it must be %s", e.Param, e.Value, e.Want)
}

// Is makes a ParamError an ErrBadRequest.
func (e *ParamError) Is(target error) bool { return target == ErrBadRequest }

// MaxTopLogProbs is the maximum of Params.TopLogProbs.
const MaxTopLogProbs = 20

// Params are the sampling parameters of a request. See DefaultParams.
type Params struct {
	// MaxTokens is the maximum length of the completion, with 0 only the prompt is computed; stop
	// ids are not sampled before MinTokens.
	MaxTokens, MinTokens int
	// Temperature 0 is greedy.
	Temperature float32
	// TopK keeps the k likeliest tokens, 0: all. TopP keeps the likeliest whose
	// probabilities together reach it, 1: all. MinP keeps those at least MinP times
	// as likely as the likeliest, 0: all.
	TopK       int
	TopP, MinP float32
	// RepetitionPenalty divides positive logits of tokens of prompt and completion and
	// multiplies negative ones, 1: off. PresencePenalty is subtracted from the logits of
	// tokens of the completion, FrequencyPenalty once per occurrence, 0: off.
	RepetitionPenalty, PresencePenalty, FrequencyPenalty float32
	// LogitBias is added to logits before the penalties, by token id; -100 bans a token.
	LogitBias map[int32]float32
	// AllowedIDs are the only tokens that are sampled; empty: all are. BadWords are sequences of tokens
	// of which the last is not sampled behind the others, counting those of the completion.
	AllowedIDs []int32
	BadWords   [][]int32
	// Seed of sampling; the samples of one request differ by their number.
	Seed uint64
	// Stop strings end a sample. Its text ends before the stop string or, with
	// IncludeStop, after it.
	Stop        []string
	IncludeStop bool
	// Ends makes, for each sample, a function that is given its text as it comes, by the engine's goroutine,
	// and ends it by returning true. nil: the text has no other end than a stop string.
	Ends func() func(text string) bool
	// Grammar restricts the completion to its texts; nil: it may be any. A sample ends where nothing may follow; stop ids
	// are sampled only where it may end.
	Grammar *grammar.Grammar
	// StopIDs end a sample, in addition to the model's, which IgnoreEOS turns off.
	StopIDs   []int32
	IgnoreEOS bool
	// SpecialTokens keeps special tokens in the text, but for the stop id that ends it; else it has only
	// those of KeepIDs.
	SpecialTokens bool
	KeepIDs       []int32
	// LogProbs adds the log-probability of each sampled token, and those of the
	// TopLogProbs likeliest tokens, at most MaxTopLogProbs.
	LogProbs    bool
	TopLogProbs int
	// PromptLogProbs computes the log-probability of each token of the prompt but the first, and
	// those of the TopPromptLogProbs likeliest tokens there: see Job.PromptLogProbs. Of such a prompt
	// nothing is read from the prefix cache.
	PromptLogProbs    bool
	TopPromptLogProbs int
	// N is the number of samples, at least 1.
	N int
}

// DefaultParams are greedy sampling of one completion of 16 tokens.
func DefaultParams() Params {
	return Params{MaxTokens: 16, TopP: 1, RepetitionPenalty: 1, N: 1}
}

// MaxN is the maximum of Params.N, MaxStop that of the number of stop strings, MaxStopBytes that of
// the length of each, MaxBadWords that of the number of bad words, MaxBadWordTokens that of the tokens of
// each, and MaxCacheSaltBytes that of the length of Request.CacheSalt.
const (
	MaxN              = 128
	MaxStop           = 16
	MaxStopBytes      = 1024
	MaxBadWords       = 1024
	MaxBadWordTokens  = 64
	MaxCacheSaltBytes = 1024
)

// Validate reports the first invalid parameter, as a *ParamError. vocab is the model's
// vocabulary size.
func (p *Params) Validate(vocab int) error {
	bad := func(name string, value any, want string) error { return &ParamError{name, value, want} }
	in := func(v, lo, hi float32) bool { return v >= lo && v <= hi } // false for NaN
	switch {
	case p.MaxTokens < 0:
		return bad("max_tokens", p.MaxTokens, "at least 0")
	case p.MinTokens < 0 || p.MinTokens > p.MaxTokens:
		return bad("min_tokens", p.MinTokens, "from 0 to max_tokens")
	case !in(p.Temperature, 0, 100):
		return bad("temperature", p.Temperature, "from 0 to 100")
	case p.TopK < 0 || p.TopK > math.MaxInt32:
		return bad("top_k", p.TopK, fmt.Sprintf("from 0 to %d", math.MaxInt32))
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
	case p.TopPromptLogProbs < 0 || p.TopPromptLogProbs > MaxTopLogProbs:
		return bad("prompt_logprobs", p.TopPromptLogProbs, fmt.Sprintf("from 0 to %d", MaxTopLogProbs))
	case p.N < 1 || p.N > MaxN:
		return bad("n", p.N, fmt.Sprintf("from 1 to %d", MaxN))
	case len(p.Stop) > MaxStop:
		return bad("stop", fmt.Sprintf("a list of %d", len(p.Stop)), fmt.Sprintf("at most %d strings", MaxStop))
	case len(p.StopIDs) > vocab:
		return bad("stop_token_ids", fmt.Sprintf("a list of %d", len(p.StopIDs)), fmt.Sprintf("at most as long as the vocabulary, %d", vocab))
	case len(p.AllowedIDs) > vocab:
		return bad("allowed_token_ids", fmt.Sprintf("a list of %d", len(p.AllowedIDs)), fmt.Sprintf("at most as long as the vocabulary, %d", vocab))
	case len(p.BadWords) > MaxBadWords:
		return bad("bad_words", fmt.Sprintf("%d words", len(p.BadWords)), fmt.Sprintf("at most %d", MaxBadWords))
	}
	for _, w := range p.BadWords {
		if len(w) == 0 || len(w) > MaxBadWordTokens {
			return bad("bad_words", fmt.Sprintf("a word of %d tokens", len(w)), fmt.Sprintf("words of 1 to %d tokens", MaxBadWordTokens))
		}
		for _, id := range w {
			if id < 0 || int(id) >= vocab {
				return bad("bad_words", fmt.Sprintf("with token %d", id), fmt.Sprintf("of tokens 0 to %d", vocab-1))
			}
		}
	}
	for _, id := range p.AllowedIDs {
		if id < 0 || int(id) >= vocab {
			return bad("allowed_token_ids", id, fmt.Sprintf("from 0 to %d", vocab-1))
		}
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
		if len(s) > MaxStopBytes {
			return bad("stop", fmt.Sprintf("a string of %d bytes", len(s)), fmt.Sprintf("at most %d bytes", MaxStopBytes))
		}
	}
	return nil
}

// Request is a prompt with sampling parameters.
type Request struct {
	// ID of the request in logs; may be empty.
	ID     string
	Prompt []int32
	// Encoded: Prompt comes from the tokenizer, not from the client. An id outside the
	// vocabulary is then reported as a mismatch of tokenizer and model.
	Encoded bool
	// CacheSalt separates users: requests share cached prefixes only with those of the same
	// salt. Empty: with all others without one.
	CacheSalt string
	// WithoutTiers: the tiers of Options.Offload neither provide its KV blocks nor get them.
	WithoutTiers bool
	// Continues: the text goes on from the prompt's, so that a space at its start is not left out.
	Continues bool
	// Priority of a request, lower values first: see scheduler.Order. 0 where the policy
	// knows none.
	Priority int
	Params   Params
}

// Token is one generated token.
type Token struct {
	ID int32
	// LogProb of the token in the model's distribution, before temperature and penalties, of the tokens that
	// Params.Grammar allows, and Top, the likeliest tokens of that position; where requested.
	LogProb float32
	Top     []TopLogProb
}

// TopLogProb is one of the likeliest tokens of a position.
type TopLogProb struct {
	ID      int32
	LogProb float32
}

// Update is the result of a step for one sample of a request.
type Update struct {
	// Sample, from 0 to N-1.
	Sample int
	// Tokens sampled; empty in an update that only ends the sample.
	Tokens []Token
	// Text that is final. It may lag behind the tokens, until characters are complete
	// and no stop string can begin in it.
	Text string
	// Finish is set in a sample's last update, and StopString if that ended the sample.
	Finish     FinishReason
	StopString string
	// At is when the tokens were sampled.
	At time.Time
}

// Usage counts a request's tokens.
type Usage struct {
	PromptTokens, CompletionTokens int
	// CachedTokens are those of the prompt that were not computed when the request's first sample
	// was first admitted: they were in the KV cache or, LoadedTokens of them, in another tier.
	CachedTokens, LoadedTokens int
}

// Times of a request's stages; zero where not reached.
type Times struct {
	Arrived, Admitted, FirstToken, Finished time.Time
}
