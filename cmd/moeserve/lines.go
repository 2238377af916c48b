package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/term"
)

// lineReader reads messages of a person, until io.EOF.
type lineReader interface {
	readLine(ctx context.Context) (string, error)
}

// pipedLines are those of a file or pipe.
type pipedLines struct{ lines *bufio.Scanner }

func newPipedLines(in io.Reader) *pipedLines {
	p := &pipedLines{bufio.NewScanner(in)}
	p.lines.Buffer(nil, maxPromptBytes)
	return p
}

func (p *pipedLines) readLine(ctx context.Context) (string, error) {
	var line string
	err := interruptible(ctx, func() error {
		if !p.lines.Scan() {
			if err := p.lines.Err(); err != nil {
				return fmt.Errorf("read a message: %w", err)
			}
			return io.EOF
		}
		line = p.lines.Text()
		return nil
	})
	if err != nil {
		return "", err
	}
	return line, nil
}

// interruptible calls a function that reads, and returns its error, or that of ctx as soon
// as it is done. Nothing ends a read that waits for a terminal: its goroutine then ends with
// its reader, or with the process.
func interruptible(ctx context.Context, read func() error) error {
	done := make(chan error, 1)
	go func() { done <- read() }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// editedLines are those of a terminal, with editing, and the lines before on the arrow keys.
type editedLines struct {
	in     *os.File
	out    io.Writer
	keys   *keyFilter
	editor *term.Terminal
	// interrupted says that the last line ended with Ctrl-C.
	interrupted bool
}

const chatPromptText, morePromptText = ">>> ", "... "

func newEditedLines(in *os.File, out io.Writer) *editedLines {
	l := &editedLines{in: in, out: out, keys: &keyFilter{in: in}}
	l.editor = term.NewTerminal(struct {
		io.Reader
		io.Writer
	}{l.keys, out}, chatPromptText)
	l.editor.History = &lineHistory{}
	return l
}

// readLine reads a message, which has several lines where these are pasted. Ctrl-C drops
// what is typed; a second one is io.EOF, as Ctrl-D is.
func (l *editedLines) readLine(ctx context.Context) (string, error) {
	fd := int(l.in.Fd())
	for {
		var line string
		state, err := term.MakeRaw(fd)
		if err != nil {
			return "", fmt.Errorf("read the terminal: %w", err)
		}
		if width, height, err := term.GetSize(fd); err == nil && width > 0 {
			l.editor.SetSize(width, height) //nolint:errcheck // it cannot redraw what is not there yet
		}
		err = interruptible(ctx, func() (err error) {
			line, err = l.edit()
			return err
		})
		if err := errors.Join(err, term.Restore(fd, state)); err != nil {
			if errors.Is(err, io.EOF) {
				return "", io.EOF
			}
			return "", err
		}
		if !l.keys.interrupted {
			l.interrupted = false
			return line, nil
		}
		l.keys.interrupted = false
		if l.interrupted {
			return "", io.EOF
		}
		l.interrupted = true
		fmt.Fprintln(l.out, "(Ctrl-C again, or Ctrl-D, ends the conversation)")
	}
}

// edit reads a line, or several that are pasted.
func (l *editedLines) edit() (string, error) {
	l.editor.SetBracketedPasteMode(true)
	defer l.editor.SetBracketedPasteMode(false)
	defer l.editor.SetPrompt(chatPromptText)
	var b strings.Builder
	for {
		line, err := l.editor.ReadLine()
		if !errors.Is(err, term.ErrPasteIndicator) {
			b.WriteString(line)
			return b.String(), err
		}
		b.WriteString(line + "\n")
		l.editor.SetPrompt(morePromptText)
	}
}

// keyFilter turns Ctrl-C, at which the editor would end, into the keys that drop a line and
// end it, and notes that it came.
type keyFilter struct {
	in          io.Reader
	ready       []byte
	interrupted bool
}

const ctrlC = "\x03"

// dropLine are the keys that drop a line: the end of an escape sequence that was begun, that of
// a paste, to which all other keys are text, to the line's end, delete to its begin, enter.
const dropLine = "~" + "\x1b[201~" + "\x05\x15\r"

func (k *keyFilter) Read(p []byte) (int, error) {
	if len(k.ready) == 0 {
		n, err := k.in.Read(p)
		if err != nil || !bytes.Contains(p[:n], []byte(ctrlC)) {
			return n, err
		}
		k.interrupted = true
		before, _, _ := bytes.Cut(p[:n], []byte(ctrlC))
		k.ready = append(bytes.Clone(before), dropLine...)
	}
	n := copy(p, k.ready)
	k.ready = k.ready[n:]
	return n, nil
}

// lineHistory keeps the lines of a conversation that are not empty.
type lineHistory struct{ lines []string }

func (h *lineHistory) Add(line string) {
	if line != "" {
		h.lines = append(h.lines, line)
	}
}

func (h *lineHistory) Len() int { return len(h.lines) }

// At returns a line; 0 is the last one.
func (h *lineHistory) At(i int) string { return h.lines[len(h.lines)-1-i] }
