package node

import (
	"fmt"
	"slices"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/node/planning"
	"github.com/moeserve/moeserve/node/sizing"
	"github.com/moeserve/moeserve/transfer"
)

// hostPaths are the GPUs over whose links copies from and to the host go, beside that of the GPU that
// computes.
type hostPaths struct {
	choice configs.HostPathChoice
	// waits: relays leave links that others use, too, to these for a while.
	waits bool
	// calibration is that of the setting hardware, if it is of the GPU that computes; else nil.
	calibration *configs.Multipath
	// wanted are GPUs by the driver's numbers, in the order in which they are taken: at most limit; 0:
	// all. soft: those that cannot be used are left out.
	wanted []int
	limit  int
	soft   bool
	// relays are their memories, once the devices are open.
	relays []device.Space
}

// choosePaths reads which relays the settings ask for.
func choosePaths(s *configs.Settings) (p hostPaths, err error) {
	if p.choice, err = s.Device.ParseHostPaths(); err != nil {
		return p, err
	}
	p.waits = s.Device.HostPathsMode == configs.WaitHostPaths
	if name := s.Plan.Hardware; name != "" {
		h, err := planning.LoadHardware(name)
		if err != nil {
			return p, fmt.Errorf("--hardware: %w", err)
		}
		if h.Multipath != nil && h.Multipath.GPU == s.Device.GPU {
			p.calibration = h.Multipath
		}
	}
	if p.calibration != nil {
		p.wanted = slices.Clone(p.calibration.Relays)
	}
	paths := p.choice.Paths
	if p.choice.Auto {
		p.soft = true
		if paths = planning.PolicyPaths(s.Plan.Policy); paths == 0 {
			return p, nil
		}
	}
	if p.limit = paths - 1; p.limit == 0 {
		p.wanted = nil
		return p, nil
	}
	if p.choice.Relays != nil {
		p.wanted = p.choice.Relays
		return p, nil
	}
	// Peers are open in any case.
	peers, err := s.Device.ParsePeers()
	if err != nil {
		return p, err
	}
	next := append(slices.Clone(peers.GPUs), make([]int, 0, paths)...)
	for i := range paths + len(peers.GPUs) {
		next = append(next, i)
	}
	for _, g := range next {
		if len(p.wanted) < p.limit && g != s.Device.GPU && !slices.Contains(p.wanted, g) {
			p.wanted = append(p.wanted, g)
		}
	}
	p.wanted = p.wanted[:min(p.limit, len(p.wanted))]
	return p, nil
}

// HostPaths is the number of links over which copies from and to the host go by the settings, without
// what a policy decides; where they leave it to a calibration, as many as pay.
func HostPaths(s *configs.Settings) (int, error) {
	p, err := choosePaths(s)
	return 1 + len(p.wanted), err
}

// findRelays finds the relays' memories on the open devices.
func (u *setup) findRelays() error {
	p := &u.paths
	for _, g := range p.wanted {
		s, err := u.devices.Relay(g)
		switch {
		case err == nil:
			p.relays = append(p.relays, s)
		case p.soft:
			u.o.Log.Warn("a GPU is not used as a relay for copies from and to the host", "gpu", g, "err", err)
		default:
			return fmt.Errorf("--host-paths is %s: %w", u.settings.Device.HostPaths, err)
		}
	}
	return nil
}

// usePaths takes the number of paths of a policy.
func (u *setup) usePaths(paths int) {
	p := &u.paths
	p.relays = p.relays[:min(len(p.relays), max(paths-1, 0))]
}

// relayNumbers are the relays as users name them.
func (u *setup) relayNumbers() []int {
	var numbers []int
	for _, r := range u.paths.relays {
		numbers = append(numbers, u.devices.Number(r))
	}
	return numbers
}

// multipath are the options of copies over several paths: calibrated ones, or defaults.
func (p *hostPaths) multipath() transfer.Multipath {
	var m transfer.Multipath
	if c := p.calibration; c != nil {
		m = transfer.Multipath{ChunkIn: c.ChunkIn, ChunkOut: c.ChunkOut, ThresholdIn: c.ThresholdIn, ThresholdOut: c.ThresholdOut, Depth: c.Depth}
	}
	m.Wait = p.waits
	return transfer.Options{Multipath: m}.EnsureDefaults().Multipath
}

// relayBuffers is the number of buffers of a relay in each direction: one is filled while another is
// emptied, and the host learns of the end of a third.
const relayBuffers = 3

// buffers are the sizes of a relay's buffers for copies from and to the host, in bytes.
func (p *hostPaths) buffers() (in, out int64) {
	m := p.multipath()
	return device.Align(m.ChunkIn), device.Align(m.ChunkOut)
}

// relayBytes is what a relay keeps of its GPU's memory.
func (p *hostPaths) relayBytes() int64 {
	in, out := p.buffers()
	return relayBuffers * (in + out)
}

// kept is what relays keep of a peer's memory.
func (p *hostPaths) kept(peer device.Space) int64 {
	if slices.Contains(p.relays, peer) {
		return p.relayBytes()
	}
	return 0
}

// lending are the GPUs whose memory is borrowed from: for experts and KV blocks, and by relays.
func (u *setup) lending() []device.Space {
	all := slices.Clone(u.borrowed())
	for _, r := range u.paths.relays {
		if !slices.Contains(all, r) {
			all = append(all, r)
		}
	}
	return all
}

// checkRelays returns an error where the buffers of relays that the settings name do not fit.
func (u *setup) checkRelays() error {
	room, err := u.settings.Harvest.ParseHeadroom()
	if err != nil {
		return err
	}
	p := &u.paths
	p.relays = slices.DeleteFunc(p.relays, func(r device.Space) bool {
		usage, failed := u.devices.Machine.Usage(r)
		need, headroom := p.relayBytes(), sizing.Headroom(room, u.devices.Machine.Topology(), r)
		if failed == nil && usage.Free()-headroom < need {
			failed = fmt.Errorf("its buffers need %s, and there are %s free, of which --harvest-headroom keeps %s", sizing.Bytes(need), sizing.Bytes(max(usage.Free(), 0)), sizing.Bytes(headroom))
		}
		if failed == nil {
			return false
		}
		if number := u.devices.Number(r); p.soft {
			u.o.Log.Warn("a GPU is not used as a relay for copies from and to the host", "gpu", number, "err", failed)
		} else if err == nil {
			err = fmt.Errorf("--host-paths is %s: GPU %d cannot be a relay: %w; name others", u.settings.Device.HostPaths, number, failed)
		}
		return true
	})
	return err
}
