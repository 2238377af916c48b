package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
)

func newMan(s *streams) *cobra.Command {
	var dir string
	cmd := &cobra.Command{
		Use:   "man [COMMAND]",
		Short: "Print a manual page, or write all",
		Long: `Print the manual page of a command, of moeserve itself without one, in the format of
man. --dir writes the pages of all commands, for packages.`,
		Example: `  moeserve man serve | man -l -
  moeserve man --dir /usr/local/share/man/man1`,
		ValidArgsFunction: func(cmd *cobra.Command, _ []string, begun string) ([]string, cobra.ShellCompDirective) {
			return beginning(commandNames(cmd.Root()), begun), cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			root := cmd.Root()
			root.DisableAutoGenTag = true
			header := doc.GenManHeader{Section: "1", Source: "moeserve " + buildInfo().Version, Manual: "moeserve"}
			if dir != "" {
				if len(args) > 0 {
					return usagef("man writes the pages of all commands with --dir, got %q, too; leave one out", strings.Join(args, " "))
				}
				if err := os.MkdirAll(dir, 0o755); err != nil {
					return fmt.Errorf("cannot write manual pages: %w", err)
				}
				return writeMan(root, header, dir)
			}
			of, rest, err := root.Find(args)
			if err != nil || len(rest) > 0 {
				return unknownCommand(root, strings.Join(args, " "))
			}
			of.DisableAutoGenTag = true
			return doc.GenMan(of, &header, s.out)
		},
	}
	cmd.Flags().StringVar(&dir, "dir", "", "`FOLDER` to write the pages of all commands to")
	return cmd
}

// writeMan writes the pages of a command and those below it.
func writeMan(cmd *cobra.Command, header doc.GenManHeader, dir string) error {
	for _, c := range cmd.Commands() {
		if !c.IsAvailableCommand() || c.IsAdditionalHelpTopicCommand() {
			continue
		}
		if err := writeMan(c, header, dir); err != nil {
			return err
		}
	}
	name := strings.ReplaceAll(cmd.CommandPath(), " ", "-") + "." + header.Section
	// The header is a copy: each page has a title of its own.
	if err := writeFile(filepath.Join(dir, name), func(w io.Writer) error { return doc.GenMan(cmd, &header, w) }); err != nil {
		return fmt.Errorf("--dir %w", err)
	}
	return nil
}
