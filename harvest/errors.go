package harvest

import "errors"

// Causes that callers decide on.
var (
	// ErrNoCapacity: no peer has room now. Use another tier, and ask again later.
	ErrNoCapacity = errors.New("no peer has room")
	// ErrQuota: the policy does not let the client hold more.
	ErrQuota = errors.New("the client's quota is used up")
	// ErrRate: the policy does not let the client allocate so fast.
	ErrRate = errors.New("the client allocates faster than it may")
	// ErrRevoked: the handle's memory was taken back, or is about to be.
	ErrRevoked = errors.New("revoked")
	// ErrFreed: the handle was freed before.
	ErrFreed = errors.New("freed before")
	// ErrDeadline: memory could not be given back in time; it will be when those
	// named in the error let go.
	ErrDeadline = errors.New("the deadline has passed")
	// ErrClosed: the runtime is closed.
	ErrClosed = errors.New("closed")
)
