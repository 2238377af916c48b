package main

import (
	"fmt"
	"os"
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
				return doc.GenManTree(root, &header, dir)
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
