package planner

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/untrusted"
)

// Hardware is a machine: the GPU that computes, its host, and the memory that it may
// borrow from peers. Rates are achieved ones; a datasheet's peaks overstate them.
type Hardware struct {
	Name string `json:"name"`

	// GPUMemory is in bytes; GPUMemoryRate is the bandwidth of a kernel's reads, in
	// bytes/s.
	GPUMemory     int64   `json:"gpu_memory_bytes"`
	GPUMemoryRate float64 `json:"gpu_memory_bytes_per_s"`
	// GPUFlops is the rate of dense 16-bit GEMMs, in flop/s, GPUAttentionFlops that of
	// attention.
	GPUFlops          float64 `json:"gpu_flop_per_s"`
	GPUAttentionFlops float64 `json:"gpu_attention_flop_per_s"`
	// GPULongAttentionFlops is the rate of attention where sequences have LongContext tokens or
	// more; 0: GPUAttentionFlops.
	GPULongAttentionFlops float64 `json:"gpu_long_attention_flop_per_s,omitempty"`

	// HostMemory is in bytes; HostMemoryRate is the bandwidth of all threads together,
	// in bytes/s.
	HostMemory     int64   `json:"host_memory_bytes"`
	HostMemoryRate float64 `json:"host_memory_bytes_per_s"`
	// CPUFlops is the rate of all cores, in flop/s.
	CPUFlops float64 `json:"cpu_flop_per_s"`
	// CPUAttentionRate is what attention on the CPU reads of the KV cache in decode steps, in bytes/s, and
	// CPUAttentionFlops its rate in prompts, in flop/s; 0: HostMemoryRate and CPUFlops.
	CPUAttentionRate  float64 `json:"cpu_attention_bytes_per_s,omitempty"`
	CPUAttentionFlops float64 `json:"cpu_attention_flop_per_s,omitempty"`

	// HostToGPU is the rate of copies from host memory over 1, 2, … paths, in
	// bytes/s. Paths after the first lead through peers.
	HostToGPU []float64 `json:"host_to_gpu_bytes_per_s"`
	// GPUToHost is the rate of copies to host memory, in bytes/s.
	GPUToHost float64 `json:"gpu_to_host_bytes_per_s"`
	// HostCopyLatency and PeerCopyLatency, in seconds, are added to the time of a copy's
	// bytes; queueing does not hide them.
	HostCopyLatency float64 `json:"host_copy_latency_s"`
	PeerCopyLatency float64 `json:"peer_copy_latency_s"`
	// RoundTrip is the time from a result on the GPU to the host's next command there, in
	// seconds.
	RoundTrip float64 `json:"round_trip_s"`

	// PeerMemory is the total that may be borrowed from peers, in bytes; 0: no peers.
	PeerMemory int64 `json:"peer_memory_bytes"`
	// PeerToGPU is the rate of copies from all peers together, in bytes/s.
	PeerToGPU float64 `json:"peer_to_gpu_bytes_per_s"`

	// HostReadRate and PeerReadRate are what kernels read of host and peer memory in place, in
	// bytes/s; 0: not measured.
	HostReadRate float64 `json:"host_kernel_read_bytes_per_s,omitempty"`
	PeerReadRate float64 `json:"peer_kernel_read_bytes_per_s,omitempty"`

	// HostLoadKernelBelow and the others are sizes of a block in bytes: below, a kernel on
	// HostLoadKernelBlocks thread blocks (0: one per multiprocessor) copies many scattered blocks
	// faster than the copy engines do; 0: it never does. Loads are copies to the GPU that
	// computes, stores copies from it. The transfer engine has the kernel copy KV blocks.
	HostLoadKernelBelow  int64 `json:"host_load_kernel_below_bytes,omitempty"`
	HostStoreKernelBelow int64 `json:"host_store_kernel_below_bytes,omitempty"`
	PeerLoadKernelBelow  int64 `json:"peer_load_kernel_below_bytes,omitempty"`
	PeerStoreKernelBelow int64 `json:"peer_store_kernel_below_bytes,omitempty"`

	HostLoadKernelBlocks  int `json:"host_load_kernel_thread_blocks,omitempty"`
	HostStoreKernelBlocks int `json:"host_store_kernel_thread_blocks,omitempty"`
	PeerLoadKernelBlocks  int `json:"peer_load_kernel_thread_blocks,omitempty"`
	PeerStoreKernelBlocks int `json:"peer_store_kernel_thread_blocks,omitempty"`

	// Multipath says how copies from and to the host use the links of several GPUs; nil: that was not
	// calibrated. HostToGPU has a rate for each number of its relays.
	Multipath *configs.Multipath `json:"multipath,omitempty"`

	// Compute is what the engine reaches on the GPU; nil: that was not measured, and steps take what
	// the rates above allow.
	Compute *Compute `json:"compute,omitempty"`

	// Sources has, by a field's key, where its number is from.
	Sources map[string]string `json:"sources,omitempty"`
}

// hardwareFields are the figures of a machine, by their keys.
var hardwareFields = []struct {
	key, unit string
	// optional figures may be missing or 0.
	optional bool
	// value is nil of what is a list or an object.
	value func(*Hardware) float64
}{
	{"gpu_memory_bytes", "bytes", false, func(h *Hardware) float64 { return float64(h.GPUMemory) }},
	{"gpu_memory_bytes_per_s", "bytes/s", false, func(h *Hardware) float64 { return h.GPUMemoryRate }},
	{"gpu_flop_per_s", "flop/s", false, func(h *Hardware) float64 { return h.GPUFlops }},
	{"gpu_attention_flop_per_s", "flop/s", false, func(h *Hardware) float64 { return h.GPUAttentionFlops }},
	{"gpu_long_attention_flop_per_s", "flop/s", true, func(h *Hardware) float64 { return h.GPULongAttentionFlops }},
	{"host_memory_bytes", "bytes", false, func(h *Hardware) float64 { return float64(h.HostMemory) }},
	{"host_memory_bytes_per_s", "bytes/s", false, func(h *Hardware) float64 { return h.HostMemoryRate }},
	{"cpu_flop_per_s", "flop/s", false, func(h *Hardware) float64 { return h.CPUFlops }},
	{"cpu_attention_bytes_per_s", "bytes/s", true, func(h *Hardware) float64 { return h.CPUAttentionRate }},
	{"cpu_attention_flop_per_s", "flop/s", true, func(h *Hardware) float64 { return h.CPUAttentionFlops }},
	{"host_to_gpu_bytes_per_s", "a list, bytes/s", false, nil},
	{"gpu_to_host_bytes_per_s", "bytes/s", false, func(h *Hardware) float64 { return h.GPUToHost }},
	{"host_copy_latency_s", "seconds", true, func(h *Hardware) float64 { return h.HostCopyLatency }},
	{"round_trip_s", "seconds", true, func(h *Hardware) float64 { return h.RoundTrip }},
	{"peer_memory_bytes", "bytes", true, func(h *Hardware) float64 { return float64(h.PeerMemory) }},
	{"peer_to_gpu_bytes_per_s", "bytes/s", true, func(h *Hardware) float64 { return h.PeerToGPU }},
	{"peer_copy_latency_s", "seconds", true, func(h *Hardware) float64 { return h.PeerCopyLatency }},
	{"host_kernel_read_bytes_per_s", "bytes/s", true, func(h *Hardware) float64 { return h.HostReadRate }},
	{"peer_kernel_read_bytes_per_s", "bytes/s", true, func(h *Hardware) float64 { return h.PeerReadRate }},
	{"host_load_kernel_below_bytes", "bytes", true, func(h *Hardware) float64 { return float64(h.HostLoadKernelBelow) }},
	{"host_store_kernel_below_bytes", "bytes", true, func(h *Hardware) float64 { return float64(h.HostStoreKernelBelow) }},
	{"peer_load_kernel_below_bytes", "bytes", true, func(h *Hardware) float64 { return float64(h.PeerLoadKernelBelow) }},
	{"peer_store_kernel_below_bytes", "bytes", true, func(h *Hardware) float64 { return float64(h.PeerStoreKernelBelow) }},
	{"host_load_kernel_thread_blocks", "thread blocks", true, func(h *Hardware) float64 { return float64(h.HostLoadKernelBlocks) }},
	{"host_store_kernel_thread_blocks", "thread blocks", true, func(h *Hardware) float64 { return float64(h.HostStoreKernelBlocks) }},
	{"peer_load_kernel_thread_blocks", "thread blocks", true, func(h *Hardware) float64 { return float64(h.PeerLoadKernelBlocks) }},
	{"peer_store_kernel_thread_blocks", "thread blocks", true, func(h *Hardware) float64 { return float64(h.PeerStoreKernelBlocks) }},
	{"multipath", "an object", true, nil},
	{"compute", "an object", true, nil},
}

// HardwareFields lists the keys of the figures of a machine.
func HardwareFields() []string {
	keys := make([]string, len(hardwareFields))
	for i, f := range hardwareFields {
		keys[i] = f.key
	}
	return keys
}

// HardwarePreset returns a profile of package configs by its name ("h200"), as
// configs.FindHardware reads it.
func HardwarePreset(name string) (Hardware, error) {
	found, err := configs.FindHardware(name)
	if err != nil {
		return Hardware{}, fmt.Errorf("planner: %w", err)
	}
	data, ok := configs.Hardware(found)
	if !ok {
		return Hardware{}, fmt.Errorf("planner: hardware %s is not embedded", found)
	}
	return ParseHardware(data)
}

// ParseHardware reads a machine from JSON with the keys of Hardware. The key "base" names
// a profile whose figures hold where the object has none; their sources are then "from"
// that profile. Its compute does not hold beside other rates of the GPU. An error names all keys that are unknown, or all that are missing.
func ParseHardware(data []byte) (Hardware, error) {
	var given map[string]json.RawMessage
	d := json.NewDecoder(bytes.NewReader(data))
	if err := d.Decode(&given); err != nil {
		return Hardware{}, fmt.Errorf("planner: read hardware: %w", untrusted.JSONError(data, err))
	}
	if given == nil {
		return Hardware{}, errors.New("planner: read hardware: null is not a JSON object")
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return Hardware{}, errors.New("planner: read hardware: data after the JSON object")
	}
	if err := unknownKeys(given); err != nil {
		return Hardware{}, err
	}
	maps.DeleteFunc(given, func(_ string, value json.RawMessage) bool { return string(value) == "null" })
	var h, own Hardware
	var base string
	if err := readKey(given, "base", &base); err != nil {
		return Hardware{}, err
	}
	if base != "" {
		found, err := configs.FindHardware(base)
		if err != nil {
			return Hardware{}, fmt.Errorf("planner: read hardware: base: %w", err)
		}
		if h, err = HardwarePreset(found); err != nil {
			return Hardware{}, err
		}
	}
	if err := readKey(given, "sources", &own.Sources); err != nil {
		return Hardware{}, err
	}
	if base != "" {
		from := "from " + h.Name
		for _, f := range hardwareFields {
			if _, ok := given[f.key]; !ok {
				h.Sources[f.key] = from
			} else if h.Sources[f.key] = own.Sources[f.key]; own.Sources[f.key] == "" {
				h.Sources[f.key] = "given"
			}
		}
	} else {
		h.Sources = own.Sources
	}
	if _, ok := given["name"]; base != "" && !ok {
		h.Name += " with changes"
	}
	delete(given, "base")
	delete(given, "sources")
	for key, value := range given {
		if strings.HasSuffix(key, "_bytes") {
			given[key] = wholeNumber(value)
		}
	}
	if err := readObject(given, "multipath", &h.Multipath); err != nil {
		return Hardware{}, err
	}
	_, measured := given["compute"]
	if err := readObject(given, "compute", &h.Compute); err != nil {
		return Hardware{}, err
	}
	profile := h
	figures, err := json.Marshal(given)
	if err != nil {
		return Hardware{}, fmt.Errorf("planner: read hardware: %w", err)
	}
	if err := json.Unmarshal(figures, &h); err != nil {
		return Hardware{}, badValue(err)
	}
	if base != "" && !measured && h.gpuRates() != profile.gpuRates() { // its kernels reach something else
		h.Compute = nil
		delete(h.Sources, "compute")
	}
	if base == "" {
		if err := missingKeys(given, h.Name); err != nil {
			return Hardware{}, err
		}
	}
	if err := h.Validate(); err != nil {
		return h, err
	}
	// A problem over fewer paths may have fewer rates.
	if m := h.Multipath; m != nil && len(h.HostToGPU) < len(m.Relays)+1 {
		return h, fmt.Errorf("planner: hardware %q: host_to_gpu_bytes_per_s is %v, it must be %d rates or more: with 0 to %d relays of multipath", h.Name, h.HostToGPU, len(m.Relays)+1, len(m.Relays))
	}
	return h, nil
}

// gpuRates are those that Compute takes the place of.
func (h *Hardware) gpuRates() [4]float64 {
	return [...]float64{h.GPUMemoryRate, h.GPUFlops, h.GPUAttentionFlops, h.GPULongAttentionFlops}
}

// wholeNumber writes a whole number with an exponent (24e9) without one, as JSON's reader
// wants it for integers. What is none stays as it is.
func wholeNumber(text json.RawMessage) json.RawMessage {
	if !bytes.ContainsAny(text, ".eE") {
		return text
	}
	v, err := strconv.ParseFloat(string(text), 64)
	if err != nil || v != math.Trunc(v) || math.Abs(v) > 1<<62 {
		return text
	}
	return strconv.AppendInt(nil, int64(v), 10)
}

// readKey reads the value of one key, if it is there.
func readKey(given map[string]json.RawMessage, key string, to any) error {
	text, ok := given[key]
	if !ok {
		return nil
	}
	if err := json.Unmarshal(text, to); err != nil {
		return fmt.Errorf("planner: read hardware: %s: %w", key, err)
	}
	return nil
}

// readObject reads an object, and removes it from what is given.
func readObject[T any](given map[string]json.RawMessage, key string, to **T) error {
	text, ok := given[key]
	if !ok {
		return nil
	}
	delete(given, key)
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	*to = new(T)
	if err := d.Decode(*to); err != nil {
		return fmt.Errorf("planner: read hardware: %s: %w", key, untrusted.JSONError(text, err))
	}
	return nil
}

// badValue names the key whose value is of the wrong kind, and its unit.
func badValue(err error) error {
	var kind *json.UnmarshalTypeError
	if !errors.As(err, &kind) {
		return fmt.Errorf("planner: read hardware: %w", err)
	}
	for _, f := range hardwareFields {
		if f.key == kind.Field {
			return fmt.Errorf("planner: read hardware: %s must be a number (%s), and is: %s", f.key, f.unit, kind.Value)
		}
	}
	return fmt.Errorf("planner: read hardware: %s must be a text, and is: %s", kind.Field, kind.Value)
}

func unknownKeys(given map[string]json.RawMessage) error {
	known := append([]string{"name", "base", "sources"}, HardwareFields()...)
	var unknown []string
	for _, key := range slices.Sorted(maps.Keys(given)) {
		if !slices.Contains(known, key) {
			text := strconv.Quote(key)
			if similar := configs.Similar(key, known); len(similar) > 0 {
				text += " (did you mean " + strings.Join(similar, " or ") + "?)"
			}
			unknown = append(unknown, text)
		}
	}
	if len(unknown) == 0 {
		return nil
	}
	return fmt.Errorf("planner: read hardware: unknown field %s: known are %s", strings.Join(unknown, ", "), strings.Join(known, ", "))
}

func missingKeys(given map[string]json.RawMessage, name string) error {
	var missing, optional []string
	for _, f := range hardwareFields {
		if _, ok := given[f.key]; ok {
			continue
		}
		text := fmt.Sprintf("%s (%s)", f.key, f.unit)
		if f.optional {
			optional = append(optional, text)
		} else {
			missing = append(missing, text)
		}
	}
	if len(missing) == 0 {
		return nil
	}
	text := strings.Join(missing, ", ")
	if len(optional) > 0 {
		text += "; optional are " + strings.Join(optional, ", ")
	}
	return fmt.Errorf(`planner: hardware %q lacks %s; or take what is missing from a profile with "base", one of %s`, name, text, strings.Join(configs.HardwareNames(), ", "))
}

// Validate names all fields, by their keys, that cannot be.
func (h Hardware) Validate() error {
	var wrong []string
	bad := func(key string, value any, want string) {
		wrong = append(wrong, fmt.Sprintf("%s is %v, it must be %s", key, value, want))
	}
	for _, f := range hardwareFields {
		if f.value == nil {
			continue
		}
		if v := f.value(&h); f.optional && !(v >= 0) {
			bad(f.key, v, "at least 0")
		} else if !f.optional && !(v > 0) {
			bad(f.key, v, "above 0")
		}
	}
	if len(h.HostToGPU) == 0 {
		bad("host_to_gpu_bytes_per_s", "empty", "one rate or more")
	}
	for i, rate := range h.HostToGPU {
		if !(rate > 0) || i > 0 && rate < h.HostToGPU[i-1] {
			bad("host_to_gpu_bytes_per_s", h.HostToGPU, "above 0 and ascending")
			break
		}
	}
	if h.PeerMemory > 0 && h.PeerToGPU == 0 {
		bad("peer_to_gpu_bytes_per_s", 0, "above 0 where there is peer memory")
	}
	if len(h.HostToGPU) > 1 && h.PeerToGPU == 0 {
		bad("peer_to_gpu_bytes_per_s", 0, "above 0 where there are several paths from the host")
	}
	if h.Multipath != nil {
		if err := h.Multipath.Validate(); err != nil {
			wrong = append(wrong, err.Error())
		}
	}
	if h.Compute != nil {
		if err := h.Compute.Validate(); err != nil {
			wrong = append(wrong, err.Error())
		}
	}
	if len(wrong) > 0 {
		return fmt.Errorf("planner: hardware %q: %s", h.Name, strings.Join(wrong, "; "))
	}
	return nil
}

// HostCopySeconds is the time of one copy from host memory over a number of paths, of batch that
// are one operation of the device.
func (h Hardware) HostCopySeconds(bytes int64, paths, batch int) float64 {
	return h.HostCopyLatency/float64(max(1, batch)) + float64(bytes)/h.HostToGPU[paths-1]
}

// PeerCopySeconds is the same of one copy from a peer.
func (h Hardware) PeerCopySeconds(bytes int64, batch int) float64 {
	return h.PeerCopyLatency/float64(max(1, batch)) + float64(bytes)/h.PeerToGPU
}
