package node

import (
	"errors"
	"fmt"
	"runtime"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/device/emulated/tenants"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/kernels/cpu"
)

// errNoCUDA: this binary, or this machine, has no GPU that it could use. An error
// that wraps it says what to do.
var errNoCUDA = errors.New("no usable GPU")

// machines opens devices and backend, as the settings say: GPUs where they are
// asked for, or there and nothing else is asked for; else emulated ones.
func (n *Node) machines(o *Options) error {
	s := &o.Settings
	if o.OpenMachine != nil {
		return n.open(o.OpenMachine, o.OpenBackend)
	}
	if s.Device.Kind == configs.CUDA || s.Device.Kind == configs.AutoDevice && s.Device.Emulate == "" && s.Harvest.AvailabilityTrace == "" {
		if s.Device.Emulate != "" {
			return fail(ErrConfig, errors.New("emulate is for emulated devices and device is cuda: leave one of them out"))
		}
		gpus := []int{s.Device.GPU}
		if c, err := s.Device.ParsePeers(); err == nil && (borrows(s) || s.Plan.Policy != configs.NoPolicy && s.Offload.Tier != configs.HostTier) {
			gpus = append(gpus, c.GPUs...)
		}
		m, b, err := openCUDA(o, gpus, n.config.DType)
		switch {
		case err == nil:
			n.use(m, b)
			n.opened = gpus
			return nil
		case s.Device.Kind == configs.CUDA || !errors.Is(err, errNoCUDA):
			return fail(ErrDevice, err)
		}
		o.Log.Info("computing on the CPU", "why", err)
	}
	err := n.open(func() (device.Machine, error) {
		spec, err := emulated.ParseSpec(s.Device.Emulate)
		if err != nil {
			return nil, fail(ErrConfig, fmt.Errorf("emulate: %w", err))
		}
		defaultMemory(&spec)
		n.traceEmulated(&spec)
		return emulated.Open(spec)
	}, nil)
	if err != nil {
		return err
	}
	if have := len(n.machine.Topology().GPUs); s.Device.GPU >= have {
		return fail(ErrConfig, fmt.Errorf("gpu is %d: the emulated machine has %d GPUs, from 0 on", s.Device.GPU, have))
	}
	n.space = device.HBM(s.Device.GPU)
	return nil
}

// open opens a machine and its backend, that of the CPU where backend is nil.
func (n *Node) open(machine func() (device.Machine, error), backend func(device.Machine) (kernels.Backend, error)) error {
	m, err := machine()
	if err != nil {
		return fail(ErrDevice, err)
	}
	if backend == nil {
		n.use(m, cpu.New(cpu.Options{Threads: runtime.GOMAXPROCS(0)}))
		return nil
	}
	b, err := backend(m)
	if err != nil {
		return fail(ErrDevice, errors.Join(err, m.Close()))
	}
	n.use(m, b)
	return nil
}

// use takes over machine and backend, and computes on the machine's first GPU.
func (n *Node) use(m device.Machine, b kernels.Backend) {
	n.machine, n.space, n.backend, n.host = n.traceMachine(m), device.HBM(0), b, b
	n.taker, _ = m.(tenants.Taker)
	n.closers = append(n.closers, n.machine.Close, b.Close)
}

// openHost finds who attends on the host, where somebody is to.
func (n *Node) openHost() {
	if _, ok := n.backend.(*cpu.Backend); !ok && n.settings.Batch.Attention == configs.OnCPU {
		n.host = cpu.New(cpu.Options{})
		n.closers = append(n.closers, n.host.Close)
	}
}

// cast is the type in which the backend wants weights of a type; nil: as they are.
func (n *Node) cast() func(kernels.DType) kernels.DType {
	if b, ok := n.backend.(interface {
		WeightDType(kernels.DType) kernels.DType
	}); ok {
		return b.WeightDType
	}
	return nil
}

// defaultMemory gives emulated memories that nobody has sized what this machine
// can give: what is taken of one is missing from the others, which the budget
// counts.
func defaultMemory(o *emulated.Options) {
	have, ok := availableMemory()
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

// EmulateHelp tells what the setting emulate may hold.
const EmulateHelp = emulated.SpecHelp
