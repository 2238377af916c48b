package observe

import (
	"github.com/moeserve/moeserve/metrics"
	"github.com/moeserve/moeserve/node/sleeping"
)

// Sleep is whether a model sleeps, and what sleep and wake have done since it was opened.
type Sleep struct {
	// Level is 0 awake, 1 where weights are in host memory, 2 where they are in none.
	Level sleeping.Level
	// Weights and KVCache: this memory is given back.
	Weights bool
	KVCache bool
	// Sleeps and Wakes that ended well.
	Sleeps int64
	Wakes  int64
	// SleepSeconds and WakeSeconds are how long they took, CopySeconds the part of both in which
	// weights were copied, CopiedBytes.
	SleepSeconds float64
	WakeSeconds  float64
	CopySeconds  float64
	CopiedBytes  int64
	// HostBytes is the pinned host memory for the copy of the weights.
	HostBytes int64
}

// Asleep reports whether any memory is given back.
func (s Sleep) Asleep() bool { return s.Level != sleeping.Awake }

var (
	sleepLevel   = metrics.NewDesc("moeserve_sleep_level", "0: the model is awake; 1: it sleeps with its weights in host memory; 2: without weights.")
	sleepCount   = metrics.NewDesc("moeserve_sleeps_total", "How often the model was put to sleep, and woken.", "what")
	sleepSeconds = metrics.NewDesc("moeserve_sleep_seconds_total", "Time that sleeps and wakes took, without the wait for running requests; copy: the part of both in which weights were copied.", "what")
	sleepBytes   = metrics.NewDesc("moeserve_sleep_copied_bytes_total", "Bytes of weights copied to host memory by sleeps, and back by wakes.")
	sleepHost    = metrics.NewDesc("moeserve_sleep_host_bytes", "Pinned host memory for the weights of the model while it sleeps.")
)

func (s Sleep) collect(to *metrics.Sink) {
	to.Gauge(sleepLevel, float64(s.Level))
	to.Counter(sleepCount, float64(s.Sleeps), "sleep")
	to.Counter(sleepCount, float64(s.Wakes), "wake")
	to.Counter(sleepSeconds, s.SleepSeconds, "sleep")
	to.Counter(sleepSeconds, s.WakeSeconds, "wake")
	to.Counter(sleepSeconds, s.CopySeconds, "copy")
	to.Counter(sleepBytes, float64(s.CopiedBytes))
	to.Gauge(sleepHost, float64(s.HostBytes))
}
