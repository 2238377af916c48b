package metrics

import (
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"time"
)

// Runtime collects what Go's runtime says of memory, garbage collection and goroutines, under the
// names that Prometheus's client library has for it.
func Runtime() Collector { return runtimeCollector{} }

type runtimeCollector struct{}

var (
	goroutines = NewDesc("go_goroutines", "Number of goroutines that currently exist.")
	threads    = NewDesc("go_threads", "Number of OS threads created.")
	pauses     = NewDesc("go_gc_duration_seconds", "A summary of the wall-time pause (stop-the-world) duration in garbage collection cycles.")
	lastGC     = NewDesc("go_memstats_last_gc_time_seconds", "Number of seconds since 1970 of last garbage collection.")
	goVersion  = NewDesc("go_info", "Information about the Go environment.").With("version", runtime.Version())

	// readings are the metrics that are sums of what runtime/metrics has.
	readings = []struct {
		desc    *Desc
		kind    kind
		sources []string
	}{
		{
			NewDesc("go_gc_gogc_percent", "Heap size target percentage configured by the user, otherwise 100. This value is set by the GOGC environment variable, and the runtime/debug.SetGCPercent function. Sourced from /gc/gogc:percent."),
			gauge,
			[]string{"/gc/gogc:percent"},
		},
		{
			NewDesc("go_gc_gomemlimit_bytes", "Go runtime memory limit configured by the user, otherwise math.MaxInt64. This value is set by the GOMEMLIMIT environment variable, and the runtime/debug.SetMemoryLimit function. Sourced from /gc/gomemlimit:bytes."),
			gauge,
			[]string{"/gc/gomemlimit:bytes"},
		},
		{
			NewDesc("go_memstats_alloc_bytes", "Number of bytes allocated in heap and currently in use. Equals to /memory/classes/heap/objects:bytes."),
			gauge,
			[]string{"/memory/classes/heap/objects:bytes"},
		},
		{
			NewDesc("go_memstats_alloc_bytes_total", "Total number of bytes allocated in heap until now, even if released already. Equals to /gc/heap/allocs:bytes."),
			counter,
			[]string{"/gc/heap/allocs:bytes"},
		},
		{
			NewDesc("go_memstats_buck_hash_sys_bytes", "Number of bytes used by the profiling bucket hash table. Equals to /memory/classes/profiling/buckets:bytes."),
			gauge,
			[]string{"/memory/classes/profiling/buckets:bytes"},
		},
		{
			NewDesc("go_memstats_frees_total", "Total number of heap objects frees. Equals to /gc/heap/frees:objects + /gc/heap/tiny/allocs:objects."),
			counter,
			[]string{"/gc/heap/frees:objects", "/gc/heap/tiny/allocs:objects"},
		},
		{
			NewDesc("go_memstats_gc_sys_bytes", "Number of bytes used for garbage collection system metadata. Equals to /memory/classes/metadata/other:bytes."),
			gauge,
			[]string{"/memory/classes/metadata/other:bytes"},
		},
		{
			NewDesc("go_memstats_heap_alloc_bytes", "Number of heap bytes allocated and currently in use, same as go_memstats_alloc_bytes. Equals to /memory/classes/heap/objects:bytes."),
			gauge,
			[]string{"/memory/classes/heap/objects:bytes"},
		},
		{
			NewDesc("go_memstats_heap_idle_bytes", "Number of heap bytes waiting to be used. Equals to /memory/classes/heap/released:bytes + /memory/classes/heap/free:bytes."),
			gauge,
			[]string{"/memory/classes/heap/released:bytes", "/memory/classes/heap/free:bytes"},
		},
		{
			NewDesc("go_memstats_heap_inuse_bytes", "Number of heap bytes that are in use. Equals to /memory/classes/heap/objects:bytes + /memory/classes/heap/unused:bytes"),
			gauge,
			[]string{"/memory/classes/heap/objects:bytes", "/memory/classes/heap/unused:bytes"},
		},
		{
			NewDesc("go_memstats_heap_objects", "Number of currently allocated objects. Equals to /gc/heap/objects:objects."),
			gauge,
			[]string{"/gc/heap/objects:objects"},
		},
		{
			NewDesc("go_memstats_heap_released_bytes", "Number of heap bytes released to OS. Equals to /memory/classes/heap/released:bytes."),
			gauge,
			[]string{"/memory/classes/heap/released:bytes"},
		},
		{
			NewDesc("go_memstats_heap_sys_bytes", "Number of heap bytes obtained from system. Equals to /memory/classes/heap/objects:bytes + /memory/classes/heap/unused:bytes + /memory/classes/heap/released:bytes + /memory/classes/heap/free:bytes."),
			gauge,
			[]string{"/memory/classes/heap/objects:bytes", "/memory/classes/heap/unused:bytes", "/memory/classes/heap/released:bytes", "/memory/classes/heap/free:bytes"},
		},
		{
			NewDesc("go_memstats_mallocs_total", "Total number of heap objects allocated, both live and gc-ed. Semantically a counter version for go_memstats_heap_objects gauge. Equals to /gc/heap/allocs:objects + /gc/heap/tiny/allocs:objects."),
			counter,
			[]string{"/gc/heap/allocs:objects", "/gc/heap/tiny/allocs:objects"},
		},
		{
			NewDesc("go_memstats_mcache_inuse_bytes", "Number of bytes in use by mcache structures. Equals to /memory/classes/metadata/mcache/inuse:bytes."),
			gauge,
			[]string{"/memory/classes/metadata/mcache/inuse:bytes"},
		},
		{
			NewDesc("go_memstats_mcache_sys_bytes", "Number of bytes used for mcache structures obtained from system. Equals to /memory/classes/metadata/mcache/inuse:bytes + /memory/classes/metadata/mcache/free:bytes."),
			gauge,
			[]string{"/memory/classes/metadata/mcache/inuse:bytes", "/memory/classes/metadata/mcache/free:bytes"},
		},
		{
			NewDesc("go_memstats_mspan_inuse_bytes", "Number of bytes in use by mspan structures. Equals to /memory/classes/metadata/mspan/inuse:bytes."),
			gauge,
			[]string{"/memory/classes/metadata/mspan/inuse:bytes"},
		},
		{
			NewDesc("go_memstats_mspan_sys_bytes", "Number of bytes used for mspan structures obtained from system. Equals to /memory/classes/metadata/mspan/inuse:bytes + /memory/classes/metadata/mspan/free:bytes."),
			gauge,
			[]string{"/memory/classes/metadata/mspan/inuse:bytes", "/memory/classes/metadata/mspan/free:bytes"},
		},
		{
			NewDesc("go_memstats_next_gc_bytes", "Number of heap bytes when next garbage collection will take place. Equals to /gc/heap/goal:bytes."),
			gauge,
			[]string{"/gc/heap/goal:bytes"},
		},
		{
			NewDesc("go_memstats_other_sys_bytes", "Number of bytes used for other system allocations. Equals to /memory/classes/other:bytes."),
			gauge,
			[]string{"/memory/classes/other:bytes"},
		},
		{
			NewDesc("go_memstats_stack_inuse_bytes", "Number of bytes obtained from system for stack allocator in non-CGO environments. Equals to /memory/classes/heap/stacks:bytes."),
			gauge,
			[]string{"/memory/classes/heap/stacks:bytes"},
		},
		{
			NewDesc("go_memstats_stack_sys_bytes", "Number of bytes obtained from system for stack allocator. Equals to /memory/classes/heap/stacks:bytes + /memory/classes/os-stacks:bytes."),
			gauge,
			[]string{"/memory/classes/heap/stacks:bytes", "/memory/classes/os-stacks:bytes"},
		},
		{
			NewDesc("go_memstats_sys_bytes", "Number of bytes obtained from system. Equals to /memory/classes/total:byte."),
			gauge,
			[]string{"/memory/classes/total:bytes"},
		},
		{
			NewDesc("go_sched_gomaxprocs_threads", "The current runtime.GOMAXPROCS setting, or the number of operating system threads that can execute user-level Go code simultaneously. Sourced from /sched/gomaxprocs:threads."),
			gauge,
			[]string{"/sched/gomaxprocs:threads"},
		},
	}
)

// Collect implements Collector.
func (runtimeCollector) Collect(to *Sink) {
	to.Gauge(goroutines, float64(runtime.NumGoroutine()))
	created, _ := runtime.ThreadCreateProfile(nil)
	to.Gauge(threads, float64(created))
	to.Gauge(goVersion, 1)

	gc := debug.GCStats{PauseQuantiles: make([]time.Duration, 5)}
	debug.ReadGCStats(&gc)
	d := distribution{sum: gc.PauseTotal.Seconds(), count: uint64(gc.NumGC)}
	for i, p := range gc.PauseQuantiles {
		d.points = append(d.points, point{float64(i) / float64(len(gc.PauseQuantiles)-1), p.Seconds()})
	}
	to.add(pauses, summary, series{distribution: d})
	to.Gauge(lastGC, float64(gc.LastGC.UnixNano())/1e9)

	var samples []metrics.Sample
	for _, r := range readings {
		for _, name := range r.sources {
			samples = append(samples, metrics.Sample{Name: name})
		}
	}
	metrics.Read(samples)
	for _, r := range readings {
		v := 0.0
		for _, s := range samples[:len(r.sources)] {
			if s.Value.Kind() == metrics.KindUint64 { // else another Go has it no more
				v += float64(s.Value.Uint64())
			}
		}
		samples = samples[len(r.sources):]
		to.add(r.desc, r.kind, series{value: v})
	}
}
