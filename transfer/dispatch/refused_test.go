package dispatch_test

import (
	"errors"
	"testing"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/transfer/dispatch"
)

// TestRefusedPrefix: what lands behind a chunk that was refused is no prefix of the request.
func TestRefusedPrefix(t *testing.T) {
	var c dispatch.Core
	c.AddLink(dispatch.Link{From: device.Host, To: device.HBM(0), ChunkBytes: 8 << 20, Depth: 2})
	r := &dispatch.Request{From: device.Host, To: device.HBM(0)}
	r.Add(dispatch.Piece{Dst: device.Range{Addr: 1 << 40, Bytes: 16 << 20}, Src: device.Range{Addr: 1 << 30, Bytes: 16 << 20}})
	if err := c.Submit(r, nil); err != nil {
		t.Fatal(err)
	}
	finished := false
	for a, ok := c.Next(); ok; a, ok = c.Next() {
		switch {
		case a.Kind == dispatch.Launch && a.Slot == 0:
			c.Refused(0, 0, errors.New("refused"))
		case a.Kind == dispatch.Launch:
			c.Landed(0, a.Slot)
		case a.Kind == dispatch.Recover:
			c.Recovered(0, nil)
		case a.Kind == dispatch.Finish:
			finished = true
		}
	}
	if !finished || r.Landed() != 0 {
		t.Errorf("ended %t, with %d bytes", finished, r.Landed())
	}
}

// TestSmallParts: chunks of many small parts count for the window by the time that these take.
func TestSmallParts(t *testing.T) {
	for _, c := range []struct {
		partBytes   int64
		least, most int
	}{{0, 10, 32}, {110 << 10, 2, 2}} {
		var core dispatch.Core
		core.AddLink(dispatch.Link{From: device.Host, To: device.HBM(0), ChunkBytes: 8 << 20, Depth: 2, WindowBytes: 4400 << 10, PartBytes: c.partBytes})
		r := &dispatch.Request{From: device.Host, To: device.HBM(0)}
		for i := range device.Addr(4096) {
			r.Add(dispatch.Piece{Dst: device.Range{Addr: 1<<40 + i<<13, Bytes: 4096}, Src: device.Range{Addr: 1<<30 + i<<13, Bytes: 4096}})
		}
		if err := core.Submit(r, nil); err != nil {
			t.Fatal(err)
		}
		launched := 0
		for a, ok := core.Next(); ok; a, ok = core.Next() {
			if a.Kind == dispatch.Launch {
				launched++
			}
		}
		if launched < c.least || launched > c.most {
			t.Errorf("%d chunks are in flight, want %d to %d", launched, c.least, c.most)
		}
	}
}
