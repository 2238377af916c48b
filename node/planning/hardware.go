package planning

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/planner"
	"github.com/moeserve/moeserve/untrusted"
)

// Rates that are assumed of devices without known ones: those of a processor that does the
// arithmetic in their place, in bytes/s and flop/s.
const (
	assumedMemory = 10e9
	assumedFlops  = 50e9
	assumedLink   = 5e9
	// unlimited stands for rates of emulated devices that nothing limits.
	unlimited = 1e18
)

// Machine is the facts that the planner's view of a machine follows from.
type Machine struct {
	Topology *device.Topology
	// Space is the memory of the GPU that computes, Peers those that may be borrowed from.
	Space device.Space
	Peers []device.Space
	// Relays are GPUs over whose links copies from the host go, too.
	Relays []device.Space
	// Real: the devices are GPUs. Others are Timed where they keep to the topology's rates.
	Real, Timed bool
}

// Facts of a machine.
func Facts(m device.Machine, space device.Space, peers []device.Space) Machine {
	c := m.Capabilities()
	return Machine{Topology: m.Topology(), Space: space, Peers: peers, Real: !c.Emulated, Timed: c.Timed}
}

// timed reports whether emulated devices keep to their rates, and have some.
func (m Machine) timed() bool {
	gpu, _ := m.Topology.Info(m.Space)
	path, _ := m.Topology.Path(device.Host, m.Space)
	return m.Timed && (gpu.FlopsPerSecond > 0 || gpu.BytesPerSecond > 0 || path.BytesPerSecond > 0)
}

// Assumed is the source, in Hardware.Sources, of a rate that is not known.
const Assumed = "assumed"

// thisMachine is the source of a rate of the machine.
const thisMachine = "this machine"

// Assume is the machine as the planner sees it, without its memories: rates from the
// topology, what that lacks from the preset of the GPU's name, and what there is none of,
// assumed.
func (m Machine) Assume() planner.Hardware {
	gpu, _ := m.Topology.Info(m.Space)
	h, from := Preset(gpu)
	if from == "" {
		from = Assumed
		memory, flops, link := assumedMemory, assumedFlops, assumedLink
		if !m.Real && m.timed() {
			from, memory, flops, link = thisMachine, unlimited, unlimited, unlimited
		}
		h = planner.Hardware{
			GPUMemoryRate: memory, GPUFlops: flops, GPUAttentionFlops: flops,
			HostMemoryRate: memory, CPUFlops: flops, HostToGPU: []float64{link}, GPUToHost: link, PeerToGPU: link,
		}
	}
	h.Name, h.Sources = gpu.Name, map[string]string{}
	for _, key := range rateKeys {
		h.Sources[key] = from
	}
	if !m.Real {
		h.Compute = nil // of the profile's GPU, and emulated devices have their own rates
	} else if h.Compute != nil {
		h.Sources["compute"] = from
	}
	take := func(key string, to *float64, rate float64) {
		if rate > 0 {
			*to, h.Sources[key] = rate, thisMachine
		}
	}
	link := func(from, to device.Space) device.Path {
		path, _ := m.Topology.Path(from, to)
		return path
	}
	up := link(device.Host, m.Space)
	own := h.HostToGPU[0]
	take("host_to_gpu_bytes_per_s", &own, up.BytesPerSecond)
	m.takeHostRates(&h, own)
	take("gpu_to_host_bytes_per_s", &h.GPUToHost, link(m.Space, device.Host).BytesPerSecond)
	take("gpu_memory_bytes_per_s", &h.GPUMemoryRate, gpu.BytesPerSecond)
	take("gpu_flop_per_s", &h.GPUFlops, gpu.FlopsPerSecond)
	take("host_memory_bytes_per_s", &h.HostMemoryRate, m.Topology.Host.BytesPerSecond)
	take("cpu_flop_per_s", &h.CPUFlops, m.Topology.Host.FlopsPerSecond)
	if h.Sources["gpu_flop_per_s"] == thisMachine && !m.Real {
		take("gpu_attention_flop_per_s", &h.GPUAttentionFlops, gpu.FlopsPerSecond)
		h.GPULongAttentionFlops = 0 // as above
	}
	if h.GPULongAttentionFlops > 0 {
		h.Sources["gpu_long_attention_flop_per_s"] = from
	}
	take("host_copy_latency_s", &h.HostCopyLatency, up.Latency.Seconds())
	if near := append(slices.Clone(m.Peers), m.Relays...); len(near) > 0 {
		// All peers and relays share the wire into the GPU.
		path := link(near[0], m.Space)
		take("peer_to_gpu_bytes_per_s", &h.PeerToGPU, path.BytesPerSecond)
		take("peer_copy_latency_s", &h.PeerCopyLatency, path.Latency.Seconds())
		if h.PeerToGPU == 0 {
			// The profile is of a product without links to peers; this machine has some, over PCIe.
			h.PeerToGPU, h.Sources["peer_to_gpu_bytes_per_s"] = h.HostToGPU[0], Assumed
		}
	}
	return h
}

// takeHostRates sets the rates from the host: those of emulated links, and of GPUs what the profile's rise
// by with each path. own is the rate of the GPU's own link.
func (m Machine) takeHostRates(h *planner.Hardware, own float64) {
	profile := h.HostToGPU
	if !m.Real && h.Sources["host_to_gpu_bytes_per_s"] == thisMachine {
		h.HostToGPU = hostRates(m.Topology, m.Space, m.Relays)
		for i, rate := range h.HostToGPU {
			if h.HostToGPU[i] = max(own, rate); rate == 0 {
				h.HostToGPU[i] = unlimited
			}
		}
		return
	}
	h.HostToGPU = []float64{own}
	for i := range m.Relays {
		h.HostToGPU = append(h.HostToGPU, own*profile[min(i+1, len(profile)-1)]/profile[0])
	}
}

// Known is the machine as the planner sees it: the specification of emulated devices or,
// of real GPUs, the preset of the same name. It returns false where emulated devices run as
// fast as they can, and where there is no such preset.
func (m Machine) Known() (planner.Hardware, bool) {
	top := m.Topology
	gpu, _ := top.Info(m.Space)
	if m.Real {
		h, from := Preset(gpu)
		if from != "" {
			m.takeHostRates(&h, h.HostToGPU[0])
		}
		return h, from != ""
	}
	if !m.Timed {
		return planner.Hardware{}, false
	}
	limit := func(rate float64) float64 {
		if rate == 0 {
			return unlimited
		}
		return rate
	}
	h := planner.Hardware{
		Name: gpu.Name, GPUMemory: gpu.MemoryBytes, GPUMemoryRate: limit(gpu.BytesPerSecond),
		GPUFlops: limit(gpu.FlopsPerSecond), GPUAttentionFlops: limit(gpu.FlopsPerSecond),
		HostMemory: top.Host.MemoryBytes, HostMemoryRate: limit(top.Host.BytesPerSecond), CPUFlops: limit(top.Host.FlopsPerSecond),
	}
	from, back := top.Paths[device.Pair{From: device.Host, To: m.Space}], top.Paths[device.Pair{From: m.Space, To: device.Host}]
	h.HostCopyLatency = from.Latency.Seconds()
	for _, rate := range hostRates(top, m.Space, m.Relays) {
		h.HostToGPU = append(h.HostToGPU, limit(rate))
	}
	h.GPUToHost = limit(back.BytesPerSecond)
	for i := range top.GPUs {
		p, err := top.Path(device.HBM(i), m.Space)
		if device.HBM(i) == m.Space || err != nil {
			continue
		}
		h.PeerMemory += top.GPUs[i].MemoryBytes
		// All peers share the wire into the GPU.
		h.PeerToGPU, h.PeerCopyLatency = limit(p.BytesPerSecond), p.Latency.Seconds()
	}
	return h, true
}

// rateKeys are the keys of planner.Hardware that are not sizes.
var rateKeys = []string{
	"gpu_memory_bytes_per_s", "gpu_flop_per_s", "gpu_attention_flop_per_s", "host_memory_bytes_per_s", "cpu_flop_per_s",
	"host_to_gpu_bytes_per_s", "gpu_to_host_bytes_per_s", "host_copy_latency_s", "round_trip_s", "peer_to_gpu_bytes_per_s", "peer_copy_latency_s",
}

// Preset finds the profile of a GPU by its name and, of those of one product, by its
// memory; the name is empty where there is none.
func Preset(gpu device.Info) (planner.Hardware, string) {
	var best planner.Hardware
	name := ""
	off := func(h planner.Hardware) float64 { return math.Abs(float64(h.GPUMemory - gpu.MemoryBytes)) }
	for _, profile := range configs.HardwareOf(gpu.Name) {
		if h, err := planner.HardwarePreset(profile); err == nil && (name == "" || off(h) < off(best)) {
			best, name = h, "preset "+profile
		}
	}
	return best, name
}

// LoadHardware reads a profile by any name that configs.FindHardware knows, or a JSON file
// with the keys of planner.Hardware. Of a file and a profile of one name the file counts,
// unless it is the profile's own name.
func LoadHardware(name string) (planner.Hardware, error) {
	if _, ok := configs.Hardware(name); ok {
		return planner.HardwarePreset(name)
	}
	data, err := untrusted.ReadFile(name, untrusted.MaxSettings)
	if errors.Is(err, fs.ErrNotExist) || isDirectory(name) {
		if strings.EqualFold(filepath.Ext(name), ".json") {
			return planner.Hardware{}, fmt.Errorf("there is no file %q: give a JSON file that describes a machine, or one of %s", name, strings.Join(configs.HardwareNames(), ", "))
		}
		found, err := configs.FindHardware(name)
		if err != nil {
			return planner.Hardware{}, err
		}
		return planner.HardwarePreset(found)
	}
	if err != nil {
		return planner.Hardware{}, fmt.Errorf("read hardware: %w", err)
	}
	h, err := planner.ParseHardware(data)
	if err != nil && !json.Valid(data) {
		return h, fmt.Errorf("%s: %w; give a JSON file that describes a machine, as bench transfer --calibrate writes it", name, err)
	}
	if err != nil {
		return h, fmt.Errorf("%s: %w", name, err)
	}
	return h, nil
}

func isDirectory(name string) bool {
	info, err := os.Stat(name)
	return err == nil && info.IsDir()
}
