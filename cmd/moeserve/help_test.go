package main

import (
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/moeserve/moeserve/configs"
)

// everyCommand calls f with each command line that has a help of its own.
func everyCommand(f func(path []string)) {
	var walk func(c *cobra.Command, path []string)
	walk = func(c *cobra.Command, path []string) {
		f(path)
		for _, below := range c.Commands() {
			walk(below, append(path[:len(path):len(path)], below.Name()))
		}
	}
	walk(newRoot(&streams{}), nil)
}

// The help of every command, short and complete, fits a terminal, and is what it was.
func TestHelp(t *testing.T) {
	for _, flag := range []string{"--help", "--help-all"} {
		var all strings.Builder
		everyCommand(func(path []string) {
			stdout, stderr, code := invoke(t, strings.NewReader(""), append(path[:len(path):len(path)], flag)...)
			if flag == "--help-all" && code == exitUsage && strings.Contains(stderr, "there is no flag --help-all") {
				return // it has no settings
			}
			if code != exitDone || stderr != "" {
				t.Errorf("%v: exit code %d: %s", path, code, stderr)
			}
			for line := range strings.Lines(stdout) {
				line = strings.TrimSuffix(line, "\n")
				if n := utf8.RuneCountInString(line); n > helpWidth {
					t.Errorf("%v: %d columns: %s", path, n, line)
				}
				if strings.TrimRight(line, " ") != line {
					t.Errorf("%v: blanks at the end of %q", path, line)
				}
			}
			all.WriteString("\n# moeserve " + strings.Join(append(path[:len(path):len(path)], flag), " ") + "\n" + stdout)
		})
		golden(t, strings.TrimLeft(flag, "-")+".txt", strings.TrimPrefix(all.String(), "\n"))
	}
}

// Lists in the text of a command are paragraphs of their own: others are wrapped.
func TestHelpLists(t *testing.T) {
	var walk func(c *cobra.Command)
	walk = func(c *cobra.Command) {
		for paragraph := range strings.SplitSeq(c.Long, "\n\n") {
			if !strings.HasPrefix(paragraph, "  ") && strings.Contains(paragraph, "\n  ") {
				t.Errorf("%s: there is a list in the paragraph %q", c.CommandPath(), paragraph)
			}
		}
		for _, sub := range c.Commands() {
			walk(sub)
		}
	}
	walk(newRoot(&streams{}))
}

// Help shows each setting that is not rare, complete help each one.
func TestHelpHasSettings(t *testing.T) {
	for _, command := range []string{"run", "chat", "serve", "inspect", "plan", "bench throughput", "bench sweep", "bench figure", "bench harvest", "bench transfer", "bench multipath", "bench kv", "bench kernels", "bench prefix", "bench fairness", "bench sleep", "config"} {
		help, _, _ := invoke(t, nil, append(strings.Fields(command), "--help")...)
		all, _, _ := invoke(t, nil, append(strings.Fields(command), "--help-all")...)
		for _, k := range configs.For(command) {
			flag := "--" + k.Name + " "
			if k.Kind == configs.Bool {
				flag = "--" + k.Name
			}
			if strings.Contains(help, "  "+flag) && k.Rare || !strings.Contains(help, " "+flag) && !k.Rare || !strings.Contains(all, " "+flag) {
				t.Errorf("%s: --%s, which is rare: %v", command, k.Name, k.Rare)
			}
		}
	}
}

// A flag has the same letter in all commands, and none is one that is said to be another
// program's.
func TestFlagsAreTheSame(t *testing.T) {
	everyCommand(func(path []string) {
		c, _, err := newRoot(&streams{}).Find(path)
		if err != nil {
			t.Fatal(err)
		}
		for name, letter := range map[string]string{"model": "m", "max-tokens": "n", "verbose": "v", "quiet": "q"} {
			if f := c.Flags().Lookup(name); f != nil && f.Shorthand != letter {
				t.Errorf("%v: --%s has the letter %q", path, name, f.Shorthand)
			}
			if f := c.Flags().ShorthandLookup(letter); f != nil && f.Name != name {
				t.Errorf("%v: -%s is --%s", path, letter, f.Name)
			}
		}
		for name := range foreign {
			if c.Flags().Lookup(strings.TrimPrefix(name, "--")) != nil {
				t.Errorf("%v: %s is a flag, and said to be another's", path, name)
			}
		}
	})
}

func TestWrap(t *testing.T) {
	for _, c := range []struct {
		text  string
		width int
		want  string
	}{
		{"", 5, ""},
		{"one", 5, "one"},
		{"one two", 7, "one two"},
		{"one two", 6, "one|two"},
		{"one\ntwo  three", 9, "one two|three"},
		{"incomprehensible x", 5, "incomprehensible|x"},
		{"a (default" + noBreak + "b)", 12, "a|(default b)"},
	} {
		if got := strings.Join(wrap(c.text, c.width), "|"); got != c.want {
			t.Errorf("%q in %d: %q, want %q", c.text, c.width, got, c.want)
		}
	}
}
