package emulated

import (
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/moeserve/moeserve/device"
)

// Span is a time of the machine's clock, from From to before Until; Until 0: to the end.
type Span struct{ From, Until time.Duration }

func (s Span) has(t time.Duration) bool { return t >= s.From && (s.Until == 0 || t < s.Until) }

// Traffic is what other programs copy over a GPU's link to the host for some time. The topology does
// not tell of it.
type Traffic struct {
	GPU int
	// ToHost: from the GPU's memory, otherwise to it.
	ToHost bool
	// BytesPerSecond is the most that they copy; copies of the machine share the link with them
	// fairly. 0: no limit but the link's.
	BytesPerSecond float64
	Span
}

// HostRate is another rate of a GPU's link to the host for some time, in both directions. The
// topology does not tell of it.
type HostRate struct {
	GPU int
	// BytesPerSecond, at most the link's; 0: the link is down, and copies over it fail with
	// device.ErrCopyFailed.
	BytesPerSecond float64
	Span
}

// validateTraffic checks Options.Traffic and HostRates.
func (o *Options) validateTraffic() error {
	check := func(what string, gpu int, rate float64, s Span) error {
		switch {
		case gpu < 0 || gpu >= len(o.GPUs):
			return fmt.Errorf("emulated: %s of gpu%d, but there are %d GPUs", what, gpu, len(o.GPUs))
		case badRate(rate):
			return fmt.Errorf("emulated: %s of gpu%d: a rate of %g bytes/s", what, gpu, rate)
		case s.From < 0 || s.Until != 0 && s.Until <= s.From:
			return fmt.Errorf("emulated: %s of gpu%d from %v to %v: it must end after it begins", what, gpu, s.From, s.Until)
		case o.HostLink.BytesPerSecond == 0:
			return fmt.Errorf("emulated: %s of gpu%d, and the links to the host have no rate; set HostLink (pcie=)", what, gpu)
		}
		return nil
	}
	for _, t := range o.Traffic {
		if err := check("traffic", t.GPU, t.BytesPerSecond, t.Span); err != nil {
			return err
		}
	}
	for _, r := range o.HostRates {
		if err := check("a rate of the link", r.GPU, r.BytesPerSecond, r.Span); err != nil {
			return err
		}
		if r.BytesPerSecond > o.HostLink.BytesPerSecond {
			return fmt.Errorf("emulated: a rate of the link of gpu%d of %g bytes/s, above that of HostLink (pcie=), %g", r.GPU, r.BytesPerSecond, o.HostLink.BytesPerSecond)
		}
	}
	return nil
}

// background is a flow of other programs.
type background struct {
	flow
	Span
}

// limit is another rate of a resource for some time.
type limit struct {
	resource int
	rate     float64
	Span
}

// addTraffic gives the model of links the flows of other programs, and rates that change.
func (m *Machine) addTraffic() {
	host := func(gpu int, toHost bool) []int {
		pair := device.Pair{From: device.Host, To: device.HBM(gpu)}
		if toHost {
			pair.From, pair.To = pair.To, pair.From
		}
		return m.topo.Paths[pair].Links
	}
	for _, t := range m.o.Traffic {
		b := &background{flow: flow{limit: t.BytesPerSecond, left: math.Inf(1), resources: host(t.GPU, t.ToHost)}, Span: t.Span}
		m.fluid.background = append(m.fluid.background, b)
	}
	for _, r := range m.o.HostRates {
		for _, toHost := range []bool{false, true} {
			links := host(r.GPU, toHost)
			// The GPU's own link is the last, behind a root.
			m.fluid.limits = append(m.fluid.limits, limit{resource: links[len(links)-1], rate: r.BytesPerSecond, Span: r.Span})
		}
	}
}

// down reports whether the link of a copy between the host and a GPU is down.
func (m *Machine) down(from, to device.Space) bool {
	if (from == device.Host) == (to == device.Host) {
		return false
	}
	gpu, _ := max(from, to).GPU()
	for _, r := range m.o.HostRates {
		if r.GPU == gpu && r.BytesPerSecond == 0 && r.has(m.clock()) {
			return true
		}
	}
	return false
}

// change is the next time, after the one to which flows have been advanced, at which flows of other
// programs or rates change; the maximum if there is none.
func (f *fluid) change() time.Duration {
	next := time.Duration(math.MaxInt64)
	of := func(s Span) {
		for _, t := range [...]time.Duration{s.From, s.Until} {
			if t > f.at {
				next = min(next, t)
			}
		}
	}
	for _, b := range f.background {
		of(b.Span)
	}
	for i := range f.limits {
		of(f.limits[i].Span)
	}
	return next
}

// sharing are the flows that share the resources now: f.room has the resources' rates.
func (f *fluid) sharing() []*flow {
	f.room = append(f.room[:0], f.rates...)
	for _, l := range f.limits {
		if l.rate > 0 && l.has(f.at) {
			f.room[l.resource] = min(f.room[l.resource], l.rate)
		}
	}
	f.active = f.active[:0]
	for _, fl := range f.flows {
		fl.rate = 0
		if fl.running {
			f.active = append(f.active, fl)
		}
	}
	for _, b := range f.background {
		if b.rate = 0; b.has(f.at) {
			f.active = append(f.active, &b.flow)
		}
	}
	return f.active
}

// parseSpan reads a rate and a time like "30GB/s@10ms-50ms": without an end to the end, without @ always.
func parseSpan(v string) (value string, s Span, err error) {
	value, times, ok := strings.Cut(v, "@")
	if !ok {
		return value, s, nil
	}
	from, until, ok := strings.Cut(times, "-")
	if err = parseDuration(from, &s.From); err == nil && ok && until != "" {
		err = parseDuration(until, &s.Until)
	}
	return value, s, err
}

func (s *spec) parseTraffic(v string) error {
	return parseEach(v, "copies of others to and from GPUs like in1:30GB/s@10ms-50ms+out0:5GB/s", func(name, value string) error {
		gpu, toHost := strings.CutPrefix(name, "out")
		if !toHost {
			gpu = strings.TrimPrefix(name, "in")
		}
		if gpu == name {
			return fmt.Errorf("no direction")
		}
		i, err := parseGPU(gpu)
		t := Traffic{GPU: i, ToHost: toHost}
		if err == nil {
			value, t.Span, err = parseSpan(value)
		}
		if err == nil {
			err = parseByteRate(value, &t.BytesPerSecond)
		}
		s.o.Traffic = append(s.o.Traffic, t)
		return err
	})
}

func (s *spec) parseHostRates(v string) error {
	return parseEach(v, "rates of GPUs' links like 1:1GB/s@10ms-50ms+2:down@80ms", func(name, value string) error {
		i, err := parseGPU(name)
		r := HostRate{GPU: i}
		if err == nil {
			value, r.Span, err = parseSpan(value)
		}
		if err == nil && value != "down" {
			err = parseByteRate(value, &r.BytesPerSecond)
		}
		s.o.HostRates = append(s.o.HostRates, r)
		return err
	})
}

// parseRoots reads one rate that all GPUs share, or sets of GPUs, each with its rate.
func (s *spec) parseRoots(v string) error {
	if !strings.Contains(v, ":") {
		return parseByteRate(v, &s.hostRoot)
	}
	return parseEach(v, "a rate that all GPUs share, or sets of GPUs with rates like 0-3:100GB/s+4-7:100GB/s", func(name, value string) error {
		from, to, ok := strings.Cut(name, "-")
		first, err := parseGPU(from)
		last := first
		if err == nil && ok {
			last, err = parseGPU(to)
		}
		r := Root{}
		if err == nil {
			err = parseByteRate(value, &r.BytesPerSecond)
		}
		if err != nil || last < first {
			return fmt.Errorf("no root")
		}
		for i := first; i <= last; i++ {
			r.GPUs = append(r.GPUs, i)
		}
		s.o.HostRoots = append(s.o.HostRoots, r)
		return nil
	})
}
