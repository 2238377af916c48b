package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/eval"
	"github.com/moeserve/moeserve/eval/compute"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/node/bench"
	"github.com/moeserve/moeserve/planner"
)

// kernelOptions are the flags of bench kernels alone.
type kernelOptions struct {
	repetitions    int
	calibrate, csv string
}

func newBenchKernels(s *streams) *cobra.Command {
	var o kernelOptions
	cmd := &cobra.Command{
		Use:   "kernels",
		Short: "Measure what the engine reaches on the GPU, for predictions",
		Long: `Measure what the engine reaches on the GPU that computes, so that predictions need
not assume that kernels reach the hardware's rates: decode and prefill steps of a few
models of generic shapes, with random weights and all experts in the GPU's memory, from 1
to 4,096 sequences. None of them has the shape of a preset. From their times follow the
fixed costs of a step and of a layer, the seconds that a weight takes by the number of
rows (of projections, experts and the output layer), and those of attention.

--calibrate writes this as hardware for --hardware, beside all that is in --hardware now:
a file of bench transfer --calibrate, or a profile. The result says how well the fit
describes the steps that it was made of; bench predict shows how well it predicts others.

A GPU needs 40 GiB of free memory; the largest models have 3 GB of weights. Emulated
devices measure small models.`,
		Example: `  moeserve bench transfer --device cuda --calibrate here.json
  moeserve bench kernels --device cuda --hardware here.json \
      --calibrate here.json
  moeserve bench kernels --hardware h200 --calibrate here.json \
      --emulate virtual,nodata,flops=78G,bw=3.9GB/s`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			set, err := readSettings(cmd.Flags(), os.Environ())
			if err != nil {
				return err
			}
			return benchKernels(cmd.Context(), s, set, &o)
		},
	}
	addSettings(cmd.Flags(), configs.For("bench kernels"))
	f := cmd.Flags()
	f.IntVar(&o.repetitions, "repetitions", 10, "`NUMBER` of steps whose median counts, or more of those that take long")
	f.Var((*pathValue)(&o.calibrate), "calibrate", "write the measured hardware to a JSON file")
	addCSV(cmd, &o.csv)
	return cmd
}

func benchKernels(ctx context.Context, s *streams, set *settings, o *kernelOptions) (err error) {
	if o.repetitions < 1 {
		return usagef("--repetitions is %d: must be at least 1", o.repetitions)
	}
	named, err := readHardware(set.Plan.Hardware)
	if err != nil {
		return err
	}
	if err := cmp.Or(s.output("--calibrate", o.calibrate), s.output("--csv", o.csv)); err != nil {
		return err
	}
	res, err := s.openResult(set.Output.JSON)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, res.close()) }()
	d, err := openCopied(s, set, named)
	if err != nil {
		return err
	}
	machine, emulated := d.machine, !d.Real()
	base, err := d.calibrationBase(named, "")
	if base == nil && err == nil {
		err = usagef("bench kernels needs the rates and memory sizes of the hardware, and those of %s are not known; name similar hardware with --hardware", d.named())
	}
	err = errors.Join(err, d.Close())
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "moeserve-kernels-")
	if err != nil {
		return fmt.Errorf("a directory for the configurations of the models: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	measure := compute.Options{Cases: compute.DefaultCases(), Repetitions: o.repetitions}
	if emulated {
		measure.Cases = compute.Small(measure.Cases)
	}
	measure.Open = func(ctx context.Context, c *compute.Case) (eval.Node, error) {
		return openCase(ctx, s, set, dir, c)
	}
	p := s.progress(&set.Output, false)
	defer p.end()
	p.begin("steps", "measurements")
	measure.Progress = func(done, total int) { p.set("steps", int64(done), int64(total)) }
	r := &compute.Result{Run: thisRun(s), Machine: machine}
	var interrupted error
	r.Points, interrupted = compute.Measure(ctx, measure)
	p.end()
	if interrupted != nil {
		return benchError(interrupted)
	}
	if err := r.Fit(base); err != nil {
		return benchError(err)
	}
	var files []outputFile
	if o.csv != "" {
		files = append(files, outputFile{"--csv", o.csv, func(w io.Writer) error { return compute.WriteCSV(w, r) }})
	}
	if o.calibrate != "" {
		files = append(files, calibrated(o.calibrate, &r.Run, base, func(c eval.Calibration) (planner.Hardware, error) {
			return compute.Calibrate(r, c)
		}))
	}
	return writeAll(s, res, r, files, func(w io.Writer) error { return compute.WriteTable(w, r) })
}

// openCase opens a node of a case, whose configuration it writes into a directory.
func openCase(ctx context.Context, s *streams, set *settings, dir string, c *compute.Case) (eval.Node, error) {
	own := set.Settings
	own.Model.Name = filepath.Join(dir, c.Model.Name)
	data, err := compute.Config(&c.Model)
	if err == nil {
		err = os.MkdirAll(own.Model.Name, 0o700)
	}
	if err == nil {
		err = os.WriteFile(filepath.Join(own.Model.Name, "config.json"), data, 0o600)
	}
	if err != nil {
		return nil, err
	}
	sequences, tokens, length, all := c.Needs(own.KV.BlockSize)
	own.Model.LoadFormat, own.Offload.Fraction, own.Plan.Policy, own.Plan.Hardware = configs.LoadDummy, 0, configs.NoPolicy, ""
	own.Batch.MaxNumSeqs, own.Batch.MaxNumBatchedTokens, own.Device.Peers = sequences, max(tokens, sequences), "none"
	own.KV.NumGPUBlocksOverride, own.KV.MaxModelLen = all/own.KV.BlockSize, length
	n, err := open(ctx, s, node.Options{Settings: own, Log: set.logger(s.err), WithoutTokenizer: true, ExpectCPU: true}, false)
	if err != nil {
		return nil, err
	}
	return bench.New(n, nil), nil
}
