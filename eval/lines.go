package eval

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
)

// maxLineBytes bounds a line of a file of prompts or requests.
const maxLineBytes = 16 << 20

// EachLine calls f with each line that is not blank, and its number. Errors of f, a line that is too long, and a file
// without lines are the user's: they wrap ErrInput, and name the line of the file called name. none is what a file
// without lines lacks, as "prompts".
func EachLine(r io.Reader, name, none string, f func(n int, line []byte) error) error {
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, maxLineBytes)
	n, some := 0, false
	for lines.Scan() {
		n++
		line := bytes.TrimSpace(lines.Bytes())
		if len(line) == 0 {
			continue
		}
		some = true
		if err := f(n, line); err != nil {
			return Inputf("%s: line %d: %w", name, n, err)
		}
	}
	switch err := lines.Err(); {
	case errors.Is(err, bufio.ErrTooLong):
		return Inputf("%s: line %d exceeds the maximum of %d MiB", name, n+1, maxLineBytes>>20)
	case err != nil:
		return fmt.Errorf("eval: read %s: %w", name, err)
	case !some:
		return Inputf("%s has no %s", name, none)
	}
	return nil
}
