package eval

import (
	"errors"
	"math"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/planner"
)

// Result is the measurement of one configuration. Seconds are those of the node's
// clock.
type Result struct {
	Run Run `json:"run"`
	Machine
	Model           string             `json:"model"`
	DType           string             `json:"dtype"`
	LoadFormat      configs.LoadFormat `json:"load_format"`
	Tier            configs.Tier       `json:"tier"`
	OffloadFraction float64            `json:"offload_fraction"`
	// HostPaths is the number of links that copies from and to the host go over; AllPaths: a sweep also
	// measures this with one.
	HostPaths int  `json:"host_paths"`
	AllPaths  bool `json:"all_host_paths,omitempty"`
	// Setting is the value of the setting that a sweep varies; absent: it varies none.
	Setting          string           `json:"setting,omitempty"`
	MicroBatchTokens int              `json:"micro_batch_tokens"`
	NumMicroBatches  int              `json:"num_micro_batches"`
	ExpertGrouping   configs.Grouping `json:"expert_grouping"`
	Attention        configs.Place    `json:"attention"`
	// Requests run as one batch; PromptTokens and GeneratedTokens are those of all of
	// them in one trial.
	Requests        int `json:"requests"`
	PromptTokens    int `json:"prompt_tokens"`
	GeneratedTokens int `json:"generated_tokens"`
	// TruncatedPrompts of the prompts were longer than the model's context allows.
	TruncatedPrompts int `json:"truncated_prompts"`
	// WarmupTokens were sampled of each request before the trials.
	WarmupTokens int     `json:"warmup_tokens"`
	Trials       []Trial `json:"trials"`
	// ThroughputTokS is end to end: generated tokens over prefill and decode. PrefillTokS
	// is prompt tokens over prefill, DecodeTokS requests * (new tokens - 1) over decode.
	// Means are over trials, of PrefillTokS over those that computed the prompts.
	ThroughputTokS float64 `json:"throughput_tok_s"`
	PrefillTokS    float64 `json:"prefill_tok_s"`
	DecodeTokS     float64 `json:"decode_tok_s"`
	// StddevTokS and DecodeStddevTokS are the standard deviations of ThroughputTokS and
	// DecodeTokS; nil with one trial, which has none.
	StddevTokS       *float64 `json:"stddev_tok_s,omitempty"`
	DecodeStddevTokS *float64 `json:"decode_stddev_tok_s,omitempty"`
	// Hits and Misses are uses of experts over all trials: of resident and cached ones,
	// and of those that had to be fetched. HitRate is the hits' share of both; 0 where no
	// expert was used.
	Hits    int64   `json:"hits"`
	Misses  int64   `json:"misses"`
	HitRate float64 `json:"hit_rate"`
	// DirectSteps are the steps of all trials that read offloaded experts in place.
	DirectSteps int64 `json:"direct_steps"`
	// FetchedBytes, with what was read in place, and StallS are over all trials, DecodeStepBytes a decode step's
	// mean.
	FetchedBytes    Bytes              `json:"fetched_bytes"`
	DecodeStepBytes Bytes              `json:"decode_step_bytes"`
	StallS          map[string]float64 `json:"stall_s"`
	// DistinctExperts is how many of a layer's experts the last decode step
	// used, and TokensPerExpert the tokens that were routed to each of these; means over
	// layers. MaxTokensPerExpert is the maximum.
	DistinctExperts    float64 `json:"distinct_experts"`
	TokensPerExpert    float64 `json:"tokens_per_expert"`
	MaxTokensPerExpert int64   `json:"max_tokens_per_expert"`
	HBMPeakBytes       int64   `json:"hbm_peak_bytes"`
	// Roofline and Prediction are null where the hardware's rates are not known, and
	// where it has no peers and the experts come from some.
	Roofline   *Roofline   `json:"roofline"`
	Prediction *Prediction `json:"prediction"`
	// TokensSHA256 is over all generated ids in the order of the requests, each as 32
	// bits, the lowest byte first; empty on devices that keep no data. Where trials may differ, of
	// the first.
	TokensSHA256 string `json:"tokens_sha256"`
}

// Trial is one run of all requests.
type Trial struct {
	PrefillSeconds float64 `json:"prefill_s"`
	DecodeSeconds  float64 `json:"decode_s"`
	// PrefillRepeated: this trial went on from the prompts of an earlier one, whose
	// prefill time it repeats.
	PrefillRepeated bool `json:"prefill_repeated,omitempty"`
}

// Bytes of experts by the tier that they were fetched from.
type Bytes struct {
	Host int64 `json:"host"`
	Peer int64 `json:"peer"`
}

func (b *Bytes) add(more Bytes) {
	b.Host += more.Host
	b.Peer += more.Peer
}

// Roofline is the fastest decode step that the hardware allows. With attention on the CPU
// it is the planner's prediction.
type Roofline struct {
	// Bound is what limits it.
	Bound string `json:"bound"`
	// TokS is the decode throughput there, Fraction the measured one's share of it; absent
	// where the devices that were measured are not that hardware.
	TokS     float64 `json:"tok_s"`
	Fraction float64 `json:"fraction,omitempty"`
}

// Prediction is what the planner expects of the hardware.
type Prediction struct {
	PrefillSeconds float64 `json:"prefill_s"`
	DecodeSeconds  float64 `json:"decode_s"`
	ThroughputTokS float64 `json:"throughput_tok_s"`
	DecodeTokS     float64 `json:"decode_tok_s"`
	// Bound of a decode step, and of a prefill step.
	Bound        string `json:"bound"`
	PrefillBound string `json:"prefill_bound"`
	// GPUSeconds and LinkSeconds are the times of a decode step's compute, and of its copies on the busiest
	// link.
	GPUSeconds  float64 `json:"step_gpu_s"`
	LinkSeconds float64 `json:"step_link_s"`
	// SaturationPoint is the offload fraction up to which copies from the cell's tier are
	// fully overlapped by compute; absent at fraction 0, where that is above 1, and with
	// on-demand fetches, which nothing overlaps.
	SaturationPoint float64 `json:"saturation_fraction,omitempty"`
}

// Cell of a sweep that the result is of.
func (r *Result) Cell() Cell {
	return Cell{Tier: r.Tier, Fraction: r.OffloadFraction, AllPaths: r.AllPaths, Setting: r.Setting}
}

// steps is the number of decode steps of a trial.
func (r *Result) steps() int { return r.GeneratedTokens/r.Requests - 1 }

// rates fills in what follows from the trials.
func (r *Result) rates() {
	var all, prefill, decode []float64
	for _, t := range r.Trials {
		all = append(all, float64(r.GeneratedTokens)/(t.PrefillSeconds+t.DecodeSeconds))
		decode = append(decode, float64(r.Requests*r.steps())/t.DecodeSeconds)
		if !t.PrefillRepeated {
			prefill = append(prefill, float64(r.PromptTokens)/t.PrefillSeconds)
		}
	}
	r.PrefillTokS, _ = meanAndDeviation(prefill)
	r.ThroughputTokS, r.StddevTokS = meanAndDeviation(all)
	r.DecodeTokS, r.DecodeStddevTokS = meanAndDeviation(decode)
	if uses := r.Hits + r.Misses; uses > 0 {
		r.HitRate = float64(r.Hits) / float64(uses)
	}
}

// meanAndDeviation returns the mean and the standard deviation of a sample, which is nil
// of a single value.
func meanAndDeviation(values []float64) (mean float64, deviation *float64) {
	for _, v := range values {
		mean += v / float64(len(values))
	}
	if len(values) < 2 {
		return mean, nil
	}
	squares := 0.0
	for _, v := range values {
		squares += (v - mean) * (v - mean)
	}
	d := math.Sqrt(squares / float64(len(values)-1))
	return mean, &d
}

// routed fills in what follows from the routed tokens of one step, [layer with experts][expert].
func (r *Result) routed(tokens [][]int64) {
	var experts, all int64
	for _, layer := range tokens {
		for _, n := range layer {
			if n > 0 {
				experts++
				all += n
				r.MaxTokensPerExpert = max(r.MaxTokensPerExpert, n)
			}
		}
	}
	if experts > 0 {
		r.DistinctExperts = float64(experts) / float64(len(tokens))
		r.TokensPerExpert = float64(all) / float64(experts)
	}
}

// plan fills in roofline and prediction. What the planner refuses, such as experts from
// peers on hardware that has none, has neither: a measurement stands without them.
func (r *Result) plan(info *Info) {
	if info.Hardware == nil {
		return
	}
	r.predict(info)
	if r.Roofline != nil && r.comparable() {
		r.Roofline.Fraction = r.DecodeTokS / r.Roofline.TokS
	}
}

func (r *Result) predict(info *Info) {
	h, newTokens := info.Hardware.Hardware, r.steps()+1
	work := planner.Workload{PromptTokens: (r.PromptTokens + r.Requests/2) / r.Requests, NewTokens: newTokens}
	at := planner.RooflineCase{Batch: r.Requests, Context: work.Context(), Fraction: r.OffloadFraction}
	policy := planner.Policy{
		Batch: r.Requests, MicroBatch: r.MicroBatchTokens, PrefillTokens: info.StepTokens, Grouping: r.ExpertGrouping, Attention: r.Attention,
		OnDemand: r.OffloadFraction > 0 && r.Requests <= info.OnDemandTokens,
	}
	if r.ExpertGrouping == configs.PerMicroBatch {
		at.Groups = r.NumMicroBatches
	}
	tier, link := configs.HostTier, planner.BoundHostLink
	policy.HostPaths = max(1, min(r.HostPaths, len(h.HostToGPU)))
	at.Rate = h.HostToGPU[policy.HostPaths-1]
	if r.Tier == configs.PeerTier {
		tier, link, at.Rate = configs.PeerTier, planner.BoundPeerLink, h.PeerToGPU
	}
	if at.Rate == 0 {
		return
	}
	roofline := planner.Rooflines(info.Shape, h, at)
	r.Roofline = &Roofline{Bound: string(bound(roofline, link)), TokS: roofline.TokS}

	problem := planner.Problem{
		Model: info.Shape, Hardware: h, Workload: work, Sizes: info.Sizes, CPUExperts: info.CPUExperts,
		PromptsAlike: r.Attention == configs.OnCPU, // which computes attention of prompts, too
	}
	if info.Complete != nil {
		info.Complete(&problem)
	}
	policy, err := problem.Offload(policy, r.OffloadFraction, tier)
	if err != nil {
		return
	}
	p, err := problem.Predict(policy)
	var misfit *planner.MisfitError
	if err != nil && !errors.As(err, &misfit) {
		return // one that does not fit the planner's memory is predicted all the same
	}
	r.Prediction = &Prediction{
		PrefillSeconds: p.PrefillSeconds, DecodeSeconds: p.DecodeSeconds,
		ThroughputTokS: p.TokS, DecodeTokS: p.DecodeTokS, Bound: string(p.Decode.Bound),
		PrefillBound: string(p.Prefill.Bound), GPUSeconds: p.Decode.GPU, LinkSeconds: max(p.Decode.HostLink, p.Decode.PeerLink),
	}
	if policy.Attention == configs.OnCPU || policy.OnDemand && info.CPUExperts != 0 {
		// Rooflines have attention and experts on the GPU; what the planner allows by rates alone is the
		// limit then.
		problem.Hardware.Compute = nil
		if p, err = problem.Predict(policy); err == nil || errors.As(err, &misfit) {
			r.Roofline = &Roofline{Bound: string(p.Decode.Bound), TokS: p.DecodeTokS}
		}
	}
	if r.Tier == configs.NoTier || policy.OnDemand {
		return // a step waits for each of its on-demand fetches
	}
	if f, err := problem.SaturationPoint(policy, tier); err == nil && f <= 1 {
		r.Prediction.SaturationPoint = f
	}
}

// bound is what limits a roofline: the link, or what bounds the greatest part of the
// compute's time.
func bound(f planner.Roofline, link planner.Bound) planner.Bound {
	if f.Copies > f.Compute {
		return link
	}
	by, dominant := map[planner.Bound]float64{}, planner.Bound("")
	for _, p := range f.Phases {
		by[p.Bound] += p.Seconds
		if by[p.Bound] > by[dominant] {
			dominant = p.Bound
		}
	}
	return dominant
}
