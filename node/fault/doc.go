// Package fault classifies errors of opening a node: the configuration, the model, or a device.
// The kind is not part of an error's text; cmd/moeserve turns it into the exit code.
//
//	return fault.Of(fault.ErrModel, err)
//	errors.Is(err, fault.ErrModel)
package fault
