package jinja

import (
	"errors"
	"fmt"
)

// ErrLimit is wrapped by the error of a rendering that exceeds a limit on time, steps, depth, output or memory.
var ErrLimit = errors.New("limit exceeded")

// RaisedError is wrapped by the error of a rendering in which the template called raise_exception.
type RaisedError struct{ Message string }

// Error implements error.
func (e *RaisedError) Error() string { return e.Message }

// exception is what Python raises. It is thrown as a panic and caught by Parse and Render.
type exception struct {
	line int // 0: the line that the run is in
	err  error
}

// raise raises an exception in the present line.
func raise(format string, args ...any) { raiseAt(0, format, args...) }

func raiseAt(line int, format string, args ...any) {
	panic(&exception{line: line, err: fmt.Errorf(format, args...)})
}

// limit ends a rendering that is about to make what exceeds a limit.
func limit(format string, args ...any) {
	panic(&exception{err: fmt.Errorf("%w: %s", ErrLimit, fmt.Sprintf(format, args...))})
}

// catch turns an exception into an error with the template's line. It is called deferred.
func catch(line func() int, err *error) {
	switch e := recover().(type) {
	case nil:
	case *exception:
		at := e.line
		if at == 0 {
			at = line()
		}
		*err = e.err
		if at > 0 {
			*err = fmt.Errorf("line %d: %w", at, e.err)
		}
	default:
		panic(e)
	}
}
