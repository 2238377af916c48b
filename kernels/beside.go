package kernels

import (
	"slices"

	"github.com/moeserve/moeserve/device"
)

// RouterGateUp runs Router, which computes the scores of experts, and GateUp, the gate/up projection of
// a shared expert, with the bits of both one after the other. A backend may run them at the same time, so
// neither may write what the other one reads or writes. Check finds that of dense tensors only.
type RouterGateUp struct {
	Router MatMul
	GateUp GatedMatMul // its X has the type of Router's, and is mostly the same
}

// Name implements Op.
func (*RouterGateUp) Name() string { return "router_gate_up" }

// Check implements Op.
func (o *RouterGateUp) Check() error {
	c := checker{op: "router_gate_up: Router"}
	router, gateUp := &o.Router, &o.GateUp
	router.check(&c)
	c.op = "router_gate_up: GateUp"
	gateUp.check(&c)
	c.op = o.Name()
	c.sameType("GateUp.X", &gateUp.X, "Router.X", &router.X)
	c.disjoint("Router.Out", &router.Out, "GateUp.X", &gateUp.X)
	c.disjoint("Router.Out", &router.Out, "GateUp.W", &gateUp.W)
	c.disjoint("Router.Out", &router.Out, "GateUp.Out", &gateUp.Out)
	c.disjoint("GateUp.Out", &gateUp.Out, "Router.X", &router.X)
	c.disjoint("GateUp.Out", &gateUp.Out, "Router.W", &router.W)
	c.disjoint("GateUp.Out", &gateUp.Out, "Router.Bias", &router.Bias)
	return c.err
}

// Declare implements Op. Bytes has an X that both read once.
func (o *RouterGateUp) Declare(d *Decl) {
	o.Router.Declare(d)
	o.GateUp.Declare(d)
	if o.Router.X == o.GateUp.X {
		d.Bytes -= o.GateUp.X.Bytes()
	}
}

// apartFromRoute checks that what route writes shares no memory with other.
func (c *checker) apartFromRoute(route *Route, name string, other *Tensor) {
	for _, written := range [...]struct {
		name string
		t    *Tensor
	}{
		{"Route.IDs", &route.IDs},
		{"Route.Weights", &route.Weights},
		{"Route.Counts", &route.Counts},
		{"Route.Offsets", &route.Offsets},
		{"Route.Order", &route.Order},
		{"Route.Runs", &route.Runs},
	} {
		c.disjoint(written.name, written.t, name, other)
	}
}

// RouteDown runs Route and Down, the down projection of a shared expert, with the bits of both one after
// the other. A backend may run them at the same time, so neither may write what the other one reads or
// writes. Check finds that of dense tensors only. Logits stay as they are until an ExpertUp and ExpertDown right behind it,
// with its lists, have ended, which may select by them, too.
type RouteDown struct {
	Route Route
	Down  MatMul
}

// Name implements Op.
func (*RouteDown) Name() string { return "route_down" }

// Check implements Op.
func (o *RouteDown) Check() error {
	c := checker{op: "route_down: Route"}
	route, down := &o.Route, &o.Down
	route.check(&c)
	c.op = "route_down: Down"
	down.check(&c)
	c.op = o.Name()
	c.disjoint("Down.Out", &down.Out, "Route.Logits", &route.Logits)
	c.apartFromRoute(route, "Down.X", &down.X)
	c.apartFromRoute(route, "Down.W", &down.W)
	c.apartFromRoute(route, "Down.Bias", &down.Bias)
	c.apartFromRoute(route, "Down.Out", &down.Out)
	return c.err
}

// Declare implements Op.
func (o *RouteDown) Declare(d *Decl) {
	o.Route.Declare(d)
	o.Down.Declare(d)
}

// RouteExpertUp runs Route and Up, the gate/up projection of the experts that it selects, with the bits of both one
// after the other. A backend may run them at the same time, so Route writes nothing that Up reads but Offsets, Order and
// Runs, which are those of Up. Check finds that of dense tensors only. Logits stay as they are until the ExpertDown behind it
// has ended, which may select by them, too.
type RouteExpertUp struct {
	Route Route
	Up    ExpertUp
}

// Name implements Op.
func (*RouteExpertUp) Name() string { return "route_expert_up" }

// Check implements Op.
func (o *RouteExpertUp) Check() error {
	c := checker{op: "route_expert_up: Route"}
	route, up := &o.Route, &o.Up
	route.check(&c)
	c.op = "route_expert_up: Up"
	up.check(&c)
	c.op = o.Name()
	if c.ok() && (route.Order != up.Order || route.Offsets != up.Offsets || route.Runs != up.Runs) {
		c.failf("Route has Order %v, Offsets %v and Runs %v, want those of Up: %v, %v and %v", route.Order, route.Offsets, route.Runs, up.Order, up.Offsets, up.Runs)
	}
	c.size("Up.X", &up.X, 0, route.Logits.Shape[0], "rows", "Route.Logits")
	c.disjoint("Up.Out", &up.Out, "Route.Logits", &route.Logits)
	c.apartFromRoute(route, "Route.Logits", &route.Logits)
	c.apartFromRoute(route, "Up.X", &up.X)
	c.apartFromRoute(route, "Up.Slots", &up.Slots)
	c.apartFromRoute(route, "Up.Experts", &up.Experts)
	c.apartFromRoute(route, "Up.Out", &up.Out)
	return c.err
}

// Declare implements Op. Reads do not have the lists that Route writes.
func (o *RouteExpertUp) Declare(d *Decl) {
	o.Route.Declare(d)
	n := len(d.Reads)
	o.Up.Declare(d)
	lists := [...]device.Range{o.Route.Offsets.Range(), o.Route.Order.Range(), o.Route.Runs.Range()}
	kept := d.Reads[:n]
	for _, r := range d.Reads[n:] {
		if !slices.Contains(lists[:], r) {
			kept = append(kept, r)
		}
	}
	d.Reads = kept
}
