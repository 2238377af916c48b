package node

import (
	"fmt"
	"io/fs"
	"log/slog"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/models"
	"github.com/moeserve/moeserve/pipeline"
	"github.com/moeserve/moeserve/planner"
)

// Now is the devices' clock, which may be a virtual one.
func (n *Node) Now() time.Duration { return n.machine.Now() }

// Emulated says whether the devices are, and so are the times that they take.
func (n *Node) Emulated() bool { return n.opened == nil }

// KeepsData says whether the devices' memory holds bytes.
func (n *Node) KeepsData() bool { return keepsData(n.machine) }

// StepRows is the most rows of a step.
func (n *Node) StepRows() int { return n.limits.MaxRows }

// MicroBatchRows is the most rows of a step whose attention runs together.
func (n *Node) MicroBatchRows() int {
	if m := n.settings.MicroBatchSize; m > 0 {
		return m
	}
	return n.limits.MaxRows
}

// Grouping is how often a layer's experts run: once per layer, or micro-batch.
func (n *Node) Grouping() string { return n.settings.ExpertGrouping }

// Attention is who attends: gpu or cpu.
func (n *Node) Attention() string {
	if n.settings.Attention == "cpu" {
		return "cpu"
	}
	return "gpu"
}

// ChosenOnlyRows is the most rows of a step that fetches only the experts that its
// router chose.
func (n *Node) ChosenOnlyRows() int {
	if !keepsData(n.machine) {
		return 0
	}
	return pipeline.SmallBatch(n.config.Experts, n.config.TopK)
}

// Shape is the model as the planner sees it.
func (n *Node) Shape() planner.Model {
	c := n.config
	activation := n.backend.ActivationDType().Size()
	m := planner.Model{
		Name: n.name, Layers: c.Layers, DenseLayers: c.Layers - c.MoELayers(), Hidden: c.Hidden,
		Heads: c.Heads, KVHeads: c.KVHeads, HeadDim: c.HeadDim,
		Experts: c.Experts, TopK: c.TopK, ExpertWidth: c.ExpertWidth, SharedWidth: c.SharedWidth, DenseWidth: c.DenseWidth,
		Vocab: c.Vocab, TiedEmbeddings: c.TiedEmbeddings,
		WeightBytes: n.layout.ExpertDType.Size(), ActivationBytes: activation, KVBytes: activation,
	}
	if w := slices.Compact(slices.Clone(c.Windows)); len(w) == 1 {
		m.Window = w[0]
	}
	return m
}

// Sizes in bytes that the node has taken, for the planner.
func (n *Node) Sizes() planner.Sizes {
	shape := n.kv.Shape()
	return planner.Sizes{
		Expert: n.plan.Layout.Size, Other: n.layout.Bytes,
		KVBlockTokens: shape.BlockTokens, KVBlock: shape.BlockBytes(),
	}
}

// noLimit stands for the rates of emulated devices that nothing limits.
const noLimit = 1e18

// Hardware is the machine as the planner sees it: what emulated devices were told to
// be, or, of real GPUs, the preset of the same name. It says false where emulated
// devices run as fast as they can, and where there is no such preset.
func (n *Node) Hardware() (planner.Hardware, bool) {
	top := n.machine.Topology()
	gpu, _ := top.Info(n.space)
	if n.opened != nil {
		return presetOf(gpu)
	}
	if o, err := emulated.ParseSpec(n.settings.Emulate); err != nil || !virtual(n.machine) && !o.Pace {
		return planner.Hardware{}, false
	}
	limit := func(rate float64) float64 {
		if rate == 0 {
			return noLimit
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

// presetOf finds the preset of a GPU by its name and, among those of one name, by its
// memory.
func presetOf(gpu device.Info) (planner.Hardware, bool) {
	best, found := planner.Hardware{}, false
	off := func(h planner.Hardware) float64 { return math.Abs(float64(h.GPUMemory - gpu.MemoryBytes)) }
	for _, name := range configs.HardwareNames() {
		product, _, _ := strings.Cut(strings.ToUpper(name), "-")
		h, err := planner.HardwarePreset(name)
		if err != nil || !slices.Contains(strings.FieldsFunc(strings.ToUpper(gpu.Name), func(r rune) bool { return r == ' ' || r == '-' }), product) {
			continue
		}
		if !found || off(h) < off(best) {
			best, found = h, true
		}
	}
	return best, found
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
	s.OffloadFraction, s.OffloadTier = 1, "auto"
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
