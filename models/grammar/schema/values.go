package schema

import (
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/moeserve/moeserve/models/grammar"
)

// hex4 is the digits of \u that are no half of a surrogate pair.
var hex4 = func() grammar.Expr {
	hex := grammar.Runes('0', '9', 'a', 'f', 'A', 'F')
	return grammar.Any(
		grammar.Seq(grammar.Runes('0', '9', 'a', 'c', 'e', 'f', 'A', 'C', 'E', 'F'), grammar.Repeat(hex, 3, 3)),
		grammar.Seq(grammar.Runes('d', 'd', 'D', 'D'), grammar.Runes('0', '7'), grammar.Repeat(hex, 2, 2)))
}()

// anyChar is one character of a JSON string. All can be written by themselves or by these escapes.
var anyChar = grammar.Any(
	grammar.Runes(' ', '!', '#', '[', ']', utf8.MaxRune),
	grammar.Seq(grammar.Literal(`\`), grammar.Any(grammar.Runes('"', '"', '\\', '\\', 'b', 'b', 'f', 'f', 'n', 'n', 'r', 'r', 't', 't'), grammar.Seq(grammar.Literal("u"), hex4))))

// plainChar is one that needs no escape.
var plainChar = grammar.Runes(' ', '!', '#', '[', ']', utf8.MaxRune)

// charsOf is a character of these ranges in a JSON string, in one way of writing it.
func charsOf(ranges ...rune) grammar.Expr {
	var plain []rune
	var parts []grammar.Expr
	for i := 0; i < len(ranges); i += 2 {
		lo, hi := ranges[i], ranges[i+1]
		for ; lo <= hi && lo <= '\\'; lo++ {
			switch short := strings.IndexRune("\b\f\n\r\t\"\\", lo); {
			case short >= 0:
				parts = append(parts, grammar.Literal(`\`+`bfnrt"\`[short:short+1]))
			case lo < ' ':
				parts = append(parts, grammar.Literal(fmt.Sprintf(`\u%04x`, lo)))
			default:
				plain = append(plain, lo, lo)
			}
		}
		if lo <= hi {
			plain = append(plain, lo, hi)
		}
	}
	return grammar.Any(append(parts, grammar.Runes(plain...))...)
}

// spelled is any character in the way that charsOf writes it.
var spelled = charsOf(0, utf8.MaxRune)

// notWhole is a number that is not whole, as a float64 neither, without an exponent.
var notWhole = func() grammar.Expr {
	var parts []grammar.Expr
	for whole := 1; whole < exactDigits; whole++ {
		parts = append(parts, grammar.Seq(grammar.Repeat(digit, whole, whole), grammar.Literal("."), notZero(exactDigits-whole)))
	}
	return grammar.Seq(grammar.Optional(grammar.Literal("-")), grammar.Any(parts...))
}()

func quoted(e grammar.Expr) grammar.Expr {
	return grammar.Seq(grammar.Literal(`"`), e, grammar.Literal(`"`))
}

// formats that are asserted. The others are annotations, as the specification has it.
var formats = func() map[string]grammar.Expr {
	const (
		year     = `([1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])` // Python has no year 0
		leap     = `([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)`
		date     = `(` + year + `-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))|` + leap + `-02-29)`
		time     = `([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])`
		byteOf   = `(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])`
		label    = `[A-Za-z0-9]{1,15}(-[A-Za-z0-9]{1,15}){0,2}` // without --, which marks other alphabets
		hostname = label + `(\.` + label + `){0,4}`
		h        = `[0-9a-fA-F]{1,4}`
		ipv4     = byteOf + `(\.` + byteOf + `){3}`
		// Addresses by a name of letters at the end, or by numbers, so that no parser takes one for another; and what else
		// is common without one.
		name    = `([A-Za-z0-9]+(-[A-Za-z0-9]+)*\.)*[A-Za-z][A-Za-z0-9]*(-[A-Za-z0-9]+)*`
		pchar   = `([A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})`
		address = `[A-Za-z][A-Za-z0-9+.-]*://(` + name + `|` + ipv4 + `)(:[1-9][0-9]{0,3})?(/` + pchar + `*)*`
		uri     = `((` + address + `|file:///` + pchar + `*(/` + pchar + `*)*)(\?(` + pchar + `|[/?])*)?(#(` + pchar + `|[/?])*)?|urn:[A-Za-z0-9]+(-[A-Za-z0-9]+)*:` + pchar + `+|tel:\+?[0-9]+(-[0-9]+)*|mailto:[A-Za-z0-9._+-]+@` + name + `)`
		clock   = `T([0-9]{1,4}H([0-9]{1,4}M([0-9]{1,4}S)?)?|[0-9]{1,4}M([0-9]{1,4}S)?|[0-9]{1,4}S)`
		days    = `([0-9]{1,4}Y([0-9]{1,4}M([0-9]{1,4}D)?)?|[0-9]{1,4}M([0-9]{1,4}D)?|[0-9]{1,4}D)`
	)
	v6 := []string{`(` + h + `:){7}` + h, `::`}
	for left := 0; left <= 6; left++ {
		for right := 0; left+right <= 7; right++ {
			if left+right == 0 {
				continue
			}
			l, r := "", ""
			if left > 0 {
				l = h + `(:` + h + fmt.Sprintf(`){%d}`, left-1)
			}
			if right > 0 {
				r = h + `(:` + h + fmt.Sprintf(`){%d}`, right-1)
			}
			v6 = append(v6, l+`::`+r)
		}
	}
	all := map[string]grammar.Expr{}
	for name, pattern := range map[string]string{
		"date": date, "time": time, "date-time": date + `T` + time,
		"duration": `P(` + days + `(` + clock + `)?|` + clock + `|[0-9]{1,4}W)`,
		"email":    `[A-Za-z0-9!#$%&'*+/=?^_{|}~-]{1,20}(\.[A-Za-z0-9!#$%&'*+/=?^_{|}~-]{1,20}){0,2}@` + label + `(\.` + label + `){1,4}`,
		"hostname": hostname,
		"ipv4":     ipv4,
		"ipv6":     strings.Join(v6, "|"),
		"uri":      uri,
		"uuid":     `[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}`,
		// Those that pydantic has beside the specification's.
		"ipvanyaddress": ipv4 + `|` + strings.Join(v6, "|"),
		"uuid1":         uuidOf("1"), "uuid3": uuidOf("3"), "uuid4": uuidOf("4"), "uuid5": uuidOf("5"), "uuid6": uuidOf("6"), "uuid7": uuidOf("7"), "uuid8": uuidOf("8"),
	} {
		p, err := grammar.ParsePattern(pattern)
		if err != nil {
			panic("schema: format " + name + ": " + err.Error())
		}
		all[name] = &grammar.Rule{Name: "format " + name, Body: p.Whole(charsOf)}
	}
	return all
}()

// uuidOf is the pattern of UUIDs of a version.
func uuidOf(version string) string {
	return `[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-` + version + `[0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12}`
}

// maxURI is the maximum length of a URI where a schema has a higher one: each length takes states of its own.
const maxURI = 512

// keyOther is a key that is none of some names, written without escapes.
func keyOther(names []string) grammar.Expr {
	declared := make([]grammar.Expr, len(names))
	for i, n := range names {
		declared[i] = grammar.Literal(text(n))
	}
	return &grammar.Rule{Name: "key", Body: grammar.Except(quoted(grammar.Repeat(plainChar, 0, -1)), grammar.Any(declared...))}
}
