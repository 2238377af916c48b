package chat

import (
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/nikolalohinski/gonja/v2/config"
	"github.com/nikolalohinski/gonja/v2/exec"
	"github.com/nikolalohinski/gonja/v2/loaders"
	"github.com/nikolalohinski/gonja/v2/tokens"
)

// Limits of one template and of one rendering. Published templates use less than a hundredth of each limit.
const (
	maxExpressionTokens = 1000             // inside one {{ }} or {% %}
	maxBracketDepth     = 50               // nested ( [ {
	maxBlockDepth       = 100              // nested blocks
	maxFactor           = 1 << 12          // product of all numbers by which the template multiplies
	maxSteps            = 1 << 19          // statements, loop items, calls and writes
	maxMacroDepth       = 50               // macros within macros
	maxValueBytes       = 4 << 20          // one variable, in addition to the size of the input
	maxOutputBytes      = 32 << 20         // all output, including captured output
	maxRenderTime       = 5 * time.Second  // one rendering
	maxMessage          = 400              // bytes of an error's cause
	programName         = "chat template"  // the only name that the loader knows
	budgetVariable      = "\x00budget"     // variable that holds the rendering's budget; templates cannot spell its name
	itemsVariable       = "\x00loop items" // variable that holds a loop's items
)

// program is a compiled template.
type program struct{ template *exec.Template }

// sourceOnly is a loader that knows only the template itself and no files.
type sourceOnly string

// Read implements loaders.Loader.
func (s sourceOnly) Read(path string) (io.Reader, error) {
	if path != programName {
		return nil, fmt.Errorf("the template asks for %q: chat templates may not reach files", path)
	}
	return strings.NewReader(string(s)), nil
}

// Resolve implements loaders.Loader.
func (s sourceOnly) Resolve(path string) (string, error) { return path, nil }

// Inherit implements loaders.Loader.
func (s sourceOnly) Inherit(string) (loaders.Loader, error) { return s, nil }

// compile parses a template. gonja panics on some malformed templates.
func compile(text string) (p *program, err error) {
	defer func() {
		if r := recover(); r != nil {
			p, err = nil, fmt.Errorf("does not parse: %s", cause(fmt.Errorf("%v", r)))
		}
	}()
	if len(text) > maxTemplateBytes {
		return nil, fmt.Errorf("is larger than %d KiB", maxTemplateBytes>>10)
	}
	// The settings of transformers.
	c := config.New()
	c.TrimBlocks = true
	c.LeftStripBlocks = true
	if err := inspect(tokens.LexAll(text, c)); err != nil {
		return nil, err
	}
	t, err := exec.NewTemplate(programName, c, sourceOnly(text), environment)
	if err != nil {
		return nil, fmt.Errorf("does not parse: %s", cause(err))
	}
	return &program{template: t}, nil
}

// inspect bounds the recursion depth of parsing and evaluation, and rejects multiplications that could make huge
// strings.
func inspect(stream *tokens.Stream) error {
	count, brackets, blocks, factor := 0, 0, 0, 1
	for ; !stream.End(); stream.Next() {
		t := stream.Current()
		count++
		switch t.Type {
		case tokens.Error:
			return fmt.Errorf("does not parse: %s at line %d", oneLine(t.Val), t.Line)
		case tokens.VariableBegin, tokens.BlockBegin, tokens.Data:
			count, brackets = 0, 0
			if next := stream.Peek(); t.Type == tokens.BlockBegin && next != nil {
				switch {
				case strings.HasPrefix(next.Val, "end"):
					blocks--
				case next.Val == "for", next.Val == "if", next.Val == "macro", next.Val == "set", next.Val == "with",
					next.Val == "generation":
					blocks++
				}
			}
		case tokens.LeftParenthesis, tokens.LeftBracket, tokens.LeftBrace:
			brackets++
		case tokens.RightParenthesis, tokens.RightBracket, tokens.RightBrace:
			brackets--
		case tokens.Multiply:
			n := -1
			if next := stream.Peek(); next != nil && next.Type == tokens.Integer {
				n, _ = strconv.Atoi(next.Val)
			}
			if n < 0 || n > maxFactor || factor*max(n, 1) > maxFactor {
				return fmt.Errorf("multiplies at line %d: only by numbers that stand in the template, by %d in all, is "+
					"supported", t.Line, maxFactor)
			}
			factor *= max(n, 1)
		}
		if count > maxExpressionTokens || brackets > maxBracketDepth {
			return fmt.Errorf("has an expression at line %d that is longer than %d tokens or nested deeper than %d", t.Line,
				maxExpressionTokens, maxBracketDepth)
		}
		if blocks > maxBlockDepth {
			return fmt.Errorf("nests blocks deeper than %d at line %d", maxBlockDepth, t.Line)
		}
	}
	return nil
}

// budget holds the remaining limits of one rendering and the error that stopped it. The error is kept here because gonja
// drops errors in some places, such as loop conditions.
type budget struct {
	steps    int
	bytes    int
	depth    int // of macros
	value    int // size of the largest variable, in bytes
	deadline time.Time
	now      func() time.Time // the clock of strftime_now
	stopped  error            // ErrLimit or a RaisedError
}

func (b *budget) stop(err error) error {
	if b.stopped == nil {
		b.stopped = err
	}
	return b.stopped
}

// step consumes n steps, and returns an error if the rendering must stop.
func (b *budget) step(n int) error {
	if b.stopped != nil {
		return b.stopped
	}
	if b.steps += n; b.steps > maxSteps {
		return b.stop(fmt.Errorf("%w: more than %d steps", ErrLimit, maxSteps))
	}
	if time.Now().After(b.deadline) {
		return b.stop(fmt.Errorf("%w: more than %v", ErrLimit, maxRenderTime))
	}
	return nil
}

func budgetOf(e *exec.Environment) *budget {
	v, _ := e.Context.Get(budgetVariable)
	b, _ := v.(*budget)
	return b
}

// meter counts the bytes written.
type meter struct {
	w io.Writer
	b *budget
}

// Write implements io.Writer.
func (m *meter) Write(p []byte) (int, error) {
	if err := m.b.step(1); err != nil {
		return 0, err
	}
	if m.b.bytes += len(p); m.b.bytes > maxOutputBytes {
		return 0, m.b.stop(fmt.Errorf("%w: more than %d MiB of text", ErrLimit, maxOutputBytes>>20))
	}
	return m.w.Write(p)
}

// run renders the template. It may modify vars.
func (p *program) run(vars map[string]any, now func() time.Time) (text string, err error) {
	b := &budget{deadline: time.Now().Add(maxRenderTime), now: now, value: maxValueBytes}
	for _, v := range vars {
		w, err := weigh(exec.ToValue(v), 0)
		if err != nil {
			return "", err
		}
		b.value += w
	}
	vars[budgetVariable] = b
	defer func() {
		if r := recover(); r != nil {
			text, err = "", fmt.Errorf("the chat template failed: %s", cause(fmt.Errorf("%v", r)))
		}
		if b.stopped != nil {
			text, err = "", b.stopped
		}
	}()
	var out strings.Builder
	if err := p.template.Execute(&meter{w: &out, b: b}, exec.NewContext(vars)); err != nil {
		return "", fmt.Errorf("the chat template failed: %s", cause(err))
	}
	return out.String(), nil
}

// weigh returns the approximate size of a value in bytes, or an error if the value is nested too deep.
func weigh(v *exec.Value, depth int) (int, error) {
	if depth > 2*maxJSONDepth {
		return 0, errors.New("a value is nested too deep")
	}
	if v.IsNil() {
		return 4, nil
	}
	if d, ok := v.Interface().(*exec.Dict); ok {
		sum := 2
		for _, p := range d.Pairs {
			for _, part := range []*exec.Value{p.Key, p.Value} {
				n, err := weigh(part, depth+1)
				if err != nil {
					return 0, err
				}
				sum += n + 16
			}
		}
		return sum, nil
	}
	switch {
	case v.IsString():
		return len(v.String()), nil
	case v.IsList():
		sum := 2
		for i := range v.Len() {
			n, err := weigh(v.Index(i), depth+1)
			if err != nil {
				return 0, err
			}
			sum += n + 16
		}
		return sum, nil
	}
	return 8, nil
}

// cause returns the innermost message of an error, on one line. gonja wraps an error once for each enclosing node.
func cause(err error) string {
	for range 10 * maxExpressionTokens {
		var next error
		switch e := err.(type) { //nolint:errorlint // this walks the chain itself
		case *exec.Value:
			next, _ = e.Interface().(error)
		case interface{ Cause() error }:
			next = e.Cause()
		case interface{ Unwrap() error }:
			next = e.Unwrap()
		}
		if next == nil {
			break
		}
		err = next
	}
	return oneLine(err.Error())
}

func oneLine(s string) string {
	s = strings.Join(strings.Fields(s), " ")
	if len(s) > maxMessage {
		s = strings.ToValidUTF8(s[:maxMessage], "") + "..."
	}
	return s
}
