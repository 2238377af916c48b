package grammar

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

// ambiguous has ever more stacks behind a text, different ones behind each.
const ambiguous = `root ::= s
s ::= [a-m] s s | [a-m] t | [n-z] t s | [n-z] s | [n-z] t t | [a-z]
t ::= [a-m] t s | [a-m] s | [n-z] s s | [n-z] t t t | [a-z]`

// letters is a vocabulary of many different texts.
func letters(n int) *Vocabulary {
	var texts []string
	for i := range n {
		var b strings.Builder
		for x := uint32(i+1) * 2654435761; b.Len() < 12; x = x*1664525 + 1013904223 {
			b.WriteByte('a' + byte(x>>16)%26)
		}
		texts = append(texts, b.String())
	}
	return bytesAnd(texts...)
}

// TestAmbiguous: a grammar whose states are very large takes neither much time for a mask, which a step of the model may
// wait for, nor much memory.
func TestAmbiguous(t *testing.T) {
	e, err := ParseGBNF(ambiguous)
	if err != nil {
		t.Fatal(err)
	}
	g, err := New(e, letters(3000))
	if err != nil {
		t.Fatal(err)
	}
	m := g.Matcher()
	began := time.Now()
	if bits := m.Mask(); slices.ContainsFunc(bits, func(w uint32) bool { return w != 0 }) {
		t.Error("the mask is not empty")
	}
	if d := time.Since(began); d > time.Minute { // minutes without a limit
		t.Errorf("a mask took %v", d)
	}
	if !errors.Is(g.Err(), ErrAmbiguous) || g.Err().Error() != ErrAmbiguous.Error() {
		t.Errorf("error %v", g.Err())
	}
	named, err := New(&Rule{Name: "x", Place: "at x", Body: e}, letters(3000))
	if err != nil {
		t.Fatal(err)
	}
	named.Matcher().Mask()
	if err := named.Err(); !errors.Is(err, ErrAmbiguous) || !strings.HasPrefix(err.Error(), "at x: ") {
		t.Errorf("error %v, want one with the place", err)
	}
	for _, b := range "aznbycxmowpkqjl" {
		if !m.Accept(b) {
			t.Fatalf("%c is not accepted", b)
		}
		kept := 0
		for _, s := range g.a.states {
			kept += len(s.configs)
		}
		// A step adds at most some 9 * maxConfigs.
		if kept += len(g.a.frames); kept != g.a.kept || kept > maxKept+9*maxConfigs {
			t.Fatalf("%d configurations and frames are kept, and %d counted", kept, g.a.kept)
		}
	}
}

// TestWarmAmbiguous: masks that are computed ahead take no longer in all than one may, also where the rules of which each
// takes long are many.
func TestWarmAmbiguous(t *testing.T) {
	var b strings.Builder
	b.WriteString("root ::= \"0\"")
	for i := range 8 {
		fmt.Fprintf(&b, " | \"%d\" s%d", i, i)
	}
	for i := range 8 {
		_, rules, _ := strings.Cut(ambiguous, "\n")
		b.WriteString("\n" + regexp.MustCompile(`\b[st]\b`).ReplaceAllString(rules, fmt.Sprintf("${0}%d", i)))
	}
	e, err := ParseGBNF(b.String())
	if err != nil {
		t.Fatal(err)
	}
	g, err := New(e, letters(3000))
	if err != nil {
		t.Fatal(err)
	}
	g.warm(8)
	if err := g.Err(); err != nil {
		t.Error(err)
	}
	if n := g.a.lastID; n > maxMaskWork {
		t.Errorf("%d frames were made", n)
	}
}

// TestCancelled: a compilation ends soon after its context does, with the cause of that.
func TestCancelled(t *testing.T) {
	gone := errors.New("gone")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(gone)
	for _, pattern := range []string{`([ac]|b)*a[abc]{15}`, `(?=(a|b)*a(a|b){14})(?=(a|b)*b(a|b){9}c).*`} {
		e, err := Regex(pattern)
		if err != nil {
			t.Fatal(err)
		}
		_, work, err := NewCounted(ctx, e, nil)
		if !errors.Is(err, gone) || work > 4*checkEvery {
			t.Errorf("%s: error %v after %d states", pattern, err, work)
		}
		if _, work, err = NewCounted(t.Context(), e, nil); errors.Is(err, gone) || work < 8*checkEvery {
			t.Errorf("%s: error %v after %d states", pattern, err, work)
		}
	}
}
