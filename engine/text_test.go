package engine

import (
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// pieces is a stream of given text, a piece per token.
type pieces struct {
	list []string
	last string
}

func (p *pieces) Push(id int32) string { return p.list[id] }
func (p *pieces) Flush() string        { return p.last }

func TestStopStrings(t *testing.T) {
	for _, c := range []struct {
		name    string
		pieces  []string
		last    string
		stop    []string
		include bool
		want    []string // text shown after each piece, then at the end
		found   int      // piece that completes a stop string, -1: none
	}{
		{"none", []string{"a", "b"}, "c", nil, false, []string{"a", "b", "c"}, -1},
		{"whole", []string{"a", "STOP", "b"}, "", []string{"STOP"}, false, []string{"a", ""}, 1},
		{"over pieces", []string{"xS", "TO", "Py"}, "", []string{"STOP"}, false, []string{"x", "", ""}, 2},
		{"included", []string{"xS", "TO", "Py"}, "", []string{"STOP"}, true, []string{"x", "", "STOP"}, 2},
		{"not after all", []string{"xS", "TO", "Ry"}, "", []string{"STOP"}, false, []string{"x", "", "STORy", ""}, -1},
		{"begins again", []string{"SST", "OP"}, "", []string{"STOP"}, false, []string{"S", ""}, 1},
		{"held at the end", []string{"xST"}, "", []string{"STOP"}, false, []string{"x", "ST"}, -1},
		{"completed by the flush", []string{"xST"}, "OP", []string{"STOP"}, false, []string{"x", ""}, 1},
		{"the first in the text", []string{"a b"}, "", []string{"b", "a"}, false, []string{""}, 0},
		{"characters", []string{"é", "日", "本x"}, "", []string{"日本"}, false, []string{"é", "", ""}, 2},
	} {
		w := newDetokenizer(&pieces{c.pieces, c.last}, c.stop, c.include)
		found := -1
		for i, want := range c.want {
			var got string
			var is bool
			if i < len(c.pieces) {
				got, is = w.push(int32(i))
			} else {
				got, is = w.flush()
			}
			if is {
				found = i
			}
			if got != want {
				t.Errorf("%s: piece %d shows %q, want %q", c.name, i, got, want)
			}
		}
		if found != c.found {
			t.Errorf("%s: found at %d, want %d", c.name, found, c.found)
		}
	}
}

// TestStopStringsWhereverCut: the text shown in the end does not depend on how it
// was cut into pieces.
func TestStopStringsWhereverCut(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		text := rapid.StringMatching(`[abc]{0,20}`).Draw(t, "text")
		stop := rapid.SliceOfN(rapid.StringMatching(`[abc]{1,4}`), 0, 3).Draw(t, "stop")
		want := text
		// The stop string that is complete first ends the text; of what is complete
		// by then, the first in the text counts.
		for n := range len(text) + 1 {
			hit := -1
			for _, s := range stop {
				if i := strings.Index(text[:n], s); i >= 0 && (hit < 0 || i < hit) {
					hit = i
				}
			}
			if hit >= 0 {
				want = text[:hit]
				break
			}
		}
		var list []string
		for rest := text; rest != ""; {
			list = append(list, rest[:1])
			rest = rest[1:]
		}
		w := newDetokenizer(&pieces{list: list}, stop, false)
		var got strings.Builder
		for i := range list {
			s, found := w.push(int32(i))
			got.WriteString(s)
			if found {
				break
			}
			if i == len(list)-1 {
				s, _ = w.flush()
				got.WriteString(s)
			}
		}
		if got.String() != want {
			t.Fatalf("%q with stops %q shows %q, want %q", text, stop, got.String(), want)
		}
	})
}

// A text ends where the function that is given it says so; what a stop string holds back is not in it.
func TestTextEnds(t *testing.T) {
	list := []string{"a", "b<", "/", "c", "d"}
	w := newDetokenizer(&pieces{list: list}, []string{"</s>"}, false)
	seen := ""
	w.ends = func(text string) bool {
		seen += text
		return strings.Contains(seen, "c")
	}
	var got string
	n, found := 0, false
	for ; n < len(list) && !found; n++ {
		var text string
		text, found = w.push(int32(n))
		got += text
	}
	if rest, _ := w.flush(); !found || n != 4 || got+rest != "ab</c" || seen != got {
		t.Errorf("%d tokens, %q, %v", n, got+rest, found)
	}
}
