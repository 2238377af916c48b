package planning

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"slices"
	"strings"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/planner"
)

// Rates that are assumed of devices of which nobody knows any: those of a processor
// that does the arithmetic in their place, in bytes/s and flop/s.
const (
	assumedMemory = 10e9
	assumedFlops  = 50e9
	assumedLink   = 5e9
	// unlimited stands for rates of emulated devices that nothing limits.
	unlimited = 1e18
)

// Machine is what the planner's view of a machine follows from.
type Machine struct {
	Topology *device.Topology
	// Space is the memory of the GPU that computes, Peers those that may be borrowed from.
	Space device.Space
	Peers []device.Space
	// Real: the devices are GPUs. Others are Timed where they keep to the topology's rates.
	Real, Timed bool
}

// Facts of a machine.
func Facts(m device.Machine, space device.Space, peers []device.Space) Machine {
	c := m.Capabilities()
	return Machine{Topology: m.Topology(), Space: space, Peers: peers, Real: !c.Emulated, Timed: c.Timed}
}

// timed says whether emulated devices keep to their rates, and have some.
func (m Machine) timed() bool {
	gpu, _ := m.Topology.Info(m.Space)
	path, _ := m.Topology.Path(device.Host, m.Space)
	return m.Timed && (gpu.FlopsPerSecond > 0 || gpu.BytesPerSecond > 0 || path.BytesPerSecond > 0)
}

// Assumed is what Hardware.Sources says of a rate that nobody knows.
const Assumed = "assumed"

// thisMachine is what Hardware.Sources says of a rate of the machine.
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
	take("host_to_gpu_bytes_per_s", &h.HostToGPU[0], up.BytesPerSecond)
	h.HostToGPU = h.HostToGPU[:1]
	take("gpu_to_host_bytes_per_s", &h.GPUToHost, link(m.Space, device.Host).BytesPerSecond)
	take("gpu_memory_bytes_per_s", &h.GPUMemoryRate, gpu.BytesPerSecond)
	take("gpu_flop_per_s", &h.GPUFlops, gpu.FlopsPerSecond)
	take("host_memory_bytes_per_s", &h.HostMemoryRate, m.Topology.Host.BytesPerSecond)
	take("cpu_flop_per_s", &h.CPUFlops, m.Topology.Host.FlopsPerSecond)
	if h.Sources["gpu_flop_per_s"] == thisMachine && !m.Real {
		take("gpu_attention_flop_per_s", &h.GPUAttentionFlops, gpu.FlopsPerSecond)
	}
	take("host_copy_latency_s", &h.HostCopyLatency, up.Latency.Seconds())
	if len(m.Peers) > 0 {
		// All peers share the wire into the GPU.
		path := link(m.Peers[0], m.Space)
		take("peer_to_gpu_bytes_per_s", &h.PeerToGPU, path.BytesPerSecond)
		take("peer_copy_latency_s", &h.PeerCopyLatency, path.Latency.Seconds())
	}
	return h
}

// Known is the machine as the planner sees it: what emulated devices were told to be, or,
// of real GPUs, the preset of the same name. It says false where emulated devices run as
// fast as they can, and where there is no such preset.
func (m Machine) Known() (planner.Hardware, bool) {
	top := m.Topology
	gpu, _ := top.Info(m.Space)
	if m.Real {
		h, from := Preset(gpu)
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
	h.HostToGPU, h.HostCopyLatency = []float64{limit(from.BytesPerSecond)}, from.Latency.Seconds()
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

// Preset finds the preset of a GPU by its name and, of those of one name, by its
// memory; the name is empty where there is none.
func Preset(gpu device.Info) (planner.Hardware, string) {
	var best planner.Hardware
	name := ""
	words := strings.FieldsFunc(strings.ToLower(gpu.Name), func(r rune) bool { return r == ' ' || r == '-' })
	off := func(h planner.Hardware) float64 { return math.Abs(float64(h.GPUMemory - gpu.MemoryBytes)) }
	for _, preset := range configs.HardwareNames() {
		product, _, _ := strings.Cut(preset, "-")
		h, err := planner.HardwarePreset(preset)
		if err == nil && slices.Contains(words, product) && (name == "" || off(h) < off(best)) {
			best, name = h, "preset "+preset
		}
	}
	return best, name
}

// LoadHardware reads a preset, or a JSON file with the keys of planner.Hardware.
func LoadHardware(name string) (planner.Hardware, error) {
	if _, ok := configs.Hardware(name); ok {
		return planner.HardwarePreset(name)
	}
	data, err := os.ReadFile(name)
	if err != nil {
		return planner.Hardware{}, fmt.Errorf("there is no hardware %q: give one of %s, or a JSON file that describes a machine", name, strings.Join(configs.HardwareNames(), ", "))
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
