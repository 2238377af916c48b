package node

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/models"
	"github.com/moeserve/moeserve/planner"
	"github.com/moeserve/moeserve/transfer"
)

// DefaultWorkload is what a policy is made for where nobody says: MT-Bench's prompts,
// without end.
var DefaultWorkload = planner.Workload{PromptTokens: 77, NewTokens: 32}

// Planned is a policy, what it should give, and where the numbers are from.
type Planned struct {
	// Model, and the size of one of its experts as it is laid out, in bytes.
	Model       planner.Model
	ExpertBytes int64
	Hardware    planner.Hardware
	Workload    planner.Workload
	Prediction  planner.Prediction
	// Settings that the policy asks for, by key.
	Settings map[string]any
	// KVBlocks that the policy's batch takes; a node's pool has the rest of the memory.
	KVBlocks int
	// Knees are the offload fractions up to which copies stay hidden with this policy,
	// by tier; only tiers that there are.
	Knees map[string]float64
	// Missing is what this engine does not do of it.
	Missing []string
}

// keys of the settings that a policy decides.
var policyKeys = []string{"offload-fraction", "max-num-seqs", "max-num-batched-tokens", "micro-batch-size", "expert-grouping", "attention"}

// runs is what of the planner's choices this engine carries out.
func runs() planner.Choices {
	return planner.Choices{KVOnHost: []float64{0}, HostPaths: []int{1}}
}

// missing names what of a policy this engine does not carry out.
func missing(x *planner.Policy) []string {
	var list []string
	if x.Attention == configs.OnGPU && x.KVOnHost > 0 {
		list = append(list, "attention on the gpu with keys and values in host memory")
	}
	if x.HostPaths > 1 {
		list = append(list, fmt.Sprintf("%d paths from the host", x.HostPaths))
	}
	return list
}

// planning is a problem together with the settings that bound its solutions.
type planning struct {
	planner.Problem
	settings *configs.Settings
	given    func(key string) bool
}

// planning puts a problem together, for hardware of whose memories those shares may be
// used.
func (f *footprint) planning(name string, s *configs.Settings, is func(string) bool, w planner.Workload, h planner.Hardware, shares planner.Shares) (*planning, error) {
	var fixed given
	for key, to := range map[string]*int{
		"max-num-seqs": &fixed.maxNumSeqs, "max-num-batched-tokens": &fixed.maxNumBatchedTokens,
		"micro-batch-size": &fixed.microBatchSize, "num-micro-batches": &fixed.numMicroBatches,
	} {
		if is(key) {
			*to, _ = s.Values()[key].(int)
		}
	}
	sizes, err := f.sizes(fixed)
	if err != nil {
		return nil, err
	}
	sizes.MinKVBlocks = s.KV.NumBlocks
	if s.KV.NumBlocks == 0 && s.KV.MaxModelLen > 0 {
		sizes.MinKVBlocks = f.kv().BlocksFor(s.KV.MaxModelLen)
	}
	p := &planning{
		Problem:  planner.Problem{Model: f.model(name), Hardware: h, Workload: w, Sizes: sizes, Shares: shares, PromptsAlike: true},
		settings: s, given: is,
	}
	if h.PeerToGPU > 0 {
		// The store cuts a fetch where the host's part is large enough.
		p.BothLinks = transfer.Splits(f.expert.Size, h.HostToGPU[0], h.PeerToGPU)
	}
	return p, nil
}

// bound puts what is given into choices.
func (p *planning) bound(c planner.Choices) (planner.Choices, error) {
	s := p.settings
	c.Tier = s.Offload.Tier
	c.MaxBatch, c.MaxPrefillTokens = most("max-num-seqs"), most("max-num-batched-tokens")
	if p.given("max-num-batched-tokens") {
		c.MaxBatch, c.PrefillTokens = min(c.MaxBatch, s.Batch.MaxNumBatchedTokens), s.Batch.MaxNumBatchedTokens
	}
	if s.KV.NumBlocks > 0 {
		c.MaxBatch = max(1, min(c.MaxBatch, s.KV.NumBlocks/p.blocks(1)))
	}
	if p.given("max-num-seqs") {
		c.Batch = min(s.Batch.MaxNumSeqs, c.MaxBatch)
		if p.Workload.Requests > 0 {
			c.Batch = min(c.Batch, p.Workload.Requests)
		}
	}
	if p.given("micro-batch-size") && s.Batch.MicroBatchSize > 0 {
		c.MicroBatch = s.Batch.MicroBatchSize
		switch {
		case p.given("max-num-seqs") && c.MicroBatch > s.Batch.MaxNumSeqs:
			return c, fmt.Errorf("micro-batch-size is %d and max-num-seqs is %d: make micro-batches at most the batch, or leave one of them to the policy", c.MicroBatch, s.Batch.MaxNumSeqs)
		case p.given("max-num-batched-tokens") && c.MicroBatch > s.Batch.MaxNumBatchedTokens:
			return c, fmt.Errorf("micro-batch-size is %d: must be at most max-num-batched-tokens, %d", c.MicroBatch, s.Batch.MaxNumBatchedTokens)
		case c.Batch > 0:
			c.MicroBatch = min(c.MicroBatch, c.Batch)
		}
	}
	switch {
	case s.Batch.NumMicroBatches > 0 && p.given("num-micro-batches"):
		c.MicroBatches = s.Batch.NumMicroBatches
	case s.Batch.MicroBatchSize == 0 && p.given("micro-batch-size"):
		c.MicroBatches = 1
	}
	if p.given("attention") && s.Batch.Attention != configs.AnyPlace {
		c.Attention = []configs.Place{s.Batch.Attention}
	}
	if p.given("expert-grouping") {
		c.Grouping = []configs.Grouping{s.Batch.Grouping}
	}
	if p.given("offload-fraction") {
		c.Offload = &s.Offload.Fraction
	}
	return c, nil
}

func most(key string) int {
	k, _ := configs.Find(key)
	return int(k.Max)
}

// blocks of the KV cache that a number of sequences takes.
func (p *planning) blocks(sequences int) int {
	per := p.Sizes.KVBlockTokens
	return sequences * ((p.Workload.PromptTokens + p.Workload.NewTokens + per - 1) / per)
}

// search finds the best policy among the choices and what is given.
func (p *planning) search(c planner.Choices) (planner.Prediction, error) {
	c, err := p.bound(c)
	if err != nil {
		return planner.Prediction{}, err
	}
	return p.Search(c)
}

// file reads the policy that the settings name; what is given holds in its place.
func (p *planning) file() (planner.Policy, error) {
	path, s := string(p.settings.Plan.Policy), p.settings
	data, err := os.ReadFile(path)
	if err != nil {
		return planner.Policy{}, fmt.Errorf("policy: %w; give none, auto, or a file that plan --json wrote", err)
	}
	x, err := planner.ParsePolicy(data, p.Model)
	if err != nil {
		return x, fmt.Errorf("%s: %w; plan --json writes policies", path, err)
	}
	all := p.Model.ExpertCount()
	// What bounds a search bounds a policy, too.
	c, err := p.bound(planner.Choices{})
	if err != nil {
		return x, err
	}
	if c.Batch > 0 {
		x.Batch = c.Batch
	} else {
		x.Batch = min(x.Batch, c.MaxBatch)
		if n := p.Workload.Requests; n > 0 {
			x.Batch = min(x.Batch, n)
		}
	}
	switch {
	case c.MicroBatch > x.Batch && x.Batch > 0 && p.Workload.Requests == 0:
		return x, fmt.Errorf("micro-batch-size is %d, and %s has a batch of %d: make micro-batches at most the batch", c.MicroBatch, path, x.Batch)
	case c.MicroBatch > 0:
		x.MicroBatch = min(c.MicroBatch, x.Batch)
	case c.MicroBatches > 0:
		x.MicroBatch = max(1, (x.Batch+c.MicroBatches-1)/c.MicroBatches)
	default:
		x.MicroBatch = min(x.MicroBatch, x.Batch)
	}
	if c.PrefillTokens > 0 {
		x.PrefillTokens = c.PrefillTokens
	}
	if c.Attention != nil {
		x.Attention = c.Attention[0]
		if x.Attention == configs.OnGPU {
			x.KVOnHost = 0
		}
	}
	if c.Grouping != nil {
		x.Grouping = c.Grouping[0]
	}
	if c.Offload != nil {
		x.LocalExperts = all - p.Model.Offloaded(*c.Offload)
	}
	if x.PeerExperts = min(x.PeerExperts, all-x.LocalExperts); s.Offload.Tier == configs.HostTier {
		x.PeerExperts = 0
	}
	return x, nil
}

// settle tells what a prediction comes to.
func (p *planning) settle(r planner.Prediction) *Planned {
	x := &r.Policy
	all := p.Model.ExpertCount()
	set := map[string]any{
		"offload-fraction":       fractionOf(all-x.LocalExperts, all),
		"max-num-seqs":           x.Batch,
		"max-num-batched-tokens": max(x.Batch, x.PrefillTokens),
		"micro-batch-size":       wayFor(x).microBatchSize,
		"expert-grouping":        x.Grouping.String(),
		"attention":              x.Attention.String(),
	}
	for key := range set {
		if key == "attention" && p.settings.Batch.Attention == configs.AnyPlace {
			continue // which leaves it open
		}
		if p.given(key) || key == "offload-fraction" && p.given("local-experts") || key == "micro-batch-size" && p.settings.Batch.NumMicroBatches > 0 {
			delete(set, key)
		}
	}
	d := &Planned{
		Model: p.Model, ExpertBytes: p.Sizes.Expert, Hardware: p.Hardware, Workload: p.Workload,
		Prediction: r, Settings: set, KVBlocks: p.blocks(x.Batch), Knees: map[string]float64{}, Missing: missing(x),
	}
	list := []configs.Tier{configs.HostTier}
	if p.Hardware.PeerMemory > 0 {
		list = append(list, configs.PeerTier, configs.AnyTier)
	}
	for _, t := range list {
		if knee, err := p.Knee(*x, t); err == nil && !math.IsInf(knee, 0) {
			d.Knees[t.String()] = knee
		}
	}
	return d
}

// fractionOf is the shortest offload fraction that stands for so many of all experts.
func fractionOf(offloaded, all int) float64 {
	exact := float64(offloaded) / float64(all)
	for digits := range 8 {
		f, err := strconv.ParseFloat(strconv.FormatFloat(exact, 'f', digits, 64), 64)
		if err == nil && int(math.Round(f*float64(all))) == offloaded {
			return f
		}
	}
	return exact
}

// problem is the planner's, on the opened machine.
func (n *Node) problem(s *configs.Settings, is func(string) bool, w planner.Workload) (*planning, error) {
	h, err := n.hardware(s)
	if err != nil {
		return nil, err
	}
	return n.footprint.planning(n.name, s, is, w, h, planner.Shares{GPU: s.Device.GPUMemoryUtilization, Host: 1, Peer: 1})
}

// given says which settings somebody has given.
func (o *Options) given() func(key string) bool {
	if o.Given != nil {
		return o.Given
	}
	values, defaults := o.Settings.Values(), configs.Defaults().Values()
	return func(key string) bool { return values[key] != defaults[key] }
}

// follow puts what a policy says, where there is one, into the settings.
func (n *Node) follow(o *Options) error {
	s := &o.Settings
	if s.Plan.Policy == configs.NoPolicy {
		return nil
	}
	w := o.Workload
	if w == (planner.Workload{}) {
		w = DefaultWorkload
	}
	p, err := n.problem(s, o.given(), w)
	if err != nil {
		return err
	}
	if s.Offload.LocalExperts != "" {
		if err := n.pinPlaces(p); err != nil {
			return err
		}
	}
	var r planner.Prediction
	if s.Plan.Policy == configs.PlannedPolicy {
		r, err = p.search(runs())
	} else {
		var x planner.Policy
		if x, err = p.file(); err == nil {
			if list := missing(&x); len(list) > 0 {
				return fmt.Errorf("%s: this engine does not do %s; make one with plan --json that leaves it out", s.Plan.Policy, strings.Join(list, ", "))
			}
			r, err = p.Predict(x)
		}
	}
	if err != nil {
		return err
	}
	n.planned = p.settle(r)
	n.log.Info("policy", "of", s.Plan.Policy, "batch", r.Policy.Batch, "prefill_tokens", r.Policy.PrefillTokens, "local_experts", r.Policy.LocalExperts, "decode_tok_s", r.DecodeTokS, "bound", string(r.Decode.Bound))
	if err := s.Put(n.planned.Settings); err != nil {
		return err
	}
	n.settings = *s
	return nil
}

// pinPlaces lets the planner count with the experts that local-experts names.
func (n *Node) pinPlaces(p *planning) error {
	placement, err := n.placement(p.settings, n.footprint.layers)
	if err != nil {
		return err
	}
	store := n.footprint.experts(placement.Largest())
	plan, err := store.Sized(placement.Offloaded(), placement.Largest())
	if err != nil {
		return err
	}
	p.Sizes.Ring = func(int) int { return plan.RingSlots }
	s := *p.settings
	s.Offload.Fraction = float64(placement.Offloaded()) / float64(p.Model.ExpertCount())
	is := p.given
	p.settings, p.given = &s, func(key string) bool { return key == "offload-fraction" || is(key) }
	return nil
}

// Rates that are assumed of devices of which nobody knows any: those of a processor
// that does the arithmetic in their place, in bytes/s and flop/s.
const (
	assumedMemory = 10e9
	assumedFlops  = 50e9
	assumedLink   = 5e9
	// unlimited stands for rates of emulated devices that nothing limits.
	unlimited = 1e18
)

// timed says whether emulated devices keep to their rates, and have some.
func (n *Node) timed() bool {
	top := n.machine.Topology()
	gpu, _ := top.Info(n.space)
	path, _ := top.Path(device.Host, n.space)
	return n.machine.Capabilities().Timed && (gpu.FlopsPerSecond > 0 || gpu.BytesPerSecond > 0 || path.BytesPerSecond > 0)
}

// Assumed is what Hardware.Sources says of a rate that nobody knows.
const Assumed = "assumed"

// hardware is the machine as the planner sees it: memories as they are, rates from the
// setting, or from the topology, what that lacks from the preset of the GPU's name,
// and what there is none of, assumed.
func (n *Node) hardware(s *configs.Settings) (planner.Hardware, error) {
	top := n.machine.Topology()
	gpu, _ := top.Info(n.space)
	var h planner.Hardware
	var err error
	if s.Plan.Hardware != "" {
		if h, err = LoadHardware(s.Plan.Hardware); err != nil {
			return h, err
		}
	} else {
		from := ""
		if h, from = presetFor(gpu); from == "" {
			from = Assumed
			memory, flops, link := assumedMemory, assumedFlops, assumedLink
			if n.opened == nil && n.timed() {
				from, memory, flops, link = "this machine", unlimited, unlimited, unlimited
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
				*to, h.Sources[key] = rate, "this machine"
			}
		}
		link := func(from, to device.Space) device.Path {
			path, _ := top.Path(from, to)
			return path
		}
		up := link(device.Host, n.space)
		take("host_to_gpu_bytes_per_s", &h.HostToGPU[0], up.BytesPerSecond)
		h.HostToGPU = h.HostToGPU[:1]
		take("gpu_to_host_bytes_per_s", &h.GPUToHost, link(n.space, device.Host).BytesPerSecond)
		take("gpu_memory_bytes_per_s", &h.GPUMemoryRate, gpu.BytesPerSecond)
		take("gpu_flop_per_s", &h.GPUFlops, gpu.FlopsPerSecond)
		take("host_memory_bytes_per_s", &h.HostMemoryRate, top.Host.BytesPerSecond)
		take("cpu_flop_per_s", &h.CPUFlops, top.Host.FlopsPerSecond)
		if h.Sources["gpu_flop_per_s"] == "this machine" && n.opened == nil {
			take("gpu_attention_flop_per_s", &h.GPUAttentionFlops, gpu.FlopsPerSecond)
		}
		take("host_copy_start_s", &h.HostCopyStart, up.Latency.Seconds())
		if len(n.peers) > 0 {
			// All peers share the wire into the GPU.
			path := link(n.peers[0], n.space)
			take("peer_to_gpu_bytes_per_s", &h.PeerToGPU, path.BytesPerSecond)
			take("peer_copy_start_s", &h.PeerCopyStart, path.Latency.Seconds())
		}
	}
	usage, err := n.machine.Usage(n.space)
	if err != nil {
		return h, err
	}
	host, err := n.machine.Usage(device.Host)
	if err != nil {
		return h, err
	}
	h.GPUMemory, h.HostMemory = usage.Capacity-usage.Other, host.Capacity-host.Other
	budgets, err := n.peerBudgets(n.footprint.expert.Size)
	if err != nil {
		return h, err
	}
	h.PeerMemory = 0
	for _, b := range budgets {
		h.PeerMemory += int64(b.Experts) * n.footprint.expert.Size
	}
	caps := n.machine.Capabilities()
	if have, ok := availableMemory(); ok && caps.KeepsData && caps.Emulated {
		h.PeerMemory = min(h.PeerMemory, have) // of which all emulated memory is
	}
	return h, h.Validate()
}

// rateKeys are the keys of planner.Hardware that are not sizes.
var rateKeys = []string{
	"gpu_memory_bytes_per_s", "gpu_flop_per_s", "gpu_attention_flop_per_s", "host_memory_bytes_per_s", "cpu_flop_per_s",
	"host_to_gpu_bytes_per_s", "gpu_to_host_bytes_per_s", "host_copy_start_s", "round_trip_s", "peer_to_gpu_bytes_per_s", "peer_copy_start_s",
}

// presetFor finds the preset of a GPU by its name and, of those of one name, by its
// memory; the name is empty where there is none.
func presetFor(gpu device.Info) (planner.Hardware, string) {
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

// PlanOptions say what to plan for.
type PlanOptions struct {
	Options
	// Unrestricted also considers what this engine does not do.
	Unrestricted bool
	// PeerMemory is what each peer has to lend, in bytes, where the setting hardware
	// names a machine; 0: what that says. The head-room stays free of it.
	PeerMemory int64
}

// planned stands for the backend of GPUs where there is none.
type plannedBackend struct{ activation kernels.DType }

func (b plannedBackend) ActivationDType() kernels.DType { return b.activation }

func (b plannedBackend) cast(kernels.DType) kernels.DType { return b.activation }

// ExpertLayout has the size of all of that backend's layouts, and a name of its own:
// experts that are not row-major, as on Hopper, take the most memory while they are
// loaded.
func (plannedBackend) ExpertLayout(s kernels.ExpertShape) (kernels.ExpertLayout, error) {
	l, err := kernels.RowMajorLayout("cuda", s)
	l.Tag = "planned"
	return l, err
}

// plannedWorkspace is what that backend takes of the GPU itself, in bytes.
const plannedWorkspace = 32 << 20

// Plan finds the best policy, or judges the one that the settings name, for the
// hardware that they name or for this machine. It takes no memory and reads no
// weights. Errors are as those of Open; a policy that does not fit is a
// *planner.MisfitError.
func Plan(o PlanOptions) (_ *Planned, err error) {
	s := &o.Settings
	if _, ok := configs.Preset(s.Model.Name); ok {
		s.Model.LoadFormat = configs.LoadDummy
	} else if weightless(s.Model.Name) {
		s.Model.LoadFormat = configs.LoadDummy
	}
	if s.Plan.Policy == configs.NoPolicy {
		s.Plan.Policy = configs.PlannedPolicy
	}
	if err := s.Validate(); err != nil {
		return nil, fail(ErrConfig, err)
	}
	if o.Workload == (planner.Workload{}) {
		o.Workload = DefaultWorkload
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if s.Offload.LocalExperts != "" {
		return nil, fail(ErrConfig, errors.New("local-experts: a plan spreads experts evenly; give offload-fraction"))
	}
	model, err := OpenModel(*s)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, fail(ErrModel, model.Close())) }()
	if model.Config.ExpertCount() == 0 {
		return nil, fail(ErrConfig, fmt.Errorf("%s has no experts to plan for", model.Name))
	}
	p, err := o.planning(model)
	if err != nil {
		return nil, err
	}
	var r planner.Prediction
	if s.Plan.Policy == configs.PlannedPolicy {
		c := runs()
		if o.Unrestricted {
			c = planner.Choices{}
		}
		r, err = p.search(c)
	} else {
		var x planner.Policy
		if x, err = p.file(); err == nil {
			r, err = p.Predict(x)
		}
	}
	if err != nil {
		return nil, fail(ErrConfig, err)
	}
	return p.settle(r), nil
}

// weightless says whether a directory has a configuration and no weights.
func weightless(dir string) bool {
	if dir == "" {
		return false
	}
	if _, err := os.Stat(filepath.Join(dir, "config.json")); err != nil {
		return false
	}
	files, err := filepath.Glob(filepath.Join(dir, "*.safetensors"))
	return err == nil && len(files) == 0
}

// planning of named hardware, or of this machine.
func (o *PlanOptions) planning(model *Model) (*planning, error) {
	s := &o.Settings
	if s.Plan.Hardware == "" {
		return o.here(model)
	}
	h, err := LoadHardware(s.Plan.Hardware)
	if err != nil {
		return nil, fail(ErrConfig, err)
	}
	peers, spare, err := o.peers(&h)
	if err != nil {
		return nil, fail(ErrConfig, err)
	}
	backend := plannedBackend{kernels.BF16}
	if model.Config.DType == kernels.F16 {
		backend.activation = kernels.F16
	}
	layout, err := models.NewLayout(model.Config, model.Source, backend.cast)
	if err != nil {
		return nil, fail(ErrModel, err)
	}
	f, err := newFootprint(footprint{
		config: model.Config, layout: layout, types: backend, ringLayers: o.RingLayers, adaptive: s.Offload.AdaptLocal,
		hostLogits: o.HostLogits, clears: peers > 0, kernels: plannedWorkspace,
	}, s.KV.MaxModelLen)
	if err != nil {
		return nil, fail(ErrConfig, err)
	}
	h.PeerMemory = peers * (spare / f.expert.Size * f.expert.Size)
	p, err := f.planning(model.Name, s, o.given(), o.Workload, h, planner.Shares{GPU: s.Device.GPUMemoryUtilization, Peer: 1})
	return p, fail(ErrConfig, err)
}

// peers is how many the named hardware is to have, and what each lends, in bytes: as
// the settings say or, where they do not, one if it has any. Paths that lead through
// peers end where there are none.
func (o *PlanOptions) peers(h *planner.Hardware) (count, spare int64, err error) {
	s := &o.Settings
	c, err := s.Device.ParsePeers()
	if err != nil {
		return 0, 0, err
	}
	room, err := s.Harvest.ParseHeadroom()
	if err != nil {
		return 0, 0, err
	}
	each := h.PeerMemory
	if count = int64(len(c.GPUs)); c.Auto {
		count = min(1, max(each, o.PeerMemory))
	}
	if each == 0 {
		each = h.GPUMemory
	}
	if o.PeerMemory > 0 {
		each = o.PeerMemory
	}
	if count > 0 && h.PeerToGPU == 0 {
		return 0, 0, fmt.Errorf("peers: hardware %s has no links to peers; describe a machine that has, with peer_to_gpu_bytes_per_s", h.Name)
	}
	if room.Share > 0 {
		room.Bytes = int64(room.Share * float64(h.GPUMemory))
	}
	if count == 0 {
		h.HostToGPU = h.HostToGPU[:1]
	}
	if s.Offload.Tier == configs.HostTier {
		count = 0
	}
	return count, max(0, each-room.Bytes), nil
}

// here opens this machine, as far as it takes to know it.
func (o *PlanOptions) here(model *Model) (_ *planning, err error) {
	if o.PeerMemory > 0 {
		return nil, fail(ErrConfig, errors.New("peer-memory goes with hardware: of this machine's peers it is known what they have"))
	}
	n := &Node{settings: o.Settings, log: o.Log, name: model.Name, config: model.Config}
	defer func() { err = errors.Join(err, n.Close()) }()
	if err := n.prepare(&o.Options, model.Source); err != nil {
		return nil, err
	}
	p, err := n.problem(&o.Settings, o.given(), o.Workload)
	return p, fail(ErrConfig, err)
}
