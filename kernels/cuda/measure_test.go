//go:build cuda

package cuda

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"
	"text/tabwriter"
	"time"

	"github.com/moeserve/moeserve/device"
)

// What measurements, which are no tests, are told by tools/cuda/gpu.sh.
var (
	promptMost = flag.Int("prompt-tokens", 128<<10, "the longest prompt that TestMeasurePrompts measures")
	measureTo  = flag.String("measure", "", "run measurements and write their results to this file as JSON; empty: they skip")
	measureFor = flag.Duration("measure-for", 45*time.Second, "no measurement begins another round after this time")
)

// needMeasure skips unless measurements are asked for, and has backends opened from now on
// load the kernels of a few units only, since compiling takes longer than measuring.
func needMeasure(t *testing.T, units ...string) {
	t.Helper()
	if *measureTo == "" {
		t.Skip("a measurement: -measure FILE runs it")
	}
	all := files
	files = units
	t.Cleanup(func() { files = all })
}

// writeMeasured writes results as JSON.
func writeMeasured(t *testing.T, results any) {
	t.Helper()
	text, err := json.MarshalIndent(results, "", " ")
	if err == nil {
		err = os.WriteFile(*measureTo, append(text, '\n'), 0o644)
	}
	if err != nil {
		t.Error(err)
	}
}

// measurer times what streams do.
type measurer struct {
	*bench
	// deadline is when no further round begins; zero: none.
	deadline time.Time
}

func newMeasurer(tb testing.TB, m device.Machine, b *Backend, s device.Stream, limit time.Duration) *measurer {
	x := &measurer{bench: &bench{TB: tb, m: m, b: b, s: s, random: rand.New(rand.NewPCG(1, 2)), exponent: 6}}
	if limit > 0 {
		x.deadline = time.Now().Add(limit)
	}
	return x
}

// over reports whether no further round is to begin.
func (x *measurer) over() bool { return !x.deadline.IsZero() && time.Now().After(x.deadline) }

// span returns the time on the devices from the first stream's start of what run enqueues
// until the last stream's end, and the host's time to enqueue it. It returns run's error
// once the streams have ended, and makes them usable again.
func (x *measurer) span(streams []device.Stream, run func() error) (took, enqueued time.Duration, err error) {
	x.Helper()
	events := make([]device.Event, 2*len(streams))
	for i := range events {
		if events[i], err = x.m.NewEvent(); err != nil {
			x.Fatal(err)
		}
		defer events[i].Close() //nolint:errcheck // Machine.Close reports what is left
	}
	for i, s := range streams {
		if err := s.Synchronize(x.Context()); err != nil {
			x.Fatal(err)
		}
		if err := s.Record(events[2*i]); err != nil {
			x.Fatal(err)
		}
	}
	begin := time.Now()
	err = run()
	enqueued = time.Since(begin)
	for i, s := range streams {
		if err == nil {
			err = s.Record(events[2*i+1])
		}
	}
	for _, s := range streams {
		err = errors.Join(err, s.Recover(x.Context()))
	}
	if err != nil {
		return 0, 0, err
	}
	var first, last time.Duration
	for i, e := range events {
		at, err := e.Time()
		if err != nil {
			x.Fatal(err)
		}
		if i%2 == 0 && (i == 0 || at < first) {
			first = at
		}
		if i%2 == 1 {
			last = max(last, at)
		}
	}
	return last - first, enqueued, nil
}

// median of values, which it sorts.
func median(values []float64) float64 {
	slices.Sort(values)
	n := len(values)
	if n == 0 {
		return 0
	}
	return (values[(n-1)/2] + values[n/2]) / 2
}

// printTable writes rows as a Markdown table; the first has the headings.
func printTable(to io.Writer, rows [][]string) {
	w := tabwriter.NewWriter(to, 0, 0, 1, ' ', 0)
	for i, row := range rows {
		fmt.Fprintf(w, "| %s\t|\n", strings.Join(row, "\t| "))
		if i == 0 {
			fmt.Fprintf(w, "|%s\n", strings.Repeat("---|", len(row)))
		}
	}
	w.Flush()
}
