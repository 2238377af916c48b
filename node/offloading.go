package node

import (
	"fmt"
	"math"

	"github.com/moeserve/moeserve/configs"
)

// OffloadFractionKey is the setting that SetOffloadFraction is about, and AutoOffload its value without
// a target.
const (
	OffloadFractionKey = "offload-fraction"
	AutoOffload        = "auto"
)

// Offloading is how many of a node's experts are offloaded, and how many are to be. It has a JSON form.
type Offloading struct {
	// Fraction of the experts that is offloaded now. Target is the one that was set; nil: memory goes
	// where it is worth more.
	Fraction float64  `json:"offload_fraction"`
	Target   *float64 `json:"target_fraction"`
	// Highest is the fraction at the start, Lowest the one with all extents lent.
	Highest float64 `json:"highest_fraction"`
	Lowest  float64 `json:"lowest_fraction"`
	// Extents of the KV cache can be lent, each for an expert. Lent ones are the experts' now;
	// TargetExtents are to be, nil without a target.
	Extents       int  `json:"extents"`
	Lent          int  `json:"lent_extents"`
	TargetExtents *int `json:"target_extents"`
}

// Offloading takes stock. It may be called while requests run.
func (n *Node) Offloading() Offloading {
	e, l := n.observer.Experts(), n.observer.Lending()
	o := Offloading{Fraction: e.OffloadFraction(), Target: n.target.Load(), Extents: l.Extents, Lent: l.Lent, TargetExtents: l.Target}
	o.Highest, o.Lowest = n.offloaded(0), n.offloaded(l.Extents)
	return o
}

// offloaded is the fraction of offloaded experts while so many extents have one.
func (n *Node) offloaded(lent int) float64 {
	p := n.store.Plan()
	return float64(p.OffloadedExperts-lent) / float64(max(p.OffloadedExperts+p.ResidentExperts, 1))
}

// extentsFor is how many extents have to be lent for a fraction of offloaded experts; negative: the
// fraction is above that of the start.
func (n *Node) extentsFor(fraction float64) int {
	p := n.store.Plan()
	return p.OffloadedExperts - int(math.Round(fraction*float64(p.OffloadedExperts+p.ResidentExperts)))
}

// CanOffload returns an error, a *configs.SettingError, where SetOffloadFraction refuses a fraction.
func (n *Node) CanOffload(fraction *float64) error {
	refuse := func(format string, args ...any) error {
		var value any = AutoOffload
		if fraction != nil {
			value = *fraction
		}
		return &configs.SettingError{Key: OffloadFractionKey, Value: value, Want: fmt.Sprintf(format, args...)}
	}
	switch {
	case fraction != nil && !(*fraction >= 0 && *fraction <= 1):
		return refuse("must be from 0 to 1")
	case n.info.Settings.KV.ExpertsShare != configs.AutoShare:
		return refuse("cannot change while the shares of the KV cache and of experts are fixed; start again with --kv-experts-share auto, or with another fraction")
	case n.store.Plan().OffloadedExperts == 0:
		return refuse("cannot change, as all experts were loaded into GPU memory of their own and stay there; start again with the highest fraction that you want to set")
	case n.memory == nil:
		return refuse("cannot change, as the KV cache holds one sequence of maximum length and no expert beside it; start again with a lower --max-model-len")
	case fraction != nil && n.extentsFor(*fraction) < 0:
		return refuse("the highest is %.4g, that of the start, as experts that were loaded into GPU memory of their own stay there; start again with a higher one", n.offloaded(0))
	}
	return nil
}

// SetOffloadFraction has the KV cache lend experts as much memory as brings the fraction of offloaded
// ones to this one, or as near as the extents of the KV cache allow; nil: memory goes where it is worth
// more. An error is CanOffload's. Memory moves between the steps that follow, as sequences leave it.
func (n *Node) SetOffloadFraction(fraction *float64) error {
	if err := n.CanOffload(fraction); err != nil {
		return err
	}
	n.balance.SetFillPlaces(fraction != nil)
	if fraction == nil {
		n.memory.SetTarget(nil)
		n.target.Store(nil)
		n.log.Info("offload target removed", "model", n.info.Name)
		return nil
	}
	target, lent := *fraction, n.extentsFor(*fraction)
	n.memory.SetTarget(&lent)
	n.target.Store(&target)
	o := n.Offloading()
	n.log.Info("offload target set", "model", n.info.Name, "target_fraction", target, "offload_fraction", o.Fraction,
		"lowest_fraction", o.Lowest, "lent_extents", o.Lent, "target_extents", min(lent, o.Extents))
	return nil
}
