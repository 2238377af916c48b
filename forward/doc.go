// Package forward enqueues the forward pass of a model, stage by stage, on a stream.
//
// # What it is not
//
// It does not decide what runs when (package pipeline), where experts live (package experts) or
// which KV blocks a sequence has (package kvcache): it gets views of those, a slot table and
// block tables, and imports neither package. Architectures and the sources of weights are data:
// package models.
//
// # Parts
//
//   - Model binds a models.Config to weights, a backend and a workspace, and enqueues
//     the stages of a step.
//   - Attention appends to a KV cache and computes attention over it, with one backend and
//     buffers next to that cache. A Model's own is in GPU memory. A KV cache in host
//     memory has an Attention of a CPU backend, with buffers in host memory; the owner of
//     both copies the buffers between GPU and host.
//   - HostBatch collects a micro-batch on the host, by Append for each sequence and Sample
//     for each token to generate; Pack turns it into a Batch, which is views of one upload.
//
// # A step
//
// A step has at most Limits.MaxTokens tokens. Attention stages run on one micro-batch of the
// step at a time, expert stages on the whole step:
//
//	for each layer
//		for each micro-batch b: Attend, PostAttention
//		if Config.Dense[layer]: MLP
//		else: SortByExpert, SharedExpert, Experts (once per wave), Combine
//	for each micro-batch b: Head
//
// An owner may run expert stages on groups of micro-batches. Where a micro-batch is all of its group, its
// PostAttention can sort, and PostAttentionShared also runs SharedExpert.
//
// With an Attention elsewhere (on the CPU), Project replaces Attend. Then the batch's Buffers
// are copied to the buffers of that Attention, its Append and Compute run, and the output is
// copied back.
//
// After a layer's last PostAttention, PredictNext runs the router of a later layer on the
// current hidden state, to predict the experts that it will select.
//
// # Sampling
//
// SamplingParams describe how a token is sampled. Head enqueues only the operations that the
// batch needs: Sample alone, or, if the logits of some tokens are adjusted, Adjust before it
// and Restore after it; and LogProbs if requested. Mask comes before all of them where a sample has a mask: PackMasks
// packs masks by themselves, as late as possible, since the host may compute them during the step. Of the tokens of a
// prompt, as its targets, Head first computes the log-probabilities that the model gives them, from a few rows of
// logits at a time.
//
// # Invariants
//
//   - Between stages the hidden state of a token is the sum of two tensors, residual
//     and x: every sub-block writes its output to x, and the next norm adds it to
//     the residual. After an MoE layer that is not the last, residual alone is the
//     hidden state and h is its norm for the next layer: Combine computes both.
//   - h of a token belongs to PostAttention until Combine, or MLP, ends the layer, and
//     then to Combine until the next layer's Project has read it. Stages that run on other
//     tokens do not touch it.
//   - A token's result does not depend on how tokens are divided into micro-batches and
//     steps, provided that the backend's operations do not (those of kernels/cpu do not).
//   - No stage allocates, in device memory or on Go's heap.
package forward
