package tokenizer

import (
	"encoding/json"
	"errors"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"unicode/utf8"

	"golang.org/x/text/unicode/norm"
	"pgregory.net/rapid"

	"github.com/moeserve/moeserve/models/tokenizer/internal/pattern"
)

func loadBase(t testing.TB, base string) *Pipeline {
	t.Helper()
	tok, err := Parse(patched(t, baseFiles[base], nil), nil)
	if err != nil {
		t.Fatal(err)
	}
	return tok
}

// TestCutsChangeNothing compares a text that is cut where no merge crosses with the same text merged as one word.
func TestCutsChangeNothing(t *testing.T) {
	tok := loadBase(t, "bytefallback")
	if tok.model.pairs == nil {
		t.Fatal("the tokenizer does not cut")
	}
	rapid.Check(t, func(t *rapid.T) {
		parts := rapid.SliceOf(rapid.SampledFrom([]string{
			" ", "  ", "the", "expert", "e", "▁", "cache", "é", "ß", "中", "\n", "12", "re", "er ", "s", "<0x0A>", "\u0301",
		})).Draw(t, "parts")
		text, _ := tok.normalizer.apply(strings.Join(parts, ""))
		cut := &merger{m: tok.model}
		whole := &merger{m: tok.model}
		if got, want := cut.charText(nil, text), whole.merge(nil, text); !slices.Equal(got, want) {
			t.Fatalf("cut %v, whole %v", got, want)
		}
	})
}

// TestConcurrentUse encodes and decodes from many goroutines, with a cache small enough to lose words all the time.
func TestConcurrentUse(t *testing.T) {
	var variants []struct {
		Base, Name string
		Cases      []vector
	}
	readJSON(t, filepath.Join("testdata", "variants.json"), &variants)
	for _, v := range variants {
		if v.Name != "plain" {
			continue
		}
		tok := loadBase(t, v.Base)
		var wg sync.WaitGroup
		for g := range 8 {
			wg.Go(func() {
				order := rand.New(rand.NewPCG(uint64(g), 1)).Perm(len(v.Cases))
				for _, i := range order {
					c := v.Cases[i]
					if got := must(tok.Encode(c.Text, true)); !slices.Equal(got, c.WithSpecial) {
						t.Errorf("Encode(%q) = %v, want %v", c.Text, got, c.WithSpecial)
					}
				}
			})
		}
		wg.Wait()
	}
}

// TestCacheBounds fills the cache with more words than it holds.
func TestCacheBounds(t *testing.T) {
	c := newWordCache()
	for i := range int32(3 * wordCacheEntries) {
		word := string([]rune{rune(0x10000 + i)})
		c.put(c.hash(word), word, []int32{i})
		if ids, ok := c.get(c.hash(word), word); !ok || len(ids) != 1 || ids[0] != i {
			t.Fatalf("word %d is %v, %v right after it was stored", i, ids, ok)
		}
	}
	held := 0
	for i := range c.slot {
		if c.slot[i].Load() != nil {
			held++
		}
	}
	if held < wordCacheEntries*9/10 {
		t.Errorf("the cache holds %d of %d words after many more", held, wordCacheEntries)
	}
	g := &merger{m: loadBase(t, "tiny").model}
	long := strings.Repeat("e", maxCachedWord+1)
	g.byteWord(nil, long)
	if _, ok := g.m.cache.get(g.m.cache.hash(long), long); ok {
		t.Error("the cache holds a word that is too long for it")
	}
}

// TestNFC compares normalization with its definition, on text that the library normalizes as Unicode says.
func TestNFC(t *testing.T) {
	chars := []rune("aeqK\ufb01\u00bd\u0300\u0301\u0323\u0345\u0334\u05b0\u212b\u1100\u1161\u11a8\uac00\u0344\u0958é\u1e0a\u0958")
	rapid.Check(t, func(t *rapid.T) {
		text := string(rapid.SliceOfN(rapid.SampledFrom(chars), 0, 25).Draw(t, "text"))
		want := norm.NFC.String(text)
		for form, want := range map[norm.Form]string{
			norm.NFC: want, norm.NFD: norm.NFD.String(text), norm.NFKC: norm.NFKC.String(text), norm.NFKD: norm.NFKD.String(text),
		} {
			if got, _ := (unicodeForm{form}).apply(text); got != want {
				t.Fatalf("form %d of %+q = %+q, want %+q", form, text, got, want)
			}
		}
	})
	for text, want := range map[string]string{
		// More combining characters than the library takes in one run: none is added, and the order is by class.
		"a" + strings.Repeat("\u0301\u0323", 40): "\u1ea1" + strings.Repeat("\u0323", 39) + strings.Repeat("\u0301", 40),
		// Starters that combine backwards count as combining for the library.
		"\u0b86" + strings.Repeat("\u0bbe", 31):                        "\u0b86" + strings.Repeat("\u0bbe", 31),
		"\u1100" + strings.Repeat("\u1161", 40) + "\u11a8" + "e\u0301": "\uac00" + strings.Repeat("\u1161", 39) + "\u11a8" + "\u00e9",
		// Characters newer than the reference's tables stay apart.
		"\U00011935\U00011930": "\U00011935\U00011930",
		"\u0345\u08ca\u0334":   "\u0345\u08ca\u0334",
		"e\u0301\u08cae\u0301": "\u00e9\u08ca\u00e9",
	} {
		if got, _ := (unicodeForm{norm.NFC}).apply(text); got != want {
			t.Errorf("nfc of %+q = %+q, want %+q", text, got, want)
		}
	}
}

func TestClasses(t *testing.T) {
	loadClasses()
	for r, want := range map[rune]class{
		'a': letter, 'Z': letter, '0': number, ' ': space, '\n': space, '.': other, '_': other, 'é': letter, 'ß': letter,
		'²': number, '٣': number, '\u00a0': space, '\u3000': space, '\u200b': other, '中': letter, '\U0002EBF0': letter,
		'\U00010D40': number, '\u1c89': letter, '\uFFFD': other, '\U0010FFFF': other, '\u0301': other,
	} {
		if got, n := classAt(string(r), 0); got != want || n != utf8.RuneLen(r) {
			t.Errorf("%U has class %d and length %d, want %d and %d", r, got, n, want, utf8.RuneLen(r))
		}
	}
	if len(classPages) > 255 {
		t.Errorf("%d pages do not fit the index", len(classPages))
	}
}

// TestWarmEncodeAllocates holds a text of known words to the allocations of its result.
func TestWarmEncodeAllocates(t *testing.T) {
	tok := loadTiny(t, map[string]json.RawMessage{})
	text := strings.Repeat("the expert moves from host to peer ", 50)
	must(tok.Encode(text, false))
	if got := testing.AllocsPerRun(100, func() { must(tok.Encode(text, false)) }); got > 8 {
		t.Errorf("%v allocations, want 8 at most", got)
	}
}

// TestEncodeEnds: a pattern that takes exponential time on a text is an error that names it.
func TestEncodeEnds(t *testing.T) {
	for _, patch := range []string{
		`{"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Split", "pattern": {"Regex": "(a+)+b"}, "behavior": "Isolated", "invert": false}, {"type": "ByteLevel"}]}}`,
		`{"normalizer": {"type": "Replace", "pattern": {"Regex": "(a+)+b"}, "content": ""}}`,
	} {
		var keys map[string]json.RawMessage
		if err := json.Unmarshal([]byte(patch), &keys); err != nil {
			t.Fatal(err)
		}
		tok := loadTiny(t, keys)
		ids, err := tok.Encode(strings.Repeat("a", 100), true)
		if !errors.Is(err, pattern.ErrSteps) || !strings.Contains(err.Error(), `tokenizer.json: pattern "(a+)+b"`) || ids != nil {
			t.Errorf("%s: %v, %v", patch, ids, err)
		}
		if _, err := tok.Encode("ab", true); err != nil {
			t.Errorf("%s: another text: %v", patch, err)
		}
	}
}
