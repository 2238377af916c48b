package rebalancer

import (
	"testing"

	"github.com/moeserve/moeserve/harvest"
)

func TestRoom(t *testing.T) {
	slab := func(bytes int64, segments ...harvest.SegmentSnapshot) harvest.SlabSnapshot {
		return harvest.SlabSnapshot{ID: 1, Bytes: bytes, Segments: segments}
	}
	leaving := slab(4096)
	leaving.Leaving = "pressure"
	for _, c := range []struct {
		name  string
		spare int64
		slabs []harvest.SlabSnapshot
		want  int
	}{
		{"nothing", 0, nil, 0},
		{"less than nothing", -4096, nil, 0},
		{"spare", 1600, nil, 3},
		{"an empty slab", 0, []harvest.SlabSnapshot{slab(1024)}, 2},
		{"before, between and behind", 0, []harvest.SlabSnapshot{slab(4096,
			harvest.SegmentSnapshot{Offset: 512, Bytes: 512}, harvest.SegmentSnapshot{Offset: 2048, Bytes: 1024})}, 1 + 2 + 2},
		{"holes too small", 0, []harvest.SlabSnapshot{slab(1792,
			harvest.SegmentSnapshot{Offset: 256, Bytes: 512}, harvest.SegmentSnapshot{Offset: 1024, Bytes: 512})}, 0},
		{"what drains will be free, with the holes beside it", 0, []harvest.SlabSnapshot{slab(1792,
			harvest.SegmentSnapshot{Offset: 256, Bytes: 512, Draining: true}, harvest.SegmentSnapshot{Offset: 1024, Bytes: 512})}, 2},
		{"a slab that is given back", 0, []harvest.SlabSnapshot{leaving, slab(512)}, 1},
		{"all together", 512, []harvest.SlabSnapshot{slab(512), slab(512, harvest.SegmentSnapshot{Bytes: 512})}, 2},
	} {
		// 400 bytes take 512 of harvest's.
		if got := room(harvest.PeerSnapshot{Spare: c.spare, Slabs: c.slabs}, 400); got != c.want {
			t.Errorf("%s: room for %d, want %d", c.name, got, c.want)
		}
	}
}
