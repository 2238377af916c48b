package main

import (
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/node/checkpoint"
)

// completeValues gives shells the values of a command's flags, and of those below it.
func completeValues(cmd *cobra.Command) {
	for _, c := range cmd.Commands() {
		completeValues(c)
	}
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		k, setting := configs.Find(f.Name)
		switch {
		case !setting || !isSetting(f):
			return // of which all that take a value take a file, or text that cannot be completed
		case k.Name == modelFlag:
			cmd.RegisterFlagCompletionFunc(f.Name, completeModel) //nolint:errcheck // there is such a flag
		default:
			cmd.RegisterFlagCompletionFunc(f.Name, completeKey(k)) //nolint:errcheck // there is such a flag
		}
	})
}

// words are the values, beside files, of settings that Values does not list.
func words(k configs.Key) []string {
	switch {
	case k.Values() != nil:
		return k.Values()
	case k.Kind == configs.Bool:
		return []string{"true", "false"}
	case k.Name == "hardware":
		return configs.HardwareNames()
	case k.Name == "json":
		return nil // "-" is quicker typed
	}
	var list []string
	for w := range strings.SplitSeq(k.Placeholder, "|") {
		if strings.ToUpper(w) != w { // others stand for something
			list = append(list, strings.TrimRight(w, "ABCDEFGHIJKLMNOPQRSTUVWXYZ"))
		}
	}
	return list
}

// completeKey completes a setting's value: words, and files where it may be one.
func completeKey(k configs.Key) cobra.CompletionFunc {
	return func(_ *cobra.Command, _ []string, begun string) ([]string, cobra.ShellCompDirective) {
		found := beginning(words(k), begun)
		if k.Path && len(found) == 0 {
			return nil, cobra.ShellCompDirectiveDefault
		}
		return found, cobra.ShellCompDirectiveNoFileComp
	}
}

func beginning(list []string, begun string) []string {
	var found []string
	for _, w := range list {
		if strings.HasPrefix(w, begun) {
			found = append(found, w)
		}
	}
	return found
}

// completeModel completes the name of a model: presets, and directories.
func completeModel(_ *cobra.Command, _ []string, begun string) ([]string, cobra.ShellCompDirective) {
	found := beginning(append(configs.PresetNames(), checkpoint.BuiltIn), begun)
	parent, _ := filepath.Split(begun)
	in := expandHome(parent)
	if in == "" {
		in = "."
	}
	entries, _ := os.ReadDir(in) // one that cannot be read has nothing to offer
	directive := cobra.ShellCompDirectiveNoFileComp
	for _, e := range entries {
		info, err := os.Stat(filepath.Join(in, e.Name())) // through links
		name := parent + e.Name()
		if err == nil && info.IsDir() && strings.HasPrefix(name, begun) && (!strings.HasPrefix(e.Name(), ".") || strings.HasPrefix(begun, name)) {
			found = append(found, name+"/")
			directive |= cobra.ShellCompDirectiveNoSpace
		}
	}
	return found, directive
}

// completeModelArgument completes the first argument.
func completeModelArgument(cmd *cobra.Command, args []string, begun string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 || cmd.Flags().Changed(modelFlag) {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return completeModel(cmd, args, begun)
}
