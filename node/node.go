package node

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"strings"
	"time"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated/tenants"
	"github.com/moeserve/moeserve/device/trace"
	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/forward"
	"github.com/moeserve/moeserve/harvest"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/models"
	"github.com/moeserve/moeserve/models/chat"
	"github.com/moeserve/moeserve/models/safetensors"
	"github.com/moeserve/moeserve/models/tiny"
	"github.com/moeserve/moeserve/models/tokenizer"
	"github.com/moeserve/moeserve/pipeline"
	"github.com/moeserve/moeserve/planner"
	"github.com/moeserve/moeserve/rebalancer"
	"github.com/moeserve/moeserve/transfer"
)

// What an error of Open is about; cmd turns it into the exit code.
var (
	// ErrConfig: settings that contradict each other or the model.
	ErrConfig = errors.New("configuration")
	// ErrModel: the model cannot be read, or is not one that we run.
	ErrModel = errors.New("model")
	// ErrDevice: a device, or its memory.
	ErrDevice = errors.New("device")
	// ErrLost marks errors of a device that is gone, whenever it went.
	ErrLost = device.ErrLost
)

// failure marks err as one of the kinds above without saying so in its text.
type failure struct{ kind, err error }

func (f *failure) Error() string   { return f.err.Error() }
func (f *failure) Unwrap() []error { return []error{f.kind, f.err} }

func fail(kind, err error) error {
	if err == nil {
		return nil
	}
	return &failure{kind, err}
}

// Options say what to run.
type Options struct {
	Settings configs.Settings
	// HostLogits keeps room for the logits of a step: see pipeline.Options.
	HostLogits bool
	// WithoutTokenizer leaves the tokenizer unread, for checkpoints that have none.
	WithoutTokenizer bool
	// Given says of a setting, by its key, whether somebody has given it: a policy does
	// not change those. Default: those that are not at their defaults.
	Given func(key string) bool
	// Workload is what a policy is made for. Default: DefaultWorkload.
	Workload planner.Workload
	// Progress, which may be nil, is called while weights are loaded, with bytes.
	Progress func(done, total int64)
	// Log gets what an operator can act on. Default: none.
	Log *slog.Logger
	// RingLayers is for how many layers' fetched experts the compute device has room.
	// Default: 2, so that the next layer's arrive while one's are read. 1 saves memory,
	// and every fetch waits.
	RingLayers int
	// MaxQueued and Listener are the engine's: see engine.Options.
	MaxQueued int
	Listener  engine.Listener
	// Events, which may be nil, is told of what happens to borrowed memory and to
	// experts. It is called with locks held: it must be quick, and not call the node.
	Events func(Event)
	// OpenMachine opens the devices in place of what the settings say; tests use it
	// to choose schedules and to inject faults.
	OpenMachine func() (device.Machine, error)
	// OpenBackend opens the backend of what OpenMachine opened. Default: kernels/cpu.
	OpenBackend func(device.Machine) (kernels.Backend, error)
}

// BuiltIn is what the built-in model is called.
const BuiltIn = "built-in"

// Node is a running node.
type Node struct {
	name     string
	log      *slog.Logger
	settings configs.Settings
	config   *models.Config
	layout   *models.Layout
	// footprint of the model on the machine.
	footprint *footprint
	// planned is what the policy says; nil where there is none.
	planned *Planned
	machine device.Machine
	// taker lets others take memory of emulated devices; nil on real ones.
	taker tenants.Taker
	space device.Space
	// opened are the driver's numbers of the machine's GPUs; nil where it is emulated.
	opened []int
	// peers may be borrowed from, as policy says.
	peers     []device.Space
	policy    harvest.Policy
	harvest   *harvest.Runtime       // nil without peers
	tenants   *playback              // nil without a trace
	balance   *rebalancer.Rebalancer // nil where nothing can move
	backend   kernels.Backend
	host      kernels.Backend // attends where the setting attention says cpu
	trace     *trace.Writer   // nil where nothing is traced
	traced    bool            // the machine tells the trace by itself
	transfer  *transfer.Engine
	store     *experts.Store
	plan      experts.Plan
	kv        *kvcache.Manager
	pipe      *pipeline.Pipeline
	engine    *engine.Engine
	tokenizer tokenizer.Tokenizer
	template  *chat.Template
	limits    forward.Limits
	loadTime  time.Duration
	closers   []func() error
}

// Model is a model's files, read as far as it takes to know what they hold.
type Model struct {
	// Name is the preset's, the directory, or BuiltIn.
	Name   string
	Config *models.Config
	Source models.Source
	// Files holds tokenizer and templates; nil for a preset.
	Files fs.FS

	close func() error
}

// Close releases the mapped files. The Source must not be read any more.
func (m *Model) Close() error {
	if m.close == nil {
		return nil
	}
	return m.close()
}

// OpenModel finds the model that the settings name and reads its configuration and
// the names and shapes of its tensors, but no weights. Errors wrap ErrModel or
// ErrConfig.
func OpenModel(s configs.Settings) (*Model, error) {
	m, err := openModel(s)
	if err != nil {
		return nil, err
	}
	if s.Model.NumHiddenLayers > 0 {
		if s.Model.LoadFormat != configs.LoadDummy {
			return nil, errors.Join(fail(ErrConfig, errors.New("num-hidden-layers cuts a preset and goes with load-format dummy only")), m.Close())
		}
	}
	return m, nil
}

func openModel(s configs.Settings) (*Model, error) {
	if s.Model.Name == "" {
		return openBuiltIn()
	}
	if data, ok := configs.Preset(s.Model.Name); ok {
		if s.Model.LoadFormat != configs.LoadDummy {
			return nil, fail(ErrConfig, fmt.Errorf("%s is a preset: it has shapes and no weights; give --load-format dummy for random ones, or the directory of its checkpoint as --model", s.Model.Name))
		}
		c, err := models.ParseConfig(data, "preset "+s.Model.Name)
		if err != nil {
			return nil, fail(ErrModel, err)
		}
		return dummy(s, s.Model.Name, c, nil)
	}
	info, err := os.Stat(s.Model.Name)
	if err != nil || !info.IsDir() {
		return nil, fail(ErrModel, fmt.Errorf("there is no model %q: give the directory of a Hugging Face checkpoint, or one of the presets %s", s.Model.Name, strings.Join(configs.PresetNames(), ", ")))
	}
	c, err := models.ReadConfig(s.Model.Name)
	if err != nil {
		return nil, fail(ErrModel, err)
	}
	files := os.DirFS(s.Model.Name)
	if s.Model.LoadFormat == configs.LoadDummy {
		return dummy(s, s.Model.Name, c, files)
	}
	ck, err := safetensors.Open(s.Model.Name)
	if err != nil {
		return nil, fail(ErrModel, err)
	}
	return &Model{Name: s.Model.Name, Config: c, Source: models.NewCheckpoint(ck), Files: files, close: ck.Close}, nil
}

func dummy(s configs.Settings, name string, c *models.Config, files fs.FS) (*Model, error) {
	var err error
	if s.Model.NumHiddenLayers > 0 {
		if c, err = c.WithLayers(s.Model.NumHiddenLayers); err != nil {
			return nil, fail(ErrConfig, err)
		}
	}
	skew, err := s.Model.ParseRouting()
	if err != nil {
		return nil, fail(ErrConfig, err)
	}
	if skew > 0 {
		if c, err = c.WithRoutingSkew(skew); err != nil {
			return nil, fail(ErrConfig, err)
		}
	}
	return &Model{Name: name, Config: c, Source: models.NewDummy(c, s.Generate.Seed), Files: files}, nil
}

func openBuiltIn() (*Model, error) {
	files := tiny.FS()
	data, err := fs.ReadFile(files, "config.json")
	if err != nil {
		return nil, fail(ErrModel, err)
	}
	c, err := models.ParseConfig(data, BuiltIn+" config.json")
	if err != nil {
		return nil, fail(ErrModel, err)
	}
	if data, err = fs.ReadFile(files, "generation_config.json"); err == nil {
		if c, err = c.WithGeneration(data, BuiltIn+" generation_config.json"); err != nil {
			return nil, fail(ErrModel, err)
		}
	}
	weights, err := fs.ReadFile(files, safetensors.SingleFile)
	if err != nil {
		return nil, fail(ErrModel, err)
	}
	ck, err := safetensors.Parse(BuiltIn+" "+safetensors.SingleFile, weights)
	if err != nil {
		return nil, fail(ErrModel, err)
	}
	return &Model{Name: BuiltIn, Config: c, Source: models.NewCheckpoint(ck), Files: files, close: ck.Close}, nil
}

// Open starts a node. ctx bounds the loading.
func Open(ctx context.Context, o Options) (_ *Node, err error) {
	if err := o.Settings.Validate(); err != nil {
		return nil, fail(ErrConfig, err)
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	n := &Node{settings: o.Settings, log: o.Log}
	defer func() {
		if err != nil {
			err = errors.Join(err, n.Close())
		}
	}()
	model, err := OpenModel(o.Settings)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, fail(ErrModel, model.Close())) }()
	n.name, n.config = model.Name, model.Config
	if err := n.text(model, o.WithoutTokenizer); err != nil {
		return nil, fail(ErrModel, err)
	}
	if err := n.openTraceFile(); err != nil {
		return nil, fail(ErrConfig, err)
	}
	if err := n.prepare(&o, model.Source); err != nil {
		return nil, err
	}
	if err := n.follow(&o); err != nil {
		return nil, fail(ErrConfig, err)
	}
	n.openHost()
	kv, blocks, err := n.budget(&o)
	if err != nil {
		return nil, fail(ErrConfig, err)
	}
	if err := n.assemble(ctx, &o, model.Source, kv, blocks); err != nil {
		return nil, err
	}
	o.Log.Info("node ready", "model", n.name, "load_seconds", n.loadTime.Seconds(), "kv_blocks", blocks, "max_model_len", n.limits.MaxModelLen)
	return n, nil
}

// prepare opens the devices and lays the model out on them.
func (n *Node) prepare(o *Options, src models.Source) error {
	if h := o.Settings.Plan.Hardware; h != "" {
		// What is named must be there, whether or not anything counts with it.
		if _, err := LoadHardware(h); err != nil {
			return fail(ErrConfig, fmt.Errorf("hardware: %w", err))
		}
	}
	if err := n.machines(o); err != nil {
		return err
	}
	if err := n.choosePeers(&o.Settings); err != nil {
		return fail(ErrConfig, err)
	}
	var err error
	if n.layout, err = models.NewLayout(n.config, src, n.cast()); err != nil {
		return fail(ErrModel, err)
	}
	usage, err := n.machine.Usage(n.space)
	if err != nil {
		return fail(ErrDevice, err)
	}
	n.footprint, err = newFootprint(footprint{
		config: n.config, layout: n.layout, types: n.backend, ringLayers: o.RingLayers, adaptive: o.Settings.Offload.AdaptLocal,
		hostLogits: o.HostLogits, clears: len(n.peers) > 0, kernels: usage.Allocated,
	}, o.Settings.KV.MaxModelLen)
	return fail(ErrConfig, err)
}

// text reads tokenizer and chat template, where the model has files.
func (n *Node) text(m *Model, without bool) error {
	if m.Files == nil || without {
		return nil
	}
	tok, err := fs.ReadFile(m.Files, "tokenizer.json")
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%s has no tokenizer.json, which turns text into the model's ids; download the complete checkpoint", m.Name)
	}
	if err != nil {
		return err
	}
	config, err := fs.ReadFile(m.Files, "tokenizer_config.json")
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	t, err := tokenizer.Parse(tok, config)
	if err != nil {
		return fmt.Errorf("%s: %w", m.Name, err)
	}
	n.tokenizer = t
	n.template, err = chat.Load(m.Files, m.Name)
	if err != nil && !errors.Is(err, chat.ErrNoTemplate) {
		// A broken template only matters to those who use it.
		n.template = nil
		if n.settings.Generate.Chat {
			return fmt.Errorf("%s: %w", m.Name, err)
		}
	}
	return nil
}

// assemble takes the memory, loads the weights and starts what runs on them.
func (n *Node) assemble(ctx context.Context, o *Options, src models.Source, kv kvcache.Shape, blocks int) (err error) {
	start := time.Now()
	arena, err := n.alloc(n.space, n.layout.Bytes, "weights")
	if err != nil {
		return fail(ErrDevice, err)
	}
	steps := n.steps(o)
	group := make([]*forward.Model, 2)[:steps.Groups()]
	limits, weights := steps.GroupLimits(n.limits), n.layout.Bind(arena.Range(0, n.layout.Bytes).Addr)
	for i := range group {
		workspace, err := n.alloc(n.space, forward.WorkspaceBytes(n.config, n.backend, limits), "activations")
		if err != nil {
			return fail(ErrDevice, err)
		}
		if group[i], err = forward.NewModel(n.config, weights, n.enqueuing(), workspace.Range(0, workspace.Bytes()), limits); err != nil {
			return fail(ErrConfig, err)
		}
	}
	if n.transfer, err = transfer.New(transfer.Options{Machine: n.machine}); err != nil {
		return fail(ErrDevice, err)
	}
	n.closers = append(n.closers, n.transfer.Close)
	if err := n.openHarvest(o.Events); err != nil {
		return err
	}
	if n.store, err = experts.New(experts.Options{
		Machine: n.machine, Space: n.space, Backend: n.backend, Transfer: n.transfer, Plan: n.plan, NoData: !n.machine.Capabilities().KeepsData, Logger: o.Log,
		Harvest: n.harvest, Events: experts.Tee(experts.LogEvents(o.Log), expertEvents(o.Events)),
	}); err != nil {
		return fail(ErrDevice, err)
	}
	n.closers = append(n.closers, n.store.Close)
	if n.harvest != nil {
		// Before the store, which is told of all that it loses.
		n.closers = append(n.closers, n.closeHarvest)
	}
	pool, err := kvcache.NewPool(kvcache.PoolOptions{Machine: n.machine, Space: n.kvSpace(), Shape: kv, Blocks: blocks})
	if err != nil {
		return fail(ErrDevice, err)
	}
	n.closers = append(n.closers, pool.Close)
	if n.kv, err = kvcache.NewManager(kvcache.ManagerOptions{Blocks: blocks, BlockTokens: kv.BlockTokens}); err != nil {
		return fail(ErrConfig, err)
	}
	if err := n.load(ctx, o, src, group, arena); err != nil {
		return err
	}
	if err := n.openRebalancer(ctx); err != nil {
		return err
	}
	n.loadTime = time.Since(start)
	steps.Model, steps.Experts, steps.KV = group[0], n.store, pool
	if len(group) > 1 {
		steps.Second = group[1]
	}
	if n.pipe, err = pipeline.New(steps); err != nil {
		return fail(ErrDevice, err)
	}
	n.closers = append(n.closers, n.pipe.Close)
	if b, ok := n.backend.(interface{ WarmRows(most int) []int }); ok {
		err := group[0].Warm(n.pipe.Compute(), b.WarmRows(limits.MaxRows))
		if err == nil {
			err = n.pipe.Compute().Synchronize(ctx)
		}
		if err != nil {
			return fail(ErrDevice, fmt.Errorf("node: first products: %w", err))
		}
	}
	if err := n.startUpkeep(); err != nil {
		return fail(ErrDevice, err)
	}
	if n.engine, err = engine.New(engine.Options{
		Pipeline: stepper{n.pipe, n.machine}, KV: n.kv, Tokenizer: n.tokenizer, MaxModelLen: n.limits.MaxModelLen,
		MaxNumSeqs: n.limits.MaxSeqs, MaxNumBatchedTokens: n.limits.MaxRows, MaxAdjust: n.limits.MaxAdjust,
		LongAfter: n.config.RoPE.LongAfter, Vocab: n.config.Vocab, StopIDs: n.config.EOS, Log: o.Log,
		MaxQueued: o.MaxQueued, Listener: o.Listener,
	}); err != nil {
		return fail(ErrConfig, err)
	}
	n.closers = append(n.closers, n.engine.Close)
	return nil
}

func (n *Node) alloc(space device.Space, bytes int64, label string) (device.Memory, error) {
	m, err := n.machine.Alloc(space, bytes, label)
	if err != nil {
		return nil, err
	}
	n.closers = append(n.closers, m.Free)
	return m, nil
}

// load streams the weights to their places.
func (n *Node) load(ctx context.Context, o *Options, src models.Source, group []*forward.Model, arena device.Memory) (err error) {
	up, err := newUploader(n.machine, n.space)
	if err != nil {
		return fail(ErrDevice, err)
	}
	defer func() { err = errors.Join(err, fail(ErrDevice, up.close(ctx))) }()
	to := &sink{ctx: ctx, arena: arena, up: up, store: n.store}
	if !n.machine.Capabilities().KeepsData {
		src, to.up = shapes{src}, nil
	}
	if err := models.Load(ctx, src, n.layout, to, o.Progress); err != nil {
		return loading(err)
	}
	if err := n.store.Seal(ctx); err != nil {
		return loading(err)
	}
	if to.up == nil {
		return nil
	}
	for _, m := range group {
		if err := m.Constants(func(dst device.Range, data []byte) error { return up.put(ctx, dst, data) }); err != nil {
			return loading(err)
		}
	}
	return loading(up.flush(ctx))
}

// loading says what an error of loading is about: the device, the model, or, where
// ctx was done, neither.
func loading(err error) error {
	var d *device.Error
	switch {
	case err == nil:
		return nil
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("node: load the model: %w", err)
	case errors.As(err, &d):
		return fail(ErrDevice, err)
	}
	return fail(ErrModel, err)
}

// Engine runs requests.
func (n *Node) Engine() *engine.Engine { return n.engine }

// Pipeline runs steps; tests and readings use it, between the engine's calls.
func (n *Node) Pipeline() *pipeline.Pipeline { return n.pipe }

// KV accounts for the blocks of the pipeline's steps.
func (n *Node) KV() *kvcache.Manager { return n.kv }

// Tokenizer of the model; nil where it has none (a preset).
func (n *Node) Tokenizer() tokenizer.Tokenizer { return n.tokenizer }

// Template is the model's chat template; nil where it has none.
func (n *Node) Template() *chat.Template { return n.template }

// EncodePrompt turns text into the ids of a prompt: as it stands, with the special
// tokens that the tokenizer puts around a prompt, or, if asChat, as a user's
// message in the model's chat template. Errors wrap ErrConfig where the model has
// no tokenizer or no template.
func (n *Node) EncodePrompt(text string, asChat bool) ([]int32, error) {
	if n.tokenizer == nil {
		return nil, fail(ErrConfig, fmt.Errorf("%s has no tokenizer: give the prompt as token ids", n.name))
	}
	if !asChat {
		return n.tokenizer.Encode(text, true), nil
	}
	if n.template == nil {
		return nil, fail(ErrConfig, fmt.Errorf("%s has no chat template: leave out --chat, or add a chat_template.jinja", n.name))
	}
	text, err := n.template.Render([]chat.Message{{Role: "user", Content: text}}, chat.Options{AddGenerationPrompt: true})
	if err != nil {
		return nil, fail(ErrModel, err)
	}
	// The template has written the special tokens out.
	return n.tokenizer.Encode(text, false), nil
}

// Settings that the node runs with: a policy may have changed them.
func (n *Node) Settings() configs.Settings { return n.settings }

// Planned is what the policy says; nil where there is none.
func (n *Node) Planned() *Planned { return n.planned }

// Config of the model.
func (n *Node) Config() *models.Config { return n.config }

// Limits of the node's steps and sequences.
func (n *Node) Limits() forward.Limits { return n.limits }

// Close stops everything, in the reverse order of its start, and gives all memory
// back. An allocation that is still alive is an error.
func (n *Node) Close() error {
	var errs []error
	for i := len(n.closers) - 1; i >= 0; i-- {
		errs = append(errs, n.closers[i]())
	}
	n.closers = nil
	return errors.Join(errs...)
}

// AvailableMemory is what this machine can still give to processes, in bytes, and
// false where the system does not say.
func AvailableMemory() (int64, bool) { return availableMemory() }
