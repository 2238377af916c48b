package harvest

import (
	"context"
	"errors"
	"fmt"

	"github.com/moeserve/moeserve/device"
)

var background = context.Background()

// Reading is the state of a peer at one moment.
type Reading struct {
	// Capacity of its memory; Free: what could be allocated now, negative if memory is
	// overcommitted; OtherProcesses: what other processes use. In bytes.
	Capacity, Free, OtherProcesses int64
	// Utilization of its processors, and of its memory bandwidth by others than this runtime's
	// clients, each from 0 to 1; 0 if unknown.
	Utilization, Bandwidth float64
	// Health is why the peer must not be used; nil if it may.
	Health error
}

// Monitor reads peers. Read is called by one goroutine at a time, at each Tick, and
// should take microseconds. An error means that there is no reading: the peer gets no new
// slabs until there is one. It makes the peer unhealthy only if it wraps device.ErrLost, or
// if the Reading returned with it has a Health.
type Monitor interface {
	Read(peer device.Space) (Reading, error)
}

// MachineMonitor reads a device.Machine: memory usage, and whether the device still
// responds. Utilization and bandwidth it knows only of emulated machines.
type MachineMonitor struct {
	machine device.Machine
	// probes are streams without work: their Recover reports at once whether the device
	// is lost.
	probes map[device.Space]device.Stream
}

// loaded is a machine that knows the share of a memory's bandwidth that other processes use.
type loaded interface {
	OtherBandwidth(device.Space) float64
}

// NewMachineMonitor makes a monitor of the peers, to be closed by its owner.
func NewMachineMonitor(m device.Machine, peers []device.Space) (*MachineMonitor, error) {
	mm := &MachineMonitor{machine: m, probes: map[device.Space]device.Stream{}}
	for _, p := range peers {
		s, err := m.NewStream(p, device.StreamOptions{Name: "harvest probe " + p.String()})
		if err != nil {
			return nil, errors.Join(fmt.Errorf("harvest: monitor %s: %w", p, err), mm.Close())
		}
		mm.probes[p] = s
	}
	return mm, nil
}

// Read implements Monitor.
func (mm *MachineMonitor) Read(peer device.Space) (Reading, error) {
	s, ok := mm.probes[peer]
	if !ok {
		return Reading{}, fmt.Errorf("harvest: %s is not monitored", peer)
	}
	u, err := mm.machine.Usage(peer)
	r := Reading{Capacity: u.Capacity, Free: u.Free(), OtherProcesses: u.OtherProcesses, Health: s.Recover(background)}
	if l, ok := mm.machine.(loaded); ok {
		r.Bandwidth = l.OtherBandwidth(peer)
	}
	return r, err
}

// Close releases the streams.
func (mm *MachineMonitor) Close() error {
	var errs []error
	for _, s := range mm.probes {
		errs = append(errs, s.Close())
	}
	mm.probes = nil
	return errors.Join(errs...)
}
