package node

import (
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"slices"
	"time"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/models"
	"github.com/moeserve/moeserve/pipeline"
	"github.com/moeserve/moeserve/planner"
)

// Now is the devices' clock, which may be a virtual one.
func (n *Node) Now() time.Duration { return n.machine.Now() }

// Emulated says whether the devices are, and so are the times that they take.
func (n *Node) Emulated() bool { return n.machine.Capabilities().Emulated }

// KeepsData says whether the devices' memory holds bytes.
func (n *Node) KeepsData() bool { return n.machine.Capabilities().KeepsData }

// StepRows is the most rows of a step.
func (n *Node) StepRows() int { return n.limits.MaxRows }

// MicroBatchRows is the most rows of a step whose attention runs together.
func (n *Node) MicroBatchRows() int {
	if m := n.settings.Batch.MicroBatchSize; m > 0 {
		return m
	}
	return n.limits.MaxRows
}

// ChosenOnlyRows is the most rows of a step that fetches only the experts that its
// router chose.
func (n *Node) ChosenOnlyRows() int {
	if !n.KeepsData() {
		return 0
	}
	return pipeline.SmallBatch(n.config.Experts, n.config.TopK)
}

// Shape is the model as the planner sees it.
func (n *Node) Shape() planner.Model { return n.footprint.model(n.name) }

// Sizes in bytes that the node has taken, for the planner.
func (n *Node) Sizes() planner.Sizes {
	s := &n.settings
	sizes, err := n.footprint.sizes(given{s.Batch.MaxNumSeqs, s.Batch.MaxNumBatchedTokens, s.Batch.MicroBatchSize, s.Batch.NumMicroBatches})
	if err != nil {
		panic("node: sizes of what is open: " + err.Error())
	}
	return sizes
}

// Hardware is the machine as the planner sees it: what emulated devices were told to
// be, or, of real GPUs, the preset of the same name. It says false where emulated
// devices run as fast as they can, and where there is no such preset.
func (n *Node) Hardware() (planner.Hardware, bool) {
	top := n.machine.Topology()
	gpu, _ := top.Info(n.space)
	if n.opened != nil {
		h, from := presetFor(gpu)
		return h, from != ""
	}
	if !n.machine.Capabilities().Timed {
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
	from, back := top.Paths[device.Pair{From: device.Host, To: n.space}], top.Paths[device.Pair{From: n.space, To: device.Host}]
	h.HostToGPU, h.HostCopyStart = []float64{limit(from.BytesPerSecond)}, from.Latency.Seconds()
	h.GPUToHost = limit(back.BytesPerSecond)
	for i := range top.GPUs {
		p, err := top.Path(device.HBM(i), n.space)
		if device.HBM(i) == n.space || err != nil {
			continue
		}
		h.PeerMemory += top.GPUs[i].MemoryBytes
		// All peers share the wire into the GPU.
		h.PeerToGPU, h.PeerCopyStart = limit(p.BytesPerSecond), p.Latency.Seconds()
	}
	return h, true
}

// Encoder returns what turns text into the ids of a prompt, with the special tokens
// that the tokenizer puts around one, without opening a node. An error wraps ErrConfig
// where the model has no tokenizer.
func Encoder(m *Model) (func(text string) []int32, error) {
	n := &Node{name: m.Name}
	if m.Files == nil {
		return nil, fail(ErrConfig, fmt.Errorf("%s has no tokenizer: leave the file of prompts out, and they are generated", m.Name))
	}
	if _, err := fs.Stat(m.Files, "tokenizer.json"); err != nil {
		return nil, fail(ErrConfig, fmt.Errorf("%s has no tokenizer.json: leave the file of prompts out, and they are generated", m.Name))
	}
	if err := n.text(m, false); err != nil {
		return nil, fail(ErrModel, err)
	}
	return func(text string) []int32 { return n.tokenizer.Encode(text, true) }, nil
}

// Devices are a node's devices alone, without a model, for measurements of copies.
type Devices struct{ n *Node }

// OpenDevices opens the devices that the settings name, the peers among them. Errors
// are as those of Open.
func OpenDevices(s configs.Settings, log *slog.Logger) (*Devices, error) {
	if err := s.Validate(); err != nil {
		return nil, fail(ErrConfig, err)
	}
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	// Peers are only opened where they are borrowed from.
	s.Offload.Fraction, s.Offload.Tier = 1, configs.AnyTier
	n := &Node{settings: s, log: log, config: &models.Config{DType: kernels.BF16}}
	err := n.machines(&Options{Settings: s, Log: log})
	if err == nil {
		err = fail(ErrConfig, n.choosePeers(&s))
	}
	if err != nil {
		n.Close() //nolint:errcheck // the first error is what counts
		return nil, err
	}
	return &Devices{n}, nil
}

// Machine is theirs until Close.
func (d *Devices) Machine() device.Machine { return d.n.machine }

// Compute is the memory of the GPU that computes.
func (d *Devices) Compute() device.Space { return d.n.space }

// Peers are the memories that may be borrowed from.
func (d *Devices) Peers() []device.Space { return d.n.peers }

// Hold says why the devices do not hold so much more, in bytes: an error wraps ErrConfig
// and names the memory. What emulated devices hold is all of this machine's.
func (d *Devices) Hold(needs map[device.Space]int64) error {
	var all int64
	for _, s := range slices.Sorted(maps.Keys(needs)) {
		u, err := d.n.machine.Usage(s)
		if err != nil {
			return fail(ErrDevice, err)
		}
		if needs[s] > u.Free() {
			return fail(ErrConfig, fmt.Errorf("%s needed of %s, whose memory has %s free", Bytes(needs[s]), s, Bytes(max(u.Free(), 0))))
		}
		if s == device.Host || d.n.KeepsData() {
			all += needs[s]
		}
	}
	if have, ok := availableMemory(); ok && d.Emulated() && all > have {
		return fail(ErrConfig, fmt.Errorf("%s needed for all emulated memories together, and this machine has %s free", Bytes(all), Bytes(have)))
	}
	return nil
}

// Name of the GPU that computes.
func (d *Devices) Name() string {
	info, _ := d.n.machine.Topology().Info(d.n.space)
	return info.Name
}

// Emulated says whether they are.
func (d *Devices) Emulated() bool { return d.n.opened == nil }

// Hardware is what Node.Hardware is.
func (d *Devices) Hardware() (planner.Hardware, bool) { return d.n.Hardware() }

// Close closes the devices.
func (d *Devices) Close() error { return d.n.Close() }

// Name is what the model is called: the preset's, the directory, or BuiltIn.
func (n *Node) Name() string { return n.name }

// Space names the memory of the GPU that computes.
func (n *Node) Space() string { return n.space.String() }

// DeviceName is the product that computes.
func (n *Node) DeviceName() string {
	info, _ := n.machine.Topology().Info(n.space)
	return info.Name
}
