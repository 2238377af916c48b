package main

import (
	"context"
	"errors"
	"io"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/eval/sleep"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/node/bench"
)

// sleepOptions are the flags of bench sleep alone.
type sleepOptions struct {
	levels []int
	trials int
	asleep time.Duration
}

func newBenchSleep(s *streams) *cobra.Command {
	var o sleepOptions
	cmd := &cobra.Command{
		Use:   "sleep [MODEL]...",
		Short: "Measure how long models take to sleep, to wake and to switch",
		Long: `Measure how long a model takes to sleep and to wake at each level (POST /sleep of
serve), and what part of that are copies of weights. With several models on the same
devices it also measures switches from each to the next.

At level 1 weights go to pinned host memory, at level 2 they are loaded again by the
wake. Experts that are offloaded stay in host memory, and are not copied. The first
sleep is measured by itself: it allocates the host memory that later ones find. After
each wake the model's tokens are compared with those from before.`,
		Example: `  moeserve bench sleep --emulate virtual,hbm=256MiB,pcie=55.3MB/s
  moeserve bench sleep mixtral-8x7b qwen1.5-moe-a2.7b --load-format dummy \
      --device cuda --offload-fraction 0.5 --levels 1 --json sleep.json`,
		Args:              cobra.ArbitraryArgs,
		ValidArgsFunction: completeModelArgument,
		RunE: func(cmd *cobra.Command, args []string) error {
			set, err := servedSettings(cmd, args)
			if err != nil {
				return err
			}
			return benchSleep(cmd.Context(), s, set, &o)
		},
	}
	addSettings(cmd.Flags(), configs.For("bench sleep"))
	severalModels(cmd)
	f := cmd.Flags()
	f.IntSliceVar(&o.levels, "levels", []int{1, 2}, "comma-separated `LEVELS` of sleep: 1, 2")
	f.IntVar(&o.trials, "repetitions", 3, "`NUMBER` of repetitions; the median counts")
	f.DurationVar(&o.asleep, "asleep", 0, "`TIME` for which a model sleeps before it wakes")
	return cmd
}

func benchSleep(ctx context.Context, s *streams, set *settings, o *sleepOptions) (err error) {
	for i, level := range o.levels {
		if level != 1 && level != 2 || slices.Contains(o.levels[:i], level) {
			return usagef("--levels has %d: must be 1, 2 or both", level)
		}
	}
	if o.trials < 1 {
		return usagef("--repetitions is %d: must be at least 1", o.trials)
	}
	if o.asleep < 0 {
		return usagef("--asleep is %s: must not be negative", o.asleep)
	}
	hardware, err := readHardware(set.Plan.Hardware)
	if err != nil {
		return err
	}
	all, err := servedModels(set)
	if err != nil {
		return err
	}
	res, err := s.openResult(set.Output.JSON)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, res.close()) }()
	defer func() { err = errors.Join(err, closeModels(all)) }()
	if err := openModels(ctx, s, node.Options{Explicit: set.given, Log: set.logger(s.err), DeviceTime: true, ExpectCPU: set.Model.Name == ""}, all, nil); err != nil {
		return err
	}
	measure := sleep.Options{Levels: o.levels, Trials: o.trials, Asleep: o.asleep}
	for _, m := range all {
		measure.Models = append(measure.Models, bench.NewSleep(m.node, hardware))
	}
	p := s.progress(&set.Output, false)
	defer p.end()
	p.begin("sleeps", "measurements")
	measure.Progress = func(done, total int64) { p.set("sleeps", done, total) }
	r := &sleep.Result{Run: thisRun(s)}
	interrupted := sleep.Measure(ctx, measure, r)
	p.end()
	if interrupted != nil && len(r.Points) == 0 {
		return benchError(interrupted)
	}
	if interrupted != nil {
		s.notice(&set.Output, "the lines that were measured follow")
	}
	written := writeAll(s, res, r, nil, func(w io.Writer) error { return sleep.WriteTable(w, r) })
	return errors.Join(written, interrupted)
}
