package untrusted

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"unicode/utf8"
)

// JSONError is an error of reading data as JSON in words for whoever wrote the file: where it stops to be JSON, in place
// of what encoding/json expected there. Errors about what the JSON says stay as they are.
func JSONError(data []byte, err error) error {
	const unknown = "json: unknown field "
	var syntax *json.SyntaxError
	var kind *json.UnmarshalTypeError
	switch {
	case err == nil || errors.As(err, &kind):
		return err
	case len(bytes.TrimSpace(data)) == 0:
		return errors.New("it is empty")
	case errors.Is(err, io.ErrUnexpectedEOF):
		return errors.New("it is not JSON: it ends too early")
	case strings.HasPrefix(err.Error(), unknown):
		return errors.New(strings.TrimPrefix(err.Error(), "json: "))
	case !errors.As(err, &syntax):
		return err
	}
	at := int(syntax.Offset) - 1
	if at < 0 || at >= len(data) || syntax.Error() == "unexpected end of JSON input" {
		return errors.New("it is not JSON: it ends too early")
	}
	if strings.Contains(syntax.Error(), " in literal ") { // of a word like tree, which begins as true
		for at > 0 && data[at-1] >= 'a' && data[at-1] <= 'z' {
			at--
		}
	}
	what := "it"
	if bytes.IndexByte(bytes.TrimSpace(data), '\n') >= 0 {
		what = fmt.Sprintf("line %d", 1+bytes.Count(data[:at], []byte("\n")))
	}
	return fmt.Errorf("%s is not JSON from %q on", what, beginning(data[at:]))
}

// beginning of a text: some characters of its first line.
func beginning(text []byte) string {
	const most = 20
	line, _, _ := bytes.Cut(text, []byte("\n"))
	if line = bytes.TrimSpace(line); len(line) == 0 {
		return "\n"
	}
	cut := 0
	for n := 0; n < most && cut < len(line); n++ {
		_, size := utf8.DecodeRune(line[cut:])
		cut += size
	}
	return string(line[:cut])
}
