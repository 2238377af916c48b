package observe

import (
	"sync"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/pipeline"
)

// EngineStep is the name of the event of a step.
const EngineStep = "engine.step"

// maxRoutedTokens is the largest step whose event has the experts of its tokens.
const maxRoutedTokens = 8

// Step is a step that has ended, as an event with a JSON form. Stalls, links, fetches and experts are those since the
// step before; the first one that is observed has none.
type Step struct {
	Event string    `json:"event"`
	Time  time.Time `json:"time"`
	// Step is its number since the node was opened.
	Step int64 `json:"step"`
	// Tokens computed, of how many Sequences, and new tokens Sampled.
	Tokens    int     `json:"tokens"`
	Sequences int     `json:"sequences"`
	Sampled   int     `json:"sampled"`
	Seconds   float64 `json:"seconds"`
	// Predicted is the planner's prediction of its seconds on the hardware that it knows; 0: none.
	Predicted float64 `json:"predicted_seconds,omitempty"`
	// Stalls are the compute stream's, in seconds by cause.
	Stalls map[string]float64 `json:"stalls,omitempty"`
	Links  []LinkUse          `json:"links,omitempty"`
	// Fetches of experts; Fetched are these experts, as [layer, expert, fetches], in steps of up to 8 tokens.
	Fetches int64      `json:"fetches,omitempty"`
	Fetched [][3]int64 `json:"fetched,omitempty"`
	// Routed are the experts of the step's tokens, as [layer, expert, tokens], in steps of up to 8 tokens.
	Routed [][3]int64 `json:"routed,omitempty"`
}

// LinkUse is what a link copied within a step.
type LinkUse struct {
	Source      string  `json:"src"`
	Destination string  `json:"dst"`
	Bytes       int64   `json:"bytes"`
	BusySeconds float64 `json:"busy_seconds"`
}

// lastStep is what counters had at the end of the last step that was observed.
type lastStep struct {
	mu      sync.Mutex
	steps   int64 // 0: none was observed
	stalls  pipeline.Stalls
	links   map[device.Pair]LinkUse
	fetched [][]int64
	routed  [][]int64
}

// Step describes a step that has just ended. The engine's goroutine calls it; it takes time in proportion to the model's
// experts, so only while somebody wants to know.
func (o *Observer) Step(i engine.StepInfo) Step {
	l := &o.last
	l.mu.Lock()
	defer l.mu.Unlock()
	s := Step{
		Event: EngineStep, Time: time.Now(), Step: o.p.Engine.State().Steps, Tokens: i.Tokens, Sequences: i.Sequences, Sampled: i.Sampled, Seconds: i.Duration.Seconds(),
	}
	if o.p.Predict != nil {
		s.Predicted = o.p.Predict(i.Mix)
	}
	follows := l.steps > 0 && s.Step == l.steps+1
	l.steps = s.Step
	stalls := o.p.Pipeline.Stalls()
	if follows {
		s.Stalls = map[string]float64{}
		for name, seconds := range stalls.ByName() {
			if d := seconds - l.stalls.ByName()[name]; d > 0 {
				s.Stalls[name] = d
			}
		}
	}
	l.stalls = stalls
	links := map[device.Pair]LinkUse{}
	for _, t := range o.p.Transfer.Stats() {
		pair := device.Pair{From: t.From, To: t.To}
		links[pair] = LinkUse{t.From.String(), t.To.String(), t.Bytes, t.Busy.Seconds()}
		if before := l.links[pair]; follows && t.Bytes > before.Bytes {
			s.Links = append(s.Links, LinkUse{t.From.String(), t.To.String(), t.Bytes - before.Bytes, t.Busy.Seconds() - before.BusySeconds})
		}
	}
	l.links = links
	fetched, routed, numbers := o.p.Store.Fetches(), o.p.Store.RoutedTokens(), o.p.Store.LayerNumbers()
	if follows {
		s.Fetches = sum(fetched) - sum(l.fetched)
		if i.Tokens <= maxRoutedTokens {
			s.Fetched = increased(fetched, l.fetched, numbers)
			s.Routed = increased(routed, l.routed, numbers)
		}
	}
	l.fetched, l.routed = fetched, routed
	return s
}

func sum(counts [][]int64) (n int64) {
	for _, layer := range counts {
		for _, c := range layer {
			n += c
		}
	}
	return n
}

// increased are the experts whose counts have grown, as [layer, expert, by how many]; numbers are the model's of the layers.
func increased(now, before [][]int64, numbers []int) (all [][3]int64) {
	for layer, counts := range now {
		for expert, n := range counts {
			if d := n - before[layer][expert]; d > 0 {
				all = append(all, [3]int64{int64(numbers[layer]), int64(expert), d})
			}
		}
	}
	return all
}

// Now is what a node is doing: what its page shows beside where experts and KV blocks are. It has a JSON form.
type Now struct {
	Time    time.Time `json:"time"`
	Backend string    `json:"backend"`
	// Device is the product name of the GPU, or "emulated".
	Device string `json:"device"`
	// Running and Waiting samples; Steps, and tokens computed of prompts and generated, since the start.
	Running         int   `json:"running"`
	Waiting         int   `json:"waiting"`
	Steps           int64 `json:"steps"`
	PrefillTokens   int64 `json:"prefill_tokens"`
	GeneratedTokens int64 `json:"generated_tokens"`
	Preemptions     int64 `json:"preemptions"`
	PrefixQueries   int64 `json:"prefix_cache_queries"`
	PrefixHits      int64 `json:"prefix_cache_hits"`
	// Hits and Misses of experts, and the share that is offloaded.
	Hits            int64   `json:"expert_hits"`
	Misses          int64   `json:"expert_misses"`
	OffloadFraction float64 `json:"offload_fraction"`
	// Memories of the machine, and Links between them.
	Memories []MemoryState      `json:"memories"`
	Links    []LinkState        `json:"links"`
	Stalls   map[string]float64 `json:"stalls"`
	// SleepLevel is 0 while the model is awake.
	SleepLevel int `json:"sleep_level"`
	// Failing is why the present step fails; empty: it does not.
	Failing string `json:"failing,omitempty"`
}

// LinkState is what a link has copied, and its rate; 0: not known, or not limited.
type LinkState struct {
	LinkUse
	BytesPerSecond float64 `json:"bytes_per_second"`
}

// MemoryState is a memory space, and what its memory is for.
type MemoryState struct {
	Memory
	// OtherProcesses is what others than moeserve have of it.
	OtherProcesses int64 `json:"other_processes_bytes"`
	// Parts are those that were allocated when the model was loaded; of peers and of a sleeping model there are none.
	Parts []MemoryPart `json:"parts,omitempty"`
}

// MemoryPart is memory that has one purpose.
type MemoryPart struct {
	Name  string `json:"name"`
	Bytes int64  `json:"bytes"`
}

// memories reads the spaces; what is lost has none.
func (o *Observer) memories(asleep bool) []MemoryState {
	all := []MemoryState{}
	for _, s := range o.p.Machine.Topology().Spaces() {
		u, err := o.p.Machine.Usage(s)
		if err != nil {
			continue
		}
		m := MemoryState{Memory: Memory{Space: s.String(), Capacity: u.Capacity, Allocated: u.Allocated, Peak: u.Peak}, OtherProcesses: u.OtherProcesses}
		if !asleep {
			m.Parts = o.p.Memory[s]
		}
		all = append(all, m)
	}
	return all
}

// Now reads it. It may be called while requests run.
func (o *Observer) Now() Now {
	e, x := o.p.Engine.State(), o.Experts()
	n := Now{
		Time: time.Now(), Backend: o.p.Backend, Device: o.p.Device, Running: e.Running, Waiting: e.Waiting, Steps: e.Steps, PrefillTokens: e.PrefillTokens,
		GeneratedTokens: e.GeneratedTokens, Preemptions: e.Preemptions, PrefixQueries: e.PrefixCacheQueries, PrefixHits: e.PrefixCacheHits,
		Hits: x.Hits, Misses: x.Misses, OffloadFraction: x.OffloadFraction(),
		Links: []LinkState{}, Stalls: o.p.Pipeline.Stalls().ByName(), SleepLevel: int(o.p.Sleep().Level), Failing: text(e.Failing),
	}
	n.Memories = o.memories(n.SleepLevel > 0)
	for _, l := range o.Links() {
		n.Links = append(n.Links, LinkState{LinkUse{l.From.String(), l.To.String(), l.Bytes, l.Busy.Seconds()}, l.BytesPerSecond})
	}
	return n
}
