// Package scheduler decides which tokens each step computes: it admits sequences in the
// order of a Policy, divides a step's token budget among running sequences, and preempts
// the last of them when the KV cache is full.
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
// loading until Loaded is called; where they are on their way it keeps waiting. A preempted
// sequence is waiting again.
//
// # Rules
//
// Sequences are in the order of the policy: "first" and "last" are by arrival under FCFS, by
// priority and then by arrival under ByPriority, and by virtual runtime under Fair.
//
//   - Running sequences are scheduled before waiting ones, each in order, and
//     sequences that decode (one token left) before prefills.
//   - With a Pace, a step that decodes has only as many prompt tokens as that allows, at least one,
//     so that prompts do not hold up decodes, and none starves.
//   - Of the tokens that decodes leave, the first prompt gets as many as it needs, or at
//     least three quarters. Then come prompts that fit whole, so that a short one does not wait
//     for the end of a long one; what they leave goes to the others in order. A
//     prefill is cut into chunks accordingly.
//   - A sequence is admitted only when there are blocks for all its tokens and one more,
//     beside those that admitted prompts have yet to take, and no sequence was preempted or
//     lacked a block in this step. None is admitted before those that come first, but for
//     those that wait for content on its way.
//   - A sequence that waits for room is matched again only where blocks that were released, or have
//     become shared, may suffice; one that waits for content is cheap to ask.
//   - When a running sequence lacks a block, the last running sequence is preempted:
//     it releases its blocks, waits in its place in the order, and computes what the KV cache
//     then no longer holds of its tokens again. The first running sequence is never preempted
//     for another, so at least one makes progress; Add checks that each sequence fits alone.
//   - A loading sequence is not preempted, since its blocks are being written. A running
//     sequence that lacks a block while only ones behind it are loading is skipped until they
//     run, and so is one for which copies hold enough free blocks: no other is preempted
//     for it.
//
// # Fair
//
// Under Fair, sequences that do not all fit take turns, as threads do under Linux's completely
// fair scheduler, so that a short completion does not wait for the end of long ones.
//
//   - A sequence's virtual runtime is the number of tokens that it has sampled, divided by its
//     weight, which a priority sets as a nice level does: 1.25 to the power of minus it. Tokens
//     of prompts do not count, nor do those that are computed again. So a sequence is not
//     preempted just when the KV of its long prompt is there, or for having been preempted.
//   - A new sequence starts at the minimum of those that have sampled a quantum. Ones that have
//     not do not count, as otherwise sequences that keep coming would overtake older ones for
//     ever. While none waits, no sequence gets further ahead than a quantum.
//   - An admitted sequence has a quantum of Policy.Granularity tokens. It is admitted only when
//     there are blocks for these, which are promised to it, so it is not preempted before it
//     has sampled them, and there is at most one preemption for each quantum of tokens.
//   - A running sequence past its quantum gives way to a waiting one that it is ahead of by the
//     granularity, in tokens of its own. The furthest ahead does first, and as many as make
//     room. When a running sequence lacks a block, the last one past its quantum is preempted.
//
// So none of several sequences of one weight and length gets ahead of another by more than the
// granularity and a block, if prompts and what is computed again or loaded fit into one step.
// Where lengths differ, a long one also waits until enough others are that far ahead. Fairness
// is between sequences that compete for blocks, or places in the batch: a step's tokens should
// suffice for all that run to decode.
//
// # Example
//
//	s := scheduler.New(scheduler.Limits{StepTokens: 2048, Sequences: 64, CacheTokens: manager.Capacity()}, scheduler.Policy{})
//	s.Add(1, blocks, 7, 39, 0)          // sequence 1: 7 tokens, at most 39
//	p := s.Plan()                       // one chunk: tokens 0 to 7 of sequence 1, then sample
//	s.Done(p.Chunks[0], 1)              // the step has ended and sampled one token
package scheduler
