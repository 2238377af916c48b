// Package schema makes grammars of JSON schemas (draft 2020-12, and what older drafts write alike): the texts of a grammar
// are values that the schema allows.
//
// # What is supported
//
// type, enum, const; properties, required, additionalProperties, patternProperties of up to four patterns, propertyNames,
// dependentRequired, dependentSchemas, maxProperties, and minProperties up to one more than the properties that are
// declared; items, prefixItems, contains, minContains, maxContains, minItems, maxItems, and uniqueItems where items have few
// values; minLength, maxLength, pattern, and format of date-time, date, time, duration, email, hostname, ipv4, ipv6, uri
// and uuid, all of them together too; minimum, maximum, exclusiveMinimum, exclusiveMaximum, multipleOf of few digits; anyOf,
// allOf, oneOf, not, if, then, else; $ref to parts of the same document, also recursive ones; OpenAPI's nullable.
// Annotations and unknown members mean nothing. All other keywords that restrict values are refused, with their place, and
// so are some within not and if: format, multipleOf, prefixItems, additionalProperties, patternProperties, propertyNames,
// uniqueItems, dependencies, and enum of arrays and objects.
//
// Schemas that hold together are merged to shapes, which have no references and alternatives. What does not fit a schema
// is alternatives, too: what does not fit one of its keywords. oneOf whose schemas may both fit a value is those that fit
// one and none of the others. Names and strings that must not match are the complement of an automaton.
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
