// Package pipeline runs steps: it turns a set of rows (decode tokens and prompt
// chunks of some sequences) into one token per sequence, and keeps the copies of
// missing experts under the compute.
//
// The order of everything in a step is a plan: a list of actions made by a pure
// function, which the pipeline then carries out by enqueueing on one compute stream.
// Copies are submitted to the experts' store, which gives them to package transfer;
// the compute stream meets them only through fences.
//
// Steps of many rows need almost all experts. Their plan is Layerwise: all that a
// layer misses is fetched while the layer before computes, and nothing on the host
// waits until the step's tokens come back. Steps of few rows (see SmallBatch) need few:
// their plan is OnDemand, where the host waits in each layer for what the router
// chose and fetches that, while the device has other work, and where a guess of what
// the next layer will choose has most of that on its way before.
//
// Where the host attends, beside keys and values in its memory, the plan is OverlappedCPUAttention:
// the micro-batches are in two merge groups, each with an Executor, and the device runs
// experts for one while the host attends for the other. CGOPipe
// is CGOPipe's order, to compare with. docs/design/pipeline.md has diagrams.
//
// Where nothing is missing, a decode step that comes again and again is one graph, with
// the same results: see docs/design/pipeline.md.
//
// A step may wait for points before it reads keys and values, and raise others once it has
// ended well: so blocks come from elsewhere, and go there.
//
// Where a trace is written, a tracer annotates the streams with step, layer, stage and
// experts, and with the copies that a wave waits for.
//
// A meter counts for how long the compute stream stands still, by Cause.
//
// # What it is not
//
// It does not decide which sequences run (package engine), where an expert lives
// (package experts), or which block a token's keys lie in (package kvcache).
//
// # Invariants
//
//   - A step ends before the next begins, and either all of it counts or nothing:
//     when a copy fails, the step's tokens are dropped, and running the same step
//     again is safe, since appending keys and values and sampling are idempotent.
//     Only the activation counts keep what a dropped step has counted. A lost device
//     fails the step in the same way, unless it is the compute device.
//   - All plans give the same bits, as far as the backend's operations do not depend on
//     which rows run together; attention does as far as both backends' is the same.
//   - Whatever a stream awaits was enqueued before, or is a copy that ends by itself.
//   - A step's results are not believed before all that it was given something by was asked
//     for errors: the compute stream may not know of them.
//   - For the same sequence of steps the tokens do not depend on where experts
//     lie, on when they arrive, or on what failed in between.
//
// # Example
//
//	p, err := pipeline.New(pipeline.Options{Machine: m, Executors: []pipeline.Executor{{Space: device.HBM(0), Model: model}}, Experts: store, KV: pool})
//	out, err := p.Step(ctx, &pipeline.Step{Sequences: []pipeline.Sequence{{Tokens: ids, Table: table, LogitRows: 1, Draw: pipeline.Draw{Temperature: 0.7}}}})
package pipeline
