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
//   - HostBatch is a micro-batch as the host puts it together, Batch its upload on the
//     device; PackBatch makes the second of the first.
//   - Draw says how a token is drawn behind a row.
//
// # A step
//
// The rows of a step form a group of at most Limits.MaxRows rows. Attention
// stages take one micro-batch of the group at a time, the expert stages the
// whole group:
//
//	for each layer
//		for each micro-batch b: PreAttention, Attention, PostAttention
//		if Config.Dense[layer]: MLP
//		else: Group, Shared, Experts (once per wave), Combine
//	for each micro-batch b: Head
//
// Behind a layer's last PostAttention, Guess asks a later layer's router what it
// would choose on the hidden state as it is by then.
//
// # Drawing
//
// Head enqueues the least that the batch needs: a draw alone, or, where some row adjusts
// tokens, Adjust before it and Restore behind it, and LogProbs where some row wants them.
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
