package device

import (
	"fmt"
	"time"
)

// Topology is the devices of a machine and the links between their memories.
type Topology struct {
	// Host is the host's memory; its FlopsPerSecond are those of the CPU.
	Host Info
	// GPUs, in the machine's order.
	GPUs []Info
	// Links, in no particular order; several paths may share a link.
	Links []Link
	// Paths has the direct path of each ordered pair of spaces that is connected.
	Paths map[Pair]Path
}

// Pair is an ordered pair of memory spaces.
type Pair struct{ From, To Space }

// Info describes one memory space and its processor.
type Info struct {
	// Name is the product name: "NVIDIA H200", "emulated".
	Name string
	// UUID identifies the device across processes; may be empty.
	UUID string
	// MemoryBytes is the capacity.
	MemoryBytes int64
	// FlopsPerSecond is the dense 16-bit tensor-core rate, BytesPerSecond the memory bandwidth;
	// 0 if unknown (an emulated device without a compute model).
	FlopsPerSecond, BytesPerSecond float64
	// Multiprocessors is the number of SMs, ComputeCapability is major*10+minor; 0 if not
	// applicable.
	Multiprocessors, ComputeCapability int
	// NUMANode of the device, -1 if unknown.
	NUMANode int
}

// Link is one physical link, or one direction of it, whose bandwidth its users share.
type Link struct {
	Name string
	// BytesPerSecond is the total bandwidth of all users; 0: unlimited.
	BytesPerSecond float64
}

// Path is the route of a copy from one space to another.
type Path struct {
	// Links are indices into Topology.Links; a copy uses all of them at once.
	Links []int
	// BytesPerSecond is the bandwidth of one large copy alone; 0: unlimited.
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
