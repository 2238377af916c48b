// Package checkpoint opens a model's files and brings what they hold to its place: the
// model's configuration and tensors (Open), its tokenizer and chat template (ReadText),
// and its weights, through a few pinned buffers, to the compute device and the store of
// experts (Load).
//
// A model is a directory, a preset with random weights, or the one that is built in; what
// of these, configs.Model says.
//
//	m, err := checkpoint.Open(s.Model, s.Generate.Seed)
//	defer m.Close()
//	text, err := m.ReadText()
//	err = checkpoint.Load(ctx, checkpoint.LoadOptions{Source: m.Source, …})
package checkpoint
