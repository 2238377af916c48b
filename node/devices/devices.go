package devices

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"runtime"
	"slices"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/device/emulated/tenants"
	"github.com/moeserve/moeserve/device/trace"
	"github.com/moeserve/moeserve/harvest"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/kernels/cpu"
	"github.com/moeserve/moeserve/node/fault"
	"github.com/moeserve/moeserve/node/sizing"
)

// errNoCUDA: this binary, or this machine, has no GPU that it could use. An error
// that wraps it says what to do.
var errNoCUDA = errors.New("no usable GPU")

// Options say what to open.
type Options struct {
	Settings configs.Device
	Kernels  configs.Kernels
	// Peers opens the GPUs whose memory may be borrowed, too.
	Peers bool
	// Emulate leaves GPUs out where the settings leave it open.
	Emulate bool
	// Weights is the type of the model's. Default: bfloat16.
	Weights kernels.DType
	// Trace is a file to which is written what each stream does when. Default: none.
	Trace string
	// Log gets what an operator can act on. Default: none.
	Log *slog.Logger
	// OpenMachine opens the machine in place of what the settings say, and OpenBackend the
	// backend of that. Default: kernels/cpu.
	OpenMachine func() (device.Machine, error)
	OpenBackend func(device.Machine) (kernels.Backend, error)
}

// EnsureDefaults fills in what is not given.
func (o Options) EnsureDefaults() Options {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.OpenBackend == nil {
		o.OpenBackend = func(device.Machine) (kernels.Backend, error) {
			return cpu.New(cpu.Options{Threads: runtime.GOMAXPROCS(0)}), nil
		}
	}
	return o
}

// Devices are a machine and the GPU of it that computes.
type Devices struct {
	Machine device.Machine
	// Space is the memory of the GPU that computes.
	Space device.Space
	// Backend carries out operations; on the machine's streams, Enqueuing does.
	Backend kernels.Backend
	// GPUs are the driver's numbers of the machine's GPUs; nil where these are emulated.
	GPUs []int
	// NoGPU is why the devices are emulated although nobody asked for that; nil where
	// somebody did, or where they are GPUs.
	NoGPU error
	// Taker lets others take memory of emulated devices; nil on real ones.
	Taker tenants.Taker
	// Limiter lowers the capacity of emulated memories; nil on real devices.
	Limiter interface {
		Limit(s device.Space, bytes int64) error
	}

	host    kernels.Backend // attends on the host; nil until somebody asks
	trace   *trace.Writer   // nil where nothing is traced
	log     *slog.Logger
	closers []func() error
}

// Open opens GPUs where they are asked for, or there and nothing else is asked for; else
// emulated ones. Errors wrap fault.ErrConfig or fault.ErrDevice.
func Open(o Options) (_ *Devices, err error) {
	o = o.EnsureDefaults()
	d := &Devices{log: o.Log}
	defer func() {
		if err != nil {
			err = errors.Join(err, d.Close())
		}
	}()
	if err := d.openTrace(o.Trace); err != nil {
		return nil, fault.Of(fault.ErrConfig, err)
	}
	s := &o.Settings
	if o.OpenMachine != nil {
		return d, d.open(o.OpenMachine, o.OpenBackend, false)
	}
	if s.Kind == configs.CUDA || s.Kind == configs.AutoDevice && s.Emulate == "" && !o.Emulate {
		if s.Emulate != "" {
			return nil, fault.Of(fault.ErrConfig, errors.New("--emulate and --device cuda exclude each other; leave one of them out"))
		}
		gpus := []int{s.GPU}
		if c, err := s.ParsePeers(); err == nil && o.Peers {
			gpus = append(gpus, c.GPUs...)
		}
		m, b, err := openCUDA(&o, gpus)
		switch {
		case err == nil:
			d.use(m, b, false)
			d.GPUs = gpus
			return d, nil
		case s.Kind == configs.CUDA || !errors.Is(err, errNoCUDA):
			return nil, fault.Of(fault.ErrDevice, err)
		}
		d.NoGPU = err
	}
	spec, err := emulated.ParseSpec(s.Emulate)
	if err != nil {
		return nil, fault.Of(fault.ErrConfig, fmt.Errorf("--emulate: %w", err))
	}
	defaultMemory(&spec)
	d.traceEmulated(&spec)
	if err := d.open(func() (device.Machine, error) { return emulated.Open(spec) }, o.OpenBackend, true); err != nil {
		return nil, err
	}
	if have := len(d.Machine.Topology().GPUs); s.GPU >= have {
		return nil, fault.Of(fault.ErrConfig, fmt.Errorf("--gpu is %d, and the emulated machine has GPUs 0 to %d", s.GPU, have-1))
	}
	d.Space = device.HBM(s.GPU)
	return d, nil
}

// open opens a machine, which may tell the trace by itself, and its backend.
func (d *Devices) open(machine func() (device.Machine, error), backend func(device.Machine) (kernels.Backend, error), tells bool) error {
	m, err := machine()
	if err != nil {
		return fault.Of(fault.ErrDevice, err)
	}
	b, err := backend(m)
	if err != nil {
		return fault.Of(fault.ErrDevice, errors.Join(err, m.Close()))
	}
	d.use(m, b, tells)
	return nil
}

// use takes over machine and backend, and computes on the machine's first GPU.
func (d *Devices) use(m device.Machine, b kernels.Backend, tells bool) {
	d.Machine, d.Space, d.Backend = d.traced(m, tells), device.HBM(0), b
	d.Taker, _ = m.(tenants.Taker)
	d.Limiter, _ = m.(interface {
		Limit(s device.Space, bytes int64) error
	})
	d.closers = append(d.closers, d.Machine.Close, b.Close)
}

// Close closes all that is open. An allocation that is still alive is an error.
func (d *Devices) Close() error {
	var errs []error
	for i := len(d.closers) - 1; i >= 0; i-- {
		errs = append(errs, d.closers[i]())
	}
	d.closers = nil
	return errors.Join(errs...)
}

// Host is a backend for attention on the host.
func (d *Devices) Host() kernels.Backend {
	if d.host == nil {
		d.host = d.Backend
		if _, ok := d.Backend.(*cpu.Backend); !ok {
			d.host = cpu.New(cpu.Options{})
			d.closers = append(d.closers, d.host.Close)
		}
	}
	return d.host
}

// Cast is the type in which the backend wants weights of a type; nil: as they are.
func (d *Devices) Cast() func(kernels.DType) kernels.DType {
	if b, ok := d.Backend.(interface {
		WeightDType(kernels.DType) kernels.DType
	}); ok {
		return b.WeightDType
	}
	return nil
}

// Name of the GPU that computes.
func (d *Devices) Name() string {
	info, _ := d.Machine.Topology().Info(d.Space)
	return info.Name
}

// Real says whether the devices are GPUs, and not emulated.
func (d *Devices) Real() bool { return d.GPUs != nil }

// Usages are the accounts of the GPU's memory and the host's.
func (d *Devices) Usages() (gpu, host device.Usage, err error) {
	if gpu, err = d.Machine.Usage(d.Space); err != nil {
		return gpu, host, err
	}
	host, err = d.Machine.Usage(device.Host)
	return gpu, host, err
}

// Shared is what this machine can still give to memories that it emulates, which share
// it; false where the devices have memories of their own, hold nothing, or the system
// does not say.
func (d *Devices) Shared() (int64, bool) {
	if c := d.Machine.Capabilities(); !c.Emulated || !c.KeepsData {
		return 0, false
	}
	return AvailableMemory()
}

// Hold says why the devices do not hold so much more, in bytes: an error wraps
// fault.ErrConfig and names the memory. What emulated devices hold is all of this
// machine's.
func (d *Devices) Hold(needs map[device.Space]int64) error {
	var all int64
	for _, s := range slices.Sorted(maps.Keys(needs)) {
		u, err := d.Machine.Usage(s)
		if err != nil {
			return fault.Of(fault.ErrDevice, err)
		}
		if needs[s] > u.Free() {
			return fault.Of(fault.ErrConfig, fmt.Errorf("%s needed of %s, whose memory has %s free", sizing.Bytes(needs[s]), s, sizing.Bytes(max(u.Free(), 0))))
		}
		if s == device.Host || d.Machine.Capabilities().KeepsData {
			all += needs[s]
		}
	}
	if have, ok := AvailableMemory(); ok && !d.Real() && all > have {
		return fault.Of(fault.ErrConfig, fmt.Errorf("%s needed for all emulated memories together, and this machine has %s free", sizing.Bytes(all), sizing.Bytes(have)))
	}
	return nil
}

// Peers are the memories of the machine that a choice says may be borrowed from.
func (d *Devices) Peers(c configs.PeerChoice) ([]device.Space, error) {
	top := d.Machine.Topology()
	var peers []device.Space
	switch {
	case d.Real(): // just those that were named
		for i := range d.GPUs[1:] {
			peers = append(peers, device.HBM(i+1))
		}
	case c.Auto:
		for i := range top.GPUs {
			if p := device.HBM(i); p != d.Space && reach(top, p, d.Space) {
				peers = append(peers, p)
			}
		}
	default:
		for _, i := range c.GPUs {
			peers = append(peers, device.HBM(i))
		}
	}
	return peers, (harvest.Options{Machine: d.Machine, Peers: peers, Reader: d.Space}).EnsureDefaults().Validate()
}

// reach says whether copies go from a to b and back, and from the host to a.
func reach(top *device.Topology, a, b device.Space) bool {
	for _, pair := range []device.Pair{{From: a, To: b}, {From: device.Host, To: a}} {
		if _, err := top.Path(pair.From, pair.To); err != nil {
			return false
		}
	}
	return true
}

// defaultMemory gives emulated memories that nobody has sized what this machine
// can give: what is taken of one is missing from the others, which the budget
// counts.
func defaultMemory(o *emulated.Options) {
	have, ok := AvailableMemory()
	if !ok || o.Topology != nil || o.NoData {
		return
	}
	if o.Host.MemoryBytes == 0 {
		o.Host.MemoryBytes = have
	}
	if len(o.GPUs) == 0 {
		o.GPUs = make([]emulated.GPU, 3)
	}
	for i := range o.GPUs {
		if o.GPUs[i].MemoryBytes == 0 {
			o.GPUs[i].MemoryBytes = have
		}
	}
}

// Sized is an Options.OpenMachine of emulated devices with memories of these sizes, in bytes,
// that hold no data: one GPU that computes, and peers.
func Sized(gpu, host, peer int64, peers int) func() (device.Machine, error) {
	spec := emulated.Options{Virtual: true, NoData: true, Host: emulated.GPU{MemoryBytes: host}}
	spec.GPUs = append(spec.GPUs, emulated.GPU{MemoryBytes: gpu})
	for range peers {
		spec.GPUs = append(spec.GPUs, emulated.GPU{MemoryBytes: peer})
	}
	return func() (device.Machine, error) { return emulated.Open(spec) }
}

// EmulateHelp tells what the setting emulate may hold.
const EmulateHelp = emulated.SpecHelp
