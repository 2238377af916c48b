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
	"github.com/moeserve/moeserve/eval"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/node/devices"
	"github.com/moeserve/moeserve/node/fault"
)

// sweepOptions are the flags of bench sweep alone.
type sweepOptions struct {
	fractions, tiers  string
	resume, csv       string
	plots, gainsPlots []string
	compare           []string
}

func newBenchSweep(s *streams) *cobra.Command {
	var o sweepOptions
	cmd := &cobra.Command{
		Use:   "sweep",
		Short: "Measure throughput over offload fractions and tiers",
		Long: `Measure throughput as bench throughput does, over offload fractions, with the
offloaded experts fetched from the host and from peers. Small models on emulated
devices take a trial of each cell in turn; else one cell is measured after another.

--plot draws decode throughput over the fraction, with what the planner predicts
and a vertical line at each tier's saturation point: the fraction from which on
copies take longer than computing. --plot-gains draws what peers give over the host
at a half, beside that of other sweeps (--compare).`,
		Example: `  moeserve bench sweep --plot sweep.svg --plot sweep.png
  moeserve bench sweep --model mixtral-8x7b --load-format dummy --num-prompts 3240 --fractions 0,0.5,1 --resume sweep.jsonl --json sweep.json`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			set, err := readSettings(cmd.Flags(), os.Environ())
			if err != nil {
				return err
			}
			return benchSweep(cmd.Context(), s, set, &o)
		},
	}
	addSettings(cmd.Flags(), configs.For("bench sweep"))
	f := cmd.Flags()
	f.StringVar(&o.fractions, "fractions", "0,0.25,0.5,0.75,1", "offload fractions, a `LIST` with commas")
	f.StringVar(&o.tiers, "tiers", "host,peer", "tiers that offloaded experts are fetched from, a `LIST` with commas")
	f.StringVar(&o.resume, "resume", "", "`FILE` to which each finished cell is appended; cells that it has are not measured again")
	f.StringVar(&o.csv, "csv", "", "write the results to a CSV `FILE`, too")
	f.StringArrayVar(&o.plots, "plot", nil, "draw throughput over the fraction to a `FILE.svg|png`; may be given again")
	f.StringArrayVar(&o.gainsPlots, "plot-gains", nil, "draw the gain of peers over the host at a half to a `FILE.svg|png`; may be given again")
	f.StringArrayVar(&o.compare, "compare", nil, "JSON `FILE` of another sweep, whose gains are drawn, too; may be given again")
	return cmd
}

func benchSweep(ctx context.Context, s *streams, set *settings, o *sweepOptions) (err error) {
	fractions, err := eval.ParseFractions(o.fractions)
	if err != nil {
		return usagef("--fractions: %w", err)
	}
	tiers, err := eval.ParseTiers(o.tiers)
	if err != nil {
		return usagef("--tiers: %w", err)
	}
	files, err := o.files()
	if err != nil {
		return err
	}
	others, err := readOthers(o.compare)
	if err != nil {
		return err
	}
	res, err := openResult(set.Output.JSON, s.out)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, res.close()) }()
	config := sweepConfig(set) // before the settings are made to fit
	b, err := newBenchmark(s, set)
	if err != nil {
		return err
	}
	config["sha256 of the prompts"] = fmt.Sprintf("%x", eval.Digest(b.options.Prompts))
	sweep := eval.SweepOptions{Options: b.options, Cells: eval.Cells(fractions, tiers), Open: b.open}
	if o.resume == "" {
		if sweep.Shared, err = b.together(len(sweep.Cells)); err != nil {
			return err
		}
	} else {
		j, err := eval.OpenJournal(o.resume, config)
		if err != nil {
			return usagef("--resume: %w", err)
		}
		defer j.Close() //nolint:errcheck // each line has been synced
		sweep.Done, sweep.Finished = j.Results, j.Append
	}
	// Of a large model some cells do not fit.
	var leftOut strings.Builder
	sweep.LeaveOut = func(c eval.Cell, err error) bool {
		if !errors.Is(err, fault.ErrConfig) {
			return false
		}
		fmt.Fprintf(&leftOut, "left out: %v %% offloaded to %s: %v\n", 100*c.Fraction, c.Tier, err)
		return true
	}
	results, err := eval.Sweep(ctx, sweep)
	if err != nil {
		return benchError(err)
	}
	if _, err := io.WriteString(s.err, leftOut.String()); err != nil {
		return err
	}
	if !res.onStdout() {
		if err := eval.WriteTable(s.out, results); err != nil {
			return err
		}
	}
	for _, f := range files {
		if err := writeFile(f.path, func(w io.Writer) error { return f.write(w, results, others) }); err != nil {
			return benchError(err)
		}
	}
	return res.write(results)
}

// sweepFile is a file that a sweep ends with.
type sweepFile struct {
	path  string
	write func(w io.Writer, results, others []eval.Result) error
}

// files lists them, and checks that they can be written.
func (o *sweepOptions) files() ([]sweepFile, error) {
	var files []sweepFile
	for _, path := range o.plots {
		format, err := plotFormat("--plot", path)
		if err != nil {
			return nil, err
		}
		files = append(files, sweepFile{path, func(w io.Writer, results, _ []eval.Result) error {
			return eval.PlotSweep(w, format, results)
		}})
	}
	for _, path := range o.gainsPlots {
		format, err := plotFormat("--plot-gains", path)
		if err != nil {
			return nil, err
		}
		files = append(files, sweepFile{path, func(w io.Writer, results, others []eval.Result) error {
			return eval.PlotGains(w, format, slices.Concat(results, others))
		}})
	}
	if o.csv != "" {
		if err := writable("--csv", o.csv); err != nil {
			return nil, err
		}
		files = append(files, sweepFile{o.csv, func(w io.Writer, results, _ []eval.Result) error {
			return eval.WriteCSV(w, results)
		}})
	}
	return files, nil
}

// readOthers reads the results of other sweeps.
func readOthers(paths []string) ([]eval.Result, error) {
	var all []eval.Result
	for _, path := range paths {
		data, err := os.ReadFile(path)
		if err != nil {
			return nil, usagef("--compare: %w", err)
		}
		results, err := eval.ReadResults(data, path)
		if err != nil {
			return nil, usagef("--compare: %w", err)
		}
		all = append(all, results...)
	}
	return all, nil
}

// sweepConfig is what the results of a sweep depend on: every setting of bench sweep
// but where its result and its messages go.
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

// together says whether the nodes of so many cells can be kept open at once: emulated
// ones whose models take little of the memory that there is.
func (b *benchmark) together(cells int) (bool, error) {
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
