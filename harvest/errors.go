package harvest

import "errors"

// Errors that callers distinguish.
var (
	// ErrNoCapacity: no peer has room now. Use another tier, and retry later.
	ErrNoCapacity = errors.New("no peer has room")
	// ErrQuota: the client has reached the policy's quota.
	ErrQuota = errors.New("the client's quota is used up")
	// ErrRate: the client exceeds the policy's allocation rate.
	ErrRate = errors.New("the client exceeds its allocation rate")
	// ErrRevoked: the handle was revoked, or is being revoked.
	ErrRevoked = errors.New("revoked")
	// ErrFreed: the handle was already freed.
	ErrFreed = errors.New("already freed")
	// ErrDeadline: memory was not released in time; it will be once the owners named in
	// the error release it.
	ErrDeadline = errors.New("the deadline has passed")
	// ErrClosed: the runtime is closed.
	ErrClosed = errors.New("closed")
)
