//go:build cuda

package devices

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/cuda/nvml"
	"github.com/moeserve/moeserve/harvest"
)

// sampling is the interval at which utilization and health of peers are read. The driver itself
// averages utilization over up to a second.
const sampling = 250 * time.Millisecond

// monitor reads the memory usage of peers from the machine, and their utilization and health
// from NVML, in a goroutine of its own since that takes milliseconds.
type monitor struct {
	*harvest.MachineMonitor
	log    *slog.Logger
	reader *nvml.Reader
	gpus   map[device.Space]interface{ Read() (nvml.Reading, error) }
	own    ownLoad
	now    func() time.Duration
	stop   context.CancelFunc
	loops  sync.WaitGroup

	mu    sync.Mutex
	loads map[device.Space]load
	// fallen: a GPU, often one that the driver cannot name, fell off the bus: one of those that
	// fail to be read from then on.
	fallen bool
}

// load is NVML's part of a reading.
type load struct {
	utilization, bandwidth float64
	health                 error
}

// OpenMonitor opens the monitoring of peers for harvest, to be closed with the devices; nil
// selects harvest's own monitor. own is the total duration of own copies from and to a peer
// so far, which is not other processes' load.
func (d *Devices) OpenMonitor(peers []device.Space, own func(device.Space) time.Duration) (harvest.Monitor, error) {
	if d.Machine.Capabilities().Emulated {
		return nil, nil
	}
	r, err := nvml.Open()
	if err != nil {
		d.log.Warn("NVML unavailable; no utilization or health of peers", "err", err)
		return nil, nil
	}
	m := &monitor{
		log: d.log, reader: r, gpus: map[device.Space]interface{ Read() (nvml.Reading, error) }{},
		loads: map[device.Space]load{}, own: ownLoad{busy: own}, now: d.Machine.Now,
	}
	var gpus []nvml.Device
	for _, p := range peers {
		info, _ := d.Machine.Topology().Info(p)
		gpu, err := r.Find(info.UUID)
		if err != nil {
			d.log.Warn("GPU not found by NVML; no utilization or health of this peer", "device", p.String(), "err", err)
			continue
		}
		m.gpus[p] = gpu
		gpus = append(gpus, gpu)
	}
	if m.MachineMonitor, err = harvest.NewMachineMonitor(d.Machine, peers); err != nil {
		return nil, errors.Join(err, r.Close())
	}
	m.sample()
	ctx, stop := context.WithCancel(context.Background())
	m.stop = stop
	m.loops.Go(func() {
		for tick := time.Tick(sampling); ; {
			select {
			case <-ctx.Done():
				return
			case <-tick:
				m.sample()
			}
		}
	})
	m.loops.Go(func() {
		if err := r.WatchXID(ctx, gpus, m.fault); err != nil && ctx.Err() == nil {
			d.log.Warn("XID error monitoring unavailable", "err", err)
		}
	})
	d.closers = append(d.closers, m.Close)
	return m, nil
}

// sample reads NVML.
func (m *monitor) sample() {
	for p, d := range m.gpus {
		r, err := d.Read()
		own := 0.0
		if m.own.busy != nil {
			own = m.own.fraction(p, m.now())
		}
		m.mu.Lock()
		switch l := m.loads[p]; {
		case err == nil:
			l = load{utilization: share(r.ComputeLoad), bandwidth: max(share(r.MemoryLoad)-own, 0)}
			if problem := r.Health.Problem(); problem != "" {
				l.health = errors.New(problem)
			}
			m.loads[p] = l
		case m.fallen:
			l.health = fmt.Errorf("the GPU fell off the bus: %w", err)
			m.loads[p] = l
		}
		m.mu.Unlock()
	}
}

// share converts a percentage to a fraction; 0 if unknown.
func share(percent *int) float64 {
	if percent == nil {
		return 0
	}
	return float64(*percent) / 100
}

// fellOff is the XID of a GPU that fell off the bus.
const fellOff = 79

// fault handles critical errors (XIDs). Most concern programs of other processes; memory errors
// show in the device's health too.
func (m *monitor) fault(x nvml.XID) {
	m.log.Warn("XID error reported by the driver", "uuid", x.UUID, "xid", x.Code)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.fallen = m.fallen || x.Code == fellOff
}

// Read implements harvest.Monitor.
func (m *monitor) Read(peer device.Space) (harvest.Reading, error) {
	r, err := m.MachineMonitor.Read(peer)
	m.mu.Lock()
	defer m.mu.Unlock()
	l := m.loads[peer]
	r.Utilization, r.Bandwidth = l.utilization, l.bandwidth
	if r.Health == nil {
		r.Health = l.health
	}
	return r, err
}

// Close ends the monitoring.
func (m *monitor) Close() error {
	m.stop()
	m.loops.Wait()
	return errors.Join(m.MachineMonitor.Close(), m.reader.Close())
}
