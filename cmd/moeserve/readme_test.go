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
	"github.com/moeserve/moeserve/tools/racedetector"
)

var update = flag.Bool("update", false, "write what is generated: golden files, docs/reference, the output in README.md")

const (
	readme      = "../../README.md"
	testCommand = "go test ./..."
)

// guides are the pages whose commands are run: README.md and those of docs/guide.
func guides(t *testing.T) []string {
	t.Helper()
	names, err := filepath.Glob("../../docs/guide/*.md")
	if err != nil || len(names) < 5 {
		t.Fatalf("%d guide pages: %v", len(names), err)
	}
	return append([]string{readme}, names...)
}

// codeBlock is a fenced block, and the HTML comment on the line before it: "skip: WHY" where it
// cannot be run here, "fails" where it shows an error, "test" and "output" in README.md.
type codeBlock struct{ mark, why, language, text string }

var fenced = regexp.MustCompile("(?m)(?:^<!-- (\\w+)(?:: (.*))? -->\n)?^```(\\w*)\n((?s:.*?))^```$")

func codeBlocks(t *testing.T, page string) []codeBlock {
	t.Helper()
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	var blocks []codeBlock
	for _, m := range fenced.FindAllStringSubmatch(string(text), -1) {
		blocks = append(blocks, codeBlock{m[1], m[2], m[3], m[4]})
	}
	return blocks
}

// Every command of the guide runs, as it stands but for five things: go run is
// this test's binary, checkpoints are a fixture, files of the clone are in it, ports are free ones, and the tests
// are not run from within. What they leave behind is not offered to be committed. Of those
// that need what is not here the flags are checked.
func TestGuideCommands(t *testing.T) {
	if _, err := exec.LookPath("bash"); err != nil {
		t.Skip("no bash to run the commands with")
	}
	ignored, err := os.ReadFile(filepath.Join("..", "..", ".gitignore"))
	if err != nil {
		t.Fatal(err)
	}
	fixture := fixtureDir(t, "mixtral")
	for _, page := range guides(t) {
		t.Run(filepath.Base(page), func(t *testing.T) {
			ran := 0
			for _, b := range codeBlocks(t, page) {
				switch {
				case b.mark != "" && !slices.Contains([]string{"test", "output", "skip", "fails"}, b.mark):
					t.Errorf("a block is marked %q", b.mark)
				case b.language != "bash":
					if !slices.Contains([]string{"", "text", "json", "python"}, b.language) {
						t.Errorf("a block of %q", b.language)
					}
				case b.mark == "test":
				case b.mark == "skip" && b.why == "":
					t.Errorf("a block is skipped without a reason:\n%s", b.text)
				default:
					ran++
					checkCommands(t, b.text)
					if b.mark == "skip" {
						t.Logf("not run (%s):\n%s", b.why, b.text)
						continue
					}
					runBlock(t, b, fixture, string(ignored))
				}
			}
			if ran == 0 {
				t.Error("no command: the pattern has lost them")
			}
		})
	}
}

// checkCommands holds a block to commands that there are, with flags that they have.
func checkCommands(t *testing.T, script string) {
	t.Helper()
	for _, m := range regexp.MustCompile(`(?m)^(?:\w+=\S+ )*moeserve (.*)$`).FindAllStringSubmatch(strings.ReplaceAll(script, "\\\n", ""), -1) {
		line := regexp.MustCompile(`'[^']*'`).ReplaceAllString(m[1], "TEXT")
		line, _, _ = strings.Cut(line, " #")
		line, _, _ = strings.Cut(line, " >")
		cmd, rest, err := newRoot(&streams{}).Find(strings.Fields(strings.TrimRight(line, "& ")))
		if err == nil {
			err = cmd.ParseFlags(rest)
		}
		if err != nil || !cmd.HasParent() {
			t.Errorf("moeserve %s: %v", m[1], err)
		}
	}
}

// runBlock runs the commands of a block.
func runBlock(t *testing.T, b codeBlock, fixture, ignored string) {
	t.Helper()
	if strings.Contains(b.text, "curl ") {
		if _, err := exec.LookPath("curl"); err != nil {
			t.Log("no curl: its block is not run")
			return
		}
	}
	script := strings.ReplaceAll(b.text, "go run ./cmd/moeserve", "moeserve")
	if !strings.Contains(script, "moeserve ") {
		t.Errorf("a block that does not call moeserve:\n%s", script)
	}
	if racedetector.Enabled && strings.Contains(script, "phi-tiny-moe") {
		return // 0.7 GB of weights
	}
	if racedetector.Enabled && !strings.Contains(script, "moeserve serve") {
		return // minutes in all: the tests of these commands run under it, too
	}
	script = regexp.MustCompile(`/models/[\w.-]+`).ReplaceAllLiteralString(script, fixture)
	if strings.Contains(script, "8000") {
		port := freePort(t)
		script = strings.ReplaceAll(script, "moeserve serve", "moeserve serve --port "+port)
		script = strings.ReplaceAll(script, "8000", port)
	}
	if strings.Contains(script, "8001") { // the admin address
		script = strings.ReplaceAll(script, "8001", freePort(t))
	}
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	for _, of := range []string{" models/tiny/", " examples/"} { // files of the clone
		script = strings.ReplaceAll(script, of, " "+root+"/"+strings.TrimSpace(of))
	}
	cmd := exec.CommandContext(t.Context(), "bash", "-euo", "pipefail", "-c", script)
	cmd.Dir = t.TempDir()
	if out, err := cmd.CombinedOutput(); (err != nil) != (b.mark == "fails") {
		t.Errorf("%v\n%s\n%s", err, script, out)
	}
	left, err := os.ReadDir(cmd.Dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range left {
		if !strings.Contains(ignored, "\n/"+f.Name()+"\n") {
			t.Errorf("%s is left behind, and .gitignore has no /%[1]s; by\n%s", f.Name(), script)
		}
	}
}

// A script that waits for a server that could not start does not wait for ever.
func TestREADMEWaitsForServer(t *testing.T) {
	for _, program := range []string{"bash", "curl"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Skipf("no %s to run the commands with", program)
		}
	}
	for _, b := range codeBlocks(t, readme) {
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

// The Python of the guide prints the model's completion, where there is the client.
func TestGuidePython(t *testing.T) {
	python := os.Getenv("MOESERVE_PYTHON")
	if python == "" {
		python = "python3"
	}
	if out, err := exec.CommandContext(t.Context(), python, "-c", "import openai").CombinedOutput(); err != nil {
		t.Skipf("%s has no package openai to run the guide's Python with (MOESERVE_PYTHON names another): %v %s", python, err, out)
	}
	p := startServe(t)
	ran := 0
	var blocks []codeBlock
	for _, page := range guides(t) {
		blocks = append(blocks, codeBlocks(t, page)...)
	}
	for _, b := range blocks {
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
		t.Error("no Python in the guide")
	}
}

// The agents of README.md and the guide have the built-in model call a tool and answer its result, where their packages are.
func TestGuideAgents(t *testing.T) {
	python := os.Getenv("MOESERVE_PYTHON")
	if python == "" {
		python = "python3"
	}
	if out, err := exec.CommandContext(t.Context(), python, "-c", "import agents, pydantic_ai.models.openai").CombinedOutput(); err != nil {
		t.Skipf("%s has not both openai-agents and pydantic-ai-slim[openai] to run the examples with (MOESERVE_PYTHON names another): %v %s", python, err, out)
	}
	guide := codeBlocks(t, "../../docs/guide/agents.md")
	prints := slices.IndexFunc(guide, func(b codeBlock) bool { return b.language == "text" })
	if prints < 0 {
		t.Fatal("the guide does not say what agents print")
	}
	var commands []string
	for _, page := range []string{readme, "../../docs/guide/agents.md"} {
		found := 0
		for _, b := range codeBlocks(t, page) {
			for _, m := range regexp.MustCompile(`(?m)^python3 (examples/agents/\S+)$`).FindAllStringSubmatch(b.text, -1) {
				commands, found = append(commands, m[1]), found+1
			}
		}
		if found != 2 {
			t.Errorf("%s runs %d agents, want 2", page, found)
		}
	}
	p := startServe(t)
	slices.Sort(commands)
	for _, example := range slices.Compact(commands) {
		out, err := exec.CommandContext(t.Context(), python, filepath.Join("..", "..", example), p.url).CombinedOutput()
		if want := strings.Repeat(guide[prints].text, 2); err != nil || string(out) != want {
			t.Errorf("%s: %v, prints\n%s\nwant\n%s", example, err, out, want)
		}
	}
}

// The first command is followed by what it prints, and the tests' command is where
// CI looks for it.
func TestREADMEOutput(t *testing.T) {
	blocks := codeBlocks(t, readme)
	if len(blocks) < 3 || blocks[0].language != "bash" || blocks[1].mark != "output" || blocks[2] != (codeBlock{"test", "", "bash", testCommand + "\n"}) {
		t.Fatalf("the README does not begin with a command, its output, and %s", testCommand)
	}
	cmd := exec.CommandContext(t.Context(), "bash", "-c", strings.ReplaceAll(strings.TrimSpace(blocks[0].text), "go run ./cmd/moeserve", "moeserve")+" 2>&1")
	cmd.Dir = t.TempDir()
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	// Times, memory, and what happened to be cached or with peers differ; nothing else may.
	stable := func(text string) string {
		for _, p := range []struct{ pattern, with string }{
			{`\d+(\.\d+)? (µs|ms|s)\b`, "T"},
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
	got, want := stable(string(out)), stable(blocks[1].text)
	switch {
	case got == want:
	case *update:
		rewrite(t, func(text string) string {
			return strings.Replace(text, "<!-- output -->\n```text\n"+blocks[1].text, "<!-- output -->\n```text\n"+string(out), 1)
		})
	default:
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

func presetsTable(t *testing.T) string {
	t.Helper()
	var b strings.Builder
	b.WriteString("| preset | parameters | experts | one expert | all experts | non-expert weights |\n|---|---|---|---|---|---|\n")
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

// otherPrograms are command lines whose flags are not moeserve's.
var otherPrograms = regexp.MustCompile(`(?m)^(docker|helm|kubectl|install|systemctl) (.*\\\n)*.*$`)

// A command or flag that README.md, a guide page or the glossary names is one that there is, in blocks and in text.
func TestGuideNamesWhatThereIs(t *testing.T) {
	root := newRoot(&streams{})
	var commands []string
	for _, c := range root.Commands() {
		commands = append(commands, c.Name())
	}
	flags := pflag.NewFlagSet("all", pflag.ContinueOnError)
	for _, c := range root.Commands() {
		for _, c := range append(c.Commands(), c) {
			c.InitDefaultHelpFlag()
			flags.AddFlagSet(c.Flags())
		}
	}
	makefile, err := os.ReadFile(filepath.Join("..", "..", "Makefile"))
	if err != nil {
		t.Fatal(err)
	}
	// Other programs' flags.
	others := []string{"budget", "cells", "resume", "layers", "install", "cpu-offload-gb", "block-size", "local-dir"}
	for _, page := range append(guides(t), "../../docs/GLOSSARY.md") {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile("[`/]moeserve (\\w[\\w-]*)").FindAllStringSubmatch(string(text), -1) {
			if !slices.Contains(commands, m[1]) {
				t.Errorf("%s calls moeserve %s", page, m[1])
			}
		}
		text = otherPrograms.ReplaceAll(text, nil)
		for _, m := range regexp.MustCompile("[ `]--([a-z][\\w-]*)").FindAllStringSubmatch(string(text), -1) {
			if flags.Lookup(m[1]) == nil && !slices.Contains(others, m[1]) {
				t.Errorf("%s has a flag --%s", page, m[1])
			}
		}
		for _, m := range regexp.MustCompile("`make (\\w+)`").FindAllStringSubmatch(string(text), -1) {
			if !strings.Contains(string(makefile), "\n"+m[1]+":") {
				t.Errorf("%s calls make %s", page, m[1])
			}
		}
	}
}
