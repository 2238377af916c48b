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
	// Step runs s to its end. After an error that wraps pipeline.ErrStepFailed the
	// same step may be run again.
	Step(ctx context.Context, s *pipeline.Step) (pipeline.Result, error)
}

// Options of an engine.
type Options struct {
	// Pipeline runs the steps, and KV accounts for the blocks of the cache that they use.
	Pipeline Stepper
	KV       *kvcache.Manager
	// Tokenizer writes the text of updates, and finds stop strings in it; without
	// it updates have no text and stop strings are refused.
	Tokenizer tokenizer.Tokenizer
	// MaxModelLen is the most tokens of a sequence, prompt and generated.
	MaxModelLen int
	// MaxNumSeqs is the most sequences that run at once. Default: 256.
	MaxNumSeqs int
	// MaxNumBatchedTokens is the most rows of a step. Default: 2048.
	MaxNumBatchedTokens int
	// MaxAdjust is the most tokens of a step whose logits are changed (penalties,
	// biases, bans): see forward.Limits. Default: 2^20.
	MaxAdjust int
	// MaxQueued is the most samples that may wait. Default: 0, no limit.
	MaxQueued int
	// LongAfter is longrope's boundary in tokens: a sequence that grows past it is
	// computed again with the long factors. 0: there is none.
	LongAfter int
	// Vocab is the number of ids the model knows.
	Vocab int
	// StopIDs end every request that does not ignore them.
	StopIDs []int32
	// MaxRetries is how often a step is run again after copies failed. Default: 3.
	MaxRetries int
	// Listener hears of steps and of requests that ended; it must not block.
	Listener Listener
	// Now is the clock of requests' times. Default: time.Now.
	Now func() time.Time
	// Log gets what an operator can act on. Default: none.
	Log *slog.Logger
}

// EnsureDefaults fills in what is zero.
func (o Options) EnsureDefaults() Options {
	if o.MaxNumSeqs == 0 {
		o.MaxNumSeqs = 256
	}
	if o.MaxNumBatchedTokens == 0 {
		o.MaxNumBatchedTokens = 2048
	}
	if o.MaxAdjust == 0 {
		o.MaxAdjust = 1 << 20
	}
	if o.MaxRetries == 0 {
		o.MaxRetries = 3
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return o
}

// Validate reports the first option that cannot be.
func (o Options) Validate() error {
	switch {
	case o.Pipeline == nil:
		return errors.New("engine: options without a pipeline")
	case o.KV == nil:
		return errors.New("engine: options without a KV cache")
	}
	for _, f := range []struct {
		name         string
		value, least int
	}{
		{"MaxModelLen", o.MaxModelLen, 1},
		{"MaxNumSeqs", o.MaxNumSeqs, 1},
		{"MaxNumBatchedTokens", o.MaxNumBatchedTokens, 1},
		{"MaxAdjust", o.MaxAdjust, 1},
		{"MaxQueued", o.MaxQueued, 0},
		{"LongAfter", o.LongAfter, 0},
		{"Vocab", o.Vocab, 1},
		{"Retries", o.MaxRetries, 0},
	} {
		if f.value < f.least {
			return fmt.Errorf("engine: %s is %d; it must be at least %d", f.name, f.value, f.least)
		}
	}
	return nil
}

// Listener hears of what the engine does; nil functions are left out. Finished may be
// called while a step runs, from another goroutine than Step and at the same time.
type Listener struct {
	Step     func(StepInfo)
	Finished func(RequestInfo)
}

// StepInfo is a step that ended.
type StepInfo struct {
	// Tokens of Sequences, of which Drawn drew a token.
	Tokens, Sequences, Sampled int
	// Duration on the wall clock, failed tries included.
	Duration time.Duration
	// Tries is 1, or more where copies failed.
	Tries int
}

// RequestInfo is a request that ended.
type RequestInfo struct {
	ID     string
	Usage  Usage
	Times  Times
	Finish []FinishReason // of each sample
	Err    error
}

// State is what the engine does now, and its counts since it was made.
type State struct {
	// Running and Waiting samples.
	Running, Waiting int
	// KVUsedBlocks of KVBlocks, of BlockTokens each.
	KVUsedBlocks, KVBlocks, BlockTokens int
	// Preemptions; Steps that ended; Retried: how often a step was dropped and run
	// again.
	Preemptions, Steps, Retried int64
}

// Engine runs requests. All methods may be called from any goroutine; one at a time is
// in Run or Generate, and others wait for it.
type Engine struct {
	o     Options
	sched *scheduler.Scheduler
	seqs  map[scheduler.ID]*sequence
	next  scheduler.ID
	// inside is locked by the call that is in Run or Generate, and by Close behind it.
	inside sync.Mutex
	// rows are a step's, chunks and sequences what they are of; the next step uses their
	// memory again.
	rows   []pipeline.Sequence
	chunks []chunk
	// pending is what steps have brought and no job has been told so far.
	pending, spare []delivery
	delivered      chan struct{}

	mu       sync.Mutex
	wake     chan struct{} // has room for one
	inbox    []*submission
	queued   int // samples in inbox
	canceled bool
	stopped  bool
	state    State
}

// submission is a request on its way to the scheduler, or there.
type submission struct {
	job      *Job
	req      Request
	ctx      context.Context
	limit    int // tokens at which a sample ends
	left     int // samples that have not ended
	finish   []FinishReason
	unlisten func() bool
}

// chunk is what a sequence does in a step.
type chunk struct {
	scheduler.Chunk
	of *sequence
}

// delivery is news on its way to a job.
type delivery struct {
	pendingUpdate
	of *sequence
	// unwritten says that the text is still to be written: that of the token, unless it
	// is a stop id, and at the sample's end what was held back.
	unwritten, stop bool
	// last news of the request, with err where the engine failed.
	last bool
	err  error
}

// sequence is one sample that waits or runs.
type sequence struct {
	sub     *submission
	sample  int
	tokens  []int32 // prompt and drawn
	sampled int
	long    bool
	table   *kvcache.Table
	text    *writer
	adjust  adjustments
}

// New makes an engine. It is closed in the end.
func New(o Options) (*Engine, error) {
	o = o.EnsureDefaults()
	if err := o.Validate(); err != nil {
		return nil, err
	}
	return &Engine{
		o:         o,
		seqs:      map[scheduler.ID]*sequence{},
		wake:      make(chan struct{}, 1),
		delivered: make(chan struct{}),
		sched:     scheduler.New(scheduler.Limits{StepTokens: o.MaxNumBatchedTokens, Sequences: o.MaxNumSeqs, CacheTokens: o.KV.Capacity()}),
		state:     State{KVBlocks: o.KV.Blocks(), BlockTokens: o.KV.BlockTokens()},
	}, nil
}

// State of the engine now.
func (e *Engine) State() State {
	e.mu.Lock()
	defer e.mu.Unlock()
	s := e.state
	s.Waiting += e.queued
	return s
}

// Submit queues a request. When ctx is done its samples end with FinishAbort.
// Errors: ErrStopped, ErrQueueFull, ErrPromptTooLong, ErrBadRequest (a *ParamError
// where a parameter is to blame).
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

// enqueue queues a request that is admissible.
func (e *Engine) enqueue(ctx context.Context, s *submission) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	// Those whom the next step can let run do not wait.
	ahead := e.queued + e.state.Waiting - (e.o.MaxNumSeqs - e.state.Running)
	switch {
	case e.stopped:
		return fmt.Errorf("engine: %w", ErrStopped)
	case e.o.MaxQueued > 0 && ahead+s.left > max(e.o.MaxQueued, s.left):
		return fmt.Errorf("engine: %w: %d wait, %d may", ErrQueueFull, ahead, e.o.MaxQueued)
	}
	s.ctx = ctx
	e.inbox = append(e.inbox, s)
	e.queued += s.left
	s.unlisten = context.AfterFunc(ctx, func() {
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

// admissible makes a submission of a request, from when on its time counts, unless it
// can be known before it runs that it never could.
func (e *Engine) admissible(r Request) (*submission, error) {
	if err := r.Params.Validate(e.o.Vocab); err != nil {
		return nil, fmt.Errorf("engine: %w", err)
	}
	if len(r.Params.Stop) > 0 && e.o.Tokenizer == nil {
		return nil, fmt.Errorf("engine: %w", &ParamError{"stop", "given", "left out: this model has no tokenizer to find strings with"})
	}
	if len(r.Prompt) == 0 {
		return nil, fmt.Errorf("engine: %w: the prompt has no tokens; give at least one", ErrBadRequest)
	}
	if len(r.Prompt) >= e.o.MaxModelLen {
		return nil, fmt.Errorf("engine: %w: it has %d tokens and the context is %d, of which at least one must be left for the answer; shorten the prompt, or raise --max-model-len if the model allows it",
			ErrPromptTooLong, len(r.Prompt), e.o.MaxModelLen)
	}
	for i, id := range r.Prompt {
		if id < 0 || int(id) >= e.o.Vocab {
			why := ""
			if r.Encoded {
				why = "; tokenizer and model do not belong together"
			}
			return nil, fmt.Errorf("engine: %w: prompt token %d has id %d, the model knows 0 to %d%s", ErrBadRequest, i, id, e.o.Vocab-1, why)
		}
	}
	// The subtraction cannot overflow, as the sum of both could.
	limit := e.o.MaxModelLen
	if r.Params.MaxTokens < limit-len(r.Prompt) {
		limit = len(r.Prompt) + r.Params.MaxTokens
	}
	if have := e.o.KV.Capacity(); limit > have {
		return nil, fmt.Errorf("engine: %w: prompt and new tokens are %d, the KV cache holds %d; ask for fewer, or give the cache more memory", ErrPromptTooLong, limit, have)
	}
	return &submission{
		job: newJob(e.o.Now(), len(r.Prompt)), req: r, limit: limit, left: r.Params.N, finish: make([]FinishReason, r.Params.N),
	}, nil
}

// Close refuses requests from now on, and waits until Run or Generate, if one is under
// way, has run those that were submitted to their ends. What nobody runs ends with
// FinishAbort.
func (e *Engine) Close() error {
	e.mu.Lock()
	e.stopped = true
	e.mu.Unlock()
	e.wakeUp()
	e.inside.Lock()
	defer e.inside.Unlock()
	e.abandon(nil)
	return nil
}

// Run runs requests until ctx is done, which ends those that are left with
// FinishAbort, or Close was called and none is left; both return nil. An error means
// that steps fail for good; all requests have ended with it, and no more are taken.
func (e *Engine) Run(ctx context.Context) error {
	e.inside.Lock()
	defer e.inside.Unlock()
	for {
		worked, err := e.turn(ctx)
		switch {
		case ctx.Err() != nil:
			e.abandon(nil)
			return nil
		case err != nil:
			e.abandon(err)
			return err
		case worked:
			continue
		}
		e.mu.Lock()
		idle := e.stopped && len(e.inbox) == 0
		e.mu.Unlock()
		if idle {
			return nil
		}
		select {
		case <-e.wake:
		case <-ctx.Done():
		}
	}
}

// Output is what became of a request that Generate ran, one sample.
type Output struct {
	// Tokens generated, the stop id included where there was one.
	Tokens       []Token
	TokenIDs     []int32
	Text         string
	FinishReason FinishReason
}

// Generate runs requests to their ends in this goroutine, without Run, and returns
// an output per sample, in the order of the requests. onUpdate, which may be nil, is
// called with each update as it comes, whose Tokens are valid during the call; output
// counts as the result does. None runs if one of them never could. When ctx is done it
// returns ctx.Err().
func (e *Engine) Generate(ctx context.Context, requests []Request, onUpdate func(output int, u Update)) ([]Output, error) {
	e.inside.Lock()
	defer e.inside.Unlock()
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
	// Their own context ends them all with this call, however it returns.
	own, cancel := context.WithCancel(ctx)
	defer func() {
		cancel()
		e.mu.Lock()
		e.canceled = true // which cancel brings about only soon
		e.mu.Unlock()
		e.dropCanceled()
		e.deliver()
	}()
	var outs []Output
	first := make([]int, len(subs))
	for i, s := range subs {
		if err := e.enqueue(own, s); err != nil {
			return nil, err
		}
		first[i] = len(outs)
		outs = append(outs, make([]Output, s.left)...)
	}
	var waiting []pendingUpdate
	token := make([]Token, 1)
	for left := len(outs); left > 0; {
		if err := ctx.Err(); err != nil {
			return nil, fmt.Errorf("engine: %w", err)
		}
		if _, err := e.turn(ctx); err != nil {
			return nil, err
		}
		e.deliver()
		for i, s := range subs {
			waiting = s.job.take(waiting)
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
		}
	}
	return outs, nil
}

// turn takes in what has arrived and runs one step, if there is anything to do.
func (e *Engine) turn(ctx context.Context) (worked bool, err error) {
	e.takeIn()
	e.dropCanceled()
	plan := e.sched.Plan()
	for _, id := range plan.Preempted {
		q := e.seqs[id]
		e.o.Log.Info("sequence preempted: the KV cache is full", "request", q.sub.req.ID, "sample", q.sample, "tokens", len(q.tokens))
	}
	now := e.o.Now()
	for _, id := range plan.Admitted {
		e.seqs[id].sub.job.admit(now)
	}
	e.publish()
	if len(plan.Chunks) == 0 {
		e.deliver()
		return false, nil
	}
	err = e.step(ctx, plan.Chunks)
	e.publish()
	return true, err
}

// takeIn hands what was submitted to the scheduler.
func (e *Engine) takeIn() {
	e.mu.Lock()
	subs := e.inbox
	e.inbox, e.queued = nil, 0
	e.mu.Unlock()
	for _, s := range subs {
		for i := range s.req.Params.N {
			q := &sequence{
				sub: s, sample: i, tokens: slices.Clone(s.req.Prompt), table: e.o.KV.NewTable(),
				long: e.o.LongAfter > 0 && len(s.req.Prompt) > e.o.LongAfter,
			}
			if e.o.Tokenizer != nil {
				q.text = newWriter(e.o.Tokenizer.NewStream(true), s.req.Params.Stop, s.req.Params.IncludeStop)
			}
			q.adjust = newAdjustments(&s.req.Params, s.req.Prompt, e.stopIDs(&s.req.Params))
			e.seqs[e.next] = q
			e.sched.Add(e.next, q.table, len(q.tokens), s.limit)
			e.next++
		}
	}
}

// stopIDs of a request: its own and, unless it ignores them, the model's.
func (e *Engine) stopIDs(p *Params) []int32 {
	ids := slices.Clone(p.StopIDs)
	if !p.IgnoreEOS {
		ids = append(ids, e.o.StopIDs...)
	}
	slices.Sort(ids)
	return slices.Compact(ids)
}

// dropCanceled ends the samples of requests whose context is done.
func (e *Engine) dropCanceled() {
	e.mu.Lock()
	canceled := e.canceled
	e.canceled = false
	e.mu.Unlock()
	if !canceled {
		return
	}
	e.takeIn()
	for id, q := range e.seqs {
		if q.sub.ctx.Err() != nil {
			e.abort(id, q, nil)
		}
	}
}

// abandon ends everything, with err or, where it is nil, as aborted.
func (e *Engine) abandon(err error) {
	e.mu.Lock()
	e.stopped = true
	e.mu.Unlock()
	e.takeIn()
	for id, q := range e.seqs {
		e.abort(id, q, err)
	}
	e.deliver()
	e.publish()
}

// publish makes the scheduler's counts visible to State.
func (e *Engine) publish() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.state.Running, e.state.Waiting = e.sched.Running(), e.sched.Waiting()
	e.state.KVUsedBlocks = e.state.KVBlocks - e.o.KV.Free()
	e.state.Preemptions = e.sched.Preemptions()
}

// step runs the chunks, and meanwhile delivers what the steps before have brought; then
// it gives the tokens to their sequences.
func (e *Engine) step(ctx context.Context, chunks []scheduler.Chunk) error {
	e.rows, e.chunks = e.rows[:0], e.chunks[:0]
	adjusted, rows := 0, 0
	for _, c := range chunks {
		q := e.seqs[c.ID]
		if c.Sample && adjusted > 0 && adjusted+len(q.adjust.list) > e.o.MaxAdjust {
			continue // it waits until those before it leave it room
		}
		e.rows = append(e.rows, pipeline.Sequence{Tokens: q.tokens[c.From:c.To], Start: c.From, Table: q.table, Long: q.long})
		if c.Sample {
			row := &e.rows[len(e.rows)-1]
			row.LogitRows = 1
			q.draw(&row.Draw)
			adjusted += len(row.Draw.Adjust)
		}
		rows += c.To - c.From
		e.chunks = append(e.chunks, chunk{c, q})
	}
	defer clear(e.chunks)
	before := e.pending
	e.pending, e.spare = e.spare, nil
	if len(before) > 0 {
		go func() {
			deliver(before, e.o.Listener.Finished)
			e.delivered <- struct{}{}
		}()
	}
	res, err := e.run(ctx, &pipeline.Step{Sequences: e.rows}, rows)
	if len(before) > 0 {
		<-e.delivered
	}
	e.spare = before[:0]
	clear(e.rows)
	if err != nil {
		return err
	}
	now := e.o.Now()
	drawn := 0
	for i := range e.chunks {
		c := &e.chunks[i]
		if !c.Sample {
			e.sched.Done(c.Chunk, 0)
			continue
		}
		e.sched.Done(c.Chunk, 1)
		t := Token{ID: res.Sampled[drawn]}
		if c.of.sub.req.Params.LogProbs {
			t.LogProb, t.Top = logProbs(res.LogProbs[drawn], c.of.sub.req.Params.TopLogProbs)
		}
		drawn++
		e.take(c.ID, c.of, t, now)
	}
	return nil
}

func logProbs(p pipeline.LogProb, n int) (chosen float32, top []TopLogProb) {
	for i := range n {
		top = append(top, TopLogProb{ID: p.TopIDs[i], LogProb: p.Top[i]})
	}
	return p.Chosen, top
}

// take gives a sequence the token that it has drawn. Only where stop strings may end it
// its text is written here, since that can wait for the delivery otherwise.
func (e *Engine) take(id scheduler.ID, q *sequence, t Token, now time.Time) {
	q.tokens = append(q.tokens, t.ID)
	q.sampled++
	q.adjust.drew(t.ID)
	d := e.news(q, now)
	d.drawn, d.token, d.unwritten = true, t, q.text != nil
	if d.stop = slices.Contains(q.adjust.stop, t.ID); d.stop {
		d.finish = FinishStop
	} else if len(q.tokens) >= q.sub.limit {
		d.finish = FinishLength
	}
	if d.unwritten && len(q.sub.req.Params.Stop) > 0 && d.write() {
		d.finish = FinishStop
	}
	if d.finish != "" {
		e.end(id, d)
		return
	}
	if !q.long && e.o.LongAfter > 0 && len(q.tokens) > e.o.LongAfter {
		// It crosses longrope's boundary: all its keys are computed again.
		q.long = true
		e.sched.Restart(id)
	}
}

// news adds empty news to what is pending.
func (e *Engine) news(q *sequence, now time.Time) *delivery {
	e.pending = append(e.pending, delivery{pendingUpdate: pendingUpdate{sample: q.sample, at: now}, of: q})
	return &e.pending[len(e.pending)-1]
}

// write writes a delivery's text. It says whether a stop string was found, behind which
// there is none.
func (d *delivery) write() (found bool) {
	w := d.of.text
	d.unwritten = false
	// A stop id is no text, even where it is an ordinary token.
	if !d.stop {
		d.text, found = w.push(d.token.ID)
	}
	if !found && d.finish != "" {
		var rest string
		rest, found = w.flush()
		d.text += rest
	}
	return found
}

// end ends a sample, whose blocks are free again, with d, its last news.
func (e *Engine) end(id scheduler.ID, d *delivery) {
	e.sched.Remove(id)
	delete(e.seqs, id)
	s := d.of.sub
	s.finish[d.sample] = d.finish
	s.left--
	d.last = s.left == 0
}

// abort ends a sample; err is why, where the engine failed.
func (e *Engine) abort(id scheduler.ID, q *sequence, err error) {
	d := e.news(q, e.o.Now())
	d.finish, d.err = FinishAbort, err
	e.end(id, d)
}

// deliver tells jobs all that they have not been told.
func (e *Engine) deliver() {
	deliver(e.pending, e.o.Listener.Finished)
	e.pending = e.pending[:0]
}

// deliver writes texts and tells jobs, in order, and forgets what it has told.
func deliver(pending []delivery, finished func(RequestInfo)) {
	for i := range pending {
		d := &pending[i]
		if d.unwritten {
			d.write()
		}
		s := d.of.sub
		s.job.deliver(d)
		if !d.last {
			continue
		}
		s.unlisten()
		if finished != nil {
			finished(RequestInfo{ID: s.req.ID, Usage: s.job.Usage(), Times: s.job.Times(), Finish: s.finish, Err: d.err})
		}
	}
	clear(pending)
}

// run runs a step, again if copies failed.
func (e *Engine) run(ctx context.Context, step *pipeline.Step, rows int) (pipeline.Result, error) {
	start := e.o.Now()
	for try := 1; ; try++ {
		res, err := e.o.Pipeline.Step(ctx, step)
		again := errors.Is(err, pipeline.ErrStepFailed) && try <= e.o.MaxRetries
		e.mu.Lock()
		n := e.state.Steps
		if err == nil {
			e.state.Steps++
		} else if again {
			e.state.Retried++
		}
		e.mu.Unlock()
		if err == nil {
			if e.o.Listener.Step != nil {
				e.o.Listener.Step(StepInfo{Tokens: rows, Sequences: len(step.Sequences), Sampled: len(res.Sampled), Duration: e.o.Now().Sub(start), Tries: try})
			}
			return res, nil
		}
		if !again {
			return res, fmt.Errorf("engine: step %d: %w", n, err)
		}
		e.o.Log.Warn("step dropped and run again", "step", n, "try", try, "err", err)
	}
}
