package pipeline

import (
	"math"
	"sync/atomic"
	"time"

	"github.com/moeserve/moeserve/configs"
)

// MaxInPlaceTokens is the maximum number of tokens of a step that reads experts in place. A
// product of this many tokens is one tile of the expert kernels, so it reads an expert's weights
// over the link once, however the tokens are routed.
const MaxInPlaceTokens = 16

// Link is the way from an offloaded expert to the GPU, by the copy engines and by kernels.
type Link struct {
	// CopyRate and ReadRate are of large extents, in bytes per second; 0: unknown, or that the
	// experts cannot be got that way.
	CopyRate, ReadRate float64
	// CopyStart and ReadStart are added to the time of an extent's bytes.
	CopyStart, ReadStart time.Duration
}

func seconds(bytes, rate float64, start time.Duration) float64 {
	if bytes == 0 {
		return 0
	}
	return start.Seconds() + bytes/rate
}

// AccessModel predicts what offloaded experts cost steps of few tokens.
type AccessModel struct {
	// Experts per layer, of which a token is routed to TopK; Layers have offloaded ones.
	Experts, TopK, Layers int
	// ExpertBytes of one expert, and the share of all experts that is offloaded.
	ExpertBytes int64
	Offloaded   float64
	Host, Peer  Link
	// MemoryRate is the GPU's, in bytes per second: what was copied is read there.
	MemoryRate float64
	// RoundTrip is the time from a router's selection to a copy that the host has submitted.
	RoundTrip time.Duration
	// MaxHold is the most time by this model for which a step may hold peers' memory that was not told
	// to be in place; 0: no limit. Memory that others need is released behind the step that reads it.
	MaxHold time.Duration
	// CPURate is the rate in bytes per second at which the CPU computes experts in host memory beside
	// copies on demand, CPUStart what it takes to start in each layer. 0: it computes none.
	CPURate  float64
	CPUStart time.Duration
}

// mispredicted is the share by which copies take longer than those of the experts that are needed:
// experts that were predicted for the next layer, and are not selected, are on the link as well.
// Estimated from times of steps of Qwen1.5-MoE on one H200 with half of its experts in host memory:
// 4 % with one sequence, 13 % with eight.
const mispredicted = 0.08

// Known reports whether the model can compare the two ways.
func (m *AccessModel) Known() bool {
	return m.Host.CopyRate > 0 && m.Host.ReadRate > 0 && m.MemoryRate > 0 && m.Experts > 0 && m.TopK > 0
}

// Missing is the expected bytes of the offloaded experts that so many tokens of a layer are
// routed to, by a uniform router.
func (m *AccessModel) Missing(tokens int) float64 {
	n := float64(m.Experts)
	return m.Offloaded * n * (1 - math.Pow(1-float64(m.TopK)/n, float64(tokens))) * float64(m.ExpertBytes)
}

// Predict returns the time that a step of so many tokens needs for its offloaded experts: by
// copies, and by reading those selected in place. onDemand: those selected are copied, otherwise
// all, while the layer before computes. peers is the share of the offloaded experts that have a
// peer copy. Links to peers and host work at the same time.
func (m *AccessModel) Predict(tokens int, onDemand bool, peers float64) (copied, read time.Duration) {
	missing := m.Missing(tokens)
	var copying float64
	if onDemand {
		copying = m.RoundTrip.Seconds() + missing/m.MemoryRate + m.copies((1+mispredicted)*missing, peers)
		if m.CPURate > 0 { // CPU and link end together
			host := (1 - peers) * missing
			if link := m.copies((1+mispredicted)*host, 0); link > m.CPUStart.Seconds() {
				computing := host / m.CPURate
				together := link * (m.CPUStart.Seconds() + computing) / (link + computing)
				copying = m.RoundTrip.Seconds() + missing/m.MemoryRate + max(together, m.copies(missing-host, 1))
			}
		}
	} else {
		copying = m.copies(m.Offloaded*float64(m.Experts)*float64(m.ExpertBytes), peers)
	}
	if m.Peer.ReadRate == 0 { // the host's copies are read
		peers = 0
	}
	reading := max(seconds(missing*peers, m.Peer.ReadRate, m.Peer.ReadStart), seconds(missing*(1-peers), m.Host.ReadRate, m.Host.ReadStart))
	layers := float64(m.Layers) * float64(time.Second)
	return time.Duration(copying * layers), time.Duration(reading * layers)
}

// copies is the time of so many bytes of a layer's experts by the copy engines.
func (m *AccessModel) copies(bytes, peers float64) float64 {
	if m.Peer.CopyRate == 0 {
		peers = 0
	}
	return max(seconds(bytes*peers, m.Peer.CopyRate, m.Peer.CopyStart), seconds(bytes*(1-peers), m.Host.CopyRate, m.Host.CopyStart))
}

// access is how a step gets at offloaded experts.
type access uint8

const (
	// byCopy: they are copied to the expert cache.
	byCopy access = iota
	// inPlace: kernels read them where they lie.
	inPlace

	accesses = int(inPlace) + 1
)

// accessChooser chooses for each step of few tokens how it gets at offloaded experts: at first
// by the model, then by the times that steps of as many tokens have taken, for each offloaded
// expert that they used: where only selected ones are copied, their number differs from step to
// step by more than the two ways do.
//
// Steps that are not as the choice says are run now and then, to measure them: probeSteps soon
// after the first of a number of tokens, and of each probeInterval. The first probeSkip of them,
// which fill the expert cache or are captured, do not count. So where the worse way takes 1.5
// times as long, probes cost less than 0.8 % of the time; where it is found to take longer than
// that, or twice as long by the model, there are none.
//
// It depends on nothing but its calls.
type accessChooser struct {
	setting configs.ExpertAccess
	// possible: steps can read in place; limit is the most tokens of such a step.
	possible bool
	limit    int
	model    AccessModel
	sizes    [MaxInPlaceTokens + 1]accessTimes
	// chosen for the present step; repeated is the number of steps before it of the same tokens
	// that were chosen alike.
	chosen   access
	tokens   int
	repeated int
	// onDemand: copies of the present step would be of the experts selected.
	onDemand bool

	// steps counts finished steps of models with offloaded experts.
	steps [accesses]atomic.Int64
}

// accessTimes are the steps of one number of tokens.
type accessTimes struct {
	// mean is a moving average of the measured seconds for each offloaded expert used, of n steps;
	// where copies are of all experts, of seconds.
	mean [accesses]float64
	n    [accesses]int
	// since counts steps since the latest probe, probing those left of one.
	since, probing int
	// learned counts steps of experts on the CPU, whose first ones are divided by assumed times.
	learned int
	// predicted is what the means belong to: where it has changed, experts have moved.
	predicted [accesses]time.Duration
}

const (
	probeInterval, probeSteps, probeSkip = 256, 4, 2
	// firstProbe is the number of steps before the first probe of a number of tokens.
	firstProbe = 5
	// A way is tried that takes up to so many times as long as the other by the model, and once both
	// were measured, by these times.
	// With experts on the CPU, whose time is not known well before it is measured, that is more.
	probePredicted, probeWithCPU, probeMeasured = 2.0, 4.0, 1.5
	// The choice is by measurement from minSamples steps of both ways on; the weight of a later step
	// is 1/maxSamples.
	minSamples, maxSamples = 2, 8
	// learnSteps do not count of a number of tokens with experts on the CPU.
	learnSteps = 12
	// movedBy is the relative change of a prediction from which on old times do not count.
	movedBy = 0.2
)

// choose chooses for a step of so many tokens; onDemand and peers are as in AccessModel.Predict.
func (c *accessChooser) choose(tokens int, onDemand bool, peers float64) access {
	chosen := byCopy
	c.onDemand = onDemand
	if c.possible && tokens <= c.limit {
		switch {
		case c.setting == configs.DirectAccess:
			chosen = inPlace
		case c.setting == configs.AutoAccess && c.model.Known():
			chosen = c.measured(tokens, peers)
		}
	}
	if c.repeated++; chosen != c.chosen || tokens != c.tokens {
		c.repeated = 0
	}
	c.chosen, c.tokens = chosen, tokens
	return chosen
}

func (c *accessChooser) measured(tokens int, peers float64) access {
	t := &c.sizes[tokens]
	var now [accesses]time.Duration
	now[byCopy], now[inPlace] = c.model.Predict(tokens, c.onDemand, peers)
	if peers > 0 && c.model.MaxHold > 0 && now[inPlace] > c.model.MaxHold {
		return byCopy
	}
	for a := range now {
		if math.Abs(float64(now[a]-t.predicted[a])) > movedBy*float64(t.predicted[a]) {
			*t = accessTimes{predicted: now, since: probeInterval - firstProbe}
			break
		}
	}
	times, limit := [...]float64{now[byCopy].Seconds(), now[inPlace].Seconds()}, probePredicted
	if c.model.CPURate > 0 {
		limit = probeWithCPU
	}
	if t.n[byCopy] >= minSamples && t.n[inPlace] >= minSamples {
		times, limit = t.mean, probeMeasured
	}
	best := byCopy
	if times[inPlace] < times[byCopy] {
		best = inPlace
	}
	other := inPlace - best
	if t.since++; t.since >= probeInterval && times[other] <= limit*times[best] {
		t.since, t.probing = 0, probeSteps
	}
	if t.probing > 0 {
		t.probing--
		return other
	}
	return best
}

// took records the time of the step that choose was called for, and how many offloaded experts it
// used.
func (c *accessChooser) took(d time.Duration, used int64) {
	c.steps[c.chosen].Add(1)
	if c.tokens > MaxInPlaceTokens || c.repeated < probeSkip || used <= 0 {
		return
	}
	t := &c.sizes[c.tokens]
	if c.chosen == byCopy && c.model.CPURate > 0 && t.learned < learnSteps {
		t.learned++
		return
	}
	if !c.onDemand {
		used = 1 // all experts are copied in every step
	}
	a := c.chosen
	t.n[a] = min(t.n[a]+1, maxSamples)
	t.mean[a] += (d.Seconds()/float64(used) - t.mean[a]) / float64(t.n[a])
}

// StepsByAccess counts the finished steps of a model with offloaded experts by how they got at
// these; Direct: kernels read them in place, Copied: they were copied to the expert cache.
type StepsByAccess struct {
	Copied, Direct int64
}

// StepsByAccess returns the counts since New. It may be called from any goroutine.
func (p *Pipeline) StepsByAccess() StepsByAccess {
	return StepsByAccess{Copied: p.access.steps[byCopy].Load(), Direct: p.access.steps[inPlace].Load()}
}
