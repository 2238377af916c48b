package engine

import (
	"context"
	"errors"
	"fmt"
)

// PauseMode says what becomes of requests when the engine pauses.
type PauseMode string

// The modes have vLLM's names. Requests that come later wait in any of them.
const (
	// PauseAbort ends all requests, running and waiting, with ErrPaused.
	PauseAbort PauseMode = "abort"
	// PauseWait lets running sequences finish. Waiting ones wait on.
	PauseWait PauseMode = "wait"
	// PauseKeep preempts running sequences: they go on after Resume, and what no tier has kept
	// of their KV cache is computed again.
	PauseKeep PauseMode = "keep"
)

// Validate reports an unknown mode.
func (m PauseMode) Validate() error {
	switch m {
	case PauseAbort, PauseWait, PauseKeep:
		return nil
	}
	return fmt.Errorf("engine: pause mode %q; it must be %q, %q or %q", string(m), PauseAbort, PauseWait, PauseKeep)
}

// errResumed: Resume was called before a pause was reached.
var errResumed = errors.New("engine: resumed before it had paused")

// pausing is a pause that was asked for. The engine's lock guards it.
type pausing struct {
	mode PauseMode
	// begun: the mode was applied to the requests that there were.
	begun bool
	// reached: no step runs, and no sequence and no copy has KV blocks.
	reached bool
	// ended is closed once the pause is reached, or ended before, with err.
	ended chan struct{}
	err   error
	// applied, of a pause that is reached, is closed once the mode of a later call was applied, or the pause has ended
	// before, with resumed set; nil without such a call.
	applied chan struct{}
	resumed bool
}

// Pause has the engine run no step until Resume. It returns when no step runs, no sequence has KV
// blocks, all copies of KV blocks have ended, and the pool's cached prefixes are dropped: then
// the memory of the pool is not used. Requests that are submitted meanwhile wait. A second call
// with another mode applies that mode, too. Where ctx is done first the engine runs on.
func (e *Engine) Pause(ctx context.Context, mode PauseMode) error {
	if err := mode.Validate(); err != nil {
		return err
	}
	e.mu.Lock()
	if e.stopped {
		e.mu.Unlock()
		return fmt.Errorf("engine: pause: %w", ErrStopped)
	}
	if e.pausing == nil {
		e.pausing = &pausing{ended: make(chan struct{})}
	}
	p := e.pausing
	if p.mode != mode {
		p.mode, p.begun = mode, false
		if p.reached && p.applied == nil {
			p.applied = make(chan struct{})
		}
	}
	done, applied := p.ended, p.applied
	if applied != nil {
		done = applied
	}
	e.mu.Unlock()
	e.wakeUp()
	select {
	case <-done:
	case e.running <- struct{}{}: // nobody else would notice the pause
		err := e.settle(ctx)
		e.running.Unlock()
		if err != nil {
			e.Resume()
			return fmt.Errorf("engine: pause: %w", err)
		}
	case <-ctx.Done():
		if e.resume(false) || applied != nil {
			return fmt.Errorf("engine: pause: %w", ctx.Err())
		}
	}
	<-done
	e.mu.Lock()
	defer e.mu.Unlock()
	if applied != nil && p.resumed {
		return errResumed
	}
	return p.err
}

// Resume ends a pause, also one that is not reached yet. Without one it does nothing.
func (e *Engine) Resume() { e.resume(true) }

// resume ends a pause, and reports whether it does: one that is reached, maybe for another caller, only
// with that set.
func (e *Engine) resume(reached bool) bool {
	e.mu.Lock()
	p := e.pausing
	if p != nil && p.reached && !reached {
		e.mu.Unlock()
		return false
	}
	e.pausing = nil
	if p != nil && !p.reached {
		p.err = errResumed
		close(p.ended)
	}
	if p != nil && p.applied != nil {
		p.resumed = true
		close(p.applied)
		p.applied = nil
	}
	e.state.Paused = false
	e.mu.Unlock()
	e.wakeUp()
	return true
}

// settle carries a pause out in the goroutine that has called Pause.
func (e *Engine) settle(ctx context.Context) error {
	for {
		e.takeIn()
		e.takeLoaded()
		if e.hold(); e.paused() || !e.asked() {
			return nil
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		if e.prefixes.tiers == nil {
			return errors.New("requests are under way that no call of Run or Generate runs")
		}
		if err := e.prefixes.wait(ctx); err != nil {
			return err
		}
	}
}

// asked reports whether a pause was asked for and not ended.
func (e *Engine) asked() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.pausing != nil
}

// paused reports whether the engine has paused.
func (e *Engine) paused() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.pausing != nil && e.pausing.reached
}

// hold carries out a pause, if one was asked for, as far as that is possible now. True: no step is
// to be run.
func (e *Engine) hold() bool {
	e.mu.Lock()
	p := e.pausing
	var mode PauseMode
	begin := false
	if p != nil {
		mode, begin = p.mode, !p.begun
		p.begun = true
	}
	e.mu.Unlock()
	e.sched.HoldAdmission(p != nil)
	if p == nil {
		return false
	}
	switch {
	case mode == PauseAbort && begin:
		for id, q := range e.seqs {
			e.abort(id, q, fmt.Errorf("engine: %w", ErrPaused))
		}
	case mode == PauseKeep:
		for _, id := range e.sched.PreemptAll() {
			q := e.seqs[id]
			e.o.Log.Debug("sequence preempted: the model pauses", "request", q.sub.req.ID, "sample", q.sample, "tokens", len(q.tokens))
		}
	}
	if e.sched.Running() > 0 || e.sched.Loading() > 0 {
		return false
	}
	e.prefixes.releasePrompts()
	e.deliver()
	idle := e.prefixes.tiers == nil || !e.prefixes.tiers.Busy()
	if idle {
		e.o.KV.DropCached()
	}
	e.publish() // before Pause returns, whose callers read the state
	if idle {
		e.mu.Lock()
		if e.pausing == p && !p.reached {
			p.reached, e.state.Paused = true, true
			close(p.ended)
		}
		if p.applied != nil && p.begun {
			close(p.applied)
			p.applied = nil
		}
		e.mu.Unlock()
	}
	return true
}

// turnstile lets one call of Run, Generate, Pause or Close use the engine at a time.
type turnstile chan struct{}

func (t turnstile) Lock()   { t <- struct{}{} }
func (t turnstile) Unlock() { <-t }
