package kernels

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

// RouteDown runs Route and Down, the down projection of a shared expert, with the bits of both one after
// the other. A backend may run them at the same time, so neither may write what the other one reads or
// writes. Check finds that of dense tensors only.
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
		c.disjoint(written.name, written.t, "Down.X", &down.X)
		c.disjoint(written.name, written.t, "Down.W", &down.W)
		c.disjoint(written.name, written.t, "Down.Bias", &down.Bias)
		c.disjoint(written.name, written.t, "Down.Out", &down.Out)
	}
	return c.err
}

// Declare implements Op.
func (o *RouteDown) Declare(d *Decl) {
	o.Route.Declare(d)
	o.Down.Declare(d)
}
