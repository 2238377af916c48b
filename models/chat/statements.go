package chat

import (
	"errors"
	"fmt"
	"strings"

	statements "github.com/nikolalohinski/gonja/v2/builtins/control_structures"
	"github.com/nikolalohinski/gonja/v2/exec"
	"github.com/nikolalohinski/gonja/v2/nodes"
	"github.com/nikolalohinski/gonja/v2/parser"
	"github.com/nikolalohinski/gonja/v2/tokens"
)

// controlStructures are the supported statements: those of transformers' environment that need no other file. Each
// consumes a step of the budget. set and macro bodies are implemented here because gonja's versions have no bounds.
var controlStructures = exec.NewControlStructureSet(map[string]parser.ControlStructureParser{
	"if":         stepped("if"),
	"for":        parseFor,
	"macro":      parseMacro,
	"set":        parseSet,
	"generation": parseGeneration,
	"with":       stepped("with"),
	"raw":        stepped("raw"),
	"break":      stepped("break"),
	"continue":   stepped("continue"),
})

// libraryParser returns gonja's parser of a statement.
func libraryParser(name string) parser.ControlStructureParser {
	parse, ok := statements.All.Get(name)
	if !ok {
		panic("chat: gonja has no statement " + name)
	}
	return parse
}

// step wraps a gonja statement so that each execution consumes one step of the budget.
type step struct{ exec.ControlStructure }

// Execute implements exec.ControlStructure.
func (s step) Execute(r *exec.Renderer, tag *nodes.ControlStructureBlock) error {
	if err := budgetOf(r.Environment).step(1); err != nil {
		return err
	}
	return s.ControlStructure.Execute(r, tag)
}

func stepped(name string) parser.ControlStructureParser {
	parse := libraryParser(name)
	return func(p, args *parser.Parser) (nodes.ControlStructure, error) {
		parsed, err := parse(p, args)
		if err != nil {
			return nil, err
		}
		runnable, ok := parsed.(exec.ControlStructure)
		if !ok {
			return nil, fmt.Errorf("statement %q cannot run", name)
		}
		return step{runnable}, nil
	}
}

// loop is gonja's for statement; the budget counts its items before it runs.
type loop struct {
	*statements.ForControlStructure
}

func parseFor(p, args *parser.Parser) (nodes.ControlStructure, error) {
	parsed, err := libraryParser("for")(p, args)
	if err != nil {
		return nil, err
	}
	f, ok := parsed.(*statements.ForControlStructure)
	if !ok || f.Recursive {
		return nil, errors.New("recursive loops are not supported in chat templates")
	}
	return loop{f}, nil
}

// Execute implements exec.ControlStructure.
func (l loop) Execute(r *exec.Renderer, tag *nodes.ControlStructureBlock) error {
	items := r.Eval(l.ObjectEvaluator)
	if items.IsError() {
		return items
	}
	n := 1
	switch {
	case items.IsNil():
		items = exec.AsValue(sequence{})
	case items.IsString():
		items = exec.AsValue(characters(items.String()))
		n += items.Len()
	case items.IsDict(), items.IsList():
		n += items.Len()
	default:
		return fmt.Errorf("%s is not something to loop over", oneLine(items.String()))
	}
	if err := budgetOf(r.Environment).step(n); err != nil {
		return err
	}
	sub := r.Inherit()
	sub.Environment.Context.Set(itemsVariable, items)
	counted := *l.ForControlStructure
	counted.ObjectEvaluator = &nodes.Name{Name: &tokens.Token{Type: tokens.Name, Val: itemsVariable}}
	return counted.Execute(sub, tag)
}

func characters(s string) sequence {
	out := sequence{}
	for _, r := range s {
		out = append(out, string(r))
	}
	return out
}

// macro is gonja's macro with bounded depth and a metered body.
type macro struct {
	*statements.MacroControlStructure
}

func parseMacro(p, args *parser.Parser) (nodes.ControlStructure, error) {
	parsed, err := libraryParser("macro")(p, args)
	if err != nil {
		return nil, err
	}
	m, ok := parsed.(*statements.MacroControlStructure)
	if !ok {
		return nil, errors.New("macro cannot run")
	}
	body := *m.Wrapper
	m.Wrapper.Nodes = []nodes.Node{&nodes.ControlStructureBlock{
		Location: m.Location, Name: "macro body", ControlStructure: metered{body: &body},
	}}
	return macro{m}, nil
}

// Execute implements exec.ControlStructure.
func (m macro) Execute(r *exec.Renderer, tag *nodes.ControlStructureBlock) error {
	b := budgetOf(r.Environment)
	if err := b.step(1); err != nil {
		return err
	}
	if err := m.MacroControlStructure.Execute(r, tag); err != nil {
		return err
	}
	v, _ := r.Environment.Context.Get(m.Name)
	call, ok := v.(exec.Macro)
	if !ok {
		return fmt.Errorf("macro %s cannot run", m.Name)
	}
	r.Environment.Context.Set(m.Name, func(args *exec.VarArgs) *exec.Value {
		if err := b.step(1); err != nil {
			return exec.AsValue(err)
		}
		if b.depth++; b.depth > maxMacroDepth {
			return exec.AsValue(b.stop(fmt.Errorf("%w: macros nested deeper than %d", ErrLimit, maxMacroDepth)))
		}
		defer func() { b.depth-- }()
		return call(args)
	})
	return nil
}

// metered runs a body whose output is captured, and counts that output.
type metered struct{ body *nodes.Wrapper }

// Position implements nodes.Node.
func (m metered) Position() *tokens.Token { return m.body.Position() }

// String implements nodes.Node.
func (m metered) String() string { return "body" }

// Execute implements exec.ControlStructure.
func (m metered) Execute(r *exec.Renderer, _ *nodes.ControlStructureBlock) error {
	sub := r.Inherit()
	sub.Output = &meter{w: r.Output, b: budgetOf(r.Environment)}
	return sub.ExecuteWrapper(m.body)
}

// assignment is {% set %} of a variable or of a namespace attribute. As in transformers, nothing else can be assigned.
type assignment struct {
	at          *tokens.Token
	name        string           // variable
	object      nodes.Expression // namespace whose attribute is set; nil for a variable
	value       nodes.Expression // nil: the value is the body
	condition   nodes.Expression // nil: none
	alternative nodes.Expression
	body        *nodes.Wrapper
}

func parseSet(p, args *parser.Parser) (nodes.ControlStructure, error) {
	a := &assignment{at: p.Current()}
	target, err := args.ParseVariableOrLiteral()
	if err != nil {
		return nil, err
	}
	switch t := target.(type) {
	case *nodes.Name:
		a.name = t.Name.Val
	case *nodes.GetAttribute:
		a.name, a.object = t.Attribute, t.Node
	}
	if a.name == "" {
		return nil, args.Error("only a name or a namespace's attribute can be set", nil)
	}
	if args.Match(tokens.Assign) == nil {
		if !args.End() {
			return nil, args.Error("expected '=' or the end of the tag", args.Current())
		}
		body, end, err := p.WrapUntil("endset")
		if err != nil {
			return nil, err
		}
		if !end.End() {
			return nil, end.Error("endset takes no arguments", nil)
		}
		a.body = body
		return a, nil
	}
	if a.value, err = args.ParseExpression(); err != nil {
		return nil, err
	}
	if a.condition, a.alternative, err = args.ParseCondition(); err != nil {
		return nil, err
	}
	if !args.End() {
		return nil, args.Error("malformed arguments of set", args.Current())
	}
	return a, nil
}

// Position implements nodes.Node.
func (a *assignment) Position() *tokens.Token { return a.at }

// String implements nodes.Node.
func (a *assignment) String() string { return "set " + a.name }

// Execute implements exec.ControlStructure.
func (a *assignment) Execute(r *exec.Renderer, _ *nodes.ControlStructureBlock) error {
	b := budgetOf(r.Environment)
	if err := b.step(1); err != nil {
		return err
	}
	v, err := a.evaluate(r)
	if err != nil {
		return err
	}
	v = normalized(v)
	size, err := weigh(v, 0)
	if err != nil {
		return b.stop(fmt.Errorf("%w: %w", ErrLimit, err))
	}
	if size > b.value {
		return b.stop(fmt.Errorf("%w: the variable %s takes more than %d bytes", ErrLimit, a.name, b.value))
	}
	if a.object == nil {
		r.Environment.Context.Set(a.name, v.Interface())
		return nil
	}
	object := r.Eval(a.object)
	ns, ok := object.Interface().(*namespace)
	if !ok {
		return fmt.Errorf("%s cannot be set: only attributes of a namespace can", a.name)
	}
	if holdsNamespace(v) {
		return errors.New("a namespace cannot hold a namespace")
	}
	ns.fields[a.name] = v.Interface()
	return nil
}

func (a *assignment) evaluate(r *exec.Renderer) (*exec.Value, error) {
	if a.body != nil {
		var out strings.Builder
		sub := r.Inherit()
		sub.Output = &meter{w: &out, b: budgetOf(r.Environment)}
		if err := sub.ExecuteWrapper(a.body); err != nil {
			return nil, err
		}
		return exec.AsValue(out.String()), nil
	}
	expression := a.value
	if a.condition != nil {
		c := r.Eval(a.condition)
		if c.IsError() {
			return nil, c
		}
		if !c.IsTrue() {
			expression = a.alternative
		}
	}
	if expression == nil {
		return exec.AsValue(nil), nil
	}
	v := r.Eval(expression)
	if v.IsError() {
		return nil, v
	}
	return v, nil
}

func holdsNamespace(v *exec.Value) bool {
	switch x := v.Interface().(type) {
	case *namespace:
		return true
	case *exec.Dict:
		for _, p := range x.Pairs {
			if holdsNamespace(p.Value) {
				return true
			}
		}
	case sequence:
		for _, e := range x {
			if holdsNamespace(exec.ToValue(e)) {
				return true
			}
		}
	}
	return false
}

// parseGeneration parses {% generation %}, which marks the assistant's text for training, and prints its body.
func parseGeneration(p, _ *parser.Parser) (nodes.ControlStructure, error) {
	body, _, err := p.WrapUntil("endgeneration")
	if err != nil {
		return nil, err
	}
	return step{metered{body: body}}, nil
}
