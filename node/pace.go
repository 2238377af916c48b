package node

import (
	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/engine/scheduler"
	"github.com/moeserve/moeserve/engine/steptime"
	"github.com/moeserve/moeserve/forward"
	"github.com/moeserve/moeserve/planner"
)

// pace limits the prompt tokens of steps that decode, as --max-itl says; nil: nothing does. It
// starts with the planner's prediction for this model on this machine.
func (u *setup) pace(i *Info) *steptime.Pace {
	choice, err := u.settings.Batch.ParseMaxITL()
	if err != nil || choice.Off { // an error has ended Validate
		return nil
	}
	o := steptime.Options{MaxSeconds: choice.Bound.Seconds(), StepTokens: i.Limits.MaxTokens}
	if o.Predict, err = u.predictor(i); err != nil {
		u.o.Log.Warn("the hardware is not known; how long steps take is learned from them", "err", err)
	}
	return steptime.New(o)
}

// predictor is the planner's prediction of the seconds of a step of this model on this machine.
func (u *setup) predictor(i *Info) (func(scheduler.Mix) float64, error) {
	h, err := u.hardware()
	if err != nil {
		return nil, err
	}
	m, plan := i.Shape.EnsureDefaults(), &u.needs.Plan
	s := planner.MixedStep{
		Fraction: float64(plan.OffloadedExperts) / float64(max(1, plan.OffloadedExperts+plan.ResidentExperts)),
		Rate:     h.HostToGPU[len(h.HostToGPU)-1],
	}
	if u.settings.Offload.Tier != configs.HostTier && h.PeerMemory > 0 {
		s.Rate += h.PeerToGPU
	}
	micro := u.settings.Batch.MicroBatchSize
	return func(x scheduler.Mix) float64 {
		s := s
		s.Decodes, s.DecodeContext = float64(x.Decodes), float64(x.DecodeContext)
		s.PromptTokens, s.PromptContext = float64(x.Prompt), float64(x.PromptContext)
		s.Groups = 1
		if micro > 0 && u.settings.Batch.Grouping == configs.PerMicroBatch {
			s.Groups = (x.Decodes + x.Prompt + micro - 1) / micro
		}
		return planner.MixedSeconds(&m, &h, s)
	}, nil
}

// maxLargerStep is the largest step that largerSteps suggests.
const maxLargerStep = 32768

// largerSteps returns how many tokens the steps of a long prompt should have, as a power of two: as many
// as take longer to compute than the copies of offloaded experts, for which each step pays once. 0: steps
// have a quarter as many already, or no prompt has more tokens than a step.
func largerSteps(predict func(scheduler.Mix) float64, l forward.Limits) int {
	at := func(tokens int) float64 { return predict(scheduler.Mix{Prompt: tokens}) }
	tokens := 1
	for tokens <= l.MaxTokens {
		tokens *= 2
	}
	// While copies bound a step it takes as long with more tokens.
	for copies := at(l.MaxTokens); tokens < min(maxLargerStep, l.MaxModelLen) && at(tokens) < 1.05*copies; {
		tokens *= 2
	}
	if tokens < 4*l.MaxTokens {
		return 0
	}
	return tokens
}
