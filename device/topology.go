package device

import (
	"fmt"
	"time"
)

// Topology says what devices there are and what connects their memories.
type Topology struct {
	// Host is the host's memory; its FlopsPerSecond are those of the CPU.
	Host Info
	// GPUs in the machine's order.
	GPUs []Info
	// Links in no particular order; a link may be shared by several paths.
	Links []Link
	// Paths holds the direct path of each ordered pair of spaces that has one.
	Paths map[Pair]Path
}

// Pair is an ordered pair of memory spaces.
type Pair struct{ From, To Space }

// Info describes one memory space and the processor beside it.
type Info struct {
	// Name is the product's: "NVIDIA H200", "emulated".
	Name string
	// UUID tells one device from another across processes; may be empty.
	UUID string
	// MemoryBytes is the capacity.
	MemoryBytes int64
	// FlopsPerSecond is the dense 16-bit product rate, BytesPerSecond the memory
	// bandwidth; 0 where unknown (an emulated device without a compute model).
	FlopsPerSecond, BytesPerSecond float64
	// Multiprocessors, and the compute capability as major*10+minor; 0 for none.
	Multiprocessors, ComputeCapability int
	// NUMANode beside the device, -1 where unknown.
	NUMANode int
}

// Link is one wire, or one direction of it, whose rate its users share.
type Link struct {
	Name string
	// BytesPerSecond is the rate of all users together; 0: not limited.
	BytesPerSecond float64
	// Latency of one copy over it.
	Latency time.Duration
}

// Path is how a copy goes from one space to another.
type Path struct {
	// Links are indices into Topology.Links, all of which the copy uses at once.
	Links []int
	// BytesPerSecond is the rate of one large copy alone; 0: not limited.
	BytesPerSecond float64
	// Latency of one copy.
	Latency time.Duration
}

// Path returns the direct path, or an error that wraps ErrUnreachable.
func (t *Topology) Path(from, to Space) (Path, error) {
	p, ok := t.Paths[Pair{from, to}]
	if !ok {
		return Path{}, fmt.Errorf("device: from %s to %s: %w", from, to, ErrUnreachable)
	}
	return p, nil
}

// Info returns the description of a space, or false if there is no such space.
func (t *Topology) Info(s Space) (Info, bool) {
	i, ok := s.GPU()
	switch {
	case !ok && s == Host:
		return t.Host, true
	case ok && i < len(t.GPUs):
		return t.GPUs[i], true
	}
	return Info{}, false
}

// Spaces lists Host and every GPU's memory.
func (t *Topology) Spaces() []Space {
	s := []Space{Host}
	for i := range t.GPUs {
		s = append(s, HBM(i))
	}
	return s
}
