package emulated

import (
	"fmt"
	"math"
	"time"

	"github.com/moeserve/moeserve/device"
)

// Options describe an emulated machine. The zero value is a machine of three GPUs (one to
// compute and two peers) with ample memory that runs as fast as it can.
type Options struct {
	// GPUs in the machine's order. Default: three of 64 GiB, without a compute model.
	GPUs []GPU
	// Host is the host's memory and processor. Default: 256 GiB, no compute model.
	Host GPU
	// HostLink connects each GPU to the host, with a separate wire per direction. Default:
	// no limit, no latency.
	HostLink Link
	// PeerLink connects each GPU to all its peers: all copies from peers into a GPU share
	// one wire, all copies from it to peers another. Default: no limit, no latency.
	PeerLink Link
	// HostRoots are host-side rates that several GPUs share, per direction. Default: none.
	HostRoots []Root
	// Topology, if set, describes the whole machine, and the fields above must be unset.
	// Copies between two spaces without a path are refused; copies within one space need no
	// path.
	Topology *device.Topology

	// PairRates limit single pairs of GPUs, in bytes per second, below PeerLink's rate.
	PairRates map[device.Pair]float64
	// Busy is the fraction, from 0 to below 1, of each GPU's memory bandwidth that other
	// processes use, by its number: peers' copies from and to it are slower by that much than
	// the topology says, as OtherBandwidth reports. Default: none.
	Busy map[int]float64
	// Traffic is what other programs copy over links to the host, HostRates are rates of these links
	// that change. Default: none.
	Traffic   []Traffic
	HostRates []HostRate
	// Virtual makes the machine deterministic: operations run one at a time, in an order
	// that Schedule decides, on a virtual clock. Default: a goroutine per stream, on the
	// wall clock.
	Virtual bool
	// Pace makes copies and Work take at least their modeled time on the wall clock (a
	// virtual machine always does so on its own clock). Default: off.
	Pace bool
	// NoData makes memory address space only: copies move nothing, and Work runs only if
	// Host is set. Host memory can still be written. Needs Virtual.
	NoData bool
	// Check enables the check for unordered and invalid accesses; see Finding.
	Check bool
	// Schedule chooses which stream runs next when several can, on a virtual machine.
	// Default: Eager.
	Schedule Schedule
	// Seed of the Random schedule, of faults with a Chance, and of failing times.
	Seed uint64
	// LikeCUDA makes the machine as lax as CUDA in what is strict by default: a GPU stream
	// that waits for a fence value or an event that has failed runs on, with undefined data,
	// and signals fences as if nothing had happened. The host gets the error from the
	// stream's Synchronize and Recover, and from events recorded behind the wait, and the
	// stream skips only what is enqueued after that. From the first such wait on, the check
	// reports no unordered accesses and no reads of memory that was never written: a stream
	// that runs on is not ordered behind what failed.
	LikeCUDA bool
	// TimeFailures is the chance, drawn from Seed, with which Event.Time fails for an event
	// of a GPU stream, as on a busy or paused machine with CUDA. Default: 0.
	TimeFailures float64
	// NoticeLatency is how long after the end of what it watches a host stream runs the work,
	// as a host that polls, in modeled time: of Virtual and Pace. Default: 0.
	NoticeLatency time.Duration
	// NoBatches: CopyBatch returns device.ErrNoBatches, as with an old driver.
	NoBatches bool
	// CopyErrorsLoseDevice is what the capability of that name says; copies are not made to fail then.
	CopyErrorsLoseDevice bool
	// NotMapped are memories that kernels of other devices cannot read in place
	// (device.Machine.KernelAddr): copies are possible. Default: none.
	NotMapped []device.Space
	// FenceStart is the value at which all fences begin: 2^32-100, say, for tests of counters
	// that wrap around. Default: 0.
	FenceStart uint32
	// Report is called with each finding as it is found; it must not call the machine.
	// Default: findings make Close fail.
	Report func(Finding)
	// Trace is called with each operation as it ends; it must not call the machine.
	// Default: none.
	Trace func(Trace)
	// Idle, if set, is called before each step of a virtual machine and must return only
	// when every other goroutine of the program is blocked, as synctest.Wait of
	// testing/synctest does; then programs of several goroutines are deterministic too.
	// Default: the machine steps while other goroutines run.
	Idle func()
	// DeadlockAfter is the wall-clock time for which nothing can run on a virtual machine,
	// and no goroutine calls it, before waits return ErrDeadlock. Default: 2 s.
	DeadlockAfter time.Duration
}

// GPU describes one memory space with its processor.
type GPU struct {
	// Name of the product. Default: "emulated".
	Name string
	// MemoryBytes is the capacity. Default: 64 GiB for a GPU, 256 GiB for the host.
	MemoryBytes int64
	// FlopsPerSecond and BytesPerSecond are the compute model: a Work takes
	// max(Flops/FlopsPerSecond, Bytes/BytesPerSecond), and concurrent Works share the
	// processor. 0: no limit.
	FlopsPerSecond, BytesPerSecond float64
}

// Link is a wire's rate and the latency of one copy over it.
type Link struct {
	// BytesPerSecond; 0: no limit.
	BytesPerSecond float64
	Latency        time.Duration
}

// Root is a rate that the host links of several GPUs share, in each direction.
type Root struct {
	GPUs           []int
	BytesPerSecond float64
}

// Schedule is the order in which a virtual machine runs the streams that can run at the
// same instant; Lazy also decides when they run.
type Schedule int

const (
	// Eager runs each stream as far as it can, higher priority and earlier streams first,
	// which gives the times of real hardware.
	Eager Schedule = iota
	// Lazy starts an operation only when a wait needs it, so every operation ends as late
	// as the program's waits allow.
	Lazy
	// Random picks a stream at random, from the seed.
	Random
)

func (s Schedule) String() string {
	switch s {
	case Eager:
		return "eager"
	case Lazy:
		return "lazy"
	case Random:
		return "random"
	}
	return fmt.Sprintf("Schedule(%d)", int(s))
}

const (
	defaultGPUs      = 3
	defaultGPUBytes  = 64 << 30
	defaultHostBytes = 256 << 30
	defaultDeadlock  = 2 * time.Second
)

// EnsureDefaults returns o with every unset field set to its default.
func (o Options) EnsureDefaults() Options {
	if o.DeadlockAfter == 0 {
		o.DeadlockAfter = defaultDeadlock
	}
	if o.Topology != nil {
		return o
	}
	if len(o.GPUs) == 0 {
		o.GPUs = make([]GPU, defaultGPUs)
	}
	gpus := make([]GPU, len(o.GPUs))
	for i, g := range o.GPUs {
		gpus[i] = g.ensureDefaults(defaultGPUBytes)
	}
	o.GPUs = gpus
	o.Host = o.Host.ensureDefaults(defaultHostBytes)
	return o
}

func (g GPU) ensureDefaults(bytes int64) GPU {
	if g.Name == "" {
		g.Name = "emulated"
	}
	if g.MemoryBytes == 0 {
		g.MemoryBytes = bytes
	}
	return g
}

func badRate(r float64) bool { return r < 0 || math.IsNaN(r) || math.IsInf(r, 0) }

// Validate returns an error for the first invalid option. Defaults must be set.
func (o *Options) Validate() error {
	if o.Virtual && o.Pace {
		return fmt.Errorf("emulated: Pace is for the wall clock and a virtual machine has its own: set only one of Pace and Virtual")
	}
	if o.NoData && !o.Virtual {
		return fmt.Errorf("emulated: NoData needs Virtual")
	}
	if o.Schedule < Eager || o.Schedule > Random {
		return fmt.Errorf("emulated: schedule %d is none of Eager, Lazy and Random", o.Schedule)
	}
	if o.Schedule != Eager && !o.Virtual {
		return fmt.Errorf("emulated: schedule %v needs Virtual: on the wall clock the system schedules", o.Schedule)
	}
	if o.NoticeLatency < 0 {
		return fmt.Errorf("emulated: NoticeLatency is %v", o.NoticeLatency)
	}
	if !(o.TimeFailures >= 0 && o.TimeFailures <= 1) {
		return fmt.Errorf("emulated: TimeFailures is %g, not between 0 and 1", o.TimeFailures)
	}
	if o.DeadlockAfter < 0 {
		return fmt.Errorf("emulated: DeadlockAfter is %v, under 0", o.DeadlockAfter)
	}
	if o.Topology != nil {
		if len(o.GPUs) != 0 || o.Host != (GPU{}) || o.HostLink != (Link{}) || o.PeerLink != (Link{}) || len(o.HostRoots)+len(o.Traffic)+len(o.HostRates) != 0 {
			return fmt.Errorf("emulated: Topology describes the whole machine: leave GPUs, Host, HostLink, PeerLink, HostRoots, Traffic and HostRates unset")
		}
		return validateTopology(o.Topology)
	}
	for i, g := range append([]GPU{o.Host}, o.GPUs...) {
		if g.MemoryBytes < 0 || badRate(g.FlopsPerSecond) || badRate(g.BytesPerSecond) {
			return fmt.Errorf("emulated: %s has a negative or infinite capacity or rate: %+v", device.Space(i), g)
		}
	}
	for p, rate := range o.PairRates {
		from, okFrom := p.From.GPU()
		to, okTo := p.To.GPU()
		if badRate(rate) || !okFrom || !okTo || from == to || max(from, to) >= len(o.GPUs) {
			return fmt.Errorf("emulated: a rate of %g bytes/s from %s to %s: there are GPUs 0 to %d", rate, p.From, p.To, len(o.GPUs)-1)
		}
	}
	for i, busy := range o.Busy {
		if i < 0 || i >= len(o.GPUs) || !(busy >= 0 && busy < 1) {
			return fmt.Errorf("emulated: GPU %d is busy to %g: there are GPUs 0 to %d, and the share is from 0 to below 1", i, busy, len(o.GPUs)-1)
		}
	}
	for _, l := range []Link{o.HostLink, o.PeerLink} {
		if badRate(l.BytesPerSecond) || l.Latency < 0 {
			return fmt.Errorf("emulated: a link has a negative or infinite rate or latency: %+v", l)
		}
	}
	rooted := map[int]bool{}
	for _, r := range o.HostRoots {
		if badRate(r.BytesPerSecond) || r.BytesPerSecond == 0 {
			return fmt.Errorf("emulated: a host root's rate is %g bytes/s; it must be over 0", r.BytesPerSecond)
		}
		for _, g := range r.GPUs {
			if g < 0 || g >= len(o.GPUs) {
				return fmt.Errorf("emulated: a host root names gpu%d, but there are %d GPUs", g, len(o.GPUs))
			}
			if rooted[g] {
				return fmt.Errorf("emulated: gpu%d is behind two host roots", g)
			}
			rooted[g] = true
		}
	}
	return o.validateTraffic()
}

func validateTopology(t *device.Topology) error {
	for _, s := range t.Spaces() {
		i, _ := t.Info(s)
		if i.MemoryBytes <= 0 {
			return fmt.Errorf("emulated: topology: %s has %d bytes of memory; set its capacity", s, i.MemoryBytes)
		}
		if badRate(i.FlopsPerSecond) || badRate(i.BytesPerSecond) {
			return fmt.Errorf("emulated: topology: %s has a negative or infinite rate", s)
		}
	}
	for _, l := range t.Links {
		if badRate(l.BytesPerSecond) {
			return fmt.Errorf("emulated: topology: link %q has rate %g", l.Name, l.BytesPerSecond)
		}
	}
	for pair, p := range t.Paths {
		for _, end := range []device.Space{pair.From, pair.To} {
			if _, ok := t.Info(end); !ok {
				return fmt.Errorf("emulated: topology: a path from %s to %s, and there is no %s", pair.From, pair.To, end)
			}
		}
		if badRate(p.BytesPerSecond) || p.Latency < 0 {
			return fmt.Errorf("emulated: topology: the path from %s to %s has a bad rate or latency", pair.From, pair.To)
		}
		for _, l := range p.Links {
			if l < 0 || l >= len(t.Links) {
				return fmt.Errorf("emulated: topology: the path from %s to %s uses link %d of %d", pair.From, pair.To, l, len(t.Links))
			}
		}
	}
	return nil
}

// minRate returns the smaller of two rates, where 0 is no limit.
func minRate(a, b float64) float64 {
	if a == 0 || b != 0 && b < a {
		return b
	}
	return a
}

// topology returns o.Topology or builds one from the other fields.
func (o *Options) topology() *device.Topology {
	if o.Topology != nil {
		return o.Topology
	}
	info := func(g GPU, uuid string) device.Info {
		return device.Info{
			Name: g.Name, UUID: uuid, MemoryBytes: g.MemoryBytes,
			FlopsPerSecond: g.FlopsPerSecond, BytesPerSecond: g.BytesPerSecond, NUMANode: -1,
		}
	}
	t := &device.Topology{Host: info(o.Host, ""), Paths: map[device.Pair]device.Path{}}
	link := func(name string, rate float64) int {
		t.Links = append(t.Links, device.Link{Name: name, BytesPerSecond: rate})
		return len(t.Links) - 1
	}
	path := func(from, to device.Space, latency time.Duration, links ...int) {
		p := device.Path{Links: links, Latency: latency}
		for _, l := range links {
			p.BytesPerSecond = minRate(p.BytesPerSecond, t.Links[l].BytesPerSecond)
		}
		t.Paths[device.Pair{From: from, To: to}] = p
	}
	type ports struct{ fromHost, toHost, fromPeers, toPeers int }
	var gpu []ports
	for i, g := range o.GPUs {
		t.GPUs = append(t.GPUs, info(g, fmt.Sprintf("emulated-%d", i)))
		name := device.HBM(i).String()
		h, p := o.HostLink, o.PeerLink
		gpu = append(gpu, ports{
			fromHost: link("host to "+name, h.BytesPerSecond), toHost: link(name+" to host", h.BytesPerSecond),
			fromPeers: link("peers to "+name, p.BytesPerSecond), toPeers: link(name+" to peers", p.BytesPerSecond),
		})
	}
	down, up := make([][]int, len(gpu)), make([][]int, len(gpu))
	for i, r := range o.HostRoots {
		d := link(fmt.Sprintf("host root %d down", i), r.BytesPerSecond)
		u := link(fmt.Sprintf("host root %d up", i), r.BytesPerSecond)
		for _, g := range r.GPUs {
			down[g], up[g] = []int{d}, []int{u}
		}
	}
	// A copy within one memory both reads and writes it, so it runs at half the memory's
	// rate.
	path(device.Host, device.Host, 0, link("host memory", o.Host.BytesPerSecond/2))
	for i, a := range gpu {
		path(device.Host, device.HBM(i), o.HostLink.Latency, append(down[i], a.fromHost)...)
		path(device.HBM(i), device.Host, o.HostLink.Latency, append(up[i], a.toHost)...)
		path(device.HBM(i), device.HBM(i), 0, link(device.HBM(i).String()+" memory", o.GPUs[i].BytesPerSecond/2))
		for j, b := range gpu {
			if i != j {
				path(device.HBM(i), device.HBM(j), o.PeerLink.Latency, a.toPeers, b.fromPeers)
				pair := device.Pair{From: device.HBM(i), To: device.HBM(j)}
				p := t.Paths[pair]
				p.BytesPerSecond = minRate(p.BytesPerSecond, o.PairRates[pair])
				t.Paths[pair] = p
			}
		}
	}
	// What others use is in no description of the machine.
	for i, busy := range o.Busy {
		for _, l := range []int{gpu[i].toPeers, gpu[i].fromPeers} {
			t.Links[l].BytesPerSecond *= 1 - busy
		}
	}
	return t
}
