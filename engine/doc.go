// Package engine turns requests into tokens and text: it admits requests, has a
// pure core (package scheduler) decide which rows each step has, has the pipeline
// run them, and ends what is finished.
//
// # How it runs
//
// Submit takes a request from any goroutine and gives back a Job, whose updates
// wait for its reader. One goroutine is in Run, where all else happens: arrivals
// are handed to the scheduler, a step is planned and run, its tokens go to their
// sequences, which may end. Text is written and jobs are told while the next step runs,
// so the device does not wait for it; only text that a stop string may end is written
// before. Generate does the same in the caller's goroutine until its own requests have
// ended.
//
// # What it is not
//
// It does not order the work inside a step (package pipeline), does not tokenize
// prompts, and knows neither HTTP nor devices.
//
// # Invariants
//
//   - Requests join and leave between steps only.
//   - A sample's tokens depend on its prompt, parameters and number only, not on its
//     neighbors, on how its prompt is cut into chunks, or on being preempted, on
//     backends whose results per row do not depend on other rows.
//   - Every Job ends: with a finish reason for each sample, or with an error.
//   - A reader that is slow or gone holds up nobody; a request whose context is done
//     gives its blocks back before the next step.
//   - A step that failed because a copy failed is run again, at most
//     Options.MaxRetries times.
//
// # Example
//
//	e, err := engine.New(engine.Options{Pipeline: p, KV: manager, MaxModelLen: 4096, Vocab: 32000})
//	go e.Run(ctx)
//	defer e.Close()
//	job, err := e.Submit(ctx, engine.Request{Prompt: ids, Params: engine.DefaultParams()})
//	for u, err := job.Next(ctx); err == nil; u, err = job.Next(ctx) { … }
package engine
