package eval

import (
	"context"
	"time"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/planner"
)

// Node is what is measured. No other request runs on it meanwhile.
type Node interface {
	// Info describes what runs.
	Info() Info
	// Batch allocates the KV blocks of prompts and new tokens behind each.
	Batch(prompts [][]int32, newTokens int) (Batch, error)
	// Counts since the node was opened. No step may be running.
	Counts(ctx context.Context) (Counts, error)
	// Now is the clock of the node's devices, which may be a virtual one.
	Now() time.Duration
	Close() error
}

// Batch is sequences that run in lockstep: first all prompts, then a token of each a
// step.
type Batch interface {
	// Prefill computes the prompts, with nothing in the KV cache, and samples token 0 of
	// each sequence.
	Prefill(ctx context.Context) error
	// Decode samples tokens from to to-1 of each sequence, a step each. The tokens before
	// from must have been sampled; those from from on are sampled again.
	Decode(ctx context.Context, from, to int) error
	// Tokens sampled so far, by sequence.
	Tokens() [][]int32
	Close()
}

// Info describes a node.
type Info struct {
	// Machine that it runs on.
	Machine
	// Model, DType and LoadFormat as a user knows them.
	Model, DType string
	LoadFormat   configs.LoadFormat
	// KeepsData: memory holds bytes. Where it does not, tokens mean nothing.
	KeepsData bool
	// MicroBatchTokens is the maximum of tokens whose attention runs together, StepTokens
	// that of a step.
	MicroBatchTokens, StepTokens int
	// MicroBatches is the minimum number of micro-batches of a step; 0: as few as
	// MicroBatchTokens allows.
	MicroBatches int
	// OnDemandTokens is the maximum of tokens of a step that fetches on demand.
	OnDemandTokens int
	// CPUExperts is the fraction of the experts missing from such a step that the CPU computes: see
	// planner.Problem.
	CPUExperts float64
	// Grouping is how often experts run, Attention where attention runs.
	Grouping  configs.Grouping
	Attention configs.Place
	// HostPaths is the number of links that copies from and to the host go over. Default: 1.
	HostPaths int
	// Shape and Sizes of the model are for predictions; Complete, if set, sets how a problem's offloaded
	// experts are fetched.
	Shape    planner.Model
	Sizes    planner.Sizes
	Complete func(*planner.Problem)
}

// Counts are what a node has done so far.
type Counts struct {
	// FetchedHost and FetchedPeer are bytes of experts that were fetched, or read in place.
	// DirectSteps are steps that read experts in place.
	FetchedHost, FetchedPeer, DirectSteps int64
	// Hits and Misses are uses of experts.
	Hits, Misses int64
	// Stalls are seconds in which the compute stream waited, by cause.
	Stalls map[string]float64
	// RoutedTokens are the tokens routed to each expert: [layer with experts][expert].
	RoutedTokens [][]int64
	// PeakBytes of the GPU's memory.
	PeakBytes int64
}

// Cell is one point of a sweep: the fraction of the experts that is offloaded, 0 to 1, and
// the tier that they are fetched from; configs.NoTier with fraction 0, and only then.
type Cell struct {
	Tier     configs.Tier `json:"tier"`
	Fraction float64      `json:"offload_fraction"`
	// AllPaths: copies from the host go over all links that the settings say, beside a cell of the
	// same fraction where they go over one.
	AllPaths bool `json:"all_host_paths,omitempty"`
	// Setting is the value that a varied setting has, as "harvest-slab-size=64MiB"; empty: none is varied.
	Setting string `json:"setting,omitempty"`
}

// Line names the cells of all fractions that the cell is one of: "host", "host, all paths",
// "peer, harvest-headroom=1GiB".
func (c Cell) Line() string {
	line := c.Tier.String()
	if c.AllPaths {
		line += ", all paths"
	}
	if c.Setting != "" {
		line += ", " + c.Setting
	}
	return line
}

// Room is what a KV cache of blocks of blockTokens needs for prompts and newTokens behind
// each: the blocks, and the maximum length of a sequence in tokens.
func Room(prompts [][]int32, newTokens, blockTokens int) (blocks, length int) {
	for _, p := range prompts {
		n := len(p) + newTokens
		blocks += (n + blockTokens - 1) / blockTokens
		length = max(length, n)
	}
	return blocks, length
}
