package eval

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/moeserve/moeserve/configs"
)

// ParseFractions reads comma-separated offload fractions from 0 to 1, and sorts them.
// Errors wrap ErrInput.
func ParseFractions(list string) ([]float64, error) {
	var fractions []float64
	for _, text := range strings.Split(list, ",") {
		f, err := strconv.ParseFloat(strings.TrimSpace(text), 64)
		if err != nil || !(f >= 0 && f <= 1) {
			return nil, Inputf("fraction %q: must be comma-separated numbers from 0 to 1, as 0,0.5,1", strings.TrimSpace(text))
		}
		fractions = append(fractions, f)
	}
	slices.Sort(fractions)
	return slices.Compact(fractions), nil
}

// ParseTiers reads comma-separated tiers. Errors wrap ErrInput.
func ParseTiers(list string) ([]configs.Tier, error) {
	var tiers []configs.Tier
	for _, text := range strings.Split(list, ",") {
		var t configs.Tier
		if err := t.UnmarshalText([]byte(strings.TrimSpace(text))); err != nil || t != configs.HostTier && t != configs.PeerTier {
			return nil, Inputf("unknown tier %q: must be host, peer, or host,peer", strings.TrimSpace(text))
		}
		if !slices.Contains(tiers, t) {
			tiers = append(tiers, t)
		}
	}
	return tiers, nil
}

// Cells are those of a sweep over fractions and tiers: fraction 0 once, each other
// fraction with each tier, and the host's again over all paths, if there are several.
func Cells(fractions []float64, tiers []configs.Tier, paths int) []Cell {
	var cells []Cell
	for _, f := range fractions {
		if f == 0 {
			cells = append(cells, Cell{Tier: configs.NoTier})
			continue
		}
		for _, t := range tiers {
			cells = append(cells, Cell{Tier: t, Fraction: f})
			if t == configs.HostTier && paths > 1 {
				cells = append(cells, Cell{Tier: t, Fraction: f, AllPaths: true})
			}
		}
	}
	return cells
}

// SweepOptions describe a sweep.
type SweepOptions struct {
	Options
	Cells []Cell
	// Open opens the node of a cell; the sweep closes it.
	Open func(ctx context.Context, c Cell) (Node, error)
	// Shared keeps the nodes of all cells open and measures a trial of each in turn, so
	// that a drift of the machine affects all alike. Without it one cell is finished, and
	// its node closed, before the next begins.
	Shared bool
	// Done are cells that have been measured before.
	Done []Result
	// Skip, if set, decides on a cell whose node cannot be opened: true skips the cell, and
	// the sweep goes on. A sweep of which all cells are skipped fails.
	Skip func(c Cell, err error) bool
	// Finished, if set, is called with each cell that all trials have been measured of.
	Finished func(Result) error

	// why the first cell was skipped.
	why error
}

// Sweep measures all cells that are not done, and returns the results of all that were
// not skipped, in the order of Cells. Where a cell fails, the results are those of the cells
// before it, beside the error; where ctx ends before the sweep does, also those of which at
// least one trial has been measured.
func Sweep(ctx context.Context, o SweepOptions) ([]Result, error) {
	o.Options = o.EnsureDefaults()
	if len(o.Cells) == 0 {
		return nil, Inputf("eval: a sweep has no cells: give at least one fraction, and a tier where it is above 0")
	}
	results := map[Cell]Result{}
	for _, r := range o.Done {
		results[r.Cell()] = r
	}
	var left []Cell
	for _, c := range o.Cells {
		if _, ok := results[c]; !ok {
			left = append(left, c)
		}
	}
	batches := make([][]Cell, 0, len(left))
	if o.Shared && len(left) > 0 {
		batches = append(batches, left)
	} else {
		for _, c := range left {
			batches = append(batches, []Cell{c})
		}
	}
	meter := newMeter(&o.Options, len(left))
	var failed error
	for _, cells := range batches {
		if failed = o.measure(ctx, cells, results, meter); failed != nil {
			break
		}
	}
	var all []Result
	for _, c := range o.Cells {
		if r, ok := results[c]; ok {
			all = append(all, r)
		}
	}
	if all == nil && failed == nil {
		failed = o.why
	}
	return all, failed
}

// measure measures cells together, a trial of each in turn.
func (o *SweepOptions) measure(ctx context.Context, cells []Cell, results map[Cell]Result, meter *meter) (err error) {
	var under []*measurement
	defer func() {
		for _, m := range under {
			if _, whole := results[m.result.Cell()]; err != nil && !whole {
				if r, ok := m.partial(ctx); ok {
					results[r.Cell()] = r
				}
			}
			m.batch.Close()
			err = errors.Join(err, m.node.Close())
		}
	}()
	fail := func(c Cell, err error) error {
		if c.Tier == configs.NoTier {
			return fmt.Errorf("0 %% offloaded: %w", err)
		}
		return fmt.Errorf("%v %% offloaded to %s: %w", 100*c.Fraction, c.Line(), err)
	}
	for _, c := range cells {
		n, err := o.Open(ctx, c)
		if err != nil && ctx.Err() == nil && o.Skip != nil && o.Skip(c, err) {
			meter.skip()
			if o.why == nil {
				o.why = fail(c, err)
			}
			continue
		}
		if err != nil {
			return fail(c, err)
		}
		m, err := start(ctx, n, c, o.Options, meter)
		if err != nil {
			return fail(c, errors.Join(err, n.Close()))
		}
		under = append(under, m)
	}
	for range o.Trials {
		for _, m := range under {
			if err := m.trial(ctx); err != nil {
				return fail(m.result.Cell(), err)
			}
		}
	}
	for _, m := range under {
		r, err := m.end(ctx)
		if err != nil {
			return fail(m.result.Cell(), err)
		}
		results[r.Cell()] = r
		if o.Finished != nil {
			if err := o.Finished(r); err != nil {
				return err
			}
		}
	}
	return nil
}

// Gain is what fetching from peers in place of the host gives at one fraction, 0.48
// for 48 % more tokens/s.
type Gain struct {
	Model string
	// Setting is the value of the varied setting; empty: none is varied.
	Setting string
	// Machine in words.
	Machine  string
	Emulated bool
	// Unpaced: the devices are emulated without rates, so that the tiers' times do not
	// compare. Decode and EndToEnd are then 0.
	Unpaced  bool
	Requests int
	Fraction float64
	// Decode of decode throughput, EndToEnd with prefill.
	Decode, EndToEnd float64
}

// Gains compares results of both tiers on one machine, the host's over one path, in the order of the
// models' first results.
func Gains(results []Result, fraction float64) []Gain {
	type key struct {
		model, setting, machine string
		requests                int
	}
	found := map[key]map[configs.Tier]Result{}
	var order []key
	for _, r := range results {
		if r.OffloadFraction != fraction || r.AllPaths {
			continue
		}
		k := key{r.Model, r.Setting, r.words(), r.Requests}
		if found[k] == nil {
			found[k] = map[configs.Tier]Result{}
			order = append(order, k)
		}
		found[k][r.Tier] = r
	}
	var gains []Gain
	for _, k := range order {
		host, peer := found[k][configs.HostTier], found[k][configs.PeerTier]
		if host.DecodeTokS == 0 || peer.DecodeTokS == 0 {
			continue
		}
		g := Gain{
			Model: k.model, Setting: k.setting, Machine: k.machine, Requests: k.requests, Fraction: fraction,
			Emulated: host.Emulated || peer.Emulated, Unpaced: host.Unpaced() || peer.Unpaced(),
		}
		if !g.Unpaced {
			g.Decode, g.EndToEnd = peer.DecodeTokS/host.DecodeTokS-1, peer.ThroughputTokS/host.ThroughputTokS-1
		}
		gains = append(gains, g)
	}
	return gains
}
