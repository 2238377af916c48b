//go:build cuda

package node_test

import (
	"encoding/binary"
	"errors"
	"slices"
	"testing"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/forward"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/models"
	"github.com/moeserve/moeserve/models/safetensors"
)

// stages runs a small model stage by stage, all its experts resident, so that a test can
// read the routers' selection, or replace it.
type stages struct {
	testing.TB
	machine device.Machine
	backend kernels.Backend
	stream  device.Stream
	memory  []device.Memory

	config *models.Config
	model  *forward.Model
	layout kernels.ExpertLayout
	slots  []kernels.Tensor // per layer, [E] U64
	all    kernels.Tensor   // every expert once
	k, v   []kernels.Tensor // per layer, [blocks, B, kv heads, D]
}

// choice is what a layer's router chose, as it lies in memory: ids and weights.
type choice struct{ ids, weights []byte }

const (
	stageTokens = 256 // of a sequence, at most
	stageBlock  = 16
)

// newStages loads the checkpoint in dir. It owns machine and backend.
func newStages(t testing.TB, dir string, machine device.Machine, backend kernels.Backend) *stages {
	t.Helper()
	r := &stages{TB: t, machine: machine, backend: backend}
	t.Cleanup(r.close)
	var err error
	r.stream, err = machine.NewStream(device.HBM(0), device.StreamOptions{Name: "compute"})
	r.ok(err)
	c, err := models.ReadConfig(dir)
	r.ok(err)
	r.config = c
	files, err := safetensors.Open(dir)
	r.ok(err)
	defer func() { r.ok(files.Close()) }()
	var cast func(kernels.DType) kernels.DType
	if b, ok := backend.(interface {
		WeightDType(kernels.DType) kernels.DType
	}); ok {
		cast = b.WeightDType
	}
	src := models.NewCheckpoint(files)
	l, err := models.NewLayout(c, src, cast)
	r.ok(err)
	r.layout, err = backend.ExpertLayout(c.ExpertShape(l.ExpertDType))
	r.ok(err)
	dense, experts := r.alloc(device.Host, l.Bytes), r.alloc(device.Host, int64(c.Layers*c.Experts)*r.layout.Size)
	clear(dense.Write(0, dense.Bytes()))
	clear(experts.Write(0, experts.Bytes()))
	r.ok(models.Load(t.Context(), src, l, &stageSink{r, dense, experts}, nil))
	arena, resident := r.alloc(device.HBM(0), l.Bytes), r.alloc(device.HBM(0), experts.Bytes())
	r.ok(r.stream.Copy(arena.Range(0, l.Bytes), dense.Range(0, l.Bytes)))
	r.ok(r.stream.Copy(resident.Range(0, resident.Bytes()), experts.Range(0, experts.Bytes())))
	r.ok(r.stream.Synchronize(t.Context()))

	limits := forward.Limits{MaxTokens: stageTokens, MaxSeqs: 1, MaxLogits: stageTokens, MaxModelLen: min(stageTokens, c.MaxPositions), BlockTokens: stageBlock}
	need := forward.WorkspaceBytes(c, backend, limits)
	ws := r.alloc(device.HBM(0), need)
	r.model, err = forward.NewModel(c, l.Bind(arena.Range(0, l.Bytes).Addr), backend, ws.Range(0, need), limits)
	r.ok(err)
	r.ok(r.model.Constants(r.upload))

	var table, list []byte
	for i := range c.Layers * c.Experts {
		table = binary.LittleEndian.AppendUint64(table, uint64(resident.Range(int64(i)*r.layout.Size, 1).Addr))
	}
	for e := range c.Experts {
		list = binary.LittleEndian.AppendUint32(list, uint32(e))
	}
	slots := r.tensor(table, kernels.U64, c.Layers, c.Experts)
	for i := range c.Layers {
		r.slots = append(r.slots, slots.Slice(i, i+1).View(c.Experts))
	}
	r.all = r.tensor(list, kernels.I32, c.Experts)
	for range c.Layers {
		for _, views := range []*[]kernels.Tensor{&r.k, &r.v} {
			x := kernels.New(0, backend.ActivationDType(), stageTokens/stageBlock, stageBlock, c.KVHeads, c.HeadDim)
			x.Addr = r.alloc(device.HBM(0), x.Bytes()).Range(0, 1).Addr
			*views = append(*views, x)
		}
	}
	return r
}

func (r *stages) close() {
	var errs []error
	if r.stream != nil {
		errs = append(errs, r.stream.Close())
	}
	for _, m := range r.memory {
		errs = append(errs, m.Free())
	}
	errs = append(errs, r.backend.Close(), r.machine.Close())
	if err := errors.Join(errs...); err != nil {
		r.Error(err)
	}
}

func (r *stages) ok(err error) {
	r.Helper()
	if err != nil {
		r.Fatal(err)
	}
}

func (r *stages) alloc(space device.Space, n int64) device.Memory {
	r.Helper()
	m, err := r.machine.Alloc(space, max(n, 1), "test")
	r.ok(err)
	r.memory = append(r.memory, m)
	return m
}

// upload copies data to dst and waits.
func (r *stages) upload(dst device.Range, data []byte) error {
	m, err := r.machine.Alloc(device.Host, dst.Bytes, "upload")
	if err != nil {
		return err
	}
	copy(m.Write(0, dst.Bytes), data)
	return errors.Join(r.stream.Copy(dst, m.Range(0, dst.Bytes)), r.stream.Synchronize(r.Context()), m.Free())
}

func (r *stages) tensor(data []byte, t kernels.DType, shape ...int) kernels.Tensor {
	r.Helper()
	x := kernels.New(r.alloc(device.HBM(0), int64(len(data))).Range(0, 1).Addr, t, shape...)
	r.ok(r.upload(x.Range(), data))
	return x
}

// download returns a dense tensor's bytes.
func (r *stages) download(x kernels.Tensor) []byte {
	r.Helper()
	m, err := r.machine.Alloc(device.Host, x.Bytes(), "download")
	r.ok(err)
	r.ok(r.stream.Copy(m.Range(0, x.Bytes()), x.Range()))
	r.ok(r.stream.Synchronize(r.Context()))
	data := slices.Clone(m.Read(0, x.Bytes()))
	r.ok(m.Free())
	return data
}

// View makes it the KV cache that attention reads.
func (r *stages) View(layer int) (k, v kernels.Tensor) { return r.k[layer], r.v[layer] }

// run computes a sequence from its start and returns the logits of every token, and
// what the routers chose, layer by layer. Where chosen is not nil, it takes the place
// of that.
func (r *stages) run(ids []int32, long bool, chosen []choice) ([]float32, []choice) {
	r.Helper()
	m, s, rows := r.model, r.stream, len(ids)
	h := forward.NewHostBatch(r.config, m.Limits)
	blocks := make([]int32, stageTokens/stageBlock)
	for i := range blocks {
		blocks[i] = int32(i ^ 1) // not in order, so that the block table matters
	}
	_, err := h.Append(&forward.Sequence{IDs: ids, Long: long, Blocks: blocks})
	r.ok(err)
	for i := range ids {
		_, err := h.Sample(i, &forward.SamplingParams{Position: int32(i + 1)})
		r.ok(err)
	}
	data := make([]byte, forward.StepUploadBytes(m.Limits, 1))
	up, err := r.machine.Alloc(device.HBM(0), int64(len(data)), "per-step metadata")
	r.ok(err)
	b, n, err := h.Pack(data, up.Range(0, 1).Addr)
	r.ok(err)
	r.ok(r.upload(up.Range(0, n), data[:n]))

	attention := m.Attention(r)
	routes := make([]choice, r.config.Layers)
	r.ok(m.Embed(s, &b))
	for layer, dense := range r.config.Dense {
		r.ok(m.Attend(s, layer, &b, attention))
		r.ok(m.PostAttention(s, layer, &b, chosen == nil, false))
		if dense {
			r.ok(m.MLP(s, layer, forward.Span{Rows: rows}))
			continue
		}
		i, w := m.Routing(rows)
		if chosen != nil {
			r.ok(r.upload(i.Range(), chosen[layer].ids))
			r.ok(r.upload(w.Range(), chosen[layer].weights))
		}
		routes[layer] = choice{r.download(i), r.download(w)}
		if chosen != nil {
			r.ok(m.SortByExpert(s, layer, forward.Span{Rows: rows}))
		}
		r.ok(m.SharedExpert(s, layer, forward.Span{Rows: rows}))
		r.ok(m.Experts(s, layer, forward.Span{Rows: rows}, r.slots[layer], r.all, r.layout))
		r.ok(m.Combine(s, layer, forward.Span{Rows: rows}))
	}
	r.ok(m.Head(s, &b))
	logits := m.Logits(b.Sampling.Span)
	out := make([]float32, logits.Elements())
	kernels.ToFloat32(out, r.download(logits), kernels.F32)
	r.ok(up.Free())
	return out, routes
}

// stageSink takes weights to host memory.
type stageSink struct {
	r              *stages
	dense, experts device.Memory
}

func (s *stageSink) Dense(off int64, data []byte) error {
	copy(s.dense.Write(off, int64(len(data))), data)
	return nil
}

func (s *stageSink) Expert(layer, expert int, part kernels.Part, row int, data []byte) error {
	size := s.r.layout.Size
	return s.r.backend.PackExpert(s.r.layout, part, row, data, s.experts.Write(int64(layer*s.r.config.Experts+expert)*size, size))
}
