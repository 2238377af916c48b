package configs

import (
	"slices"
	"strings"
	"unicode"
)

// Nearest returns the known name that takes the fewest edits to reach, and false if
// none is near: a third of the name, less what all known names begin with, but at
// least two edits, may be wrong.
func Nearest(name string, known []string) (string, bool) {
	best, least := "", max(2, len(strings.TrimPrefix(name, commonPrefix(known)))/3)+1
	for _, k := range known {
		if d := distance(name, k); d < least {
			best, least = k, d
		}
	}
	return best, best != ""
}

// Similar lists the known names that a name may stand for, letter case and separators
// aside: the one that is equal, or those that begin with it, or contain it, or begin with
// what takes the fewest edits to reach (at most a third of the name, or one), or are
// contained in it. It is empty where none is near.
func Similar(name string, known []string) []string {
	plain := lettersAndDigits(name)
	least := max(1, len(plain)/3)
	for _, k := range known {
		least = min(least, edits(plain, lettersAndDigits(k)))
	}
	for _, like := range []func(known string) bool{
		func(k string) bool { return k == plain },
		func(k string) bool { return len(plain) > 1 && strings.HasPrefix(k, plain) },
		func(k string) bool { return len(plain) > 2 && strings.Contains(k, plain) },
		func(k string) bool { return edits(plain, k) <= least && least < len(plain) },
		func(k string) bool { return len(k) > 2 && strings.Contains(plain, k) },
	} {
		var list []string
		for _, k := range known {
			if like(lettersAndDigits(k)) {
				list = append(list, k)
			}
		}
		if len(list) > 0 {
			return list
		}
	}
	return nil
}

// edits is the distance of a name from a known one, or from what that begins with.
func edits(name, known string) int {
	return min(distance(name, known), distance(name, known[:min(len(name), len(known))]))
}

// DidYouMean is "; did you mean a or b?" of the known names that a name may stand for, for
// the end of an error, and empty where none is near.
func DidYouMean(name string, known []string) string { return didYouMean(Similar(name, known)) }

func didYouMean(similar []string) string {
	if len(similar) == 0 {
		return ""
	}
	return "; did you mean " + alternatives(similar) + "?"
}

// alternatives joins names as in "a, b or c".
func alternatives(names []string) string {
	last := len(names) - 1
	if last == 0 {
		return names[0]
	}
	return strings.Join(names[:last], ", ") + " or " + names[last]
}

func lettersAndDigits(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsLetter(r) || unicode.IsDigit(r) {
			return unicode.ToLower(r)
		}
		return -1
	}, s)
}

func commonPrefix(names []string) string {
	if len(names) == 0 {
		return ""
	}
	low, high := slices.Min(names), slices.Max(names)
	n := 0
	for n < min(len(low), len(high)) && low[n] == high[n] {
		n++
	}
	return low[:n]
}

// distance is the number of bytes to insert, delete or replace to get from a to b
// (Levenshtein).
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			replace := diagonal
			if a[i] != b[j] {
				replace++
			}
			diagonal = row[j+1]
			row[j+1] = min(replace, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}
