package observe

import (
	"context"
	"time"

	"github.com/moeserve/moeserve/experts"
)

// Report is what a node has done since it was opened.
type Report struct {
	// Model, Device and Backend as the user would name them.
	Model, Device, Backend string
	// Emulated: the CPU plays the devices.
	Emulated bool
	// Clock is the time on the machine's clock, which Links are busy by.
	Clock time.Duration
	// Memory of each space.
	Memory Memories
	// Layers that have experts.
	Layers   []Layer
	Experts  Experts
	Links    Links
	Harvest  Harvest
	Pipeline Pipeline
	KVTiers  KVTiers
	// Dynamic: experts may be swapped.
	Dynamic bool
	// Steps that ended; Retried of them were run again after a failed copy.
	Steps, Retried int64
	// LoadTime is how long allocating memory and loading weights took.
	LoadTime time.Duration
}

// Layer is where the experts of one layer are, by the model's number. It has a JSON form.
type Layer struct {
	Layer int `json:"layer"`
	// Tiers of its experts, by their numbers.
	Tiers []experts.Tier `json:"tiers"`
	// RoutedTokens is how many tokens were routed to each expert, Fetches how often each
	// was fetched.
	RoutedTokens []int64 `json:"routed_tokens"`
	Fetches      []int64 `json:"fetches"`
}

// Report reads the counts. No request may be running.
func (o *Observer) Report(ctx context.Context) (Report, error) {
	p := &o.p
	r := Report{
		Model: p.Model, Backend: p.Backend, Dynamic: p.Dynamic, LoadTime: p.LoadTime,
		Experts: o.Experts(), Links: o.Links(), Harvest: o.Harvest(), Pipeline: o.Pipeline(), KVTiers: o.KVTiers(),
	}
	state := p.Engine.State()
	r.Steps, r.Retried = state.Steps, state.Retried
	if info, ok := p.Machine.Topology().Info(p.Space); ok {
		r.Device = info.Name
	}
	r.Emulated, r.Clock = p.Machine.Capabilities().Emulated, p.Machine.Now()
	var err error
	if r.Memory, err = o.Memories(); err != nil {
		return r, err
	}
	counts, err := p.Pipeline.Counts(ctx)
	if err != nil {
		return r, err
	}
	where, fetches := p.Store.Residency(), p.Store.Fetches()
	for i, l := range p.Store.Plan().Layers {
		r.Layers = append(r.Layers, Layer{Layer: l, Tiers: where[i], RoutedTokens: counts[l], Fetches: fetches[i]})
	}
	return r, nil
}
