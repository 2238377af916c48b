package checkpoint

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/node/fault"
	"github.com/moeserve/moeserve/untrusted"
)

// Download is the command that downloads a model of the Hugging Face Hub ("org/name").
func Download(repository string) string {
	return fmt.Sprintf("hf download %s --local-dir %s", repository, path.Base(repository))
}

// Find says what to do about the name of a model that is no preset and no directory of a
// checkpoint. An error wraps fault.ErrModel.
func Find(name string) error {
	if _, ok := configs.Preset(name); ok || name == "" {
		return nil
	}
	return fault.Of(fault.ErrModel, checkDirectory(name))
}

// repository is the name of a model on the Hub, as people write it: org/name, hf://org/name
// or its page.
var repository = regexp.MustCompile(`^(?:hf://|https?://(?:www\.)?(?:huggingface\.co|hf\.co)/)?([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)/?$`)

// formats is what a checkpoint must be.
const formats = "moeserve reads Hugging Face checkpoints: a directory with config.json, tokenizer.json and safetensors in BF16, FP16 or FP32"

// checkDirectory says what to do about a name that is no directory with a config.json; nil
// where it is one.
func checkDirectory(name string) error {
	info, err := os.Stat(name)
	switch {
	case err == nil && info.IsDir():
		return checkContent(name)
	case err == nil && isGGUF(name):
		return fmt.Errorf("%s is a GGUF file, which moeserve does not read; %s: download the model that it was made from (hf download ORG/NAME --local-dir DIR)", name, formats)
	case err == nil:
		return fmt.Errorf("%s is a file; give the directory of the checkpoint: %s", name, filepath.Dir(name))
	case !os.IsNotExist(err):
		return fmt.Errorf("model %q: %w", name, err)
	}
	if m := repository.FindStringSubmatch(name); m != nil && !isGGUF(name) {
		if dir := cached(m[1]); dir != "" {
			return fmt.Errorf("%s is a model of the Hugging Face Hub, which is in its cache: give its directory, %s", m[1], dir)
		}
		return fmt.Errorf("%s is no directory here; if it is a model of the Hugging Face Hub, download it: %s; then give that directory", name, Download(m[1]))
	}
	if isGGUF(name) {
		return fmt.Errorf("there is no file %s, and moeserve does not read GGUF; %s: download the model that it was made from (hf download ORG/NAME --local-dir DIR)", name, formats)
	}
	presets := configs.PresetNames()
	return fmt.Errorf("there is no model %q; give the directory of a Hugging Face checkpoint, or one of the presets %s%s", name,
		strings.Join(presets, ", "), configs.DidYouMean(name, append(presets, BuiltIn)))
}

// checkContent says what to do about a directory without a config.json.
func checkContent(dir string) error {
	has := func(pattern string) bool { return contains(dir, pattern) }
	switch {
	case has("config.json"):
		return nil
	case has("*.gguf"):
		return fmt.Errorf("%s has GGUF files, which moeserve does not read; %s: download the model that they were made from (hf download ORG/NAME --local-dir DIR)", dir, formats)
	case has("adapter_config.json"):
		return fmt.Errorf("%s is an adapter (LoRA), which moeserve does not apply; merge it into its base model, and give that directory", dir)
	case has("params.json"):
		return fmt.Errorf("%s has no config.json: it is in another format; %s: download the version for transformers", dir, formats)
	case has("snapshots/*/config.json"):
		found, err := filepath.Glob(filepath.Join(escape(dir), "snapshots", "*", "config.json"))
		if err == nil && len(found) > 0 {
			return fmt.Errorf("%s is a folder of the Hub's cache; give the snapshot in it: %s", dir, filepath.Dir(found[len(found)-1]))
		}
	}
	return fmt.Errorf("%s has no config.json; give the directory of a complete Hugging Face checkpoint", dir)
}

// checkWeights says what to do about a directory whose weights are in another format.
func checkWeights(dir string) error {
	has := func(pattern string) bool { return contains(dir, pattern) }
	if !has("*.safetensors") && !has("*.safetensors.index.json") && (has("*.bin") || has("*.pth") || has("*.pt")) {
		return fmt.Errorf("%s has its weights in PyTorch's format, which moeserve does not read; %s: convert it, or download a version with safetensors", dir, formats)
	}
	return nil
}

// contains says whether a directory has a file of a pattern.
func contains(dir, pattern string) bool {
	files, err := filepath.Glob(filepath.Join(escape(dir), pattern))
	return err == nil && len(files) > 0
}

// escape makes a path a pattern of itself.
func escape(path string) string {
	return regexp.MustCompile(`[*?\[\\]`).ReplaceAllString(path, `\$0`)
}

// isGGUF says whether a file is one, by its name or its first bytes.
func isGGUF(path string) bool {
	if strings.HasSuffix(strings.ToLower(path), ".gguf") {
		return true
	}
	f, err := untrusted.Open(path)
	if err != nil {
		return false
	}
	defer f.Close() //nolint:errcheck // only read from
	magic := make([]byte, 4)
	_, err = io.ReadFull(f, magic)
	return err == nil && bytes.Equal(magic, []byte("GGUF"))
}

// cached is where the Hub's client has put a model on this machine; empty where it has not.
func cached(repository string) string {
	hub := os.Getenv("HF_HUB_CACHE")
	if home := os.Getenv("HF_HOME"); hub == "" && home != "" {
		hub = filepath.Join(home, "hub")
	}
	if home, err := os.UserHomeDir(); hub == "" && err == nil {
		hub = filepath.Join(home, ".cache", "huggingface", "hub")
	}
	found, err := filepath.Glob(filepath.Join(escape(hub), "models--"+strings.ReplaceAll(repository, "/", "--"), "snapshots", "*", "config.json"))
	if err != nil || len(found) == 0 {
		return ""
	}
	return filepath.Dir(found[len(found)-1])
}
