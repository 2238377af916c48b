package cpu

import "github.com/moeserve/moeserve/device"

// Ceilings is what the machine gives to all threads of a backend, measured with
// the backend's instructions, or with the machine's best where they are Go's.
type Ceilings struct {
	backend      *Backend
	read         func([]byte)
	multiplyAdds func(rounds int)
	lanes        int
}

// NewCeilings returns the ceilings of b's threads, or nil where the machine has
// no instruction set that they are measured with.
func NewCeilings(b *Backend) *Ceilings {
	set := b.set
	if set.isa == Generic {
		set = available()[0]
	}
	switch set.isa {
	case AVX512:
		return &Ceilings{b, readAVX512, multiplyAddsAVX512, set.lanes}
	case AVX2:
		return &Ceilings{b, readAVX2, multiplyAddsAVX2, set.lanes}
	}
	return nil
}

// Read loads n bytes at address a once: a multiple of 512 times the threads.
func (c *Ceilings) Read(a device.Addr, n int) {
	each := n / c.backend.threads
	c.backend.parallel(c.backend.threads, func(part int) {
		c.read(at[byte](a+device.Addr(part*each), each))
	})
}

// MultiplyAdds carries out fused multiply-adds that do not depend on each other
// nor on memory, and returns how many floating-point operations these were.
func (c *Ceilings) MultiplyAdds() float64 {
	const rounds, chains = 1 << 21, 12
	c.backend.parallel(c.backend.threads, func(int) { c.multiplyAdds(rounds) })
	return 2 * chains * rounds * float64(c.lanes) * float64(c.backend.threads)
}
