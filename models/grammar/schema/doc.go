// Package schema makes grammars of JSON schemas (draft 2020-12, and what older drafts write alike): the texts of a grammar
// are values that the schema allows.
//
// # What is supported
//
// type, enum, const; properties, required, additionalProperties, and maxProperties and minProperties of 1 where no
// property is declared; items, prefixItems, minItems, maxItems; minLength, maxLength, pattern, and format of date-time,
// date, time, duration, email, hostname, ipv4, ipv6 and uuid, all of them together too; minimum, maximum,
// exclusiveMinimum, exclusiveMaximum, multipleOf of few digits; anyOf, allOf, oneOf where no value can fit two of its
// schemas; $ref to parts of the same document, also recursive ones; OpenAPI's nullable. Annotations and unknown members
// mean nothing. All other keywords that restrict values are refused, with their place.
//
// # What is written
//
// A grammar has fewer texts than the schema has values: members come in the order of properties, then those that are only
// required, then others; additional names are written without escapes; numbers have up to 18 digits before the point and 17
// behind it, and integers no point; a value of an enum is written as in the schema. Objects that declare properties and do
// not say additionalProperties have no others, unless Options.Open; schemas without a type have that which their keywords
// are about.
//
// # What it is not
//
// It does not validate documents, and does not fetch schemas.
//
// # Invariants
//
//   - Every text of the grammar is one JSON value, without white space around it, that the schema allows.
//   - A schema that is refused names the keyword and its place, as a JSON pointer. grammar.New names the place of what
//     needs too many states, and its keyword where it is a string.
//
// # Example
//
//	e, err := schema.Compile([]byte(`{"type": "object", "properties": {"a": {"type": "integer"}}}`), schema.Options{})
//	g, err := grammar.New(e, vocabulary)
package schema
