//go:build cuda

package cuda

/*
#include <cuda.h>
*/
import "C"

import (
	"bufio"
	"fmt"
	"io/fs"
	"os"
	"path"
	"strconv"
	"strings"
	"time"

	"gorgonia.org/cu"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/cuda/nvml"
)

// facts are the attributes of one device.
type facts struct {
	name, uuid, bus string
	memoryBytes     int64
	// capability is major*10+minor.
	capability, multiprocessors int
	// clockHz and memoryClockHz are the maximum clocks, memoryBits the memory bus width.
	clockHz, memoryClockHz float64
	memoryBits             int
	// sharedBytes is the maximum shared memory of a block, with opt-in.
	sharedBytes              int
	virtualMemory, registers bool
	numa                     int
	links                    nvml.Links
}

func readFacts(d cu.Device) (facts, error) {
	var f facts
	failed := func(what string, err error) (facts, error) {
		return facts{}, failure("open", device.Host, code(err), fmt.Sprintf("%s of CUDA device %d", what, int(d)))
	}
	var err error
	if f.name, err = d.Name(); err != nil {
		return failed("name", err)
	}
	id, err := d.UUID()
	if err != nil {
		return failed("UUID", err)
	}
	f.uuid = id.String()
	if f.memoryBytes, err = d.TotalMem(); err != nil {
		return failed("memory", err)
	}
	attribute := func(a cu.DeviceAttribute) int {
		var v int
		if err == nil {
			v, err = d.Attribute(a)
		}
		return v
	}
	f.capability = attribute(cu.ComputeCapabilityMajor)*10 + attribute(cu.ComputeCapabilityMinor)
	f.multiprocessors = attribute(cu.MultiprocessorCount)
	f.clockHz = 1e3 * float64(attribute(cu.ClockRate))
	f.memoryClockHz = 1e3 * float64(attribute(cu.MemoryClockRate))
	f.memoryBits = attribute(cu.GlobalMemoryBusWidth)
	f.sharedBytes = attribute(C.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
	f.virtualMemory = attribute(C.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) != 0
	f.registers = attribute(C.CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM) != 0
	f.bus = fmt.Sprintf("%04x:%02x:%02x.0", attribute(cu.PciDomainID), attribute(cu.PciBusID), attribute(cu.PciDeviceID))
	if err != nil {
		return failed("attributes", err)
	}
	f.numa = numaNode(os.DirFS("/"), f.bus)
	return f, nil
}

// numaNode returns the NUMA node of the device at a bus address, -1 if unknown.
func numaNode(root fs.FS, bus string) int {
	text, err := fs.ReadFile(root, path.Join("sys/bus/pci/devices", strings.ToLower(bus), "numa_node"))
	if err != nil {
		return -1
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		return -1
	}
	return n
}

// describe reads the links of the devices and returns the topology of the machine.
func (m *Machine) describe(reach [][]bool) *device.Topology {
	all := make([]facts, len(m.gpus))
	r, err := nvml.Open()
	if err != nil {
		m.o.Log.Info("link rates unknown: NVML unavailable", "err", err)
	} else {
		defer r.Close()
	}
	for i, g := range m.gpus {
		all[i] = g.facts
		if r == nil {
			continue
		}
		d, err := r.Find(g.facts.uuid)
		if err != nil {
			m.o.Log.Info("link rates unknown: GPU not found by NVML", "device", g.space.String(), "err", err)
			continue
		}
		all[i].links = d.Links()
	}
	total := m.o.HostBytes
	if total <= 0 {
		total, _ = hostMemory(os.DirFS("/"))
	}
	return layout(device.Info{Name: processorName(), MemoryBytes: total, NUMANode: -1}, all, reach)
}

// processorName returns the name of the host processor.
func processorName() string {
	f, err := os.Open("/proc/cpuinfo")
	if err != nil {
		return "host"
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		if key, value, ok := strings.Cut(s.Text(), ":"); ok && strings.TrimSpace(key) == "model name" {
			return strings.TrimSpace(value)
		}
	}
	return "host"
}

// attainable is the fraction of a link's nominal rate that one large copy attains: on an
// H200, 55 of 63 GB/s over PCIe and 390 of 450 GB/s over NVLink.
const attainable = 0.87

// copyLatency is the time from enqueueing a small copy until the host detects its
// completion, on an H200.
const copyLatency = 9 * time.Microsecond

// pcieRate returns the rate of one direction of a PCIe link, in bytes per second; 0 if
// unknown.
func pcieRate(generation, width int) float64 {
	perLane := map[int]float64{1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
	return perLane[generation] * float64(width) * attainable
}

// nvlinkRate returns the rate of one direction of an NVLink, in bytes per second.
func nvlinkRate(version int) float64 {
	rate := map[int]float64{1: 20e9, 2: 25e9, 3: 25e9, 4: 25e9, 5: 50e9}[version]
	if rate == 0 {
		rate = 25e9
	}
	return rate * attainable
}

// flopsPerClock returns the dense 16-bit multiplications and additions of one
// multiprocessor per clock, with float32 accumulation; 0 if unknown.
func flopsPerClock(capability int) float64 {
	switch capability {
	case 80:
		return 2048
	case 86, 87, 89, 120, 121:
		return 1024
	case 90:
		return 4096
	case 100, 101, 103, 110:
		return 8192
	}
	return 0
}

func (f *facts) info() device.Info {
	return device.Info{
		Name: f.name, UUID: f.uuid, MemoryBytes: f.memoryBytes,
		FlopsPerSecond: flopsPerClock(f.capability) * f.clockHz * float64(f.multiprocessors),
		// Both edges of the clock carry data.
		BytesPerSecond:  2 * f.memoryClockHz * float64(f.memoryBits) / 8,
		Multiprocessors: f.multiprocessors, ComputeCapability: f.capability, NUMANode: f.numa,
	}
}

// layout builds the topology: reach[i][j] reports whether GPU i can access the memory of
// GPU j.
func layout(host device.Info, gpus []facts, reach [][]bool) *device.Topology {
	t := &device.Topology{Host: host, Paths: map[device.Pair]device.Path{}}
	link := func(name string, rate float64) int {
		t.Links = append(t.Links, device.Link{Name: name, BytesPerSecond: rate})
		return len(t.Links) - 1
	}
	route := func(from, to device.Space, links ...int) {
		p := device.Path{Links: links, Latency: copyLatency}
		for _, l := range links {
			if r := t.Links[l].BytesPerSecond; r > 0 && (p.BytesPerSecond == 0 || r < p.BytesPerSecond) {
				p.BytesPerSecond = r
			}
		}
		t.Paths[device.Pair{From: from, To: to}] = p
	}
	type ports struct{ fromHost, toHost, fromPeers, toPeers int }
	at := make([]ports, len(gpus))
	route(device.Host, device.Host, link("host memory", host.BytesPerSecond/2))
	for i := range gpus {
		f, name, space := &gpus[i], device.HBM(i).String(), device.HBM(i)
		t.GPUs = append(t.GPUs, f.info())
		pcie := pcieRate(f.links.PCIeGeneration, f.links.PCIeWidth)
		at[i] = ports{fromHost: link("host to "+name, pcie), toHost: link(name+" to host", pcie)}
		route(device.Host, space, at[i].fromHost)
		route(space, device.Host, at[i].toHost)
		// A copy within one memory both reads and writes it, hence half the rate.
		route(space, space, link(name+" memory", t.GPUs[i].BytesPerSecond/2))
		if through := switched(f.links); through > 0 {
			at[i].fromPeers, at[i].toPeers = link("switch to "+name, through), link(name+" to switch", through)
		}
	}
	for i := range gpus {
		for j := range gpus {
			if i == j || !reach[i][j] || !reach[j][i] {
				continue
			}
			from, to := device.HBM(i), device.HBM(j)
			switch direct := wired(gpus[i].links, gpus[j].bus); {
			case direct > 0:
				route(from, to, link(fmt.Sprintf("%s to %s", from, to), direct))
			case at[i].toPeers > 0 && at[j].fromPeers > 0:
				route(from, to, at[i].toPeers, at[j].fromPeers)
			default:
				route(from, to, at[i].toHost, at[j].fromHost)
			}
		}
	}
	return t
}

// switched returns the total rate of a device's links to switches.
func switched(l nvml.Links) float64 {
	rate := 0.0
	for _, n := range l.NVLinks {
		if n.Switch {
			rate += nvlinkRate(n.Version)
		}
	}
	return rate
}

// wired returns the total rate of a device's links to the GPU at a bus address.
// ---
func wired(l nvml.Links, bus string) float64 {
	rate := 0.0
	for _, n := range l.NVLinks {
		if !n.Switch && n.Bus != "" && strings.EqualFold(n.Bus, bus) {
			rate += nvlinkRate(n.Version)
		}
	}
	return rate
}
