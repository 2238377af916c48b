package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/eval"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/node/devices"
	"github.com/moeserve/moeserve/node/fault"
	"github.com/moeserve/moeserve/untrusted"
)

// sweepOptions are the flags of bench sweep alone.
type sweepOptions struct {
	fractions, tiers  string
	vary              string
	resume, csv       string
	plots, gainsPlots []string
	compare           []string
}

func newBenchSweep(s *streams) *cobra.Command {
	var o sweepOptions
	cmd := &cobra.Command{
		Use:   "sweep [MODEL]",
		Short: "Measure throughput over offload fractions and tiers",
		Long: `Measure throughput as bench throughput does, over offload fractions, with the
offloaded experts fetched from the host and from peers: a cell is one fraction with
one tier. Small models on emulated devices run a trial of each cell in turn;
otherwise one cell is measured after another.

With --vary all this is measured with each value of another setting, and --plot draws
a group of bars for each.

Ctrl-C ends the sweep with what has been measured. With --resume FILE the same
command goes on from there.

--plot draws decode throughput over the fraction, with what the planner predicts
and a vertical line at each tier's saturation point: the largest fraction at which
copies are fully overlapped by compute. --plot-gains draws the gain of peer over host
memory with half of the experts offloaded, beside that of other sweeps (--compare).`,
		Example: `  moeserve bench sweep --plot sweep.svg --plot sweep.png
  moeserve bench sweep mixtral-8x7b --load-format dummy --num-prompts 3240 \
      --fractions 0,0.5,1 --resume sweep.jsonl --json sweep.json
  moeserve bench sweep --fractions 0.5 --vary peers=1,1+2 --plot peers.svg`,
		Args:              oneModel,
		ValidArgsFunction: completeModelArgument,
		RunE: func(cmd *cobra.Command, args []string) error {
			set, err := modelSettings(cmd, args)
			if err != nil {
				return err
			}
			variants, err := o.variants(cmd, set)
			if err != nil {
				return err
			}
			return benchSweep(cmd.Context(), s, set, variants, &o)
		},
	}
	addSettings(cmd.Flags(), configs.For("bench sweep"))
	f := cmd.Flags()
	f.StringVar(&o.fractions, "fractions", "0,0.25,0.5,0.75,1", "comma-separated `LIST` of offload fractions")
	f.StringVar(&o.tiers, "tiers", "host,peer", "comma-separated `LIST` of tiers that offloaded experts are fetched from")
	f.StringVar(&o.vary, "vary", "", "measure with each value of a setting: `KEY=VALUE,VALUE`; + stands for a comma in a value, as peers=1,1+2")
	f.Var((*pathValue)(&o.resume), "resume", "append each finished cell to a file; cells that are in it are not measured again")
	addCSV(cmd, &o.csv)
	f.Var((*pathList)(&o.plots), "plot", "draw throughput over the fraction to a .svg or .png; repeatable")
	f.Var((*pathList)(&o.gainsPlots), "plot-gains", "draw the gain of peer over host memory to a .svg or .png; repeatable")
	f.Var((*pathList)(&o.compare), "compare", "draw the gains of another sweep's JSON, too; repeatable")
	return cmd
}

func benchSweep(ctx context.Context, s *streams, set *settings, variants []variant, o *sweepOptions) (err error) {
	fractions, err := eval.ParseFractions(o.fractions)
	if err != nil {
		return usagef("--fractions: %w", err)
	}
	tiers, err := eval.ParseTiers(o.tiers)
	if err != nil {
		return usagef("--tiers: %w", err)
	}
	files, err := o.files(s)
	if err != nil {
		return err
	}
	others, err := readOthers("--compare", o.compare)
	if err != nil {
		return err
	}
	res, err := s.openResult(set.Output.JSON)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, res.close()) }()
	results, failed := measureCells(ctx, s, set, variants, fractions, tiers, o.resume)
	if failed != nil && len(results) == 0 {
		return benchError(failed)
	}
	var complete []outputFile
	for _, f := range files {
		file := outputFile{f.flag, f.path, func(w io.Writer) error { return f.write(w, results, others) }}
		if failed == nil || f.path == stdoutName {
			complete = append(complete, file)
		} else if err := file.create(s); err != nil {
			s.notice(&set.Output, "%s is not written: %v", f.path, err) // it may need cells that were not measured
		}
	}
	written := writeAll(s, res, results, complete, func(w io.Writer) error { return eval.WriteTable(w, results) })
	return errors.Join(written, benchError(failed))
}

// variant is the settings of a sweep with one value of a setting that it varies; an empty name: it
// varies none.
type variant struct {
	name string
	set  *settings
}

// variants reads --vary, KEY=VALUE,VALUE,…, and the settings with each value. A + in a value stands
// for a comma.
func (o *sweepOptions) variants(cmd *cobra.Command, set *settings) ([]variant, error) {
	if o.vary == "" {
		return []variant{{"", set}}, nil
	}
	key, list, _ := strings.Cut(o.vary, "=")
	known := slices.ContainsFunc(configs.For("bench sweep"), func(k configs.Key) bool { return k.Name == key })
	if !known || slices.Contains([]string{modelFlag, "json", "log-level", "log-format"}, key) {
		return nil, usagef("--vary %s: must be KEY=VALUE,VALUE with a setting of this command, as harvest-headroom=0,1GiB", o.vary)
	}
	if cmd.Flags().Changed(key) {
		return nil, usagef("--vary %s: --%s is given, too; leave one of them out", o.vary, key)
	}
	var all []variant
	for _, value := range strings.Split(list, ",") {
		value = strings.ReplaceAll(value, "+", ",")
		if err := cmd.Flags().Set(key, value); err != nil {
			return nil, usagef("--vary %s: %w", o.vary, err)
		}
		set, err := readSettings(cmd.Flags(), os.Environ())
		if err != nil {
			return nil, usagef("--vary %s: %w", o.vary, err)
		}
		all = append(all, variant{key + "=" + value, set})
	}
	return all, nil
}

// measureCells measures the cells of fractions and tiers with each variant. resume is the file that keeps
// finished cells; empty: none. set is what the variants have in common. Results may come beside an error.
func measureCells(ctx context.Context, s *streams, set *settings, variants []variant, fractions []float64, tiers []configs.Tier, resume string) ([]eval.Result, error) {
	var (
		journal  *eval.Journal
		all      []eval.Result
		cells    int
		skipped  []string
		failed   error
		none     error
		complete = set.Bench.Trials
	)
	config := sweepConfig(set) // before the settings are sized for the batch
	for i, v := range variants {
		paths, err := node.HostPaths(&v.set.Settings)
		if err != nil {
			return nil, err
		}
		b, err := newBenchmark(s, v.set)
		if err != nil {
			return nil, err
		}
		b.sweep = true
		if i == 0 && resume != "" {
			config["sha256 of the prompts"] = fmt.Sprintf("%x", eval.Digest(b.options.Prompts))
			if journal, err = eval.OpenJournal(resume, config); err != nil {
				return nil, benchError(fmt.Errorf("--resume: %w", err))
			}
			defer journal.Close() //nolint:errcheck // each line has been synced
		}
		p := b.follow()
		defer p.end()
		sweep := eval.SweepOptions{Options: b.options, Cells: eval.Cells(fractions, tiers, paths), Open: b.open}
		for i := range sweep.Cells {
			sweep.Cells[i].Setting = v.name
		}
		cells += len(sweep.Cells)
		if journal != nil {
			sweep.Done, sweep.Finished = journal.Results, journal.Append
		} else if sweep.Shared, err = b.fitTogether(len(sweep.Cells)); err != nil {
			return nil, err
		}
		// Of a large model some cells do not fit.
		sweep.Skip = func(c eval.Cell, err error) bool {
			if !errors.Is(err, fault.ErrConfig) {
				return false
			}
			skipped = append(skipped, fmt.Sprintf("skipped: %s: %v", cellWords(c, 1, 1), err))
			return true
		}
		before := len(skipped)
		results, err := eval.Sweep(ctx, sweep)
		p.end()
		all = append(all, results...)
		if err != nil && len(skipped)-before == len(sweep.Cells) {
			none = err // with this value nothing fits; with another something may
		} else if failed = err; failed != nil {
			break
		}
	}
	if len(all) == 0 {
		return nil, cmp.Or(failed, none)
	}
	for _, text := range skipped {
		s.notice(&set.Output, "%s", text)
	}
	if failed != nil {
		s.notice(&set.Output, "%s", unfinished(all, cells, complete, resume))
	}
	return all, failed
}

// unfinished words what a sweep has measured that was interrupted, or of which a cell failed,
// and how to go on.
func unfinished(results []eval.Result, cells, trials int, resume string) string {
	whole := 0
	for _, r := range results {
		if len(r.Trials) == trials {
			whole++
		}
	}
	how := "with --resume FILE a sweep keeps each finished cell in FILE, and goes on from there"
	if resume != "" {
		how = "the same command measures the rest: --resume " + resume + " has the finished ones"
	}
	return fmt.Sprintf("%d of %d cells are finished, %d with fewer trials; %s", whole, cells, len(results)-whole, how)
}

// sweepFile is a file that a sweep writes at its end.
type sweepFile struct {
	flag, path string
	write      func(w io.Writer, results, others []eval.Result) error
}

// files lists them, and checks that they can be written.
func (o *sweepOptions) files(s *streams) ([]sweepFile, error) {
	var files []sweepFile
	for _, path := range o.plots {
		format, err := s.plotFormat("--plot", path)
		if err != nil {
			return nil, err
		}
		files = append(files, sweepFile{"--plot", path, func(w io.Writer, results, _ []eval.Result) error {
			return eval.PlotSweep(w, format, results)
		}})
	}
	for _, path := range o.gainsPlots {
		format, err := s.plotFormat("--plot-gains", path)
		if err != nil {
			return nil, err
		}
		files = append(files, sweepFile{"--plot-gains", path, func(w io.Writer, results, others []eval.Result) error {
			return eval.PlotGains(w, format, slices.Concat(results, others))
		}})
	}
	if err := cmp.Or(s.output("--csv", o.csv), s.inPlace("--resume", o.resume)); err != nil {
		return nil, err
	}
	if o.csv != "" {
		files = append(files, sweepFile{"--csv", o.csv, func(w io.Writer, results, _ []eval.Result) error {
			return eval.WriteCSV(w, results)
		}})
	}
	return files, nil
}

// readOthers reads the results of other sweeps, which a flag names.
func readOthers(flag string, paths []string) ([]eval.Result, error) {
	var all []eval.Result
	for _, path := range paths {
		data, err := untrusted.ReadFile(path, untrusted.MaxData)
		if err != nil {
			return nil, usagef("%s: %w", flag, err)
		}
		results, err := eval.ReadResults(data, path)
		if err != nil {
			return nil, usagef("%s: %w", flag, err)
		}
		all = append(all, results...)
	}
	return all, nil
}

// sweepConfig is what the results of a sweep depend on: every setting of bench sweep
// except where its result and its messages go.
func sweepConfig(set *settings) map[string]string {
	config, values := map[string]string{}, set.Values()
	for _, k := range configs.For("bench sweep") {
		switch k.Name {
		case "json", "log-level", "log-format":
			continue
		}
		config[k.Name] = fmt.Sprint(values[k.Name])
	}
	return config
}

// fitTogether reports whether the nodes of so many cells can be open at once: emulated ones
// whose models need little of this machine's memory.
func (b *benchmark) fitTogether(cells int) (bool, error) {
	set := b.set.Settings
	if gpus, _ := devices.GPUs(); set.Device.Kind == configs.CUDA || set.Device.Kind == configs.AutoDevice && set.Device.Emulate == "" && len(gpus) > 0 {
		return false, nil
	}
	in, err := node.Inspect(node.Options{Settings: set, Log: b.set.logger(b.s.err)})
	if err != nil {
		return false, err
	}
	have, ok := devices.AvailableMemory()
	// Three copies of the weights, for host and peers beside the device, and the cache.
	each := 3*(in.Sizes.Experts+in.Sizes.Other) + int64(in.KV.Blocks)*in.KVBlockBytes
	return ok && int64(cells)*each < have/4, nil
}
