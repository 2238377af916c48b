// Package checkpoint opens a model's files and loads them: the model's configuration and
// tensors (Open), its tokenizer and chat template (ReadText), and its weights, through a few
// pinned buffers, into GPU memory and the expert store (Load).
//
// A model is a directory, a preset with random weights, or the built-in one: see configs.Model.
//
//	m, err := checkpoint.Open(s.Model, s.Generate.Seed)
//	defer m.Close()
//	text, err := m.ReadText()
//	err = checkpoint.Load(ctx, checkpoint.LoadOptions{Source: m.Source, …})
package checkpoint
