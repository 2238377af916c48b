package planner

import "testing"

// TestSearchCost: for no preset of a model and of hardware a search asks the cost model
// more often than this: at half a microsecond each that is 75 ms.
func TestSearchCost(t *testing.T) {
	const most = 150_000
	largest := 0
	for _, hardware := range hardwareNames {
		for _, model := range modelNames {
			p := problem(t, model, hardware)
			n, err := p.normalized()
			if err != nil {
				t.Fatal(err)
			}
			s := search{Problem: n, choices: Choices{}.EnsureDefaults(n)}
			if err := s.run(); err != nil {
				continue // TestSearch
			}
			largest = max(largest, s.evaluations)
			if s.evaluations > most {
				t.Errorf("%s on %s: a search asks the cost model %d times, more than %d", model, hardware, s.evaluations, most)
			}
		}
	}
	t.Logf("%d evaluations at most", largest)
}
