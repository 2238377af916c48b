package pattern

import (
	"errors"
	"strings"
	"testing"
	"unicode/utf8"
)

// TestFind has what the reference's patterns do not show; those are in models/tokenizer/testdata/variants.json.
func TestFind(t *testing.T) {
	for _, c := range []struct {
		pattern, text, want string // the first match; "-": none
	}{
		{`a|ab`, "ab", "a"},
		{`(?:a|ab)c`, "abc", "abc"},
		{`a{2}`, "caaa", "aa"},
		{`a{,2}b`, "aaab", "aab"},
		{`a{x}`, "a{x}", "a{x}"},
		{`(a|b){2,3}`, "xabab", "aba"},
		{`a*+a`, "aaa", "-"},
		{`(?>a|ab)c`, "abc", "-"},
		{`a+?`, "aaa", "a"},
		{`a{1,2}+`, "aaaaa", "aaaaa"}, // as Ruby has it: not possessive
		{`(?=b)..`, "abc", "bc"},
		{`(?<=a)b`, "bab", "b"},
		{`(?<!a)b`, "abb", "b"},
		{`\bb`, "ab b", "b"},
		{`^b`, "a\nb", "b"},
		{`[^\P{L}a]`, "1ab", "b"},
		{`[a-c&&[^b]]+`, "bcab", "ca"},
		{`[\]\-a]+`, "x]-a", "]-a"},
		{`(?i:K)`, "\u212a", "\u212a"},
		{`\x{1F600}\u0041\x41`, "\U0001F600AA", "\U0001F600AA"},
		{`.`, "\n", "-"},
		{``, "a", ""},
	} {
		p, err := Compile(c.pattern)
		if err != nil {
			t.Errorf("%s: %v", c.pattern, err)
			continue
		}
		var m Matcher
		m.Begin(c.text)
		start, end, ok, err := m.Find(p, 0)
		got := "-"
		if ok {
			got = c.text[start:end]
		}
		if err != nil || got != c.want {
			t.Errorf("%s in %q is %q, %v, want %q", c.pattern, c.text, got, err, c.want)
		}
	}
}

func TestRefused(t *testing.T) {
	for pattern, want := range map[string]string{
		`(`: "not closed", `)`: "not opened", `[a`: "bracket is not closed", `a**`: "quantifier of a quantifier", `*`: "quantifier of nothing",
		`(a*)*`: "may be empty", `\1`: `\1`, `(?<n>a)`: "the group", `\p{Greek}`: "the class", `[[:alpha:]]`: "POSIX", `(?i:st)`: "in any case",
		`(?i:\p{L})`: "large class", `(?<=a+)b`: "no fixed length", `a{2000}`: "more than 1000", `[b-a]`: "ends before", `\`: "backslash",
		strings.Repeat("(", 60) + strings.Repeat(")", 60): "nested", `\h`: `\h`, `a{2}?`: "{n}?", "\xff": "UTF-8", `\xFF`: `\x"FF"`,
		strings.Repeat(`(?:`, 40) + `(?:a|){0}` + strings.Repeat(`){1000}`, 40): "too long", `[]a]`: "empty class",
	} {
		if _, err := Compile(pattern); !errors.Is(err, ErrUnsupported) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", pattern, err, want)
		}
	}
}

// TestSteps: a pattern that takes exponential or quadratic time on a text ends with an error.
func TestSteps(t *testing.T) {
	for _, source := range []string{`(?:(?:a|aa)+)+b`, `(a+)+b`, `a*a*a*a*a*b`} {
		p, err := Compile(source)
		if err != nil {
			t.Fatal(err)
		}
		var m Matcher
		m.Begin(strings.Repeat("a", 5000))
		if _, _, _, err := m.Find(p, 0); !errors.Is(err, ErrSteps) {
			t.Errorf("%s: %v", source, err)
		}
	}
}

// TestPublishedPatternsAreFast: on runs of any kind of character, where backtracking shows, they take a small part of the
// steps that they may.
func TestPublishedPatternsAreFast(t *testing.T) {
	const gpt4o = `[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+`
	for name, source := range map[string]string{
		"GPT-4o":                gpt4o,
		"Tekken":                strings.ReplaceAll(gpt4o, "(?i:'s|'t|'re|'ve|'m|'ll|'d)?", ""),
		"cl100k":                `'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s`,
		"DeepSeek":              "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
		"DeepSeek's ideographs": "[一-龥぀-ゟ゠-ヿ]+",
	} {
		p, err := Compile(source)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		for _, run := range []string{"a", "A", "中", "aB", "7", " ", " \n", "\n", "!", "!a", "\u0301", "é", "\u0000", "'s", " A"} {
			text := strings.Repeat(run, 20_000/len(run)) + "x"
			var m Matcher
			m.Begin(text)
			before := m.steps
			for at := 0; at < len(text); {
				_, end, ok, err := m.Find(p, at)
				if err != nil {
					t.Fatalf("%s on %q again and again: %v", name, run, err)
				}
				if !ok {
					break
				}
				at = end
			}
			if steps := (before - m.steps) / len(text); steps > 50 {
				t.Errorf("%s on %q again and again: %d steps for each byte", name, run, steps)
			}
		}
	}
}

// FuzzPattern: whatever compiles matches whole characters, within its steps.
func FuzzPattern(f *testing.F) {
	for _, s := range []string{
		`'s|'t| ?\p{L}+|\s+(?!\S)|\s+`, `(?i:'s|[sdmt])|[^\r\n\p{L}]?+\p{L}++|\p{N}{1,3}+`, `(?<=a)b|(?<!a)[^b]`, `(?>a|ab)(?=c)|^x$`,
		`[a-c&&[^b]]{2,3}?`, `(?:a|b|){3}`, `\p{^Han}\P{Lu}[\p{M}\d-]`, `((a{2}){3})+`,
	} {
		f.Add(s, "ab's é中 12\n")
	}
	f.Fuzz(func(t *testing.T, source, text string) {
		p, err := Compile(source)
		if err != nil {
			if !errors.Is(err, ErrUnsupported) {
				t.Fatal(err)
			}
			return
		}
		if !utf8.ValidString(text) || len(text) > 1000 {
			return
		}
		var m Matcher
		m.Begin(text)
		for at := 0; at <= len(text); {
			start, end, ok, err := m.Find(p, at)
			if err != nil && !errors.Is(err, ErrSteps) {
				t.Fatal(err)
			}
			if !ok {
				return
			}
			if start < at || end < start || end > len(text) || !utf8.ValidString(text[start:end]) || utf8.RuneCountInString(text[start:end]) < p.Minimum() {
				t.Fatalf("%q in %q from %d: %d to %d, at least %d characters", source, text, at, start, end, p.Minimum())
			}
			_, n := utf8.DecodeRuneInString(text[start:])
			at = start + max(n, 1)
		}
	})
}
