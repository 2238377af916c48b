package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sync/errgroup"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/kernels"
	"github.com/moeserve/moeserve/models"
	"github.com/moeserve/moeserve/models/safetensors"
	"github.com/moeserve/moeserve/models/safetensors/write"
)

// presetModel has the shape of a preset, of as many of its layers as asked for (0:
// all), and the weights that moeserve runs it with under --load-format dummy.
func presetModel(name string, layers int, seed uint64) (*model, error) {
	data, ok := configs.Preset(name)
	if !ok {
		return nil, fmt.Errorf("-preset %s is unknown: presets are %s%s", name, strings.Join(configs.PresetNames(), ", "), configs.DidYouMean(name, configs.PresetNames()))
	}
	return configModel(data, name, layers, seed)
}

// configModel is presetModel for the config.json that data is.
func configModel(data []byte, name string, layers int, seed uint64) (*model, error) {
	var fields map[string]any
	if err := json.Unmarshal(data, &fields); err != nil {
		return nil, err
	}
	if all, _ := fields["num_hidden_layers"].(float64); layers < 0 || layers > int(all) {
		return nil, fmt.Errorf("-layers %d: %s has %.0f", layers, name, all)
	}
	if layers > 0 {
		fields["num_hidden_layers"] = layers
	}
	text, err := json.MarshalIndent(fields, "", "  ")
	if err != nil {
		return nil, err
	}
	config, err := models.ParseConfig(text, "preset "+name)
	if err != nil {
		return nil, err
	}
	if config.DType != kernels.BF16 {
		return nil, fmt.Errorf("-preset %s is in %s; only bfloat16 is written", name, config.DType)
	}
	dummy := models.NewDummy(config, seed)
	m := &model{config: append(text, '\n')}
	for _, n := range dummy.Names() {
		info, _ := dummy.Tensor(n)
		m.specs = append(m.specs, write.Spec{Name: n, DType: safetensors.BF16, Shape: info.Shape})
	}
	slices.SortStableFunc(m.specs, func(a, b write.Spec) int { return cmp.Compare(place(a.Name), place(b.Name)) })
	m.data = func(t write.Spec) (io.Reader, error) {
		n, err := t.Bytes()
		return &dummyReader{source: dummy, name: t.Name, left: n}, err
	}
	return m, nil
}

// place orders tensors as published checkpoints do: the embedding, the layers in
// turn, and what comes behind them.
func place(tensor string) int {
	rest, ok := strings.CutPrefix(tensor, "model.layers.")
	if !ok {
		if strings.Contains(tensor, "embed") {
			return -1
		}
		return 1 << 30
	}
	layer, _, _ := strings.Cut(rest, ".")
	n, err := strconv.Atoi(layer)
	if err != nil {
		panic(fmt.Sprintf("bigcheckpoint: tensor %q has no layer", tensor))
	}
	return n
}

// dummyReader reads one tensor, which several goroutines make piece by piece.
type dummyReader struct {
	source    *models.Dummy
	name      string
	off, left int64 // of what is not made yet
	made      []byte
	buffer    []byte
}

// madePiece is what a goroutine makes at a time, in bytes.
const madePiece = 4 << 20

// Read implements io.Reader.
func (r *dummyReader) Read(p []byte) (int, error) {
	if len(r.made) == 0 {
		if r.left == 0 {
			return 0, io.EOF
		}
		if err := r.fill(); err != nil {
			return 0, err
		}
	}
	n := copy(p, r.made)
	r.made = r.made[n:]
	return n, nil
}

// fill makes the next bytes, a piece on each processor.
func (r *dummyReader) fill() error {
	n := min(r.left, int64(runtime.GOMAXPROCS(0))*madePiece)
	if int64(cap(r.buffer)) < n {
		r.buffer = make([]byte, n)
	}
	r.made = r.buffer[:n]
	var group errgroup.Group
	begin := r.off
	for at := int64(0); at < n; at += madePiece {
		group.Go(func() error {
			part := r.made[at:min(at+madePiece, n)]
			return r.source.Read(r.name, begin+at, int64(len(part)), func(data []byte) error {
				copy(part, data)
				return nil
			})
		})
	}
	r.off, r.left = r.off+n, r.left-n
	return group.Wait()
}
