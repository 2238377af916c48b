package grammar

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/moeserve/moeserve/tools/racedetector"
)

// bytesAnd is a vocabulary of all bytes and of some further tokens.
func bytesAnd(more ...string) *Vocabulary {
	var tokens []Token
	for b := range 256 {
		tokens = append(tokens, Token{ID: int32(b), Text: string([]byte{byte(b)}), First: string([]byte{byte(b)})})
	}
	for i, t := range more {
		tokens = append(tokens, Token{ID: int32(256 + i), Text: t, First: t})
	}
	return NewVocabulary(len(tokens)+3, tokens)
}

func TestRegex(t *testing.T) {
	for _, c := range []struct {
		pattern   string
		yes, no   []string
		neverEnds bool
	}{
		{pattern: `abc`, yes: []string{"abc"}, no: []string{"ab", "abcd", ""}},
		{pattern: `^a+b?$`, yes: []string{"a", "aab"}, no: []string{"b", "abb"}},
		{pattern: `(foo|ba[rz])*x`, yes: []string{"x", "foobarbazx"}, no: []string{"foo", "bax"}},
		{pattern: `[^a-c]{2,3}`, yes: []string{"dé", "日本語"}, no: []string{"da", "d", "dddd"}},
		{pattern: `\d{4}-\d\d`, yes: []string{"2024-01"}, no: []string{"2024-1"}},
		{pattern: `(?i)straße`, yes: []string{"STRAßE", "Straẞe"}, no: []string{"strasse"}},
		{pattern: `.`, yes: []string{"x", "é", "€", "😀"}, no: []string{"\n", "\xff", "\xed\xa0\x80", "xx"}},
		{pattern: `é|\x{1F600}`, yes: []string{"é", "😀"}},
		{pattern: `\u0041\/\-`, yes: []string{"A/-"}},
		{pattern: `[\ud83d\uDE00-\ud83d\ude02]|\ud83da|\u00e9\u0041`, yes: []string{"😀", "😂", "éA"}, no: []string{"😃", "a", "é"}},
		{pattern: `[^\ud83d\ude00]`, yes: []string{"😁", "a"}, no: []string{"😀"}},
		{pattern: `\p{Greek}+`, yes: []string{"αβγ"}, no: []string{"abc"}},
		{pattern: `\s[^\s\]]\S[\S\n]`, yes: []string{" abc", "\fé-\n"}, no: []string{"aabc", "\u00a0abc", " \u2003bc", " a\ufeffc", " abc ", " ]bc", " ab\t", "\vabc", " a\x1cb"}},
		{pattern: `[]\s]\\s[[:alpha:]\s]..`, yes: []string{"]\\saab", "\f\\s é\t"}, no: []string{"a\\saab", "]\\s1ab", "]\\sa\rb", "]\\sa\u2028b"}},
		{pattern: `(?!.*\s$)[^x]+`, yes: []string{"a b", "\u00a0b", "\rb"}, no: []string{"a ", "a\u00a0", "x", "a\r "}},
		{pattern: `(?s)a.`, yes: []string{"a\n", "a\u2028"}},
		{pattern: `\(?s.[(?s]`, yes: []string{"(s.s", "sa?"}, no: []string{"s\rs", "(s\u2028?"}},
		{pattern: `(a|b)*abb`, yes: []string{"abb", "aababb"}, no: []string{"ab", "abba"}},
		{pattern: `(a?){3}b`, yes: []string{"b", "aaab"}, no: []string{"aaaab"}},
		{pattern: `(?=.*[A-Z])(?=.*\d)[A-Za-z\d]{4,}`, yes: []string{"Ab12", "1xxxxA"}, no: []string{"ab12", "ABCD", "A1", "Ab1!x"}},
		{pattern: `^(?!.*--)[a-z](?:[a-z-]*[a-z])?$`, yes: []string{"a", "a-b-c"}, no: []string{"a--b", "a-", ""}},
		{pattern: `a(?!b|$).?c?`, yes: []string{"ac", "axc", "aé"}, no: []string{"a", "ab", "abc"}},
		{pattern: `((?!x)[w-y]|(?=z)[y-z]?)1`, yes: []string{"w1", "y1", "z1"}, no: []string{"x1", "1"}},
		{pattern: `(?:a|(?=bc)b)?(c|d$)?e?`, yes: []string{"a", "bc", "ace", "d", "", "bce"}, no: []string{"b", "be", "de", "bd"}},
		{pattern: `(?![\])])[^x](?=(?!b)[abc](?=d))..`, yes: []string{"aad", "[cd"}, no: []string{"]ad", "abd", "aae", ")cd"}},
		{pattern: `(?=.{1,5}\.?$)[a-z]{1,3}(?:\.[a-z]{1,3})*\.?`, yes: []string{"abc", "a.b.c", "abc.d."}, no: []string{"abc.de", "a..b"}},
		{pattern: `^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$`, yes: []string{"1", "-0.5", ".5", "+007."}, no: []string{"", "-", ".", "-.", "1.5.", "x"}}, // pydantic's Decimal
		// Durations and bank accounts of zod.
		{pattern: `^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$`, yes: []string{"P1W", "P1Y2M", "PT1.5S", "P3DT4H"}, no: []string{"P", "PT", "P1Y1W", "P1DT", "P1.5Y"}},
		{
			pattern: `^[-+]?P(?!$)(?:(?:[-+]?\d+Y)|(?:[-+]?\d+[.,]\d+Y$))?(?:(?:[-+]?\d+M)|(?:[-+]?\d+[.,]\d+M$))?(?:(?:[-+]?\d+W)|(?:[-+]?\d+[.,]\d+W$))?(?:(?:[-+]?\d+D)|(?:[-+]?\d+[.,]\d+D$))?(?:T(?=[\d+-])(?:(?:[-+]?\d+H)|(?:[-+]?\d+[.,]\d+H$))?(?:(?:[-+]?\d+M)|(?:[-+]?\d+[.,]\d+M$))?(?:[-+]?\d+(?:[.,]\d+)?S)?)??$`,
			yes:     []string{"P1Y", "-P1.5Y", "P1Y-2MT3.5M", "PT+1H2S", "P1W2DT0.1S"}, no: []string{"P", "P1.5Y1M", "P1YT", "PT1.5H1M", "P1D1W"},
		},
		{pattern: `^[A-Z]{2}(?!00|01|99)\d{2}[A-Z0-9]{11,30}$`, yes: []string{"DE02ABCDEFGHIJKL"}, no: []string{"DE00ABCDEFGHIJKL", "DE99ABCDEFGHIJKL", "DE02ABC"}},
	} {
		e, err := Regex(c.pattern)
		if err != nil {
			t.Errorf("%s: %v", c.pattern, err)
			continue
		}
		g, err := New(e, nil)
		if err != nil {
			t.Errorf("%s: %v", c.pattern, err)
			continue
		}
		for _, s := range c.yes {
			if !g.Match(s) {
				t.Errorf("%s does not match %q", c.pattern, s)
			}
		}
		for _, s := range c.no {
			if g.Match(s) {
				t.Errorf("%s matches %q", c.pattern, s)
			}
		}
	}
	for pattern, want := range map[string]string{
		`(a(?=b)b)*`: "lookahead", `((?!a)b){2}`: "lookahead", `(?=a`: "has no end", `(?i)(?=a)b`: "flags", `(?=(?<=a)b)b`: "lookbehind", `(^a|b)(?=c)`: "anchor (^) in some", `(?=^a)b`: "anchor (^) in a lookahead", `^b(?=^a)`: "anchor (^) in a lookahead",
		strings.Repeat("(?=a)", maxLookaheads+1): "more than 32", strings.Repeat("(?=", 6) + strings.Repeat(")", 6): "deep", `(?<!a)b`: "lookbehind", `(a)\1`: `backreferences (\1)`, `(a)\12`: `backreferences (\1)`, `a\b`: "word boundaries", `a^b`: "anchor (^)", `$^`: "anchor (^)", `^$^`: "anchor (^)",
		`(a$)+`: "anchor ($)", `(?m)^a$`: "anchors of lines", `a(`: "missing closing )", strings.Repeat("a", maxPattern+1): "the maximum is", "\xff": "UTF-8",
		`[`: "missing closing ]",
	} {
		if _, err := Regex(pattern); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.20s: %v, want an error with %q", pattern, err, want)
		}
	}
}

// randomPattern is a regular expression over few characters.
func randomPattern(r *rand.Rand, depth int) string {
	sub := func() string { return randomPattern(r, depth-1) }
	switch n := r.IntN(8); {
	case depth == 0 || n < 3:
		return []string{"a", "b", "é", "[ab]", "[^a]", "."}[r.IntN(6)]
	case n < 5:
		return sub() + sub()
	case n < 6:
		return "(" + sub() + "|" + sub() + ")"
	case n < 7:
		return "(" + sub() + ")" + []string{"*", "+", "?", "{2}", "{1,3}"}[r.IntN(5)]
	}
	return "(" + sub() + ")"
}

// TestRegexAgainstGo compares random expressions with package regexp.
func TestRegexAgainstGo(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 300 {
		pattern := randomPattern(r, 4)
		e, err := Regex(pattern)
		if err != nil {
			t.Fatalf("%s: %v", pattern, err)
		}
		g, err := New(e, nil)
		if err != nil {
			t.Fatalf("%s: %v", pattern, err)
		}
		whole := regexp.MustCompile("^(?:" + pattern + ")$")
		for range 100 {
			text := randomText(r)
			if got, want := g.Match(text), whole.MatchString(text); got != want {
				t.Fatalf("%s matches %q: %v, want %v", pattern, text, got, want)
			}
		}
	}
}

// matcher says whether a pattern matches at i, and goes on to match what follows it from j.
type matcher func(text []rune, i int, follows func(j int) bool) bool

// randomLooking is a regular expression with lookaheads and anchors ($) anywhere but in repetitions, and its matcher.
func randomLooking(r *rand.Rand, depth int, repeated bool) (string, matcher) {
	sub := func(repeated bool) (string, matcher) { return randomLooking(r, depth-1, repeated) }
	switch n := r.IntN(12); {
	case depth == 0 || n < 3:
		chars := [][2]string{{"a", "a"}, {"b", "b"}, {"[ab]", "ab"}, {"[^a]", "bc\n"}, {".", "abc"}}[r.IntN(5)]
		return chars[0], func(text []rune, i int, follows func(int) bool) bool {
			return i < len(text) && strings.ContainsRune(chars[1], text[i]) && follows(i+1)
		}
	case n < 6:
		a, matchA := sub(repeated)
		b, matchB := sub(repeated)
		return a + b, func(text []rune, i int, follows func(int) bool) bool {
			return matchA(text, i, func(j int) bool { return matchB(text, j, follows) })
		}
	case n < 7:
		a, matchA := sub(repeated)
		b, matchB := sub(repeated)
		return "(?:" + a + "|" + b + ")", func(text []rune, i int, follows func(int) bool) bool {
			return matchA(text, i, follows) || matchB(text, i, follows)
		}
	case n < 8:
		a, match := sub(repeated)
		return "(" + a + ")?", func(text []rune, i int, follows func(int) bool) bool {
			return match(text, i, follows) || follows(i)
		}
	case n < 9:
		a, match := sub(true)
		var star matcher
		star = func(text []rune, i int, follows func(int) bool) bool {
			return follows(i) || match(text, i, func(j int) bool { return j > i && star(text, j, follows) })
		}
		return "(" + a + ")*", star
	case repeated:
		return "b", func(text []rune, i int, follows func(int) bool) bool {
			return i < len(text) && text[i] == 'b' && follows(i+1)
		}
	case n < 10:
		return "$", func(text []rune, i int, follows func(int) bool) bool { return i == len(text) && follows(i) }
	}
	a, match := sub(false)
	not := r.IntN(2) == 0
	open := "(?="
	if not {
		open = "(?!"
	}
	return open + a + ")", func(text []rune, i int, follows func(int) bool) bool {
		return match(text, i, func(int) bool { return true }) != not && follows(i)
	}
}

// TestLookahead compares random expressions with a matcher that goes through all ways to match.
func TestLookahead(t *testing.T) {
	racedetector.SkipSequential(t)
	r := rand.New(rand.NewPCG(3, 4))
	matched, looked := 0, 0
	for range 3000 {
		pattern, match := randomLooking(r, 5, false)
		p, err := ParsePattern(pattern)
		if err != nil {
			t.Fatalf("%s: %v", pattern, err)
		}
		if !p.looks {
			continue
		}
		looked++
		whole, within := matching(t, p.Whole(Runes)), matching(t, p.Within(Runes, Any()))
		for range 60 {
			text := strings.ReplaceAll(randomText(r), "é", "a")
			runes := []rune(text)
			has := false
			for i := range len(runes) + 1 {
				has = has || match(runes, i, func(int) bool { return true })
			}
			for name, x := range map[string]struct{ got, want bool }{
				"is": {whole(text), match(runes, 0, func(j int) bool { return j == len(runes) })}, "has": {within(text), has},
			} {
				if x.want {
					matched++
				}
				if x.got != x.want {
					t.Fatalf("%q %s %s: %v, want %v", text, name, pattern, x.got, x.want)
				}
			}
		}
	}
	if looked < 500 || matched < 5000 {
		t.Errorf("%d patterns look, and %d texts match", looked, matched)
	}
}

// matching says which texts fit an expression.
func matching(t *testing.T, e Expr) func(string) bool {
	t.Helper()
	g, err := New(e, nil)
	switch {
	case err == nil:
		return g.Match
	case errors.Is(err, ErrNoText):
		return func(string) bool { return false }
	case strings.Contains(err.Error(), "only the empty text"):
		return func(text string) bool { return text == "" }
	}
	t.Fatal(err)
	return nil
}

// TestExcept compares random differences with package regexp.
func TestExcept(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	for range 200 {
		var patterns [3]string
		var parts [3]Expr
		var whole [3]*regexp.Regexp
		for i := range patterns {
			patterns[i] = randomPattern(r, 3)
			var err error
			if parts[i], err = Regex(patterns[i]); err != nil {
				t.Fatal(err)
			}
			whole[i] = regexp.MustCompile("^(?:" + patterns[i] + ")$")
		}
		match := matching(t, Except(parts[0], parts[1:]...))
		for range 50 {
			text := randomText(r)
			if got, want := match(text), whole[0].MatchString(text) && !whole[1].MatchString(text) && !whole[2].MatchString(text); got != want {
				t.Fatalf("%q: %v, want %v", patterns, got, want)
			}
		}
	}
}

func randomText(r *rand.Rand) (text string) {
	for range r.IntN(8) {
		text += []string{"a", "b", "é", "c", "\n"}[r.IntN(5)]
	}
	return text
}

// TestAll compares what fits random expressions, and numbers of characters or of other units, with package regexp.
func TestAll(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	for range 400 {
		patterns := []string{randomPattern(r, 4), randomPattern(r, 3)}
		unit, least := []string{"(?s:.)", "(ab|é|c)", "(a|ab)", "a*b", "()"}[max(r.IntN(9)-4, 0)], r.IntN(4)
		most := least + r.IntN(5)
		patterns = append(patterns, fmt.Sprintf("(%s){%d,%d}", unit, least, most))
		if r.IntN(3) == 0 {
			patterns[2] = fmt.Sprintf("(%s){%d,}", unit, least)
			most = -1
		}
		var parts []Expr
		for _, p := range append(patterns[:2:2], unit) {
			e, err := Regex(p)
			if err != nil {
				t.Fatalf("%s: %v", p, err)
			}
			parts = append(parts, e)
		}
		parts[2] = Repeat(parts[2], least, most)
		r.Shuffle(3, func(i, j int) { parts[i], parts[j] = parts[j], parts[i] })
		// In a row, so that where it ends is told, too.
		g, err := New(Seq(All(parts...), Optional(Seq(Literal("\xff"), All(All(parts[:2]...), parts[2])))), bytesAnd())
		if err != nil {
			if err.Error() != ErrNoText.Error() && err.Error() != "only the empty text fits it" {
				t.Fatalf("%q: %v", patterns, err)
			}
			g = nil
		}
		fits := func(text string) bool {
			for _, p := range patterns {
				if !regexp.MustCompile("^(?:" + p + ")$").MatchString(text) {
					return false
				}
			}
			return true
		}
		for range 60 {
			text := randomText(r)
			want := fits(text)
			if g == nil {
				if want && text != "" {
					t.Fatalf("%q: nothing fits, and %q does", patterns, text)
				}
				continue
			}
			if got := g.Match(text); got != want {
				t.Fatalf("%q: %q fits: %v, want %v", patterns, text, got, want)
			}
			if got := g.Match(text + "\xff" + text); got != want {
				t.Fatalf("%q: %q fits twice: %v, want %v", patterns, text, got, want)
			}
		}
		if g == nil {
			continue
		}
		m, text := g.Matcher(), ""
		for n := 0; n < 200 && !m.MayEnd(); n++ {
			var next []byte
			for b := range 256 {
				if m.Mask()[b/32]>>(b%32)&1 != 0 {
					next = append(next, byte(b))
				}
			}
			if len(next) == 0 {
				t.Fatalf("%q: nothing may follow %q", patterns, text)
			}
			b := next[r.IntN(len(next))]
			m.Accept(int32(b))
			text += string([]byte{b})
		}
		if m.MayEnd() && !strings.Contains(text, "\xff") && !fits(text) {
			t.Fatalf("%q: %q is written", patterns, text)
		}
	}
	huge := All(Repeat(Runes('a', 'a'), 0, 1<<19), Seq(Literal("aaa"), Repeat(Runes('a', 'b'), 0, 3)))
	if g, err := New(huge, nil); err != nil || g.Nodes() > 8 || !g.Match("aaaa") || g.Match("aaab") {
		t.Errorf("%v", err)
	}
	for name, c := range map[string]struct {
		of   Expr
		want string
	}{
		"product": {&Rule{Name: "x", Place: "at x", Body: All(Repeat(Runes('a', 'b'), 0, 1<<19), Repeat(Runes('b', 'c'), 0, -1))}, "at x: it needs too many states"},
		"counter": {All(Repeat(Runes('a', 'b'), 0, 1<<30), Literal("a")), "it needs too many states"},
	} {
		if _, err := New(Seq(c.of, Literal("x")), nil); !errors.Is(err, ErrTooLarge) || !strings.HasPrefix(err.Error(), c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestGBNF(t *testing.T) {
	for _, c := range []struct {
		grammar string
		yes, no []string
	}{
		{`root ::= "a" | "b"`, []string{"a", "b"}, []string{"", "ab"}},
		{"# sums\nroot ::= term (op term)*\nterm ::= [0-9]+ | \"(\" root \")\"\nop ::= [-+*/]", []string{"1+2", "(1+(2*33))-4"}, []string{"1+", "(1", "1)"}},
		{"root ::= x{2} y{1,} z{0,2} w{,1}\nx ::= \"x\"\ny ::= \"y\"\nz ::= \"z\"\nw ::= \"\\x77\" # w", []string{"xxy", "xxyyzzw"}, []string{"xy", "xxyzzz"}},
		{"root ::= \"a\"\n  | \"b\" (\n  \"c\" )?", []string{"a", "bc", "b"}, []string{"ac"}},
		{`root ::= [^\n"\]] . [\u00e9-]`, []string{"ab-", "a\né"}, []string{`"b-`, "]b-"}},
		{"root ::= \"(\" root \")\" | \"\" | \"x\"", []string{"((x))", "()", "((()))"}, []string{"(()", "x)"}},
		{"root ::= item more\nmore ::= \",\" item more | \";\"\nitem ::= [a-z]*", []string{"a,b,,c;"}, []string{"a,b"}},
	} {
		e, err := ParseGBNF(c.grammar)
		if err != nil {
			t.Errorf("%s: %v", c.grammar, err)
			continue
		}
		g, err := New(e, nil)
		if err != nil {
			t.Errorf("%s: %v", c.grammar, err)
			continue
		}
		for _, s := range c.yes {
			if !g.Match(s) {
				t.Errorf("%s does not match %q", c.grammar, s)
			}
		}
		for _, s := range c.no {
			if g.Match(s) {
				t.Errorf("%s matches %q", c.grammar, s)
			}
		}
	}
	for text, want := range map[string]string{
		`root ::= "a" }`: "}",
		`a ::= "b"`:      "no rule named root", `root ::= b`: "rule b is not defined", `root = "a"`: "expected ::=", `root ::= "a`: "does not end",
		"root ::= \"a\"\nroot ::= \"b\"": "line 2: rule root is there twice", `root ::= ("a"`: "( without )", `root ::= "a"{3,2}`: "no number",
		`root ::= "a"{20000}`: "more than 10000", `root ::= [z-a]`: "no range", `root ::= "\q"`: "unknown escape", `root ::= "a" )`: "unexpected",
		"start: \"a\"": "expected ::=", "": "no rule named root",
	} {
		if _, err := ParseGBNF(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want an error with %q", text, err, want)
		}
	}
}

func TestRefused(t *testing.T) {
	racedetector.SkipSequential(t)
	for text, want := range map[string]string{
		"root ::= root \"a\" | \"b\"":                          "rule root begins with itself",
		"root ::= a \"x\"\na ::= b? root | \"a\"\nb ::= \"b\"": "begins with itself",
		"root ::= \"a\" root":                                  "no text fits",
		"root ::= \"\"":                                        "only the empty text",
		"root ::= [a-z]{0,10000} \"\"{10000} \"\"{10000} \"\"{10000} \"z\"": "too many states",
		"root ::= ([a-z]{1,50} \" \"){5000}":                                "too many states",
		"root ::= [ab]* \"a\" [ab]{20}":                                     "too many states",
	} {
		e, err := ParseGBNF(text)
		if err == nil {
			_, err = New(e, nil)
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want an error with %q", text, err, want)
		}
	}
	e, err := ParseGBNF("root ::= [ab]* \"a\" [ab]{30}")
	if err == nil {
		_, err = New(e, nil)
	}
	if !errors.Is(err, ErrTooLarge) {
		t.Errorf("%v, want ErrTooLarge", err)
	}
}

func TestUntil(t *testing.T) {
	g, err := New(Seq(Until("</think>"), Literal("x")), nil)
	if err != nil {
		t.Fatal(err)
	}
	for text, want := range map[string]bool{
		"</think>x": true, "a <b></thin</think>x": true, "é<</think>x": true, "</think></think>x": false, "abc": false, "\xff</think>x": false, "</</think>x": true,
	} {
		if got := g.Match(text); got != want {
			t.Errorf("%q: %v", text, got)
		}
	}
}

func TestWithout(t *testing.T) {
	g, err := New(Without("aéa"), nil)
	if err != nil {
		t.Fatal(err)
	}
	for text, want := range map[string]bool{"": true, "aé": true, "aéb": true, "aaéa": false, "xaéaéa": false, "éaé": true, "\xff": false} {
		if got := g.Match(text); got != want {
			t.Errorf("%q: %v", text, got)
		}
	}
}

// TestMasks compares masks with what each token's bytes do by themselves.
func TestMasks(t *testing.T) {
	v := bytesAnd("ab", "aba", "(", "((", "))", "),", ", a", "é", "\xc3", "x)y", "a)", "a),b", ")))", "\"}", "\", \"", "日本", "\xe6\x97", "")
	for _, text := range []string{
		`root ::= "(" root ")" | [a-z]+ | root2
root2 ::= "{" (root ("," root)*)? "}"`,
		"root ::= list\nlist ::= \"[\" (item (\",\" item)*)? \"]\"\nitem ::= [a-y]* | list | \"é\"+ | [一-龥]",
		`root ::= "a" "b"? "a"* ")" | ("a" [^x])* "x"`,
	} {
		e, err := ParseGBNF(text)
		if err != nil {
			t.Fatal(err)
		}
		g, err := New(e, v)
		if err != nil {
			t.Fatal(err)
		}
		plain, err := New(e, nil)
		if err != nil {
			t.Fatal(err)
		}
		r := rand.New(rand.NewPCG(3, 4))
		for range 50 {
			m, text := g.Matcher(), ""
			for range 40 {
				bits := m.Mask()
				var allowed []int32
				for id := range int32(len(v.text)) {
					is := bits[id/32]>>(id%32)&1 != 0
					if want := v.text[id] != "" && plain.Begins(text+v.text[id]); is != want {
						t.Fatalf("behind %q token %q: %v, want %v", text, v.text[id], is, want)
					}
					if is {
						allowed = append(allowed, id)
					}
				}
				if m.Ended() != (len(allowed) == 0) || m.MayEnd() != plain.Match(text) {
					t.Fatalf("behind %q ended %v, may end %v, %d tokens", text, m.Ended(), m.MayEnd(), len(allowed))
				}
				if len(allowed) == 0 {
					break
				}
				id := allowed[r.IntN(len(allowed))]
				if !m.Accept(id) {
					t.Fatalf("%q is not accepted behind %q", v.text[id], text)
				}
				text += v.text[id]
			}
		}
	}
}

// TestFirstToken: a space that the tokenizer leaves out in front of a text is none of the grammar.
func TestFirstToken(t *testing.T) {
	v := NewVocabulary(4, []Token{{0, " a", "a"}, {1, "a", "a"}, {2, " ", ""}, {3, " b", "b"}})
	g, err := New(Seq(Literal("a a")), v)
	if err != nil {
		t.Fatal(err)
	}
	m := g.Matcher()
	if got := m.Mask()[0]; got != 0b0111 {
		t.Errorf("the first mask is %b", got)
	}
	if !m.Accept(0) || m.Mask()[0] != 0b0101 {
		t.Errorf("the second mask is %b", m.Mask()[0])
	}
	if !m.Accept(2) || m.Accept(0) || !m.Accept(1) || !m.Ended() {
		t.Error("the text is not a a")
	}
}

// TestFlushed: dropping states and masks changes nothing for those who use them.
func TestFlushed(t *testing.T) {
	v := bytesAnd("ab", "((", "))")
	e, _ := ParseGBNF(`root ::= "(" root ")" | [a-z]+`)
	g, err := New(e, v)
	if err != nil {
		t.Fatal(err)
	}
	m := g.Matcher()
	for i, c := range "((((ab))))" {
		want := fmt.Sprint(m.Mask())
		if i%2 == 0 {
			g.maskBytes.Store(maxMaskBytes)
			g.newMask()
		}
		other := g.Matcher()
		for _, b := range "((((ab))))"[:i] {
			other.Accept(b)
		}
		if got := fmt.Sprint(other.Mask()); got != want {
			t.Fatalf("behind %d characters the mask differs", i)
		}
		if !m.Accept(c) {
			t.Fatalf("%c is not accepted", c)
		}
	}
	if !m.Ended() {
		t.Error("the text has not ended")
	}
}

// TestWarm: masks that are computed ahead are those that would be later.
func TestWarm(t *testing.T) {
	for _, workers := range []int{1, 8} {
		t.Run(fmt.Sprint(workers, " workers"), func(t *testing.T) { testWarm(t, workers) })
	}
}

func testWarm(t *testing.T, workers int) {
	v := bytesAnd("ab", "abc", "a\"", "\",", "\"]", "x\"]")
	e, err := ParseGBNF("root ::= \"[\" s (\",\" s)* \"]\" | [0-9]+\ns ::= \"\\\"\" [^\"]{0,3} \"\\\"\" | root")
	if err != nil {
		t.Fatal(err)
	}
	warm, err := New(e, v)
	if err != nil {
		t.Fatal(err)
	}
	warm.warm(workers)
	cold, err := New(e, v)
	if err != nil {
		t.Fatal(err)
	}
	computed := 0
	for i := range warm.alone {
		if warm.alone[i].Load() != nil {
			computed++
		}
	}
	if computed < 3 {
		t.Errorf("%d masks are computed ahead", computed)
	}
	for _, text := range []string{`["abc","a",[12,"b"]]`, `[[["x"]]]`} {
		m, n := warm.Matcher(), cold.Matcher()
		for i := range text {
			if fmt.Sprint(m.Mask()) != fmt.Sprint(n.Mask()) {
				t.Fatalf("behind %q the masks differ", text[:i])
			}
			if !m.Accept(int32(text[i])) || !n.Accept(int32(text[i])) {
				t.Fatalf("%q is refused at %d", text, i)
			}
		}
	}
}

// TestDeep: a text may be nested thousands of levels deep, and not without end.
func TestDeep(t *testing.T) {
	e, err := ParseGBNF(`root ::= "[" root? "]"`)
	if err != nil {
		t.Fatal(err)
	}
	g, err := New(e, nil)
	if err != nil {
		t.Fatal(err)
	}
	for depth, want := range map[int]bool{1: true, 5000: true, 3 * maxStack: false} {
		if got := g.Match(strings.Repeat("[", depth) + strings.Repeat("]", depth)); got != want {
			t.Errorf("%d levels: %v", depth, got)
		}
	}
}

// TestConcurrentMasks: matchers of one grammar in several goroutines have the masks that one alone has.
func TestConcurrentMasks(t *testing.T) {
	v := bytesAnd("ab", "((", "))", "a)", "),(")
	e, err := ParseGBNF("root ::= \"(\" (root (\",\" root)*)? \")\" | [a-z]{1,20}")
	if err != nil {
		t.Fatal(err)
	}
	want, err := New(e, v)
	if err != nil {
		t.Fatal(err)
	}
	g, err := New(e, v)
	if err != nil {
		t.Fatal(err)
	}
	texts := []string{"((ab),(c,(d)))", "abcdefgh", "(a,b,c,(((x))))", "()"}
	masks := map[string]string{}
	for _, text := range texts {
		m := want.Matcher()
		for i := range text {
			masks[text[:i]] = fmt.Sprint(m.Mask())
			m.Accept(int32(text[i]))
		}
	}
	var all sync.WaitGroup
	for i := range 16 {
		all.Go(func() {
			text := texts[i%len(texts)]
			m := g.Matcher()
			for i := range text {
				if got := fmt.Sprint(m.Mask()); got != masks[text[:i]] {
					t.Errorf("behind %q the mask differs", text[:i])
				}
				if !m.Accept(int32(text[i])) {
					t.Errorf("%q is refused at %d", text, i)
				}
			}
		})
	}
	all.Wait()
}

func FuzzFrontEnds(f *testing.F) {
	f.Add("a(b|c)*d{2,3}[^e]")
	f.Add("root ::= \"a\" [b-c]{1,2} | root2*\nroot2 ::= . \"\\n\"")
	f.Fuzz(func(t *testing.T, text string) {
		for _, parse := range []func(string) (Expr, error){Regex, ParseGBNF} {
			e, err := parse(text)
			if err != nil {
				continue
			}
			g, err := New(e, bytesAnd("ab"))
			if err != nil {
				continue
			}
			m := g.Matcher()
			for range 20 {
				bits := m.Mask()
				next := int32(-1)
				for id := range int32(257) {
					if bits[id/32]>>(id%32)&1 != 0 {
						next = id
						break
					}
				}
				if next < 0 {
					if !m.Ended() {
						t.Fatal("nothing may follow, and the text may not end")
					}
					break
				}
				m.Accept(next)
			}
		}
	})
}
