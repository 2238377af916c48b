package eval

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/moeserve/moeserve/planner"
	"github.com/moeserve/moeserve/untrusted"
)

// Run is one execution of a measuring program.
type Run struct {
	// Version and Commit of the program; Commit is empty where the build does not know it.
	Version string `json:"version"`
	Commit  string `json:"commit"`
	// Modified: the program was built from the commit with changes.
	Modified bool `json:"modified"`
	// Date is when it began, in UTC.
	Date time.Time `json:"date"`
	// Command is the command line.
	Command string `json:"command"`
}

// userInfo is what stands before the host of a URL.
var userInfo = regexp.MustCompile(`(://)[^\s/?#]+@`)

// HideCredentials removes the users and passwords of the URLs in a text, such as a command line:
// results are shown to others.
func HideCredentials(text string) string { return userInfo.ReplaceAllString(text, "${1}xxxxx@") }

// Machine is what measurements run on.
type Machine struct {
	// Device is the name of the GPU, Driver the version of its driver; empty where the
	// devices are emulated.
	Device string `json:"device"`
	Driver string `json:"driver_version"`
	// Emulated: the devices are played on the CPU, and so are their times.
	Emulated bool `json:"emulated"`
	// Emulation is how; absent on real devices.
	Emulation *Emulation `json:"emulation,omitempty"`
	// Hardware has the rates that rooflines and predictions are computed from; null where
	// they are not known.
	Hardware *Hardware `json:"hardware"`
}

// Emulation is how devices are emulated.
type Emulation struct {
	// Spec is the value of --emulate.
	Spec  string `json:"emulate"`
	Rates Rates  `json:"rates"`
}

// Rates are what the times of emulated devices come from.
type Rates string

// The kinds of Rates.
const (
	// RatesNone: this CPU, which copies and computes as fast as it can.
	RatesNone Rates = "none"
	// RatesPaced: the given rates, on the wall clock.
	RatesPaced Rates = "paced"
	// RatesVirtual: the given rates, on a virtual clock.
	RatesVirtual Rates = "virtual"
)

// Hardware is a machine's rates with their sources.
type Hardware struct {
	planner.Hardware
	// Comparable: the devices that were measured are this hardware. Otherwise predictions
	// are of another machine than measurements.
	Comparable bool `json:"comparable"`
}

// Unpaced reports whether the devices are emulated and keep to no rates, so that times of
// different memories do not compare.
func (m *Machine) Unpaced() bool {
	return m.Emulated && (m.Emulation == nil || m.Emulation.Rates == RatesNone)
}

// comparable reports whether predictions may stand beside measurements as shares of them.
func (m *Machine) comparable() bool { return m.Hardware != nil && m.Hardware.Comparable }

// words name the machine for a person.
func (m *Machine) words() string {
	if !m.Emulated {
		if m.Driver != "" {
			return m.Device + ", driver " + m.Driver
		}
		return m.Device
	}
	s := "emulated on the CPU"
	if m.Device != emulatedLabel {
		s = m.Device + ", " + s
	}
	if m.Emulation == nil {
		return s
	}
	if m.Emulation.Spec != "" {
		s += " (--emulate " + m.Emulation.Spec + ")"
	}
	switch m.Emulation.Rates {
	case RatesVirtual:
		return s + ", on a virtual clock: times are calculated from the given rates"
	case RatesPaced:
		return s + ", paced to the given rates"
	default:
		return s + ", without rates: times are this CPU's"
	}
}

// notComparable is why predictions do not stand beside measurements; empty where they do.
func (m *Machine) notComparable() string {
	if m.Hardware == nil || m.Hardware.Comparable {
		return ""
	}
	on := m.Device
	if m.Emulated {
		on = "emulated devices"
	}
	return fmt.Sprintf("predicted for %s; measured on %s: not comparable", untrusted.Name(m.Hardware.Name), on)
}

// labeled is a device's name, with "emulated" where it is and its name does not have that.
func labeled(device string, emulated bool) string {
	if emulated && device != emulatedLabel {
		device += ", " + emulatedLabel
	}
	return device
}

// String names the program and the date for a person.
func (r *Run) String() string { return r.build() + ", " + r.Date.UTC().Format(time.RFC3339) }

// build names the program.
func (r *Run) build() string {
	s := "moeserve " + r.Version
	if r.Commit != "" {
		s += ", commit " + r.Commit[:min(12, len(r.Commit))]
		if r.Modified {
			s += " with changes"
		}
	}
	return s
}

// Header writes what ran, where and how, for the top of a table.
func Header(r *Run, m *Machine) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s\ncommand: %s\ndevice: %s\n", r, r.Command, m.words())
	h := m.Hardware
	if h == nil {
		b.WriteString("hardware rates: unknown; --hardware names them for rooflines and predictions\n\n")
		return b.String()
	}
	fmt.Fprintf(&b, "hardware rates: %s\n", untrusted.Name(h.Name))
	for _, f := range hardwareRates(h) {
		fmt.Fprintf(&b, "  %-12s %s", f.name, f.value)
		if f.source != "" {
			fmt.Fprintf(&b, " (%s)", f.source)
		}
		b.WriteString("\n")
	}
	b.WriteString("\n")
	return b.String()
}

// hardwareRate is one figure of a machine for a person.
type hardwareRate struct{ name, value, source string }

// unlimited is the rate from which on nothing limits emulated hardware.
const unlimited = 1e18

// hardwareRates are the figures on which predictions depend most.
func hardwareRates(h *Hardware) []hardwareRate {
	var rates []hardwareRate
	add := func(name, key, unit string, value, scale float64) {
		text := "not limited"
		switch {
		case value == 0:
			return
		case value < unlimited:
			text = strconv.FormatFloat(value/scale, 'g', 4, 64) + " " + unit
		}
		rates = append(rates, hardwareRate{name, text, h.Sources[key]})
	}
	if len(h.HostToGPU) > 0 {
		add("H2D link", "host_to_gpu_bytes_per_s", "GB/s", h.HostToGPU[0], 1e9)
	}
	add("D2H link", "gpu_to_host_bytes_per_s", "GB/s", h.GPUToHost, 1e9)
	add("P2P link", "peer_to_gpu_bytes_per_s", "GB/s", h.PeerToGPU, 1e9)
	add("GPU memory", "gpu_memory_bytes_per_s", "GB/s", h.GPUMemoryRate, 1e9)
	add("GPU compute", "gpu_flop_per_s", "TFLOP/s", h.GPUFlops, 1e12)
	return rates
}

// RunColumns are a Run's columns of CSV.
var RunColumns = []string{"version", "commit", "modified", "date", "command"}

// Values are those of RunColumns.
func (r *Run) Values() []string {
	date := ""
	if !r.Date.IsZero() {
		date = r.Date.UTC().Format(time.RFC3339)
	}
	return []string{r.Version, r.Commit, strconv.FormatBool(r.Modified), date, r.Command}
}

// ProvenanceColumns are the columns of CSV that name what a line is of.
var ProvenanceColumns = append(slices.Clone(RunColumns),
	"device", "driver_version", "emulated", "emulate", "emulated_rates", "hardware", "hardware_comparable", "hardware_rates")

// Provenance are the values of ProvenanceColumns. hardware_rates lists figures with their
// sources, separated by semicolons.
func Provenance(r *Run, m *Machine) []string {
	values := append(r.Values(), m.Device, m.Driver, strconv.FormatBool(m.Emulated))
	if e := m.Emulation; e != nil {
		values = append(values, e.Spec, string(e.Rates))
	} else {
		values = append(values, "", "")
	}
	h := m.Hardware
	if h == nil {
		return append(values, "", "", "")
	}
	var rates []string
	for _, f := range hardwareRates(h) {
		text := f.name + " " + f.value
		if f.source != "" {
			text += " (" + f.source + ")"
		}
		rates = append(rates, text)
	}
	return append(values, h.Name, strconv.FormatBool(h.Comparable), strings.Join(rates, "; "))
}
