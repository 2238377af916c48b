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
				r.Label, r.Priority, r.Src.Bytes = name, p, bytes
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
	if Host := (Request{From: device.Host, To: device.HBM(1)}); Host.name() != "copy of 0 bytes from host to gpu1" {
		t.Errorf("a request without label is named %q", Host.name())
	}
}
