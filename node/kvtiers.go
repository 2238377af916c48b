package node

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/harvest"
	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/kvcache/offload"
	"github.com/moeserve/moeserve/node/fault"
)

// slabKVBlocks is the number of KV blocks of a slab where no size is set.
const slabKVBlocks = 16

// kvTiers is the configuration of KV tiers by the settings; given says which are set
// explicitly.
func kvTiers(s *configs.Settings, given func(key string) bool) (c offload.Config, err error) {
	const backend, sized = "kv-offloading-backend", "kv-offloading-size"
	if given(backend) && !given(sized) && s.KV.TransferConfig == "" {
		return c, fmt.Errorf("--%s is set, and --%s is not, so no KV block would be kept; set it to the GiB of host memory for KV blocks", backend, sized)
	}
	if s.KV.TransferConfig != "" {
		if c, err = offload.ParseTransferConfig([]byte(s.KV.TransferConfig)); err != nil {
			return c, err
		}
	}
	if size := int64(s.KV.OffloadingSize * (1 << 30)); size > 0 {
		if c.CPUBytes > 0 && c.CPUBytes != size {
			return c, fmt.Errorf("--%s is %d bytes, and cpu_bytes_to_use of --kv-transfer-config %d; set one of them", sized, size, c.CPUBytes)
		}
		c.CPUBytes = size
	}
	if !c.Enabled() && s.KV.TransferConfig == "" {
		return c, nil
	}
	if s.Batch.Attention == configs.OnCPU {
		return c, fmt.Errorf("--attention cpu keeps the whole KV cache in host memory; leave out --kv-offloading-size and --kv-transfer-config, or use --attention gpu")
	}
	return c, c.EnsureDefaults().Validate()
}

// chooseKVPeers finds the peers that may hold KV blocks, among those that can be borrowed from,
// and has the configuration name them as the machine does.
func (u *setup) chooseKVPeers(peers []device.Space) error {
	if len(peers) == 0 {
		return fmt.Errorf("--kv-transfer-config sets num_gpu_blocks, and there are no peers; name GPUs whose memory may be borrowed, as --peers 1")
	}
	u.kvPeers = peers
	if len(u.kvTiers.DestGPUs) == 0 {
		return nil
	}
	u.kvPeers = nil
	c := &u.kvTiers
	c.DestGPUs = slices.Clone(c.DestGPUs)
	for i, named := range c.DestGPUs {
		at := slices.IndexFunc(peers, func(p device.Space) bool { return u.devices.Number(p) == named })
		if at < 0 {
			var have []string
			for _, p := range peers {
				have = append(have, strconv.Itoa(u.devices.Number(p)))
			}
			return fmt.Errorf("--kv-transfer-config: dest_gpu_id is %d, and the peers are GPUs %s; choose one of these, or name it by --peers", named, strings.Join(have, ", "))
		}
		c.DestGPUs[i], _ = peers[at].GPU()
		u.kvPeers = append(u.kvPeers, peers[at])
	}
	return nil
}

// borrowed are the peers that experts or KV blocks may borrow from.
func (u *setup) borrowed() []device.Space {
	if len(u.peers) > 0 {
		return u.peers // all there are
	}
	return u.kvPeers
}

// lending is the runtime that experts borrow from; nil: they do not.
func (n *Node) lending(u *setup) *harvest.Runtime {
	if len(u.peers) == 0 {
		return nil
	}
	return n.harvest
}

// openKVTiers opens the tiers of KV blocks, if there are any.
func (n *Node) openKVTiers(u *setup, pool *kvcache.Pool) error {
	if !u.kvTiers.Enabled() {
		return nil
	}
	o := offload.Options{
		Machine: n.machine, Space: u.kvSpace(), Pool: pool, Blocks: n.kv, Transfer: n.transfer, Config: u.kvTiers, Events: u.kvEvents.Enabled, Log: n.log,
	}
	if len(u.kvPeers) > 0 {
		o.Harvest = n.harvest
	}
	var err error
	if n.tiers, err = offload.New(o); err != nil {
		return fault.Of(fault.ErrConfig, err)
	}
	n.started(n.tiers.Close)
	if tokens := n.tiers.Factor() * n.kv.BlockTokens(); tokens > n.info.Limits.MaxModelLen {
		return fault.Of(fault.ErrConfig, fmt.Errorf("--kv-transfer-config: a tier's block has %d tokens, more than a sequence of at most %d, so none would be stored; lower block_size or block_size_factor", tokens, n.info.Limits.MaxModelLen))
	}
	if o.Harvest != nil {
		n.started(n.closeHarvest) // before the tiers, which are notified of every revocation
	}
	return nil
}
