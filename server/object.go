package server

import (
	"bytes"
	"encoding/json"
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

// parseBody reads a request's body, which must be one JSON object.
func parseBody(body []byte) *object {
	o := &object{}
	switch {
	case len(bytes.TrimSpace(body)) == 0:
		o.err = badRequest("", "", "The body is empty: it must be a JSON object.")
	case !utf8.Valid(body):
		o.err = badRequest("", "", "The body is not valid UTF-8.")
	default:
		o.parse(body, "The body")
	}
	return o
}

// parse fills the members; what names the object in errors.
func (o *object) parse(data []byte, what string) {
	err := json.Unmarshal(data, &o.members)
	if err != nil && !json.Valid(data) {
		o.err = badRequest(o.path, "", "%s is not valid JSON: %v.", what, err)
		return
	}
	if err != nil || o.members == nil {
		o.err = badRequest(o.path, "invalid_type", "%s must be a JSON object, and is %s.", what, kindOf(data))
	}
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

// unsupported is the error for a known member that requests what is not implemented.
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

// list parses a member that is an array.
func (o *object) list(member, of string) ([]json.RawMessage, bool) {
	raw, ok := o.pop(member)
	if !ok {
		return nil, false
	}
	var values []json.RawMessage
	if json.Unmarshal(raw, &values) != nil {
		o.wrongType(member, of, raw)
		return nil, false
	}
	return values, true
}

// ids parses a list of token ids.
func (o *object) ids(member string, to *[]int32) bool {
	raw, ok := o.pop(member)
	if !ok {
		return false
	}
	ids, ok := parseIDs(raw)
	if !ok {
		o.wrongIDs(member, raw)
		return false
	}
	*to = ids
	return true
}

func (o *object) wrongIDs(member string, raw json.RawMessage) {
	if kindOf(raw) != "an array" {
		o.wrongType(member, "an array of token ids", raw)
		return
	}
	o.fail(member, "invalid_type", "Invalid type for '%s': token ids must be whole numbers from 0 to %d.", o.name(member), math.MaxInt32)
}

// parseIDs reads an array of token ids.
func parseIDs(raw json.RawMessage) ([]int32, bool) {
	var values []*int32 // pointers, as null would be read as 0
	if json.Unmarshal(raw, &values) != nil {
		return nil, false
	}
	ids := make([]int32, len(values))
	for i, v := range values {
		if v == nil || *v < 0 {
			return nil, false
		}
		ids[i] = *v
	}
	return ids, true
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
