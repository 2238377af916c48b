package eval

import (
	"context"
	"time"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/planner"
)

// Node is what is measured. Whoever hands one out keeps no other request running on
// it.
type Node interface {
	// Info says what runs.
	Info() Info
	// Batch takes the cache blocks that prompts and new tokens behind each need.
	Batch(prompts [][]int32, newTokens int) (Batch, error)
	// Counts since the node was opened. No step may be running.
	Counts(ctx context.Context) (Counts, error)
	// Now is the clock of the node's devices, which may be a virtual one.
	Now() time.Duration
	Close() error
}

// Batch is sequences that go in lockstep: first all prompts, then a token of each a
// step.
type Batch interface {
	// Prefill computes the prompts, with nothing in the cache, and draws token 0 of
	// each sequence.
	Prefill(ctx context.Context) error
	// Decode draws tokens from to to-1 of each sequence, a step each. The tokens before
	// from must have been drawn; those from from on are drawn again.
	Decode(ctx context.Context, from, to int) error
	// Tokens drawn so far, by sequence.
	Tokens() [][]int32
	Close()
}

// Info describes a node.
type Info struct {
	// Model, Device, DType and LoadFormat as a user knows them.
	Model, Device, DType string
	LoadFormat           configs.LoadFormat
	// Emulated: the devices are, and so are their times.
	Emulated bool
	// KeepsData: memory holds bytes. Where it does not, tokens mean nothing.
	KeepsData bool
	// MicroBatchTokens is the most rows whose attention runs together, StepTokens the most
	// of a step.
	MicroBatchTokens, StepTokens int
	// MicroBatches is the least number of micro-batches of a step; 0: as few as
	// MicroBatchTokens allows.
	MicroBatches int
	// OnDemandTokens is the most rows of a step that fetches only chosen experts.
	OnDemandTokens int
	// Grouping is how often experts run, Attention where attention runs.
	Grouping  configs.Grouping
	Attention configs.Place
	// Shape and Sizes of the model are for predictions.
	Shape planner.Model
	Sizes planner.Sizes
	// Hardware is the machine, for floors and predictions; nil where its rates are not
	// known.
	Hardware *planner.Hardware
}

// Counts are what a node has done so far.
type Counts struct {
	// FetchedHost and FetchedPeer are bytes of experts that were fetched.
	FetchedHost, FetchedPeer int64
	// Stalls are seconds in which the compute device waited, by cause.
	Stalls map[string]float64
	// RoutedTokens are the rows that chose each expert: [layer with experts][expert].
	RoutedTokens [][]int64
	// PeakBytes of the compute device's memory.
	PeakBytes int64
}

// Cell is one point of a sweep: a share of the experts that is offloaded, 0 to 1, and
// where they are fetched from; configs.NoTier with fraction 0, and only then.
type Cell struct {
	Tier     configs.Tier `json:"tier"`
	Fraction float64      `json:"offload_fraction"`
}

// Room is what a cache of blocks of blockTokens needs for prompts and newTokens behind
// each: the blocks, and the longest sequence in tokens.
func Room(prompts [][]int32, newTokens, blockTokens int) (blocks, longest int) {
	for _, p := range prompts {
		n := len(p) + newTokens
		blocks += (n + blockTokens - 1) / blockTokens
		longest = max(longest, n)
	}
	return blocks, longest
}
