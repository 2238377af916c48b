package grammar

import (
	"cmp"
	"slices"
)

// Token is what a token adds to a text.
type Token struct {
	ID int32
	// Text is its bytes, which need not be whole characters, and First those that it adds as the first token, where
	// tokenizers leave out a space. A token without Text is in no mask.
	Text, First string
}

// Vocabulary is the tokens of a model, for masks. It is immutable.
type Vocabulary struct {
	words int
	// text and first by id.
	text, first []string
	// differs: some token is different as the first one.
	differs bool
	// The trie of all texts, in preorder: nodes[i] is above nodes[i+1:nodes[i].end]. ids has the tokens of all nodes.
	nodes []trieNode
	ids   []int32
	depth int
}

type trieNode struct {
	end   int32 // behind the last node below
	ids   int32 // its tokens: ids[ids:][:count]
	count uint16
	depth uint16 // 1: of the first byte
	b     byte
}

// maxTokenBytes is the length from which on tokens are in no mask.
const maxTokenBytes = 1 << 15

// NewVocabulary returns the vocabulary of a model with that many ids, of which the others are in no mask.
func NewVocabulary(size int, tokens []Token) *Vocabulary {
	v := &Vocabulary{words: (size + 31) / 32, text: make([]string, size), first: make([]string, size)}
	sorted := make([]Token, 0, len(tokens))
	for _, t := range tokens {
		if t.ID < 0 || int(t.ID) >= size || t.Text == "" || len(t.Text) >= maxTokenBytes || v.text[t.ID] != "" {
			continue
		}
		v.text[t.ID], v.first[t.ID] = t.Text, t.First
		v.differs = v.differs || t.Text != t.First
		sorted = append(sorted, t)
	}
	slices.SortFunc(sorted, func(a, b Token) int { return cmp.Or(cmp.Compare(a.Text, b.Text), cmp.Compare(a.ID, b.ID)) })
	var open []int32 // the nodes above
	last := ""
	v.ids = make([]int32, len(sorted))
	for i, t := range sorted {
		v.ids[i] = t.ID
		if t.Text == last {
			v.nodes[open[len(open)-1]].count++
			continue
		}
		same := 0
		for same < len(last) && same < len(t.Text) && last[same] == t.Text[same] {
			same++
		}
		v.close(open[same:])
		open = open[:same]
		for at := same; at < len(t.Text); at++ {
			open = append(open, int32(len(v.nodes)))
			v.nodes = append(v.nodes, trieNode{b: t.Text[at], depth: uint16(at + 1), ids: int32(i)})
		}
		v.nodes[len(v.nodes)-1].count = 1
		v.depth = max(v.depth, len(t.Text))
		last = t.Text
	}
	v.close(open)
	return v
}

// close ends nodes.
func (v *Vocabulary) close(open []int32) {
	for _, n := range open {
		v.nodes[n].end = int32(len(v.nodes))
	}
}

// Words is the number of words of a mask: a bit for each id, the lowest first.
func (v *Vocabulary) Words() int { return v.words }

// path is the bytes from the root to a node.
func (v *Vocabulary) path(n int32) string {
	return v.text[v.ids[v.nodes[n].ids]][:v.nodes[n].depth]
}
