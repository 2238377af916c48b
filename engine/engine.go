package engine

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/moeserve/moeserve/engine/scheduler"
	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/models/tokenizer"
	"github.com/moeserve/moeserve/pipeline"
)

// Stepper runs steps. *pipeline.Pipeline is one.
type Stepper interface {
	// Step runs s to its end. After pipeline.ErrDeviceLost no step can run, after
	// pipeline.ErrStepFailed the same one can run again, and after a *pipeline.SequenceError
	// the same one without that sequence.
	Step(ctx context.Context, s *pipeline.Step) (pipeline.Result, error)
	// Discard waits for the end of a step that the latest one has enqueued ahead (pipeline.Result.Ahead), which no
	// call of Step will follow.
	Discard(ctx context.Context) error
}

// Lender lends memory of the KV cache that is worth more elsewhere, and takes it back.
// *lending.Lender is one. The engine's goroutine calls its methods.
type Lender interface {
	// Turn is called between steps, before each is planned, with how many blocks the first waiting
	// request needs if it waits for them, else 0, and the number of running sequences.
	Turn(lacking, running int)
	// Computed reports that so many tokens of prompts took so many seconds.
	Computed(tokens int, seconds float64)
}

// Pace limits the prompt tokens of steps that also decode, by how long steps have taken.
// *steptime.Pace is one. The engine's goroutine calls its methods.
type Pace interface {
	scheduler.Pace
	// Measured reports the time of a step, in seconds: from the end of the step before, where the
	// engine was not idle in between.
	Measured(m scheduler.Mix, seconds float64)
}

// Options of an engine.
type Options struct {
	// Pipeline runs the steps. KV manages the blocks of the KV cache that they use.
	Pipeline Stepper
	KV       *kvcache.Manager
	// Tokenizer detokenizes updates. Without it updates have no text, and requests with
	// stop strings are rejected.
	Tokenizer tokenizer.Tokenizer
	// MaxModelLen is the maximum number of tokens of a sequence, prompt and completion.
	MaxModelLen int
	// MaxNumSeqs is the maximum number of running sequences. Default: 256.
	MaxNumSeqs int
	// MaxNumBatchedTokens is the maximum number of tokens of a step. Default: 2048.
	MaxNumBatchedTokens int
	// Scheduling decides which requests come first, and which are preempted. Default: first
	// come, first served; of fair scheduling, a granularity of 64 tokens.
	Scheduling scheduler.Policy
	// Pace limits the prompt tokens of steps that also decode. Default: none.
	Pace Pace
	// MaxAdjust is the maximum number of logits that a step changes for penalties,
	// biases and bans: see forward.Limits. Default: 2^20.
	MaxAdjust int
	// MaxQueued is the maximum number of waiting samples. Default: 0, no limit.
	MaxQueued int
	// LongAfter is longrope's original maximum position: a sequence that grows past it is
	// computed again with the long factors. 0: no longrope.
	LongAfter int
	// PrefixCaching lets sequences that begin alike share KV blocks, also after the end of those
	// that computed them.
	PrefixCaching bool
	// Offload keeps KV blocks in other tiers. Default: none.
	Offload Offloader
	// KVEvents gets what KV and Offload stored and removed, which then both record events (ManagerOptions.Events
	// and offload.Options.Events), one call after another and in order. It must not block. Default: none.
	KVEvents func([]kvcache.Event)
	// Lender lends memory of the KV cache to others. Default: none.
	Lender Lender
	// KeySalt is what the KV cache depends on besides tokens and their positions, such as its
	// data type: blocks of engines with different salts have different keys.
	KeySalt string
	// Vocab is the vocabulary size of the model.
	Vocab int
	// StopIDs, the model's, end every request that does not ignore them. Ids outside the
	// vocabulary, which no step samples, are dropped with a warning.
	StopIDs []int32
	// RetryTimeout is the maximum sum of the pauses after which a step whose copies failed is
	// retried. Then its requests end with ErrUnavailable. Default: 30 s.
	RetryTimeout time.Duration
	// Listener is called after steps and requests; it must not block.
	Listener Listener
	// Now is the clock of requests' times. Default: time.Now.
	Now func() time.Time
	// Clock is the clock of the devices, by which Offload compares computing with loading.
	// Default: that of Now.
	Clock func() time.Duration
	// Pause waits for d, or until ctx is done, whose error it returns. Default: by the wall
	// clock.
	Pause func(ctx context.Context, d time.Duration) error
	// Log receives messages for operators. Default: none.
	Log *slog.Logger
}

// EnsureDefaults returns o with its defaults filled in.
func (o Options) EnsureDefaults() Options {
	if o.MaxNumSeqs == 0 {
		o.MaxNumSeqs = 256
	}
	if o.MaxNumBatchedTokens == 0 {
		o.MaxNumBatchedTokens = 2048
	}
	if o.Scheduling.Order == scheduler.Fair && o.Scheduling.Granularity == 0 {
		o.Scheduling.Granularity = 64
	}
	if o.MaxAdjust == 0 {
		o.MaxAdjust = 1 << 20
	}
	if o.RetryTimeout == 0 {
		o.RetryTimeout = 30 * time.Second
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Clock == nil {
		start := o.Now()
		o.Clock = func() time.Duration { return o.Now().Sub(start) }
	}
	if o.Pause == nil {
		o.Pause = pause
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return o
}

// pause is the default of Options.Pause.
func pause(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
	return ctx.Err()
}

// Validate reports the first invalid option.
func (o Options) Validate() error {
	switch {
	case o.Pipeline == nil:
		return errors.New("engine: Options.Pipeline is nil")
	case o.KV == nil:
		return errors.New("engine: Options.KV is nil")
	}
	for _, f := range []struct {
		name       string
		value, min int
	}{
		{"MaxModelLen", o.MaxModelLen, 1},
		{"MaxNumSeqs", o.MaxNumSeqs, 1},
		{"MaxNumBatchedTokens", o.MaxNumBatchedTokens, 1},
		{"Scheduling.Granularity", o.Scheduling.Granularity, 0},
		{"MaxAdjust", o.MaxAdjust, 1},
		{"MaxQueued", o.MaxQueued, 0},
		{"LongAfter", o.LongAfter, 0},
		{"Vocab", o.Vocab, 1},
		{"RetryTimeout", int(o.RetryTimeout), 1},
	} {
		if f.value < f.min {
			return fmt.Errorf("engine: %s is %d; it must be at least %d", f.name, f.value, f.min)
		}
	}
	return nil
}

// Listener has callbacks of the engine; nil ones are not called. RequestFinished may be
// called while a step runs, concurrently with StepFinished.
type Listener struct {
	StepFinished    func(StepInfo)
	RequestFinished func(RequestInfo)
}

// StepInfo describes a finished step.
type StepInfo struct {
	// Tokens computed, of how many Sequences, and new tokens Sampled.
	Tokens, Sequences, Sampled int
	// Duration by the wall clock, failed attempts included.
	Duration time.Duration
	// Mix is what was computed, by which predictions are made.
	Mix scheduler.Mix
}

// RequestInfo describes a finished request.
type RequestInfo struct {
	ID     string
	Usage  Usage
	Times  Times
	Finish []FinishReason // of each sample
	Err    error
}

// State is the engine's present load, and its counters since New.
type State struct {
	// Running and Waiting samples; those whose KV blocks are being loaded wait.
	Running, Waiting int
	// KVUsedBlocks of KVBlocks KV blocks, each of BlockTokens tokens, those left out that are
	// lent to other uses now. KVMaxBlocks counts these, too, and does not change.
	KVUsedBlocks, KVBlocks, KVMaxBlocks, BlockTokens int
	// Preemptions of sequences, Steps finished, and Retried attempts of steps.
	Preemptions, Steps, Retried int64
	// PrefillTokens computed of prompts, those of preempted sequences again, and GeneratedTokens
	// sampled.
	PrefillTokens, GeneratedTokens int64
	// PrefixCacheQueries are the prompt tokens of admitted requests, each request once, that
	// were looked up in the prefix cache, and PrefixCacheHits those found.
	PrefixCacheQueries, PrefixCacheHits int64
	// ExternalQueries are those of the queries that were not found, and looked up in other
	// tiers, and ExternalHits those loaded.
	ExternalQueries, ExternalHits int64
	// Paused: no step runs, and requests wait, see Engine.Pause.
	Paused bool
	// Failing is why the present step fails, where it has been retried for longer than a
	// second.
	Failing error
}

// Engine runs requests. All methods are safe for concurrent use; Run and Generate exclude
// each other.
type Engine struct {
	o        Options
	prefixes *prefixes
	sched    *scheduler.Scheduler
	seqs     map[scheduler.ID]*sequence
	next     scheduler.ID
	// running is held by the active call of Run or Generate, and then by Close; else by a Pause.
	running turnstile
	// batch is the present step's.
	batch batch
	// stepEnded is when the step before ended, by the devices' clock; -1: the engine was idle since. ended is that by Now.
	stepEnded time.Duration
	ended     time.Time
	// ahead: the device already computes the next token of so many sequences, those that still run among them.
	// aheadPartial: what it computes of these is used also where others have ended.
	ahead        int
	aheadPartial bool
	// serving: Run is active, where requests come and go at any time, so that nobody expects the same batches again.
	serving bool
	// updates are those that no job has received yet.
	updates, spareUpdates []delivery
	deliveryDone          chan struct{}
	// masks are those that are being computed.
	masks sync.WaitGroup
	// meanwhile is what steps call while the device computes; nil: there are no tiers.
	meanwhile func()

	mu           sync.Mutex
	wake         chan struct{} // capacity 1
	inbox        []*submission
	inboxSamples int // samples in inbox
	canceled     bool
	// reset drops cached prefixes; resetExternal those of other tiers, too.
	reset, resetExternal bool
	stopped              bool
	pausing              *pausing // nil: no pause was asked for
	state                State
}

// submission is a submitted request.
type submission struct {
	job          *Job
	req          Request
	ctx          context.Context
	adjust       *requestAdjustments
	keys         []kvcache.Key   // of the prompt's full blocks; nil without prefix caching
	resets       uint64          // prefixes.resets when it came
	prompt       *promptLogProbs // nil: they were not asked for
	limit        int             // maximum tokens of a sample, prompt included
	unfinished   int             // unfinished samples
	finish       []FinishReason
	stopWatching func() bool
}

// ahead is the number of generated tokens for which a sample has memory from the start, so that most
// steps allocate none.
func (s *submission) ahead() int { return min(s.limit-len(s.req.Prompt), 1024) }

// delivery is an update on its way to a job.
type delivery struct {
	pendingUpdate
	seq *sequence
	// needsText: the update is not detokenized yet. stop: its token is a stop id, which
	// has no text.
	needsText, stop bool
	// last update of the request, with err where it failed.
	last bool
	err  error
}

// sequence is one waiting or running sample.
type sequence struct {
	sub     *submission
	sample  int
	tokens  []int32 // prompt and sampled
	sampled int
	long    bool
	blocks  blocks
	// started: it was admitted; first: the present admission is its request's first.
	started, first bool
	text           *detokenizer
	adjust         adjustments
	constraint     *constraint // nil: there is none
}

// New returns an engine; the caller closes it.
func New(o Options) (*Engine, error) {
	o = o.EnsureDefaults()
	if err := o.Validate(); err != nil {
		return nil, err
	}
	outside := func(id int32) bool { return id < 0 || int(id) >= o.Vocab }
	if slices.ContainsFunc(o.StopIDs, outside) {
		o.Log.Warn("the model's eos_token_id has ids outside its vocabulary, which are ignored", "eos_token_id", o.StopIDs, "vocab_size", o.Vocab)
		o.StopIDs = slices.DeleteFunc(slices.Clone(o.StopIDs), outside)
	}
	e := &Engine{
		o:            o,
		prefixes:     newPrefixes(&o),
		seqs:         map[scheduler.ID]*sequence{},
		running:      make(turnstile, 1),
		wake:         make(chan struct{}, 1),
		deliveryDone: make(chan struct{}),
		stepEnded:    -1,
		state:        State{KVBlocks: o.KV.Blocks(), KVMaxBlocks: o.KV.Blocks(), BlockTokens: o.KV.BlockTokens()},
	}
	limits := scheduler.Limits{StepTokens: o.MaxNumBatchedTokens, Sequences: o.MaxNumSeqs, CacheTokens: o.KV.Capacity()}
	if o.Pace != nil {
		limits.Pace = o.Pace
	}
	e.sched = scheduler.New(limits, o.Scheduling)
	if o.Offload != nil {
		e.meanwhile = e.prefixes.meanwhile
		o.Offload.OnLost(e.wakeUp) // also an idle engine polls
	}
	return e, nil
}

// State returns the present state.
func (e *Engine) State() State {
	e.mu.Lock()
	defer e.mu.Unlock()
	s := e.state
	s.Waiting += e.inboxSamples
	return s
}

// Submit queues a request. When ctx is done its samples end with FinishAbort.
// Errors: ErrStopped, ErrQueueFull, ErrPromptTooLong, ErrBadRequest (a *ParamError
// where a parameter is invalid).
func (e *Engine) Submit(ctx context.Context, r Request) (*Job, error) {
	s, err := e.admissible(r)
	if err != nil {
		return nil, err
	}
	if err := e.enqueue(ctx, s); err != nil {
		return nil, err
	}
	return s.job, nil
}

// enqueue puts an admissible request into the inbox.
func (e *Engine) enqueue(ctx context.Context, s *submission) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	// Samples that the next step can admit do not count as waiting.
	ahead := e.inboxSamples + e.state.Waiting - (e.o.MaxNumSeqs - e.state.Running)
	switch {
	case e.stopped:
		return fmt.Errorf("engine: %w", ErrStopped)
	case e.o.MaxQueued > 0 && ahead+s.unfinished > max(e.o.MaxQueued, s.unfinished):
		return fmt.Errorf("engine: %w: %d are waiting, at most %d may", ErrQueueFull, ahead, e.o.MaxQueued)
	}
	s.ctx = ctx
	e.inbox = append(e.inbox, s)
	e.inboxSamples += s.unfinished
	s.stopWatching = context.AfterFunc(ctx, func() {
		e.mu.Lock()
		e.canceled = true
		e.mu.Unlock()
		e.wakeUp()
	})
	e.wakeUp()
	return nil
}

func (e *Engine) wakeUp() {
	select {
	case e.wake <- struct{}{}:
	default:
	}
}

// admissible returns the submission of a request, or an error if the request could never
// run. The request's arrival time is now.
func (e *Engine) admissible(r Request) (*submission, error) {
	if err := r.Params.Validate(e.o.Vocab); err != nil {
		return nil, fmt.Errorf("engine: %w", err)
	}
	if len(r.Params.Stop) > 0 && e.o.Tokenizer == nil {
		return nil, fmt.Errorf("engine: %w", &ParamError{"stop", "given", "absent: this model has no tokenizer, which stop strings need"})
	}
	if want := e.o.Scheduling.WantedPriority(r.Priority); want != "" {
		return nil, fmt.Errorf("engine: %w", &ParamError{"priority", r.Priority, want})
	}
	if len(r.CacheSalt) > MaxCacheSaltBytes {
		return nil, fmt.Errorf("engine: %w", &ParamError{"cache_salt", fmt.Sprintf("a string of %d bytes", len(r.CacheSalt)), fmt.Sprintf("at most %d bytes", MaxCacheSaltBytes)})
	}
	if len(r.Prompt) == 0 {
		return nil, fmt.Errorf("engine: %w: the prompt has no tokens; at least one is needed", ErrBadRequest)
	}
	if len(r.Prompt)+min(r.Params.MaxTokens, 1) > e.o.MaxModelLen {
		return nil, fmt.Errorf("engine: %w: it has %d tokens, and the maximum model length is %d, completion included; shorten the prompt, or raise --max-model-len if the model allows it",
			ErrPromptTooLong, len(r.Prompt), e.o.MaxModelLen)
	}
	if g := r.Params.Grammar; g != nil && g.Words() != (e.o.Vocab+31)/32 {
		return nil, fmt.Errorf("engine: %w: the grammar's vocabulary is not that of the model", ErrBadRequest)
	}
	for i, id := range r.Prompt {
		if id < 0 || int(id) >= e.o.Vocab {
			why := ""
			if r.Encoded {
				why = "; the tokenizer does not match the model"
			}
			return nil, fmt.Errorf("engine: %w: prompt token %d has id %d, the vocabulary is 0 to %d%s", ErrBadRequest, i, id, e.o.Vocab-1, why)
		}
	}
	// A sum could overflow, the difference cannot.
	limit := e.o.MaxModelLen
	if r.Params.MaxTokens < limit-len(r.Prompt) {
		limit = len(r.Prompt) + r.Params.MaxTokens
	}
	if have := e.o.KV.Capacity(); limit > have {
		return nil, fmt.Errorf("engine: %w: prompt and completion need %d tokens, the KV cache holds %d; lower max_tokens, or give the KV cache more memory (--gpu-memory-utilization, --offload-fraction)", ErrPromptTooLong, limit, have)
	}
	s := &submission{
		job: newJob(e.o.Now(), len(r.Prompt)), req: r, limit: limit, unfinished: r.Params.N, finish: make([]FinishReason, r.Params.N),
		prompt: newPromptLogProbs(&r),
	}
	stop := e.o.StopIDs
	if r.Params.IgnoreEOS {
		stop = nil
	}
	s.adjust = newAdjustments(&s.req.Params, r.Prompt, stop, e.o.Vocab)
	if e.prefixes.keyed(&r) {
		s.resets = e.prefixes.resets.Load()
		s.keys = e.prefixes.promptKeys(r.CacheSalt, s.resets, r.Prompt, s.ahead())
	}
	return s, nil
}

// Close rejects new requests and waits until an active Run or Generate has finished those
// submitted before. Requests that no call runs, or that wait for the end of a pause, end with
// FinishAbort.
func (e *Engine) Close() error {
	e.mu.Lock()
	e.stopped = true
	e.mu.Unlock()
	e.wakeUp()
	e.running.Lock()
	defer e.running.Unlock()
	e.abortAll(nil)
	e.masks.Wait()
	return nil
}

// Run runs requests until ctx is done, which aborts the unfinished ones, or until Close
// was called and all have finished; in both cases it returns nil. An error means that no
// step can run any more, since the compute device is lost: all requests have ended with it,
// and new ones are rejected.
func (e *Engine) Run(ctx context.Context) error {
	e.running.Lock()
	defer e.running.Unlock()
	e.serving = true
	defer func() { e.serving = false }()
	for {
		worked, err := e.runStep(ctx)
		switch {
		case ctx.Err() != nil:
			e.abortAll(nil)
			return nil
		case err != nil:
			e.abortAll(err)
			return err
		case worked:
			continue
		}
		e.mu.Lock()
		idle := e.stopped && len(e.inbox) == 0 && len(e.seqs) == 0
		never := e.stopped && e.state.Paused
		e.mu.Unlock()
		if never {
			e.abortAll(nil)
		}
		if idle || never {
			return nil
		}
		if err := e.idle(ctx); err != nil {
			e.abortAll(err)
			return err
		}
	}
}

// idle waits until there may be something to compute, or ctx is done, or a transfer of KV blocks
// has ended: sequences may wait for its blocks, and it holds them.
func (e *Engine) idle(ctx context.Context) error {
	if e.prefixes.tiers == nil || (len(e.seqs) == 0 || e.paused()) && !e.prefixes.tiers.Busy() {
		select {
		case <-e.wake:
		case <-ctx.Done():
		}
		return nil
	}
	waiting, cancel := context.WithCancel(ctx)
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- e.prefixes.wait(waiting) }()
	select {
	case <-e.wake:
		cancel()
		return <-ended
	case err := <-ended:
		return err
	}
}

// Output is the result of one sample of a request that Generate ran.
type Output struct {
	// Tokens generated, a final stop id included.
	Tokens       []Token
	TokenIDs     []int32
	Text         string
	FinishReason FinishReason
}

// Generate runs requests in the caller's goroutine, without Run, and returns an output
// per sample, in the order of the requests. onUpdate may be nil; it is called with each
// update and the index of its output, and the update's Tokens are valid during the call.
// If one request is not admissible, none runs; if one fails, the others are aborted. When
// ctx is done the error is ctx.Err().
func (e *Engine) Generate(ctx context.Context, requests []Request, onUpdate func(output int, u Update)) ([]Output, error) {
	e.running.Lock()
	defer e.running.Unlock()
	e.stepEnded = -1
	subs := make([]*submission, len(requests))
	for i, r := range requests {
		var err error
		if subs[i], err = e.admissible(r); err != nil {
			if len(requests) > 1 {
				err = fmt.Errorf("request %d: %w", i, err)
			}
			return nil, err
		}
	}
	// A context of their own ends all requests when this call returns, for any reason.
	own, cancel := context.WithCancel(ctx)
	defer func() {
		cancel()
		_ = e.discard(context.WithoutCancel(ctx)) // a lost device is found by the next step
		e.mu.Lock()
		e.canceled = true // cancel itself sets it only later
		e.mu.Unlock()
		e.takeIn()
		e.deliver()
	}()
	var outs []Output
	first := make([]int, len(subs))
	for i, s := range subs {
		if err := e.enqueue(own, s); err != nil {
			return nil, err
		}
		first[i] = len(outs)
		outs = append(outs, make([]Output, s.unfinished)...)
	}
	var waiting []pendingUpdate
	token := make([]Token, 1)
	for left := len(outs); left > 0; {
		if err := ctx.Err(); err != nil {
			return nil, fmt.Errorf("engine: %w", err)
		}
		worked, err := e.runStep(ctx)
		switch {
		case err != nil || worked:
		case e.asked():
			e.deliver()
			err = e.idle(ctx)
		case len(e.seqs) > 0 && e.prefixes.tiers != nil:
			err = e.prefixes.wait(ctx)
		}
		if err != nil {
			return nil, err
		}
		e.deliver()
		for i, s := range subs {
			waiting = s.job.takeAll(waiting)
			for k := range waiting {
				u := waiting[k].update(token)
				o := &outs[first[i]+u.Sample]
				if onUpdate != nil {
					onUpdate(first[i]+u.Sample, u)
				}
				for _, t := range u.Tokens {
					o.Tokens, o.TokenIDs = append(o.Tokens, t), append(o.TokenIDs, t.ID)
				}
				o.Text += u.Text
				if u.Finish != "" {
					o.FinishReason = u.Finish
					left--
				}
			}
			if err := s.job.failure(); err != nil {
				return nil, err
			}
		}
	}
	return outs, nil
}

// runStep admits new requests and runs one step, if there is anything to compute.
func (e *Engine) runStep(ctx context.Context) (worked bool, err error) {
	if n := e.sched.Running(); e.ahead > n && (n == 0 || !e.aheadPartial) {
		e.deliver() // what those get that have ended
		if err := e.discard(ctx); err != nil {
			return false, err
		}
	}
	// A step that is under way already is of those that run: nobody joins it, and no load gets a block before it has ended.
	if e.ahead == 0 {
		e.takeIn()
		e.takeLoaded()
	}
	// What tiers have stored meanwhile comes before what the plan removes from the GPU: routers forget a
	// block that they know in no medium.
	e.publishEvents()
	if e.ahead == 0 {
		if e.hold() {
			e.stepEnded = -1
			return false, nil
		}
		if e.o.Lender != nil {
			e.o.Lender.Turn(e.sched.Lacking(), e.sched.Running())
		}
	}
	plan := e.sched.Plan()
	for _, id := range plan.Preempted {
		q := e.seqs[id]
		if e.o.Scheduling.Order == scheduler.Fair {
			e.o.Log.Debug("sequence preempted: others are behind", "request", q.sub.req.ID, "sample", q.sample, "tokens", len(q.tokens))
			continue
		}
		e.o.Log.Info("sequence preempted: KV cache full", "request", q.sub.req.ID, "sample", q.sample, "tokens", len(q.tokens))
	}
	now := e.o.Now()
	for _, id := range plan.Admitted {
		if !slices.Contains(plan.Preempted, id) { // by the same plan: it waits again
			e.admitted(e.seqs[id], now)
		}
	}
	for _, l := range plan.Loads {
		e.startLoad(l.ID)
	}
	e.publish()
	if len(plan.Chunks) == 0 {
		e.stepEnded = -1
		e.deliver()
		e.prefixes.storeFilled()
		// Blocks of prompts that samples have yet to fork may be what others lack.
		released := e.sched.Loading() == 0 && e.o.KV.Held() == 0 && e.prefixes.releasePrompts()
		return released, nil
	}
	err = e.step(ctx, plan.Chunks)
	e.publish()
	return true, err
}

// takeIn adds submitted requests to the scheduler, and aborts those whose context is done.
// It takes both together: a request that is canceled later is dropped by the next call, one
// that was canceled before is among those taken.
func (e *Engine) takeIn() {
	e.mu.Lock()
	subs, canceled, reset, external := e.inbox, e.canceled, e.reset, e.resetExternal
	e.state.Waiting += e.inboxSamples // until publish counts them: State must not miss them meanwhile
	e.inbox, e.inboxSamples, e.canceled, e.reset, e.resetExternal = nil, 0, false, false, false
	e.mu.Unlock()
	if reset {
		e.o.KV.DropCached()
	}
	if external && e.prefixes.tiers != nil {
		e.prefixes.tiers.Reset()
	}
	for _, s := range subs {
		var samples *group
		if n := s.req.Params.N; n > 1 {
			samples = &group{tokens: len(s.req.Prompt), prompt: e.o.KV.NewTable(), left: n}
		}
		for i := range s.req.Params.N {
			q := &sequence{
				sub: s, sample: i, tokens: append(make([]int32, 0, len(s.req.Prompt)+s.ahead()), s.req.Prompt...), long: e.prefixes.long(len(s.req.Prompt)),
				blocks: blocks{Table: e.o.KV.NewTable(), in: e.prefixes, alone: e.prefixes.alone(&s.req), group: samples, prompt: s.prompt},
			}
			keys := s.keys
			if s.req.Params.N > 1 {
				keys = slices.Clip(keys) // each appends its own
			}
			e.identify(q, keys)
			if e.o.Tokenizer != nil {
				text := e.o.Tokenizer.NewStream(!s.req.Params.SpecialTokens)
				text.Keep(s.req.Params.KeepIDs)
				if s.req.Continues {
					text.Continue()
				}
				q.text = newDetokenizer(text, s.req.Params.Stop, s.req.Params.IncludeStop)
				if s.req.Params.Ends != nil {
					q.text.ends = s.req.Params.Ends()
				}
			}
			q.adjust = s.adjust.sample()
			if g := s.req.Params.Grammar; g != nil {
				q.constraint = &constraint{m: g.Matcher(), stop: s.adjust.stop}
				q.constraint.prepare(&e.masks)
			}
			e.seqs[e.next] = q
			e.sched.Add(e.next, &q.blocks, len(q.tokens), s.limit, s.req.Priority)
			e.next++
		}
	}
	if !canceled {
		return
	}
	for id, q := range e.seqs {
		if q.sub.ctx.Err() != nil {
			e.abort(id, q, nil)
		}
	}
}

// identify sets the keys of a sequence's first blocks. Events have the tokens of those that any request may
// share: a salt keeps prompts from others.
func (e *Engine) identify(q *sequence, keys []kvcache.Key) {
	q.blocks.identify(keys)
	if e.o.KVEvents != nil && q.sub.req.CacheSalt == "" {
		q.blocks.SetTokens(q.tokens)
	}
}

// abortAll ends all requests, with err or, where err is nil, as aborted.
func (e *Engine) abortAll(err error) {
	_ = e.discard(context.Background()) // it logs an error, and all requests end anyway
	e.mu.Lock()
	e.stopped = true
	e.mu.Unlock()
	e.prefixes.last = true
	e.takeIn()
	for id, q := range e.seqs {
		e.abort(id, q, err)
	}
	e.prefixes.releasePrompts()
	e.deliver()
	e.publish()
}

// publishEvents passes on what the KV cache and its tiers have stored and removed.
func (e *Engine) publishEvents() {
	if e.o.KVEvents == nil {
		return
	}
	if events := e.prefixes.events(); len(events) > 0 {
		e.o.KVEvents(events)
	}
}

// publish copies the scheduler's counters to where State reads them, and passes on events.
func (e *Engine) publish() {
	e.publishEvents()
	e.mu.Lock()
	defer e.mu.Unlock()
	e.state.Running, e.state.Waiting = e.sched.Running(), e.sched.Waiting()+e.sched.Loading()
	e.state.KVBlocks = e.o.KV.Present()
	e.state.KVUsedBlocks = e.state.KVBlocks - e.o.KV.Free()
	e.state.Preemptions = e.sched.Preemptions()
}

// step runs the chunks, delivers the updates of earlier steps meanwhile, and then appends
// the new tokens to their sequences. It returns an error only where no step can run any more.
func (e *Engine) step(ctx context.Context, chunks []scheduler.Chunk) error {
	e.batch.compose(chunks, e.seqs, e.o.MaxAdjust)
	defer e.batch.clear()
	before := e.updates
	e.updates, e.spareUpdates = e.spareUpdates, nil
	if len(before) > 0 {
		go func() {
			deliver(before, e.o.Listener.RequestFinished)
			e.deliveryDone <- struct{}{}
		}()
	}
	start, began := e.o.Now(), e.o.Clock()
	if e.ahead > 0 { // the device has begun when the step before ended
		start, began = e.ended, e.stepEnded
	}
	ahead, mayEnd := e.nextIsKnown()
	res, err := e.o.Pipeline.Step(ctx, &pipeline.Step{Sequences: e.batch.sequences, Ahead: ahead, MayEnd: mayEnd, Partial: e.serving, Copies: e.o.KV.Copies(), Meanwhile: e.meanwhile})
	e.ahead, e.aheadPartial = 0, res.AheadPartial
	if err == nil && res.Ahead {
		e.ahead = len(e.batch.sequences)
	}
	if len(before) > 0 {
		<-e.deliveryDone
	}
	e.spareUpdates = before[:0]
	tries, pauses := 1, backoff{limit: e.o.RetryTimeout}
	for ; err != nil; tries++ {
		if err := e.afterFailure(ctx, err, tries, &pauses); err != nil {
			return err
		}
		if len(e.batch.sequences) == 0 {
			e.stepEnded = -1
			e.setFailing(nil)
			return nil
		}
		res, err = e.o.Pipeline.Step(ctx, &pipeline.Step{Sequences: e.batch.sequences, Copies: e.o.KV.Copies(), Meanwhile: e.meanwhile})
	}
	e.prefixes.storeFilled() // if the step has not done so
	e.o.KV.Copied()
	ended := e.o.Clock()
	if e.o.Pace != nil && tries == 1 {
		since := began
		if e.stepEnded >= 0 {
			since = e.stepEnded
		}
		e.o.Pace.Measured(e.batch.mix(), (ended - since).Seconds())
	}
	e.stepEnded, e.ended = ended, e.o.Now()
	tokens, prefill := e.batch.tokens()
	// Steps that mostly decode say little of how long prompts take.
	if n := e.batch.promptTokens(); tries == 1 && n > 0 && 2*n >= tokens {
		e.computed(n, (ended - began).Seconds())
	}
	e.mu.Lock()
	e.state.Steps++
	e.state.PrefillTokens += int64(prefill)
	e.state.GeneratedTokens += int64(len(res.Sampled))
	e.state.Failing = nil
	e.mu.Unlock()
	if e.o.Listener.StepFinished != nil {
		e.o.Listener.StepFinished(StepInfo{Tokens: tokens, Sequences: len(e.batch.sequences), Sampled: len(res.Sampled), Duration: e.ended.Sub(start), Mix: e.batch.mix()})
	}
	e.appendSampled(&res, e.o.Now())
	return nil
}

// computed reports how long prompts take.
func (e *Engine) computed(tokens int, seconds float64) {
	if e.prefixes.tiers != nil {
		e.prefixes.tiers.Computed(tokens, seconds)
	}
	if e.o.Lender != nil {
		e.o.Lender.Computed(tokens, seconds)
	}
}

// afterFailure prepares the batch to run again after an error: it ends the requests that
// failed, or waits where copies failed. It returns an error where no step can run any more.
func (e *Engine) afterFailure(ctx context.Context, cause error, tries int, pauses *backoff) error {
	n := e.state.Steps // which this goroutine alone changes
	var own *pipeline.SequenceError
	switch {
	case ctx.Err() != nil, errors.Is(cause, pipeline.ErrDeviceLost):
		return fmt.Errorf("engine: step %d: %w", n, cause)
	case errors.As(cause, &own):
		e.failAlone(e.batch.chunks[own.Index].seq, fmt.Errorf("engine: step %d: %w", n, own.Err))
	case errors.Is(cause, pipeline.ErrStepFailed):
		d, again := pauses.next()
		if !again {
			e.failBatch(fmt.Errorf("engine: %w: step %d failed %d times in %v: %w", ErrUnavailable, n, tries, pauses.spent, cause))
			break
		}
		e.o.Log.Warn("retrying step", "step", n, "try", tries, "pause_s", d.Seconds(), "err", cause)
		e.mu.Lock()
		e.state.Retried++
		e.mu.Unlock()
		if pauses.spent-d >= failingAfter {
			e.setFailing(cause)
		}
		if err := e.pause(ctx, d); err != nil {
			return err
		}
	default:
		e.failBatch(fmt.Errorf("engine: step %d: %w", n, cause))
	}
	e.batch.keep(e.seqs)
	return nil
}

// failingAfter is how long a step is retried before State says so.
const failingAfter = time.Second

func (e *Engine) setFailing(err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.state.Failing = err
}

// pauseSlice is how often a pause looks for requests that were canceled, or submitted.
const pauseSlice = 20 * time.Millisecond

// pause waits before a retry, until no request of the batch is left.
func (e *Engine) pause(ctx context.Context, d time.Duration) error {
	for ; d > 0 && len(e.batch.sequences) > 0; d -= pauseSlice {
		if err := e.o.Pause(ctx, min(d, pauseSlice)); err != nil {
			return fmt.Errorf("engine: %w", err)
		}
		e.takeIn()
		e.batch.keep(e.seqs)
		e.deliver()
		e.publish()
	}
	return nil
}

// appendSampled appends a step's tokens to their sequences. A request for which the step
// could sample none fails.
func (e *Engine) appendSampled(res *pipeline.Result, now time.Time) {
	sampled, targets := 0, res.Targets
	for i := range e.batch.chunks {
		c := &e.batch.chunks[i]
		n := len(e.batch.sequences[i].Targets)
		if p := c.seq.sub.prompt; p.add(c.From, targets[:n]) {
			c.seq.sub.job.setPromptLogProbs(p.list)
		}
		targets = targets[n:]
		row := sampled
		if c.Sample {
			sampled++
		}
		switch {
		case e.seqs[c.ID] == nil: // another sample of its request has failed
		case !c.Sample:
			e.sched.Done(c.Chunk, 0)
			c.seq.blocks.store(c.From, c.To)
		case res.Sampled[row] < 0:
			why := ErrNoToken
			if g := c.seq.sub.req.Params.Grammar; g != nil && g.Err() != nil {
				why = fmt.Errorf("the grammar: %w", g.Err())
			}
			e.failAlone(c.seq, fmt.Errorf("engine: after %d tokens: %w", len(c.seq.tokens), why))
		case c.seq.sub.req.Params.MaxTokens == 0:
			e.sched.Done(c.Chunk, 0)
			c.seq.blocks.store(c.From, c.To)
			d := e.addUpdate(c.seq, now)
			d.finish = FinishLength
			e.end(c.ID, d)
		default:
			e.sched.Done(c.Chunk, 1)
			c.seq.blocks.store(c.From, c.To)
			t := Token{ID: res.Sampled[row]}
			if c.seq.sub.req.Params.LogProbs {
				t.LogProb, t.Top = logProbs(res.LogProbs[row], c.seq.sub.req.Params.TopLogProbs)
			}
			if q := c.seq; q.constraint != nil && !q.adjust.ends(t.ID) {
				if !q.constraint.accept(t.ID) {
					e.failAlone(q, fmt.Errorf("engine: after %d tokens: token %d is none that the grammar allows", len(q.tokens), t.ID))
					continue
				}
				q.constraint.prepare(&e.masks)
			}
			e.addToken(c.ID, c.seq, t, now)
		}
	}
}

func logProbs(p pipeline.LogProb, n int) (chosen float32, top []TopLogProb) {
	for i := range n {
		top = append(top, TopLogProb{ID: p.TopIDs[i], LogProb: p.Top[i]})
	}
	return p.Sampled, top
}

// addToken appends a sampled token to a sequence. It detokenizes only where stop strings may
// end the sequence; otherwise delivery does.
func (e *Engine) addToken(id scheduler.ID, q *sequence, t Token, now time.Time) {
	q.tokens = append(q.tokens, t.ID)
	q.sampled++
	q.adjust.addToken(t.ID)
	d := e.addUpdate(q, now)
	d.hasToken, d.token, d.needsText = true, t, q.text != nil
	if d.stop = q.adjust.ends(t.ID); d.stop || q.constraint != nil && q.constraint.m.Ended() {
		d.finish = FinishStop
	} else if len(q.tokens) >= q.sub.limit {
		d.finish = FinishLength
	}
	if q.text != nil {
		q.text.early = q.sampled < q.sub.req.Params.MinTokens
	}
	if d.needsText && (len(q.sub.req.Params.Stop) > 0 || q.text.ends != nil) && d.write() {
		d.finish = FinishStop
	}
	if d.finish != "" {
		e.end(id, d)
		return
	}
	if !q.long && e.prefixes.long(len(q.tokens)) {
		// Past longrope's boundary other factors apply: recompute the KV cache.
		e.prefixes.storeFilled()
		q.long = true
		q.blocks.resign(true)
		q.blocks.group = nil
		e.sched.Restart(id)
		q.blocks.keys = nil
	}
	if e.prefixes.keyed(&q.sub.req) && (len(q.blocks.keys)+1)*e.o.KV.BlockTokens() <= len(q.tokens) {
		e.identify(q, e.prefixes.moreKeys(q))
	}
}

// addUpdate adds an empty update to those pending.
func (e *Engine) addUpdate(q *sequence, now time.Time) *delivery {
	e.updates = append(e.updates, delivery{pendingUpdate: pendingUpdate{sample: q.sample, at: now}, seq: q})
	return &e.updates[len(e.updates)-1]
}

// write detokenizes an update and reports whether its text ends with a stop string.
func (d *delivery) write() (found bool) {
	w := d.seq.text
	d.needsText = false
	// A stop id has no text, even where it is an ordinary token.
	if !d.stop {
		d.text, found = w.push(d.token.ID)
	}
	if !found && d.finish != "" {
		var rest string
		rest, found = w.flush()
		d.text += rest
	}
	if found {
		d.stopped = w.matched
	}
	return found
}

// end ends a sample with its last update and releases its KV blocks.
func (e *Engine) end(id scheduler.ID, d *delivery) {
	// What a failed request has computed may be why it failed.
	d.seq.leave(d.finish != FinishAbort)
	if d.err != nil {
		d.seq.blocks.drop()
	}
	e.sched.Remove(id, d.err == nil)
	delete(e.seqs, id)
	s := d.seq.sub
	s.finish[d.sample] = d.finish
	s.unfinished--
	d.last = s.unfinished == 0
}

// abort ends a sample; err is set where it failed. Text that was held back, as a stop string
// could begin in it, is delivered before.
func (e *Engine) abort(id scheduler.ID, q *sequence, err error) {
	now := e.o.Now()
	if q.text != nil && q.text.held != "" {
		e.addUpdate(q, now).text = q.text.release()
	}
	d := e.addUpdate(q, now)
	d.finish, d.err = FinishAbort, err
	e.end(id, d)
}

// fail ends a request, all its samples, with an error.
func (e *Engine) fail(s *submission, err error) {
	for id, q := range e.seqs {
		if q.sub == s {
			e.abort(id, q, err)
		}
	}
}

// failAlone ends the request of one sequence, for which alone the step failed.
func (e *Engine) failAlone(q *sequence, err error) {
	e.o.Log.Warn("request failed", "request", q.sub.req.ID, "sample", q.sample, "err", err)
	e.fail(q.sub, err)
}

// failBatch ends the requests of the present step with an error.
func (e *Engine) failBatch(err error) {
	e.o.Log.Error("step failed; its requests end", "sequences", len(e.batch.chunks), "err", err)
	for i := range e.batch.chunks {
		if c := &e.batch.chunks[i]; e.seqs[c.ID] != nil {
			e.fail(c.seq.sub, err)
		}
	}
}

// deliver delivers all pending updates to their jobs.
func (e *Engine) deliver() {
	deliver(e.updates, e.o.Listener.RequestFinished)
	e.updates = e.updates[:0]
}

// deliver detokenizes updates, delivers them to their jobs in order, and clears them.
func deliver(pending []delivery, finished func(RequestInfo)) {
	for i := range pending {
		d := &pending[i]
		if d.needsText {
			d.write()
		}
		s := d.seq.sub
		s.job.deliver(d)
		if !d.last {
			continue
		}
		s.stopWatching()
		if finished != nil {
			finished(RequestInfo{ID: s.req.ID, Usage: s.job.Usage(), Times: s.job.Times(), Finish: s.finish, Err: d.err})
		}
	}
	clear(pending)
}
