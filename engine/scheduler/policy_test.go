package scheduler

import (
	"slices"
	"testing"

	"pgregory.net/rapid"
)

const blockTokens = 4

// run is what sequences have done that an account plays to their ends.
type run struct {
	*account
	sampled []int // tokens, by ID
	left    []int // tokens to sample
	waits   []int // steps that it waited at a time, at most
	waited  []int
	steps   int
}

func (r *run) add(tokens, answer, priority int) {
	r.account.add(ID(len(r.left)), tokens, tokens+answer, priority, "", 0)
	r.left = append(r.left, answer)
	for _, s := range []*[]int{&r.sampled, &r.waits, &r.waited} {
		*s = append(*s, 0)
	}
}

// step plays one, and returns false when nothing is left.
func (r *run) step() bool {
	p := r.Plan()
	for i := range r.left {
		r.waited[i]++
	}
	for _, c := range p.Chunks {
		if !c.Sample {
			r.Done(c, 0)
			continue
		}
		r.Done(c, 1)
		r.waits[c.ID] = max(r.waits[c.ID], r.waited[c.ID])
		r.waited[c.ID] = 0
		r.sampled[c.ID]++
		if r.left[c.ID]--; r.left[c.ID] == 0 {
			r.Remove(c.ID, true)
		}
	}
	r.steps++
	return len(p.Chunks) > 0
}

// TestFairLag: sequences of one length that come together stay together, though only some of
// them fit at a time: none is ahead of another by more than the granularity and a block, since
// what one that gives way releases is whole blocks.
func TestFairLag(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n, answer := rapid.IntRange(2, 12).Draw(t, "sequences"), rapid.IntRange(20, 200).Draw(t, "answer")
		prompt, granularity := rapid.IntRange(1, 30).Draw(t, "prompt"), rapid.IntRange(1, 40).Draw(t, "granularity")
		one := (prompt + answer + blockTokens - 1) / blockTokens
		blocks := rapid.IntRange(one, n*one).Draw(t, "blocks")
		places := rapid.IntRange(1, n).Draw(t, "places")
		r := &run{account: newAccount(t, Limits{StepTokens: 1 << 20, Sequences: places}, Policy{Order: Fair, Granularity: granularity}, blocks, blockTokens)}
		for range n {
			r.add(prompt, answer, 0)
		}
		for r.step() {
			if lag := slices.Max(r.sampled) - slices.Min(r.sampled); lag > granularity+blockTokens {
				t.Fatalf("step %d: %v, a lag of %d with a granularity of %d", r.steps, r.sampled, lag, granularity)
			}
		}
		if slices.Max(r.left) > 0 {
			t.Fatalf("left: %v", r.left)
		}
		if got, most := r.Preemptions(), int64(n*answer/granularity); got > most {
			t.Fatalf("%d preemptions of %d tokens with a granularity of %d", got, n*answer, granularity)
		}
	})
}

// TestFairLagOfUnlike: of sequences of any length that come at any time, none that runs is ahead
// of one that waits by more than three times the granularity and a block. It can be more than once, since the
// blocks of one are too few for a longer one, which waits until others are ahead as well.
func TestFairLagOfUnlike(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		granularity := rapid.IntRange(1, 40).Draw(t, "granularity")
		l := Limits{StepTokens: 1 << 20, Sequences: rapid.IntRange(1, 16).Draw(t, "places")}
		r := &run{account: newAccount(t, l, Policy{Order: Fair, Granularity: granularity}, rapid.IntRange(20, 100).Draw(t, "blocks"), blockTokens)}
		sum := 0
		for arrive := rapid.IntRange(2, 30).Draw(t, "sequences"); ; {
			if arrive > 0 && rapid.IntRange(0, 9).Draw(t, "arrives") == 0 {
				most := rapid.IntRange(2, r.Capacity()).Draw(t, "most")
				prompt := rapid.IntRange(1, most-1).Draw(t, "prompt")
				r.add(prompt, most-prompt, 0)
				sum += most - prompt
				arrive--
			}
			if !r.step() && arrive == 0 {
				break
			}
			for _, w := range r.waiting {
				for _, q := range r.running {
					if lag := (q.rank - w.rank) / tokenCost; lag > int64(3*granularity+blockTokens) {
						t.Fatalf("step %d: %d runs %d tokens ahead of %d with a granularity of %d", r.steps, q.id, lag, w.id, granularity)
					}
				}
			}
		}
		if slices.Max(r.left) > 0 {
			t.Fatalf("left: %v", r.left)
		}
		if got, most := r.Preemptions(), int64(sum/granularity); got > most {
			t.Fatalf("%d preemptions of %d tokens with a granularity of %d", got, sum, granularity)
		}
	})
}

// TestFairWeights: where one of two fits at a time, they get tokens as their weights.
func TestFairWeights(t *testing.T) {
	for _, c := range []struct {
		a, b int
		want float64 // tokens of a for one of b
	}{
		{0, 0, 1}, {0, 3, 1.95}, {-3, 0, 1.95}, {5, 0, 1 / 3.05}, {-20, -17, 1.95}, {19, 16, 1 / 1.95}, {100, 19, 1},
	} {
		r := &run{account: newAccount(t, Limits{StepTokens: 64, Sequences: 1}, Policy{Order: Fair, Granularity: 8}, 2000, blockTokens)}
		r.add(3, 4000, c.a)
		r.add(3, 4000, c.b)
		for range 4000 {
			r.step()
		}
		if got := float64(r.sampled[0]) / float64(r.sampled[1]); got < 0.98*c.want || got > 1.02*c.want {
			t.Errorf("priorities %d and %d: %v tokens, 1 : %.2f; want %.2f", c.a, c.b, r.sampled, got, c.want)
		}
	}
}

// TestFairForgetsWhatNobodyWanted: sequences that all fit have the same claim when others come,
// though their weights differ.
func TestFairForgetsWhatNobodyWanted(t *testing.T) {
	r := &run{account: newAccount(t, Limits{StepTokens: 64, Sequences: 2}, Policy{Order: Fair, Granularity: 8}, 2000, blockTokens)}
	r.add(3, 4000, 0)
	r.add(3, 4000, 10) // has a ninth of the weight
	for range 1000 {
		r.step()
	}
	for range 4 {
		r.add(3, 4000, 0)
	}
	r.waits[1] = 0
	for range 1000 {
		r.step()
	}
	if n := max(r.waits[1], r.waited[1]); n > 500 {
		t.Errorf("a sequence of low weight waited %d steps for what it computed while nobody waited", n)
	}
}

// TestShortAnswersDoNotWaitForLongOnes: under Fair, a short answer that comes when long ones have
// all places begins within a quantum; first come, first served it waits for the end of one.
func TestShortAnswersDoNotWaitForLongOnes(t *testing.T) {
	for order, most := range map[Order][2]int{FCFS: {300, 400}, Fair: {1, 17}} {
		r := &run{account: newAccount(t, Limits{StepTokens: 64, Sequences: 3}, Policy{Order: order, Granularity: 16}, 1000, blockTokens)}
		for range 3 {
			r.add(10, 320, 0)
		}
		for range 20 {
			r.step()
		}
		r.add(10, 5, 0)
		first := 0
		for ; r.sampled[3] == 0; first++ {
			r.step()
		}
		if first < most[0] || first > most[1] {
			t.Errorf("%v: the first token comes after %d steps, want %d to %d", order, first, most[0], most[1])
		}
	}
}

// TestFairWithoutEnd: sequences shorter than a quantum that keep the queue full do not keep an
// older one from its tokens.
func TestFairWithoutEnd(t *testing.T) {
	r := &run{account: newAccount(t, Limits{StepTokens: 64, Sequences: 2}, Policy{Order: Fair, Granularity: 8}, 2000, blockTokens)}
	r.add(3, 100, 0)
	for r.left[0] > 0 && r.steps < 2000 {
		for r.Waiting() < 10 {
			r.add(3, 6, 0)
		}
		r.step()
	}
	if r.left[0] > 0 {
		t.Errorf("after %d steps the first of %d sequences has %d tokens to sample", r.steps, len(r.left), r.left[0])
	}
}
