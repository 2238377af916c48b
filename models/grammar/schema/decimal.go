package schema

import (
	"encoding/json"
	"fmt"
	"math/big"
	"strconv"
	"strings"

	"github.com/moeserve/moeserve/models/grammar"
)

// decimal is a number: digits before and behind the point, without zeros at the far ends.
type decimal struct {
	negative    bool
	whole, part string
}

const (
	// maxDigits is the maximum number of digits of a bound.
	maxDigits = 40
	// maxFraction is that of digits written behind the point. exactDigits are those of a decimal that a float64 tells from
	// all others of as many.
	maxFraction = 17
	exactDigits = 15
)

func parseDecimal(n json.Number) (decimal, error) {
	var d decimal
	s := string(n)
	mantissa, exponent, has := strings.Cut(strings.ToLower(s), "e")
	shift := 0
	if has {
		var err error
		if shift, err = strconv.Atoi(exponent); err != nil || shift > maxDigits || shift < -maxDigits {
			return d, fmt.Errorf("%s has more than %d digits", n, maxDigits)
		}
	}
	mantissa, d.negative = strings.CutPrefix(mantissa, "-")
	d.whole, d.part, _ = strings.Cut(mantissa, ".")
	if len(d.whole)+len(d.part) > 10*maxDigits {
		return d, fmt.Errorf("it has more than %d digits", maxDigits)
	}
	for ; shift > 0; shift-- {
		if d.part == "" {
			d.part = "0"
		}
		d.whole, d.part = d.whole+d.part[:1], d.part[1:]
	}
	for ; shift < 0; shift++ {
		if d.whole == "" {
			d.whole = "0"
		}
		d.whole, d.part = d.whole[:len(d.whole)-1], d.whole[len(d.whole)-1:]+d.part
	}
	d.whole, d.part = strings.TrimLeft(d.whole, "0"), strings.TrimRight(d.part, "0")
	if d.whole == "" && d.part == "" {
		d.negative = false
	}
	if len(d.whole) > maxDigits || len(d.part) > maxDigits {
		return d, fmt.Errorf("%s has more than %d digits", n, maxDigits)
	}
	return d, nil
}

func (d decimal) compare(o decimal) int {
	if d.negative != o.negative {
		if d.negative {
			return -1
		}
		return 1
	}
	c := 0
	switch {
	case len(d.whole) != len(o.whole):
		c = len(d.whole) - len(o.whole)
	case d.whole != o.whole:
		c = strings.Compare(d.whole, o.whole)
	default:
		c = strings.Compare(d.part, o.part)
	}
	if d.negative {
		c = -c
	}
	return c
}

func (d decimal) zero() bool { return d.whole == "" && d.part == "" }

// bound of a range; nil: none.
type bound struct {
	decimal
	open bool // the bound itself is outside
}

// places is how many digits are written behind the point of numbers beside some bounds. Beside one that is itself outside
// they are as few as it takes for a number to be another one than the bound, also for those who read it as a float64.
func places(bounds ...*bound) int {
	n := maxFraction
	for _, b := range bounds {
		if b != nil && b.open {
			n = min(n, max(exactDigits-max(len(b.whole), 1), 1))
		}
	}
	return n
}

// tighter returns the tighter one of two lower (sign 1) or upper (sign -1) bounds.
func tighter(a, b *bound, sign int) *bound {
	switch {
	case a == nil:
		return b
	case b == nil:
		return a
	}
	switch c := sign * a.compare(b.decimal); {
	case c > 0 || c == 0 && a.open:
		return a
	}
	return b
}

var (
	digit   = grammar.Runes('0', '9')
	nonZero = grammar.Runes('1', '9')
	// wholeNumber has up to 18 digits, which an int64 holds.
	wholeNumber = grammar.Any(grammar.Literal("0"), grammar.Seq(nonZero, grammar.Repeat(digit, 0, 17)))
	fraction    = grammar.Seq(grammar.Literal("."), grammar.Repeat(digit, 1, maxFraction))
	anyInteger  = grammar.Seq(grammar.Optional(grammar.Literal("-")), wholeNumber)
	// anyNumber has an exponent that a float64 holds.
	anyNumber = grammar.Seq(anyInteger, grammar.Optional(fraction),
		grammar.Optional(grammar.Seq(grammar.Runes('e', 'e', 'E', 'E'), grammar.Optional(grammar.Runes('+', '+', '-', '-')), grammar.Repeat(digit, 1, 2))))
)

// integers is the whole numbers of a range.
func integers(lo, hi *bound) grammar.Expr {
	if lo == nil && hi == nil {
		return anyInteger
	}
	least, most := rounded(lo, 1), rounded(hi, -1)
	if least != nil && most != nil && least.Cmp(most) > 0 {
		return grammar.Any()
	}
	var parts []grammar.Expr
	zero, one := new(big.Int), big.NewInt(1)
	if least == nil || least.Sign() < 0 { // "-" and the mirrored range
		from := one
		if most != nil && most.Sign() < 0 {
			from = new(big.Int).Neg(most)
		}
		var to *big.Int
		if least != nil {
			to = new(big.Int).Neg(least)
		}
		parts = append(parts, grammar.Seq(grammar.Literal("-"), positive(from, to)))
	}
	if most == nil || most.Sign() >= 0 {
		from := zero
		if least != nil && least.Sign() > 0 {
			from = least
		}
		parts = append(parts, positive(from, most))
	}
	return grammar.Any(parts...)
}

// rounded is the first whole number within a lower (sign 1) or upper (sign -1) bound.
func rounded(b *bound, sign int64) *big.Int {
	if b == nil {
		return nil
	}
	n, _ := new(big.Int).SetString("0"+b.whole, 10)
	if b.negative {
		n.Neg(n)
	}
	// n is the bound, rounded towards zero.
	switch inside := b.part != "" && (b.negative == (sign > 0)); {
	case inside: // the next number towards zero is within
	case b.part != "" || b.open:
		n.Add(n, big.NewInt(sign))
	}
	return n
}

// positive is the whole numbers from a to b, neither negative; b may be nil.
func positive(a, b *big.Int) grammar.Expr {
	var parts []grammar.Expr
	from := a.String()
	if b == nil {
		parts = append(parts, sameLength(from, strings.Repeat("9", len(from))))
		if longest := max(18, len(from)+1); len(from) < longest {
			parts = append(parts, grammar.Seq(nonZero, grammar.Repeat(digit, len(from), longest-1)))
		}
		return grammar.Any(parts...)
	}
	to := b.String()
	for n := len(from); n <= len(to); n++ {
		lo, hi := "1"+strings.Repeat("0", n-1), strings.Repeat("9", n)
		if n == len(from) {
			lo = from
		}
		if n == len(to) {
			hi = to
		}
		parts = append(parts, sameLength(lo, hi))
	}
	return grammar.Any(parts...)
}

// sameLength is the numbers from lo to hi, which have as many digits.
func sameLength(lo, hi string) grammar.Expr {
	switch {
	case lo > hi:
		return grammar.Any()
	case lo == "":
		return grammar.Seq()
	case strings.Trim(lo, "0") == "" && strings.Trim(hi, "9") == "":
		return grammar.Repeat(digit, len(lo), len(lo))
	case lo[0] == hi[0]:
		return grammar.Seq(grammar.Literal(lo[:1]), sameLength(lo[1:], hi[1:]))
	}
	rest := len(lo) - 1
	parts := []grammar.Expr{
		grammar.Seq(grammar.Literal(lo[:1]), sameLength(lo[1:], strings.Repeat("9", rest))),
		grammar.Seq(grammar.Literal(hi[:1]), sameLength(strings.Repeat("0", rest), hi[1:])),
	}
	if lo[0]+1 < hi[0] {
		parts = append(parts, grammar.Seq(grammar.Runes(rune(lo[0]+1), rune(hi[0]-1)), grammar.Repeat(digit, rest, rest)))
	}
	return grammar.Any(parts...)
}

// numbers is those of a range. Where there is one, they have no exponent.
func numbers(lo, hi *bound) grammar.Expr {
	if lo == nil && hi == nil {
		return anyNumber
	}
	if lo != nil && hi != nil {
		if c := lo.compare(hi.decimal); c > 0 || c == 0 && (lo.open || hi.open) {
			return grammar.Any()
		}
	}
	var parts []grammar.Expr
	zero, n := &bound{}, places(lo, hi)
	if lo == nil || lo.negative { // "-" and the mirrored range
		from := zero
		if hi != nil && (hi.negative || hi.zero()) {
			from = &bound{decimal{whole: hi.whole, part: hi.part}, hi.open}
		}
		var to *bound
		if lo != nil {
			to = &bound{decimal{whole: lo.whole, part: lo.part}, lo.open}
		}
		parts = append(parts, grammar.Seq(grammar.Literal("-"), decimals(from, to, n)))
	}
	if hi == nil || !hi.negative {
		from := zero
		if lo != nil && !lo.negative {
			from = lo
		}
		parts = append(parts, decimals(from, hi, n))
	}
	return grammar.Any(parts...)
}

// decimals is the numbers from lo to hi, which are not negative, with up to some digits behind the point; hi may be nil.
func decimals(lo, hi *bound, places int) grammar.Expr {
	fraction := grammar.Seq(grammar.Literal("."), grammar.Repeat(digit, 1, places))
	whole := func(b *bound) *big.Int {
		n, _ := new(big.Int).SetString("0"+b.whole, 10)
		return n
	}
	from, one := whole(lo), big.NewInt(1)
	above := new(big.Int).Add(from, one)
	literal := func(n *big.Int) grammar.Expr { return grammar.Literal(n.String()) }
	if hi == nil {
		return grammar.Any(
			grammar.Seq(literal(from), part{lo, nil, places}.expr()),
			grammar.Seq(positive(above, nil), grammar.Optional(fraction)))
	}
	to := whole(hi)
	if from.Cmp(to) == 0 {
		return grammar.Seq(literal(from), part{lo, hi, places}.expr())
	}
	parts := []grammar.Expr{
		grammar.Seq(literal(from), part{lo, nil, places}.expr()),
		grammar.Seq(literal(to), part{nil, hi, places}.expr()),
	}
	if below := new(big.Int).Sub(to, one); above.Cmp(below) <= 0 {
		parts = append(parts, grammar.Seq(positive(above, below), grammar.Optional(fraction)))
	}
	return grammar.Any(parts...)
}

// part is what is behind the whole part of a number, where that is the bound's; nil: there is none.
type part struct {
	lo, hi *bound
	places int // digits of it, where they are not those of a bound
}

func (p part) expr() grammar.Expr {
	parts := []grammar.Expr{grammar.Seq(grammar.Literal("."), p.digits(0, true))}
	if p.mayEnd(0) {
		parts = append(parts, grammar.Seq())
	}
	return grammar.Any(parts...)
}

// mayEnd says whether the number is in range if it ends before digit i, up to which it is that of the bounds.
func (p part) mayEnd(i int) bool {
	rest := func(b *bound) string { return strings.Trim(b.part[min(i, len(b.part)):], "0") }
	if p.lo != nil && (rest(p.lo) != "" || p.lo.open) {
		return false
	}
	return p.hi == nil || rest(p.hi) != "" || !p.hi.open
}

// digits is those from digit i on, up to which they are those of the bounds; with must there is at least one.
func (p part) digits(i int, must bool) grammar.Expr {
	var parts []grammar.Expr
	if !must && p.mayEnd(i) {
		parts = append(parts, grammar.Seq())
	}
	at := func(b *bound, otherwise byte) byte {
		switch {
		case b == nil:
			return otherwise
		case i < len(b.part):
			return b.part[i]
		}
		return '0'
	}
	least, left := 0, max(p.places-i, 1)
	if must {
		least = 1
	}
	switch {
	case p.lo == nil && p.hi == nil:
		return grammar.Repeat(digit, least, left)
	case p.hi == nil && i >= len(p.lo.part):
		if !p.lo.open {
			return grammar.Repeat(digit, least, left)
		}
		return notZero(left)
	case p.hi != nil && i >= len(p.hi.part) && (p.lo == nil || i >= len(p.lo.part)):
		if !p.mayEnd(i) {
			return grammar.Any()
		}
		return grammar.Repeat(grammar.Literal("0"), least, 1)
	}
	lo, hi := at(p.lo, '0'), at(p.hi, '9')
	next := func(q part) grammar.Expr { return q.digits(i+1, false) }
	one := func(d byte, q part) {
		parts = append(parts, grammar.Seq(grammar.Literal(string(rune(d))), next(q)))
	}
	switch {
	case lo > hi:
	case lo == hi && p.lo != nil && p.hi != nil:
		one(lo, p)
	default:
		from, to := lo, hi
		if p.lo != nil {
			one(lo, part{p.lo, tight(p.hi, lo == hi), p.places})
			from++
		}
		if p.hi != nil && !(p.lo != nil && lo == hi) {
			one(hi, part{tight(p.lo, lo == hi), p.hi, p.places})
			to--
		}
		if from <= to {
			parts = append(parts, grammar.Seq(grammar.Runes(rune(from), rune(to)), grammar.Repeat(digit, 0, left-1)))
		}
	}
	return grammar.Any(parts...)
}

// notZero is up to some digits, of which one is not 0.
func notZero(most int) grammar.Expr {
	e := grammar.Seq(nonZero, grammar.Repeat(digit, 0, most-1))
	if most == 1 {
		return e
	}
	return grammar.Any(e, grammar.Seq(grammar.Literal("0"), notZero(most-1)))
}

func tight(b *bound, is bool) *bound {
	if is {
		return b
	}
	return nil
}
