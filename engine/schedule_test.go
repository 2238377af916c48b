package engine

import (
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"pgregory.net/rapid"
)

// TestSchedule: `schedule budget=N`, then a line `tokens computed` per candidate.
func TestSchedule(t *testing.T) {
	datadriven.RunTest(t, "testdata/schedule", func(t *testing.T, d *datadriven.TestData) string {
		var budget int
		d.ScanArgs(t, "budget", &budget)
		var c []Candidate
		for line := range strings.Lines(d.Input) {
			f := strings.Fields(line)
			tokens, err := strconv.Atoi(f[0])
			if err != nil {
				t.Fatal(err)
			}
			computed, err := strconv.Atoi(f[1])
			if err != nil {
				t.Fatal(err)
			}
			c = append(c, Candidate{Tokens: tokens, Computed: computed})
		}
		var b strings.Builder
		for _, ch := range Schedule(c, budget) {
			fmt.Fprintf(&b, "seq %d: [%d, %d)", ch.Index, ch.From, ch.To)
			if ch.Sample {
				b.WriteString(" sample")
			}
			b.WriteByte('\n')
		}
		return b.String()
	})
}

func TestScheduleProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		budget := rapid.IntRange(1, 40).Draw(t, "budget")
		var c []Candidate
		for range rapid.IntRange(1, 12).Draw(t, "candidates") {
			tokens := rapid.IntRange(1, 50).Draw(t, "tokens")
			c = append(c, Candidate{Tokens: tokens, Computed: rapid.IntRange(0, tokens-1).Draw(t, "computed")})
		}
		chunks := Schedule(c, budget)
		rows, left := 0, 0
		seen := map[int]bool{}
		for _, x := range c {
			left += x.Tokens - x.Computed
		}
		for _, ch := range chunks {
			x := c[ch.Index]
			if seen[ch.Index] || ch.From != x.Computed || ch.To <= ch.From || ch.To > x.Tokens || ch.Sample != (ch.To == x.Tokens) {
				t.Fatalf("chunk %+v of %+v", ch, x)
			}
			seen[ch.Index] = true
			rows += ch.To - ch.From
		}
		if rows != min(budget, left) {
			t.Fatalf("%d rows of a budget of %d, with %d to do", rows, budget, left)
		}
	})
}
