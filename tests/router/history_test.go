package router

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/llm-d/llm-d-kv-cache/pkg/kvevents"
	"github.com/llm-d/llm-d-kv-cache/pkg/kvevents/engineadapter"
)

const gpu = "GPU"

// history is what a node has published, as the router's decoder has it.
type history struct {
	// held are the hashes of each medium, after all events.
	held map[string]map[uint64]bool
	// stored and removed count the blocks of each medium.
	stored, removed map[string]int
	// prefixes are all tokens up to the end of the block of a hash, and hashes the other way round.
	prefixes map[uint64]string
	hashes   map[string]uint64
	// salted are hashes of which no event has said the tokens.
	salted map[uint64]bool
	// ran are the prefixes of the sequences that the node has run.
	ran map[string]bool
}

// readHistory reads all events of a node's process, and checks each against those before it and against the sequences
// that the node has run.
func readHistory(t *testing.T, n *node) *history {
	t.Helper()
	h := &history{
		held: map[string]map[uint64]bool{}, stored: map[string]int{}, removed: map[string]int{},
		prefixes: map[uint64]string{}, hashes: map[string]uint64{}, salted: map[uint64]bool{}, ran: map[string]bool{},
	}
	for _, tokens := range n.asked {
		for _, prefix := range prefixes("", tokens) {
			h.ran[prefix] = true
		}
	}
	vllm := engineadapter.NewVLLMAdapter()
	for _, m := range n.replay(t) {
		address, name, batch, err := vllm.ParseMessage(m)
		if err != nil {
			t.Fatalf("batch %d: %v", m.Sequence, err)
		}
		if address != n.address || name != model {
			t.Fatalf("batch %d is of %s at %s", m.Sequence, name, address)
		}
		cleared := false
		for _, e := range batch.Events {
			wrong := ""
			switch e := e.(type) {
			case *kvevents.AllBlocksClearedEvent:
				cleared = true
			case *kvevents.BlockStoredEvent:
				wrong = h.store(e)
			case *kvevents.BlockRemovedEvent:
				wrong = h.remove(e)
			default:
				wrong = "another kind of event"
			}
			if wrong != "" {
				t.Fatalf("batch %d: %s: %+v", m.Sequence, wrong, e)
			}
		}
		// No batch is dropped here: nothing is cleared but by the first one, which has nothing else.
		if first := m.Sequence == 0; cleared != first || first && len(batch.Events) != 1 {
			t.Fatalf("batch %d has %d events; all blocks are cleared: %t", m.Sequence, len(batch.Events), cleared)
		}
	}
	return h
}

// store applies a BlockStored, and returns what is wrong with it.
func (h *history) store(e *kvevents.BlockStoredEvent) (wrong string) {
	if e.BlockSize != blockTokens || e.LoraID != nil || e.LoraName != nil || e.GroupIdx != nil || e.ExtraKeys != nil {
		return "not blocks of this model"
	}
	switch {
	case e.DeviceTier == gpu && len(e.Tokens) > 0:
		if wrong := h.storeTokens(e); wrong != "" {
			return wrong
		}
	case len(e.Tokens) > 0 || e.ParentHash != 0:
		return "tokens that are not in the GPU, or a parent of no tokens"
	case e.DeviceTier == gpu:
		for _, hash := range e.BlockHashes {
			if h.prefixes[hash] != "" {
				return "the hash had tokens"
			}
			h.salted[hash] = true
		}
	}
	held := h.held[e.DeviceTier]
	if held == nil {
		held = map[uint64]bool{}
		h.held[e.DeviceTier] = held
	}
	for _, hash := range e.BlockHashes {
		if held[hash] {
			return "the medium has it already"
		}
		if h.prefixes[hash] == "" && !h.salted[hash] {
			return "the GPU has never had it"
		}
		held[hash] = true
	}
	h.stored[e.DeviceTier] += len(e.BlockHashes)
	return ""
}

// storeTokens has the tokens of blocks that the GPU has stored, behind those of their parent.
func (h *history) storeTokens(e *kvevents.BlockStoredEvent) (wrong string) {
	if e.ParentHash != 0 && !h.held[gpu][e.ParentHash] {
		return "the parent is not there"
	}
	if len(e.Tokens) != blockTokens*len(e.BlockHashes) {
		return "tokens of more blocks, or of fewer"
	}
	for i, prefix := range prefixes(h.prefixes[e.ParentHash], e.Tokens) {
		hash := e.BlockHashes[i]
		if !h.ran[prefix] {
			return "tokens that the node was not asked for"
		}
		if known, ok := h.prefixes[hash]; ok && known != prefix {
			return "the hash is that of other tokens"
		}
		if known, ok := h.hashes[prefix]; ok && known != hash {
			return "the tokens have another hash"
		}
		h.prefixes[hash], h.hashes[prefix] = prefix, hash
	}
	return ""
}

// remove applies a BlockRemoved, and returns what is wrong with it.
func (h *history) remove(e *kvevents.BlockRemovedEvent) (wrong string) {
	for _, hash := range e.BlockHashes {
		if !h.held[e.DeviceTier][hash] {
			return "the medium does not have it"
		}
		delete(h.held[e.DeviceTier], hash)
	}
	h.removed[e.DeviceTier] += len(e.BlockHashes)
	return ""
}

// where are the mediums that have each block of a prompt, in the form of picker.where.
func (h *history) where(tokens []uint32) (all []string) {
	mediums := map[string][]string{}
	for medium, hashes := range h.held {
		for hash := range hashes {
			mediums[h.prefixes[hash]] = append(mediums[h.prefixes[hash]], strings.ToLower(medium))
		}
	}
	for _, prefix := range prefixes("", tokens) {
		slices.Sort(mediums[prefix])
		all = append(all, strings.Join(mediums[prefix], " "))
	}
	return all
}

// prefixes are the tokens up to the end of each block, as a text that begins with those before them.
func prefixes(before string, tokens []uint32) (all []string) {
	for block := range slices.Chunk(tokens, blockTokens) {
		if len(block) == blockTokens {
			before += fmt.Sprint(block)
			all = append(all, before)
		}
	}
	return all
}
