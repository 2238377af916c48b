package main

import "strings"

// suggestion names what a mistyped name may have meant, or else says otherwise.
func suggestion(name string, known []string, otherwise string) string {
	if near, ok := nearest(name, known); ok {
		return "; did you mean " + near + "?"
	}
	return "; " + otherwise
}

// nearest returns the known name that takes the fewest edits to reach, and false
// if none is near: a third of the name, less what all variables begin with, but at
// least two edits, may be wrong.
func nearest(name string, known []string) (string, bool) {
	best, least := "", max(2, len(strings.TrimPrefix(name, variablePrefix))/3)+1
	for _, k := range known {
		if d := distance(name, k); d < least {
			best, least = k, d
		}
	}
	return best, best != ""
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
