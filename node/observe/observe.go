package observe

import (
	"errors"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/engine/scheduler"
	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/harvest"
	"github.com/moeserve/moeserve/kvcache/events"
	"github.com/moeserve/moeserve/kvcache/offload"
	"github.com/moeserve/moeserve/metrics"
	"github.com/moeserve/moeserve/pipeline"
	"github.com/moeserve/moeserve/rebalancer"
	"github.com/moeserve/moeserve/rebalancer/lending"
	"github.com/moeserve/moeserve/transfer"
)

// Parts of a node that are observed.
type Parts struct {
	// Model, Backend and Device as the user would name them; Space is that of the GPU that
	// computes.
	Model, Backend, Device string
	Machine                device.Machine
	Space                  device.Space
	Store                  *experts.Store
	Transfer               *transfer.Engine
	Pipeline               *pipeline.Pipeline
	Engine                 *engine.Engine
	Tiers                  *offload.Tiers         // nil without KV tiers
	Events                 *events.Publisher      // nil without KV events
	Lender                 *lending.Lender        // nil where the KV cache lends nothing to experts
	Harvest                *harvest.Runtime       // nil without peers
	Rebalancer             *rebalancer.Rebalancer // nil where nothing can move
	// Peers are the peers that may be borrowed from.
	Peers []Peer
	// Memory is what memory was allocated for when the model was loaded, by space.
	Memory map[device.Space][]MemoryPart
	// Dynamic: experts may be swapped.
	Dynamic bool
	// LoadTime is how long allocating memory and loading weights took.
	LoadTime time.Duration
	// Sleep reads whether the model sleeps.
	Sleep func() Sleep
	// Predict is the planner's prediction of a step's seconds; nil: the hardware is not known.
	Predict func(scheduler.Mix) float64
}

// Observer reads what the parts count.
type Observer struct {
	p    Parts
	last lastStep
}

// New makes an observer. The parts stay their owner's.
func New(p Parts) *Observer { return &Observer{p: p} }

// Backend is the name of what computes: "cpu", "cuda".
func (o *Observer) Backend() string { return o.p.Backend }

// Experts reads where experts are, and what was fetched and moved.
func (o *Observer) Experts() Experts { return readExperts(o.p.Store) }

// Links reads what links have copied.
func (o *Observer) Links() Links {
	paths := o.p.Machine.Topology().Paths
	var l Links
	for _, s := range o.p.Transfer.Stats() {
		l = append(l, Link{s, paths[device.Pair{From: s.From, To: s.To}].BytesPerSecond})
	}
	return l
}

// Memories reads the accounts of all memory spaces. With an error, those that can be read.
func (o *Observer) Memories() (m Memories, err error) {
	for _, s := range o.p.Machine.Topology().Spaces() {
		u, usage := o.p.Machine.Usage(s)
		if usage != nil {
			err = errors.Join(err, usage)
			continue
		}
		m = append(m, Memory{Space: s.String(), Capacity: u.Capacity, Allocated: u.Allocated, Peak: u.Peak})
	}
	return m, err
}

// Pipeline reads how steps ran.
func (o *Observer) Pipeline() Pipeline {
	return Pipeline{Stalls: o.p.Pipeline.Stalls(), Graphs: o.p.Pipeline.Graphs(), Steps: o.p.Pipeline.StepsByAccess()}
}

// Harvest reads what is borrowed; nothing without peers.
func (o *Observer) Harvest() Harvest {
	if o.p.Harvest == nil {
		return Harvest{}
	}
	s := o.p.Harvest.Summary()
	h := Harvest{Peers: s.Peers, Clients: s.Clients, Revocations: map[string]int64{}}
	for reason, n := range s.Revocations {
		h.Revocations[reason.String()] = n
	}
	return h
}

// Collectors collect the metrics of all parts but the engine's. Those that have vLLM's names have the
// name under which the model is served.
func (o *Observer) Collectors(model string) []metrics.Collector {
	return []metrics.Collector{
		collector[Experts]{o.Experts},
		collector[Links]{o.Links},
		collector[Memories]{func() Memories {
			m, _ := o.Memories() // what is lost has none
			return m
		}},
		collector[Pipeline]{o.Pipeline},
		collector[Harvest]{o.Harvest},
		collector[modelTiers]{func() modelTiers { return modelTiers{model, o.KVTiers()} }},
		collector[KVEvents]{o.KVEvents},
		collector[Lending]{o.Lending},
		collector[Sleep]{o.p.Sleep},
	}
}

// collects is a part's metrics.
type collects interface{ collect(to *metrics.Sink) }

// collector collects a part's metrics as they are when they are read.
type collector[M collects] struct{ read func() M }

// Collect implements metrics.Collector.
func (c collector[M]) Collect(to *metrics.Sink) { c.read().collect(to) }
