package safetensors

import (
	"bytes"
	"errors"
	"io"
	"path/filepath"
	"unicode/utf8"

	"github.com/moeserve/moeserve/untrusted"
)

// Names of the files that make a checkpoint.
const (
	SingleFile = "model.safetensors"
	IndexFile  = "model.safetensors.index.json"
)

// parseIndex reads an index and returns which file each tensor is in. The
// metadata beside it is skipped: its sizes are informative, and wrong in some
// published checkpoints.
func parseIndex(file string, text []byte) (map[string]string, error) {
	if !utf8.Valid(text) {
		return nil, damaged(file, "", "index is not valid UTF-8")
	}
	dec := newDecoder(text)
	var weights map[string]string
	seen := map[string]bool{}
	err := object(dec, func(key string) error {
		if seen[key] {
			return damaged(file, "", "%s occurs twice in the index", untrusted.Quote(key))
		}
		seen[key] = true
		if key != "weight_map" {
			return skipValue(dec)
		}
		weights = map[string]string{}
		return object(dec, func(name string) error {
			tok, err := dec.Token()
			if err != nil {
				return err
			}
			shard, ok := tok.(string)
			if !ok {
				return damaged(file, name, "its file in the index is not a string")
			}
			// A name with a path could reach outside the checkpoint.
			if shard == "" || shard == "." || shard == ".." || filepath.Base(shard) != shard {
				return damaged(file, name, "%s is not a file name", untrusted.Quote(shard))
			}
			if len(weights) == maxTensors {
				return damaged(file, "", "index lists more than %d tensors, the maximum of a checkpoint", maxTensors)
			}
			if _, dup := weights[name]; dup {
				return damaged(file, name, "occurs twice in the index")
			}
			weights[name] = shard
			return nil
		})
	})
	if err == nil {
		if rest := bytes.TrimLeft(text[dec.InputOffset():], " \t\r\n"); len(rest) > 0 {
			err = errors.New("something follows the object")
		}
	}
	if err != nil {
		var fe *FileError
		if errors.As(err, &fe) {
			return nil, err
		}
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return nil, damaged(file, "", "index is not valid JSON: %s", err)
	}
	if len(weights) == 0 {
		return nil, damaged(file, "", "index has no weight_map, or an empty one")
	}
	return weights, nil
}
