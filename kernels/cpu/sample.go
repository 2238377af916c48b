package cpu

import (
	"fmt"
	"math"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/kernels/philox"
)

var negInf = float32(math.Inf(-1))

// segment is the number of tokens of a row that one part samples from; a multiple of 4.
const segment = 8192

// choice is the best token so far; id -1: none.
type choice struct {
	score float32
	id    int32
}

// sampleScratch is the scratch memory of one operation on logits.
type sampleScratch struct {
	best    []choice // per row and segment
	filters []filter // per row, if any token is removed
	listed  []int32  // per token; all 0 between operations
}

// drawing returns scratch memory; the caller puts it back into b.draws.
func (b *Backend) drawing() *sampleScratch {
	if d, _ := b.draws.Get().(*sampleScratch); d != nil {
		return d
	}
	return &sampleScratch{}
}

func (b *Backend) sample(o *kernels.Sample, _ device.Access) error {
	temperatures, seeds := vector[float32](&o.Temperature), vector[uint64](&o.Seeds)
	samples, positions := vector[int32](&o.Samples), vector[int32](&o.Positions)
	out := vector[int32](&o.Out)
	for i, t := range temperatures {
		if !(t >= 0) || math.IsInf(float64(t), 1) {
			return fmt.Errorf("cpu: %s: Temperature[%d] is %g, want 0 or more", o.Name(), i, t)
		}
	}
	d := b.drawing()
	defer b.draws.Put(d)
	filters, err := b.filters(o, d)
	if err != nil {
		return err
	}
	vocabulary := o.Logits.Shape[1]
	segments := (vocabulary + segment - 1) / segment
	d.best = resize(d.best, len(out)*segments)
	best := d.best
	b.rows(len(best), 10*min(segment, vocabulary), func(from, to int) {
		for i := from; i < to; i++ {
			n, first := i/segments, i%segments*segment
			logits := row(&o.Logits, n)[first:min(first+segment, vocabulary)]
			switch {
			case temperatures[n] == 0:
				if best[i] = largest(logits); best[i].score == negInf {
					best[i].id = -1
				}
			case filters != nil && filters[n].on:
				best[i] = filters[n].draw(logits, seeds[n], samples[n], positions[n], int32(first))
			default:
				best[i] = draw(logits, temperatures[n], seeds[n], samples[n], positions[n], int32(first/4))
			}
			if best[i].id >= 0 {
				best[i].id += int32(first)
			}
		}
	})
	for n := range out {
		c := choice{id: -1}
		for _, d := range best[n*segments:][:segments] {
			if d.id >= 0 && (c.id < 0 || d.score > c.score) {
				c = d
			}
		}
		out[n] = c.id
	}
	return nil
}

// resize returns n elements with undefined content, reusing s if it is large enough.
func resize[T any](s []T, n int) []T {
	if cap(s) < n {
		return make([]T, n+n/4)[:n]
	}
	return s[:n]
}

// largest returns the largest logit, the first of equals, ignoring NaN.
func largest(logits []float32) choice {
	c := choice{id: -1}
	for i, v := range logits {
		if v > c.score || c.id < 0 && v == v {
			c = choice{v, int32(i)}
		}
	}
	return c
}

// draw returns the token with the largest logit / temperature + Gumbel noise; block is the
// generator's counter at the first logit.
func draw(logits []float32, temperature float32, seed uint64, sample, position, block int32) choice {
	c := choice{id: -1}
	var noise [4]float32
	for i, v := range logits {
		if i%4 == 0 {
			noise = philox.GumbelBlock(seed, sample, position, block+int32(i/4))
		}
		s := v/temperature + noise[i%4]
		if c.id < 0 && v > negInf || s > c.score {
			c = choice{s, int32(i)}
		}
	}
	return c
}
