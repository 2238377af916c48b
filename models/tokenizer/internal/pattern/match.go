package pattern

import (
	"errors"
	"unicode/utf8"
)

// ErrSteps means that a text takes a pattern more steps than a Matcher allows.
var ErrSteps = errors.New("a regular expression takes too many steps on this text")

// The steps that a Matcher takes: some for any text, and some for each byte. Published patterns take under 50 for each.
const (
	baseSteps = 100_000
	byteSteps = 1_000
)

// maxProgram bounds the instructions of a pattern, whose groups are copied for each repetition.
const maxProgram = 20_000

type code uint8

const (
	cMatch code = iota
	cSet
	cLoop  // as many characters of set as possible, from min to max
	cSplit // x first, then y
	cJump  // to x
	cLook  // the program at x, then y
	cAtomic
	cLineStart
	cLineEnd
	cTextStart
	cTextEnd
	cTextEndLine
)

type inst struct {
	code     code
	negative bool
	back     int // cLook: characters to go back before; -1: none, it looks ahead
	set      *Set
	x, y     int
	min, max int
}

// Pattern is a compiled regular expression.
type Pattern struct {
	program []inst
	first   *Set // characters that a match begins with; nil: it may be empty, or look behind
	minimum int
	word    *Set

	// Of Compile.
	sets    map[string]*Set
	emitted int
}

// Compile reads a regular expression. Errors wrap ErrUnsupported.
func Compile(source string) (*Pattern, error) {
	n, err := parse(source)
	if err != nil {
		return nil, err
	}
	word, _ := Named("word")
	p := &Pattern{minimum: n.minimum(), sets: map[string]*Set{}, word: NewSet(word)}
	if first, empty := n.first(); !empty {
		p.first = p.set(first)
	}
	if err := p.emit(n); err != nil {
		return nil, err
	}
	p.program = append(p.program, inst{code: cMatch})
	p.sets = nil
	return p, nil
}

// Minimum is the least number of characters of a match.
func (p *Pattern) Minimum() int { return p.minimum }

// set returns one Set for all equal ranges.
func (p *Pattern) set(r Ranges) *Set {
	key := make([]byte, 0, 8*len(r))
	for _, x := range r {
		key = append(key, byte(x[0]), byte(x[0]>>8), byte(x[0]>>16), byte(x[1]), byte(x[1]>>8), byte(x[1]>>16))
	}
	s, ok := p.sets[string(key)]
	if !ok {
		s = NewSet(r)
		p.sets[string(key)] = s
	}
	return s
}

func (p *Pattern) add(i inst) int {
	p.program = append(p.program, i)
	return len(p.program) - 1
}

func (p *Pattern) emit(n *node) error {
	// An expression that is empty is not in the program, and takes time all the same.
	if p.emitted++; p.emitted > maxProgram {
		return refuse("it is too long with its repetitions")
	}
	switch n.op {
	case opSet:
		p.add(inst{code: cSet, set: p.set(n.set)})
	case opCat:
		for _, k := range n.kids {
			if err := p.emit(k); err != nil {
				return err
			}
		}
	case opAlt:
		var jumps []int
		for i, k := range n.kids {
			if i == len(n.kids)-1 {
				if err := p.emit(k); err != nil {
					return err
				}
				break
			}
			split := p.add(inst{code: cSplit})
			if err := p.emit(k); err != nil {
				return err
			}
			jumps = append(jumps, p.add(inst{code: cJump}))
			p.program[split].x, p.program[split].y = split+1, len(p.program)
		}
		for _, j := range jumps {
			p.program[j].x = len(p.program)
		}
	case opRepeat:
		return p.repeat(n)
	case opLook, opAtomic:
		i := inst{code: cAtomic, back: -1, negative: n.negative}
		if n.op == opLook {
			i.code = cLook
			if n.behind {
				i.back, _ = n.kids[0].fixed()
			}
		}
		at := p.add(i)
		if err := p.emit(n.kids[0]); err != nil {
			return err
		}
		p.add(inst{code: cMatch})
		p.program[at].x, p.program[at].y = at+1, len(p.program)
	case opLineStart, opLineEnd, opTextStart, opTextEnd, opTextEndLine, opWordBound:
		p.add(inst{code: cLineStart + code(n.op-opLineStart), negative: n.negative})
	}
	return nil
}

func (p *Pattern) repeat(n *node) error {
	kid := n.kids[0]
	if kid.op == opSet && !n.lazy {
		p.add(inst{code: cLoop, set: p.set(kid.set), min: n.min, max: n.max})
		return nil
	}
	for range n.min {
		if err := p.emit(kid); err != nil {
			return err
		}
	}
	split := func() int { return p.add(inst{code: cSplit}) }
	aim := func(at, body, after int) {
		if n.lazy {
			body, after = after, body
		}
		p.program[at].x, p.program[at].y = body, after
	}
	if n.max == unlimited {
		at := split()
		if err := p.emit(kid); err != nil {
			return err
		}
		p.add(inst{code: cJump, x: at})
		aim(at, at+1, len(p.program))
		return nil
	}
	var splits []int
	for range n.max - n.min {
		splits = append(splits, split())
		if err := p.emit(kid); err != nil {
			return err
		}
	}
	for _, at := range splits {
		aim(at, at+1, len(p.program))
	}
	return nil
}

// Matcher matches patterns with a text. Its zero value is ready for Begin.
type Matcher struct {
	text  string
	stack []choice
	steps int
}

// choice is where matching goes on when what was tried has failed.
type choice struct {
	pc, at int
	low    int // of a loop: it gives back characters down to here; -1: no loop
}

// Begin makes a Matcher ready for a text.
func (m *Matcher) Begin(text string) {
	m.text = text
	m.steps = baseSteps + byteSteps*len(text)
}

// Find returns the first match that begins at from or behind; ok is false if there is none.
func (m *Matcher) Find(p *Pattern, from int) (start, end int, ok bool, err error) {
	for at := from; ; {
		if p.first != nil {
			for at < len(m.text) {
				r, n := decode(m.text, at)
				if p.first.Has(r) {
					break
				}
				at += n
			}
			if at >= len(m.text) {
				return 0, 0, false, nil
			}
		}
		end, ok := m.run(p, 0, at)
		if m.steps < 0 {
			return 0, 0, false, ErrSteps
		}
		if ok {
			return at, end, true, nil
		}
		if at >= len(m.text) {
			return 0, 0, false, nil
		}
		_, n := decode(m.text, at)
		at += n
	}
}

func decode(s string, at int) (rune, int) {
	if c := s[at]; c < utf8.RuneSelf {
		return rune(c), 1
	}
	return utf8.DecodeRuneInString(s[at:])
}

// run matches the program at pc with the text at a position, and returns where the match ends.
func (m *Matcher) run(p *Pattern, pc, at int) (end int, ok bool) {
	base := len(m.stack)
	defer func() { m.stack = m.stack[:base] }()
	for {
		if m.steps--; m.steps < 0 {
			return 0, false
		}
		i := &p.program[pc]
		ok := true
		switch i.code {
		case cMatch:
			return at, true
		case cSet:
			ok = false
			if at < len(m.text) {
				if r, n := decode(m.text, at); i.set.Has(r) {
					at += n
					ok = true
				}
			}
			pc++
		case cLoop:
			low := at
			count := 0
			for count < i.max && at < len(m.text) {
				r, n := decode(m.text, at)
				if !i.set.Has(r) {
					break
				}
				at += n
				if count++; count == i.min {
					low = at
				}
			}
			m.steps -= count
			ok = count >= i.min
			pc++
			if ok && at > low {
				m.stack = append(m.stack, choice{pc, at, low})
			}
		case cSplit:
			m.stack = append(m.stack, choice{i.y, at, -1})
			pc = i.x
		case cJump:
			pc = i.x
		case cLook:
			from := at
			for range i.back {
				if from == 0 {
					from = -1
					break
				}
				_, n := utf8.DecodeLastRuneInString(m.text[:from])
				from -= n
			}
			found := false
			if from >= 0 {
				_, found = m.run(p, i.x, from)
			}
			ok = found != i.negative
			pc = i.y
		case cAtomic:
			at, ok = m.run(p, i.x, at)
			pc = i.y
		default:
			ok = m.holds(p, i, at)
			pc++
		}
		if ok {
			continue
		}
		if len(m.stack) == base {
			return 0, false
		}
		top := &m.stack[len(m.stack)-1]
		pc, at = top.pc, top.at
		if top.low >= 0 {
			_, n := utf8.DecodeLastRuneInString(m.text[:at])
			at -= n
			if top.at = at; at > top.low {
				continue
			}
		}
		m.stack = m.stack[:len(m.stack)-1]
	}
}

// holds says whether an assertion holds at a position.
func (m *Matcher) holds(p *Pattern, i *inst, at int) bool {
	rest := m.text[at:]
	switch i.code {
	case cLineStart:
		return at == 0 || m.text[at-1] == '\n' && rest != ""
	case cLineEnd:
		return rest == "" || rest[0] == '\n'
	case cTextStart:
		return at == 0
	case cTextEnd:
		return rest == ""
	case cTextEndLine:
		return rest == "" || rest == "\n"
	}
	before, after := false, false
	if at > 0 {
		r, _ := utf8.DecodeLastRuneInString(m.text[:at])
		before = p.word.Has(r)
	}
	if rest != "" {
		r, _ := utf8.DecodeRuneInString(rest)
		after = p.word.Has(r)
	}
	return (before != after) != i.negative
}
