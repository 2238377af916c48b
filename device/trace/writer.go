package trace

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/moeserve/moeserve/device"
)

// Span is one operation of a stream.
type Span struct {
	Space  device.Space
	Stream string
	// Op is what it is ("copy", "launch", "wait"), Name what it is called, if it has a
	// name of its own.
	Op, Name string
	// Start and End are on the machine's clock.
	Start, End time.Duration
	// Bytes of a copy; 0 for other operations.
	Bytes int64
	// Err is why it failed, or nil.
	Err error
}

// Writer writes spans as they come. It may be used from several goroutines.
type Writer struct {
	mu   sync.Mutex
	w    *bufio.Writer
	err  error
	rows map[row]int
	// spaces that have been named.
	spaces map[device.Space]bool
	begun  bool
}

// row is a stream as the file knows it.
type row struct {
	space  device.Space
	stream string
}

// NewWriter writes to w, which it does not close.
func NewWriter(w io.Writer) *Writer {
	return &Writer{w: bufio.NewWriterSize(w, 1<<20), rows: map[row]int{}, spaces: map[device.Space]bool{}}
}

// event is one of the format's: times are in microseconds.
type event struct {
	Name  string         `json:"name"`
	Phase string         `json:"ph"`
	Cat   string         `json:"cat,omitempty"`
	TS    float64        `json:"ts"`
	Dur   float64        `json:"dur"`
	PID   int            `json:"pid"`
	TID   int            `json:"tid"`
	Args  map[string]any `json:"args,omitempty"`
}

// Add writes a span. What takes no time is left out.
func (w *Writer) Add(s Span) {
	if s.End <= s.Start {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	e := event{
		Name: s.Name, Phase: "X", Cat: s.Op, TS: micros(s.Start), Dur: micros(s.End - s.Start),
		PID: int(s.Space), TID: w.row(row{s.Space, s.Stream}),
	}
	if e.Name == "" {
		e.Name = s.Op
	}
	if s.Bytes > 0 {
		e.Args = map[string]any{"bytes": s.Bytes, "GB/s": float64(s.Bytes) / 1e9 / (s.End - s.Start).Seconds()}
	}
	if s.Err != nil {
		e.Args = map[string]any{"error": s.Err.Error()}
	}
	w.event(e)
}

func micros(d time.Duration) float64 { return float64(d) / 1e3 }

// row is the number of a stream's row, which is named when it is first met.
func (w *Writer) row(r row) int {
	if n, ok := w.rows[r]; ok {
		return n
	}
	n := len(w.rows) + 1
	w.rows[r] = n
	if !w.spaces[r.space] {
		w.spaces[r.space] = true
		w.event(event{Name: "process_name", Phase: "M", PID: int(r.space), Args: map[string]any{"name": r.space.String()}})
	}
	w.event(event{Name: "thread_name", Phase: "M", PID: int(r.space), TID: n, Args: map[string]any{"name": r.stream}})
	return n
}

func (w *Writer) event(e event) {
	data, err := json.Marshal(e)
	if err == nil {
		if w.begun {
			w.write(",\n")
		} else {
			w.write("{\"traceEvents\":[\n")
		}
		w.begun = true
		w.write(string(data))
	}
	if w.err == nil {
		w.err = err
	}
}

func (w *Writer) write(s string) {
	if _, err := w.w.WriteString(s); w.err == nil {
		w.err = err
	}
}

// Close ends what was written. Nothing may be added any more.
func (w *Writer) Close() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.begun {
		w.write("{\"traceEvents\":[")
	}
	w.write("\n],\"displayTimeUnit\":\"ms\"}\n")
	if err := w.w.Flush(); w.err == nil {
		w.err = err
	}
	if w.err != nil {
		return fmt.Errorf("trace: %w", w.err)
	}
	return nil
}
