package harvest

import (
	"slices"
	"testing"

	"github.com/moeserve/moeserve/device"
)

func TestRoom(t *testing.T) {
	type span struct {
		off, bytes int64
		state      handleState
	}
	lay := func(bytes int64, spans ...span) *slab {
		s := &slab{segments: newSegments(bytes), handles: map[int64]*Handle{}}
		at := int64(0)
		for _, p := range append(spans, span{off: bytes}) { // with the gap before each
			if p.off > at {
				s.segments.allocate(at, p.off-at)
			}
			if p.bytes > 0 {
				s.segments.allocate(p.off, p.bytes)
			}
			at = p.off + p.bytes
		}
		at = 0
		for _, p := range append(spans, span{off: bytes}) {
			if p.off > at {
				s.segments.release(at)
			}
			at = p.off + p.bytes
		}
		for _, p := range spans {
			if p.state == freeing {
				s.freeing++
			}
			s.handles[p.off] = &Handle{account: allocation{slab: s, offset: p.off, state: p.state}}
		}
		return s
	}
	others := lay(4096)
	others.owner = "kv"
	leaving := lay(4096)
	leaving.draining = &revocation{}
	for _, c := range []struct {
		name  string
		spare int64
		slabs []*slab
		want  int
	}{
		{"nothing", 0, nil, 0},
		{"less than nothing", -4096, nil, 0},
		{"spare", 1600, nil, 3},
		{"an empty slab", 0, []*slab{lay(1024)}, 2},
		{"before, between and behind", 0, []*slab{lay(4096, span{512, 512, live}, span{2048, 1024, live})}, 1 + 2 + 2},
		{"holes too small", 0, []*slab{lay(1792, span{256, 512, live}, span{1024, 512, live})}, 0},
		{"what drains will be free, with the holes beside it", 0, []*slab{lay(1792, span{256, 512, freeing}, span{1024, 512, live})}, 2},
		{"a slab that is given back", 0, []*slab{leaving, lay(512)}, 1},
		{"a slab that is another's", 0, []*slab{others, lay(512)}, 1},
		{"all together", 512, []*slab{lay(512), lay(512, span{0, 512, live})}, 2},
	} {
		// 400 bytes take 512.
		r := &Runtime{control: &controller{rules: rules{ownSlabBytes: map[string]int64{"kv": 4096}}, peers: []*peer{{space: device.HBM(1), free: c.spare + 100, headroom: 100, slabs: c.slabs}}}}
		if got := r.Room("experts", 400); got[device.HBM(1)] != c.want {
			t.Errorf("%s: room for %v, want %d", c.name, got, c.want)
		}
		own := int(max(c.spare, 0)) / 512
		if slices.Contains(c.slabs, others) {
			own += 8
		}
		if got := r.Room("kv", 400); got[device.HBM(1)] != own {
			t.Errorf("%s: room for %v of the client with slabs of its own, want %d", c.name, got, own)
		}
	}
}
