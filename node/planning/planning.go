package planning

import (
	"errors"
	"fmt"
	"math"
	"sort"
	"strconv"
	"strings"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/node/sizing"
	"github.com/moeserve/moeserve/pipeline"
	"github.com/moeserve/moeserve/planner"
	"github.com/moeserve/moeserve/transfer"
	"github.com/moeserve/moeserve/untrusted"
)

// DefaultWorkload is the workload of policies without another one: MT-Bench's prompts,
// continuous.
var DefaultWorkload = planner.Workload{PromptTokens: 77, NewTokens: 32}

// Planned is a policy, its prediction, and what that is based on.
type Planned struct {
	// Model, and the size of one of its experts as it is laid out, in bytes.
	Model       planner.Model
	ExpertBytes int64
	Hardware    planner.Hardware
	Workload    planner.Workload
	Prediction  planner.Prediction
	// Settings of the policy, by key.
	Settings map[string]any
	// KVBlocks, of KVBlockTokens each, is the need of the policy's batch. A node's pool also
	// gets the rest of the memory: KVTokens in total, for sequences of up to MaxModelLen tokens
	// of the model's Context.
	KVBlocks, KVBlockTokens        int
	KVTokens, MaxModelLen, Context int
	// SaturationPoints are the maximum offload fractions at which copies are fully
	// overlapped with this policy, by tier; only tiers that the hardware has.
	SaturationPoints map[configs.Tier]float64
	// Missing lists features of the policy that this engine does not support.
	Missing []string
	// Notes are warnings: where the policy is not the one of its file.
	Notes []string
}

// supported are the planner's choices that this engine supports. The planner also knows
// GPU attention with a part of the KV cache on the host, which plan --unrestricted considers.
func supported() planner.Choices { return planner.Choices{KVOnHost: []float64{0}} }

// missing names the features of a policy that this engine does not support.
func missing(x *planner.Policy) []string {
	var list []string
	if x.Attention == configs.OnGPU && x.KVOnHost > 0 {
		list = append(list, "attention on the GPU with KV cache in host memory")
	}
	return list
}

// Explicit are the settings that bound a policy and were given explicitly: a policy does
// not change these.
type Explicit struct {
	MaxNumSeqs, MaxNumBatchedTokens, MicroBatchSize, NumMicroBatches bool
	Grouping, Attention                                              bool
	Fraction, ResidentExperts, HostPaths                             bool
}

// ExplicitIn reads the explicit settings by key.
func ExplicitIn(is func(key string) bool) Explicit {
	return Explicit{
		MaxNumSeqs: is("max-num-seqs"), MaxNumBatchedTokens: is("max-num-batched-tokens"),
		MicroBatchSize: is("micro-batch-size"), NumMicroBatches: is("num-micro-batches"),
		Grouping: is("expert-grouping"), Attention: is("attention"),
		Fraction: is("offload-fraction"), ResidentExperts: is("resident-experts"), HostPaths: is("host-paths"),
	}
}

// All has every setting explicit.
func All() Explicit { return ExplicitIn(func(string) bool { return true }) }

// Options of a problem.
type Options struct {
	// Model's name in messages.
	Model    string
	Settings *configs.Settings
	Explicit Explicit
	// Workload to plan for. Default: DefaultWorkload.
	Workload planner.Workload
	// Hardware, and the usable Shares of its memories.
	Hardware planner.Hardware
	Shares   planner.Shares
	// MaxTTFT and MaxTPOT bound a search, in seconds; 0: no bound.
	MaxTTFT, MaxTPOT float64
}

// EnsureDefaults fills in the workload.
func (o Options) EnsureDefaults() Options {
	if o.Workload == (planner.Workload{}) {
		o.Workload = DefaultWorkload
	}
	return o
}

// Problem is a planner's problem, together with the settings that bound its solutions.
type Problem struct {
	planner.Problem
	// offload and batch are settings; a policy keeps those that are explicit.
	offload          configs.Offload
	batch            configs.Batch
	kv               configs.KV
	policy           configs.PolicySource
	explicit         Explicit
	maxTTFT, maxTPOT float64
	// context is the maximum length of a sequence in tokens; step is the number of tokens
	// of a step that memory is reserved for, whatever the policy.
	context, step int
	// footprint and options are those of New.
	footprint *sizing.Footprint
	options   Options
}

// within is the workload with sequences of at most so many tokens.
func within(w planner.Workload, context int) planner.Workload {
	w.PromptTokens = max(1, min(w.PromptTokens, context-1))
	w.NewTokens = max(1, min(w.NewTokens, context-w.PromptTokens))
	return w
}

// Context is the maximum length of a sequence in tokens.
func (p *Problem) Context() int { return p.context }

// New makes a problem of a footprint. A workload whose sequences are longer than they may be is one of
// sequences of the maximum length.
func New(f *sizing.Footprint, o Options) (*Problem, error) {
	o = o.EnsureDefaults()
	o.Workload = within(o.Workload, f.MaxModelLen())
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
		maxTTFT: o.MaxTTFT, maxTPOT: o.MaxTPOT, context: f.MaxModelLen(), footprint: f, options: o,
	}
	choice, err := s.Batch.ParseCPUExperts()
	if err != nil {
		return nil, err
	}
	if p.CPUExperts = choice.Fraction; choice.Auto {
		p.CPUExperts = -1
	}
	Fetches(&p.Problem, f.ExpertBytes(), s.Batch.ExpertAccess)
	return p, nil
}

// Fetches sets how the engine gets at offloaded experts of a size, in bytes, over the links of the
// problem's hardware.
func Fetches(p *planner.Problem, expertBytes int64, access configs.ExpertAccess) {
	h := &p.Hardware
	p.HostBatch = transfer.PerBatch(h.HostToGPU[0], expertBytes)
	if h.PeerToGPU > 0 {
		p.PeerBatch = transfer.PerBatch(h.PeerToGPU, expertBytes)
		// The store splits a layer's misses, taken as half of its experts, where the host's
		// part is large enough.
		p.BothLinks = transfer.Splits(expertBytes*int64((p.Model.Experts+1)/2), h.HostToGPU[0], h.PeerToGPU)
	}
	if access != configs.CopyAccess && p.CPUExperts == 0 {
		p.InPlaceTokens, p.AlwaysInPlace = pipeline.MaxInPlaceTokens, access == configs.DirectAccess
	}
}

// Static predicts a static batch as bench throughput runs it: prompts in steps of so many tokens, and
// experts once a layer. The fraction and tier of offloaded experts, and where attention runs, are the settings'.
// What does not fit is predicted all the same.
func (p *Problem) Static(batch, stepTokens int) (planner.Prediction, error) {
	choice, err := p.options.Settings.Batch.ParseCPUExperts()
	if err != nil {
		return planner.Prediction{}, err
	}
	x := planner.Policy{Batch: batch, PrefillTokens: stepTokens, Attention: p.batch.Attention, Grouping: p.batch.Grouping}
	if x.Attention == configs.AnyPlace {
		x.Attention = configs.OnGPU
	}
	x.OnDemand = p.offload.Fraction > 0 && batch <= pipeline.OnDemandTokens(p.Model.Experts, p.Model.TopK, choice.On())
	if x, err = p.Offload(x, p.offload.Fraction, p.offload.Tier); err != nil {
		return planner.Prediction{}, err
	}
	r, err := p.Predict(x)
	var misfit *planner.MisfitError
	if errors.As(err, &misfit) {
		err = nil
	}
	return r, err
}

// Pin plans with a placement of experts, in place of a fraction spread evenly.
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

// Follow finds the policy that the settings name. A file's policy that this engine does not
// support is an error.
func (p *Problem) Follow() (*Planned, error) {
	if p.policy == configs.PlannedPolicy {
		return p.Search(true)
	}
	x, notes, err := p.file()
	if err != nil {
		return nil, err
	}
	if list := missing(&x); len(list) > 0 {
		return nil, fmt.Errorf("%s: this engine does not support %s; use --policy auto, or a file of plan --json without --unrestricted", p.policy, strings.Join(list, ", "))
	}
	r, err := p.judge(x, notes)
	var misfit *planner.MisfitError
	if errors.As(err, &misfit) {
		return nil, fmt.Errorf("%w; or use --policy auto, which plans for this machine", err)
	}
	return r, err
}

// Judge predicts the policy that the settings name.
func (p *Problem) Judge() (*Planned, error) {
	if p.maxTTFT > 0 || p.maxTPOT > 0 {
		return nil, fmt.Errorf("--max-ttft and --max-tpot bound a search, and --policy names a file, %s; leave one out", p.policy)
	}
	x, notes, err := p.file()
	if err != nil {
		return nil, err
	}
	return p.judge(x, notes)
}

func (p *Problem) judge(x planner.Policy, notes []string) (*Planned, error) {
	r, err := p.Predict(x)
	if err != nil {
		return nil, err
	}
	d := p.resolve(r)
	for _, q := range p.reserves() {
		if r, err := q.Predict(x); err == nil {
			d = q.resolve(r)
			break
		}
	}
	d.Notes = notes
	return d, nil
}

// Search finds the best policy: of those that this engine supports, or of all. For a
// continuous workload it leaves memory for sequences of the model's context and for prefill
// steps of usual size, or for as much of these as costs little throughput.
func (p *Problem) Search(onlySupported bool) (*Planned, error) {
	var c planner.Choices
	if onlySupported {
		c = supported()
	}
	c, err := p.bound(c)
	if err != nil {
		return nil, err
	}
	best, err := p.Problem.Search(c)
	if err != nil {
		return nil, p.without(err, onlySupported)
	}
	for _, q := range p.reserves() {
		if r, err := q.Predict(best.Policy); err == nil {
			return q.resolve(r), nil
		}
		if r, err := q.Problem.Search(c); err == nil && r.TokS >= (1-reserveCost)*best.TokS {
			return q.resolve(r), nil
		}
	}
	return p.resolve(best), nil
}

// without adds to a misfit the explicit setting without which there is a policy.
func (p *Problem) without(err error, onlySupported bool) error {
	var misfit *planner.MisfitError
	if !errors.As(err, &misfit) {
		return err
	}
	for _, s := range []struct {
		flag string
		of   func(*Explicit) *bool
	}{
		{"--offload-fraction", func(e *Explicit) *bool { return &e.Fraction }},
		{"--max-num-seqs", func(e *Explicit) *bool { return &e.MaxNumSeqs }},
		{"--max-num-batched-tokens", func(e *Explicit) *bool { return &e.MaxNumBatchedTokens }},
		{"--attention", func(e *Explicit) *bool { return &e.Attention }},
	} {
		o := p.options
		given := s.of(&o.Explicit)
		if !*given {
			continue
		}
		*given = false
		if q, bad := New(p.footprint, o); bad == nil {
			if _, bad := q.Search(onlySupported); bad == nil {
				return fmt.Errorf("%w; or leave out %s, which --policy auto then selects", err, s.flag)
			}
		}
	}
	return err
}

// reserves are the problem with memory for less and less: first for smaller prefill steps,
// then for a shorter context. There are none where the workload is not continuous.
func (p *Problem) reserves() []*Problem {
	var list []*Problem
	for tokens := p.context; p.Workload.Requests == 0 && tokens > p.Workload.PromptTokens+p.Workload.NewTokens; tokens /= 2 {
		for step := min(tokens, usualStep); ; step /= 4 {
			if step < p.Workload.PromptTokens {
				step = 0
			}
			if list = append(list, p.reserving(tokens, step)); step == 0 {
				break
			}
		}
	}
	return list
}

// reserveCost is the share of throughput that a longer context and larger prefill steps may
// cost.
const reserveCost = 0.1

// usualStep is the number of tokens of a prefill step that a continuous workload should have
// room for, as its prompts are not all alike.
var usualStep = configs.Defaults().Batch.MaxNumBatchedTokens

// reserving is the problem with memory for at least a sequence of a number of tokens, and for
// steps of a number of tokens.
func (p *Problem) reserving(tokens, step int) *Problem {
	q := *p
	if p.kv.NumGPUBlocksOverride == 0 {
		q.Sizes.MinKVBlocks = max(p.Sizes.MinKVBlocks, p.blocksOf(tokens))
	}
	q.step = step
	q.Sizes.Workspace = func(x *planner.Policy) (gpu, host int64) {
		y := *x
		y.PrefillTokens = max(x.PrefillTokens, step)
		return p.Sizes.Workspace(&y)
	}
	return &q
}

// kvBlocks is the size of a node's pool with a policy: the minimum and the rest of the memory
// space.
func (p *Problem) kvBlocks(r *planner.Prediction) int {
	x, s := &r.Policy, &r.Memory.GPU
	usable, share := s.Usable, 1.0
	if x.Attention == configs.OnCPU {
		s = &r.Memory.Host
		usable, share = s.Capacity, sizing.HostKVShare
	}
	blocks := max(p.blocks(x.Batch), p.Sizes.MinKVBlocks)
	if x.KVOnHost > 0 && x.Attention == configs.OnGPU {
		return blocks // in two spaces, which no node supports
	}
	free := usable - s.Need() + int64(blocks)*p.Sizes.KVBlock
	return int(share * float64(free) / float64(p.Sizes.KVBlock))
}

// blocksOf are the KV blocks of a number of tokens in one sequence.
func (p *Problem) blocksOf(tokens int) int {
	return (tokens + p.Sizes.KVBlockTokens - 1) / p.Sizes.KVBlockTokens
}

// plain is a policy of one sequence with the batch settings.
func (p *Problem) plain() planner.Policy {
	x := planner.Policy{Batch: 1, Grouping: p.batch.Grouping}
	if p.batch.Attention == configs.OnCPU {
		x.Attention = configs.OnCPU
	}
	return x
}

// keep reserves a number of KV blocks.
func (p *Problem) keep(blocks int) {
	if p.batch.Attention == configs.OnCPU {
		blocks = int(math.Ceil(float64(blocks) / sizing.HostKVShare))
	}
	p.Sizes.MinKVBlocks = blocks
}

// fitting is the offload fraction closest to that of the settings with which the model and a
// number of KV blocks fit, and false where there is none.
func (p *Problem) fitting(blocks int) (float64, bool) {
	p.keep(max(1, blocks))
	x, all := p.plain(), p.Model.ExpertCount()
	resident, ok := p.MostResident(x)
	if !ok {
		return 0, false
	}
	offloaded := all - resident
	if p.offload.Tier == configs.PeerTier {
		room := int(p.Hardware.PeerMemory / p.Sizes.Expert)
		if offloaded > room {
			return 0, false
		}
		x.ResidentExperts = all - max(offloaded, min(room, p.Model.Offloaded(p.offload.Fraction)))
		if _, err := p.Predict(x); err == nil {
			offloaded = all - x.ResidentExperts
		}
	}
	return p.Model.OffloadFraction(offloaded), true
}

// mostBlocks is the maximum number of KV blocks, up to a limit, that fit with any fraction.
func (p *Problem) mostBlocks(limit int) int {
	return sort.Search(limit, func(n int) bool {
		_, ok := p.fitting(n + 1)
		return !ok
	})
}

// need is the memory space that is too small for a number of KV blocks whatever the
// fraction.
func (p *Problem) need(blocks int) planner.Space {
	p.keep(blocks)
	x := p.plain()
	q := p.Problem
	q.Hardware.HostMemory = math.MaxInt64 / 4
	resident, onGPU := q.MostResident(x)
	x.ResidentExperts = resident
	// Of the error only its prediction counts.
	r, _ := p.Predict(x)
	if onGPU {
		return r.Memory.Host
	}
	return r.Memory.GPU
}

// bound puts the explicit settings into choices.
func (p *Problem) bound(c planner.Choices) (planner.Choices, error) {
	b, given := &p.batch, &p.explicit
	c.Tier, c.MaxTTFT, c.MaxTPOT = p.offload.Tier, p.maxTTFT, p.maxTPOT
	c.MaxBatch, c.MaxPrefillTokens = maximum("max-num-seqs"), maximum("max-num-batched-tokens")
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
			return c, fmt.Errorf("--micro-batch-size is %d and --max-num-seqs is %d: make micro-batches at most the batch, or leave one of them to the policy", c.MicroBatch, b.MaxNumSeqs)
		case given.MaxNumBatchedTokens && c.MicroBatch > b.MaxNumBatchedTokens:
			return c, fmt.Errorf("--micro-batch-size is %d: must be at most --max-num-batched-tokens, %d", c.MicroBatch, b.MaxNumBatchedTokens)
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
	switch {
	case given.Attention && b.Attention != configs.AnyPlace:
		c.Attention = []configs.Place{b.Attention}
	case p.kv.ExpertsShare == configs.AutoShare: // what is lent to experts is memory of a KV cache on the GPU
		c.Attention = []configs.Place{configs.OnGPU}
	}
	if given.Grouping {
		c.Grouping = []configs.Grouping{b.Grouping}
	}
	if given.Fraction {
		c.Offload = &p.offload.Fraction
	}
	if given.HostPaths { // all that there are
		c.HostPaths = []int{len(p.Hardware.HostToGPU)}
	}
	return c, nil
}

// maximum of a setting.
func maximum(key string) int {
	k, _ := configs.Find(key)
	return int(k.Max)
}

// blocks is the number of KV blocks of a batch of sequences.
func (p *Problem) blocks(sequences int) int {
	return sequences * p.blocksOf(p.Workload.PromptTokens+p.Workload.NewTokens)
}

// file reads the policy that the settings name; explicit settings replace its values. Notes
// report what else is not as in the file.
func (p *Problem) file() (x planner.Policy, notes []string, err error) {
	path := string(p.policy)
	data, err := untrusted.ReadFile(path, untrusted.MaxSettings)
	if err != nil {
		return x, nil, fmt.Errorf("--policy: %w; use none, auto, or a file of plan --json", err)
	}
	if x, err = planner.ParsePolicy(data, p.Model); err != nil {
		return x, nil, fmt.Errorf("%s: %w; plan --json writes policies", path, err)
	}
	all := p.Model.ExpertCount()
	// The bounds of a search bound a policy, too.
	c, err := p.bound(planner.Choices{})
	if err != nil {
		return x, nil, err
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
		return x, nil, fmt.Errorf("--micro-batch-size is %d, and %s has a batch of %d: make micro-batches at most the batch", c.MicroBatch, path, x.Batch)
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
	if have := len(p.Hardware.HostToGPU); c.HostPaths != nil {
		x.HostPaths = have
	} else if x.HostPaths > have {
		notes = append(notes, fmt.Sprintf("%s has %d paths from the host and there are %d; name relays (--host-paths), or make a policy for these", path, x.HostPaths, have))
		x.HostPaths = have
	}
	if x.PeerExperts > 0 && p.Hardware.PeerMemory == 0 {
		notes = append(notes, fmt.Sprintf("%s has %d experts in peer memory and there are no peers: these experts are fetched from host memory, which is slower; name peers (--peers), or make a policy without", path, x.PeerExperts))
		x.PeerExperts = 0
	}
	return x, notes, nil
}

// resolve turns a prediction into settings.
func (p *Problem) resolve(r planner.Prediction) *Planned {
	x, given := &r.Policy, &p.explicit
	all := p.Model.ExpertCount()
	d := &Planned{
		Model: p.Model, ExpertBytes: p.Sizes.Expert, Hardware: p.Hardware, Workload: p.Workload, Prediction: r,
		Settings: map[string]any{}, KVBlocks: p.blocks(x.Batch), KVBlockTokens: p.Sizes.KVBlockTokens, KVTokens: min(p.kvBlocks(&r), x.Batch*p.blocksOf(p.context)) * p.Sizes.KVBlockTokens, Context: p.context, SaturationPoints: map[configs.Tier]float64{}, Missing: missing(x),
	}
	if n := p.kv.NumGPUBlocksOverride; n > 0 {
		d.KVTokens = n * p.Sizes.KVBlockTokens
	}
	d.MaxModelLen = min(p.context, d.KVTokens)
	decide := func(key string, given bool, value any) {
		if !given {
			d.Settings[key] = value
		}
	}
	decide("offload-fraction", given.Fraction || given.ResidentExperts, p.Model.OffloadFraction(all-x.ResidentExperts))
	decide("max-num-seqs", given.MaxNumSeqs, x.Batch)
	decide("max-num-batched-tokens", given.MaxNumBatchedTokens, max(x.Batch, x.PrefillTokens, p.step))
	decide("micro-batch-size", given.MicroBatchSize || p.batch.NumMicroBatches > 0, sizing.BatchOf(x).MicroBatchSize)
	decide("expert-grouping", given.Grouping, x.Grouping.String())
	if len(p.Hardware.HostToGPU) > 1 {
		decide("host-paths", given.HostPaths, strconv.Itoa(x.HostPaths))
	}
	decide("attention", given.Attention && p.batch.Attention != configs.AnyPlace, x.Attention.String())
	list := []configs.Tier{configs.HostTier}
	if p.Hardware.PeerMemory > 0 {
		list = append(list, configs.PeerTier, configs.AnyTier)
	}
	for _, t := range list {
		if point, err := p.SaturationPoint(*x, t); err == nil && !math.IsInf(point, 0) {
			d.SaturationPoints[t] = point
		}
	}
	return d
}
