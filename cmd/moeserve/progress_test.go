package main

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/moeserve/moeserve/configs"
)

func TestStatusLine(t *testing.T) {
	load := status{what: "loading", unit: bytesUnit, done: 3 << 29, total: 3 << 30, elapsed: 10 * time.Second}
	steps := status{what: "cell 3 of 9: peer memory, 50 % offloaded", unit: "steps", done: 30, total: 400, elapsed: 5 * time.Minute}
	for _, c := range []struct {
		s       status
		columns int
		want    string
	}{
		{load, 100, "loading  [============            ]  50 %  1.50 GiB of 3.00 GiB  153.60 MiB/s  10 s left"},
		{load, 80, "loading  [=======        ]  50 %  1.50 GiB of 3.00 GiB  153.60 MiB/s  10 s left"},
		{load, 70, "loading  50 %  1.50 GiB of 3.00 GiB  153.60 MiB/s  10 s left"},
		{load, 60, "loading  50 %  1.50 GiB of 3.00 GiB  10 s left"},
		{load, 30, "loading  50 %  10 s left"},
		{load, 24, "loa…  50 %  10 s left"},
		{load, 8, "50 %  1"},
		{load, 1, "5"},
		{steps, 80, "cell 3 of 9: peer memory, 50 % offloaded  7 %  30 of 400 steps  1 h 1 min left"},
		{steps, 30, "cell …  7 %  1 h 1 min left"},
		{status{what: "loading", unit: bytesUnit, total: 1 << 30}, 60, "loading  [                        ]  0 %  0 B of 1.00 GiB"},
		{status{what: "loading", unit: bytesUnit}, 60, "loading  [                        ]  0 B of 0 B"},
	} {
		got := c.s.line(c.columns)
		if got != c.want {
			t.Errorf("%d columns: %q, want %q", c.columns, got, c.want)
		}
		if n := utf8.RuneCountInString(got); n >= max(c.columns, 2) {
			t.Errorf("%d columns: %q takes %d", c.columns, got, n)
		}
	}
	// However wide the terminal is, the line is narrower.
	for columns := 2; columns < 120; columns++ {
		for _, s := range []status{load, steps} {
			if n := utf8.RuneCountInString(s.line(columns)); n >= columns {
				t.Errorf("%d columns: %q takes %d", columns, s.line(columns), n)
			}
		}
	}
}

func TestRemaining(t *testing.T) {
	for d, want := range map[time.Duration]string{
		time.Millisecond: "1 s", 59 * time.Second: "59 s", 60 * time.Second: "1 min 0 s", 200 * time.Second: "3 min 20 s",
		2*time.Hour + 5*time.Minute: "2 h 5 min",
	} {
		if got := remaining(d); got != want {
			t.Errorf("%v: %q, want %q", d, got, want)
		}
	}
}

// drawn is a terminal that keeps what it shows.
type drawn struct {
	bytes.Buffer
	lines []string
}

func (d *drawn) show(line string) { d.lines = append(d.lines, line) }
func (d *drawn) columns() int     { return 40 }

func TestProgress(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	clock := func() time.Time { return now }
	// report loads 100 MiB in 25 s.
	report := func(s *streams, o configs.Output) {
		p := s.progress(&o, false)
		p.begin("loading", bytesUnit)
		for i := range int64(101) {
			p.set("loading", i<<20, 100<<20)
			now = now.Add(250 * time.Millisecond)
		}
		p.end()
	}
	text := configs.Output{LogLevel: configs.LogWarn}

	terminal := &drawn{}
	report(&streams{err: terminal, now: clock}, text)
	if n := len(terminal.lines); n != 100 || terminal.lines[0] != "loading  2 %  2.00 MiB of 100.00 MiB" || terminal.lines[n-1] != "" || terminal.lines[1] != "loading  3 %  3.00 MiB of 100.00 MiB" || terminal.lines[2] != "loading  4 %  24 s left" || terminal.lines[n-2] != "loading  100 %" || terminal.Len() > 0 {
		t.Errorf("a terminal shows %d lines: %q, and has %q", n, terminal.lines, terminal.String())
	}
	var file bytes.Buffer
	report(&streams{err: &file, now: clock}, text)
	if want := "moeserve: loading: 40 %, 40.00 MiB of 100.00 MiB, 4.00 MiB/s, 15 s left\nmoeserve: loading: 80 %, 80.00 MiB of 100.00 MiB, 4.00 MiB/s, 5 s left\n"; file.String() != want {
		t.Errorf("a file has\n%s, want\n%s", file.String(), want)
	}
	file.Reset()
	report(&streams{err: &file, now: clock}, configs.Output{LogLevel: configs.LogError})
	if file.Len() > 0 {
		t.Errorf("with log-level error: %s", file.String())
	}
	// JSON stays JSON, on a terminal too.
	terminal = &drawn{}
	report(&streams{err: terminal, now: clock}, configs.Output{LogLevel: configs.LogInfo, LogFormat: configs.LogJSON})
	lines := strings.Split(strings.TrimSpace(terminal.String()), "\n")
	var record map[string]any
	if err := json.Unmarshal([]byte(lines[0]), &record); err != nil || len(lines) != 2 || len(terminal.lines) > 0 || record["msg"] != "progress" || record["left_s"] != 15.0 {
		t.Errorf("%v: %q, drawn %q", err, lines, terminal.lines)
	}
	(&streams{err: terminal, now: clock}).progress(&text, true).set("quiet", 1, 2) // shows nothing
	if len(terminal.lines) > 0 {
		t.Errorf("quiet, and drawn %q", terminal.lines)
	}
}
