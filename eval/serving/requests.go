package serving

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"time"

	"github.com/moeserve/moeserve/eval"
	"github.com/moeserve/moeserve/untrusted"
)

// Request is one of a load: text, or token ids, which /v1/completions accepts too.
type Request struct {
	Text string
	IDs  []int32
	// OutputLen is the maximum of tokens that it generates; 0: Options.OutputLen.
	OutputLen int
	// At is when it arrives, with Options.Timed.
	At time.Duration
}

// requestStream separates the random numbers of requests from others with the same seed.
const requestStream = 0x7265_7175_6573_7473

// Random describes requests of random token ids.
type Random struct {
	Count int
	// InputLen and OutputLen are the means of tokens. InputLen 0: the lengths of
	// eval.GeneratePrompts.
	InputLen, OutputLen int
	// RangeRatio, from 0 to below 1, spreads lengths evenly from (1 - RangeRatio) to
	// (1 + RangeRatio) times these.
	RangeRatio float64
	// PrefixLen tokens begin all prompts, in addition.
	PrefixLen int
}

// Requests makes them of a vocabulary. The same arguments give the same requests.
func (r Random) Requests(vocabulary []int32, seed uint64) []Request {
	draw := rand.New(rand.NewPCG(seed, requestStream))
	length := func(mean int) int {
		low := math.Floor(float64(mean) * (1 - r.RangeRatio))
		high := math.Ceil(float64(mean) * (1 + r.RangeRatio))
		return max(1, int(low)+draw.IntN(int(high-low)+1))
	}
	requests := make([]Request, r.Count)
	if r.InputLen == 0 {
		for i, ids := range eval.GeneratePrompts(r.Count, 0, len(vocabulary), seed) {
			for j, at := range ids {
				ids[j] = vocabulary[at]
			}
			requests[i].IDs = ids
		}
	}
	prefix := randomIDs(draw, r.PrefixLen, vocabulary)
	for i := range requests {
		q := &requests[i]
		if r.InputLen > 0 {
			q.IDs = randomIDs(draw, length(r.InputLen), vocabulary)
		}
		q.IDs = append(prefix[:len(prefix):len(prefix)], q.IDs...)
		q.OutputLen = length(r.OutputLen)
	}
	return requests
}

func randomIDs(draw *rand.Rand, count int, vocabulary []int32) []int32 {
	ids := make([]int32, count)
	for i := range ids {
		ids[i] = vocabulary[draw.IntN(len(vocabulary))]
	}
	return ids
}

// PrefixRepetition describes requests that share prefixes, as vllm bench serve's data set
// prefix_repetition: each of Prefixes prefixes of PrefixLen tokens begins as many of Count requests
// (one more for the first, where they do not divide), each with SuffixLen tokens of its own, in random order.
type PrefixRepetition struct {
	Count, Prefixes, PrefixLen, SuffixLen int
}

// Requests makes them of a vocabulary. The same arguments give the same requests.
func (r PrefixRepetition) Requests(vocabulary []int32, seed uint64) []Request {
	draw := rand.New(rand.NewPCG(seed, requestStream))
	prefixes := make([][]int32, r.Prefixes)
	for i := range prefixes {
		prefixes[i] = randomIDs(draw, r.PrefixLen, vocabulary)
	}
	requests := make([]Request, r.Count)
	for i, at := range draw.Perm(r.Count) {
		p := prefixes[at%r.Prefixes]
		requests[i].IDs = append(p[:len(p):len(p)], randomIDs(draw, r.SuffixLen, vocabulary)...)
	}
	return requests
}

// TraceBlock is the number of tokens that one of a trace's hash_ids stands for: that of Mooncake's
// traces.
const TraceBlock = 512

// traceLine is a request of a trace. Its JSON has more keys in some traces.
type traceLine struct {
	Timestamp    *float64 `json:"timestamp"`
	InputLength  int      `json:"input_length"`
	OutputLength int      `json:"output_length"`
	HashIDs      []int64  `json:"hash_ids"`
}

// maxTraceTokens bounds the tokens of a trace's prompts together: they are in memory.
const maxTraceTokens = 1 << 28

// ReadTrace reads at most count requests (0: all) of a trace in Mooncake's format, a JSON object a
// line with timestamp (in ms, ascending), input_length, output_length and, for blocks of TraceBlock
// tokens that requests have in common, hash_ids. Tokens are random, the same for the same hash
// id. Errors wrap eval.ErrInput and name the line of the file called name.
func ReadTrace(r io.Reader, name string, count int, vocabulary []int32, seed uint64) ([]Request, error) {
	draw := rand.New(rand.NewPCG(seed, requestStream))
	var requests []Request
	first, last, total := 0.0, math.Inf(-1), 0
	err := eachLine(r, name, func(n int, line []byte) error {
		if count > 0 && len(requests) == count {
			return nil
		}
		var l traceLine
		if err := json.Unmarshal(line, &l); err != nil {
			return fmt.Errorf("not a JSON object of a trace: %w", untrusted.JSONError(line, err))
		}
		switch {
		case l.Timestamp == nil:
			return errors.New(`it has no "timestamp", in ms`)
		case l.InputLength < 1 || l.OutputLength < 1:
			return fmt.Errorf(`"input_length" is %d and "output_length" %d: both must be at least 1`, l.InputLength, l.OutputLength)
		case *l.Timestamp < last:
			return fmt.Errorf(`"timestamp" %v comes after %v: sort the trace by it`, *l.Timestamp, last)
		case *l.Timestamp-first > 1e12:
			return fmt.Errorf(`"timestamp" %v is more than 30 years after the first: it is in ms`, *l.Timestamp)
		case l.InputLength > maxTraceTokens-total:
			return fmt.Errorf("prompts of more than %d tokens in all; take fewer requests (--num-prompts)", maxTraceTokens)
		}
		if len(requests) == 0 {
			first = *l.Timestamp
		}
		last = *l.Timestamp
		total += l.InputLength
		ids := make([]int32, 0, l.InputLength)
		for _, h := range l.HashIDs {
			block := rand.New(rand.NewPCG(seed^uint64(h), requestStream+1))
			ids = append(ids, randomIDs(block, min(TraceBlock, l.InputLength-len(ids)), vocabulary)...)
		}
		ids = append(ids, randomIDs(draw, l.InputLength-len(ids), vocabulary)...)
		at := time.Duration((*l.Timestamp - first) * float64(time.Millisecond))
		requests = append(requests, Request{IDs: ids, OutputLen: l.OutputLength, At: at})
		return nil
	})
	return requests, err
}

// ReadCustom reads requests of a file as vllm bench serve's data set custom: a JSON object a line
// with prompt and, optionally, output_tokens. Errors wrap eval.ErrInput and name the line of the
// file called name.
func ReadCustom(r io.Reader, name string) ([]Request, error) {
	var requests []Request
	err := eachLine(r, name, func(_ int, line []byte) error {
		var l struct {
			Prompt       string `json:"prompt"`
			OutputTokens int    `json:"output_tokens"`
		}
		if err := json.Unmarshal(line, &l); err != nil {
			return fmt.Errorf("not a JSON object with a prompt: %w", untrusted.JSONError(line, err))
		}
		if l.Prompt == "" || l.OutputTokens < 0 {
			return errors.New(`it has no "prompt", or an "output_tokens" below 0`)
		}
		requests = append(requests, Request{Text: l.Prompt, OutputLen: l.OutputTokens})
		return nil
	})
	return requests, err
}

// eachLine calls f with each line of a data set that is not blank.
func eachLine(r io.Reader, name string, f func(n int, line []byte) error) error {
	return eval.EachLine(r, name, "requests, one JSON object a line", f)
}
