package eval

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"

	"github.com/moeserve/moeserve/untrusted"
)

// ErrInput marks an error in the user's input: a file, a list, a value.
var ErrInput = errors.New("bad input")

// inputError is ErrInput without its text.
type inputError struct{ err error }

func (e *inputError) Error() string        { return e.err.Error() }
func (e *inputError) Unwrap() error        { return e.err }
func (e *inputError) Is(target error) bool { return target == ErrInput }

// Inputf is an error in the user's input, which wraps ErrInput without its text.
func Inputf(format string, args ...any) error { return &inputError{fmt.Errorf(format, args...)} }

// ReadPrompts reads the first turn of each question of an MT-Bench file (a line is
// {"turns": ["…", …]}) or of each conversation of an MT-Bench-101 file (a line is
// {"history": [{"user": "…"}, …]}). Blank lines are skipped. An error wraps ErrInput
// and names the line of the file called name.
func ReadPrompts(r io.Reader, name string) ([]string, error) {
	var prompts []string
	err := EachLine(r, name, "prompts; give an MT-Bench or MT-Bench-101 file, one JSON object a line", func(_ int, line []byte) error {
		p, err := firstTurn(line)
		prompts = append(prompts, p)
		return err
	})
	if err != nil {
		return nil, err
	}
	return prompts, nil
}

func firstTurn(line []byte) (string, error) {
	var q struct {
		Turns   []string `json:"turns"`
		History []struct {
			User string `json:"user"`
		} `json:"history"`
	}
	if err := json.Unmarshal(line, &q); err != nil {
		return "", fmt.Errorf("not a JSON object of MT-Bench: %w", untrusted.JSONError(line, err))
	}
	turn := ""
	switch {
	case len(q.Turns) > 0:
		turn = q.Turns[0]
	case len(q.History) > 0:
		turn = q.History[0].User
	case q.Turns != nil:
		return "", errors.New(`its "turns" is empty`)
	case q.History != nil:
		return "", errors.New(`its "history" is empty`)
	default:
		return "", errors.New(`it has neither "turns", as MT-Bench has, nor "history", as MT-Bench-101 has`)
	}
	if turn == "" {
		return "", errors.New("its first turn is empty")
	}
	return turn, nil
}

// MT-Bench's prompts in tokens of a 32,000-entry vocabulary: their minimum and maximum
// length, and the parameters of the log-normal distribution between these whose median and
// mean, 47 and 77 tokens, are theirs.
const (
	minPromptTokens = 9
	maxPromptTokens = 418
	lengthMu        = 3.7
	lengthSigma     = 1.3129
)

// promptStream separates the random numbers of prompts from others with the same seed.
const promptStream = 0x6d74_6265_6e63_6800

// PromptLength is the quantile of p, from 0 to 1, of the lengths of generated prompts,
// in tokens: a log-normal distribution cut to 9 to 418, of mean 77.
func PromptLength(p float64) int {
	cut := func(tokens float64) float64 { // share of the uncut distribution below
		return (1 + math.Erf((math.Log(tokens)-lengthMu)/(lengthSigma*math.Sqrt2))) / 2
	}
	low, high := cut(minPromptTokens), cut(maxPromptTokens)
	x := math.Exp(lengthMu + lengthSigma*math.Sqrt2*math.Erfinv(2*(low+p*(high-low))-1))
	return min(max(int(math.Round(x)), minPromptTokens), maxPromptTokens)
}

// GeneratePrompts makes count prompts of ids from 0 to vocab-1, of length tokens each.
// Where length is 0, their lengths are the quantiles (i + 1/2) / count of PromptLength
// in an order that seed decides, so that their mean is that of the distribution for
// every count. The ids are uniform. The same arguments give the same prompts.
func GeneratePrompts(count, length, vocab int, seed uint64) [][]int32 {
	r := rand.New(rand.NewPCG(seed, promptStream))
	prompts := make([][]int32, count)
	for i, rank := range r.Perm(count) {
		n := length
		if n == 0 {
			n = PromptLength((float64(rank) + 0.5) / float64(count))
		}
		p := make([]int32, n)
		for j := range p {
			p[j] = int32(r.IntN(vocab))
		}
		prompts[i] = p
	}
	return prompts
}

// Repeat returns count prompts, beginning again after the last, each cut to maxTokens. cut
// is how many of them were longer.
func Repeat(prompts [][]int32, count, maxTokens int) (repeated [][]int32, cut int) {
	repeated = make([][]int32, count)
	for i := range repeated {
		p := prompts[i%len(prompts)]
		if len(p) > maxTokens {
			p = p[:maxTokens]
			cut++
		}
		repeated[i] = p
	}
	return repeated, cut
}
