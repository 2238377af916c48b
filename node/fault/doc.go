// Package fault tells errors of opening a node apart by what they are about: the
// configuration, the model, or a device. The kind is not in an error's text; cmd/moeserve
// turns it into the exit code.
//
//	return fault.Of(fault.ErrModel, err)
//	errors.Is(err, fault.ErrModel)
package fault
