package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/eval"
	"github.com/moeserve/moeserve/eval/kv"
	"github.com/moeserve/moeserve/node/planning"
	"github.com/moeserve/moeserve/planner"
)

// maxKVTokens bounds entries of a load and tokens of a block: bytes of both do not overflow.
const maxKVTokens = 1 << 24

// maxCopyBlocks bounds the blocks of a copy and the kernel's thread blocks.
const maxCopyBlocks = 1 << 20

// kvOptions are the flags of bench kv alone.
type kvOptions struct {
	// Of loads.
	models, entries []string
	blockTokens     int
	directory       string // of files; empty: they are not measured
	// Of copies by block size, which are measured where method is set.
	method                           string
	sizes                            []string
	blocks, threadBlocks, largestMiB int
	calibrate                        string

	repetitions int
	csv         string
	plots       []string
}

func newBenchKV(s *streams) *cobra.Command {
	var o kvOptions
	cmd := &cobra.Command{
		Use:   "kv",
		Short: "Measure reloads of KV blocks from host memory, peers and files",
		Long: `Measure how long the GPU that computes takes to load KV entries, those of a prefix
that was computed before, from pinned host memory and from a peer: one request to the
transfer engine with blocks of --block-size tokens, scattered in both memories, and
the same as one contiguous run (the Harvest paper's Figure 7).

--models names models by whose entries loads are sized: those of the paper
(deepseek-v3, kimi-k2, mistral-large-3) and the presets. Models with entries of one
size share a measurement. Nothing of a model is loaded.

Beside the time of one load, as the host and as the device sees it, stand the rate of
several that are queued, and the raw rate: that of the same copies on a stream of the
device, queued one by one or batched, whichever is faster. A second table says where
the time of one load goes. Host and peer take turns, so that what disturbs the machine
disturbs both.

With --file-directory loads from files in that directory are measured, too, as a server
with a tier in files has them. Before each the system is asked to drop the files from
its page cache, and the table says whether it did; another load follows at once, from
the page cache. Raw is the rate of the same files read without the engine, by as many
threads. The directory needs room for the blocks of the largest loads.
The files are removed at the end.

With --hardware of a file of --calibrate, on GPUs, the engine has the kernel copy blocks
that are small enough, as a server does.

--copy-method measures copies of scattered blocks by block size in place of loads, from
and to host and peer, in one direction and in both at once: dma makes a copy of the
device for each block, batch hands all of them to the driver in one call, kernel
launches a kernel that copies all of them; both compares dma and kernel, all compares
the three. --calibrate writes the block sizes below which the kernel is faster, and its
--copy-thread-blocks, as hardware for --hardware: a server that is given it has the kernel
copy KV blocks that are smaller. Measure with all, as servers copy batches; several runs with
other thread blocks add up. All else comes from --hardware, or from the devices where it
is known.

Ctrl-C ends the measurement with the points that are done.`,
		Example: `  moeserve bench kv --device cuda --peers 1 --plot reload.svg
  moeserve bench kv --models kimi-k2,mixtral-8x7b --entries 100,8000 \
      --emulate virtual,nodata,pcie=55.3GB/s,nvlink=395GB/s,latency=8us
  moeserve bench kv --models mixtral-8x7b --file-directory /var/tmp
  moeserve bench kv --device cuda --peers 1 --copy-method all --plot copies.svg`,
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
	f.StringSliceVar(&o.models, "models", nil, "comma-separated `NAMES` of models that loads are sized by; default: all")
	f.StringSliceVar(&o.entries, "entries", defaultEntries(), "comma-separated `NUMBERS` of tokens of a load")
	f.IntVar(&o.blockTokens, "block-size", 16, "`TOKENS` of a KV block")
	f.Var((*pathValue)(&o.directory), "file-directory", "measure loads from files in this `DIR`, too")
	f.StringVar(&o.method, "copy-method", "", "measure copies by block size: `dma|batch|kernel|both|all`")
	f.StringSliceVar(&o.sizes, "copy-sizes", nil, "comma-separated `SIZES` of blocks, as 64KiB; default: 4KiB to 16MiB")
	f.IntVar(&o.blocks, "copy-blocks", 1000, "`NUMBER` of blocks")
	f.IntVar(&o.largestMiB, "copy-largest-mib", 4096, "maximum size of a copy, in `MiB`")
	f.IntVar(&o.threadBlocks, "copy-thread-blocks", 0, "`NUMBER` of the kernel's thread blocks; 0: one per multiprocessor")
	f.Var((*pathValue)(&o.calibrate), "calibrate", "write which --copy-method is faster to a JSON file of hardware")
	f.IntVar(&o.repetitions, "repetitions", 10, "`NUMBER` of measurements whose median counts")
	addCSV(cmd, &o.csv)
	f.Var((*pathList)(&o.plots), "plot", "draw the measurement to a .svg or .png; repeatable")
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

// defaultEntries are kv.DefaultCounts as the flag has them.
func defaultEntries() []string {
	var texts []string
	for _, n := range kv.DefaultCounts() {
		texts = append(texts, strconv.Itoa(n))
	}
	return texts
}

// loads reads the flags of loads.
func (o *kvOptions) loads() (kv.ReloadOptions, error) {
	var models []configs.KVEntry
	for _, name := range o.models {
		i := slices.Index(kvModels(), name)
		if i < 0 {
			return kv.ReloadOptions{}, usagef("--models %s: no such model%s; known are %s", name, configs.DidYouMean(name, kvModels()), strings.Join(kvModels(), ", "))
		}
		models = append(models, configs.KVEntries()[i])
	}
	if len(models) == 0 {
		models = configs.KVEntries()
	}
	var counts []int
	for _, text := range o.entries {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 || n > maxKVTokens {
			return kv.ReloadOptions{}, usagef("--entries has %q: must be a whole number from 1 to %d", text, maxKVTokens)
		}
		counts = append(counts, n)
	}
	if len(counts) == 0 {
		return kv.ReloadOptions{}, usagef("--entries has no number: name how many entries a load has, such as 100,8000")
	}
	if o.blockTokens < 1 || o.blockTokens > maxKVTokens {
		return kv.ReloadOptions{}, usagef("--block-size is %d: must be from 1 to %d", o.blockTokens, maxKVTokens)
	}
	return kv.ReloadOptions{
		Entries: kv.Entries(models), Counts: counts, BlockTokens: o.blockTokens, Repetitions: o.repetitions, Directory: o.directory,
	}, nil
}

// copies reads the flags of copies by block size.
func (o *kvOptions) copies() (c kv.CopyOptions, err error) {
	methods := map[string][]kv.Method{
		"dma": {kv.DMA}, "batch": {kv.Batch}, "kernel": {kv.Kernel}, "both": {kv.DMA, kv.Kernel}, "all": {kv.DMA, kv.Batch, kv.Kernel},
	}[o.method]
	if methods == nil && o.method != "" {
		return c, usagef("--copy-method %s: must be dma, batch, kernel, both or all", o.method)
	}
	if o.method != "" && o.directory != "" {
		return c, usagef("--file-directory is of loads, and --copy-method measures copies; leave one of them out")
	}
	if o.calibrate != "" && o.method != "both" && o.method != "all" {
		return c, usagef("--calibrate needs --copy-method both or all: it writes from which block size on dma is as fast as kernel")
	}
	if o.largestMiB < 1 || o.largestMiB > maxMiB {
		return c, usagef("--copy-largest-mib is %d: must be from 1 to %d", o.largestMiB, maxMiB)
	}
	largest := int64(o.largestMiB) << 20
	sizes := kv.DefaultBlockSizes()
	if len(o.sizes) > 0 {
		sizes = nil
	}
	for _, text := range o.sizes {
		n, err := configs.ParseBytes(text)
		if err != nil {
			return c, usagef("--copy-sizes: %w", err)
		}
		if n < 16 || n%16 != 0 {
			return c, usagef("--copy-sizes %s: must be a multiple of 16 bytes", text)
		}
		sizes = append(sizes, n)
	}
	if most := slices.Max(sizes); most > largest {
		return c, usagef("--copy-largest-mib is %d, which has no room for a block of %s", o.largestMiB, eval.Size(most))
	}
	for flag, n := range map[string]int{"--copy-blocks": o.blocks, "--copy-thread-blocks": o.threadBlocks + 1} {
		if n < 1 || n > maxCopyBlocks {
			return c, usagef("%s is out of range: must be at most %d, and --copy-blocks at least 1", flag, maxCopyBlocks)
		}
	}
	return kv.CopyOptions{Methods: methods, Sizes: sizes, Blocks: o.blocks, MaxBytes: largest, ThreadBlocks: o.threadBlocks, Repetitions: o.repetitions}, nil
}

// outputs checks the files that are written, and returns the formats of plots.
func (o *kvOptions) outputs(s *streams) ([]string, error) {
	formats := make([]string, len(o.plots))
	for i, path := range o.plots {
		var err error
		if formats[i], err = s.plotFormat("--plot", path); err != nil {
			return nil, err
		}
	}
	return formats, cmp.Or(s.output("--calibrate", o.calibrate), s.output("--csv", o.csv))
}

func benchKV(ctx context.Context, s *streams, set *settings, o *kvOptions) (err error) {
	base, err := readHardware(set.Plan.Hardware)
	if err != nil {
		return err
	}
	if o.repetitions < 1 {
		return usagef("--repetitions is %d: must be at least 1", o.repetitions)
	}
	loads, err := o.loads()
	if err != nil {
		return err
	}
	copies, err := o.copies()
	if err != nil {
		return err
	}
	formats, err := o.outputs(s)
	if err != nil {
		return err
	}
	res, err := s.openResult(set.Output.JSON)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, res.close()) }()
	d, err := openCopied(s, set, base)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	if o.calibrate != "" && !d.Real() {
		return usagef("--calibrate needs GPUs (--device cuda): emulated devices do not model a kernel's copies over links")
	}
	named := base
	if base, err = d.calibrationBase(base, o.calibrate); err != nil {
		return err
	}
	p := s.progress(&set.Output, false)
	defer p.end()
	r := &kv.Result{Run: thisRun(s), Machine: d.machine}
	progress := func(what string) func(done, total int64) {
		p.begin(what, bytesUnit)
		return func(done, total int64) { p.set(what, done, total) }
	}
	var interrupted error
	points := 0
	if o.method == "" {
		loads.Machine, loads.Compute, loads.Peer = d.Machine, d.Space, d.peer
		if err := d.CheckFree(loads.Needs()); err != nil {
			return fmt.Errorf("loads of %d entries are too large; give fewer --entries, or --models with smaller ones: %w", slices.Max(loads.Counts), err)
		}
		loads.Progress, loads.Log = progress("loads"), set.logger(s.err)
		if named != nil && d.Real() { // emulated devices do not model a kernel's copies over links
			loads.Kernel = planning.CopyKernel(*named, d.Machine.Topology(), d.Backend, d.Space, d.peers())
		}
		r.Loads = &kv.Loads{BlockTokens: o.blockTokens, FileDirectory: o.directory, Entries: loads.Entries}
		r.Reloads, interrupted = kv.Reload(ctx, loads)
		points = len(r.Reloads)
	} else {
		copies.Machine, copies.Compute, copies.Peer, copies.Backend = d.Machine, d.Space, d.peer, d.Backend
		if err := d.CheckFree(copies.Needs()); err != nil {
			return fmt.Errorf("copies of %d MiB are too large; give a smaller --copy-largest-mib: %w", o.largestMiB, err)
		}
		copies.Progress = progress("copies")
		r.Sizes = &kv.Sizes{ThreadBlocks: o.threadBlocks}
		r.Copies, interrupted = kv.Copies(ctx, copies)
		if d.Real() {
			r.Crossovers = kv.Crossovers(r.Copies)
		}
		points = len(r.Copies)
	}
	p.end()
	if errors.Is(interrupted, kv.ErrDirectory) {
		return usagef("--file-directory: %w", interrupted)
	}
	if interrupted != nil && points == 0 {
		return benchError(interrupted)
	}
	if interrupted != nil {
		s.notice(&set.Output, "the points that were measured follow; no plot and no calibration")
		formats, o.plots, o.calibrate = nil, nil, ""
	}
	written := writeAll(s, res, r, o.files(r, formats, base), func(w io.Writer) error { return kv.WriteTable(w, r) })
	return errors.Join(written, interrupted)
}

// files are those that a measurement writes.
func (o *kvOptions) files(r *kv.Result, formats []string, base *planner.Hardware) []outputFile {
	var files []outputFile
	for i, path := range o.plots {
		files = append(files, outputFile{"--plot", path, func(w io.Writer) error { return kv.Plot(w, formats[i], r) }})
	}
	if o.csv != "" {
		files = append(files, outputFile{"--csv", o.csv, func(w io.Writer) error { return kv.WriteCSV(w, r) }})
	}
	if o.calibrate != "" {
		files = append(files, calibrated(o.calibrate, &r.Run, base, func(c eval.Calibration) (planner.Hardware, error) { return kv.Calibrate(r, c) }))
	}
	return files
}
