package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/eval/kv"
)

// maxKVTokens bounds entries of a load and tokens of a block: bytes of both do not overflow.
const maxKVTokens = 1 << 24

// kvOptions are the flags of bench kv alone.
type kvOptions struct {
	models                   []string
	entries                  []int
	blockTokens, repetitions int
	csv                      string
	plots                    []string
}

func newBenchKV(s *streams) *cobra.Command {
	var o kvOptions
	cmd := &cobra.Command{
		Use:   "kv",
		Short: "Measure reloads of KV blocks from host and peer memory",
		Long: `Measure how long the GPU that computes takes to load KV entries, those of a prefix
that was computed before, from pinned host memory and from a peer: one request to the
transfer engine with blocks of --block-size tokens, scattered in both memories, and
the same as one contiguous run (the Harvest paper's Figure 7).

--models names models by whose entries loads are sized: those of the paper
(deepseek-v3, kimi-k2, mistral-large-3) and the presets. Models with entries of one
size share a measurement. Nothing of a model is loaded.

Beside the time of one load stand the rate of several that are queued, and the raw
rate: that of the same copies queued on a stream of the device. Host and peer take
turns, so that what disturbs the machine disturbs both.

Ctrl-C ends the measurement with the points that are done.`,
		Example: `  moeserve bench kv --device cuda --peers 1 --plot reload.svg
  moeserve bench kv --models kimi-k2,mixtral-8x7b --entries 100,8000 \
      --emulate virtual,nodata,pcie=55.3GB/s,nvlink=395GB/s,latency=8us`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			set, err := readSettings(cmd.Flags(), os.Environ())
			if err != nil {
				return err
			}
			return benchKV(cmd.Context(), s, set, &o)
		},
	}
	addSettings(cmd.Flags(), configs.For("bench kv"))
	f := cmd.Flags()
	f.StringSliceVar(&o.models, "models", nil, "comma-separated `NAMES` of models whose KV entries are loaded; default: all that are known")
	f.IntSliceVar(&o.entries, "entries", kv.DefaultCounts(), "comma-separated `NUMBERS` of entries (tokens) of a load")
	f.IntVar(&o.blockTokens, "block-size", 16, "`TOKENS` of a KV block")
	f.IntVar(&o.repetitions, "repetitions", 10, "`NUMBER` of measurements whose median counts")
	addCSV(cmd, &o.csv)
	f.Var((*pathList)(&o.plots), "plot", "draw times over entries to a .svg or .png; repeatable")
	return cmd
}

// kvModels are the names of models whose entries are known.
func kvModels() []string {
	var names []string
	for _, e := range configs.KVEntries() {
		names = append(names, e.Name)
	}
	return names
}

// validate checks the flags, and returns the entries that they name and the formats of plots.
func (o *kvOptions) validate() (entries []kv.Entry, formats []string, err error) {
	var models []configs.KVEntry
	for _, name := range o.models {
		i := slices.Index(kvModels(), name)
		if i < 0 {
			return nil, nil, usagef("--models %s: no such model%s; known are %s", name, configs.DidYouMean(name, kvModels()), strings.Join(kvModels(), ", "))
		}
		models = append(models, configs.KVEntries()[i])
	}
	if len(models) == 0 {
		models = configs.KVEntries()
	}
	for _, n := range o.entries {
		if n < 1 || n > maxKVTokens {
			return nil, nil, usagef("--entries has %d: must be from 1 to %d", n, maxKVTokens)
		}
	}
	if len(o.entries) == 0 {
		return nil, nil, usagef("--entries has no number: name how many entries a load has, such as 100,8000")
	}
	if o.blockTokens < 1 || o.blockTokens > maxKVTokens {
		return nil, nil, usagef("--block-size is %d: must be from 1 to %d", o.blockTokens, maxKVTokens)
	}
	if o.repetitions < 1 {
		return nil, nil, usagef("--repetitions is %d: must be at least 1", o.repetitions)
	}
	formats = make([]string, len(o.plots))
	for i, path := range o.plots {
		if formats[i], err = plotFormat("--plot", path); err != nil {
			return nil, nil, err
		}
	}
	if o.csv != "" {
		err = writable("--csv", o.csv)
	}
	return kv.Entries(models), formats, err
}

func benchKV(ctx context.Context, s *streams, set *settings, o *kvOptions) (err error) {
	hardware, err := readHardware(set.Plan.Hardware)
	if err != nil {
		return err
	}
	entries, formats, err := o.validate()
	if err != nil {
		return err
	}
	res, err := openResult(set.Output.JSON, s.out)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, res.close()) }()
	d, err := openCopied(s, set, hardware)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	measure := kv.ReloadOptions{
		Machine: d.Machine, Compute: d.Space, Peer: d.peer,
		Entries: entries, Counts: o.entries, BlockTokens: o.blockTokens, Repetitions: o.repetitions,
	}
	if err := d.CheckFree(measure.Needs()); err != nil {
		return fmt.Errorf("loads of %d entries are too large; give fewer --entries, or --models with smaller ones: %w", slices.Max(o.entries), err)
	}
	p := s.progress(&set.Output, false)
	defer p.end()
	p.begin("loads", bytesUnit)
	measure.Progress = func(done, total int64) { p.set("loads", done, total) }
	r := &kv.Result{Run: thisRun(s), Machine: d.machine, BlockTokens: o.blockTokens, Entries: entries}
	points, interrupted := kv.Reload(ctx, measure)
	p.end()
	if interrupted != nil && len(points) == 0 {
		return benchError(interrupted)
	}
	r.Reloads = points
	files := o.files(r, formats)
	if interrupted != nil {
		s.notice(&set.Output, "the points that were measured follow; no plot")
		files = files[len(formats):]
	}
	written := writeAll(s, res, r, files, func(w io.Writer) error { return kv.WriteTable(w, r) })
	return errors.Join(written, interrupted)
}

// files are those that a measurement writes: plots, then CSV.
func (o *kvOptions) files(r *kv.Result, formats []string) []outputFile {
	var files []outputFile
	for i, path := range o.plots {
		files = append(files, outputFile{path, func(w io.Writer) error { return kv.Plot(w, formats[i], r) }})
	}
	if o.csv != "" {
		files = append(files, outputFile{o.csv, func(w io.Writer) error { return kv.WriteCSV(w, r) }})
	}
	return files
}
