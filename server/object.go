package server

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// object is a JSON object whose members are removed as they are parsed; members that remain
// are unknown. err is the first error; after it nothing is parsed.
type object struct {
	// path names the object in errors: empty for the body, or "stream_options".
	path    string
	members map[string]json.RawMessage
	err     *Error
}

// Limits of a body besides its size. They are far above what clients send, and keep the work and the
// memory of reading it in proportion to its bytes.
const (
	// maxDepth is the maximum nesting of objects and arrays.
	maxDepth = 64
	// maxMembers is the maximum number of members of an object that the API defines, and of the
	// variables in chat_template_kwargs.
	maxMembers = 256
	// maxMessages is the maximum number of messages of a conversation, maxMessageValues that of JSON
	// values and names in all of them.
	maxMessages      = 8192
	maxMessageValues = 1 << 18
	// maxTools is the maximum number of tools, maxToolValues that of JSON values and names in them.
	maxTools      = 1024
	maxToolValues = 1 << 16
	// maxTemplateVariables is the maximum size of chat_template_kwargs in bytes.
	maxTemplateVariables = 64 << 10
	// maxTokenIDs is the maximum number of ids for which nothing else sets a limit.
	maxTokenIDs = 1 << 20
)

// parseBody reads a request's body, which must be one JSON object.
func parseBody(body []byte) *object {
	o := &object{}
	body = bytes.TrimSpace(body)
	switch {
	case len(body) == 0:
		o.err = badRequest("", "", "The body is empty: it must be a JSON object.")
	case !utf8.Valid(body):
		o.err = badRequest("", "", "The body is not valid UTF-8.")
	case !json.Valid(body):
		o.err = badRequest("", "", "The body is not valid JSON: %v.", json.Unmarshal(body, new(any)))
	default:
		if depth, _ := extent(body); depth > maxDepth {
			o.err = badRequest("", "invalid_value", "The body is nested %d levels deep: the maximum is %d.", depth, maxDepth)
			break
		}
		if half := loneSurrogate(body); half != "" {
			o.err = badRequest("", "invalid_value", "The body has %s, an unpaired UTF-16 surrogate: send whole characters.", half)
			break
		}
		o.parse(body, "The body")
	}
	return o
}

// peek is a member that is a text, before it is read; empty where there is none.
func (o *object) peek(member string) (text string) {
	if raw := o.members[member]; kindOf(raw) == "a string" {
		_ = json.Unmarshal(raw, &text) // what cannot be read is refused when it is
	}
	return text
}

// parse fills the members from data, which is a part of a body that parseBody has checked; what
// names the object in errors.
func (o *object) parse(data []byte, what string) {
	if kind := kindOf(data); kind != "an object" {
		o.err = badRequest(o.path, "invalid_type", "%s must be a JSON object, and is %s.", what, kind)
		return
	}
	o.members = map[string]json.RawMessage{}
	eachMember(data, func(name string, value json.RawMessage) bool {
		o.members[name] = value
		if len(o.members) > maxMembers {
			o.err = badRequest(o.path, "invalid_value", "%s has more than %d members.", what, maxMembers)
		}
		return o.err == nil
	})
}

// name of a member in errors.
func (o *object) name(member string) string {
	if o.path == "" {
		return member
	}
	return o.path + "." + member
}

func (o *object) fail(member, code, format string, args ...any) {
	if o.err == nil {
		o.err = badRequest(o.name(member), code, format, args...)
	}
}

// wrongType is the error for a member whose value is of the wrong type.
func (o *object) wrongType(member, want string, got json.RawMessage) {
	o.fail(member, "invalid_type", "Invalid type for '%s': it must be %s, and is %s.", o.name(member), want, kindOf(got))
}

// unsupported is the error for a known member whose value this server refuses.
func (o *object) unsupported(member, why string) {
	o.fail(member, "unsupported_parameter", "'%s' is not supported: %s.", o.name(member), why)
}

// pop removes a member and returns its value; false if it is absent, null, or an error has
// occurred before.
func (o *object) pop(member string) (json.RawMessage, bool) {
	raw, ok := o.members[member]
	delete(o.members, member)
	return raw, ok && o.err == nil && !isNull(raw)
}

// ignore removes members that change nothing.
func (o *object) ignore(members ...string) {
	for _, m := range members {
		delete(o.members, m)
	}
}

// end returns the first error; members that were not removed and are not null are one.
func (o *object) end() error {
	maps.DeleteFunc(o.members, func(_ string, raw json.RawMessage) bool { return isNull(raw) })
	if o.err == nil && len(o.members) > 0 {
		names := make([]string, 0, len(o.members))
		for m := range o.members {
			names = append(names, o.name(m))
		}
		slices.Sort(names)
		o.err = badRequest(truncate(names[0]), "unknown_parameter", "Unrecognized request argument supplied: %s.", truncate(strings.Join(names, ", ")))
	}
	if o.err != nil {
		return o.err
	}
	return nil
}

func (o *object) text(member string, to *string) bool {
	raw, ok := o.pop(member)
	if !ok {
		return false
	}
	if kindOf(raw) != "a string" || json.Unmarshal(raw, to) != nil {
		o.wrongType(member, "a string", raw)
		return false
	}
	return true
}

func (o *object) flag(member string, to *bool) bool {
	raw, ok := o.pop(member)
	if ok && json.Unmarshal(raw, to) != nil {
		o.wrongType(member, "true or false", raw)
		return false
	}
	return ok
}

func (o *object) integer(member string, to *int) bool {
	n, ok := o.int64(member)
	if ok && (n < math.MinInt || n > math.MaxInt) {
		o.fail(member, "invalid_value", "Invalid value for '%s': it is out of range.", o.name(member))
		return false
	}
	if ok {
		*to = int(n)
	}
	return ok
}

func (o *object) int64(member string) (int64, bool) {
	raw, ok := o.pop(member)
	if !ok {
		return 0, false
	}
	n, ok := wholeNumber(raw)
	if ok {
		return n, true
	}
	if kindOf(raw) == "a number" {
		o.fail(member, "invalid_value", "Invalid value for '%s': %s is not a whole number in range.", o.name(member), truncate(string(raw)))
	} else {
		o.wrongType(member, "a whole number", raw)
	}
	return 0, false
}

// wholeNumber reads 16, and 16.0 and 1.6e1, which some clients write.
func wholeNumber(raw json.RawMessage) (int64, bool) {
	if n, err := strconv.ParseInt(string(raw), 10, 64); err == nil {
		return n, true
	}
	if kindOf(raw) != "a number" {
		return 0, false
	}
	// Above 2^53 a float no longer represents every whole number.
	f, err := strconv.ParseFloat(string(raw), 64)
	if err != nil || f != math.Trunc(f) || math.Abs(f) > 1<<53 {
		return 0, false
	}
	return int64(f), true
}

func (o *object) number(member string, to *float32) bool {
	raw, ok := o.pop(member)
	if !ok {
		return false
	}
	if kindOf(raw) != "a number" {
		o.wrongType(member, "a number", raw)
		return false
	}
	f, err := strconv.ParseFloat(string(raw), 32)
	if err != nil {
		o.fail(member, "invalid_value", "Invalid value for '%s': %s is out of range.", o.name(member), truncate(string(raw)))
		return false
	}
	*to = float32(f)
	return true
}

// list parses a member that is an array of at most limit items.
func (o *object) list(member, of string, limit int) ([]json.RawMessage, bool) {
	raw, ok := o.pop(member)
	if !ok {
		return nil, false
	}
	if kindOf(raw) != "an array" {
		o.wrongType(member, of, raw)
		return nil, false
	}
	items := []json.RawMessage{}
	eachItem(raw, func(item json.RawMessage) bool {
		if len(items) == limit {
			o.tooMany(member, limit, "items")
			return false
		}
		items = append(items, item)
		return true
	})
	return items, o.err == nil
}

// tooMany is the error for a member with more of something than its limit.
func (o *object) tooMany(member string, limit int, what string) {
	o.fail(member, "invalid_value", "Invalid value for '%s': it has more than %d %s.", o.name(member), limit, what)
}

// ids parses a list of at most limit token ids.
func (o *object) ids(member string, to *[]int32, limit int) bool {
	raw, ok := o.pop(member)
	if !ok {
		return false
	}
	if kindOf(raw) != "an array" {
		o.wrongType(member, "an array of token ids", raw)
		return false
	}
	ids, wrong := parseIDs(raw, limit)
	if wrong != nil {
		o.wrongID(fmt.Sprintf("%s[%d]", member, len(ids)), wrong)
		return false
	}
	if len(ids) > limit {
		o.tooMany(member, limit, "token ids")
		return false
	}
	*to = ids
	return true
}

// known checks that token ids are of a vocabulary of that size; what is a token's name in the error, which is
// the engine's for a prompt.
func (o *object) known(member, what string, ids []int32, vocab int) {
	for i, id := range ids {
		if int(id) >= vocab {
			o.fail(member, "invalid_value", "Invalid value for '%s': %s %d has id %d, the vocabulary is 0 to %d.", o.name(member), what, i, id, vocab-1)
			return
		}
	}
}

// wrongID is the error for an item that is no token id.
func (o *object) wrongID(item string, got json.RawMessage) {
	is := kindOf(got)
	if is == "a number" {
		is = truncate(string(got))
	}
	o.fail(item, "invalid_type", "Invalid type for '%s': it must be a token id, from 0 to %d, and is %s.", o.name(item), math.MaxInt32, is)
}

// parseIDs reads an array of token ids, of which it returns up to limit+1, and the item behind them if that
// is none.
func parseIDs(raw json.RawMessage, limit int) (ids []int32, wrong json.RawMessage) {
	ids = []int32{}
	eachItem(raw, func(item json.RawMessage) bool {
		id, ok := tokenID(item)
		if !ok {
			wrong = item
			return false
		}
		ids = append(ids, id)
		return len(ids) <= limit
	})
	return ids, wrong
}

// sub parses a member that is an object; nil if it is absent.
func (o *object) sub(member string) *object {
	raw, ok := o.pop(member)
	if !ok {
		return nil
	}
	s := &object{path: o.name(member)}
	s.parse(raw, "'"+s.path+"'")
	if s.err != nil {
		o.err = s.err
		return nil
	}
	return s
}

// close checks that no member of a sub-object remains.
func (o *object) close(s *object) {
	if err := s.end(); err != nil && o.err == nil {
		o.err = s.err
	}
}

// kindOf names the type of a JSON value.
func kindOf(raw json.RawMessage) string {
	raw = bytes.TrimSpace(raw)
	if len(raw) == 0 {
		return "nothing"
	}
	switch c := raw[0]; {
	case c == '{':
		return "an object"
	case c == '[':
		return "an array"
	case c == '"':
		return "a string"
	case c == 't' || c == 'f':
		return "a boolean"
	case c == 'n':
		return "null"
	case c == '-' || c >= '0' && c <= '9':
		return "a number"
	}
	return "not JSON"
}

func isNull(raw json.RawMessage) bool { return kindOf(raw) == "null" }

// truncate shortens a client's value for use in an error.
func truncate(s string) string {
	const limit = 100
	if len(s) <= limit {
		return s
	}
	cut := limit
	for !utf8.RuneStart(s[cut]) {
		cut--
	}
	return s[:cut] + "…"
}
