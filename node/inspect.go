package node

import (
	"errors"
	"log/slog"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/models"
)

// Inspection is what Open would do with the same options.
type Inspection struct {
	// Settings, with what a policy has changed; Planned is that policy, or nil.
	Settings configs.Settings
	Planned  *Planned
	Model    string
	Config   *models.Config
	Sizes    Sizes
	// Routing and DType in words: how experts are chosen, the type of weights.
	Routing, DType string
	// Local and Offloaded experts, and the tier of each.
	Local, Offloaded int
	Placement        []LayerPlacement
	// Demands on the memory spaces, without the KV cache.
	Demands []Demand
	// KV is the cache that the rest is used for, in blocks of KVBlockBytes.
	KV           KVFit
	KVBlockBytes int64
	// Peers that may be borrowed from.
	Peers []PeerBudget
	// Problem is why Open would fail for lack of memory on these devices; nil if it
	// would not. Here is why they cannot be emulated on this machine, or nil.
	Problem, Here error
}

// LayerPlacement says of one layer in which tiers its experts start.
type LayerPlacement struct {
	Layer int
	Tiers []string
}

// Inspect tells a model's sizes and works out what would live where. It reads no
// weights and takes no memory; a preset needs no load format. Errors are as those
// of Open, but for memory that does not suffice, which Inspection tells.
func Inspect(o Options) (_ *Inspection, err error) {
	if _, ok := configs.Preset(o.Settings.Model.Name); ok {
		o.Settings.Model.LoadFormat = configs.LoadDummy
	}
	if err := o.Settings.Validate(); err != nil {
		return nil, fail(ErrConfig, err)
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	n := &Node{settings: o.Settings, log: o.Log}
	defer func() { err = errors.Join(err, n.Close()) }()
	model, err := OpenModel(o.Settings)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, fail(ErrModel, model.Close())) }()
	n.name, n.config = model.Name, model.Config
	if err := n.prepare(&o, model.Source); err != nil {
		return nil, err
	}
	if err := n.follow(&o); err != nil {
		return nil, fail(ErrConfig, err)
	}
	needs, err := n.needs(&o)
	if err != nil {
		return nil, fail(ErrConfig, err)
	}
	in := &Inspection{
		Settings: n.settings, Planned: n.planned, Model: n.name, Config: n.config, Sizes: SizesOf(n.config, n.layout),
		Routing: routing(n.config.Route), DType: n.config.DType.String(),
		Local: n.plan.LocalExperts, Offloaded: n.plan.OffloadedExperts,
		Demands: []Demand{needs.device, needs.host}, KVBlockBytes: needs.kv.BlockBytes(),
	}
	for i, l := range n.plan.Layers {
		tiers := make([]string, n.plan.Experts)
		for e := range tiers {
			tiers[e] = experts.Local.String()
		}
		for _, e := range n.plan.Placement[i] {
			tiers[e] = experts.Host.String()
			if n.settings.Offload.Tier == configs.PeerTier {
				tiers[e] = experts.Peer.String()
			}
		}
		in.Placement = append(in.Placement, LayerPlacement{l, tiers})
	}
	in.KV, in.Problem = n.fit(&o, needs)
	in.Here = n.together(needs.device.Need(), needs.host.Need())
	if in.Here == nil { // else peers, too, are of a machine that is not this one
		if err := n.shareMemory(needs, in.KV); err != nil {
			return nil, fail(ErrConfig, err)
		}
	}
	if in.Peers, err = n.lend(); err != nil {
		return nil, fail(ErrConfig, err)
	}
	if in.Problem == nil {
		in.Problem = n.peersHold(in.Peers)
	}
	return in, nil
}

func routing(m kernels.RouteMethod) string {
	return [...]string{
		kernels.Softmax:       "softmax",
		kernels.SoftmaxRenorm: "softmax, renormalized",
		kernels.SparseMixer:   "sparsemixer",
	}[m]
}
