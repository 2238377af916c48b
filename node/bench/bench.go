package bench

import (
	"context"
	"time"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/eval"
	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/node/planning"
	"github.com/moeserve/moeserve/pipeline"
	"github.com/moeserve/moeserve/planner"
)

// Node is a node as package eval measures it.
type Node struct {
	n        *node.Node
	hardware *planner.Hardware
}

var _ eval.Node = (*Node)(nil)

// New takes over a node. hardware replaces what is known of its machine's rates; nil: it
// does not.
func New(n *node.Node, hardware *planner.Hardware) *Node { return &Node{n, hardware} }

// Info implements eval.Node.
func (b *Node) Info() eval.Info {
	i := b.n.Info()
	s := &i.Settings
	c := b.n.Machine().Capabilities()
	info := eval.Info{
		Machine: Machine(i.Facts, &s.Device, b.over(i)),
		Model:   i.Name, DType: i.Config.DType.String(), LoadFormat: s.Model.LoadFormat,
		KeepsData: c.KeepsData, StepTokens: i.Limits.MaxTokens, MicroBatchTokens: i.Limits.MaxTokens,
		Grouping: s.Batch.Grouping, Attention: s.Batch.Attention, MicroBatches: s.Batch.NumMicroBatches,
		HostPaths: 1 + len(i.Relays), Shape: i.Shape, Sizes: i.Sizes,
	}
	access := s.Batch.ExpertAccess
	if access == configs.AutoAccess && c.Emulated {
		access = configs.CopyAccess // emulated devices' kernels take no time for links
	}
	info.Complete = func(p *planner.Problem) { planning.Fetches(p, i.Sizes.Expert, access) }
	if s.Batch.MicroBatchSize > 0 {
		info.MicroBatchTokens = s.Batch.MicroBatchSize
	}
	if c.KeepsData {
		onCPU, _ := s.Batch.ParseCPUExperts() // valid
		info.OnDemandTokens = pipeline.OnDemandTokens(i.Config.Experts, i.Config.TopK, onCPU.On())
		if info.CPUExperts = onCPU.Fraction; onCPU.Auto {
			info.CPUExperts = -1
		}
	}
	if info.Attention == configs.AnyPlace {
		info.Attention = configs.OnGPU
	}
	return info
}

// over is the hardware with the rates over the paths that are used.
func (b *Node) over(i *node.Info) *planner.Hardware {
	if b.hardware == nil {
		return nil
	}
	h := *b.hardware
	planning.Over(&h, i.Settings.Device.GPU, i.Relays)
	return &h
}

// Batch implements eval.Node.
func (b *Node) Batch(prompts [][]int32, newTokens int) (eval.Batch, error) {
	batch, err := NewBatch(b.n, prompts, newTokens)
	if err != nil {
		return nil, err
	}
	return batch, nil
}

// Counts implements eval.Node.
func (b *Node) Counts(ctx context.Context) (eval.Counts, error) {
	r, err := b.n.Observe().Report(ctx)
	if err != nil {
		return eval.Counts{}, err
	}
	c := eval.Counts{
		Hits: r.Experts.Hits, Misses: r.Experts.Misses,
		Stalls:      r.Pipeline.Stalls.ByName(),
		FetchedHost: r.Experts.Fetched[experts.Host] + r.Experts.ReadInPlace[experts.Host],
		FetchedPeer: r.Experts.Fetched[experts.Peer] + r.Experts.ReadInPlace[experts.Peer],
		DirectSteps: r.Pipeline.Steps.Direct,
	}
	for _, l := range r.Layers {
		c.RoutedTokens = append(c.RoutedTokens, l.RoutedTokens)
	}
	space := b.n.Info().Facts.Space.String()
	for _, m := range r.Memory {
		if m.Space == space {
			c.PeakBytes = m.Peak
		}
	}
	return c, nil
}

// Now implements eval.Node.
func (b *Node) Now() time.Duration { return b.n.Machine().Now() }

// Close implements eval.Node.
func (b *Node) Close() error { return b.n.Close() }
