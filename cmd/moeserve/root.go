package main

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/node/devices"
)

// newRoot makes the command tree.
func newRoot(s *streams) *cobra.Command {
	root := &cobra.Command{
		Use:   "moeserve",
		Short: "Run mixture-of-experts models whose experts do not all fit in device memory",
		Long: `moeserve runs mixture-of-experts models on a device whose memory does not hold
all their experts: the others live in host memory and are fetched while the
device computes.

Settings are taken from flags, then MOESERVE_* variables, then a file (--config,
else moeserve.yaml in the current directory), then, with --policy, from that, then
defaults.

Exit codes: 0 done, 1 failed while running, 2 usage, configuration or prompt,
3 model, 4 device, 130 interrupted.`,
		SilenceErrors:     true,
		SilenceUsage:      true,
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return unknownCommand(cmd, args[0])
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.SetIn(s.in)
	root.SetOut(s.out)
	root.SetErr(s.err)
	root.Version = buildInfo().String()
	root.SetVersionTemplate("moeserve {{.Version}}\n")
	root.Flags().Bool("version", false, "print what this binary was built from")
	root.SetFlagErrorFunc(flagError)
	help := root.HelpFunc()
	root.SetHelpFunc(func(cmd *cobra.Command, args []string) {
		help(cmd, args)
		printSettings(cmd.OutOrStdout(), cmd.Flags())
	})
	root.SetHelpCommand(newHelp())
	root.AddCommand(newRun(s), newServe(s), newInspect(s), newPlan(s), newBench(s), newConfig(s), newCollectEnv(s), newVersion(s), newCompletion(s))
	return root
}

// newHelp replaces cobra's own help command, which succeeds on unknown topics.
func newHelp() *cobra.Command {
	return &cobra.Command{
		Use:   "help [COMMAND]",
		Short: "Tell about a command",
		RunE: func(cmd *cobra.Command, args []string) error {
			topic, rest, err := cmd.Root().Find(args)
			if err != nil || len(rest) > 0 {
				return unknownCommand(cmd.Root(), strings.Join(args, " "))
			}
			return topic.Help()
		},
	}
}

func unknownCommand(root *cobra.Command, name string) error {
	var names []string
	for _, c := range root.Commands() {
		if c.IsAvailableCommand() {
			names = append(names, c.Name())
		}
	}
	return usagef("there is no command %q%s", name, suggestion(name, names, "moeserve --help lists all"))
}

// flagError words what pflag found wrong with a command line.
func flagError(cmd *cobra.Command, err error) error {
	if rest := cmd.Flags().Args(); !cmd.HasParent() && len(rest) > 0 {
		return unknownCommand(cmd, rest[0])
	}
	var unknown *pflag.NotExistError
	if errors.As(err, &unknown) && unknown.GetSpecifiedShortnames() == "" {
		var names []string
		cmd.Flags().VisitAll(func(f *pflag.Flag) { names = append(names, "--"+f.Name) })
		name := "--" + unknown.GetSpecifiedName()
		return usagef("there is no flag %s%s", name, suggestion(name, names, cmd.CommandPath()+" --help lists all"))
	}
	var invalid *pflag.InvalidValueError
	if errors.As(err, &invalid) {
		flag, why := invalid.GetFlag(), invalid.Unwrap()
		if flag.Value.Type() == "int" { // one of pflag's own, which says it in strconv's words
			if _, err := parse(configs.Int, invalid.GetValue()); err != nil {
				why = err
			}
		}
		return usagef("--%s is %q: %w", flag.Name, invalid.GetValue(), why)
	}
	return &usageError{err}
}

// noArguments refuses arguments of commands that take none.
func noArguments(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return usagef("%s takes no arguments, and got %q", cmd.CommandPath(), args[0])
	}
	return nil
}

// printSettings tells what help on flags does not: what --emulate takes, and the
// variables that stand for flags.
func printSettings(out io.Writer, flags *pflag.FlagSet) {
	if flags.Lookup(configFlag) == nil {
		return
	}
	if flags.Lookup("emulate") != nil {
		fmt.Fprintf(out, "\n--emulate SPEC: %s\n", devices.EmulateHelp)
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintf(w, "\nVariables, where there is no flag:\n  %s\tas --%s\n", configVariable, configFlag)
	for _, k := range configs.Schema {
		if flags.Lookup(k.Name) != nil {
			fmt.Fprintf(w, "  %s\tas --%s\n", k.Variable(), k.Name)
		}
	}
	w.Flush() //nolint:errcheck // help that cannot be printed has nobody to tell
}
