package observe

import (
	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/harvest"
	"github.com/moeserve/moeserve/rebalancer"
)

// Peer is a peer as the outside knows it.
type Peer struct {
	// Device is its name on this machine: "gpu1".
	Device string `json:"device"`
	// GPU is the driver's number.
	GPU  int    `json:"gpu"`
	Name string `json:"name"`
	UUID string `json:"uuid"`
}

// Residency is where every expert is, and whose memory is borrowed for it. It has a JSON
// form.
type Residency struct {
	Experts experts.Snapshot `json:"experts"`
	// Relays are links between the host and GPUs that have carried copies of other GPUs.
	Relays []Relayed `json:"relays"`
	// Peers that may be borrowed from; Harvest is what is.
	Peers   []Peer         `json:"peers"`
	Harvest *harvest.State `json:"harvest"`
	// Rebalancer has its counts; nil where nothing can move.
	Rebalancer *rebalancer.Counts `json:"rebalancer"`
	// KV is the GPU's KV cache and the tiers below it.
	KV KVResidency `json:"kv"`
}

// Relayed is what a link between the host and a GPU has carried for copies of other GPUs.
type Relayed struct {
	Source      string `json:"src"`
	Destination string `json:"dst"`
	Copies      int64  `json:"relayed_chunks"`
	Bytes       int64  `json:"relayed_bytes"`
	// Retired: it failed, and carries no more.
	Retired bool `json:"relay_retired"`
}

// relayed are the links that have carried copies of other GPUs, or failed to.
func (o *Observer) relayed() []Relayed {
	all := []Relayed{}
	for _, s := range o.p.Transfer.Stats() {
		if s.RelayedBytes > 0 || s.Retired {
			all = append(all, Relayed{s.From.String(), s.To.String(), s.RelayedCopies, s.RelayedBytes, s.Retired})
		}
	}
	return all
}

// KVResidency is where KV blocks are.
type KVResidency struct {
	// UsedBlocks of Blocks of the GPU's KV cache, of BlockTokens tokens each, are used by
	// sequences.
	UsedBlocks  int `json:"used_blocks"`
	Blocks      int `json:"blocks"`
	BlockTokens int `json:"block_tokens"`
	// Lent is memory of the KV cache that experts have; Blocks do not count it. Nil where
	// --kv-experts-share is static.
	Lent *Lending `json:"lent,omitempty"`
	KVTiers
}

// KV takes stock of KV blocks. It may be called while requests run.
func (o *Observer) KV() KVResidency {
	s := o.p.Engine.State()
	r := KVResidency{UsedBlocks: s.KVUsedBlocks, Blocks: s.KVBlocks, BlockTokens: s.BlockTokens, KVTiers: o.KVTiers()}
	if o.p.Lender != nil {
		l := o.Lending()
		r.Lent = &l
	}
	return r
}

// Residency takes stock. It may be called while requests run.
func (o *Observer) Residency() Residency {
	r := Residency{Experts: o.p.Store.Snapshot(), Relays: o.relayed(), Peers: o.p.Peers, KV: o.KV()}
	if o.p.Harvest != nil {
		s := o.p.Harvest.State()
		r.Harvest = &s
	}
	if o.p.Rebalancer != nil {
		c := o.p.Rebalancer.Counts()
		r.Rebalancer = &c
	}
	return r
}
