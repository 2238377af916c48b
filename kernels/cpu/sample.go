package cpu

import (
	"fmt"
	"math"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
)

// segment is how many tokens one part of a row's draw takes; a multiple of 4.
const segment = 8192

// choice is the best token so far; none has id -1.
type choice struct {
	score float32
	id    int32
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
	vocabulary := o.Logits.Shape[1]
	segments := (vocabulary + segment - 1) / segment
	best := make([]choice, len(out)*segments)
	b.rows(len(best), 10*min(segment, vocabulary), func(from, to int) {
		for i := from; i < to; i++ {
			n, first := i/segments, i%segments*segment
			logits := row(&o.Logits, n)[first:min(first+segment, vocabulary)]
			if temperatures[n] == 0 {
				best[i] = largest(logits)
			} else {
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
		if c.id < 0 {
			return fmt.Errorf("cpu: %s: row %d of Logits has no number", o.Name(), n)
		}
		out[n] = c.id
	}
	return nil
}

// largest returns the largest logit, the first of equals, leaving out what is not
// a number.
func largest(logits []float32) choice {
	c := choice{id: -1}
	for i, v := range logits {
		if v > c.score || c.id < 0 && v == v {
			c = choice{v, int32(i)}
		}
	}
	return c
}

// draw returns the largest logit / temperature + Gumbel noise; block is the
// generator's at the first logit.
func draw(logits []float32, temperature float32, seed uint64, sample, position, block int32) choice {
	c := choice{id: -1}
	var noise [4]float32
	for i, v := range logits {
		if i%4 == 0 {
			noise = kernels.GumbelBlock(seed, sample, position, block+int32(i/4))
		}
		s := v/temperature + noise[i%4]
		if c.id < 0 && s == s || s > c.score {
			c = choice{s, int32(i)}
		}
	}
	return c
}
