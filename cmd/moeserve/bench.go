package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/eval"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/node/bench"
	"github.com/moeserve/moeserve/node/checkpoint"
	"github.com/moeserve/moeserve/node/fault"
	"github.com/moeserve/moeserve/node/planning"
	"github.com/moeserve/moeserve/planner"
)

func newBench(s *streams) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "bench",
		Short: "Measure throughput, a server under load, copies, and scheduling",
		Args:  commandName,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newBenchThroughput(s), newBenchSweep(s), newBenchFigure(s), newBenchHarvest(s), newBenchServe(s), newBenchTransfer(s), newBenchMultipath(s), newBenchKV(s), newBenchKernels(s), newBenchPredict(s), newBenchPrefix(s), newBenchFairness(s), newBenchSleep(s))
	return cmd
}

func newBenchThroughput(s *streams) *cobra.Command {
	var csv string
	cmd := &cobra.Command{
		Use:   "throughput [MODEL]",
		Short: "Measure the throughput of one configuration",
		Long: `Measure the throughput of one configuration: all requests run as one batch, first
prefill and then decode, one token of each per step.

Without --dataset-path, the prompts are random tokens whose lengths are distributed
as MT-Bench's: a log-normal distribution from 9 to 418 tokens with a mean of 77.
Prompts that do not fit the model's context with --output-len are truncated, and
end-of-sequence tokens are ignored. With --offload-tier auto, offloaded experts are
fetched from peers where these hold all of them, and from the host otherwise.

Where the rates of the hardware are known (--hardware, a profile of the GPU's name,
or emulated devices with a virtual clock or pace), their roofline and what the
planner predicts stand beside the measurement.

Ctrl-C ends the measurement with the trials that are done.`,
		Example: `  moeserve bench throughput --offload-fraction 50% --offload-tier host
  moeserve bench throughput mixtral-8x7b --load-format dummy --num-prompts 324 \
      --dataset-path question.jsonl --json out.json`,
		Args:              oneModel,
		ValidArgsFunction: completeModelArgument,
		RunE: func(cmd *cobra.Command, args []string) error {
			set, err := modelSettings(cmd, args)
			if err != nil {
				return err
			}
			return benchThroughput(cmd.Context(), s, set, csv)
		},
	}
	addSettings(cmd.Flags(), configs.For("bench throughput"))
	addCSV(cmd, &csv)
	return cmd
}

// addCSV adds the flag --csv.
func addCSV(cmd *cobra.Command, path *string) {
	cmd.Flags().StringVar(path, "csv", "", "write the results to a CSV `FILE` too; -: to standard output")
}

func benchThroughput(ctx context.Context, s *streams, set *settings, csv string) (err error) {
	if err := cmp.Or(s.inPlace("--trace", set.Output.Trace), s.output("--csv", csv)); err != nil {
		return err
	}
	res, err := s.openResult(set.Output.JSON)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, res.close()) }()
	b, err := newBenchmark(s, set)
	if err != nil {
		return err
	}
	if err := b.applyPolicy(); err != nil {
		return err
	}
	cell := eval.Cell{Tier: set.Offload.Tier, Fraction: set.Offload.Fraction}
	n, err := b.openAuto(ctx, &cell)
	if err != nil {
		return err
	}
	p := b.follow()
	r, err := eval.Throughput(ctx, n, cell, b.options)
	p.end()
	if err = errors.Join(err, n.Close()); err != nil && len(r.Trials) == 0 {
		return benchError(err)
	}
	if err != nil {
		s.notice(&set.Output, "%d of %d trials are done", len(r.Trials), b.options.Trials)
	}
	results := []eval.Result{r}
	var files []outputFile
	if csv != "" {
		files = append(files, outputFile{"--csv", csv, func(w io.Writer) error { return eval.WriteCSV(w, results) }})
	}
	written := writeAll(s, res, r, files, func(w io.Writer) error { return eval.WriteTable(w, results) })
	return errors.Join(written, err)
}

// follow shows the progress of a measurement, which the caller ends.
func (b *benchmark) follow() *progress {
	p := b.s.progress(&b.set.Output, false)
	p.begin("warm-up", "steps")
	b.options.Progress = func(at eval.Progress) {
		p.set(cellWords(at.Cell, at.Number, at.Cells), int64(at.Done), int64(at.Total))
	}
	return p
}

// cellWords name a cell of a sweep in progress.
func cellWords(c eval.Cell, number, cells int) string {
	what := "nothing offloaded"
	if c.Tier != configs.NoTier {
		what = fmt.Sprintf("%v %% offloaded, %s", 100*c.Fraction, c.Line())
	}
	if cells > 1 {
		return fmt.Sprintf("cell %d of %d: %s", number, cells, what)
	}
	return what
}

// thisRun describes this execution, for results.
func thisRun(s *streams) eval.Run {
	b := buildInfo()
	return eval.Run{Version: b.Version, Commit: b.Revision, Modified: b.Modified, Date: s.clock()().UTC().Truncate(time.Second), Command: commandLine(s.args)}
}

// commandLine is a command line as a shell would read it, without secrets.
func commandLine(args []string) string {
	b := []string{"moeserve"}
	for _, a := range args {
		b = append(b, shellQuote(eval.HideCredentials(a)))
	}
	return strings.Join(b, " ")
}

// applyPolicy puts the policy, where there is one, into the settings. The batch and its KV
// blocks are the benchmark's.
func (b *benchmark) applyPolicy() error {
	set := b.set
	if set.Plan.Policy == configs.NoPolicy {
		return nil
	}
	tokens := 0
	for _, p := range b.options.Prompts {
		tokens += len(p)
	}
	requests := len(b.options.Prompts)
	in, err := node.Inspect(node.Options{
		Settings: set.Settings, Log: set.logger(b.s.err),
		Explicit: func(key string) bool {
			return set.given(key) || slices.Contains([]string{"max-num-seqs", "num-gpu-blocks-override", "max-model-len"}, key)
		},
		Workload: planner.Workload{PromptTokens: (tokens + requests - 1) / requests, NewTokens: b.options.NewTokens, Requests: requests},
	})
	if err != nil {
		return err
	}
	set.Settings = in.Settings
	set.Plan.Policy = configs.NoPolicy // it is applied
	return nil
}

// benchError makes errors in the user's input usage errors.
func benchError(err error) error {
	if errors.Is(err, eval.ErrInput) {
		return &usageError{err}
	}
	return err
}

// benchmark is what measurements of a model share.
type benchmark struct {
	s        *streams
	set      *settings
	options  eval.Options
	hardware *planner.Hardware // that the user named
	opened   bool              // a node, so that it warns of what the next would warn of, too
	sweep    bool              // cells without AllPaths use one path from the host
}

// newBenchmark reads the prompts, and sizes the settings for them as one batch.
func newBenchmark(s *streams, set *settings) (*benchmark, error) {
	b := &benchmark{s: s, set: set}
	var err error
	if b.hardware, err = readHardware(set.Plan.Hardware); err != nil {
		return nil, err
	}
	if set.Batch.MicroBatchSize > set.Bench.NumPrompts {
		return nil, usagef("--micro-batch-size is %d and the batch has %d requests: must be at most that", set.Batch.MicroBatchSize, set.Bench.NumPrompts)
	}
	m, err := checkpoint.Open(set.Model, set.Generate.Seed)
	if err != nil {
		return nil, err
	}
	defer m.Close() //nolint:errcheck // only read from
	room := m.Config.MaxPositions - set.Bench.OutputLen
	if room < 1 {
		return nil, usagef("--output-len is %d and the model has %d positions: must be below that", set.Bench.OutputLen, m.Config.MaxPositions)
	}
	prompts := eval.GeneratePrompts(set.Bench.NumPrompts, min(set.Bench.InputLen, m.Config.MaxPositions), m.Config.Vocab, set.Generate.Seed)
	if set.Bench.DatasetPath != "" {
		if prompts, err = readPrompts(set.Bench.DatasetPath, m); err != nil {
			return nil, err
		}
	}
	o := &b.options
	o.Run = thisRun(s)
	onCPU, err := set.Batch.ParseCPUExperts()
	if err != nil {
		return nil, err
	}
	o.TokensMayDiffer = onCPU.Timed()
	o.Prompts, o.Cut = eval.Repeat(prompts, set.Bench.NumPrompts, room)
	if o.Cut > 0 && (set.Bench.InputLen > 0 || set.Bench.DatasetPath != "") { // some random lengths are always cut
		log := set.logger(s.err)
		log.Warn("prompts are longer than the model's context allows beside --output-len, and are cut", "prompts", o.Cut, "cut_to_tokens", room)
	}
	o.NewTokens, o.Warmup, o.Trials, o.Prefills = set.Bench.OutputLen, set.Bench.WarmupTokens, set.Bench.Trials, set.Bench.PrefillTrials
	if o.Warmup == 0 {
		o.Warmup = -1
	}
	set.Batch.MaxNumSeqs = set.Bench.NumPrompts
	set.Batch.MaxNumBatchedTokens = max(set.Batch.MaxNumBatchedTokens, set.Bench.NumPrompts)
	set.KV.NumGPUBlocksOverride, set.KV.MaxModelLen = eval.Room(o.Prompts, o.NewTokens, set.KV.BlockSize)
	return b, nil
}

// readPrompts reads a file of prompts and turns them into ids.
func readPrompts(path string, m *checkpoint.Model) ([][]int32, error) {
	texts, err := readTexts(path)
	if err != nil {
		return nil, err
	}
	encode, err := m.Encoder()
	if err != nil {
		return nil, err
	}
	prompts := make([][]int32, len(texts))
	for i, text := range texts {
		if prompts[i], err = encode(text); err != nil {
			return nil, err
		}
	}
	return prompts, nil
}

// readHardware finds the hardware that the user names; nil where none is named.
func readHardware(name string) (*planner.Hardware, error) {
	if name == "" {
		return nil, nil
	}
	h, err := planning.LoadHardware(name)
	if err != nil {
		return nil, usagef("--hardware: %w", err)
	}
	return &h, nil
}

// open opens the node of a cell.
func (b *benchmark) open(ctx context.Context, c eval.Cell) (eval.Node, error) {
	set := b.set.Settings
	set.Offload.Fraction, set.Offload.Tier = c.Fraction, c.Tier
	if b.sweep && c.Tier == configs.HostTier && !c.AllPaths {
		set.Device.HostPaths = "1"
	}
	if c.Tier == configs.NoTier {
		set.Offload.Tier = configs.HostTier
	}
	n, err := open(ctx, b.s, b.nodeOptions(set), false)
	if err != nil {
		return nil, err
	}
	return bench.New(n, b.hardware), nil
}

// nodeOptions are those of the next node.
func (b *benchmark) nodeOptions(set configs.Settings) node.Options {
	o := node.Options{Settings: set, RuntimeDir: runtimeDir(set.Harvest.RuntimeDir), Log: b.set.logger(b.s.err), WithoutTokenizer: true, ExpectCPU: set.Model.Name == "" || b.opened}
	b.opened = true
	return o
}

// openAuto opens the node of a cell whose tier may be auto: then it is peer where the
// peers hold all that is offloaded, and else host.
func (b *benchmark) openAuto(ctx context.Context, c *eval.Cell) (eval.Node, error) {
	switch {
	case c.Fraction == 0:
		c.Tier = configs.NoTier
	case c.Tier == configs.AnyTier:
		c.Tier = configs.PeerTier
		n, err := b.open(ctx, *c)
		if !errors.Is(err, fault.ErrConfig) {
			return n, err
		}
		c.Tier = configs.HostTier
	}
	return b.open(ctx, *c)
}

// outputFile is a file that a benchmark writes at its end.
type outputFile struct {
	flag, path string
	write      func(io.Writer) error
}

// create writes the file.
func (f *outputFile) create(s *streams) error {
	write := func() error { return writeFile(f.path, f.write) }
	if f.path == stdoutName {
		write = func() error { return f.write(s.out) }
	}
	if err := write(); err != nil {
		return fmt.Errorf("%s %w", f.flag, err)
	}
	return nil
}

// writeAll writes what was measured: files, then JSON, and the table last, as nobody may read
// standard output any more. What fails keeps nothing else from being written.
func writeAll(s *streams, res *result, v any, files []outputFile, table func(io.Writer) error) error {
	var errs []error
	for _, f := range files {
		errs = append(errs, benchError(f.create(s)))
	}
	errs = append(errs, res.write(v))
	if !res.onStdout() && !slices.ContainsFunc(files, func(f outputFile) bool { return f.path == stdoutName }) {
		errs = append(errs, table(s.out))
	}
	return errors.Join(errs...)
}

// plotFormat is the format of a file by its name.
func (s *streams) plotFormat(flag, path string) (string, error) {
	format := strings.TrimPrefix(strings.ToLower(filepath.Ext(path)), ".")
	if !slices.Contains(eval.PlotFormats, format) {
		return "", usagef("%s %s: must be a file that ends in .%s", flag, path, strings.Join(eval.PlotFormats, " or ."))
	}
	return format, s.output(flag, path)
}
