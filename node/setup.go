package node

import (
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/models"
	"github.com/moeserve/moeserve/node/checkpoint"
	"github.com/moeserve/moeserve/node/devices"
	"github.com/moeserve/moeserve/node/fault"
	"github.com/moeserve/moeserve/node/planning"
	"github.com/moeserve/moeserve/node/sizing"
	"github.com/moeserve/moeserve/pipeline"
	"github.com/moeserve/moeserve/planner"
)

// setup is a model on open devices before any memory is taken: what Open, Inspect and
// Plan begin with. Whoever makes one closes the devices.
type setup struct {
	o *Options
	// settings are the options'; follow changes them.
	settings  configs.Settings
	model     *checkpoint.Model
	devices   *devices.Devices
	peers     []device.Space // that may be borrowed from
	layout    *models.Layout
	footprint *sizing.Footprint
	planned   *planning.Planned // nil without a policy
	needs     *sizing.Needs     // nil before size
	others    *playback         // nil without a trace, and before lend
}

// borrows says whether offloaded experts may lie with peers, as far as the settings
// tell: a policy may yet offload some.
func borrows(o *configs.Offload) bool {
	return o.Tier != configs.HostTier && (o.Fraction > 0 || o.ResidentExperts != "")
}

// newSetup opens the devices and lays the model out on them.
func newSetup(o *Options, model *checkpoint.Model) (_ *setup, err error) {
	s := &o.Settings
	if h := s.Plan.Hardware; h != "" {
		// What is named must be there, whether or not anything counts with it.
		if _, err := planning.LoadHardware(h); err != nil {
			return nil, fault.Of(fault.ErrConfig, fmt.Errorf("hardware: %w", err))
		}
	}
	u := &setup{o: o, settings: o.Settings, model: model}
	if u.devices, err = devices.Open(devices.Options{
		Settings: s.Device, Kernels: s.Kernels, Weights: model.Config.DType, Trace: s.Output.Trace, Log: o.Log,
		Peers:       borrows(&s.Offload) || s.Plan.Policy != configs.NoPolicy && s.Offload.Tier != configs.HostTier,
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
	if u.layout, err = models.NewLayout(model.Config, model.Source, u.devices.Cast()); err != nil {
		return nil, fault.Of(fault.ErrModel, err)
	}
	usage, err := u.devices.Machine.Usage(u.devices.Space)
	if err != nil {
		return nil, fault.Of(fault.ErrDevice, err)
	}
	u.footprint, err = sizing.New(sizing.Options{
		Config: model.Config, Layout: u.layout, Types: u.devices.Backend, MaxModelLen: s.KV.MaxModelLen, CacheLayers: o.CacheLayers,
		Dynamic: s.Offload.DynamicResidency, HostLogits: o.HostLogits, Clears: len(u.peers) > 0, Kernels: usage.Allocated,
	})
	return u, fault.Of(fault.ErrConfig, err)
}

// choosePeers works out which memories of the machine may be borrowed from. Where it
// turns out that nothing is offloaded, none is.
func (u *setup) choosePeers() error {
	offload := &u.settings.Offload
	c, err := u.settings.Device.ParsePeers()
	if err != nil {
		return err
	}
	// What is named must be right, whether or not it is used.
	peers, err := u.devices.Peers(c)
	if err != nil || offload.Tier == configs.HostTier {
		return err
	}
	if borrows(offload) && offload.Tier == configs.PeerTier && len(peers) == 0 {
		if u.devices.Real() {
			return errors.New("offload-tier is peer and peers names no GPU: name those whose memory may be borrowed")
		}
		return fmt.Errorf("offload-tier is peer, and there is no GPU but %s to lend memory", u.devices.Space)
	}
	u.peers = peers
	return nil
}

// facts of the machine, for planning.
func (u *setup) facts() planning.Machine {
	return planning.Facts(u.devices.Machine, u.devices.Space, u.peers)
}

// hardware is the machine as the planner sees it: memories as they are, rates from the
// setting, or those that are known or assumed.
func (u *setup) hardware() (h planner.Hardware, err error) {
	if name := u.settings.Plan.Hardware; name == "" {
		h = u.facts().Assume()
	} else if h, err = planning.LoadHardware(name); err != nil {
		return h, err
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

// problem is the planner's, on the machine.
func (u *setup) problem(given planning.Explicit, w planner.Workload) (*planning.Problem, error) {
	h, err := u.hardware()
	if err != nil {
		return nil, err
	}
	return planning.New(u.footprint, planning.Options{
		Model: u.model.Name, Settings: &u.settings, Explicit: given, Workload: w,
		Hardware: h, Shares: planner.Shares{GPU: u.settings.Device.GPUMemoryUtilization, Host: 1, Peer: 1},
	})
}

// applyPolicy puts what a policy says, where there is one, into the settings.
func (u *setup) applyPolicy() error {
	s := &u.settings
	if s.Plan.Policy == configs.NoPolicy {
		return nil
	}
	p, err := u.problem(u.o.explicit(), u.o.Workload)
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
	r := &u.planned.Prediction
	u.o.Log.Info("policy selected", "source", s.Plan.Policy, "batch", r.Policy.Batch, "prefill_tokens", r.Policy.PrefillTokens, "resident_experts", r.Policy.ResidentExperts, "decode_tok_s", r.DecodeTokS, "bound", string(r.Decode.Bound))
	return s.Put(u.planned.Settings)
}

// placement says which experts are offloaded.
func (u *setup) placement() (experts.Placement, error) {
	offload := u.settings.Offload
	list := offload.ResidentExperts
	if path, ok := offload.ResidentExpertsFile(); ok {
		data, err := os.ReadFile(path)
		if err != nil {
			return nil, fmt.Errorf("resident-experts: %w", err)
		}
		list = string(data)
	}
	return u.footprint.Place(offload, list)
}

// size works out what the settings take of which memory.
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

// fit sizes the KV cache with what the needs leave, or says what there is too little of.
func (u *setup) fit() (sizing.KVFit, error) {
	fit, err := u.needs.Fit(u.settings.Batch.MaxNumSeqs, u.settings.KV)
	if _, short := u.needs.Device.Room(); short != nil && u.settings.Offload.ResidentExperts == "" {
		p, planErr := u.problem(planning.All(), planner.Workload{PromptTokens: 1, NewTokens: 1})
		if planErr != nil {
			return fit, err
		}
		if f, ok := p.Fraction(u.needs.Plan.ResidentExperts); ok {
			err = fmt.Errorf("%w; with offload-fraction %v it would fit", err, f)
		}
	}
	return fit, err
}

// budget works out what lies where, before anything is taken, and the KV cache.
func (u *setup) budget() (sizing.KVFit, error) {
	if err := u.size(); err != nil {
		return sizing.KVFit{}, err
	}
	fit, err := u.fit()
	if err != nil {
		return fit, err
	}
	if fit.MaxModelLen < u.needs.Limits.MaxModelLen {
		// Tables of shorter sequences take less.
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
	peers, err := u.lend()
	if err != nil {
		return fit, err
	}
	if u.needs.Plan.OffloadedExperts > 0 && len(peers) > 0 && !slices.ContainsFunc(peers, func(b sizing.PeerBudget) bool { return b.Experts > 0 }) {
		u.o.Log.Warn("no peer has room for an expert now; offloaded experts are fetched from host memory until one has", "headroom_bytes", peers[0].Headroom)
	}
	return fit, u.peersHold(peers)
}

// together refuses what this machine cannot emulate.
func (u *setup) together() error {
	if have, ok := u.devices.Shared(); ok {
		return u.needs.Together(have)
	}
	return nil
}

// shareMemory leaves emulated peers only as much memory as this machine has beside
// what the GPU that computes and the host take of it: it is all the same memory.
func (u *setup) shareMemory(fit sizing.KVFit) error {
	have, ok := u.devices.Shared()
	if !ok || u.devices.Limiter == nil || len(u.peers) == 0 {
		return nil
	}
	left := u.needs.Left(have, fit, len(u.peers))
	for _, p := range u.peers {
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

// lend works out what peers can lend, with what others hold of them at first.
func (u *setup) lend() (_ []sizing.PeerBudget, err error) {
	if u.others, err = openPlayback(u.devices, u.settings.Harvest, u.o.Log); err != nil {
		return nil, err
	}
	return u.budgets()
}

// budgets says what each peer can lend.
func (u *setup) budgets() ([]sizing.PeerBudget, error) {
	room, err := u.headroom()
	if err != nil {
		return nil, err
	}
	var all []sizing.PeerBudget
	for _, p := range u.peers {
		usage, err := u.devices.Machine.Usage(p)
		if err != nil {
			return nil, err
		}
		all = append(all, sizing.Lent(p, usage, room, u.footprint.ExpertBytes()))
	}
	return all, nil
}

// headroom is what stays free on each peer, in bytes.
func (u *setup) headroom() (int64, error) {
	h, err := u.settings.Harvest.ParseHeadroom()
	return sizing.Headroom(h, u.devices.Machine.Topology(), u.peers), err
}

// peersHold says whether peers can hold all offloaded experts, where they must.
func (u *setup) peersHold(peers []sizing.PeerBudget) error {
	if u.settings.Offload.Tier != configs.PeerTier {
		return nil
	}
	return sizing.PeersHold(peers, &u.needs.Plan)
}

// steps says how the settings have steps run, without what runs them.
func (u *setup) steps() pipeline.Options {
	p := u.footprint.Steps(u.needs.Limits, u.settings.Batch)
	p.Machine, p.Log = u.devices.Machine, u.o.Log
	if u.settings.Kernels.EnforceEager {
		p.Graphs = -1
	}
	if p.HostAttention != nil {
		p.HostAttention = u.devices.Host()
	}
	return p
}

// kvSpace is the memory that keys and values lie in: that of whoever attends.
func (u *setup) kvSpace() device.Space {
	if u.settings.Batch.Attention == configs.OnCPU {
		return device.Host
	}
	return u.devices.Space
}
