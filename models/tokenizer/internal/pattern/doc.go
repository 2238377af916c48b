// Package pattern matches the regular expressions of tokenizer.json files as the reference does, whose engine is
// Oniguruma with Ruby's syntax.
//
// Go's regexp has no lookahead, which nearly all published patterns need, and the Unicode tables of the reference are
// newer than Go's. So this is a small backtracking matcher of its own, over character classes that are generated from the
// reference (tables.go).
//
// # What it is not
//
// It has no captures, back references, named groups, conditionals, or classes by script other than Han: Compile refuses
// them by name rather than approximating them.
//
// # Invariants
//
//   - A Pattern is immutable, and safe for concurrent use; a Matcher belongs to one goroutine.
//   - A Matcher takes a bounded number of steps for each byte of a text. A pattern that needs more on some text ends with
//     ErrSteps.
package pattern
