package planner

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/moeserve/moeserve/configs"
)

// Choices bound a search. Zero values leave the choice to it.
type Choices struct {
	// Batch, MicroBatch, MicroBatches and PrefillTokens pin a value. Of the first
	// three, two give the third.
	Batch, MicroBatch, MicroBatches int
	PrefillTokens                   int
	// MaxBatch and MaxPrefillTokens bound the batch and the prompt tokens of a step.
	MaxBatch, MaxPrefillTokens int
	// MaxTTFT and MaxTPOT bound Prediction.TTFT and Prediction.TPOT, in seconds; 0: no
	// bound.
	MaxTTFT, MaxTPOT float64
	// Offload pins the offload fraction. Default: the minimum that fits.
	Offload *float64
	// Tier of the offloaded experts. Default: the best split.
	Tier configs.Tier
	// Attention, Grouping, KVOnHost and HostPaths list the allowed values, in the order
	// in which they are tried; shares and paths ascend. Defaults: GPU and CPU; PerLayer and
	// PerMicroBatch; 0, 0.25, 0.5, 0.75 and 1; all numbers of paths that the hardware
	// has.
	Attention []configs.Place
	Grouping  []configs.Grouping
	KVOnHost  []float64
	HostPaths []int
	// Slack is the share of throughput that a simpler schedule or a smaller batch may
	// cost, 0 to 1. Default: 0.01; below 0: none.
	Slack float64
}

// EnsureDefaults allows all values of the fields that are nil.
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
		{"number of prompt tokens of a step", c.PrefillTokens},
		{"maximum batch", c.MaxBatch},
		{"maximum of prompt tokens of a step", c.MaxPrefillTokens},
	} {
		if f.value < 0 {
			return fmt.Errorf("planner: %s is %d: must be at least 0; 0 leaves the choice to the search", f.name, f.value)
		}
	}
	for _, f := range []struct {
		name  string
		value float64
	}{{"TTFT", c.MaxTTFT}, {"TPOT", c.MaxTPOT}} {
		if !(f.value >= 0) {
			return fmt.Errorf("planner: maximum %s is %v s: must be at least 0; 0 is no bound", f.name, f.value)
		}
	}
	switch {
	case c.Batch > 0 && c.MicroBatch > c.Batch:
		return fmt.Errorf("planner: micro-batches of %d tokens in a batch of %d: make them at most the batch", c.MicroBatch, c.Batch)
	case c.Batch > 0 && c.MicroBatches > c.Batch:
		return fmt.Errorf("planner: %d micro-batches in a batch of %d: make them at most the batch", c.MicroBatches, c.Batch)
	case c.Batch > 0 && c.MicroBatch > 0 && c.MicroBatches > 0 && (c.Batch+c.MicroBatch-1)/c.MicroBatch != c.MicroBatches:
		return fmt.Errorf("planner: %d micro-batches of %d tokens are not a batch of %d: leave one of the three to the search", c.MicroBatches, c.MicroBatch, c.Batch)
	case c.MaxBatch > 0 && c.Batch > c.MaxBatch:
		return fmt.Errorf("planner: a batch of %d, and the maximum is %d", c.Batch, c.MaxBatch)
	case c.MaxPrefillTokens > 0 && c.PrefillTokens > c.MaxPrefillTokens:
		return fmt.Errorf("planner: %d prompt tokens a step, and the maximum is %d", c.PrefillTokens, c.MaxPrefillTokens)
	case p.Workload.Requests > 0 && c.Batch > p.Workload.Requests:
		return fmt.Errorf("planner: a batch of %d sequences for %d requests: lower the batch", c.Batch, p.Workload.Requests)
	case !(c.Slack < 1):
		return fmt.Errorf("planner: a slack of %v: must be below 1", c.Slack)
	case c.Offload != nil && !(*c.Offload >= 0 && *c.Offload <= 1):
		return fmt.Errorf("planner: offload fraction %v: must be from 0 to 1", *c.Offload)
	case len(c.Attention) == 0 || len(c.Grouping) == 0 || len(c.KVOnHost) == 0 || len(c.HostPaths) == 0:
		return errors.New("planner: no choices: Attention, Grouping, KVOnHost and HostPaths must not be empty")
	}
	if !slices.IsSorted(c.KVOnHost) || !slices.IsSorted(c.HostPaths) {
		return fmt.Errorf("planner: KVOnHost %v, HostPaths %v: both must ascend", c.KVOnHost, c.HostPaths)
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
			return fmt.Errorf("planner: a share %v of the KV cache on the host: must be from 0 to 1", share)
		}
	}
	for _, paths := range c.HostPaths {
		if paths < 1 || paths > len(p.Hardware.HostToGPU) {
			return fmt.Errorf("planner: %d paths from the host, and hardware %s has %d", paths, p.Hardware.Name, len(p.Hardware.HostToGPU))
		}
	}
	return p.has(c.Tier)
}

// better is the factor by which a policy must be better than one that was found before,
// so that rounding decides nothing.
const better = 1 + 1e-9

// batchesTried is about the number of batches that a search tries between the minimum and
// the maximum, and around the best of these each time that it narrows.
const batchesTried = 24

// microBatchCounts are the numbers of micro-batches that a search tries.
var microBatchCounts = []int{1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64}

// prefillSteps are the numbers of prefill steps that a search tries.
var prefillSteps = []int{2, 3, 4, 6, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096}

// Search returns the policy of the highest predicted throughput that fits and keeps within
// the bounds of TTFT and TPOT. It tries every combination of the choices but two: the
// number of resident experts is the maximum that fits (more never cost time), and the batch
// is searched on a grid that narrows around the best. Of the policies within Slack of the
// best it takes the simplest schedule (KV cache and attention on the GPU, one path, all
// experts fetched a layer ahead), of these those with the fewest batches for all requests,
// and of these the smallest batch. The result depends on nothing but the arguments.
//
// If no policy fits, the error is a *MisfitError; if none keeps within the bounds, a
// *LatencyError.
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
	if len(s.tried) == 0 {
		return Prediction{}, &LatencyError{MaxTTFT: c.MaxTTFT, MaxTPOT: c.MaxTPOT, Nearest: n.predict(s.nearest.Policy), model: n.Model}
	}
	return n.predict(s.simplest()), nil
}

// LatencyError reports that no policy that fits keeps within the bounds of TTFT and TPOT.
type LatencyError struct {
	// MaxTTFT and MaxTPOT are the bounds, in seconds; 0: none.
	MaxTTFT, MaxTPOT float64
	// Nearest has the minimum of the larger ratio of TTFT and TPOT to their bounds.
	Nearest Prediction
	model   Model
}

func (e *LatencyError) Error() string {
	var bounds, flags []string
	for _, b := range []struct {
		name, flag string
		max        float64
	}{{"TTFT", "--max-ttft", e.MaxTTFT}, {"TPOT", "--max-tpot", e.MaxTPOT}} {
		if b.max > 0 {
			bounds, flags = append(bounds, fmt.Sprintf("%s of at most %s", b.name, latency(b.max))), append(flags, b.flag)
		}
	}
	r, x := &e.Nearest, &e.Nearest.Policy
	return fmt.Sprintf("planner: no policy has a %s: the nearest has a TTFT of %s and a TPOT of %s, with a batch of %d, %d prompt tokens a step, attention on the %s and --offload-fraction %v; raise %s, or lower --input-len",
		strings.Join(bounds, " and a "), latency(r.TTFT()), latency(r.TPOT()), x.Batch, x.PrefillTokens, strings.ToUpper(x.Attention.String()), e.model.OffloadFraction(e.model.ExpertCount()-x.ResidentExperts), strings.Join(flags, " and "))
}

// latency prints seconds with three digits; what rounds to 1,000 has the next unit.
func latency(s float64) string {
	switch {
	case s < 0.9995:
		return fmt.Sprintf("%.3g ms", 1e3*s)
	case s < 999.5:
		return fmt.Sprintf("%.3g s", s)
	}
	return fmt.Sprintf("%.0f s", s)
}

// run tries policies; the error is that none fits.
func (s *search) run() error {
	low, high := s.batches()
	if s.choices.Batch > 0 {
		low, high = s.choices.Batch, s.choices.Batch
	}
	lowest := low
	for high-low > batchesTried {
		grid := s.grid(low, high)
		for _, b := range grid {
			s.try(b)
		}
		if s.nearest.Batch == 0 {
			return s.hopeless(lowest)
		}
		// The best of all is between the neighbors of the best so far.
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
	if s.nearest.Batch == 0 {
		return s.hopeless(lowest)
	}
	return nil
}

type search struct {
	*Problem
	choices Choices
	// tried has the best policy within the bounds of each batch and degree of complexity.
	tried []candidate
	// nearest to the bounds, of all policies; its excess is how far it is from them.
	nearest candidate
	excess  float64
	// evaluations of the cost model: placements of experts, and throughputs of policies.
	evaluations int
}

type candidate struct {
	Policy
	rate float64
	// complexity is Policy.complexity.
	complexity int
}

// complexity counts the features that a schedule has beyond the simplest.
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

// best is the candidate of the highest rate, of equal ones the first tried; without one,
// the nearest to the bounds.
func (s *search) best() candidate {
	if len(s.tried) == 0 {
		return s.nearest
	}
	best := s.tried[0]
	for _, c := range s.tried[1:] {
		if c.rate > best.rate*better {
			best = c
		}
	}
	return best
}

// simplest is the policy that Search returns, of those that it has tried.
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

// rounds is the number of batches of all requests; 0 for a continuous workload.
func (s *search) rounds(batch int) int { return (s.Workload.Requests + batch - 1) / batch }

// keep records a policy if it is the best of its batch and complexity within the bounds, or
// the nearest to them.
func (s *search) keep(x Policy, rate, ttft, tpot float64) {
	c := candidate{x, rate, x.complexity()}
	excess := 1.0
	if limit := s.choices.MaxTTFT; limit > 0 {
		excess = max(excess, ttft/limit)
	}
	if limit := s.choices.MaxTPOT; limit > 0 {
		excess = max(excess, tpot/limit)
	}
	if n := &s.nearest; n.Batch == 0 || excess*better < s.excess || excess < s.excess*better && rate > n.rate*better {
		*n, s.excess = c, excess
	}
	if excess > 1 {
		return
	}
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

// batches bounds the batch: from below by the choices, from above by memory.
func (s *search) batches() (low, high int) {
	low = max(1, s.choices.MicroBatches)
	high = max(low, math.MaxInt32/(s.Workload.PromptTokens+s.Workload.NewTokens))
	for _, limit := range []int{s.choices.MaxBatch, s.Workload.Requests} {
		if limit > 0 {
			high = min(high, limit)
		}
	}
	fits := func(b int) bool {
		// Small micro-batches need less for activations, or more for metadata.
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
	fit, limit := low, high
	for fit < limit {
		mid := fit + (limit-fit+1)/2
		if fits(mid) {
			fit = mid
		} else {
			limit = mid - 1
		}
	}
	return low, fit
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

// kvShares are the allowed shares of the KV cache on the host.
func (s *search) kvShares(place configs.Place) []float64 {
	if place == configs.OnCPU {
		return []float64{1}
	}
	return s.choices.KVOnHost
}

// prefillTokens are the maxima of tokens of a prefill step to try, ascending: from the
// batch, for which a decode step has room in any case, to all prompts.
func (s *search) prefillTokens(batch int) []int {
	all := batch * s.Workload.PromptTokens
	limit := all
	if s.choices.MaxPrefillTokens > 0 {
		limit = min(limit, s.choices.MaxPrefillTokens)
	}
	if s.choices.PrefillTokens > 0 {
		return []int{min(limit, s.choices.PrefillTokens)}
	}
	list := []int{limit}
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
			return nil // one of them would be empty
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

// place fills in resident and peer experts: as many resident as fit, or as pinned.
func (s *search) place(x Policy) (Policy, bool) {
	s.evaluations++
	resident, ok := s.mostResident(x)
	if s.choices.Offload != nil {
		x.ResidentExperts = s.Model.ExpertCount() - s.Model.Offloaded(*s.choices.Offload)
		ok = s.fits(&x)
	} else {
		x.ResidentExperts = resident
	}
	if !ok {
		return x, false
	}
	x.PeerExperts = s.split(&x, s.choices.Tier)
	return x, x.PeerExperts <= s.peerRoom()
}

// try finds the best policies of a batch.
func (s *search) try(batch int) {
	micros := s.microBatches(batch)
	for _, prefill := range s.prefillTokens(batch) {
		for _, place := range s.choices.Attention {
			resident := false
			for _, kv := range s.kvShares(place) {
				if resident {
					break // all fits: a KV cache on the host saves nothing
				}
				best := -1 // resident experts of a larger micro-batch
				for i, micro := range micros {
					x, ok := s.place(s.policy(batch, micro, prefill, place, configs.PerLayer, kv, s.choices.HostPaths[0]))
					// Smaller micro-batches read weights more often. They pay only by the memory
					// that they save, or by overlapping with the CPU.
					if !ok || x.ResidentExperts <= best && !(place == configs.OnCPU && i < 3) {
						continue
					}
					best = max(best, x.ResidentExperts)
					resident = resident || i == 0 && place == configs.OnGPU && best == s.Model.ExpertCount()
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

// compare keeps a policy with each way of fetching its experts.
func (s *search) compare(x Policy) {
	gpuDecode, prefillTimes := s.decodeTimes(&x), s.prefillTimes(&x)
	gpuPrefill := prefillTimes.total()
	steps, n := float64(s.prefillSteps(&x)), float64(s.Workload.NewTokens)
	onDemand := x.Attention == configs.OnGPU && x.ResidentExperts < s.Model.ExpertCount() &&
		s.Model.Distinct(float64(x.Batch)) < 0.999*float64(s.Model.Experts)
	for i, paths := range s.choices.HostPaths {
		x.HostPaths = paths
		if i > 0 {
			x.PeerExperts = s.split(&x, s.choices.Tier)
		}
		prefill := s.prefill(&x, gpuPrefill)
		linked := prefill.Bound != BoundGPUCompute
		for _, x.OnDemand = range []bool{false, true} {
			if x.OnDemand && !onDemand {
				break
			}
			s.evaluations++
			gpu := gpuDecode
			if x.OnDemand {
				gpu[phaseCopies] = Phase{}
			}
			step := s.decode(&x, &gpu)
			linked = linked || step.Bound != BoundGPUCompute
			rate := float64(x.Batch) * n / (steps*prefill.Seconds + (n-1)*step.Seconds)
			s.keep(x, rate, steps*prefill.Seconds, step.Seconds)
		}
		x.OnDemand = false
		if !linked {
			return // the links do not bound it: more paths gain nothing
		}
	}
}

// hopeless is the error that nothing fits, of the minimum that the choices allow of a
// batch.
func (s *search) hopeless(batch int) error {
	var last error
	sizes := s.microBatches(batch)
	if len(sizes) == 0 {
		return fmt.Errorf("planner: a batch of %d cannot be cut into %d micro-batches of equal size", batch, s.choices.MicroBatches)
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
		return fmt.Errorf("planner: no policy fits model %s on %s; use more memory or a smaller model", s.Model.Name, s.Hardware.Name)
	}
	return last
}
