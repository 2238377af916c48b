// Package grammar restricts what a model may write: it says which tokens may come next for the text to become one of a
// formal language. Front ends make grammars of choices, of regular expressions (Regex), and of GBNF (ParseGBNF); package
// grammar/schema makes them of JSON schemas.
//
// # How it works
//
// An Expr describes texts by their bytes. Rules, which may be recursive, are Exprs with a name. New compiles each rule
// to a deterministic automaton over bytes and calls of other rules, so a grammar is a pushdown automaton; an
// intersection (All) is the product of the automata of its parts, and a difference (Except) that with complements. What
// has been read is a state: a set of configurations, each a node and the stack of nodes to return to. States are made and
// kept as texts reach them (a lazy DFA), so that reading a byte again is one load.
//
// A mask has a bit for each token. For one node alone, of which the stack is not known, the tokens that stay within its
// rule are found once, by a walk through the vocabulary's trie with that node's states; tokens that leave the rule are
// kept aside, and are checked in the state that has the stack. This is the split into context-independent and
// context-dependent tokens of XGrammar (Dong et al., 2024). The masks of states are kept, too.
//
// # What it is not
//
// It samples nothing, and knows no request: package engine asks a Matcher for masks, and a backend applies them. It does
// not validate what a model wrote without it.
//
// # Invariants
//
//   - A token is in a mask exactly if the bytes that it adds to the text can be continued to a text of the grammar.
//     So the text of tokens from masks, up to where the grammar may end, is one of the grammar.
//   - From every state a text of the grammar can be reached, byte by byte.
//   - Compilation takes time and memory in proportion to limits, and so do states and masks that are kept.
//   - A Grammar is safe for concurrent use; a Matcher belongs to one goroutine at a time.
//
// # Example
//
//	e, err := grammar.Regex(`[a-z]+@[a-z]+\.com`)
//	g, err := grammar.New(e, vocabulary)
//	m := g.Matcher()
//	for !m.Ended() {
//		id := sample(logits, m.Mask())
//		m.Accept(id)
//	}
package grammar
