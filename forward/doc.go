// Package forward enqueues the forward pass of a model, stage by stage, on a stream.
//
// # What it is not
//
// It does not decide what runs when (package pipeline), where experts live (package
// experts) or which KV blocks a sequence has (package kvcache): it is handed views of
// those, a slot table and block tables, and imports neither. What an architecture is,
// and where its weights come from, is data: package models.
//
// # Parts
//
//   - Model binds a models.Config to weights, a backend and a workspace, and enqueues
//     the stages of a step.
//   - Attention appends to a KV cache and attends over it, by one backend, in buffers
//     beside that cache. A model's own are on the compute device; keys and values that
//     live in other memory have an Attention of another backend, with buffers there,
//     and who owns both copies rows between the two.
//   - HostBatch is a micro-batch as the host puts it together, by Append for each
//     sequence and Draw for each token wanted; Pack makes a Batch of it, the views of
//     one upload.
//
// # A step
//
// The rows of a step form a group of at most Limits.MaxTokens rows. Attention
// stages take one micro-batch of the group at a time, the expert stages the
// whole group:
//
//	for each layer
//		for each micro-batch b: PreAttention, Attention.Attend, PostAttention
//		if Config.Dense[layer]: MLP
//		else: Group, Shared, Experts (once per wave), Combine
//	for each micro-batch b: Head
//
// Where another Attention attends, Project comes in place of PreAttention, then a copy of
// the batch's Buffers to that Attention's, its Append and Attend, and a copy back.
//
// Behind a layer's last PostAttention, Guess asks a later layer's router what it
// would choose on the hidden state as it is by then.
//
// # Drawing
//
// Draw says how a token is drawn behind a row. Head enqueues the least that the batch
// needs: a draw alone, or, where some row adjusts tokens, Adjust before it and Restore
// behind it, and LogProbs where some row wants them.
//
// # Invariants
//
//   - Between stages the hidden state of a row is the sum of two tensors, residual
//     and x: every sub-block leaves its output in x, and the next norm adds it to
//     the residual. Behind an MoE layer that is not the last it is the residual
//     alone, and h its norm for the next layer: Combine does both.
//   - h of a row is PostAttention's until Combine, or MLP, has ended the layer, and
//     from then on Combine's until the next layer's Project has read it. Stages of
//     other rows leave it alone.
//   - What a row gives does not depend on how rows are cut into micro-batches and
//     groups, as far as the backend's operations do not (those of kernels/cpu).
//   - No stage allocates, on the device or in Go.
package forward
