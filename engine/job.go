package engine

import (
	"context"
	"errors"
	"io"
	"sync"
	"time"
)

// Job is a request that was submitted. Its updates wait for whoever reads them,
// at most MaxTokens for each sample, so a slow reader holds nobody up.
type Job struct {
	mu   sync.Mutex
	wake chan struct{} // closed when there is news; nil while nobody waits
	// news waits from read on; what lies before was read.
	news  []pendingUpdate
	read  int
	ended bool
	err   error
	usage Usage
	times Times
}

// pendingUpdate is an Update that waits. Its token, if it has one, becomes a slice where it is
// read, so that the engine's goroutine makes none.
type pendingUpdate struct {
	sample int
	drawn  bool
	token  Token
	text   string
	finish FinishReason
	at     time.Time
}

// update gives n to a reader; its Tokens lie in room, which has place for one.
func (n *pendingUpdate) update(room []Token) Update {
	u := Update{Sample: n.sample, Text: n.text, Finish: n.finish}
	if n.drawn {
		u.Tokens, u.At = append(room[:0], n.token), n.at
	}
	return u
}

func newJob(now time.Time, promptTokens int) *Job {
	return &Job{usage: Usage{PromptTokens: promptTokens}, times: Times{Arrived: now}}
}

// Next waits for the next update. It returns io.EOF after the last one, and, where
// the engine failed, why.
func (j *Job) Next(ctx context.Context) (Update, error) {
	for {
		j.mu.Lock()
		if j.read < len(j.news) {
			n := j.pop()
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

// pop takes the first of the news that wait. The lock is held, and there are some.
func (j *Job) pop() pendingUpdate {
	n := j.news[j.read]
	j.news[j.read] = pendingUpdate{}
	if j.read++; j.read == len(j.news) {
		j.news, j.read = j.news[:0], 0
	}
	return n
}

// Usage counts the request's tokens so far, those of updates that still wait among them; it
// is final once Next returned io.EOF.
func (j *Job) Usage() Usage {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.usage
}

// Times of the request so far.
func (j *Job) Times() Times {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.times
}

// admit notes when the first of the request's samples was admitted.
func (j *Job) admit(now time.Time) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.times.Admitted.IsZero() {
		j.times.Admitted = now
	}
}

// deliver hands d to the reader, and ends the job with the last.
func (j *Job) deliver(d *delivery) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if d.drawn {
		if j.times.FirstToken.IsZero() {
			j.times.FirstToken = d.at
		}
		j.usage.CompletionTokens++
	}
	if len(j.news) == cap(j.news) && j.read > len(j.news)/2 {
		// A reader that never catches up: what it has read makes room.
		n := copy(j.news, j.news[j.read:])
		clear(j.news[n:])
		j.news, j.read = j.news[:n], 0
	}
	j.news = append(j.news, d.pendingUpdate)
	if d.last {
		j.times.Finished, j.err, j.ended = d.at, d.err, true
	}
	j.wakeReader()
}

// wakeReader wakes who waits. The lock is held.
func (j *Job) wakeReader() {
	if j.wake != nil {
		close(j.wake)
		j.wake = nil
	}
}

// take moves all that waits to room, which is emptied first.
func (j *Job) take(room []pendingUpdate) []pendingUpdate {
	j.mu.Lock()
	defer j.mu.Unlock()
	room = append(room[:0], j.news[j.read:]...)
	clear(j.news)
	j.news, j.read = j.news[:0], 0
	return room
}

// Wait reads a job to its end and returns all updates of each sample as one.
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
		s.Finish = u.Finish
	}
}
