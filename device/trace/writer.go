package trace

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"sync"
	"time"

	"github.com/moeserve/moeserve/device"
)

// Span is one operation of a stream.
type Span struct {
	Space  device.Space
	Stream string
	// Op is what it is, Name what it is called, if it has a name of its own.
	Op   Op
	Name string
	// Start and End are on the machine's clock.
	Start, End time.Duration
	// Bytes of a copy; 0 for other operations.
	Bytes int64
	// Note is that of the stream when the operation was enqueued, or nil.
	Note *Note
	// Err is why it failed, or nil.
	Err error
}

// Op is what an operation is.
type Op string

// The operations.
const (
	// Launch is a kernel, or work of the host in a kernel's place.
	Launch Op = "launch"
	// Callback is work by which the host learns of something.
	Callback Op = "callback"
	Copied   Op = "copy"
	// Wait is one for an event or a fence.
	Wait Op = "wait"
)

// What takes less is left out: waits that are over when they begin, and callbacks that
// hold nothing up, which would be half of all slices.
const (
	minWait     = 2 * time.Microsecond
	minCallback = 50 * time.Microsecond
)

// Writer writes spans as they come. It may be used from several goroutines. Methods of a
// nil Writer do nothing.
type Writer struct {
	mu   sync.Mutex
	w    *bufio.Writer
	err  error
	rows map[row]*rowState
	// processes that have been named.
	processes map[int]bool
	links     map[row]*link
	begun     bool
	line      []byte
	latest    args
	// points are raised by copies under way; flows counts arrows.
	points points
	flows  int64
	// step is the latest.
	step *Step
}

// row is a stream as the file knows it.
type row struct {
	space  device.Space
	stream string
}

// rowState is what has been written of a row.
type rowState struct {
	tid int
	// end of the latest slice, in ns.
	end int64
	// held is a copy of which more parts may come.
	held operation
	// step and layer that it is in.
	step, layer outer
}

// outer is a slice around others, which is written once it has ended.
type outer struct {
	open  bool
	start int64
	// of is the step, number the layer's.
	of     *Step
	number int
	// events within it.
	events []byte
}

// NewWriter writes to w, which it does not close.
func NewWriter(w io.Writer) *Writer {
	return &Writer{
		w: bufio.NewWriterSize(w, 1<<20), rows: map[row]*rowState{}, processes: map[int]bool{}, links: map[row]*link{}, points: points{},
	}
}

// Begin begins a step: copies requested from now on belong to it.
func (w *Writer) Begin(s *Step) {
	if w == nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.step = s
}

// Add writes a span. What takes no time is left out, and what is of no interest.
func (w *Writer) Add(s Span) {
	took := s.End - s.Start
	if w == nil || took <= 0 || s.Err == nil && (s.Op == Wait && took < minWait || s.Op == Callback && took < minCallback) {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	at := row{s.Space, s.Stream}
	r := w.row(at)
	// Devices' clocks are read in other units than this one's.
	x := operation{Span: s, start: max(int64(s.Start), r.end), parts: 1}
	x.end = max(int64(s.End), x.start)
	if s.Op == Copied && s.Note != nil && s.Note.Priority != "" {
		w.link(at).add(w, x.start, x.end, s.Bytes)
	}
	if r.held.continues(&x) {
		r.held.end, r.held.Bytes, r.held.Note = x.end, r.held.Bytes+s.Bytes, s.Note
		r.held.parts++
		r.end = x.end
		return
	}
	w.release(at, r)
	if s.Note != nil && s.Note.copy != nil && s.Err == nil {
		r.held = x
	} else {
		w.operation(at, r, &x)
	}
	r.end = x.end
}

// operation is a span as it is written.
type operation struct {
	Span
	start, end int64 // ns
	// parts of a copy that are one slice.
	parts int
}

// maxGap is the longest time between parts of a copy that are written as one slice, in ns.
const maxGap = int64(10 * time.Microsecond)

// continues says whether x is another part of the copy.
func (o *operation) continues(x *operation) bool {
	return o.parts > 0 && x.Err == nil && x.Note != nil && x.Note.copy == o.Note.copy && x.Note.StartedAs == o.Note.StartedAs &&
		x.start-o.end <= maxGap
}

// release writes the copy of which a row has held parts.
func (w *Writer) release(at row, r *rowState) {
	if r.held.parts > 0 {
		w.operation(at, r, &r.held)
		r.held = operation{}
	}
}

// operation writes one.
func (w *Writer) operation(at row, r *rowState, s *operation) {
	w.nest(at, r, s.start, s.Note)
	name := s.name()
	took := time.Duration(s.end - s.start)
	w.open('X', name, at, s.start)
	w.line = append(w.line, `,"cat":"`...)
	w.line = append(w.line, s.Op...)
	w.line = append(w.line, `","dur":`...)
	w.line = appendMicros(w.line, s.end-s.start)
	a := w.args()
	if s.Op == Copied && s.Bytes > 0 {
		a.integer("bytes", s.Bytes)
		a.rate("GB/s", float64(s.Bytes)/took.Seconds()/1e9)
		if s.parts > 1 {
			a.integer("chunks", int64(s.parts))
		}
	}
	if s.Note != nil {
		s.Note.print(a, took)
	}
	if s.Err != nil {
		a.text("error", s.Err.Error())
	}
	a.end()
	switch w.line = append(w.line, '}'); {
	case r.layer.open:
		r.layer.events = append(r.layer.events, w.line...)
	case r.step.open:
		r.step.events = append(r.step.events, w.line...)
	default:
		w.write(w.line)
	}
	if s.Note != nil && s.Err == nil {
		// Not where it begins or ends, where others may.
		w.connect(&s.Span, place{at, s.start + (s.end-s.start)/2})
	}
}

// name is what the slice is called.
func (o *operation) name() string {
	n := o.Note
	if n == nil {
		n = &Note{}
	}
	switch {
	case o.Op == Wait && n.Cause != "":
		return "wait: " + n.Cause
	case o.Op != Wait && n.Name != "":
		return n.Name
	case o.Name != "":
		return o.Name
	case o.Op == Copied && n.Stage != "":
		return "copy: " + n.Stage
	}
	return string(o.Op)
}

// nest ends and begins the slices of steps and layers that an operation stands in.
func (w *Writer) nest(at row, r *rowState, start int64, n *Note) {
	var step *Step
	layer := NoLayer
	if n != nil && n.Nested && n.Step != nil {
		step, layer = n.Step, n.Layer
	}
	if l := &r.layer; l.open && (step != r.step.of || layer != l.number) {
		l.open = false
		r.step.events = append(r.step.events, w.around(at, r, l, "layer "+strconv.Itoa(l.number), func(a *args) {
			a.integer("step", r.step.of.Number)
			a.integer("layer", int64(l.number))
		})...)
	}
	if s := &r.step; s.open && step != s.of {
		s.open = false
		w.write(w.around(at, r, s, s.of.name(), func(a *args) {
			a.integer("step", s.of.Number)
			a.integer("sequences", int64(s.of.Sequences))
			a.integer("prefill_tokens", int64(s.of.PrefillTokens))
			a.integer("decode_tokens", int64(s.of.DecodeTokens))
			a.text("plan", s.of.Plan)
		}))
	}
	if step != nil && !r.step.open {
		r.step = outer{open: true, start: start, of: step, events: r.step.events[:0]}
	}
	if layer != NoLayer && !r.layer.open {
		r.layer = outer{open: true, start: start, number: layer, events: r.layer.events[:0]}
	}
}

// around is the slice of a step or a layer that has ended with the row's latest operation,
// followed by what is in it: a viewer wants the outer one first where both begin at once.
func (w *Writer) around(at row, r *rowState, o *outer, name string, describe func(*args)) []byte {
	w.open('X', name, at, o.start)
	w.line = append(w.line, `,"dur":`...)
	w.line = appendMicros(w.line, r.end-o.start)
	a := w.args()
	describe(a)
	a.end()
	w.line = append(append(w.line, '}'), o.events...)
	return w.line
}

// print prints what a note has.
func (n *Note) print(a *args, took time.Duration) {
	if n.Step != nil {
		a.integer("step", n.Step.Number)
	}
	if n.Layer != NoLayer {
		a.integer("layer", int64(n.Layer))
	}
	a.text("stage", n.Stage)
	a.count("micro_batch", n.MicroBatch)
	a.count("group", n.Group)
	a.list("experts", n.Experts)
	a.text("tier", n.Tier)
	a.text("priority", n.Priority)
	a.text("started_as", n.StartedAs)
	a.text("cause", n.Cause)
	a.text("copy", n.Detail)
	if s := &n.Shape; *s != (Shape{}) {
		a.count("m", s.M)
		a.count("n", s.N)
		a.count("k", s.K)
		a.count("num_experts", s.Experts)
		if s.Flops > 0 {
			a.rate("TFLOP/s", float64(s.Flops)/took.Seconds()/1e12)
		}
	}
}

// connect draws the arrows that begin or end in a slice.
func (w *Writer) connect(s *Span, at place) {
	if src := s.Note.source; src != nil && s.Op == Copied {
		src.at, src.known = at, true
		for _, to := range src.waiting {
			w.arrow(at, to)
		}
		src.waiting = nil
	}
	if s.Note.waits == nil || s.Op == Wait {
		return
	}
	for _, src := range s.Note.waits.sources {
		if src.known {
			w.arrow(src.at, at)
		} else {
			src.waiting = append(src.waiting, at)
		}
	}
	s.Note.waits.sources = nil
}

// arrow draws one from a slice to another.
func (w *Writer) arrow(from, to place) {
	w.flows++
	for i, p := range [...]place{from, to} {
		w.open("sf"[i], "copy", p.row, p.at)
		w.line = append(w.line, `,"cat":"copy","id":`...)
		w.line = strconv.AppendInt(w.line, w.flows, 10)
		if i == 1 {
			w.line = append(w.line, `,"bp":"e"`...)
		}
		w.close()
	}
}

// Processes of the file are the memory spaces, and one for the engine.
const enginePID = 1000

// Counter writes what a quantity of the engine is from a moment on. Viewers show it as
// "name unit".
func (w *Writer) Counter(name, unit string, at time.Duration, value float64) {
	if w == nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.process(enginePID, "engine", -1)
	w.counter(name, unit, enginePID, int64(at), value)
}

func (w *Writer) counter(name, unit string, pid int, at int64, value float64) {
	w.begin('C', name, pid, at)
	a := w.args()
	a.number(unit, value)
	a.end()
	w.close()
}

// linkWindow is over what time the throughput of a link is averaged, in ns.
const linkWindow = int64(time.Millisecond)

// link is the throughput of a stream's copies.
type link struct {
	name string
	pid  int
	// bytes that were copied in the window that begins then.
	window int64
	bytes  float64
	// zero says that the counter is.
	zero bool
}

// link is that of a stream.
func (w *Writer) link(at row) *link {
	l := w.links[at]
	if l == nil {
		l = &link{name: at.stream, pid: pid(at.space), window: -1, zero: true}
		w.links[at] = l
	}
	return l
}

// add spreads a copy over the windows that it was under way in.
func (l *link) add(w *Writer, start, end, bytes int64) {
	perNS := float64(bytes) / float64(max(1, end-start))
	for start < end {
		window := start / linkWindow * linkWindow
		if l.window != window {
			l.flush(w, window)
		}
		till := min(end, window+linkWindow)
		l.bytes += perNS * float64(till-start)
		start = till
	}
}

// flush writes the window that is over, and that there is nothing until the next.
func (l *link) flush(w *Writer, next int64) {
	if l.window >= 0 {
		w.counter(l.name, "GB/s", l.pid, l.window, l.bytes/float64(linkWindow))
		l.zero = l.bytes == 0
		if next != l.window+linkWindow && !l.zero {
			w.counter(l.name, "GB/s", l.pid, l.window+linkWindow, 0)
			l.zero = true
		}
	}
	l.window, l.bytes = next, 0
}

// pid is the process of a memory space: the host is not 0, which viewers take for the
// kernel's idle process.
func pid(s device.Space) int { return int(s) + 1 }

// firstTID is above all processes: a viewer takes a thread with its process's number for the
// main one.
const firstTID = enginePID + 1

// row is a stream's row, which is named when it is first met.
func (w *Writer) row(at row) *rowState {
	if r := w.rows[at]; r != nil {
		return r
	}
	r := &rowState{tid: firstTID + len(w.rows)}
	w.rows[at] = r
	w.process(pid(at.space), at.space.String(), int(at.space))
	w.metadata("thread_name", at, at.stream)
	return r
}

// process names one, which is shown in this order.
func (w *Writer) process(pid int, name string, order int) {
	if w.processes[pid] {
		return
	}
	w.processes[pid] = true
	w.begin('M', "process_name", pid, 0)
	a := w.args()
	a.text("name", name)
	a.end()
	w.close()
	w.begin('M', "process_sort_index", pid, 0)
	a = w.args()
	a.integer("sort_index", int64(order))
	a.end()
	w.close()
}

func (w *Writer) metadata(what string, at row, name string) {
	w.open('M', what, at, 0)
	a := w.args()
	a.text("name", name)
	a.end()
	w.close()
}

// open begins an event of a row; close ends it.
func (w *Writer) open(phase byte, name string, at row, ts int64) {
	tid := w.rows[at].tid
	w.begin(phase, name, pid(at.space), ts)
	w.line = append(w.line, `,"tid":`...)
	w.line = strconv.AppendInt(w.line, int64(tid), 10)
}

// begin begins an event of a process.
func (w *Writer) begin(phase byte, name string, pid int, ts int64) {
	w.line = append(append(w.line[:0], ",\n{\"ph\":\""...), phase)
	w.line = append(w.line, '"')
	if name != "" {
		w.line = append(w.line, `,"name":`...)
		w.line = appendText(w.line, name)
	}
	w.line = append(w.line, `,"ts":`...)
	w.line = appendMicros(w.line, ts)
	w.line = append(w.line, `,"pid":`...)
	w.line = strconv.AppendInt(w.line, int64(pid), 10)
}

func (w *Writer) close() {
	w.line = append(w.line, '}')
	w.write(w.line)
}

// write writes events, each of which begins with a comma.
func (w *Writer) write(line []byte) {
	if !w.begun {
		w.begun = true
		w.print("{\"traceEvents\":[")
		line = line[1:]
	}
	if _, err := w.w.Write(line); w.err == nil {
		w.err = err
	}
}

func (w *Writer) print(s string) {
	if _, err := w.w.WriteString(s); w.err == nil {
		w.err = err
	}
}

// Close ends what was written. Nothing may be added any more.
func (w *Writer) Close() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	for at, r := range w.rows {
		w.release(at, r)
		w.nest(at, r, r.end, nil)
	}
	for _, l := range w.links {
		l.flush(w, -1)
	}
	if !w.begun {
		w.print("{\"traceEvents\":[")
	}
	w.print("\n],\"displayTimeUnit\":\"ms\"}\n")
	if err := w.w.Flush(); w.err == nil {
		w.err = err
	}
	if w.err != nil {
		return fmt.Errorf("trace: %w", w.err)
	}
	return nil
}

// args are an event's arguments, which are printed only where there are some.
type args struct {
	w    *Writer
	some bool
}

// args begins the arguments of the event that is open.
func (w *Writer) args() *args {
	w.latest = args{w: w}
	return &w.latest
}

func (a *args) key(key string) {
	sep := `,"args":{"`
	if a.some {
		sep = `,"`
	}
	a.some = true
	a.w.line = append(append(append(a.w.line, sep...), key...), `":`...)
}

func (a *args) integer(key string, v int64) {
	a.key(key)
	a.w.line = strconv.AppendInt(a.w.line, v, 10)
}

// count prints what is not 0, text what is not empty.
func (a *args) count(key string, v int) {
	if v != 0 {
		a.integer(key, int64(v))
	}
}

func (a *args) text(key, v string) {
	if v != "" {
		a.key(key)
		a.w.line = appendText(a.w.line, v)
	}
}

func (a *args) number(key string, v float64) {
	a.key(key)
	a.w.line = strconv.AppendFloat(a.w.line, v, 'f', -1, 64)
}

// rate prints four digits.
func (a *args) rate(key string, v float64) {
	a.key(key)
	a.w.line = strconv.AppendFloat(a.w.line, v, 'g', 4, 64)
}

// list prints ascending numbers as ranges: "0-3,7".
func (a *args) list(key string, v []int) {
	if len(v) == 0 {
		return
	}
	a.key(key)
	line := append(a.w.line, '"')
	for i := 0; i < len(v); {
		j := i
		for j+1 < len(v) && v[j+1] == v[j]+1 {
			j++
		}
		if i > 0 {
			line = append(line, ',')
		}
		line = strconv.AppendInt(line, int64(v[i]), 10)
		if j > i {
			line = strconv.AppendInt(append(line, '-'), int64(v[j]), 10)
		}
		i = j + 1
	}
	a.w.line = append(line, '"')
}

func (a *args) end() {
	if a.some {
		a.w.line = append(a.w.line, '}')
	}
}

// appendMicros prints nanoseconds in the format's unit, exactly.
func appendMicros(b []byte, ns int64) []byte {
	b = strconv.AppendInt(b, ns/1000, 10)
	if ns %= 1000; ns != 0 {
		b = append(b, '.', byte('0'+ns/100), byte('0'+ns/10%10), byte('0'+ns%10))
	}
	return b
}

func appendText(b []byte, s string) []byte {
	for i := range len(s) {
		if c := s[i]; c < ' ' || c > '~' || c == '"' || c == '\\' {
			quoted, _ := json.Marshal(s) // of a string it does not fail
			return append(b, quoted...)
		}
	}
	return append(append(append(b, '"'), s...), '"')
}
