//go:build unix

package tokenizer

import (
	"math"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/text/unicode/norm"

	"github.com/moeserve/moeserve/tools/racedetector"
)

// TestLongWords holds encoding to near-linear time: a text of 128 KiB takes what sixteen of 8 KiB take, and with a quadratic
// step sixteen times that. Half of it leaves room for what else the machine does. It is a bound on every step, of our
// own code and of the libraries' (normalizing, splitting, searching added tokens, merging), so there is no one thing to
// count; it is measured in the processor's time, which others on the machine do not add to.
func TestLongWords(t *testing.T) {
	racedetector.SkipSequential(t)
	texts := map[string]func(n int) string{
		"one letter": func(n int) string { return strings.Repeat("e", n) },
		"letters":    func(n int) string { return strings.Repeat("thexpertcacherouter", n/19) },
		"spaces":     func(n int) string { return strings.Repeat(" ", n) },
		"newlines":   func(n int) string { return strings.Repeat(" \n", n/2) },
		"brackets":   func(n int) string { return strings.Repeat("<", n) },
		"unknown":    func(n int) string { return strings.Repeat("中", n/3) },
		"marks":      func(n int) string { return "a" + strings.Repeat("\u0323\u0301", n/4) },
	}
	const size, times = 8 << 10, 16
	for base := range baseFiles {
		tok := loadBase(t, base)
		if base == "tiny" {
			tok.normalizer = normalizer{unicodeForm{norm.NFC}}
		}
		for name, text := range texts {
			small := cost(t, func() { must(tok.Encode(text(size), false)) })
			large := cost(t, func() { must(tok.Encode(text(times*size), false)) })
			if large > times*times/2*small {
				t.Errorf("%s, %s: %v for %d KiB, %v for %d KiB", base, name, small, size>>10, large, times*size>>10)
			}
		}
	}
}

// cost is the processor time that f takes: the least of some averages over runs that are long enough for the system's
// account, since garbage of earlier runs is collected in some of them.
func cost(t *testing.T, f func()) time.Duration {
	t.Helper()
	used := func() time.Duration {
		var u syscall.Rusage
		if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
			t.Fatal(err)
		}
		return time.Duration(u.Utime.Nano() + u.Stime.Nano())
	}
	f() // once, so that memory is warm
	least := time.Duration(math.MaxInt64)
	for range 3 {
		start := used()
		for n := time.Duration(1); ; n++ {
			f()
			if d := used() - start; d >= 10*time.Millisecond {
				least = min(least, d/n)
				break
			}
		}
	}
	return least
}
