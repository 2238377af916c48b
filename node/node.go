package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/tenants"
	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/engine/scheduler"
	"github.com/moeserve/moeserve/engine/steptime"
	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/forward"
	"github.com/moeserve/moeserve/harvest"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/kvcache/events"
	"github.com/moeserve/moeserve/kvcache/offload"
	"github.com/moeserve/moeserve/models"
	"github.com/moeserve/moeserve/node/checkpoint"
	"github.com/moeserve/moeserve/node/devices"
	"github.com/moeserve/moeserve/node/fault"
	"github.com/moeserve/moeserve/node/observe"
	"github.com/moeserve/moeserve/node/planning"
	"github.com/moeserve/moeserve/node/sizing"
	"github.com/moeserve/moeserve/pipeline"
	"github.com/moeserve/moeserve/planner"
	"github.com/moeserve/moeserve/rebalancer"
	"github.com/moeserve/moeserve/rebalancer/lending"
	"github.com/moeserve/moeserve/transfer"
)

// Options of a node.
type Options struct {
	Settings configs.Settings
	// HostLogits allocates pinned memory for the logits of a step: see pipeline.Options.
	HostLogits bool
	// WithoutTokenizer skips the tokenizer, for checkpoints without one.
	WithoutTokenizer bool
	// Explicit reports whether a setting, by its key, is set explicitly; a policy does not
	// change those. Default: settings that differ from their defaults.
	Explicit func(key string) bool
	// Workload is the workload that a policy is planned for. Default:
	// planning.DefaultWorkload.
	Workload planner.Workload
	// Template is the intended use of the model's chat template; Open checks that it is
	// possible before anything is loaded.
	Template checkpoint.TemplateUse
	// ExpectCPU suppresses the warning that the CPU computes for lack of a GPU.
	ExpectCPU bool
	// Progress, if not nil, is called with bytes while weights are loaded.
	Progress func(done, total int64)
	// Log receives messages for operators. Default: none.
	Log *slog.Logger
	// CacheLayers is the size of the expert cache, in layers' offloaded experts. Default: 2,
	// so that the next layer's experts arrive while this layer's are read. 1 saves memory,
	// and every fetch waits.
	CacheLayers int
	// MaxQueued, RetryTimeout and Listener are the engine's: see engine.Options.
	MaxQueued    int
	RetryTimeout time.Duration
	Listener     engine.Listener
	// DeviceTime: requests' times are those of the devices' clock, which may be a virtual one,
	// since 1970. Default: of the wall clock.
	DeviceTime bool
	// Events, if not nil, receives events of borrowed memory and of experts. It is called
	// with locks held: it must return quickly, and not call the node.
	Events func(observe.Event)
	// RuntimeDir is the directory of the socket on which other processes may ask for borrowed
	// memory. Default: none.
	RuntimeDir string
	// Share has several nodes use one machine, each awake while the others sleep. Their settings
	// for devices are the same. Default: the node has the machine to itself.
	Share *devices.Shared
	// OpenMachine opens the devices in place of the settings; tests use it to select
	// schedules and to inject faults.
	OpenMachine func() (device.Machine, error)
	// OpenBackend opens the backend for OpenMachine's machine. Default: kernels/cpu.
	OpenBackend func(device.Machine) (kernels.Backend, error)
}

// EnsureDefaults returns o with its defaults filled in.
func (o Options) EnsureDefaults() Options {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Workload == (planner.Workload{}) {
		o.Workload = planning.DefaultWorkload
	}
	return o
}

// Validate reports the first invalid setting. Errors wrap fault.ErrConfig.
func (o *Options) Validate() error { return fault.Of(fault.ErrConfig, o.Settings.Validate()) }

// explicit returns which settings are set explicitly.
func (o *Options) explicit() planning.Explicit { return planning.ExplicitIn(o.given()) }

// given is Explicit, or its default.
func (o *Options) given() func(key string) bool {
	if o.Explicit != nil {
		return o.Explicit
	}
	values, defaults := o.Settings.Values(), configs.Defaults().Values()
	return func(key string) bool { return values[key] != defaults[key] }
}

// Info describes a node. It does not change.
type Info struct {
	// Name is the model's name: that of the preset, the directory, or the built-in model.
	// Device is the product name of the compute device.
	Name, Device string
	Config       *models.Config
	// Limits of steps and sequences.
	Limits forward.Limits
	// Settings that the node runs with, after changes by a policy. Planned is the policy's
	// plan, nil without one.
	Settings configs.Settings
	Planned  *planning.Planned
	// Relays are the GPUs, by number, over whose links copies from and to the host go, too.
	Relays []int
	// Facts of the machine, Shape of the model and Sizes of the node's allocations, for the
	// planner.
	Facts planning.Machine
	Shape planner.Model
	Sizes planner.Sizes
}

// Node is a running node.
type Node struct {
	info     Info
	log      *slog.Logger
	text     checkpoint.Text
	machine  device.Machine
	harvest  *harvest.Runtime       // nil without peers
	lenders  map[int]device.Space   // peers of harvest, by the driver's numbers
	relays   *relays                // nil where copies from the host go over one link
	balance  *rebalancer.Rebalancer // nil where nothing can move
	transfer *transfer.Engine
	store    *experts.Store
	kv       *kvcache.Manager
	tiers    *offload.Tiers          // nil without KV tiers
	events   *events.Publisher       // nil without KV events
	memory   *lending.Lender         // nil where the KV cache lends nothing to experts
	target   atomic.Pointer[float64] // offload fraction that was set; nil: none was
	pipe     *pipeline.Pipeline
	steps    stepper
	engine   *engine.Engine
	pace     *steptime.Pace // nil: nothing limits prompts in steps that decode
	observer *observe.Observer
	lender   *lender // nil where nothing is borrowed
	sleep    sleeper
	occupier tenants.Occupier // nil on GPUs
	// closers of the started parts, in the order of their start.
	closers []func() error
}

// Open starts a node. ctx bounds the loading. Errors wrap the kinds of package fault.
func Open(ctx context.Context, o Options) (_ *Node, err error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	o = o.EnsureDefaults()
	s := &o.Settings
	n := &Node{log: o.Log}
	defer func() {
		if err != nil {
			err = errors.Join(err, n.Close())
		}
	}()
	model, err := checkpoint.Open(s.Model, s.Generate.Seed)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, fault.Of(fault.ErrModel, model.Close())) }()
	if !o.WithoutTokenizer {
		if n.text, err = model.ReadText(); err != nil {
			return nil, err
		}
		n.text.SpecialTokensInChat = o.Settings.Generate.SpecialTokensInChat
		if err := n.text.Check(o.Template); err != nil {
			return nil, err
		}
	}
	u, err := newSetup(&o, model)
	if err != nil {
		return nil, err
	}
	n.started(u.devices.Close)
	n.keepTrace(u.devices.Trace())
	n.occupier = u.devices.Occupier
	if err := u.applyPolicy(); err != nil {
		return nil, fault.Of(fault.ErrConfig, err)
	}
	fit, err := u.budget()
	if err != nil {
		return nil, fault.Of(fault.ErrConfig, err)
	}
	if why := u.devices.NoGPU; why != nil {
		level := slog.LevelWarn
		if o.ExpectCPU {
			level = slog.LevelInfo
		}
		o.Log.Log(ctx, level, "computing on the CPU, with emulated devices", "err", why)
	}
	load, err := n.assemble(ctx, u, fit)
	if err != nil {
		return nil, err
	}
	o.Log.Info("model loaded", "model", n.info.Name, "load_s", load.Seconds())
	return n, nil
}

// started registers a closer. Close calls closers in reverse order.
func (n *Node) started(f func() error) { n.closers = append(n.closers, f) }

// describe fills in Info.
func (n *Node) describe(u *setup) error {
	sizes, err := u.footprint.Sizes(u.settings.Batch)
	if err != nil {
		return err
	}
	n.info = Info{
		Name: u.model.Name, Device: u.devices.Name(), Config: u.model.Config, Limits: u.needs.Limits,
		Settings: u.settings, Planned: u.planned, Relays: u.relayNumbers(), Facts: u.facts(), Shape: u.footprint.Model(u.model.Name), Sizes: sizes,
	}
	return nil
}

// assemble allocates memory, loads the weights and starts the parts that use them. It returns
// how long allocation and loading took.
func (n *Node) assemble(ctx context.Context, u *setup, fit sizing.KVFit) (load time.Duration, err error) {
	start := time.Now()
	d, o := u.devices, u.o
	n.machine = d.Machine
	if err := n.describe(u); err != nil {
		return 0, fault.Of(fault.ErrConfig, err)
	}
	arena, err := n.alloc(d.Space, u.layout.Bytes, "weights")
	if err != nil {
		return 0, fault.Of(fault.ErrDevice, err)
	}
	steps := u.steps()
	groups, err := n.groups(u, &steps, arena)
	if err != nil {
		return 0, err
	}
	if n.transfer, err = transfer.New(transfer.Options{Machine: n.machine, Trace: d.Trace(), Kernel: u.kernel, Multipath: u.paths.multipath()}); err != nil {
		return 0, fault.Of(fault.ErrDevice, err)
	}
	n.started(n.transfer.Close)
	if err := n.openHarvest(u); err != nil {
		return 0, err
	}
	if n.store, err = experts.New(experts.Options{
		Machine: n.machine, Space: d.Space, Backend: d.Enqueuing(), Transfer: n.transfer, Plan: u.needs.Plan, CPU: steps.CPUShare, Log: o.Log,
		Harvest: n.lending(u), Events: experts.Tee(experts.LogEvents(o.Log), observe.ExpertEvents(o.Events)),
	}); err != nil {
		return 0, fault.Of(fault.ErrDevice, err)
	}
	n.started(n.store.Close)
	if n.harvest != nil {
		// Closed before the store, which is notified of every revocation.
		n.started(n.closeHarvest)
	}
	pool, err := kvcache.NewPool(kvcache.PoolOptions{Machine: n.machine, Space: u.kvSpace(), Shape: u.needs.KV, Blocks: fit.Blocks})
	if err != nil {
		return 0, fault.Of(fault.ErrDevice, err)
	}
	n.started(pool.Close)
	if n.kv, err = u.newKV(fit); err != nil {
		return 0, fault.Of(fault.ErrConfig, err)
	}
	if err := checkpoint.Load(ctx, checkpoint.LoadOptions{
		Machine: n.machine, Space: d.Space, Arena: arena, Layout: u.layout, Source: u.model.Source,
		Store: n.store, Groups: groups, Progress: o.Progress,
	}); err != nil {
		return 0, err
	}
	if err := n.openRebalancer(ctx, u); err != nil {
		return 0, err
	}
	if err := n.openKVTiers(u, pool); err != nil {
		return 0, err
	}
	load = time.Since(start)
	steps.Experts, steps.KV, steps.Trace = n.store, pool, d.Trace()
	if n.pipe, err = pipeline.New(steps); err != nil {
		return 0, fault.Of(fault.ErrDevice, err)
	}
	n.started(n.pipe.Close)
	if m := steps.AccessModel; m.Known() && u.needs.Plan.OffloadedExperts > 0 {
		copied, direct := m.Predict(1, true, n.store.PeerShare())
		o.Log.Info("time of offloaded experts in a step of one token, predicted", "copy_s", copied.Seconds(), "direct_s", direct.Seconds())
		u.warnOfHold(&m)
		if with, ok := u.cpuWouldHelp(m, min(copied, direct)); ok {
			o.Log.Info("--cpu-experts auto would let the CPU compute some of the experts in host memory; tokens may then differ in roundings from run to run",
				"experts_s", min(copied, direct).Seconds(), "with_cpu_s", with.Seconds())
		}
	}
	if err := n.openLender(u, pool); err != nil {
		return 0, err
	}
	if err := n.openSleeper(ctx, u, arena, groups, pool); err != nil {
		return 0, fault.Of(fault.ErrDevice, err)
	}
	n.steps = stepper{n.pipe, n.machine, n.kv, d.Trace()}
	if err := n.warm(ctx, d.Backend, groups[0]); err != nil {
		return 0, fault.Of(fault.ErrDevice, fmt.Errorf("node: warm up GEMMs: %w", err))
	}
	if err := n.startUpkeep(u.others); err != nil {
		return 0, fault.Of(fault.ErrDevice, err)
	}
	if err := n.openNeighbors(u); err != nil {
		return 0, fault.Of(fault.ErrConfig, err)
	}
	c, l := u.model.Config, &n.info.Limits
	now := time.Now
	if o.DeviceTime {
		now = func() time.Time { return time.Unix(0, 0).Add(n.machine.Now()) }
	}
	eo := engine.Options{
		Pipeline: n.steps, KV: n.kv, Tokenizer: n.text.Tokenizer, MaxModelLen: l.MaxModelLen,
		MaxNumSeqs: l.MaxSeqs, MaxNumBatchedTokens: l.MaxTokens, MaxAdjust: l.MaxAdjust,
		Scheduling:    scheduling(u.settings.Batch),
		PrefixCaching: u.settings.KV.EnablePrefixCaching, KeySalt: u.needs.KV.DType.String(), LongAfter: c.RoPE.LongAfter, Vocab: c.Vocab, StopIDs: c.EOS, Log: o.Log,
		MaxQueued: o.MaxQueued, RetryTimeout: o.RetryTimeout, Listener: o.Listener, Pause: n.machine.Yield, Now: now, Clock: n.machine.Now,
	}
	if n.tiers != nil {
		eo.Offload = n.tiers
	}
	if n.memory != nil {
		eo.Lender = n.memory
	}
	if n.pace = u.pace(&n.info); n.pace != nil {
		eo.Pace = n.pace
	}
	if err := n.openKVEvents(u, &eo); err != nil {
		return 0, err
	}
	if n.engine, err = engine.New(eo); err != nil {
		return 0, fault.Of(fault.ErrConfig, err)
	}
	n.started(n.engine.Close)
	predict, err := u.predictor(&n.info)
	if err != nil {
		o.Log.Debug("steps are not predicted: the hardware is not known", "err", err)
	} else if l := n.info.Limits; u.settings.Offload.Fraction > 0 && !o.given()("max-num-batched-tokens") {
		if tokens := largerSteps(predict, l); tokens > 0 {
			o.Log.Info("each step of a long prompt copies all offloaded experts, which takes longer than computing it; larger steps copy them less often",
				"step_tokens", l.MaxTokens, "copy_s", predict(scheduler.Mix{Prompt: l.MaxTokens}), "setting", fmt.Sprintf("--max-num-batched-tokens %d", tokens))
		}
	}
	n.observer = observe.New(observe.Parts{
		Model: n.info.Name, Backend: d.Backend.Name(), Device: n.info.Device, Machine: n.machine, Space: d.Space, Store: n.store, Transfer: n.transfer,
		Pipeline: n.pipe, Engine: n.engine, Tiers: n.tiers, Lender: n.memory, Harvest: n.harvest, Rebalancer: n.balance, Peers: u.peerDevices(),
		Memory: u.memory(fit), Dynamic: u.needs.Plan.Dynamic, LoadTime: load, Sleep: n.Sleeping, Events: n.events, Predict: predict,
	})
	return load, nil
}

// scheduling is the policy of settings.
func scheduling(b configs.Batch) scheduler.Policy {
	order := map[configs.SchedulingPolicy]scheduler.Order{
		configs.FCFSScheduling: scheduler.FCFS, configs.PriorityScheduling: scheduler.ByPriority, configs.FairScheduling: scheduler.Fair,
	}
	return scheduler.Policy{Order: order[b.SchedulingPolicy], Granularity: b.FairGranularity}
}

// groups makes the models over the weights in the arena, each with its own workspace.
func (n *Node) groups(u *setup, steps *pipeline.Options, arena device.Memory) ([]*forward.Model, error) {
	d, c := u.devices, u.model.Config
	groups := make([]*forward.Model, steps.Groups())
	limits, weights := steps.GroupLimits(u.needs.Limits), u.layout.Bind(arena.Range(0, u.layout.Bytes).Addr)
	for i := range groups {
		workspace, err := n.alloc(d.Space, forward.WorkspaceBytes(c, d.Backend, limits), "activations")
		if err != nil {
			return nil, fault.Of(fault.ErrDevice, err)
		}
		if groups[i], err = forward.NewModel(c, weights, d.Enqueuing(), workspace.Range(0, workspace.Bytes()), limits); err != nil {
			return nil, fault.Of(fault.ErrConfig, err)
		}
		n.sleep.workspaces = append(n.sleep.workspaces, workspace)
		steps.Executors = append(steps.Executors, pipeline.Executor{Space: d.Space, Model: groups[i]})
	}
	return groups, nil
}

func (n *Node) alloc(space device.Space, bytes int64, label string) (device.Memory, error) {
	m, err := n.machine.Alloc(space, bytes, label)
	if err != nil {
		return nil, err
	}
	n.started(m.Free)
	return m, nil
}

// warm runs the first GEMMs of all shapes, if the backend is slower at these.
func (n *Node) warm(ctx context.Context, backend kernels.Backend, m *forward.Model) error {
	b, ok := backend.(interface{ WarmRows(most int) []int })
	if !ok {
		return nil
	}
	if err := m.WarmUp(n.pipe.Compute(), b.WarmRows(m.Limits.MaxTokens)); err != nil {
		return err
	}
	return n.pipe.Compute().Synchronize(ctx)
}

// Engine returns the engine, which runs requests.
func (n *Node) Engine() *engine.Engine { return n.engine }

// Pipeline returns the pipeline, which runs steps; tests and measurements use it, between the
// engine's calls.
func (n *Node) Pipeline() *pipeline.Pipeline { return n.pipe }

// KV returns the manager of the KV blocks of the pipeline's steps.
func (n *Node) KV() *kvcache.Manager { return n.kv }

// KVTiers are the tiers of KV blocks, nil: there are none. No request runs while the caller uses them.
func (n *Node) KVTiers() *offload.Tiers { return n.tiers }

// Machine returns the machine that the node runs on.
func (n *Node) Machine() device.Machine { return n.machine }

// Text returns the model's tokenizer and chat template.
func (n *Node) Text() checkpoint.Text { return n.text }

// Info describes the node.
func (n *Node) Info() *Info { return &n.info }

// Observe returns the observer of the counters of the node's parts.
func (n *Node) Observe() *observe.Observer { return n.observer }

// Log returns the node's logger.
func (n *Node) Log() *slog.Logger { return n.log }

// Step runs a step without the engine, between the engine's calls, after the loops that run
// before steps on a virtual clock.
func (n *Node) Step(ctx context.Context, s *pipeline.Step) (pipeline.Result, error) {
	return n.steps.Step(ctx, s)
}

// Close stops everything, in the reverse order of its start, and releases all memory. An
// allocation that is still alive is an error.
func (n *Node) Close() error {
	var errs []error
	for i := len(n.closers) - 1; i >= 0; i-- {
		errs = append(errs, n.closers[i]())
	}
	n.closers = nil
	return errors.Join(errs...)
}
