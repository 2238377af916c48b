package models

import (
	"fmt"
	"slices"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/models/safetensors"
)

// Layout is the place of every weight.
type Layout struct {
	// Bytes of the arena for everything but routed experts.
	Bytes int64
	// ExpertDType is the type of all experts' weights.
	ExpertDType kernels.DType
	// ExpertBytes of all routed experts together, without padding.
	ExpertBytes int64

	weights Weights     // Addr counts from the arena's start
	plan    []placement // in the source's order
}

// placement is the destination of the rows of one tensor of a source.
type placement struct {
	name     string
	from, to kernels.DType // as it is, and as it is kept
	cols     int           // elements of a row
	parts    []segment     // by rising row
}

// segment is rows [row, row+rows) of a tensor, which stay together.
type segment struct {
	row, rows int
	// off is the place in the arena; -1 for rows of an expert.
	off           int64
	layer, expert int
	part          kernels.Part
}

// NewLayout checks every tensor of src against c (none missing, none unexpected, shapes and
// types right) and assigns its place. Errors name tensor and file, and wrap
// safetensors.ErrMismatch. cast, unless nil, returns the type in which weights of a type are
// stored; weights stacked to one matrix, and all experts, are stored in one type (float32 if a
// source mixes types).
func NewLayout(c *Config, src Source, cast func(kernels.DType) kernels.DType) (*Layout, error) {
	if cast == nil {
		cast = func(t kernels.DType) kernels.DType { return t }
	}
	b := layoutBuilder{config: c, src: src, found: map[string]int{}}
	l := &Layout{}
	params := denseTensors(c, &l.weights)

	// First what is there, so that one error lists all that is missing.
	dense := make([]Info, len(params))
	for i, p := range params {
		dense[i] = b.need(p.shape(), p.names...)
	}
	experts := b.experts()
	if err := b.check(); err != nil {
		return nil, err
	}

	types := map[*kernels.Tensor]kernels.DType{}
	rows := map[*kernels.Tensor]int{}
	for i, p := range params {
		types[p.to] = common(types[p.to], dense[i].DType)
		rows[p.to] += p.rows
	}
	filled := map[*kernels.Tensor]int{}
	for i, p := range params {
		if filled[p.to] == 0 {
			shape := p.shape()
			shape[0] = rows[p.to]
			*p.to = kernels.New(device.Addr(l.Bytes), cast(types[p.to]), shape...)
			l.Bytes += device.Align(p.to.Bytes())
		}
		off := int64(p.to.Addr) + int64(filled[p.to])*int64(p.to.Stride[0]*p.to.DType.Size())
		l.plan = append(l.plan, placement{
			name: b.firstPresent(p.names), from: dense[i].DType, to: p.to.DType, cols: max(1, p.cols),
			parts: []segment{{rows: p.rows, off: off}},
		})
		filled[p.to] += p.rows
	}
	if c.TiedEmbeddings {
		l.weights.Head = l.weights.Embed
	}

	var expertType kernels.DType
	for _, e := range experts {
		expertType = common(expertType, e.from)
	}
	if expertType != kernels.Invalid {
		l.ExpertDType = cast(expertType)
		l.ExpertBytes = c.ExpertParameters() * int64(l.ExpertDType.Size())
	}
	for _, e := range experts {
		e.to = l.ExpertDType
		l.plan = append(l.plan, e)
	}
	slices.SortStableFunc(l.plan, func(x, y placement) int { return b.found[x.name] - b.found[y.name] })
	return l, nil
}

// common is the type that holds both; a is Invalid at first.
func common(a, b kernels.DType) kernels.DType {
	if a == kernels.Invalid || a == b {
		return b
	}
	return kernels.F32
}

// Bind returns views of the weights in an arena of l.Bytes that begins at base,
// a multiple of 256.
func (l *Layout) Bind(base device.Addr) *Weights {
	w := l.weights
	w.Layers = slices.Clone(w.Layers)
	move := func(t *kernels.Tensor) {
		if !t.None() {
			t.Addr += base
		}
	}
	for _, t := range []*kernels.Tensor{&w.Embed, &w.FinalNorm, &w.FinalNormBias, &w.Head, &w.HeadBias} {
		move(t)
	}
	for i := range w.Layers {
		x := &w.Layers[i]
		for _, t := range []*kernels.Tensor{
			&x.InputNorm, &x.InputNormBias, &x.QKV, &x.QKVBias, &x.QNorm, &x.KNorm, &x.O, &x.OBias,
			&x.PostNorm, &x.PostNormBias, &x.Router, &x.RouterBias,
			&x.SharedGateUp, &x.SharedDown, &x.GateUp, &x.Down,
		} {
			move(t)
		}
	}
	return &w
}

// layoutBuilder collects what a source has and lacks.
type layoutBuilder struct {
	config  *Config
	src     Source
	found   map[string]int // tensors taken, with their place in the source's order
	missing []string
	bad     error // the first tensor that is there but wrong
}

// need registers the tensor that has one of the names, and checks its shape.
func (b *layoutBuilder) need(shape []int, names ...string) Info {
	name := b.firstPresent(names)
	info, ok := b.src.Tensor(name)
	if !ok {
		b.missing = append(b.missing, name)
		return Info{}
	}
	b.found[name] = 0
	if b.bad != nil {
		return info
	}
	fail := func(advice, format string, args ...any) {
		b.bad = fmt.Errorf("models: %w", &safetensors.FileError{
			File: info.File, Tensor: name, Reason: fmt.Sprintf(format, args...), Advice: advice, Err: safetensors.ErrMismatch,
		})
	}
	switch {
	case !slices.Equal(info.Shape, shape):
		fail("config.json and the weights do not belong together", "shape %v, but the config asks for %v", info.Shape, shape)
	case info.DType != kernels.BF16 && info.DType != kernels.F16 && info.DType != kernels.F32:
		fail("use a checkpoint in BF16, F16 or F32", "type %s cannot be used for weights", info.TypeName)
	}
	return info
}

// firstPresent returns the first of names that the source has, or names[0].
func (b *layoutBuilder) firstPresent(names []string) string {
	for _, name := range names {
		if _, ok := b.src.Tensor(name); ok {
			return name
		}
	}
	return names[0]
}

// experts registers the tensors of all routed experts. Their type is set later.
func (b *layoutBuilder) experts() []placement {
	c := b.config
	var all []placement
	add := func(layer int, shape []int, name string, cols int, parts []segment) {
		info := b.need(shape, name)
		for i := range parts {
			parts[i].layer, parts[i].off = layer, -1
		}
		all = append(all, placement{name: name, from: info.DType, cols: cols, parts: parts})
	}
	h, wide := c.Hidden, c.ExpertWidth
	for layer, dense := range c.Dense {
		if dense {
			continue
		}
		names := b.expertNames(layer)
		if names.fused {
			var gateUp, down []segment
			for e := range c.Experts {
				gateUp = append(gateUp,
					segment{row: 2 * e * wide, rows: wide, expert: e, part: kernels.W1},
					segment{row: (2*e + 1) * wide, rows: wide, expert: e, part: kernels.W3})
				down = append(down, segment{row: e * h, rows: h, expert: e, part: kernels.W2})
			}
			add(layer, []int{c.Experts, 2 * wide, h}, names.gateUp(), h, gateUp)
			add(layer, []int{c.Experts, h, wide}, names.down(), wide, down)
			continue
		}
		for e := range c.Experts {
			for _, part := range []kernels.Part{kernels.W1, kernels.W3} {
				add(layer, []int{wide, h}, names.tensor(e, part), h, []segment{{rows: wide, expert: e, part: part}})
			}
			add(layer, []int{h, wide}, names.tensor(e, kernels.W2), wide, []segment{{rows: h, expert: e, part: kernels.W2}})
		}
	}
	return all
}

// expertNames finds out how the source calls a layer's experts, by any tensor of
// the first; where it has none, the published names are what is missing.
func (b *layoutBuilder) expertNames(layer int) expertNames {
	all := expertLayouts(b.config, layer)
	for _, n := range all {
		names := []string{n.gateUp(), n.down()}
		if !n.fused {
			names = []string{n.tensor(0, kernels.W1), n.tensor(0, kernels.W3), n.tensor(0, kernels.W2)}
		}
		for _, name := range names {
			if _, ok := b.src.Tensor(name); ok {
				return n
			}
		}
	}
	return all[0]
}

// check reports missing, unexpected and wrong tensors.
func (b *layoutBuilder) check() error {
	var unexpected []string
	for i, name := range b.src.Names() {
		if _, taken := b.found[name]; taken {
			b.found[name] = i
		} else if !ignored(b.config, name) {
			unexpected = append(unexpected, name)
		}
	}
	if len(b.missing)+len(unexpected) > 0 {
		return fmt.Errorf("models: %w", &safetensors.MismatchError{Dir: b.src.Origin(), Missing: b.missing, Unexpected: unexpected})
	}
	return b.bad
}
