package turns

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"
)

// Took is how long a sleep or a wake took, without the wait for running requests, and its copies.
type Took struct{ Total, Copies time.Duration }

// Model is one of the models.
type Model interface {
	// Load is that of now, from any goroutine.
	Load() Load
	// Sleep admits no more requests, and puts the model to sleep when those that run have
	// finished, or, once hurry is closed, are preempted. After an error the model is awake.
	Sleep(ctx context.Context, hurry <-chan struct{}) (Took, error)
	// Wake wakes it. After an error it sleeps.
	Wake(ctx context.Context) (Took, error)
}

// Options of a Runner.
type Options struct {
	Limits
	// Models, of which Awake is awake and all others sleep; Names are theirs, in messages.
	Models []Model
	Names  []string
	Awake  int
	// Switched, if not nil, is called after each switch from one model to another, with how long the
	// sleep and the wake took together.
	Switched func(Took)
	// Log receives failures, and switches at debug. Default: none.
	Log *slog.Logger
}

// Validate reports the first invalid option.
func (o Options) Validate() error {
	switch {
	case len(o.Models) < 2 || len(o.Names) != len(o.Models):
		return fmt.Errorf("turns: %d models with %d names; two at least take turns", len(o.Models), len(o.Names))
	case o.Awake < 0 || o.Awake >= len(o.Models):
		return fmt.Errorf("turns: model %d of %d is awake", o.Awake, len(o.Models))
	case o.Turn <= 0 || o.Linger < 0 || o.Retry < 0:
		return errors.New("turns: Turn must be positive, Linger and Retry not negative")
	}
	return nil
}

// State is that of turns. It has a JSON form.
type State struct {
	// Awake is the name of the model that is awake; empty while one goes to sleep or wakes.
	Awake string `json:"awake"`
	// Models are all of them.
	Models []ModelState `json:"models"`
	// Switches from one model to another, Failures of a sleep or a wake.
	Switches int64 `json:"switches"`
	Failures int64 `json:"failures"`
	// SwitchSeconds is how long the latest switch took, without the wait for running requests,
	// CopySeconds the part of it in which weights were copied.
	SwitchSeconds float64 `json:"last_switch_s"`
	CopySeconds   float64 `json:"last_switch_copy_s"`
}

// ModelState is the load of one model.
type ModelState struct {
	Model   string `json:"model"`
	Running int    `json:"running"`
	Waiting int    `json:"waiting"`
}

// Runner carries out what a Core decides.
type Runner struct {
	o      Options
	notify chan struct{} // capacity 1
	began  time.Time

	mu    sync.Mutex
	state State
	awake int // -1: none
}

// poll is how often loads are looked at while requests wait for a model that sleeps.
const poll = 5 * time.Millisecond

// NewRunner makes a runner; Run runs it.
func NewRunner(o Options) (*Runner, error) {
	o.Limits = o.Limits.EnsureDefaults()
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if err := o.Validate(); err != nil {
		return nil, err
	}
	return &Runner{o: o, notify: make(chan struct{}, 1), began: time.Now(), awake: o.Awake}, nil
}

// Notify tells that a request has come.
func (r *Runner) Notify() {
	select {
	case r.notify <- struct{}{}:
	default:
	}
}

// State is the present one.
func (r *Runner) State() State {
	r.mu.Lock()
	s := r.state
	if r.awake >= 0 {
		s.Awake = r.o.Names[r.awake]
	}
	r.mu.Unlock()
	for i, l := range r.loads() {
		s.Models = append(s.Models, ModelState{r.o.Names[i], l.Running, l.Waiting})
	}
	return s
}

func (r *Runner) loads() []Load {
	all := make([]Load, len(r.o.Models))
	for i, m := range r.o.Models {
		all[i] = m.Load()
	}
	return all
}

// ended is the end of a sleep or a wake.
type ended struct {
	kind Kind
	took Took
	err  error
}

// Run carries turns out until ctx is done. It returns when no sleep or wake is under way.
func (r *Runner) Run(ctx context.Context) {
	now := func() time.Duration { return time.Since(r.began) }
	core := NewCore(r.o.Limits, len(r.o.Models), r.o.Awake, now())
	done := make(chan ended, 1)
	var hurry chan struct{}
	var slept Took
	var from, under int // under counts what is under way: 0 or 1
	for {
		loads := r.loads()
		a := core.Decide(now(), loads)
		r.publish(core.Awake())
		switch a.Kind {
		case Nothing:
		case Sleep:
			hurry, from, under = make(chan struct{}), a.Model, 1
			go func() {
				took, err := r.o.Models[a.Model].Sleep(ctx, hurry)
				done <- ended{Sleep, took, err}
			}()
		case Hurry:
			close(hurry)
		case Wake:
			under = 1
			go func() {
				took, err := r.o.Models[a.Model].Wake(ctx)
				done <- ended{Wake, took, err}
			}()
		}
		wait := time.Duration(-1)
		if a.At >= 0 {
			wait = max(a.At-now(), 0)
		}
		if waiting(loads, core.Awake()) && (wait < 0 || wait > poll) {
			wait = poll
		}
		select {
		case <-ctx.Done():
			if under > 0 {
				<-done
			}
			return
		case <-r.notify:
		case <-after(wait):
		case e := <-done:
			under = 0
			if ctx.Err() != nil {
				return
			}
			if e.err != nil {
				r.failed(e, core)
			}
			if e.kind == Sleep {
				slept = e.took
				core.Slept(now(), e.err == nil)
				continue
			}
			if core.Woken(now(), e.err == nil); e.err == nil {
				r.switched(from, core.Awake(), slept, e.took)
			}
		}
	}
}

// after is time.After, and never of a negative duration.
func after(d time.Duration) <-chan time.Time {
	if d < 0 {
		return nil
	}
	return time.After(d)
}

// waiting reports whether a model other than the one that is awake has requests.
func waiting(loads []Load, awake int) bool {
	for i, l := range loads {
		if i != awake && l.any() {
			return true
		}
	}
	return false
}

func (r *Runner) publish(awake int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.awake = awake
}

func (r *Runner) failed(e ended, core *Core) {
	r.mu.Lock()
	r.state.Failures++
	r.mu.Unlock()
	what, model := "model not put to sleep; it is tried again", core.model
	if e.kind == Wake {
		what = "model not woken; it is tried again"
	}
	r.o.Log.Warn(what, "model", r.o.Names[model], "after_s", r.o.Retry.Seconds(), "err", e.err)
}

// switched counts a switch.
func (r *Runner) switched(from, to int, slept, woken Took) {
	total, copies := slept.Total+woken.Total, slept.Copies+woken.Copies
	if r.o.Switched != nil {
		r.o.Switched(Took{total, copies})
	}
	r.mu.Lock()
	r.state.Switches++
	r.state.SwitchSeconds, r.state.CopySeconds = total.Seconds(), copies.Seconds()
	r.mu.Unlock()
	r.o.Log.Debug("models switched", "from", r.o.Names[from], "to", r.o.Names[to], "sleep_s", slept.Total.Seconds(), "wake_s", woken.Total.Seconds(), "copy_s", copies.Seconds())
}
