package fairness_test

import (
	"context"
	"errors"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/eval"
	"github.com/moeserve/moeserve/eval/fairness"
)

func TestJain(t *testing.T) {
	for _, c := range []struct {
		rates []float64
		want  float64
	}{
		{nil, 0}, {[]float64{0, 0}, 0}, {[]float64{3}, 1}, {[]float64{2, 2, 2}, 1}, {[]float64{5, 0, 0, 0}, 0.25}, {[]float64{1, 3}, 0.8},
	} {
		if got := fairness.Jain(c.rates); math.Abs(got-c.want) > 1e-12 {
			t.Errorf("%v: %v, want %v", c.rates, got, c.want)
		}
	}
}

// fake gives request i its tokens a second apart, the first delay[i] after its arrival.
type fake struct {
	delay  []time.Duration
	short  int // tokens that are missing of the last request
	closed *int
}

func (f *fake) Info() fairness.Info {
	return fairness.Info{Model: "m", DType: "bfloat16", BlockTokens: 16, Blocks: 9, Vocab: 50}
}

func (f *fake) Run(_ context.Context, requests []fairness.Request) (fairness.Outcome, error) {
	out := fairness.Outcome{Preemptions: 3, PrefillTokens: 100, IDs: [][]int32{{7}}}
	for i, r := range requests {
		out.Arrived = append(out.Arrived, r.Arrival)
		var at []time.Duration
		for k := range r.NewTokens {
			at = append(at, r.Arrival+f.delay[i]+time.Duration(k)*time.Second)
		}
		if i == len(requests)-1 {
			at = at[:len(at)-f.short]
		}
		out.Tokens = append(out.Tokens, at)
	}
	return out, nil
}

func (f *fake) Close() error { *f.closed++; return nil }

func TestMeasure(t *testing.T) {
	var closed int
	var lines []fairness.Line
	o := fairness.Options{
		Lines: fairness.Lines([]int{8, 64}, []fairness.Tier{fairness.None, fairness.Host}),
		Long:  1, LongTokens: 5, Short: 2, ShortTokens: 3, PromptTokens: 20, Interval: 2 * time.Second,
		Open: func(_ context.Context, l fairness.Line) (fairness.Engine, error) {
			lines = append(lines, l)
			return &fake{delay: []time.Duration{time.Second, 2 * time.Second, 7 * time.Second}, closed: &closed}, nil
		},
	}
	var r fairness.Result
	if err := fairness.Measure(t.Context(), o, &r); err != nil {
		t.Fatal(err)
	}
	want := []fairness.Line{
		{Tier: fairness.None},
		{Policy: configs.FairScheduling, Granularity: 8, Tier: fairness.None},
		{Policy: configs.FairScheduling, Granularity: 64, Tier: fairness.None},
		{Tier: fairness.Host},
		{Policy: configs.FairScheduling, Granularity: 8, Tier: fairness.Host},
		{Policy: configs.FairScheduling, Granularity: 64, Tier: fairness.Host},
	}
	if !slices.Equal(lines, want) || closed != len(want) || len(r.Points) != len(want) {
		t.Errorf("lines %+v, %d closed, %d points", lines, closed, len(r.Points))
	}
	// Rates: 5 tokens in 5 s, 3 in 4 s, 3 in 9 s. The last comes at 4 + 9 s.
	p := r.Points[0]
	if math.Abs(p.Jain-math.Pow(1+0.75+1./3, 2)/3/(1+0.75*0.75+1./9)) > 1e-12 || p.TTFT50 != 2 || p.TTFT99 != 7 || p.ShortTTFT50 != 2 || p.ShortTTFT99 != 7 ||
		p.TPOT99 != 1 || p.ITL99 != 1 || p.ITLMax != 1 || p.TokensSHA256 == "" || p.Seconds != 13 || p.OutputThroughput != 11./13 || p.Preemptions != 3 || p.RecomputedTokens != 40 {
		t.Errorf("%+v", p)
	}
	var b strings.Builder
	if err := fairness.WriteTable(&b, &r); err != nil {
		t.Fatal(err)
	}
	if want := "the same tokens in all lines"; !strings.Contains(b.String(), want) {
		t.Errorf("no %q in\n%s", want, b.String())
	}
	r.Points[1].TokensSHA256 = "other"
	if err := fairness.WriteTable(&b, &r); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"the generated tokens DIFFER", "m (bfloat16): 1 requests of 5 tokens at the start, and 2 of 3, 2 s apart; prompts of 20 tokens\nKV cache of 9 blocks of 16 tokens; all requests together need 6\n",
		"none    fcfs            -", "host    fair           64",
	} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("no %q in\n%s", want, b.String())
		}
	}
}

func TestMeasureFails(t *testing.T) {
	var closed int
	good := fairness.Options{Lines: fairness.Lines(nil, []fairness.Tier{fairness.None}), Long: 1, LongTokens: 5, Short: 1, ShortTokens: 3}
	good.Open = func(context.Context, fairness.Line) (fairness.Engine, error) {
		return &fake{delay: make([]time.Duration, 2), short: 1, closed: &closed}, nil
	}
	if err := fairness.Measure(t.Context(), good, &fairness.Result{}); err == nil || !strings.Contains(err.Error(), "request 1 got 2 tokens of 3") || closed != 1 {
		t.Errorf("%v, closed %d", err, closed)
	}
	bad := good
	bad.ShortTokens = 1
	if err := fairness.Measure(t.Context(), bad, &fairness.Result{}); !errors.Is(err, eval.ErrInput) {
		t.Error(err)
	}
	for text, want := range map[string]string{"none, peer": "", "gpu": `"gpu" is no tier`, "host,host": "host is there twice"} {
		if _, err := fairness.ParseTiers(text); want == "" && err != nil || want != "" && (!errors.Is(err, eval.ErrInput) || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %v", text, err)
		}
	}
}
