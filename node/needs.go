package node

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/pipeline"
	"github.com/moeserve/moeserve/planner"
)

// budget works out what lies where, before anything is taken, and how many blocks
// the KV cache gets.
func (n *Node) budget(o *Options) (kvcache.Shape, int, error) {
	w, err := n.needs(o)
	if err != nil {
		return kvcache.Shape{}, 0, err
	}
	fit, err := n.fit(o, w)
	if err != nil {
		return kvcache.Shape{}, 0, err
	}
	if fit.MaxModelLen < n.limits.MaxModelLen {
		// Tables of shorter sequences take less.
		n.footprint.maxModelLen = fit.MaxModelLen
		if w, err = n.needs(o); err != nil {
			return kvcache.Shape{}, 0, err
		}
	}
	if err := n.together(w.device.Need(), w.host.Need()); err != nil {
		return kvcache.Shape{}, 0, err
	}
	if err := n.shareMemory(w, fit); err != nil {
		return kvcache.Shape{}, 0, err
	}
	peers, err := n.lend()
	if err != nil {
		return kvcache.Shape{}, 0, err
	}
	if n.plan.OffloadedExperts > 0 && len(peers) > 0 && !slices.ContainsFunc(peers, func(b PeerBudget) bool { return b.Experts > 0 }) {
		n.log.Warn("no peer has room for an expert now: offloaded ones come from host memory until one has", "headroom_bytes", peers[0].Headroom)
	}
	return w.kv, fit.Blocks, n.peersHold(peers)
}

// lend works out what peers can lend, with what others hold of them at first.
func (n *Node) lend() ([]PeerBudget, error) {
	if err := n.openTrace(); err != nil {
		return nil, err
	}
	return n.peerBudgets(n.plan.Layout.Size)
}

// topLogProbs is how many alternatives come with the log-probability of a token:
// what the OpenAI API allows at most.
const topLogProbs = 20

// needs is what a configuration takes, before it is known whether that is there.
type needs struct {
	kv           kvcache.Shape
	device, host Demand
}

// needs works out plan and limits, and what they take of which memory.
func (n *Node) needs(o *Options) (*needs, error) {
	s, f := &o.Settings, n.footprint
	n.limits = f.limits(s.Batch.MaxNumBatchedTokens, s.Batch.MaxNumSeqs)
	placement, err := n.placement(s, f.layers)
	if err != nil {
		return nil, err
	}
	store := f.experts(placement.Largest())
	store.Placement = placement
	if n.plan, err = experts.NewPlan(store); err != nil {
		return nil, err
	}
	if n.plan.OffloadedExperts == 0 {
		n.peers = nil
	}
	usage, err := n.machine.Usage(n.space)
	if err != nil {
		return nil, err
	}
	host, err := n.machine.Usage(device.Host)
	if err != nil {
		return nil, err
	}
	gpu, pinned := f.parts(&n.plan, n.limits, wayOf(s))
	return &needs{
		kv: f.kv(),
		device: Demand{
			Space: n.space.String(), Capacity: usage.Capacity - usage.Other, Share: s.Device.GPUMemoryUtilization, Parts: gpu,
			Advice: "offload more experts (offload-fraction), lower max-num-batched-tokens, or give the device more memory",
		},
		host: Demand{
			Space: device.Host.String(), Capacity: host.Capacity - host.Other, Share: 1, Parts: pinned,
			Advice: "offload fewer experts (offload-fraction), or give the host more memory",
		},
	}, nil
}

// steps says how the settings have steps run, without what runs them.
func (n *Node) steps(o *Options) pipeline.Options {
	p := n.footprint.steps(n.limits, wayOf(&o.Settings))
	p.Machine, p.Space, p.Log = n.machine, n.space, n.log
	if n.settings.Kernels.EnforceEager {
		p.Graphs = -1
	}
	if p.HostAttention != nil {
		p.HostAttention = n.host
	}
	return p
}

// kvSpace is the memory that keys and values lie in: that of whoever attends.
func (n *Node) kvSpace() device.Space {
	if n.settings.Batch.Attention == configs.OnCPU {
		return device.Host
	}
	return n.space
}

// placement says which experts of the layers are offloaded.
func (n *Node) placement(s *configs.Settings, layers []int) (experts.Placement, error) {
	c := n.config
	if s.Offload.LocalExperts == "" {
		return experts.Place(len(layers), c.Experts, s.Offload.Fraction)
	}
	text := s.Offload.LocalExperts
	if path, ok := s.Offload.LocalExpertsFile(); ok {
		data, err := os.ReadFile(path)
		if err != nil {
			return nil, fmt.Errorf("local-experts: %w", err)
		}
		text = string(data)
	}
	list, err := configs.ParseExperts(text)
	if err != nil {
		return nil, fmt.Errorf("local-experts: %w", err)
	}
	var local []experts.ID
	for _, l := range list {
		at, ok := slices.BinarySearch(layers, l.Layer)
		if !ok {
			return nil, fmt.Errorf("local-experts: layer %d has no experts; the model's layers that have are %s", l.Layer, spans(layers))
		}
		for _, e := range l.Experts {
			if e >= c.Experts {
				return nil, fmt.Errorf("local-experts: there is no expert %d in layer %d: it has %d, from 0 on", e, l.Layer, c.Experts)
			}
			local = append(local, experts.ID{Layer: at, Expert: e})
		}
	}
	return experts.PlaceLocal(len(layers), c.Experts, local)
}

// spans writes ascending numbers shortly: "0-5, 8".
func spans(numbers []int) string {
	if len(numbers) == 0 {
		return "none"
	}
	var parts []string
	for i := 0; i < len(numbers); {
		j := i
		for j+1 < len(numbers) && numbers[j+1] == numbers[j]+1 {
			j++
		}
		part := strconv.Itoa(numbers[i])
		if j > i {
			part += "-" + strconv.Itoa(numbers[j])
		}
		parts = append(parts, part)
		i = j + 1
	}
	return strings.Join(parts, ", ")
}

// fit sizes the KV cache with what the needs leave, or says what there is too
// little of.
func (n *Node) fit(o *Options, w *needs) (KVFit, error) {
	s := &o.Settings
	if _, err := w.device.Room(); err != nil {
		if f, ok := n.fraction(s); ok {
			err = fmt.Errorf("%w; with offload-fraction %v it would fit", err, f)
		}
		return KVFit{}, err
	}
	if _, err := w.host.Room(); err != nil {
		return KVFit{}, err
	}
	return n.cache(s, w)
}

// fraction is the least offload fraction with which the model would fit, and false
// where there is none above the one asked for.
func (n *Node) fraction(s *configs.Settings) (float64, bool) {
	if s.Offload.LocalExperts != "" {
		return 0, false
	}
	all := func(string) bool { return true }
	p, err := n.problem(s, all, planner.Workload{PromptTokens: 1, NewTokens: 1})
	if err != nil {
		return 0, false
	}
	x := planner.Policy{Batch: 1, Grouping: s.Batch.Grouping}
	if n.kvSpace() == device.Host {
		x.Attention = configs.OnCPU
	}
	local, ok := p.MostLocal(x)
	if !ok || local >= n.plan.LocalExperts {
		return 0, false
	}
	return fractionOf(p.Model.ExpertCount()-local, p.Model.ExpertCount()), true
}

// hostKVShare of the host's room may be keys and values: the rest of the machine lives
// there too.
const hostKVShare = 0.8

// cache sizes the KV cache with what is left where it lies.
func (n *Node) cache(s *configs.Settings, w *needs) (KVFit, error) {
	room, err := w.device.Room()
	if err == nil && n.kvSpace() == device.Host {
		room, err = w.host.Room()
		room = int64(hostKVShare * float64(room))
	}
	if err != nil {
		return KVFit{}, err
	}
	return KVDemand{
		Room: room, BlockBytes: w.kv.BlockBytes(), BlockTokens: w.kv.BlockTokens,
		MaxModelLen: s.KV.MaxModelLen, ModelPositions: n.config.MaxPositions, MaxNumSeqs: s.Batch.MaxNumSeqs, Blocks: s.KV.NumBlocks,
	}.Fit()
}

// together refuses what emulated devices could hold one by one but this machine,
// whose memory they all share, cannot.
func (n *Node) together(gpu, host int64) error {
	if c := n.machine.Capabilities(); !c.Emulated || !c.KeepsData {
		return nil
	}
	have, ok := availableMemory()
	if !ok {
		return nil
	}
	_, err := Demand{
		Space: "this machine", Capacity: have, Share: 1,
		Parts:  []Part{{"emulated " + n.space.String(), gpu}, {"emulated host", host}},
		Advice: "use a smaller model, fewer layers (num-hidden-layers, with dummy weights), or a machine with more memory",
	}.Room()
	return err
}
