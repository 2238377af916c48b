package schema

import (
	"encoding/json"
	"math/big"
	"strings"

	"github.com/moeserve/moeserve/models/grammar"
)

const (
	// maxMultiple is the maximum of multipleOf without its point, and maxPlaces that of the digits behind that.
	maxMultiple = 1024
	maxPlaces   = 12
	// maxRemainders is the maximum of multipleOf without its factors 2 and 5, times the ways to place the point: for each
	// digit an automaton has a state for each remainder, and these factors say something of the last digits alone.
	maxRemainders = 54
)

func (s *shape) readMultiple(l located, v any) error {
	n, ok := v.(json.Number)
	if !ok {
		return l.fail("multipleOf", "it must be a number")
	}
	d, err := parseDecimal(n)
	if err != nil {
		return l.fail("multipleOf", "%v", err)
	}
	if d.negative || d.zero() {
		return l.fail("multipleOf", "it must be above 0")
	}
	whole, _ := new(big.Int).SetString("0"+d.whole+d.part, 10)
	s.implied |= isNumber
	s.multiple = new(big.Rat).SetFrac(whole, power(len(d.part)))
	if s.multiple.IsInt() {
		s.types &^= isFraction
	}
	return nil
}

func power(of int) *big.Int { return new(big.Int).Exp(big.NewInt(10), big.NewInt(int64(of)), nil) }

// commonMultiple is the least number that is a multiple of both; nil stands for no condition.
func commonMultiple(a, b *big.Rat) *big.Rat {
	switch {
	case a == nil:
		return b
	case b == nil:
		return a
	}
	gcd := new(big.Int).GCD(nil, nil, a.Num(), b.Num())
	least := new(big.Int).Div(new(big.Int).Mul(a.Num(), b.Num()), gcd)
	return new(big.Rat).SetFrac(least, new(big.Int).GCD(nil, nil, a.Denom(), b.Denom()))
}

// multiples is the numbers of a range that are multiples of one, without exponents; whole: only those without a point.
func (s *shape) multiples(whole bool) (grammar.Expr, error) {
	places, of := 0, new(big.Rat).Set(s.multiple) // of is the multiple, times 10 to the power of places
	for ; !of.IsInt() && places <= maxPlaces; places++ {
		of.Mul(of, big.NewRat(10, 1))
	}
	step := of.Num()
	most := places
	if whole {
		// Of 2.5, which is 25 tenths, whole numbers are multiples of 5.
		step, most = reduced(step, places), 0
	}
	remainders := reduced(step, step.BitLen())
	if places > maxPlaces || step.Cmp(big.NewInt(maxMultiple)) > 0 || remainders.Int64()*int64(most+1) > maxRemainders {
		return nil, located{path: s.path}.fail("multipleOf", "it is not supported with so many digits, or so large a factor beside 2 and 5: give one such as 0.01, 7 or 60, or leave it out")
	}
	var parts []grammar.Expr
	for behind := range most + 1 { // numbers with as many digits behind the point
		m := multiple{step.Int64(), behind, map[[2]int64]*grammar.Rule{}}
		if !whole {
			m.of = reduced(step, places-behind).Int64()
		}
		parts = append(parts, m.between(rounded(shifted(s.least, behind), 1), rounded(shifted(s.most, behind), -1)))
	}
	return grammar.Any(parts...), nil
}

// reduced is the number of which x is a multiple if x, with this many zeros behind it, is one of step.
func reduced(step *big.Int, zeros int) *big.Int {
	return new(big.Int).Div(step, new(big.Int).GCD(nil, nil, step, power(zeros)))
}

// shifted is a bound with its point further right.
func shifted(b *bound, places int) *bound {
	if b == nil || places == 0 {
		return b
	}
	part := b.part + strings.Repeat("0", max(places-len(b.part), 0))
	return &bound{decimal{b.negative, strings.TrimLeft(b.whole+part[:places], "0"), part[places:]}, b.open}
}

// multiple writes multiples of a number, with a point before the last digits.
type multiple struct {
	of     int64
	behind int
	// rules of digits, by how many there are and the remainder of what is before them and as many zeros.
	rules map[[2]int64]*grammar.Rule
}

// between is those from a to b, counted without the point; nil: no bound.
func (m multiple) between(a, b *big.Int) grammar.Expr {
	var parts []grammar.Expr
	if a == nil || a.Sign() < 0 {
		from, to := big.NewInt(1), (*big.Int)(nil)
		if b != nil && b.Sign() < 0 {
			from = new(big.Int).Neg(b)
		}
		if a != nil {
			to = new(big.Int).Neg(a)
		}
		parts = append(parts, grammar.Seq(grammar.Literal("-"), m.positive(from, to)))
	}
	if b == nil || b.Sign() >= 0 {
		from := new(big.Int)
		if a != nil && a.Sign() > 0 {
			from = a
		}
		parts = append(parts, m.positive(from, b))
	}
	return grammar.Any(parts...)
}

// positive is those from a to b, neither negative; b may be nil.
func (m multiple) positive(a, b *big.Int) grammar.Expr {
	from := a.String()
	longest := max(18+m.behind, len(from)+1)
	if b != nil {
		longest = len(b.String())
	}
	var parts []grammar.Expr
	for n := max(len(from), m.behind+1); n <= max(longest, m.behind+1); n++ {
		least, most := power(n-1), power(n)
		if n == m.behind+1 {
			least = new(big.Int) // 0 before the point
		}
		most.Sub(most, big.NewInt(1))
		if least.Cmp(a) < 0 {
			least = a
		}
		if b != nil && most.Cmp(b) > 0 {
			most = b
		}
		if least.Cmp(most) > 0 {
			continue
		}
		padded := func(x *big.Int) string { s := x.String(); return strings.Repeat("0", n-len(s)) + s }
		parts = append(parts, m.digits(padded(least), padded(most), 0))
	}
	return grammar.Any(parts...)
}

// digits is those from lo to hi, of as many digits, behind digits whose remainder is rest.
func (m multiple) digits(lo, hi string, rest int64) grammar.Expr {
	left := len(lo)
	switch {
	case strings.Trim(lo, "0") == "" && strings.Trim(hi, "9") == "":
		return m.any(left, rest)
	case lo > hi:
		return grammar.Any()
	}
	var parts []grammar.Expr
	for d := lo[0]; d <= hi[0]; d++ {
		next := [2]string{strings.Repeat("0", left-1), strings.Repeat("9", left-1)}
		if d == lo[0] {
			next[0] = lo[1:]
		}
		if d == hi[0] {
			next[1] = hi[1:]
		}
		parts = append(parts, m.behindDigit(d, left, m.digits(next[0], next[1], m.after(rest, d))))
	}
	return grammar.Any(parts...)
}

// any is those of any digits behind digits whose remainder is rest.
func (m multiple) any(left int, rest int64) grammar.Expr {
	if left == 0 {
		if rest == 0 {
			return grammar.Seq()
		}
		return grammar.Any()
	}
	key := [2]int64{int64(left), rest}
	for range left {
		key[1] = key[1] * 10 % m.of
	}
	if m.rules[key] == nil {
		r := &grammar.Rule{Name: "multiple"}
		m.rules[key] = r
		var parts []grammar.Expr
		for d := byte('0'); d <= '9'; d++ {
			parts = append(parts, m.behindDigit(d, left, m.any(left-1, m.after(rest, d))))
		}
		r.Body = grammar.Any(parts...)
	}
	return m.rules[key]
}

func (m multiple) after(rest int64, d byte) int64 { return (rest*10 + int64(d-'0')) % m.of }

// behindDigit is a digit, a point if it is the last one before that, and the rest; left counts the digit.
func (m multiple) behindDigit(d byte, left int, rest grammar.Expr) grammar.Expr {
	text := string(rune(d))
	if left == m.behind+1 && m.behind > 0 {
		text += "."
	}
	return grammar.Seq(grammar.Literal(text), rest)
}
