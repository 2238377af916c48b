package tokenizer

import (
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// addedToken is a token that is matched in the text as a whole, before BPE.
type addedToken struct {
	content    string
	singleWord bool // matches only if no word character is adjacent
	lstrip     bool // also consumes the white space before it
	rstrip     bool // also consumes the white space after it
	normalized bool // is matched on normalized text
	special    bool
}

// addedTrie finds added tokens: the leftmost match, and the longest match at that position.
type addedTrie struct {
	first  [256]int32 // node after the first byte, 0 if no token starts with it
	nodes  []trieNode // nodes[0] is unused
	tokens []addedToken
	ids    []int32
}

type trieNode struct {
	edges []trieEdge // ordered by byte
	token int32      // index in tokens, -1: no token ends here
}

type trieEdge struct {
	b  byte
	to int32
}

func newAddedTrie() *addedTrie { return &addedTrie{nodes: make([]trieNode, 1)} }

// add maps pattern to token. A later token with the same pattern does not replace an earlier one.
func (t *addedTrie) add(pattern string, token addedToken, id int32) {
	if pattern == "" {
		return
	}
	at := &t.first[pattern[0]]
	for i := 1; ; i++ {
		if *at == 0 {
			*at = int32(len(t.nodes))
			t.nodes = append(t.nodes, trieNode{token: -1})
		}
		node := *at
		if i == len(pattern) {
			if t.nodes[node].token < 0 {
				t.nodes[node].token = int32(len(t.tokens))
				t.tokens = append(t.tokens, token)
				t.ids = append(t.ids, id)
			}
			return
		}
		edges := t.nodes[node].edges
		k, ok := slices.BinarySearchFunc(edges, pattern[i], func(e trieEdge, b byte) int { return int(e.b) - int(b) })
		if !ok {
			edges = slices.Insert(edges, k, trieEdge{b: pattern[i], to: int32(len(t.nodes))})
			t.nodes[node].edges = edges
			t.nodes = append(t.nodes, trieNode{token: -1})
			edges = t.nodes[node].edges
		}
		next := edges[k].to
		at = &next
	}
}

// match returns the longest token that is a prefix of text, as its index in tokens (-1: none), and its length in bytes.
func (t *addedTrie) match(text string) (token int32, length int) {
	token = -1
	node := t.first[text[0]]
	for i := 1; node != 0; i++ {
		n := &t.nodes[node]
		if n.token >= 0 {
			token, length = n.token, i
		}
		node = 0
		if i < len(text) {
			for _, e := range n.edges {
				if e.b == text[i] {
					node = e.to
					break
				}
			}
		}
	}
	return token, length
}

// split calls yield for the parts of text in order: an added token with its id, or the text between two of them with
// id -1. Parts of text are never empty.
//
// As in the reference, a match whose token wants a word of its own and does not have it is passed over without a
// second choice, and the search goes on behind the token itself, not behind white space that the token took with it.
func (t *addedTrie) split(text string, yield func(id int32, start, end int)) {
	done := 0
	if len(t.tokens) > 0 {
		for i := 0; i < len(text); {
			if t.first[text[i]] == 0 {
				i++
				continue
			}
			k, n := t.match(text[i:])
			if k < 0 {
				i++
				continue
			}
			token := &t.tokens[k]
			start, end := i, i+n
			i = end
			if token.singleWord && (endsWithWord(text[:start]) || startsWithWord(text[end:])) {
				continue
			}
			if token.lstrip {
				start = max(len(strings.TrimRightFunc(text[:start], unicode.IsSpace)), done)
			}
			if token.rstrip {
				end = len(text) - len(strings.TrimLeftFunc(text[end:], unicode.IsSpace))
			}
			if done < start {
				yield(-1, done, start)
			}
			if start < end { // start == end: the previous match consumed it as white space
				yield(t.ids[k], start, end)
			}
			done = end
		}
	}
	if done < len(text) {
		yield(-1, done, len(text))
	}
}

func endsWithWord(s string) bool {
	r, n := utf8.DecodeLastRuneInString(s)
	return n > 0 && isWord(r)
}

func startsWithWord(s string) bool {
	r, n := utf8.DecodeRuneInString(s)
	return n > 0 && isWord(r)
}
