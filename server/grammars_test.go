package server

import (
	"container/list"
	"context"
	"errors"
	"testing"

	"github.com/moeserve/moeserve/models/grammar"
)

// TestCancelledGrammar: a request that ends compiles no more, and does not spoil the grammar for the next one with the same.
func TestCancelledGrammar(t *testing.T) {
	var tokens []grammar.Token
	for b := range 256 {
		tokens = append(tokens, grammar.Token{ID: int32(b), Text: string([]byte{byte(b)}), First: string([]byte{byte(b)})})
	}
	s := &grammars{byKey: map[grammarKey]*list.Element{}, vocabulary: grammar.NewVocabulary(256, tokens)}
	key := []string{"regex", "a"}
	gone := errors.New("gone")
	ctx, cancel := context.WithCancelCause(t.Context())
	if _, err := s.get(ctx, key, func() (grammar.Expr, error) {
		// Another one, which waits, ends too.
		waits, leave := context.WithCancelCause(t.Context())
		leave(gone)
		if _, err := s.get(waits, key, func() (grammar.Expr, error) { panic("both compile") }); !errors.Is(err, gone) {
			t.Errorf("the one that waits: error %v", err)
		}
		cancel(gone)
		return grammar.Literal("a"), nil
	}); !errors.Is(err, gone) {
		t.Errorf("error %v", err)
	}
	g, err := s.get(t.Context(), key, func() (grammar.Expr, error) { return grammar.Literal("a"), nil })
	if err != nil || !g.Match("a") {
		t.Fatalf("the next one: error %v", err)
	}
	if again, err := s.get(t.Context(), key, func() (grammar.Expr, error) { panic("it is kept") }); err != nil || again != g {
		t.Errorf("error %v of one that is kept", err)
	}
}
