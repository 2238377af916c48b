package emulated

import (
	"fmt"
	"slices"

	"github.com/moeserve/moeserve/device"
)

// FindingKind classifies a Finding.
type FindingKind int

const (
	// Unordered: two accesses to the same bytes, at least one a write, that no event, fence
	// or host wait orders.
	Unordered FindingKind = iota
	// UseAfterFree: an access to freed or suspended memory.
	UseAfterFree
	// EarlyFree: a Free that nothing orders after an access.
	EarlyFree
	// Uninitialized: a read of bytes not written since they were allocated.
	Uninitialized
	// OutOfBounds: an access to a range that does not lie within one allocation.
	OutOfBounds
)

func (k FindingKind) String() string {
	switch k {
	case Unordered:
		return "unordered accesses"
	case UseAfterFree:
		return "use after free"
	case EarlyFree:
		return "freed too early"
	case Uninitialized:
		return "read of memory never written"
	case OutOfBounds:
		return "access outside of any allocation"
	}
	return fmt.Sprintf("FindingKind(%d)", int(k))
}

// Finding is one error found by the check.
type Finding struct {
	Kind FindingKind
	// Space and Label identify the memory; Label is empty if there is no allocation.
	Space device.Space
	Label string
	// First and Second are, for Unordered, the two operations; for UseAfterFree and
	// EarlyFree, the access and the free in the order in which they were issued. Other
	// kinds set only Second.
	First, Second Operation
	// Missing is the suggested fix.
	Missing string
}

// Operation is one access by a stream's operation or by the host.
type Operation struct {
	// Name is `copy`, `launch "name"`, `read`, `write` or `free`.
	Name string
	// Stream is empty for the host.
	Stream string
	Write  bool
	// Offset and Bytes are relative to the finding's memory; if there is none, Offset is
	// the address.
	Offset, Bytes int64
}

func (o Operation) String() string {
	who := "host"
	if o.Stream != "" {
		who = fmt.Sprintf("stream %q", o.Stream)
	}
	does := "reads"
	if o.Write {
		does = "writes"
	}
	return fmt.Sprintf("%s %s %s [%d, %d)", who, o.Name, does, o.Offset, o.Offset+o.Bytes)
}

func (f Finding) String() string {
	s := fmt.Sprintf("check: %s: memory %q on %s: ", f.Kind, f.Label, f.Space)
	if f.First.Name != "" {
		s += fmt.Sprintf("%s, then %s", f.First, f.Second)
	} else {
		s += f.Second.String()
	}
	return s + ": " + f.Missing
}

const (
	// maxFindings bounds the findings kept and reported.
	maxFindings = 100
	// pruneEvery is the number of checked operations between calls of prune.
	pruneEvery = 2048
)

// checker is the happens-before check.
//
// Each actor (each stream, and the host as one) has a vector clock. An operation's clock
// joins its enqueuer's clock at the time of the enqueue, its stream's earlier operations,
// and the clocks of the events and fences it waited for. Every byte's shadow holds its last
// write and the reads since. An access whose clock does not cover a conflicting access is a
// finding, whatever the order in which they really ran.
//
// Work with Host set counts as part of the host: it and the host know each other's
// accesses, so a channel between it and a goroutine needs no event. Other Work acts as its
// stream, also when it enqueues and waits while it runs; goroutines that it starts count as
// host.
//
// Once all actors know of an access, nothing can conflict with it any more, and prune
// removes it.
//
// A copy of unwritten bytes marks its destination unwritten and is no finding, unless all
// its bytes are unwritten: partly filled blocks are copied whole.
type checker struct {
	m         *Machine
	hostActor actor
	actors    int
	unused    []*actor
	findings  []Finding
	seen      map[string]bool
	// running maps each goroutine that is running Work to the Work's stream, or to nil for
	// Work with Host set.
	running map[uintptr]*stream
	// ofStreams counts the running Works (including nested ones) without Host set. While it
	// is 0, every caller counts as host and the goroutine need not be looked up.
	ofStreams int
	ops       int
	// parts is scratch space of copy.
	parts []run
}

func newChecker(m *Machine) *checker {
	return &checker{
		m: m, hostActor: actor{clock: vclock{1}}, actors: 1,
		seen: map[string]bool{}, running: map[uintptr]*stream{},
	}
}

// newActor returns an actor for a stream, reusing a closed stream's if possible. The host
// has known all accesses of the previous stream since that stream was closed, so they come
// before all of the new stream's; the new stream's accesses count as later, since Close
// took a snapshot.
func (c *checker) newActor() *actor {
	if n := len(c.unused); n > 0 {
		a := c.unused[n-1]
		c.unused = c.unused[:n-1]
		return a
	}
	a := &actor{id: c.actors, clock: make(vclock, c.actors+1)}
	a.clock[a.id] = 1
	c.actors++
	return a
}

func (c *checker) dropActor(a *actor) { c.unused = append(c.unused, a) }

// caller returns the actor that the calling goroutine acts for.
func (c *checker) caller() *actor {
	if s := c.callingStream(); s != nil {
		return s.actor
	}
	return &c.hostActor
}

func (c *checker) callingStream() *stream {
	if c.ofStreams == 0 {
		return nil
	}
	return c.running[goroutine()]
}

// enter marks the start of a Work on the calling goroutine; the returned function marks its
// end.
func (c *checker) enter(s *stream, host bool) func() {
	g := s.goroutine
	if c.m.o.Virtual {
		g = c.m.driver
	}
	outer, nested := c.running[g]
	if host {
		c.hostActor.join(s.actor.snapshot())
		c.running[g] = nil
	} else {
		c.running[g] = s
		c.ofStreams++
	}
	return func() {
		if host {
			s.actor.join(c.hostActor.snapshot())
		} else {
			c.ofStreams--
		}
		if nested {
			c.running[g] = outer
		} else {
			delete(c.running, g)
		}
	}
}

// accessRecord is an operation as stored in the shadow.
type accessRecord struct {
	name   string
	stream string
	actor  *actor
	id     int
	at     uint32
}

func (c *checker) record(a *actor, name, stream string) *accessRecord {
	d := &accessRecord{name: name, stream: stream, actor: a, id: a.id, at: a.tick()}
	if c.ops++; c.ops%pruneEvery == 0 {
		c.prune()
	}
	return d
}

func (d *accessRecord) operation(mem *memory, r device.Range, write bool) Operation {
	o := Operation{Name: d.name, Stream: d.stream, Write: write, Offset: int64(r.Addr), Bytes: r.Bytes}
	if mem != nil {
		o.Offset -= int64(mem.base)
	}
	return o
}

// known reports whether a knows that d has ended.
func (a *actor) known(d *accessRecord) bool { return d == nil || d.at <= a.clock.at(d.id) }

func (c *checker) report(f Finding) {
	key := fmt.Sprintf("%d %s %s %s %s %s", f.Kind, f.Label, f.First.Name, f.First.Stream, f.Second.Name, f.Second.Stream)
	if c.seen[key] || len(c.findings) >= maxFindings {
		return
	}
	c.seen[key] = true
	c.findings = append(c.findings, f)
	if c.m.o.Report != nil {
		c.m.o.Report(f)
	}
}

// unordered reports two conflicting accesses.
func (c *checker) unordered(mem *memory, first *accessRecord, firstWrites bool, second *accessRecord, r device.Range, writes bool) {
	if c.m.undefined {
		return
	}
	f := Finding{Kind: Unordered, Space: mem.space.id, Label: mem.label, First: first.operation(mem, r, firstWrites), Second: second.operation(mem, r, writes)}
	switch {
	case first.stream != "" && second.stream != "":
		f.Missing = fmt.Sprintf("let %q record an event (or signal a fence) behind the first, and %q wait for it before the second", first.stream, second.stream)
	case first.stream != "":
		f.Missing = fmt.Sprintf("let the host synchronize with %q behind the first", first.stream)
	default:
		f.Missing = fmt.Sprintf("let the host synchronize with %q before its access or, if the host is to come first, enqueue behind it", second.stream)
	}
	c.report(f)
}

// useAfterFree reports an access to a range that does not lie within one live allocation.
func (c *checker) useAfterFree(d *accessRecord, r device.Range, write bool) {
	f := Finding{Kind: OutOfBounds, Second: d.operation(nil, r, write), Missing: "the range must lie within one allocation"}
	if mem := c.m.memory.findFreed(r.Addr); mem != nil {
		f.Kind, f.Space, f.Label = UseAfterFree, mem.space.id, mem.label
		f.First = Operation{Name: "free", Write: true, Bytes: mem.bytes}
		f.Second = d.operation(mem, r, write)
		f.Missing = "free the memory only when all that uses it has ended"
		if mem.suspended {
			f.First.Name, f.Missing = "suspend", "resume the memory before it is used"
		}
	} else if i := c.m.memory.at(r.Addr); i < len(c.m.memory.live) && c.m.memory.live[i].base < r.End() {
		mem := c.m.memory.live[i]
		f.Space, f.Label = mem.space.id, mem.label
		f.Second = d.operation(mem, r, write)
	}
	c.report(f)
}

// read checks and records a read. partial reports whether the range may include unwritten
// bytes.
func (c *checker) read(d *accessRecord, mem *memory, r device.Range, partial bool) {
	lo := int64(r.Addr - mem.base)
	written := false
	c.visit(mem, lo, r.Bytes, func(lo, hi int64, old *cell) *cell {
		at := device.Range{Addr: mem.base + device.Addr(lo), Bytes: hi - lo}
		if old.write != d && !d.actor.known(old.write) {
			c.unordered(mem, old.write, true, d, at, false)
		}
		if old.written {
			written = true
		} else if !partial {
			c.uninitialized(d, mem, at)
		}
		return old.withRead(d)
	})
	if partial && !written {
		c.uninitialized(d, mem, r)
	}
}

func (c *checker) uninitialized(d *accessRecord, mem *memory, r device.Range) {
	if c.m.undefined {
		return
	}
	c.report(Finding{
		Kind: Uninitialized, Space: mem.space.id, Label: mem.label, Second: d.operation(mem, r, false),
		Missing: "write these bytes first, or declare what is really read",
	})
}

// write checks and records a write, and replaces the range's cells by now, which marks the
// bytes written or unwritten.
func (c *checker) write(d *accessRecord, mem *memory, r device.Range, now *cell) {
	lo := int64(r.Addr - mem.base)
	c.visit(mem, lo, r.Bytes, func(lo, hi int64, old *cell) *cell {
		at := device.Range{Addr: mem.base + device.Addr(lo), Bytes: hi - lo}
		c.conflicts(d, mem, at, old)
		return now
	})
}

// conflicts reports the accesses in old that are not ordered before the write d.
func (c *checker) conflicts(d *accessRecord, mem *memory, at device.Range, old *cell) {
	if old.write != d && !d.actor.known(old.write) {
		c.unordered(mem, old.write, true, d, at, true)
	}
	for _, r := range old.reads {
		if r != d && !d.actor.known(r) {
			c.unordered(mem, r, false, d, at, true)
		}
	}
}

// visit replaces the cells of the n bytes at lo by the results of f.
func (c *checker) visit(mem *memory, lo, n int64, f func(lo, hi int64, old *cell) *cell) {
	if n > 0 {
		mem.shadow.update(lo, lo+n, f)
	}
}

// copy checks a copy that is about to move its bytes.
func (c *checker) copy(s *stream, o *op) {
	d := c.record(s.actor, "copy", s.name)
	for i := range o.parts() {
		c.copyPart(d, o.part(i))
	}
}

func (c *checker) copyPart(d *accessRecord, o part) {
	c.read(d, o.srcMem, o.src, true)
	off := int64(o.dst.Addr-o.dstMem.base) - int64(o.src.Addr-o.srcMem.base)
	written, not := &cell{write: d, written: true}, &cell{write: d}
	lo := int64(o.src.Addr - o.srcMem.base)
	// The parts are gathered first, since source and destination may lie in one allocation.
	c.parts = c.parts[:0]
	o.srcMem.shadow.each(lo, lo+o.src.Bytes, func(lo, hi int64, from *cell) {
		now := not
		if from.written {
			now = written
		}
		c.parts = append(c.parts, run{lo + off, hi + off, now})
	})
	for _, p := range c.parts {
		c.write(d, o.dstMem, device.Range{Addr: o.dstMem.base + device.Addr(p.lo), Bytes: p.hi - p.lo}, p.cell)
	}
}

// work checks the ranges that a Work declared when it was enqueued.
func (c *checker) work(s *stream, o *op) {
	d := c.record(s.actor, fmt.Sprintf("launch %q", o.work.Name), s.name)
	s.access.deed, s.access.written = d, &cell{write: d, written: true}
	for _, r := range o.work.Reads {
		c.declare(s, r, false)
	}
	for _, r := range o.work.Writes {
		c.declare(s, r, true)
	}
}

// use marks the allocations that a Work declares as in use, so that they cannot be freed
// before it ends. It returns an error if a declared range is not within one live
// allocation.
func (c *checker) use(s *stream, o *op) error {
	for i, ranges := range [][]device.Range{o.work.Reads, o.work.Writes} {
		for _, r := range ranges {
			if r.Bytes == 0 {
				continue
			}
			mem := c.m.memory.find(r)
			if mem == nil {
				name := fmt.Sprintf("launch %q", o.work.Name)
				c.useAfterFree(c.record(&c.hostActor, name, s.name), r, i == 1)
				return &device.Error{
					Op: "launch", Space: s.sp.id,
					Detail: fmt.Sprintf("%q on %s: %v is not in one live allocation: it was freed, or is too long", o.work.Name, s, r),
				}
			}
			o.used = append(o.used, mem)
		}
	}
	for _, mem := range o.used {
		mem.users++
	}
	return nil
}

// declared checks a range that a Work declares while it runs.
func (c *checker) declared(s *stream, r device.Range, write bool) {
	if s.cur == nil || !s.busy || s.cur.kind != opWork {
		panic(fmt.Sprintf("emulated: Access used on %s while none of its work runs", s))
	}
	c.declare(s, r, write)
}

func (c *checker) declare(s *stream, r device.Range, write bool) {
	if r.Bytes == 0 {
		return
	}
	d := s.access.deed
	mem := c.m.memory.find(r)
	switch {
	case mem == nil:
		c.useAfterFree(d, r, write)
	case write:
		c.write(d, mem, r, s.access.written)
	default:
		c.read(d, mem, r, false)
	}
}

// host checks Memory.Read and Memory.Write.
func (c *checker) host(mem *memory, r device.Range, write bool) {
	if r.Bytes == 0 {
		return
	}
	s := c.callingStream()
	var d *accessRecord
	name := "read"
	if write {
		name = "write"
	}
	if s != nil {
		d = c.record(s.actor, fmt.Sprintf("launch %q", s.cur.work.Name), s.name)
	} else {
		d = c.record(&c.hostActor, name, "")
	}
	if write {
		c.write(d, mem, r, &cell{write: d, written: true})
	} else {
		c.read(d, mem, r, false)
	}
}

// outOfBounds reports a copy that was refused because a range is not within one allocation.
func (c *checker) outOfBounds(s *stream, r device.Range, write bool) {
	c.useAfterFree(c.record(&c.hostActor, "copy", s.name), r, write)
}

// free checks that all accesses are ordered before the caller's free.
func (c *checker) free(mem *memory) {
	d := c.record(c.caller(), "free", "")
	mem.shadow.each(0, mem.bytes, func(lo, hi int64, old *cell) {
		at := device.Range{Addr: mem.base + device.Addr(lo), Bytes: hi - lo}
		if !d.actor.known(old.write) {
			c.earlyFree(mem, old.write.operation(mem, at, true), d.operation(mem, at, true))
		}
		for _, r := range old.reads {
			if !d.actor.known(r) {
				c.earlyFree(mem, r.operation(mem, at, false), d.operation(mem, at, true))
			}
		}
	})
}

// freeInUse reports a Free that was refused because operations still use the memory.
func (c *checker) freeInUse(mem *memory) {
	d := c.record(c.caller(), "free", "")
	all := device.Range{Addr: mem.base, Bytes: mem.bytes}
	for _, s := range c.m.streams {
		uses := func(o *op) {
			u, r, write := accessRecord{name: "copy", stream: s.name}, all, false
			switch {
			case o.kind == opCopy:
				var found bool
				if r, write, found = o.uses(mem); !found {
					return
				}
			case slices.Contains(o.used, mem):
				u.name = fmt.Sprintf("launch %q", o.work.Name)
			default:
				return
			}
			c.earlyFree(mem, u.operation(mem, r, write), d.operation(mem, all, true))
		}
		if s.busy {
			uses(s.cur)
		}
		for i := range s.q.n {
			uses(s.q.at(i))
		}
	}
}

func (c *checker) earlyFree(mem *memory, use, free Operation) {
	c.report(Finding{
		Kind: EarlyFree, Space: mem.space.id, Label: mem.label, First: use, Second: free,
		Missing: fmt.Sprintf("let the host synchronize with %q before the free", use.Stream),
	})
}

// prune removes the accesses known to every actor that can still act.
func (c *checker) prune() {
	all := c.hostActor.clock
	for _, s := range c.m.streams {
		if s.q.n == 0 && !s.busy {
			// The stream's next operation is still to be enqueued, by the host or by Work
			// that runs now on a busy stream.
			continue
		}
		knows := s.actor.clock
		if s.q.n > 0 && !s.busy {
			knows = joined(knows, s.q.head().clock)
		}
		all = met(all, knows)
	}
	quiet := map[*cell]*cell{}
	for _, mem := range c.m.memory.live {
		mem.shadow.update(0, mem.bytes, func(_, _ int64, old *cell) *cell {
			if old == quietWritten || old == quietUnwritten {
				return old
			}
			now, ok := quiet[old]
			if !ok {
				now = old.without(all)
				quiet[old] = now
			}
			return now
		})
	}
}

// Findings returns the findings of the check so far.
func (m *Machine) Findings() []Finding {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.check == nil {
		return nil
	}
	return slices.Clone(m.check.findings)
}
