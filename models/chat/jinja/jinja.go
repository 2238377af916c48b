package jinja

import (
	"context"
	"fmt"
	"slices"
	"time"
)

// Template is a compiled template. It is immutable and safe for concurrent use.
type Template struct{ body []stmt }

// Parse compiles a template.
func Parse(text string) (t *Template, err error) {
	defer catch(func() int { return 0 }, &err)
	p := &parser{tokens: lex(text)}
	t = &Template{body: p.parse()}
	for _, s := range t.body {
		checker{}.check(s)
	}
	return t, nil
}

// Options are the options of one rendering.
type Options struct {
	// Now is the clock behind strftime_now. Default: time.Now.
	Now func() time.Time
	// MaxBytes bounds the output, and any other value. Default: 32 MiB.
	MaxBytes int
	// MaxTime bounds the rendering. Default: 5 s.
	MaxTime time.Duration
}

// Limits that no published template comes near. The bytes that a rendering makes count together, whether they are still
// used or not.
const (
	maxSteps    = 1 << 22
	maxDepth    = 600     // nested calls, and nested values that are walked
	madeFactor  = 4       // bytes made, by Options.MaxBytes
	wordBytes   = 16      // of a value in a list
	textBytes   = 80      // of a string, beside its characters
	scanBytes   = 256     // bytes read in a step
	stepsByTime = 1 << 10 // steps between two looks at the clock
)

// run is the state of one rendering.
type run struct {
	ctx      context.Context
	now      func() time.Time
	deadline time.Time
	maxBytes int

	out     *builder
	line    int
	steps   int
	depth   int
	bytes   int // made
	written int // of the output
}

// Render renders the template with its variables. It stops when ctx ends. An error names the template's line, and wraps
// ErrLimit, a *RaisedError, or the cause of ctx's end, where it is one of these.
func (t *Template) Render(ctx context.Context, vars map[string]Value, o Options) (out Text, err error) {
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.MaxBytes == 0 {
		o.MaxBytes = 32 << 20
	}
	if o.MaxTime == 0 {
		o.MaxTime = 5 * time.Second
	}
	r := &run{ctx: ctx, now: o.Now, deadline: time.Now().Add(o.MaxTime), maxBytes: o.MaxBytes}
	r.out = &builder{r: r}
	defer catch(func() int { return r.line }, &err)
	context := &scope{vars: vars, parent: &scope{vars: globals}}
	r.look()
	r.exec(t.body, newScope(context))
	return r.out.text(), nil
}

// step counts work.
func (r *run) step(n int) {
	before := r.steps / stepsByTime
	r.steps += n
	if r.steps/stepsByTime != before {
		r.look()
	}
}

// look ends a rendering that takes too long, or that nobody waits for.
func (r *run) look() {
	if r.ctx.Err() != nil {
		panic(&exception{err: fmt.Errorf("rendering stopped: %w", context.Cause(r.ctx))})
	}
	if r.steps > maxSteps {
		limit("more than %d steps", maxSteps)
	}
	if time.Now().After(r.deadline) {
		limit("rendering takes too long")
	}
}

// scan counts the work of reading a string.
func (r *run) scan(v Value) {
	if t, ok := v.(Text); ok {
		r.step(len(t.s) / scanBytes)
	}
}

// made counts bytes of values.
func (r *run) made(n int) {
	if r.bytes += n; r.bytes > madeFactor*r.maxBytes {
		limit("more than %d MiB of text and lists", madeFactor*r.maxBytes>>20)
	}
	if n >= stepsByTime {
		r.step(n / 64)
	}
}

// room makes sure that n times size bytes may be made.
func (r *run) room(size, n int) {
	if n > 0 && size > r.maxBytes/n {
		limit("a value of more than %d MiB", r.maxBytes>>20)
	}
}

func (r *run) enter() {
	if r.depth++; r.depth > maxDepth {
		limit("calls or values nested more than %d deep", maxDepth)
	}
}

func (r *run) leave() { r.depth-- }

// write puts text into the output.
func (r *run) write(t Text) {
	if r.written += len(t.s); r.written > r.maxBytes {
		limit("output of more than %d MiB", r.maxBytes>>20)
	}
	r.out.add(t)
}

// capture returns what body writes.
func (r *run) capture(body func()) Text {
	outer := r.out
	r.out = &builder{r: r}
	body()
	t := r.out.text()
	r.out = outer
	return t
}

// Mentions reports whether the template has a string equal to s.
func (t *Template) Mentions(s string) bool {
	found := false
	t.walk(func(n any) {
		if c, ok := n.(*constant); ok {
			text, ok := c.value.(Text)
			found = found || ok && text.s == s
		}
	})
	return found
}

// WalksParts reports whether the template expects a message's content in parts: whether it loops over the content of
// something, or loops over a variable that may have it and compares the types of the items with those of parts. (vLLM
// looks at the first alone.)
func (t *Template) WalksParts() bool {
	may := map[string]bool{} // variables that may have a content
	t.walk(func(n any) {
		switch n := n.(type) {
		case *macroStmt:
			for _, p := range n.params {
				may[p] = true
			}
		case *setStmt:
			if v, ok := n.target.(*name); ok && member(base(n.value)) == "content" {
				may[v.name] = true
			}
		}
	})
	found := false
	t.walk(func(n any) {
		loop, ok := n.(*forStmt)
		if !ok {
			return
		}
		iter := base(loop.iter)
		v, ok := iter.(*name)
		found = found || member(iter) == "content" || ok && may[v.name] && comparesTypes(loop)
	})
	return found
}

// comparesTypes reports whether a loop compares the type of something with that of a content part.
func comparesTypes(loop *forStmt) bool {
	found := false
	walk(loop, func(n any) {
		c, ok := n.(*compareExpr)
		if !ok || member(c.first) != "type" {
			return
		}
		walk(c.rest[0], func(n any) {
			k, ok := n.(*constant)
			if !ok {
				return
			}
			kind, ok := k.value.(Text)
			found = found || ok && slices.Contains([]string{"text", "image", "image_url"}, kind.s)
		})
	})
	return found
}

func (t *Template) walk(visit func(any)) {
	for _, s := range t.body {
		walk(s, visit)
	}
}

// base returns what filters and slices are applied to.
func base(e expr) expr {
	for {
		switch n := e.(type) {
		case *filter:
			e = n.of
		case *slice:
			e = n.of
		default:
			return e
		}
	}
}

// member returns the name of the member that an expression reads, or "".
func member(e expr) string {
	switch n := e.(type) {
	case *attribute:
		return n.name
	case *item:
		return key(n.key)
	case *call:
		if a, ok := n.of.(*attribute); ok && a.name == "get" && len(n.args.args) > 0 {
			return key(n.args.args[0])
		}
	}
	return ""
}

// key returns the string that an expression is, or "".
func key(e expr) string {
	if c, ok := e.(*constant); ok {
		if t, ok := c.value.(Text); ok {
			return t.s
		}
	}
	return ""
}
