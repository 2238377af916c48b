// Package trace writes a timeline of a machine's streams in the Chrome trace format, which
// ui.perfetto.dev reads: a row for each stream, named, below the memory space that it
// belongs to.
//
// A Writer takes spans from machines. One that knows when its operations begin and end (an
// emulated one) reports them itself. For others there is Wrap: a machine whose streams put
// events around copies and waits, and around what is enqueued through Stream.Span, and
// whose host streams look at the clock. It costs two events for each operation, so it is
// for runs that are traced and no others.
//
// # Notes
//
// What a span cannot know of itself is in a Note: step, layer, stage, experts, tier,
// priority, the shape of a GEMM. A stream of a traced machine is a device.Annotator, and
// each operation keeps the note that its stream had when it was enqueued. Package pipeline
// annotates the streams of a step, package transfer those of copies, with what the label of
// a request (a Describer) knows of it. Where nothing is traced the Writer is nil, no note is
// made, and nothing is allocated.
//
// Operations with a Nested note stand within slices for their step and layer, which end
// where the next begins. Chunks of one copy that follow each other are one slice. Waits and
// callbacks that are over at once are left out.
//
// # Arrows
//
// Request says which point a copy raises, Awaits which points the next operation of a stream
// waits for. Where both are known the copy's last slice gets an arrow to the slice of
// the operation, whichever of them is written first; other copies and waits get none.
//
// # What it is not
//
// It does not say why a stream stalled: package pipeline counts that. It keeps nothing but
// what has not ended, and reads nothing back.
//
// # Invariants
//
//   - What is written is one JSON object once Close has returned, whatever happened
//     before; Close reports the first error of writing.
//   - A wrapped machine runs the same operations in the same order on the same streams.
//   - Slices of one row are nested or do not overlap, also where a device's clock is less
//     exact: viewers drop others.
//   - Each arrow has a number of its own, a beginning and an end.
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
