package node

import (
	"time"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/pipeline"
	"github.com/moeserve/moeserve/planner"
)

// What kernels read over links where no calibration says: their rates as shares of those of
// copies, and what starting costs; measured on two H200 with extents of 4 to 352 MB.
const (
	hostReadShare, hostReadStart = 0.925, 5 * time.Microsecond
	peerReadShare, peerReadStart = 0.945, 4 * time.Microsecond
	// roundTrip is assumed where the hardware has none.
	roundTrip = 13500 * time.Nanosecond
)

// readsInPlace reports whether steps may read experts in place. Emulated devices' kernels take no
// time for links, so there only those do that are told to.
func (u *setup) readsInPlace() bool {
	switch u.settings.Batch.ExpertAccess {
	case configs.DirectAccess:
		return true
	case configs.AutoAccess:
		return u.devices.Real()
	}
	return false
}

// accessModel predicts what offloaded experts cost steps of few tokens. It is empty where rates
// are not known: all is copied there.
func (u *setup) accessModel() pipeline.AccessModel {
	onCPU, err := u.settings.Batch.ParseCPUExperts()
	auto := err == nil && onCPU.Auto
	if !u.devices.Real() || u.settings.Batch.ExpertAccess == configs.CopyAccess && !auto {
		return pipeline.AccessModel{}
	}
	h, err := u.hardware()
	if err != nil {
		return pipeline.AccessModel{}
	}
	c, p := u.model.Config, &u.needs.Plan
	layers := 0
	for _, l := range p.Layers {
		if p.OffloadedIn(l) > 0 {
			layers++
		}
	}
	seconds := func(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
	m := pipeline.AccessModel{
		Experts: c.Experts, TopK: c.TopK, Layers: layers, ExpertBytes: p.Layout.Size,
		Offloaded:  float64(p.OffloadedExperts) / float64(max(1, p.OffloadedExperts+p.ResidentExperts)),
		MemoryRate: h.GPUMemoryRate, RoundTrip: seconds(h.RoundTrip), MaxHold: u.harvestDeadline() / 2,
		Host: pipeline.Link{CopyRate: h.HostToGPU[len(h.HostToGPU)-1], CopyStart: seconds(h.HostCopyLatency), ReadRate: h.HostReadRate, ReadStart: hostReadStart},
		Peer: pipeline.Link{CopyRate: h.PeerToGPU, CopyStart: seconds(h.PeerCopyLatency), ReadRate: h.PeerReadRate, ReadStart: peerReadStart},
	}
	if auto {
		u.addCPU(&m)
	}
	if m.RoundTrip == 0 {
		m.RoundTrip = roundTrip
	}
	if m.Host.ReadRate == 0 { // kernels read over the GPU's own link
		m.Host.ReadRate = hostReadShare * h.HostToGPU[0]
	}
	if m.Peer.ReadRate == 0 {
		m.Peer.ReadRate = peerReadShare * h.PeerToGPU
	}
	return m
}

// harvestDeadline is the time in which memory that others need is to be released.
func (u *setup) harvestDeadline() time.Duration {
	t, _ := u.settings.Harvest.ParseTimes() // valid
	return t.Deadline
}

// longestHold predicts how long a step of at most so many tokens in place may hold peers' memory: where
// most of that is taken by others, it reads the host's copies meanwhile.
func longestHold(m *pipeline.AccessModel, tokens int) time.Duration {
	_, hold := m.Predict(min(tokens, pipeline.MaxInPlaceTokens), true, 0)
	return hold
}

// warnOfHold says that steps which are told to be in place may hold memory for too long.
func (u *setup) warnOfHold(m *pipeline.AccessModel) {
	if u.settings.Batch.ExpertAccess != configs.DirectAccess || len(u.peers) == 0 {
		return
	}
	if hold, deadline := longestHold(m, u.needs.Limits.MaxTokens), u.harvestDeadline(); hold > deadline {
		u.o.Log.Warn("peers' memory that others need is released when the step ends that reads it, with --expert-access direct possibly after --harvest-deadline; auto copies where that takes long",
			"step_s", hold.Seconds(), "deadline_s", deadline.Seconds())
	}
}

// addCPU lets the CPU compute experts.
func (u *setup) addCPU(m *pipeline.AccessModel) {
	m.CPURate, m.CPUStart = cpuRate(u.devices.CPUThreads()).BytesPerSecond, planner.CPUExpertsStart
}

// cpuWouldHelp predicts the time of offloaded experts in a step of one token with --cpu-experts auto;
// false: the setting is given or not possible, peers lend memory, or it saves less than a fifth of
// the time without.
func (u *setup) cpuWouldHelp(m pipeline.AccessModel, without time.Duration) (with time.Duration, ok bool) {
	b := &u.settings.Batch
	if c, err := b.ParseCPUExperts(); err != nil || c.On() || b.Attention == configs.OnCPU || b.ExpertAccess != configs.AutoAccess || len(u.peers) > 0 {
		return 0, false
	}
	u.addCPU(&m)
	with, _ = m.Predict(1, true, 0)
	return with, with < without*4/5
}
