package engine

import (
	"context"
	"errors"
	"io"
	"sync"
	"time"
)

// Job is a submitted request. It buffers updates for its reader, at most MaxTokens per
// sample, so a slow reader does not block other requests.
type Job struct {
	mu   sync.Mutex
	wake chan struct{} // closed when an update arrives; nil while no reader waits
	// updates waits from read on; what lies before was read.
	updates []pendingUpdate
	read    int
	ended   bool
	err     error
	usage   Usage
	times   Times
	prompt  []PromptLogProb
}

// pendingUpdate is a buffered Update. Its token becomes a slice only when it is read, so
// that the engine's goroutine does not allocate.
type pendingUpdate struct {
	sample   int
	hasToken bool
	token    Token
	text     string
	finish   FinishReason
	stopped  string // by this stop string
	at       time.Time
}

// update converts n for a reader; buf is the memory of its Tokens, if not nil.
func (n *pendingUpdate) update(buf []Token) Update {
	u := Update{Sample: n.sample, Text: n.text, Finish: n.finish, StopString: n.stopped}
	if n.hasToken {
		u.Tokens, u.At = append(buf[:0], n.token), n.at
	}
	return u
}

func newJob(now time.Time, promptTokens int) *Job {
	return &Job{usage: Usage{PromptTokens: promptTokens}, times: Times{Arrived: now}}
}

// Next waits for the next update. After the last one the error is io.EOF or, where the
// request or the engine failed, that error.
func (j *Job) Next(ctx context.Context) (Update, error) {
	for {
		j.mu.Lock()
		if j.read < len(j.updates) {
			n := j.popUpdate()
			j.mu.Unlock()
			return n.update(nil), nil
		}
		if j.ended {
			err := j.err
			j.mu.Unlock()
			if err == nil {
				err = io.EOF
			}
			return Update{}, err
		}
		if j.wake == nil {
			j.wake = make(chan struct{})
		}
		wake := j.wake
		j.mu.Unlock()
		select {
		case <-wake:
		case <-ctx.Done():
			return Update{}, ctx.Err()
		}
	}
}

// popUpdate removes the first unread update. The caller holds the lock and has checked that there
// is one.
func (j *Job) popUpdate() pendingUpdate {
	n := j.updates[j.read]
	j.updates[j.read] = pendingUpdate{}
	if j.read++; j.read == len(j.updates) {
		j.updates, j.read = j.updates[:0], 0
	}
	return n
}

// Usage counts the request's tokens so far, unread ones included. It is final once Next
// has returned io.EOF.
func (j *Job) Usage() Usage {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.usage
}

// Times returns the times of the stages reached so far.
func (j *Job) Times() Times {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.times
}

// PromptLogProbs are those of the prompt's tokens but the first, in order, where the request asks for
// them. They are complete before the first update, and the caller does not change them.
func (j *Job) PromptLogProbs() []PromptLogProb {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.prompt
}

func (j *Job) setPromptLogProbs(list []PromptLogProb) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.prompt = list
}

// failure is the error with which the job has ended; nil for another end, or none.
func (j *Job) failure() error {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.err
}

// admit records when the first of the request's samples was admitted, and how many of the
// prompt's tokens were cached. It returns false where that was recorded before.
func (j *Job) admit(now time.Time, cached int) (first bool) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if first = j.times.Admitted.IsZero(); first {
		j.times.Admitted, j.usage.CachedTokens = now, cached
	}
	return first
}

// load records that so many of the prompt's tokens were loaded from another tier.
func (j *Job) load(tokens int) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.usage.CachedTokens += tokens
	j.usage.LoadedTokens += tokens
}

// deliver buffers d for the reader; the last update ends the job.
func (j *Job) deliver(d *delivery) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if d.hasToken {
		if j.times.FirstToken.IsZero() {
			j.times.FirstToken = d.at
		}
		j.usage.CompletionTokens++
	}
	if len(j.updates) == cap(j.updates) && j.read > len(j.updates)/2 {
		// The reader never catches up: reuse the memory of updates already read.
		n := copy(j.updates, j.updates[j.read:])
		clear(j.updates[n:])
		j.updates, j.read = j.updates[:n], 0
	}
	j.updates = append(j.updates, d.pendingUpdate)
	if d.last {
		j.times.Finished, j.err, j.ended = d.at, d.err, true
	}
	j.wakeReader()
}

// wakeReader wakes waiting readers. The caller holds the lock.
func (j *Job) wakeReader() {
	if j.wake != nil {
		close(j.wake)
		j.wake = nil
	}
}

// takeAll moves all unread updates to buf, overwriting it.
func (j *Job) takeAll(buf []pendingUpdate) []pendingUpdate {
	j.mu.Lock()
	defer j.mu.Unlock()
	buf = append(buf[:0], j.updates[j.read:]...)
	clear(j.updates)
	j.updates, j.read = j.updates[:0], 0
	return buf
}

// Wait reads a job to its end and returns one update per sample, with all its tokens.
func (j *Job) Wait(ctx context.Context) ([]Update, error) {
	var samples []Update
	for {
		u, err := j.Next(ctx)
		if errors.Is(err, io.EOF) {
			return samples, nil
		}
		if err != nil {
			return samples, err
		}
		for len(samples) <= u.Sample {
			samples = append(samples, Update{Sample: len(samples)})
		}
		s := &samples[u.Sample]
		s.Tokens = append(s.Tokens, u.Tokens...)
		s.Text += u.Text
		s.Finish, s.StopString = u.Finish, u.StopString
	}
}
