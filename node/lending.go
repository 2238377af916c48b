package node

import (
	"fmt"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/kvcache/offload"
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
	o := kvcache.ManagerOptions{Blocks: fit.Blocks, BlockTokens: u.needs.KV.BlockTokens, Events: u.kvEvents.Enabled}
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
	var x expertTime
	var err error
	n.memory, err = lending.New(lending.Options{
		Manager: n.kv, Pool: pool, Store: n.store, Worth: n.balance.Worth,
		Waited: func() float64 { return x.waited(n) }, Copied: func() float64 { return x.copied(n) },
		ReloadSeconds: n.reload, Clock: n.machine, Log: n.log,
	})
	if err != nil {
		return fault.Of(fault.ErrConfig, err)
	}
	n.started(n.memory.Close)
	return nil
}

// expertTime is what experts outside GPU memory have cost so far.
type expertTime struct{ copies, reads linkTime }

// waited is how long compute has waited for experts, in seconds, or for KV blocks: these come over
// the same link, later for each expert that does. For experts that kernels read in place it waits as
// long as the link takes.
func (x *expertTime) waited(n *Node) float64 {
	s := n.pipe.Stalls()
	return (s[pipeline.ExpertCopy] + s[pipeline.CPUExperts] + s[pipeline.KVLoad]).Seconds() + x.reads.add(n, n.store.Stats().ReadInPlace)
}

// copied is how long experts have taken of the links, in seconds. Those that the CPU computed count
// as if the host's link had brought them, as in their worth.
func (x *expertTime) copied(n *Node) float64 {
	s := n.store.Stats()
	s.Fetched[experts.Host] += s.OnCPU*n.store.Layout().Size - s.ReadDivided
	return x.copies.add(n, s.Fetched) + x.reads.add(n, s.ReadInPlace)
}

// rates are those of the links to the GPU, from the host and from the fastest peer, in bytes per
// second; 0: unknown, or there is none.
func (n *Node) rates() (host, peer float64) {
	for _, l := range n.store.Links() {
		if l.From == device.Host {
			host = l.BytesPerSecond
		} else {
			peer = max(peer, l.BytesPerSecond)
		}
	}
	return host, peer
}

// linkTime adds up how long bytes of experts have taken on the links to the GPU, each at the rate of
// its time.
type linkTime struct {
	bytes   experts.FetchedBytes
	seconds float64
}

// add adds what is new in these counts since the last call, and returns the sum in seconds.
func (l *linkTime) add(n *Node, now experts.FetchedBytes) float64 {
	host, peer := n.rates()
	if host > 0 {
		l.seconds += float64(now[experts.Host]-l.bytes[experts.Host]) / host
	}
	if peer > 0 {
		l.seconds += float64(now[experts.Peer]-l.bytes[experts.Peer]) / peer
	}
	l.bytes = now
	return l.seconds
}

// reload is what the load of a KV block from the fastest tier that has blocks takes of the link, in
// seconds; 0: unknown. Measured rates of loads also count the time in which the link had other copies
// to make, those of experts: so the link's rate is taken where a tier has one.
func (n *Node) reload() float64 {
	if n.tiers == nil {
		return 0
	}
	host, peer := n.rates()
	for _, s := range n.tiers.Stats() {
		rate := s.BytesPerSecond
		switch s.Medium {
		case offload.CPU:
			rate = max(rate, host)
		case offload.PeerGPU:
			rate = max(rate, peer)
		}
		if s.Evictable+s.Pinned > 0 && rate > 0 {
			return float64(s.BlockBytes) / float64(n.tiers.Factor()) / rate
		}
	}
	return 0
}
