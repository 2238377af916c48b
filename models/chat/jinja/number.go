package jinja

import (
	"math"
	"math/big"
	"strconv"
	"strings"
)

// maxBits bounds integers. Python has no bound, but prints none of more than 4300 digits.
const maxBits = 1 << 16

// maxDigits is the number of digits up to which Python prints and reads an integer.
const maxDigits = 4300

// unordered is what compareNumbers returns for NaN.
const unordered = 2

func isNumber(v Value) bool {
	switch v.(type) {
	case bool, int, *big.Int, float64:
		return true
	}
	return false
}

// integer returns an int that a bool or an int is; big integers are saturated.
func integer(v Value) (int, bool) {
	switch v := v.(type) {
	case bool:
		if v {
			return 1, true
		}
		return 0, true
	case int:
		return v, true
	case *big.Int:
		if v.Sign() < 0 {
			return math.MinInt, true
		}
		return math.MaxInt, true
	}
	return 0, false
}

// bigInt returns the value of a bool or an int.
func bigInt(v Value) *big.Int {
	if b, ok := v.(*big.Int); ok {
		return b
	}
	i, _ := integer(v)
	return big.NewInt(int64(i))
}

// small returns the value of a big.Int as templates see it.
func small(b *big.Int) Value {
	if b.IsInt64() {
		return int(b.Int64())
	}
	return b
}

// float is float(v) of a number.
func float(v Value) float64 {
	switch v := v.(type) {
	case float64:
		return v
	case *big.Int:
		f, _ := new(big.Float).SetInt(v).Float64()
		if math.IsInf(f, 0) {
			raise("int too large to convert to float")
		}
		return f
	}
	i, _ := integer(v)
	return float64(i)
}

// compareNumbers returns the sign of a - b, exactly, or unordered.
func compareNumbers(a, b Value) int {
	x, isFloat := a.(float64)
	y, areFloats := b.(float64)
	if isFloat && areFloats {
		switch {
		case x < y:
			return -1
		case x > y:
			return 1
		case x == y:
			return 0
		}
		return unordered
	}
	if areFloats {
		if c := compareNumbers(b, a); c != unordered {
			return -c
		}
		return unordered
	}
	if !isFloat {
		return bigInt(a).Cmp(bigInt(b))
	}
	switch {
	case math.IsNaN(x):
		return unordered
	case math.IsInf(x, 0):
		return int(math.Copysign(1, x))
	}
	return new(big.Float).SetFloat64(x).Cmp(new(big.Float).SetInt(bigInt(b)))
}

// binary is a op b, for the operators + - * / // % **.
func (r *run) binary(op string, a, b Value) Value {
	if t, ok := a.(Text); ok && op == "%" {
		return r.percent(t, b)
	}
	failIfUndefined(a, b)
	if isNumber(a) && isNumber(b) {
		_, isFloat := a.(float64)
		_, areFloats := b.(float64)
		if isFloat || areFloats {
			return floats(op, a, b)
		}
		return integers(op, a, b)
	}
	switch x := a.(type) {
	case Text:
		if y, ok := b.(Text); ok && op == "+" {
			return r.concat(x, y)
		}
	case *List:
		if y, ok := b.(*List); ok && op == "+" {
			return r.list(append(x.Items[:len(x.Items):len(x.Items)], y.Items...))
		}
	case Tuple:
		if y, ok := b.(Tuple); ok && op == "+" {
			r.made(wordBytes * (len(x) + len(y)))
			return append(x[:len(x):len(x)], y...)
		}
	}
	if op == "*" {
		if n, ok := integer(b); ok {
			if v := r.times(a, n); v != nil {
				return v
			}
		}
		if n, ok := integer(a); ok {
			if v := r.times(b, n); v != nil {
				return v
			}
		}
	}
	if op == "**" {
		op = "** or pow()"
	}
	if _, ok := a.(Text); ok && op == "+" {
		raise("can only concatenate str (not \"%s\") to str", typeName(b))
	}
	raise("unsupported operand type(s) for %s: '%s' and '%s'", op, typeName(a), typeName(b))
	return nil
}

// times is v * n of a sequence, or nil.
func (r *run) times(v Value, n int) Value {
	n = max(n, 0)
	switch v := v.(type) {
	case Text:
		return r.repeat(v, n)
	case *List:
		return &List{Items: r.repeatItems(v.Items, n)}
	case Tuple:
		return Tuple(r.repeatItems(v, n))
	}
	return nil
}

func (r *run) repeatItems(list []Value, n int) []Value {
	if len(list) == 0 {
		return nil
	}
	r.room(wordBytes*len(list), n)
	r.made(wordBytes * len(list) * n)
	out := make([]Value, 0, len(list)*n)
	for range n {
		out = append(out, list...)
	}
	return out
}

func integers(op string, a, b Value) Value {
	x, isInt := a.(int)
	y, areInts := b.(int)
	if isInt && areInts {
		switch op {
		case "+":
			if c := x + y; (c > x) == (y > 0) {
				return c
			}
		case "-":
			if c := x - y; (c < x) == (y > 0) {
				return c
			}
		}
	}
	p, q := bigInt(a), bigInt(b)
	if q.Sign() == 0 {
		switch op {
		case "/":
			raise("division by zero")
		case "//", "%":
			raise("integer division or modulo by zero")
		}
	}
	c := new(big.Int)
	switch op {
	case "+":
		c.Add(p, q)
	case "-":
		c.Sub(p, q)
	case "*":
		c.Mul(p, q)
	case "/":
		f, _ := new(big.Rat).SetFrac(p, q).Float64()
		if math.IsInf(f, 0) {
			raise("integer division result too large for a float")
		}
		return f
	case "//", "%":
		m := new(big.Int)
		c.DivMod(p, q, m) // Euclidean: m is not negative
		if m.Sign() != 0 && q.Sign() < 0 {
			c.Sub(c, big.NewInt(1))
			m.Add(m, q)
		}
		if op == "%" {
			c = m
		}
	case "**":
		if q.Sign() < 0 {
			return floats(op, a, b)
		}
		if p.BitLen() > 1 && (!q.IsInt64() || q.Int64() > maxBits || q.Int64()*int64(p.BitLen()) > maxBits+int64(p.BitLen())) {
			limit("an integer of more than %d bits", maxBits)
		}
		c.Exp(p, q, nil)
	}
	if c.BitLen() > maxBits {
		limit("an integer of more than %d bits", maxBits)
	}
	return small(c)
}

func floats(op string, a, b Value) Value {
	x, y := float(a), float(b)
	switch op {
	case "+":
		return x + y
	case "-":
		return x - y
	case "*":
		return x * y
	case "**":
		if x == 0 && y < 0 {
			raise("0.0 cannot be raised to a negative power")
		}
		if x < 0 && y != math.Trunc(y) && !math.IsInf(x, 0) && !math.IsNaN(y) {
			raise("complex numbers are not supported")
		}
		f := math.Pow(x, y)
		if math.IsInf(f, 0) && !math.IsInf(x, 0) && !math.IsInf(y, 0) {
			raise("(34, 'Numerical result out of range')")
		}
		return f
	}
	if y == 0 {
		if op == "/" {
			raise("float division by zero")
		}
		raise("float floor division by zero")
	}
	if op == "/" {
		return x / y
	}
	// As CPython's float_divmod.
	m := math.Mod(x, y)
	d := (x - m) / y
	if m != 0 {
		if (y < 0) != (m < 0) {
			m += y
			d--
		}
	} else {
		m = math.Copysign(0, y)
	}
	if op == "%" {
		return m
	}
	if d == 0 {
		return math.Copysign(0, x/y)
	}
	f := math.Floor(d)
	if d-f > 0.5 {
		f++
	}
	return f
}

// unary is -v or +v.
func unary(op string, v Value) Value {
	failIfUndefined(v)
	switch v := v.(type) {
	case float64:
		if op == "-" {
			return -v
		}
		return v
	case bool, int, *big.Int:
		if op == "-" {
			return small(new(big.Int).Neg(bigInt(v)))
		}
		return small(bigInt(v))
	}
	raise("bad operand type for unary %s: '%s'", op, typeName(v))
	return nil
}

// formatInt is str of an int.
func formatInt(v Value) string {
	if b, ok := v.(*big.Int); ok {
		s := b.String()
		if len(strings.TrimPrefix(s, "-")) > maxDigits {
			raise("Exceeds the limit (%d digits) for integer string conversion", maxDigits)
		}
		return s
	}
	i, _ := integer(v)
	return strconv.Itoa(i)
}

// formatFloat is repr of a float.
func formatFloat(f float64) string {
	switch {
	case math.IsNaN(f):
		return "nan"
	case math.IsInf(f, 1):
		return "inf"
	case math.IsInf(f, -1):
		return "-inf"
	}
	s := strconv.FormatFloat(f, 'e', -1, 64)
	if exp, _ := strconv.Atoi(s[strings.IndexByte(s, 'e')+1:]); exp < -4 || exp >= 16 {
		return s // two digits of exponent at least, as Python
	}
	s = strconv.FormatFloat(f, 'f', -1, 64)
	if !strings.Contains(s, ".") {
		s += ".0"
	}
	return s
}

// parseInt is int(s, base) of a string.
func parseInt(s string, base int) (Value, bool) {
	s = strings.TrimFunc(s, isSpace)
	sign := ""
	if s != "" && (s[0] == '-' || s[0] == '+') {
		sign, s = s[:1], s[1:]
	}
	lower := strings.ToLower(s)
	for prefix, b := range map[string]int{"0x": 16, "0o": 8, "0b": 2} {
		if strings.HasPrefix(lower, prefix) && (base == b || base == 0) {
			s, base = strings.TrimPrefix(s[2:], "_"), b
			break
		}
	}
	if base == 0 {
		if base = 10; len(s) > 1 && s[0] == '0' && strings.Trim(s, "0_") != "" {
			return nil, false
		}
	}
	if s == "" || s[0] == '_' || s[len(s)-1] == '_' || strings.Contains(s, "__") || base < 2 || base > 36 {
		return nil, false
	}
	digits := decimals(strings.ReplaceAll(s, "_", ""))
	if strings.ContainsAny(digits, "+-") || len(digits) > maxDigits {
		return nil, false
	}
	b, ok := new(big.Int).SetString(sign+digits, base)
	if !ok {
		return nil, false
	}
	return small(b), true
}

// parseFloat is float(s) of a string.
func parseFloat(s string) (float64, bool) {
	s = decimals(strings.TrimFunc(s, isSpace))
	for i := range len(s) {
		if s[i] == '_' && (i == 0 || i+1 == len(s) || !isDigit(s[i-1]) || !isDigit(s[i+1])) {
			return 0, false
		}
	}
	s = strings.ReplaceAll(s, "_", "")
	if strings.ContainsAny(s, "xXpP") {
		return 0, false
	}
	f, err := strconv.ParseFloat(s, 64)
	if err != nil && !math.IsInf(f, 0) {
		return 0, false
	}
	return f, true
}

func isDigit(c byte) bool { return '0' <= c && c <= '9' }

// roundFloat is round(f, digits).
func roundFloat(f float64, digits int) float64 {
	if math.IsNaN(f) || math.IsInf(f, 0) || digits > 323 {
		return f
	}
	if digits < 0 {
		if digits < -308 {
			return math.Copysign(0, f)
		}
		// The exact decimal value, rounded half to even as a rational number.
		unit := new(big.Int).Exp(big.NewInt(10), big.NewInt(int64(-digits)), nil)
		x := new(big.Rat).SetFloat64(f)
		whole := roundRat(x.Quo(x, new(big.Rat).SetInt(unit)))
		out, _ := new(big.Rat).SetInt(whole.Mul(whole, unit)).Float64()
		return math.Copysign(out, f)
	}
	out, _ := strconv.ParseFloat(strconv.FormatFloat(f, 'f', digits, 64), 64)
	return out
}

// roundRat rounds half to even.
func roundRat(x *big.Rat) *big.Int {
	two := big.NewInt(2)
	num := new(big.Int).Mul(x.Num(), two)
	num.Add(num, x.Denom())
	den := new(big.Int).Mul(x.Denom(), two)
	q, m := new(big.Int).DivMod(num, den, new(big.Int)) // floor(x + 1/2)
	if m.Sign() == 0 && q.Bit(0) == 1 {
		q.Sub(q, big.NewInt(1))
	}
	return q
}
