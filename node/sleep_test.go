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
	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/node/devices"
	"github.com/moeserve/moeserve/node/fault"
	"github.com/moeserve/moeserve/node/sleeping"
	"github.com/moeserve/moeserve/tools/fixtures"
	"github.com/moeserve/moeserve/tools/racedetector"
)

// usage reads what is allocated in each memory.
func usage(t *testing.T, n *node.Node) map[device.Space]int64 {
	t.Helper()
	all := map[device.Space]int64{}
	for _, s := range n.Machine().Topology().Spaces() {
		u, err := n.Machine().Usage(s)
		if errors.Is(err, device.ErrLost) {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		all[s] = u.Allocated
	}
	return all
}

// someRequests are a few requests.
func someRequests() (rs []engine.Request) {
	for i := range 4 {
		p := engine.DefaultParams()
		p.MaxTokens, p.IgnoreEOS, p.Seed, p.Temperature = 12, true, uint64(i), float32(i%2)
		prompt := make([]int32, 20+9*i)
		for j := range prompt {
			prompt[j] = int32((13*i + 7*j + j*j) % 90)
		}
		rs = append(rs, engine.Request{ID: fmt.Sprint(i), Prompt: prompt, Params: p})
	}
	return rs
}

// tokensOf runs a few requests and returns their tokens.
func tokensOf(t *testing.T, n *node.Node) string {
	t.Helper()
	outs, err := n.Engine().Generate(t.Context(), someRequests(), nil)
	if err != nil {
		t.Fatal(err)
	}
	var all [][]int32
	for _, o := range outs {
		all = append(all, o.TokenIDs)
	}
	return fmt.Sprint(all)
}

// TestSleepSameTokens: after each level of sleep tokens are those from before, the GPU's memory and
// that of peers is empty meanwhile, and accounts are the same afterwards.
func TestSleepSameTokens(t *testing.T) {
	kvTiers := `{"kv_connector_extra_config": {"num_gpu_blocks": 16, "num_cpu_blocks": 16}}`
	for name, x := range map[string]struct {
		fraction float64
		change   func(*configs.Settings)
	}{
		"resident":            {0, nil},
		"resident/graphs off": {0, func(s *configs.Settings) { s.Kernels.EnforceEager = true }},
		"half/host":           {0.5, func(s *configs.Settings) { s.Offload.Tier = configs.HostTier }},
		"half/peers":          {0.5, func(s *configs.Settings) { s.Offload.Tier = configs.PeerTier }},
		"half/host, direct": {0.5, func(s *configs.Settings) {
			s.Offload.Tier, s.Batch.ExpertAccess = configs.HostTier, configs.DirectAccess
		}},
		"half/peers, direct": {0.5, func(s *configs.Settings) {
			s.Offload.Tier, s.Batch.ExpertAccess = configs.PeerTier, configs.DirectAccess
		}},
		"half/dynamic":          {0.5, func(s *configs.Settings) { s.Offload.DynamicResidency, s.Harvest.MigrationLimit = true, "0" }},
		"all/any tier":          {1, func(s *configs.Settings) { s.Harvest.MigrationLimit = "0" }},
		"half/KV tiers":         {0.5, func(s *configs.Settings) { s.KV.TransferConfig = kvTiers }},
		"half/lending":          {0.5, func(s *configs.Settings) { s.KV.ExpertsShare, s.KV.MaxModelLen = configs.AutoShare, 128 }},
		"half/attention on CPU": {0.5, func(s *configs.Settings) { s.Batch.Attention = configs.OnCPU }},
	} {
		for _, o := range []emulated.Options{linked(emulated.Random), {Check: true, GPUs: linked(emulated.Random).GPUs}} {
			t.Run(fmt.Sprintf("%s/virtual %t", name, o.Virtual), func(t *testing.T) {
				if o.Virtual {
					racedetector.SkipSequential(t)
				}
				t.Parallel()
				n := open(t, machine{fraction: x.fraction, options: o}, x.change)
				want := tokensOf(t, n)
				if l := n.KVLender(); l != nil {
					l.Move(2)
					_ = tokensOf(t, n)
				}
				modes := []engine.PauseMode{engine.PauseWait, engine.PauseKeep, engine.PauseAbort}
				before, copies := usage(t, n), n.Observe().Experts().PeerCopies
				for i, level := range []sleeping.Level{sleeping.Copy, sleeping.Copy, sleeping.Drop, sleeping.Copy} {
					times, err := n.Sleep(t.Context(), level, modes[i%len(modes)])
					if err != nil {
						t.Fatal(err)
					}
					s := n.Sleeping()
					if s.Level != level || !s.Weights || !s.KVCache || !n.Engine().State().Paused {
						t.Errorf("asleep with state %+v", s)
					}
					asleep := usage(t, n)
					for space, bytes := range asleep {
						if space != device.Host && bytes > 0 {
							t.Errorf("level %d: %d bytes of %s are allocated by a model that sleeps", level, bytes, space)
						}
					}
					if level == sleeping.Drop && asleep[device.Host] > before[device.Host]+s.HostBytes {
						t.Errorf("level 2 has %d bytes of host memory, %d before", asleep[device.Host], before[device.Host])
					}
					if copied := times.Bytes; level == sleeping.Copy && copied == 0 {
						t.Error("nothing was copied")
					}
					if _, err := n.Wake(t.Context()); err != nil {
						t.Fatal(err)
					}
					if s := n.Sleeping(); s.Asleep() || s.Weights || s.KVCache || n.Engine().State().Paused {
						t.Errorf("awake with state %+v", s)
					}
					if got := n.Observe().Experts().PeerCopies; n.Info().Settings.Offload.Tier == configs.PeerTier && got != copies {
						t.Errorf("%d experts have peer copies after the wake, %d before", got, copies)
					}
					after := usage(t, n)
					gpu := device.HBM(0)
					if after[gpu] != before[gpu] || after[device.Host]-n.Sleeping().HostBytes != before[device.Host] {
						t.Errorf("level %d: %v is allocated after wake, %v before, %d for copies", level, after, before, n.Sleeping().HostBytes)
					}
					if got := tokensOf(t, n); got != want {
						t.Fatalf("tokens after sleep at level %d: %s, want %s", level, got, want)
					}
				}
			})
		}
	}
}

// overRelays has copies from and to the host use the links of three more GPUs, which lend nothing else.
func overRelays(t *testing.T, s *configs.Settings) {
	t.Helper()
	s.Offload.Tier, s.Device.Peers, s.Device.HostPaths = configs.HostTier, "none", "4"
	s.Plan.Hardware = calibrated(t, 1, 2, 3)
}

// TestSleepOverRelays: the weights of a model that sleeps and wakes go over the links of other GPUs, too, and the
// tokens are those from before, also where one of these fails, is lost, or has its memory taken meanwhile.
func TestSleepOverRelays(t *testing.T) {
	const hurt, healthy = 1, 2
	relayFault := func(kind emulated.FaultKind, chance float64, times int, d time.Duration) func(*testing.T, *emulated.Machine) {
		return func(_ *testing.T, m *emulated.Machine) {
			m.Inject(&emulated.Fault{Kind: kind, Chance: chance, Times: times, For: d, Match: func(p emulated.Point) bool { return p.To == device.HBM(hurt) }})
		}
	}
	for name, harm := range map[string]func(*testing.T, *emulated.Machine){
		"healthy": nil,
		"failing": relayFault(emulated.FailCopy, 0.3, -1, 0),
		"stalled": relayFault(emulated.StallCopy, 0, 3, 20*time.Millisecond),
		"lost": func(t *testing.T, m *emulated.Machine) {
			if err := m.Lose(hurt); err != nil {
				t.Error(err)
			}
		},
		"taken": func(t *testing.T, m *emulated.Machine) {
			u, err := m.Usage(device.HBM(hurt))
			if err == nil {
				err = m.Occupy(device.HBM(hurt), u.Free())
			}
			if err != nil {
				t.Error(err)
			}
		},
	} {
		for _, fraction := range []float64{0, 0.5} {
			t.Run(fmt.Sprintf("%s/%v", name, fraction), func(t *testing.T) {
				t.Parallel()
				n, m := openSleeper(t, four(emulated.Random, 5), nil, func(s *configs.Settings) {
					overRelays(t, s)
					s.Offload.Fraction = fraction
				})
				want := tokensOf(t, n)
				_, out := relayed(n)
				if _, err := n.Sleep(t.Context(), sleeping.Copy, engine.PauseWait); err != nil {
					t.Fatal(err)
				}
				in, slept := relayed(n)
				if slept[device.HBM(healthy)] == out[device.HBM(healthy)] {
					t.Errorf("no weight went to the host over a relay: %v before, %v after", out, slept)
				}
				if harm != nil {
					harm(t, m)
				}
				if _, err := n.Wake(t.Context()); err != nil {
					t.Fatal(err)
				}
				woken, _ := relayed(n)
				if woken[device.HBM(healthy)] == in[device.HBM(healthy)] {
					t.Errorf("no weight came from the host over a relay: %v before, %v after", in, woken)
				}
				if got := tokensOf(t, n); got != want {
					t.Errorf("tokens after sleep %s, want %s", got, want)
				}
			})
		}
	}
}

// TestWakeRelayGoes: a relay whose memory is revoked, that is lost, or whose link fails while a chunk of a wake is on its
// way into it takes no more of the weights, and the wake goes on over the others. A request that waited has the
// tokens that it has alone, and KV blocks that host memory kept are loaded, over relays too.
func TestWakeRelayGoes(t *testing.T) {
	const hurt, healthy = 1, 2
	for name, harm := range map[string]func(*node.Node, *emulated.Machine) error{
		"revoked": func(n *node.Node, m *emulated.Machine) error {
			if err := n.Harvest().Withdraw(device.HBM(hurt), true); err != nil {
				return err
			}
			time.Sleep(20 * time.Millisecond) // harvest would have released it
			u, err := m.Usage(device.HBM(hurt))
			if err == nil && u.Allocated == 0 {
				err = errors.New("the relay's memory is released with a chunk on its way into it")
			}
			return err
		},
		"lost": func(_ *node.Node, m *emulated.Machine) error { return m.Lose(hurt) },
		"failing": func(_ *node.Node, m *emulated.Machine) error {
			m.Inject(&emulated.Fault{Kind: emulated.FailCopy, Times: -1, Match: func(p emulated.Point) bool { return p.To == device.HBM(hurt) }})
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o := four(emulated.Eager, 0)
			o.Virtual = false
			// While it is set steps take 50 ms at least, the long request 6 s, so that it does not end before the sleep.
			var slow atomic.Bool
			l := engine.Listener{StepFinished: func(engine.StepInfo) {
				if slow.Load() {
					time.Sleep(50 * time.Millisecond)
				}
			}}
			n, m := openListened(t, o, nil, l, func(s *configs.Settings) {
				overRelays(t, s)
				s.KV.TransferConfig = `{"kv_connector_extra_config": {"load_policy": "always", "num_cpu_blocks": 64}}`
			})
			want := tokensOf(t, n)
			long := engine.Request{ID: "long", Prompt: []int32{5, 3, 8}, Params: engine.DefaultParams()}
			long.Params.MaxTokens, long.Params.IgnoreEOS = 120, true
			alone, err := n.Engine().Generate(t.Context(), []engine.Request{long}, nil)
			if err != nil {
				t.Fatal(err)
			}
			slow.Store(true)
			running, cancel := context.WithCancel(t.Context())
			ran := make(chan error, 1)
			go func() { ran <- n.Engine().Run(running) }()
			job, err := n.Engine().Submit(t.Context(), long)
			if err != nil {
				t.Fatal(err)
			}
			first, err := job.Next(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if _, err := n.Sleep(t.Context(), sleeping.Copy, engine.PauseKeep); err != nil {
				t.Fatal(err)
			}
			slow.Store(false)
			if n.Engine().State().Running+n.Engine().State().Waiting == 0 {
				t.Error("the request did not wait for the wake")
			}

			asleep, _ := relayed(n)
			// Each relay gets its first chunks when the copy is submitted, however the links' threads are scheduled then.
			stall := m.Inject(&emulated.Fault{Kind: emulated.StallCopy, Match: func(p emulated.Point) bool { return p.From == device.Host && p.To == device.HBM(hurt) }})
			woke := make(chan error, 1)
			go func() {
				_, err := n.Wake(t.Context())
				woke <- err
			}()
			for begun := time.Now(); stall.Hits() == 0 && time.Since(begun) < 20*time.Second; {
				time.Sleep(100 * time.Microsecond)
			}
			if hits, now := stall.Hits(), n.Sleeping(); hits == 0 || !now.Weights {
				t.Errorf("%d chunks of the weights are on their way into the relay, asleep %t", hits, now.Weights)
			}
			if err := harm(n, m); err != nil {
				t.Error(err)
			}
			stall.Release()
			if err := <-woke; err != nil {
				t.Fatal(err)
			}
			awake, _ := relayed(n)
			for space, took := range awake {
				took -= asleep[space]
				if space == device.HBM(hurt) && name == "revoked" && (took == 0 || took > 3*(16<<10)) {
					t.Errorf("a relay that was removed with chunks on their way to it carried %d bytes of the wake", took)
				}
				if space == device.HBM(healthy) && took == 0 {
					t.Error("no weight came from the host over the other relay")
				}
			}

			if got := append(tokens(first), waited(t, job)...); !slices.Equal(got, alone[0].TokenIDs) {
				t.Errorf("the request that waited: %v, alone %v", got, alone[0].TokenIDs)
			}
			loaded := func() int64 { return n.Observe().KVTiers().Tiers[0].Reloaded }
			before, relays := loaded(), sum(awake)
			var got [][]int32
			for _, q := range someRequests() {
				job, err := n.Engine().Submit(t.Context(), q)
				if err != nil {
					t.Fatal(err)
				}
				got = append(got, waited(t, job))
			}
			if fmt.Sprint(got) != want {
				t.Errorf("tokens after the wake %v, want %s", got, want)
			}
			if after, _ := relayed(n); loaded() == before || sum(after) == relays {
				t.Errorf("%d KV blocks were loaded after the wake, and relays carried %d bytes", loaded()-before, sum(after)-relays)
			}
			cancel()
			if err := <-ran; err != nil {
				t.Error(err)
			}
			if u, err := m.Usage(device.HBM(hurt)); name == "revoked" && (err != nil || u.Allocated > 0) {
				t.Errorf("the relay that was revoked has %d bytes: %v", u.Allocated, err)
			}
		})
	}
}

// waited are the tokens of a job from now on.
func waited(t *testing.T, j *engine.Job) []int32 {
	t.Helper()
	updates, err := j.Wait(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return tokens(updates...)
}

func tokens(updates ...engine.Update) (all []int32) {
	for _, u := range updates {
		for _, x := range u.Tokens {
			all = append(all, x.ID)
		}
	}
	return all
}

func sum(bytes map[device.Space]int64) (all int64) {
	for _, n := range bytes {
		all += n
	}
	return all
}

// openSleeper opens a node on a machine that the test has a hold of.
func openSleeper(t *testing.T, o emulated.Options, share *devices.Shared, change func(*configs.Settings)) (*node.Node, *emulated.Machine) {
	t.Helper()
	return openListened(t, o, share, engine.Listener{}, change)
}

// openListened is openSleeper with a listener.
func openListened(t *testing.T, o emulated.Options, share *devices.Shared, l engine.Listener, change func(*configs.Settings)) (*node.Node, *emulated.Machine) {
	t.Helper()
	s := configs.Defaults()
	s.Offload.Fraction = 0.5
	if change != nil {
		change(&s)
	}
	var m *emulated.Machine
	n, err := node.Open(t.Context(), node.Options{Settings: s, Share: share, Listener: l, OpenMachine: func() (device.Machine, error) {
		x, err := emulated.New(o)
		m = x
		return x, err
	}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Close(); err != nil && !errors.Is(err, device.ErrLost) {
			t.Error(err)
		}
	})
	return n, m
}

// inject has what matches fail until mend is called.
func inject(m *emulated.Machine, kind emulated.FaultKind, match func(emulated.Point) bool) (mend func()) {
	var mended atomic.Bool
	m.Inject(&emulated.Fault{Kind: kind, Times: -1, Match: func(p emulated.Point) bool { return !mended.Load() && match(p) }})
	return func() { mended.Store(true) }
}

// TestSleepTwice: what sleeps can be put to sleep again, deeper, and what is awake can be woken; a
// partial wake leaves the rest asleep.
func TestSleepTwice(t *testing.T) {
	n, _ := openSleeper(t, linked(emulated.Random), nil, nil)
	want := tokensOf(t, n)
	step := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	wake := func(tags ...sleeping.Tag) error { _, err := n.Wake(t.Context(), tags...); return err }
	sleep := func(l sleeping.Level) error { _, err := n.Sleep(t.Context(), l, engine.PauseWait); return err }
	step(wake())
	for range 2 {
		step(sleep(sleeping.Copy))
	}
	one := usage(t, n)[device.Host]
	for range 2 {
		step(sleep(sleeping.Drop))
	}
	if two := usage(t, n)[device.Host]; two >= one || n.Sleeping().Level != sleeping.Drop {
		t.Errorf("host memory: %d bytes at level 1, %d after level 2; %+v", one, two, n.Sleeping())
	}
	step(sleep(sleeping.Copy)) // no copy is there any more
	if n.Sleeping().Level != sleeping.Drop {
		t.Errorf("level 1 after level 2: %+v", n.Sleeping())
	}
	step(wake(sleeping.Weights))
	if s := n.Sleeping(); s.Weights || !s.KVCache || !s.Asleep() || !n.Engine().State().Paused {
		t.Errorf("with weights awake: %+v", s)
	}
	step(sleep(sleeping.Copy))
	if s := n.Sleeping(); !s.Weights || !s.KVCache || usage(t, n)[device.HBM(0)] > 0 {
		t.Errorf("asleep again after a partial wake: %+v, %v", s, usage(t, n))
	}
	step(wake(sleeping.KVCache))
	step(wake(sleeping.Weights, sleeping.KVCache))
	step(wake())
	if got := tokensOf(t, n); got != want {
		t.Errorf("tokens %s, want %s", got, want)
	}
	if err := sleep(3); !errors.Is(err, fault.ErrConfig) || n.Sleeping().Asleep() {
		t.Errorf("level 3: %v", err)
	}
}

// TestSleepMemory: with --sleep-memory start the first sleep allocates nothing, and with release
// nothing is kept.
func TestSleepMemory(t *testing.T) {
	for setting, kept := range map[string]bool{configs.ReservedSleepMemory: true, configs.ReleasedSleepMemory: false, configs.KeptSleepMemory: true} {
		n, m := openSleeper(t, linked(emulated.Random), nil, func(s *configs.Settings) { s.Device.SleepMemory = setting })
		before := usage(t, n)[device.Host]
		mend := inject(m, emulated.RefuseAlloc, func(p emulated.Point) bool { return strings.Contains(p.Label, "sleeping model") })
		_, err := n.Sleep(t.Context(), sleeping.Copy, engine.PauseWait)
		if (err == nil) != (setting == configs.ReservedSleepMemory) || err != nil && (!errors.Is(err, device.ErrOutOfMemory) || n.Sleeping().Asleep() || n.Engine().State().Paused) {
			t.Errorf("%s: sleep without host memory: %v, %+v", setting, err, n.Sleeping())
		}
		mend()
		if setting != configs.ReservedSleepMemory {
			if _, err := n.Sleep(t.Context(), sleeping.Copy, engine.PauseWait); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := n.Wake(t.Context()); err != nil {
			t.Fatal(err)
		}
		if setting == configs.ReservedSleepMemory {
			if after := usage(t, n)[device.Host]; after != before {
				t.Errorf("%s: %d bytes of host memory after a wake, %d before", setting, after, before)
			}
		}
		if got := n.Sleeping().HostBytes > 0; got != kept {
			t.Errorf("%s: host memory is kept: %t", setting, got)
		}
	}
}

// TestSleepFaults: copies that fail at a sleep leave the model awake, and those that fail at a wake
// leave it asleep, as does memory that others have; both can be tried again.
func TestSleepFaults(t *testing.T) {
	for _, o := range []emulated.Options{linked(emulated.Random), {GPUs: linked(emulated.Random).GPUs}} {
		n, m := openSleeper(t, o, nil, func(s *configs.Settings) { s.Offload.Tier = configs.PeerTier })
		want := tokensOf(t, n)
		before := usage(t, n)
		fail := func(from, to device.Space) (mend func()) {
			return inject(m, emulated.FailCopy, func(p emulated.Point) bool { return p.From == from && p.To == to && p.Bytes > 4096 })
		}
		mend := fail(device.HBM(0), device.Host)
		if _, err := n.Sleep(t.Context(), sleeping.Copy, engine.PauseKeep); !errors.Is(err, device.ErrCopyFailed) || !errors.Is(err, fault.ErrDevice) {
			t.Errorf("a sleep whose copies fail: %v", err)
		}
		mend()
		if n.Sleeping().Asleep() || n.Engine().State().Paused {
			t.Errorf("after a failed sleep: %+v", n.Sleeping())
		}
		if got := tokensOf(t, n); got != want {
			t.Errorf("tokens after a failed sleep: %s, want %s", got, want)
		}
		for _, level := range []sleeping.Level{sleeping.Copy, sleeping.Drop} {
			if _, err := n.Sleep(t.Context(), level, engine.PauseKeep); err != nil {
				t.Fatal(err)
			}
			asleep := usage(t, n)
			mend = fail(device.Host, device.HBM(0))
			if _, err := n.Wake(t.Context()); !errors.Is(err, device.ErrCopyFailed) {
				t.Errorf("level %d: a wake whose copies fail: %v", level, err)
			}
			mend()
			mend = inject(m, emulated.RefuseAlloc, func(p emulated.Point) bool { return p.Label == "kv cache" })
			if _, err := n.Wake(t.Context(), sleeping.KVCache); !errors.Is(err, device.ErrOutOfMemory) {
				t.Errorf("level %d: a wake without memory: %v", level, err)
			}
			mend()
			now := usage(t, n)
			if s := n.Sleeping(); s.Level != level || !s.Weights || !s.KVCache || !n.Engine().State().Paused || fmt.Sprint(now) != fmt.Sprint(asleep) {
				t.Errorf("level %d: after failed wakes: %+v, %v allocated, %v before", level, s, now, asleep)
			}
			if _, err := n.Wake(t.Context()); err != nil {
				t.Fatal(err)
			}
			if got := tokensOf(t, n); got != want {
				t.Errorf("level %d: tokens %s, want %s", level, got, want)
			}
		}
		if after := usage(t, n); after[device.HBM(0)] != before[device.HBM(0)] {
			t.Errorf("%v is allocated at the end, %v at first", after, before)
		}
	}
}

// TestSleepLostPeer: a peer that is lost while the model sleeps costs its copies, and nothing else.
func TestSleepLostPeer(t *testing.T) {
	for _, o := range []emulated.Options{linked(emulated.Random), {GPUs: linked(emulated.Random).GPUs}} {
		n, m := openSleeper(t, o, nil, func(s *configs.Settings) {
			s.Offload.Tier, s.KV.TransferConfig = configs.PeerTier, `{"kv_connector_extra_config": {"num_gpu_blocks": 16}}`
		})
		want := tokensOf(t, n)
		if _, err := n.Sleep(t.Context(), sleeping.Copy, engine.PauseWait); err != nil {
			t.Fatal(err)
		}
		if err := m.Lose(1); err != nil {
			t.Fatal(err)
		}
		if _, err := n.Wake(t.Context()); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if got := tokensOf(t, n); got != want {
				t.Errorf("tokens %s, want %s", got, want)
			}
		}
	}
}

// TestSleepReload: level 2 reads the checkpoint again; where that is gone, or is another model's, the
// wake says so, and works when it is back.
func TestSleepReload(t *testing.T) {
	dir := fixtures.Dir(t, fixtures.Names(t)[0])
	other := fixtures.Dir(t, fixtures.Names(t)[1])
	link := filepath.Join(t.TempDir(), "model")
	point := func(at string) {
		t.Helper()
		if err := errors.Join(os.RemoveAll(link), os.Symlink(at, link)); err != nil {
			t.Fatal(err)
		}
	}
	point(dir)
	n, _ := openSleeper(t, emulated.Options{}, nil, func(s *configs.Settings) { s.Model.Name = link })
	want := tokensOf(t, n)
	if _, err := n.Sleep(t.Context(), sleeping.Drop, engine.PauseWait); err != nil {
		t.Fatal(err)
	}
	for _, at := range []string{filepath.Join(t.TempDir(), "nothing"), other} {
		point(at)
		if _, err := n.Wake(t.Context()); !errors.Is(err, fault.ErrModel) && !errors.Is(err, fault.ErrConfig) || !n.Sleeping().Weights {
			t.Errorf("a wake with a checkpoint at %s: %v, %+v", at, err, n.Sleeping())
		}
	}
	point(dir)
	if _, err := n.Wake(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := tokensOf(t, n); got != want {
		t.Errorf("tokens %s, want %s", got, want)
	}
}

// TestSleepBusy: sleeps and wakes at any time, with requests that come and go: each request that is
// answered is answered as alone, and none is lost.
func TestSleepBusy(t *testing.T) {
	for name, change := range map[string]func(*configs.Settings){
		"host": func(s *configs.Settings) { s.Offload.Tier = configs.HostTier },
		"peers, KV tiers": func(s *configs.Settings) {
			s.Offload.DynamicResidency, s.Harvest.MigrationLimit = true, "0"
			s.KV.TransferConfig = `{"kv_connector_extra_config": {"num_gpu_blocks": 16, "num_cpu_blocks": 16}}`
		},
		"lending": func(s *configs.Settings) { s.KV.ExpertsShare, s.KV.MaxModelLen = configs.AutoShare, 128 },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n, _ := openSleeper(t, emulated.Options{Check: true, GPUs: linked(emulated.Random).GPUs}, nil, change)
			requests := make([]engine.Request, 8)
			want := make([][]int32, len(requests))
			for i := range requests {
				p := engine.DefaultParams()
				p.MaxTokens, p.IgnoreEOS = 10+5*i, true
				prompt := make([]int32, 20+3*i)
				for j := range prompt {
					prompt[j] = int32((i + 7*j) % 90)
				}
				requests[i] = engine.Request{ID: fmt.Sprint(i), Prompt: prompt, Params: p}
				outs, err := n.Engine().Generate(t.Context(), requests[i:i+1], nil)
				if err != nil {
					t.Fatal(err)
				}
				want[i] = outs[0].TokenIDs
			}
			running, cancel := context.WithCancel(context.Background())
			ran := make(chan error, 1)
			go func() { ran <- n.Engine().Run(running) }()
			stop := make(chan struct{})
			busyRounds := racedetector.Fewer(6, 2)
			var clients, sleeper sync.WaitGroup
			for i := range requests {
				clients.Go(func() {
					for range busyRounds {
						j, err := n.Engine().Submit(t.Context(), requests[i])
						if err != nil {
							t.Error(err)
							return
						}
						updates, err := j.Wait(t.Context())
						if errors.Is(err, engine.ErrPaused) {
							continue
						}
						var got []int32
						for _, u := range updates {
							for _, x := range u.Tokens {
								got = append(got, x.ID)
							}
						}
						if err != nil || !slices.Equal(got, want[i]) {
							t.Errorf("request %d: %v, %v; want %v", i, got, err, want[i])
						}
					}
				})
			}
			sleeper.Go(func() {
				modes := []engine.PauseMode{engine.PauseKeep, engine.PauseWait, engine.PauseKeep, engine.PauseAbort}
				for i := 0; ; i++ {
					select {
					case <-stop:
						return
					case <-time.After(3 * time.Millisecond):
					}
					if _, err := n.Sleep(t.Context(), sleeping.Level(1+i%3/2), modes[i%len(modes)]); err != nil {
						t.Error(err)
					}
					if _, err := n.Wake(t.Context()); err != nil {
						t.Error(err)
					}
				}
			})
			clients.Wait()
			close(stop)
			sleeper.Wait()
			cancel()
			if err := <-ran; err != nil {
				t.Error(err)
			}
			if n.Sleeping().Sleeps < 2 {
				t.Errorf("%d sleeps", n.Sleeping().Sleeps)
			}
		})
	}
}

// TestSleepClose: a node can be closed while it sleeps, at either level and half awake, and leaks nothing.
func TestSleepClose(t *testing.T) {
	for _, level := range []sleeping.Level{sleeping.Copy, sleeping.Drop} {
		for _, half := range []bool{false, true} {
			n, _ := openSleeper(t, linked(emulated.Random), nil, nil)
			if _, err := n.Sleep(t.Context(), level, engine.PauseWait); err != nil {
				t.Fatal(err)
			}
			if half {
				if _, err := n.Wake(t.Context(), sleeping.Weights); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
}

// TestSleepShared: two nodes that together do not fit share a machine, one awake at a time.
func TestSleepShared(t *testing.T) {
	share := &devices.Shared{}
	o := emulated.Options{Check: true, GPUs: slices.Repeat([]emulated.GPU{{MemoryBytes: 24 << 20}}, 2)}
	var nodes []*node.Node
	var want []string
	dir := fixtures.Dir(t, fixtures.Names(t)[0])
	for _, name := range []string{"", dir} {
		n, _ := openSleeper(t, o, share, func(s *configs.Settings) { s.Model.Name = name })
		want = append(want, tokensOf(t, n))
		if _, err := n.Sleep(t.Context(), sleeping.Copy, engine.PauseWait); err != nil {
			t.Fatal(err)
		}
		nodes = append(nodes, n)
	}
	for i := range 4 {
		n := nodes[i%2]
		if _, err := n.Turn().Wake(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got := tokensOf(t, n); got != want[i%2] {
			t.Errorf("turn %d: tokens %s, want %s", i, got, want[i%2])
		}
		if _, err := nodes[(i+1)%2].Wake(t.Context()); !errors.Is(err, device.ErrOutOfMemory) {
			t.Errorf("two models are awake in memory for one: %v", err)
		}
		if took, err := n.Turn().Sleep(t.Context(), make(chan struct{})); err != nil || took.Total <= 0 {
			t.Fatal(took, err)
		}
	}
	if nodes[0].Machine() != nodes[1].Machine() {
		t.Error("the nodes have two machines")
	}
}
