package trace

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"strconv"
	"sync"
	"time"

	"github.com/moeserve/moeserve/device"
)

// Span is one operation of a stream.
type Span struct {
	Space  device.Space
	Stream string
	// Op is the kind of operation, Name its own name, if it has one.
	Op   Op
	Name string
	// Start and End are times on the machine's clock.
	Start, End time.Duration
	// Bytes of a copy; 0 for other operations.
	Bytes int64
	// Note is the stream's note when the operation was enqueued, or nil.
	Note *Note
	// Err is the error of a failed operation, or nil.
	Err error
}

// Op is a kind of operation.
type Op string

// The kinds of operations.
const (
	// Launch is a kernel, or a function on a host stream.
	Launch Op = "launch"
	// Callback is host work that only handles the completion of other operations.
	Callback Op = "callback"
	Copied   Op = "copy"
	// Wait is a wait for an event or a fence.
	Wait Op = "wait"
)

// Shorter waits and callbacks are not written: waits that had ended when they began, and
// callbacks that delay nothing. They would be half of all slices.
const (
	minWait     = 2 * time.Microsecond
	minCallback = 50 * time.Microsecond
)

// Writer writes spans as they come. It may be used from several goroutines. Methods of a
// nil Writer do nothing.
type Writer struct {
	mu     sync.Mutex
	w      *bufio.Writer
	out    io.Writer
	err    error
	told   bool // Flush has returned err
	tracks map[trackID]*track
	// processes whose names have been written.
	processes map[int]bool
	links     map[trackID]*link
	started   bool
	line      []byte
	latest    args
	// points are signaled by copies in flight; flows counts arrows.
	points points
	flows  int64
	// step is the latest step.
	step *Step
}

// trackID identifies a stream's track in the viewer.
type trackID struct {
	space  device.Space
	stream string
}

// track is the state of a stream's track.
type track struct {
	tid int
	// end of the latest slice, in ns.
	end int64
	// pendingCopy is a copy of which more chunks may follow.
	pendingCopy operation
	// step and layer are the open slices around the latest operation.
	step, layer enclosing
}

// enclosing is a slice around others; it is written once it has ended.
type enclosing struct {
	open  bool
	start int64
	// of is the step, number that of the layer.
	of     *Step
	number int
	// events within the slice.
	events []byte
}

// NewWriter returns a Writer to w, which it does not close.
func NewWriter(w io.Writer) *Writer {
	return &Writer{
		w: bufio.NewWriterSize(w, 1<<20), out: w, tracks: map[trackID]*track{}, processes: map[int]bool{}, links: map[trackID]*link{}, points: points{},
	}
}

// Begin starts a step: copies requested from now on belong to it.
func (w *Writer) Begin(s *Step) {
	if w == nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.step = s
}

// Add writes a span, unless it takes no time or is a short wait or callback.
func (w *Writer) Add(s Span) {
	took := s.End - s.Start
	if w == nil || took <= 0 || s.Err == nil && (s.Op == Wait && took < minWait || s.Op == Callback && took < minCallback) {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	at := trackID{s.Space, s.Stream}
	r := w.track(at)
	// A device's clock may be less exact than the host's, so spans could overlap.
	x := operation{Span: s, start: max(int64(s.Start), r.end), chunks: 1}
	x.end = max(int64(s.End), x.start)
	if s.Op == Copied && s.Note != nil && s.Note.Priority != "" {
		w.link(at).add(w, x.start, x.end, s.Bytes)
	}
	if r.pendingCopy.continues(&x) {
		r.pendingCopy.end, r.pendingCopy.Bytes, r.pendingCopy.Note = x.end, r.pendingCopy.Bytes+s.Bytes, s.Note
		r.pendingCopy.chunks++
		r.end = x.end
		return
	}
	w.writePendingCopy(at, r)
	if s.Note != nil && s.Note.copy != nil && s.Err == nil {
		r.pendingCopy = x
	} else {
		w.writeOperation(at, r, &x)
	}
	r.end = x.end
}

// operation is a span in the form in which it is written.
type operation struct {
	Span
	start, end int64 // ns
	// chunks of a copy that are one slice.
	chunks int
}

// maxGap is the maximum time between chunks of a copy that are written as one slice, in ns.
const maxGap = int64(10 * time.Microsecond)

// continues reports whether x is the next chunk of the copy.
func (o *operation) continues(x *operation) bool {
	return o.chunks > 0 && x.Err == nil && x.Note != nil && x.Note.copy == o.Note.copy && x.Note.StartedAs == o.Note.StartedAs && x.Note.Relay == o.Note.Relay &&
		x.start-o.end <= maxGap
}

// writePendingCopy writes the copy of which a track has chunks.
func (w *Writer) writePendingCopy(at trackID, r *track) {
	if r.pendingCopy.chunks > 0 {
		w.writeOperation(at, r, &r.pendingCopy)
		r.pendingCopy = operation{}
	}
}

// writeOperation writes one operation.
func (w *Writer) writeOperation(at trackID, r *track, s *operation) {
	w.nest(at, r, s.start, s.Note)
	name := s.name()
	took := time.Duration(s.end - s.start)
	w.beginTrackEvent('X', name, at, s.start)
	w.line = append(w.line, `,"cat":"`...)
	w.line = append(w.line, s.Op...)
	w.line = append(w.line, `","dur":`...)
	w.line = appendMicros(w.line, s.end-s.start)
	a := w.args()
	if s.Op == Copied && s.Bytes > 0 {
		a.integer("bytes", s.Bytes)
		a.rate("GB/s", float64(s.Bytes)/took.Seconds()/1e9)
		if s.chunks > 1 {
			a.integer("chunks", int64(s.chunks))
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
		// In the middle, since other slices may begin or end at the ends.
		w.connect(&s.Span, anchor{at, s.start + (s.end-s.start)/2})
	}
}

// name returns the name of the slice.
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

// nest ends and begins the slices of steps and layers around an operation.
func (w *Writer) nest(at trackID, r *track, start int64, n *Note) {
	var step *Step
	layer := NoLayer
	if n != nil && n.Nested && n.Step != nil {
		step, layer = n.Step, n.Layer
	}
	if l := &r.layer; l.open && (step != r.step.of || layer != l.number) {
		l.open = false
		r.step.events = append(r.step.events, w.enclosingEvent(at, r, l, "layer "+strconv.Itoa(l.number), func(a *args) {
			a.integer("step", r.step.of.Number)
			a.integer("layer", int64(l.number))
		})...)
	}
	if s := &r.step; s.open && step != s.of {
		s.open = false
		w.write(w.enclosingEvent(at, r, s, s.of.name(), func(a *args) {
			a.integer("step", s.of.Number)
			a.integer("sequences", int64(s.of.Sequences))
			a.integer("prefill_tokens", int64(s.of.PrefillTokens))
			a.integer("decode_tokens", int64(s.of.DecodeTokens))
			a.text("plan", s.of.Plan)
		}))
	}
	if step != nil && !r.step.open {
		r.step = enclosing{open: true, start: start, of: step, events: r.step.events[:0]}
	}
	if layer != NoLayer && !r.layer.open {
		r.layer = enclosing{open: true, start: start, number: layer, events: r.layer.events[:0]}
	}
}

// enclosingEvent returns the event of a step or a layer that ended with the track's latest
// operation, followed by the events within. Viewers need the outer slice first if both begin
// at once.
func (w *Writer) enclosingEvent(at trackID, r *track, o *enclosing, name string, describe func(*args)) []byte {
	w.beginTrackEvent('X', name, at, o.start)
	w.line = append(w.line, `,"dur":`...)
	w.line = appendMicros(w.line, r.end-o.start)
	a := w.args()
	describe(a)
	a.end()
	w.line = append(append(w.line, '}'), o.events...)
	return w.line
}

// print writes a note's fields.
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
	a.text("relay", n.Relay)
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

// connect writes the arrows that begin or end in a slice.
func (w *Writer) connect(s *Span, at anchor) {
	if src := s.Note.source; src != nil && s.Op == Copied {
		src.at, src.written = at, true
		for _, to := range src.waiters {
			w.arrow(at, to)
		}
		src.waiters = nil
	}
	if s.Note.waits == nil || s.Op == Wait {
		return
	}
	for _, src := range s.Note.waits.sources {
		if src.written {
			w.arrow(src.at, at)
		} else {
			src.waiters = append(src.waiters, at)
		}
	}
	s.Note.waits.sources = nil
}

// arrow writes an arrow between two slices.
func (w *Writer) arrow(from, to anchor) {
	w.flows++
	for i, p := range [...]anchor{from, to} {
		w.beginTrackEvent("sf"[i], "copy", p.track, p.at)
		w.line = append(w.line, `,"cat":"copy","id":`...)
		w.line = strconv.AppendInt(w.line, w.flows, 10)
		if i == 1 {
			w.line = append(w.line, `,"bp":"e"`...)
		}
		w.endEvent()
	}
}

// enginePID is the process of the engine's counters. The other processes of the file are the
// memory spaces.
const enginePID = 1000

// Counter writes the value of a quantity of the engine from a time on. Viewers show it as
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
	w.beginEvent('C', name, pid, at)
	a := w.args()
	a.number(unit, value)
	a.end()
	w.endEvent()
}

// linkWindow is the time over which a link's throughput is averaged, in ns.
const linkWindow = int64(time.Millisecond)

// link is the throughput counter of a stream's copies.
type link struct {
	name string
	pid  int
	// bytes were copied in the window that begins at window, in ns.
	window int64
	bytes  float64
	// atZero: the latest value written is 0.
	atZero bool
}

// link returns a stream's counter.
func (w *Writer) link(at trackID) *link {
	l := w.links[at]
	if l == nil {
		l = &link{name: at.stream, pid: pid(at.space), window: -1, atZero: true}
		w.links[at] = l
	}
	return l
}

// add divides a copy's bytes over the windows in which it ran.
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

// flush writes the current window, and 0 if the next does not follow at once.
func (l *link) flush(w *Writer, next int64) {
	if l.window >= 0 {
		w.counter(l.name, "GB/s", l.pid, l.window, l.bytes/float64(linkWindow))
		l.atZero = l.bytes == 0
		if next != l.window+linkWindow && !l.atZero {
			w.counter(l.name, "GB/s", l.pid, l.window+linkWindow, 0)
			l.atZero = true
		}
	}
	l.window, l.bytes = next, 0
}

// pid returns the process of a memory space. The host's is not 0, which viewers take for the
// kernel's idle process.
func pid(s device.Space) int { return int(s) + 1 }

// firstTID is above all process numbers: viewers take a thread with its process's number for
// the main thread.
const firstTID = enginePID + 1

// track returns a stream's track, and writes its name the first time.
func (w *Writer) track(at trackID) *track {
	if r := w.tracks[at]; r != nil {
		return r
	}
	r := &track{tid: firstTID + len(w.tracks)}
	w.tracks[at] = r
	w.process(pid(at.space), at.space.String(), int(at.space))
	w.metadata("thread_name", at, at.stream)
	return r
}

// process writes the name of a process, and its place in the order shown.
func (w *Writer) process(pid int, name string, order int) {
	if w.processes[pid] {
		return
	}
	w.processes[pid] = true
	w.beginEvent('M', "process_name", pid, 0)
	a := w.args()
	a.text("name", name)
	a.end()
	w.endEvent()
	w.beginEvent('M', "process_sort_index", pid, 0)
	a = w.args()
	a.integer("sort_index", int64(order))
	a.end()
	w.endEvent()
}

func (w *Writer) metadata(what string, at trackID, name string) {
	w.beginTrackEvent('M', what, at, 0)
	a := w.args()
	a.text("name", name)
	a.end()
	w.endEvent()
}

// beginTrackEvent begins an event of a track; endEvent ends it.
func (w *Writer) beginTrackEvent(phase byte, name string, at trackID, ts int64) {
	tid := w.tracks[at].tid
	w.beginEvent(phase, name, pid(at.space), ts)
	w.line = append(w.line, `,"tid":`...)
	w.line = strconv.AppendInt(w.line, int64(tid), 10)
}

// beginEvent begins an event of a process.
func (w *Writer) beginEvent(phase byte, name string, pid int, ts int64) {
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

func (w *Writer) endEvent() {
	w.line = append(w.line, '}')
	w.write(w.line)
}

// write writes events; each begins with a comma.
func (w *Writer) write(line []byte) {
	if !w.started {
		w.started = true
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

// Flush writes out what has been added, also through a compressing writer, so that it is there
// where the process is killed. Only the first call after an error returns it.
func (w *Writer) Flush() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	pending := w.w.Buffered() > 0
	err := w.w.Flush()
	if f, ok := w.out.(interface{ Flush() error }); ok && err == nil && pending {
		err = f.Flush()
	}
	if w.err == nil {
		w.err = err
	}
	if w.err == nil || w.told {
		return nil
	}
	w.told = true
	return w.err
}

// Close writes what is pending and ends the file. Nothing may be added afterwards.
func (w *Writer) Close() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	for at, r := range w.tracks {
		w.writePendingCopy(at, r)
		w.nest(at, r, r.end, nil)
	}
	for _, l := range w.links {
		l.flush(w, -1)
	}
	if !w.started {
		w.print("{\"traceEvents\":[")
	}
	w.print("\n],\"displayTimeUnit\":\"ms\"}\n")
	if err := w.w.Flush(); w.err == nil {
		w.err = err
	}
	if w.err != nil {
		return fmt.Errorf("--trace: %w", w.err)
	}
	return nil
}

// args are the arguments of an event, written only if there are any.
type args struct {
	w       *Writer
	started bool
}

// args begins the arguments of the current event.
func (w *Writer) args() *args {
	w.latest = args{w: w}
	return &w.latest
}

func (a *args) key(key string) {
	sep := `,"args":{"`
	if a.started {
		sep = `,"`
	}
	a.started = true
	a.w.line = append(append(append(a.w.line, sep...), key...), `":`...)
}

func (a *args) integer(key string, v int64) {
	a.key(key)
	a.w.line = strconv.AppendInt(a.w.line, v, 10)
}

// count writes a number unless it is 0, text a string unless it is empty.
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

// rate writes four digits. An operation that takes no time, as one whose times lie within those
// of the operation before it, has none.
func (a *args) rate(key string, v float64) {
	if math.IsInf(v, 0) {
		return
	}
	a.key(key)
	a.w.line = strconv.AppendFloat(a.w.line, v, 'g', 4, 64)
}

// list writes ascending numbers as ranges: "0-3,7".
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
	if a.started {
		a.w.line = append(a.w.line, '}')
	}
}

// appendMicros appends nanoseconds in microseconds, the format's unit, exactly.
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
