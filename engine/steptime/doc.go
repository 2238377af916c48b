// Package steptime predicts how long a step takes, from what it computes and from what steps
// have taken, and decides by that how many prompt tokens a step may have beside the tokens that
// sequences decode. A step that computes a whole prompt delays the next token of every running
// sequence: the time between two tokens (inter-token latency, ITL) is that of a step.
//
// The package is pure: no goroutine, clock or IO, and the same calls give the same answers.
//
// # The model
//
// Options.Predict, the planner's, gives the time that hardware and shapes allow. What steps
// measured, divided by it, corrects it: the median of the last 8 for each number of tokens,
// two to an octave, in one table for steps with prompts, and one for those that only decode, which
// may be CUDA graphs. Between numbers of tokens that were measured it is interpolated over the
// logarithm. So constant costs (launches, the host's work between steps) and kernels that reach
// less than the hardware's rates are covered, and one slow step changes nothing.
//
// A time that was measured too high, while something else used the GPU, would never be measured
// again if it kept steps from having so many tokens. So what larger steps took is forgotten after
// 256 steps with fewer prompt tokens.
//
// # The limit
//
// With Options.MaxSeconds a step that decodes has as many prompt tokens as keep it within 90 % of
// that. Without, it has the larger one of two numbers:
//
//   - As many as make it take twice as long as without prompts, so that the longest times
//     between two tokens are well below three times the median. Shorter steps would gain little: of
//     what prompts and decodes take together, the steps' constant part is already small.
//   - As many as give prompts half of the rate that they have in steps of their own: with fewer,
//     which is with few sequences that decode, the prompts would pay for little. A step of a
//     mixture of experts reads almost all weights from some hundreds of tokens on, whatever it
//     computes, so that is where tokens begin to cost time.
//
// In either case prompts get 64 tokens of a step. Where that step takes too long already, as decoding
// alone does or as experts are copied for any number of tokens, they get as many more as lengthen it
// by 10 %, so that they do not starve. They get all that time allows, so that TTFT is as short as it can be. Steps in which
// nothing decodes are not limited.
//
// # What it is not
//
// It does not bound the time of a step that only decodes: fewer sequences do (--max-num-seqs).
//
// # Example
//
//	p := steptime.New(steptime.Options{Predict: predict, MaxSeconds: 0.03, StepTokens: 8192})
//	n := p.PromptTokens(scheduler.Mix{Decodes: 324, DecodeContext: 324 * 200}, 7868)
//	p.Measured(scheduler.Mix{Decodes: 324, DecodeContext: 324 * 200, Prompt: n}, 0.0262)
package steptime
