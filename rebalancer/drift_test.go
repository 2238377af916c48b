//go:build simulate

package rebalancer_test

import (
	"cmp"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/rebalancer"
)

// The built-in model, as docs/design/tiny.md describes it.
const (
	tinyLayers, tinyExperts = 6, 8
	tinyBytes               = 135168
)

// tinyTask is one of the built-in model's tasks: the share of the choices of each
// layer that fell on each expert; they add up to 1.
type tinyTask struct {
	name   string
	shares [tinyLayers][tinyExperts]float64
}

// tinyTasks reads docs/design/tiny.md's table of activations, tasks in their order there.
func tinyTasks(t *testing.T) []tinyTask {
	t.Helper()
	page, err := os.ReadFile("../docs/design/tiny.md")
	if err != nil {
		t.Fatal(err)
	}
	row := regexp.MustCompile(`(?m)^\| (\d) \| (\w+) \|((?: [\d.]+ \|){8})$`)
	var tasks []tinyTask
	rows := 0
	for _, m := range row.FindAllStringSubmatch(string(page), -1) {
		layer, _ := strconv.Atoi(m[1])
		k := slices.IndexFunc(tasks, func(t tinyTask) bool { return t.name == m[2] })
		if k < 0 {
			k = len(tasks)
			tasks = append(tasks, tinyTask{name: m[2]})
		}
		shares, sum := &tasks[k].shares[layer], 0.0
		for e, f := range strings.Fields(strings.ReplaceAll(m[3], "|", " ")) {
			if shares[e], err = strconv.ParseFloat(f, 64); err != nil {
				t.Fatal(err)
			}
			sum += shares[e]
		}
		if math.Abs(sum-100) > 0.5 {
			t.Fatalf("%s: the shares of layer %d add up to %.1f %%", m[2], layer, sum)
		}
		for e := range shares {
			shares[e] /= sum
		}
		rows++
	}
	if len(tasks) != 5 || rows != 5*tinyLayers {
		t.Fatalf("docs/design/tiny.md has %d rows of %d tasks", rows, len(tasks))
	}
	return tasks
}

// draw chooses two experts of a layer, so that each is among them with twice its
// share: with the experts' shares laid end to end in random order on a circle, those
// at two opposite points. No share is over a half, so they are different ones.
func (k *tinyTask) draw(rng *rand.Rand, layer int) [2]int {
	var chosen [2]int
	point, sum, n := rng.Float64()/2, 0.0, 0
	order := rng.Perm(tinyExperts)
	for i, e := range order {
		sum += k.shares[layer][e]
		if n < 2 && (point+float64(n)/2 < sum || i == len(order)-1) {
			chosen[n] = e
			n++
		}
	}
	return chosen
}

// use is how likely a step of so many tokens needs each expert.
func (k *tinyTask) use(tokens int) map[experts.ID]float64 {
	use := map[experts.ID]float64{}
	for l, shares := range k.shares {
		for e, s := range shares {
			use[experts.ID{Layer: l, Expert: e}] = 1 - math.Pow(1-2*s, float64(tokens))
		}
	}
	return use
}

// hottest are the n that are used most.
func hottest(use map[experts.ID]float64, n int) []experts.ID {
	var ids []experts.ID
	for id := range use {
		ids = append(ids, id)
	}
	slices.SortFunc(ids, func(a, b experts.ID) int {
		return cmp.Or(cmp.Compare(use[b], use[a]), cmp.Compare(a.Layer, b.Layer), cmp.Compare(a.Expert, b.Expert))
	})
	return ids[:n]
}

// hitRate that is to be expected with these on peers.
func hitRate(use map[experts.ID]float64, there []experts.ID) float64 {
	hits, all := 0.0, 0.0
	for _, u := range use {
		all += u
	}
	for _, id := range there {
		hits += use[id]
	}
	return hits / all
}

// fixed moves certain experts to peers at once, and none later.
type fixed struct {
	w     *world
	there []experts.ID
}

func (fixed) used(experts.ID, bool) {}

func (f fixed) tick() {
	if f.w.moved == 0 {
		for _, id := range f.there {
			f.w.promote(id, []int{0})
		}
	}
}

// drift runs tasks in turn, each for so many seconds, in steps of some tokens, with
// each of the placements, and returns their hit rates of each second.
func drift(tasks []tinyTask, tokens, seconds int, placements ...drifting) [][]float64 {
	rng := rand.New(rand.NewPCG(99, uint64(tokens)))
	hits := make([][]float64, len(placements))
	for _, k := range tasks {
		for range seconds {
			found, uses := make([]int, len(placements)), 0
			for range time.Second / simStep {
				for l := range tinyLayers {
					var needed [tinyExperts]bool
					for range tokens {
						for _, e := range k.draw(rng, l) {
							needed[e] = true
						}
					}
					for e, n := range needed {
						if !n {
							continue
						}
						uses++
						for i, p := range placements {
							if p.use(experts.ID{Layer: l, Expert: e}) {
								found[i]++
							}
						}
					}
				}
				for _, p := range placements {
					p.step()
				}
			}
			for i, n := range found {
				hits[i] = append(hits[i], float64(n)/float64(uses))
			}
		}
	}
	return hits
}

// drifting is a placement and its world.
type drifting struct {
	*world
	placement
}

func (d drifting) use(id experts.ID) (hit bool) {
	hit = d.at(id).Tier == experts.Peer
	d.uses[id.Layer][id.Expert]++
	d.placement.used(id, hit)
	return hit
}

func (d drifting) step() {
	d.now += simStep
	if d.now%simTick == 0 {
		d.tick()
	}
	d.settle()
}

func mean(of []float64) float64 {
	sum := 0.0
	for _, x := range of {
		sum += x
	}
	return sum / float64(len(of))
}

// TestTasksInTurn runs the built-in model's tasks in turn. After each change the hit
// rate comes back to 90 % of what it is in the long run on that task, in the time that
// it takes to notice the change and to move the hot set.
func TestTasksInTurn(t *testing.T) {
	tasks := tinyTasks(t)
	inTurn := slices.Concat(tasks, tasks)
	for _, c := range []struct {
		slots, tokens int
		limit         float64 // bytes per second
	}{
		{12, 1, 0.1e6},
		{12, 1, 1e6},
		{12, 4, 1e6},
		{20, 1, 0.2e6},
		{20, 4, 0.2e6},
		{20, 4, 20e6},
	} {
		t.Run(fmt.Sprintf("slots=%d/tokens=%d/limit=%.1fMB", c.slots, c.tokens, c.limit/1e6), func(t *testing.T) {
			t.Parallel()
			bound := 1.5*float64(c.slots)*tinyBytes/c.limit + 2*simHalfLife.Seconds()
			const rest = 60 // seconds of a phase behind the bound
			phase := int(bound) + rest
			with := func(p func(*world) placement) drifting {
				w := newWorld(t, tinyBytes, tinyLayers, tinyExperts, c.slots)
				return drifting{w, p(w)}
			}
			balanced := func(w *world) placement {
				o := rebalancer.CoreOptions{Bytes: tinyBytes, MigrationLimit: c.limit, HalfLife: simHalfLife}
				return ours{w, rebalancer.NewCore(o), c.limit}
			}
			latest := func(w *world) placement { return &lru{w: w, limit: c.limit, last: map[experts.ID]int{}} }
			stays := func(there []experts.ID) func(*world) placement {
				return func(w *world) placement { return fixed{w, there} }
			}
			mixture := map[experts.ID]float64{}
			for _, k := range tasks {
				for id, u := range k.use(c.tokens) {
					mixture[id] += u
				}
			}
			firstHot := hottest(tasks[0].use(c.tokens), c.slots)
			runs := []drifting{with(balanced), with(latest), with(stays(firstHot)), with(stays(hottest(mixture, c.slots)))}
			rates := drift(inTurn, c.tokens, phase, runs...)
			hits, lruHits, firstHits, mixedHits := rates[0], rates[1], rates[2], rates[3]
			moved, lruMoved := float64(runs[0].moved)*tinyBytes, float64(runs[1].moved)*tinyBytes

			var worst, fell, told int
			var fallen, levels, ends, bests []float64
			for i, k := range inTurn {
				use := k.use(c.tokens)
				if i < len(tasks) {
					alone := drift([]tinyTask{k}, c.tokens, phase, with(balanced))
					levels = append(levels, mean(alone[0][phase-rest:]))
					bests = append(bests, hitRate(use, hottest(use, c.slots)))
					if levels[i] < 0.93*bests[i] || levels[i] > 1.05*bests[i] {
						t.Errorf("%s: a hit rate of %.3f in the long run, where %.3f is the best to be expected", k.name, levels[i], bests[i])
					}
				}
				level, at := levels[i%len(tasks)], i*phase
				end := mean(hits[at+phase-rest : at+phase])
				ends = append(ends, end)
				if end < 0.9*level {
					t.Errorf("%d, %s: a hit rate of %.3f after %.0f s, in the long run %.3f", i, k.name, end, bound, level)
				}
				if other := mean(lruHits[at+phase-rest : at+phase]); end < other {
					t.Errorf("%d, %s: a hit rate of %.3f in the end, LRU %.3f", i, k.name, end, other)
				}
				if i == 0 {
					continue
				}
				took, ok := outcome{hits: hits[:at+phase]}.recovered(at, 0.9*level)
				if !ok || float64(took) > bound {
					t.Errorf("%d, %s: not back at 90 %% of %.3f after %.0f s (%d, %v)", i, k.name, level, bound, took, ok)
				}
				worst = max(worst, took)
				if after := mean(hits[at : at+3]); after < 0.9*level {
					fell++
					fallen = append(fallen, after/level)
				}
				// Where the hot sets are much alike, static placement is good enough.
				if hitRate(use, firstHot) < 0.8*level {
					told++
					if got := mean(firstHits[at : at+phase]); got >= 0.9*level {
						t.Errorf("%d, %s: static placement has a hit rate of %.3f of %.3f: it is not static", i, k.name, got, level)
					}
				}
			}
			t.Logf("%d of 48 experts fit, %d tokens a step, %.1f MB/s: %d of 9 changes are felt (to %.0f %% of the level), back at 90 %% after %d s at most, of %.0f allowed; level %.3f, the best %.3f, at the ends of phases %.3f; whole run %.3f, LRU %.3f, static %.3f (best for the first task, which fails at %d changes) and %.3f (best for all tasks together); moved %.1f MB, LRU %.1f MB",
				c.slots, c.tokens, c.limit/1e6, fell, 100*mean(fallen), worst, bound, mean(levels), mean(bests), mean(ends),
				mean(hits), mean(lruHits), mean(firstHits), told, mean(mixedHits), moved/1e6, lruMoved/1e6)
			if fell < 8 || told < 6 {
				t.Errorf("%d changes are felt, and at %d the first task's placement is much too bad: this says nothing", fell, told)
			}
			if mean(hits) < 1.1*max(mean(lruHits), mean(firstHits), mean(mixedHits)) {
				t.Errorf("a hit rate of %.3f, LRU %.3f, static %.3f and %.3f", mean(hits), mean(lruHits), mean(firstHits), mean(mixedHits))
			}
			if moved > lruMoved/4 {
				t.Errorf("%.0f bytes are moved, by LRU %.0f", moved, lruMoved)
			}
		})
	}
}
