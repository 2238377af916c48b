package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
	"go.uber.org/goleak"

	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/node/fault"
	"github.com/moeserve/moeserve/tools/fixtures"
	"github.com/moeserve/moeserve/tools/racedetector"
)

// TestMain puts this test binary on the PATH as moeserve, for scripts and for the
// README's commands.
func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"moeserve": main})
}

func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir: filepath.Join("testdata", "script"),
		Setup: func(env *testscript.Env) error {
			env.Values["t"] = t
			env.Setenv("GORACE", os.Getenv("GORACE"))
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"fails":    scriptFails,
			"exits":    scriptExits,
			"fixture":  scriptFixture,
			"replace":  scriptReplace,
			"truncate": scriptTruncate,
			"sameas":   scriptSameAs,
		},
		Condition: func(name string) (bool, error) {
			if name == "race" {
				return racedetector.Enabled, nil
			}
			return false, fmt.Errorf("there is no condition %q", name)
		},
		RequireExplicitExec: true,
		RequireUniqueNames:  true,
	})
}

// scriptFails runs "fails CODE COMMAND ARG…": the command must end with that exit
// code, one line on standard error, none on standard output, and no file that it
// did not finish.
func scriptFails(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: fails CODE COMMAND ARG…")
	}
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	err = ts.Exec(args[1], args[2:]...)
	var exit *exec.ExitError
	if !errors.As(err, &exit) {
		ts.Fatalf("did not fail: %v", err)
	}
	if exit.ExitCode() != want {
		ts.Fatalf("exit code %d, want %d", exit.ExitCode(), want)
	}
	if out := ts.ReadFile("stdout"); out != "" {
		ts.Fatalf("standard output has %q", out)
	}
	text := ts.ReadFile("stderr")
	if !strings.HasPrefix(text, "moeserve: ") || strings.Count(text, "\n") != 1 || !strings.HasSuffix(text, "\n") {
		ts.Fatalf("standard error is not one line of moeserve's")
	}
	if left, _ := filepath.Glob(ts.MkAbs("*.partial")); left != nil {
		ts.Fatalf("left behind: %v", left)
	}
}

// scriptExits runs "exits CODE COMMAND ARG…": the command must end with that exit code.
func scriptExits(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: exits CODE COMMAND ARG…")
	}
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	err = ts.Exec(args[1], args[2:]...)
	code := 0
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		code = exit.ExitCode()
	} else {
		ts.Check(err)
	}
	if code != want {
		ts.Fatalf("exit code %d, want %d", code, want)
	}
}

// scriptFixture runs "fixture NAME DIR": copies a checkpoint of testdata/fixtures.
func scriptFixture(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 2 {
		ts.Fatalf("usage: fixture NAME DIR")
	}
	ts.Check(copyFixture(ts.Value("t").(*testing.T), args[0], ts.MkAbs(args[1])))
}

// copyFixture puts the files of a fixture into a directory, where a test may spoil
// them.
func copyFixture(t testing.TB, name, into string) error {
	from := fixtures.Dir(t, name)
	if err := os.MkdirAll(into, 0o777); err != nil {
		return err
	}
	entries, err := os.ReadDir(from)
	if err != nil {
		return err
	}
	for _, e := range entries {
		data, err := os.ReadFile(filepath.Join(from, e.Name()))
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(into, e.Name()), data, 0o666); err != nil {
			return err
		}
	}
	return nil
}

// scriptReplace runs "replace FILE OLD NEW".
func scriptReplace(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 3 {
		ts.Fatalf("usage: replace FILE OLD NEW")
	}
	text := ts.ReadFile(args[0])
	if !strings.Contains(text, args[1]) {
		ts.Fatalf("%s does not contain %q", args[0], args[1])
	}
	ts.Check(os.WriteFile(ts.MkAbs(args[0]), []byte(strings.ReplaceAll(text, args[1], args[2])), 0o666))
}

// scriptTruncate runs "truncate FILE BYTES".
func scriptTruncate(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 2 {
		ts.Fatalf("usage: truncate FILE BYTES")
	}
	n, err := strconv.ParseInt(args[1], 10, 64)
	ts.Check(err)
	ts.Check(os.Truncate(ts.MkAbs(args[0]), n))
}

// scriptSameAs runs "sameas FILE": the last command's standard output is the
// file's text.
func scriptSameAs(ts *testscript.TestScript, neg bool, args []string) {
	if len(args) != 1 {
		ts.Fatalf("usage: [!] sameas FILE")
	}
	if got, want := ts.ReadFile("stdout"), ts.ReadFile(args[0]); (got == want) == neg {
		ts.Fatalf("standard output is %q, %s has %q", got, args[0], want)
	}
}

// fixedNow is a clock that stands still, so that no progress is shown.
func fixedNow() time.Time { return time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC) }

// invoke runs a command line in this process.
func invoke(t *testing.T, stdin io.Reader, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	var out, errs bytes.Buffer
	code = execute(t.Context(), &streams{in: stdin, out: &out, err: &errs, now: fixedNow}, args)
	return out.String(), errs.String(), code
}

// Every architecture says what the reference says, with half of its experts
// elsewhere, and leaves no goroutine behind.
func TestFixturesAnswerAsTheReference(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	for _, name := range []string{"mixtral", "phimoe", "qwen2_moe", "qwen3_moe", "olmoe", "mixtral_fused"} {
		t.Run(name, func(t *testing.T) {
			dir := fixtureDir(t, name)
			for i, text := range fixtures.Load(t, name).Texts {
				args := []string{
					"run", "--model", dir, "--raw", "--offload-fraction", "0.5", "--ignore-eos", "--quiet",
					"--max-tokens", strconv.Itoa(len(text.GreedyIDs)), "--max-num-batched-tokens", "64",
				}
				// In turn as an argument and on standard input.
				stdin := io.Reader(strings.NewReader(""))
				if i%2 == 0 {
					args = append(args, "--", text.Prompt)
				} else {
					stdin = strings.NewReader(text.Prompt)
				}
				stdout, stderr, code := invoke(t, stdin, args...)
				if code != exitDone || stdout != text.GreedyText+"\n" || stderr != "" {
					t.Errorf("prompt %q: exit code %d, %q, want %q; %s", text.Prompt, code, stdout, text.GreedyText, stderr)
				}
			}
		})
	}
}

func fixtureDir(t *testing.T, name string) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), name)
	if err := copyFixture(t, name, dir); err != nil {
		t.Fatal(err)
	}
	return dir
}

// An interrupt ends the process in order, whatever it is at.
func TestInterrupt(t *testing.T) {
	dir := t.TempDir()
	// Each layer waits 20 ms for its experts: the answer takes half a minute.
	cmd := exec.CommandContext(t.Context(), "moeserve", "run", "--emulate", "pace,latency=20ms", "--offload-fraction", "1",
		"--ignore-eos", "--max-tokens", "240", "--json", "out.json", "--log-level", "error", "1+2=")
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "TMPDIR="+dir)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := stdout.Read(make([]byte, 1)); err != nil {
		t.Fatalf("no first token: %v; %s", err, &stderr)
	}
	start := time.Now()
	if err := cmd.Process.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(io.Discard, stdout); err != nil {
		t.Error(err)
	}
	err = cmd.Wait()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != exitInterrupted {
		t.Errorf("ended with %v, want exit code %d", err, exitInterrupted)
	}
	if stderr.String() != "moeserve: interrupted\n" {
		t.Errorf("standard error: %q", &stderr)
	}
	if d := time.Since(start); d > time.Minute {
		t.Errorf("took %v to end", d)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

// So it does while a prompt is waited for.
func TestInterruptedPrompt(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	in, typist := io.Pipe()
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(10*time.Millisecond, cancel)
	var errs bytes.Buffer
	code := execute(ctx, &streams{in: in, out: io.Discard, err: &errs}, []string{"run"})
	if code != exitInterrupted || errs.String() != "moeserve: interrupted\n" {
		t.Errorf("exit code %d, %q", code, &errs)
	}
	if err := typist.Close(); err != nil {
		t.Error(err)
	}
}

// And while a model is loaded.
func TestInterruptedLoad(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(50*time.Millisecond, cancel)
	var errs bytes.Buffer
	// Some 150 copies of 50 ms each.
	code := execute(ctx, &streams{in: strings.NewReader(""), out: io.Discard, err: &errs}, []string{"run", "--emulate", "pace,latency=50ms", "1+2="})
	if code != exitInterrupted || errs.String() != "moeserve: interrupted\n" {
		t.Errorf("exit code %d, %q", code, &errs)
	}
}

// A reader who goes away ends the generation.
func TestBrokenOutput(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	t.Chdir(t.TempDir())
	var errs bytes.Buffer
	code := execute(t.Context(), &streams{in: strings.NewReader(""), out: brokenWriter{}, err: &errs}, []string{"run", "--log-level", "error", "12+34="})
	if code != exitFailed || errs.String() != "moeserve: write the completion: the reader is gone\n" {
		t.Errorf("exit code %d, %q", code, &errs)
	}
}

type brokenWriter struct{}

func (brokenWriter) Write([]byte) (int, error) { return 0, errors.New("the reader is gone") }

func TestReadPrompt(t *testing.T) {
	text := func(s string) *string { return &s }
	for _, c := range []struct {
		in   string
		ids  string
		arg  *string
		want string
	}{
		{"not read", "", text("text\n"), "text\n"},
		{"piped", "", nil, "piped"},
		{"piped\n", "", nil, "piped"},
		{"piped\r\n", "", nil, "piped"},
		{"two\nlines\n\n", "", text("-"), "two\nlines\n"},
		{"not read", "1,2", nil, ""},
	} {
		p, err := readPrompt(t.Context(), strings.NewReader(c.in), &settings{}, &runOptions{promptIDs: c.ids, prompt: c.arg})
		if err != nil || p.text != c.want || (c.ids != "") != slices.Equal(p.ids, []int32{1, 2}) {
			t.Errorf("%q: %+v, %v", c.in, p, err)
		}
	}
	endless := io.LimitReader(zeros{}, maxPromptBytes+1)
	if _, err := readPrompt(t.Context(), endless, &settings{}, &runOptions{}); exitCode(err) != exitUsage {
		t.Errorf("a prompt of %d bytes: %v", maxPromptBytes+1, err)
	}
	if _, err := parseIDs("2147483648"); exitCode(err) != exitUsage {
		t.Errorf("an id of 32 bits: %v", err)
	}
}

// zeros is a reader without end.
type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

func TestExitCode(t *testing.T) {
	for _, c := range []struct {
		err  error
		want int
	}{
		{errors.New("x"), exitFailed},
		{fmt.Errorf("a: %w", context.Canceled), exitInterrupted},
		{fmt.Errorf("a: %w", usagef("b")), exitUsage},
		{fs.ErrNotExist, exitFailed},
		{fmt.Errorf("a: %w", fault.ErrConfig), exitUsage},
		{fmt.Errorf("a: %w", engine.ErrPromptTooLong), exitUsage},
		{fmt.Errorf("a: %w", engine.ErrBadRequest), exitUsage},
		{fmt.Errorf("a: %w", fault.ErrModel), exitModel},
		{fmt.Errorf("a: %w", fault.ErrDevice), exitDevice},
		{fmt.Errorf("a: %w", fault.ErrLost), exitDevice},
		// What a device refuses because of its specification is the user's to mend.
		{errors.Join(fault.ErrDevice, fault.ErrConfig), exitUsage},
	} {
		if got := exitCode(c.err); got != c.want {
			t.Errorf("%v: exit code %d, want %d", c.err, got, c.want)
		}
	}
}

func TestTally(t *testing.T) {
	tiers := slices.Concat(slices.Repeat([]string{"resident"}, 3), slices.Repeat([]string{"host"}, 2), []string{"resident"})
	if got := tally(tiers); got != "R 4  H 2" {
		t.Errorf("%q", got)
	}
	lines := layerLines([]layerTiers{{1, tiers}, {2, tiers}, {4, tiers[1:]}}, letters)
	if want := []string{"1-2    RRRHHR", "4      RRHHR"}; !slices.Equal(lines, want) {
		t.Errorf("%q, want %q", lines, want)
	}
}

// run says that the context, not --max-tokens, ends the completion; not with --quiet, and not where both or
// --max-tokens alone do.
func TestContextEnds(t *testing.T) {
	for _, c := range []struct {
		tokens string
		quiet  bool
		want   string // empty: no note
	}{
		{tokens: "1000", want: "moeserve: the context ends the completion after 29 of --max-tokens 1000: prompt and completion have at most 32 tokens together (--max-model-len)\n"},
		{tokens: "30", want: "moeserve: the context ends the completion after 29 of --max-tokens 30: prompt and completion have at most 32 tokens together (--max-model-len)\n"},
		{tokens: "1000", quiet: true},
		{tokens: "29"},
		{tokens: "5"},
	} {
		args := []string{"run", "--prompt-ids", "1,2,3", "--ignore-eos", "--max-model-len", "32", "--max-tokens", c.tokens}
		if c.quiet {
			args = append(args, "--quiet")
		}
		_, stderr, code := invoke(t, strings.NewReader(""), args...)
		if code != exitDone || !strings.HasPrefix(stderr, c.want) || (c.want == "" && strings.Contains(stderr, "context")) || c.quiet && stderr != "" {
			t.Errorf("--max-tokens %s, quiet %v: exit code %d, %q", c.tokens, c.quiet, code, stderr)
		}
	}
	_, stderr, code := invoke(t, strings.NewReader(""), "run", "--log-format", "json", "--max-model-len", "32", "--ignore-eos", "--max-tokens", "99", "1+2=")
	if code != exitDone || !strings.Contains(stderr, `"level":"WARN","msg":"the context ends the completion after `) {
		t.Errorf("exit code %d: %s", code, stderr)
	}
}
