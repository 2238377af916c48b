package devices

import (
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/node/fault"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func spec(s string) configs.Device {
	d := configs.Defaults().Device
	d.Emulate = s
	return d
}

// What cannot be opened says what is wrong, and leaves nothing behind.
func TestOpenRefuses(t *testing.T) {
	broken := errors.New("no backend today")
	machine := func() (device.Machine, error) { return emulated.Open(emulated.Options{}) }
	both := spec("virtual")
	both.Kind = configs.CUDA
	third := spec("gpus=2")
	third.GPU = 2
	for name, c := range map[string]struct {
		o    Options
		kind error
		want string
	}{
		"both":    {Options{Settings: both}, fault.ErrConfig, "--emulate and --device cuda exclude each other"},
		"spec":    {Options{Settings: spec("gpus=0")}, fault.ErrConfig, "--emulate: "},
		"gpu":     {Options{Settings: third}, fault.ErrConfig, "--gpu is 2, and the emulated machine has GPUs 0 to 1"},
		"trace":   {Options{Settings: spec("virtual"), Trace: filepath.Join(t.TempDir(), "no", "such", "folder")}, fault.ErrConfig, "trace: "},
		"machine": {Options{OpenMachine: func() (device.Machine, error) { return nil, broken }}, fault.ErrDevice, "no backend today"},
		"backend": {Options{OpenMachine: machine, OpenBackend: func(device.Machine) (kernels.Backend, error) { return nil, broken }}, fault.ErrDevice, "no backend today"},
	} {
		if _, err := Open(c.o); !errors.Is(err, c.kind) || !strings.HasPrefix(err.Error(), c.want) {
			t.Errorf("%s: %v, want %s", name, err, c.want)
		}
	}
}

// TestHostMemory: --host-memory-gib holds for emulated devices, unless --emulate says otherwise.
func TestHostMemory(t *testing.T) {
	for emulate, want := range map[string]int64{"": 512 << 20, "virtual": 512 << 20, "virtual,nodata": 512 << 20, "host=64MiB": 64 << 20} {
		s := spec(emulate)
		s.HostMemoryGiB = 0.5
		d, err := Open(Options{Settings: s, Emulate: true})
		if err != nil {
			t.Fatal(err)
		}
		if u, err := d.Machine.Usage(device.Host); err != nil || u.Capacity != want {
			t.Errorf("%q: %+v, %v, want %d bytes", emulate, u, err, want)
		}
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	}
}

// TestPeersUnreachable: a peer that the GPU has no access to is named, with what to do; auto leaves it out.
func TestPeersUnreachable(t *testing.T) {
	info, both := device.Info{MemoryBytes: 1 << 30}, map[device.Pair]device.Path{}
	for _, to := range []device.Space{device.HBM(0), device.HBM(1), device.HBM(2)} {
		both[device.Pair{From: device.Host, To: to}], both[device.Pair{From: to, To: device.Host}] = device.Path{}, device.Path{}
	}
	both[device.Pair{From: device.HBM(2), To: device.HBM(0)}], both[device.Pair{From: device.HBM(0), To: device.HBM(2)}] = device.Path{}, device.Path{}
	top := &device.Topology{Host: info, GPUs: []device.Info{info, info, info}, Paths: both}
	d, err := Open(Options{OpenMachine: func() (device.Machine, error) { return emulated.New(emulated.Options{Virtual: true, Topology: top}) }})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	}()
	if peers, err := d.Peers(configs.PeerChoice{Auto: true}); err != nil || len(peers) != 1 || peers[0] != device.HBM(2) {
		t.Errorf("auto: %v, %v", peers, err)
	}
	_, err = d.Peers(configs.PeerChoice{GPUs: []int{2, 1}})
	const want = "--peers: GPU 0 has no access to the memory of GPU 1 (device: from gpu1 to gpu0: no path between these memory spaces); leave it out: experts are then copied from host memory"
	if !errors.Is(err, device.ErrUnreachable) || err.Error() != want {
		t.Errorf("%v, want %s", err, want)
	}
}

func TestPeersAndHold(t *testing.T) {
	d, err := Open(Options{Settings: spec("virtual,nodata,gpus=3,hbm=1GiB,host=2GiB")})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	}()
	for _, c := range []struct {
		choice configs.PeerChoice
		want   int
		fails  bool
	}{{configs.PeerChoice{Auto: true}, 2, false}, {configs.PeerChoice{}, 0, false}, {configs.PeerChoice{GPUs: []int{2}}, 1, false}, {configs.PeerChoice{GPUs: []int{3}}, 1, true}, {configs.PeerChoice{GPUs: []int{0}}, 1, true}} {
		if peers, err := d.Peers(c.choice); len(peers) != c.want || (err != nil) != c.fails {
			t.Errorf("%+v: %v, %v", c.choice, peers, err)
		}
	}
	if _, ok := d.Shared(); ok || d.Real() || d.Name() != "emulated" {
		t.Errorf("%s shares this machine's memory %v, is real %v", d.Name(), ok, d.Real())
	}
	if err := d.CheckFree(map[device.Space]int64{device.HBM(1): 1 << 30, device.Host: 1 << 20}); err != nil {
		t.Error(err)
	}
	if err := d.CheckFree(map[device.Space]int64{device.HBM(1): 1<<30 + 1}); !errors.Is(err, fault.ErrConfig) || !strings.Contains(err.Error(), "gpu1") {
		t.Errorf("more than there is: %v", err)
	}
}
