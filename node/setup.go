package node

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/kvcache/events"
	"github.com/moeserve/moeserve/kvcache/offload"
	"github.com/moeserve/moeserve/models"
	"github.com/moeserve/moeserve/node/checkpoint"
	"github.com/moeserve/moeserve/node/devices"
	"github.com/moeserve/moeserve/node/fault"
	"github.com/moeserve/moeserve/node/observe"
	"github.com/moeserve/moeserve/node/planning"
	"github.com/moeserve/moeserve/node/sizing"
	"github.com/moeserve/moeserve/pipeline"
	"github.com/moeserve/moeserve/planner"
	"github.com/moeserve/moeserve/transfer"
	"github.com/moeserve/moeserve/untrusted"
)

// setup is a model on open devices before any memory is allocated: the beginning of Open,
// Inspect and Plan. The caller of newSetup closes the devices.
type setup struct {
	o *Options
	// settings are the options'; applyPolicy changes them.
	settings  configs.Settings
	model     *checkpoint.Model
	devices   *devices.Devices
	peers     []device.Space // that experts may borrow from; none where nothing is offloaded
	allPeers  []device.Space // the same, also where nothing is offloaded
	kvPeers   []device.Space // that KV blocks may borrow from
	layout    *models.Layout
	footprint *sizing.Footprint
	full      *sizing.Footprint // the same, with the full context that the settings allow
	kvTiers   offload.Config
	kvEvents  events.Config
	paths     hostPaths
	kernel    *transfer.Kernel  // that copies KV blocks; nil without a calibration
	planned   *planning.Planned // nil without a policy
	needs     *sizing.Needs     // nil before size
	others    *playback         // nil without a trace, and before borrowable
}

// borrows reports whether offloaded experts may have peer copies, as far as is known from the
// settings: a policy may yet offload some.
func borrows(o *configs.Offload) bool {
	return o.Tier != configs.HostTier && (o.Fraction > 0 || o.ResidentExperts != "")
}

// newSetup opens the devices and lays the model out on them.
func newSetup(o *Options, model *checkpoint.Model) (_ *setup, err error) {
	s := &o.Settings
	if h := s.Plan.Hardware; h != "" {
		// The named hardware must exist, whether or not it is used.
		if _, err := planning.LoadHardware(h); err != nil {
			return nil, fault.Of(fault.ErrConfig, fmt.Errorf("--hardware: %w", err))
		}
	}
	u := &setup{o: o, settings: o.Settings, model: model}
	if u.kvTiers, err = kvTiers(s, o.given()); err == nil {
		err = u.checkShare()
	}
	if err == nil {
		u.kvEvents, err = kvEvents(s, u.kvTiers.Enabled())
	}
	if err == nil {
		u.paths, err = choosePaths(s)
	}
	if err != nil {
		return nil, fault.Of(fault.ErrConfig, err)
	}
	if u.devices, err = devices.Open(devices.Options{
		Settings: s.Device, Kernels: s.Kernels, Weights: model.Config.DType, Trace: s.Output.Trace, Share: o.Share, Log: o.Log,
		Peers:       borrows(&s.Offload) || s.Plan.Policy != configs.NoPolicy && s.Offload.Tier != configs.HostTier || u.kvTiers.GPUBlocks > 0,
		Relays:      u.paths.wanted,
		IfPossible:  u.paths.soft,
		Emulate:     s.Harvest.AvailabilityTrace != "",
		OpenMachine: o.OpenMachine, OpenBackend: o.OpenBackend,
	}); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, u.devices.Close())
		}
	}()
	if err := u.choosePeers(); err != nil {
		return nil, fault.Of(fault.ErrConfig, err)
	}
	if err := u.findRelays(); err != nil {
		return nil, fault.Of(fault.ErrConfig, err)
	}
	if u.layout, err = models.NewLayout(model.Config, model.Source, u.devices.Cast()); err != nil {
		return nil, fault.Of(fault.ErrModel, err)
	}
	usage, err := u.devices.Machine.Usage(u.devices.Space)
	if err != nil {
		return nil, fault.Of(fault.ErrDevice, err)
	}
	if u.kernel, err = u.copyKernel(); err != nil {
		return nil, fault.Of(fault.ErrConfig, err)
	}
	hostKV := func(blockBytes int64) (n int64) {
		all, _ := u.kvTiers.Tiers(blockBytes, s.KV.BlockSize) // checked below
		for _, t := range all {
			n += t.HostBytes
		}
		return n
	}
	u.footprint, err = sizing.New(sizing.Options{
		Config: model.Config, Layout: u.layout, Types: u.devices.Backend, MaxModelLen: s.KV.MaxModelLen, BlockTokens: s.KV.BlockSize, CacheLayers: o.CacheLayers,
		Dynamic: s.Offload.DynamicResidency, InPlace: u.readsInPlace(), HostLogits: o.HostLogits,
		Graphs: !s.Kernels.EnforceEager && !u.devices.Machine.Capabilities().Emulated, Clears: len(u.peers) > 0, Kernels: usage.Allocated + u.kernel.TableBytes(0),
		ClearsAlways: len(u.kvPeers)+len(u.paths.relays) > 0, HostKV: hostKV,
	})
	u.full = u.footprint
	if err == nil {
		_, err = u.kvTierSizes()
	}
	return u, fault.Of(fault.ErrConfig, err)
}

// kvTierSizes are the tiers that the settings ask for.
func (u *setup) kvTierSizes() ([]offload.TierSize, error) {
	kv := u.footprint.KV()
	all, err := u.kvTiers.Tiers(kv.BlockBytes(), kv.BlockTokens)
	if err != nil {
		return nil, fmt.Errorf("KV tiers: %w", err)
	}
	return all, nil
}

// choosePeers finds the memories of the machine that may be borrowed from. Where nothing is
// offloaded after all, size removes them.
func (u *setup) choosePeers() error {
	offload := &u.settings.Offload
	c, err := u.settings.Device.ParsePeers()
	if err != nil {
		return err
	}
	// The named peers must exist, whether or not they are used.
	if !u.devices.Real() {
		if err := u.settings.Device.CheckPeers(len(u.devices.Machine.Topology().GPUs)); err != nil {
			return err
		}
	}
	peers, err := u.devices.Peers(c)
	if err != nil {
		return err
	}
	if u.kvTiers.GPUBlocks > 0 {
		if err := u.chooseKVPeers(peers); err != nil {
			return err
		}
	}
	if offload.Tier == configs.HostTier {
		return nil
	}
	if borrows(offload) && offload.Tier == configs.PeerTier && len(peers) == 0 {
		if u.devices.Real() {
			return errors.New("--offload-tier is peer, and there are no peers; name GPUs whose memory may be borrowed, as --peers 1")
		}
		return fmt.Errorf("--offload-tier is peer, and %s is the only GPU; use another tier", u.devices.Space)
	}
	u.peers, u.allPeers = peers, peers
	return nil
}

// facts of the machine, for planning.
func (u *setup) facts() planning.Machine {
	m := planning.Facts(u.devices.Machine, u.devices.Space, u.peers)
	m.Relays = u.paths.relays
	return m
}

// hardware is the planner's view of the machine: its memories, and the rates of the setting
// or those that are known or assumed.
func (u *setup) hardware() (h planner.Hardware, err error) {
	if name := u.settings.Plan.Hardware; name == "" {
		h = u.facts().Assume()
	} else if h, err = planning.LoadHardware(name); err != nil {
		return h, err
	} else {
		planning.Over(&h, u.settings.Device.GPU, u.relayNumbers())
	}
	gpu, host, err := u.devices.Usages()
	if err != nil {
		return h, err
	}
	h.GPUMemory, h.HostMemory = gpu.Capacity-gpu.OtherProcesses, host.Capacity-host.OtherProcesses
	budgets, err := u.budgets()
	if err != nil {
		return h, err
	}
	h.PeerMemory = 0
	for _, b := range budgets {
		h.PeerMemory += int64(b.Experts) * u.footprint.ExpertBytes()
	}
	if have, ok := u.devices.Shared(); ok {
		h.PeerMemory = min(h.PeerMemory, have) // of which all emulated memory is
	}
	if h.PeerToGPU == 0 {
		h.PeerMemory = 0 // named hardware without links to peers
	}
	return h, h.Validate()
}

// planning are the options of problems on the machine.
func (u *setup) planning() (planning.Options, error) {
	h, err := u.hardware()
	return planning.Options{
		Model: u.model.Name, Settings: &u.settings, Explicit: u.o.explicit(), Workload: u.o.Workload,
		Hardware: h, Shares: planner.Shares{GPU: u.settings.Device.GPUMemoryUtilization, Host: 1, Peer: 1},
	}, err
}

// advice is what makes the model fit.
func (u *setup) advice() (*planning.Advice, error) {
	whole := *u
	whole.peers = u.allPeers
	o, err := whole.planning()
	if err != nil {
		return nil, err
	}
	return planning.Advise(u.full, o)
}

// applyPolicy puts the policy, where there is one, into the settings.
func (u *setup) applyPolicy() error {
	s := &u.settings
	if s.Plan.Policy == configs.NoPolicy {
		return nil
	}
	o, err := u.planning()
	if err != nil {
		return err
	}
	p, err := planning.New(u.footprint, o)
	if err != nil {
		return err
	}
	if s.Offload.ResidentExperts != "" {
		placement, err := u.placement()
		if err != nil {
			return err
		}
		if err := p.Pin(u.footprint, placement); err != nil {
			return err
		}
	}
	if u.planned, err = p.Follow(); err != nil {
		return err
	}
	for _, note := range u.planned.Notes {
		u.o.Log.Warn("part of the policy does not apply", "reason", note)
	}
	r := &u.planned.Prediction
	u.o.Log.Info("policy selected", "source", s.Plan.Policy, "batch", r.Policy.Batch, "prefill_tokens", r.Policy.PrefillTokens, "resident_experts", r.Policy.ResidentExperts, "ttft_s", r.TTFT(), "tpot_s", r.TPOT(), "decode_tok_s", r.DecodeTokS, "bound", string(r.Decode.Bound))
	u.usePaths(r.Policy.HostPaths)
	return s.Put(u.planned.Settings)
}

// placement is the set of offloaded experts.
func (u *setup) placement() (experts.Placement, error) {
	offload := u.settings.Offload
	list := offload.ResidentExperts
	if path, ok := offload.ResidentExpertsFile(); ok {
		data, err := untrusted.ReadFile(path, untrusted.MaxSettings)
		if err != nil {
			return nil, fmt.Errorf("--resident-experts: %w", err)
		}
		list = string(data)
	}
	return u.footprint.Place(offload, list)
}

// size computes the memory of the settings.
func (u *setup) size() error {
	placement, err := u.placement()
	if err != nil {
		return err
	}
	gpu, host, err := u.devices.Usages()
	if err != nil {
		return err
	}
	u.needs, err = u.footprint.Needs(u.settings.Batch, placement, sizing.Memories{
		Space: u.devices.Space, GPU: gpu, Host: host, Share: u.settings.Device.GPUMemoryUtilization,
	})
	if err == nil && u.needs.Plan.OffloadedExperts == 0 {
		u.peers = nil
	}
	return err
}

// fit sizes the KV cache with the room that the needs leave. Its error ends with what makes
// the model fit.
func (u *setup) fit() (sizing.KVFit, error) {
	fit, err := u.needs.Fit(u.settings.Batch.MaxNumSeqs, u.settings.KV)
	if err == nil || u.settings.KV.MaxModelLen > u.model.Config.MaxPositions {
		return fit, err // no memory helps
	}
	var misfit *sizing.MisfitError
	if room, ok := u.needs.KVTierRoom(); ok && errors.As(err, &misfit) && misfit.Space == device.Host.String() {
		misfit.Advice = fmt.Sprintf("lower --kv-offloading-size, or num_cpu_blocks or cpu_bytes_to_use of --kv-transfer-config: there is room for %s", sizing.Bytes(room))
		return fit, err
	}
	a, adviceErr := u.advice()
	if adviceErr != nil {
		return fit, err
	}
	if errors.As(err, &misfit) {
		misfit.Advice = a.String()
		return fit, err
	}
	if a.Fits() {
		err = fmt.Errorf("%w; or %v", err, a)
	}
	return fit, err
}

// budget computes the memory of everything before it is allocated, and sizes the KV cache.
func (u *setup) budget() (sizing.KVFit, error) {
	if err := u.size(); err != nil {
		return sizing.KVFit{}, err
	}
	fit, err := u.fit()
	if err != nil {
		return fit, err
	}
	if fit.MaxModelLen < u.needs.Limits.MaxModelLen {
		u.warnOfContext(fit)
		// Tables of shorter sequences need less.
		u.footprint = u.footprint.Within(fit.MaxModelLen)
		if err := u.size(); err != nil {
			return fit, err
		}
	}
	if err := u.together(); err != nil {
		return fit, err
	}
	if err := u.shareMemory(fit); err != nil {
		return fit, err
	}
	if err := u.checkRelays(); err != nil {
		return fit, err
	}
	peers, err := u.borrowable()
	if err != nil {
		return fit, err
	}
	if u.needs.Plan.OffloadedExperts > 0 && len(peers) > 0 && !slices.ContainsFunc(peers, func(b sizing.PeerBudget) bool { return b.Experts > 0 }) {
		u.o.Log.Warn("no peer has room for an expert now; offloaded experts are fetched from host memory until one has", "headroom_bytes", peers[0].Headroom)
	}
	u.warnOfIdle()
	return fit, u.peersHold(peers)
}

// warnOfIdle names settings that were given explicitly and have no effect.
func (u *setup) warnOfIdle() {
	given, values, defaults := u.o.Explicit, u.settings.Values(), configs.Defaults().Values()
	var idle []string
	for _, key := range []string{"cpu-experts", "dynamic-residency", "expert-access", "kv-experts-share", "offload-tier"} {
		if given != nil && given(key) && values[key] != defaults[key] {
			idle = append(idle, "--"+key)
		}
	}
	switch b := u.settings.Batch; {
	case u.needs.Plan.OffloadedExperts == 0 && len(idle) > 0:
		u.o.Log.Warn("no expert is offloaded, so these settings have no effect", "settings", strings.Join(idle, " "))
	case b.CPUExperts == "auto" && b.Attention == configs.OnCPU:
		u.o.Log.Warn("--cpu-experts auto computes no experts on the CPU beside --attention cpu; give a fraction")
	}
}

// memory is what the memory of the GPU and of the host is for once the model is loaded.
func (u *setup) memory(fit sizing.KVFit) map[device.Space][]observe.MemoryPart {
	all := map[device.Space][]observe.MemoryPart{}
	for space, parts := range map[device.Space][]planner.Part{u.devices.Space: u.needs.Held(fit), device.Host: u.needs.HeldOnHost(fit)} {
		for _, p := range parts {
			all[space] = append(all[space], observe.MemoryPart{Name: p.Name, Bytes: p.Bytes})
		}
	}
	return all
}

// warnOfContext warns of a KV cache that is smaller than the model's context, which the
// settings have not asked for. A policy that is made for a number of requests has room for
// these.
func (u *setup) warnOfContext(fit sizing.KVFit) {
	if u.planned != nil && u.o.Workload.Requests > 0 {
		return
	}
	u.o.Log.Warn("the KV cache holds less than the model's context: longer requests are refused", "kv_cache_tokens", fit.Blocks*u.needs.KV.BlockTokens, "max_model_len", fit.MaxModelLen,
		"model_context", u.needs.Limits.MaxModelLen, "advice", u.contextAdvice(fit))
}

// contextAdvice is how to get a KV cache for more of the model's context than fits.
func (u *setup) contextAdvice(fit sizing.KVFit) string {
	if u.settings.KV.NumGPUBlocksOverride > 0 {
		return "raise --num-gpu-blocks-override"
	}
	if a, err := u.advice(); err == nil {
		if longer, ok := a.Longer(fit.MaxModelLen); ok {
			return longer.String()
		}
	}
	return "use more GPU memory, or a model with a smaller context"
}

// together refuses needs that this machine cannot emulate.
func (u *setup) together() error {
	if have, ok := u.devices.Shared(); ok {
		return u.needs.Together(have)
	}
	return nil
}

// shareMemory leaves emulated peers only the memory of this machine that GPU and host do not
// need: all emulated memory is this machine's. The rest counts as used by other processes.
func (u *setup) shareMemory(fit sizing.KVFit) error {
	have, ok := u.devices.Shared()
	if !ok || u.devices.Limiter == nil || len(u.lending()) == 0 {
		return nil
	}
	left := u.needs.Left(have, fit, len(u.lending()))
	for _, p := range u.lending() {
		usage, err := u.devices.Machine.Usage(p)
		if err != nil {
			return err
		}
		if err := u.devices.Limiter.Limit(p, usage.Allocated+usage.OtherProcesses+left); err != nil {
			return err
		}
	}
	return nil
}

// borrowable computes the budgets of peers, with the initial memory of other processes.
func (u *setup) borrowable() (_ []sizing.PeerBudget, err error) {
	if u.others, err = openPlayback(u.devices, u.settings.Harvest, u.o.Log); err != nil {
		return nil, err
	}
	return u.budgets()
}

// budgets are the memories that can be borrowed from peers.
func (u *setup) budgets() ([]sizing.PeerBudget, error) {
	room, err := u.settings.Harvest.ParseHeadroom()
	if err != nil {
		return nil, err
	}
	top := u.devices.Machine.Topology()
	var all []sizing.PeerBudget
	for _, p := range u.peers {
		usage, err := u.devices.Machine.Usage(p)
		if err != nil {
			return nil, err
		}
		all = append(all, sizing.NewPeerBudget(p, usage, sizing.Headroom(room, top, p), u.paths.kept(p), u.footprint.ExpertBytes()))
	}
	return all, nil
}

// peersHold returns an error where peers must hold copies of all offloaded experts and
// cannot.
func (u *setup) peersHold(peers []sizing.PeerBudget) error {
	if u.settings.Offload.Tier != configs.PeerTier {
		return nil
	}
	err := sizing.PeersHold(peers, &u.needs.Plan)
	if err == nil {
		return nil
	}
	if a, adviceErr := u.advice(); adviceErr == nil && !a.AnyTier && a.Fits() {
		return fmt.Errorf("%w; or %v", err, a)
	}
	return err
}

// steps are the options of a pipeline with the settings, without its executors.
func (u *setup) steps() pipeline.Options {
	p := u.footprint.Steps(u.needs.Limits, u.settings.Batch)
	p.Machine, p.Log = u.devices.Machine, u.o.Log
	p.ExpertAccess, p.AccessModel = u.settings.Batch.ExpertAccess, u.accessModel()
	p.BatchInvariant = u.settings.Kernels.BatchInvariant
	if p.HostAttention != nil {
		p.HostAttention = u.devices.OnCPU()
	}
	if p.CPUExperts != nil {
		p.CPUExperts, p.CPUShare = u.cpuExperts()
	}
	return p
}

// cpuExperts are the backend for experts on the CPU, and which experts it gets.
func (u *setup) cpuExperts() (kernels.Backend, *experts.CPUShare) {
	backend := u.devices.OnCPU()
	choice, _ := u.settings.Batch.ParseCPUExperts() // valid
	fraction := choice.Fraction
	if choice.Auto {
		fraction = experts.AutoCPUShare
		if p, err := u.devices.Machine.Topology().Path(device.Host, u.devices.Space); err != nil || p.BytesPerSecond == 0 {
			u.o.Log.Warn("--cpu-experts auto computes no experts on the CPU, as the rate of the link from host memory is not known; give a fraction", "gpu", u.devices.Space.String())
		}
	}
	return backend, experts.NewCPUShare(fraction, cpuRate(u.devices.CPUThreads()))
}

// cpuRate is what so many threads of a server read and compute of experts, until it is measured.
func cpuRate(threads int) experts.CPURate {
	return experts.CPURate{BytesPerSecond: min(9e9*float64(threads), 110e9), FlopsPerSecond: 100e9 * float64(threads), Latency: planner.CPUExpertsStart}
}

// kvSpace is the memory of the KV cache: where attention runs.
func (u *setup) kvSpace() device.Space {
	if u.settings.Batch.Attention == configs.OnCPU {
		return device.Host
	}
	return u.devices.Space
}
