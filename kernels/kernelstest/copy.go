package kernelstest

import (
	"bytes"
	"encoding/binary"
	"fmt"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels"
)

// accessible lists the spaces that operations of the stream can access: its own, and for a GPU
// also host memory and that of a peer, if there is one.
func (r *rig) accessible() []device.Space {
	own := r.stream.Space()
	if own == device.Host {
		return []device.Space{own}
	}
	spaces := []device.Space{own, device.Host}
	for _, s := range r.machine.Topology().Spaces() {
		if _, err := r.machine.Topology().Path(own, s); s != own && s != device.Host && err == nil {
			return append(spaces, s)
		}
	}
	return spaces
}

func testCopyBlocks(r *rig) {
	type shape struct {
		bytes, blocks, threadBlocks int
	}
	shapes := []shape{{16, 1, 0}, {16, 70, 1}, {48, 333, 2}, {4096, 1, 1}, {4096, 9, 0}, {8192 + 16, 5, 3}, {64 << 10, 4, 1}}
	if r.o.Full {
		shapes = append(shapes, shape{4096, 1000, 4}, shape{1 << 20, 5, 16})
	}
	spaces := r.accessible()
	for _, s := range shapes {
		for _, from := range spaces {
			for _, to := range spaces {
				r.run(fmt.Sprintf("%+v/%v-%v", s, from, to), func(r *rig) { testCopyBlocksShape(r, s.bytes, s.blocks, s.threadBlocks, from, to) })
			}
		}
	}
	r.run("no blocks", func(r *rig) {
		r.do(&kernels.CopyBlocks{Src: kernels.New(0, kernels.U64, 0), Dst: kernels.New(0, kernels.U64, 0), BlockBytes: 16})
	})
}

// testCopy copies a part of a buffer to a part of another one, whose places differ by words.
func testCopy(r *rig) {
	spaces := r.accessible()
	for _, n := range []int{1, 3, 4, 31, 1024, 1027, 40000} {
		for _, from := range spaces {
			for _, to := range spaces {
				for _, skip := range [][2]int{{0, 0}, {4, 8}, {1, 1}, {0, 3}} {
					r.run(fmt.Sprintf("%d/%v+%d-%v+%d", n, from, skip[0], to, skip[1]), func(r *rig) {
						src, dst := r.denseIn(from, "Src", kernels.I32, n+skip[0]), r.denseIn(to, "Dst", kernels.I32, n+skip[1])
						src.Tensor, dst.Tensor = src.Slice(skip[0], skip[0]+n), dst.Slice(skip[1], skip[1]+n)
						want := src.all()
						for i := range want {
							want[i] = byte(r.rand.Uint32())
						}
						dst.writes()
						r.do(&kernels.Copy{Src: src.Tensor, Dst: dst.Tensor})
						if got := dst.buffer.after[dst.offset():][:len(want)]; !bytes.Equal(got, want) {
							r.Fatal("the copy differs from what was copied")
						}
					})
				}
			}
		}
	}
	// Two at once, of 0 words too, to memory on either side.
	for _, n := range [][2]int{{1, 1}, {2880, 1}, {3, 40000}, {0, 5}, {7, 0}, {9000, 20001}} {
		for i, from := range spaces {
			to := spaces[(i+1)%len(spaces)]
			r.run(fmt.Sprintf("%v/%v-%v", n, from, to), func(r *rig) {
				var srcs, dsts [2]tensor
				var want [2][]byte
				for j := range srcs {
					srcs[j], dsts[j] = r.denseIn(from, fmt.Sprint("Src", j), kernels.I32, n[j]), r.denseIn([]device.Space{to, from}[j], fmt.Sprint("Dst", j), kernels.I32, n[j])
					want[j] = srcs[j].all()
					for k := range want[j] {
						want[j][k] = byte(r.rand.Uint32())
					}
					dsts[j].writes()
				}
				r.do(&kernels.Copy{Src: srcs[0].Tensor, Dst: dsts[0].Tensor, Src2: srcs[1].Tensor, Dst2: dsts[1].Tensor})
				for j := range dsts {
					if got := dsts[j].buffer.after[dsts[j].offset():][:len(want[j])]; !bytes.Equal(got, want[j]) {
						r.Fatalf("copy %d differs from what was copied", j)
					}
				}
			})
		}
	}
	r.run("nothing", func(r *rig) {
		r.do(&kernels.Copy{Src: kernels.New(0, kernels.F32, 0), Dst: kernels.New(0, kernels.F32, 0)})
	})
}

// testAddRows adds every second row of a buffer to rows of another one, in no order.
func testAddRows(r *rig) {
	for _, columns := range []int{8, 48, 1024, 4096} {
		for _, n := range []int{1, 2, 13} {
			for _, from := range r.accessible() {
				r.run(fmt.Sprintf("%dx%d/%v", n, columns, from), func(r *rig) {
					src, dst := r.normal(r.denseIn(from, "rows read", r.act, 2*n, columns), 0, 1), r.normal(r.dense("rows written", r.act, n, columns), 0, 1)
					src.buffer.partly = true
					var reads, writes []uint64
					order := r.rand.Perm(n)
					want := make([][]float64, n)
					for i, j := range order {
						reads, writes = append(reads, uint64(src.Slice(2*i, 2*i+1).Addr)), append(writes, uint64(dst.Slice(j, j+1).Addr))
						want[j] = dst.row(j)
						for c, v := range src.row(2 * i) {
							want[j][c] += v
						}
					}
					dst.writes()
					r.do(&kernels.AddRows{Src: r.words("Src", reads...).Tensor, Dst: r.words("Dst", writes...).Tensor, Columns: columns, DType: r.act})
					for j := range want {
						r.near(dst, want[j], j)
					}
				})
			}
		}
	}
	r.run("nothing", func(r *rig) {
		r.do(&kernels.AddRows{Src: kernels.New(0, kernels.U64, 0), Dst: kernels.New(0, kernels.U64, 0), Columns: 8, DType: r.act})
	})
}

// testCopyBlocksShape copies between two buffers with room for twice as many blocks, in no
// order. One pair is skipped, and one source is copied twice.
func testCopyBlocksShape(r *rig, size, blocks, threadBlocks int, from, to device.Space) {
	src, dst := r.bufferIn(from, "blocks read", kernels.U64, 2*blocks*size), r.bufferIn(to, "blocks written", kernels.U64, 2*blocks*size)
	dst.out = make([]byte, len(dst.before))
	reads, writes := r.rand.Perm(2 * blocks)[:blocks], r.rand.Perm(2 * blocks)[:blocks]
	if blocks > 1 {
		reads[0] = reads[blocks-1]
	}
	block := func(b *buffer, data []byte, i int) ([]byte, uint64) {
		at := guard + i*size
		return data[at:][:size], uint64(b.device.Range(int64(at), int64(size)).Addr)
	}
	sources, destinations := make([]uint64, blocks), make([]uint64, blocks)
	skipped := -1
	if blocks > 4 {
		skipped = blocks / 2
	}
	for i := range blocks {
		if i == skipped {
			if _, sources[i] = block(src, src.before, reads[i]); blocks%2 == 0 {
				sources[i] = 0
			}
			if sources[i] == 0 {
				_, destinations[i] = block(dst, dst.before, writes[i])
			}
			continue
		}
		var data []byte
		data, sources[i] = block(src, src.before, reads[i])
		for j := 0; j < size; j += 8 {
			binary.LittleEndian.PutUint64(data[j:], r.rand.Uint64())
		}
		data, destinations[i] = block(dst, dst.out, writes[i])
		fill(data, 1)
	}
	r.do(&kernels.CopyBlocks{Src: r.words("Src", sources...).Tensor, Dst: r.words("Dst", destinations...).Tensor, BlockBytes: int64(size), ThreadBlocks: threadBlocks})
	for i := range blocks {
		if i == skipped {
			continue
		}
		want, _ := block(src, src.before, reads[i])
		if got, _ := block(dst, dst.after, writes[i]); !bytes.Equal(got, want) {
			r.Fatalf("block %d of %d is not what was copied", i, blocks)
		}
	}
}
