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
	// Capacity of its memory; Free, what could be allocated now, may be under 0 where
	// more was promised than there is; Other, what others hold. In bytes.
	Capacity, Free, OtherProcesses int64
	// Utilization of its processors and Bandwidth of its memory in use, each from 0
	// to 1; 0 where the monitor cannot tell.
	Utilization, Bandwidth float64
	// Health is why the peer must not be used; nil where it may.
	Health error
}

// Monitor reads peers. Read is called by one goroutine at a time, at each Tick, and
// should take microseconds. An error means that there is no reading, which is no
// verdict on the peer: it gets no new slabs until there is one.
type Monitor interface {
	Read(peer device.Space) (Reading, error)
}

// MachineMonitor reads what a device.Machine tells: the account of memory, and
// whether the device still answers. It does not know utilization and bandwidth.
type MachineMonitor struct {
	machine device.Machine
	// probes are streams that nothing is ever enqueued on: they say at once whether
	// their device is lost.
	probes map[device.Space]device.Stream
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
	u, err := mm.machine.Usage(peer)
	if err != nil {
		return Reading{}, err
	}
	s, ok := mm.probes[peer]
	if !ok {
		return Reading{}, fmt.Errorf("harvest: %s is not monitored", peer)
	}
	return Reading{Capacity: u.Capacity, Free: u.Free(), OtherProcesses: u.OtherProcesses, Health: s.Recover(background)}, nil
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
