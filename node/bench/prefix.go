package bench

import (
	"context"
	"fmt"
	"math"
	"time"

	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/eval/prefix"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/planner"
)

// Prefixes is a node as package prefix measures it: requests run through its engine.
type Prefixes struct {
	n        *node.Node
	hardware *planner.Hardware
}

var _ prefix.Engine = (*Prefixes)(nil)

// NewPrefixes takes over a node. hardware replaces what is known of its machine's rates; nil:
// it does not.
func NewPrefixes(n *node.Node, hardware *planner.Hardware) *Prefixes { return &Prefixes{n, hardware} }

// modelName is the name of a node's model, and how many of its layers are left.
func modelName(i *node.Info) string {
	if full := i.Config.FullLayers(); i.Config.Layers < full {
		return fmt.Sprintf("%s, %d of %d layers", i.Name, i.Config.Layers, full)
	}
	return i.Name
}

// Info implements prefix.Engine.
func (b *Prefixes) Info() prefix.Info {
	i := b.n.Info()
	return prefix.Info{
		Machine: Machine(i.Facts, &i.Settings.Device, b.hardware),
		Model:   modelName(i), DType: i.Config.DType.String(), LoadFormat: i.Settings.Model.LoadFormat.String(),
		BlockTokens: b.n.KV().BlockTokens(), Vocab: i.Config.Vocab,
	}
}

// Run implements prefix.Engine. Times are those of the devices' clock.
func (b *Prefixes) Run(ctx context.Context, prompts [][]int32, o prefix.RunOptions) (prefix.Batch, error) {
	requests := make([]engine.Request, len(prompts))
	for i, p := range prompts {
		params := engine.DefaultParams()
		params.MaxTokens, params.IgnoreEOS = o.NewTokens, true
		requests[i] = engine.Request{Prompt: p, Params: params, WithoutTiers: o.WithoutTiers}
	}
	r := prefix.Batch{First: make([]time.Duration, len(prompts)), Last: make([]time.Duration, len(prompts))}
	e, m := b.n.Engine(), b.n.Machine()
	before, recomputed, loaded, began := e.State(), b.recomputed(), b.loading(), m.Now()
	if _, err := e.Generate(ctx, requests, func(i int, u engine.Update) {
		if len(u.Tokens) == 0 {
			return
		}
		r.Last[i] = m.Now() - began
		if r.First[i] == 0 {
			r.First[i] = r.Last[i]
		}
	}); err != nil {
		return prefix.Batch{}, err
	}
	after := e.State()
	r.Recomputed = int(b.recomputed() - recomputed)
	r.Loading = b.loading() - loaded
	r.Cached = int(after.PrefixCacheHits - before.PrefixCacheHits + after.ExternalHits - before.ExternalHits)
	return r, nil
}

// recomputed is the number of tokens so far that a tier had and that were computed.
func (b *Prefixes) recomputed() int64 {
	t := b.n.KVTiers()
	if t == nil {
		return 0
	}
	return t.Decisions().ComputedTokens
}

// loading is the time of all loads from tiers so far, each from its submission until the host sees that
// its last byte has arrived. The tiers measure it of every load.
func (b *Prefixes) loading() time.Duration {
	t := b.n.KVTiers()
	if t == nil {
		return 0
	}
	seconds := 0.0
	for _, s := range t.Stats() {
		seconds += s.Loads.Seconds
	}
	return time.Duration(math.Round(seconds * float64(time.Second)))
}

// Settle implements prefix.Engine. Blocks that are being stored are held; the engine sees that
// a store has ended when it runs a step. Steps alone would not do: where the virtual clock of emulated
// devices does not advance, nothing but a wait for a copy runs it.
func (b *Prefixes) Settle(ctx context.Context) error {
	for b.n.KV().Held() > 0 {
		if t := b.n.KVTiers(); t != nil {
			if err := t.Wait(ctx); err != nil {
				return err
			}
		}
		if _, err := b.Run(ctx, [][]int32{{0}}, prefix.RunOptions{NewTokens: 1, WithoutTiers: true}); err != nil {
			return err
		}
	}
	return nil
}

// Close implements prefix.Engine.
func (b *Prefixes) Close() error { return b.n.Close() }
