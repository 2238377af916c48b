package node

import (
	"errors"
	"fmt"
	"slices"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/kvcache/offload"
	"github.com/moeserve/moeserve/models"
	"github.com/moeserve/moeserve/node/checkpoint"
	"github.com/moeserve/moeserve/node/devices"
	"github.com/moeserve/moeserve/node/fault"
	"github.com/moeserve/moeserve/node/planning"
	"github.com/moeserve/moeserve/node/sizing"
)

// Inspection is what Open would do with the same options, without doing it.
type Inspection struct {
	// Settings, with the changes of a policy; Planned is that policy, or nil.
	Settings configs.Settings
	Planned  *planning.Planned
	Model    string
	Config   *models.Config
	Sizes    sizing.ModelSizes
	// Routing method and DType of the weights, in words.
	Routing, DType string
	// Resident and Offloaded experts, and the tier of each.
	Resident, Offloaded int
	Placement           []LayerPlacement
	// Demands on the memory spaces, without the KV cache.
	Demands []sizing.Demand
	// KV is the KV cache that gets the rest, in blocks of KVBlockBytes.
	KV           sizing.KVFit
	KVBlockBytes int64
	// KVTiers keep blocks that the GPU has no room for, fastest first.
	KVTiers []offload.TierSize
	// Peers that may be borrowed from.
	Peers []sizing.PeerBudget
	// Relays are the GPUs, by number, over whose links copies from and to the host go beside the
	// computing GPU's own; each keeps RelayBytes of its memory.
	Relays     []int
	RelayBytes int64
	// Problem is the error of Open for lack of memory on these devices, or nil. RunsHere is
	// the error where this machine cannot emulate them, or nil.
	Problem, RunsHere error
	// Advice is how to get a KV cache for the model's context, where it is smaller and the
	// settings do not ask for that; else empty.
	Advice string
}

// LayerPlacement is the initial tiers of one layer's experts.
type LayerPlacement struct {
	Layer int
	Tiers []string
}

// Inspect returns a model's sizes and the placement of its experts. It reads no weights and
// allocates no device memory; a preset needs no load format. Errors are as those of Open,
// but for insufficient memory, which Inspection reports.
func Inspect(o Options) (_ *Inspection, err error) {
	if _, ok := configs.Preset(o.Settings.Model.Name); ok {
		o.Settings.Model.LoadFormat = configs.LoadDummy
	}
	if err := o.Validate(); err != nil {
		return nil, err
	}
	o = o.EnsureDefaults()
	model, err := checkpoint.Open(o.Settings.Model, o.Settings.Generate.Seed)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, fault.Of(fault.ErrModel, model.Close())) }()
	if err := o.onHardware(model.Config.DType); err != nil {
		return nil, err
	}
	u, err := newSetup(&o, model)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, u.devices.Close()) }()
	if err := u.applyPolicy(); err != nil {
		return nil, fault.Of(fault.ErrConfig, err)
	}
	if err := u.size(); err != nil {
		return nil, fault.Of(fault.ErrConfig, err)
	}
	plan := &u.needs.Plan
	in := &Inspection{
		Settings: u.settings, Planned: u.planned, Model: model.Name, Config: model.Config, Sizes: sizing.OfModel(model.Config, u.layout),
		Routing: routing(model.Config.Route), DType: model.Config.DType.String(),
		Resident: plan.ResidentExperts, Offloaded: plan.OffloadedExperts,
		Demands: []sizing.Demand{u.needs.Device, u.needs.Host}, KVBlockBytes: u.needs.KV.BlockBytes(),
	}
	for i, l := range plan.Layers {
		tiers := make([]string, plan.Experts)
		for e := range tiers {
			tiers[e] = experts.Resident.String()
		}
		for _, e := range plan.Placement[i] {
			tiers[e] = experts.Host.String()
			if u.settings.Offload.Tier == configs.PeerTier {
				tiers[e] = experts.Peer.String()
			}
		}
		in.Placement = append(in.Placement, LayerPlacement{l, tiers})
	}
	if in.KVTiers, err = u.kvTierSizes(); err != nil {
		return nil, fault.Of(fault.ErrConfig, err)
	}
	in.KV, in.Problem = u.fit()
	if in.Problem == nil && in.KV.MaxModelLen < u.needs.Limits.MaxModelLen {
		in.Advice = u.contextAdvice(in.KV)
	}
	in.RunsHere = u.together()
	if in.RunsHere == nil { // else peers, too, are of another machine
		if err := u.shareMemory(in.KV); err != nil {
			return nil, fault.Of(fault.ErrConfig, err)
		}
	}
	if in.RunsHere == nil {
		if err := u.checkRelays(); err != nil && in.Problem == nil {
			in.Problem = err
		}
	}
	if in.Relays = u.relayNumbers(); len(in.Relays) > 0 {
		in.RelayBytes = u.paths.relayBytes()
	}
	if in.Peers, err = u.borrowable(); err != nil {
		return nil, fault.Of(fault.ErrConfig, err)
	}
	if in.Problem == nil {
		in.Problem = u.peersHold(in.Peers)
	}
	return in, nil
}

// onHardware has the machine that the setting hardware names inspected, unless the settings
// say which devices to take.
func (o *Options) onHardware(weights kernels.DType) error {
	s := &o.Settings
	if s.Plan.Hardware == "" || s.Device.Emulate != "" || s.Device.Kind == configs.CUDA || o.OpenMachine != nil {
		return nil
	}
	h, err := planning.LoadHardware(s.Plan.Hardware)
	if err != nil {
		return fault.Of(fault.ErrConfig, fmt.Errorf("--hardware: %w", err))
	}
	c, err := s.Device.ParsePeers()
	if err != nil {
		return fault.Of(fault.ErrConfig, err)
	}
	// As of real GPUs, peers are those that are named.
	peers, each := 0, h.PeerMemory
	paths, err := choosePaths(s)
	if err != nil {
		return fault.Of(fault.ErrConfig, err)
	}
	if all := append(slices.Clone(c.GPUs), paths.wanted...); len(all) > 0 {
		peers = slices.Max(all)
	}
	if each == 0 {
		each = h.GPUMemory // of a product of which no peers are known
	}
	o.OpenMachine = devices.Sized(h.GPUMemory, h.HostMemory, each, peers)
	o.OpenBackend = func(device.Machine) (kernels.Backend, error) { return planning.Sized(weights), nil }
	return nil
}

func routing(m kernels.RouteMethod) string {
	return [...]string{
		kernels.Softmax:       "softmax",
		kernels.SoftmaxRenorm: "softmax, renormalized",
		kernels.SparseMixer:   "sparsemixer",
	}[m]
}
