package dispatch

import (
	"fmt"
	"testing"

	"github.com/moeserve/moeserve/device"
)

// BenchmarkWave is the life of so many requests that wait for one point, as the fetches of
// a layer do.
func BenchmarkWave(b *testing.B) {
	for _, n := range []int{8, 64} {
		b.Run(fmt.Sprintf("requests=%d", n), func(b *testing.B) {
			var c Core
			c.AddLink(Link{From: device.Host, To: device.HBM(0), ChunkBytes: 1 << 20, Depth: 2})
			after := []device.Point{{Fence: &fence{name: "readers"}, Value: 1}}
			requests := make([]Request, n)
			done := make([]fence, n)
			piece := Piece{Src: device.Range{Addr: 1, Bytes: 1 << 20}, Dst: device.Range{Addr: 1 << 40, Bytes: 1 << 20}}
			act := func() {
				for a, ok := c.Next(); ok; a, ok = c.Next() {
					if a.Kind == Launch {
						c.Landed(a.Link, a.Slot)
					}
				}
			}
			b.ReportAllocs()
			for b.Loop() {
				for i := range requests {
					r := &requests[i]
					r.Reset()
					r.From, r.To, r.Class = device.Host, device.HBM(0), uint8(1+i%2)
					r.Done = device.Point{Fence: &done[i], Value: 1}
					r.Add(piece)
					if err := c.Submit(r, after); err != nil {
						b.Fatal(err)
					}
					act()
				}
				for i := range requests {
					c.RaiseClass(&requests[i], 2)
				}
				c.Reached(after[0])
				act()
			}
		})
	}
}
