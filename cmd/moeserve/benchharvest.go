package main

import (
	"context"
	"errors"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/eval/tenancy"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/node/bench"
)

// harvestOptions are the flags of bench harvest alone.
type harvestOptions struct {
	steps, tenant   string
	every, workTime time.Duration
	plots           []string
}

func newBenchHarvest(s *streams) *cobra.Command {
	var o harvestOptions
	cmd := &cobra.Command{
		Use:   "harvest [MODEL]",
		Short: "Measure throughput while another process uses a peer's memory",
		Long: `Measure decode throughput over time while a tenant, another user of the first peer,
takes memory there and returns it in steps, also more than is free: how soon it got
the memory, how soon the headroom was free again, and that tokens stay the same. Half
of the experts are offloaded where nothing else is said, and peers hold copies of them
all at the beginning.

--steps are what the tenant holds, one after the other: sizes (8GiB), shares of the
peer's memory (50%), or either behind free+: so much more than it holds and than is
free. On emulated devices the tenant is played. On GPUs --tenant starts it as a
process, which answers requests on its standard input (tools/cuda/tenant.py is one, with
PyTorch). Its own work, bf16 products and a loop over HBM, is then measured beside an
idle engine and beside one that decodes.

--plot draws throughput over time, and the peer's memory beneath it.`,
		Example: `  moeserve bench harvest --peers 1 --every 200ms --plot harvest.svg \
      --emulate virtual,pcie=55.3MB/s,nvlink=395MB/s,flops=78G,bw=3.9GB/s
  moeserve bench harvest mixtral-8x7b --load-format dummy --device cuda \
      --peers 1 --tenant 'CUDA_VISIBLE_DEVICES=1 python3 tools/cuda/tenant.py'`,
		Args:              oneModel,
		ValidArgsFunction: completeModelArgument,
		RunE: func(cmd *cobra.Command, args []string) error {
			set, err := modelSettings(cmd, args)
			if err != nil {
				return err
			}
			return benchHarvest(cmd.Context(), s, set, &o)
		},
	}
	addSettings(cmd.Flags(), configs.For("bench harvest"))
	f := cmd.Flags()
	f.StringVar(&o.steps, "steps", "25%,50%,free+5%,90%,50%,0", "comma-separated `LIST` of what the tenant holds: sizes, shares, either behind free+")
	f.DurationVar(&o.every, "every", 2*time.Second, "`TIME` between two steps of the tenant")
	f.StringVar(&o.tenant, "tenant", "", "`COMMAND` that starts the tenant, with a shell; empty: it is played, on emulated devices")
	f.DurationVar(&o.workTime, "work-time", 2*time.Second, "`TIME` for which each kind of the tenant's work is measured, three times alone and beside the engine")
	f.Var((*pathList)(&o.plots), "plot", "draw throughput and memory over time to a .svg or .png; repeatable")
	return cmd
}

func benchHarvest(ctx context.Context, s *streams, set *settings, o *harvestOptions) (err error) {
	steps, err := tenancy.ParseSteps(o.steps)
	if err != nil {
		return usagef("--steps: %w", err)
	}
	if o.every <= 0 || o.workTime <= 0 {
		return usagef("--every is %v and --work-time %v: must be above 0", o.every, o.workTime)
	}
	formats := make([]string, len(o.plots))
	for i, path := range o.plots {
		if formats[i], err = s.plotFormat("--plot", path); err != nil {
			return err
		}
	}
	res, err := s.openResult(set.Output.JSON)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, res.close()) }()
	if !set.given("offload-fraction") && set.Offload.ResidentExperts == "" {
		set.Offload.Fraction = 0.5
	}
	if set.Offload.Fraction == 0 && set.Offload.ResidentExperts == "" {
		return usagef("--offload-fraction is 0: bench harvest measures where offloaded experts are; must be above 0")
	}
	if set.Device.Peers == "none" {
		return usagef("--peers is none: bench harvest measures memory that is borrowed of a peer; name one")
	}
	if set.Offload.Tier == configs.AnyTier {
		set.Offload.Tier = configs.PeerTier
	}
	b, err := newBenchmark(s, set)
	if err != nil {
		return err
	}
	opts := b.nodeOptions(set.Settings)
	n, err := bench.OpenBorrower(opts, b.hardware, func(opts node.Options) (*node.Node, error) { return open(ctx, s, opts, false) })
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, n.Close()) }()
	t, err := o.openTenant(ctx, s, n)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, t.Close()) }()
	p := s.progress(&set.Output, false)
	defer p.end()
	p.begin("steps of the tenant", "steps")
	r := &tenancy.Result{Run: thisRun(s)}
	failed := tenancy.Measure(ctx, tenancy.Options{
		Node: n, Tenant: t, Prompts: b.options.Prompts, NewTokens: b.options.NewTokens, Steps: steps, Every: o.every, WorkTime: o.workTime,
		Progress: func(done, total int64) { p.set("steps of the tenant", done, total) },
	}, r)
	p.end()
	if failed != nil && len(r.Changes) == 0 {
		return benchError(failed)
	}
	var files []outputFile
	for i, path := range o.plots {
		files = append(files, outputFile{"--plot", path, func(w io.Writer) error { return tenancy.Plot(w, formats[i], r) }})
	}
	written := writeAll(s, res, r, files, func(w io.Writer) error { return tenancy.WriteTable(w, r) })
	return errors.Join(written, benchError(failed))
}

// openTenant starts the tenant, or plays one.
func (o *harvestOptions) openTenant(ctx context.Context, s *streams, n *bench.Borrower) (tenancy.Tenant, error) {
	if o.tenant != "" {
		return tenancy.StartProcess(ctx, o.tenant, s.err)
	}
	if i := n.Info(); !i.Emulated {
		return nil, usagef("on GPUs the tenant is a process of its own: name it with --tenant, as --tenant 'CUDA_VISIBLE_DEVICES=1 python3 tools/cuda/tenant.py'")
	} else if i.Unpaced() {
		return nil, usagef("emulated devices without rates copy as fast as this CPU does: give --emulate rates, with virtual or pace, as virtual,pcie=55.3MB/s,nvlink=395MB/s,flops=78G,bw=3.9GB/s")
	}
	return n.Tenant()
}
