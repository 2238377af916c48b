package eval_test

import (
	"bytes"
	"context"
	"encoding/csv"
	"encoding/json"
	"encoding/xml"
	"errors"
	"fmt"
	"image/png"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/eval"
	"github.com/moeserve/moeserve/tools/racedetector"
)

var threePrompts = [][]int32{{1, 2}, {3}, {4, 5, 6}}

func TestThroughput(t *testing.T) {
	n := newFake("a", time.Second/4, nil)
	r, err := eval.Throughput(t.Context(), n, eval.Cell{Tier: configs.HostTier, Fraction: 0.5}, eval.Options{
		Prompts: threePrompts, NewTokens: 5, Warmup: 9, Trials: 3, Prefills: 2,
	})
	if err != nil {
		t.Fatal(err)
	}
	// 3 requests, 4 steps of 1/4 s behind prefills of 2 s.
	if r.DecodeTokS != 12 || r.ThroughputTokS != 5 || r.PrefillTokS != 3 || *r.StddevTokS != 0 {
		t.Errorf("%v tokens/s decoding, %v prefill, %v ± %v in all; want 12, 3, 5 ± 0", r.DecodeTokS, r.PrefillTokS, r.ThroughputTokS, *r.StddevTokS)
	}
	if r.Hits != 420 || r.Misses != 140 || r.HitRate != 0.75 {
		t.Errorf("%d hits, %d misses, hit rate %v", r.Hits, r.Misses, r.HitRate)
	}
	want := []eval.Trial{{PrefillSeconds: 2, DecodeSeconds: 1}, {PrefillSeconds: 2, DecodeSeconds: 1}, {PrefillSeconds: 2, DecodeSeconds: 1, PrefillRepeated: true}}
	if !slices.Equal(r.Trials, want) {
		t.Errorf("trials %+v", r.Trials)
	}
	// Prefill twice, 4 steps three times, 10 bytes each; warm-up does not count.
	if r.FetchedBytes != (eval.Bytes{Host: 140}) || r.DecodeStepBytes != (eval.Bytes{Host: 10}) {
		t.Errorf("fetched %+v, %+v a step", r.FetchedBytes, r.DecodeStepBytes)
	}
	if got := r.StallS; len(got) != 1 || got["router-sync"] < 1.3999 || got["router-sync"] > 1.4001 {
		t.Errorf("stalls %v", got)
	}
	// Layer 0 has one expert in use, by 3 rows; layer 1 two, by 2 rows and by 1.
	if r.DistinctExperts != 1.5 || r.TokensPerExpert != 2 || r.MaxTokensPerExpert != 3 || r.HBMPeakBytes != 77 {
		t.Errorf("%+v", r)
	}
	if r.MicroBatchTokens != 2 || r.NumMicroBatches != 2 || r.PromptTokens != 6 || r.GeneratedTokens != 15 || r.WarmupTokens != 9 {
		t.Errorf("%+v", r)
	}
	if r.Roofline == nil || r.Prediction == nil || r.Roofline.Bound != "host-link" || r.Roofline.Fraction != r.DecodeTokS/r.Roofline.TokS || r.Prediction.SaturationPoint <= 0 {
		t.Errorf("roofline %+v, prediction %+v", r.Roofline, r.Prediction)
	}
	if len(r.TokensSHA256) != 64 {
		t.Errorf("digest %q", r.TokensSHA256)
	}
}

// With attention on the CPU the floor is the planner's prediction.
func TestAttentionOnCPU(t *testing.T) {
	n := newFake("a", time.Second, nil)
	n.attention = configs.OnCPU
	r, err := eval.Throughput(t.Context(), n, eval.Cell{Tier: configs.NoTier}, eval.Options{Prompts: threePrompts, NewTokens: 2, Trials: 1})
	if err != nil {
		t.Fatal(err)
	}
	if r.Roofline.TokS != r.Prediction.DecodeTokS || r.Roofline.Bound != r.Prediction.Bound || r.Attention != configs.OnCPU {
		t.Errorf("%+v, %+v", r.Roofline, r.Prediction)
	}
}

// With experts on the CPU steps are predicted to be faster, and may be faster than the link: the floor
// is the planner's prediction.
func TestExpertsOnCPU(t *testing.T) {
	decode := func(fraction float64) eval.Result {
		n := newFake("a", time.Second, nil)
		n.cpuExperts, n.onDemand = fraction, len(threePrompts)
		r, err := eval.Throughput(t.Context(), n, eval.Cell{Tier: configs.HostTier, Fraction: 1}, eval.Options{Prompts: threePrompts, NewTokens: 2, Trials: 1})
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	link, both := decode(0), decode(-1)
	if both.Prediction.DecodeTokS <= link.Prediction.DecodeTokS || both.Roofline.TokS != both.Prediction.DecodeTokS || link.Roofline.Bound != "host-link" {
		t.Errorf("predicted are %+v, roofline %+v, and with experts on the CPU %+v, roofline %+v", link.Prediction, link.Roofline, both.Prediction, both.Roofline)
	}
}

// A measurement stands where the named hardware could not do it.
func TestPeersThatTheHardwareHasNot(t *testing.T) {
	n := newFake("a", time.Second, nil)
	n.alone = true
	r, err := eval.Throughput(t.Context(), n, eval.Cell{Tier: configs.PeerTier, Fraction: 0.5}, eval.Options{Prompts: threePrompts, NewTokens: 2, Trials: 1})
	if err != nil || r.DecodeTokS != 3 || r.Roofline != nil || r.Prediction != nil {
		t.Errorf("%+v, %v", r, err)
	}
	if _, err := json.Marshal(r); err != nil {
		t.Error(err)
	}
}

func TestDeviation(t *testing.T) {
	n := newFake("a", time.Second, nil)
	slower := &slowing{fake: n}
	r, err := eval.Throughput(t.Context(), slower, eval.Cell{Tier: configs.NoTier}, eval.Options{Prompts: threePrompts, NewTokens: 2, Warmup: -1, Trials: 2})
	if err != nil {
		t.Fatal(err)
	}
	// Steps of 1 s and 3 s: 3 and 1 tokens/s.
	if r.DecodeTokS != 2 || *r.DecodeStddevTokS < 1.4142 || *r.DecodeStddevTokS > 1.4143 {
		t.Errorf("%v ± %v tokens/s, want 2 ± 1.4142", r.DecodeTokS, *r.DecodeStddevTokS)
	}
	if r.Roofline.Bound == "host-link" || r.Prediction.SaturationPoint != 0 {
		t.Errorf("nothing offloaded: %+v, %+v", r.Roofline, r.Prediction)
	}
}

// slowing takes 2 s more for each further step.
type slowing struct{ *fake }

func (s *slowing) Batch(prompts [][]int32, newTokens int) (eval.Batch, error) {
	b, err := s.fake.Batch(prompts, newTokens)
	return &slowingBatch{b, s.fake}, err
}

type slowingBatch struct {
	eval.Batch
	f *fake
}

func (b *slowingBatch) Decode(ctx context.Context, from, to int) error {
	err := b.Batch.Decode(ctx, from, to)
	b.f.step += 2 * time.Second
	return err
}

func TestThroughputRefuses(t *testing.T) {
	drifting := newFake("a", time.Second, nil)
	drifting.drift = 1
	timeless := newFake("a", 0, nil)
	for _, c := range []struct {
		name string
		node *fake
		o    eval.Options
		want error
		text string
	}{
		{"other tokens", drifting, eval.Options{Prompts: threePrompts}, eval.ErrTokens, "eval: trial 2: trials sampled different tokens"},
		{"no time", timeless, eval.Options{Prompts: threePrompts}, nil, "eval: trial 1: the virtual clock did not advance"},
		{"no prompts", newFake("a", 1, nil), eval.Options{}, eval.ErrInput, "eval: no prompts to run"},
		{"one token", newFake("a", 1, nil), eval.Options{Prompts: threePrompts, NewTokens: 1}, eval.ErrInput, "eval: 1 new tokens"},
		{"no trial", newFake("a", 1, nil), eval.Options{Prompts: threePrompts, Trials: -1}, eval.ErrInput, "eval: -1 trials"},
	} {
		_, err := eval.Throughput(t.Context(), c.node, eval.Cell{Tier: configs.NoTier}, c.o)
		if err == nil || c.want != nil && !errors.Is(err, c.want) || !strings.HasPrefix(err.Error(), c.text) {
			t.Errorf("%s: %v, want %s", c.name, err, c.text)
		}
	}
	if _, err := eval.Throughput(t.Context(), drifting, eval.Cell{Tier: configs.NoTier}, eval.Options{Prompts: threePrompts, TokensMayDiffer: true}); err != nil {
		t.Errorf("other tokens, which may be: %v", err)
	}
}

func TestParse(t *testing.T) {
	for in, want := range map[string][]float64{"0": {0}, "1, 0.5,0": {0, 0.5, 1}, "0.25,0.25": {0.25}} {
		if got, err := eval.ParseFractions(in); err != nil || !slices.Equal(got, want) {
			t.Errorf("%q: %v, %v", in, got, err)
		}
	}
	for _, in := range []string{"", "1.1", "-0.5", "NaN", "half", "0,,1", "25%"} {
		if got, err := eval.ParseFractions(in); !errors.Is(err, eval.ErrInput) {
			t.Errorf("%q: %v, %v", in, got, err)
		}
	}
	if got, err := eval.ParseTiers("peer, host,peer"); err != nil || !slices.Equal(got, []configs.Tier{configs.PeerTier, configs.HostTier}) {
		t.Errorf("%v, %v", got, err)
	}
	for _, in := range []string{"", "none", "auto", "host,disk"} {
		if got, err := eval.ParseTiers(in); !errors.Is(err, eval.ErrInput) {
			t.Errorf("%q: %v, %v", in, got, err)
		}
	}
	want := []eval.Cell{{Tier: configs.NoTier}, {Tier: configs.HostTier, Fraction: 0.5}, {Tier: configs.PeerTier, Fraction: 0.5}}
	if got := eval.Cells([]float64{0, 0.5}, []configs.Tier{configs.HostTier, configs.PeerTier}, 1); !slices.Equal(got, want) {
		t.Errorf("%v", got)
	}
	want = []eval.Cell{{Tier: configs.NoTier}, {Tier: configs.HostTier, Fraction: 0.5}, {Tier: configs.HostTier, Fraction: 0.5, AllPaths: true}, {Tier: configs.PeerTier, Fraction: 0.5}}
	if got := eval.Cells([]float64{0, 0.5}, []configs.Tier{configs.HostTier, configs.PeerTier}, 2); !slices.Equal(got, want) {
		t.Errorf("over two paths: %v", got)
	}
}

// sweep runs a sweep over fakes, whose steps take as many seconds as the cell's
// fraction says from the host, and none more from a peer.
func sweep(t *testing.T, o eval.SweepOptions, log *[]string) ([]eval.Result, error) {
	t.Helper()
	o.Options = eval.Options{Prompts: threePrompts, NewTokens: 3, Warmup: 1, Trials: 2, Run: eval.Run{
		Version: "v1.2.3", Commit: "0123456789abcdef", Modified: true, Date: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC), Command: "moeserve bench sweep",
	}}
	if o.Cells == nil {
		o.Cells = eval.Cells([]float64{0, 0.5, 1}, []configs.Tier{configs.HostTier, configs.PeerTier}, 1)
	}
	var opened []*fake
	o.Open = func(_ context.Context, c eval.Cell) (eval.Node, error) {
		step := time.Second
		if c.Tier == configs.HostTier {
			step += time.Duration(c.Fraction * float64(2*time.Second))
		}
		f := newFake(c.Tier.String(), step, log)
		opened = append(opened, f)
		return f, nil
	}
	r, err := eval.Sweep(t.Context(), o)
	for i, f := range opened {
		if !f.closed {
			t.Errorf("node %d is left open", i)
		}
	}
	return r, err
}

func TestSweepGoesRound(t *testing.T) {
	cells := eval.Cells([]float64{0, 1}, []configs.Tier{configs.HostTier}, 1)
	for _, c := range []struct {
		together bool
		want     string
	}{
		{true, "none prefill, none decode 1 to 2, host prefill, host decode 1 to 2, " +
			"none prefill, none decode 1 to 3, host prefill, host decode 1 to 3, none prefill, none decode 1 to 3, host prefill, host decode 1 to 3, " +
			"none decode 2 to 3, host decode 2 to 3, none closed, host closed"},
		{false, "none prefill, none decode 1 to 2, none prefill, none decode 1 to 3, none prefill, none decode 1 to 3, none decode 2 to 3, none closed, " +
			"host prefill, host decode 1 to 2, host prefill, host decode 1 to 3, host prefill, host decode 1 to 3, host decode 2 to 3, host closed"},
	} {
		var log []string
		r, err := sweep(t, eval.SweepOptions{Cells: cells, Shared: c.together}, &log)
		if err != nil || len(r) != 2 || r[0].DecodeTokS != 3 || r[1].DecodeTokS != 1 {
			t.Errorf("%+v, %v", r, err)
		}
		if got := strings.Join(log, ", "); got != c.want {
			t.Errorf("together %v:\n%s, want\n%s", c.together, got, c.want)
		}
	}
}

func TestSweepSkips(t *testing.T) {
	errRoom := errors.New("no room")
	open := func(_ context.Context, c eval.Cell) (eval.Node, error) {
		if c.Fraction < 1 {
			return nil, errRoom
		}
		return newFake("a", time.Second, nil), nil
	}
	o := eval.SweepOptions{
		Options: eval.Options{Prompts: threePrompts, NewTokens: 2, Trials: 1}, Open: open,
		Cells: eval.Cells([]float64{0, 0.5, 1}, []configs.Tier{configs.HostTier}, 1), Skip: func(_ eval.Cell, err error) bool { return errors.Is(err, errRoom) },
	}
	for _, o.Shared = range []bool{false, true} {
		r, err := eval.Sweep(t.Context(), o)
		if err != nil || len(r) != 1 || r[0].OffloadFraction != 1 {
			t.Errorf("%+v, %v", r, err)
		}
	}
	o.Cells = o.Cells[:2]
	if r, err := eval.Sweep(t.Context(), o); !errors.Is(err, errRoom) || !strings.HasPrefix(err.Error(), "0 % offloaded: ") {
		t.Errorf("%+v, %v", r, err)
	}
	o.Skip = nil
	if _, err := eval.Sweep(t.Context(), o); !errors.Is(err, errRoom) {
		t.Error(err)
	}
}

func TestGains(t *testing.T) {
	r, err := sweep(t, eval.SweepOptions{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	got := eval.Gains(r, 0.5)
	// Steps of 2 s and of 1 s; whole runs of 6 s and of 4 s.
	if len(got) != 1 || got[0].Decode != 1 || got[0].EndToEnd != 0.5 || got[0].Model != "fake" || !got[0].Emulated {
		t.Errorf("%+v", got)
	}
	// Tiers of different machines do not compare.
	other := slices.Clone(r)
	for i := range other {
		other[i].Machine = eval.Machine{Device: "NVIDIA H200"}
		other[i].DecodeTokS *= 10
	}
	other = slices.DeleteFunc(other, func(r eval.Result) bool { return r.Tier == configs.PeerTier })
	if mixed := eval.Gains(append(other, r...), 0.5); len(mixed) != 1 || mixed[0] != got[0] {
		t.Errorf("beside host memory of another machine: %+v", mixed)
	}
	if mixed := eval.Gains(append(slices.Clone(r), other...), 0.5); len(mixed) != 1 || mixed[0] != got[0] {
		t.Errorf("before host memory of another machine: %+v", mixed)
	}
	if got := eval.Gains(r, 0.25); got != nil {
		t.Errorf("at a fraction that was not measured: %+v", got)
	}
}

func TestJournal(t *testing.T) {
	path := filepath.Join(t.TempDir(), "sweep.jsonl")
	config := map[string]string{"model": "a", "seed": "1"}
	errCut := errors.New("cut off")
	run := func(stopAfter int) ([]eval.Result, []string, error) {
		j, err := eval.OpenJournal(path, config)
		if err != nil {
			t.Fatal(err)
		}
		defer j.Close()
		var log []string
		r, err := sweep(t, eval.SweepOptions{Done: j.Results, Finished: func(r eval.Result) error {
			if stopAfter--; stopAfter < 0 {
				return errCut
			}
			return j.Append(r)
		}}, &log)
		return r, log, err
	}
	if _, _, err := run(2); !errors.Is(err, errCut) {
		t.Fatal(err)
	}
	// The process ended in the middle of a line.
	f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteString(`{"model":"fa`); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	resumed, log, err := run(100)
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(strings.Join(log, " "), "none") {
		t.Errorf("measured again: %v", log)
	}
	whole, err := sweep(t, eval.SweepOptions{}, nil)
	if err != nil || !reflect.DeepEqual(resumed, whole) {
		t.Errorf("resumed %+v, in one go %+v, %v", resumed, whole, err)
	}
	if _, log, err := run(0); err != nil || log != nil {
		t.Errorf("all done, and yet %v, %v", log, err)
	}
	_, err = eval.OpenJournal(path, map[string]string{"model": "b", "seed": "1"})
	if !errors.Is(err, eval.ErrInput) || !strings.Contains(err.Error(), `it has model "a", this sweep "b"`) {
		t.Errorf("another model: %v", err)
	}
	_, err = eval.OpenJournal(path, map[string]string{"model": "a"})
	if !errors.Is(err, eval.ErrInput) || !strings.Contains(err.Error(), `it has seed "1", this sweep ""`) {
		t.Errorf("a setting less: %v", err)
	}
}

func TestBrokenJournal(t *testing.T) {
	config := map[string]string{"model": "a"}
	for name, text := range map[string]string{
		"text":             "to do\n",
		"text without end": "to do",
		"other JSON":       "{\"model\": \"a\"}\n",
		"and without end":  "{\"model\": \"a\"}",
		"a broken line":    "{\"sweep\": {\"model\": \"a\"}}\n{\"tier\"\n",
		"no result":        "{\"sweep\": {\"model\": \"a\"}}\n{}\n",
	} {
		path := filepath.Join(t.TempDir(), "j")
		if err := os.WriteFile(path, []byte(text), 0o666); err != nil {
			t.Fatal(err)
		}
		if _, err := eval.OpenJournal(path, config); !errors.Is(err, eval.ErrInput) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v", name, err)
		}
		if got, _ := os.ReadFile(path); string(got) != text {
			t.Errorf("%s: the file is now %q", name, got)
		}
	}
	if _, err := eval.OpenJournal(filepath.Join(t.TempDir(), "none", "j"), config); !errors.Is(err, eval.ErrInput) {
		t.Errorf("no directory: %v", err)
	}
	// What is no file may have no end.
	if _, err := eval.OpenJournal(os.DevNull, config); !errors.Is(err, eval.ErrInput) || !strings.Contains(err.Error(), "not a regular file") {
		t.Error(err)
	}
}

// The keys of a result are a promise to those who read it.
func TestResultKeys(t *testing.T) {
	r, err := sweep(t, eval.SweepOptions{Cells: []eval.Cell{{Tier: configs.HostTier, Fraction: 0.5}}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	data, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	var objects []map[string]any
	if err := json.Unmarshal(data, &objects); err != nil {
		t.Fatal(err)
	}
	for _, key := range []string{
		"model", "device", "dtype", "load_format", "tier", "offload_fraction", "micro_batch_tokens", "num_micro_batches", "expert_grouping",
		"attention", "requests", "prompt_tokens", "generated_tokens", "trials", "throughput_tok_s", "decode_tok_s", "stddev_tok_s",
		"run", "driver_version", "emulation", "hardware", "hits", "misses", "hit_rate", "direct_steps", "prefill_tok_s", "decode_stddev_tok_s",
		"fetched_bytes", "distinct_experts", "stall_s", "hbm_peak_bytes", "roofline", "tokens_sha256", "prediction", "emulated",
	} {
		if _, ok := objects[0][key]; !ok {
			t.Errorf("there is no key %s", key)
		}
	}
	for key, parts := range map[string][]string{
		"fetched_bytes": {"host", "peer"}, "run": {"version", "commit", "modified", "date", "command"}, "emulation": {"emulate", "rates"},
		"hardware": {"name", "host_to_gpu_bytes_per_s", "sources", "comparable"}, "roofline": {"bound", "tok_s", "fraction"},
		"prediction": {"prefill_s", "decode_s", "throughput_tok_s", "decode_tok_s", "bound", "saturation_fraction"},
	} {
		object, _ := objects[0][key].(map[string]any)
		for _, part := range parts {
			if _, ok := object[part]; !ok {
				t.Errorf("%s has no key %s: %v", key, part, object)
			}
		}
	}
	for _, trial := range objects[0]["trials"].([]any) {
		for _, key := range []string{"prefill_s", "decode_s"} {
			if _, ok := trial.(map[string]any)[key]; !ok {
				t.Errorf("a trial has no key %s", key)
			}
		}
	}
	back, err := eval.ReadResults(data, "file")
	if err != nil || !reflect.DeepEqual(back, r) {
		t.Errorf("read back: %+v, %v", back, err)
	}
	one, _ := json.Marshal(r[0])
	if back, err = eval.ReadResults(one, "file"); err != nil || len(back) != 1 {
		t.Errorf("a single one read back: %+v, %v", back, err)
	}
	for _, text := range []string{"", "5", "[{}]", `{"tier": "host"}`} {
		if _, err := eval.ReadResults([]byte(text), "file"); !errors.Is(err, eval.ErrInput) {
			t.Errorf("%q: %v", text, err)
		}
	}
}

func TestTables(t *testing.T) {
	r, err := sweep(t, eval.SweepOptions{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	var table bytes.Buffer
	if err := eval.WriteTable(&table, r); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"moeserve v1.2.3, commit 0123456789ab with changes, 2026-01-02T03:04:05Z\ncommand: moeserve bench sweep\n",
		"device: none, emulated on the CPU (--emulate virtual), on a virtual clock: times are calculated from the given rates\n", "hardware rates: fake\n", "H2D link     0.1 GB/s (made up)\n",
		"fake (bfloat16): 3 requests, 6 prompt tokens, 9 generated tokens, 2 trials", "host link", "75.0 %",
		" s for router-sync, all lines and trials together, on the virtual clock\n", "predicted saturation point, from host: ", "the same tokens in all lines",
		"at 50 % offloaded, peer over host memory: +100 % decode throughput, +50 % end-to-end",
	} {
		if !strings.Contains(table.String(), want) {
			t.Errorf("there is no %q in\n%s", want, &table)
		}
	}
	r[1].TokensSHA256 = "other"
	table.Reset()
	if err := eval.WriteTable(&table, r); err != nil || !strings.Contains(table.String(), "the generated tokens DIFFER") {
		t.Errorf("%v\n%s", err, &table)
	}
	var out bytes.Buffer
	if err := eval.WriteCSV(&out, r); err != nil {
		t.Fatal(err)
	}
	rows, err := csv.NewReader(&out).ReadAll()
	if err != nil || len(rows) != 1+len(r) {
		t.Fatalf("%v, %v", rows, err)
	}
	for column, want := range map[string]string{
		"version": "v1.2.3", "commit": "0123456789abcdef", "modified": "true", "date": "2026-01-02T03:04:05Z", "command": "moeserve bench sweep",
		"device": "none", "driver_version": "", "emulate": "virtual", "emulated_rates": "virtual", "hardware": "fake", "hardware_comparable": "true",
		"tier": "host", "offload_fraction": "0.5", "trials": "2", "stddev_tok_s": "0", "hit_rate": "0.75", "stall_s_router_sync": "0.6", "stall_s_expert_copy": "0",
	} {
		at := slices.Index(rows[0], column)
		if at < 0 || rows[2][at] != want {
			t.Errorf("column %s is number %d of %v: %v, want %q", column, at, rows[0], rows[2], want)
		}
	}
	if at := slices.Index(rows[0], "hardware_rates"); !strings.HasPrefix(rows[2][at], "H2D link 0.1 GB/s (made up); ") {
		t.Errorf("hardware_rates: %q", rows[2][at])
	}
	if at := slices.Index(rows[0], "prediction_saturation_fraction"); rows[2][at] == "" || rows[1][at] != "" {
		t.Errorf("saturation fraction %q, %q with nothing offloaded", rows[2][at], rows[1][at])
	}
}

// A deviation has the decimals of its mean: the rest is noise.
func TestDeviationsHaveTheDecimalsOfTheirMeans(t *testing.T) {
	r, err := sweep(t, eval.SweepOptions{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	small := 0.0007117
	r[0].DecodeTokS, r[0].DecodeStddevTokS = 272.43, &small
	r[0].ThroughputTokS, r[0].StddevTokS = 4645, &small
	var table bytes.Buffer
	if err := eval.WriteTable(&table, r[:1]); err != nil {
		t.Fatal(err)
	}
	if text := strings.Join(strings.Fields(table.String()), " "); !strings.Contains(text, " 272.4 0.0 ") || !strings.Contains(text, " 4645 0 ") {
		t.Errorf("%s", table.String())
	}
}

// One trial has no deviation, emulated devices without rates no gain, and predictions for
// other hardware are no measure of what was measured.
func TestTablesStateNothingThatIsNotKnown(t *testing.T) {
	n := newFake("a", time.Second, nil)
	n.otherHardware = true
	cell := eval.Cell{Tier: configs.HostTier, Fraction: 0.5}
	one, err := eval.Throughput(t.Context(), n, cell, eval.Options{Prompts: threePrompts, NewTokens: 3, Warmup: -1, Trials: 1})
	if err != nil {
		t.Fatal(err)
	}
	if one.StddevTokS != nil || one.DecodeStddevTokS != nil || one.Roofline.Fraction != 0 {
		t.Errorf("%+v, roofline %+v", one, one.Roofline)
	}
	data, err := json.Marshal(one)
	if err != nil || strings.Contains(string(data), "stddev") || strings.Contains(string(data), `"fraction"`) {
		t.Errorf("%v: %s", err, data)
	}
	var table, csv bytes.Buffer
	if err := errors.Join(eval.WriteTable(&table, []eval.Result{one}), eval.WriteCSV(&csv, []eval.Result{one})); err != nil {
		t.Fatal(err)
	}
	if text := table.String(); !strings.Contains(text, "predicted for fake; measured on emulated devices: not comparable") || strings.Contains(text, "overlapped") || strings.Count(text, "%") != 3 {
		t.Errorf("of other hardware:\n%s", text) // the three are of the heading, the fraction and the hit rate
	}

	r, err := sweep(t, eval.SweepOptions{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	for i := range r {
		r[i].Emulation.Rates = eval.RatesNone
	}
	if g := eval.Gains(r, 0.5); len(g) != 1 || !g[0].Unpaced || g[0].Decode != 0 || g[0].EndToEnd != 0 {
		t.Errorf("gains %+v", g)
	}
	table.Reset()
	if err := eval.WriteTable(&table, r); err != nil || !strings.Contains(table.String(), "no gain of peer over host memory: emulated devices without rates") || strings.Contains(table.String(), "peer over host memory: +") {
		t.Errorf("without rates: %v\n%s", err, &table)
	}
	var picture bytes.Buffer
	if err := eval.PlotSweep(&picture, "svg", r); err != nil || !strings.Contains(svgText(t, picture.Bytes()), "emulated devices without rates: times are this CPU") {
		t.Errorf("%v: the picture has %s", err, svgText(t, picture.Bytes()))
	}
	var svg bytes.Buffer
	if err := eval.PlotGains(&svg, "svg", r); err != nil {
		t.Fatal(err)
	}
	if text := svgText(t, svg.Bytes()); !strings.Contains(text, "no bars where emulated devices have no rates") || strings.Contains(text, "+100") {
		t.Errorf("the picture has %s", text)
	}
}

// A sweep that was resumed with another build says so: the heading names only one.
func TestTableOfBuilds(t *testing.T) {
	r, err := sweep(t, eval.SweepOptions{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	const want = "\nmeasured by other builds, too: moeserve v1.2.3, commit fedcba987654\n"
	r[0].Run.Date = r[0].Run.Date.Add(time.Hour)
	var same, other bytes.Buffer
	if err := eval.WriteTable(&same, r); err != nil || strings.Contains(same.String(), "other builds") {
		t.Errorf("of one build: %v\n%s", err, &same)
	}
	for i := range r[1:3] {
		r[1+i].Run.Commit, r[1+i].Run.Modified = "fedcba9876543210", false
	}
	if err := eval.WriteTable(&other, r); err != nil || !strings.Contains(other.String(), want) {
		t.Errorf("%v\n%s\nwant %s", err, &other, want)
	}
}

// A sweep that fails keeps the cells that were measured by then.
func TestFailedSweep(t *testing.T) {
	lost, full := errors.New("device lost"), errors.New("disk full")
	cells := eval.Cells([]float64{0, 0.5, 1}, []configs.Tier{configs.HostTier}, 1)
	for name, c := range map[string]struct {
		lost, full eval.Cell
		want       error
		whole      int
	}{
		"device":  {lost: cells[1], want: lost, whole: 1},
		"first":   {lost: cells[0], want: lost},
		"journal": {lost: eval.Cell{Fraction: 2}, full: cells[1], want: full, whole: 2},
	} {
		results, err := eval.Sweep(t.Context(), eval.SweepOptions{
			Options: eval.Options{Prompts: threePrompts, NewTokens: 3, Warmup: 1, Trials: 2}, Cells: cells,
			Open: func(_ context.Context, cell eval.Cell) (eval.Node, error) {
				if cell == c.lost {
					return nil, lost
				}
				return newFake("a", time.Second, nil), nil
			},
			Finished: func(r eval.Result) error {
				if c.full.Fraction > 0 && r.Cell() == c.full {
					return full
				}
				return nil
			},
		})
		if !errors.Is(err, c.want) || len(results) != c.whole {
			t.Errorf("%s: %d results, %v", name, len(results), err)
		}
		for _, r := range results {
			if len(r.Trials) != 2 {
				t.Errorf("%s: %+v", name, r)
			}
		}
	}
}

// An interrupted sweep keeps what has been measured.
func TestInterruptedSweep(t *testing.T) {
	cells := eval.Cells([]float64{0, 1}, []configs.Tier{configs.HostTier}, 1)
	for _, c := range []struct {
		shared   bool
		after    int    // steps: of a cell one for warm-up, two for each of three trials, and the last one again
		want     string // trials of each cell
		finished string
	}{
		{true, 2, "", ""},
		{true, 4, "none 1 ", ""},
		{true, 7, "none 2 host 1 ", ""},
		{true, 15, "none 3 host 3 ", "none "},
		{false, 1, "", ""},
		{false, 4, "none 2 ", ""},
		{false, 7, "none 3 ", ""},
		{false, 8, "none 3 ", "none "},
		{false, 12, "none 3 host 2 ", "none "},
	} {
		ctx, cancel := context.WithCancel(t.Context())
		steps := 0
		var finished string
		results, err := eval.Sweep(ctx, eval.SweepOptions{
			Options: eval.Options{Prompts: threePrompts, NewTokens: 3, Warmup: 1, Trials: 3}, Cells: cells, Shared: c.shared,
			Open: func(_ context.Context, cell eval.Cell) (eval.Node, error) {
				f := newFake("a", time.Second, nil)
				f.stepped = func() {
					if steps++; steps == c.after {
						cancel()
					}
				}
				return f, nil
			},
			Finished: func(r eval.Result) error {
				finished += r.Tier.String() + " "
				return nil
			},
		})
		var got string
		for _, r := range results {
			got += fmt.Sprintf("%s %d ", r.Tier, len(r.Trials))
			if r.DecodeTokS != 3 || r.ThroughputTokS == 0 {
				t.Errorf("%+v", r)
			}
		}
		if !errors.Is(err, context.Canceled) || got != c.want || finished != c.finished {
			t.Errorf("shared %v, after %d steps: %v, %q, want %q; finished %q", c.shared, c.after, err, got, c.want, finished)
		}
		cancel()
	}
}

// Progress counts the steps of all cells that are measured.
func TestProgress(t *testing.T) {
	cells := eval.Cells([]float64{0, 0.5, 1}, []configs.Tier{configs.HostTier}, 1)
	var first, last eval.Progress
	calls := 0
	_, err := eval.Sweep(t.Context(), eval.SweepOptions{
		Options: eval.Options{Prompts: threePrompts, NewTokens: 3, Warmup: 1, Trials: 2, Progress: func(p eval.Progress) {
			if calls++; calls == 1 {
				first = p
			} else if p.Done <= last.Done {
				t.Errorf("%+v after %+v", p, last)
			}
			last = p
		}},
		Cells: cells, Done: []eval.Result{{Tier: configs.NoTier, Requests: 3, GeneratedTokens: 9}},
		Open: func(context.Context, eval.Cell) (eval.Node, error) { return newFake("a", time.Second, nil), nil },
	})
	// Prefill and a step for warm-up, then two trials of prefill and two steps.
	if err != nil || first != (eval.Progress{Cell: cells[1], Number: 1, Cells: 2, Done: 1, Total: 16}) || last != (eval.Progress{Cell: cells[2], Number: 2, Cells: 2, Done: 16, Total: 16}) {
		t.Errorf("%v: from %+v to %+v", err, first, last)
	}
}

// svgText is all text that a picture shows.
func svgText(t *testing.T, data []byte) string {
	t.Helper()
	var all strings.Builder
	d := xml.NewDecoder(bytes.NewReader(data))
	for {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			return all.String()
		}
		if err != nil {
			t.Fatalf("not an SVG: %v", err)
		}
		if text, ok := token.(xml.CharData); ok {
			all.Write(text)
			all.WriteByte('\n')
		}
	}
}

// inked checks that a picture has ink.
func inked(t *testing.T, data []byte) {
	t.Helper()
	picture, err := png.Decode(bytes.NewReader(data))
	if err != nil {
		t.Fatal(err)
	}
	ink := 0
	b := picture.Bounds()
	for y := b.Min.Y; y < b.Max.Y; y++ {
		for x := b.Min.X; x < b.Max.X; x++ {
			if r, g, _, _ := picture.At(x, y).RGBA(); r < 0x8000 && g < 0x8000 {
				ink++
			}
		}
	}
	if ink < 1000 {
		t.Errorf("%d dark points", ink)
	}
}

func TestPlots(t *testing.T) {
	racedetector.SkipSequential(t)
	r, err := sweep(t, eval.SweepOptions{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name string
		draw func(io.Writer, string, []eval.Result) error
		want []string
	}{
		{"sweep", eval.PlotSweep, []string{
			"fake, batch of 3 requests, emulated devices and links", "experts offloaded (% of all)", "decode throughput (tokens/s)",
			"host memory, emulated", "peer memory, emulated", "host memory, predicted", "host: saturation point", "50", "100",
		}},
		{"gains", eval.PlotGains, []string{
			"batches of 3 requests, emulated devices and links", "gain in throughput (%)", "fake", "+100 %", "+50 %", "decode throughput", "end-to-end throughput",
		}},
	} {
		var svg, picture, again bytes.Buffer
		for _, f := range []struct {
			format string
			to     io.Writer
		}{{"svg", &svg}, {"png", &picture}, {"svg", &again}} {
			if err := c.draw(f.to, f.format, r); err != nil {
				t.Fatalf("%s as %s: %v", c.name, f.format, err)
			}
		}
		text := svgText(t, svg.Bytes())
		for _, want := range c.want {
			if !strings.Contains(text, want) {
				t.Errorf("%s: no %q in %q", c.name, want, text)
			}
		}
		inked(t, picture.Bytes())
		if !bytes.Equal(svg.Bytes(), again.Bytes()) {
			t.Errorf("%s: drawn twice, it differs", c.name)
		}
		if err := c.draw(io.Discard, "gif", r); !errors.Is(err, eval.ErrInput) {
			t.Errorf("%s as gif: %v", c.name, err)
		}
		if err := c.draw(io.Discard, "svg", nil); !errors.Is(err, eval.ErrInput) {
			t.Errorf("%s of nothing: %v", c.name, err)
		}
	}
}
