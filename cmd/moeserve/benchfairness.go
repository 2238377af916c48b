package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/eval/fairness"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/node/bench"
)

// fairnessOptions are the flags of bench fairness alone.
type fairnessOptions struct {
	long, longTokens, short, shortTokens, promptTokens int
	interval                                           time.Duration
	granularities                                      []int
	tiers                                              string
}

func newBenchFairness(s *streams) *cobra.Command {
	var o fairnessOptions
	cmd := &cobra.Command{
		Use:   "fairness [MODEL]",
		Short: "Measure scheduling policies where the KV cache is too small",
		Long: `Measure what first come, first served and fair scheduling (--scheduling-policy) give
each request: long requests come at the start, and short ones one after the other
while these run. Each policy and tier has an engine of its own.

Without --num-gpu-blocks-override, the KV cache has room for a third of the long
requests at their ends. With the tiers host and peer, KV blocks of preempted
sequences are stored there and loaded back; with none, those that the GPU has no room
for are computed again.

Prompts are random tokens, and end-of-sequence tokens are ignored. Ctrl-C ends the
measurement with the lines that are done.`,
		Example: `  moeserve bench fairness \
      --emulate virtual,pcie=55.3MB/s,nvlink=395MB/s,flops=78G,bw=3.9GB/s
  moeserve bench fairness mixtral-8x7b --load-format dummy --device cuda \
      --peers 1 --kv-tiers none,host,peer --json fairness.json`,
		Args:              oneModel,
		ValidArgsFunction: completeModelArgument,
		RunE: func(cmd *cobra.Command, args []string) error {
			set, err := modelSettings(cmd, args)
			if err != nil {
				return err
			}
			return benchFairness(cmd.Context(), s, set, &o)
		},
	}
	addSettings(cmd.Flags(), configs.For("bench fairness"))
	f := cmd.Flags()
	f.IntVar(&o.long, "long-requests", 16, "`NUMBER` of requests at the start")
	f.IntVar(&o.longTokens, "long-output-len", 192, "generated `TOKENS` of each of these")
	f.IntVar(&o.short, "short-requests", 32, "`NUMBER` of requests that come while these run")
	f.IntVar(&o.shortTokens, "short-output-len", 16, "generated `TOKENS` of each of these")
	f.IntVar(&o.promptTokens, "input-len", 32, "prompt `TOKENS` of each request")
	f.DurationVar(&o.interval, "interval", 25*time.Millisecond, "`TIME` between two short requests")
	f.IntSliceVar(&o.granularities, "fair-granularity", []int{8, 32, 128}, "comma-separated granularities of fair scheduling, in `TOKENS`")
	f.StringVar(&o.tiers, "kv-tiers", "none", "comma-separated `LIST` of where KV blocks of preempted sequences are kept: none, host, peer")
	return cmd
}

// read reads the flags.
func (o *fairnessOptions) read() (fairness.Options, error) {
	for flag, n := range map[string]int{
		"--long-requests": o.long, "--long-output-len": o.longTokens - 1, "--short-requests": o.short, "--short-output-len": o.shortTokens - 1, "--input-len": o.promptTokens,
	} {
		if n < 1 {
			return fairness.Options{}, usagef("%s: must be at least 1 request, and at least 2 generated tokens", flag)
		}
	}
	if o.interval < 0 {
		return fairness.Options{}, usagef("--interval is %v: must be at least 0", o.interval)
	}
	for _, g := range o.granularities {
		if g < 1 {
			return fairness.Options{}, usagef("--fair-granularity has %d: must be at least 1", g)
		}
	}
	tiers, err := fairness.ParseTiers(o.tiers)
	if err != nil {
		return fairness.Options{}, usagef("--kv-tiers: %w", err)
	}
	return fairness.Options{
		Lines: fairness.Lines(o.granularities, tiers), Long: o.long, LongTokens: o.longTokens, Short: o.short, ShortTokens: o.shortTokens,
		PromptTokens: o.promptTokens, Interval: o.interval,
	}, nil
}

func benchFairness(ctx context.Context, s *streams, set *settings, o *fairnessOptions) (err error) {
	hardware, err := readHardware(set.Plan.Hardware)
	if err != nil {
		return err
	}
	measure, err := o.read()
	if err != nil {
		return err
	}
	res, err := s.openResult(set.Output.JSON)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, res.close()) }()
	opened, log := false, set.logger(s.err)
	measure.Seed = set.Generate.Seed
	measure.Open = func(ctx context.Context, l fairness.Line) (fairness.Engine, error) {
		set, err := o.settings(set.Settings, l)
		if err != nil {
			return nil, err
		}
		opts := node.Options{Settings: set, Log: log, WithoutTokenizer: true, ExpectCPU: set.Model.Name == "" || opened}
		opened = true
		b, err := bench.OpenFairness(opts, hardware, func(o node.Options) (*node.Node, error) { return open(ctx, s, o, true) })
		if err != nil {
			return nil, err
		}
		return b, nil
	}
	p := s.progress(&set.Output, false)
	defer p.end()
	p.begin("policies", "policies")
	measure.Progress = func(done, total int64) { p.set("policies", done, total) }
	r := &fairness.Result{Run: thisRun(s)}
	interrupted := fairness.Measure(ctx, measure, r)
	p.end()
	if interrupted != nil && len(r.Points) == 0 {
		return benchError(interrupted)
	}
	if interrupted != nil {
		s.notice(&set.Output, "the lines that were measured follow")
	}
	written := writeAll(s, res, r, nil, func(w io.Writer) error { return fairness.WriteTable(w, r) })
	return errors.Join(written, interrupted)
}

// blocks is the number of KV blocks of a request with so many generated tokens.
func (o *fairnessOptions) blocks(newTokens, blockTokens int) int {
	return (o.promptTokens + newTokens + blockTokens - 1) / blockTokens
}

// settings are those of a line.
func (o *fairnessOptions) settings(set configs.Settings, l fairness.Line) (configs.Settings, error) {
	set.Batch.SchedulingPolicy = l.Policy
	if l.Granularity > 0 {
		set.Batch.FairGranularity = l.Granularity
	}
	set.KV.MaxModelLen = o.promptTokens + max(o.longTokens, o.shortTokens)
	long, short := o.blocks(o.longTokens, set.KV.BlockSize), o.blocks(o.shortTokens, set.KV.BlockSize)
	if set.KV.NumGPUBlocksOverride == 0 {
		set.KV.NumGPUBlocksOverride = max(o.long*long/3, long, short)
	}
	sizes := map[fairness.Tier]string{fairness.Host: "num_cpu_blocks", fairness.Peer: "num_gpu_blocks"}
	size, ok := sizes[l.Tier]
	if !ok {
		return set, nil
	}
	text, err := json.Marshal(map[string]any{"kv_connector_extra_config": map[string]int{size: o.long*long + o.short*short}})
	if err != nil {
		return set, fmt.Errorf("kv tier %s: %w", l.Tier, err)
	}
	set.KV.TransferConfig = string(text)
	return set, nil
}
