package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/node/sizing"
)

var update = flag.Bool("update", false, "write the parts of README.md that are generated")

const (
	readme      = "../../README.md"
	testCommand = "go test ./..."
)

// codeBlock is a fenced block, and the HTML comment on the line before it.
type codeBlock struct{ mark, language, text string }

var fenced = regexp.MustCompile("(?m)(?:^<!-- (\\w+) -->\n)?^```(\\w*)\n((?s:.*?))^```$")

func codeBlocks(t *testing.T) []codeBlock {
	t.Helper()
	text, err := os.ReadFile(readme)
	if err != nil {
		t.Fatal(err)
	}
	var blocks []codeBlock
	for _, m := range fenced.FindAllStringSubmatch(string(text), -1) {
		blocks = append(blocks, codeBlock{m[1], m[2], m[3]})
	}
	return blocks
}

// Every command of the README runs, as it stands but for four things: go run is
// this test's binary, checkpoints are a fixture, ports are free ones, and the tests
// are not run from within. What they leave behind is not offered to be committed.
func TestREADMECommands(t *testing.T) {
	if _, err := exec.LookPath("bash"); err != nil {
		t.Skip("no bash to run the README's commands with")
	}
	ignored, err := os.ReadFile(filepath.Join("..", "..", ".gitignore"))
	if err != nil {
		t.Fatal(err)
	}
	fixture := fixtureDir(t, "mixtral")
	ran := 0
	for _, b := range codeBlocks(t) {
		switch {
		case b.language == "text" || b.mark == "test":
			continue
		case b.language == "python":
			continue // TestREADMEPython
		case b.language != "bash":
			t.Errorf("a block of %q: only bash and python are run, and text is output", b.language)
			continue
		}
		if strings.Contains(b.text, "curl ") {
			if _, err := exec.LookPath("curl"); err != nil {
				t.Log("no curl: its block is not run")
				continue
			}
		}
		ran++
		script := strings.ReplaceAll(b.text, "go run ./cmd/moeserve", "moeserve")
		if !strings.Contains(script, "moeserve ") {
			t.Errorf("a block that does not call moeserve:\n%s", script)
		}
		if raceDetector && strings.Contains(script, "phi-tiny-moe") {
			continue // 0.7 GB of weights
		}
		script = regexp.MustCompile(`/models/[\w.-]+`).ReplaceAllLiteralString(script, fixture)
		if strings.Contains(script, "8000") {
			port := freePort(t)
			script = strings.ReplaceAll(script, "moeserve serve", "moeserve serve --port "+port)
			script = strings.ReplaceAll(script, "8000", port)
		}
		cmd := exec.CommandContext(t.Context(), "bash", "-euo", "pipefail", "-c", script)
		cmd.Dir = t.TempDir()
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%v\n%s\n%s", err, script, out)
		}
		left, err := os.ReadDir(cmd.Dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range left {
			if !strings.Contains(string(ignored), "\n/"+f.Name()+"\n") {
				t.Errorf("%s is left behind, and .gitignore has no /%[1]s; by\n%s", f.Name(), script)
			}
		}
	}
	if ran < 5 {
		t.Errorf("only %d blocks of commands: the pattern has lost them", ran)
	}
}

// Whoever waits for a server that could not start does not wait for ever.
func TestREADMEWaitsForServer(t *testing.T) {
	for _, program := range []string{"bash", "curl"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Skipf("no %s to run the README's commands with", program)
		}
	}
	for _, b := range codeBlocks(t) {
		serve, rest, ok := strings.Cut(b.text, "&\n")
		if !ok {
			continue
		}
		wait, _, _ := strings.Cut(rest, "\n")
		if !strings.Contains(wait, "curl ") {
			t.Fatalf("the README does not wait for the server that it starts, but does %s", wait)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		script := strings.TrimSpace(serve) + " --gpu 7 &\n" + strings.ReplaceAll(wait, "8000", freePort(t)) + "\nwait $!"
		cmd := exec.CommandContext(ctx, "bash", "-c", script)
		cmd.Dir = t.TempDir()
		out, err := cmd.CombinedOutput()
		var exit *exec.ExitError
		if !errors.As(err, &exit) || exit.ExitCode() != exitUsage {
			t.Errorf("%v\n%s\n%s", err, script, out)
		}
		return
	}
	t.Error("the README starts no server")
}

// freePort is one that was free a moment ago.
func freePort(t *testing.T) string {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close() //nolint:errcheck // nobody has connected
	return strconv.Itoa(l.Addr().(*net.TCPAddr).Port)
}

// The Python of the README says what the README says, where there is the client.
func TestREADMEPython(t *testing.T) {
	python := os.Getenv("MOESERVE_PYTHON")
	if python == "" {
		python = "python3"
	}
	if out, err := exec.CommandContext(t.Context(), python, "-c", "import openai").CombinedOutput(); err != nil {
		t.Skipf("%s has no package openai to run the README's Python with (MOESERVE_PYTHON names another): %v %s", python, err, out)
	}
	p := startServe(t)
	ran := 0
	for _, b := range codeBlocks(t) {
		if b.language != "python" {
			continue
		}
		ran++
		cmd := exec.CommandContext(t.Context(), python, "-c", strings.ReplaceAll(b.text, "http://127.0.0.1:8000", p.url))
		out, err := cmd.CombinedOutput()
		if err != nil || string(out) != "Ben has the red ball.\nBen has the red ball.\n" {
			t.Errorf("%v\n%s\nprints %q", err, b.text, out)
		}
	}
	if ran == 0 {
		t.Error("no Python in the README")
	}
}

// The first command is followed by what it prints, and the tests' command is where
// CI looks for it.
func TestREADMEOutput(t *testing.T) {
	blocks := codeBlocks(t)
	if len(blocks) < 3 || blocks[0].language != "bash" || blocks[1].mark != "output" || blocks[2] != (codeBlock{"test", "bash", testCommand + "\n"}) {
		t.Fatalf("the README does not begin with a command, its output, and %s", testCommand)
	}
	cmd := exec.CommandContext(t.Context(), "bash", "-c", strings.ReplaceAll(strings.TrimSpace(blocks[0].text), "go run ./cmd/moeserve", "moeserve")+" 2>&1")
	cmd.Dir = t.TempDir()
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if *update {
		rewrite(t, func(text string) string {
			return strings.Replace(text, "<!-- output -->\n```text\n"+blocks[1].text, "<!-- output -->\n```text\n"+string(out), 1)
		})
		return
	}
	// Times, memory, and what happened to be cached or with peers differ; nothing else may.
	stable := func(text string) string {
		for _, p := range []struct{ pattern, with string }{
			{`\d+(\.\d+)? (us|ms|s)\b`, "T"},
			{`\d+(\.\d+)? tokens/s`, "R"},
			{`\d+(\.\d+)? ([KMGT]i)?B\b`, "M"},
			{`\d+(\.\d+)? [kMG]B/s`, "S"},
			{`(?m)^experts  .*`, "W"},
			// Experts may be promoted to peers within the run.
			{`, \d+ in peer memory`, ""},
			{`, (gpu[12]|\d peers) M of M`, ""},
			{`(?m)^copies   (gpu[12]|\d peers) to .*\n`, ""},
		} {
			text = regexp.MustCompile(p.pattern).ReplaceAllString(text, p.with)
		}
		return text
	}
	if got, want := stable(string(out)), stable(blocks[1].text); got != want {
		t.Errorf("the first command prints\n%s\nand the README says\n%s\n(go test ./cmd/moeserve -run README -update writes it)", out, blocks[1].text)
	}
}

// rewrite changes the README.
func rewrite(t *testing.T, change func(text string) string) {
	t.Helper()
	text, err := os.ReadFile(readme)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(readme, []byte(change(string(text))), 0o666); err != nil {
		t.Fatal(err)
	}
}

// The tables of the README are what the schema and the presets say.
func TestREADMETables(t *testing.T) {
	for name, want := range map[string]string{"settings": settingsTable(), "presets": presetsTable(t)} {
		// A mark, an empty line, and lines that begin with a bar.
		table := regexp.MustCompile(`(?m)^<!-- ` + name + ` -->\n\n((?:\|.*\n)*)`)
		if *update {
			rewrite(t, func(text string) string {
				return table.ReplaceAllLiteralString(text, "<!-- "+name+" -->\n\n"+want)
			})
			continue
		}
		text, err := os.ReadFile(readme)
		if err != nil {
			t.Fatal(err)
		}
		m := table.FindSubmatch(text)
		if m == nil {
			t.Fatalf("no table of %s", name)
		}
		if string(m[1]) != want {
			t.Errorf("the table of %s is\n%s\nwant\n%s\n(go test ./cmd/moeserve -run README -update writes it)", name, m[1], want)
		}
	}
}

func settingsTable() string {
	var b strings.Builder
	b.WriteString("| setting | default | what |\n|---|---|---|\n")
	for _, k := range configs.Schema {
		def := fmt.Sprintf("`%v`", k.Default)
		if k.Default == "" {
			def = ""
		}
		help := k.Help
		if k.Allowed != nil {
			help += " (" + strings.Join(k.Allowed, ", ") + ")"
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s |\n", k.Name, def, strings.ReplaceAll(help, "|", `\|`))
	}
	return b.String()
}

func presetsTable(t *testing.T) string {
	t.Helper()
	var b strings.Builder
	b.WriteString("| preset | parameters | experts | one expert | all experts | all else |\n|---|---|---|---|---|---|\n")
	for _, name := range configs.PresetNames() {
		s := configs.Defaults()
		s.Model.Name = name
		in, err := node.Inspect(node.Options{Settings: s})
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&b, "| `%s` | %s | %d layers of %d, %d per token | %s | %s | %s |\n", name, grouped(in.Sizes.Parameters),
			in.Config.MoELayers(), in.Config.Experts, in.Config.TopK, sizing.Bytes(in.Sizes.ExpertBytes), sizing.Bytes(in.Sizes.Experts), sizing.Bytes(in.Sizes.Other))
	}
	return b.String()
}

// A command that the README shows is one that there is, in blocks and in text.
func TestREADMENamesWhatThereIs(t *testing.T) {
	text, err := os.ReadFile(readme)
	if err != nil {
		t.Fatal(err)
	}
	root := newRoot(&streams{})
	var commands []string
	for _, c := range root.Commands() {
		commands = append(commands, c.Name())
	}
	for _, m := range regexp.MustCompile("[`/]moeserve (\\w[\\w-]*)").FindAllStringSubmatch(string(text), -1) {
		if !slices.Contains(commands, m[1]) {
			t.Errorf("the README calls moeserve %s", m[1])
		}
	}
	flags := pflag.NewFlagSet("all", pflag.ContinueOnError)
	for _, c := range root.Commands() {
		for _, c := range append(c.Commands(), c) {
			c.InitDefaultHelpFlag()
			flags.AddFlagSet(c.Flags())
		}
	}
	for _, m := range regexp.MustCompile(`--([a-z][\w-]*)`).FindAllStringSubmatch(string(text), -1) {
		if flags.Lookup(m[1]) == nil {
			t.Errorf("the README has a flag --%s", m[1])
		}
	}
	makefile, err := os.ReadFile(filepath.Join("..", "..", "Makefile"))
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range regexp.MustCompile("`make (\\w+)`").FindAllStringSubmatch(string(text), -1) {
		if !strings.Contains(string(makefile), "\n"+m[1]+":") {
			t.Errorf("the README calls make %s", m[1])
		}
	}
}
