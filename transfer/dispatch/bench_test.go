package dispatch

import (
	"fmt"
	"testing"
	"time"

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

// BenchmarkRelays is what the core needs for each chunk of a large request that all links carry.
func BenchmarkRelays(b *testing.B) {
	for _, gpus := range []int{2, 8} {
		b.Run(fmt.Sprintf("gpus=%d", gpus), func(b *testing.B) {
			var c Core
			for g := range gpus {
				c.AddLink(Link{From: device.Host, To: device.HBM(g), ChunkBytes: 8 << 20, Depth: 2, WindowBytes: 4 << 20, BytesPerSecond: 54e9, RelayFrom: 1 << 20, RelayChunkBytes: 5 << 20})
			}
			for g := 1; g < gpus; g++ {
				if err := c.AddRelay(Relay{Link: g, Buffers: 3, BufferBytes: 5 << 20}); err != nil {
					b.Fatal(err)
				}
				if _, err := c.AddHop(g, Link{From: device.HBM(g), To: device.HBM(0), BytesPerSecond: 395e9}); err != nil {
					b.Fatal(err)
				}
			}
			var r Request
			var flights []Action
			now := time.Duration(0)
			act := func() {
				for a, ok := c.Next(); ok; a, ok = c.Next() {
					if a.Kind == Launch {
						flights = append(flights, a)
					}
				}
			}
			b.ReportAllocs()
			for b.Loop() {
				if len(flights) == 0 {
					r.Reset()
					r.From, r.To = device.Host, device.HBM(0)
					r.Add(Piece{Src: device.Range{Addr: 1, Bytes: 1 << 40}, Dst: device.Range{Addr: 1 << 50, Bytes: 1 << 40}})
					if err := c.Submit(&r, nil); err != nil {
						b.Fatal(err)
					}
					act()
				}
				a := flights[0]
				flights = flights[:copy(flights, flights[1:])]
				now += 10 * time.Microsecond
				c.At(now)
				c.Landed(a.Link, a.Slot)
				act()
			}
		})
	}
}
