package main

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/node/devices"
)

const (
	// helpWidth is the columns that help keeps to.
	helpWidth = 80
	// helpColumn is where descriptions of flags and commands begin.
	helpColumn = 32

	helpAllFlag = "help-all"
)

// helpPrinter prints the help of commands: flags by the groups of their settings, rare
// settings only with --help-all.
type helpPrinter struct{ all bool }

// addTo gives a command, and those below it, the flag --help-all.
func (h *helpPrinter) addTo(cmd *cobra.Command) {
	for _, c := range cmd.Commands() {
		h.addTo(c)
	}
	if cmd.Flags().Lookup(configFlag) == nil {
		return
	}
	cmd.Flags().BoolFunc(helpAllFlag, "help with all settings", func(string) error {
		h.all = true
		return cmd.Flags().Set("help", "true") // which cobra acts on
	})
}

func (h *helpPrinter) print(out io.Writer, cmd *cobra.Command) {
	text := cmd.Long
	if text == "" {
		text = cmd.Short
	}
	for paragraph := range strings.SplitSeq(text, "\n\n") {
		if !strings.HasPrefix(paragraph, "  ") { // lists are as they are
			paragraph = strings.Join(wrap(paragraph, helpWidth), "\n")
		}
		fmt.Fprintln(out, paragraph+"\n")
	}
	usage := cmd.UseLine()
	if cmd.HasAvailableSubCommands() {
		usage = cmd.CommandPath() + " COMMAND"
	}
	fmt.Fprintf(out, "Usage:\n  %s\n", usage)
	if cmd.HasAvailableSubCommands() {
		fmt.Fprintln(out, "\nCommands:")
		for _, c := range cmd.Commands() {
			if c.IsAvailableCommand() {
				printEntry(out, "  "+c.Name(), c.Short, 16)
			}
		}
	}
	if cmd.Example != "" {
		fmt.Fprintf(out, "\nExamples:\n%s\n", cmd.Example)
	}
	h.flags(out, cmd)
	if cmd.HasAvailableSubCommands() {
		fmt.Fprintf(out, "\n%s COMMAND --help shows the flags of a command.\n", cmd.CommandPath())
	}
}

// flags prints those of a command by their groups.
func (h *helpPrinter) flags(out io.Writer, cmd *cobra.Command) {
	const own, general = "Options", "General"
	titles, groups := []string{own}, map[string][]*pflag.Flag{}
	settings, rare := false, 0
	for _, k := range configs.Schema {
		if g := k.Group(); !slices.Contains(titles, g) {
			titles = append(titles, g)
		}
	}
	titles = append(titles, general)
	cmd.Flags().SortFlags = false
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		k, setting := configs.Find(f.Name)
		group := own
		switch {
		case f.Hidden:
			return
		case setting && isSetting(f):
			settings = true
			if k.Rare && !h.all {
				rare++
				return
			}
			group = k.Group()
		case f.Name == configFlag || f.Name == helpAllFlag || f.Name == "help" || f.Name == "version":
			group = general
		}
		groups[group] = append(groups[group], f)
	})
	for _, title := range titles {
		if len(groups[title]) == 0 {
			continue
		}
		fmt.Fprintf(out, "\n%s:\n", title)
		for _, f := range groups[title] {
			printFlag(out, f)
		}
	}
	if !settings {
		return
	}
	if cmd.Flags().Lookup("emulate") != nil && h.all {
		fmt.Fprintf(out, "\n--emulate SPEC: %s\n", devices.EmulateHelp)
	}
	fmt.Fprintln(out, "\nEach setting is also a variable and a key of moeserve.yaml: --max-num-seqs is\nMOESERVE_MAX_NUM_SEQS and max-num-seqs. In sizes, G and GiB are 2^30 bytes, GB\nis 10^9.")
	if rare > 0 {
		fmt.Fprintf(out, "--%s shows %d more settings.\n", helpAllFlag, rare)
	}
}

// isSetting says whether a flag is that of a setting, and not a command's own of its name.
func isSetting(f *pflag.Flag) bool {
	_, ok := f.Value.(*flagValue)
	return ok
}

func printFlag(out io.Writer, f *pflag.Flag) {
	left := "      --" + f.Name
	if f.Shorthand != "" {
		left = "  -" + f.Shorthand + ", --" + f.Name
	}
	value, text := pflag.UnquoteUsage(f)
	if v, ok := f.Value.(*flagValue); ok {
		value, text = v.placeholder(), v.key.Help
	}
	if value != "" && f.Value.Type() != "bool" && f.NoOptDefVal == "" {
		left += " " + value
	}
	if d := f.DefValue; d != "" && d != "0" && d != "false" && d != "[]" {
		text += " (default" + noBreak + d + ")"
	}
	printEntry(out, left, text, helpColumn)
}

// printEntry prints a name and, from a column on, what it is.
func printEntry(out io.Writer, name, text string, column int) {
	lines := wrap(text, helpWidth-column)
	if len(name)+2 > column {
		fmt.Fprintln(out, name)
		name = ""
	}
	for _, line := range lines {
		fmt.Fprintf(out, "%-*s%s\n", column, name, line)
		name = ""
	}
}

// noBreak is a space at which wrap does not break a line.
const noBreak = "\u00a0"

// wrap breaks a text into lines of at most width bytes, between words.
func wrap(text string, width int) []string {
	var lines []string
	line := ""
	for _, word := range strings.FieldsFunc(text, func(r rune) bool { return r == ' ' || r == '\n' }) {
		word = strings.ReplaceAll(word, noBreak, " ")
		if line != "" && len(line)+1+len(word) > width {
			lines, line = append(lines, line), ""
		}
		if line != "" {
			line += " "
		}
		line += word
	}
	return append(lines, line)
}
