package main

import (
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"golang.org/x/term"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/node/sizing"
)

// console is a terminal that a process writes its messages to. Below them it shows one line
// at a time that is drawn anew in place.
type console struct {
	mu   sync.Mutex
	file *os.File
	line string
}

// clearLine moves to the beginning of the line, and clears it.
const clearLine = "\r\x1b[K"

// Write writes messages above the line that is shown.
func (c *console) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.line != "" {
		c.file.WriteString(clearLine) //nolint:errcheck // what follows reports the error
		c.line = ""
	}
	return c.file.Write(p)
}

// show replaces the line that is shown; an empty one removes it.
func (c *console) show(line string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if line != "" || c.line != "" {
		c.file.WriteString(clearLine + line) //nolint:errcheck // a line that cannot be drawn is no reason to stop
	}
	c.line = line
}

// columns of the terminal.
func (c *console) columns() int {
	if n, _, err := term.GetSize(int(c.file.Fd())); err == nil && n > 0 {
		return n
	}
	return 80
}

// newConsole is the writer of a file: a console where that is a terminal.
func newConsole(f *os.File) io.Writer {
	if !interactive(f) {
		return f
	}
	return &console{file: f}
}

// lineDisplay is where progress is drawn in place: a console.
type lineDisplay interface {
	show(line string)
	columns() int
}

// Progress is drawn at most each drawInterval, for the first time after drawDelay, and
// written as lines each lineInterval where it cannot be drawn.
const (
	drawInterval = 100 * time.Millisecond
	drawDelay    = 300 * time.Millisecond
	lineInterval = 10 * time.Second
)

// notice writes a message beside a command's result: a line, or a record of the log where that
// is JSON.
func (s *streams) notice(o *configs.Output, format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	if o.LogFormat == configs.LogJSON {
		newLogger(s.err, o, o.LogLevel.Level()).Warn(text)
		return
	}
	fmt.Fprintf(s.err, "moeserve: %s\n", text) //nolint:errcheck // the result is written all the same
}

// progress shows how far a long command has got: drawn in place on a terminal; as a line of
// text each lineInterval elsewhere, unless log-level is error; and as records of the log, at
// info, where that is JSON. A nil one shows nothing.
type progress struct {
	now     func() time.Time
	display lineDisplay  // nil: not drawn
	out     io.Writer    // nil: not written
	log     *slog.Logger // nil: not logged

	mu          sync.Mutex
	at          status
	began, next time.Time
}

// progress shows progress as the settings of output say; nil where quiet.
func (s *streams) progress(o *configs.Output, quiet bool) *progress {
	if quiet {
		return nil
	}
	p := &progress{now: s.clock()}
	display, terminal := s.err.(lineDisplay)
	switch {
	case o.LogFormat == configs.LogJSON:
		p.log = newLogger(s.err, o, o.LogLevel.Level())
	case terminal:
		p.display = display
	case o.LogLevel < configs.LogError:
		p.out = s.err
	default:
		return nil
	}
	return p
}

// begin starts a part of the command, in bytes or other units, from nothing done. Its time
// left is estimated from now on.
func (p *progress) begin(what, unit string) {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.at, p.began = status{what: what, unit: unit}, p.now()
	first := lineInterval
	if p.display != nil {
		first = drawDelay
	}
	p.next = p.began.Add(first)
}

// set is how much is done of a total.
func (p *progress) set(what string, done, total int64) {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	now := p.now()
	p.at.what, p.at.done, p.at.total, p.at.elapsed = what, done, total, now.Sub(p.began)
	if now.Before(p.next) {
		return
	}
	switch {
	case p.display != nil:
		p.next = now.Add(drawInterval)
		p.display.show(p.at.line(p.display.columns()))
	case p.log != nil:
		p.next = now.Add(lineInterval)
		p.log.Info("progress", "what", what, "done", done, "total", total, "unit", p.at.unit, "left_s", p.at.left().Seconds())
	default:
		p.next = now.Add(lineInterval)
		fmt.Fprintf(p.out, "moeserve: %s\n", p.at.text()) //nolint:errcheck // as notice
	}
}

// end removes what is drawn.
func (p *progress) end() {
	if p != nil && p.display != nil {
		p.display.show("")
	}
}

// status is how far a part of a command has got.
type status struct {
	what string
	// unit of done and total: bytesUnit, or the plural of what is counted.
	unit        string
	done, total int64
	elapsed     time.Duration
}

const bytesUnit = "bytes"

// left is the time left if the rest takes as long as what is done; 0 where that is unknown.
func (s *status) left() time.Duration {
	if s.done <= 0 || s.total <= s.done || s.elapsed < time.Second {
		return 0
	}
	return time.Duration(float64(s.elapsed) * float64(s.total-s.done) / float64(s.done))
}

// parts are the percentage, how much is done, the rate, and the time left, each of which may
// be empty.
func (s *status) parts() (percent, amount, rate, left string) {
	if s.total > 0 {
		percent = fmt.Sprintf("%d %%", 100*min(s.done, s.total)/s.total)
	}
	if s.unit == bytesUnit {
		amount = sizing.Bytes(s.done) + " of " + sizing.Bytes(s.total)
		if s.elapsed >= time.Second {
			rate = sizing.Bytes(int64(float64(s.done)/s.elapsed.Seconds())) + "/s"
		}
	} else {
		amount = fmt.Sprintf("%d of %d %s", s.done, s.total, s.unit)
	}
	if d := s.left(); d > 0 {
		left = remaining(d) + " left"
	}
	return percent, amount, rate, left
}

// text is the status in words.
func (s *status) text() string {
	percent, amount, rate, left := s.parts()
	return s.what + ": " + join(", ", percent, amount, rate, left)
}

// The parts of a line that is drawn: a bar of so many characters, and what is shown before
// it of its subject if there is little room.
const (
	maxBar = 24
	minBar = 8
)

// line is the status in one line of fewer than so many columns: with a bar, amount and rate
// where there is room, and else without.
func (s *status) line(columns int) string {
	room := max(columns-1, 1) // a full line would wrap
	percent, amount, rate, left := s.parts()
	length := utf8.RuneCountInString
	full := join("  ", percent, amount, rate, left)
	if bar := room - length(s.what) - length(full) - len("  []  "); bar >= minBar {
		bar = min(bar, maxBar)
		done := 0
		if s.total > 0 {
			done = int(int64(bar) * min(s.done, s.total) / s.total)
		}
		return s.what + "  [" + strings.Repeat("=", done) + strings.Repeat(" ", bar-done) + "]  " + full
	}
	for _, line := range []string{
		s.what + "  " + full, join("  ", s.what, percent, amount, left), join("  ", s.what, percent, left),
	} {
		if length(line) <= room {
			return line
		}
	}
	short := join("  ", percent, left)
	if over := room - length(short) - len("…  "); over > 0 {
		return string([]rune(s.what)[:min(over, length(s.what))]) + "…  " + short
	}
	return string([]rune(short)[:min(room, length(short))])
}

// join joins the parts that are not empty.
func join(separator string, parts ...string) string {
	var b []string
	for _, p := range parts {
		if p != "" {
			b = append(b, p)
		}
	}
	return strings.Join(b, separator)
}

// remaining writes a duration with its two greatest units: "6 s", "3 min 20 s", "2 h 5 min".
func remaining(d time.Duration) string {
	s := int64(d.Round(time.Second).Seconds())
	switch {
	case s < 60:
		return fmt.Sprintf("%d s", max(s, 1))
	case s < 3600:
		return fmt.Sprintf("%d min %d s", s/60, s%60)
	}
	return fmt.Sprintf("%d h %d min", s/3600, s%3600/60)
}
