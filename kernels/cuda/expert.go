package cuda

import (
	"fmt"

	"github.com/moeserve/moeserve/kernels"
)

// expertShape is what a block of expert.cu, or of dense.cu, works on.
type expertShape struct {
	units   int // of 64 weight rows, at once
	most    int // tokens of a tile, at most
	deep    int // steps of 64 elements in a stage of the ring
	blocks  int // per multiprocessor
	threads int
	shared  int // bytes
}

// expertShapes as they are instantiated in expert.cu. A multiprocessor has 228 KiB of
// shared memory, of which a block has 227 at most, and 1 KiB of each is taken.
var expertShapes = [...]expertShape{
	{4, 160, 1, 1, 384, 226 << 10},
	{1, 64, 2, 2, 256, 112 << 10},
	{1, 64, 2, 1, 256, 226 << 10},
}

const (
	expertWide kernelID = iota
	expertNarrow
	expertAlone
)

const (
	// expertRun is an expert's place in shared memory, ringAlign what the ring starts
	// at a multiple of, mostStages how many barriers there are.
	expertRun, ringAlign, mostStages = 24, 1024, 16
	// Up to fewPairs, experts are streams of weights.
	fewPairs = 32
	// tokenStep is what a tile's tokens are a multiple of.
	tokenStep = 16
)

// step is the bytes of one step in a stage with room for so many tokens.
func (e *expertShape) step(tokens int) int { return e.units*unitRows*tileRow + tokens*tileRow }

// chooseExpertShape takes wide tiles where there are enough of them: some for every
// second multiprocessor where experts have many tokens, one and a half for each where
// they have few, for which narrow tiles do as well. Few pairs with wide tiles for less
// than three rounds have narrow ones of blocks that are alone on their multiprocessors,
// which then all have as much to do: blocks that start as others end come in twos else.
func (b *Backend) chooseExpertShape(units, tokens, experts, pairs int) kernelID {
	wide, narrow := &expertShapes[expertWide], experts*units
	tiles := experts * ceil(units, wide.units) * ceil(tokens, wide.most)
	switch {
	case pairs <= fewPairs && tiles < 3*b.multiprocessors && (narrow <= b.multiprocessors || narrow >= 4*b.multiprocessors):
		return expertAlone
	case 2*tiles >= 3*b.multiprocessors || tokens > expertShapes[expertNarrow].most/2 && 2*tiles >= b.multiprocessors:
		return expertWide
	}
	return expertNarrow
}

// tiledExperts enqueues a product with experts in the layout Tiles. Blocks share the
// tiles out among themselves, which are counted on the device.
func (l *lane) tiledExperts(op string, mode kernelID, p *kernels.ExpertGEMM) error {
	x, out := &p.X, &p.Out
	pairs, listed, all := p.Order.Shape[0], p.Experts.Shape[0], p.Slots.Shape[0]
	if !aligned(x) || int(out.Addr)%8 != 0 || out.Stride[0]%4 != 0 {
		return fmt.Errorf("cuda: %s: X is %v at %#x and Out %v at %#x, want rows of X to start at multiples of 16 bytes, of Out at multiples of 8",
			op, *x, uint64(x.Addr), *out, uint64(out.Addr))
	}
	columns, inner := out.Shape[1], x.Shape[1]
	a := expertArgs{
		x: address(x), out: address(out), offsets: address(&p.Offsets), order: address(&p.Order), slots: address(&p.Slots), experts: address(&p.Experts),
		xStride: int64(x.Stride[0]), outStride: int64(out.Stride[0]),
		units: int32(columns / unitRows), steps: int32(inner / tileStep),
		listed: int32(listed), expertsAll: int32(all), topK: int32(pairs / max(x.Shape[0], 1)),
	}
	if mode == upMode {
		a.units *= 2
	} else {
		a.start = 4 * int64(columns) * int64(inner) // w1 and w3
	}
	usual := ceil(pairs, all)
	shape := l.b.chooseExpertShape(int(a.units), usual, min(listed, pairs), pairs)
	e := &expertShapes[shape]
	// Experts with more tokens than there is room for get several tiles.
	tokens := min(ceil(usual+usual/2, tokenStep)*tokenStep, e.most)
	room := e.shared - ringAlign - listed*expertRun
	stages := min(room/(e.deep*e.step(tokens)), mostStages)
	if stages < 2 {
		return fmt.Errorf("cuda: %s: Experts is %v, want fewer at once", op, p.Experts)
	}
	a.most, a.stages = int32(tokens), int32(stages)
	if mode == downMode {
		l.tiles = tileMap{x.Addr, x.Shape[0], inner, rowStride(x), tokens}
		if err := l.b.run.mapTiles(&l.maps[0], &l.tiles); err != nil {
			return fmt.Errorf("cuda: %s: %w", op, err)
		}
		a.xRows = l.maps[0]
	}
	// Right behind the way up, the way down starts with its weights while that still runs.
	now := chosenExperts{a.offsets, a.order, a.slots, a.experts}
	a.early = truth(mode == downMode && l.up == now)
	g := grid{x: l.b.multiprocessors * e.blocks, threads: e.threads, shared: ringAlign + listed*expertRun + stages*e.deep*e.step(tokens)}
	// Wide blocks, which have one tile or two, are best spread evenly: not where others
	// happen to end first.
	g.apart = shape == expertWide
	err := launch(l, op, expertKernels+(mode-upMode)*kernelID(len(expertShapes))+shape, g, &a)
	if mode == upMode && err == nil {
		l.up = now
	}
	return err
}

// chosenExperts are where a product with experts finds which of them it is to take.
type chosenExperts struct{ offsets, order, slots, experts uint64 }
