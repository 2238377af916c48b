//go:build !amd64

package cpu

import "github.com/moeserve/moeserve/device"

// Ceilings is what the machine gives: not measured here.
type Ceilings struct{}

// NewCeilings returns nil.
func NewCeilings(*Backend) *Ceilings { return nil }

// Read is never called.
func (*Ceilings) Read(device.Addr, int) {}

// MultiplyAdds is never called.
func (*Ceilings) MultiplyAdds() float64 { return 0 }
