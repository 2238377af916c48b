//go:build cuda

package nvml

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	lib "github.com/NVIDIA/go-nvml/pkg/nvml"
)

// ErrUnavailable reports that this machine has no working NVML.
var ErrUnavailable = errors.New("NVML is not available")

// Error is a failed call of NVML.
type Error struct {
	// Op names the operation and the device.
	Op string
	// Code is NVML's return code.
	Code int
	// Name is NVML's text for Code.
	Name string
}

func (e *Error) Error() string { return fmt.Sprintf("nvml: %s: %s (%d)", e.Op, e.Name, e.Code) }

func failed(op string, r lib.Return) error {
	return &Error{Op: op, Code: int(r), Name: r.String()}
}

// Reader reads all devices of a machine. Its methods may be called from several
// goroutines.
type Reader struct {
	lib    lib.Interface
	driver string
}

// Open loads NVML. Its error wraps ErrUnavailable if NVML cannot be loaded.
func Open() (*Reader, error) { return New(lib.New()) }

// New is Open over a library of the caller's, or a mock.
func New(l lib.Interface) (*Reader, error) {
	if r := l.Init(); r != lib.SUCCESS {
		why := r.String()
		if r == lib.ERROR_LIBRARY_NOT_FOUND {
			why = "libnvidia-ml.so.1 is not there; it comes with the NVIDIA driver"
		}
		return nil, fmt.Errorf("nvml: %w: %s", ErrUnavailable, why)
	}
	driver, r := l.SystemGetDriverVersion()
	if r != lib.SUCCESS {
		driver = ""
	}
	return &Reader{lib: l, driver: driver}, nil
}

// Close shuts NVML down; its readers and devices must not be used afterwards.
func (r *Reader) Close() error {
	if c := r.lib.Shutdown(); c != lib.SUCCESS {
		return failed("shutdown", c)
	}
	return nil
}

// DriverVersion returns the driver's version, like "580.159.03"; empty if unknown.
func (r *Reader) DriverVersion() string { return r.driver }

// has reports whether the library exports a symbol. Older NVML libraries lack newer calls,
// and calling a missing one would end the process.
func (r *Reader) has(symbol string) bool { return r.lib.Extensions().LookupSymbol(symbol) == nil }

// Device is one GPU, or one MIG instance found by its UUID.
type Device struct {
	// UUID begins with "GPU-", or with "MIG-" for an instance.
	UUID string
	Name string
	// Bus is the PCI address, like "0000:0a:00.0"; empty where unknown.
	Bus string

	r *Reader
	d lib.Device
}

// Devices lists the GPUs in NVML's order: by bus address, unlike CUDA's ordinals.
func (r *Reader) Devices() ([]Device, error) {
	n, c := r.lib.DeviceGetCount()
	if c != lib.SUCCESS {
		return nil, failed("count devices", c)
	}
	var all []Device
	for i := range n {
		d, c := r.lib.DeviceGetHandleByIndex(i)
		if c != lib.SUCCESS {
			return nil, failed(fmt.Sprintf("open device %d", i), c)
		}
		dev, err := r.device(d)
		if err != nil {
			return nil, err
		}
		all = append(all, dev)
	}
	return all, nil
}

// Find returns the device of a UUID as CUDA spells it, with or without the prefix.
func (r *Reader) Find(uuid string) (Device, error) {
	names := []string{uuid}
	if !strings.HasPrefix(uuid, "GPU-") && !strings.HasPrefix(uuid, "MIG-") {
		names = []string{"GPU-" + uuid, "MIG-" + uuid}
	}
	c := lib.ERROR_NOT_FOUND
	for _, name := range names {
		var d lib.Device
		if d, c = r.lib.DeviceGetHandleByUUID(name); c == lib.SUCCESS {
			return r.device(d)
		}
	}
	return Device{}, failed("open device "+uuid, c)
}

func (r *Reader) device(d lib.Device) (Device, error) {
	dev := Device{r: r, d: d}
	var c lib.Return
	if dev.UUID, c = d.GetUUID(); c != lib.SUCCESS {
		return Device{}, failed("UUID of a device", c)
	}
	if dev.Name, c = d.GetName(); c != lib.SUCCESS {
		return Device{}, failed("name of "+dev.UUID, c)
	}
	if p, c := d.GetPciInfo(); c == lib.SUCCESS {
		dev.Bus = bus(p)
	}
	return dev, nil
}

func bus(p lib.PciInfo) string { return fmt.Sprintf("%04x:%02x:%02x.0", p.Domain, p.Bus, p.Device) }

// Reading is the state of a device at one moment.
type Reading struct {
	Memory Memory
	// Load in percent of the last sampling period (up to a second): of time in which
	// a kernel ran, and in which memory was read or written. Nil where unknown, as on
	// MIG instances.
	ComputeLoad, MemoryLoad *int
	Health                  Health
}

// Memory of a device, in bytes. Used is the memory of all processes. It excludes Reserved,
// the driver's own memory, which is 0 if the driver is too old to report it separately.
type Memory struct{ Total, Used, Free, Reserved int64 }

// Health of a device. Nil is unknown.
type Health struct {
	// UncorrectedECC counts errors since the driver was loaded. Any is a reason to stop using
	// the device.
	UncorrectedECC *int64
	// RowRemapPending reports that the next reset will remap failed rows, RowRemapFailed
	// that no spare rows are left.
	RowRemapPending, RowRemapFailed *bool
}

// Problem describes why the device should not be used; empty if no problem is known.
func (h Health) Problem() string {
	switch {
	case h.UncorrectedECC != nil && *h.UncorrectedECC > 0:
		return fmt.Sprintf("%d uncorrected memory errors since the driver was loaded", *h.UncorrectedECC)
	case h.RowRemapFailed != nil && *h.RowRemapFailed:
		return "memory failed and no spare rows are left"
	case h.RowRemapPending != nil && *h.RowRemapPending:
		return "memory failed; the device needs a reset to replace it"
	}
	return ""
}

// Read reads the device's state. Read fails only if the memory cannot be read; other values
// may be unknown.
func (d Device) Read() (Reading, error) {
	var out Reading
	if err := d.memory(&out.Memory); err != nil {
		return Reading{}, err
	}
	if u, c := d.d.GetUtilizationRates(); c == lib.SUCCESS {
		out.ComputeLoad, out.MemoryLoad = known(int(u.Gpu)), known(int(u.Memory))
	}
	out.Health = d.health()
	return out, nil
}

func known[T any](v T) *T { return &v }

func (d Device) memory(m *Memory) error {
	if d.r.has("nvmlDeviceGetMemoryInfo_v2") {
		if v, c := d.d.GetMemoryInfo_v2(); c == lib.SUCCESS {
			*m = Memory{Total: int64(v.Total), Used: int64(v.Used), Free: int64(v.Free), Reserved: int64(v.Reserved)}
			return nil
		}
	}
	v, c := d.d.GetMemoryInfo()
	if c != lib.SUCCESS {
		return failed("memory of "+d.UUID, c)
	}
	*m = Memory{Total: int64(v.Total), Used: int64(v.Used), Free: int64(v.Free)}
	return nil
}

func (d Device) health() Health {
	var h Health
	if n, c := d.d.GetTotalEccErrors(lib.MEMORY_ERROR_TYPE_UNCORRECTED, lib.VOLATILE_ECC); c == lib.SUCCESS {
		h.UncorrectedECC = known(int64(n))
	}
	if d.r.has("nvmlDeviceGetRemappedRows") {
		if _, _, pending, gone, c := d.d.GetRemappedRows(); c == lib.SUCCESS {
			h.RowRemapPending, h.RowRemapFailed = known(pending), known(gone)
		}
	}
	return h
}

// Links describes the links of a device.
type Links struct {
	// PCIe generation and width that device and slot can do together; 0 where
	// unknown. (The current ones drop while a device is idle.)
	PCIeGeneration, PCIeWidth int
	NVLinks                   []NVLink
}

// NVLink is one link that is up.
type NVLink struct {
	// Version of NVLink: 4 on Hopper.
	Version int
	// Switch reports that the other end is a switch, which connects to all GPUs behind
	// it; otherwise Bus is the PCI address of the GPU there, empty if unknown.
	Switch bool
	Bus    string
}

// Links reads the links of the device.
func (d Device) Links() Links {
	var out Links
	if g, c := d.d.GetMaxPcieLinkGeneration(); c == lib.SUCCESS {
		out.PCIeGeneration = g
	}
	if w, c := d.d.GetMaxPcieLinkWidth(); c == lib.SUCCESS {
		out.PCIeWidth = w
	}
	for i := range lib.NVLINK_MAX_LINKS {
		if up, c := d.d.GetNvLinkState(i); c != lib.SUCCESS || up != lib.FEATURE_ENABLED {
			continue
		}
		var l NVLink
		if v, c := d.d.GetNvLinkVersion(i); c == lib.SUCCESS {
			l.Version = int(v)
		}
		if d.r.has("nvmlDeviceGetNvLinkRemoteDeviceType") {
			if k, c := d.d.GetNvLinkRemoteDeviceType(i); c == lib.SUCCESS {
				l.Switch = k == lib.NVLINK_DEVICE_TYPE_SWITCH
			}
		}
		if p, c := d.d.GetNvLinkRemotePciInfo(i); c == lib.SUCCESS && !l.Switch {
			l.Bus = bus(p)
		}
		out.NVLinks = append(out.NVLinks, l)
	}
	return out
}

// MIG describes how a GPU is partitioned.
type MIG struct {
	// Enabled reports that MIG mode is on; the GPU then has no peer access.
	Enabled bool
	// Instances are the UUIDs of the partitions that a process can open.
	Instances []string
}

// MIG reads the partitioning; a device that has none is not partitioned.
func (d Device) MIG() (MIG, error) {
	mode, _, c := d.d.GetMigMode()
	switch c {
	case lib.SUCCESS:
	case lib.ERROR_NOT_SUPPORTED:
		return MIG{}, nil
	default:
		return MIG{}, failed("MIG mode of "+d.UUID, c)
	}
	if mode != lib.DEVICE_MIG_ENABLE {
		return MIG{}, nil
	}
	out := MIG{Enabled: true}
	n, c := d.d.GetMaxMigDeviceCount()
	if c != lib.SUCCESS {
		return MIG{}, failed("MIG instances of "+d.UUID, c)
	}
	for i := range n {
		instance, c := d.d.GetMigDeviceHandleByIndex(i)
		if c == lib.ERROR_NOT_FOUND {
			continue
		}
		if c != lib.SUCCESS {
			return MIG{}, failed(fmt.Sprintf("MIG instance %d of %s", i, d.UUID), c)
		}
		uuid, c := instance.GetUUID()
		if c != lib.SUCCESS {
			return MIG{}, failed(fmt.Sprintf("UUID of MIG instance %d of %s", i, d.UUID), c)
		}
		out.Instances = append(out.Instances, uuid)
	}
	return out, nil
}

// XID is a critical error that the driver reported for a device.
type XID struct {
	UUID string
	// Code is the driver's: 48 and 63 are memory errors, 79 a device that fell off the
	// bus.
	Code int
}

const watchPeriod = 200 * time.Millisecond

// WatchXID calls report for each critical error of the devices until ctx is done, and then
// returns ctx's error. It runs, and calls report, on the caller's goroutine.
func (r *Reader) WatchXID(ctx context.Context, devices []Device, report func(XID)) error {
	set, c := r.lib.EventSetCreate()
	if c != lib.SUCCESS {
		return failed("create an event set", c)
	}
	defer set.Free()
	for _, d := range devices {
		if c := d.d.RegisterEvents(lib.EventTypeXidCriticalError, set); c != lib.SUCCESS {
			return failed("watch Xid errors of "+d.UUID, c)
		}
	}
	for ctx.Err() == nil {
		e, c := set.Wait(uint32(watchPeriod.Milliseconds()))
		switch c {
		case lib.ERROR_TIMEOUT:
		case lib.SUCCESS:
			uuid, c := e.Device.GetUUID()
			if c != lib.SUCCESS {
				// A device that fell off the bus no longer reports its UUID.
				// ---
				uuid = "unknown"
			}
			report(XID{UUID: uuid, Code: int(e.EventData)})
		default:
			return failed("wait for Xid errors", c)
		}
	}
	return ctx.Err()
}
