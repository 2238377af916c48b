package harvest

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
)

// PolicyOptions are the settings that a policy may take.
type PolicyOptions struct {
	// Clients have limits, by name, which Fairness enforces.
	Clients map[string]ClientLimits
	// EvacuateAt is when Interference and Stability revoke everything on a peer: see there.
	// Default: never.
	EvacuateAt float64
}

// ClientLimits are the limits of one client.
type ClientLimits struct {
	// Weight of the client's share among all clients. Default: 1.
	Weight float64
	// Quota in bytes, in place of the share. Default: none.
	Quota int64
	// Rate at which it may allocate, in bytes per second. Default: no limit.
	Rate float64
}

// policies are the constructors by name.
var policies = struct {
	sync.Mutex
	by map[string]func(PolicyOptions) (Policy, error)
}{by: map[string]func(PolicyOptions) (Policy, error){
	BestFit{}.Name():  func(o PolicyOptions) (Policy, error) { return BestFit{}, o.none("best-fit") },
	Locality{}.Name(): func(o PolicyOptions) (Policy, error) { return Locality{}, o.none("locality") },
	"fairness": func(o PolicyOptions) (Policy, error) {
		if o.EvacuateAt != 0 {
			return nil, errors.New("harvest: policy fairness leaves no peer; use interference or stability")
		}
		return NewFairness(o.fairness()), nil
	},
	Interference{}.Name(): func(o PolicyOptions) (Policy, error) {
		if o.EvacuateAt < 0 || o.EvacuateAt > 1 {
			return nil, fmt.Errorf("harvest: policy interference leaves a peer at a share of its memory's bandwidth, from 0 to 1, not at %g", o.EvacuateAt)
		}
		return Interference{EvacuateAt: o.EvacuateAt}, o.noClients("interference")
	},
	Stability{}.Name(): func(o PolicyOptions) (Policy, error) {
		return Stability{EvacuateAt: o.EvacuateAt}, o.noClients("stability")
	},
}}

// RegisterPolicy adds a policy, which NewPolicy then makes. It panics if there is one of that
// name. A program that takes the name as a setting allows it there, too (configs.Schema).
func RegisterPolicy(name string, construct func(PolicyOptions) (Policy, error)) {
	policies.Lock()
	defer policies.Unlock()
	if policies.by[name] != nil || name == "" {
		panic(fmt.Sprintf("harvest: policy %q is registered twice, or has no name", name))
	}
	policies.by[name] = construct
}

// NewPolicy returns the policy of that name.
func NewPolicy(name string, o PolicyOptions) (Policy, error) {
	policies.Lock()
	construct, names := policies.by[name], slices.Sorted(maps.Keys(policies.by))
	policies.Unlock()
	if construct == nil {
		return nil, fmt.Errorf("harvest: unknown policy %q; choose one of %s", name, strings.Join(names, ", "))
	}
	return construct(o)
}

// noClients refuses limits of clients, which only fairness has.
func (o PolicyOptions) noClients(policy string) error {
	if len(o.Clients) > 0 {
		return fmt.Errorf("harvest: policy %s has no limits of clients; use fairness", policy)
	}
	return nil
}

// none refuses all options.
func (o PolicyOptions) none(policy string) error {
	if o.EvacuateAt != 0 {
		return fmt.Errorf("harvest: policy %s leaves no peer; use interference or stability", policy)
	}
	return o.noClients(policy)
}

func (o PolicyOptions) fairness() FairnessOptions {
	f := FairnessOptions{Quotas: map[string]int64{}, Weights: map[string]float64{}, Rates: map[string]float64{}}
	for name, c := range o.Clients {
		if c.Weight > 0 {
			f.Weights[name] = c.Weight
		}
		if c.Quota > 0 {
			f.Quotas[name] = c.Quota
		}
		if c.Rate > 0 {
			f.Rates[name] = c.Rate
		}
	}
	return f
}
