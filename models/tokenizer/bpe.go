package tokenizer

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/moeserve/moeserve/untrusted"
)

// bpeConfig is the model of a tokenizer.json whose type is BPE.
type bpeConfig struct {
	Dropout                 *float64         `json:"dropout"`
	UnkToken                *string          `json:"unk_token"`
	ContinuingSubwordPrefix string           `json:"continuing_subword_prefix"`
	EndOfWordSuffix         string           `json:"end_of_word_suffix"`
	FuseUnk                 bool             `json:"fuse_unk"`
	ByteFallback            bool             `json:"byte_fallback"`
	IgnoreMerges            bool             `json:"ignore_merges"`
	Vocab                   map[string]int32 `json:"vocab"`
	Merges                  mergeList        `json:"merges"`
}

// mergeList reads both spellings of merges: "a b" and ["a", "b"].
type mergeList [][2]string

func (m *mergeList) UnmarshalJSON(b []byte) error {
	var lines []string
	if err := json.Unmarshal(b, &lines); err == nil {
		*m = make(mergeList, 0, len(lines))
		for i, line := range lines {
			if strings.HasPrefix(line, "#version") {
				continue
			}
			left, right, ok := strings.Cut(line, " ")
			if !ok || strings.Contains(right, " ") {
				return fmt.Errorf("merge %d is %s: want two tokens with one space between them", i, untrusted.Quote(line))
			}
			*m = append(*m, [2]string{left, right})
		}
		return nil
	}
	var pairs [][]string
	if err := json.Unmarshal(b, &pairs); err != nil {
		return errors.New(`merges are neither ["a b", ...] nor [["a", "b"], ...]`)
	}
	*m = make(mergeList, 0, len(pairs))
	for i, p := range pairs {
		if len(p) != 2 {
			return fmt.Errorf("merge %d has %d tokens: want 2", i, len(p))
		}
		*m = append(*m, [2]string{p[0], p[1]})
	}
	return nil
}

func buildModel(t *Pipeline, c *fileConfig, _ *sideConfig) error {
	var head struct {
		Type   string          `json:"type"`
		Merges json.RawMessage `json:"merges"`
	}
	if len(c.Model) == 0 {
		return errors.New("tokenizer.json has no model")
	}
	if err := json.Unmarshal(c.Model, &head); err != nil {
		return memberError("model", err)
	}
	switch {
	case head.Type == "BPE" || head.Type == "" && head.Merges != nil:
		return buildBPE(t, c.Model)
	case head.Type == "Unigram":
		return buildUnigram(t, c.Model)
	}
	return unsupported("model type %s: BPE and Unigram are", untrusted.Quote(head.Type))
}

func buildBPE(t *Pipeline, text json.RawMessage) error {
	mc := new(bpeConfig)
	if err := json.Unmarshal(text, mc); err != nil {
		return memberError("model", err)
	}
	switch {
	case mc.Dropout != nil && *mc.Dropout != 0:
		return unsupported("model.dropout %g: only null or 0 is", *mc.Dropout)
	case mc.ContinuingSubwordPrefix != "":
		return unsupported("model.continuing_subword_prefix %s: only an empty one is", untrusted.Quote(mc.ContinuingSubwordPrefix))
	case mc.EndOfWordSuffix != "":
		return unsupported("model.end_of_word_suffix %s: only an empty one is", untrusted.Quote(mc.EndOfWordSuffix))
	}
	vocab := mc.Vocab
	for token, id := range vocab {
		if err := t.set(id, token); err != nil {
			return err
		}
	}
	m := &model{
		vocab: vocab, size: len(vocab), merges: make(map[uint64]mergeRule, len(mc.Merges)),
		byteFallback: mc.ByteFallback, unk: noToken, fuseUnk: mc.FuseUnk, cache: newWordCache(),
	}
	if mc.UnkToken != nil {
		id, ok := vocab[*mc.UnkToken]
		if !ok {
			return fmt.Errorf("model.unk_token %s is not in the vocabulary", untrusted.Quote(*mc.UnkToken))
		}
		m.unk = id
	}
	fallback := m.findByteTokens()
	isByte := map[int32]bool{}
	for _, id := range m.byteTokens {
		isByte[id] = id >= 0
	}
	pairs := new(pairSet)
	for i, p := range mc.Merges {
		left, ok1 := vocab[p[0]]
		right, ok2 := vocab[p[1]]
		if !ok1 || !ok2 {
			return fmt.Errorf("merge %d joins %s and %s, which are not both in the vocabulary", i, untrusted.Quote(p[0]), untrusted.Quote(p[1]))
		}
		joined := p[0] + p[1]
		id, ok := vocab[joined]
		if !ok {
			return fmt.Errorf("merge %d makes %s, which is not in the vocabulary", i, untrusted.Quote(joined))
		}
		m.merges[pairKey(left, right)] = mergeRule{rank: uint32(i), id: id}
		if mc.ByteFallback && (isByte[left] || isByte[right]) || m.unk >= 0 && (left == m.unk || right == m.unk) {
			pairs = nil
		}
		if pairs != nil {
			prev := rune(-1)
			for _, r := range joined {
				if prev >= 0 {
					pairs.add(prev, r)
				}
				prev = r
			}
		}
	}
	// Cuts are safe if each character becomes symbols of its own. That fails for unknown characters that are dropped, so
	// that their neighbors meet, that fuse, or that byte tokens overtake; and for ignore_merges, which looks up whole words.
	if !mc.IgnoreMerges && (mc.ByteFallback && fallback || !mc.ByteFallback && m.unk >= 0 && !mc.FuseUnk) {
		m.pairs = pairs
	}
	if mc.IgnoreMerges {
		m.whole = m.vocab
	}
	t.model = m
	return nil
}

// findByteTokens finds the tokens <0x00> to <0xFF>, and reports whether all of them exist.
func (m *model) findByteTokens() bool {
	all := true
	for b := range m.byteTokens {
		id, ok := m.vocab[fmt.Sprintf("<0x%02X>", b)]
		if !ok {
			id, all = noToken, false
		}
		m.byteTokens[b] = id
	}
	return all
}

// set records the token of an id.
func (t *Pipeline) set(id int32, token string) error {
	if id < 0 || id > maxID {
		return fmt.Errorf("token %s has id %d: ids run from 0 to %d", untrusted.Quote(token), id, maxID)
	}
	if n := int(id) + 1; n > len(t.tokens) {
		t.tokens = append(t.tokens, make([]string, n-len(t.tokens))...)
		t.present = append(t.present, make([]bool, n-len(t.present))...)
		t.special = append(t.special, make([]bool, n-len(t.special))...)
	}
	if t.present[id] && t.tokens[id] != token {
		return fmt.Errorf("tokens %s and %s have the same id %d", untrusted.Quote(t.tokens[id]), untrusted.Quote(token), id)
	}
	t.tokens[id], t.present[id] = token, true
	return nil
}

// toByteLevel makes the model start from the bytes of a word.
func (m *model) toByteLevel() {
	m.byteLevel = true
	for b, char := range byteChars {
		id, ok := m.vocab[char]
		if !ok {
			id = noToken
		}
		m.byteStart[b] = id
	}
	m.pairs = nil
	if m.whole == nil {
		return
	}
	m.whole = make(map[string]int32, len(m.vocab))
	for token, id := range m.vocab {
		if raw := string(unspell(nil, token)); spell(raw) == token {
			m.whole[raw] = id
		}
	}
}
