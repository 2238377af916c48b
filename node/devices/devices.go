package devices

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/device/tenants"
	"github.com/moeserve/moeserve/device/trace"
	"github.com/moeserve/moeserve/harvest"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/kernels/cpu"
	"github.com/moeserve/moeserve/node/fault"
	"github.com/moeserve/moeserve/node/sizing"
)

// errNoCUDA: this binary or this machine has no usable GPU. An error that wraps it says what to
// do.
var errNoCUDA = errors.New("no usable GPU")

// Options select the devices to open.
type Options struct {
	Settings configs.Device
	Kernels  configs.Kernels
	// Peers also opens the GPUs whose memory may be borrowed.
	Peers bool
	// Relays are GPUs over whose links copies from and to the host go, too, by the driver's numbers.
	// IfPossible: without them where they cannot be opened.
	Relays     []int
	IfPossible bool
	// Emulate uses emulated devices if the settings do not select a device.
	Emulate bool
	// Weights is the type of the model's weights. Default: bfloat16.
	Weights kernels.DType
	// Trace is the file to write a trace of all streams to. Default: none.
	Trace string
	// Share has several Devices use one machine. Default: each has its own.
	Share *Shared
	// Log receives events that an operator can act on. Default: none.
	Log *slog.Logger
	// OpenMachine opens the machine, instead of the one in the settings, and OpenBackend its
	// backend. Default: kernels/cpu.
	OpenMachine func() (device.Machine, error)
	OpenBackend func(device.Machine) (kernels.Backend, error)
}

// EnsureDefaults sets unset options to their defaults.
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

// Devices are a machine and its compute GPU.
type Devices struct {
	Machine device.Machine
	// Space is the memory of the compute GPU.
	Space device.Space
	// Backend runs operations; on the machine's streams use Enqueuing.
	Backend kernels.Backend
	// GPUs are the driver's indices of the machine's GPUs; nil if they are emulated.
	GPUs []int
	// NoGPU is the reason why the devices are emulated although the settings leave it open; else
	// nil.
	NoGPU error
	// Occupier lets other processes occupy memory of emulated devices; nil on GPUs.
	Occupier tenants.Occupier
	// Limiter lowers the capacity of emulated memories; nil on real devices.
	Limiter interface {
		Limit(s device.Space, bytes int64) error
	}

	share   *Shared         // nil where nobody else uses the machine
	onCPU   kernels.Backend // computes on the CPU beside a GPU; nil until OnCPU is called
	trace   *trace.Writer   // nil without a trace
	log     *slog.Logger
	closers []func() error
}

// Open opens GPUs if the settings select them, or if the machine has some and the settings
// leave the device open; otherwise emulated devices. Errors wrap fault.ErrConfig or
// fault.ErrDevice.
func Open(o Options) (_ *Devices, err error) {
	o = o.EnsureDefaults()
	d := &Devices{log: o.Log, share: o.Share}
	defer func() {
		if err != nil {
			err = errors.Join(err, d.Close())
		}
	}()
	if o.Trace != "" && o.Share != nil {
		return nil, fault.Of(fault.ErrConfig, errSharedTrace)
	}
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
		without := len(gpus)
		for _, g := range o.Relays {
			if !slices.Contains(gpus, g) {
				gpus = append(gpus, g)
			}
		}
		m, b, err := openCUDA(&o, gpus)
		if err != nil && o.IfPossible && len(gpus) > without {
			d.log.Warn("GPUs cannot be used as relays for copies from and to the host", "gpus", gpus[without:], "err", err)
			gpus = gpus[:without]
			m, b, err = openCUDA(&o, gpus)
		}
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
	defaultMemory(&spec, int64(s.HostMemoryGiB*(1<<30)))
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

// open opens a machine and its backend. tells: the machine itself reports what its streams do
// to the trace.
func (d *Devices) open(machine func() (device.Machine, error), backend func(device.Machine) (kernels.Backend, error), tells bool) error {
	m, err := d.share.open(machine)
	if err != nil {
		return fault.Of(fault.ErrDevice, err)
	}
	b, err := backend(m)
	if err != nil {
		return fault.Of(fault.ErrDevice, errors.Join(err, d.share.close(m)))
	}
	d.use(m, b, tells)
	return nil
}

// use takes ownership of machine and backend; the machine's first GPU computes.
func (d *Devices) use(m device.Machine, b kernels.Backend, tells bool) {
	d.Machine, d.Space, d.Backend = d.traced(m, tells), device.HBM(0), b
	d.Occupier, _ = m.(tenants.Occupier)
	d.Limiter, _ = m.(interface {
		Limit(s device.Space, bytes int64) error
	})
	closeMachine := d.Machine.Close
	if d.share != nil { // which no trace wraps
		closeMachine = func() error { return d.share.close(m) }
	}
	d.closers = append(d.closers, closeMachine, b.Close)
}

// Close closes everything that was opened. An allocation that is still alive is an error.
func (d *Devices) Close() error {
	var errs []error
	for i := len(d.closers) - 1; i >= 0; i-- {
		errs = append(errs, d.closers[i]())
	}
	d.closers = nil
	return errors.Join(errs...)
}

// cpuSpin is how long threads poll for the work of the next layer before they sleep: longer than the GPU's part
// of a layer takes, and what is between two steps. Waking them would take as long as some experts of small models.
const cpuSpin = 2 * time.Millisecond

// CPUThreads is the number of threads of OnCPU. Beside a GPU some of the machine's cores are left
// to the threads that feed the GPU.
func (d *Devices) CPUThreads() int {
	threads := runtime.GOMAXPROCS(0)
	if _, ok := d.Backend.(*cpu.Backend); ok {
		return threads
	}
	return max(1, threads-max(1, threads*3/16))
}

// OnCPU returns a backend for attention and experts on the CPU.
func (d *Devices) OnCPU() kernels.Backend {
	if _, ok := d.Backend.(*cpu.Backend); ok {
		return d.Backend
	}
	if d.onCPU == nil {
		d.onCPU = cpu.New(cpu.Options{Threads: d.CPUThreads(), Spin: cpuSpin})
		d.closers = append(d.closers, d.onCPU.Close)
	}
	return d.onCPU
}

// Cast returns the type that the backend wants weights of a type converted to; nil: no
// conversion.
func (d *Devices) Cast() func(kernels.DType) kernels.DType {
	if b, ok := d.Backend.(interface {
		WeightDType(kernels.DType) kernels.DType
	}); ok {
		return b.WeightDType
	}
	return nil
}

// Name returns the name of the compute GPU.
func (d *Devices) Name() string {
	info, _ := d.Machine.Topology().Info(d.Space)
	return info.Name
}

// Real reports whether the devices are GPUs, not emulated.
func (d *Devices) Real() bool { return d.GPUs != nil }

// Usages returns the memory usage of the compute GPU and of the host.
func (d *Devices) Usages() (gpu, host device.Usage, err error) {
	if gpu, err = d.Machine.Usage(d.Space); err != nil {
		return gpu, host, err
	}
	host, err = d.Machine.Usage(device.Host)
	return gpu, host, err
}

// Shared returns the memory that this machine has available for all emulated memories together;
// false if the devices have memories of their own, keep no data, or the system does not report
// it.
func (d *Devices) Shared() (int64, bool) {
	if c := d.Machine.Capabilities(); !c.Emulated || !c.KeepsData {
		return 0, false
	}
	return AvailableMemory()
}

// CheckFree returns an error unless the devices have that many bytes free: it wraps
// fault.ErrConfig and names the memory. Emulated devices all use this machine's memory.
func (d *Devices) CheckFree(needs map[device.Space]int64) error {
	var all int64
	for _, s := range slices.Sorted(maps.Keys(needs)) {
		u, err := d.Machine.Usage(s)
		if err != nil {
			return fault.Of(fault.ErrDevice, err)
		}
		if needs[s] > u.Free() {
			return fault.Of(fault.ErrConfig, fmt.Errorf("out of memory on %s: need %s, free %s", s, sizing.Bytes(needs[s]), sizing.Bytes(max(u.Free(), 0))))
		}
		if s == device.Host || d.Machine.Capabilities().KeepsData {
			all += needs[s]
		}
	}
	if have, ok := AvailableMemory(); ok && !d.Real() && all > have {
		return fault.Of(fault.ErrConfig, fmt.Errorf("out of memory: all emulated memories together need %s, this machine has %s free", sizing.Bytes(all), sizing.Bytes(have)))
	}
	return nil
}

// Peers returns the memories of the machine that may be borrowed by a setting.
func (d *Devices) Peers(c configs.PeerChoice) ([]device.Space, error) {
	top := d.Machine.Topology()
	var peers []device.Space
	switch {
	case d.Real(): // exactly the GPUs that were named, if they were opened
		for i, g := range d.GPUs[1:] {
			if slices.Contains(c.GPUs, g) {
				peers = append(peers, device.HBM(i+1))
			}
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
	for _, p := range peers {
		if _, known := top.Info(p); !known || p == d.Space {
			continue
		}
		if _, err := top.Path(p, d.Space); err != nil {
			return peers, d.partitioned(fmt.Errorf("--peers: GPU %d has no access to the memory of GPU %d (%w); leave it out: experts are then copied from host memory", d.Number(d.Space), d.Number(p), err))
		}
	}
	err := (harvest.Options{Machine: d.Machine, Peers: peers, Reader: d.Space}).EnsureDefaults().Validate()
	return peers, d.partitioned(err)
}

// partitioned adds to an error about GPUs that some are divided by MIG.
func (d *Devices) partitioned(err error) error {
	if err != nil && d.Real() {
		if mig := partitioned(); mig != "" {
			return fmt.Errorf("%w; %s", err, mig)
		}
	}
	return err
}

// Number is the number of a GPU as users name it.
func (d *Devices) Number(s device.Space) int {
	i, _ := s.GPU()
	if d.Real() {
		return d.GPUs[i]
	}
	return i
}

// Relay returns the memory of a GPU, by its number, over whose link copies between the host and the GPU
// that computes may go; the error says why they may not.
func (d *Devices) Relay(number int) (device.Space, error) {
	top := d.Machine.Topology()
	at := number
	if d.Real() {
		at = slices.Index(d.GPUs, number)
	}
	if at < 0 || at >= len(top.GPUs) {
		return 0, fmt.Errorf("there is no GPU %d: the machine has GPUs 0 to %d", number, len(top.GPUs)-1)
	}
	s := device.HBM(at)
	for _, ends := range [][2]device.Space{{device.Host, s}, {s, device.Host}, {s, d.Space}, {d.Space, s}} {
		if _, err := top.Path(ends[0], ends[1]); err != nil {
			return s, fmt.Errorf("GPU %d cannot relay copies between the host and GPU %d: %w", number, d.Number(d.Space), err)
		}
	}
	return s, nil
}

// partition is a GPU that is divided by MIG.
type partition struct {
	uuid      string
	instances int
}

// describePartitions is the end of an error about GPUs that cannot be used. An instance can be
// a peer only where the driver allows it access to another GPU; then it is one like any other.
func describePartitions(all []partition) string {
	if len(all) == 0 {
		return ""
	}
	var each []string
	for _, p := range all {
		each = append(each, fmt.Sprintf("%s (%d instances)", p.uuid, p.instances))
	}
	return "MIG is enabled on " + strings.Join(each, ", ") + ", and CUDA gives a process one instance and no peer access to others: disable it there (nvidia-smi -mig 0), or name other --peers"
}

// reach reports whether copies are possible from a to b and back, and from the host to a.
func reach(top *device.Topology, a, b device.Space) bool {
	for _, pair := range []device.Pair{{From: a, To: b}, {From: device.Host, To: a}} {
		if _, err := top.Path(pair.From, pair.To); err != nil {
			return false
		}
	}
	return true
}

// defaultMemory gives each emulated memory without a size all that this machine has available:
// they share it, which the budget takes into account. host is the size of host memory in bytes, 0: not said.
func defaultMemory(o *emulated.Options, host int64) {
	have, ok := AvailableMemory()
	if o.Topology == nil && o.Host.MemoryBytes == 0 {
		o.Host.MemoryBytes = host
	}
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

// EmulateHelp describes the setting emulate.
const EmulateHelp = emulated.SpecHelp
