package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"strings"
	"sync"
	"unicode/utf8"

	"github.com/moeserve/moeserve/engine"
)

// responseShape is the form of the responses of one endpoint. A choice's index is that of its
// prompt times n, plus that of its sample.
type responseShape interface {
	// whole is the response that is not streamed; each update holds all of its choice.
	whole(choices []engine.Update, u *usage) any
	// chunks of a stream for an update of a choice; none where there is nothing to send yet.
	// first: it is the choice's first update.
	chunks(index int, first bool, u *engine.Update) []any
	// finished are the chunks behind all others, with the usage, and failed those where an error ends the
	// stream.
	finished(u *usage) []any
	failed(e *Error) []any
	// promptParam is the member of the body that holds the prompt.
	promptParam() string
}

// Chunks are events of their JSON form; a namedEvent has a name, too, and a streamEnd is the event that
// ends streams of OpenAI's first endpoints.
type (
	namedEvent struct {
		name string
		data any
	}
	streamEnd struct{}
)

// endOfStream ends a stream of OpenAI's first endpoints, with the usage if it is requested.
func (c *common) endOfStream(usage any) []any {
	if !c.usage {
		return []any{streamEnd{}}
	}
	return []any{usage, streamEnd{}}
}

// usage of a request, in tokens.
type usage struct {
	PromptTokens        int           `json:"prompt_tokens"`
	CompletionTokens    int           `json:"completion_tokens"`
	TotalTokens         int           `json:"total_tokens"`
	PromptTokensDetails promptDetails `json:"prompt_tokens_details"`
}

type promptDetails struct {
	// CachedTokens are those whose KV was not computed for this request.
	CachedTokens int `json:"cached_tokens"`
}

// generate submits the engine's requests of one HTTP request and writes the response. It
// returns an error where nothing was written yet.
func (s *Server) generate(w *response, r *http.Request, m *Model, c *common, requests []engine.Request, a responseShape) error {
	// Returning aborts what was submitted.
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	if s.o.RequestTimeout > 0 {
		ctx, cancel = context.WithTimeoutCause(ctx, s.o.RequestTimeout, errTimeout)
		defer cancel()
	}
	jobs := make([]*reading, 0, len(requests))
	defer func() {
		logs := make([]jobLog, len(jobs))
		for i, j := range jobs {
			j.done()
			logs[i] = j.log()
		}
		if len(jobs) > 0 {
			l := summarize(logs)
			l.model, l.params = m.Names[0], c.params
			w.ran = &l
		}
	}()
	for _, req := range requests {
		job, err := m.Engine.Submit(ctx, req)
		if err != nil {
			return asError(ctx, err, a.promptParam())
		}
		jobs = append(jobs, m.Metrics.read(job, req.Params))
	}
	c.promptTokens = make([][]engine.PromptLogProb, len(jobs))
	if c.stream {
		return s.stream(ctx, w, c, jobs, a)
	}
	choices := make([]engine.Update, len(jobs)*c.params.N)
	texts := make([]strings.Builder, len(choices))
	for i, j := range jobs {
		for {
			u, err := j.next(ctx)
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				return asError(ctx, err, a.promptParam())
			}
			at := i*c.params.N + u.Sample
			texts[at].WriteString(u.Text)
			choices[at].Tokens = append(choices[at].Tokens, u.Tokens...)
			choices[at].Finish, choices[at].StopString = u.Finish, u.StopString
		}
		c.promptTokens[i] = j.job.PromptLogProbs()
	}
	for i := range choices {
		choices[i].Text = texts[i].String()
	}
	w.json(http.StatusOK, a.whole(choices, total(jobs)))
	return nil
}

// stream writes a response as server-sent events. The status is sent with the first of them,
// so that a request that never runs can still be refused.
func (s *Server) stream(ctx context.Context, w *response, c *common, jobs []*reading, a responseShape) error {
	seen := make([]bool, len(jobs)*c.params.N)
	err := each(ctx, jobs, func(job int, u engine.Update) error {
		at := job*c.params.N + u.Sample
		first := !seen[at]
		seen[at] = true
		c.promptTokens[job] = jobs[job].job.PromptLogProbs()
		if c.usageSoFar {
			c.sent.PromptTokensDetails = total(jobs).PromptTokensDetails
		}
		return w.events(a.chunks(at, first, &u))
	})
	var broken *writeError
	if errors.As(err, &broken) {
		return nil // the client has gone
	}
	if err != nil {
		e := asError(ctx, err, a.promptParam())
		if !w.streaming {
			return e
		}
		if e.Status >= http.StatusInternalServerError {
			s.o.Log.Warn("stream aborted", "request_id", w.id, "err", err)
		}
		w.events(a.failed(e)) //nolint:errcheck // the response ends, and its reader is gone
		return nil
	}
	w.events(a.finished(total(jobs))) //nolint:errcheck // the response is complete, and its reader gone
	return nil
}

// each hands the updates of all jobs to do, one at a time, until their end or the
// first error.
func each(ctx context.Context, jobs []*reading, do func(job int, u engine.Update) error) error {
	if len(jobs) == 1 {
		return follow(ctx, jobs[0], func(u engine.Update) error { return do(0, u) })
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var (
		mu       sync.Mutex
		wg       sync.WaitGroup
		firstErr error
	)
	for i, j := range jobs {
		wg.Go(func() {
			err := follow(ctx, j, func(u engine.Update) error {
				mu.Lock()
				defer mu.Unlock()
				if firstErr != nil {
					return firstErr
				}
				return do(i, u)
			})
			if err == nil {
				return
			}
			mu.Lock()
			defer mu.Unlock()
			if firstErr == nil {
				firstErr = err
				cancel(err)
			}
		})
	}
	wg.Wait()
	return firstErr
}

// follow hands the updates of a job to do, until its end or the first error.
func follow(ctx context.Context, j *reading, do func(engine.Update) error) error {
	for {
		u, err := j.next(ctx)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err == nil {
			err = do(u)
		}
		if err != nil {
			return err
		}
	}
}

func total(jobs []*reading) *usage {
	var u usage
	for _, j := range jobs {
		u.add(j.job.Usage())
	}
	return &u
}

func (u *usage) add(one engine.Usage) {
	u.PromptTokens += one.PromptTokens
	u.CompletionTokens += one.CompletionTokens
	u.TotalTokens = u.PromptTokens + u.CompletionTokens
	u.PromptTokensDetails.CachedTokens += one.CachedTokens
}

// finishReason is null until there is one.
func finishReason(r engine.FinishReason) *string {
	if r == "" {
		return nil
	}
	s := string(r)
	return &s
}

func tokenIDs(tokens []engine.Token) []int32 {
	ids := make([]int32, len(tokens))
	for i, t := range tokens {
		ids[i] = t.ID
	}
	return ids
}

// logProb returns a log-probability as JSON can represent it: -9999 for an impossible token,
// as OpenAI's.
func logProb(lp float32) float64 {
	const impossible = -9999
	if !(lp > impossible) || math.IsInf(float64(lp), 1) {
		return impossible
	}
	return float64(lp)
}

// tokenTexts converts tokens to their texts.
type tokenTexts struct {
	m *Model
	// anchor are the ids of a letter and base its text: after it, a token's text keeps the
	// leading space that tokenizers strip at the start of a text.
	anchor []int32
	base   string
}

func (m *Model) texts() *tokenTexts {
	t := &tokenTexts{m: m}
	if m.Tokenizer != nil {
		// Without it texts are as at the start of a text.
		if anchor, err := m.Tokenizer.Encode("a", false); err == nil {
			t.anchor = anchor
		}
		t.base = m.Tokenizer.Decode(t.anchor, false)
	}
	return t
}

// text returns a token's text. A part of a character becomes U+FFFD.
func (t *tokenTexts) text(id int32) string {
	if t.m.Tokenizer == nil {
		return ""
	}
	return strings.TrimPrefix(t.m.Tokenizer.Decode(append(t.anchor[:len(t.anchor):len(t.anchor)], id), false), t.base)
}

// shown returns the name of a token in log-probabilities. Parts of characters are spelled "bytes:\xe2\x82"; without a tokenizer, ids are "token_id:7".
func (t *tokenTexts) shown(id int32) string {
	if t.m.Tokenizer == nil {
		return fmt.Sprintf("token_id:%d", id)
	}
	text := t.text(id)
	if raw, ok := t.partial(id, text); ok {
		var b strings.Builder
		b.WriteString("bytes:")
		for _, c := range raw {
			fmt.Fprintf(&b, `\x%02x`, c)
		}
		return b.String()
	}
	return text
}

// offsets are where the text of each of a prompt's tokens begins in the prompt's text, in characters.
func (t *tokenTexts) offsets(ids []int32) []int {
	all := make([]int, len(ids))
	if t.m.Tokenizer == nil {
		return all
	}
	stream, at := t.m.Tokenizer.NewStream(true), 0
	for i, id := range ids {
		all[i] = at
		at += utf8.RuneCountInString(stream.Push(id))
	}
	return all
}

// bytes of a token's text; nil where they are not known.
func (t *tokenTexts) bytes(id int32) []int {
	if t.m.Tokenizer == nil {
		return nil
	}
	text := t.text(id)
	raw, ok := t.partial(id, text)
	if !ok {
		raw = []byte(text)
	}
	numbers := make([]int, len(raw))
	for i, c := range raw {
		numbers[i] = int(c)
	}
	return numbers
}

// partial returns the bytes of a token whose text is not whole characters, from how
// the vocabulary spells it.
func (t *tokenTexts) partial(id int32, text string) ([]byte, bool) {
	if !strings.ContainsRune(text, '\uFFFD') {
		return nil, false
	}
	spelled, ok := t.m.Tokenizer.Token(id)
	if !ok {
		return nil, false
	}
	var b byte
	if n, err := fmt.Sscanf(spelled, "<0x%02X>", &b); err == nil && n == 1 && len(spelled) == len("<0x00>") {
		return []byte{b}, true
	}
	raw := make([]byte, 0, len(spelled))
	for _, r := range spelled {
		c, ok := byteOf(r)
		if !ok {
			return nil, false
		}
		raw = append(raw, c)
	}
	return raw, true
}

// byteOf is the byte that a character of a byte-level vocabulary stands for: itself
// where it is printable in Latin-1, and else the n-th character from U+0100 for the
// n-th byte that is not.
func byteOf(r rune) (byte, bool) {
	printable := func(c rune) bool { return c >= '!' && c <= '~' || c >= 0xA1 && c <= 0xFF && c != 0xAD }
	if r < 0x100 {
		return byte(r), printable(r)
	}
	n := r - 0x100
	for c := range rune(0x100) {
		if printable(c) {
			continue
		}
		if n == 0 {
			return byte(c), true
		}
		n--
	}
	return 0, false
}
