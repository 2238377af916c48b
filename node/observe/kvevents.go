package observe

import (
	"github.com/moeserve/moeserve/kvcache/events"
	"github.com/moeserve/moeserve/metrics"
)

// KVEvents are counters of the publisher of KV events.
type KVEvents struct {
	events.Stats
	// Enabled: there is a publisher.
	Enabled bool
}

// KVEvents reads the publisher of KV events.
func (o *Observer) KVEvents() KVEvents {
	if o.p.Events == nil {
		return KVEvents{}
	}
	return KVEvents{o.p.Events.Stats(), true}
}

var (
	kvEventBatches     = metrics.NewDesc("moeserve_kv_events_batches_total", "Batches of KV events that were published.")
	kvEvents           = metrics.NewDesc("moeserve_kv_events_total", "KV events in these batches; each is of one or more blocks.")
	kvEventsDropped    = metrics.NewDesc("moeserve_kv_events_dropped_batches_total", "Batches that found the publisher's queue full, so that no subscriber got them; the next one says that all blocks are cleared.")
	kvEventsMissed     = metrics.NewDesc("moeserve_kv_events_missed_batches_total", "Batches that were not sent to a subscriber that was too far behind, each counted for each subscriber.")
	kvEventSubscribers = metrics.NewDesc("moeserve_kv_events_subscribers", "Subscribers of KV events that are connected.")
	kvEventReplays     = metrics.NewDesc("moeserve_kv_events_replays_total", "Replays of KV events that were asked for.")
)

func (k KVEvents) collect(to *metrics.Sink) {
	if !k.Enabled {
		return
	}
	to.Counter(kvEventBatches, float64(k.Batches))
	to.Counter(kvEvents, float64(k.Events))
	to.Counter(kvEventsDropped, float64(k.Dropped))
	to.Counter(kvEventsMissed, float64(k.Missed))
	to.Gauge(kvEventSubscribers, float64(k.Subscribers))
	to.Counter(kvEventReplays, float64(k.Replays))
}
