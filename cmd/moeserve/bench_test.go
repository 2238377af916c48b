package main

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"regexp"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/eval"
)

const benchmarks = "../../docs/BENCHMARKS.md"

// pictured is the --emulate of the README's picture.
func pictured(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile(benchmarks)
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile(`moeserve bench sweep --emulate (\S+)`).FindSubmatch(text)
	if m == nil {
		t.Fatalf("%s has no command that draws the picture", benchmarks)
	}
	return string(m[1])
}

// Every command of the page is one that there is, with flags that it has.
func TestBenchmarksCommands(t *testing.T) {
	text, err := os.ReadFile(benchmarks)
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	for _, m := range regexp.MustCompile(`(?m)^moeserve (.*)$`).FindAllStringSubmatch(strings.ReplaceAll(string(text), "\\\n", ""), -1) {
		found++
		cmd, rest, err := newRoot(&streams{}).Find(strings.Fields(m[1]))
		if err == nil {
			err = cmd.ParseFlags(rest)
		}
		if err != nil || len(cmd.Flags().Args()) > 0 {
			t.Errorf("moeserve %s: %v, %q", m[1], err, cmd.Flags().Args())
		}
	}
	if found < 4 {
		t.Errorf("%d commands: the pattern has lost them", found)
	}
}

// Each tier is flat up to where the planner has its knee, and falls from there, on the
// machine of the README's picture. Its times do not depend on data, so none is kept.
func TestSweepBendsWhereThePlannerSays(t *testing.T) {
	defer goleak.VerifyNone(t)
	args := []string{
		"bench", "sweep", "--emulate", pictured(t) + ",nodata", "--input-len", "77", "--warmup-tokens", "2", "--trials", "1",
		"--fractions", "0,0.0625,0.25,0.5,0.625,1", "--json", "-",
	}
	stdout, stderr, code := invoke(t, strings.NewReader(""), args...)
	if code != exitDone {
		t.Fatalf("exit code %d: %s", code, stderr)
	}
	var results []eval.Result
	if err := json.Unmarshal([]byte(stdout), &results); err != nil {
		t.Fatal(err)
	}
	at, knees := map[eval.Cell]float64{}, map[configs.Tier]float64{}
	for _, r := range results {
		at[r.Cell()] = r.DecodeTokS
		if r.Prediction == nil || r.Roofline == nil {
			t.Fatalf("%v: neither floor nor prediction", r.Cell())
		}
		if r.Prediction.SaturationPoint > 0 {
			knees[r.Tier] = r.Prediction.SaturationPoint
		}
	}
	flat := at[eval.Cell{Tier: configs.NoTier}]
	for _, tier := range []configs.Tier{configs.HostTier, configs.PeerTier} {
		all := at[eval.Cell{Tier: tier, Fraction: 1}]
		// Where a line that falls as 1/fraction leaves the flat one.
		bend := all / flat
		if math.Abs(bend/knees[tier]-1) > 0.06 {
			t.Errorf("%s: bends at %.4f, the planner's knee is %.4f", tier, bend, knees[tier])
		}
		for cell, got := range at {
			if cell.Tier != tier || math.Abs(cell.Fraction/knees[tier]-1) < 0.1 {
				continue // right at the knee, copies and computing get in each other's way
			}
			if want := min(flat, all/cell.Fraction); math.Abs(got/want-1) > 0.02 {
				t.Errorf("%s, %v: %.0f tokens/s, want %.0f: flat up to %.3f, falling from there", tier, cell.Fraction, got, want, bend)
			}
		}
	}
	picture, err := os.ReadFile("../../docs/sweep.svg")
	if err != nil {
		t.Fatal(err)
	}
	for tier, knee := range knees {
		if want := fmt.Sprintf("%s: saturation point %.1f %%", tier, 100*knee); !strings.Contains(string(picture), want) {
			t.Errorf("the picture does not say %q: draw it again (%s has the command)", want, benchmarks)
		}
	}
	if !strings.Contains(string(picture), "emulated devices and links") {
		t.Error("the picture does not say that it is of emulated devices")
	}
	if len(knees) != 2 || knees[configs.HostTier] > 0.15 || knees[configs.PeerTier] < 0.4 {
		t.Errorf("knees %v: they do not stand where links of 55 and 395 put them", knees)
	}
}
