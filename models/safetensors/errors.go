package safetensors

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"

	"github.com/moeserve/moeserve/untrusted"
)

var (
	// ErrNotFound means that a directory holds no safetensors checkpoint.
	ErrNotFound = errors.New("no safetensors checkpoint")
	// ErrDamaged means that a file's content does not match the format or the index. The
	// remedy is to download the checkpoint again.
	ErrDamaged = errors.New("damaged checkpoint")
	// ErrChanged means that a file changed between Open and a read.
	ErrChanged = errors.New("checkpoint changed while it was read")
	// ErrMismatch means that a checkpoint's tensors are not those that the model needs.
	ErrMismatch = errors.New("tensors do not match the model")
)

// FileError describes an error in one file of a checkpoint and, if known, the tensor
// concerned.
type FileError struct {
	File   string // path of the file
	Tensor string // the tensor concerned, or ""
	Reason string // what is wrong
	Advice string // what the user can do, or ""
	Err    error  // ErrNotFound, ErrDamaged or ErrChanged, or the operating system's error
}

// Error names file and tensor, then the reason and the advice.
func (e *FileError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "safetensors: %s: ", untrusted.Name(e.File))
	if e.Tensor != "" {
		fmt.Fprintf(&b, "tensor %s: ", untrusted.Quote(e.Tensor))
	}
	b.WriteString(e.Reason)
	if e.Advice != "" {
		b.WriteString(": ")
		b.WriteString(e.Advice)
	}
	return b.String()
}

// Unwrap returns the sentinel, or the operating system's error.
func (e *FileError) Unwrap() error { return e.Err }

const downloadAgain = "the file is damaged or incomplete; download it again"

func damaged(file, tensor, format string, args ...any) error {
	return &FileError{
		File: file, Tensor: tensor, Reason: fmt.Sprintf(format, args...),
		Advice: downloadAgain, Err: ErrDamaged,
	}
}

// NewFileError wraps an operating system's error. A *fs.PathError would name the path
// a second time.
func NewFileError(file string, err error) error {
	reason := err.Error()
	var pe *fs.PathError
	if errors.As(err, &pe) {
		reason = pe.Op + ": " + pe.Err.Error()
	}
	return &FileError{File: file, Reason: reason, Err: err}
}

// MismatchError lists the tensors that a checkpoint lacks and those that the model does
// not need. A loader builds it from [Checkpoint.Diff].
type MismatchError struct {
	Dir        string   // the checkpoint
	Missing    []string // needed but absent
	Unexpected []string // present but not needed
}

// Error names the first few tensors of each list and counts the rest.
func (e *MismatchError) Error() string {
	var parts []string
	if len(e.Missing) > 0 {
		parts = append(parts, "lacks "+brief(e.Missing))
	}
	if len(e.Unexpected) > 0 {
		parts = append(parts, "has unexpected "+brief(e.Unexpected))
	}
	return fmt.Sprintf("safetensors: %s: %s: config.json and the weights do not belong together, "+
		"or the download is incomplete", untrusted.Name(filepath.Clean(e.Dir)), strings.Join(parts, " and "))
}

// Unwrap returns [ErrMismatch].
func (e *MismatchError) Unwrap() error { return ErrMismatch }

// brief lists at most three names and counts the rest.
func brief(names []string) string {
	const show = 3
	quoted := make([]string, 0, show)
	for _, n := range names[:min(show, len(names))] {
		quoted = append(quoted, untrusted.Quote(n))
	}
	s := strings.Join(quoted, ", ")
	if rest := len(names) - len(quoted); rest > 0 {
		s += fmt.Sprintf(" and %d more", rest)
	}
	if len(names) == 1 {
		return "tensor " + s
	}
	return fmt.Sprintf("%d tensors: %s", len(names), s)
}
