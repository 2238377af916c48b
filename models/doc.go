// Package models holds the MoE architectures as data: reading a config.json, and
// laying out and loading weights.
//
// # What it is not
//
// It computes nothing: package forward enqueues the parts of a transformer layer. Nor
// does it decide where weights live: it streams them into a Sink.
//
// # Parts
//
//   - Config is an architecture: shapes, norms, biases, routing, RoPE. ParseConfig
//     reads it, strictly, from a Hugging Face config.json.
//   - Source is where weights come from: a checkpoint (Checkpoint) or a seeded
//     generator (Dummy). NewLayout checks every tensor of a Source against the
//     Config and gives each its place; Load streams them there through a Sink.
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
// # Invariants
//
//   - A Layout has one arena for everything but experts, each tensor at a
//     multiple of 256 bytes; q, k, v lie row after row as one matrix, and so do
//     gate and up.
//   - Loading needs memory for pieces, never for a tensor.
package models
