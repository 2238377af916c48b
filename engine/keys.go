package engine

import (
	"slices"
	"sync"
	"unsafe"

	"github.com/moeserve/moeserve/kvcache"
)

// Of a promptKeys: what is kept, and from how many blocks on. Hashing fewer takes microseconds.
const (
	maxHashedPrompts = 64
	maxHashedTokens  = 1 << 20
	minHashedBlocks  = 32
)

// promptKeys keeps the keys of the latest long prompts. A prompt that begins as one of them, such as
// the next turn of a conversation, is hashed only from where it differs: comparing tokens takes a
// small part of the time of hashing them. Any goroutine may use it.
type promptKeys struct {
	blockTokens int

	mu      sync.Mutex
	prompts []hashedPrompt // the latest used last
	tokens  int            // of all
}

// hashedPrompt is the full blocks of a prompt, with their keys, which follow from root.
type hashedPrompt struct {
	root   kvcache.Key
	tokens []int32
	keys   []kvcache.Key
}

// begin appends to keys, which is empty, those of the blocks with which a prompt that is kept begins,
// too.
func (p *promptKeys) begin(keys []kvcache.Key, root kvcache.Key, tokens []int32) []kvcache.Key {
	if len(tokens) < minHashedBlocks*p.blockTokens {
		return keys
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	best, same := -1, 0
	for i := len(p.prompts) - 1; i >= 0; i-- {
		if n := p.prompts[i].same(root, tokens, same, p.blockTokens); n > same {
			best, same = i, n
		}
	}
	if best < 0 {
		return keys
	}
	h := p.prompts[best]
	p.prompts = append(slices.Delete(p.prompts, best, best+1), h)
	return append(keys, h.keys[:same]...)
}

// same is the number of blocks with which the prompt and others' tokens begin alike, if they are more
// than so many.
func (h *hashedPrompt) same(root kvcache.Key, tokens []int32, than, size int) (n int) {
	most := min(len(h.keys), len(tokens)/size)
	if most <= than || !equalIDs(tokens[than*size:(than+1)*size], h.tokens[than*size:(than+1)*size]) || h.root != root {
		return 0 // most are told apart here
	}
	for step := most; step > 0; step /= 2 { // all of them, if they are equal
		for n+step <= most && equalIDs(tokens[n*size:(n+step)*size], h.tokens[n*size:(n+step)*size]) {
			n += step
		}
	}
	return n
}

// equalIDs reports whether two slices of one length are equal, as slices.Equal does, but many at a time.
func equalIDs(a, b []int32) bool {
	text := func(v []int32) string { return unsafe.String((*byte)(unsafe.Pointer(unsafe.SliceData(v))), 4*len(v)) }
	return text(a) == text(b)
}

// add keeps a prompt with the keys of its full blocks, of which begin has returned so many. It takes
// the place of one that it begins with, or else of the one that was used longest ago.
func (p *promptKeys) add(root kvcache.Key, tokens []int32, keys []kvcache.Key, begun int) {
	tokens = tokens[:len(keys)*p.blockTokens]
	if len(keys) < minHashedBlocks || len(keys) == begun || len(tokens) > maxHashedTokens {
		return
	}
	h := hashedPrompt{root, slices.Clone(tokens), slices.Clone(keys)}
	p.mu.Lock()
	defer p.mu.Unlock()
	if i := slices.IndexFunc(p.prompts, func(old hashedPrompt) bool {
		return begun > 0 && len(old.keys) == begun && old.keys[begun-1] == keys[begun-1]
	}); i >= 0 {
		p.remove(i)
	}
	p.prompts = append(p.prompts, h)
	p.tokens += len(tokens)
	for len(p.prompts) > maxHashedPrompts || p.tokens > maxHashedTokens {
		p.remove(0)
	}
}

// remove removes a prompt. mu is held.
func (p *promptKeys) remove(i int) {
	p.tokens -= len(p.prompts[i].tokens)
	p.prompts = slices.Delete(p.prompts, i, i+1)
}
