// Package trace writes a timeline of a machine's streams in the Chrome trace format, which
// ui.perfetto.dev reads: a named track for each stream, below the memory space that it
// belongs to.
//
// A Writer receives spans from machines. An emulated machine knows when its operations begin
// and end, and reports them itself. Wrap traces other machines: their streams record events
// around copies and waits, and around what is enqueued through Stream.Span, and their host
// streams read the clock. Wrap costs two events for each operation, so only traced runs use
// it.
//
// # Notes
//
// A Note has what a span does not know: step, layer, stage, experts, tier, priority, the
// shape of a GEMM. A stream of a traced machine is a device.Annotator, and each operation
// keeps the note that its stream had when it was enqueued. Package pipeline annotates the
// streams of a step. Package transfer annotates those of copies, with what the label of a
// request (a Describer) adds. Without tracing the Writer is nil, no note is made, and
// nothing is allocated.
//
// Operations with a Nested note are nested in slices for their step and layer, which end
// where the next begins. Consecutive chunks of one copy are one slice. Waits and callbacks
// that end at once are not written.
//
// # Arrows
//
// Request registers the point that a copy signals, Awaits the points that the next operation
// of a stream waits for. If both are known, an arrow leads from the copy's last slice to the
// slice of the operation, whichever is written first. Other copies and waits get no arrow.
//
// # What it is not
//
// The package does not explain why a stream stalled: package pipeline measures that. A
// Writer keeps only operations in flight, and reads nothing back.
//
// # Invariants
//
//   - The output is one JSON object once Close has returned, whatever happened before. Close
//     returns the first write error.
//   - A wrapped machine runs the same operations in the same order on the same streams.
//   - Slices of one track are nested or do not overlap, even if a device's clock is less
//     exact: viewers drop overlapping slices.
//   - Each arrow has a unique number, a beginning and an end.
//
// # Example
//
//	w := trace.NewWriter(file)
//	m := trace.Wrap(machine, w)
//	s, err := m.NewStream(device.HBM(0), device.StreamOptions{Name: "compute"})
//	trace.Annotate(s, &trace.Note{Step: step, Layer: 3, Nested: true})
//	…
//	err = errors.Join(m.Close(), w.Close())
package trace
