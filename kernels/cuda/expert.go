package cuda

import (
	"fmt"

	"github.com/moeserve/moeserve/kernels"
)

// expertShape is the tile shape of a block of expert.cu, or of dense.cu.
type expertShape struct {
	units         int // units of 64 weight rows
	maxTokens     int // maximum tokens of a tile
	stepsPerStage int // k-steps of 64 elements per stage of the pipeline
	blocks        int // per multiprocessor
	threads       int
	shared        int // bytes
}

// expertShapes are the instantiations in expert.cu. A multiprocessor has 228 KiB of shared
// memory; a block may use 227, and 1 KiB per block is reserved.
var expertShapes = [...]expertShape{
	{4, 160, 1, 1, 384, 226 << 10},
	{1, 64, 2, 2, 256, 112 << 10},
	{1, 64, 2, 1, 256, 226 << 10},
	{4, tokenStep, 1, 1, 384, 226 << 10},
	{1, tokenStep, 2, 2, 256, 112 << 10},
	{1, tokenStep, 2, 1, 256, 226 << 10},
	{1, tokenStep, 2, 2, 256, 112 << 10},
	{1, tokenStep, 2, 1, 256, 226 << 10},
	{1, tokenStep, 2, 2, 256, 112 << 10},
	{1, tokenStep, 2, 1, 256, 226 << 10},
}

const (
	expertWide kernelID = iota
	expertNarrow
	expertAlone
	// The same that read Runs, each of which has tokens of one tile.
	expertWideFew
	expertNarrowFew
	expertAloneFew
	// The same, which select the experts: of one token, and of more.
	expertNarrowRouted
	expertAloneRouted
	expertNarrowRoutedFew
	expertAloneRoutedFew
)

// expertNames are how the names of kernels end.
var expertNames = [len(expertShapes)]string{"256", "64", "alone", "256_few", "64_few", "alone_few", "64_routed", "alone_routed", "64_routed_few", "alone_routed_few"}

const (
	// expertRun is the bytes of an expert's entry in shared memory, expertSlot with Runs, ringAlign the
	// alignment of the stages, maxStages the number of barriers.
	expertRun, expertSlot, ringAlign, maxStages = 24, 8, 1024, 16
	// With at most fewPairs pairs, expert GEMMs are bound by reading weights.
	fewPairs = 32
	// A tile's tokens are a multiple of tokenStep.
	tokenStep = 16
	// Kernels select by themselves of at most mostRouted experts, for mostRoutedRows tokens and mostRoutedPairs pairs.
	mostRouted, mostRoutedRows, mostRoutedPairs = 128, 8, 64
)

// step is the bytes of one k-step in a stage with room for that many tokens.
func (e *expertShape) step(tokens int) int { return e.units*unitRows*tileRow + tokens*tileRow }

// chooseExpertShape selects wide tiles if there are enough of them: one for every second
// multiprocessor if experts have many tokens, one and a half for each if they have few, for
// which narrow tiles are as fast. With few pairs and less than three waves of wide tiles, it
// selects narrow tiles with one block per multiprocessor, so that all multiprocessors have
// equal work; otherwise blocks that start as others end would share a multiprocessor.
func (b *Backend) chooseExpertShape(units, tokens, experts, pairs int) kernelID {
	wide, narrow := &expertShapes[expertWide], experts*units
	tiles := experts * ceil(units, wide.units) * ceil(tokens, wide.maxTokens)
	switch {
	case pairs <= fewPairs && tiles < 3*b.multiprocessors && (narrow <= b.multiprocessors || narrow >= 4*b.multiprocessors):
		return expertAlone
	case 2*tiles >= 3*b.multiprocessors || tokens > expertShapes[expertNarrow].maxTokens/2 && 2*tiles >= b.multiprocessors:
		return expertWide
	}
	return expertNarrow
}

// hopperExpertGEMM enqueues a grouped GEMM of experts in the layout Tiles, as a persistent
// kernel: blocks divide the tiles, whose number only the device knows.
// With route, gate/up also routes the tokens of p, whose lists route has (see routes).
func (l *streamState) hopperExpertGEMM(op string, mode kernelID, p *kernels.ExpertGEMM, route *routeSortArgs) error {
	x, out := &p.X, &p.Out
	pairs, listed, all := p.Order.Shape[0], p.Experts.Shape[0], p.Slots.Shape[0]
	if !aligned(x) || int(out.Addr)%8 != 0 || out.Stride[0]%4 != 0 {
		return fmt.Errorf("cuda: %s: X is %v at %#x and Out %v at %#x, want rows of X to start at multiples of 16 bytes, of Out at multiples of 8",
			op, *x, uint64(x.Addr), *out, uint64(out.Addr))
	}
	if err := alignedRuns(op, &p.Runs); err != nil {
		return err
	}
	columns, inner := out.Shape[1], x.Shape[1]
	first, _ := p.ColumnRange()
	a := expertArgs{
		x: address(x), out: address(out), offsets: address(&p.Offsets), order: address(&p.Order), slots: address(&p.Slots), experts: address(&p.Experts),
		xStride: int64(x.Stride[0]), outStride: int64(out.Stride[0]),
		units: int32(columns / unitRows), steps: int32(inner / tileStep),
		listed: int32(listed), expertsAll: int32(all), topK: int32(pairs / max(x.Shape[0], 1)),
	}
	if mode == gateUpMode {
		a.units, a.tiles = 2*a.units, a.steps
		a.start = 4 * int64(first) * int64(inner)
	} else {
		a.tiles = int32(p.Layout.Intermediate / tileStep)
		a.start = 4*int64(columns)*int64(p.Layout.Intermediate) + int64(first/tileStep)*unitRows*tileRow // after w1 and w3
	}
	usual := ceil(pairs, all)
	shape, lists := l.b.chooseExpertShape(int(a.units), usual, min(listed, pairs), pairs), listed*expertRun
	if !p.Runs.None() {
		shape, lists = shape+expertWideFew, all*expertSlot
		a.runs, a.mostRuns = address(&p.Runs), int32(p.Runs.Shape[0])
	}
	e := &expertShapes[shape]
	// Experts with more tokens than the maximum get several tiles.
	tokens := min(ceil(usual+usual/2, tokenStep)*tokenStep, e.maxTokens)
	room := e.shared - ringAlign - lists
	stages := min(room/(e.stepsPerStage*e.step(tokens)), maxStages)
	if stages < 2 {
		return fmt.Errorf("cuda: %s: Experts is %v, want fewer experts per launch", op, p.Experts)
	}
	a.maxTokens, a.stages = int32(tokens), int32(stages)
	if mode == downMode {
		l.tiles = tileMap{x.Addr, x.Shape[0], inner, rowStride(x), tokens}
		if err := l.b.run.mapTiles(&l.maps[0], &l.tiles); err != nil {
			return fmt.Errorf("cuda: %s: %w", op, err)
		}
		a.xRows = l.maps[0]
	}
	// If it directly follows the gate/up projection, the down projection starts to load weights
	// while that still runs. Gate/up of few tokens directly behind RouteDown runs beside that.
	now := expertLists{a.offsets, a.order, a.slots, a.experts, address(&p.Runs)}
	switch last := &l.last; {
	case mode == gateUpMode:
		if route == nil && (shape == expertNarrowFew || shape == expertAloneFew) && x.Shape[0] == int(last.routeDown.route.rows) && last.routeDown.selects(&a) && l.besideRouteDown(p) {
			route, a.listsReady = &last.routeDown, 1
		}
	case last.gateUp != now:
	case last.selected.route.logits == 0:
		a.listsReady = 1
	case shape != expertWideFew:
		// Lists may not be complete when it starts; the scores are.
		route, a.listsReady = &last.selected, 1
	}
	switch {
	case route == nil:
	case route.route.rows == 1:
		shape += expertNarrowRouted - expertNarrowFew
	default:
		shape += expertNarrowRoutedFew - expertNarrowFew
	}
	g := grid{x: l.b.multiprocessors * e.blocks, threads: e.threads, shared: ringAlign + lists + stages*e.stepsPerStage*e.step(tokens)}
	// Wide blocks, which have only one or two tiles, must be distributed evenly, not to
	// wherever other blocks end first.
	g.noOverlap = shape == expertWide || shape == expertWideFew
	k := expertKernels + (mode-gateUpMode)*kernelID(len(expertShapes)) + shape
	var routed routedExpertArgs
	var err error
	if route == nil {
		err = launch(l, op, k, g, &a)
	} else {
		routed = routedExpertArgs{expert: a, route: *route}
		err = launch(l, op, k, g, &routed)
	}
	if mode == gateUpMode && err == nil {
		l.last.gateUp, l.last.selected = now, routed.route
	}
	return err
}

// selects reports whether expert GEMMs with those arguments can select experts by r.
func (r *routeSortArgs) selects(a *expertArgs) bool {
	return r.route.logits != 0 && r.route.rows <= mostRoutedRows && r.route.k <= sortedEach && int(r.route.rows)*int(r.route.k) <= mostRoutedPairs && r.route.experts <= mostRouted &&
		r.runs != 0 && a.topK == r.route.k && a.listed == r.route.experts && a.expertsAll == a.listed && r.offsets == a.offsets && r.order == a.order && r.runs == a.runs
}

// besideRouteDown reports whether gate/up neither reads nor overwrites what the latest RouteDown writes, but lists, nor
// overwrites what that reads.
func (l *streamState) besideRouteDown(p *kernels.ExpertGEMM) bool {
	x, slots, out := p.X.Range(), p.Slots.Range(), p.Out.Range()
	for _, r := range l.routeDowns.Writes {
		if r.Overlaps(x) || r.Overlaps(slots) || r.Overlaps(out) {
			return false
		}
	}
	for _, r := range l.routeDowns.Reads {
		if r.Overlaps(out) {
			return false
		}
	}
	return true
}

// routes reports whether one kernel can run Route and Up: with Runs, of few tokens, up to mostRouted experts, and narrow
// tiles.
func (b *Backend) routes(o *kernels.RouteExpertUp) bool {
	route, p := &o.Route, &o.Up.ExpertGEMM
	rows, experts, k := route.Logits.Shape[0], route.Logits.Shape[1], route.IDs.Shape[1]
	if p.Layout.Tag != Tiles || rows == 0 || rows > mostRoutedRows || k > sortedEach || rows*k > mostRoutedPairs || experts > mostRouted || route.Runs.None() {
		return false
	}
	return b.chooseExpertShape(2*p.Out.Shape[1]/unitRows, ceil(rows*k, experts), min(experts, rows*k), rows*k) != expertWide
}

// routeExpertUp enqueues one kernel where that can do both, else two.
func (l *streamState) routeExpertUp(o *kernels.RouteExpertUp) error {
	if err := l.b.activation(o.Name(), "Up.X", &o.Up.X); err != nil {
		return err
	}
	if !l.b.routes(o) {
		if err := l.route(&o.Route); err != nil {
			return err
		}
		return l.expertUp(&o.Up)
	}
	if err := l.b.checkLayout(o.Name(), &o.Up.Layout); err != nil {
		return err
	}
	route := routeArguments(&o.Route)
	return l.hopperExpertGEMM(o.Name(), gateUpMode, &o.Up.ExpertGEMM, &route)
}

// expertLists are the addresses of the lists that select experts and pairs.
type expertLists struct{ offsets, order, slots, experts, runs uint64 }
