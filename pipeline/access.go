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

// PredictOnCPU returns the time that a step of so many tokens needs for its offloaded experts if the CPU
// computes all of those in host memory. peers is as for Predict, whose link takes part.
func (m *AccessModel) PredictOnCPU(tokens int, peers float64) time.Duration {
	missing := m.Missing(tokens)
	host := (1 - peers) * missing
	computing := seconds(host, m.CPURate, m.CPUStart)
	layer := m.RoundTrip.Seconds() + (missing-host)/m.MemoryRate + max(computing, m.copies((1+mispredicted)*(missing-host), 1))
	return time.Duration(layer * float64(m.Layers) * float64(time.Second))
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
	// onCPU: the CPU computes all of those in host memory, and nothing is copied from there. It is a way of
	// its own beside byCopy, by which CPU and link end together: both take from the same host memory, so
	// what the link gets may be less than what the CPU loses by it, in times that differ by as much as
	// estimates of single layers do.
	onCPU
	// wholeExperts is byCopy without experts that are divided between the CPU and kernels that read them: these
	// reads take from the CPU's memory, too.
	wholeExperts

	accesses = int(wholeExperts) + 1
)

// accessChooser chooses for each step of few tokens how it gets at offloaded experts: at first
// by the model, then by the times that steps of as many tokens have taken, for each offloaded
// expert that they used: where only selected ones are copied, their number differs from step to
// step by more than the two ways do.
//
// Steps that are not as the choice says are run now and then, to measure them: probeSteps soon
// after the first of a number of tokens, and of each probeInterval, of one other way in turn. The first
// probeSkip of them, which fill the expert cache or are captured, do not count. So where a worse way takes 1.5
// times as long, probes cost less than 0.8 % of the time (probeStepsCPU: 1.2 %); where it is found to take longer than
// that, or twice as long by the model, there are none.
//
// It depends on nothing but its calls.
type accessChooser struct {
	setting configs.ExpertAccess
	// possible: steps can read in place; limit is the most tokens of such a step.
	possible bool
	limit    int
	// cpuLimit is the most tokens of a step that may leave all experts in host memory to the CPU; 0: none.
	cpuLimit int
	// divides: with byCopy experts may be divided.
	divides bool
	model   AccessModel
	sizes   []accessTimes // by the number of tokens
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
	// since counts steps since the latest probe, probing those left of one, of the way probed.
	since, probing int
	probed         access
	// tried are the ways that have been probed, the first of which follow one another.
	tried [accesses]bool
	// learned counts steps of experts on the CPU, whose first ones are divided by assumed times.
	learned int
	// predicted is what the means belong to: where it has changed, experts have moved.
	predicted [accesses]time.Duration
}

const (
	probeInterval, probeSteps, probeSkip = 256, 4, 2
	// probeStepsCPU are those of models with experts on the CPU, where times vary by more.
	probeStepsCPU = 6
	// firstProbe is the number of steps before the first probe of a number of tokens.
	firstProbe = 5
	// A way is tried that takes up to so many times as long as the other by the model, and once both
	// were measured, by these times.
	// With experts on the CPU, whose time is not known well before it is measured, that is more.
	probePredicted, probeWithCPU, probeMeasured = 2.0, 4.0, 1.5
	// The choice is by measurement from minSamples steps of both ways on; the weight of a later step
	// is 1/maxSamples.
	minSamples, maxSamples = 2, 8
	// outlierSample is the factor of the mean as which a longer time counts: a step that something else has
	// delayed would otherwise decide until the next probe.
	outlierSample = 1.5
	// learnSteps do not count of a number of tokens with experts on the CPU.
	learnSteps = 12
	// movedBy is the relative change of a prediction from which on old times do not count.
	movedBy = 0.2
)

// choose chooses for a step of so many tokens; onDemand and peers are as in AccessModel.Predict.
func (c *accessChooser) choose(tokens int, onDemand bool, peers float64) access {
	chosen := byCopy
	c.onDemand = onDemand
	readable := c.possible && tokens <= c.limit
	var ways [accesses]bool
	ways[inPlace] = readable && c.setting == configs.AutoAccess && c.model.Known()
	ways[onCPU] = onDemand && tokens <= c.cpuLimit
	ways[wholeExperts] = ways[onCPU] && c.divides
	switch {
	case readable && c.setting == configs.DirectAccess:
		chosen = inPlace
	case ways[inPlace] || ways[onCPU]:
		chosen = c.measured(tokens, peers, ways)
	}
	if c.repeated++; chosen != c.chosen || tokens != c.tokens {
		c.repeated = 0
	}
	c.chosen, c.tokens = chosen, tokens
	return chosen
}

// measured chooses among byCopy and other ways.
func (c *accessChooser) measured(tokens int, peers float64, ways [accesses]bool) access {
	for len(c.sizes) <= tokens {
		c.sizes = append(c.sizes, accessTimes{})
	}
	t := &c.sizes[tokens]
	var now [accesses]time.Duration
	now[byCopy], now[inPlace] = c.model.Predict(tokens, c.onDemand, peers)
	now[onCPU] = c.model.PredictOnCPU(tokens, peers)
	now[wholeExperts] = now[byCopy] // the model does not divide experts
	ways[byCopy] = true
	if peers > 0 && c.model.MaxHold > 0 && now[inPlace] > c.model.MaxHold {
		ways[inPlace] = false
	}
	limit, steps := probePredicted, probeSteps
	if c.model.CPURate > 0 {
		limit, steps = probeWithCPU, probeStepsCPU
	}
	for a := range now {
		if ways[a] && math.Abs(float64(now[a]-t.predicted[a])) > movedBy*float64(t.predicted[a]) {
			*t = accessTimes{predicted: now, since: probeInterval - firstProbe}
			break
		}
	}
	best := t.best(ways)
	if !ways[t.probed] {
		t.probing = 0
	}
	if t.since++; t.since >= probeInterval {
		if other, found := t.next(ways, best, limit); found {
			first := !t.tried[other]
			t.since, t.probed, t.probing, t.tried[other] = 0, other, steps, true
			if another, more := t.next(ways, best, limit); first && more && !t.tried[another] {
				t.since = probeInterval - steps - firstProbe
			}
		}
	}
	if t.probing > 0 {
		t.probing--
		return t.probed
	}
	return best
}

// again reports whether the next step, if it has as many tokens as the present one, is to read in place as that does,
// which choose is not asked for then: where that was chosen some times in a row, and no other way is about to be measured. holds is for
// how long peers' memory may be held by then.
func (c *accessChooser) again(tokens int, holds time.Duration) bool {
	switch {
	case c.chosen != inPlace || c.tokens != tokens || c.repeated < probeSkip+minSamples:
		return false
	case c.model.MaxHold > 0 && holds > c.model.MaxHold:
		return false
	case c.setting != configs.AutoAccess:
		return true
	}
	t := &c.sizes[tokens]
	return t.probing == 0 && t.since+1 < probeInterval
}

// repeat is choose for a step of which again was true.
func (c *accessChooser) repeat() {
	c.repeated++
	if c.setting == configs.AutoAccess {
		c.sizes[c.tokens].since++
	}
}

// best is the way that takes least: of those measured, where byCopy and another one are, otherwise by the model.
func (t *accessTimes) best(ways [accesses]bool) access {
	known := ways
	n := 0
	for a := range known {
		if known[a] = ways[a] && t.n[a] >= minSamples; known[a] {
			n++
		}
	}
	times := t.mean
	if n < 2 || !known[byCopy] {
		known = ways
		for a := range times {
			times[a] = t.predicted[a].Seconds()
		}
	}
	best := byCopy
	for a, ok := range known {
		if ok && (!known[best] || times[a] < times[best]) {
			best = access(a)
		}
	}
	return best
}

// next is the way to probe, in turn behind the latest one: one that is not known to take probeMeasured times as
// long as the best, or limit times by the model.
func (t *accessTimes) next(ways [accesses]bool, best access, limit float64) (access, bool) {
	for i := range accesses {
		a := access((int(t.probed) + 1 + i) % accesses)
		if !ways[a] || a == best || a == t.probed && t.probing > 0 {
			continue
		}
		if t.n[a] >= minSamples && t.n[best] >= minSamples {
			if t.mean[a] <= probeMeasured*t.mean[best] {
				return a, true
			}
		} else if t.predicted[a].Seconds() <= limit*t.predicted[best].Seconds() {
			return a, true
		}
	}
	return 0, false
}

// took records the time of the step that choose was called for, and how many offloaded experts it
// used.
func (c *accessChooser) took(d time.Duration, used int64) {
	c.steps[c.chosen].Add(1)
	if c.tokens >= len(c.sizes) || c.repeated < probeSkip || used <= 0 {
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
	each := d.Seconds() / float64(used)
	if t.n[a] >= minSamples {
		each = min(each, outlierSample*t.mean[a])
	}
	t.n[a] = min(t.n[a]+1, maxSamples)
	t.mean[a] += (each - t.mean[a]) / float64(t.n[a])
}

// StepsByAccess counts the finished steps of a model with offloaded experts by how they got at
// these; Direct: kernels read them in place, OnCPU: the CPU computed all of those in host memory, Copied: they
// were copied to the expert cache, but for those that the CPU computed meanwhile.
type StepsByAccess struct {
	Copied, Direct, OnCPU int64
}

// StepsByAccess returns the counts since New. It may be called from any goroutine.
func (p *Pipeline) StepsByAccess() StepsByAccess {
	return StepsByAccess{Copied: p.access.steps[byCopy].Load() + p.access.steps[wholeExperts].Load(), Direct: p.access.steps[inPlace].Load(), OnCPU: p.access.steps[onCPU].Load()}
}
