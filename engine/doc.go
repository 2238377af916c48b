// Package engine generates tokens and text for requests. A pure core (package scheduler)
// decides which tokens each step computes, the pipeline runs the step, and the engine
// appends sampled tokens to their sequences until these end.
//
// # How it runs
//
// Submit queues a request from any goroutine and returns a Job, which buffers updates for
// its reader. One goroutine calls Run, where everything else happens: new requests go to
// the scheduler, a step is planned and run, its tokens are appended, and sequences end.
// Detokenization and delivery of updates overlap the next step, so the device does not
// wait for them; only a request with stop strings is detokenized before it. Generate does
// the same in the caller's goroutine until the requests given to it have ended.
//
// With Options.PrefixCaching a sequence has keys, chained hashes of its full blocks' tokens, by
// which it finds blocks that others have computed (see package kvcache). Their root covers all
// else that the KV cache depends on: Options.KeySalt, the request's CacheSalt, the block size and
// longrope's choice.
//
// Of a request's samples one computes the prompt. The others wait for it, share its blocks, and
// compute the prompt's last token only, whose logits they need.
//
// Options.Offload keeps blocks in other tiers. It is offered the blocks that each step has
// filled, while the device computes the next one, and those of sequences that end or are preempted. A waiting sequence of which it has
// more than the pool is loading until Poll reports the end, while others run; what has not
// arrived is computed. Transfers hold their blocks, so a sequence ends at once in any state.
//
// A sample with a Grammar has its mask of the next token computed in another goroutine from when the token before is known,
// while the next step runs; the pipeline asks for it when all else of the step is enqueued. So it costs time only where the
// mask takes longer than the layers. The state of the grammar depends on the sample's tokens alone: preemption does not
// change it.
//
// With Options.Pace a step that decodes has only so many prompt tokens that it does not take too
// long (see package steptime), and the pace is told how long each step took.
//
// Pause has it run no step until Resume, so that the memory that steps use can be released: requests
// that run end, finish before, or are preempted, and those that come wait.
//
// # What it is not
//
// The engine does not order the work inside a step (package pipeline does), does not
// tokenize prompts, and depends neither on HTTP nor on devices.
//
// # Invariants
//
//   - Requests join and leave between steps only.
//   - A sample's tokens depend only on its prompt, parameters and number, not on the rest
//     of the batch, on how its prompt is cut into chunks, on what is cached of it, or on
//     preemption, where the backend is batch-invariant.
//   - Every Job ends: with a finish reason for each sample, or with an error.
//   - A slow reader, or one that has gone, blocks no other request. A request whose
//     context is done releases its KV blocks before the next step.
//   - An error of one sequence, or a row of logits without a number, ends that request
//     alone. A step whose copies failed is retried after growing pauses, during which requests
//     may be canceled and submitted; after Options.RetryTimeout its requests end, and the
//     next step is tried. Only the loss of the compute device ends Run with an error.
//
// # Example
//
//	e, err := engine.New(engine.Options{Pipeline: p, KV: manager, MaxModelLen: 4096, Vocab: 32000})
//	go e.Run(ctx)
//	defer e.Close()
//	job, err := e.Submit(ctx, engine.Request{Prompt: ids, Params: engine.DefaultParams()})
//	for u, err := job.Next(ctx); err == nil; u, err = job.Next(ctx) { … }
package engine
