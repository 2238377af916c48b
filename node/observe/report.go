package observe

import (
	"context"
	"time"

	"github.com/moeserve/moeserve/experts"
)

// Report says what a node has done since it was opened.
type Report struct {
	// Model, Device and Backend as the user would name them.
	Model, Device, Backend string
	// Memory of each space.
	Memory []Memory
	// Layers that have experts.
	Layers   []Layer
	Experts  Experts
	Links    Links
	Harvest  Harvest
	Pipeline Pipeline
	// Dynamic says that other experts may become local.
	Dynamic bool
	// Steps that ended; Retried of them were run again after a failed copy.
	Steps, Retried int64
	// LoadTime is how long taking memory and loading took.
	LoadTime time.Duration
}

// Memory is the account of one memory space, in bytes. It has a JSON form.
type Memory struct {
	Space     string `json:"space"`
	Capacity  int64  `json:"capacity_bytes"`
	Allocated int64  `json:"allocated_bytes"`
	Peak      int64  `json:"peak_bytes"`
}

// Layer says of one layer, by the model's number, where its experts are. It has a JSON
// form.
type Layer struct {
	Layer int `json:"layer"`
	// Tiers of its experts, by their numbers.
	Tiers []experts.Tier `json:"tiers"`
	// RoutedTokens is how many rows chose each expert, Fetches how often each was
	// fetched.
	RoutedTokens []int64 `json:"routed_tokens"`
	Fetches      []int64 `json:"fetches"`
}

// Report reads the counts. No request may be running.
func (o *Observer) Report(ctx context.Context) (Report, error) {
	p := &o.p
	r := Report{
		Model: p.Model, Backend: p.Backend, Dynamic: p.Dynamic, LoadTime: p.LoadTime,
		Experts: o.Experts(), Links: o.Links(), Harvest: o.Harvest(), Pipeline: o.Pipeline(),
	}
	state := p.Engine.State()
	r.Steps, r.Retried = state.Steps, state.Retried
	t := p.Machine.Topology()
	if info, ok := t.Info(p.Space); ok {
		r.Device = info.Name
	}
	for _, s := range t.Spaces() {
		u, err := p.Machine.Usage(s)
		if err != nil {
			return r, err
		}
		r.Memory = append(r.Memory, Memory{Space: s.String(), Capacity: u.Capacity, Allocated: u.Allocated, Peak: u.Peak})
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
