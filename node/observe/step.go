package observe

import (
	"cmp"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/kvcache/offload"
	"github.com/moeserve/moeserve/pipeline"
	"github.com/moeserve/moeserve/transfer"
)

// EngineStep is the name of the event of a step.
const EngineStep = "engine.step"

// RelayClient is the name of the account of relays' buffers in borrowed memory.
const RelayClient = "relay"

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
	// Timeline is when they were; 16 consecutive steps of each second have one.
	Timeline *Timeline `json:"timeline,omitempty"`
	// Bound is what the step was bound by; nil: not known of the first one.
	Bound *Bound `json:"bound,omitempty"`
	// Fetches of experts; Fetched are these experts, as [layer, expert, fetches], in steps of up to 8 tokens.
	Fetches int64      `json:"fetches,omitempty"`
	Fetched [][3]int64 `json:"fetched,omitempty"`
	// Routed are the experts of the step's tokens, as [layer, expert, tokens], in steps of up to 8 tokens.
	Routed [][3]int64 `json:"routed,omitempty"`
}

// LinkUse is what a link has copied, or copied within a step.
type LinkUse struct {
	Source      string `json:"src"`
	Destination string `json:"dst"`
	Bytes       int64  `json:"bytes"`
	// ByPurpose are the bytes by the name of the priority that their copy had in the end: "demand", "kv-load". Those of
	// 0 are absent.
	ByPurpose   map[string]int64 `json:"bytes_by_purpose,omitempty"`
	BusySeconds float64          `json:"busy_seconds"`
}

// linkUse is what a link has copied since before.
func linkUse(now, before transfer.PathStats) LinkUse {
	u := LinkUse{Source: now.From.String(), Destination: now.To.String(), Bytes: now.Bytes - before.Bytes, BusySeconds: (now.Busy - before.Busy).Seconds()}
	for p, bytes := range now.ByPriority {
		if bytes -= before.ByPriority[p]; bytes > 0 {
			if u.ByPurpose == nil {
				u.ByPurpose = map[string]int64{}
			}
			u.ByPurpose[transfer.Priority(p).String()] = bytes
		}
	}
	return u
}

// Bound is what a step was bound by.
type Bound struct {
	// By is "compute", "link", or the cause of a stall: "router-sync".
	By string `json:"by"`
	// Source and Destination are those of a link.
	Source      string `json:"src,omitempty"`
	Destination string `json:"dst,omitempty"`
	// Share of the step's time in which the GPU computed, the link was busy, or the compute stream waited, from 0 to 1.
	Share float64 `json:"share"`
}

// The bounds that are no stalls.
const (
	boundByCompute = "compute"
	boundByLink    = "link"
)

// bound finds what took the largest share of the step's time: computing, a stall, or, where the compute stream has waited
// for copies, a link that was busy with copies of this kind. Background copies bind no step, so a link's busy time
// counts by their share of its bytes, less gap: the seconds before the step that the links' counters include, in which
// it may have been busy too. A wait for copies is named by its link where that was busy for half as long or longer.
func (s *Step) bound(gap float64) *Bound {
	if s.Seconds <= 0 {
		return nil
	}
	computed := s.Seconds
	var stall string
	for _, cause := range slices.Sorted(maps.Keys(s.Stalls)) {
		computed -= s.Stalls[cause]
		if s.Stalls[cause] > s.Stalls[stall] {
			stall = cause
		}
	}
	by, seconds := &Bound{By: boundByCompute}, computed
	if s.Stalls[stall] > seconds {
		by, seconds = &Bound{By: stall}, s.Stalls[stall]
	}
	enough := seconds
	if by.By == pipeline.ExpertCopy.String() || by.By == pipeline.KVLoad.String() {
		enough /= 2
	}
	for _, l := range s.Links {
		var awaited int64
		if s.Stalls[pipeline.ExpertCopy.String()] > 0 {
			awaited = l.ByPurpose[transfer.Demand.String()] + l.ByPurpose[transfer.Prefetch.String()]
		}
		if s.Stalls[pipeline.KVLoad.String()] > 0 {
			awaited += l.ByPurpose[transfer.KVLoad.String()]
		}
		if b := l.BusySeconds*float64(awaited)/float64(max(l.Bytes, 1)) - gap; awaited > 0 && b >= enough {
			by, seconds, enough = &Bound{By: boundByLink, Source: l.Source, Destination: l.Destination}, b, b
		}
	}
	by.Share = min(seconds/s.Seconds, 1)
	return by
}

// lastStep is what counters had at the end of the last step that was observed.
type lastStep struct {
	mu       sync.Mutex
	steps    int64 // 0: none was observed
	time     time.Time
	stalls   pipeline.Stalls
	links    map[device.Pair]transfer.PathStats
	fetched  [][]int64
	routed   [][]int64
	recorder recorder
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
	links := map[device.Pair]transfer.PathStats{}
	for _, t := range o.p.Transfer.Stats() {
		pair := device.Pair{From: t.From, To: t.To}
		links[pair] = t
		if before := l.links[pair]; follows && t.Bytes > before.Bytes {
			s.Links = append(s.Links, linkUse(t, before))
		}
	}
	l.links = links
	if follows {
		s.Bound = s.bound(max(0, s.Time.Sub(l.time).Seconds()-s.Seconds))
	}
	l.time = s.Time
	s.Timeline = l.recorder.step(&o.p, follows)
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
	// Queued copies are under way now, or wait for nothing but the link; QueuedBytes of them have not landed.
	Queued      int   `json:"queued"`
	QueuedBytes int64 `json:"queued_bytes"`
}

// MemoryState is a memory space, and what its memory is for.
type MemoryState struct {
	Memory
	// OtherProcesses is what others than moeserve have of it.
	OtherProcesses int64 `json:"other_processes_bytes"`
	// Parts are those that were allocated when the model was loaded; of a sleeping model there are none. Those of
	// peers are what borrowed memory is for now.
	Parts []MemoryPart `json:"parts,omitempty"`
}

// MemoryPart is memory that has one purpose.
type MemoryPart struct {
	Name  string `json:"name"`
	Bytes int64  `json:"bytes"`
}

// memories reads the spaces; what is lost has none.
func (o *Observer) memories(asleep bool) []MemoryState {
	all, borrowed := []MemoryState{}, o.borrowed()
	for _, s := range o.p.Machine.Topology().Spaces() {
		u, err := o.p.Machine.Usage(s)
		if err != nil {
			continue
		}
		m := MemoryState{Memory: Memory{Space: s.String(), Capacity: u.Capacity, Allocated: u.Allocated, Peak: u.Peak}, OtherProcesses: u.OtherProcesses}
		if !asleep {
			m.Parts = o.p.Memory[s]
		}
		m.Parts = append(slices.Clone(m.Parts), borrowed[s]...)
		all = append(all, m)
	}
	return all
}

// clientNames are what borrowed memory is for, by the name of its account.
var clientNames = map[string]string{experts.HarvestClient: "copies of experts", offload.HarvestClient: "offloaded KV blocks", RelayClient: "relay buffers"}

// borrowed is what the memory that is borrowed of peers is for.
func (o *Observer) borrowed() map[device.Space][]MemoryPart {
	all := map[device.Space][]MemoryPart{}
	if o.p.Harvest == nil {
		return all
	}
	for _, p := range o.p.Harvest.Summary().Peers {
		// Clients have some of the slabs in service and of those that drain.
		rest := p.Used + p.FreeInSlabs + p.Draining
		for _, client := range slices.Sorted(maps.Keys(p.Clients)) {
			all[p.Space] = append(all[p.Space], MemoryPart{cmp.Or(clientNames[client], client), p.Clients[client]})
			rest -= p.Clients[client]
		}
		if rest > 0 {
			all[p.Space] = append(all[p.Space], MemoryPart{"borrowed, free", rest})
		}
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
		n.Links = append(n.Links, LinkState{linkUse(l.PathStats, transfer.PathStats{}), l.BytesPerSecond, l.Queued, l.QueuedBytes})
	}
	return n
}
