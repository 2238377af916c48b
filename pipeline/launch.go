package pipeline

import "time"

// launchPolicy decides for each step whether all experts of a layer run in one launch: where,
// by the times of the step before, their copies end long before they are needed. Steps with
// about as many tokens take about as long.
type launchPolicy struct {
	// start and tokens are of the current step.
	start  time.Duration
	tokens int
	// lastBusy is the duration of the latest successful step without its waits for experts,
	// lastTokens its tokens; 0: no such step.
	lastBusy   time.Duration
	lastTokens int
	// singleLaunch is the decision for the current step.
	singleLaunch bool
}

// maxLinkShare is the maximum link time, as a share of a step's time without waits for
// experts, at which a layer's missing experts arrive before the layer begins. They are
// requested while the layer before computes.
const maxLinkShare = 0.75

// begin starts a step. linkTime is the busy time of the busiest link since the step before
// began.
func (p *launchPolicy) begin(now time.Duration, tokens int, linkTime time.Duration) {
	similar := 4*tokens >= 3*p.lastTokens && 3*tokens <= 4*p.lastTokens
	p.singleLaunch = p.lastTokens > 0 && similar && linkTime > 0 && linkTime.Seconds() <= maxLinkShare*p.lastBusy.Seconds()
	p.start, p.tokens = now, tokens
}

// fail forgets the latest step's times. The links' time of a failed step covers only a part
// of it, so it says nothing about the next step's copies.
func (p *launchPolicy) fail() { p.lastTokens = 0 }

// end ends the step, in which the compute stream waited for experts for this long.
func (p *launchPolicy) end(now, waited time.Duration) {
	p.lastBusy, p.lastTokens = now-p.start-waited, p.tokens
}
