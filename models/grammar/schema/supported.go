package schema

import (
	"errors"
	"slices"
	"strconv"
	"strings"
)

// maxUnsupported is how many keywords Supported removes at most: for each the schema is read again.
const maxUnsupported = 16

// Supported is a schema without the keywords that Compile refuses, which mean nothing in it: for those whose values need
// not all be valid. One within not or if is removed with all of that. Errors are those of Compile that name
// no keyword.
func Supported(data []byte, o Options) ([]byte, error) {
	root, err := parse(data)
	if err != nil {
		return nil, err
	}
	c := newCompiler(root, o)
	for range maxUnsupported + 1 {
		_, err = c.value(all{{root, "#"}})
		// All of them together take as long as one compilation may.
		again := newCompiler(root, c.o)
		again.patterns, again.matchers = c.patterns, c.matchers
		c = again
		var bad *Error
		if err == nil || !errors.As(err, &bad) || bad.Keyword == "" || !remove(root, bad.Path, bad.Keyword) {
			break
		}
	}
	if err != nil {
		return nil, err
	}
	return []byte(text(root)), nil
}

// remove removes a keyword of the schema at a place, or the whole not or if that contains it, and reports whether it was
// there.
func remove(root any, path, keyword string) bool {
	at := root
	var parts []string
	if fragment := strings.TrimPrefix(path, "#"); fragment != "" {
		parts = strings.Split(fragment[1:], "/")
	}
	named := false // at has schemas by name
	for _, part := range parts {
		part = fromPointer.Replace(part)
		switch v := at.(type) {
		case *object:
			if !named && (part == "not" || part == "if") && removeFrom(v, part) {
				return true
			}
			named = !named && slices.Contains([]string{"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}, part)
			at = v.values[part]
		case []any:
			i, err := strconv.Atoi(part)
			if err != nil || i < 0 || i >= len(v) {
				return false
			}
			at = v[i]
		default:
			return false
		}
	}
	o, ok := at.(*object)
	return ok && removeFrom(o, keyword)
}

func removeFrom(o *object, keyword string) bool {
	if !o.has(keyword) {
		return false
	}
	delete(o.values, keyword)
	o.names = slices.DeleteFunc(o.names, func(n string) bool { return n == keyword })
	return true
}
