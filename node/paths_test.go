package node_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/node/fault"
	"github.com/moeserve/moeserve/tools/racedetector"
)

// calibrated writes a hardware file for GPU 0 of a machine of four, by which small copies are relayed.
func calibrated(t *testing.T, relays ...int) string {
	t.Helper()
	rates := []float64{1e9, 2e9, 3e9, 4e9}[:1+len(relays)]
	data, err := json.Marshal(map[string]any{
		"base": "h200", "name": "test", "host_to_gpu_bytes_per_s": rates,
		"multipath": configs.Multipath{
			Relays: relays, GPUToHost: rates, ChunkIn: 16 << 10, ChunkOut: 8 << 10, ThresholdIn: 32 << 10, ThresholdOut: 16 << 10, Depth: 2,
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "hardware.json")
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// four is a machine of four GPUs with links to the host and to each other.
func four(s emulated.Schedule, seed uint64) emulated.Options {
	o := linked(s)
	o.GPUs, o.Seed = slices.Repeat([]emulated.GPU{{MemoryBytes: 256 << 20}}, 4), seed
	return o
}

// relayed is the bytes that each GPU's links have carried for others, from the host and to it.
func relayed(n *node.Node) (in, out map[device.Space]int64) {
	in, out = map[device.Space]int64{}, map[device.Space]int64{}
	for _, l := range n.Observe().Links() {
		if l.From == device.Host {
			in[l.To] += l.RelayedBytes
		} else if l.To == device.Host {
			out[l.From] += l.RelayedBytes
		}
	}
	return in, out
}

// TestHostPaths: with copies over 1, 2 and 4 links the tokens are those of a fully resident model, for
// fractions, tiers and KV tiers, and the relays that were asked for carry some of the copies.
func TestHostPaths(t *testing.T) {
	want := generate(t, open(t, machine{options: emulated.Options{}}, nil))
	for _, c := range []struct {
		name  string
		paths string
		// relays that carry copies
		relays []int
		change func(*configs.Settings)
	}{
		{"one", "1", nil, nil},
		{"two", "2", []int{3}, nil},
		{"four", "4", []int{1, 2, 3}, nil},
		{"calibrated", "auto", []int{1, 2, 3}, nil},
		{"listed", "2,", []int{2}, nil},
		{"relays that lend", "4", []int{1, 2, 3}, func(s *configs.Settings) { s.Offload.Tier, s.Device.Peers = configs.AnyTier, "1,2" }},
		{"KV", "4", []int{1, 2, 3}, func(s *configs.Settings) {
			s.KV.OffloadingSize, s.KV.NumGPUBlocksOverride, s.Batch.MaxNumSeqs = 0.25, 24, 4
		}},
	} {
		for i, fraction := range []float64{0.5, 1} {
			t.Run(fmt.Sprintf("%s/%v", c.name, fraction), func(t *testing.T) {
				t.Parallel()
				n := open(t, machine{fraction: fraction, options: four(emulated.Random, uint64(i))}, func(s *configs.Settings) {
					s.Plan.Hardware, s.Device.HostPaths, s.Offload.Tier = calibrated(t, 3, 2, 1), c.paths, configs.HostTier
					if c.change != nil {
						c.change(s)
					}
				})
				if in, _ := relayed(n); fraction < 1 && len(c.relays) > 0 && in[device.HBM(c.relays[0])] == 0 {
					t.Errorf("no weight was loaded over a relay: %v", in)
				}
				if got := generate(t, n); got != want {
					t.Errorf("tokens %s, want %s", got, want)
				}
				in, out := relayed(n)
				for gpu := range 4 {
					if is := slices.Contains(c.relays, gpu); is != (in[device.HBM(gpu)] > 0) || out[device.HBM(gpu)] > 0 && !is {
						t.Errorf("relays %v: %v bytes were relayed in, %v out", c.relays, in, out)
						break
					}
				}
				if c.name == "KV" && len(out) == 0 {
					t.Error("no KV block was stored over a relay")
				}
			})
		}
	}
}

// TestHostPathsFaults: relays that are revoked, lost, or whose link crawls or fails change no token, and
// copies go on.
func TestHostPathsFaults(t *testing.T) {
	want := generate(t, open(t, machine{options: emulated.Options{}}, nil))
	for name, hurt := range map[string]func(t *testing.T, m *emulated.Machine){
		"revoked": func(t *testing.T, m *emulated.Machine) {
			u, err := m.Usage(device.HBM(1))
			if err == nil {
				err = m.Occupy(device.HBM(1), u.Free())
			}
			if err != nil {
				t.Error(err)
			}
		},
		"lost": func(t *testing.T, m *emulated.Machine) {
			if err := m.Lose(1); err != nil {
				t.Error(err)
			}
		},
		"failing": func(t *testing.T, m *emulated.Machine) {
			m.Inject(&emulated.Fault{Kind: emulated.FailCopy, Times: -1, Match: func(p emulated.Point) bool { return p.To == device.HBM(1) }})
		},
		"failing on": func(t *testing.T, m *emulated.Machine) {
			m.Inject(&emulated.Fault{Kind: emulated.FailCopy, Times: -1, Match: func(p emulated.Point) bool { return p.From == device.HBM(1) }})
		},
		"stalled for a while": func(t *testing.T, m *emulated.Machine) {
			m.Inject(&emulated.Fault{Kind: emulated.StallCopy, Times: 5, For: 20 * time.Millisecond, Match: func(p emulated.Point) bool { return p.To == device.HBM(1) }})
		},
	} {
		for seed := range uint64(racedetector.Fewer(2, 1)) { // in virtual time
			t.Run(fmt.Sprintf("%s/%d", name, seed), func(t *testing.T) {
				t.Parallel()
				var m *emulated.Machine
				s := configs.Defaults()
				s.Offload.Fraction, s.Batch.MaxNumBatchedTokens, s.Offload.Tier = 1, 192, configs.HostTier
				s.Plan.Hardware = calibrated(t, 1, 2)
				n, err := node.Open(t.Context(), node.Options{Settings: s, HostLogits: true, OpenMachine: func() (_ device.Machine, err error) {
					m, err = emulated.New(four(emulated.Random, seed))
					return m, err
				}})
				if err != nil {
					t.Fatal(err)
				}
				defer func() {
					if err := n.Close(); err != nil && name != "lost" { // its buffers went with it
						t.Error(err)
					}
				}()
				if got := generate(t, n); got != want {
					t.Errorf("tokens %s, want %s", got, want)
				}
				before, _ := relayed(n)
				hurt(t, m)
				for range 3 {
					if got := generate(t, n); got != want {
						t.Errorf("tokens %s after the relay is hurt, want %s", got, want)
					}
				}
				after, _ := relayed(n)
				if before[device.HBM(1)] == 0 || after[device.HBM(2)] == before[device.HBM(2)] {
					t.Errorf("relayed before %v, after %v", before, after)
				}
			})
		}
	}
}

// TestHostPathsRestored: a relay whose memory was revoked has none of it, and works again when there is room.
func TestHostPathsRestored(t *testing.T) {
	racedetector.SkipSequential(t) // in virtual time
	var m *emulated.Machine
	s := configs.Defaults()
	s.Offload.Fraction, s.Offload.Tier, s.Harvest.Cooldown, s.Plan.Hardware = 1, configs.HostTier, "20ms", calibrated(t, 1)
	n, err := node.Open(t.Context(), node.Options{Settings: s, OpenMachine: func() (_ device.Machine, err error) {
		m, err = emulated.New(four(emulated.Eager, 0))
		return m, err
	}})
	if err != nil {
		t.Fatal(err)
	}
	held := func() int64 {
		u, err := m.Usage(device.HBM(1))
		if err != nil {
			t.Fatal(err)
		}
		return u.Allocated
	}
	const kept = 3 * (16<<10 + 8<<10)
	generate(t, n)
	if got := held(); got != kept {
		t.Errorf("%d bytes are kept, want %d", got, kept)
	}
	u, err := m.Usage(device.HBM(1))
	if err == nil {
		err = m.Occupy(device.HBM(1), u.Free())
	}
	if err != nil {
		t.Fatal(err)
	}
	generate(t, n)
	before, _ := relayed(n)
	generate(t, n)
	if after, _ := relayed(n); held() != 0 || after[device.HBM(1)] != before[device.HBM(1)] {
		t.Errorf("revoked: %d bytes are held, and %v more were relayed than %v", held(), after, before)
	}
	if err := m.Occupy(device.HBM(1), -u.Free()); err != nil {
		t.Fatal(err)
	}
	for range 20 {
		generate(t, n)
	}
	if after, _ := relayed(n); held() != kept || after[device.HBM(1)] == before[device.HBM(1)] {
		t.Errorf("restored: %d bytes are held at %v, and %v were relayed, before %v", held(), m.Now(), after, before)
	}
	if err := n.Close(); err != nil {
		t.Error(err)
	}
}

// Contradictions are errors that name what contradicts.
func TestHostPathsRefused(t *testing.T) {
	apart := func() (device.Machine, error) {
		top := &device.Topology{Host: device.Info{MemoryBytes: 1 << 30}, Paths: map[device.Pair]device.Path{}}
		for i := range 3 {
			top.GPUs = append(top.GPUs, device.Info{MemoryBytes: 256 << 20})
			top.Paths[device.Pair{From: device.Host, To: device.HBM(i)}] = device.Path{}
			top.Paths[device.Pair{From: device.HBM(i), To: device.Host}] = device.Path{}
		}
		top.Paths[device.Pair{From: device.HBM(1), To: device.HBM(0)}] = device.Path{}
		top.Paths[device.Pair{From: device.HBM(0), To: device.HBM(1)}] = device.Path{}
		return emulated.Open(emulated.Options{Topology: top, Virtual: true})
	}
	full := func() (device.Machine, error) {
		m, err := emulated.New(four(emulated.Eager, 0))
		if err == nil {
			err = m.Occupy(device.HBM(2), 240<<20)
		}
		return m, err
	}
	for _, c := range []struct {
		name, paths string
		open        func() (device.Machine, error)
		want        string // empty: it opens
	}{
		{"the GPU itself", "1,0", full, "names the GPU that computes, 0, whose own link is always used"},
		{"more than there are", "5", full, "--host-paths is 5: there is no GPU 4: the machine has GPUs 0 to 3"},
		{"one that is not there", "1,7", full, "--host-paths is 1,7: there is no GPU 7"},
		{"one without access", "2,", apart, "--host-paths is 2,: GPU 2 cannot relay copies between the host and GPU 0: device: from gpu2 to gpu0: no path"},
		{"one with access", "1,", apart, ""},
		{"one without memory", "1,2", full, "--host-paths is 1,2: GPU 2 cannot be a relay: its buffers need 48.00 MiB, and there are 16.00 MiB free, of which --harvest-headroom keeps 12.80 MiB; name others"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := configs.Defaults()
			s.Device.HostPaths, s.Device.Peers = c.paths, "none"
			n, err := node.Open(t.Context(), node.Options{Settings: s, OpenMachine: c.open})
			if err == nil {
				err = n.Close()
			}
			if c.want == "" && err != nil || c.want != "" && (!errors.Is(err, fault.ErrConfig) || !strings.Contains(err.Error(), c.want)) {
				t.Errorf("%v; want %s", err, c.want)
			}
		})
	}
	// Of calibrated relays those that cannot be used are left out.
	n := func() *node.Node {
		s := configs.Defaults()
		s.Plan.Hardware, s.Offload.Fraction, s.Offload.Tier = calibrated(t, 3, 2, 1), 1, configs.HostTier
		n, err := node.Open(t.Context(), node.Options{Settings: s, OpenMachine: func() (device.Machine, error) {
			m, err := emulated.New(four(emulated.Eager, 0))
			if err == nil {
				err = errors.Join(m.Occupy(device.HBM(2), 244<<20), m.Occupy(device.HBM(1), 244<<20))
			}
			return m, err
		}})
		if err != nil {
			t.Fatal(err)
		}
		return n
	}()
	generate(t, n)
	if in, _ := relayed(n); in[device.HBM(1)]+in[device.HBM(2)] > 0 || in[device.HBM(3)] == 0 {
		t.Errorf("relayed in: %v", in)
	}
	if err := n.Close(); err != nil {
		t.Error(err)
	}
}

// TestHostPathsRate: a step that waits for experts from the host takes as long as the links that are used
// together need, whatever they share, and beside a copy of another program on one of them.
func TestHostPathsRate(t *testing.T) {
	racedetector.SkipSequential(t) // in virtual time
	const pcie, nvlink = 55e9, 395e9
	second := emulated.Span{Until: time.Hour}
	for _, c := range []struct {
		name  string
		paths string
		links func(*emulated.Options)
		rate  float64
	}{
		{"own", "1", nil, pcie},
		{"two", "2", nil, 2 * pcie},
		{"four", "4", nil, 4 * pcie},
		{"behind one root", "4", func(o *emulated.Options) {
			o.HostRoots = []emulated.Root{{GPUs: []int{0, 1, 2, 3}, BytesPerSecond: pcie}}
		}, pcie},
		{"behind two roots", "4", func(o *emulated.Options) {
			o.HostRoots = []emulated.Root{{GPUs: []int{0, 1}, BytesPerSecond: pcie}, {GPUs: []int{2, 3}, BytesPerSecond: pcie}}
		}, 2 * pcie},
		{"as fast as the link into the GPU", "4", func(o *emulated.Options) { o.PeerLink.BytesPerSecond = 80e9 }, pcie + 80e9},
		{"beside others on a relay", "2", func(o *emulated.Options) {
			o.Traffic = []emulated.Traffic{{GPU: 1, BytesPerSecond: pcie, Span: second}}
		}, 1.5 * pcie},
		{"beside others on its own", "2", func(o *emulated.Options) {
			o.Traffic = []emulated.Traffic{{GPU: 0, BytesPerSecond: pcie, Span: second}}
		}, 1.5 * pcie},
		{"with a relay that crawls", "3", func(o *emulated.Options) {
			o.HostRates = []emulated.HostRate{{GPU: 1, BytesPerSecond: 5e9, Span: second}}
		}, 2*pcie + 5e9},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := configs.Defaults()
			s.Model.Name, s.Model.LoadFormat, s.Model.NumHiddenLayers, s.Offload.Fraction, s.KV.MaxModelLen = "mixtral-8x7b", configs.LoadDummy, 3, 1, 1024
			s.Offload.Tier, s.Device.HostPaths = configs.HostTier, c.paths
			x := timed{T: t}
			var err error
			x.n, err = node.Open(t.Context(), node.Options{Settings: s, OpenMachine: func() (_ device.Machine, err error) {
				o := emulated.Options{
					Virtual: true, NoData: true, HostLink: emulated.Link{BytesPerSecond: pcie},
					PeerLink: emulated.Link{BytesPerSecond: nvlink},
					GPUs:     slices.Repeat([]emulated.GPU{{MemoryBytes: 141e9, FlopsPerSecond: 800e12, BytesPerSecond: 4.8e12}}, 4),
				}
				if c.links != nil {
					c.links(&o)
				}
				x.m, err = emulated.New(o)
				return x.m, err
			}})
			if err != nil {
				t.Fatal(err)
			}
			defer func() {
				if err := x.n.Close(); err != nil {
					t.Error(err)
				}
			}()
			took, bytes := x.step()
			if rate := float64(bytes) / took.Seconds(); rate < 0.95*c.rate || rate > 1.01*c.rate {
				t.Errorf("%d bytes in %v: %.1f GB/s, want %.1f", bytes, took, rate/1e9, c.rate/1e9)
			}
		})
	}
}

// TestHostPathsMode: in mode wait a relay carries less of a step's copies beside those of another program on its
// link, and half where there are none.
func TestHostPathsMode(t *testing.T) {
	const pcie = 55e9
	relayedPart := func(mode string, busy bool) float64 {
		s := configs.Defaults()
		s.Model.Name, s.Model.LoadFormat, s.Model.NumHiddenLayers, s.Offload.Fraction, s.KV.MaxModelLen = "mixtral-8x7b", configs.LoadDummy, 3, 1, 1024
		s.Offload.Tier, s.Device.HostPaths, s.Device.HostPathsMode = configs.HostTier, "2", mode
		x := timed{T: t}
		var err error
		x.n, err = node.Open(t.Context(), node.Options{Settings: s, OpenMachine: func() (_ device.Machine, err error) {
			o := emulated.Options{
				Virtual: true, NoData: true, HostLink: emulated.Link{BytesPerSecond: pcie}, PeerLink: emulated.Link{BytesPerSecond: 395e9},
				GPUs: slices.Repeat([]emulated.GPU{{MemoryBytes: 141e9, FlopsPerSecond: 800e12, BytesPerSecond: 4.8e12}}, 2),
			}
			if busy {
				o.Traffic = []emulated.Traffic{{GPU: 1, BytesPerSecond: pcie, Span: emulated.Span{Until: time.Hour}}}
			}
			x.m, err = emulated.New(o)
			return x.m, err
		}})
		if err != nil {
			t.Fatal(err)
		}
		defer func() {
			if err := x.n.Close(); err != nil {
				t.Error(err)
			}
		}()
		before, _ := relayed(x.n)
		_, bytes := x.run(10)
		after, _ := relayed(x.n)
		return float64(after[device.HBM(1)]-before[device.HBM(1)]) / float64(bytes)
	}
	alone, takes, waits := relayedPart(configs.WaitHostPaths, false), relayedPart(configs.TakeHostPaths, true), relayedPart(configs.WaitHostPaths, true)
	if alone < 0.45 || takes < 0.3 || waits > 0.8*takes || waits == 0 {
		t.Errorf("relayed of a step's copies: %.2f without others, %.2f beside them, and %.2f in mode wait", alone, takes, waits)
	}
}

// TestHostPathsPromotion: experts are promoted to peers over the peers' own links, and never through the
// GPU that computes.
func TestHostPathsPromotion(t *testing.T) {
	n := open(t, machine{fraction: 1, options: four(emulated.Random, 3)}, func(s *configs.Settings) {
		s.Plan.Hardware, s.Offload.Tier, s.Device.Peers = calibrated(t, 1), configs.PeerTier, "2,3"
	})
	var promoted int64
	for _, l := range n.Observe().Links() {
		if l.From == device.HBM(0) {
			t.Errorf("%d bytes from %s to %s", l.Bytes, l.From, l.To)
		}
		if l.From == device.Host && (l.To == device.HBM(2) || l.To == device.HBM(3)) {
			promoted += l.Bytes
		}
	}
	if e := n.Observe().Experts(); e.PeerCopies != 48 || promoted < e.MigratedBytes || promoted == 0 {
		t.Errorf("%d peer copies, %d bytes from the host, %d migrated", e.PeerCopies, promoted, e.MigratedBytes)
	}
}

// TestHostPathsPolicy: a policy decides how many of the relays are used, and one of a file names them.
func TestHostPathsPolicy(t *testing.T) {
	for _, c := range []struct {
		name, policy, paths, hardware string
		relays                        []int
	}{
		{"found", "auto", "auto", calibrated(t, 2, 3), []int{2, 3}},
		{"none calibrated", "auto", "auto", "", nil},
		{"given", "auto", "2", calibrated(t, 2, 3), []int{2}},
		{"of a file", `{"batch": 8, "resident_experts": 0, "host_paths": 2}`, "auto", calibrated(t, 2, 3), []int{2}},
		{"of a file, not calibrated", `{"batch": 8, "resident_experts": 0, "host_paths": 3}`, "auto", "", []int{1, 2}},
		{"of a file, and given", `{"batch": 8, "resident_experts": 0, "host_paths": 3}`, "3,", "", []int{3}},
		{"of a file, one", `{"batch": 8, "resident_experts": 0}`, "auto", calibrated(t, 2, 3), nil},
		{"of a file, more than there are", `{"batch": 8, "resident_experts": 0, "host_paths": 9}`, "auto", "", []int{1, 2, 3}},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := configs.Defaults()
			s.Offload.Fraction, s.Offload.Tier, s.Device.HostPaths, s.Plan.Hardware, s.Plan.Policy = 1, configs.HostTier, c.paths, c.hardware, configs.PlannedPolicy
			if c.policy != "auto" {
				path := filepath.Join(t.TempDir(), "policy.json")
				if err := os.WriteFile(path, []byte(c.policy), 0o600); err != nil {
					t.Fatal(err)
				}
				s.Plan.Policy = configs.PolicySource(path)
			}
			n, err := node.Open(t.Context(), node.Options{Settings: s, OpenMachine: func() (device.Machine, error) { return emulated.Open(four(emulated.Eager, 0)) }})
			if err != nil {
				t.Fatal(err)
			}
			if i := n.Info(); !slices.Equal(i.Relays, c.relays) || i.Planned.Prediction.Policy.HostPaths != 1+len(c.relays) {
				t.Errorf("relays %v, %d paths planned, want relays %v", i.Relays, i.Planned.Prediction.Policy.HostPaths, c.relays)
			}
			if err := n.Close(); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestHostPathsBesidePeers: relays share the link into the GPU with peers' reads, and do not make fetches from
// peer and host together slower.
func TestHostPathsBesidePeers(t *testing.T) {
	const pcie, nvlink = 55e9, 395e9
	rate := func(paths string) float64 {
		s := configs.Defaults()
		s.Model.Name, s.Model.LoadFormat, s.Model.NumHiddenLayers, s.Offload.Fraction, s.KV.MaxModelLen = "mixtral-8x7b", configs.LoadDummy, 3, 1, 1024
		s.Offload.Tier, s.Device.Peers, s.Device.HostPaths = configs.PeerTier, "1", paths
		x := timed{T: t}
		var err error
		x.n, err = node.Open(t.Context(), node.Options{Settings: s, OpenMachine: func() (_ device.Machine, err error) {
			x.m, err = emulated.New(emulated.Options{
				Virtual: true, NoData: true, HostLink: emulated.Link{BytesPerSecond: pcie}, PeerLink: emulated.Link{BytesPerSecond: nvlink},
				GPUs: slices.Repeat([]emulated.GPU{{MemoryBytes: 141e9, FlopsPerSecond: 800e12, BytesPerSecond: 4.8e12}}, 4),
			})
			return x.m, err
		}})
		if err != nil {
			t.Fatal(err)
		}
		defer func() {
			if err := x.n.Close(); err != nil {
				t.Error(err)
			}
		}()
		all := func() int64 {
			e := x.n.Observe().Experts()
			return e.Fetched[experts.Host] + e.Fetched[experts.Peer]
		}
		x.run(4) // rates are measured
		from, before := x.m.Now(), all()
		x.run(20)
		return float64(all()-before) / (x.m.Now() - from).Seconds()
	}
	one := rate("1")
	for _, paths := range []string{"2", "4"} {
		if got := rate(paths); got < 0.97*one || got > 1.01*(pcie+nvlink) {
			t.Errorf("%s paths: %.1f GB/s, over one %.1f", paths, got/1e9, one/1e9)
		}
	}
}

// TestHostPathsConcurrently: relays' memory is revoked and borrowed again while requests run, in real
// concurrency; the tokens stay the same.
func TestHostPathsConcurrently(t *testing.T) {
	want := generate(t, open(t, machine{options: emulated.Options{}}, nil))
	o := four(emulated.Eager, 0)
	o.Virtual, o.Schedule = false, emulated.Eager
	var m *emulated.Machine
	s := configs.Defaults()
	s.Offload.Fraction, s.Batch.MaxNumBatchedTokens, s.Offload.Tier, s.Harvest.Cooldown = 1, 192, configs.HostTier, "10ms"
	s.Plan.Hardware = calibrated(t, 1, 2, 3)
	n, err := node.Open(t.Context(), node.Options{Settings: s, HostLogits: true, OpenMachine: func() (_ device.Machine, err error) {
		m, err = emulated.New(o)
		return m, err
	}})
	if err != nil {
		t.Fatal(err)
	}
	stop, ended := make(chan struct{}), make(chan int)
	go func() {
		times := 0
		defer func() { ended <- times }()
		for ; ; times++ {
			p := device.HBM(1 + times%3)
			u, err := m.Usage(p)
			if err == nil {
				err = m.Occupy(p, u.Free())
			}
			if err != nil {
				t.Error(err)
				return
			}
			wait := time.After(20 * time.Millisecond)
			select {
			case <-wait:
			case <-stop:
			}
			if err := m.Occupy(p, -u.Free()); err != nil {
				t.Error(err)
				return
			}
			select {
			case <-stop:
				return
			default:
			}
		}
	}()
	for range 4 {
		if got := generate(t, n); got != want {
			t.Errorf("tokens %s, want %s", got, want)
		}
	}
	close(stop)
	if times := <-ended; times == 0 {
		t.Error("no memory was taken")
	}
	if in, _ := relayed(n); in[device.HBM(1)]+in[device.HBM(2)]+in[device.HBM(3)] == 0 {
		t.Error("nothing was relayed")
	}
	if err := n.Close(); err != nil {
		t.Error(err)
	}
}
