package observe

import (
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/experts"
	"github.com/moeserve/moeserve/harvest"
)

// What listeners of a server parse: the names of events and of their fields.
func TestEventForms(t *testing.T) {
	var got []string
	to := func(e Event) {
		if time.Since(e.Time) > time.Minute {
			t.Errorf("%s happened at %v", e.Event, e.Time)
		}
		e.Time, e.Drain, e.Took = time.Time{}, min(e.Drain, 1), min(e.Took, 1)
		text, err := json.Marshal(e)
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, strings.Replace(string(text), `,"time":"0001-01-01T00:00:00Z"`, "", 1))
	}
	m, err := emulated.New(emulated.Options{Virtual: true, PeerLink: emulated.Link{Latency: time.Microsecond}, GPUs: slices.Repeat([]emulated.GPU{{MemoryBytes: 1 << 20, BytesPerSecond: 1e9}}, 2)})
	if err != nil {
		t.Fatal(err)
	}
	rt, err := harvest.New(harvest.Options{Machine: m, Peers: []device.Space{device.HBM(1)}, SlabBytes: 8 << 10, HeadroomBytes: -1, Events: HarvestEvents(to)})
	if err != nil {
		t.Fatal(err)
	}
	alloc := func(bytes int64) *harvest.Handle {
		h, err := rt.Alloc(bytes, harvest.Hints{Client: "experts"})
		if err != nil {
			t.Fatal(err)
		}
		return h
	}
	if err := rt.Free(alloc(4 << 10)); err != nil {
		t.Fatal(err)
	}
	if _, err := rt.Alloc(2<<20, harvest.Hints{Client: "kv"}); !errors.Is(err, harvest.ErrNoCapacity) {
		t.Fatal(err)
	}
	alloc(1 << 10)
	if err := rt.RegisterCallback(alloc(2<<10), func(harvest.Revocation) { panic("out of range") }); err != nil {
		t.Fatal(err)
	}
	c, err := rt.Reclaim(device.HBM(1), 1<<40, time.Second)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := rt.Exclude(device.HBM(1), errors.New("copies fail")); err != nil {
		t.Fatal(err)
	}
	if err := rt.Readmit(device.HBM(1)); err != nil {
		t.Fatal(err)
	}
	if err := rt.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	HarvestEvents(to).DeadlineMissed(harvest.DeadlineMissInfo{Slab: 3, Device: device.HBM(2), Reason: harvest.ReasonPressure, Err: errors.New("no")})
	l := ExpertEvents(to)
	l.Promoted(experts.MoveInfo{Layer: 0, Expert: 5, Device: device.HBM(1), Bytes: 100, Took: time.Second})
	l.Demoted(experts.MoveInfo{Layer: 3, Expert: 0, Device: device.HBM(1), Bytes: 100, Reason: "revoked"})
	l.Swapped(experts.SwapInfo{Layer: 3, In: 0, Out: 4})
	l.PeerFailed(experts.PeerInfo{Device: device.HBM(2), Err: errors.New("lost"), Excluded: true})
	want := []string{
		`{"event":"harvest.slab_allocated","device":"gpu1","slab":1,"bytes":8192}`,
		`{"event":"harvest.allocated","device":"gpu1","slab":1,"handle":1,"client":"experts","bytes":4096}`,
		`{"event":"harvest.freed","device":"gpu1","handle":1,"client":"experts","bytes":4096}`,
		`{"event":"harvest.refused","client":"kv","bytes":2097152,"error":"`,
		`{"event":"harvest.allocated","device":"gpu1","slab":1,"handle":2,"client":"experts","bytes":1024}`,
		`{"event":"harvest.allocated","device":"gpu1","slab":1,"handle":3,"client":"experts","bytes":2048}`,
		`{"event":"harvest.revocation_started","device":"gpu1","slab":1,"handles":2,"bytes":8192,"reason":"external"}`,
		`{"event":"harvest.revoked","device":"gpu1","handle":2,"client":"experts","bytes":1024,"reason":"external"}`,
		`{"event":"harvest.revoked","device":"gpu1","handle":3,"client":"experts","bytes":2048,"reason":"external"}`,
		`{"event":"harvest.callback_panicked","device":"gpu1","handle":3,"client":"experts","bytes":2048,"reason":"external","error":"out of range"}`,
		`{"event":"harvest.slab_released","device":"gpu1","slab":1,"bytes":8192,"reason":"external"}`,
		`{"event":"harvest.revocation_ended","device":"gpu1","slab":1,"handles":2,"bytes":8192,"reason":"external"`,
		`{"event":"harvest.peer_unhealthy","device":"gpu1","error":"copies fail"}`,
		`{"event":"harvest.peer_healthy","device":"gpu1"}`,
		`{"event":"harvest.deadline_missed","device":"gpu2","slab":3,"reason":"pressure","deadline_missed":true,"error":"slab 3 on gpu2: no"}`,
		`{"event":"experts.promoted","device":"gpu1","bytes":100,"layer":0,"expert":5,"took_ns":1}`,
		`{"event":"experts.demoted","device":"gpu1","bytes":100,"reason":"revoked","layer":3,"expert":0}`,
		`{"event":"experts.swapped","layer":3,"in":0,"out":4}`,
		`{"event":"experts.peer_failed","device":"gpu2","reason":"excluded","error":"lost"}`,
	}
	for i, w := range want {
		if i >= len(got) || !strings.HasPrefix(got[i], w) {
			t.Fatalf("event %d is not %s: %s", i, w, strings.Join(got, "\n"))
		}
	}
	if len(got) != len(want) {
		t.Errorf("%d events more: %s", len(got)-len(want), strings.Join(got, "\n"))
	}
}
