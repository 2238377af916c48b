// Package jinja renders Jinja2 templates of chat models as Python does, byte for byte.
//
// The reference is jinja2 3.1 in the environment of transformers: ImmutableSandboxedEnvironment with trim_blocks and
// lstrip_blocks, the loop controls, the generation tag, and json.dumps behind tojson. Values are Python's: undefined is
// not None, integers are unbounded, dicts keep their order, floats print as repr does. What raises in Python is an error
// here, with the template's line.
//
// Templates are untrusted. They reach no files (include, import and extends are refused by name), change no list or
// dict, and a rendering is bounded in time, steps, depth, output and the bytes that it makes (ErrLimit).
//
// A string knows which of its bytes came from the client. Every function keeps that apart, so that the caller can treat
// a control token in a message as plain text while the template's own control tokens work.
//
// It is no general template engine: autoescape is off for good, and filters that chat templates have no use for
// (urlize, wordwrap, pprint, random, striptags) do not exist.
//
// # Inside
//
// lexer and parser make a tree of nodes, checked once by check. Each node evaluates itself against a run (the budget
// and the output) and a scope (the variables). An exception of Python is a panic with an *exception, which only Parse
// and Render recover, as in text/template; every other panic is a defect of this package.
//
//	t, err := jinja.Parse("{% for m in messages %}{{ m.content }}{% endfor %}")
//	messages, err := jinja.Decode([]byte(`[{"content": "hi"}]`), jinja.FromClient)
//	out, err := t.Render(ctx, map[string]jinja.Value{"messages": messages}, jinja.Options{})
package jinja
