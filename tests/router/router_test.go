// Package router holds moeserve's KV events to the llm-d router's own packages: its subscriber, its decoder of vLLM's
// events, its index of blocks and its scorer. With MOESERVE_PICKER, the path of the router's endpoint picker, nodes also
// run behind that. A module of its own, so that these packages stay out of moeserve's.
package router

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
)

const (
	model       = "small"
	blockTokens = 16
)

// numbered are tokens of a prompt that begins as no other does.
func numbered(prompt uint32, count int) []uint32 {
	tokens := make([]uint32, count)
	for i := range tokens {
		tokens[i] = 5 + (prompt+uint32(i)*(prompt%7+1))%500
	}
	tokens[0], tokens[1] = 5+prompt%500, 5+prompt/500
	return tokens
}

const story = "Ann gave the red ball to Ben. Ben gave the red ball to Ann. "

// TestPrefixes: of two nodes that have a prompt's beginning, the one with more of it has the higher score, which is the
// number of blocks that it does not compute. Nothing is left of what a node has dropped, nor of a process that has ended.
func TestPrefixes(t *testing.T) {
	p := newPicker(t)
	long, short := newNode(t), newNode(t)
	p.follow(t, long)
	p.follow(t, short)
	prompt, _ := long.ask(t, strings.Repeat(story, 8))
	blocks := len(prompt) / blockTokens
	if blocks < 8 {
		t.Fatalf("the prompt has %d blocks", blocks)
	}
	p.await(t, prompt, map[string]float64{long.address: float64(blocks)})
	// The other node has 4 blocks of it, and goes on in another way.
	short.ask(t, slices.Concat(prompt[:4*blockTokens], numbered(1, 3*blockTokens)))
	p.await(t, prompt, map[string]float64{long.address: float64(blocks), short.address: 4})
	// A prompt that leaves the first one after 6 blocks.
	branch := slices.Concat(prompt[:6*blockTokens+blockTokens/2], numbered(2, 2*blockTokens))
	if got, want := p.scores(t, branch), (map[string]float64{long.address: 6, short.address: 4}); !maps.Equal(got, want) {
		t.Errorf("scores %v, want %v", got, want)
	}
	for _, n := range []*node{short, long} {
		want := int(p.scores(t, branch)[n.address]) * blockTokens
		if _, cached := n.ask(t, branch); cached != want {
			t.Errorf("the node found %d tokens, the router expects %d", cached, want)
		}
	}
	all := float64(len(branch) / blockTokens)
	p.await(t, branch, map[string]float64{long.address: all, short.address: all})
	if got := p.scores(t, numbered(3, 4*blockTokens)); len(got) != 0 {
		t.Errorf("a prompt that no node has seen: scores %v", got)
	}
	// Both have the same hashes for the same tokens, and for no others.
	a, b := readHistory(t, long), readHistory(t, short)
	same := 0.0
	for hash, prefix := range a.prefixes {
		if hash == b.hashes[prefix] {
			same++
		} else if b.hashes[prefix] != 0 || b.prefixes[hash] != "" {
			t.Errorf("two nodes have hash %x of other tokens, or another one of the same", hash)
		}
	}
	if same < all {
		t.Errorf("two nodes with %v blocks of the same tokens have %v hashes in common", all, same)
	}
	// A node drops what it has cached: each block is removed.
	post(t, "http://"+long.admin+"/reset_prefix_cache", map[string]any{}, nil)
	whole := p.scores(t, prompt)[short.address]
	p.await(t, prompt, map[string]float64{short.address: whole})
	if h := readHistory(t, long); len(h.held[gpu]) != 0 || h.removed[gpu] != h.stored[gpu] || h.stored[gpu] < blocks {
		t.Errorf("%d blocks are left of %d, %d were removed", len(h.held[gpu]), h.stored[gpu], h.removed[gpu])
	}
	// A process that follows another at its address has none of its blocks.
	p.forget(short)
	short.stop(t)
	p.await(t, prompt, map[string]float64{short.address: whole})
	short.start(t)
	short.asked = nil
	p.follow(t, short)
	p.await(t, prompt, map[string]float64{})
	readHistory(t, short)
	short.ask(t, prompt)
	p.await(t, prompt, map[string]float64{short.address: float64(blocks)})
	// Nobody finds the blocks of a prompt with a salt, also where it goes on behind blocks that are there.
	for blocks := 2; blocks <= 6; blocks += 2 {
		salted := numbered(4, blocks*blockTokens)
		post(t, "http://"+short.address+"/v1/completions", map[string]any{"model": model, "prompt": salted, "max_tokens": 1, "cache_salt": "a tenant"}, nil)
		later, _ := short.ask(t, numbered(uint32(10+blocks), 2*blockTokens))
		p.await(t, later, map[string]float64{short.address: 2})
		if got := p.scores(t, salted); len(got) != 0 {
			t.Errorf("a prompt with a salt has the scores %v", got)
		}
	}
	if h := readHistory(t, short); len(h.salted) != 6 {
		t.Errorf("%d blocks have no tokens, want 6", len(h.salted))
	}
}

// TestTiers: the index has each block in the mediums that have it, while tiers fill up, drop blocks and give them back,
// and peers take their memory away.
func TestTiers(t *testing.T) {
	p := newPicker(t)
	n := newNode(t, "--num-gpu-blocks-override", "48", "--max-model-len", "256", "--max-num-seqs", "1", "--kv-transfer-config", fmt.Sprintf(
		`{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
			"num_gpu_blocks": 80, "num_cpu_blocks": 112, "num_file_blocks": 144, "directory": %q, "load_policy": "always"}}`, t.TempDir()))
	p.follow(t, n)
	const (
		blocks  = 8
		prompts = 24 // more than any tier has room for
	)
	prompt := func(i int) []uint32 { return numbered(uint32(i), blocks*blockTokens+1) }
	await := func(i int, want string) {
		t.Helper()
		eventually(t, func() string {
			if got := p.where(t, n, prompt(i)); !slices.Equal(got, slices.Repeat([]string{want}, blocks)) {
				return fmt.Sprintf("blocks of prompt %d are in %q, want %q", i, got, want)
			}
			return ""
		})
	}
	var first []string // where the last block of the first prompt is
	for i := range prompts {
		n.ask(t, prompt(i))
		await(i, "cpu file gpu peer_gpu")
		eventually(t, func() string {
			where := p.where(t, n, prompt(0))
			if got, want := p.scores(t, prompt(0))[n.address], scoreIn(where); got != want {
				return fmt.Sprintf("blocks in %q have the score %v, want %v", where, got, want)
			}
			return ""
		})
		first = append(first, p.where(t, n, prompt(0))[blocks-1])
	}
	if stages := slices.Compact(first); !slices.Equal(stages, []string{"cpu file gpu peer_gpu", "cpu file peer_gpu", "cpu file", "file", ""}) {
		t.Errorf("a block goes through %q", stages)
	}
	// A prompt that the GPU has dropped comes back to it.
	const back = prompts - 8
	await(back, "cpu file peer_gpu")
	if _, cached := n.ask(t, prompt(back)); cached != blocks*blockTokens {
		t.Errorf("the node found %d tokens of %d blocks in its tiers", cached, blocks)
	}
	await(back, "cpu file gpu peer_gpu")
	p.await(t, prompt(back+1), map[string]float64{n.address: score(blocks, weights["peer_gpu"])})
	// Peers need their memory.
	for _, device := range []int{1, 2} {
		post(t, "http://"+n.admin+"/harvest/reclaim", map[string]any{"device": device, "bytes": 64 << 20, "deadline_ms": 5000}, nil)
	}
	await(back, "cpu file gpu")
	var h *history
	eventually(t, func() string {
		h = readHistory(t, n)
		for i := range prompts {
			if got, want := p.where(t, n, prompt(i)), h.where(prompt(i)); !slices.Equal(got, want) {
				return fmt.Sprintf("blocks of prompt %d are in %q, the index has them in %q", i, want, got)
			}
		}
		return ""
	})
	for _, medium := range []string{gpu, "PEER_GPU", "CPU", "FILE"} {
		if stored, held := h.stored[medium], len(h.held[medium]); stored < prompts*blocks || h.removed[medium] != stored-held {
			t.Errorf("%s has %d blocks; %d were stored, %d removed", medium, held, stored, h.removed[medium])
		}
	}
	if len(h.stored) != 4 {
		t.Errorf("events of %v", h.stored)
	}
}

// TestLargeTierBlocks: where a tier's block holds several of the GPU's, the index has all of these, also those that two
// blocks of the tier have in common, as long as one of them is there.
func TestLargeTierBlocks(t *testing.T) {
	for _, factor := range []int{2, 3} {
		t.Run(fmt.Sprintf("factor=%d", factor), func(t *testing.T) {
			p := newPicker(t)
			const (
				prompts = 24
				begin   = 4 // tier blocks of a prompt, the last of which prompts 2i and 2i+1 have in part
			)
			blocks := begin * factor
			n := newNode(t, "--num-gpu-blocks-override", fmt.Sprint(4*blocks), "--max-model-len", "256", "--max-num-seqs", "1", "--kv-transfer-config", fmt.Sprintf(
				`{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
					"block_size_factor": %d, "num_gpu_blocks": 30, "num_cpu_blocks": 38, "num_file_blocks": 44, "directory": %q, "load_policy": "always"}}`,
				factor, t.TempDir()))
			p.follow(t, n)
			prompt := func(i int) []uint32 {
				shared := numbered(uint32(i/2), (blocks-1)*blockTokens)
				return append(shared, numbered(uint32(100+i), blockTokens+1)...)
			}
			await := func(i int, want string) {
				t.Helper()
				eventually(t, func() string {
					if got := p.where(t, n, prompt(i)); !slices.Equal(got, slices.Repeat([]string{want}, blocks)) {
						return fmt.Sprintf("blocks of prompt %d are in %q, want %q", i, got, want)
					}
					return ""
				})
			}
			parted := 0 // prompts whose last tier block is gone, and has blocks in common with one that is not
			for i := range prompts {
				n.ask(t, prompt(i))
				await(i, "cpu file gpu peer_gpu")
				for j := range i {
					where := p.where(t, n, prompt(j))
					if last := where[blocks-1]; last == "" && where[blocks-2] != "" {
						parted++
					}
				}
			}
			if parted == 0 {
				t.Error("no block of a prompt was left that another one has, too")
			}
			const back = prompts - 10
			await(back, "cpu file peer_gpu")
			p.await(t, prompt(back), map[string]float64{n.address: score(blocks, weights["peer_gpu"])})
			if _, cached := n.ask(t, prompt(back)); cached != blocks*blockTokens {
				t.Errorf("the node found %d tokens of %d blocks in its tiers", cached, blocks)
			}
			await(back, "cpu file gpu peer_gpu")
			var h *history
			eventually(t, func() string {
				h = readHistory(t, n)
				for i := range prompts {
					if got, want := p.where(t, n, prompt(i)), h.where(prompt(i)); !slices.Equal(got, want) {
						return fmt.Sprintf("blocks of prompt %d are in %q, the index has them in %q", i, want, got)
					}
				}
				return ""
			})
			for _, medium := range []string{"PEER_GPU", "CPU", "FILE"} {
				if stored, held := h.stored[medium], len(h.held[medium]); held == 0 || stored == held || h.removed[medium] != stored-held {
					t.Errorf("%s has %d blocks; %d were stored, %d removed", medium, held, stored, h.removed[medium])
				}
			}
			post(t, "http://"+n.admin+"/reset_prefix_cache?reset_external=true", map[string]any{}, nil)
			n.ask(t, numbered(90, blockTokens))
			p.await(t, prompt(back), map[string]float64{})
			if h := readHistory(t, n); len(h.held["PEER_GPU"])+len(h.held["CPU"])+len(h.held["FILE"]) > 0 {
				t.Errorf("after a reset %v are left", h.held)
			}
		})
	}
}
