package rebalancer_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/harvest"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/peercache"
	"github.com/moeserve/moeserve/rebalancer"
	"github.com/moeserve/moeserve/tools/racedetector"
	"github.com/moeserve/moeserve/transfer"
)

// The scenario: Mixtral's experts and the KV blocks of conversations, all of which are in host
// memory, share the memory that a peer lends: neither fits.
const (
	shareLayers, shareExperts = 32, 8
	shareExpertBytes          = 3 * 4096 * 14336 * 2
	shareConversations        = 256
	shareBlocks               = 8 // of a conversation
	shareBlockBytes           = 16 << 20
	shareLent                 = 40 << 30
	shareHeadroom             = 2 << 30
	sharePhase                = 60 * time.Second
	shareInterval             = 20 * time.Millisecond
)

// shareLoad is what a phase uses: decode steps, each of which uses two experts of each layer,
// and turns of conversations, each of which reads the blocks of one, per second.
type shareLoad struct{ steps, turns float64 }

var shareLoads = []shareLoad{{3, 5}, {0.2, 256}, {3, 5}}

// savedPerUse is what one use of an object in the peer's memory saves.
func savedPerUse(bytes int64) time.Duration {
	return time.Duration(float64(bytes) * (1/simHost - 1/simPeer) * float64(time.Second))
}

// shared is a machine with both clients.
type shared struct {
	*testing.T
	m       *emulated.Machine
	harvest *harvest.Runtime
	experts *sharedExperts
	kv      *sharedKV
	rb      *rebalancer.Rebalancer
	compute device.Executor
	rng     *rand.Rand
	// saved by each client in each phase, in seconds; held is the bytes held at each second.
	saved   [][2]float64
	held    [][2]int64
	clients map[string]harvest.ClientUsage // at the end
}

// sharedExperts is a store whose uses are drawn.
type sharedExperts struct {
	*peercache.Cache[experts.ID]
	host device.Memory
	uses [][]int64
	hits int64
}

func (s *sharedExperts) Plan() experts.Plan {
	return experts.Plan{Config: experts.Config{Layout: kernels.ExpertLayout{Size: shareExpertBytes}}}
}
func (s *sharedExperts) Uses() [][]int64 { return s.uses }
func (s *sharedExperts) Placed() [][]experts.Placed {
	all := make([][]experts.Placed, shareLayers)
	for l := range all {
		all[l] = make([]experts.Placed, shareExperts)
		for e := range all[l] {
			all[l][e].Tier = experts.Host
			if c := s.Find(experts.ID{Layer: l, Expert: e}); c != nil {
				all[l][e] = experts.Placed{Tier: experts.Peer, Device: c.Device()}
			}
		}
	}
	for _, id := range s.Moving() {
		all[id.Layer][id.Expert].Moving = true
	}
	return all
}

func (s *sharedExperts) Links() []experts.Link {
	return []experts.Link{{From: device.Host, BytesPerSecond: simHost}, {From: device.HBM(1), BytesPerSecond: simPeer}}
}

func (s *sharedExperts) Promote(id experts.ID, o experts.PromoteOptions) error {
	src := s.host.Region(int64(id.Layer*shareExperts+id.Expert)*shareExpertBytes, shareExpertBytes)
	return s.Put(id, src, peercache.PutOptions[experts.ID]{Peers: o.Peers, Cost: o.Cost, Move: o.Move})
}
func (s *sharedExperts) Demote(id experts.ID) error          { return s.Drop(id) }
func (s *sharedExperts) Swap(_, _ experts.ID) error          { return errors.ErrUnsupported }
func (s *sharedExperts) WaitMoves(ctx context.Context) error { return s.Wait(ctx) }

// step draws two experts of each layer, the first of them most often.
func (s *sharedExperts) step(rng *rand.Rand) {
	for l := range s.uses {
		first := rank(rng, shareExperts, 1)
		second := first
		for second == first {
			second = rank(rng, shareExperts, 1)
		}
		for _, r := range []int{first, second} {
			id := experts.ID{Layer: l, Expert: (r + l) % shareExperts}
			s.uses[l][id.Expert]++
			if _, ref, ok := s.Acquire(id); ok {
				ref.Release()
				s.hits++
			}
		}
	}
}

// rank draws one of n ranks with a probability that falls by a power of the rank.
func rank(rng *rand.Rand, n int, exponent float64) int {
	for {
		r := rng.IntN(n)
		if rng.Float64() < math.Pow(float64(r+1), -exponent) {
			return r
		}
	}
}

// blockID is a block of a conversation.
type blockID struct{ conversation, block int }

// sharedKV is a tier of KV blocks above host memory: a conversation that is read is given
// copies in place of that which was read longest ago, if that is longer ago than its own last
// time.
type sharedKV struct {
	*peercache.Cache[blockID]
	host         device.Memory
	last         []time.Duration // by conversation
	hits, misses int64
	// How often blocks here, and those in host memory alone, are read.
	here, below harvest.Reuse
}

func (s *sharedKV) turn(conversation int, now time.Duration) {
	var missing []peercache.Object[blockID]
	for b := range shareBlocks {
		id := blockID{conversation, b}
		if _, ref, ok := s.Acquire(id); ok {
			ref.Release()
			s.hits++
			continue
		}
		s.misses++
		src := s.host.Region(int64(conversation*shareBlocks+b)*shareBlockBytes, shareBlockBytes)
		missing = append(missing, peercache.Object[blockID]{Key: id, Src: src})
	}
	previous := s.last[conversation]
	s.last[conversation] = now
	if len(missing) == 0 {
		return
	}
	if _, err := s.PutAll(missing, peercache.PutOptions[blockID]{}); errors.Is(err, harvest.ErrNoCapacity) || errors.Is(err, harvest.ErrQuota) {
		oldest := -1
		for c, at := range s.last {
			if at < previous && (oldest < 0 || at < s.last[oldest]) && s.Find(blockID{c, 0}) != nil {
				oldest = c
			}
		}
		for b := range shareBlocks {
			if oldest >= 0 {
				_ = s.Drop(blockID{oldest, b})
			}
		}
	}
}

// report reports to harvest how blocks are used.
func (s *sharedKV) report(now time.Duration) error {
	st := s.Stats()
	held := int(st.Landed - st.Dropped - st.Revoked)
	below := shareConversations*shareBlocks - held
	s.here.Observe(s.hits, float64(held), now)
	s.below.Observe(s.misses, float64(below), now)
	return s.SetUse(harvest.Use{
		PerSecond: s.here.PerSecond(), Saved: savedPerUse(shareBlockBytes),
		Wanted: int64(below) * shareBlockBytes, WantedPerSecond: s.below.PerSecond(),
	})
}

func newShared(t *testing.T, o harvest.Options) *shared {
	t.Helper()
	s := &shared{T: t, rng: rand.New(rand.NewPCG(5, 8))}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	end := func(what string, f func() error) {
		t.Cleanup(func() {
			if err := f(); err != nil {
				t.Errorf("%s: %v", what, err)
			}
		})
	}
	var err error
	s.m, err = emulated.New(emulated.Options{
		Virtual: true, NoData: true,
		GPUs:     []emulated.GPU{{MemoryBytes: 1 << 30, FlopsPerSecond: 1e12}, {MemoryBytes: shareLent + shareHeadroom}},
		HostLink: emulated.Link{BytesPerSecond: simHost}, PeerLink: emulated.Link{BytesPerSecond: simPeer},
	})
	must(err)
	end("machine", s.m.Close)
	engine, err := transfer.New(transfer.Options{Machine: s.m})
	must(err)
	end("transfer", engine.Close)
	o.Machine, o.Peers, o.HeadroomBytes = s.m, []device.Space{device.HBM(1)}, shareHeadroom
	o.Clients = map[string]harvest.ClientOptions{"experts": {SlabBytes: 4 * shareExpertBytes}, "kv": {SlabBytes: 64 << 20}}
	s.harvest, err = harvest.New(o)
	must(err)
	end("harvest", func() error { return s.harvest.Close(context.Background()) })
	host := func(bytes int64, label string) device.Memory {
		mem, err := s.m.Alloc(device.Host, bytes, label)
		must(err)
		end(label, mem.Free)
		return mem
	}
	s.experts = &sharedExperts{host: host(shareLayers*shareExperts*shareExpertBytes, "experts"), uses: make([][]int64, shareLayers)}
	for l := range s.experts.uses {
		s.experts.uses[l] = make([]int64, shareExperts)
	}
	s.experts.Cache, err = peercache.New(peercache.Options[experts.ID]{Machine: s.m, Harvest: s.harvest, Transfer: engine, Client: "experts", Reader: device.HBM(0)})
	must(err)
	end("experts", s.experts.Close)
	s.kv = &sharedKV{host: host(shareConversations*shareBlocks*shareBlockBytes, "kv"), last: make([]time.Duration, shareConversations)}
	s.kv.Cache, err = peercache.New(peercache.Options[blockID]{Machine: s.m, Harvest: s.harvest, Transfer: engine, Client: "kv", Reader: device.HBM(0)})
	must(err)
	end("kv", s.kv.Close)
	s.rb, err = rebalancer.New(rebalancer.Options{Store: s.experts, Harvest: s.harvest, Clock: s.m})
	must(err)
	stream, err := s.m.NewStream(device.HBM(0), device.StreamOptions{Name: "compute"})
	must(err)
	end("compute", stream.Close)
	s.compute = stream.(device.Executor)
	return s
}

// run runs all phases.
func (s *shared) run() {
	s.Helper()
	must := func(err error) {
		s.Helper()
		if err != nil {
			s.Fatal(err)
		}
	}
	var steps, turns float64
	for _, load := range shareLoads {
		began := [2]int64{s.experts.hits, s.kv.hits}
		for i := range int(sharePhase / shareInterval) {
			must(s.compute.Execute(device.Work{Name: "compute", Flops: int64(shareInterval.Seconds() * 1e12)}))
			must(s.compute.Synchronize(s.Context()))
			now := s.m.Now()
			for steps += load.steps * shareInterval.Seconds(); steps >= 1; steps-- {
				s.experts.step(s.rng)
			}
			for turns += load.turns * shareInterval.Seconds(); turns >= 1; turns-- {
				s.kv.turn(rank(s.rng, shareConversations, 0.5), now)
			}
			s.kv.Poll()
			_, err := s.harvest.Tick(now)
			must(err)
			if i%5 == 0 {
				must(s.kv.report(now))
				must(s.rb.Tick(now))
			}
			if i%50 == 0 {
				s.clients = s.harvest.Summary().Clients
				s.held = append(s.held, [2]int64{s.clients["experts"].Bytes, s.clients["kv"].Bytes})
			}
		}
		s.saved = append(s.saved, [2]float64{
			float64(s.experts.hits-began[0]) * savedPerUse(shareExpertBytes).Seconds(),
			float64(s.kv.hits-began[1]) * savedPerUse(shareBlockBytes).Seconds(),
		})
	}
}

// row is a line of the table: the seconds of copies saved in each phase, and in all.
func (s *shared) row(name string) (text string, all float64) {
	text = "| " + name + " |"
	for _, p := range s.saved {
		text += fmt.Sprintf(" %.1f + %.1f |", p[0], p[1])
		all += p[0] + p[1]
	}
	return text + fmt.Sprintf(" %.1f |", all), all
}

// sharedParts are the eighths of the memory that fixed splits give to experts.
var sharedParts = []int{4, 6, 8}

// shareFollows is the time within which 90 % of the memory that a shift moves has moved.
const shareFollows = 30 * time.Second

// follows returns how long the experts' memory takes from the start of a phase to within a tenth
// of what it has at the end.
func (s *shared) follows(phase int) time.Duration {
	per := int(sharePhase / time.Second)
	held := s.held[phase*per:][:per]
	from, to := held[0][0], held[per-1][0]
	i := per
	for i > 0 && math.Abs(float64(held[i-1][0]-to)) <= math.Abs(float64(from-to))/10 {
		i--
	}
	return time.Duration(i) * time.Second
}

// TestSharedMemory: experts and KV blocks give way to each other as use shifts from one to the
// other and back. No fixed split of the memory saves as much, and the memory follows within a
// stated time.
func TestSharedMemory(t *testing.T) {
	racedetector.SkipSequential(t) // in virtual time
	var table strings.Builder
	fmt.Fprintln(&table, "| memory | experts' phase | KV's phase | experts' phase | all |\n|---|---|---|---|---|")
	run := func(name string, o harvest.Options) (s *shared, all float64) {
		t.Run(name, func(t *testing.T) {
			s = newShared(t, o)
			s.run()
			var text string
			text, all = s.row(name)
			fmt.Fprintln(&table, text)
		})
		return s, all
	}
	best := 0.0
	for _, n := range sharedParts {
		quota := map[string]int64{"experts": shareLent * int64(n) / 8, "kv": shareLent * int64(8-n) / 8}
		_, all := run(fmt.Sprintf("%d of 8 for experts", n), harvest.Options{DisplaceFactor: -1, Policy: harvest.NewFairness(harvest.FairnessOptions{Quotas: quota})})
		best = max(best, all)
	}
	_, all := run("first come", harvest.Options{DisplaceFactor: -1})
	best = max(best, all)
	s, all := run("by worth", harvest.Options{})
	if all < 1.1*best {
		t.Errorf("%.1f s are saved, and %.1f by the best fixed split", all, best)
	}
	per := int(sharePhase / time.Second)
	for phase := 1; phase < len(shareLoads); phase++ {
		held, took := s.held[(phase+1)*per-1], s.follows(phase)
		t.Logf("phase %d: %.1f GiB of experts and %.1f of KV at its end, 90 %% of that after %v", phase, float64(held[0])/(1<<30), float64(held[1])/(1<<30), took)
		if took > shareFollows {
			t.Errorf("phase %d: memory has followed after %v", phase, took)
		}
	}
	if kv, ex := s.held[2*per-1][1], s.held[3*per-1][0]; kv < 30<<30 || ex < 36<<30 {
		t.Errorf("KV holds %d bytes at the end of its phase, experts %d at the end of theirs", kv, ex)
	}
	// Each phase moves the memory once.
	if moved := s.clients["experts"].Displaced + s.clients["kv"].Displaced; moved > 2*shareLent {
		t.Errorf("%d bytes were displaced", moved)
	}
	t.Logf("seconds of copies saved, by experts + by KV\n%s", &table)
}
