package emulated

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/moeserve/moeserve/device"
)

// SpecHelp describes the syntax of ParseSpec, for a command's help.
const SpecHelp = `comma-separated settings of emulated devices, as
  gpus=3             number of GPUs
  hbm=8GiB           memory of each GPU (8G is the same; 8GB is 8*10^9 bytes)
  host=16GiB         pinned host memory
  pcie=55.3GB/s      rate between host and each GPU, in each direction
  hostroot=100GB/s   rate that all GPUs share towards the host; 0-3:9GB/s: a set
  traffic=in1:9GB/s@1s-2s   copies of others to GPU 1 (out1: from it) for a time
  hostlink=1:1GB/s@1s-2s   slower link to the host for a time; 1:down: it fails
  nvlink=395GB/s     rate in and out of each GPU towards its peers
  pairs=2-0:50GB/s   lower rate of two GPUs, in both directions; more with +
  busy=1:60%         share of a GPU's bandwidth that others use; more with +
  latency=8us        of every copy; hostlatency=, peerlatency= for one kind
  flops=800T         flops per second of each GPU
  bw=4.6TB/s         memory bandwidth of each GPU
  cpuflops=2T, cpubw=300GB/s   the same of the host
  pace               take the time that the rates say (virtual always does)
  virtual            virtual clock, deterministic order
  schedule=eager     order on the virtual clock: eager, lazy, random
  seed=1             of schedule=random and of injected faults
  nodata             memory is address space only; needs virtual
  check              check that accesses are ordered`

// specKey sets one option; keys without a value get "".
type specKey struct {
	value bool
	set   func(s *spec, v string) error
}

// spec is Options in the making: per-GPU settings hold for all GPUs.
type spec struct {
	o        Options
	gpus     int
	gpu      GPU
	hostRoot float64
	latency  time.Duration
}

var specKeys = map[string]specKey{
	"gpus": {true, func(s *spec, v string) error {
		n, err := strconv.Atoi(v)
		if err != nil || n < 1 || n > 1024 {
			return fmt.Errorf("want a number of GPUs from 1 to 1024")
		}
		s.gpus = n
		return nil
	}},
	"hbm":      {true, func(s *spec, v string) error { return parseBytes(v, &s.gpu.MemoryBytes) }},
	"host":     {true, func(s *spec, v string) error { return parseBytes(v, &s.o.Host.MemoryBytes) }},
	"pcie":     {true, func(s *spec, v string) error { return parseByteRate(v, &s.o.HostLink.BytesPerSecond) }},
	"nvlink":   {true, func(s *spec, v string) error { return parseByteRate(v, &s.o.PeerLink.BytesPerSecond) }},
	"hostroot": {true, func(s *spec, v string) error { return s.parseRoots(v) }},
	"traffic":  {true, func(s *spec, v string) error { return s.parseTraffic(v) }},
	"hostlink": {true, func(s *spec, v string) error { return s.parseHostRates(v) }},
	"pairs": {true, func(s *spec, v string) error {
		s.o.PairRates = map[device.Pair]float64{}
		return parseEach(v, "pairs of GPUs and their rates like 1-0:395GB/s+2-0:50GB/s", func(name, value string) error {
			a, b, _ := strings.Cut(name, "-")
			i, err := parseGPU(a)
			j, errJ := parseGPU(b)
			var rate float64
			if err := errors.Join(err, errJ, parseByteRate(value, &rate)); err != nil || i == j {
				return errors.New("no pair")
			}
			for _, p := range []device.Pair{{From: device.HBM(i), To: device.HBM(j)}, {From: device.HBM(j), To: device.HBM(i)}} {
				s.o.PairRates[p] = rate
			}
			return nil
		})
	}},
	"busy": {true, func(s *spec, v string) error {
		s.o.Busy = map[int]float64{}
		return parseEach(v, "GPUs and shares below 100% like 1:60%+2:0.1", func(name, value string) error {
			i, err := parseGPU(name)
			bare, percent := strings.CutSuffix(value, "%")
			share, errShare := strconv.ParseFloat(bare, 64)
			if percent {
				share /= 100
			}
			s.o.Busy[i] = share
			return errors.Join(err, errShare)
		})
	}},
	"latency":     {true, func(s *spec, v string) error { return parseDuration(v, &s.latency) }},
	"hostlatency": {true, func(s *spec, v string) error { return parseDuration(v, &s.o.HostLink.Latency) }},
	"peerlatency": {true, func(s *spec, v string) error { return parseDuration(v, &s.o.PeerLink.Latency) }},
	"flops":       {true, func(s *spec, v string) error { return parseFlops(v, &s.gpu.FlopsPerSecond) }},
	"bw":          {true, func(s *spec, v string) error { return parseByteRate(v, &s.gpu.BytesPerSecond) }},
	"cpuflops":    {true, func(s *spec, v string) error { return parseFlops(v, &s.o.Host.FlopsPerSecond) }},
	"cpubw":       {true, func(s *spec, v string) error { return parseByteRate(v, &s.o.Host.BytesPerSecond) }},
	"seed": {true, func(s *spec, v string) error {
		n, err := strconv.ParseUint(v, 10, 64)
		if err != nil {
			return fmt.Errorf("want a whole number from 0")
		}
		s.o.Seed = n
		return nil
	}},
	"schedule": {true, func(s *spec, v string) error {
		for _, k := range []Schedule{Eager, Lazy, Random} {
			if v == k.String() {
				s.o.Schedule = k
				return nil
			}
		}
		return fmt.Errorf("want eager, lazy or random")
	}},
	"pace":    {false, func(s *spec, _ string) error { s.o.Pace = true; return nil }},
	"virtual": {false, func(s *spec, _ string) error { s.o.Virtual = true; return nil }},
	"nodata":  {false, func(s *spec, _ string) error { s.o.NoData = true; return nil }},
	"check":   {false, func(s *spec, _ string) error { s.o.Check = true; return nil }},
}

// ParseSpec reads Options from text like
//
//	gpus=3,hbm=8GiB,host=16GiB,pcie=55.3GB/s,nvlink=395GB/s,virtual,seed=1
//
// SpecHelp lists all keys. Keys not given have their defaults, so "" is the default
// machine. Sizes take KB, MB, GB, TB, PB (powers of 1000) and KiB, MiB, GiB, TiB, PiB or K, M,
// G, T, P (powers of 1024); rates take the same units with /s; flops per second take M, G, T or P.
// An error names the key and what is expected.
func ParseSpec(text string) (Options, error) {
	s := &spec{gpus: defaultGPUs}
	given := map[string]bool{}
	for _, part := range strings.Split(text, ",") {
		part = strings.TrimSpace(part)
		if part == "" {
			if strings.TrimSpace(text) == "" {
				break
			}
			return Options{}, fmt.Errorf("emulated: specification %q has an empty setting", text)
		}
		name, value, hasValue := strings.Cut(part, "=")
		key, ok := specKeys[name]
		switch {
		case !ok:
			return Options{}, fmt.Errorf("emulated: unknown key %q; the keys are %s", name, strings.Join(specNames(), ", "))
		case given[name]:
			return Options{}, fmt.Errorf("emulated: key %q is given twice", name)
		case hasValue && !key.value:
			return Options{}, fmt.Errorf("emulated: key %q takes no value", name)
		case !hasValue && key.value:
			return Options{}, fmt.Errorf("emulated: key %q needs a value: %s=…", name, name)
		}
		given[name] = true
		if err := key.set(s, value); err != nil {
			return Options{}, fmt.Errorf("emulated: key %q: %q: %w", name, value, err)
		}
	}
	if err := s.together(); err != nil {
		return Options{}, fmt.Errorf("emulated: %w", err)
	}
	o := s.o
	if !given["hostlatency"] {
		o.HostLink.Latency = s.latency
	}
	if !given["peerlatency"] {
		o.PeerLink.Latency = s.latency
	}
	if s.hostRoot > 0 {
		root := Root{BytesPerSecond: s.hostRoot}
		for i := range s.gpus {
			root.GPUs = append(root.GPUs, i)
		}
		o.HostRoots = []Root{root}
	}
	for range s.gpus {
		o.GPUs = append(o.GPUs, s.gpu)
	}
	if err := o.Validate(); err != nil {
		return Options{}, err
	}
	return o, nil
}

// together returns an error for keys that cannot be combined. Options.Validate refuses them
// too, but by field names instead of keys.
func (s *spec) together() error {
	switch o := &s.o; {
	case o.Virtual && o.Pace:
		return fmt.Errorf("pace is for the wall clock and virtual has a clock of its own: use only one of pace and virtual")
	case o.NoData && !o.Virtual:
		return fmt.Errorf("nodata needs virtual")
	case o.Schedule != Eager && !o.Virtual:
		return fmt.Errorf("schedule=%v needs virtual: on the wall clock the system schedules", o.Schedule)
	}
	return nil
}

// parseEach parses entries like name:value+name:value.
func parseEach(v, want string, parse func(name, value string) error) error {
	for entry := range strings.SplitSeq(v, "+") {
		name, value, ok := strings.Cut(entry, ":")
		if !ok || parse(name, value) != nil {
			return fmt.Errorf("want %s", want)
		}
	}
	return nil
}

func parseGPU(v string) (int, error) {
	n, err := strconv.ParseUint(v, 10, 16)
	return int(n), err
}

func specNames() []string {
	var names []string
	for n := range specKeys {
		names = append(names, n)
	}
	slices.Sort(names)
	return names
}

var byteUnits = map[string]float64{
	"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "PB": 1e15,
	"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "PiB": 1 << 50,
	"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40, "P": 1 << 50,
}

var flopUnits = map[string]float64{"M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}

// parseNumber parses a positive number with one of the units.
func parseNumber(v string, units map[string]float64, want string) (float64, error) {
	i := strings.IndexFunc(v, func(r rune) bool { return (r < '0' || r > '9') && r != '.' })
	if i < 0 {
		i = len(v)
	}
	n, err := strconv.ParseFloat(v[:i], 64)
	unit, ok := units[v[i:]]
	switch {
	case err == nil && i == len(v) && !ok:
		return 0, fmt.Errorf("the unit is missing: want %s", want)
	case err == nil && !ok:
		return 0, fmt.Errorf("there is no unit %q: want %s", v[i:], want)
	case errors.Is(err, strconv.ErrRange), math.IsInf(n*unit, 0):
		return 0, fmt.Errorf("it is too large: want %s", want)
	case err != nil || n <= 0:
		return 0, fmt.Errorf("want %s", want)
	}
	return n * unit, nil
}

func parseBytes(v string, to *int64) error {
	const want = "a size over 0 like 8GiB"
	n, err := parseNumber(v, byteUnits, want)
	if err != nil {
		return err
	}
	if n > 1<<60 {
		return fmt.Errorf("it is more than 1024PiB: want %s", want)
	}
	if n < 1 {
		return fmt.Errorf("want %s", want)
	}
	*to = int64(n)
	return nil
}

func parseByteRate(v string, to *float64) error {
	const want = "a rate over 0 like 55.3GB/s"
	bare, ok := strings.CutSuffix(v, "/s")
	if !ok {
		return fmt.Errorf("want %s", want)
	}
	n, err := parseNumber(bare, byteUnits, want)
	*to = n
	return err
}

func parseFlops(v string, to *float64) error {
	n, err := parseNumber(v, flopUnits, "flops per second over 0 like 800T")
	*to = n
	return err
}

func parseDuration(v string, to *time.Duration) error {
	d, err := time.ParseDuration(v)
	if err != nil || d < 0 {
		return fmt.Errorf("want a duration like 8us")
	}
	*to = d
	return nil
}
