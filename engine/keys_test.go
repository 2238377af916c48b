package engine

import (
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/moeserve/moeserve/kvcache"
)

func newKeys(t interface{ Fatal(...any) }) *prefixes {
	kv, err := kvcache.NewManager(kvcache.ManagerOptions{Blocks: 1, BlockTokens: 2})
	if err != nil {
		t.Fatal(err)
	}
	return newPrefixes(&Options{KV: kv, PrefixCaching: true, LongAfter: 400})
}

// TestPromptKeys: prompts have the keys that hashing gives, whatever prompts came before, which salts
// and resets they had, and whatever became of their slices; what is kept is bounded.
func TestPromptKeys(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := newKeys(t)
		for range rapid.IntRange(1, 40).Draw(t, "prompts") {
			prompt := make([]int32, rapid.IntRange(1, 500).Draw(t, "tokens"))
			for i := rapid.SampledFrom([]int{100, 130, 300, 500}).Draw(t, "differs from"); i < len(prompt); i++ {
				prompt[i] = int32(rapid.IntRange(1, 2).Draw(t, "id"))
			}
			salt := rapid.SampledFrom([]string{"", "a"}).Draw(t, "salt")
			if rapid.IntRange(0, 9).Draw(t, "resets") == 0 {
				p.resets.Add(1)
			}
			root := p.root(salt, 0, p.long(len(prompt)))
			keys := p.promptKeys(salt, 0, prompt, 10)
			if want := p.appendKeys(nil, root, prompt); !slices.Equal(keys, want) || cap(keys) < len(prompt)/2+5 {
				t.Fatalf("%d keys with room for %d, not those of the %d blocks", len(keys), cap(keys), len(want))
			}
			clear(prompt)
			clear(keys)
		}
		tokens := 0
		for _, h := range p.recent.prompts {
			tokens += len(h.tokens)
		}
		if tokens != p.recent.tokens || len(p.recent.prompts) > maxHashedPrompts {
			t.Fatalf("%d prompts of %d tokens, counted %d", len(p.recent.prompts), tokens, p.recent.tokens)
		}
	})
}

// TestPromptKeysOfConversation: each turn of a conversation is hashed from the end of the last one,
// which it replaces, also where other prompts begin as both do.
func TestPromptKeysOfConversation(t *testing.T) {
	p := newKeys(t)
	var prompts [2][]int32
	for i := range prompts {
		prompts[i] = append(make([]int32, 200), int32(1+i))
	}
	for turn := range 5 {
		for i := range prompts {
			begun := len(p.recent.begin(nil, p.root("", 0, p.long(len(prompts[i]))), prompts[i]))
			want := 0
			switch {
			case turn > 0:
				want = (len(prompts[i]) - 40) / 2
			case i > 0:
				want = 100
			}
			if begun != want {
				t.Errorf("turn %d of conversation %d: %d blocks were not hashed, want %d", turn, i, begun, want)
			}
			p.promptKeys("", 0, prompts[i], 0)
			prompts[i] = append(prompts[i], make([]int32, 40)...)
		}
		if n := len(p.recent.prompts); n != 1 && turn == 0 && n != 2 || turn > 0 && n != 2 {
			t.Errorf("turn %d: %d prompts are kept", turn, n)
		}
	}
}
