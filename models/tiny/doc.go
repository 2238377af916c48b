// Package tiny holds the built-in model: a Mixtral of 3.8 million parameters (6 layers, 8 experts, top-2 routing) that
// adds, sorts, reverses, recalls, answers short questions and calls tools. Commands use it without --model, and tests
// use it where they need a checkpoint with checkable answers. docs/design/tiny.md is its model card; tools/tiny trains it.
//
// The package is not a loader: FS is an ordinary Hugging Face checkpoint in an fs.FS, for packages that read
// checkpoints.
//
// # Invariants
//
//   - The checkpoint takes at most 8 MB, since every binary carries it.
//   - No prompt or request of the test split (docs/design/tiny.md) was trained on: scores are measured on
//     such alone.
//
// # Example
//
//	weights, err := fs.ReadFile(tiny.FS(), "model.safetensors")
//	if err != nil {
//		return err
//	}
package tiny
