package main

import (
	"errors"
	"os"

	"github.com/spf13/cobra"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/node"
)

func newConfig(s *streams) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "config",
		Short: "Print the effective settings and their sources",
		Long: `Print the effective settings and their sources: a flag, a variable, a file, or the
defaults, in this order. With --policy, what is not given is what the policy sets
for serve; run plans for its one prompt.`,
		Example: `  moeserve config --offload-fraction 50%
  moeserve config --json -`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			set, err := readSettings(cmd.Flags(), os.Environ())
			if err != nil {
				return err
			}
			if err := planned(s, set); err != nil {
				return err
			}
			return printConfig(s, set)
		},
	}
	addSettings(cmd.Flags(), configs.For("config"))
	return cmd
}

// planned puts what a policy says into the settings, where there is one.
func planned(s *streams, set *settings) error {
	if set.Plan.Policy == configs.NoPolicy {
		return nil
	}
	in, err := node.Inspect(node.Options{Settings: set.Settings, Explicit: set.given, Log: set.logger(s.err)})
	if err != nil {
		return err
	}
	if in.Planned != nil {
		for key := range in.Planned.Settings {
			set.sources[key] = source{Kind: "policy", Name: "policy " + set.Plan.Policy.String()}
		}
	}
	format := set.Model.LoadFormat
	set.Settings = in.Settings
	set.Model.LoadFormat = format // which Inspect takes no notice of
	return nil
}

// hidden stands for the value of a secret.
const hidden = "(hidden)"

// configResult is what config --json writes.
type configResult struct {
	// File that was read; empty for none.
	File     string          `json:"file"`
	Settings []settingResult `json:"settings"`
}

type settingResult struct {
	Key     string `json:"key"`
	Value   any    `json:"value"`
	Default any    `json:"default"`
	Unit    string `json:"unit,omitempty"`
	// Source is flag, variable, file, policy or default; Name the flag, variable or file.
	Source string `json:"source"`
	Name   string `json:"name,omitempty"`
}

func printConfig(s *streams, set *settings) (err error) {
	res, err := s.openResult(set.Output.JSON)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, res.close()) }()
	r := configResult{File: set.file}
	values := set.Values()
	t := newTable()
	t.line("SETTING\tVALUE\tFROM")
	for _, k := range configs.Schema {
		from := set.sources[k.Name]
		if k.Secret && values[k.Name] != k.Default {
			values[k.Name] = hidden
		}
		r.Settings = append(r.Settings, settingResult{k.Name, values[k.Name], k.Default, k.Unit, from.Kind, from.Name})
		shown := values[k.Name]
		if shown == "" {
			shown = `""`
		}
		t.line("%s\t%v\t%s", k.Name, shown, from)
	}
	if !res.onStdout() {
		if err := t.print(s.out); err != nil {
			return err
		}
	}
	return res.write(r)
}
