package node_test

import (
	"testing"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/tools/fixtures"
)

// TestCPUExpertsAreWorth: experts that the CPU computes are worth GPU memory that is lent to them, as
// those that are copied are, although nothing is copied then.
func TestCPUExpertsAreWorth(t *testing.T) {
	for _, choice := range []string{"off", "1"} {
		m := machine{"", 1, emulated.Options{Virtual: true, HostLink: emulated.Link{BytesPerSecond: 1e7}, Host: emulated.GPU{BytesPerSecond: 1e7}, GPUs: []emulated.GPU{{BytesPerSecond: 1e10}}}}
		n := open(t, m, func(s *configs.Settings) {
			s.Model.Name, s.Batch.CPUExperts, s.Batch.MaxNumBatchedTokens = fixtures.Dir(t, "mixtral"), choice, 8
		})
		exposure := node.Exposure(n)
		generate(t, n)
		waited, copied := exposure()
		e := n.Observe().Experts()
		if bytes := float64(e.Misses) * float64(n.Store().Layout().Size); copied < 0.5*bytes/1e7 || waited < 0.2*copied || (e.OnCPU == e.Misses) != (choice == "1") {
			t.Errorf("--cpu-experts %s: compute waited %.2f s, experts took %.2f s of the link, want about %.2f s: %+v", choice, waited, copied, bytes/1e7, e)
		}
	}
}
