package node

import (
	"errors"
	"fmt"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/node/checkpoint"
	"github.com/moeserve/moeserve/node/fault"
	"github.com/moeserve/moeserve/node/planning"
)

// PlanOptions of a plan.
type PlanOptions struct {
	Options
	// Unrestricted also considers policies that this engine does not support.
	Unrestricted bool
	// PeerMemory is the memory of each peer, in bytes, where the setting hardware names a
	// machine; 0: that machine's. The headroom stays free of it.
	PeerMemory int64
	// MaxTTFT and MaxTPOT bound the search, in seconds; 0: no bound.
	MaxTTFT, MaxTPOT float64
}

// Plan finds the best policy, or predicts the one that the settings name, for the hardware
// that they name or for this machine. It allocates no device memory and reads no weights.
// Errors are as those of Open; a policy that does not fit is a *planner.MisfitError, and
// bounds out of reach are a *planner.LatencyError.
func Plan(o PlanOptions) (_ *planning.Planned, err error) {
	s := &o.Settings
	if _, ok := configs.Preset(s.Model.Name); ok || checkpoint.ConfigOnly(s.Model.Name) {
		s.Model.LoadFormat = configs.LoadDummy
	}
	if s.Plan.Policy == configs.NoPolicy {
		s.Plan.Policy = configs.PlannedPolicy
	}
	if err := o.Validate(); err != nil {
		return nil, err
	}
	o.Options = o.EnsureDefaults()
	if s.Offload.ResidentExperts != "" {
		return nil, fault.Of(fault.ErrConfig, errors.New("--resident-experts: a plan spreads experts evenly; use --offload-fraction"))
	}
	model, err := checkpoint.Open(s.Model, s.Generate.Seed)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, fault.Of(fault.ErrModel, model.Close())) }()
	if model.Config.ExpertCount() == 0 {
		return nil, fault.Of(fault.ErrConfig, fmt.Errorf("%s has no experts to plan for", model.Name))
	}
	p, err := o.problem(model)
	if err != nil {
		return nil, err
	}
	if w, most := o.Workload, p.Context(); w.PromptTokens+w.NewTokens > most && w != planning.DefaultWorkload {
		return nil, fault.Of(fault.ErrConfig, fmt.Errorf(
			"prompts of %d tokens (--input-len) and %d generated (--output-len) are longer together than a sequence may be, %d tokens (--max-model-len; by default the model's maximum); lower one of them",
			w.PromptTokens, w.NewTokens, most))
	}
	var planned *planning.Planned
	if s.Plan.Policy == configs.PlannedPolicy {
		planned, err = p.Search(!o.Unrestricted)
	} else {
		planned, err = p.Judge()
	}
	return planned, fault.Of(fault.ErrConfig, err)
}

// problem is that of named hardware, or of this machine, or of emulated devices: these have the rates of the
// hardware that is named.
func (o *PlanOptions) problem(model *checkpoint.Model) (_ *planning.Problem, err error) {
	if o.Settings.Plan.Hardware != "" && o.Settings.Device.Emulate == "" {
		return planning.NewNamed(model, planning.NamedOptions{
			Settings: &o.Settings, Explicit: o.explicit(), Workload: o.Workload,
			CacheLayers: o.CacheLayers, HostLogits: o.HostLogits, PeerMemory: o.PeerMemory, MaxTTFT: o.MaxTTFT, MaxTPOT: o.MaxTPOT,
		})
	}
	if o.PeerMemory > 0 {
		return nil, fault.Of(fault.ErrConfig, errors.New("--peer-memory needs --hardware, without --emulate: other peers have the memory that they have"))
	}
	u, err := newSetup(&o.Options, model)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, u.devices.Close()) }()
	po, err := u.planning()
	if err != nil {
		return nil, fault.Of(fault.ErrConfig, err)
	}
	po.MaxTTFT, po.MaxTPOT = o.MaxTTFT, o.MaxTPOT
	p, err := planning.New(u.footprint, po)
	return p, fault.Of(fault.ErrConfig, err)
}
