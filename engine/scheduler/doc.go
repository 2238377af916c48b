// Package scheduler decides which tokens each step computes: it admits sequences in
// order of arrival, divides a step's token budget among running sequences, and preempts
// the latest of them when the KV cache is full.
//
// The package is pure: no goroutine, clock or IO, and the same calls give the same plans.
// It does not account for KV blocks: each sequence comes with its Blocks, through which
// Plan reserves them. The engine reports arrivals (Add), ends (Remove), the results of a
// step (Done) and of a load (Loaded), and carries out each Plan.
//
// # States
//
// A sequence is waiting, loading or running. Admission gives a waiting sequence its
// blocks. Tokens that the KV cache already holds (Blocks.Match) are not computed again:
// where their blocks are ready the sequence runs at once; where they must be loaded it is
// loading until Loaded is called; where they are on their way it keeps waiting. A preempted sequence is waiting again.
//
// # Rules
//
//   - Running sequences are scheduled before waiting ones, each in order of arrival, and
//     sequences that decode (one token left) before prefills.
//   - Of the tokens that decodes leave, the earliest prompt gets as many as it needs, or at
//     least three quarters. Then come prompts that fit whole, so that a short one does not wait
//     for the end of a long one; what they leave goes to the others in order of arrival. A
//     prefill is cut into chunks accordingly.
//   - A sequence is admitted only when there are blocks for all its tokens and one more,
//     beside those that admitted prompts have yet to take, and no sequence was preempted or
//     lacked a block in this step. None is admitted before those that came earlier, but for
//     those that wait for content on its way.
//   - When a running sequence lacks a block, the latest running sequence is preempted:
//     it releases its blocks, waits in its place of arrival, and computes what the KV cache
//     then no longer holds of its tokens again. The earliest running sequence is never preempted for a later one, so at
//     least one sequence makes progress; Add checks that each sequence fits alone.
//   - A loading sequence is not preempted, since its blocks are being written. A running
//     sequence that lacks a block while only later ones are loading is skipped until they
//     run, and so is one for which copies hold enough free blocks: no other is preempted
//     for it.
//
// # Example
//
//	s := scheduler.New(scheduler.Limits{StepTokens: 2048, Sequences: 64, CacheTokens: manager.Capacity()})
//	s.Add(1, manager.NewTable(), 7, 39) // sequence 1: 7 tokens, at most 39
//	p := s.Plan()                       // one chunk: tokens 0 to 7 of sequence 1, then sample
//	s.Done(p.Chunks[0], 1)              // the step has ended and sampled one token
package scheduler
