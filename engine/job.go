package engine

import (
	"context"
	"io"
	"sync"
	"time"
)

// Job is a request that was submitted. Its updates wait for whoever reads them,
// at most MaxTokens for each sample, so a slow reader holds nobody up.
type Job struct {
	mu      sync.Mutex
	wake    chan struct{} // closed when there is news; nil while nobody waits
	updates []Update
	ended   bool
	err     error
	usage   Usage
	times   Times
}

func newJob(now time.Time, promptTokens int) *Job {
	return &Job{usage: Usage{PromptTokens: promptTokens}, times: Times{Arrived: now}}
}

// Next waits for the next update. It returns io.EOF after the last one, and, where
// the engine failed, why.
func (j *Job) Next(ctx context.Context) (Update, error) {
	for {
		j.mu.Lock()
		if len(j.updates) > 0 {
			u := j.updates[0]
			j.updates = j.updates[1:]
			j.mu.Unlock()
			return u, nil
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

// Usage counts the request's tokens so far; it is final once Next returned io.EOF.
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

// change applies f under the lock and wakes the reader.
func (j *Job) change(f func()) {
	j.mu.Lock()
	defer j.mu.Unlock()
	f()
	j.news()
}

// drew counts a token, and hands out its update unless that is the sample's last, which
// comes otherwise.
func (j *Job) drew(u Update) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.times.FirstToken.IsZero() {
		j.times.FirstToken = u.At
	}
	j.usage.CompletionTokens++
	if u.Finish == "" {
		j.updates = append(j.updates, u)
		j.news()
	}
}

// news wakes who waits. The lock is held.
func (j *Job) news() {
	if j.wake != nil {
		close(j.wake)
		j.wake = nil
	}
}
