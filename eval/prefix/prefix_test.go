package prefix_test

import (
	"bytes"
	"context"
	"encoding/csv"
	"errors"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/moeserve/moeserve/eval"
	"github.com/moeserve/moeserve/eval/prefix"
)

// Rates of the fake: prompt tokens computed and loaded per second, and the time of a decode
// step.
const (
	computed = 1e4
	step     = 10 * time.Millisecond
)

var loaded = map[prefix.Place]float64{prefix.HBM: 1e9, prefix.Peer: 1e7, prefix.Host: 1e6, prefix.File: 1e5}

// engine keeps the latest prompts that it has run or found, with room for so many tokens. A
// prompt is stored once Settle was called, or another batch runs.
type engine struct {
	place         prefix.Place
	room, length  int
	pending, kept [][]int32 // the latest last
	closed        bool
	runs          [][][]int32
	fail          int // at that run, from 1
	loads         int
}

func (e *engine) Info() prefix.Info {
	return prefix.Info{
		Machine: eval.Machine{Device: "emulated", Emulated: true, Emulation: &eval.Emulation{Rates: eval.RatesVirtual}},
		Model:   "fake", DType: "bfloat16", LoadFormat: "dummy", BlockTokens: 16, Vocab: 1000,
	}
}

func (e *engine) Run(ctx context.Context, prompts [][]int32, o prefix.RunOptions) (prefix.Batch, error) {
	newTokens := o.NewTokens
	if err := ctx.Err(); err != nil {
		return prefix.Batch{}, err
	}
	if err := e.Settle(ctx); err != nil {
		return prefix.Batch{}, err
	}
	e.runs = append(e.runs, prompts)
	if len(e.runs) == e.fail {
		return prefix.Batch{}, errors.New("broken")
	}
	var b prefix.Batch
	now := time.Duration(0)
	for _, p := range prompts {
		if len(p)+newTokens > e.length {
			return b, errors.New("too long")
		}
		seconds := float64(len(p)) / computed
		if k := slices.IndexFunc(e.kept, func(k []int32) bool { return slices.Equal(k, p) }); k >= 0 {
			seconds = float64(len(p)) / loaded[e.place]
			b.Cached += len(p)
			if e.place != prefix.HBM {
				b.Loading += e.loading(seconds)
			}
			e.kept = append(slices.Delete(e.kept, k, k+1), p)
		} else if e.place != prefix.Nowhere {
			e.pending = append(e.pending, p)
		}
		now += time.Duration(seconds * 1e9)
		b.First = append(b.First, now)
		now += time.Duration(newTokens-1) * step
		b.Last = append(b.Last, now)
	}
	return b, nil
}

// loading is the time of a load in a time to first token of so many seconds: half of it, and of each
// third request nearly all.
func (e *engine) loading(seconds float64) time.Duration {
	share := 0.5
	if e.loads++; e.loads%3 == 0 {
		share = 0.9
	}
	return time.Duration(share * seconds * 1e9)
}

func (e *engine) Settle(context.Context) error {
	e.kept, e.pending = append(e.kept, e.pending...), nil
	for room := e.room; ; e.kept = e.kept[1:] {
		all := 0
		for _, p := range e.kept {
			all += len(p)
		}
		if all <= room {
			return nil
		}
	}
}

func (e *engine) Close() error {
	e.closed = true
	return nil
}

// opener opens fakes, and knows them.
type opener struct {
	engines []*engine
	refuses prefix.Place
	fail    int
}

var errRefused = errors.New("no such tier")

func (o *opener) open(_ context.Context, p prefix.Place, tokens, length int) (prefix.Engine, error) {
	if p == o.refuses {
		return nil, errRefused
	}
	e := &engine{place: p, room: tokens, length: length, fail: o.fail}
	o.engines = append(o.engines, e)
	return e, nil
}

func (o *opener) check(t *testing.T) {
	t.Helper()
	for _, e := range o.engines {
		if !e.closed {
			t.Errorf("%s: not closed", e.place)
		}
	}
}

func TestTTFT(t *testing.T) {
	o := &opener{}
	var done, total int64
	r := &prefix.Result{}
	lengths := []int{100, 5000}
	if err := prefix.TTFT(t.Context(), prefix.TTFTOptions{Open: o.open, Lengths: lengths, Progress: func(d, all int64) { done, total = d, all }}, r, nil); err != nil {
		t.Fatal(err)
	}
	o.check(t)
	if done != total || total == 0 || len(r.TTFT) != len(prefix.Places)*len(lengths) || r.Model != "fake" || r.BlockTokens != 16 {
		t.Errorf("%d of %d, %+v", done, total, r)
	}
	for i, x := range r.TTFT {
		n := float64(lengths[i%2] + 1) // the fake finds the last token, too
		place, want, cached := prefix.Places[i/2], 0.0, lengths[i%2]+1
		if want = n / loaded[place]; place == prefix.Nowhere {
			want, cached = n/computed, 0
		}
		if x.Place != place || x.PrefixTokens != lengths[i%2] || x.CachedTokens != cached || math.Abs(x.Seconds/want-1) > 1e-3 ||
			math.Abs(x.MissSeconds/(n/computed)-1) > 1e-6 || math.Abs(x.DecodeStepSeconds/step.Seconds()-1) > 1e-6 || math.Abs(x.Speedup/(n/computed/x.Seconds)-1) > 1e-9 {
			t.Errorf("%+v, want %.4g s in %s", x, want, place)
		}
		share := 0.0
		if place != prefix.HBM && place != prefix.Nowhere {
			share = 0.5
		}
		if math.Abs(x.LoadShare-share) > 1e-3 || math.Abs(x.LoadSeconds-share*x.Seconds) > 1e-6 {
			t.Errorf("%+v, want a share of %g of the load", x, share)
		}
	}
	// A warm-up, then of each length the miss and the hits; and no prompt begins like another.
	for _, e := range o.engines {
		want := 1 + 2*6
		if e.place == prefix.Nowhere {
			want = 1 + 2
		}
		if len(e.runs) != want {
			t.Errorf("%s: %d requests, want %d", e.place, len(e.runs), want)
		}
		var starts [][]int32
		for _, run := range e.runs {
			if start := run[0][:16]; !slices.ContainsFunc(starts, func(s []int32) bool { return slices.Equal(s, start) }) {
				starts = append(starts, start)
			}
		}
		if len(starts) != 3 {
			t.Errorf("%s: prompts begin in %d ways, want 3", e.place, len(starts))
		}
	}
}

func TestHits(t *testing.T) {
	o := &opener{}
	r := &prefix.Result{}
	var done, total int64
	fractions := []float64{0, 0.3, 1}
	if err := prefix.Hits(t.Context(), prefix.HitsOptions{
		Open: o.open, Places: []prefix.Place{prefix.Peer, prefix.Nowhere}, Fractions: fractions, Requests: 50, PromptTokens: 64, Pool: 4,
		Progress: func(d, all int64) { done, total = d, all },
	}, r, nil); err != nil {
		t.Fatal(err)
	}
	o.check(t)
	if done != total || total != 2*3*(4+50) || len(r.Hits) != 6 {
		t.Errorf("%d of %d, %d points", done, total, len(r.Hits))
	}
	for i, x := range r.Hits {
		hits := int(50*fractions[i%3] + 0.5)
		rate := loaded[prefix.Peer]
		if i >= 3 {
			hits = 0
		}
		want := 64 * (float64(50-hits)/computed + float64(hits)/rate)
		if x.CachedTokens != 64*hits || x.PromptTokens != 50*64 || math.Abs(x.Seconds/want-1) > 1e-3 || math.Abs(x.RequestThroughput*x.Seconds-50) > 1e-6 || math.Abs(x.Speedup/(x.RequestThroughput/r.Hits[i/3*3].RequestThroughput)-1) > 1e-9 {
			t.Errorf("%+v, want %d hits in %.4g s", x, hits, want)
		}
	}
	// Hits are spread evenly, and all prompts of the pool are among them.
	e := o.engines[0]
	pool, run := e.runs[0], e.runs[3]
	var at []int
	seen := map[int]bool{}
	for i, p := range run {
		if k := slices.IndexFunc(pool, func(q []int32) bool { return slices.Equal(p, q) }); k >= 0 {
			at = append(at, i)
			seen[k] = true
		}
	}
	for i := 1; i < len(at); i++ {
		if gap := at[i] - at[i-1]; gap < 3 || gap > 4 {
			t.Errorf("hits at %v", at)
			break
		}
	}
	if len(seen) != 4 {
		t.Errorf("%d prompts of the pool were found", len(seen))
	}
}

// A place whose engine cannot be opened fails the measurement, or is skipped; what an engine
// fails with does.
func TestFailures(t *testing.T) {
	ttft := func(ctx context.Context, o *opener, r *prefix.Result, skip func(prefix.Place, error) bool) error {
		return prefix.TTFT(ctx, prefix.TTFTOptions{Open: o.open, Lengths: []int{16}}, r, skip)
	}
	throughput := func(ctx context.Context, o *opener, r *prefix.Result, skip func(prefix.Place, error) bool) error {
		return prefix.Hits(ctx, prefix.HitsOptions{Open: o.open, Requests: 2, PromptTokens: 16, Pool: 1}, r, skip)
	}
	for name, measure := range map[string]func(context.Context, *opener, *prefix.Result, func(prefix.Place, error) bool) error{"ttft": ttft, "hits": throughput} {
		o := &opener{refuses: prefix.Peer}
		if err := measure(t.Context(), o, &prefix.Result{}, nil); !errors.Is(err, errRefused) || !strings.Contains(err.Error(), "peer") {
			t.Errorf("%s: %v", name, err)
		}
		o.check(t)
		o, r := &opener{refuses: prefix.Peer}, &prefix.Result{}
		var skipped []prefix.Place
		if err := measure(t.Context(), o, r, func(p prefix.Place, err error) bool {
			skipped = append(skipped, p)
			return errors.Is(err, errRefused)
		}); err != nil || !slices.Equal(skipped, []prefix.Place{prefix.Peer}) || len(r.TTFT)+len(r.Hits) == 0 {
			t.Errorf("%s: %v, skipped %v, %+v", name, err, skipped, r)
		}
		o = &opener{fail: 2}
		if err := measure(t.Context(), o, &prefix.Result{}, func(prefix.Place, error) bool { return true }); err == nil || !strings.Contains(err.Error(), "broken") {
			t.Errorf("%s: %v", name, err)
		}
		o.check(t)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := measure(ctx, &opener{}, &prefix.Result{}, nil); !errors.Is(err, context.Canceled) {
			t.Errorf("%s: %v", name, err)
		}
	}
	open := (&opener{}).open
	for name, err := range map[string]error{
		"length":      prefix.TTFT(t.Context(), prefix.TTFTOptions{Open: open, Lengths: []int{0}}, &prefix.Result{}, nil),
		"repetitions": prefix.TTFT(t.Context(), prefix.TTFTOptions{Open: open, Repetitions: -1}, &prefix.Result{}, nil),
		"new tokens":  prefix.TTFT(t.Context(), prefix.TTFTOptions{Open: open, NewTokens: 1}, &prefix.Result{}, nil),
		"fraction":    prefix.Hits(t.Context(), prefix.HitsOptions{Open: open, Fractions: []float64{2}}, &prefix.Result{}, nil),
		"requests":    prefix.Hits(t.Context(), prefix.HitsOptions{Open: open, Requests: -1}, &prefix.Result{}, nil),
	} {
		if !errors.Is(err, eval.ErrInput) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Lengths that an engine has no room for are left out where that is wished, the longest first.
func TestShorten(t *testing.T) {
	small := errors.New("too small")
	open := func(ctx context.Context, p prefix.Place, tokens, length int) (prefix.Engine, error) {
		if length > 200 || p == prefix.Peer {
			return nil, small
		}
		return (&opener{}).open(ctx, p, tokens, length)
	}
	for _, shortens := range []bool{true, false} {
		o := prefix.TTFTOptions{Open: open, Lengths: []int{50, 1000, 100, 300}, Places: []prefix.Place{prefix.HBM, prefix.Peer}}
		if shortens {
			o.Shorten = func(err error) bool { return errors.Is(err, small) }
		}
		var done, total int64
		o.Progress = func(d, all int64) { done, total = d, all }
		r, skipped := &prefix.Result{}, 0
		if err := prefix.TTFT(t.Context(), o, r, func(prefix.Place, error) bool { skipped++; return true }); err != nil {
			t.Error(err)
		}
		switch {
		case shortens && (len(r.TTFT) != 2 || r.TTFT[0].PrefixTokens != 50 || r.TTFT[1].PrefixTokens != 100 || skipped != 1 || done == 0 || done > total):
			t.Errorf("%+v, %d skipped, %d of %d", r.TTFT, skipped, done, total)
		case !shortens && (len(r.TTFT) > 0 || skipped != 2):
			t.Errorf("%+v, %d skipped", r.TTFT, skipped)
		}
	}
}

// However few requests find their prompts, there is room for the prompts of one fraction, and not for more
// than that.
func TestRoomForHits(t *testing.T) {
	for fraction, want := range map[float64]int{0.5: 5 * 32, 1e-300: 15 * 32, 0: 2 * 32} {
		o := &opener{}
		if err := prefix.Hits(t.Context(), prefix.HitsOptions{Open: o.open, Places: []prefix.Place{prefix.Host}, Fractions: []float64{fraction}, Requests: 10, PromptTokens: 32, Pool: 2}, &prefix.Result{}, nil); err != nil || o.engines[0].room != want {
			t.Errorf("hits %g: room for %d tokens, want %d: %v", fraction, o.engines[0].room, want, err)
		}
	}
}

func TestParsePlaces(t *testing.T) {
	if got, err := prefix.ParsePlaces("host, hbm"); err != nil || !slices.Equal(got, []prefix.Place{prefix.Host, prefix.HBM}) {
		t.Errorf("%v, %v", got, err)
	}
	for _, text := range []string{"", "disk", "host,host"} {
		if _, err := prefix.ParsePlaces(text); !errors.Is(err, eval.ErrInput) {
			t.Errorf("%q: %v", text, err)
		}
	}
}

func TestOutput(t *testing.T) {
	o, r := &opener{}, &prefix.Result{}
	if err := errors.Join(
		prefix.TTFT(t.Context(), prefix.TTFTOptions{Open: o.open, Lengths: []int{2000, 100}}, r, nil),
		prefix.Hits(t.Context(), prefix.HitsOptions{Open: o.open, Requests: 10, PromptTokens: 32, Pool: 2}, r, nil),
	); err != nil {
		t.Fatal(err)
	}
	var table, list bytes.Buffer
	if err := errors.Join(prefix.WriteTable(&table, r), prefix.WriteCSV(&list, r)); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"TTFT ms", "  load  ", "  50.0 %  ", "nowhere/TTFT", "requests/s", "10 requests of 32 prompt tokens", "does not count reading and writing files", "fake (bfloat16), KV blocks of 16 tokens"} {
		if !strings.Contains(table.String(), want) {
			t.Errorf("no %q in\n%s", want, &table)
		}
	}
	lines, err := csv.NewReader(&list).ReadAll()
	if err != nil || len(lines) != 1+len(r.TTFT)+len(r.Hits) {
		t.Fatalf("%v, %d lines", err, len(lines))
	}
	for i, line := range lines[1:] {
		load, found := line[slices.Index(lines[0], "load_share")], line[slices.Index(lines[0], "hit_fraction")]
		loads := i < len(r.TTFT) && r.TTFT[i].Place != prefix.HBM && r.TTFT[i].Place != prefix.Nowhere
		if loads != strings.HasPrefix(load, "0.5") || (i < len(r.TTFT)) != (found == "") {
			t.Errorf("load_share %q, hit_fraction %q in %q", load, found, line)
		}
	}
	var ttft, hits bytes.Buffer
	if err := errors.Join(prefix.PlotTTFT(&ttft, "svg", r), prefix.PlotHits(&hits, "svg", r)); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"GPU memory", "peer memory", "host memory", "files"} {
		if !strings.Contains(ttft.String(), want) || !strings.Contains(hits.String(), want) {
			t.Errorf("no %q in a plot", want)
		}
	}
	if !strings.Contains(ttft.String(), "nowhere: computed") || strings.Contains(hits.String(), "nowhere") {
		t.Error("the places of the plots are others")
	}
	empty := &prefix.Result{}
	if prefix.PlotTTFT(&ttft, "svg", empty) == nil || prefix.PlotHits(&hits, "svg", empty) == nil {
		t.Error("nothing was plotted")
	}
}
