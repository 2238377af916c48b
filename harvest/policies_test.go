package harvest_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/harvest"
)

// scene is a machine on which policies place objects.
type scene struct {
	*testing.T
	m       *emulated.Machine
	r       *harvest.Runtime
	now     time.Duration
	revoked int
}

const sceneObject = 1 << 20

// newScene has gpu1 with room for 16 objects, and gpu2, the larger one, for 32.
func newScene(t *testing.T, o emulated.Options, policy harvest.Policy) *scene {
	t.Helper()
	o.Virtual = true
	o.GPUs = []emulated.GPU{{MemoryBytes: 64 * sceneObject}, {MemoryBytes: 20 * sceneObject}, {MemoryBytes: 36 * sceneObject}}
	s := &scene{T: t, m: machine(t, o)}
	s.r = open(t, s.m, harvest.Options{
		Policy: policy, SlabBytes: 4 * sceneObject, HeadroomBytes: 4 * sceneObject, Cooldown: time.Second,
		Events: harvest.EventListener{Revoked: func(harvest.RevokeInfo) { s.revoked++ }},
	})
	return s
}

// pass lets time pass, in ticks.
func (s *scene) pass(d time.Duration) {
	s.Helper()
	for end := s.now + d; s.now < end; {
		s.now += 100 * time.Millisecond
		if _, err := s.r.Tick(s.now); err != nil {
			s.Fatal(err)
		}
		drive(s.T, s.m)
	}
}

// borrow allocates up to n objects for a client.
func (s *scene) borrow(client string, n int) (all []*harvest.Handle) {
	s.Helper()
	for range n {
		h, err := s.r.Alloc(sceneObject, harvest.Hints{Client: client, Cost: time.Second})
		if err != nil {
			break
		}
		all = append(all, h)
	}
	return all
}

// others has other processes hold so much of a peer: what is refused they ask for.
func (s *scene) others(gpu int, objects int64) {
	s.Helper()
	p := device.HBM(gpu)
	u, err := s.m.Usage(p)
	if err != nil {
		s.Fatal(err)
	}
	for range 100 {
		err := s.m.Occupy(p, objects*sceneObject-u.OtherProcesses)
		if err == nil {
			return
		}
		if _, err := s.r.Reclaim(p, objects*sceneObject-u.OtherProcesses, time.Second); err != nil {
			s.Fatal(err)
		}
		s.pass(100 * time.Millisecond)
	}
	s.Fatal("other processes do not get their memory")
}

// read is the rate of copies of all objects to gpu0, in GB/s.
func (s *scene) read(all []*harvest.Handle) float64 {
	s.Helper()
	to, err := s.m.Alloc(device.HBM(0), sceneObject, "read")
	if err != nil {
		s.Fatal(err)
	}
	stream, err := s.m.NewStream(device.HBM(0), device.StreamOptions{Name: "read"})
	if err != nil {
		s.Fatal(err)
	}
	begin := s.m.Now()
	for _, h := range all {
		if err := stream.Copy(to.Range(0, sceneObject), h.Region().Range); err != nil {
			s.Fatal(err)
		}
	}
	if err := stream.Synchronize(s.Context()); err != nil {
		s.Fatal(err)
	}
	took := s.m.Now() - begin
	if err := errors.Join(stream.Close(), to.Free()); err != nil {
		s.Fatal(err)
	}
	return float64(len(all)*sceneObject) / took.Seconds() / 1e9
}

func newPolicy(t *testing.T, name string, o harvest.PolicyOptions) harvest.Policy {
	t.Helper()
	p, err := harvest.NewPolicy(name, o)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// TestPoliciesBeatBestFit: each policy has a scenario in which it is better than best fit;
// docs/design/harvest.md has the table.
func TestPoliciesBeatBestFit(t *testing.T) {
	pairs := map[device.Pair]float64{{From: device.HBM(2), To: device.HBM(0)}: 300e9}
	link := emulated.Link{BytesPerSecond: 400e9}
	var table strings.Builder
	for _, c := range []struct {
		policy, scenario, unit string
		o                      harvest.PolicyOptions
		machine                emulated.Options
		measure                func(*scene) float64
		// better reports whether the policy's value beats best fit's by enough.
		better func(value, bestFit float64) bool
	}{
		{
			"locality", "16 objects; the peer with more free memory has a link of 300 GB/s, the other one of 400", "read at, GB/s",
			harvest.PolicyOptions{},
			emulated.Options{PeerLink: link, PairRates: pairs},
			func(s *scene) float64 { return s.read(s.borrow("c", 16)) },
			func(v, b float64) bool { return v > 1.3*b },
		},
		{
			"interference", "16 objects; others use 60 % of the memory bandwidth of the peer with more free memory", "read at, GB/s",
			harvest.PolicyOptions{},
			emulated.Options{PeerLink: link, Busy: map[int]float64{2: 0.6}},
			func(s *scene) float64 { return s.read(s.borrow("c", 16)) },
			func(v, b float64) bool { return v > 2.4*b },
		},
		{
			"stability", "12 objects, replaced every 10 s; others take and return 28 objects of the peer with more free memory, 30 times in 5 minutes", "objects revoked",
			harvest.PolicyOptions{},
			emulated.Options{},
			func(s *scene) float64 {
				var all []*harvest.Handle
				for i := range 30 {
					s.others(2, int64(i%2)*28)
					s.pass(10 * time.Second)
					for _, h := range all {
						if err := s.r.Free(h); err != nil && !errors.Is(err, harvest.ErrRevoked) {
							s.Fatal(err)
						}
					}
					s.pass(time.Second)
					all = s.borrow("c", 12)
				}
				return float64(s.revoked)
			},
			func(v, b float64) bool { return v < b/3 && b > 50 },
		},
		{
			"fairness", "48 objects fit; a client with a quota of 12 takes all it gets, then a second client comes", "objects of the second",
			harvest.PolicyOptions{Clients: map[string]harvest.ClientLimits{"kv": {Weight: 1, Quota: 12 * sceneObject}, "experts": {Weight: 3}}},
			emulated.Options{},
			func(s *scene) float64 {
				s.borrow("kv", 100)
				return float64(len(s.borrow("experts", 36)))
			},
			func(v, b float64) bool { return v >= 20 && b == 0 },
		},
		{
			"fairness", "one client allocates all at once, limited to 4 objects/s; another process asks for half a second later", "objects that had to be revoked",
			harvest.PolicyOptions{Clients: map[string]harvest.ClientLimits{"kv": {Rate: 4 * sceneObject}}},
			emulated.Options{},
			func(s *scene) float64 {
				s.pass(time.Second)
				s.borrow("kv", 100)
				s.pass(500 * time.Millisecond)
				s.others(2, 30)
				return float64(s.revoked)
			},
			func(v, b float64) bool { return v == 0 && b > 20 },
		},
	} {
		t.Run(c.policy, func(t *testing.T) {
			fit := c.measure(newScene(t, c.machine, harvest.BestFit{}))
			got := c.measure(newScene(t, c.machine, newPolicy(t, c.policy, c.o)))
			if !c.better(got, fit) {
				t.Errorf("%s: %s %.4g, best fit %.4g", c.scenario, c.unit, got, fit)
			}
			fmt.Fprintf(&table, "| %s | %s | %s | %.4g | %.4g |\n", c.policy, c.scenario, c.unit, fit, got)
		})
	}
	t.Logf("\n%s", &table)
}

// TestEvacuation: a policy that leaves a peer has everything there revoked, for that reason,
// and places nothing there before it is calm again.
func TestEvacuation(t *testing.T) {
	s := newScene(t, emulated.Options{}, newPolicy(t, "stability", harvest.PolicyOptions{EvacuateAt: 0.5}))
	s.pass(time.Second)
	if n := len(s.borrow("c", 100)); n != 48 {
		t.Fatalf("%d objects fit", n)
	}
	// Others come and go beside what is borrowed, in the headroom and what they ask for.
	for i := range 4 {
		s.others(1, int64(1-i%2)*10)
		s.pass(2 * time.Second)
	}
	st := s.r.State()
	if st.Revocations[harvest.ReasonPolicy] == 0 || st.Peers[0].Used != 0 || st.Peers[1].Used == 0 {
		t.Errorf("revocations %v, peers %+v", st.Revocations, st.Peers)
	}
	_, err := s.r.Alloc(sceneObject, harvest.Hints{Peers: peers12[:1]})
	if !errors.Is(err, harvest.ErrNoCapacity) || !strings.Contains(err.Error(), "is left by the policy stability") {
		t.Errorf("the peer that was left: %v", err)
	}
	s.pass(5 * time.Minute)
	if _, err := s.r.Alloc(sceneObject, harvest.Hints{Peers: peers12[:1]}); err != nil {
		t.Errorf("a peer that is calm again: %v", err)
	}
}

// mirror is a policy of a program of its own: objects go to the peer with the highest number.
type mirror struct{ harvest.BestFit }

func (mirror) Name() string { return "mirror" }

func (mirror) Choose(_ harvest.Request, from []harvest.Candidate) (int, error) {
	best := 0
	for i, c := range from {
		if c.Peer.Space > from[best].Peer.Space {
			best = i
		}
	}
	return best, nil
}

// A policy decides where each request goes, or refuses it. Registered, it is made by name.
func ExampleRegisterPolicy() {
	harvest.RegisterPolicy("mirror", func(harvest.PolicyOptions) (harvest.Policy, error) { return mirror{}, nil })
	policy, err := harvest.NewPolicy("mirror", harvest.PolicyOptions{})
	if err != nil {
		panic(err)
	}
	machine, err := emulated.New(emulated.Options{GPUs: make([]emulated.GPU, 4)})
	if err != nil {
		panic(err)
	}
	runtime, err := harvest.New(harvest.Options{
		Machine: machine, Peers: []device.Space{device.HBM(1), device.HBM(2), device.HBM(3)}, Policy: policy,
	})
	if err != nil {
		panic(err)
	}
	h, err := runtime.Alloc(1<<20, harvest.Hints{Client: "cache"})
	if err != nil {
		panic(err)
	}
	fmt.Println(policy.Name(), h.Device())
	fmt.Println(runtime.Close(context.Background()), machine.Close())
	// Output:
	// mirror gpu3
	// <nil> <nil>
}

func TestPolicyOptionsRefused(t *testing.T) {
	clients := map[string]harvest.ClientLimits{"c": {Weight: 2}}
	for _, c := range []struct {
		name string
		o    harvest.PolicyOptions
		want string
	}{
		{"best-fit", harvest.PolicyOptions{Clients: clients}, "best-fit has no limits of clients; use fairness"},
		{"locality", harvest.PolicyOptions{EvacuateAt: 1}, "locality leaves no peer; use interference or stability"},
		{"fairness", harvest.PolicyOptions{EvacuateAt: 1}, "fairness leaves no peer"},
		{"interference", harvest.PolicyOptions{EvacuateAt: 2}, "from 0 to 1, not at 2"},
		{"stability", harvest.PolicyOptions{Clients: clients}, "stability has no limits of clients"},
	} {
		if _, err := harvest.NewPolicy(c.name, c.o); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %s", c.name, err, c.want)
		}
	}
	defer func() {
		if recover() == nil {
			t.Error("a policy is registered twice")
		}
	}()
	harvest.RegisterPolicy("best-fit", nil)
}
