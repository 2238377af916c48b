package planning

import (
	"encoding/json"
	"math"
	"slices"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/planner"
	"github.com/moeserve/moeserve/untrusted"
)

// Calibrated are the relays of a GPU that hardware says to pay, by the driver's numbers; none where
// it was not calibrated, or for another GPU.
func Calibrated(h *planner.Hardware, gpu int) []int {
	if h.Multipath == nil || h.Multipath.GPU != gpu {
		return nil
	}
	return h.Multipath.Relays
}

// Over sets the rates of hardware from the host to those over a GPU's own link alone, and with 1, 2, …
// of the relays, by the driver's numbers. Relays that were not calibrated have the rates of any where
// there was no calibration of the GPU, and add nothing where there was; nor do more paths than there
// are rates of.
func Over(h *planner.Hardware, gpu int, relays []int) {
	known := Calibrated(h, gpu)
	calibrated := h.Multipath != nil && h.Multipath.GPU == gpu
	rates := h.HostToGPU[:1:1]
	n := 0
	for _, r := range relays {
		if !calibrated || slices.Contains(known, r) {
			n++
		}
		rates = append(rates, h.HostToGPU[min(n, len(h.HostToGPU)-1)])
	}
	h.HostToGPU = rates
	if h.PeerToGPU == 0 { // relays reach the GPU as peers would
		h.HostToGPU = rates[:1]
	}
}

// hostRates are the rates from the host to a GPU over its own link alone, and with 1, 2, … of the relays,
// when all copy at once, as the links of emulated devices share their rates. The first is 0 where it is
// not limited.
func hostRates(t *device.Topology, gpu device.Space, relays []device.Space) []float64 {
	direct, _ := t.Path(device.Host, gpu)
	rates := []float64{direct.BytesPerSecond}
	ways := []device.Path{direct}
	for _, r := range relays {
		up, _ := t.Path(device.Host, r)
		over, _ := t.Path(r, gpu)
		up.Links = append(slices.Clone(up.Links), over.Links...)
		if over.BytesPerSecond > 0 && (up.BytesPerSecond == 0 || over.BytesPerSecond < up.BytesPerSecond) {
			up.BytesPerSecond = over.BytesPerSecond
		}
		ways = append(ways, up)
		rates = append(rates, max(together(t, ways), rates[len(rates)-1]))
	}
	return rates
}

// together is the rate of all paths at once: they grow alike until a link or the path itself is at its
// limit; 0: no limit.
func together(t *device.Topology, ways []device.Path) float64 {
	room := map[int]float64{}
	for _, w := range ways {
		for _, l := range w.Links {
			if t.Links[l].BytesPerSecond > 0 {
				room[l] = t.Links[l].BytesPerSecond
			}
		}
	}
	var sum float64
	at := make([]float64, len(ways))
	for open := slices.Clone(ways); len(open) > 0; {
		users := map[int]int{}
		for _, w := range open {
			for _, l := range w.Links {
				users[l]++
			}
		}
		more := math.Inf(1) // by how much all can grow
		for l, n := range users {
			if r, ok := room[l]; ok {
				more = min(more, r/float64(n))
			}
		}
		for i, w := range open {
			if w.BytesPerSecond > 0 {
				more = min(more, w.BytesPerSecond-at[i])
			}
		}
		if math.IsInf(more, 1) {
			return 0
		}
		sum += more * float64(len(open))
		for l, n := range users {
			if _, ok := room[l]; ok {
				room[l] -= more * float64(n)
			}
		}
		const nothing = 1e-6 // bytes per second
		var left []device.Path
		var rates []float64
		for i, w := range open {
			full := w.BytesPerSecond > 0 && w.BytesPerSecond-at[i]-more < nothing
			for _, l := range w.Links {
				r, ok := room[l]
				full = full || ok && r < nothing
			}
			if !full {
				left, rates = append(left, w), append(rates, at[i]+more)
			}
		}
		open, at = left, rates
	}
	return sum
}

// PolicyPaths is the number of paths from the host of the policy in a file; 0 where the file has none, or
// cannot be read.
func PolicyPaths(policy configs.PolicySource) int {
	if policy == configs.NoPolicy || policy == configs.PlannedPolicy {
		return 0
	}
	data, err := untrusted.ReadFile(string(policy), untrusted.MaxSettings)
	if err != nil {
		return 0 // reported where the policy is read
	}
	var file struct {
		planner.Policy
		Under planner.Policy `json:"policy"`
	}
	if json.Unmarshal(data, &file) != nil {
		return 0
	}
	return max(file.HostPaths, file.Under.HostPaths)
}
