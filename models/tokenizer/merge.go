package tokenizer

import (
	"hash/maphash"
	"slices"
	"strings"
	"sync/atomic"
	"unicode/utf8"
)

// noToken marks a symbol or table entry without an id.
const noToken = -1

// maxCachedWord is the maximum length in bytes of a cached word. Longer words are rare and would make the size of an
// entry unbounded.
const maxCachedWord = 128

// wordCacheEntries is the number of words that a tokenizer caches: a power of two, well above the number of distinct
// words in a megabyte of prose.
const wordCacheEntries = 1 << 16

// mergeRule maps a pair of symbols to the token id of their merge. Pairs of lower rank merge first.
type mergeRule struct {
	rank uint32
	id   int32
}

// pairKey is the key of the merge of left and right.
func pairKey(left, right int32) uint64 { return uint64(uint32(left))<<32 | uint64(uint32(right)) }

// model turns words into tokens. Byte-pair encoding has the initial symbols of a word, and the pairs that merge.
type model struct {
	vocab        map[string]int32
	size         int      // entries of the vocabulary
	unigram      *unigram // nil: merges
	merges       map[uint64]mergeRule
	byteTokens   [256]int32 // ids of <0x00> to <0xFF>, noToken where missing; used with byteFallback
	byteFallback bool
	unk          int32 // noToken: characters without a token are dropped
	fuseUnk      bool

	// byteLevel models start from the bytes of a word, each of which is one character in the vocabulary.
	byteLevel bool
	byteStart [256]int32       // id of each byte's character, noToken where the vocabulary lacks it
	whole     map[string]int32 // with ignore_merges: ids of words that are in the vocabulary as a whole, as spelled in text

	// longest token in bytes of text. covering: no text is without tokens, so that a word has at least its length divided
	// by longest.
	longest  int
	covering bool

	pairs *pairSet // nil: no cuts inside a segment
	cache *wordCache
}

// pairSet holds a superset of the pairs of adjacent characters inside tokens that merges produce. No merge crosses the
// boundary between two characters whose pair is not in the set, so cutting a text there does not change its ids. This
// turns a SentencePiece text, which has no pre-tokenizer, into words that the cache can hold. Pairs share bits: a false
// positive loses a cut and never changes an id.
type pairSet [1 << pairBits / 64]uint64

const pairBits = 19

func pairBit(a, b rune) (word, bit uint32) {
	h := (uint32(a)*0x9E3779B1 ^ uint32(b)*0x85EBCA77) * 0xC2B2AE3D
	h >>= 32 - pairBits
	return h >> 6, h & 63
}

func (p *pairSet) add(a, b rune) {
	w, bit := pairBit(a, b)
	p[w] |= 1 << bit
}

func (p *pairSet) has(a, b rune) bool {
	w, bit := pairBit(a, b)
	return p[w]>>bit&1 != 0
}

// symbol is an element of the doubly linked list that represents a word during merging.
type symbol struct {
	id         int32 // noToken: merged into its left neighbor
	prev, next int32 // indices, -1 at the ends
}

// candidate is a queued merge. It is stale if one of its symbols has changed since it was pushed.
type candidate struct {
	rank        uint32
	pos         int32
	id          int32
	left, right int32 // ids at pos and its successor when pushed
}

func (c candidate) before(d candidate) bool {
	return c.rank < d.rank || c.rank == d.rank && c.pos < d.pos
}

// merger holds the scratch memory of one goroutine's encoding.
type merger struct {
	m       *model
	symbols []symbol
	heap    []candidate
	unk     int32 // pending unknown token, noToken: none
	limit   int   // maximum number of ids that the caller can use, 0: any

	spans []span // of the splitter

	// Of a unigram model.
	ends   []pathEnd
	pieces []piece
}

// maxScratch is the maximum number of symbols for which an idle merger keeps memory, so that a huge word does not pin
// its memory.
const maxScratch = 1 << 16

// byteWord appends the ids of a word of a byte-level model.
func (g *merger) byteWord(out []int32, word string) []int32 {
	if len(word) == 1 && g.m.whole == nil {
		if id := g.m.byteStart[word[0]]; id >= 0 {
			return append(out, id)
		}
	}
	return g.cached(out, word)
}

// full reports whether there are more ids than the caller can use.
func (g *merger) full(out []int32) bool { return g.limit > 0 && len(out) > g.limit }

// charText appends the ids of a text for a character-level model. It cuts the text at boundaries that no merge crosses.
func (g *merger) charText(out []int32, text string) []int32 {
	if text == "" {
		return out
	}
	if g.m.pairs == nil {
		return g.cached(out, text)
	}
	start := 0
	prev, n := utf8.DecodeRuneInString(text)
	for i := n; i < len(text); i += n {
		r := rune(text[i])
		n = 1
		if r >= utf8.RuneSelf {
			r, n = utf8.DecodeRuneInString(text[i:])
		}
		if !g.m.pairs.has(prev, r) {
			if out = g.cached(out, text[start:i]); g.full(out) {
				return out
			}
			start = i
		}
		prev = r
	}
	return g.cached(out, text[start:])
}

func (g *merger) cached(out []int32, word string) []int32 {
	if len(word) > maxCachedWord {
		if g.limit > 0 && g.m.covering && len(word)/g.m.longest > g.limit {
			return slices.Grow(out, g.limit+1)[:g.limit+1] // whatever they are
		}
		return g.merge(out, word)
	}
	h := g.m.cache.hash(word)
	if ids, ok := g.m.cache.get(h, word); ok {
		return append(out, ids...)
	}
	n := len(out)
	out = g.merge(out, word)
	g.m.cache.put(h, word, out[n:])
	return out
}

// merge appends the ids of one word, computed without the cache.
func (g *merger) merge(out []int32, word string) []int32 {
	if g.m.unigram != nil {
		return g.unigramWord(out, word)
	}
	if g.m.whole != nil {
		if id, ok := g.m.whole[word]; ok {
			return append(out, id)
		}
	}
	g.begin(word)
	if len(g.symbols) == 0 {
		return out
	}
	g.run()
	for i := int32(0); i >= 0; i = g.symbols[i].next {
		out = append(out, g.symbols[i].id)
	}
	if cap(g.symbols) > maxScratch {
		g.symbols, g.heap = nil, nil
	}
	return out
}

// begin fills g.symbols with the initial symbols of word.
func (g *merger) begin(word string) {
	g.symbols = g.symbols[:0]
	g.heap = g.heap[:0]
	g.unk = noToken
	if g.m.byteLevel {
		for i := range len(word) {
			if id := g.m.byteStart[word[i]]; id >= 0 {
				g.known(id)
			} else {
				g.unknown(byteChars[word[i]])
			}
		}
	} else {
		for i := 0; i < len(word); {
			_, n := utf8.DecodeRuneInString(word[i:])
			if id, ok := g.m.vocab[word[i:i+n]]; ok {
				g.known(id)
			} else {
				g.unknown(word[i : i+n])
			}
			i += n
		}
	}
	if g.unk >= 0 {
		g.push(g.unk)
	}
	if n := len(g.symbols); n > 0 {
		g.symbols[n-1].next = -1
	}
}

func (g *merger) push(id int32) {
	n := int32(len(g.symbols))
	g.symbols = append(g.symbols, symbol{id: id, prev: n - 1, next: n + 1})
}

func (g *merger) known(id int32) {
	if g.unk >= 0 {
		g.push(g.unk)
		g.unk = noToken
	}
	g.push(id)
}

// unknown adds a character without a token: as its byte tokens if all of them exist, else as the unknown token. As in
// the reference, byte tokens are added before an unknown token that is still pending.
func (g *merger) unknown(char string) {
	if g.m.byteFallback {
		all := true
		for i := range len(char) {
			all = all && g.m.byteTokens[char[i]] >= 0
		}
		if all {
			for i := range len(char) {
				g.push(g.m.byteTokens[char[i]])
			}
			return
		}
	}
	if g.m.unk < 0 {
		return
	}
	if g.unk >= 0 && !g.m.fuseUnk {
		g.push(g.unk)
	}
	g.unk = g.m.unk
}

// run merges until no pair has a rule. Each step merges the pair of minimum rank, and the leftmost of equal pairs.
func (g *merger) run() {
	sym := g.symbols
	for i := range sym {
		g.consider(int32(i))
	}
	for len(g.heap) > 0 {
		c := g.pop()
		l := &sym[c.pos]
		if l.id != c.left || l.next < 0 || sym[l.next].id != c.right {
			continue
		}
		r := &sym[l.next]
		l.id = c.id
		l.next = r.next
		r.id = noToken
		if l.next >= 0 {
			sym[l.next].prev = c.pos
		}
		if l.prev >= 0 {
			g.consider(l.prev)
		}
		g.consider(c.pos)
	}
}

// consider pushes the merge of the symbol at pos with its successor, if a rule exists.
func (g *merger) consider(pos int32) {
	l := g.symbols[pos]
	if l.next < 0 {
		return
	}
	right := g.symbols[l.next].id
	rule, ok := g.m.merges[pairKey(l.id, right)]
	if !ok {
		return
	}
	h := append(g.heap, candidate{rank: rule.rank, pos: pos, id: rule.id, left: l.id, right: right})
	for i := len(h) - 1; i > 0; {
		parent := (i - 1) / 2
		if !h[i].before(h[parent]) {
			break
		}
		h[i], h[parent] = h[parent], h[i]
		i = parent
	}
	g.heap = h
}

func (g *merger) pop() candidate {
	h := g.heap
	top := h[0]
	last := len(h) - 1
	h[0] = h[last]
	h = h[:last]
	for i := 0; ; {
		child := 2*i + 1
		if child >= last {
			break
		}
		if child+1 < last && h[child+1].before(h[child]) {
			child++
		}
		if !h[child].before(h[i]) {
			break
		}
		h[i], h[child] = h[child], h[i]
		i = child
	}
	g.heap = h
	return top
}

// wordCache caches the ids of words. It is a two-way set-associative table of atomic pointers: readers and writers never
// wait, a full set evicts one of its words, and memory is bounded by wordCacheEntries words of at most maxCachedWord
// bytes. Entries are immutable.
type wordCache struct {
	seed maphash.Seed
	slot [wordCacheEntries]atomic.Pointer[cachedWord]
}

type cachedWord struct {
	word string
	ids  []int32
}

func newWordCache() *wordCache { return &wordCache{seed: maphash.MakeSeed()} }

func (c *wordCache) hash(word string) uint64 { return maphash.String(c.seed, word) }

func (c *wordCache) get(h uint64, word string) ([]int32, bool) {
	i := h % wordCacheEntries
	if e := c.slot[i].Load(); e != nil && e.word == word {
		return e.ids, true
	}
	if e := c.slot[i^1].Load(); e != nil && e.word == word {
		return e.ids, true
	}
	return nil, false
}

// put stores a copy of word and ids.
func (c *wordCache) put(h uint64, word string, ids []int32) {
	i := h % wordCacheEntries
	if c.slot[i].Load() != nil && (c.slot[i^1].Load() == nil || h>>63 == 1) {
		i ^= 1
	}
	e := &cachedWord{word: strings.Clone(word)}
	e.ids = append(e.ids, ids...)
	c.slot[i].Store(e)
}
