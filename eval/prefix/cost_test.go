package prefix_test

import (
	"context"
	"encoding/json"
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/moeserve/moeserve/eval"
	"github.com/moeserve/moeserve/eval/prefix"
)

// slow is an engine whose tier adds a tenth to the time of a prompt, and twice the time to its first.
type slow struct {
	engine
	stored int
}

func (e *slow) Run(_ context.Context, prompts [][]int32, o prefix.RunOptions) (prefix.Batch, error) {
	seconds := float64(len(prompts[0])) / computed
	if !o.WithoutTiers {
		if seconds *= 1.1; e.stored < 3 {
			seconds *= 2
		}
		e.stored++
	}
	d := time.Duration(seconds * 1e9)
	return prefix.Batch{First: []time.Duration{d}, Last: []time.Duration{d}}, nil
}

func TestMisses(t *testing.T) {
	r := &prefix.Result{}
	o := prefix.MissesOptions{Open: func(_ context.Context, p prefix.Place, _, _ int) (prefix.Engine, error) {
		return &slow{engine: engine{place: p}}, nil
	}, Lengths: []int{100, 1000}}
	var done, total int64
	o.Progress = func(d, all int64) { done, total = d, all }
	if err := prefix.Misses(t.Context(), o, r, nil); err != nil || done != total || len(r.Misses) != 6 {
		t.Fatalf("%v, %d of %d, %+v", err, done, total, r.Misses)
	}
	for i, x := range r.Misses {
		plain, first := float64(x.PromptTokens)/computed, 1.1
		if i%2 == 0 {
			first = 2.2
		}
		if math.Abs(x.PlainSeconds/plain-1) > 1e-6 || math.Abs(x.Cost-0.1) > 1e-6 || math.Abs(x.Seconds/plain-1.1) > 1e-6 || math.Abs(x.FirstSeconds/plain-first) > 1e-6 {
			t.Errorf("%+v", x)
		}
	}
	for name, err := range map[string]error{
		"place":  prefix.Misses(t.Context(), prefix.MissesOptions{Open: o.Open, Places: []prefix.Place{prefix.HBM}}, r, nil),
		"length": prefix.Misses(t.Context(), prefix.MissesOptions{Open: o.Open, Lengths: []int{0}}, r, nil),
		"rounds": prefix.Decodes(t.Context(), prefix.DecodesOptions{Open: openBatch, Rounds: -1}, r, nil),
		"tier":   prefix.Decodes(t.Context(), prefix.DecodesOptions{Open: openBatch, Places: []prefix.Place{prefix.Nowhere}}, r, nil),
	} {
		if !errors.Is(err, eval.ErrInput) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// batch takes longer from call to call, and a tenth longer beside loads.
type batch struct {
	engine
	calls int
}

func openBatch(_ context.Context, p prefix.Place, sequences, tokens, _ int) (prefix.Decoder, error) {
	return &batch{engine: engine{place: p}, calls: sequences * tokens}, nil
}

func (b *batch) Steps(_ context.Context, n int, t prefix.Traffic) (ran prefix.Steps, err error) {
	b.calls++
	d := time.Second + time.Duration(b.calls)*time.Microsecond
	if t == prefix.Loads {
		d += d / 10
	}
	if t != prefix.Quiet {
		ran.Bytes = 1000
	}
	for range n {
		ran.Times, ran.Host = append(ran.Times, d), append(ran.Host, d/4)
	}
	return ran, nil
}

func TestDecodes(t *testing.T) {
	r := &prefix.Result{}
	if err := prefix.Decodes(t.Context(), prefix.DecodesOptions{Open: openBatch, Sequences: 2, Tokens: 50, Steps: 10}, r, nil); err != nil || len(r.Decodes) != 12 {
		t.Fatalf("%v, %+v", err, r.Decodes)
	}
	for _, x := range r.Decodes {
		want, rate := 0.0, 100.0
		switch x.Traffic {
		case prefix.Loads:
			want, rate = 0.1, 100/1.1
		case prefix.Quiet:
			rate = 0
		}
		if math.Abs(x.Cost-want) > 1e-4 || math.Abs(x.StepSeconds/(1+want)-1) > 1e-3 || math.Abs(x.BytesPerSecond-rate) > 1 || math.Abs(x.HostSeconds/x.StepSeconds-0.25) > 1e-6 || x.Sequences != 2 || x.ContextTokens != 50 {
			t.Errorf("%+v", x)
		}
	}
	var table strings.Builder
	if err := prefix.WriteTable(&table, r); err != nil || !strings.Contains(table.String(), "own stores") || !strings.Contains(table.String(), "+10.00 %") {
		t.Errorf("%v\n%s", err, &table)
	}
}

// still is an engine on which nothing takes time.
type still struct{ engine }

func (e *still) Run(_ context.Context, prompts [][]int32, _ prefix.RunOptions) (prefix.Batch, error) {
	return prefix.Batch{First: make([]time.Duration, len(prompts)), Last: make([]time.Duration, len(prompts))}, nil
}

func (e *still) Steps(_ context.Context, n int, _ prefix.Traffic) (prefix.Steps, error) {
	return prefix.Steps{Times: make([]time.Duration, n), Host: make([]time.Duration, n), Bytes: 1000}, nil
}

// Where nothing takes time there are no rates, shares and costs, and a result without them is written.
func TestNoTime(t *testing.T) {
	r := &prefix.Result{}
	open := func(_ context.Context, p prefix.Place, _, _ int) (prefix.Engine, error) {
		return &still{engine{place: p}}, nil
	}
	if err := errors.Join(
		prefix.TTFT(t.Context(), prefix.TTFTOptions{Open: open, Lengths: []int{16}}, r, nil),
		prefix.Hits(t.Context(), prefix.HitsOptions{Open: open, Requests: 2, PromptTokens: 16, Pool: 1}, r, nil),
		prefix.Misses(t.Context(), prefix.MissesOptions{Open: open, Lengths: []int{16}}, r, nil),
		prefix.Decodes(t.Context(), prefix.DecodesOptions{Open: func(_ context.Context, p prefix.Place, _, _, _ int) (prefix.Decoder, error) {
			return &still{engine{place: p}}, nil
		}, Sequences: 1, Tokens: 16}, r, nil),
	); err != nil {
		t.Fatal(err)
	}
	if _, err := json.Marshal(r); err != nil {
		t.Error(err)
	}
	var table, list strings.Builder
	if err := errors.Join(prefix.WriteTable(&table, r), prefix.WriteCSV(&list, r)); err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{table.String(), list.String()} {
		if strings.Contains(text, "NaN") || strings.Contains(text, "Inf") {
			t.Errorf("a number that is none:\n%s", text)
		}
	}
	for _, x := range r.Misses {
		if x.Cost != 0 {
			t.Errorf("%+v", x)
		}
	}
}
