package tokenizer

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"unicode/utf8"

	"github.com/moeserve/moeserve/untrusted"
)

// unigramConfig is the model of a tokenizer.json whose type is Unigram. Ids are indices in the vocabulary.
type unigramConfig struct {
	UnkID        *int32         `json:"unk_id"`
	Vocab        []unigramPiece `json:"vocab"`
	ByteFallback bool           `json:"byte_fallback"`
}

// unigramPiece is a token and the logarithm of its probability: ["token", -3.5].
type unigramPiece struct {
	token string
	score float64
}

func (p *unigramPiece) UnmarshalJSON(b []byte) error {
	entry := []any{&p.token, &p.score}
	if err := json.Unmarshal(b, &entry); err != nil || len(entry) != 2 {
		return errors.New(`an entry of the vocabulary is not ["token", score]`)
	}
	return nil
}

const (
	// unkPenalty is how much less likely than the least likely token an unknown character is, as in the reference.
	unkPenalty = 10
	// maxPiece bounds the tokens of a unigram model, in bytes, and with it the time for each character.
	maxPiece = 512
)

// unigram picks the most likely sequence of tokens (Kudo 2018, "Subword Regularization", section 3.2): the Viterbi search
// of the reference, ties included.
type unigram struct {
	scores   []float64 // by id
	unkScore float64
	// The tree of tokens by their bytes: the child of a node for a byte, and the token that ends at a node (noToken: none).
	next map[treeEdge]int32
	ends []int32
}

type treeEdge struct {
	node int32
	b    byte
}

func buildUnigram(t *Pipeline, text json.RawMessage) error {
	var c unigramConfig
	if err := json.Unmarshal(text, &c); err != nil {
		return memberError("model", err)
	}
	switch {
	case len(c.Vocab) == 0:
		return errors.New("model.vocab is empty")
	case c.UnkID == nil:
		return unsupported("model Unigram without unk_id")
	case *c.UnkID < 0 || int(*c.UnkID) >= len(c.Vocab):
		return fmt.Errorf("model.unk_id is %d, and there are %d tokens", *c.UnkID, len(c.Vocab))
	case len(c.Vocab) > maxID:
		return fmt.Errorf("model.vocab has %d tokens: ids run from 0 to %d", len(c.Vocab), maxID)
	}
	u := &unigram{scores: make([]float64, len(c.Vocab)), next: map[treeEdge]int32{}, ends: []int32{noToken}}
	least := math.Inf(1)
	m := &model{vocab: make(map[string]int32, len(c.Vocab)), size: len(c.Vocab), unk: *c.UnkID, byteFallback: c.ByteFallback, cache: newWordCache(), unigram: u}
	for i, p := range c.Vocab {
		if len(p.token) > maxPiece {
			return unsupported("token %s of %d bytes in a Unigram model: up to %d are", untrusted.Quote(p.token), len(p.token), maxPiece)
		}
		id := int32(i)
		if err := t.set(id, p.token); err != nil {
			return err
		}
		u.scores[id] = p.score
		least = min(least, p.score)
		m.vocab[p.token] = id // of equal tokens the last
		u.add(p.token, id)
	}
	u.unkScore = least - unkPenalty
	m.findByteTokens()
	t.model = m
	return nil
}

func (u *unigram) add(token string, id int32) {
	at := int32(0)
	for i := range len(token) {
		to, ok := u.next[treeEdge{at, token[i]}]
		if !ok {
			to = int32(len(u.ends))
			u.ends = append(u.ends, noToken)
			u.next[treeEdge{at, token[i]}] = to
		}
		at = to
	}
	if at > 0 {
		u.ends[at] = id
	}
}

// finish takes special tokens out of the tree.
func (u *unigram) finish(special []bool) {
	for at, id := range u.ends {
		if id >= 0 && special[id] {
			u.ends[at] = noToken
		}
	}
}

// pathEnd is the best path that ends at a byte of a word.
type pathEnd struct {
	score float64
	start int32 // of the path's last token; -1: no path ends here
	id    int32
}

// unigramWord appends the ids of a word.
func (g *merger) unigramWord(out []int32, word string) []int32 {
	u := g.m.unigram
	ends := append(g.ends[:0], pathEnd{})
	for range len(word) {
		ends = append(ends, pathEnd{start: -1})
	}
	offer := func(at int, end pathEnd) {
		if ends[at].start < 0 || end.score > ends[at].score {
			ends[at] = end
		}
	}
	for start := 0; start < len(word); {
		_, size := utf8.DecodeRuneInString(word[start:])
		here := ends[start].score
		single := false // a token is this one character
		for node, i := int32(0), start; i < len(word); {
			to, ok := u.next[treeEdge{node, word[i]}]
			if !ok {
				break
			}
			node = to
			i++
			id := u.ends[node]
			if id < 0 {
				continue
			}
			single = single || i == start+size
			offer(i, pathEnd{u.scores[id] + here, int32(start), id})
		}
		if !single {
			offer(start+size, pathEnd{u.unkScore + here, int32(start), g.m.unk})
		}
		start += size
	}
	// Backwards along the best path. Neighbors that are unknown are one piece.
	pieces := g.pieces[:0]
	for end := len(word); end > 0; {
		at := ends[end]
		if n := len(pieces); at.id == g.m.unk && n > 0 && pieces[n-1].unk {
			pieces[n-1].start = int(at.start)
		} else {
			pieces = append(pieces, piece{int(at.start), end, at.id == g.m.unk})
		}
		end = int(at.start)
	}
	for i := len(pieces) - 1; i >= 0; i-- {
		out = g.unigramPiece(out, word[pieces[i].start:pieces[i].end])
	}
	if cap(ends) <= maxScratch {
		g.ends, g.pieces = ends, pieces
	}
	return out
}

type piece struct {
	start, end int
	unk        bool
}

// unigramPiece appends the id of a piece: what is no token is the unknown token, or the tokens of its bytes.
func (g *merger) unigramPiece(out []int32, text string) []int32 {
	if id, ok := g.m.vocab[text]; ok {
		return append(out, id)
	}
	if g.m.byteFallback {
		n := len(out)
		for i := range len(text) {
			id := g.m.byteTokens[text[i]]
			if id < 0 {
				return append(out[:n], g.m.unk)
			}
			out = append(out, id)
		}
		return out
	}
	return append(out, g.m.unk)
}
