package rebalancer_test

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"unsafe"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/harvest"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/rebalancer"
	"github.com/moeserve/moeserve/tools/racedetector"
	"github.com/moeserve/moeserve/transfer"
)

var _ rebalancer.Store = (*experts.Store)(nil)

// The rig's model: an expert's rows hold its number, in every byte.
const (
	rigLayers, rigExperts = 6, 8
	rigChosen             = 2
	rigBytes              = 512
	rigHalfLife           = 500 * time.Millisecond
)

var rigLayout = kernels.ExpertLayout{
	ExpertShape: kernels.ExpertShape{Hidden: 8, Intermediate: 10, DType: kernels.BF16}, Tag: kernels.RowMajor, Size: rigBytes,
}

// packer is a backend's packing alone, which knows from its data where a row goes.
type packer struct{ kernels.Backend }

func (packer) PackExpert(l kernels.ExpertLayout, part kernels.Part, row int, src, dst []byte) error {
	at := int(l.Bytes()) / 3 * int(part)
	if part == kernels.W2 {
		at += row * l.Intermediate * l.DType.Size()
	} else {
		at += row * l.Hidden * l.DType.Size()
	}
	copy(dst[at:], src)
	return nil
}

func content(layer, expert int) byte { return byte(1 + layer*rigExperts + expert) }

// rig is a whole node's worth of experts on a virtual machine.
type rig struct {
	*testing.T
	m       *emulated.Machine
	harvest *harvest.Runtime
	store   *experts.Store
	rb      *rebalancer.Rebalancer
	compute device.Executor
	// last is the latest step.
	last experts.Step
	rng  *rand.Rand
	log  *bytes.Buffer
	// first of the hot experts of each layer.
	hot int
	// resets counts steps that were run again.
	resets int
	// places in lent memory.
	places []*experts.LentPlace
}

// rigOptions differ from test to test.
type rigOptions struct {
	machine  emulated.Options
	peers    []int // how many experts each holds. Default: 16 and 8
	offload  float64
	adaptive bool
	harvest  harvest.Options
	core     rebalancer.CoreOptions
	// rates of the links from peers, in bytes per second. Default: 8e6.
	rates []float64
	// store, if set, stands before the real one.
	store func(*experts.Store) rebalancer.Store
	// monitor of harvest, which watches the machine's own.
	monitor *sickly
	// places in lent memory of the GPU.
	places int
}

// topology is the machine with links from peers of different rates.
func (o rigOptions) topology() *device.Topology {
	top := &device.Topology{Host: device.Info{MemoryBytes: 1 << 30}, Paths: map[device.Pair]device.Path{}}
	for _, g := range o.machine.GPUs {
		top.GPUs = append(top.GPUs, device.Info{MemoryBytes: g.MemoryBytes, FlopsPerSecond: g.FlopsPerSecond})
	}
	for i := range top.GPUs {
		top.Paths[device.Pair{From: device.Host, To: device.HBM(i)}] = device.Path{BytesPerSecond: 1e6}
		if i > 0 {
			top.Paths[device.Pair{From: device.HBM(i), To: device.HBM(0)}] = device.Path{BytesPerSecond: o.rates[i-1]}
		}
	}
	return top
}

func newRig(t *testing.T, o rigOptions) *rig {
	t.Helper()
	if o.machine.Virtual {
		racedetector.SkipSequential(t)
	}
	if o.peers == nil {
		o.peers = []int{16, 8}
	}
	o.machine.Check = true
	o.machine.GPUs = []emulated.GPU{{MemoryBytes: 1 << 20, FlopsPerSecond: 1e6}}
	for _, n := range o.peers {
		o.machine.GPUs = append(o.machine.GPUs, emulated.GPU{MemoryBytes: int64(n) * rigBytes})
		o.harvest.Peers = append(o.harvest.Peers, device.HBM(len(o.harvest.Peers)+1))
	}
	o.machine.HostLink, o.machine.PeerLink = emulated.Link{BytesPerSecond: 1e6}, emulated.Link{BytesPerSecond: 8e6}
	if o.rates != nil {
		o.machine.Topology = o.topology()
		o.machine.GPUs, o.machine.HostLink, o.machine.PeerLink = nil, emulated.Link{}, emulated.Link{}
	}
	r := &rig{T: t, rng: rand.New(rand.NewPCG(3, 9)), log: &bytes.Buffer{}}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	end := func(what string, closed func() error) {
		t.Cleanup(func() {
			if err := closed(); err != nil && !errors.Is(err, device.ErrLost) {
				t.Errorf("%s: %v", what, err)
			}
		})
	}
	var err error
	r.m, err = emulated.New(o.machine)
	must(err)
	end("machine", r.m.Close)
	engine, err := transfer.New(transfer.Options{Machine: r.m, ChunkBytes: rigBytes})
	must(err)
	end("transfer", engine.Close)
	o.harvest.Machine, o.harvest.ScrubBytes = r.m, rigBytes
	def := func(field *int64, to int64) {
		if *field == 0 {
			*field = to
		}
	}
	def(&o.harvest.SlabBytes, 2*rigBytes)
	def(&o.harvest.HeadroomBytes, -1)
	def((*int64)(&o.harvest.Cooldown), int64(50*time.Millisecond))
	if o.monitor != nil {
		mm, err := harvest.NewMachineMonitor(r.m, o.harvest.Peers)
		must(err)
		end("monitor", mm.Close)
		o.monitor.Monitor, o.harvest.Monitor = mm, o.monitor
	}
	r.harvest, err = harvest.New(o.harvest)
	must(err)
	end("harvest", func() error { return r.harvest.Close(context.Background()) })
	stream, err := r.m.NewStream(device.HBM(0), device.StreamOptions{Name: "compute"})
	must(err)
	end("compute", stream.Close)
	r.compute = stream.(device.Executor)

	// The expert cache is so small that it never still holds what the step before has fetched.
	c := experts.Config{Experts: rigExperts, Layout: rigLayout, Dynamic: o.adaptive, CacheSlots: rigExperts}
	for l := range rigLayers {
		c.Layers = append(c.Layers, l)
	}
	if o.offload == 0 {
		o.offload = 1
	}
	c.Placement, err = experts.Place(rigLayers, rigExperts, o.offload)
	must(err)
	plan, err := experts.NewPlan(c)
	must(err)
	log := slog.New(slog.NewTextHandler(r.log, nil))
	var lent device.Memory
	if o.places > 0 {
		lent, err = r.m.Alloc(device.HBM(0), int64(o.places)*rigBytes, "lent")
		must(err)
		end("lent", lent.Free)
	}
	r.store, err = experts.New(experts.Options{
		Machine: r.m, Space: device.HBM(0), Backend: packer{}, Transfer: engine, Plan: plan, Harvest: r.harvest,
	})
	must(err)
	end("store", r.store.Close)
	for l := range rigLayers {
		for e := range rigExperts {
			for part := kernels.W1; part <= kernels.W2; part++ {
				must(r.store.Expert(l, e, part, 0, bytes.Repeat([]byte{content(l, e)}, int(rigLayout.Bytes())/3)))
			}
		}
	}
	must(r.store.Seal(t.Context()))
	if o.core.MigrationLimit == 0 {
		o.core.MigrationLimit = 80 * rigBytes
	}
	if o.core.HalfLife == 0 {
		o.core.HalfLife = rigHalfLife
	}
	o.core.Tuning.Horizon = 2 * time.Second
	for i := range o.places {
		p, err := r.store.AddPlace(lent.Region(int64(i)*rigBytes, rigBytes))
		must(err)
		r.places = append(r.places, p)
	}
	var store rebalancer.Store = r.store
	if o.store != nil {
		store = o.store(r.store)
	}
	r.rb, err = rebalancer.New(rebalancer.Options{
		Store: store, Harvest: r.harvest, Clock: r.m, Core: o.core, Interval: 20 * time.Millisecond,
		Backoff: 200 * time.Millisecond, Log: log, Places: r.store,
	})
	must(err)
	end("rebalancer", r.rb.Close)
	return r
}

// products reads every byte of a wave's experts.
func (r *rig) products(layer int, table kernels.Tensor, w experts.Wave) error {
	at := func(a device.Addr, n int64) []byte { return unsafe.Slice(*(**byte)(unsafe.Pointer(&a)), n) }
	return r.compute.Execute(device.Work{
		Name: "products", Reads: []device.Range{w.Experts.Range(), table.Range()}, Flops: 1000,
		Run: func(a device.Access) error {
			list, slots := at(w.Experts.Addr, w.Experts.Bytes()), at(table.Addr, table.Bytes())
			for i := range w.Experts.Shape[0] {
				e := int(binary.NativeEndian.Uint32(list[4*i:]))
				extent := device.Range{Addr: device.Addr(binary.NativeEndian.Uint64(slots[8*e:])), Bytes: rigLayout.Bytes()}
				a.Read(extent)
				if got := at(extent.Addr, extent.Bytes); bytes.Count(got, []byte{content(layer, e)}) != len(got) {
					r.Errorf("layer %d expert %d is not what was loaded: %d …", layer, e, got[0])
				}
			}
			return nil
		},
	})
}

// choose draws two experts of each layer: hot ones nine times in ten.
func (r *rig) choose(layer int) []int32 {
	var chosen []int32
	for range rigChosen {
		e := r.hot + r.rng.IntN(2)
		if r.rng.IntN(10) == 0 {
			e = r.rng.IntN(rigExperts)
		}
		chosen = append(chosen, int32((e+layer)%rigExperts))
	}
	return chosen
}

// try runs a step as the pipeline does, with the chosen experts alone or whole layers.
func (r *rig) try(whole bool) error {
	st, err := r.store.BeginStep(r.Context(), r.compute)
	if err != nil {
		return err
	}
	r.last = st
	for l := range rigLayers {
		if err := r.layer(st, l, whole); err != nil {
			return err
		}
	}
	if err := r.compute.Synchronize(r.Context()); err != nil {
		return err
	}
	return st.End()
}

// layer opens a layer, runs its waves and closes it.
func (r *rig) layer(st experts.Step, l int, whole bool) error {
	var use experts.Use
	var err error
	if whole {
		use, err = st.Layer(r.Context(), l)
	} else {
		var open experts.Unrouted
		if open, err = st.LayerUnrouted(r.Context(), l); err == nil {
			if err = r.waves(l, open.Slots, open.Waves); err == nil {
				use, err = open.FetchChosen(r.Context(), r.choose(l))
			}
		}
	}
	if err == nil {
		err = r.waves(l, use.Slots, use.Waves)
	}
	if err == nil {
		err = use.Release()
	}
	return err
}

func (r *rig) waves(layer int, table kernels.Tensor, waves []experts.Wave) error {
	for _, w := range waves {
		for _, p := range w.WaitFor {
			if err := r.compute.WaitFence(p.Fence, p.Value); err != nil {
				return err
			}
		}
		if err := r.products(layer, table, w); err != nil {
			return err
		}
	}
	return nil
}

// steps runs steps until the time has passed, ticking between them.
func (r *rig) steps(d time.Duration, whole bool) {
	r.Helper()
	for end := r.m.Now() + d; r.m.Now() < end; {
		for tries := 0; ; tries++ {
			err := r.try(whole)
			if err == nil {
				break
			}
			if tries == 5 {
				r.Fatalf("the step does not come through: %v", err)
			}
			r.resets++
			_ = r.compute.Recover(r.Context()) // the step's failure
			if err := r.last.Drop(r.Context()); err != nil {
				r.Fatal(err)
			}
		}
		r.tick()
	}
}

func (r *rig) tick() {
	r.Helper()
	if _, err := r.harvest.Tick(r.m.Now()); err != nil {
		r.Fatal(err)
	}
	if err := r.rb.Tick(r.m.Now()); err != nil {
		r.Fatal(err)
	}
}

// occupy lets another process allocate so many bytes of a peer: where it is refused, it
// asks for the memory and tries again.
func (r *rig) occupy(gpu int, bytes int64) {
	r.Helper()
	for tries := 0; ; tries++ {
		err := r.m.Occupy(device.HBM(gpu), bytes)
		if err == nil {
			return
		}
		if !errors.Is(err, device.ErrOutOfMemory) || tries == 100 {
			r.Fatal(err)
		}
		if _, err := r.harvest.Reclaim(device.HBM(gpu), bytes, 0); err != nil {
			r.Fatal(err)
		}
		r.steps(time.Millisecond, false)
	}
}

// hitRate over a time: of the offloaded experts that were fetched, how many came from
// peers.
func (r *rig) hitRate(d time.Duration) float64 {
	r.Helper()
	before := r.store.Stats().Uses
	r.steps(d, false)
	after := r.store.Stats().Uses
	p, h := after[experts.Peer]-before[experts.Peer], after[experts.Host]-before[experts.Host]
	if p+h == 0 {
		r.Fatal("nothing was fetched")
	}
	return float64(p) / float64(p+h)
}

// onPeers counts copies by layer and by peer.
func (r *rig) onPeers() (layers [rigLayers]int, peers map[device.Space]int) {
	peers = map[device.Space]int{}
	for l, homes := range r.store.Placed() {
		for _, h := range homes {
			if h.Tier == experts.Peer {
				layers[l]++
				peers[h.Device]++
			}
		}
	}
	return layers, peers
}

// TestDrift: the whole chain follows a hot set that shifts.
func TestDrift(t *testing.T) {
	for _, schedule := range []emulated.Schedule{emulated.Eager, emulated.Random} {
		t.Run(schedule.String(), func(t *testing.T) {
			r := newRig(t, rigOptions{machine: emulated.Options{Virtual: true, Schedule: schedule, Seed: 5}, peers: []int{6, 4}})
			r.steps(2*time.Second, false)
			before := r.hitRate(time.Second)
			for range 2 {
				r.hot += 4
				shifted := r.hitRate(100 * time.Millisecond)
				bound := time.Duration(1.5*10*rigBytes/(80*rigBytes)*float64(time.Second)) + 2*rigHalfLife
				r.steps(bound-100*time.Millisecond, false)
				after := r.hitRate(time.Second)
				t.Logf("hit rate %.2f, after the shift %.2f, %v later %.2f; %+v", before, shifted, bound, after, r.rb.Counts())
				if shifted > 0.6*before || after < 0.9*before {
					t.Errorf("hit rate %.2f, after the shift %.2f, %v later %.2f", before, shifted, bound, after)
				}
			}
			if s := r.store.Stats(); s.Failed != 0 || s.MigratedBytes != s.Promoted*rigBytes || r.log.Len() != 0 {
				t.Errorf("%+v, log:\n%s", s, r.log)
			}
		})
	}
}

// TestWholeLayers: where every step fetches whole layers each gets the same share, and
// then nothing moves any more.
func TestWholeLayers(t *testing.T) {
	r := newRig(t, rigOptions{machine: emulated.Options{Virtual: true}, peers: []int{7, 6}})
	r.steps(2*time.Second, true)
	counts := r.rb.Counts()
	r.steps(2*time.Second, true)
	layers, peers := r.onPeers()
	for _, n := range layers {
		if n < 2 || n > 3 {
			t.Errorf("layers have %v copies", layers)
		}
	}
	if peers[device.HBM(1)] != 7 || peers[device.HBM(2)] != 6 {
		t.Errorf("peers hold %v, want all that fits", peers)
	}
	if got := r.rb.Counts(); got != counts || got.Replaced != 0 {
		t.Errorf("moves go on: %+v, then %+v", counts, got)
	}
}

// TestStorm: memory is taken and freed without rest. Steps get slower and lose
// nothing; afterwards all that fits is there again.
func TestStorm(t *testing.T) {
	r := newRig(t, rigOptions{machine: emulated.Options{Virtual: true, Schedule: emulated.Random, Seed: 11}})
	r.steps(time.Second, true)
	taken := map[int]int64{}
	for range 60 {
		gpu := 1 + r.rng.IntN(2)
		if n := int64(r.rng.IntN(1+16/gpu)) * rigBytes; taken[gpu] > 0 {
			if err := r.m.Occupy(device.HBM(gpu), -taken[gpu]); err != nil {
				t.Fatal(err)
			}
			taken[gpu] = 0
		} else {
			r.occupy(gpu, n)
			taken[gpu] = n
		}
		r.steps(30*time.Millisecond, r.rng.IntN(2) == 0)
	}
	revoked := r.store.Stats().Revoked
	for gpu, n := range taken {
		if err := r.m.Occupy(device.HBM(gpu), -n); err != nil {
			t.Fatal(err)
		}
	}
	r.steps(2*time.Second, true)
	_, peers := r.onPeers()
	t.Logf("%d copies were revoked; %+v; %v", revoked, r.rb.Counts(), r.store.Stats())
	if revoked < 50 || peers[device.HBM(1)] != 16 || peers[device.HBM(2)] != 8 {
		t.Errorf("%d copies were revoked; afterwards peers hold %v", revoked, peers)
	}
	if r.resets != 0 || r.log.Len() != 0 {
		t.Errorf("%d steps were run again; log:\n%s", r.resets, r.log)
	}
}

// TestWants: harvest knows that more would be borrowed where experts are fetched from the host and
// peers are full, though the plan asks a full peer for nothing; and not where all have copies.
func TestWants(t *testing.T) {
	for _, c := range []struct {
		room  int
		wants bool
	}{{4, true}, {1, true}, {64, false}} {
		r := newRig(t, rigOptions{machine: emulated.Options{Virtual: true}, peers: []int{c.room}, harvest: harvest.Options{SlabBytes: rigBytes}})
		r.steps(4*time.Second, true)
		b, err := r.harvest.Balance(device.HBM(1))
		if err != nil || b.Wants != c.wants {
			t.Errorf("room for %d: %+v, %v", c.room, b, err)
		}
	}
}

// TestCosts: harvest knows what each copy is worth now, and takes the cheapest.
func TestCosts(t *testing.T) {
	r := newRig(t, rigOptions{machine: emulated.Options{Virtual: true}, peers: []int{30}, harvest: harvest.Options{SlabBytes: rigBytes}})
	r.steps(2*time.Second, false)
	was := r.hot
	r.hot += 4
	r.steps(2*time.Second, false)
	costs := map[string]time.Duration{}
	for _, s := range r.harvest.State().Peers[0].Slabs {
		for _, g := range s.Segments {
			costs[g.Label] = g.Cost
		}
	}
	if _, err := r.harvest.Reclaim(device.HBM(1), 16*rigBytes, 0); err != nil {
		t.Fatal(err)
	}
	for range 10 { // nothing is used meanwhile
		r.tick()
		if err := r.store.WaitMoves(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	for l, homes := range r.store.Placed() {
		label := func(e int) string { return fmt.Sprintf("layer %d expert %d", l, (e+l)%rigExperts) }
		for i := range 2 {
			hot, cold := costs[label(r.hot+i)], costs[label(was+i)]
			if hot < 3*cold || hot == 0 {
				t.Errorf("losing %s, which is hot, costs %v; %s, which was, %v", label(r.hot+i), hot, label(was+i), cold)
			}
			if h := homes[(r.hot+i+l)%rigExperts]; h.Tier != experts.Peer {
				t.Errorf("%s, which is hot, was revoked", label(r.hot+i))
			}
		}
	}
}

// TestFailingPeer: one whose copies fail is excluded and readmitted, each time after
// longer; one that is lost is not.
func TestFailingPeer(t *testing.T) {
	r := newRig(t, rigOptions{machine: emulated.Options{Virtual: true}})
	r.m.Inject(&emulated.Fault{
		Kind: emulated.FailCopy, Times: 18, // six times the failures after which a peer is left out, copies being tried twice
		Match: func(p emulated.Point) bool { return p.From == device.Host && p.To == device.HBM(1) },
	})
	health := func(i int) string {
		if err := r.harvest.State().Peers[i].Health; err != nil {
			return err.Error()
		}
		return "ok"
	}
	r.steps(100*time.Millisecond, true)
	if health(0) == "ok" || health(1) != "ok" {
		t.Fatalf("peers are %q and %q", health(0), health(1))
	}
	r.steps(3*time.Second, true)
	if _, peers := r.onPeers(); health(0) != "ok" || peers[device.HBM(1)] != 16 {
		t.Errorf("the peer is %q and holds %v", health(0), peers)
	}
	if n := r.rb.Counts().Readmitted; n < 1 || n > 6 || strings.Count(r.log.String(), "retrying a disabled peer") != int(n) {
		t.Errorf("taken back %d times; log:\n%s", n, r.log)
	}
	var after []time.Duration
	for line := range strings.Lines(r.log.String()) {
		if _, rest, ok := strings.Cut(line, " after="); ok {
			d, err := time.ParseDuration(strings.Fields(rest)[0])
			if err != nil {
				t.Fatal(err)
			}
			after = append(after, d)
		}
	}
	for i, d := range after {
		if want := 200 * time.Millisecond << i; d != want {
			t.Errorf("readmitted after %v, want twice as long each time", after)
			break
		}
	}
	if len(after) < 2 {
		t.Errorf("readmitted after %v, and not again", after)
	}
	readmitted := r.rb.Counts().Readmitted
	if err := r.m.Lose(2); err != nil {
		t.Fatal(err)
	}
	r.steps(2*time.Second, true)
	if _, peers := r.onPeers(); health(1) == "ok" || peers[device.HBM(2)] != 0 || r.rb.Counts().Readmitted != readmitted {
		t.Errorf("a lost peer is %q, holds %v; %+v", health(1), peers, r.rb.Counts())
	}
	// Beside it, the other peer follows what is used.
	r.steps(2*time.Second, false)
	r.hot += 3
	r.steps(3*time.Second, false)
	if hits := r.hitRate(time.Second); hits < 0.7 {
		t.Errorf("beside a lost peer the hit rate is %.2f; %+v", hits, r.rb.Counts())
	}
}

// sickly is a monitor of peers one of which may be sick.
type sickly struct {
	harvest.Monitor
	peer   device.Space
	health error
}

func (s *sickly) Read(p device.Space) (harvest.Reading, error) {
	r, err := s.Monitor.Read(p)
	if p == s.peer {
		r.Health = s.health
	}
	return r, err
}

// TestSickPeer: what a peer's own readings say is not for the rebalancer to mend.
func TestSickPeer(t *testing.T) {
	monitor := &sickly{peer: device.HBM(1)}
	r := newRig(t, rigOptions{machine: emulated.Options{Virtual: true}, monitor: monitor})
	r.steps(time.Second, true)
	for _, why := range []string{"hot", "hotter"} {
		monitor.health = errors.New(why)
		r.steps(time.Second, true)
		if _, peers := r.onPeers(); peers[device.HBM(1)] != 0 || peers[device.HBM(2)] != 8 {
			t.Errorf("a peer that is %s: they hold %v", why, peers)
		}
	}
	monitor.health = nil
	r.steps(time.Second, true)
	if _, peers := r.onPeers(); peers[device.HBM(1)] != 16 || r.rb.Counts().Readmitted != 0 || r.log.Len() != 0 {
		t.Errorf("a peer that is well again: they hold %v; %+v; log:\n%s", peers, r.rb.Counts(), r.log)
	}
}

// TestFasterPeer: the hottest experts end on the faster of two peers.
func TestFasterPeer(t *testing.T) {
	r := newRig(t, rigOptions{machine: emulated.Options{Virtual: true}, peers: []int{24, 12}, rates: []float64{2e6, 20e6}})
	if err := r.m.Occupy(device.HBM(2), 12*rigBytes); err != nil {
		t.Fatal(err)
	}
	r.steps(2*time.Second, false)
	if err := r.m.Occupy(device.HBM(2), -12*rigBytes); err != nil {
		t.Fatal(err)
	}
	r.steps(3*time.Second, false)
	for l, homes := range r.store.Placed() {
		for _, e := range []int{l % rigExperts, (l + 1) % rigExperts} {
			if h := homes[e]; h.Tier != experts.Peer || h.Device != device.HBM(2) {
				t.Errorf("hot expert %d of layer %d is at %v %v", e, l, h.Tier, h.Device)
			}
		}
	}
}

// TestMoveAtQuota: experts move to a faster peer also where the quota has no room for two
// copies of one.
func TestMoveAtQuota(t *testing.T) {
	r := newRig(t, rigOptions{
		machine: emulated.Options{Virtual: true}, peers: []int{24, 12}, rates: []float64{2e6, 20e6},
		harvest: harvest.Options{Policy: harvest.NewFairness(harvest.FairnessOptions{Quota: 12 * rigBytes})},
	})
	if err := r.m.Occupy(device.HBM(2), 12*rigBytes); err != nil {
		t.Fatal(err)
	}
	r.steps(3*time.Second, false)
	if _, peers := r.onPeers(); peers[device.HBM(1)] != 12 {
		t.Fatalf("peers hold %v", peers)
	}
	if err := r.m.Occupy(device.HBM(2), -12*rigBytes); err != nil {
		t.Fatal(err)
	}
	r.steps(6*time.Second, false)
	if _, peers := r.onPeers(); peers[device.HBM(2)] < 10 {
		t.Errorf("peers hold %v; %+v", peers, r.rb.Counts())
	}
}

// TestMoveRefused: an expert that cannot move to a faster peer stays where it is.
func TestMoveRefused(t *testing.T) {
	r := newRig(t, rigOptions{machine: emulated.Options{Virtual: true}, peers: []int{24, 12}, rates: []float64{2e6, 20e6}})
	if err := r.m.Occupy(device.HBM(2), 12*rigBytes); err != nil {
		t.Fatal(err)
	}
	r.steps(2*time.Second, false)
	r.m.Inject(&emulated.Fault{Kind: emulated.RefuseAlloc, Times: -1, Match: func(p emulated.Point) bool { return p.Space == device.HBM(2) }})
	if err := r.m.Occupy(device.HBM(2), -12*rigBytes); err != nil {
		t.Fatal(err)
	}
	refused := r.rb.Counts().Refused
	for range 100 {
		r.steps(10*time.Millisecond, false)
		r.tick()
		if _, peers := r.onPeers(); peers[device.HBM(1)] != 24 {
			t.Fatalf("peers hold %v", peers)
		}
	}
	if r.rb.Counts().Refused == refused {
		t.Error("no move was tried")
	}
}

// TestSwaps: the hottest experts become resident.
func TestSwaps(t *testing.T) {
	r := newRig(t, rigOptions{machine: emulated.Options{Virtual: true}, offload: 0.75, adaptive: true})
	for range 2 {
		r.hot += 3
		r.steps(4*time.Second, false)
		for l, homes := range r.store.Placed() {
			for _, e := range []int{r.hot, r.hot + 1} {
				if h := homes[(e+l)%rigExperts]; h.Tier != experts.Resident {
					t.Errorf("layer %d: hot expert %d is %v", l, (e+l)%rigExperts, h.Tier)
				}
			}
		}
	}
	// The copies on peers of those that became resident were freed.
	layers, _ := r.onPeers()
	copies, held := 0, 0
	for _, n := range layers {
		copies += n
	}
	for _, c := range r.harvest.State().Clients {
		held += c.Handles
	}
	if s := r.store.Stats(); s.Swapped == 0 || copies != held {
		t.Errorf("%d swaps; %d copies on peers, and %d handles", s.Swapped, copies, held)
	}
}

// TestLentMemory: the hottest experts are resident in lent memory of the GPU, others follow when
// use changes, and Worth is what they save there and what the next ones would.
func TestLentMemory(t *testing.T) {
	const places = 2 * rigLayers
	r := newRig(t, rigOptions{machine: emulated.Options{Virtual: true}, places: places})
	if w := r.rb.Worth(); len(w.Next) > 0 || len(w.Lent) > 0 {
		t.Errorf("%+v before any use", w)
	}
	for range 2 {
		r.hot += 3
		r.steps(6*time.Second, false)
		for l, homes := range r.store.Placed() {
			for _, e := range []int{r.hot, r.hot + 1} {
				if h := homes[(e+l)%rigExperts]; h.Tier != experts.Resident || !h.Lent {
					t.Errorf("layer %d: hot expert %d is %+v", l, (e+l)%rigExperts, h)
				}
			}
		}
		w := r.rb.Worth()
		if len(w.Lent) != places || len(w.Next) == 0 || !slices.IsSortedFunc(w.Next, func(a, b float64) int { return cmp.Compare(b, a) }) {
			t.Fatalf("%+v", w)
		}
		for id, worth := range w.Lent {
			if worth <= w.Next[0] {
				t.Errorf("%v is worth %g s/s, and the next one %g", id, worth, w.Next[0])
			}
		}
	}
	if s := r.store.Stats(); s.MadeResident < 2*places || s.Offloaded < places || int64(r.rb.Counts().MadeResident) < s.MadeResident {
		t.Errorf("%+v, %+v", s, r.rb.Counts())
	}
}

// TestFillPlaces: places that are to be filled have experts before any is used, and whoever is used
// then comes in place of those.
func TestFillPlaces(t *testing.T) {
	const places = 2 * rigLayers
	r := newRig(t, rigOptions{machine: emulated.Options{Virtual: true}, places: places, core: rebalancer.CoreOptions{MigrationLimit: -1}})
	tick := func(fill bool) int64 {
		r.rb.SetFillPlaces(fill)
		if err := r.rb.Tick(r.m.Now()); err != nil {
			t.Fatal(err)
		}
		return r.rb.Counts().MadeResident
	}
	if n := tick(false); n > 0 {
		t.Errorf("%d experts without any use are made resident", n)
	}
	if n := tick(true); n == 0 {
		t.Error("no place is filled")
	}
	r.steps(6*time.Second, false)
	for l, homes := range r.store.Placed() {
		for _, e := range []int{r.hot, r.hot + 1} {
			if h := homes[(e+l)%rigExperts]; h.Tier != experts.Resident || !h.Lent {
				t.Errorf("layer %d: hot expert %d is %+v", l, (e+l)%rigExperts, h)
			}
		}
	}
	if n := r.store.FreePlaces(); n > 0 {
		t.Errorf("%d places are free", n)
	}
}

// TestRefusals: a policy that lets little be had slows moves down, and is no trouble.
func TestRefusals(t *testing.T) {
	for _, c := range []struct {
		name   string
		policy harvest.FairnessOptions
		want   int // copies on peers
	}{
		{"quota", harvest.FairnessOptions{Quota: 10 * rigBytes}, 10},
		{"rate", harvest.FairnessOptions{Quota: 1 << 20, Rate: 30 * rigBytes, Burst: rigBytes}, 24},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t, rigOptions{machine: emulated.Options{Virtual: true}, harvest: harvest.Options{Policy: harvest.NewFairness(c.policy)}})
			r.steps(3*time.Second, true)
			_, peers := r.onPeers()
			if n := peers[device.HBM(1)] + peers[device.HBM(2)]; n != c.want {
				t.Errorf("%d copies, want %d", n, c.want)
			}
			refused := r.rb.Counts().Refused
			if refused == 0 || refused > 60 || r.log.Len() != 0 {
				t.Errorf("%d refusals; log:\n%s", refused, r.log)
			}
			if c.name == "quota" {
				r.steps(2*time.Second, false)
				if hits := r.hitRate(2 * time.Second); hits < 0.65 {
					t.Errorf("with 10 of the 12 hottest experts allowed the hit rate is %.2f", hits)
				}
			}
		})
	}
}

// TestRefusingPeer: a peer that has free memory and never gives any does not keep
// experts from being replaced on another.
func TestRefusingPeer(t *testing.T) {
	r := newRig(t, rigOptions{machine: emulated.Options{Virtual: true}, peers: []int{12, 24}})
	r.m.Inject(&emulated.Fault{Kind: emulated.RefuseAlloc, Times: -1, Match: func(p emulated.Point) bool { return p.Space == device.HBM(2) }})
	r.steps(2*time.Second, false)
	r.hot += 3
	r.steps(4*time.Second, false)
	if _, peers := r.onPeers(); peers[device.HBM(1)] != 12 || peers[device.HBM(2)] != 0 {
		t.Fatalf("peers hold %v", peers)
	}
	if hits := r.hitRate(time.Second); hits < 0.7 {
		t.Errorf("with the 12 hottest experts on the peer the hit rate is %.2f; %+v", hits, r.rb.Counts())
	}
}

// draining is a store whose peer memory is only free some ticks after a Demote.
type draining struct {
	*experts.Store
	ticks int
	// free is the number of ticks until the latest Demote's memory is free.
	free    int
	demoted []experts.ID
}

func (s *draining) Poll() int {
	if s.free > 0 {
		s.free--
	}
	return s.Store.Poll()
}

func (s *draining) Demote(id experts.ID) error {
	s.free = s.ticks
	s.demoted = append(s.demoted, id)
	return s.Store.Demote(id)
}

func (s *draining) Promote(id experts.ID, o experts.PromoteOptions) error {
	if s.free > 0 {
		return fmt.Errorf("still being read: %w", harvest.ErrNoCapacity)
	}
	return s.Store.Promote(id, o)
}

// TestReplaceWaitsForTheRoom: where the memory of the replaced expert is still being read,
// the other one's copy is made when that has ended. Meanwhile the room is nobody else's,
// the limit of moves counts the promotion, and no peer counts as refusing.
func TestReplaceWaitsForTheRoom(t *testing.T) {
	for _, moving := range []int{1, 4} {
		var s *draining
		r := newRig(t, rigOptions{
			machine: emulated.Options{Virtual: true}, peers: []int{12}, core: rebalancer.CoreOptions{MaxMoving: moving, MigrationLimit: -1},
			store: func(real *experts.Store) rebalancer.Store {
				s = &draining{Store: real, ticks: 3}
				return s
			},
		})
		r.steps(2*time.Second, false)
		r.hot += 4
		demoted, replaced := len(s.demoted), r.rb.Counts().Replaced
		for range 300 {
			r.steps(10*time.Millisecond, false)
			began, ended := len(s.demoted)-demoted, int(r.rb.Counts().Replaced-replaced)
			if began-ended > moving {
				t.Fatalf("%d replacements under way at a time, want at most %d", began-ended, moving)
			}
		}
		for range 10 {
			r.tick()
		}
		began, ended := len(s.demoted)-demoted, int(r.rb.Counts().Replaced-replaced)
		if began == 0 || began != ended || r.rb.Counts().Refused != 0 {
			t.Errorf("%d at a time: %d experts were demoted, and %d promoted in their place; %+v", moving, began, ended, r.rb.Counts())
		}
		if _, peers := r.onPeers(); peers[device.HBM(1)] != 12 {
			t.Errorf("%d at a time: %d experts on the peer", moving, peers[device.HBM(1)])
		}
	}
}

func TestFillAll(t *testing.T) {
	r := newRig(t, rigOptions{machine: emulated.Options{Virtual: true}, offload: 0.5, peers: []int{16, 8}})
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	if err := r.rb.FillAll(canceled); !errors.Is(err, context.Canceled) {
		t.Errorf("given up: %v", err)
	}
	if err := r.rb.FillAll(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, peers := r.onPeers(); peers[device.HBM(1)] != 16 || peers[device.HBM(2)] != 8 {
		t.Errorf("peers hold %v", peers)
	}
	if err := r.rb.FillAll(t.Context()); err != nil {
		t.Errorf("a second time: %v", err)
	}

	r = newRig(t, rigOptions{machine: emulated.Options{Virtual: true}, peers: []int{16, 8}})
	err := r.rb.FillAll(t.Context())
	if !errors.Is(err, rebalancer.ErrDoesNotFit) || !strings.Contains(err.Error(), "24 of 48 fit, 16 on gpu1, 8 on gpu2; an expert takes 512 bytes") {
		t.Error(err)
	}

	r = newRig(t, rigOptions{machine: emulated.Options{Virtual: true}, peers: []int{64}})
	r.m.Inject(&emulated.Fault{Kind: emulated.FailCopy, Times: -1, Match: func(p emulated.Point) bool { return p.To == device.HBM(1) }})
	if err := r.rb.FillAll(t.Context()); !errors.Is(err, rebalancer.ErrDoesNotFit) || !strings.Contains(err.Error(), "0 of 48 fit") {
		t.Error(err)
	}

	r = newRig(t, rigOptions{machine: emulated.Options{Virtual: true}, peers: []int{64}, harvest: harvest.Options{Policy: harvest.NewFairness(harvest.FairnessOptions{Quota: 10 * rigBytes})}})
	if err := r.rb.FillAll(t.Context()); !errors.Is(err, rebalancer.ErrDoesNotFit) || !errors.Is(err, harvest.ErrQuota) {
		t.Error(err)
	}
}

// TestStart: the loop does it by itself, and ends.
func TestStart(t *testing.T) { synctest.Test(t, testStart) }

func testStart(t *testing.T) {
	r := newRig(t, rigOptions{core: rebalancer.CoreOptions{MigrationLimit: -1}})
	if err := r.rb.Start(); err != nil {
		t.Fatal(err)
	}
	if err := r.rb.Start(); err == nil {
		t.Error("it starts twice")
	}
	time.Sleep(time.Second) // of the bubble's: many ticks
	synctest.Wait()
	if _, peers := r.onPeers(); peers[device.HBM(1)]+peers[device.HBM(2)] != 24 {
		t.Fatalf("peers are not filled: %v", peers)
	}
	for range 2 {
		if err := r.rb.Close(); err != nil {
			t.Error(err)
		}
	}
	if r.log.Len() != 0 {
		t.Errorf("log:\n%s", r.log)
	}
}

// refusing is a store that promotes nothing.
type refusing struct {
	rebalancer.Store
	err   error
	asked chan struct{}
}

func (s refusing) Promote(experts.ID, experts.PromoteOptions) error {
	select {
	case s.asked <- struct{}{}:
	default:
	}
	return s.err
}

// TestTrouble: what goes wrong at each tick is reported once, and nothing when harvest is
// closed.
func TestTrouble(t *testing.T) { synctest.Test(t, testTrouble) }

func testTrouble(t *testing.T) {
	for _, c := range []struct {
		err  error
		want int
	}{{errors.New("out of luck"), 1}, {harvest.ErrClosed, 0}} {
		asked := make(chan struct{})
		r := newRig(t, rigOptions{store: func(s *experts.Store) rebalancer.Store { return refusing{s, c.err, asked} }, core: rebalancer.CoreOptions{MaxMoving: 1}})
		if err := r.rb.Start(); err != nil {
			t.Fatal(err)
		}
		<-asked
		if c.want > 0 {
			for range 5 { // several ticks
				<-asked
			}
		}
		if err := r.rb.Close(); err != nil {
			t.Error(err)
		}
		if n := strings.Count(r.log.String(), "rebalance failed"); n != c.want {
			t.Errorf("%v is reported %d times:\n%s", c.err, n, r.log)
		}
	}
}

func TestOptions(t *testing.T) {
	r := newRig(t, rigOptions{machine: emulated.Options{Virtual: true}})
	good := rebalancer.Options{Store: r.store, Harvest: r.harvest, Clock: r.m}
	for _, c := range []struct {
		change func(*rebalancer.Options)
		want   string
	}{
		{func(o *rebalancer.Options) { o.Store = nil }, "Options.Store is not set"},
		{func(o *rebalancer.Options) { o.Clock = nil }, "Options.Clock is not set"},
		{func(o *rebalancer.Options) { o.Interval = -1 }, "durations must not be negative"},
		{func(o *rebalancer.Options) { o.Core.HalfLife = -1 }, "durations must not be negative"},
		{func(o *rebalancer.Options) { o.Core.Tuning.Hysteresis = 0.5 }, "hysteresis 0.5 is below 1"},
		{func(o *rebalancer.Options) { o.Core.MaxMoving = -1 }, "must be at least 1"},
	} {
		o := good
		c.change(&o)
		if _, err := rebalancer.New(o); err == nil || !strings.HasPrefix(err.Error(), "rebalancer: ") || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v, want %s", err, c.want)
		}
	}
	if rb, err := rebalancer.New(good); err != nil || rb.Tick(r.m.Now()) != nil || rb.Close() != nil {
		t.Error(rb, err)
	}
	// Without harvest there is nothing to do here, and that is no trouble.
	good.Harvest = nil
	rb, err := rebalancer.New(good)
	if err != nil {
		t.Fatal(err)
	}
	if err := rb.Tick(r.m.Now()); err != nil {
		t.Error(err)
	}
	if err := rb.FillAll(t.Context()); !errors.Is(err, rebalancer.ErrDoesNotFit) {
		t.Error(err)
	}
	if got := fmt.Sprint(rb.Counts()); got != fmt.Sprint(rebalancer.Counts{}) {
		t.Error(got)
	}
}
