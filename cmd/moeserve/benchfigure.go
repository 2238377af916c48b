package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/tenants"
	"github.com/moeserve/moeserve/eval"
	"github.com/moeserve/moeserve/eval/paper"
	"github.com/moeserve/moeserve/node/fault"
	"github.com/moeserve/moeserve/untrusted"
)

// figureOptions are the flags of bench figure alone.
type figureOptions struct {
	from             []string
	plots, overTime  []string
	fractions        string
	resume           string
	machineMemory    string
	every, generated time.Duration
	machines         int
}

func newBenchFigure(s *streams) *cobra.Command {
	var o figureOptions
	cmd := &cobra.Command{
		Use:   "figure 2|3|5|6 [MODEL]...",
		Short: "Measure and draw a figure of the Harvest paper beside its numbers",
		Long: `Measure what a figure of the Harvest paper shows, and draw it beside the numbers that
the paper states:

  2  GPU memory in use, of recordings (--from) and of generated traces: its
     distribution (--plot), and over time (--plot-over-time)
  3  the time to fetch one expert of each model, host over peer
  5  the gain of peer over host memory with half of the experts offloaded
  6  decode throughput over the offload fraction

5 and 6 measure each MODEL as bench sweep does, with the paper's batch where no other
is given: 4,536 requests in micro-batches of 324. Cells that do not fit are skipped.

--from draws recorded results in place of measuring: of 3 the JSON of bench transfer
or bench figure 3, of 5 and 6 that of bench sweep or bench figure. Of 2 it is a
recording (time_s,peer,bytes) of machines with --machine-memory each, or a directory
with the tables of Alibaba's cluster-trace-gpu-v2020 (pai_machine_spec.csv,
pai_sensor_table.csv, pai_instance_table.csv). A figure has measured results or
predicted ones (emulated devices with a virtual clock), never both, and says which.`,
		Example: `  moeserve bench figure 2 --from cluster-trace-gpu-v2020/data --plot figure2.svg
  moeserve bench figure 6 mixtral-8x7b qwen1.5-moe-a2.7b --load-format dummy \
      --device cuda --peers 1 --resume figure6 --json figure6.json
  moeserve bench figure 6 --from figure6.json --plot figure6.png`,
		Args:              someArguments("the number of a figure: 2, 3, 5 or 6 of the Harvest paper"),
		ValidArgsFunction: completeModelArgument,
		RunE: func(cmd *cobra.Command, args []string) error {
			sets, err := eachModel(cmd, args[1:])
			if err != nil {
				return err
			}
			return benchFigure(cmd.Context(), s, sets, args[0], &o)
		},
	}
	addSettings(cmd.Flags(), configs.For("bench figure"))
	f := cmd.Flags()
	f.Var((*pathList)(&o.from), "from", "draw recorded results or, of 2, a recording or the tables in a directory; repeatable")
	f.Var((*pathList)(&o.plots), "plot", "draw the figure to a .svg or .png; repeatable")
	f.Var((*pathList)(&o.overTime), "plot-over-time", "of 2: draw the memory in use over time to a .svg or .png; repeatable")
	f.StringVar(&o.fractions, "fractions", "0,0.25,0.5,0.75,1", "of 6: comma-separated `LIST` of offload fractions")
	f.Var((*pathValue)(&o.resume), "resume", "of 5 and 6: keep finished cells in a file for each model, FILE.MODEL, and go on from these")
	f.StringVar(&o.machineMemory, "machine-memory", "80GB", "of 2: GPU memory of each machine of a recording, a `SIZE`")
	f.DurationVar(&o.every, "every", time.Hour, "of 2: `TIME` between two snapshots")
	f.DurationVar(&o.generated, "duration", 14*24*time.Hour, "of 2: `TIME` that the generator covers")
	f.IntVar(&o.machines, "machines", 100, "of 2: `NUMBER` of machines that the generator covers; 0: no generator")
	return cmd
}

// eachModel are the settings of each model of a list; of an empty one those without any.
func eachModel(cmd *cobra.Command, models []string) ([]*settings, error) {
	if len(models) == 0 {
		set, err := readSettings(cmd.Flags(), os.Environ())
		return []*settings{set}, err
	}
	if f := cmd.Flags().Lookup(modelFlag); f.Changed {
		return nil, usagef("--model %s beside %s; leave one of them out", f.Value, strings.Join(models, " "))
	}
	var all []*settings
	for _, model := range models {
		if err := cmd.Flags().Set(modelFlag, model); err != nil {
			return nil, err
		}
		set, err := readSettings(cmd.Flags(), os.Environ())
		if err != nil {
			return nil, err
		}
		all = append(all, set)
	}
	return all, nil
}

// benchFigure draws a figure. sets are the settings, with one model each.
func benchFigure(ctx context.Context, s *streams, sets []*settings, number string, o *figureOptions) (err error) {
	set := sets[0]
	formats := map[string]string{}
	for i, paths := range [][]string{o.plots, o.overTime} {
		for _, path := range paths {
			if formats[path], err = s.plotFormat([]string{"--plot", "--plot-over-time"}[i], path); err != nil {
				return err
			}
		}
	}
	if len(o.overTime) > 0 && number != "2" {
		return usagef("--plot-over-time is of figure 2, not of %s", number)
	}
	if number == "2" || number == "3" {
		if set.Model.Name != "" {
			return usagef("figure %s is of no MODEL: leave %s out", number, set.Model.Name)
		}
	}
	if number == "3" && len(o.from) > 1 {
		return usagef("figure 3 draws one measurement: give one --from")
	}
	draw := map[string]func() (figureFile, any, error){
		"2": func() (figureFile, any, error) { return o.figure2(s, set) },
		"3": func() (figureFile, any, error) { return o.figure3(ctx, s, set) },
		"5": func() (figureFile, any, error) { return o.experts(ctx, s, sets, []float64{0.5}, "5") },
		"6": func() (figureFile, any, error) {
			fractions, err := eval.ParseFractions(o.fractions)
			if err != nil {
				return figureFile{}, nil, usagef("--fractions: %w", err)
			}
			return o.experts(ctx, s, sets, fractions, "6")
		},
	}[number]
	if draw == nil {
		return usagef("figure %s: must be 2, 3, 5 or 6 of the Harvest paper", number)
	}
	res, err := s.openResult(set.Output.JSON)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, res.close()) }()
	f, v, failed := draw()
	if v == nil {
		return benchError(failed)
	}
	var files []outputFile
	for _, path := range o.plots {
		files = append(files, outputFile{"--plot", path, func(w io.Writer) error { return f.chart(w, formats[path]) }})
	}
	for _, path := range o.overTime {
		files = append(files, outputFile{"--plot-over-time", path, func(w io.Writer) error { return f.overTime(w, formats[path]) }})
	}
	written := writeAll(s, res, v, files, f.table)
	return errors.Join(written, benchError(failed))
}

// figureFile is how a figure is written: as a chart, of memory over time, and as a table.
type figureFile struct {
	chart, overTime func(w io.Writer, format string) error
	table           func(w io.Writer) error
}

// drawing writes a chart that may not have come about.
func drawing[C interface {
	Write(w io.Writer, format string) error
}](chart C, err error) func(w io.Writer, format string) error {
	return func(w io.Writer, format string) error {
		if err != nil {
			return err
		}
		return chart.Write(w, format)
	}
}

// memories is the result of figure 2.
type memories struct {
	Run    eval.Run        `json:"run"`
	Memory []*paper.Memory `json:"memory"`
}

// figure2 reads recordings, and generates a trace.
func (o *figureOptions) figure2(s *streams, set *settings) (figureFile, any, error) {
	capacity, err := configs.ParseBytes(o.machineMemory)
	if err != nil {
		return figureFile{}, nil, usagef("--machine-memory: %w", err)
	}
	if o.machines < 0 || o.machines > 10000 {
		return figureFile{}, nil, usagef("--machines is %d: must be from 0 to 10000", o.machines)
	}
	if o.every <= 0 || o.generated < o.every {
		return figureFile{}, nil, usagef("--every %v --duration %v: must be above 0, and the duration at least as long", o.every, o.generated)
	}
	r := &memories{Run: thisRun(s)}
	add := func(name string, t tenants.Trace, of map[device.Space]int64, until time.Duration) error {
		m, err := paper.ReadMemory(name, t, of, o.every, until)
		r.Memory = append(r.Memory, m)
		return err
	}
	for _, path := range o.from {
		if err := o.recorded(path, capacity, add); err != nil {
			return figureFile{}, nil, usagef("--from %s: %w", path, err)
		}
	}
	if o.machines > 0 {
		g := tenants.Options{Duration: o.generated, Churn: 1.0 / 60, Seed: set.Generate.Seed}
		of := map[device.Space]int64{}
		for i := range o.machines {
			g.Peers, g.Capacity, of[device.HBM(i)] = append(g.Peers, device.HBM(i)), append(g.Capacity, capacity), capacity
		}
		t, err := tenants.Generate(g)
		if err == nil {
			err = add(fmt.Sprintf("moeserve's generator, seed %d", set.Generate.Seed), t, of, o.generated)
		}
		if err != nil {
			return figureFile{}, nil, err
		}
	}
	table := func(w io.Writer) error {
		for _, m := range r.Memory {
			if _, err := fmt.Fprintf(w, "%s: %d snapshots of %d machines; at most 20 %% of the memory in use in %.1f %% of them, at most 50 %% in %.1f %%\n",
				m.Name, m.Snapshots, m.Machines, 100*m.AtMost20, 100*m.AtMost50); err != nil {
				return err
			}
		}
		_, err := fmt.Fprintln(w, "the Harvest paper, of Alibaba's gpu-v2020: about 68 % and 87 % of the machines")
		return err
	}
	return figureFile{chart: drawing(paper.Figure2(r.Memory)), overTime: drawing(paper.Figure2OverTime(r.Memory)), table: table}, r, nil
}

// recorded reads a recording, or the tables in a directory.
func (o *figureOptions) recorded(path string, capacity int64, add func(string, tenants.Trace, map[device.Space]int64, time.Duration) error) error {
	name := strings.TrimSuffix(filepath.Base(path), filepath.Ext(path))
	if info, err := os.Stat(path); err != nil || !info.IsDir() {
		f, err := untrusted.Open(path)
		if err != nil {
			return err
		}
		defer f.Close() //nolint:errcheck // only read from
		t, err := tenants.Read(f, nil, 0)
		if err != nil {
			return err
		}
		of := map[device.Space]int64{}
		for _, x := range t {
			of[x.Peer] = capacity
		}
		return add(name, t, of, t[len(t)-1].At)
	}
	var open [3]*os.File
	for i, table := range []string{"pai_machine_spec.csv", "pai_sensor_table.csv", "pai_instance_table.csv"} {
		f, err := untrusted.Open(filepath.Join(path, table))
		if err != nil {
			return err
		}
		defer f.Close() //nolint:errcheck // only read from
		open[i] = f
	}
	c, err := tenants.ReadAlibaba(tenants.Alibaba{Machines: open[0], Sensors: open[1], Instances: open[2]})
	if err != nil {
		return err
	}
	return add("Alibaba gpu-v2020", c.Trace, c.Capacity, c.Trace[len(c.Trace)-1].At)
}

// figure3 measures copies, or reads their results.
func (o *figureOptions) figure3(ctx context.Context, s *streams, set *settings) (figureFile, any, error) {
	var r *eval.TransferResult
	var err error
	if len(o.from) > 0 {
		var data []byte
		if data, err = untrusted.ReadFile(o.from[0], untrusted.MaxData); err == nil {
			r, err = eval.ReadTransferResult(data, o.from[0])
		}
		if err != nil {
			return figureFile{}, nil, usagef("--from: %w", err)
		}
	} else if r, err = measureFetches(ctx, s, set); err != nil {
		return figureFile{}, nil, err
	}
	chart, err := paper.Figure3(r)
	table := func(w io.Writer) error { return eval.WriteTransferTable(w, r) }
	return figureFile{chart: drawing(chart, err), table: table}, r, nil
}

// measureFetches measures copies of the sizes of experts.
func measureFetches(ctx context.Context, s *streams, set *settings) (r *eval.TransferResult, err error) {
	hardware, err := readHardware(set.Plan.Hardware)
	if err != nil {
		return nil, err
	}
	d, err := openCopied(s, set, hardware)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	if d.peer == device.Host {
		return nil, usagef("figure 3 compares host and peer, and there is no peer: name one with --peers")
	}
	_, sizes := eval.ExpertSizes()
	measure := eval.TransferOptions{Machine: d.Machine, Compute: d.Space, Peer: d.peer, Sizes: sizes}
	if err := d.CheckFree(measure.Needs()); err != nil {
		return nil, err
	}
	p := s.progress(&set.Output, false)
	defer p.end()
	p.begin("copies", bytesUnit)
	measure.Progress = func(done, total int64) { p.set("copies", done, total) }
	r = &eval.TransferResult{Run: thisRun(s), Machine: d.machine}
	r.Points, err = eval.Transfer(ctx, measure)
	return r, err
}

// resumeFile keeps the finished cells of a model.
func (o *figureOptions) resumeFile(set *settings) string {
	if o.resume == "" || set.Model.Name == "" {
		return o.resume
	}
	return o.resume + "." + filepath.Base(set.Model.Name)
}

// experts measures sweeps of models, or reads their results.
func (o *figureOptions) experts(ctx context.Context, s *streams, sets []*settings, fractions []float64, number string) (figureFile, any, error) {
	results, failed := readOthers("--from", o.from)
	if failed != nil {
		return figureFile{}, nil, failed
	}
	for _, set := range sets {
		if err := s.inPlace("--resume", o.resumeFile(set)); err != nil {
			return figureFile{}, nil, err
		}
	}
	var misfit error // of the first model that does not fit
	if len(o.from) == 0 {
		for _, set := range sets {
			if !set.given("num-prompts") {
				set.Bench.NumPrompts = paper.Sequences
			}
			if !set.given("micro-batch-size") {
				set.Batch.MicroBatchSize = min(paper.MicroBatch, set.Bench.NumPrompts)
			}
			set.Batch.MaxNumBatchedTokens = max(set.Batch.MaxNumBatchedTokens, set.Batch.MicroBatchSize)
			var of []eval.Result
			of, failed = measureCells(ctx, s, set, []variant{{"", set}}, fractions, []configs.Tier{configs.HostTier, configs.PeerTier}, o.resumeFile(set))
			results = append(results, of...)
			if len(of) == 0 && errors.Is(failed, fault.ErrConfig) && len(sets) > 1 {
				s.notice(&set.Output, "skipped: %s: %v", set.Model.Name, failed) // another model may fit
				misfit, failed = cmp.Or(misfit, failed), nil
				continue
			}
			if failed != nil {
				break
			}
		}
	}
	if len(results) == 0 {
		return figureFile{}, nil, cmp.Or(failed, misfit)
	}
	f := figureFile{table: func(w io.Writer) error {
		var errs []error
		for from := 0; from < len(results); {
			to := from + 1
			for to < len(results) && results[to].Model == results[from].Model {
				to++
			}
			errs = append(errs, eval.WriteTable(w, results[from:to]))
			from = to
		}
		return errors.Join(errs...)
	}}
	if number == "5" {
		f.chart = drawing(paper.Figure5(results))
	} else {
		f.chart = drawing(paper.Figure6(slices.Clone(results)))
	}
	return f, results, failed
}
