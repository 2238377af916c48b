package bench

import (
	"math"
	"slices"
	"strings"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/eval"
	"github.com/moeserve/moeserve/node/devices"
	"github.com/moeserve/moeserve/node/planning"
	"github.com/moeserve/moeserve/planner"
)

// Machine describes a machine that was opened with settings, for results. named is
// hardware that the user named, which stands for the machine's own; nil: none.
func Machine(facts planning.Machine, s *configs.Device, named *planner.Hardware) eval.Machine {
	gpu, _ := facts.Topology.Info(facts.Space)
	m := eval.Machine{Device: gpu.Name, Emulated: !facts.Real}
	if facts.Real {
		m.Driver = devices.DriverVersion()
	} else {
		m.Emulation = &eval.Emulation{Spec: s.Emulate, Rates: eval.RatesNone}
		switch {
		case facts.Timed && slices.Contains(strings.Split(s.Emulate, ","), "pace"):
			m.Emulation.Rates = eval.RatesPaced
		case facts.Timed:
			m.Emulation.Rates = eval.RatesVirtual
		}
	}
	known, ok := facts.Known()
	switch {
	case named != nil:
		m.Hardware = &eval.Hardware{Hardware: *named, Comparable: comparable(facts.Real, named, known, ok)}
	case ok:
		if known.Sources == nil {
			known.Sources = map[string]string{}
			for _, key := range planner.HardwareFields() {
				known.Sources[key] = "--emulate"
			}
		}
		m.Hardware = &eval.Hardware{Hardware: known, Comparable: true}
	}
	return m
}

// tolerance is by how much rates of the same hardware may differ.
const tolerance = 0.1

// comparable reports whether named hardware is the machine, of which the rates are known or
// not. Emulated devices are a machine where they keep to its rates. A GPU is not one of
// which there is a profile for another GPU, or which was measured on emulated devices; any
// other file counts as of this machine.
func comparable(realDevices bool, named *planner.Hardware, known planner.Hardware, ok bool) bool {
	if realDevices {
		if strings.HasPrefix(named.Name, "emulated") {
			return false
		}
		_, profile := configs.Hardware(named.Name)
		return !profile || ok && known.Name == named.Name
	}
	near := func(a, b float64) bool { return math.Abs(a-b) <= tolerance*max(a, b) }
	return ok && near(named.HostToGPU[0], known.HostToGPU[0]) && near(named.GPUFlops, known.GPUFlops) && near(named.GPUMemoryRate, known.GPUMemoryRate) &&
		(named.PeerToGPU == 0 || known.PeerToGPU == 0 || near(named.PeerToGPU, known.PeerToGPU))
}
