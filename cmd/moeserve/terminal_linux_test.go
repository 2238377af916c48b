package main

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// terminal is a pseudo terminal: what is written to it is typed, and what is read is shown.
type terminal struct {
	t     *testing.T
	typed *os.File
	shown strings.Builder
}

// openTerminal starts moeserve in a terminal of so many columns.
func openTerminal(t *testing.T, columns uint16, args ...string) (*terminal, *exec.Cmd) {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Skipf("no pseudo terminals: %v", err)
	}
	t.Cleanup(func() { master.Close() }) //nolint:errcheck // only read from, by then
	fd := int(master.Fd())
	if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	n, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Row: 24, Col: columns}); err != nil {
		t.Fatal(err)
	}
	slave, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Skipf("no pseudo terminals: %v", err)
	}
	cmd := exec.CommandContext(t.Context(), "moeserve", args...)
	cmd.Dir = t.TempDir()
	cmd.Stdin, cmd.Stdout, cmd.Stderr = slave, slave, slave
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if err := slave.Close(); err != nil {
		t.Error(err)
	}
	return &terminal{t: t, typed: master}, cmd
}

// escapes are what a terminal does not show: cursor movements, and modes.
var escapes = regexp.MustCompile(`\x1b\[[0-9;?]*[A-Za-z]`)

// until reads on until the terminal shows a text behind all that it has shown before.
func (p *terminal) until(text string) {
	p.t.Helper()
	var shown []byte
	for one := make([]byte, 1); !strings.HasSuffix(escapes.ReplaceAllString(string(shown), ""), text); {
		n, err := p.typed.Read(one)
		if err != nil {
			p.t.Fatalf("it shows %q and then %v, want %q", shown, err, text)
		}
		shown = append(shown, one[:n]...)
	}
	p.shown.Write(shown)
}

func (p *terminal) typeIn(keys string) {
	p.t.Helper()
	if _, err := p.typed.WriteString(keys); err != nil {
		p.t.Fatal(err)
	}
}

// In a terminal there is a prompt with editing and history. Ctrl-C drops a line, stops a
// completion, and twice ends the conversation.
func TestChatInTerminal(t *testing.T) {
	const up, left, end = "\x1b[A", "\x1b[D", "\x05"
	p, cmd := openTerminal(t, 80, "chat", "-v")
	p.until("/help lists commands, Ctrl-D ends\r\n")
	p.until(">>> ")
	p.typeIn("1+2" + left + "1" + end + "=\r") // 1+12=
	p.until("\n13")
	p.until("[TTFT ")
	p.until(">>> ")
	p.typeIn(up + "\r")
	p.until("\n13")
	p.until(">>> ")
	p.typeIn("no" + ctrlC)
	p.until("(Ctrl-C again, or Ctrl-D, ends the conversation)")
	p.until(">>> ")
	p.typeIn("2+2=\r")
	p.until("\n4")
	p.until(">>> ")
	p.typeIn("/set ignore-eos true\r")
	p.until(">>> ")
	p.typeIn("1+2=\r")
	p.until("[TTFT ")
	p.until(">>> ")
	p.typeIn(ctrlC)
	p.until("ends the conversation)")
	p.until(">>> ")
	p.typeIn(ctrlC)
	if err := cmd.Wait(); err != nil {
		t.Errorf("%v; %s", err, &p.shown)
	}

	p, cmd = openTerminal(t, 80, "chat", "--ignore-eos", "-n", "240", "--emulate", "pace,latency=20ms", "--offload-fraction", "1")
	p.until(">>> ")
	p.typeIn("1+2=\r")
	p.until("\n3")
	p.typeIn(ctrlC) // which the terminal makes a signal of: it is not edited in
	p.until("(stopped)")
	p.until(">>> ")
	p.typeIn("\x04")
	if err := cmd.Wait(); err != nil {
		t.Errorf("%v; %s", err, &p.shown)
	}
}

// The bar of loading is drawn over itself, however narrow the terminal is.
func TestBarInTerminal(t *testing.T) {
	for _, columns := range []uint16{20, 30, 45, 80} {
		p, cmd := openTerminal(t, columns, "run", "--emulate", "pace,latency=5ms", "1+2=")
		shown, err := io.ReadAll(p.typed) // which ends with an error, as the process does
		if waited := cmd.Wait(); waited != nil {
			t.Fatalf("%v, %v: %s", waited, err, shown)
		}
		before, _, ok := strings.Cut(string(shown), "\n3\r\n")
		if !ok {
			before, _, ok = strings.Cut(string(shown), "3\r\n")
		}
		if !ok || !strings.Contains(before, "loading") || strings.Contains(before, "\n") {
			t.Errorf("%d columns: %q", columns, before)
		}
		for _, bar := range regexp.MustCompile(`\x1b\[\w+`).Split(before, -1) {
			for line := range strings.SplitSeq(bar, "\r") {
				if n := len([]rune(line)); n > int(columns) {
					t.Errorf("%d columns: a line of %d: %q", columns, n, line)
				}
			}
		}
	}
}

// Without a prompt, the error says how to give one; the command does not wait for input.
func TestNoPromptInTerminal(t *testing.T) {
	p, cmd := openTerminal(t, 80, "run", "built-in")
	p.until("no prompt; give it as an argument or on standard input, or start a conversation with moeserve chat")
	if err := cmd.Wait(); err == nil || cmd.ProcessState.ExitCode() != exitUsage {
		t.Errorf("%v", err)
	}
}
