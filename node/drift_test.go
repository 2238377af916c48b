package node_test

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/engine"
)

// TestDriftOfTasks: the built-in model is given its tasks in turn, each of which likes
// other experts. 16 of its 48 fit on a peer. At each change the rebalancer brings the
// hit rate back to 90 % of what the task had before, within 1.5 x (bytes of the new hot
// set / migration limit) and two half-lives.
func TestDriftOfTasks(t *testing.T) {
	const (
		fit, expertBytes = 16, 135168
		limit            = 2e6 // bytes per second
		bound            = time.Duration(1.5*fit*expertBytes/limit*1e9) + 20*time.Second
	)
	n := open(t, machine{fraction: 1, options: emulated.Options{
		Virtual: true, HostLink: emulated.Link{BytesPerSecond: 3e7}, PeerLink: emulated.Link{BytesPerSecond: 24e7},
		GPUs: []emulated.GPU{{MemoryBytes: 256 << 20}, {MemoryBytes: 64 << 20}},
	}}, func(s *configs.Settings) {
		s.MigrationLimit = "2MB/s"
		s.HarvestHeadroom = fmt.Sprint(64<<20 - fit*expertBytes - 4096)
	})
	rng := rand.New(rand.NewPCG(1, 1))
	letters := func() string {
		var b []string
		for range 7 {
			b = append(b, string(rune('a'+rng.IntN(26))))
		}
		return strings.Join(b, " ")
	}
	tasks := map[string]func() string{
		"sort": func() string { return "sort: " + letters() + " =" },
		"say":  func() string { return "Ann gave the red ball to Ben. Who has the ball?" },
	}
	// ask runs requests of a task for so long, and returns the share of fetches that came
	// from the peer.
	ask := func(task string, long time.Duration) float64 {
		t.Helper()
		before, end := n.Traffic().Hits, n.Machine().Now()+long
		for n.Machine().Now() < end {
			ids, err := n.EncodePrompt(tasks[task](), false)
			if err != nil {
				t.Fatal(err)
			}
			p := engine.DefaultParams()
			p.MaxTokens = 10
			if _, err := n.Engine().Generate(t.Context(), []engine.Request{{Prompt: ids, Params: p}}, nil); err != nil {
				t.Fatal(err)
			}
		}
		after := n.Traffic().Hits
		peer, host := after["peer"]-before["peer"], after["host"]-before["host"]
		return float64(peer) / float64(peer+host)
	}
	level := map[string]float64{}
	for _, task := range []string{"sort", "say", "sort", "say"} {
		first := ask(task, 2*time.Second)
		ask(task, bound-2*time.Second)
		back := ask(task, 5*time.Second)
		t.Logf("%s: hit rate %.2f at first, %.2f after %v, %.2f before", task, first, back, bound, level[task])
		if back < 0.9*level[task] {
			t.Errorf("%s: hit rate %.2f after %v, %.2f before", task, back, bound, level[task])
		}
		if was, known := level[task]; known && first > 0.9*was {
			t.Errorf("%s: hit rate %.2f at first, %.2f before: the tasks like the same experts", task, first, was)
		}
		level[task] = ask(task, 5*time.Second)
	}
}
