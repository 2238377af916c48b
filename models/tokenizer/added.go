package tokenizer

import (
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/moeserve/moeserve/untrusted"
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

// markup reports whether the token may mean more to a model than its text: it is no run of white space.
func (t *addedToken) markup() bool { return strings.TrimSpace(t.content) != "" }

// addedTrie finds added tokens: the leftmost match, and the longest match at that position.
type addedTrie struct {
	first  [256]int32 // node after the first byte, 0 if no token starts with it
	nodes  []trieNode // nodes[0] is unused
	tokens []addedToken
	ids    []int32
	markup bool // one of the tokens is not white space
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
				t.markup = t.markup || token.markup()
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
// One that is not white space may have up to maximum bytes.
func (t *addedTrie) match(text string, maximum int) (token int32, length int) {
	token = -1
	node := t.first[text[0]]
	for i := 1; node != 0; i++ {
		n := &t.nodes[node]
		if n.token >= 0 && (i <= maximum || !t.tokens[n.token].markup()) {
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
// id -1. Parts of text are never empty. It ends where yield returns false. Tokens that touch one of the plain ranges,
// which are ascending and disjoint, are matched only if they are white space.
//
// As in the reference, a match whose token wants a word of its own and does not have it is passed over without a
// second choice, and the search goes on behind the token itself, not behind white space that the token took with it.
func (t *addedTrie) split(text string, plain [][2]int, yield func(id int32, start, end int) bool) {
	done := 0
	if len(t.tokens) > 0 {
		for i := 0; i < len(text); {
			if t.first[text[i]] == 0 {
				i++
				continue
			}
			for len(plain) > 0 && plain[0][1] <= i {
				plain = plain[1:]
			}
			maximum := len(text)
			if len(plain) > 0 {
				maximum = plain[0][0] - i
			}
			k, n := t.match(text[i:], maximum)
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
			if done < start && !yield(-1, done, start) {
				return
			}
			// start == end: the previous match consumed it as white space
			if start < end && !yield(t.ids[k], start, end) {
				return
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

// buildAdded registers added tokens as the reference does: a token of the vocabulary keeps its id, a new one gets the
// next free id, and a later definition of a token replaces an earlier one.
func buildAdded(t *Pipeline, c *fileConfig, side *sideConfig) error {
	t.added = map[string]int32{}
	var list []addedToken
	index := map[string]int{} // in list
	next := int32(t.model.size)
	add := func(token addedToken) error {
		if token.content == "" {
			return nil
		}
		if i, ok := index[token.content]; ok {
			list[i] = token
			return nil
		}
		id, ok := t.model.vocab[token.content]
		if !ok {
			id = next
		}
		if err := t.set(id, token.content); err != nil {
			return fmt.Errorf("added token: %w", err)
		}
		t.added[token.content] = id
		next = max(next, id+1)
		index[token.content] = len(list)
		list = append(list, token)
		return nil
	}
	for i, a := range c.AddedTokens {
		if a.ID == nil || *a.ID < 0 || *a.ID > maxID {
			id := "no id"
			if a.ID != nil {
				id = fmt.Sprintf("id %d", *a.ID)
			}
			return fmt.Errorf("added_tokens[%d], %s, has %s: ids run from 0 to %d", i, untrusted.Quote(a.Content), id, maxID)
		}
		if err := add(a.token()); err != nil {
			return err
		}
	}
	restated := make([]int64, 0, len(side.AddedTokensDecoder))
	for key := range side.AddedTokensDecoder {
		id, err := strconv.ParseInt(key, 10, 32)
		if err != nil {
			return fmt.Errorf("%s: added_tokens_decoder has the key %s, which is no id", configFile, untrusted.Quote(key))
		}
		restated = append(restated, id)
	}
	slices.Sort(restated)
	for _, id := range restated {
		if err := add(side.AddedTokensDecoder[strconv.FormatInt(id, 10)].token()); err != nil {
			return err
		}
	}
	named := []*tokenName{side.BOS, side.EOS, side.Unk, side.Pad}
	for _, raw := range []json.RawMessage{side.AdditionalSpecialTokens, side.ExtraSpecialTokens} {
		var more []*tokenName
		if len(raw) == 0 || raw[0] != '[' {
			continue
		}
		if err := json.Unmarshal(raw, &more); err != nil {
			return fmt.Errorf("%s: special tokens: %w", configFile, err)
		}
		named = append(named, more...)
	}
	for _, n := range named {
		if n == nil {
			continue
		}
		if _, ok := index[n.token.content]; ok {
			continue
		}
		if err := add(n.token); err != nil {
			return err
		}
	}
	t.raw, t.normalized = newAddedTrie(), newAddedTrie()
	for _, special := range []bool{true, false} {
		for _, token := range list {
			if token.special != special {
				continue
			}
			id := t.added[token.content]
			t.special[id] = token.special
			if token.normalized {
				pattern, err := t.normalizer.apply(token.content)
				if err != nil {
					return fmt.Errorf("added token %s: %w", untrusted.Quote(token.content), err)
				}
				t.normalized.add(pattern, token, id)
			} else {
				t.raw.add(token.content, token, id)
			}
		}
	}
	return nil
}
