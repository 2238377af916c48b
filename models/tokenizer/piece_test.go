package tokenizer

import (
	"math/rand/v2"
	"testing"
	"unicode/utf8"

	"github.com/moeserve/moeserve/tools/racedetector"
)

// TestPieces: the text of ids is their pieces, one after another, of the first id the one for that place.
func TestPieces(t *testing.T) {
	racedetector.SkipSequential(t)
	for _, name := range families {
		tok := loadFamily(t, name)
		r := rand.New(rand.NewPCG(1, 2))
		for range 2000 {
			var ids []int32
			var want []byte
			for len(ids) < 1+r.IntN(6) {
				id := int32(r.IntN(tok.VocabSize()))
				piece, first, special, ok := tok.Piece(id)
				if !ok || special {
					continue
				}
				if len(ids) == 0 {
					piece = first
				}
				ids, want = append(ids, id), append(want, piece...)
			}
			if got := tok.Decode(ids, false); utf8.Valid(want) && got != string(want) {
				t.Fatalf("%s: %v is %q, and its pieces %q", name, ids, got, want)
			}
		}
	}
}
