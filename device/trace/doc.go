// Package trace writes down what the streams of a machine do when, in the Chrome trace
// format, which ui.perfetto.dev and chrome://tracing read: a row for each stream, named,
// below the memory space that it belongs to.
//
// A Writer takes spans from whoever knows them. A machine that knows when its operations
// begin and end tells it itself. For others there is Wrap: a machine whose streams put
// events around copies and waits, and around what is enqueued through Stream.Span, and
// whose host streams look at the clock. It costs two events for each operation, so it is
// for runs that are traced and no others.
//
// # What it is not
//
// It does not say why a stream stood still: package pipeline counts that. It keeps
// nothing but what has not ended, and reads nothing back.
//
// # Invariants
//
//   - What is written is one JSON object once Close has returned, whatever happened
//     before; Close reports the first error of writing.
//   - A wrapped machine runs the same operations in the same order on the same streams.
//   - Spans of one stream do not overlap.
//
// # Example
//
//	w := trace.NewWriter(file)
//	m := trace.Wrap(machine, w)
//	s, err := m.NewStream(device.HBM(0), device.StreamOptions{Name: "compute"})
//	…
//	err = errors.Join(m.Close(), w.Close())
package trace
