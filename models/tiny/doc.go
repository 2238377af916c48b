// Package tiny holds the built-in model: a Mixtral of 3.7 million parameters (6 layers, 8 experts, 2 chosen per token)
// that adds, sorts, reverses, recalls and answers short questions. It is what commands use without --model, and what
// tests use where a checkpoint has to give answers that can be checked. docs/design/tiny.md is its card; tools/tiny trains it.
//
// It is not a loader: FS is an ordinary Hugging Face checkpoint in an fs.FS, for whoever reads checkpoints.
//
// # Invariants
//
//   - The checkpoint takes at most 8 MB, since every binary carries it.
//   - No prompt of the test split (docs/design/tiny.md) was trained on: scores are measured on such prompts alone.
//
// # Example
//
//	weights, err := fs.ReadFile(tiny.FS(), "model.safetensors")
//	if err != nil {
//		return err
//	}
package tiny
