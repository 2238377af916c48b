package prefix

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/moeserve/moeserve/eval"
)

// Place is where the KV cache of prefixes is kept.
type Place string

// The places.
const (
	// HBM: in the memory of the GPU that computes.
	HBM Place = "hbm"
	// Peer, Host and File: in that tier alone; the GPU's own prefix cache is off.
	Peer Place = "peer"
	Host Place = "host"
	File Place = "file"
	// Nowhere: all prompts are computed.
	Nowhere Place = "nowhere"
)

// Places are all of them, the fastest first.
var Places = []Place{HBM, Peer, Host, File, Nowhere}

// ParsePlaces reads a comma-separated list of places. Errors wrap eval.ErrInput.
func ParsePlaces(text string) ([]Place, error) {
	var places []Place
	for _, name := range strings.Split(text, ",") {
		p := Place(strings.TrimSpace(name))
		switch {
		case !slices.Contains(Places, p):
			return nil, eval.Inputf("%q is no place: must be hbm, peer, host, file or nowhere", p)
		case slices.Contains(places, p):
			return nil, eval.Inputf("%s is there twice", p)
		}
		places = append(places, p)
	}
	return places, nil
}

// Engine runs requests, and keeps the KV cache of their prompts in one place. No other request
// runs on it.
type Engine interface {
	// Info describes it.
	Info() Info
	// Run submits a request for each prompt, at once, and runs them to their ends.
	Run(ctx context.Context, prompts [][]int32, o RunOptions) (Batch, error)
	// Settle returns when no KV block is being stored.
	Settle(ctx context.Context) error
	Close() error
}

// RunOptions are those of requests.
type RunOptions struct {
	// NewTokens of each, whatever they are.
	NewTokens int
	// WithoutTiers: their KV blocks are neither looked up nor stored outside of the GPU's memory.
	WithoutTiers bool
}

// Info describes an engine.
type Info struct {
	// Machine that it runs on.
	eval.Machine
	// Model, DType and LoadFormat as a user knows them.
	Model, DType, LoadFormat string
	// BlockTokens is the number of tokens of a KV block.
	BlockTokens int
	// Vocab is the size of the vocabulary.
	Vocab int
}

// Batch is requests that have ended.
type Batch struct {
	// First and Last are when each request had its first and its last token, since all were
	// submitted.
	First, Last []time.Duration
	// Cached is the number of tokens of prompts that were found, in the GPU's memory or a tier.
	Cached int
	// Recomputed is the number of those that a tier had, too, and that were computed, since a load
	// was expected to take longer.
	Recomputed int
	// Loading is the time of the loads from tiers, each from its submission until the host sees that
	// its last byte is in the GPU's memory, added up: 0 where nothing was loaded.
	Loading time.Duration
}

// Open opens an engine that keeps prefixes in a place, which has room for those of tokens
// tokens; requests have at most length tokens, prompt and completion.
type Open func(ctx context.Context, p Place, tokens, length int) (Engine, error)

// Result is a measurement of one or more kinds.
type Result struct {
	Run eval.Run `json:"run"`
	eval.Machine
	Model       string      `json:"model"`
	DType       string      `json:"dtype"`
	LoadFormat  string      `json:"load_format"`
	BlockTokens int         `json:"block_tokens"`
	TTFT        []TTFTPoint `json:"prefix_ttft"`
	Hits        []HitsPoint `json:"prefix_hits"`
	// Misses and Decodes are absent where they were not measured.
	Misses  []MissPoint   `json:"prefix_misses,omitempty"`
	Decodes []DecodePoint `json:"prefix_decodes,omitempty"`
}

// describe takes over what an engine is.
func (r *Result) describe(i Info) {
	r.Machine, r.Model, r.DType, r.LoadFormat, r.BlockTokens = i.Machine, i.Model, i.DType, i.LoadFormat, i.BlockTokens
}

// prompt is one of n random tokens. Prompts with different seeds begin differently.
func prompt(n, vocab int, seed uint64) []int32 {
	return eval.GeneratePrompts(1, n, vocab, seed)[0]
}

// closing closes an engine, and adds the error to err.
func closing(e Engine, err *error) { *err = errors.Join(*err, e.Close()) }

// ratio is a part of a whole; 0 where there is no whole, as on a virtual clock without rates.
func ratio(part, whole float64) float64 {
	if whole == 0 {
		return 0
	}
	return part / whole
}
