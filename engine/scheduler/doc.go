// Package scheduler decides which rows each step has: it admits sequences in order
// of arrival, divides a step's rows among those that run, and preempts the latest
// of them when the KV cache is full.
//
// It is pure: no goroutine, clock or IO, and the same calls give the same plans. It has
// no account of blocks of its own: each sequence brings its Blocks along, through which
// Plan reserves them. The engine tells it what arrives (Add), what ended (Remove), what
// a step has brought (Done) and what was loaded (Loaded), and carries out what Plan
// says.
//
// # States
//
// A sequence waits, loads or runs. It is admitted from among those that wait, and then
// it has blocks. What the cache has of its first tokens (Blocks.Match) is not computed:
// where it is ready the sequence runs at once, else it loads until Loaded is called. A
// sequence that is preempted waits again.
//
// # Rules
//
//   - Running sequences come before waiting ones, and each in order of arrival;
//     those that need a single row (decoding) come before prompts.
//   - A prompt is cut into chunks where the step's rows end.
//   - A sequence is admitted only when there are blocks for all tokens that it has
//     and one more, and nobody was preempted or found no block in this step.
//   - When a running sequence finds no block, the latest running one is preempted:
//     it loses its blocks, waits in its place of arrival, and computes all its
//     tokens again. The earliest running sequence is never preempted for a later
//     one, so some sequence always gets on; and one sequence alone always fits,
//     which Add checks.
//   - A sequence that loads is not preempted, since its blocks are being written. One
//     that finds no block while only later ones load has no rows until they run.
//
// # Example
//
//	s := scheduler.New(scheduler.Limits{Rows: 2048, Sequences: 64, Tokens: manager.Capacity()})
//	s.Add(1, manager.NewTable(), 7, 39) // sequence 1: 7 tokens, at most 39
//	p := s.Plan()                       // one chunk: tokens 0 to 7 of sequence 1, and a draw
//	s.Done(p.Chunks[0], 1)              // the step is done and has drawn a token
package scheduler
