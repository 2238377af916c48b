package main

import (
	"errors"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/moeserve/moeserve/configs"
)

// newRoot makes the command tree.
func newRoot(s *streams) *cobra.Command {
	root := &cobra.Command{
		Use:   "moeserve",
		Short: "Serve mixture-of-experts models that do not fit in GPU memory",
		Long: `moeserve runs mixture-of-experts models that do not fit in GPU memory: offloaded
experts live in host memory or in the spare memory of other GPUs, and are fetched
while the GPU computes.

Settings are taken from flags, then MOESERVE_* variables, then a file (--config,
else moeserve.yaml in the current directory), then a policy (--policy), then
defaults.

Exit codes: 0 done, 1 failed while running (inspect: the model does not fit),
2 usage, configuration or prompt, 3 model, 4 device, 130 interrupted.`,
		Example: `  moeserve run 'Ann gave the red ball to Ben. Who has the ball?'
  moeserve chat
  moeserve serve /models/mixtral-8x7b --offload-fraction 0.5
  moeserve plan mixtral-8x7b --hardware l4`,
		SilenceErrors:     true,
		SilenceUsage:      true,
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
		Args:              commandName,
		RunE:              func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.SetIn(s.in)
	root.SetOut(s.out)
	root.SetErr(s.err)
	root.Version = buildInfo().String()
	root.SetVersionTemplate("moeserve {{.Version}}\n")
	root.Flags().Bool("version", false, "print what this binary was built from")
	root.SetFlagErrorFunc(flagError)
	root.SetHelpCommand(newHelp())
	root.AddCommand(newRun(s), newChat(s), newServe(s), newInspect(s), newPlan(s), newBench(s), newReclaim(s), newConfig(s), newCollectEnv(s), newVersion(s), newCompletion(s), newMan(s))
	cobra.EnableCommandSorting = false
	completeValues(root)
	h := &helpPrinter{}
	h.addTo(root)
	root.SetHelpFunc(func(cmd *cobra.Command, _ []string) {
		var text strings.Builder
		h.print(&text, cmd)
		_, s.help = io.WriteString(s.out, text.String())
	})
	return root
}

// newHelp replaces cobra's own help command, which succeeds on unknown topics.
func newHelp() *cobra.Command {
	return &cobra.Command{
		Use:   "help [COMMAND]",
		Short: "Help about any command",
		RunE: func(cmd *cobra.Command, args []string) error {
			topic, rest, err := cmd.Root().Find(args)
			if err != nil || len(rest) > 0 {
				return unknownCommand(cmd.Root(), strings.Join(args, " "))
			}
			topic.InitDefaultHelpFlag()
			return topic.Help()
		},
	}
}

// commandName refuses what is not the name of a command.
func commandName(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return unknownCommand(cmd, args[0])
	}
	return nil
}

// elsewhere are commands of other programs, and what does the same.
var elsewhere = map[string]string{
	"pull":     "moeserve downloads no models; hf download ORG/NAME --local-dir DIR does",
	"download": "moeserve downloads no models; hf download ORG/NAME --local-dir DIR does",
	"generate": "did you mean run?",
	"complete": "did you mean run?",
	"show":     "did you mean inspect?",
	"list":     "models are directories; moeserve inspect DIR shows one",
}

func unknownCommand(parent *cobra.Command, name string) error {
	names := commandNames(parent)
	what := "command"
	if parent.HasParent() {
		what = parent.Name() + " command"
		if top := commandNames(parent.Root()); slices.Contains(top, name) {
			return usagef("there is no %s %q; did you mean %s %s?", what, name, parent.Root().Name(), name)
		}
	} else if hint, ok := elsewhere[name]; ok {
		return usagef("there is no command %q; %s", name, hint)
	}
	return usagef("there is no %s %q%s", what, name, suggestion(name, names, parent.CommandPath()+" --help lists "+strings.Join(names, ", ")))
}

func commandNames(parent *cobra.Command) []string {
	var names []string
	for _, c := range parent.Commands() {
		if c.IsAvailableCommand() {
			names = append(names, c.Name())
		}
	}
	return names
}

// foreign are flags that other engines have, and those that do the same here.
var foreign = map[string]string{
	"--max-new-tokens": "--max-tokens", "--n-predict": "--max-tokens", "--predict": "--max-tokens",
	"--ctx-size": "--max-model-len", "--context-length": "--max-model-len", "--num-ctx": "--max-model-len",
	"--temp": "--temperature", "--batch-size": "--max-num-batched-tokens", "--parallel": "--max-num-seqs",
	"--n-cpu-moe": "--offload-fraction", "--cpu-moe": "--offload-fraction", "--cpu-offload-gb": "--offload-fraction",
	"--n-gpu-layers": "--offload-fraction", "--gpu-layers": "--offload-fraction", "-ngl": "--offload-fraction", "-ncmoe": "--offload-fraction",
	"-c": "--max-model-len", "-np": "--max-num-seqs", "-n": "--max-tokens", "-b": "--max-num-batched-tokens", "-mg": "--gpu",
	"--prompts": "--dataset-path", "--num-requests": "--num-prompts", "--main-gpu": "--gpu",
	"--random-input-len": "--input-len", "--random-output-len": "--output-len", "--custom-output-len": "--output-len",
	"--save-result": "--json", "--result-filename": "--json", "--backend": "--endpoint", "--endpoint-type": "--endpoint",
}

// foreignUse says what to do instead of flags of other engines that have no counterpart.
var foreignUse = map[string]string{
	"--prompt": promptUse, "-p": promptUse,
	"--tensor-parallel-size": oneGPU, "--tp": oneGPU, "--pipeline-parallel-size": oneGPU, "--tensor-split": oneGPU, "--split-mode": oneGPU,
	"--quantization": "moeserve runs checkpoints in BF16, FP16 or FP32",
	"--dtype":        "moeserve runs checkpoints in BF16, FP16 or FP32",
	"--stream":       "moeserve run and chat print a completion as it is generated",

	"--data-parallel-size": oneEach, "--dp": oneEach, "--enable-expert-parallel": oneGPU,
	"--enable-lora": noAdapters, "--lora-modules": noAdapters,
	"--speculative-config": "there is no speculative decoding", "--speculative-model": "there is no speculative decoding",
	"--swap-space":     "--kv-offloading-size is the host memory for KV blocks, in GiB",
	"--kv-cache-dtype": "the KV cache has the type of the activations",
}

const (
	promptUse = "the prompt is an argument: moeserve run [MODEL] PROMPT"
	oneGPU    = "one GPU computes; --peers names others that lend memory"
	oneEach   = "one server is one GPU that computes; start several behind a router"

	noAdapters = "there are no LoRA adapters; merge them into the checkpoint"
)

// flagError words what pflag found wrong with a command line.
func flagError(cmd *cobra.Command, err error) error {
	if rest := cmd.Flags().Args(); cmd.HasSubCommands() && len(rest) > 0 {
		return unknownCommand(cmd, rest[0])
	}
	var unknown *pflag.NotExistError
	if errors.As(err, &unknown) {
		var names []string
		cmd.Flags().VisitAll(func(f *pflag.Flag) { names = append(names, "--"+f.Name) })
		lists := cmd.CommandPath() + " --help lists the flags"
		if all, _, _ := strings.Cut(unknown.GetSpecifiedShortnames(), "="); all != "" {
			// One name of several letters, as llama.cpp has, is several flags to pflag.
			for _, name := range []string{"-" + all, "-" + unknown.GetSpecifiedName()} {
				if same := foreign[name]; slices.Contains(names, same) {
					return usagef("there is no flag %s; did you mean %s?", name, same)
				}
			}
			name := "-" + unknown.GetSpecifiedName()
			if use, ok := foreignUse[name]; ok && cmd.Name() == "run" {
				lists = use
			}
			return usagef("there is no flag %s; %s", name, lists)
		}
		name := "--" + unknown.GetSpecifiedName()
		if same := foreign[name]; slices.Contains(names, same) {
			return usagef("there is no flag %s; did you mean %s?", name, same)
		}
		if use, ok := foreignUse[name]; ok {
			return usagef("there is no flag %s; %s", name, use)
		}
		if longer := beginWith(name, names); len(longer) > 0 {
			return usagef("there is no flag %s; did you mean %s?", name, strings.Join(longer, " or "))
		}
		return usagef("there is no flag %s%s", name, suggestion(name, names, lists))
	}
	var missing *pflag.ValueRequiredError
	if errors.As(err, &missing) {
		return usagef("--%s needs a value", missing.GetFlag().Name)
	}
	var invalid *pflag.InvalidValueError
	if errors.As(err, &invalid) {
		flag, why := invalid.GetFlag(), invalid.Unwrap()
		if flag.Value.Type() == "int" { // one of pflag's own, which says it in strconv's words
			if _, err := parse(configs.Key{Kind: configs.Int}, invalid.GetValue()); err != nil {
				why = err
			}
		}
		return usagef("--%s is %q: %w", flag.Name, invalid.GetValue(), why)
	}
	return &usageError{err}
}

// beginWith lists the names, at most three, that begin with the words of a shorter one.
func beginWith(name string, names []string) []string {
	var list []string
	for _, n := range names {
		if strings.HasPrefix(n, name+"-") {
			list = append(list, n)
		}
	}
	if len(list) > 3 {
		return nil
	}
	return list
}

// noArguments refuses arguments of commands that take none.
func noArguments(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return usagef("%s takes no arguments, got %q", commandPath(cmd), args[0])
	}
	return nil
}

// someArguments refuses a command line without any of the arguments that are missing.
func someArguments(missing string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) == 0 {
			return usagef("%s needs %s", commandPath(cmd), missing)
		}
		return nil
	}
}

// commandPath is the command as configs.Key has it: "bench sweep".
func commandPath(cmd *cobra.Command) string {
	_, path, _ := strings.Cut(cmd.CommandPath(), " ")
	return path
}
