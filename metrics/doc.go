// Package metrics has counters and histograms, and writes them and what collectors read
// elsewhere as text that Prometheus scrapes (text format 0.0.4): with help and type, families
// by name, and series by their labels' values.
//
// It has what moeserve's own metrics need, and what dashboards know of every Go process: Runtime
// and Process have the names that Prometheus's client library gives these. The library itself is
// not used: it brings fifty packages, Protobuf among them, an eighth of what is compiled before
// the first answer of go run. Tests compare with what it writes, byte by byte.
//
// It does not speak HTTP, does not know OpenMetrics or Protobuf, and has no registry: Write takes
// the collectors whose metrics are needed. Counters and histograms may be used by any number of
// goroutines, also while they are written.
//
//	steps := metrics.NewHistogram(metrics.NewDesc("moeserve_step_duration_seconds", "Steps of the engine."), []float64{.01, .1, 1})
//	steps.Observe(took.Seconds())
//	err := metrics.Write(w, steps, metrics.Runtime())
package metrics
