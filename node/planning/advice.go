package planning

import (
	"fmt"
	"math"
	"strings"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/node/sizing"
	"github.com/moeserve/moeserve/planner"
)

// Advice is what makes a model fit.
type Advice struct {
	// Policy is the maximum length of a sequence with --policy auto, in tokens; 0: the
	// planner finds no policy. InPlaceOf names the flag that it, and the fraction, replace;
	// empty: none.
	Policy    int
	InPlaceOf string
	// Fraction is an offload fraction that fits, NaN without one; with
	// MaxNumBatchedTokens where that must be lower (else 0), and with AnyTier where peers
	// do not hold that many experts.
	Fraction            float64
	MaxNumBatchedTokens int
	AnyTier             bool
	// Tokens of KV cache fit beside it: one sequence of Context, the maximum length of a
	// sequence, or less; Lower: the settings ask for more. Blocks: the settings ask for a
	// number of blocks, which fit.
	Tokens, Context int
	Lower, Blocks   bool
	// Need is the memory space that is too small for any fraction; no name where there is
	// a fraction.
	Need planner.Space
}

// minBatchedTokens is the minimum of --max-num-batched-tokens that advice tries.
const minBatchedTokens = 16

// adviser tries settings.
type adviser struct {
	footprint *sizing.Footprint
	options   Options
	// blocks of the KV cache that should fit.
	blocks int
}

// Advise finds what makes a model fit: whether a policy does, and an offload fraction that
// leaves KV cache for one sequence of the footprint's maximum length or, where none does,
// for as much of it as possible.
func Advise(f *sizing.Footprint, o Options) (*Advice, error) {
	s := *o.Settings
	a := &Advice{Fraction: math.NaN(), Context: f.MaxModelLen()}
	var err error
	if a.Policy, a.InPlaceOf, err = policyFits(f, o); err != nil {
		return nil, err
	}
	if s.Offload.ResidentExperts != "" {
		a.InPlaceOf = "--resident-experts"
	}
	o.Settings, o.Explicit, o.Workload = &s, All(), planner.Workload{PromptTokens: 1, NewTokens: 1}
	t := adviser{footprint: f, options: o, blocks: f.KV().BlocksFor(a.Context)}
	if n := s.KV.NumGPUBlocksOverride; n > 0 {
		t.blocks, a.Blocks = n, true
	}
	if err := t.fraction(a); err != nil || !math.IsNaN(a.Fraction) || s.Offload.Tier != configs.PeerTier {
		return a, err
	}
	s.Offload.Tier, a.AnyTier = configs.AnyTier, true
	return a, t.fraction(a)
}

// policyFits returns the maximum length of a sequence with the policy that the planner finds
// with the explicit settings, or else without the one of what is offloaded, whose flag it
// returns; 0: there is none.
func policyFits(f *sizing.Footprint, o Options) (tokens int, inPlaceOf string, err error) {
	s := *o.Settings
	if s.Plan.Policy == configs.PlannedPolicy {
		return 0, "", nil
	}
	o.Settings = &s
	switch {
	case s.Offload.ResidentExperts != "":
		s.Offload.ResidentExperts, o.Explicit.ResidentExperts, inPlaceOf = "", false, "--resident-experts"
	case o.Explicit.Fraction:
		p, err := New(f, o)
		if err != nil {
			return 0, "", err
		}
		if d, err := p.Search(true); err == nil {
			return d.MaxModelLen, "", nil
		}
		o.Explicit.Fraction, inPlaceOf = false, "--offload-fraction"
	}
	p, err := New(f, o)
	if err != nil {
		return 0, "", err
	}
	d, misfit := p.Search(true)
	if misfit != nil {
		return 0, "", nil
	}
	return d.MaxModelLen, inPlaceOf, nil
}

// problem with a maximum of tokens a step.
func (t *adviser) problem(tokens int) (*Problem, error) {
	s := *t.options.Settings
	o := t.options
	o.Settings = &s
	s.Batch.MaxNumBatchedTokens = tokens
	s.Batch.NumMicroBatches, s.Batch.MicroBatchSize = min(s.Batch.NumMicroBatches, tokens), min(s.Batch.MicroBatchSize, tokens)
	return New(t.footprint, o)
}

// fraction fills in a fraction with which the blocks fit or, failing that, with the largest
// number of them; the fewest changes first.
func (t *adviser) fraction(a *Advice) error {
	given := t.options.Settings.Batch.MaxNumBatchedTokens
	best := 0 // blocks
	for _, all := range []bool{true, false} {
		if !all && a.Blocks {
			break // fewer blocks are not what the settings ask for
		}
		for tokens := given; tokens == given || tokens >= minBatchedTokens; tokens /= 2 {
			p, err := t.problem(tokens)
			if err != nil {
				return err
			}
			blocks := t.blocks
			if !all {
				blocks = p.mostBlocks(t.blocks)
			}
			f, ok := p.fitting(blocks)
			// Smaller steps are slower: they must be worth it.
			if !ok || blocks < 2*best {
				continue
			}
			best, a.Fraction, a.MaxNumBatchedTokens = blocks, f, 0
			a.Tokens = min(a.Context, blocks*p.Sizes.KVBlockTokens)
			a.Lower = a.Tokens < t.options.Settings.KV.MaxModelLen
			if tokens < given {
				a.MaxNumBatchedTokens = tokens
			}
			if all {
				return nil
			}
		}
	}
	if best > 0 {
		return nil
	}
	p, err := t.problem(min(given, minBatchedTokens))
	if err != nil {
		return err
	}
	a.Need = p.need(t.blocks)
	return nil
}

// Longer is the advice without what leaves no longer sequences than a number of tokens, and
// false if nothing is left of it.
func (a *Advice) Longer(tokens int) (*Advice, bool) {
	b := *a
	if b.Policy <= tokens {
		b.Policy = 0
	}
	if b.Tokens <= tokens {
		b.Fraction = math.NaN()
	}
	return &b, b.Fits()
}

// Fits reports whether there is a policy or a fraction that fits.
func (a *Advice) Fits() bool { return a.Policy > 0 || !math.IsNaN(a.Fraction) }

// String is the advice as the end of an error: "use --policy auto, or ...".
func (a *Advice) String() string {
	var options []string
	inPlaceOf := ""
	if a.InPlaceOf != "" {
		inPlaceOf = " in place of " + a.InPlaceOf
	}
	if a.Policy > 0 {
		options = append(options, "--policy auto"+inPlaceOf)
	}
	if !math.IsNaN(a.Fraction) {
		text := fmt.Sprintf("--offload-fraction %v", a.Fraction)
		for _, more := range []struct {
			flag string
			set  bool
		}{
			{fmt.Sprintf("--max-num-batched-tokens %d", a.MaxNumBatchedTokens), a.MaxNumBatchedTokens > 0},
			{"--offload-tier auto", a.AnyTier},
			{fmt.Sprintf("--max-model-len %d", a.Tokens), a.Lower},
		} {
			if more.set {
				text += " " + more.flag
			}
		}
		if a.InPlaceOf == "--resident-experts" {
			text += inPlaceOf
		}
		switch {
		case a.Blocks:
			text += " (which leaves the KV blocks of --num-gpu-blocks-override)"
		case a.Tokens < a.Context:
			text += fmt.Sprintf(" (which leaves a KV cache of %d tokens, less than the context of %d)", a.Tokens, a.Context)
		default:
			text += fmt.Sprintf(" (which leaves KV cache for one sequence of the full context, %d tokens)", a.Tokens)
		}
		options = append(options, text)
	}
	if len(options) > 0 {
		return "use " + strings.Join(options, ", or ")
	}
	return fmt.Sprintf("no offload fraction fits: use more %s memory (with --max-num-batched-tokens %d the minimum is %s usable) or a smaller model",
		a.Need.Name, minBatchedTokens, sizing.Bytes(a.Need.Need()))
}
