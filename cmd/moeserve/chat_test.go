package main

import (
	"bytes"
	"context"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/term"
)

// talk has a conversation on pipes.
func talk(t *testing.T, input string, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	return invoke(t, strings.NewReader(input), append([]string{"chat"}, args...)...)
}

// Lines are messages, and completions lines of standard output.
func TestChat(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	stdout, stderr, code := talk(t, "1+2=\n\n  reverse: d a c b =  \n123+456=")
	if code != exitDone || stdout != "3\nb c a d\n579\n" || stderr != "" {
		t.Errorf("exit code %d: %q, %q", code, stdout, stderr)
	}
	// The conversation ends at /exit.
	stdout, stderr, code = talk(t, "1+2=\n/exit\n2+3=\n", "built-in")
	if code != exitDone || stdout != "3\n" || stderr != "" {
		t.Errorf("exit code %d: %q, %q", code, stdout, stderr)
	}
}

// The model sees the messages before, until they are cleared or there is no room for them.
func TestChatRemembers(t *testing.T) {
	prompts := func(stderr string) (n []string) {
		for line := range strings.Lines(stderr) {
			if strings.HasPrefix(line, "[TTFT ") {
				_, rest, _ := strings.Cut(line, ", ")
				tokens, _, _ := strings.Cut(rest, " ")
				n = append(n, tokens)
			}
		}
		return n
	}
	stdout, stderr, code := talk(t, "1+2=\n1+2=\n/clear\n1+2=\n", "-v")
	if got := strings.Join(prompts(stderr), " "); code != exitDone || stdout != "3\n3\n3\n" || got != "6 14 6" {
		t.Errorf("exit code %d: %q, prompts of %q tokens: %s", code, stdout, got, stderr)
	}
	// 8 tokens a turn, and a completion is to have 4 of 32.
	stdout, stderr, code = talk(t, strings.Repeat("1+2=\n", 6), "--max-model-len", "32", "-n", "4", "-v")
	if got := strings.Join(prompts(stderr), " "); code != exitDone || strings.Count(stdout, "3\n") != 6 || got != "6 14 22 22 22 22" || strings.Count(stderr, "(the context is full: the oldest 2 messages are forgotten)") != 3 {
		t.Errorf("exit code %d: %q, prompts of %q tokens: %s", code, stdout, got, stderr)
	}
	// One message alone that is too long is refused, and the conversation goes on.
	stdout, stderr, code = talk(t, strings.Repeat("1+", 40)+"2=\n1+2=\n", "--max-model-len", "32")
	if code != exitDone || stdout != "3\n" || !strings.Contains(stderr, "prompt too long") {
		t.Errorf("exit code %d: %q, %q", code, stdout, stderr)
	}
}

func TestChatCommands(t *testing.T) {
	for _, c := range []struct{ input, args, stdout, stderr string }{
		{"/help\n", "", "", "/system [TEXT]       set the system message"},
		{"/set\n", "", "", "  max-tokens           128\n  temperature          0\n"},
		{"/set max-tokens 2\n123+456=\n", "", "57\n", ""},
		{"/set --max-tokens 2\n123+456=\n", "", "57\n", ""},
		{"/set max-tokens no\n", "", "", `max-tokens is "no": must be a whole number`},
		{"/set max-tokens 0\n123+456=\n", "", "579\n", `--max-tokens is 0: must be from 1 to `},
		{"/set temperatur 1\n", "", "", `there is no parameter "temperatur"; did you mean temperature?`},
		{"/set model x\n", "", "", `there is no parameter "model"; /set lists them`},
		{"/hlep\n", "", "", "there is no command /hlep; did you mean /help?"},
		{"/etc/passwd is what?\n", "", "", "// sends a message that begins with /"},
		{"/quit\n1+2=\n", "", "", ""},
		{"/system be brief\n1+2=\n/system\n1+2=\n", "", "3\n3\n", ""},
		{"1+2=\n", "--system brief", "3\n", ""},
	} {
		stdout, stderr, code := talk(t, c.input, strings.Fields(c.args)...)
		if code != exitDone || stdout != c.stdout || !strings.Contains(stderr, c.stderr) || c.stderr == "" && stderr != "" {
			t.Errorf("%q: exit code %d, %q, %q", c.input, code, stdout, stderr)
		}
	}
}

// Models that cannot talk are refused, before anything is loaded.
func TestChatNeedsAnInstructModel(t *testing.T) {
	base := fixtureDir(t, "mixtral")
	config := filepath.Join(base, "tokenizer_config.json")
	text, err := os.ReadFile(config)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(config, bytes.ReplaceAll(text, []byte("chat_template"), []byte("no_template")), 0o666); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		args string
		code int
		want string
	}{
		{base, exitUsage, "has no chat template: it is a base model, which continues a text (moeserve run); "},
		{"qwen3-30b-a3b", exitUsage, "chat needs a trained model, and qwen3-30b-a3b has no weights; download one (hf download Qwen/Qwen3-30B-A3B "},
		{base + " --load-format dummy", exitUsage, "chat needs a trained model"},
		{"nowhere", exitModel, `there is no model "nowhere"`},
		{"one two", exitUsage, "chat takes one MODEL, got 2 arguments: one two"},
	} {
		stdout, stderr, code := talk(t, "hello\n", strings.Fields(c.args)...)
		if code != c.code || stdout != "" || !strings.Contains(stderr, c.want) || strings.Count(stderr, "\n") != 1 {
			t.Errorf("%s: exit code %d, %q, %q", c.args, code, stdout, stderr)
		}
	}
}

// An interrupt stops a completion, and the conversation goes on.
func TestChatInterrupted(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	in, typist := io.Pipe()
	s := &streams{in: in, err: io.Discard}
	printed := make(chan string, 1000)
	s.out = writerFunc(func(p []byte) (int, error) {
		printed <- string(p)
		return len(p), nil
	})
	done := make(chan int, 1)
	go func() {
		done <- execute(t.Context(), s, []string{"chat", "--ignore-eos", "-n", "200", "--emulate", "pace,latency=5ms", "--offload-fraction", "1"})
	}()
	write := func(text string) {
		if _, err := io.WriteString(typist, text); err != nil {
			t.Error(err)
		}
	}
	write("1+2=\n")
	<-printed
	if !s.interrupts.raise() {
		t.Error("nobody takes an interrupt during a completion")
	}
	for text := range printed {
		if text == "\n" { // which ends every completion
			break
		}
	}
	write("/set max-tokens 1\n1+2=\n")
	if text := <-printed; text != "3" {
		t.Errorf("after the interrupt: %q", text)
	}
	if err := typist.Close(); err != nil {
		t.Error(err)
	}
	if code := <-done; code != exitDone {
		t.Errorf("exit code %d", code)
	}
	if s.interrupts.raise() {
		t.Error("an interrupt is taken behind the conversation")
	}
}

// What ends the process ends a conversation that waits for a message.
func TestChatTerminated(t *testing.T) {
	in, typist := io.Pipe()
	ctx, cancel := context.WithCancel(t.Context())
	var errs bytes.Buffer
	s := &streams{in: in, err: &errs, out: writerFunc(func(p []byte) (int, error) {
		cancel() // with the first of a completion
		return len(p), nil
	})}
	go io.WriteString(typist, "1+2=\n") //nolint:errcheck // then the exit code is another
	if code := execute(ctx, s, []string{"chat"}); code != exitInterrupted || errs.String() != "moeserve: interrupted\n" {
		t.Errorf("exit code %d, %q", code, &errs)
	}
	if err := typist.Close(); err != nil {
		t.Error(err)
	}
}

type writerFunc func(p []byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

// Ctrl-C amid a paste, whose end never comes, ends both paste and line.
func TestInterruptedPaste(t *testing.T) {
	for _, typed := range []string{"\x1b[200~one\rtwo" + ctrlC, "\x1b[200~" + ctrlC, "\x1b[200~one\r" + ctrlC, "\x1b[200~one\x1b" + ctrlC} {
		keys, typist := io.Pipe()
		go func() {
			for _, text := range []string{typed, "then\r"} {
				io.WriteString(typist, text) //nolint:errcheck // it is read, or the test has failed
			}
			typist.Close() //nolint:errcheck // a pipe's does not fail
		}()
		l := &editedLines{keys: &keyFilter{in: keys}}
		l.editor = term.NewTerminal(struct {
			io.Reader
			io.Writer
		}{l.keys, io.Discard}, chatPromptText)
		if line, err := l.edit(); err != nil || !l.keys.interrupted {
			t.Errorf("%q: %q, %v", typed, line, err)
		}
		if line, err := l.edit(); err != nil || line != "then" {
			t.Errorf("%q: the next line is %q, %v", typed, line, err)
		}
	}
}

// Ctrl-C is the keys that drop a line; what else is typed passes.
func TestKeyFilter(t *testing.T) {
	k := &keyFilter{in: strings.NewReader("abc")}
	got, err := io.ReadAll(k)
	if err != nil || string(got) != "abc" || k.interrupted {
		t.Errorf("%q, %v, %v", got, k.interrupted, err)
	}
	k = &keyFilter{in: strings.NewReader("ab" + ctrlC + "c")}
	got = nil
	for one := make([]byte, 1); ; {
		n, err := k.Read(one)
		got = append(got, one[:n]...)
		if err != nil {
			break
		}
	}
	if string(got) != "ab"+dropLine+"c" || !k.interrupted {
		t.Errorf("%q, %v", got, k.interrupted)
	}
}
