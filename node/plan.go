package node

import (
	"errors"
	"fmt"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/node/checkpoint"
	"github.com/moeserve/moeserve/node/fault"
	"github.com/moeserve/moeserve/node/planning"
)

// PlanOptions say what to plan for.
type PlanOptions struct {
	Options
	// Unrestricted also considers what this engine does not do.
	Unrestricted bool
	// PeerMemory is what each peer has to lend, in bytes, where the setting hardware
	// names a machine; 0: what that says. The head-room stays free of it.
	PeerMemory int64
}

// Plan finds the best policy, or judges the one that the settings name, for the
// hardware that they name or for this machine. It takes no memory and reads no
// weights. Errors are as those of Open; a policy that does not fit is a
// *planner.MisfitError.
func Plan(o PlanOptions) (_ *planning.Planned, err error) {
	s := &o.Settings
	if _, ok := configs.Preset(s.Model.Name); ok || checkpoint.Weightless(s.Model.Name) {
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
		return nil, fault.Of(fault.ErrConfig, errors.New("resident-experts: a plan spreads experts evenly; give offload-fraction"))
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
	var planned *planning.Planned
	if s.Plan.Policy == configs.PlannedPolicy {
		planned, err = p.Search(!o.Unrestricted)
	} else {
		planned, err = p.Judge()
	}
	return planned, fault.Of(fault.ErrConfig, err)
}

// problem is that of named hardware, or of this machine.
func (o *PlanOptions) problem(model *checkpoint.Model) (_ *planning.Problem, err error) {
	if o.Settings.Plan.Hardware != "" {
		return planning.NewNamed(model, planning.NamedOptions{
			Settings: &o.Settings, Explicit: o.explicit(), Workload: o.Workload,
			CacheLayers: o.CacheLayers, HostLogits: o.HostLogits, PeerMemory: o.PeerMemory,
		})
	}
	if o.PeerMemory > 0 {
		return nil, fault.Of(fault.ErrConfig, errors.New("peer-memory goes with hardware: of this machine's peers it is known what they have"))
	}
	u, err := newSetup(&o.Options, model)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, u.devices.Close()) }()
	p, err := u.problem(o.explicit(), o.Workload)
	return p, fault.Of(fault.ErrConfig, err)
}
