package fault

import (
	"errors"

	"github.com/moeserve/moeserve/device"
)

// The kinds.
var (
	// ErrConfig: settings that contradict each other or the model.
	ErrConfig = errors.New("configuration")
	// ErrModel: the model cannot be read, or is not supported.
	ErrModel = errors.New("model")
	// ErrDevice: a device, or its memory.
	ErrDevice = errors.New("device")
	// ErrLost: a device was lost, at any time.
	ErrLost = device.ErrLost
)

// failure marks err as one of the kinds without changing its text.
type failure struct{ kind, err error }

func (f *failure) Error() string   { return f.err.Error() }
func (f *failure) Unwrap() []error { return []error{f.kind, f.err} }

// Of marks an error as one of a kind; nil stays nil.
func Of(kind, err error) error {
	if err == nil {
		return nil
	}
	return &failure{kind, err}
}
