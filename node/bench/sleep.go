package bench

import (
	"context"

	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/eval/sleep"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/node/sleeping"
	"github.com/moeserve/moeserve/planner"
)

// Sleep is a node as package sleep measures it.
type Sleep struct {
	n        *node.Node
	hardware *planner.Hardware
}

var _ sleep.Engine = (*Sleep)(nil)

// NewSleep makes one of a node, which stays its caller's. hardware replaces what is known of its
// machine's rates; nil: it does not.
func NewSleep(n *node.Node, hardware *planner.Hardware) *Sleep { return &Sleep{n, hardware} }

// Info implements sleep.Engine.
func (b *Sleep) Info() sleep.Info {
	i := b.n.Info()
	e := b.n.Observe().Experts()
	return sleep.Info{
		Machine: Machine(i.Facts, &i.Settings.Device, b.hardware), Model: i.Name, DType: i.Config.DType.String(), OffloadFraction: e.OffloadFraction(),
	}
}

// Tokens implements sleep.Engine.
func (b *Sleep) Tokens(ctx context.Context) ([]int32, error) {
	p := engine.DefaultParams()
	p.MaxTokens, p.IgnoreEOS = 8, true
	prompt := make([]int32, 16)
	for i := range prompt {
		prompt[i] = int32((7*i + i*i) % b.n.Info().Config.Vocab)
	}
	outs, err := b.n.Engine().Generate(ctx, []engine.Request{{Prompt: prompt, Params: p}}, nil)
	if err != nil || !b.n.Machine().Capabilities().KeepsData {
		return nil, err
	}
	return outs[0].TokenIDs, nil
}

// Sleep implements sleep.Engine.
func (b *Sleep) Sleep(ctx context.Context, level int) (sleep.Phase, error) {
	t, err := b.n.Sleep(ctx, sleeping.Level(level), engine.PauseWait)
	return phase(t), err
}

// Wake implements sleep.Engine.
func (b *Sleep) Wake(ctx context.Context) (sleep.Phase, error) {
	t, err := b.n.Wake(ctx)
	return phase(t), err
}

func phase(t sleeping.Times) sleep.Phase {
	return sleep.Phase{
		Seconds: t.Total.Seconds(), CopySeconds: t.Copies.Seconds(), PinSeconds: t.Pin.Seconds(), MapSeconds: t.Map.Seconds(), LoadSeconds: t.Load.Seconds(),
		CopiedBytes: t.Bytes, GPUBytes: t.Freed,
	}
}
