package dispatch

import (
	"testing"

	"pgregory.net/rapid"

	"github.com/moeserve/moeserve/device"
)

// shared is a link whose requests take turns.
type shared struct {
	core Core
	link int
	addr device.Addr
	// flight are the chunks that the device has.
	flight []Action
	// launched counts the bytes of each request.
	launched map[*Request]int64
}

func newShared(chunk int64) *shared {
	s := &shared{launched: map[*Request]int64{}}
	s.link = s.core.AddLink(Link{From: 1, To: device.Host, ChunkBytes: chunk, Depth: 1})
	return s
}

func (s *shared) submit(t testing.TB, bytes int64) *Request {
	r := &Request{From: 1, To: device.Host, Class: 1, TakesTurns: true}
	r.Add(Piece{Src: device.Range{Addr: s.addr, Bytes: bytes}, Dst: device.Range{Addr: 1<<50 + s.addr, Bytes: bytes}})
	s.addr += device.Addr(bytes) + 1
	if err := s.core.Submit(r, nil); err != nil {
		t.Fatal(err)
	}
	s.act()
	return r
}

func (s *shared) act() {
	for a, ok := s.core.Next(); ok; a, ok = s.core.Next() {
		if a.Kind == Launch {
			s.flight = append(s.flight, a)
			s.launched[a.Chunk.Request] += a.Chunk.Bytes
		}
	}
}

// land ends the first chunk in flight, and returns its request.
func (s *shared) land() *Request {
	a := s.flight[0]
	s.flight = s.flight[1:]
	s.core.Landed(s.link, a.Slot)
	s.act()
	return a.Chunk.Request
}

// TestTurnsOfALargeRequest: a large request behind a steady stream of small ones, of which
// some always wait, has its share of the link, whatever their size.
func TestTurnsOfALargeRequest(t *testing.T) {
	const chunk, total = 64, 100_000
	for _, size := range []int64{1, 10, 63, 64, 65, 300} {
		for _, n := range []int{1, 4} {
			s := newShared(chunk)
			large := s.submit(t, total)
			small, others := make([]*Request, n), int64(0)
			for s.launched[large]+others < total/2 {
				for i, r := range small {
					if r == nil || s.launched[r] == size {
						others += size
						small[i] = s.submit(t, size)
					}
				}
				s.land()
			}
			share, fair := float64(s.launched[large])/float64(s.launched[large]+others), 1/float64(n+1)
			if share < 0.9*fair {
				t.Errorf("beside %d small ones of %d bytes, a large request has launched %.0f %% of all bytes", n, size, 100*share)
			}
		}
	}
}

// TestTurnsAreFair: whatever comes, two requests that both have bytes left never differ by
// more than a few chunks in what they have launched since then.
func TestTurnsAreFair(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		chunk := rapid.Int64Range(1, 100).Draw(rt, "chunk")
		s := newShared(chunk)
		var all []*Request
		// began has, for each two requests, what both had launched when the later one came.
		type pair struct{ a, b *Request }
		began := map[pair][2]int64{}
		rt.Repeat(map[string]func(*rapid.T){
			"submit": func(rt *rapid.T) {
				r := s.submit(t, rapid.Int64Range(1, 2000).Draw(rt, "bytes"))
				for _, o := range all {
					began[pair{o, r}] = [2]int64{s.launched[o], 0}
				}
				all = append(all, r)
			},
			"land": func(rt *rapid.T) {
				if len(s.flight) == 0 {
					rt.Skip("idle")
				}
				s.land()
			},
			"": func(rt *rapid.T) {
				for p, at := range began {
					if s.launched[p.a] == p.a.Bytes() || s.launched[p.b] == p.b.Bytes() {
						delete(began, p) // ended
						continue
					}
					a, b := s.launched[p.a]-at[0], s.launched[p.b]-at[1]
					if a-b > 3*chunk || b-a > 3*chunk {
						rt.Fatalf("of two requests, one has launched %d bytes and the other %d, in chunks of %d", a, b, chunk)
					}
				}
			},
		})
	})
}

// TestTurnsAfterRedirect: a request that comes to a link by Redirect has no claim to what others launched there before.
func TestTurnsAfterRedirect(t *testing.T) {
	const chunk, total = 10, 10_000
	s := newShared(chunk)
	other := s.core.AddLink(Link{From: 2, To: device.Host, ChunkBytes: chunk, Depth: 1})
	first := s.submit(t, total)
	moved := &Request{From: 2, To: device.Host, Class: 1, TakesTurns: true}
	for i, r := range []*Request{{From: 2, To: device.Host, Class: 2}, moved} { // the first keeps the link busy
		r.Add(Piece{Src: device.Range{Addr: 1 << 40, Bytes: total}, Dst: device.Range{Addr: 1<<51 + device.Addr(i*total), Bytes: total}})
		if err := s.core.Submit(r, nil); err != nil {
			t.Fatal(err)
		}
		s.act()
	}
	busy := s.flight[1]
	if busy.Link != other || s.launched[moved] > 0 {
		t.Fatalf("link %d is busy, and of the request to be moved %d bytes are launched", busy.Link, s.launched[moved])
	}
	s.flight = s.flight[:1]
	for s.launched[first] < total/2 {
		s.land()
	}
	before := s.launched[first]
	if !s.core.Redirect(moved, 1, []Piece{{Src: device.Range{Addr: 1 << 41, Bytes: total}, Dst: device.Range{Addr: 1<<51 + total, Bytes: total}}}) {
		t.Fatal("not redirected")
	}
	s.act()
	for s.launched[moved] < total/4 {
		s.land()
	}
	if n, want := s.launched[first]-before, s.launched[moved]; n < want-3*chunk {
		t.Errorf("since a request of %d launched bytes came, the other one on the link has launched %d", want, n)
	}
}
