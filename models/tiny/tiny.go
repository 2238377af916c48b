package tiny

import (
	"embed"
	"io/fs"
)

//go:embed checkpoint
var files embed.FS

// FS returns the checkpoint: config.json, generation_config.json, model.safetensors (bf16), tokenizer.json and
// tokenizer_config.json at its root.
func FS() fs.FS {
	sub, err := fs.Sub(files, "checkpoint")
	if err != nil {
		panic(err) // only a malformed path fails
	}
	return sub
}
