package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/eval/prefix"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/node/bench"
	"github.com/moeserve/moeserve/node/checkpoint"
	"github.com/moeserve/moeserve/node/fault"
	"github.com/moeserve/moeserve/planner"
)

// prefixOptions are the flags of bench prefix alone.
type prefixOptions struct {
	places, directory, csv string
	// Of time to first token.
	lengths     []string
	repetitions int
	plots       []string
	// Of throughput, which is measured where hits are named.
	hits                                []string
	requests, inputLen, newTokens, pool int
	// misses: what tiers cost prompts that they do not have is measured; decodes: what copies cost
	// that number of sequences that decode.
	misses  bool
	decodes int
}

func newBenchPrefix(s *streams) *cobra.Command {
	var o prefixOptions
	cmd := &cobra.Command{
		Use:   "prefix [MODEL]",
		Short: "Measure what a prompt's KV cache is worth, by where it is",
		Long: `Measure the time to first token with the KV cache of the prompt in the GPU's memory
(hbm), on peers, in host memory, in files, and nowhere: a prompt of random tokens runs
once, is stored, and runs again, one request at a time. Each place has an engine of its
own, with that tier alone; the GPU's own prefix cache is used in hbm only.

With --hits the throughput of --num-prompts requests is measured instead, all
submitted at once, of which a fraction has prompts that have run before.

With --misses what tiers add to the time to first token of new prompts is measured: in
each tier's engine prompts that are stored there and prompts that are not run in turn.
With --decodes what stores and loads add to decode steps of so many sequences of
--input-len tokens: steps beside each kind of copies and without run in turn.

A prompt has one token more than its prefix, which is always computed. Default lengths
that do not fit the model's context, or the memory of the machine, are excluded. Places
whose tier cannot be opened are skipped, and named. How many tokens were found stands
beside each time: an engine may find it faster to compute a prefix again. So does the
share of the time that loading the prefix took (load), where it was loaded.

Ctrl-C ends the measurement with the points that are done.`,
		Example: `  moeserve bench prefix mixtral-8x7b --load-format dummy --lengths 1024,32000 \
      --device cuda --peers 1 --plot ttft.svg
  moeserve bench prefix --hits 0,0.5,1 --places hbm,host \
      --num-prompts 100 --input-len 128
  moeserve bench prefix --misses --places host
  moeserve bench prefix --decodes 8 --input-len 64 --places host`,
		Args:              oneModel,
		ValidArgsFunction: completeModelArgument,
		RunE: func(cmd *cobra.Command, args []string) error {
			set, err := modelSettings(cmd, args)
			if err != nil {
				return err
			}
			return benchPrefix(cmd.Context(), s, set, &o)
		},
	}
	addSettings(cmd.Flags(), configs.For("bench prefix"))
	f := cmd.Flags()
	f.StringVar(&o.places, "places", "hbm,peer,host,file,nowhere", "comma-separated `LIST` of places of the KV cache")
	f.Var((*pathValue)(&o.directory), "file-directory", "`DIR` of the tier in files; default: the system's for temporary files")
	f.StringSliceVar(&o.lengths, "lengths", nil, "comma-separated `NUMBERS` of tokens of prefixes; default: 1024 to 90000")
	f.IntVar(&o.repetitions, "repetitions", 5, "`NUMBER` of requests that find their prompt, of misses, or of rounds of --decodes; the median counts")
	f.StringSliceVar(&o.hits, "hits", nil, "measure throughput by these `FRACTIONS` of requests that find their prompt")
	f.BoolVar(&o.misses, "misses", false, "measure what tiers cost new prompts")
	f.IntVar(&o.decodes, "decodes", 0, "measure what copies cost decode steps of this `NUMBER` of sequences")
	f.IntVar(&o.requests, "num-prompts", 10000, "`NUMBER` of requests of --hits")
	f.IntVar(&o.inputLen, "input-len", 512, "prompt `TOKENS` of each request of --hits, or sequence of --decodes")
	f.IntVar(&o.newTokens, "output-len", 1, "generated `TOKENS` of each request of --hits")
	f.IntVar(&o.pool, "num-prefixes", 100, "`NUMBER` of prompts that requests of --hits find, in turn")
	addCSV(cmd, &o.csv)
	f.Var((*pathList)(&o.plots), "plot", "draw the measurement to a .svg or .png; repeatable")
	return cmd
}

// ttft reads the flags of time to first token; limit is the model's context.
func (o *prefixOptions) ttft(limit int) (prefix.TTFTOptions, error) {
	m := prefix.TTFTOptions{Repetitions: o.repetitions}.EnsureDefaults()
	m.Lengths = nil
	for _, n := range prefix.DefaultLengths() {
		if len(o.lengths) == 0 && n+1+m.NewTokens <= limit {
			m.Lengths = append(m.Lengths, n)
		}
	}
	for _, text := range o.lengths {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 || n+1+m.NewTokens > limit {
			return m, usagef("--lengths has %q: must be a whole number from 1 to %d, for a context of %d tokens", text, limit-1-m.NewTokens, limit)
		}
		m.Lengths = append(m.Lengths, n)
	}
	if longest := limit - 1 - m.NewTokens; len(m.Lengths) == 0 && longest >= 1 { // a small model
		for _, n := range []int{longest / 4, longest / 2, longest} {
			m.Lengths = append(m.Lengths, max(1, n-n%16))
		}
		m.Lengths = slices.Compact(m.Lengths)
	}
	if len(m.Lengths) == 0 {
		return m, usagef("no prefix fits in the context of %d tokens beside %d others: raise --max-model-len", limit, 1+m.NewTokens)
	}
	return m, nil
}

// throughput reads the flags of throughput by hits.
func (o *prefixOptions) throughput(limit int) (prefix.HitsOptions, error) {
	m := prefix.HitsOptions{Requests: o.requests, PromptTokens: o.inputLen, NewTokens: o.newTokens, Pool: o.pool}
	for _, text := range o.hits {
		f, err := strconv.ParseFloat(text, 64)
		if err != nil || !(f >= 0 && f <= 1) {
			return m, usagef("--hits has %q: must be a fraction from 0 to 1", text)
		}
		m.Fractions = append(m.Fractions, f)
	}
	for flag, n := range map[string]int{"--num-prompts": o.requests, "--input-len": o.inputLen, "--output-len": o.newTokens, "--num-prefixes": o.pool} {
		if n < 1 {
			return m, usagef("%s is %d: must be at least 1", flag, n)
		}
	}
	if o.inputLen+o.newTokens > limit {
		return m, usagef("--input-len and --output-len are %d together, and the context has %d tokens", o.inputLen+o.newTokens, limit)
	}
	return m, nil
}

func benchPrefix(ctx context.Context, s *streams, set *settings, o *prefixOptions) (err error) {
	hardware, err := readHardware(set.Plan.Hardware)
	if err != nil {
		return err
	}
	for _, key := range []string{"enable-prefix-caching", "kv-offloading-backend", "kv-offloading-size", "kv-transfer-config"} {
		if set.given(key) {
			return usagef("--%s is what --places sets, for each place its own; leave it out", key)
		}
	}
	places, err := prefix.ParsePlaces(o.places)
	if err != nil {
		return usagef("--places: %w", err)
	}
	limit, err := contextOf(set)
	if err != nil {
		return err
	}
	b := &prefixes{s: s, set: set, hardware: hardware, directory: o.directory}
	k, err := o.kind(b, places, limit)
	if err != nil {
		return err
	}
	if k.plot == nil && len(o.plots) > 0 {
		return usagef("--plot draws times to first token and --hits; leave it out")
	}
	formats := make([]string, len(o.plots))
	for i, path := range o.plots {
		if formats[i], err = s.plotFormat("--plot", path); err != nil {
			return err
		}
	}
	if err := s.output("--csv", o.csv); err != nil {
		return err
	}
	res, err := s.openResult(set.Output.JSON)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, res.close()) }()
	r := &prefix.Result{Run: thisRun(s)}
	p := s.progress(&set.Output, false)
	defer p.end()
	p.begin(k.of, k.unit)
	interrupted := k.measure(ctx, r, func(done, total int64) { p.set(k.of, done, total) })
	p.end()
	for _, text := range b.skipped {
		s.notice(&set.Output, "%s", text)
	}
	if len(r.TTFT)+len(r.Hits)+len(r.Misses)+len(r.Decodes) == 0 {
		if interrupted == nil {
			return fault.Of(fault.ErrConfig, errors.New("no place could be measured"))
		}
		return benchError(interrupted)
	}
	var files []outputFile
	if interrupted == nil && k.plot != nil {
		for i, path := range o.plots {
			files = append(files, outputFile{"--plot", path, func(w io.Writer) error { return k.plot(w, formats[i], r) }})
		}
	} else if interrupted != nil {
		s.notice(&set.Output, "the points that were measured follow; no plot")
	}
	if o.csv != "" {
		files = append(files, outputFile{"--csv", o.csv, func(w io.Writer) error { return prefix.WriteCSV(w, r) }})
	}
	written := writeAll(s, res, r, files, func(w io.Writer) error { return prefix.WriteTable(w, r) })
	return errors.Join(written, interrupted)
}

// kindOfPrefix is what a call of bench prefix measures.
type kindOfPrefix struct {
	// of and unit are the progress bar's.
	of, unit string
	measure  func(ctx context.Context, r *prefix.Result, progress func(done, total int64)) error
	plot     func(w io.Writer, format string, r *prefix.Result) error // nil: there is none
}

// kind reads the flags of what is measured.
func (o *prefixOptions) kind(b *prefixes, places []prefix.Place, limit int) (kindOfPrefix, error) {
	if o.repetitions < 1 {
		return kindOfPrefix{}, usagef("--repetitions is %d: must be at least 1", o.repetitions)
	}
	kinds := 0
	for _, asked := range []bool{len(o.hits) > 0, o.misses, o.decodes != 0} {
		if asked {
			kinds++
		}
	}
	seed, tiers := b.set.Generate.Seed, tiersOf(places)
	switch {
	case len(tiers) == 0 && (o.misses || o.decodes != 0):
		return kindOfPrefix{}, usagef("--misses and --decodes measure tiers; name a tier in --places: peer, host or file")
	case kinds > 1:
		return kindOfPrefix{}, usagef("--hits, --misses and --decodes are measured one at a time; give one of them")
	case len(o.hits) > 0:
		m, err := o.throughput(limit)
		m.Open, m.Places, m.Seed = b.open, places, seed
		return kindOfPrefix{"requests", "requests", func(ctx context.Context, r *prefix.Result, progress func(done, total int64)) error {
			m.Progress = progress
			return prefix.Hits(ctx, m, r, b.skip)
		}, prefix.PlotHits}, err
	case o.misses:
		t, err := o.ttft(limit)
		m := prefix.MissesOptions{Open: b.open, Places: tiers, Lengths: t.Lengths, Repetitions: o.repetitions, Seed: seed}
		return kindOfPrefix{"prompts", "tokens", func(ctx context.Context, r *prefix.Result, progress func(done, total int64)) error {
			m.Progress = progress
			return prefix.Misses(ctx, m, r, b.skip)
		}, nil}, err
	case o.decodes != 0:
		m, err := o.steps(limit)
		m.Open, m.Places = b.openDecoder, tiers
		return kindOfPrefix{"steps", "steps", func(ctx context.Context, r *prefix.Result, progress func(done, total int64)) error {
			m.Progress = progress
			return prefix.Decodes(ctx, m, r, b.skip)
		}, nil}, err
	}
	m, err := o.ttft(limit)
	m.Open, m.Places, m.Seed = b.open, places, seed
	if len(o.lengths) == 0 { // those that the machine has room for
		m.Shorten = func(err error) bool { return errors.Is(err, fault.ErrConfig) }
	}
	return kindOfPrefix{"prompts", "tokens", func(ctx context.Context, r *prefix.Result, progress func(done, total int64)) error {
		m.Progress = progress
		return prefix.TTFT(ctx, m, r, b.skip)
	}, prefix.PlotTTFT}, err
}

// steps reads the flags of decode steps beside copies.
func (o *prefixOptions) steps(limit int) (prefix.DecodesOptions, error) {
	m := prefix.DecodesOptions{Sequences: o.decodes, Tokens: o.inputLen, Rounds: o.repetitions}.EnsureDefaults()
	if most := limit - 1 - m.Steps; o.decodes < 1 || o.inputLen < 1 || o.inputLen > most {
		return m, usagef("--decodes %d --input-len %d: must be at least 1, and for a context of %d tokens at most %d tokens", o.decodes, o.inputLen, limit, most)
	}
	return m, nil
}

// tiersOf are the places that are tiers.
func tiersOf(places []prefix.Place) []prefix.Place {
	return slices.DeleteFunc(slices.Clone(places), func(p prefix.Place) bool { return p == prefix.HBM || p == prefix.Nowhere })
}

// contextOf is the maximum of tokens of a sequence: the model's, or what the user allows.
func contextOf(set *settings) (int, error) {
	m, err := checkpoint.Open(set.Model, set.Generate.Seed)
	if err != nil {
		return 0, err
	}
	defer m.Close() //nolint:errcheck // only read from
	if n := set.KV.MaxModelLen; n > 0 {
		return min(n, m.Config.MaxPositions), nil
	}
	return m.Config.MaxPositions, nil
}

// prefixes opens engines for places.
type prefixes struct {
	s         *streams
	set       *settings
	hardware  *planner.Hardware
	directory string
	opened    bool
	skipped   []string
}

// skip leaves out places that the machine or the settings have no tier for.
func (b *prefixes) skip(p prefix.Place, err error) bool {
	if !errors.Is(err, fault.ErrConfig) {
		return false
	}
	b.skipped = append(b.skipped, fmt.Sprintf("skipped: %s: %v", p, err))
	return true
}

// open opens an engine with the tier of a place alone.
func (b *prefixes) open(ctx context.Context, p prefix.Place, tokens, length int) (prefix.Engine, error) {
	n, err := b.node(ctx, p, tokens, length, 0)
	if err != nil {
		return nil, err
	}
	return bench.NewPrefixes(n, b.hardware), nil
}

// openDecoder opens sequences that decode, with the tier of a place alone.
func (b *prefixes) openDecoder(ctx context.Context, p prefix.Place, sequences, tokens, steps int) (prefix.Decoder, error) {
	n, err := b.node(ctx, p, bench.TrafficTokens(b.set.KV.BlockSize), tokens+steps+1, sequences)
	if err != nil {
		return nil, err
	}
	return bench.NewDecodes(ctx, n, b.hardware, sequences, tokens, steps)
}

// node opens a node with the tier of a place alone, for at least so many sequences.
func (b *prefixes) node(ctx context.Context, p prefix.Place, tokens, length, sequences int) (*node.Node, error) {
	set := b.set.Settings
	set.KV.MaxModelLen = length
	// The KV cache has no more blocks than so many sequences can use: a third more are for copies.
	set.Batch.MaxNumSeqs = max(set.Batch.MaxNumSeqs, (4*sequences+2)/3)
	set.KV.EnablePrefixCaching = p == prefix.HBM
	if err := tierSettings(&set, p, tokens, b.directory); err != nil {
		return nil, err
	}
	opts := node.Options{Settings: set, Log: b.set.logger(b.s.err), WithoutTokenizer: true, ExpectCPU: set.Model.Name == "" || b.opened}
	b.opened = true
	return open(ctx, b.s, opts, true)
}

// tierSettings asks for the tier of a place alone, with room for the blocks of tokens tokens.
func tierSettings(set *configs.Settings, p prefix.Place, tokens int, directory string) error {
	set.KV.OffloadingSize, set.KV.TransferConfig = 0, ""
	sizes := map[prefix.Place]string{prefix.Peer: "num_gpu_blocks", prefix.Host: "num_cpu_blocks", prefix.File: "num_file_blocks"}
	size, ok := sizes[p]
	if !ok {
		return nil
	}
	extra := map[string]any{size: tokens/set.KV.BlockSize + 64} // and what is generated
	if p == prefix.File {
		if extra["directory"] = directory; directory == "" {
			extra["directory"] = os.TempDir()
		}
	}
	text, err := json.Marshal(map[string]any{"kv_connector_extra_config": extra})
	set.KV.TransferConfig = string(text)
	return err
}
