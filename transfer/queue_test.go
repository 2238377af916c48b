package transfer

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"

	"github.com/moeserve/moeserve/device"
)

// TestQueue runs scripts of:
//
//	push name=A bytes=20 priority=prefetch [blocked]
//	ready name=A
//	promote name=A priority=needed
//	remove name=A
//	next [n=3] [chunk=8]    what goes to the device, as name[offset,end)
func TestQueue(t *testing.T) {
	datadriven.Walk(t, "testdata/queue", func(t *testing.T, path string) {
		var q queue
		requests := map[string]*request{}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			var name, priority string
			var bytes int64
			n, chunkBytes := 1, int64(8)
			d.MaybeScanArgs(t, "name", &name)
			d.MaybeScanArgs(t, "priority", &priority)
			d.MaybeScanArgs(t, "bytes", &bytes)
			d.MaybeScanArgs(t, "n", &n)
			d.MaybeScanArgs(t, "chunk", &chunkBytes)
			p := Priority(0)
			for priority != "" && p.String() != priority {
				p++
			}
			switch d.Cmd {
			case "push":
				r := &request{ready: !d.HasArg("blocked")}
				r.Label, r.Priority, r.Src.Bytes = Text(name), p, bytes
				requests[name] = r
				q.push(r)
			case "ready":
				requests[name].ready = true
			case "promote":
				q.promote(requests[name], p)
			case "remove":
				return fmt.Sprintln(q.remove(requests[name]))
			case "next":
				var out []string
				for range n {
					c, ok := q.next(chunkBytes)
					if !ok {
						out = append(out, "nothing")
						break
					}
					out = append(out, fmt.Sprintf("%s[%d,%d)", c.req.Label, c.offset, c.offset+c.n))
				}
				return strings.Join(out, " ") + "\n"
			default:
				d.Fatalf(t, "unknown command %s", d.Cmd)
			}
			return ""
		})
		if left := q.all(); slices.ContainsFunc(left, func(r *request) bool { return r.issued == r.Src.Bytes }) {
			t.Errorf("a request with nothing left is still queued: %v", left)
		}
	})
}

func TestPriorityOrder(t *testing.T) {
	got := []Priority{Needed, KVReload, KVStore, Prefetch, Rebalance}
	if !slices.IsSortedFunc(got, func(a, b Priority) int { return int(b) - int(a) }) {
		t.Errorf("priorities %v do not fall", got)
	}
	if s := Priority(99).String(); s != "priority(99)" {
		t.Errorf("an unknown priority prints as %q", s)
	}
	if Host := (Request{Dst: device.Region{Space: device.HBM(1)}}); Host.name() != "copy of 0 bytes from host to gpu1" {
		t.Errorf("a request without label is named %q", Host.name())
	}
}

// TestPart: a request is cut into as few chunks as may be, none of them much smaller
// than the others.
func TestPart(t *testing.T) {
	for _, c := range []struct{ bytes, chunk, first, count int64 }{
		{8 << 20, 8 << 20, 8 << 20, 1},
		{8<<20 + 256, 8 << 20, 4<<20 + 256, 2},
		{311_000_000, 61 << 20, 62_200_064, 5},
		{352_321_536, 61 << 20, 58_720_256, 6},
		{10, 8, 8, 2}, // no multiple of 256 fits
		{100, 1 << 20, 100, 1},
	} {
		first, count, least := part(c.bytes, c.chunk), int64(0), c.bytes
		for left := c.bytes; left > 0; count++ {
			n := part(left, c.chunk)
			if n <= 0 || n > c.chunk {
				t.Fatalf("a chunk of %d of %d bytes", n, left)
			}
			least, left = min(least, n), left-n
		}
		if first != c.first || count != c.count {
			t.Errorf("%d bytes: the first of %d chunks has %d, want %d and %d", c.bytes, count, first, c.count, c.first)
		}
		if c.chunk > 1<<20 && count > 1 && least < first*9/10 {
			t.Errorf("%d bytes: a chunk of %d beside one of %d", c.bytes, least, first)
		}
	}
}
