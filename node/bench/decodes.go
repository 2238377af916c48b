package bench

import (
	"context"
	"encoding/binary"
	"fmt"

	"github.com/moeserve/moeserve/eval"
	"github.com/moeserve/moeserve/eval/prefix"
	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/kvcache/offload"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/node/fault"
	"github.com/moeserve/moeserve/planner"
)

// maxTrafficBlocks is the maximum number of KV blocks of one transfer of a Decodes.
const maxTrafficBlocks = 1024

// TrafficTokens is the room, in tokens, that a tier needs for the traffic of a Decodes beside
// sequences whose blocks have blockTokens tokens.
func TrafficTokens(blockTokens int) int { return 2 * maxTrafficBlocks * blockTokens }

// Decodes is a batch of a node that decodes beside copies of KV blocks, as package prefix measures
// it. The copies are of blocks that no sequence has; their content does not matter.
type Decodes struct {
	n        *node.Node
	hardware *planner.Hardware
	batch    *Batch
	tiers    *offload.Tiers
	spare    *kvcache.Table
	// keys of the blocks of the next store, and of one that loads read.
	keys, stored []kvcache.Key
	names        uint64
	// own are blocks that the sequences have filled and that were not stored, in parts.
	own float64
}

var _ prefix.Decoder = (*Decodes)(nil)

// NewDecodes takes over a node with KV tiers, and computes the prompts of so many sequences. Calls of
// Steps have at most steps steps.
func NewDecodes(ctx context.Context, n *node.Node, hardware *planner.Hardware, sequences, tokens, steps int) (_ *Decodes, err error) {
	d := &Decodes{n: n, hardware: hardware, tiers: n.KVTiers(), spare: n.KV().NewTable()}
	defer func() {
		if err != nil {
			_ = d.Close() // the first error is the one that matters
		}
	}()
	if d.tiers == nil {
		return nil, fault.Of(fault.ErrConfig, fmt.Errorf("node: no KV tier is configured"))
	}
	prompts := eval.GeneratePrompts(sequences, tokens, n.Info().Config.Vocab, 1)
	if d.batch, err = NewBatch(n, prompts, steps+1); err != nil {
		return nil, err
	}
	blocks := min(maxTrafficBlocks, n.KV().Free(), n.KV().Blocks()/4)
	if blocks < 1 || !d.spare.Reserve(blocks*n.KV().BlockTokens()) {
		return nil, fault.Of(fault.ErrConfig, fmt.Errorf("node: the KV cache has no block beside %d sequences of %d tokens", sequences, tokens))
	}
	if err := d.batch.Prefill(ctx); err != nil {
		return nil, err
	}
	d.keys, d.stored = make([]kvcache.Key, blocks), make([]kvcache.Key, blocks)
	return d, nil
}

// Info implements prefix.Decoder.
func (d *Decodes) Info() prefix.Info { return NewPrefixes(d.n, d.hardware).Info() }

// Steps implements prefix.Decoder. Times are those of the devices' clock.
func (d *Decodes) Steps(ctx context.Context, n int, t prefix.Traffic) (ran prefix.Steps, err error) {
	if t == prefix.Loads {
		if err := d.prepareLoads(ctx); err != nil {
			return ran, err
		}
	}
	clock := d.n.Machine()
	d.batch.decode.Meanwhile = func() {
		began := clock.Now()
		d.copy(t)
		ran.Host = append(ran.Host, clock.Now()-began)
	}
	defer func() { d.batch.decode.Meanwhile = nil }()
	before := d.copied()
	for i := range n {
		began := clock.Now()
		if err := d.batch.Decode(ctx, 1+i, 2+i); err != nil {
			return ran, err
		}
		ran.Times = append(ran.Times, clock.Now()-began)
	}
	d.tiers.Poll()
	ran.Bytes = d.copied() - before
	return ran, d.settle(ctx)
}

// copy starts the copies of a step while the device computes it.
func (d *Decodes) copy(t prefix.Traffic) {
	d.tiers.Poll()
	blocks := d.spare.Blocks()
	switch {
	case t == prefix.OwnStores:
		d.own += float64(len(d.batch.prompts)) / float64(d.n.KV().BlockTokens())
		n := min(int(d.own), len(blocks))
		d.own -= float64(int(d.own))
		d.rename()
		d.tiers.Store(d.keys[:n], 0, blocks[:n], offload.Filled)
	case t == prefix.Stores && !d.tiers.Busy():
		d.rename()
		d.tiers.Store(d.keys, 0, blocks, offload.Filled)
	case t == prefix.Loads && !d.tiers.Busy():
		d.startLoad()
	}
}

// startLoad loads what prepareLoads has stored. Without it nothing is copied, and the number of
// bytes says so.
func (d *Decodes) startLoad() { _ = d.tiers.Load(0, d.stored, 0, d.spare.Blocks()) }

// prepareLoads stores the blocks that are to be loaded.
func (d *Decodes) prepareLoads(ctx context.Context) error {
	d.rename()
	copy(d.stored, d.keys)
	d.tiers.Store(d.stored, 0, d.spare.Blocks(), offload.Filled)
	return d.settle(ctx)
}

// rename gives the blocks of the next store new keys.
func (d *Decodes) rename() {
	for i := range d.keys {
		d.names++
		binary.LittleEndian.PutUint64(d.keys[i][:], d.names)
	}
}

// copied is the number of bytes that were stored and loaded so far.
func (d *Decodes) copied() (bytes int64) {
	for _, s := range d.tiers.Stats() {
		bytes += s.StoredBytes + s.LoadedBytes
	}
	return bytes
}

// settle waits until nothing is copied.
func (d *Decodes) settle(ctx context.Context) error {
	for d.tiers.Poll(); d.tiers.Busy(); d.tiers.Poll() {
		if err := d.tiers.Wait(ctx); err != nil {
			return err
		}
	}
	return nil
}

// Close implements prefix.Decoder.
func (d *Decodes) Close() error {
	if d.batch != nil {
		d.batch.Close()
	}
	d.spare.Release(false)
	return d.n.Close()
}
