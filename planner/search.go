package planner

import (
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/moeserve/moeserve/configs"
)

// Choices is what a search may choose from. Zero values leave the choice to it.
type Choices struct {
	// Batch, MicroBatch, MicroBatches and PrefillTokens pin a value. Of the first
	// three, two give the third.
	Batch, MicroBatch, MicroBatches int
	PrefillTokens                   int
	// MaxBatch and MaxPrefillTokens bound the batch and the prompt tokens of a step.
	MaxBatch, MaxPrefillTokens int
	// Offload pins the fraction of offloaded experts. Default: the least that fits.
	Offload *float64
	// Tier of the offloaded experts. Default: the best split.
	Tier configs.Tier
	// Attention, Grouping, KVOnHost and HostPaths list what may be used, in the order
	// in which it is tried; shares and paths ascend. Defaults: GPU and CPU; PerLayer and
	// PerMicroBatch; 0, 0.25, 0.5, 0.75 and 1; all numbers of paths that the hardware
	// has.
	Attention []configs.Place
	Grouping  []configs.Grouping
	KVOnHost  []float64
	HostPaths []int
	// Slack is the share of throughput that may go for a simpler schedule and a
	// smaller batch, 0 to 1. Default: 0.01; below 0: none.
	Slack float64
}

// EnsureDefaults leaves all that is not given to the search of a problem.
func (c Choices) EnsureDefaults(p *Problem) Choices {
	if c.Attention == nil {
		c.Attention = []configs.Place{configs.OnGPU, configs.OnCPU}
	}
	if c.Grouping == nil {
		c.Grouping = []configs.Grouping{configs.PerLayer, configs.PerMicroBatch}
	}
	if c.KVOnHost == nil {
		c.KVOnHost = []float64{0, 0.25, 0.5, 0.75, 1}
	}
	if c.HostPaths == nil {
		for i := range p.Hardware.HostToGPU {
			c.HostPaths = append(c.HostPaths, i+1)
		}
	}
	if c.Slack == 0 {
		c.Slack = 0.01
	}
	c.Slack = max(c.Slack, 0)
	if c.MicroBatch > 0 && c.MicroBatches > 0 && c.Batch == 0 {
		c.Batch = c.MicroBatch * c.MicroBatches
	}
	return c
}

func (c *Choices) validate(p *Problem) error {
	for _, f := range []struct {
		name  string
		value int
	}{
		{"batch", c.Batch},
		{"micro-batch", c.MicroBatch},
		{"number of micro-batches", c.MicroBatches},
		{"prompt tokens of a step", c.PrefillTokens},
		{"largest batch", c.MaxBatch},
		{"most prompt tokens of a step", c.MaxPrefillTokens},
	} {
		if f.value < 0 {
			return fmt.Errorf("planner: %s is %d; 0 leaves it open", f.name, f.value)
		}
	}
	switch {
	case c.Batch > 0 && c.MicroBatch > c.Batch:
		return fmt.Errorf("planner: micro-batches of %d rows in a batch of %d; make them at most the batch", c.MicroBatch, c.Batch)
	case c.Batch > 0 && c.MicroBatches > c.Batch:
		return fmt.Errorf("planner: %d micro-batches in a batch of %d; make them at most the batch", c.MicroBatches, c.Batch)
	case c.Batch > 0 && c.MicroBatch > 0 && c.MicroBatches > 0 && (c.Batch+c.MicroBatch-1)/c.MicroBatch != c.MicroBatches:
		return fmt.Errorf("planner: %d micro-batches of %d rows are not a batch of %d; leave one of the three open", c.MicroBatches, c.MicroBatch, c.Batch)
	case c.MaxBatch > 0 && c.Batch > c.MaxBatch:
		return fmt.Errorf("planner: a batch of %d, and at most %d may run at once", c.Batch, c.MaxBatch)
	case c.MaxPrefillTokens > 0 && c.PrefillTokens > c.MaxPrefillTokens:
		return fmt.Errorf("planner: %d prompt tokens a step, and at most %d may run at once", c.PrefillTokens, c.MaxPrefillTokens)
	case p.Workload.Requests > 0 && c.Batch > p.Workload.Requests:
		return fmt.Errorf("planner: a batch of %d sequences for %d requests; make it at most that", c.Batch, p.Workload.Requests)
	case !(c.Slack < 1):
		return fmt.Errorf("planner: a slack of %v; it must be below 1", c.Slack)
	case c.Offload != nil && !(*c.Offload >= 0 && *c.Offload <= 1):
		return fmt.Errorf("planner: offload fraction %v; it must be from 0 to 1", *c.Offload)
	case len(c.Attention) == 0 || len(c.Grouping) == 0 || len(c.KVOnHost) == 0 || len(c.HostPaths) == 0:
		return errors.New("planner: nothing to choose from: Attention, Grouping, KVOnHost and HostPaths must not be empty")
	}
	if !slices.IsSorted(c.KVOnHost) || !slices.IsSorted(c.HostPaths) {
		return fmt.Errorf("planner: KVOnHost %v, HostPaths %v; both must ascend", c.KVOnHost, c.HostPaths)
	}
	for _, place := range c.Attention {
		if place > configs.OnCPU {
			return fmt.Errorf("planner: invalid attention %d", place)
		}
	}
	for _, grouping := range c.Grouping {
		if grouping > configs.PerMicroBatch {
			return fmt.Errorf("planner: invalid expert grouping %d", grouping)
		}
	}
	for _, share := range c.KVOnHost {
		if !(share >= 0 && share <= 1) {
			return fmt.Errorf("planner: a share %v of keys and values on the host; it must be from 0 to 1", share)
		}
	}
	for _, paths := range c.HostPaths {
		if paths < 1 || paths > len(p.Hardware.HostToGPU) {
			return fmt.Errorf("planner: %d paths from the host; hardware %s has %d", paths, p.Hardware.Name, len(p.Hardware.HostToGPU))
		}
	}
	return p.has(c.Tier)
}

// better is by how much a policy must be better than one that was found before, so
// that rounding decides nothing.
const better = 1 + 1e-9

// batchesTried is about how many batches a search tries between one and the largest,
// and around the best of these each time it looks closer.
const batchesTried = 24

// microBatchCounts are the numbers of micro-batches that a search tries.
var microBatchCounts = []int{1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64}

// prefillSteps are the numbers of prefill steps that a search tries.
var prefillSteps = []int{2, 3, 4, 6, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096}

// Search returns the policy of the highest predicted throughput that fits. It tries
// every combination of the choices but two: the number of local experts is the
// largest that fits (more never cost time), and the batch is looked for on a grid
// that narrows around the best. Of all that was tried and comes within Slack of the
// best it takes the simplest schedule (local keys and values, attention on the GPU,
// one path, all experts streamed), of these those that take the fewest batches for
// all requests, and of these the smallest batch. The result depends on nothing but its
// arguments.
//
// If nothing fits, the error is a *MisfitError.
func (p Problem) Search(c Choices) (Prediction, error) {
	n, err := p.normalized()
	if err != nil {
		return Prediction{}, err
	}
	c = c.EnsureDefaults(n)
	if err := c.validate(n); err != nil {
		return Prediction{}, err
	}
	s := search{Problem: n, choices: c}
	if err := s.run(); err != nil {
		return Prediction{}, err
	}
	return n.predict(s.simplest()), nil
}

// run tries policies; the error says that none fits.
func (s *search) run() error {
	low, high := s.batches()
	if s.choices.Batch > 0 {
		low, high = s.choices.Batch, s.choices.Batch
	}
	least := low
	for high-low > batchesTried {
		grid := s.grid(low, high)
		for _, b := range grid {
			s.try(b)
		}
		if len(s.tried) == 0 {
			return s.hopeless(least)
		}
		// The best of all lies between the neighbors of the best so far.
		best := s.best().Batch
		for _, b := range grid {
			if b < best {
				low = b
			}
			if b > best {
				high = b
				break
			}
		}
	}
	for b := low; b <= high; b++ {
		s.try(b)
	}
	if len(s.tried) == 0 {
		return s.hopeless(least)
	}
	return nil
}

type search struct {
	*Problem
	choices Choices
	// tried has the best policy of each batch and degree of complexity.
	tried []candidate
	// evaluations of the cost model: experts placed, and policies rated.
	evaluations int
}

type candidate struct {
	Policy
	rate float64
	// complexity counts what a schedule has beyond the simplest.
	complexity int
}

// complexity counts what a schedule has beyond the simplest.
func (p *Policy) complexity() int {
	n := 0
	for _, more := range []bool{
		p.Attention == configs.OnCPU, p.Attention == configs.OnGPU && p.KVOnHost > 0, p.Grouping == configs.PerMicroBatch, p.HostPaths > 1, p.OnDemand,
	} {
		if more {
			n++
		}
	}
	return n
}

// best is the candidate of the highest rate; of equal ones the first tried.
func (s *search) best() candidate {
	best := s.tried[0]
	for _, c := range s.tried[1:] {
		if c.rate > best.rate*better {
			best = c
		}
	}
	return best
}

// simplest is what Search returns of what it has tried.
func (s *search) simplest() Policy {
	enough := s.best().rate * (1 - s.choices.Slack) / better
	var simplest *candidate
	for i := range s.tried {
		c := &s.tried[i]
		switch {
		case c.rate < enough:
		case simplest == nil || c.complexity < simplest.complexity,
			c.complexity == simplest.complexity && s.rounds(c.Batch) < s.rounds(simplest.Batch),
			c.complexity == simplest.complexity && s.rounds(c.Batch) == s.rounds(simplest.Batch) && c.Batch < simplest.Batch:
			simplest = c
		}
	}
	return simplest.Policy
}

// rounds is how many batches all requests make; 0 where they have no end.
func (s *search) rounds(batch int) int { return (s.Workload.Requests + batch - 1) / batch }

// keep remembers a policy if it is the best of its batch and complexity.
func (s *search) keep(x Policy, rate float64) {
	c := candidate{x, rate, x.complexity()}
	for i := len(s.tried) - 1; i >= 0 && s.tried[i].Batch == x.Batch; i-- {
		if s.tried[i].complexity == c.complexity {
			if rate > s.tried[i].rate*better {
				s.tried[i] = c
			}
			return
		}
	}
	s.tried = append(s.tried, c)
}

// batches bounds the batch: from below by what is pinned, from above by memory.
func (s *search) batches() (low, high int) {
	low = max(1, s.choices.MicroBatches)
	high = max(low, math.MaxInt32/(s.Workload.PromptTokens+s.Workload.NewTokens))
	for _, limit := range []int{s.choices.MaxBatch, s.Workload.Requests} {
		if limit > 0 {
			high = min(high, limit)
		}
	}
	fits := func(b int) bool {
		// Small micro-batches take less for activations, or more for row data.
		micros := []int{min(b, max(1, s.choices.MicroBatch))}
		if s.choices.MicroBatch == 0 {
			micros = append(micros, (b+max(1, s.choices.MicroBatches)-1)/max(1, s.choices.MicroBatches))
		}
		for _, place := range s.choices.Attention {
			for _, kv := range s.kvShares(place) {
				for _, micro := range micros {
					if _, ok := s.place(s.policy(b, micro, s.prefillTokens(b)[0], place, configs.PerLayer, kv, s.choices.HostPaths[0])); ok {
						return true
					}
				}
			}
		}
		return false
	}
	least, most := low, high
	for least < most {
		mid := least + (most-least+1)/2
		if fits(mid) {
			least = mid
		} else {
			most = mid - 1
		}
	}
	return low, least
}

// grid is about batchesTried batches from low to high, in even ratios.
func (s *search) grid(low, high int) []int {
	grid := []int{low}
	step := math.Pow(float64(high)/float64(low), 1.0/batchesTried)
	for i := 1; i <= batchesTried; i++ {
		b := int(math.Round(float64(low) * math.Pow(step, float64(i))))
		if i == batchesTried {
			b = high
		}
		if b > grid[len(grid)-1] {
			grid = append(grid, b)
		}
	}
	return grid
}

// kvShares are the shares of keys and values that may lie on the host.
func (s *search) kvShares(place configs.Place) []float64 {
	if place == configs.OnCPU {
		return []float64{1}
	}
	return s.choices.KVOnHost
}

// prefillTokens are the limits of a prefill step to try, ascending: from the batch,
// for which a decode step has room in any case, to all prompts.
func (s *search) prefillTokens(batch int) []int {
	all := batch * s.Workload.PromptTokens
	most := all
	if s.choices.MaxPrefillTokens > 0 {
		most = min(most, s.choices.MaxPrefillTokens)
	}
	if s.choices.PrefillTokens > 0 {
		return []int{min(most, s.choices.PrefillTokens)}
	}
	list := []int{most}
	for _, steps := range prefillSteps {
		if n := (all + steps - 1) / steps; n > batch && n < list[len(list)-1] {
			list = append(list, n)
		}
	}
	if batch < list[len(list)-1] {
		list = append(list, batch)
	}
	slices.Reverse(list)
	return list
}

// microBatches are the sizes of micro-batches to try, descending.
func (s *search) microBatches(batch int) []int {
	if s.choices.MicroBatch > 0 {
		return []int{min(s.choices.MicroBatch, batch)}
	}
	if n := s.choices.MicroBatches; n > 0 {
		size := (batch + n - 1) / n
		if (batch+size-1)/size != n {
			return nil // as many would leave one empty
		}
		return []int{size}
	}
	var list []int
	for _, n := range microBatchCounts {
		if size := (batch + n - 1) / n; len(list) == 0 || size < list[len(list)-1] {
			list = append(list, size)
		}
	}
	return list
}

func (s *search) policy(batch, micro, prefill int, place configs.Place, grouping configs.Grouping, kv float64, paths int) Policy {
	return Policy{
		Batch: batch, MicroBatch: micro, PrefillTokens: prefill,
		Attention: place, Grouping: grouping, KVOnHost: kv, HostPaths: paths,
	}
}

// place gives experts their places, as many local as fit or what is pinned.
func (s *search) place(x Policy) (Policy, bool) {
	s.evaluations++
	local, ok := s.mostResident(x)
	if s.choices.Offload != nil {
		x.ResidentExperts = s.Model.ExpertCount() - s.Model.Offloaded(*s.choices.Offload)
		ok = s.fits(&x)
	} else {
		x.ResidentExperts = local
	}
	if !ok {
		return x, false
	}
	x.PeerExperts = s.split(&x, s.choices.Tier)
	return x, x.PeerExperts <= s.peerRoom()
}

// try looks for the best policies of a batch.
func (s *search) try(batch int) {
	micros := s.microBatches(batch)
	for _, prefill := range s.prefillTokens(batch) {
		for _, place := range s.choices.Attention {
			resident := false
			for _, kv := range s.kvShares(place) {
				if resident {
					break // all fits, so that keys and values on the host save nothing
				}
				most := -1 // local experts of a larger micro-batch
				for i, micro := range micros {
					x, ok := s.place(s.policy(batch, micro, prefill, place, configs.PerLayer, kv, s.choices.HostPaths[0]))
					// Smaller micro-batches read weights more often. They pay only by the memory
					// that they save, or by taking turns with the CPU.
					if !ok || x.ResidentExperts <= most && !(place == configs.OnCPU && i < 3) {
						continue
					}
					most = max(most, x.ResidentExperts)
					resident = resident || i == 0 && place == configs.OnGPU && most == s.Model.ExpertCount()
					for _, grouping := range s.choices.Grouping {
						if grouping == configs.PerMicroBatch && place == configs.OnGPU && len(s.choices.Grouping) > 1 {
							continue // PerLayer reads less
						}
						x.Grouping = grouping
						s.compare(x)
					}
				}
			}
		}
	}
}

// compare keeps a policy in the ways of fetching its experts that there are.
func (s *search) compare(x Policy) {
	decodeWork, prefillWork := s.decodeWork(&x), s.prefillWork(&x)
	gpuDecode, gpuPrefill := s.Hardware.total(&decodeWork), s.Hardware.total(&prefillWork)
	steps, n := float64(s.prefillSteps(&x)), float64(s.Workload.NewTokens)
	chooses := x.Attention == configs.OnGPU && x.ResidentExperts < s.Model.ExpertCount() &&
		s.Model.Distinct(float64(x.Batch)) < 0.999*float64(s.Model.Experts)
	for i, paths := range s.choices.HostPaths {
		x.HostPaths = paths
		if i > 0 {
			x.PeerExperts = s.split(&x, s.choices.Tier)
		}
		prefill := s.prefill(&x, gpuPrefill)
		linked := prefill.Bound != BoundGPUCompute
		for _, x.OnDemand = range []bool{false, true} {
			if x.OnDemand && !chooses {
				break
			}
			s.evaluations++
			step := s.decode(&x, gpuDecode)
			linked = linked || step.Bound != BoundGPUCompute
			rate := float64(x.Batch) * n / (steps*prefill.Seconds + (n-1)*step.Seconds)
			s.keep(x, rate)
		}
		x.OnDemand = false
		if !linked {
			return // more paths bring nothing
		}
	}
}

// hopeless says why nothing fits, by the least that the choices allow of a batch.
func (s *search) hopeless(batch int) error {
	var last error
	sizes := s.microBatches(batch)
	if len(sizes) == 0 {
		return fmt.Errorf("planner: a batch of %d cannot be cut into %d micro-batches of the same size, none of them empty", batch, s.choices.MicroBatches)
	}
	for _, place := range s.choices.Attention {
		for _, kv := range s.kvShares(place) {
			x := s.policy(batch, sizes[0], s.prefillTokens(batch)[0], place, s.choices.Grouping[0], kv, s.choices.HostPaths[0])
			if s.choices.Offload != nil {
				x.ResidentExperts = s.Model.ExpertCount() - s.Model.Offloaded(*s.choices.Offload)
			}
			if s.choices.Tier == configs.PeerTier {
				x.PeerExperts = s.split(&x, configs.PeerTier)
			}
			x, err := s.normal(x)
			if err != nil {
				return err
			}
			if err := s.misfit(x); err != nil {
				last = err
				var m *MisfitError
				if errors.As(err, &m) && len(m.Nearest) > 0 {
					return err
				}
			}
		}
	}
	if last == nil {
		return fmt.Errorf("planner: no policy fits model %s on %s", s.Model.Name, s.Hardware.Name)
	}
	return last
}
