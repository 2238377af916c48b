package metrics_test

import (
	"math"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/moeserve/moeserve/metrics"
)

// library is what Prometheus's client library writes of its collectors.
func library(t *testing.T, all ...prometheus.Collector) string {
	t.Helper()
	r := prometheus.NewRegistry()
	r.MustRegister(all...)
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var text strings.Builder
	for _, f := range families {
		if _, err := expfmt.MetricFamilyToText(&text, f); err != nil {
			t.Fatal(err)
		}
	}
	return text.String()
}

func write(t *testing.T, all ...metrics.Collector) string {
	t.Helper()
	var text strings.Builder
	if err := metrics.Write(&text, all...); err != nil {
		t.Fatal(err)
	}
	return text.String()
}

// collect is a collector of what is written down in a test.
type collect func(to *metrics.Sink)

func (c collect) Collect(to *metrics.Sink) { c(to) }

var values = []float64{0, 1, -1, .1, 1e-7, 123456789, 1e21, math.Inf(1), math.Inf(-1), math.NaN(), math.MaxUint64}

func TestLikeTheLibrary(t *testing.T) {
	bounds := []float64{-1, .25, 1, 1e6}
	h := metrics.NewHistogram(metrics.NewDesc("vllm:took_seconds", `Back\slash, "quotes" and`+"\nlines.").With("model_name", "a\"b\\c\nd"), bounds)
	theirs := prometheus.NewHistogram(prometheus.HistogramOpts{
		Name: "vllm:took_seconds", Help: `Back\slash, "quotes" and` + "\nlines.",
		ConstLabels: prometheus.Labels{"model_name": "a\"b\\c\nd"}, Buckets: bounds,
	})
	ended := metrics.NewCounters(metrics.NewDesc("ended_total", "Requests.", "why").With("model", "é"), "stop")
	theirEnded := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "ended_total", Help: "Requests.", ConstLabels: prometheus.Labels{"model": "é"}}, []string{"why"})
	theirEnded.WithLabelValues("stop")
	for range 3 {
		ended.Of("abort").Add(2)
		theirEnded.WithLabelValues("abort").Add(2)
	}
	tokens := metrics.NewCounter(metrics.NewDesc("tokens_total", "Tokens."))
	theirTokens := prometheus.NewCounter(prometheus.CounterOpts{Name: "tokens_total", Help: "Tokens."})
	tokens.Add(12345678)
	theirTokens.Add(12345678)
	shape := metrics.NewDesc("shape", "Values.", "y", "x").With("m", "n")
	gauge := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "shape", Help: "Values.", ConstLabels: prometheus.Labels{"m": "n"}}, []string{"y", "x"})
	var shapes collect = func(to *metrics.Sink) {
		for i, v := range values {
			to.Gauge(shape, v, string(rune('z'-i)), string(rune('a'+i%3)))
		}
	}
	for i, v := range values {
		gauge.WithLabelValues(string(rune('z'-i)), string(rune('a'+i%3))).Set(v)
	}
	compare := func() {
		t.Helper()
		if diff := cmp.Diff(library(t, theirs, theirEnded, theirTokens, gauge), write(t, h, ended, tokens, shapes)); diff != "" {
			t.Errorf("the library's and ours:\n%s", diff)
		}
	}
	compare() // before anything was observed
	for _, v := range append([]float64{-2, .25, .3, 1e6, 1e6 + 1}, values[:len(values)-2]...) {
		h.Observe(v)
		theirs.Observe(v)
		compare()
	}
	h.Observe(math.NaN())
	theirs.Observe(math.NaN())
	compare()
}

// What dashboards know of every Go process is there, with the same help, types and labels.
func TestRuntimeAndProcessAreTheLibrarys(t *testing.T) {
	ours := write(t, metrics.Runtime(), metrics.Process())
	theirs := library(t, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	value := regexp.MustCompile(`(?m)^([^#].*) \S+$`)
	if diff := cmp.Diff(value.ReplaceAllString(theirs, "$1"), value.ReplaceAllString(ours, "$1")); diff != "" {
		t.Errorf("the library's and ours:\n%s", diff)
	}
	// These do not change between two readings, or not by much.
	for _, name := range []string{"go_gc_gogc_percent", "go_gc_gomemlimit_bytes", "go_sched_gomaxprocs_threads", "process_start_time_seconds", "process_max_fds", "process_virtual_memory_max_bytes"} {
		line := regexp.MustCompile(`(?m)^` + name + ` .*$`)
		if our, their := line.FindString(ours), line.FindString(theirs); our != their {
			t.Errorf("%q, and the library %q", our, their)
		}
	}
	if regexp.MustCompile(`(?m)^(process_resident_memory_bytes|process_open_fds|go_goroutines|go_threads|go_memstats_heap_sys_bytes|go_memstats_mallocs_total) 0$`).MatchString(ours) {
		t.Errorf("a process that uses nothing: %s", ours)
	}
}

func TestWriteRefuses(t *testing.T) {
	d := metrics.NewDesc("a", "Help.", "l")
	for want, c := range map[string]collect{
		"a is there twice":                           func(to *metrics.Sink) { to.Gauge(d, 1, "x"); to.Gauge(d, 2, "y"); to.Gauge(d, 3, "x") },
		"a is a gauge (Help.) and a counter (Help.)": func(to *metrics.Sink) { to.Gauge(d, 1, "x"); to.Counter(d, 1, "y") },
		"a is a gauge (Help.) and a gauge (Other.)": func(to *metrics.Sink) {
			to.Gauge(d, 1, "x")
			to.Gauge(metrics.NewDesc("a", "Other.", "l"), 1, "y")
		},
	} {
		var text strings.Builder
		if err := metrics.Write(&text, c); err == nil || !strings.Contains(err.Error(), want) || text.Len() > 0 {
			t.Errorf("%v, and wrote %q; want %q", err, &text, want)
		}
	}
}

// A label may be a directory's name, which may be any bytes; a reader wants UTF-8, or reads nothing.
func TestLabelsAreUTF8(t *testing.T) {
	text := write(t, metrics.NewCounter(metrics.NewDesc("a_total", "Help.", "l").With("m", "caf\xe9"), "x\xff\xfey"))
	parser := expfmt.NewTextParser(model.UTF8Validation)
	if families, err := parser.TextToMetricFamilies(strings.NewReader(text)); err != nil || len(families) != 1 || !strings.Contains(text, "a_total{l=\"x\uFFFDy\",m=\"caf\uFFFD\"} 0") {
		t.Errorf("%v: %q", err, text)
	}
}

// Mistakes in the program are reported at once, with the metric's name.
func TestMisuse(t *testing.T) {
	for name, use := range map[string]func(){
		"two values":     func() { metrics.NewHistogram(metrics.NewDesc("m", ""), []float64{1, 1}) },
		"falling bounds": func() { metrics.NewHistogram(metrics.NewDesc("m", ""), []float64{2, 1}) },
		"infinite bound": func() { metrics.NewHistogram(metrics.NewDesc("m", ""), []float64{1, math.Inf(1)}) },
		"no bound":       func() { metrics.NewHistogram(metrics.NewDesc("m", ""), []float64{1, math.NaN()}) },
		"down":           func() { metrics.NewCounter(metrics.NewDesc("m", "")).Add(-1) },
		"missing label":  func() { write(t, metrics.NewCounter(metrics.NewDesc("m", "", "l"))) },
		"surplus label":  func() { write(t, metrics.NewCounter(metrics.NewDesc("m", ""), "v")) },
	} {
		t.Run(name, func(t *testing.T) {
			defer func() {
				if s, ok := recover().(string); !ok || !strings.Contains(s, "metrics: ") || !strings.Contains(s, "m") {
					t.Errorf("panicked with %q", s)
				}
			}()
			use()
		})
	}
}

// All of a histogram is of one moment, also while others observe.
func TestConcurrent(t *testing.T) {
	h := metrics.NewHistogram(metrics.NewDesc("h", "."), []float64{1})
	c := metrics.NewCounters(metrics.NewDesc("c", ".", "l"))
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			for range 200 {
				h.Observe(1)
				c.Of("x").Add(1)
			}
		})
		all.Go(func() {
			for range 20 {
				text := write(t, h, c)
				n := regexp.MustCompile(`(?m)^h\S* (\d+)$`).FindAllStringSubmatch(text, -1)
				if len(n) != 4 || n[0][1] != n[1][1] || n[1][1] != n[2][1] || n[2][1] != n[3][1] {
					t.Errorf("buckets, sum and count disagree: %s", text)
				}
			}
		})
	}
	all.Wait()
	if text := write(t, h, c); !strings.Contains(text, "h_count 800\n") || !strings.Contains(text, "c{l=\"x\"} 800\n") {
		t.Errorf("%s", text)
	}
}

// TestWithLabel: series get the label, unless they have it, and two collectors of the same metrics
// have one family.
func TestWithLabel(t *testing.T) {
	h := metrics.NewHistogram(metrics.NewDesc("h", "H."), []float64{1})
	h.Observe(0.5)
	one := collect(func(to *metrics.Sink) {
		to.Gauge(metrics.NewDesc("g", "G.", "a"), 1, "x")
		to.Gauge(metrics.NewDesc("own", "Own.").With("model", "mine"), 2)
		h.Collect(to)
	})
	got := write(t, metrics.WithLabel(one, "model", "m"), metrics.WithLabel(collect(func(to *metrics.Sink) {
		to.Gauge(metrics.NewDesc("g", "G.", "a"), 3, "x")
	}), "model", "n"))
	for _, want := range []string{`g{a="x",model="m"} 1`, `g{a="x",model="n"} 3`, `own{model="mine"} 2`, `h_bucket{model="m",le="1"} 1`} {
		if !strings.Contains(got, want) {
			t.Errorf("%s\nhas no %s", got, want)
		}
	}
	if strings.Count(got, "# HELP g ") != 1 {
		t.Errorf("%s\nhas a family twice", got)
	}
}
