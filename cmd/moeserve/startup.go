package main

import (
	"log/slog"

	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/node/observe"
	"github.com/moeserve/moeserve/node/sizing"
)

// byteCount is bytes in a log: with a unit in text, a number in JSON.
type byteCount int64

func (b byteCount) String() string { return sizing.Bytes(int64(b)) }

// startup is what the log says of a server that begins to serve.
type startup struct {
	model, address string
	// device that computes, in words.
	device      string
	memory      observe.Memories
	experts     observe.Experts
	expertBytes int64
	kv          engine.State
	kvTiers     []observe.KVTier
	maxModelLen int
	peers       []peerMemory
}

// peerMemory is what of a peer's memory is borrowed, and what else may be, in bytes.
type peerMemory struct {
	device, name                string
	borrowed, borrowable, other int64
}

func newStartup(model, address string, n *node.Node) *startup {
	o, info := n.Observe(), n.Info()
	placed := o.Residency()
	s := &startup{
		model: model, address: address, device: deviceInWords(info.Device, o.Backend(), n.Machine().Capabilities().Emulated),
		experts: o.Experts(), expertBytes: placed.Experts.ExpertBytes, kv: n.Engine().State(), kvTiers: o.KVTiers().Tiers, maxModelLen: info.Limits.MaxModelLen,
	}
	s.memory, _ = o.Memories() // a device that is lost by now has none
	names := map[string]string{}
	for _, p := range placed.Peers {
		names[p.Device] = p.Name
	}
	h := o.Harvest()
	for i, b := range h.Borrowed() {
		p := &h.Peers[i]
		s.peers = append(s.peers, peerMemory{b.Device, names[b.Device], b.Bytes, p.Borrowable, p.Reading.OtherProcesses})
	}
	return s
}

// log writes a line for each subject, the address last.
func (s *startup) log(to *slog.Logger) {
	device := []any{"device", s.device}
	for _, m := range s.memory {
		if m.Allocated > 0 {
			device = append(device, slog.Group(m.Space, "used_bytes", byteCount(m.Allocated), "capacity_bytes", byteCount(m.Capacity)))
		}
	}
	to.Info("device", device...)
	all := s.experts.All()
	to.Info("experts", "resident", s.experts.ResidentExperts, "offloaded", all-s.experts.ResidentExperts, "peer_copies", s.experts.PeerCopies,
		"offload_fraction", s.experts.OffloadFraction(), "expert_bytes", byteCount(s.expertBytes))
	for _, p := range s.peers {
		to.Info("peer", "device", p.device, "name", p.name, "borrowed_bytes", byteCount(p.borrowed), "borrowable_bytes", byteCount(p.borrowable), "other_processes_bytes", byteCount(p.other))
	}
	to.Info("KV cache", "tokens", s.kv.KVBlocks*s.kv.BlockTokens, "max_model_len", s.maxModelLen, "full_context_sequences", s.fullContext())
	for i := range s.kvTiers {
		k := &s.kvTiers[i]
		to.Info("KV tier", "medium", k.Medium, "blocks", k.CapacityBlocks, "tokens", k.CapacityBlocks*k.BlockTokens, "bytes", byteCount(int64(k.CapacityBlocks)*k.BlockBytes))
	}
	to.Info("serving", "model", s.model, "address", s.address)
}

// fullContext is how many sequences of the maximum length the KV cache holds at a time.
func (s *startup) fullContext() int {
	blocks := (s.maxModelLen + s.kv.BlockTokens - 1) / s.kv.BlockTokens
	return s.kv.KVBlocks / max(blocks, 1)
}
