package planning

import (
	"fmt"
	"math"
	"os"
	"strconv"
	"strings"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/node/sizing"
	"github.com/moeserve/moeserve/planner"
	"github.com/moeserve/moeserve/transfer"
)

// DefaultWorkload is what a policy is made for where nobody says: MT-Bench's prompts,
// without end.
var DefaultWorkload = planner.Workload{PromptTokens: 77, NewTokens: 32}

// Planned is a policy, what it should give, and where the numbers are from.
type Planned struct {
	// Model, and the size of one of its experts as it is laid out, in bytes.
	Model       planner.Model
	ExpertBytes int64
	Hardware    planner.Hardware
	Workload    planner.Workload
	Prediction  planner.Prediction
	// Settings that the policy asks for, by key.
	Settings map[string]any
	// KVBlocks that the policy's batch takes; a node's pool has the rest of the memory.
	KVBlocks int
	// SaturationPoints are the offload fractions up to which copies stay hidden with this policy,
	// by tier; only tiers that there are.
	SaturationPoints map[configs.Tier]float64
	// Missing is what this engine does not do of it.
	Missing []string
}

// runs is what of the planner's choices this engine carries out. The planner also counts
// with keys and values that stream from the host and with several paths from there, which
// plan --unrestricted shows.
func runs() planner.Choices {
	return planner.Choices{KVOnHost: []float64{0}, HostPaths: []int{1}}
}

// missing names what of a policy this engine does not carry out.
func missing(x *planner.Policy) []string {
	var list []string
	if x.Attention == configs.OnGPU && x.KVOnHost > 0 {
		list = append(list, "attention on the gpu with keys and values in host memory")
	}
	if x.HostPaths > 1 {
		list = append(list, fmt.Sprintf("%d paths from the host", x.HostPaths))
	}
	return list
}

// Explicit says which of the settings that bound a policy somebody has given: a policy
// leaves these as they are.
type Explicit struct {
	MaxNumSeqs, MaxNumBatchedTokens, MicroBatchSize, NumMicroBatches bool
	Grouping, Attention                                              bool
	Fraction, ResidentExperts                                        bool
}

// ExplicitIn asks by key.
func ExplicitIn(is func(key string) bool) Explicit {
	return Explicit{
		MaxNumSeqs: is("max-num-seqs"), MaxNumBatchedTokens: is("max-num-batched-tokens"),
		MicroBatchSize: is("micro-batch-size"), NumMicroBatches: is("num-micro-batches"),
		Grouping: is("expert-grouping"), Attention: is("attention"),
		Fraction: is("offload-fraction"), ResidentExperts: is("resident-experts"),
	}
}

// All says that everything is given.
func All() Explicit { return ExplicitIn(func(string) bool { return true }) }

// Options say what to plan for.
type Options struct {
	// Model's name in messages.
	Model    string
	Settings *configs.Settings
	Explicit Explicit
	// Workload is what a policy is made for. Default: DefaultWorkload.
	Workload planner.Workload
	// Hardware, of whose memories the Shares may be used.
	Hardware planner.Hardware
	Shares   planner.Shares
}

// EnsureDefaults fills in what is not given.
func (o Options) EnsureDefaults() Options {
	if o.Workload == (planner.Workload{}) {
		o.Workload = DefaultWorkload
	}
	return o
}

// Problem is what to plan for, together with the settings that bound its solutions.
type Problem struct {
	planner.Problem
	// offload and batch are settings; a policy keeps what is given of them.
	offload  configs.Offload
	batch    configs.Batch
	kv       configs.KV
	policy   configs.PolicySource
	explicit Explicit
}

// New puts a problem together.
func New(f *sizing.Footprint, o Options) (*Problem, error) {
	o = o.EnsureDefaults()
	s, h := o.Settings, &o.Hardware
	var fixed configs.Batch
	for _, x := range []struct {
		given    bool
		to, from *int
	}{
		{o.Explicit.MaxNumSeqs, &fixed.MaxNumSeqs, &s.Batch.MaxNumSeqs},
		{o.Explicit.MaxNumBatchedTokens, &fixed.MaxNumBatchedTokens, &s.Batch.MaxNumBatchedTokens},
		{o.Explicit.MicroBatchSize, &fixed.MicroBatchSize, &s.Batch.MicroBatchSize},
		{o.Explicit.NumMicroBatches, &fixed.NumMicroBatches, &s.Batch.NumMicroBatches},
	} {
		if x.given {
			*x.to = *x.from
		}
	}
	sizes, err := f.Sizes(fixed)
	if err != nil {
		return nil, err
	}
	sizes.MinKVBlocks = s.KV.NumGPUBlocksOverride
	if s.KV.NumGPUBlocksOverride == 0 && s.KV.MaxModelLen > 0 {
		sizes.MinKVBlocks = f.KV().BlocksFor(s.KV.MaxModelLen)
	}
	p := &Problem{
		Problem: planner.Problem{Model: f.Model(o.Model), Hardware: *h, Workload: o.Workload, Sizes: sizes, Shares: o.Shares, PromptsAlike: true},
		offload: s.Offload, batch: s.Batch, kv: s.KV, policy: s.Plan.Policy, explicit: o.Explicit,
	}
	if h.PeerToGPU > 0 {
		// The store cuts what a layer misses, here half of its experts, where the host's
		// part is large enough.
		p.BothLinks = transfer.Splits(f.ExpertBytes()*int64((p.Model.Experts+1)/2), h.HostToGPU[0], h.PeerToGPU)
	}
	return p, nil
}

// Pin has the planner count with a placement of experts, in place of a fraction spread
// evenly.
func (p *Problem) Pin(f *sizing.Footprint, placement experts.Placement) error {
	plan, err := f.Experts(placement.MaxPerLayer()).SizePlan(placement.Offloaded(), placement.MaxPerLayer())
	if err != nil {
		return err
	}
	p.Sizes.ExpertCache = func(int) int { return plan.CacheSlots }
	p.offload.Fraction = float64(placement.Offloaded()) / float64(p.Model.ExpertCount())
	p.explicit.Fraction = true
	return nil
}

// Follow finds the policy that the settings ask for. One of a file that this engine does
// not carry out is an error.
func (p *Problem) Follow() (*Planned, error) {
	if p.policy == configs.PlannedPolicy {
		return p.Search(true)
	}
	x, err := p.file()
	if err != nil {
		return nil, err
	}
	if list := missing(&x); len(list) > 0 {
		return nil, fmt.Errorf("%s: this engine does not do %s; make one with plan --json that leaves it out", p.policy, strings.Join(list, ", "))
	}
	return p.judge(x)
}

// Judge tells what the policy gives that the settings name.
func (p *Problem) Judge() (*Planned, error) {
	x, err := p.file()
	if err != nil {
		return nil, err
	}
	return p.judge(x)
}

func (p *Problem) judge(x planner.Policy) (*Planned, error) {
	r, err := p.Predict(x)
	if err != nil {
		return nil, err
	}
	return p.resolve(r), nil
}

// Search finds the best policy: of those that this engine carries out, or of all.
func (p *Problem) Search(carriedOut bool) (*Planned, error) {
	var c planner.Choices
	if carriedOut {
		c = runs()
	}
	c, err := p.bound(c)
	if err != nil {
		return nil, err
	}
	r, err := p.Problem.Search(c)
	if err != nil {
		return nil, err
	}
	return p.resolve(r), nil
}

// Fraction is the least offload fraction with which the model would fit, and false
// where it is not above one that keeps so many experts local.
func (p *Problem) Fraction(local int) (float64, bool) {
	x := planner.Policy{Batch: 1, Grouping: p.batch.Grouping}
	if p.batch.Attention == configs.OnCPU {
		x.Attention = configs.OnCPU
	}
	most, ok := p.MostResident(x)
	if !ok || most >= local {
		return 0, false
	}
	all := p.Model.ExpertCount()
	return fractionOf(all-most, all), true
}

// bound puts what is given into choices.
func (p *Problem) bound(c planner.Choices) (planner.Choices, error) {
	b, given := &p.batch, &p.explicit
	c.Tier = p.offload.Tier
	c.MaxBatch, c.MaxPrefillTokens = most("max-num-seqs"), most("max-num-batched-tokens")
	if given.MaxNumBatchedTokens {
		c.MaxBatch, c.PrefillTokens = min(c.MaxBatch, b.MaxNumBatchedTokens), b.MaxNumBatchedTokens
	}
	if p.kv.NumGPUBlocksOverride > 0 {
		c.MaxBatch = max(1, min(c.MaxBatch, p.kv.NumGPUBlocksOverride/p.blocks(1)))
	}
	if given.MaxNumSeqs {
		c.Batch = min(b.MaxNumSeqs, c.MaxBatch)
		if p.Workload.Requests > 0 {
			c.Batch = min(c.Batch, p.Workload.Requests)
		}
	}
	if given.MicroBatchSize && b.MicroBatchSize > 0 {
		c.MicroBatch = b.MicroBatchSize
		switch {
		case given.MaxNumSeqs && c.MicroBatch > b.MaxNumSeqs:
			return c, fmt.Errorf("micro-batch-size is %d and max-num-seqs is %d: make micro-batches at most the batch, or leave one of them to the policy", c.MicroBatch, b.MaxNumSeqs)
		case given.MaxNumBatchedTokens && c.MicroBatch > b.MaxNumBatchedTokens:
			return c, fmt.Errorf("micro-batch-size is %d: must be at most max-num-batched-tokens, %d", c.MicroBatch, b.MaxNumBatchedTokens)
		case c.Batch > 0:
			c.MicroBatch = min(c.MicroBatch, c.Batch)
		}
	}
	switch {
	case b.NumMicroBatches > 0 && given.NumMicroBatches:
		c.MicroBatches = b.NumMicroBatches
	case b.MicroBatchSize == 0 && given.MicroBatchSize:
		c.MicroBatches = 1
	}
	if given.Attention && b.Attention != configs.AnyPlace {
		c.Attention = []configs.Place{b.Attention}
	}
	if given.Grouping {
		c.Grouping = []configs.Grouping{b.Grouping}
	}
	if given.Fraction {
		c.Offload = &p.offload.Fraction
	}
	return c, nil
}

func most(key string) int {
	k, _ := configs.Find(key)
	return int(k.Max)
}

// blocks of the KV cache that a number of sequences takes.
func (p *Problem) blocks(sequences int) int {
	per := p.Sizes.KVBlockTokens
	return sequences * ((p.Workload.PromptTokens + p.Workload.NewTokens + per - 1) / per)
}

// file reads the policy that the settings name; what is given holds in its place.
func (p *Problem) file() (planner.Policy, error) {
	path := string(p.policy)
	data, err := os.ReadFile(path)
	if err != nil {
		return planner.Policy{}, fmt.Errorf("policy: %w; give none, auto, or a file that plan --json wrote", err)
	}
	x, err := planner.ParsePolicy(data, p.Model)
	if err != nil {
		return x, fmt.Errorf("%s: %w; plan --json writes policies", path, err)
	}
	all := p.Model.ExpertCount()
	// What bounds a search bounds a policy, too.
	c, err := p.bound(planner.Choices{})
	if err != nil {
		return x, err
	}
	if c.Batch > 0 {
		x.Batch = c.Batch
	} else {
		x.Batch = min(x.Batch, c.MaxBatch)
		if n := p.Workload.Requests; n > 0 {
			x.Batch = min(x.Batch, n)
		}
	}
	switch {
	case c.MicroBatch > x.Batch && x.Batch > 0 && p.Workload.Requests == 0:
		return x, fmt.Errorf("micro-batch-size is %d, and %s has a batch of %d: make micro-batches at most the batch", c.MicroBatch, path, x.Batch)
	case c.MicroBatch > 0:
		x.MicroBatch = min(c.MicroBatch, x.Batch)
	case c.MicroBatches > 0:
		x.MicroBatch = max(1, (x.Batch+c.MicroBatches-1)/c.MicroBatches)
	default:
		x.MicroBatch = min(x.MicroBatch, x.Batch)
	}
	if c.PrefillTokens > 0 {
		x.PrefillTokens = c.PrefillTokens
	}
	if c.Attention != nil {
		x.Attention = c.Attention[0]
		if x.Attention == configs.OnGPU {
			x.KVOnHost = 0
		}
	}
	if c.Grouping != nil {
		x.Grouping = c.Grouping[0]
	}
	if c.Offload != nil {
		x.ResidentExperts = all - p.Model.Offloaded(*c.Offload)
	}
	if x.PeerExperts = min(x.PeerExperts, all-x.ResidentExperts); p.offload.Tier == configs.HostTier {
		x.PeerExperts = 0
	}
	return x, nil
}

// resolve tells what a prediction comes to.
func (p *Problem) resolve(r planner.Prediction) *Planned {
	x, given := &r.Policy, &p.explicit
	all := p.Model.ExpertCount()
	d := &Planned{
		Model: p.Model, ExpertBytes: p.Sizes.Expert, Hardware: p.Hardware, Workload: p.Workload, Prediction: r,
		Settings: map[string]any{}, KVBlocks: p.blocks(x.Batch), SaturationPoints: map[configs.Tier]float64{}, Missing: missing(x),
	}
	decide := func(key string, given bool, value any) {
		if !given {
			d.Settings[key] = value
		}
	}
	decide("offload-fraction", given.Fraction || given.ResidentExperts, fractionOf(all-x.ResidentExperts, all))
	decide("max-num-seqs", given.MaxNumSeqs, x.Batch)
	decide("max-num-batched-tokens", given.MaxNumBatchedTokens, max(x.Batch, x.PrefillTokens))
	decide("micro-batch-size", given.MicroBatchSize || p.batch.NumMicroBatches > 0, sizing.BatchOf(x).MicroBatchSize)
	decide("expert-grouping", given.Grouping, x.Grouping.String())
	decide("attention", given.Attention && p.batch.Attention != configs.AnyPlace, x.Attention.String())
	list := []configs.Tier{configs.HostTier}
	if p.Hardware.PeerMemory > 0 {
		list = append(list, configs.PeerTier, configs.AnyTier)
	}
	for _, t := range list {
		if knee, err := p.SaturationPoint(*x, t); err == nil && !math.IsInf(knee, 0) {
			d.SaturationPoints[t] = knee
		}
	}
	return d
}

// fractionOf is the shortest offload fraction that stands for so many of all experts.
func fractionOf(offloaded, all int) float64 {
	exact := float64(offloaded) / float64(all)
	for digits := range 8 {
		f, err := strconv.ParseFloat(strconv.FormatFloat(exact, 'f', digits, 64), 64)
		if err == nil && int(math.Round(f*float64(all))) == offloaded {
			return f
		}
	}
	return exact
}
