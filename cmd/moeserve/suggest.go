package main

import "github.com/moeserve/moeserve/configs"

// suggestion names what a mistyped name may have meant, or else says otherwise.
func suggestion(name string, known []string, otherwise string) string {
	if near, ok := configs.Nearest(name, known); ok {
		return "; did you mean " + near + "?"
	}
	return "; " + otherwise
}
