package harvest_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/harvest"
)

// TestLogEvents: what an operator reads, and that a second listener hears it all.
func TestLogEvents(t *testing.T) {
	m := machine(t, emulated.Options{GPUs: gpus(3, 8192), Virtual: true})
	var text bytes.Buffer
	log := slog.New(slog.NewTextHandler(&text, &slog.HandlerOptions{Level: slog.LevelDebug, ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey {
			return slog.Attr{}
		}
		return a
	}}))
	heard := map[string]int{}
	r := open(t, m, harvest.Options{SlabBytes: 1024, Events: harvest.Tee(harvest.LogEvents(log), harvest.EventListener{
		Allocated:         func(harvest.AllocInfo) { heard["allocated"]++ },
		Refused:           func(harvest.RefuseInfo) { heard["refused"]++ },
		Freed:             func(harvest.FreeInfo) { heard["freed"]++ },
		SlabAllocated:     func(harvest.SlabInfo) { heard["taken"]++ },
		SlabReleased:      func(harvest.SlabInfo) { heard["returned"]++ },
		RevocationStarted: func(harvest.RevocationInfo) { heard["began"]++ },
		Revoked:           func(harvest.RevokeInfo) { heard["revoked"]++ },
		RevocationEnded:   func(harvest.RevocationInfo) { heard["ended"]++ },
		DeadlineMissed:    func(harvest.DeadlineMissInfo) { heard["violated"]++ },
		PeerHealthChanged: func(harvest.PeerInfo) { heard["peer"]++ },
	})})
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	tick := func(now time.Duration) {
		t.Helper()
		_, err := r.Tick(now)
		must(err)
	}
	m.Inject(&emulated.Fault{Kind: emulated.FailCopy, Times: -1})
	a, err := r.Alloc(500, harvest.Hints{Client: "experts", Label: "layer 3 expert 1"})
	must(err)
	b, err := r.Alloc(500, harvest.Hints{Client: "kv", Label: "block 9"})
	must(err)
	if _, err := r.Alloc(9000, harvest.Hints{Client: "kv"}); !errors.Is(err, harvest.ErrNoCapacity) {
		t.Fatal(err)
	}
	must(r.Free(b))
	ref, _ := a.Acquire(harvest.NewOwner("expert fetch"))
	if ref.Handle() != a || !ref.Held() || a.Client() != "experts" {
		t.Errorf("a reference on %v, held %t", ref.Handle(), ref.Held())
	}
	c, err := reclaimMore(r, device.HBM(1), 1, time.Millisecond)
	must(err)
	tick(2 * time.Millisecond)
	ref.Release()
	if err := c.Wait(t.Context()); !errors.Is(err, harvest.ErrDeadline) {
		t.Fatal(err)
	}
	must(r.Close(t.Context())) // clearing fails thrice

	want := `level=DEBUG msg="harvest: slab allocated on peer" slab=1 device=gpu1 bytes=1024
level=DEBUG msg="harvest: allocated" handle=1 client=experts device=gpu1 bytes=500 slab=1
level=DEBUG msg="harvest: allocated" handle=2 client=kv device=gpu1 bytes=500 slab=1
level=DEBUG msg="harvest: refused" client=kv bytes=9000 err="harvest: alloc 9000 bytes for kv (unnamed): no peer has room: gpu1 has 7168 bytes free, of which 409 are headroom; gpu2 has 8192 bytes free, of which 409 are headroom"
level=DEBUG msg="harvest: freed" handle=2 client=kv drain=0s
level=DEBUG msg="harvest: revocation started" slab=1 device=gpu1 bytes=1024 handles=1 reason=external
level=WARN msg="harvest: deadline missed: handle 1 (layer 3 expert 1, 500 bytes on gpu1) is held by \"expert fetch\", for 2ms" slab=1 device=gpu1 reason=external
level=DEBUG msg="harvest: revoked" handle=1 client=experts reason=external drain=2ms
level=WARN msg="harvest: deadline missed: slab 1 on gpu1: scrub: device: copy on gpu1: stream \"harvest scrub gpu1\" (gpu1): 1024 bytes from host to gpu1; failed by fault injection: copy failed" slab=1 device=gpu1 reason=external
level=ERROR msg="harvest: slab released without scrubbing; weights or KV may be readable by the next user of the memory" slab=1 device=gpu1 bytes=1024 err="scrub: device: copy on gpu1: stream \"harvest scrub gpu1\" (gpu1): 1024 bytes from host to gpu1; failed by fault injection: copy failed"
level=INFO msg="harvest: peer memory released" slab=1 device=gpu1 bytes=1024 handles=1 reason=external took=2ms drain=2ms deadline_missed=true
`
	if diff := cmp.Diff(want, text.String()); diff != "" {
		t.Errorf("log (-want +got):\n%s", diff)
	}
	counts := map[string]int{"taken": 1, "allocated": 2, "refused": 1, "freed": 1, "began": 1, "violated": 2, "revoked": 1, "returned": 1, "ended": 1}
	if diff := cmp.Diff(counts, heard); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
}

func TestLogPeers(t *testing.T) {
	m := machine(t, emulated.Options{Virtual: true})
	var text bytes.Buffer
	log := slog.New(slog.NewJSONHandler(&text, nil))
	r := open(t, m, harvest.Options{Events: harvest.LogEvents(log)})
	if err := errors.Join(r.Exclude(device.HBM(2), errors.New("xid 79")), r.Readmit(device.HBM(2))); err != nil {
		t.Fatal(err)
	}
	for i, want := range []string{"harvest: peer disabled; what it held is fetched from host memory", "harvest: peer enabled again"} {
		var line struct{ Msg, Device string }
		if err := json.NewDecoder(bytes.NewReader(bytes.Split(text.Bytes(), []byte("\n"))[i])).Decode(&line); err != nil || line.Msg != want || line.Device != "gpu2" {
			t.Errorf("%+v, %v; want %q", line, err, want)
		}
	}
}

// TestStateJSON: what /debug shows of one handle.
func TestStateJSON(t *testing.T) {
	m := machine(t, emulated.Options{GPUs: gpus(2, 8192), Virtual: true})
	r := open(t, m, harvest.Options{Peers: peers12[:1], SlabBytes: 1024})
	if _, err := r.Alloc(500, harvest.Hints{Client: "experts", Label: "layer 3 expert 1", Cost: time.Millisecond}); err != nil {
		t.Fatal(err)
	}
	got, err := json.Marshal(r.State())
	if err != nil {
		t.Fatal(err)
	}
	want := `{"now_ns":0,"peers":[{"device":"gpu1","capacity_bytes":8192,"free_bytes":7168,"other_processes_bytes":0,"headroom_bytes":409,"borrowable_bytes":6759,` +
		`"used_bytes":512,"bytes_by_client":{"experts":512},"slab_free_bytes":512,"draining_bytes":0,"largest_free_extent_bytes":512,"fragmentation":0,"utilization":0,"bandwidth":0,"churn_per_minute":0,"health":"ok",` +
		`"slabs":[{"id":1,"bytes":1024,"segments":[{"offset":0,"bytes":512,"handle":1,"client":"experts","label":"layer 3 expert 1","references":0,"reload_cost_ns":1000000}]}]}],` +
		`"clients":{"experts":{"bytes":512,"handles":1,"displaced_bytes":0}},"draining":0,"revocations":{"external":0,"policy":0,"pressure":0,"shutdown":0,"unhealthy":0},"callback_panics":0}`
	if diff := cmp.Diff(want, string(got)); diff != "" {
		t.Error(diff)
	}
	for reason, want := range map[harvest.Reason]string{harvest.ReasonEmpty: `"empty"`, harvest.ReasonShutdown: `"shutdown"`, 99: `"Reason(99)"`} {
		if got, err := json.Marshal(reason); err != nil || string(got) != want {
			t.Errorf("reason %d is %s, %v", uint8(reason), got, err)
		}
	}
}
