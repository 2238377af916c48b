package cuda

import "github.com/moeserve/moeserve/kernels"

// routerGateUp enqueues one kernel, if few_rows computes both GEMMs, all blocks run at once, and none has more tiles
// of gate/up than without the router's blocks; else one after the other.
func (l *streamState) routerGateUp(o *kernels.RouterGateUp) error {
	if err := l.b.activation(o.Name(), "Router.X", &o.Router.X); err != nil { // GateUp.X has the same type
		return err
	}
	gateUp, _ := o.GateUp.Apart()
	// A block for each tile of the router, the others take turns with those of gate/up.
	router, columns := ceil(o.Router.W.Shape[0], 16), o.GateUp.W.Shape[0]/2
	tiles := ceil(columns, 8)
	blocks := min(tiles, l.b.multiprocessors-router)
	eights := l.b.eightsOfRows(&o.Router)
	if router > 0 && blocks > 0 && ceil(tiles, blocks) == ceil(tiles, l.b.multiprocessors) && eights > 0 && eights == l.b.eightsOfRows(&gateUp) &&
		skinnyLoadsOf(columns, 8, blocks, gateUp.X.Shape[1]) <= skinnyLoads {
		a := routerGateUpArgs{router: fewArguments(&o.Router, o.Router.Out.DType == kernels.F32), gateUp: fewArguments(&gateUp, false)}
		a.gateUp.columns = int32(columns)
		k := routerGateUp
		if eights > 1 {
			k = sixteenRouterGateUp
		}
		return launch(l, o.Name(), k, grid{x: blocks + router, threads: skinnyThreads, shared: 5 * skinnyStageBytes}, &a)
	}
	if err := l.matmul(&o.Router); err != nil {
		return err
	}
	return l.gatedMatmul(&o.GateUp)
}

// routeDown enqueues one kernel, if one block can route and sort, few_rows computes the GEMM and all blocks run at once;
// else one after the other.
func (l *streamState) routeDown(o *kernels.RouteDown) error {
	if err := l.b.activation(o.Name(), "Down.X", &o.Down.X); err != nil {
		return err
	}
	if err := alignedRuns(o.Name(), &o.Route.Runs); err != nil {
		return err
	}
	down := &o.Down
	blocks := min(ceil(down.W.Shape[0], 16), l.b.multiprocessors-1)
	eights := l.b.eightsOfRows(down)
	if sortsFew(&o.Route) && o.Route.Logits.Shape[0] <= skinnyThreads/32 && blocks > 0 && eights > 0 {
		// Routing takes less than a stage.
		loads, shared := skinnyLoadsOf(down.W.Shape[0], 16, blocks, down.X.Shape[1]), skinnyStageBytes
		k, stages := routeDown, 3
		if eights > 1 {
			k, stages = sixteenRouteDown, 4
		}
		if loads > 0 {
			shared *= min(loads, stages)
		}
		if loads <= skinnyLoads {
			a := routeDownArgs{route: routeArguments(&o.Route), down: fewArguments(down, down.Out.DType == kernels.F32)}
			err := launch(l, o.Name(), k, grid{x: 1 + blocks, threads: skinnyThreads, shared: shared}, &a)
			if err == nil {
				l.last.routeDown = a.route
				l.routeDowns.Reset()
				o.Declare(&l.routeDowns)
			}
			return err
		}
	}
	if err := l.route(&o.Route); err != nil {
		return err
	}
	return l.matmul(down)
}

// eightsOfRows is how many eights of rows few_rows multiplies by a tile of weights, if it computes o on devices whose blocks
// may use much shared memory, of which this is one; else 0.
func (b *Backend) eightsOfRows(o *kernels.MatMul) int {
	rows := o.X.Shape[0]
	if !b.largeSmem || b.o.BatchInvariant || o.X.DType != b.o.Activation || rows > maxSixteenRows || !b.sameTypes(o) {
		return 0
	}
	return ceil(rows, 8)
}
