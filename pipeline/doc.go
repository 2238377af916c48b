// Package pipeline runs steps. A step computes tokens of several sequences (one decode
// token, or a chunk of a prompt, of each), samples the tokens that follow them, and
// overlaps the fetches of missing experts (offloaded, and not in the expert cache) with
// compute.
//
// The order of everything in a step is a plan: a list of actions made by a pure function.
// The pipeline runs a plan by enqueueing its actions on one compute stream. Copies of
// experts are submitted to the experts' store, which passes them to package transfer; the
// compute stream waits for them through fences only.
//
// A step of many tokens needs almost all experts. Its plan is Layerwise: all missing
// experts of a layer are fetched while the layer before computes, and the host waits for
// nothing before the end of the step. A step of few tokens (see SmallBatch) needs few
// experts. Its plan is OnDemand: in each layer the host waits for the router and fetches
// the experts that it selected, while the device has other work. Experts predicted for the
// next layer are prefetched, so that the copies of most have started before that layer's
// router has run. With CPUExperts the host computes some of the selected experts in its own
// memory while others are fetched.
//
// A step of very few tokens may read experts where they lie instead (InPlace), if that is faster
// (AccessModel).
//
// Where the host computes attention, with the KV cache in its memory, the plan is
// OverlappedCPUAttention: the micro-batches form two merge groups, each with an Executor,
// and the device runs the experts of one while the host computes attention for the other.
// CGOPipe is the order of MoE-Lightning, for comparison. docs/design/pipeline.md has diagrams.
//
// Where all experts are resident or read in place, repeated decode steps are captured and launched as CUDA
// graphs, with the same results: see docs/design/pipeline.md. Such a step may be enqueued
// before the tokens of the step in front are known (Step.Ahead).
//
// A step may wait for points before it reads the KV cache, and signal others once it has
// succeeded, so that KV blocks can be loaded and stored by other streams.
//
// A tracer annotates the streams of a traced machine with step, layer, stage and experts,
// and with the copies that kernels wait for. A meter measures for how long the compute
// stream stalls, by Cause.
//
// # What it is not
//
// The package does not decide which sequences run (package engine), where an expert lives
// (package experts), or which KV block a token is stored in (package kvcache).
//
// # Invariants
//
//   - A step ends before the next begins, and takes effect as a whole or not at all. When
//     a copy fails, the step's tokens are discarded. Running the same step again is safe,
//     since KV append and sampling are idempotent; only the counts of routed tokens keep
//     what a discarded step added. A lost device fails the step in the same way, unless
//     the device is the compute GPU.
//   - All plans give the same bits where the backend is batch-invariant; with attention or
//     experts on another backend, where that gives the same bits as well.
//   - Whatever a stream waits for was enqueued before, or is a copy that completes by
//     itself.
//   - A step's results are used only after all of its sources were checked for errors: the
//     compute stream may not see them.
//   - For the same sequence of steps the tokens do not depend on where experts are, on when
//     they arrive, or on failures in between; with CPUExperts on a backend that rounds otherwise
//     they may, unless its share is 1.
//
// # Example
//
//	p, err := pipeline.New(pipeline.Options{Machine: m, Executors: []pipeline.Executor{{Space: device.HBM(0), Model: model}}, Experts: store, KV: pool})
//	out, err := p.Step(ctx, &pipeline.Step{Sequences: []pipeline.Sequence{{
//		Tokens: ids, Table: table, LogitRows: 1, SamplingParams: pipeline.SamplingParams{Temperature: 0.7},
//	}}})
package pipeline
