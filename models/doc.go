// Package models holds what differs between the MoE architectures as data, and
// what is common to them as stages: reading a config.json, laying out and
// loading weights, and enqueueing the parts of a transformer layer.
//
// # What it is not
//
// It does not decide what runs when (package pipeline), where experts live
// (package experts) or which KV blocks a sequence has (package kvcache): it is
// handed views of those, a slot table and block tables, and imports neither.
//
// # Parts
//
//   - Config is an architecture: shapes, norms, biases, routing, RoPE. ParseConfig
//     reads it, strictly, from a Hugging Face config.json.
//   - Source is where weights come from: a checkpoint (Checkpoint) or a seeded
//     generator (Dummy). NewLayout checks every tensor of a Source against the
//     Config and gives each its place; Load streams them there through a Sink.
//   - Model enqueues the stages of a step on a stream. Batch is the upload that
//     a micro-batch needs.
//
// # Loading
//
//	config, err := models.ReadConfig(dir)
//	files, err := safetensors.Open(dir)
//	source := models.NewCheckpoint(files)
//	layout, err := models.NewLayout(config, source, nil)
//	err = models.Load(ctx, source, layout, sink, progress)
//	weights := layout.Bind(arena.Addr)
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
// Draw says how a token is drawn behind a row. Head enqueues the least that the
// batch needs: a draw alone, or, where some row adjusts tokens, Adjust before it and
// Restore behind it, and LogProbs where some row wants them.
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
//   - A Layout has one arena for everything but experts, each tensor at a
//     multiple of 256 bytes; q, k, v lie row after row as one matrix, and so do
//     gate and up.
//   - Loading needs memory for pieces, never for a tensor.
package models
