package planning

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/models"
	"github.com/moeserve/moeserve/node/checkpoint"
	"github.com/moeserve/moeserve/node/fault"
	"github.com/moeserve/moeserve/node/sizing"
	"github.com/moeserve/moeserve/planner"
)

// plannedBackend stands for the backend of GPUs that this machine does not have.
type plannedBackend struct{ activation kernels.DType }

func (b plannedBackend) ActivationDType() kernels.DType { return b.activation }

func (b plannedBackend) cast(kernels.DType) kernels.DType { return b.activation }

// ExpertLayout has the size of all of that backend's layouts, and a name of its own:
// experts that are not row-major, as on Hopper, need the maximum of memory while they are
// loaded.
func (plannedBackend) ExpertLayout(s kernels.ExpertShape) (kernels.ExpertLayout, error) {
	l, err := kernels.RowMajorLayout("cuda", s)
	l.Tag = "planned"
	return l, err
}

// sizedBackend has the sizes of GPUs' backend, and computes nothing: it has no kernels.
type sizedBackend struct {
	kernels.Backend
	sizes plannedBackend
}

func (sizedBackend) Name() string { return "planned" }
func (sizedBackend) Close() error { return nil }

func (b sizedBackend) ActivationDType() kernels.DType            { return b.sizes.ActivationDType() }
func (b sizedBackend) WeightDType(t kernels.DType) kernels.DType { return b.sizes.cast(t) }
func (b sizedBackend) ExpertLayout(s kernels.ExpertShape) (kernels.ExpertLayout, error) {
	return b.sizes.ExpertLayout(s)
}

// Sized is a backend for the sizes alone that a model with weights of a type has on a GPU.
func Sized(weights kernels.DType) kernels.Backend { return sizedBackend{sizes: gpuBackend(weights)} }

// gpuBackend computes in FP16 where the weights are, else in BF16.
func gpuBackend(weights kernels.DType) plannedBackend {
	if weights == kernels.F16 {
		return plannedBackend{kernels.F16}
	}
	return plannedBackend{kernels.BF16}
}

// plannedWorkspace is the GPU memory that the backend allocates itself, in bytes.
const plannedWorkspace = 64 << 20

// NamedOptions of a problem on hardware that need not be this machine.
type NamedOptions struct {
	Settings *configs.Settings
	Explicit Explicit
	Workload planner.Workload
	// CacheLayers and HostLogits as in sizing.Options.
	CacheLayers int
	HostLogits  bool
	// PeerMemory is the memory of each peer, in bytes; 0: the hardware's. The headroom
	// stays free of it.
	PeerMemory int64
	// MaxTTFT and MaxTPOT bound a search, in seconds; 0: no bound.
	MaxTTFT, MaxTPOT float64
}

// NewNamed makes a problem of the hardware that the settings name. Errors wrap
// fault.ErrConfig or fault.ErrModel.
func NewNamed(model *checkpoint.Model, o NamedOptions) (*Problem, error) {
	s := o.Settings
	h, err := LoadHardware(s.Plan.Hardware)
	if err != nil {
		return nil, fault.Of(fault.ErrConfig, err)
	}
	peers, spare, err := o.peers(&h)
	if err == nil {
		err = o.paths(&h)
	}
	if err != nil {
		return nil, fault.Of(fault.ErrConfig, err)
	}
	backend := gpuBackend(model.Config.DType)
	layout, err := models.NewLayout(model.Config, model.Source, backend.cast)
	if err != nil {
		return nil, fault.Of(fault.ErrModel, err)
	}
	f, err := sizing.New(sizing.Options{
		Config: model.Config, Layout: layout, Types: backend, MaxModelLen: s.KV.MaxModelLen, BlockTokens: s.KV.BlockSize, CacheLayers: o.CacheLayers,
		Dynamic: s.Offload.DynamicResidency, InPlace: s.Batch.ExpertAccess != configs.CopyAccess, HostLogits: o.HostLogits, Graphs: !s.Kernels.EnforceEager,
		Clears: peers > 0, Kernels: plannedWorkspace,
	})
	if err != nil {
		return nil, fault.Of(fault.ErrConfig, err)
	}
	h.PeerMemory = peers * (spare / f.ExpertBytes() * f.ExpertBytes())
	p, err := New(f, Options{
		Model: model.Name, Settings: s, Explicit: o.Explicit, Workload: o.Workload,
		Hardware: h, Shares: planner.Shares{GPU: s.Device.GPUMemoryUtilization, Peer: 1},
		MaxTTFT: o.MaxTTFT, MaxTPOT: o.MaxTPOT,
	})
	return p, fault.Of(fault.ErrConfig, err)
}

// peers is the number of peers of the named hardware, and the memory that may be borrowed
// from each, in bytes. As for run, GPUs have the peers that the settings name; emulated
// devices have one where the hardware has any.
func (o *NamedOptions) peers(h *planner.Hardware) (count, spare int64, err error) {
	s := o.Settings
	c, err := s.Device.ParsePeers()
	if err != nil {
		return 0, 0, err
	}
	room, err := s.Harvest.ParseHeadroom()
	if err != nil {
		return 0, 0, err
	}
	each := h.PeerMemory
	if count = int64(len(c.GPUs)); c.Auto && s.Device.Emulate != "" {
		count = min(1, max(each, o.PeerMemory))
	}
	if count == 0 && o.PeerMemory > 0 {
		return 0, 0, errors.New("--peer-memory is the memory of peers, and there are none; name them, as --peers 1")
	}
	if count == 0 && s.Offload.Tier == configs.PeerTier {
		return 0, 0, errors.New("--offload-tier is peer, and there are no peers; name them, as --peers 1")
	}
	if each == 0 {
		each = h.GPUMemory
	}
	if o.PeerMemory > 0 {
		each = o.PeerMemory
	}
	if count > 0 && h.PeerToGPU == 0 {
		reason := ""
		if source := h.Sources["peer_to_gpu_bytes_per_s"]; source != "" {
			reason = " (" + strings.TrimPrefix(source, "none: ") + ")"
		}
		return 0, 0, fmt.Errorf("--peers: hardware %s has no links to peers%s; plan with --peers none, or describe a machine that has such links, with peer_to_gpu_bytes_per_s", h.Name, reason)
	}
	if room.Share > 0 {
		room.Bytes = int64(room.Share * float64(h.GPUMemory))
	}
	if s.Offload.Tier == configs.HostTier {
		count = 0
	}
	return count, max(0, each-room.Bytes), nil
}

// paths sets the rates from the host over the paths that the settings, or the policy's file, ask for.
func (o *NamedOptions) paths(h *planner.Hardware) error {
	s := o.Settings
	c, err := s.Device.ParseHostPaths()
	if err != nil {
		return err
	}
	relays, calibrated := c.Relays, Calibrated(h, s.Device.GPU)
	if n := PolicyPaths(s.Plan.Policy); c.Auto && n > 0 {
		c.Paths = n
	} else if c.Auto {
		relays = calibrated
	}
	if len(relays) == 0 && c.Paths > 1 {
		relays = slices.Clone(calibrated)
		for i := 0; len(relays) < c.Paths-1; i++ {
			if i != s.Device.GPU && !slices.Contains(relays, i) {
				relays = append(relays, i)
			}
		}
		relays = relays[:c.Paths-1]
	}
	if len(relays) > 0 && h.PeerToGPU == 0 {
		return fmt.Errorf("--host-paths: hardware %s has no links between GPUs, over which relays reach the one that computes; plan with --host-paths 1", h.Name)
	}
	Over(h, s.Device.GPU, relays)
	return nil
}
