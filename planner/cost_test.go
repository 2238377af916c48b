package planner

import (
	"testing"

	"github.com/moeserve/moeserve/tools/racedetector"
)

// TestSearchCost: no search for a preset of a model and of hardware, with or without bounds,
// evaluates the cost model more often than the limit: 75 ms at half a microsecond each.
func TestSearchCost(t *testing.T) {
	racedetector.SkipSequential(t)
	const limit = 150_000
	peak := 0
	for _, hardware := range hardwareNames {
		for _, model := range modelNames {
			p := problem(t, model, hardware)
			n, err := p.normalized()
			if err != nil {
				t.Fatal(err)
			}
			for _, c := range []Choices{{}, {MaxTPOT: 0.1}, {MaxTTFT: 1, MaxTPOT: 1e-6}} {
				s := search{Problem: n, choices: c.EnsureDefaults(n)}
				if err := s.run(); err != nil {
					continue // TestSearch
				}
				peak = max(peak, s.evaluations)
				if s.evaluations > limit {
					t.Errorf("%s on %s: %d evaluations, more than %d", model, hardware, s.evaluations, limit)
				}
			}
		}
	}
	t.Logf("peak: %d evaluations", peak)
}
