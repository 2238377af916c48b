package main

import (
	"os"
	"regexp"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/node/checkpoint"
)

const modelFlag = "model"

// oneModel allows an argument that names the model.
func oneModel(cmd *cobra.Command, args []string) error {
	if len(args) > 1 {
		return usagef("%s takes one MODEL, got %d arguments: %s", commandPath(cmd), len(args), strings.Join(args, " "))
	}
	return nil
}

// modelSettings are those of a command whose argument, where there is one, is the model.
func modelSettings(cmd *cobra.Command, args []string) (*settings, error) {
	if len(args) > 0 {
		if err := setModel(cmd, args[0]); err != nil {
			return nil, err
		}
	}
	return readSettings(cmd.Flags(), os.Environ())
}

// setModel makes an argument the flag --model.
func setModel(cmd *cobra.Command, name string) error {
	if f := cmd.Flags().Lookup(modelFlag); f.Changed && f.Value.String() != name {
		return usagef("two models: %s and --model %s; leave one of them out", name, f.Value)
	}
	return cmd.Flags().Set(modelFlag, name)
}

// runArguments are what the arguments of run say.
type runArguments struct {
	// model and prompt; nil where they are not given.
	model, prompt *string
	// doubtful prompts may have been meant as the name of a model.
	doubtful bool
}

// splitRun separates model and prompt. named says that --model is given; dash is the
// number of arguments in front of "--", or negative. Behind "--", and where --model is
// given, there is only a prompt. Two arguments are a model and a prompt. One is a model if
// it is a preset, a file or directory, or looks like the name of a model; else a prompt.
func splitRun(args []string, named bool, dash int) (r runArguments, err error) {
	if dash >= 0 {
		if len(args)-dash > 1 || dash > 1 {
			return r, usagef("expected [MODEL] -- [PROMPT], got %d arguments; put a prompt of several words in quotes", len(args))
		}
		if dash == 1 {
			r.model = &args[0]
		}
		if len(args) > dash {
			r.prompt = &args[dash]
		}
		return r, nil
	}
	switch {
	case len(args) == 0:
	case named && len(args) > 1:
		return r, usagef("expected one PROMPT, got %d arguments; put a prompt of several words in quotes", len(args))
	case named || len(args) == 1 && !meansModel(args[0]):
		r.prompt, r.doubtful = &args[0], !named && word.MatchString(args[0])
	case len(args) == 1:
		r.model = &args[0]
	case len(args) > 2 || !meansModel(args[0]):
		return r, usagef("expected [MODEL] [PROMPT], got %d arguments, and %q is not a model%s", len(args), args[0],
			suggestion(args[0], configs.PresetNames(), "put a prompt of several words in quotes"))
	default:
		r.model, r.prompt = &args[0], &args[1]
	}
	return r, nil
}

var (
	// word is a text that could be a model's name.
	word = regexp.MustCompile(`^[A-Za-z][\w.:-]+$`)
	// modelPath begins like a path, or like the name of a repository.
	modelPath = regexp.MustCompile(`^(~|\.{0,2})/\S+$|^[A-Za-z][\w.-]*/[A-Za-z0-9][\w./-]*$|^(hf|https?)://`)
	// modelFile ends like a file of a model.
	modelFile = regexp.MustCompile(`^\S+\.(gguf|safetensors|json)$`)
)

// meansModel says whether an argument that may be a prompt, too, is a model's name, or a
// wrong one that is near the name of a preset.
func meansModel(arg string) bool {
	if arg == checkpoint.BuiltIn || slices.Contains(configs.PresetNames(), arg) || modelPath.MatchString(arg) || modelFile.MatchString(arg) {
		return true
	}
	if arg == "" || arg == stdoutName {
		return false
	}
	if _, err := os.Stat(expandHome(arg)); err == nil {
		return true
	}
	return len(arg) > 2 && word.MatchString(arg) && len(configs.Similar(arg, configs.PresetNames())) > 0
}
