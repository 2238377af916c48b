package node_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/node/fault"
	"github.com/moeserve/moeserve/node/observe"
	"github.com/moeserve/moeserve/tools/racedetector"
)

// linked is a virtual machine on which time goes by.
func linked(s emulated.Schedule) emulated.Options {
	return emulated.Options{
		Virtual: true, Check: true, Schedule: s, Seed: 11,
		HostLink: emulated.Link{BytesPerSecond: 1e9, Latency: 10 * time.Microsecond},
		PeerLink: emulated.Link{BytesPerSecond: 8e9, Latency: 5 * time.Microsecond},
		GPUs:     slices.Repeat([]emulated.GPU{{MemoryBytes: 256 << 20}}, 3),
	}
}

// TestTiers: with experts in each tier the built-in model's completions are those of a fully
// resident model, and the report counts the tiers.
func TestTiers(t *testing.T) {
	want := generate(t, open(t, machine{options: emulated.Options{}}, nil))
	for _, c := range []struct {
		name   string
		change func(*configs.Settings)
		homes  map[string]int
	}{
		{"host", func(s *configs.Settings) { s.Offload.Tier = configs.HostTier }, map[string]int{"resident": 24, "host": 24}},
		{"none", func(s *configs.Settings) { s.Device.Peers = "none" }, map[string]int{"resident": 24, "host": 24}},
		{"peer", func(s *configs.Settings) { s.Offload.Tier = configs.PeerTier }, map[string]int{"resident": 24, "peer": 24}},
		{"one peer", func(s *configs.Settings) { s.Offload.Tier, s.Device.Peers = configs.PeerTier, "2" }, map[string]int{"resident": 24, "peer": 24}},
		{"auto", func(s *configs.Settings) { s.Harvest.MigrationLimit = "0" }, map[string]int{"resident": 24, "peer": 24}},
		{"auto in little memory", func(s *configs.Settings) { s.Harvest.Headroom, s.Harvest.MigrationLimit = "255MiB", "0" }, map[string]int{"resident": 24, "peer": 14, "host": 10}},
		{"listed", func(s *configs.Settings) {
			s.Offload.Fraction, s.Offload.ResidentExperts, s.Offload.Tier = 0, "0:0-7;3:1,4", configs.PeerTier
		}, map[string]int{"resident": 10, "peer": 38}},
		{"adapted", func(s *configs.Settings) { s.Offload.DynamicResidency, s.Harvest.MigrationLimit = true, "0" }, nil},
		{"locality", func(s *configs.Settings) { s.Offload.Tier, s.Harvest.Policy = configs.PeerTier, "locality" }, map[string]int{"resident": 24, "peer": 24}},
	} {
		for _, o := range []emulated.Options{linked(emulated.Random), {GPUs: linked(emulated.Random).GPUs}} {
			if !o.Virtual && c.homes["peer"] > 0 && !strings.Contains(c.name, "peer") {
				continue // when experts move is then a matter of the wall clock
			}
			t.Run(fmt.Sprintf("%s/virtual %v", c.name, o.Virtual), func(t *testing.T) {
				if o.Virtual {
					racedetector.SkipSequential(t)
				}
				n := open(t, machine{fraction: 0.5, options: o}, c.change)
				if got := generate(t, n); got != want {
					t.Errorf("tokens %s, want %s", got, want)
				}
				r, err := n.Observe().Report(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				e := &r.Experts
				placed := map[string]int{"resident": e.ResidentExperts, "peer": e.PeerCopies, "host": e.All() - e.ResidentExperts - e.PeerCopies}
				for tier, n := range placed {
					if c.homes != nil && n != c.homes[tier] {
						t.Errorf("experts are placed %v, want %v", placed, c.homes)
						break
					}
				}
				if peer := e.Fetched[experts.Peer] > 0; peer != (e.PeerCopies > 0) {
					t.Errorf("%d bytes came from peers, where %d experts are", e.Fetched[experts.Peer], e.PeerCopies)
				}
				var borrowed int64
				loans := r.Harvest.Borrowed()
				for i, p := range loans {
					borrowed += p.Bytes
					if used := r.Harvest.Peers[i].Used; used > p.Bytes {
						t.Errorf("%s: %d bytes used of %d borrowed", p.Device, used, p.Bytes)
					}
				}
				if borrowed < int64(e.PeerCopies)*(132<<10) || len(loans) == 0 && borrowed > 0 {
					t.Errorf("%d bytes borrowed for %d experts", borrowed, e.PeerCopies)
				}
				snapshot := n.Observe().Residency()
				counts := map[string]int{}
				for _, l := range snapshot.Experts.Layers {
					for _, e := range l.Experts {
						if e.Peer != "" {
							counts["peer"]++
						}
					}
				}
				if counts["peer"] != e.PeerCopies || len(snapshot.Peers) != len(loans) || (snapshot.Harvest == nil) != (len(loans) == 0) {
					t.Errorf("%+v, and the report has %+v", snapshot, r)
				}
			})
		}
	}
}

// writeTrace puts a trace into a file.
func writeTrace(t *testing.T, lines ...string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "trace.csv")
	if err := os.WriteFile(path, []byte("time_s,peer,bytes\n"+strings.Join(lines, "\n")+"\n"), 0o666); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestRareChanges: a generated trace may change arbitrarily rarely.
func TestRareChanges(t *testing.T) {
	for _, churn := range []string{"0.01", "1e-5", "1e-300"} {
		n := open(t, machine{fraction: 0.5, options: emulated.Options{}}, func(s *configs.Settings) { s.Harvest.AvailabilityTrace = "generated:1:" + churn })
		if p := n.Observe().Harvest().Peers[0]; p.Space != device.HBM(1) || p.Reading.OtherProcesses == 0 {
			t.Errorf("%s changes per minute: nobody holds anything", churn)
		}
	}
}

// TestRevokedDuringRun: other tenants use and release the peers' memory while requests run,
// and the completions do not change.
func TestRevokedDuringRun(t *testing.T) {
	want := generate(t, open(t, machine{options: emulated.Options{}}, nil))
	for trace, headroom := range map[string]string{
		writeTrace(t, "0,1,0", "0,2,0", "0.004,1,268435456", "0.004,2,0", "0.01,1,0", "0.01,2,268435456", "0.02,1,0", "0.02,2,0"): "5%",
		"generated:6:60000": "75%",
	} {
		for schedule, policies := range map[emulated.Schedule][]string{
			emulated.Eager: {"best-fit"}, emulated.Lazy: {"interference"}, emulated.Random: {"best-fit", "stability"},
		} {
			for _, policy := range policies {
				s := configs.Defaults()
				s.Offload.Fraction, s.Batch.MaxNumBatchedTokens = 0.75, 192
				s.Harvest.MigrationLimit, s.Harvest.AvailabilityTrace, s.Harvest.Policy, s.Harvest.Headroom = "0", trace, policy, headroom
				var events []observe.Event
				n, err := node.Open(t.Context(), node.Options{
					Settings: s, HostLogits: true, Events: func(e observe.Event) { events = append(events, e) },
					OpenMachine: func() (device.Machine, error) { return emulated.Open(linked(schedule)) },
				})
				if err != nil {
					t.Fatal(err)
				}
				what := fmt.Sprintf("%s, %v, %s", filepath.Base(trace), schedule, policy)
				if got := generate(t, n); got != want {
					t.Errorf("%s: tokens %s, want %s", what, got, want)
				}
				r, err := n.Observe().Report(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				revoked := r.Harvest.Revocations["pressure"] + r.Harvest.Revocations["external"]
				if revoked == 0 || r.Experts.Revoked == 0 || r.Experts.Fetched[experts.Peer] == 0 {
					t.Errorf("%s: %v pieces of memory and %d copies were revoked, %d bytes fetched from peers", what, r.Harvest.Revocations, r.Experts.Revoked, r.Experts.Fetched[experts.Peer])
				}
				if err := n.Close(); err != nil {
					t.Errorf("%s: %v", what, err)
				}
				began, ended := 0, 0
				for _, e := range events {
					if e.Reason == "pressure" || e.Reason == "external" {
						switch e.Event {
						case observe.HarvestRevocationStarted:
							began++
						case observe.HarvestRevocationEnded:
							ended++
						}
					}
				}
				if int64(began) != revoked || ended != began {
					t.Errorf("%s: %d revocations began and %d ended, of %v", what, began, ended, r.Harvest.Revocations)
				}
			}
		}
	}
}

// TestCloseInRevocation: the node is closed while a peer is being revoked and a copy from it
// stalls. Close waits for that copy, and releases everything.
func TestCloseInRevocation(t *testing.T) {
	began := make(chan struct{}, 100)
	s := configs.Defaults()
	s.Offload.Fraction, s.Offload.Tier, s.Batch.MaxNumBatchedTokens = 0.75, configs.PeerTier, 192
	var m *emulated.Machine
	n, err := node.Open(t.Context(), node.Options{
		Settings: s, OpenMachine: func() (_ device.Machine, err error) {
			m, err = emulated.New(emulated.Options{GPUs: linked(emulated.Eager).GPUs, Check: true})
			return m, err
		},
		Events: func(e observe.Event) {
			if e.Event == observe.HarvestRevocationStarted {
				began <- struct{}{}
			}
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	stall := m.Inject(&emulated.Fault{
		Kind: emulated.StallCopy, Skip: 5,
		Match: func(p emulated.Point) bool { return p.From == device.HBM(1) && p.To == device.HBM(0) },
	})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		_, err := n.Engine().Generate(ctx, requests(n.Info().Config.Vocab), nil)
		ended <- err
	}()
	for end := time.Now().Add(time.Minute); stall.Hits() == 0; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("no copy stalls")
		}
	}
	if _, err := n.Harvest().Reclaim(device.HBM(1), 256<<20, 0); err != nil {
		t.Fatal(err)
	}
	<-began
	cancel()
	var released atomic.Bool
	time.AfterFunc(100*time.Millisecond, func() {
		released.Store(true)
		stall.Release()
	})
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if err := n.Close(); err != nil {
		t.Error(err)
	}
	if !released.Load() {
		t.Error("closed under a copy that stalls")
	}
}

// TestLostPeer loses a peer while requests run: its experts are fetched from the host, and
// the completions are the same.
func TestLostPeer(t *testing.T) {
	want := generate(t, open(t, machine{options: emulated.Options{}}, nil))
	for _, o := range []emulated.Options{linked(emulated.Eager), linked(emulated.Random), {GPUs: linked(emulated.Eager).GPUs}} {
		var m *emulated.Machine
		s := configs.Defaults()
		s.Offload.Fraction, s.Offload.Tier, s.Batch.MaxNumBatchedTokens = 0.75, configs.PeerTier, 192
		n, err := node.Open(t.Context(), node.Options{Settings: s, OpenMachine: func() (_ device.Machine, err error) {
			m, err = emulated.New(o)
			return m, err
		}})
		if err != nil {
			t.Fatal(err)
		}
		if got := generate(t, n); got != want {
			t.Errorf("tokens %s, want %s", got, want)
		}
		if err := m.Lose(1); err != nil {
			t.Fatal(err)
		}
		if got := generate(t, n); got != want {
			t.Errorf("without the peer: tokens %s, want %s", got, want)
		}
		// Those that were read from last go when their readers are done.
		left := func() (on []string) {
			for _, l := range n.Observe().Residency().Experts.Layers {
				for e, x := range l.Experts {
					if x.Peer == "gpu1" {
						on = append(on, fmt.Sprintf("layer %d expert %d", l.Layer, e))
					}
				}
			}
			return on
		}
		for end := time.Now().Add(10 * time.Second); len(left()) > 0; time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				t.Errorf("still said to be on gpu1: %s", left())
				break
			}
		}
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	}
}

// TestBadPeers: invalid peer settings are rejected before anything is loaded, in one line
// that says what to do.
func TestBadPeers(t *testing.T) {
	apart := linked(emulated.Eager)
	top := func() device.Topology {
		m, err := emulated.New(apart)
		if err != nil {
			t.Fatal(err)
		}
		defer m.Close() //nolint:errcheck // nothing was taken
		return *m.Topology()
	}()
	delete(top.Paths, device.Pair{From: device.HBM(2), To: device.HBM(0)})
	split := emulated.Options{Virtual: true, Topology: &top}
	for _, c := range []struct {
		name    string
		options emulated.Options
		wrap    bool
		change  func(*configs.Settings)
		want    string
	}{
		{"unknown", apart, false, func(s *configs.Settings) { s.Device.Peers = "1,3" }, `--peers is "1,3": names GPU 3, and the emulated machine has GPUs 0 to 2`},
		{"unknown and not used", apart, false, func(s *configs.Settings) { s.Device.Peers, s.Offload.Tier = "1,3", configs.HostTier }, "names GPU 3, and"},
		{"the compute GPU", apart, false, func(s *configs.Settings) { s.Device.Peers, s.Device.GPU = "0", 1 }, "gpu0 is the GPU that computes"},
		{"out of reach", split, false, func(s *configs.Settings) { s.Device.Peers = "1,2" }, "GPU 0 has no access to the memory of GPU 2 (device: from gpu2 to gpu0: no path between these memory spaces); leave it out: experts are then copied from host memory"},
		{"too little", apart, false, func(s *configs.Settings) {
			s.Offload.Tier, s.Harvest.Headroom = configs.PeerTier, "255MiB"
		}, "36 offloaded experts of 132.00 KiB each, and 14 fit: gpu1 7 (1.00 MiB of 256.00 MiB, after 0 B used by other processes and 255.00 MiB headroom), gpu2 7"},
		{"taken at first", apart, false, func(s *configs.Settings) {
			s.Offload.Tier, s.Harvest.AvailabilityTrace = configs.PeerTier, writeTrace(t, "0,1,268435456", "0,2,268435456")
		}, "and 0 fit"},
		{"no peers", emulated.Options{GPUs: make([]emulated.GPU, 1)}, false, func(s *configs.Settings) { s.Offload.Tier = configs.PeerTier }, "gpu0 is the only GPU"},
		{"a trace with a gap", apart, false, func(s *configs.Settings) { s.Harvest.AvailabilityTrace = writeTrace(t, "0,1,0", "0,2,0", "1,2,0") }, "time 1 has no line for peer 1"},
		{"a trace of others", apart, false, func(s *configs.Settings) { s.Harvest.AvailabilityTrace = writeTrace(t, "0,3,0") }, "there is no peer 3"},
		{"no trace", apart, false, func(s *configs.Settings) { s.Harvest.AvailabilityTrace = "no/such/file" }, "no/such/file: no such file"},
		{"a trace of real GPUs", apart, true, func(s *configs.Settings) { s.Harvest.AvailabilityTrace = "generated:1" }, "availability-trace is for emulated devices"},
		{"no such expert", apart, false, func(s *configs.Settings) { s.Offload.Fraction, s.Offload.ResidentExperts = 0, "0:8" }, "no expert 8 in layer 0: the layer has 8"},
		{"no such layer", apart, false, func(s *configs.Settings) { s.Offload.Fraction, s.Offload.ResidentExperts = 0, "6:0" }, "the model's layers with experts are 0-5"},
		{"no such list", apart, false, func(s *configs.Settings) { s.Offload.Fraction, s.Offload.ResidentExperts = 0, "@no/such/file" }, "no/such/file: no such file"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := configs.Defaults()
			s.Offload.Fraction, s.Batch.MaxNumBatchedTokens = 0.75, 192
			c.change(&s)
			n, err := node.Open(t.Context(), node.Options{Settings: s, OpenMachine: func() (device.Machine, error) {
				m, err := emulated.Open(c.options)
				if c.wrap {
					m = struct{ device.Machine }{m}
				}
				return m, err
			}})
			if err == nil {
				t.Fatal("it opens", n.Close())
			}
			if !errors.Is(err, fault.ErrConfig) || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "\n") {
				t.Errorf("%v, want %s", err, c.want)
			}
		})
	}
}

// TestPeersRefuse: peer memory that was reported free cannot be allocated.
func TestPeersRefuse(t *testing.T) {
	for _, virtual := range []bool{true, false} {
		for _, tier := range []configs.Tier{configs.PeerTier, configs.AnyTier} {
			s := configs.Defaults()
			s.Offload.Fraction, s.Offload.Tier, s.Batch.MaxNumBatchedTokens = 0.5, tier, 192
			n, err := node.Open(t.Context(), node.Options{Settings: s, OpenMachine: func() (device.Machine, error) {
				m, err := emulated.New(emulated.Options{Virtual: virtual})
				if err == nil {
					m.Inject(&emulated.Fault{
						Kind: emulated.RefuseAlloc, Skip: 1, Times: -1,
						Match: func(p emulated.Point) bool { return strings.HasPrefix(p.Label, "harvest slab") },
					})
				}
				return m, err
			}})
			if tier == configs.AnyTier {
				if err != nil {
					t.Fatal(err)
				}
				generate(t, n)
				if err := n.Close(); err != nil {
					t.Error(err)
				}
				continue
			}
			if err == nil {
				t.Fatal("it opens", n.Close())
			}
			if !errors.Is(err, fault.ErrConfig) || !strings.Contains(err.Error(), "4 of 24 fit") || strings.Contains(err.Error(), "\n") {
				t.Error(err)
			}
		}
	}
}

// noticed is a context that calls seen each time that somebody is told that it is done.
type noticed struct {
	context.Context
	seen func()
}

func (n noticed) Err() error {
	err := n.Context.Err()
	if err != nil {
		n.seen()
	}
	return err
}

// TestFillCanceled: waiting for the promotion of all experts to peers can be canceled.
func TestFillCanceled(t *testing.T) {
	s := configs.Defaults()
	s.Offload.Fraction, s.Offload.Tier, s.Batch.MaxNumBatchedTokens = 0.5, configs.PeerTier, 192
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var stall *emulated.Fault
	// The copy ends some time after the wait has, however late that is: the node's end waits for it.
	release := sync.OnceFunc(func() { time.AfterFunc(80*time.Millisecond, func() { stall.Release() }) })
	n, err := node.Open(noticed{ctx, release}, node.Options{Settings: s, OpenMachine: func() (device.Machine, error) {
		m, err := emulated.New(emulated.Options{})
		if err == nil {
			stall = m.Inject(&emulated.Fault{
				Kind: emulated.StallCopy, Skip: 3,
				Match: func(p emulated.Point) bool {
					if p.To != device.HBM(1) {
						return false
					}
					time.AfterFunc(20*time.Millisecond, cancel)
					return true
				},
			})
		}
		return m, err
	}})
	if err == nil {
		t.Fatal("it opens", n.Close())
	}
	if !errors.Is(err, context.Canceled) || strings.Contains(err.Error(), "\n") {
		t.Error(err)
	}
}
