package forward

import (
	"errors"
	"fmt"
	"math"

	"github.com/moeserve/moeserve/models"
)

// SamplingParams describe how a token is sampled from its logits. The zero value is greedy.
type SamplingParams struct {
	// Temperature 0 selects the largest logit and ignores TopK, TopP and MinP.
	Temperature float32
	Seed        uint64
	// Sample is the index of the sample within its request.
	Sample int32
	// Position is the position of the sampled token in the sequence.
	Position int32
	// TopK keeps this many tokens with the highest probability; 0: all. TopP, 0 to 1, keeps the
	// most probable tokens that together reach this probability; 0 or 1: all. MinP, 0 to 1,
	// keeps the tokens whose probability is at least MinP times the highest; 0: all. See
	// kernels.Sample.
	TopK       int32
	TopP, MinP float32
	// RepetitionPenalty (1 or 0: off), PresencePenalty and FrequencyPenalty change the logits
	// of the tokens in Adjust only: see kernels.Adjust.
	RepetitionPenalty, PresencePenalty, FrequencyPenalty float32
	// Adjust lists tokens, each once, in any order.
	Adjust []TokenAdjust
	// LogProbs requests log-probabilities, of the logits before penalties, bias and
	// temperature, and behind Mask.
	LogProbs bool
	// Mask bans tokens; nil: none.
	Mask Mask
}

// Mask says which tokens may be sampled. It is asked when all else of a step is enqueued, so that it can be computed while
// the device computes.
type Mask interface {
	// Allowed sets dst: bit id%32 of word id/32 for each token that may be sampled, of Vocab/32 words rounded up. It may
	// wait for another goroutine.
	Allowed(dst []uint32)
}

// TokenAdjust changes the logit of one token: see kernels.Adjust.
type TokenAdjust struct {
	ID int32
	// Seen is -1 for a token in neither prompt nor completion, 0 for one in the prompt only, n
	// for one that occurs n times in the completion.
	Seen int32
	// Bias is added to the logit; -Inf bans the token.
	Bias float32
}

// hostSamples are the sampled tokens of a micro-batch.
type hostSamples struct {
	list    []hostSample
	adjusts []TokenAdjust // of all samples, in order
	masks   []hostMask
	// The parameters that at least one sample uses.
	usesTopK, usesTopP, usesMinP, logProbs bool
}

// hostSample samples one token from the logits at one row of the batch. Its adjusted tokens end
// at adjustEnd.
type hostSample struct {
	seed                            uint64
	row, sample, position           int32
	temperature                     float32
	topK                            int32
	topP, minP                      float32
	repetition, presence, frequency float32
	adjustEnd                       int32
}

// hostMask is the mask of the sample at an index of the list.
type hostMask struct {
	sample int32
	mask   Mask
}

// Sample requests the logits of a row of h, and a token sampled from them. It returns the index
// of the logit row within h. It rejects values that would make a backend read outside of its
// tensors or leave no token to sample; that Adjust lists no token twice is up to the caller.
func (h *HostBatch) Sample(row int, d *SamplingParams) (int, error) {
	if err := d.validate(h.config, &h.limits); err != nil {
		return 0, err
	}
	all := &h.samples
	if n := len(all.adjusts) + len(d.Adjust); n > h.limits.MaxAdjust {
		return 0, fmt.Errorf("forward: %d adjusted tokens exceed the maximum of %d", n, h.limits.MaxAdjust)
	}
	if len(d.Adjust) > 0 {
		all.adjusts = append(all.adjusts, d.Adjust...)
	}
	topP, repetition := d.TopP, d.RepetitionPenalty
	if topP == 0 {
		topP = 1
	}
	if repetition == 0 {
		repetition = 1
	}
	if d.Temperature > 0 {
		all.usesTopK = all.usesTopK || d.TopK > 0
		all.usesTopP = all.usesTopP || topP < 1
		all.usesMinP = all.usesMinP || d.MinP > 0
	}
	all.logProbs = all.logProbs || d.LogProbs
	if d.Mask != nil {
		all.masks = append(all.masks, hostMask{int32(len(all.list)), d.Mask})
	}
	x := grow(&all.list)
	x.seed, x.row, x.sample, x.position, x.temperature = d.Seed, int32(row), d.Sample, d.Position, d.Temperature
	x.topK, x.topP, x.minP = d.TopK, topP, d.MinP
	x.repetition, x.presence, x.frequency = repetition, d.PresencePenalty, d.FrequencyPenalty
	x.adjustEnd = int32(len(all.adjusts))
	return len(all.list) - 1, nil
}

// hostTarget is a row of the batch, and the token that follows it.
type hostTarget struct{ row, id int32 }

// Target requests the log-probability of token id as the one that follows a row of h, its rank, and the
// most probable tokens there: see Targets.
func (h *HostBatch) Target(row int, id int32) error {
	switch {
	case h.limits.MaxTopLogProbs == 0:
		return errors.New("forward: log-probabilities requested, but the limit MaxTopLogProbs is 0")
	case id < 0 || int(id) >= h.config.Vocab:
		return fmt.Errorf("forward: token id %d is outside the model's vocabulary of %d", id, h.config.Vocab)
	}
	t := grow(&h.targets)
	t.row, t.id = int32(row), id
	return nil
}

// validate checks d alone, without its batch.
func (d *SamplingParams) validate(c *models.Config, l *Limits) error {
	finite := func(f float32) bool { return f-f == 0 }
	switch {
	case !(d.Temperature >= 0 && finite(d.Temperature)):
		return fmt.Errorf("forward: temperature %g, want a finite number of at least 0", d.Temperature)
	case d.TopK < 0:
		return fmt.Errorf("forward: top-k %d, want 0 (all) or more", d.TopK)
	case !(d.TopP >= 0 && d.TopP <= 1):
		return fmt.Errorf("forward: top-p %g, want 0 to 1", d.TopP)
	case !(d.MinP >= 0 && d.MinP <= 1):
		return fmt.Errorf("forward: min-p %g, want 0 to 1", d.MinP)
	case !(d.RepetitionPenalty >= 0 && finite(d.RepetitionPenalty)):
		return fmt.Errorf("forward: repetition penalty %g, want a finite number above 0", d.RepetitionPenalty)
	case !finite(d.PresencePenalty) || !finite(d.FrequencyPenalty):
		return fmt.Errorf("forward: presence penalty %g and frequency penalty %g, want finite numbers", d.PresencePenalty, d.FrequencyPenalty)
	case d.LogProbs && l.MaxTopLogProbs == 0:
		return errors.New("forward: log-probabilities requested, but the limit MaxTopLogProbs is 0")
	}
	for i, a := range d.Adjust {
		switch {
		case a.ID < 0 || int(a.ID) >= c.Vocab:
			return fmt.Errorf("forward: adjusted token %d has id %d, outside the model's vocabulary of %d", i, a.ID, c.Vocab)
		case a.Seen < -1:
			return fmt.Errorf("forward: adjusted token %d was seen %d times, want -1 or more", i, a.Seen)
		case a.Bias != a.Bias || a.Bias > math.MaxFloat32:
			return fmt.Errorf("forward: adjusted token %d has bias %g, want a finite number or -Inf", i, a.Bias)
		}
	}
	return nil
}
