package multipath

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/eval/figure"
)

// trafficGain is how many times as fast as an even static split the engine is to be where
// others copy over one of two links.
const trafficGain = 1.3

// Traffic is one copy beside plain copies of others over some of the links.
type Traffic struct {
	Bytes int64 `json:"bytes"`
	// Processes: the others are processes of their own, except those that change links; otherwise streams of
	// this one.
	Processes bool           `json:"other_processes"`
	Points    []TrafficPoint `json:"points"`
}

// TrafficPoint is a copy over a number of links beside some traffic, rates in bytes/s.
type TrafficPoint struct {
	Direction Direction `json:"direction"`
	Links     int       `json:"links"`
	// Beside is what else goes on.
	Beside string  `json:"beside"`
	Native float64 `json:"native_bytes_per_s"`
	// Even is a static split of equal parts, Uneven one that gives a link two of three chunks:
	// the other one than that with traffic, or the relay's where that changes; 0: there are more
	// than two links.
	Even   float64 `json:"even_bytes_per_s"`
	Uneven float64 `json:"uneven_bytes_per_s"`
	Engine float64 `json:"engine_bytes_per_s"`
	// Others is the rate of the traffic beside the engine.
	Others float64 `json:"others_bytes_per_s"`
	// The same where the engine leaves links to others that use them.
	EngineWaits  float64 `json:"engine_waits_bytes_per_s"`
	OthersBeside float64 `json:"others_beside_waiting_bytes_per_s"`
	// Covered is the part of the slowest copy's time in which there was traffic: 1, unless it
	// ended early.
	Covered float64 `json:"covered"`
}

// The traffic beside copies over two links.
const (
	noTraffic       = "no other copies"
	directTraffic   = "copies over the direct link"
	relayTraffic    = "copies over the relay's link"
	changingTraffic = "copies over both in turn"
)

// scene is traffic beside a copy.
type scene struct {
	name   string
	relays []device.Space
	// busy are the GPUs over whose links others copy; turns: over one at a time.
	busy  []device.Space
	turns bool
	// uneven is a split for it; none where it is empty.
	uneven []device.Space
}

// turnCopies is how many copies others make over a link before they change to the other.
const turnCopies = 2

// scenes are those of two links, and of all of them with copies over 1, 2 and 4 relays' links.
func (o *Options) scenes() []scene {
	first := o.Relays[:1]
	relay := first[0]
	toRelay, toDirect := []device.Space{device.Host, relay, relay}, []device.Space{device.Host, device.Host, relay}
	scenes := []scene{
		{noTraffic, first, nil, false, toRelay},
		{directTraffic, first, []device.Space{o.GPU}, false, toRelay},
		{relayTraffic, first, first, false, toDirect},
		{changingTraffic, first, []device.Space{o.GPU, relay}, true, toRelay},
	}
	if len(o.Relays) == 1 {
		return scenes
	}
	scenes = append(scenes, scene{name: noTraffic, relays: o.Relays})
	for n := 1; n <= min(len(o.Relays), 4); n *= 2 {
		name := fmt.Sprintf("copies over %d relays' links", n)
		if n == 1 {
			name = relayTraffic
		}
		scenes = append(scenes, scene{name: name, relays: o.Relays, busy: o.Relays[:n]})
	}
	return scenes
}

// others are the flows of a scene's traffic: enough for a copy over one link that shares it.
func (r *rig) others(d Direction, s scene) ([]flow, error) {
	var flows []flow
	for _, gpu := range s.busy {
		f, err := r.own(slices.Index(r.o.gpus(), gpu), d)
		if err != nil {
			return nil, err
		}
		if f.stream, err = r.stream(gpu, "others, "+string(d)); err != nil {
			return nil, err
		}
		f.copies = int(2*r.o.Bytes/f.bytes) + 2*turnCopies
		flows = append(flows, f)
	}
	return flows, nil
}

// beside measures a copy beside traffic: its rate, that of the traffic, and the part of the time
// in which there was some.
func (r *rig) beside(ctx context.Context, flows []flow, turns bool, run func() (time.Duration, error)) ([]float64, error) {
	every := 0
	if turns {
		every = turnCopies
	}
	x, err := r.start(flows, every)
	if err != nil {
		return nil, err
	}
	if err := x.began(ctx); err != nil {
		return nil, err
	}
	from := r.o.Machine.Now()
	took, err := run()
	if err != nil {
		return nil, err
	}
	to := from + took
	all, err := x.end(ctx)
	if err != nil {
		return nil, err
	}
	rate, last := 0.0, time.Duration(0)
	for _, p := range all {
		rate += (p.done(to) - p.done(from)) / took.Seconds()
		last = max(last, p.at[len(p.at)-1])
	}
	covered := 1.0
	if len(all) > 0 {
		covered = min(1, (last-from).Seconds()/took.Seconds())
	}
	return []float64{float64(r.o.Bytes) / took.Seconds(), rate, covered}, nil
}

// besideOthers measures a copy beside competitors, as beside does.
func (r *rig) besideOthers(ctx context.Context, d Direction, others []Competitor, run func() (time.Duration, error)) (values []float64, err error) {
	copied := func() (sum int64, err error) {
		for _, x := range others {
			n, err := x.Bytes(ctx)
			if err != nil {
				return 0, err
			}
			sum += n
		}
		return sum, nil
	}
	for _, x := range others {
		var idle int64
		if idle, err = x.Bytes(ctx); err != nil {
			return nil, err
		}
		if err = x.Start(ctx, d); err != nil {
			return nil, err
		}
		defer func() {
			if failed := x.Stop(ctx); err == nil {
				err = failed
			}
		}()
		for now := idle; now == idle; { // until it copies
			if now, err = x.Bytes(ctx); err == nil {
				err = ctx.Err()
			}
			if err != nil {
				return nil, err
			}
		}
	}
	before, err := copied()
	if err != nil {
		return nil, err
	}
	from := time.Now() // theirs is the same clock, whatever the machine's
	took, err := run()
	if err != nil {
		return nil, err
	}
	after, err := copied()
	if err != nil {
		return nil, err
	}
	return []float64{float64(r.o.Bytes) / took.Seconds(), float64(after-before) / time.Since(from).Seconds(), 1}, nil
}

// competitors are those of the GPUs that a scene has others on; none where the scene's traffic is flows of
// this process.
func (r *rig) competitors(ctx context.Context, s scene, known map[device.Space]Competitor) ([]Competitor, error) {
	if r.o.Others == nil || s.turns {
		return nil, nil
	}
	var others []Competitor
	for _, gpu := range s.busy {
		if known[gpu] == nil {
			x, err := r.o.Others(ctx, gpu)
			if err != nil {
				return nil, err
			}
			known[gpu] = x
		}
		others = append(others, known[gpu])
	}
	return others, nil
}

func (r *rig) traffic(ctx context.Context) (_ *Traffic, err error) {
	t := &Traffic{Bytes: r.o.Bytes, Processes: r.o.Others != nil}
	known := map[device.Space]Competitor{}
	defer func() { // other parts are measured without the contexts of other processes
		for _, x := range known {
			err = errors.Join(err, x.Close())
		}
	}()
	var cells []*cell
	// set puts the medians of a cell into a point.
	type set func(p *TrafficPoint, values []float64)
	var sets []func()
	for _, d := range directions {
		for _, s := range r.o.scenes() {
			flows, err := r.others(d, s)
			if err != nil {
				return nil, err
			}
			others, err := r.competitors(ctx, s, known)
			if err != nil {
				return nil, err
			}
			beside := func(ctx context.Context, run func() (time.Duration, error)) ([]float64, error) {
				if len(others) > 0 {
					return r.besideOthers(ctx, d, others, run)
				}
				return r.beside(ctx, flows, s.turns, run)
			}
			at := len(t.Points)
			t.Points = append(t.Points, TrafficPoint{Direction: d, Links: len(s.relays) + 1, Beside: s.name, Covered: 1})
			add := func(run func(ctx context.Context) ([]float64, error), to set) {
				c := &cell{run: run}
				cells = append(cells, c)
				sets = append(sets, func() {
					p, m := &t.Points[at], c.medians()
					p.Covered = min(p.Covered, m[2])
					to(p, m)
				})
			}
			add(func(ctx context.Context) ([]float64, error) {
				return beside(ctx, func() (time.Duration, error) {
					dst, src := r.ends(d, r.o.Bytes)
					took, err := r.native(ctx, d, dst, src)
					return took.host, err
				})
			}, func(p *TrafficPoint, m []float64) { p.Native = m[0] })
			splits := []split{r.o.statically(s.relays)}
			if len(s.uneven) > 0 {
				splits = append(splits, split{paths: s.uneven, chunk: r.o.ChunkBytes, depth: staticDepth})
			}
			for i, x := range splits {
				if err := r.checkSplit(ctx, d, x); err != nil {
					return nil, err
				}
				add(func(ctx context.Context) ([]float64, error) {
					return beside(ctx, func() (time.Duration, error) { return r.split(ctx, d, r.o.Bytes, x) })
				}, func(p *TrafficPoint, m []float64) { *[]*float64{&p.Even, &p.Uneven}[i] = m[0] })
			}
			engined := func(waits bool) func(ctx context.Context) ([]float64, error) {
				return func(ctx context.Context) (values []float64, err error) {
					err = r.with(r.o.GPU, tuning{relays: s.relays, waits: waits}, func(e *engine) (err error) {
						dst, src := r.ends(d, r.o.Bytes)
						if _, err := e.copy(ctx, dst, src); err != nil { // the first one is slower
							return err
						}
						values, err = beside(ctx, func() (time.Duration, error) {
							took, err := e.copy(ctx, dst, src)
							return took.host, err
						})
						return err
					})
					return values, err
				}
			}
			add(engined(false), func(p *TrafficPoint, m []float64) { p.Engine, p.Others = m[0], m[1] })
			add(engined(true), func(p *TrafficPoint, m []float64) { p.EngineWaits, p.OthersBeside = m[0], m[1] })
		}
	}
	if err := r.measure(ctx, TrafficPart, r.o.Rounds, cells); err != nil {
		return nil, err
	}
	for _, set := range sets {
		set()
	}
	return t, nil
}

func (t *Traffic) table(b *strings.Builder) {
	for _, d := range directions {
		fmt.Fprintf(b, "a copy of %s beside plain copies of others, %s, GB/s (Figures 10a and 11)\n", size(t.Bytes), d.words())
		w := tabwriter.NewWriter(b, 0, 0, 2, ' ', tabwriter.AlignRight)
		fmt.Fprintln(w, "links\tbeside\tnative\tstatic, even\tstatic, 1:2\tengine\tothers beside it\tengine that waits\tothers beside it\t")
		for _, p := range t.Points {
			if p.Direction != d {
				continue
			}
			uneven, others, beside := "–", "–", "–"
			if p.Uneven > 0 {
				uneven = gb(p.Uneven)
			}
			if p.Beside != noTraffic {
				others, beside = gb(p.Others), gb(p.OthersBeside)
			}
			fmt.Fprintf(w, "%d\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t", p.Links, p.Beside, gb(p.Native), gb(p.Even), uneven, gb(p.Engine), others, gb(p.EngineWaits), beside)
			if p.Covered < 0.98 {
				fmt.Fprintf(w, "others copied in %.0f %% of the time only\t", 100*p.Covered)
			}
			fmt.Fprintln(w)
		}
		w.Flush() //nolint:errcheck // writing to memory does not fail
		b.WriteString("\n")
	}
	if t.Processes {
		fmt.Fprintf(b, "copies over one link are those of another process; %s those of other streams of this one\n\n", changingTraffic)
	}
}

func (t *Traffic) targets() []Target {
	var all []Target
	if t == nil {
		return nil
	}
	for _, p := range t.Points {
		if p.Links == 2 && (p.Beside == directTraffic || p.Beside == relayTraffic) {
			all = append(all, atLeast(fmt.Sprintf("%s beside %s: engine over an even static split", p.Direction.words(), p.Beside), p.Engine/p.Even, trafficGain, ""))
		}
	}
	return all
}

func (t *Traffic) figure(on string) *figure.Bars {
	chart := &figure.Bars{
		Title:  "A copy over two links beside others' copies",
		Note:   fmt.Sprintf("%s, host to GPU, on %s", size(t.Bytes), on),
		X:      figure.Axis{Label: "GB/s"},
		Series: []string{"engine", "static split 1:1", "static split 1:2", "native copy"},
		Value:  func(v float64) string { return fmt.Sprintf("%.0f", v) },
	}
	for _, p := range t.Points {
		if p.Direction == ToGPU && p.Links == 2 {
			chart.Groups = append(chart.Groups, figure.Group{Name: p.Beside, Values: []float64{p.Engine / 1e9, p.Even / 1e9, p.Uneven / 1e9, p.Native / 1e9}})
		}
	}
	return chart
}

// Engines are two engines that copy at once.
type Engines struct {
	Bytes  int64         `json:"bytes"`
	Points []EnginePoint `json:"points"`
}

// EnginePoint is copies by two engines over all links, rates in bytes/s.
type EnginePoint struct {
	Direction Direction `json:"direction"`
	// To are the GPUs that the engines copy to, or from.
	To []string `json:"gpus"`
	// Alone is the first engine alone, Each both at once, Together the sum of their bytes over
	// the time until both have ended.
	Alone    float64   `json:"alone_bytes_per_s"`
	Each     []float64 `json:"each_bytes_per_s"`
	Together float64   `json:"together_bytes_per_s"`
}

// engineTurns is how many copies each engine makes in a measurement.
const engineTurns = 4

// engines measures two engines that copy to one GPU, and to two GPUs.
func (r *rig) engines(ctx context.Context) (*Engines, error) {
	g := &Engines{Bytes: r.o.targetBytes()}
	var cells []*cell
	for _, d := range directions {
		for _, second := range []device.Space{r.o.GPU, r.o.Relays[0]} {
			g.Points = append(g.Points, EnginePoint{Direction: d, To: []string{r.o.GPU.String(), second.String()}})
			cells = append(cells, &cell{run: func(ctx context.Context) ([]float64, error) { return r.twoEngines(ctx, d, second) }})
		}
	}
	if err := r.measure(ctx, EnginesPart, r.o.Rounds, cells); err != nil {
		return nil, err
	}
	for i := range g.Points {
		p, m := &g.Points[i], cells[i].medians()
		p.Alone, p.Each, p.Together = m[0], m[1:3], m[3]
	}
	return g, nil
}

// twoEngines is a measurement of two engines, the second one of copies from or to another GPU or
// the same.
func (r *rig) twoEngines(ctx context.Context, d Direction, second device.Space) (values []float64, err error) {
	n := r.o.targetBytes()
	type side struct {
		e        *engine
		dst, src device.Region
	}
	var sides [engines]side
	for i, gpu := range []device.Space{r.o.GPU, second} {
		s := &sides[i]
		others := slices.DeleteFunc(r.o.gpus(), func(x device.Space) bool { return x == gpu })
		if s.e, err = r.engine(gpu, i, tuning{relays: others}); err != nil {
			return nil, err
		}
		defer func() {
			if failed := s.e.close(); err == nil {
				err = failed
			}
		}()
		on := r.target(gpu)
		if i == 1 && gpu == r.o.GPU {
			on = r.local.Region(0, n)
		}
		s.dst, s.src = on, r.source.Region(int64(i)*n, n)
		if d == FromGPU {
			s.dst, s.src = r.back.Region(int64(i)*n, n), on
		}
	}
	run := func(sides []side) (each []float64, together float64, err error) {
		began, times := r.o.Machine.Now(), make([]time.Duration, len(sides))
		for range engineTurns {
			copies := make([]*pending, len(sides))
			for i, s := range sides {
				if copies[i], err = s.e.begin(s.dst, s.src); err != nil {
					return nil, 0, err
				}
			}
			for i, s := range sides {
				took, err := s.e.end(ctx, copies[i])
				if err != nil {
					return nil, 0, err
				}
				times[i] += took.device
			}
		}
		bytes := float64(engineTurns * n)
		for _, t := range times {
			each = append(each, bytes/t.Seconds())
		}
		return each, float64(len(sides)) * bytes / (r.o.Machine.Now() - began).Seconds(), nil
	}
	if _, _, err := run(sides[:]); err != nil { // the first one is slower
		return nil, err
	}
	alone, _, err := run(sides[:1])
	if err != nil {
		return nil, err
	}
	each, together, err := run(sides[:])
	return append(append(alone, each...), together), err
}

func (g *Engines) table(b *strings.Builder) {
	fmt.Fprintf(b, "two engines that copy %s each over all links, GB/s (Figure 10b)\n", size(g.Bytes))
	w := tabwriter.NewWriter(b, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "direction\tGPUs\tone alone\tfirst\tsecond\ttogether\t")
	for _, p := range g.Points {
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\t\n", p.Direction, strings.Join(p.To, ", "), gb(p.Alone), gb(p.Each[0]), gb(p.Each[1]), gb(p.Together))
	}
	w.Flush() //nolint:errcheck // writing to memory does not fail
	b.WriteString("\n")
}

// Direct is copies from one GPU to another beside copies of all GPUs from the host, rates in bytes/s.
type Direct struct {
	From string `json:"from"`
	To   string `json:"to"`
	// Alone, beside plain copies of all GPUs, and beside the same by one engine, which may relay.
	Alone        float64 `json:"alone_bytes_per_s"`
	BesidePlain  float64 `json:"beside_plain_bytes_per_s"`
	BesideEngine float64 `json:"beside_engine_bytes_per_s"`
	// Relayed is the part of the engine's bytes that went over relays.
	Relayed float64 `json:"relayed_fraction"`
	// The same where the GPUs' own copies have no precedence on their links.
	BesideLongest  float64 `json:"beside_engine_no_direct_first_bytes_per_s"`
	RelayedLongest float64 `json:"relayed_fraction_no_direct_first"`
}

func (r *rig) betweenGPUs(ctx context.Context) (*Direct, error) {
	gpus := r.o.gpus()
	x := &Direct{From: gpus[0].String(), To: gpus[1].String()}
	f, err := r.between(gpus[0], gpus[1])
	if err != nil {
		return nil, err
	}
	f.copies *= 2
	owns, err := r.owns(len(gpus), ToGPU)
	if err != nil {
		return nil, err
	}
	first := &cell{run: func(ctx context.Context) ([]float64, error) {
		rates, err := r.busyRates(ctx, append([]flow{f}, owns...))
		return rates[:min(1, len(rates))], err
	}}
	engined := func(longest bool) *cell {
		return &cell{run: func(ctx context.Context) ([]float64, error) { return r.besideEngine(ctx, f, longest) }}
	}
	second, third := engined(false), engined(true)
	alone := r.flowCell([]flow{f})
	if err := r.measure(ctx, DirectPart, r.o.Rounds, []*cell{alone, first, second, third}); err != nil {
		return nil, err
	}
	x.Alone, x.BesidePlain = alone.median(0), first.median(0)
	x.BesideEngine, x.Relayed = second.median(0), second.median(1)
	x.BesideLongest, x.RelayedLongest = third.median(0), third.median(1)
	return x, nil
}

// besideEngine is the rate of a flow while one engine copies from the host to all GPUs, each a
// relay for the others, with direct first or by the longest queue, and the part of the bytes that was relayed.
func (r *rig) besideEngine(ctx context.Context, f flow, longest bool) (values []float64, err error) {
	n := r.o.targetBytes()
	err = r.with(r.o.GPU, tuning{relays: r.o.gpus(), longest: longest}, func(e *engine) error {
		copies := func() error {
			for range engineTurns {
				var err error
				tickets := []waiter{}
				for _, s := range r.o.gpus() {
					t, failed := e.submit(r.target(s), r.source.Region(0, n), false)
					if failed != nil {
						err = failed
						break
					}
					tickets = append(tickets, t)
				}
				for _, t := range tickets {
					if failed := t.Wait(ctx); err == nil {
						err = failed
					}
				}
				if err != nil {
					return err
				}
			}
			return nil
		}
		if err := copies(); err != nil { // the first ones are slower
			return err
		}
		x, err := r.start([]flow{f}, 0)
		if err != nil {
			return err
		}
		if err := x.began(ctx); err != nil {
			return err
		}
		from := r.o.Machine.Now()
		if err := copies(); err != nil {
			return err
		}
		to := r.o.Machine.Now()
		all, err := x.end(ctx)
		if err != nil {
			return err
		}
		p := &all[0]
		to = max(min(to, p.at[len(p.at)-1]), from+1)
		relayed, bytes := 0.0, 0.0
		for _, s := range e.Stats() {
			relayed += float64(s.RelayedBytes)
			if s.From == device.Host {
				bytes += float64(s.Bytes)
			}
		}
		values = []float64{(p.done(to) - p.done(from)) / (to - from).Seconds(), relayed / bytes}
		return nil
	})
	return values, err
}

// waiter is a copy that can be waited for.
type waiter interface {
	Wait(ctx context.Context) error
}

func (x *Direct) table(b *strings.Builder) {
	fmt.Fprintf(b, "copies from %s to %s beside copies of all GPUs from the host (Table 2)\n", x.From, x.To)
	w := tabwriter.NewWriter(b, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "\tGB/s\trelayed\t")
	fmt.Fprintf(w, "%s\t%s\t\t\n%s\t%s\t\t\n", directAlone, gb(x.Alone), directPlain, gb(x.BesidePlain))
	fmt.Fprintf(w, "%s\t%s\t%.1f %%\t\n%s\t%s\t%.1f %%\t\n", directOn, gb(x.BesideEngine), 100*x.Relayed, directOff, gb(x.BesideLongest), 100*x.RelayedLongest)
	w.Flush() //nolint:errcheck // writing to memory does not fail
	b.WriteString("direct first: each GPU's own chunks go first on its link; relayed: part of the engine's bytes that went over other GPUs' links\n\n")
}

// What stands beside the copies between GPUs.
const (
	directAlone = "alone"
	directPlain = "beside plain copies"
	directOn    = "beside the engine"
	directOff   = "beside the engine without direct first"
)

func (x *Direct) figure(on string) *figure.Bars {
	chart := &figure.Bars{
		Title:  "Copies between two GPUs beside copies of all GPUs from the host",
		Note:   fmt.Sprintf("From %s to %s; %.0f %% of the engine's bytes are relayed, %.0f %% without direct first; on %s", x.From, x.To, 100*x.Relayed, 100*x.RelayedLongest, on),
		X:      figure.Axis{Label: "GB/s"},
		Series: []string{"copies between the GPUs"},
		Value:  func(v float64) string { return fmt.Sprintf("%.0f", v) },
	}
	for _, g := range []struct {
		name string
		rate float64
	}{{directAlone, x.Alone}, {directPlain, x.BesidePlain}, {directOn, x.BesideEngine}, {directOff, x.BesideLongest}} {
		chart.Groups = append(chart.Groups, figure.Group{Name: g.name, Values: []float64{g.rate / 1e9}})
	}
	return chart
}
