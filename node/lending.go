package node

import (
	"fmt"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/node/fault"
	"github.com/moeserve/moeserve/node/sizing"
	"github.com/moeserve/moeserve/pipeline"
	"github.com/moeserve/moeserve/rebalancer/lending"
)

// checkShare refuses settings that leave nothing to share.
func (u *setup) checkShare() error {
	if u.settings.KV.ExpertsShare == configs.AutoShare && u.settings.Batch.Attention == configs.OnCPU {
		return fmt.Errorf("--kv-experts-share auto lends memory of the KV cache on the GPU, and --attention cpu keeps that cache in host memory; use --attention gpu, or leave --kv-experts-share out")
	}
	return nil
}

// shares reports whether memory of the KV cache may be lent to experts.
func (u *setup) shares() bool {
	return u.settings.KV.ExpertsShare == configs.AutoShare && u.needs.Plan.OffloadedExperts > 0
}

// newKV makes the account of a KV cache, with the extents that may be lent.
func (u *setup) newKV(fit sizing.KVFit) (*kvcache.Manager, error) {
	o := kvcache.ManagerOptions{Blocks: fit.Blocks, BlockTokens: u.needs.KV.BlockTokens}
	if u.shares() {
		o.Extents, o.ExtentBlocks = u.needs.Extents(fit, u.settings.KV), u.needs.ExtentBlocks()
		if o.Extents == 0 {
			u.o.Log.Warn("no memory of the KV cache can be lent to experts: it holds one sequence of maximum length and no expert beside it; lower --max-model-len",
				"kv_blocks", fit.Blocks, "max_model_len", fit.MaxModelLen, "blocks_per_expert", o.ExtentBlocks)
		}
	}
	return kvcache.NewManager(o)
}

// openLender has memory of the KV cache lent to experts, where the settings ask for it.
func (n *Node) openLender(u *setup, pool *kvcache.Pool) error {
	if !u.shares() || n.kv.Extents() == 0 {
		return nil
	}
	var err error
	n.memory, err = lending.New(lending.Options{
		Manager: n.kv, Pool: pool, Store: n.store, Worth: n.balance.Worth, Waited: n.waited, Copied: n.copied,
		ReloadSeconds: n.reload, Clock: n.machine, Log: n.log,
	})
	if err != nil {
		return fault.Of(fault.ErrConfig, err)
	}
	n.started(n.memory.Close)
	return nil
}

// waited is how long compute has waited for copies of experts, in seconds.
func (n *Node) waited() float64 { return n.pipe.Stalls()[pipeline.ExpertCopy].Seconds() }

// copied is how long the copies of experts to the GPU have taken at the present rates, in seconds.
func (n *Node) copied() (seconds float64) {
	fetched := n.store.Stats().Fetched
	fastest := 0.0 // of the peers
	for _, l := range n.store.Links() {
		if l.From != device.Host {
			fastest = max(fastest, l.BytesPerSecond)
		} else if l.BytesPerSecond > 0 {
			seconds += float64(fetched[experts.Host]) / l.BytesPerSecond
		}
	}
	if fastest > 0 {
		seconds += float64(fetched[experts.Peer]) / fastest
	}
	return seconds
}

// reload is what the load of a KV block from the fastest tier that has blocks takes, in seconds;
// 0: unknown.
func (n *Node) reload() float64 {
	if n.tiers == nil {
		return 0
	}
	for _, s := range n.tiers.Stats() {
		if s.Evictable+s.Pinned > 0 && s.BytesPerSecond > 0 {
			return float64(s.BlockBytes) / float64(n.tiers.Factor()) / s.BytesPerSecond
		}
	}
	return 0
}
