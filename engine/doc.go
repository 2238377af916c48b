// Package engine turns requests into tokens: it admits requests, decides with a
// pure function (Schedule) which rows each step has, has the pipeline run them, and
// ends what is finished.
//
// # What it is not
//
// It does not order the work inside a step (package pipeline), and knows neither
// text (it takes and gives token ids) nor devices.
//
// # Invariants
//
//   - A request is admitted when the KV blocks for all that it may grow to are
//     free, in order of arrival; so a running request never runs out of them.
//   - Requests join and leave between steps only.
//   - A request's tokens do not depend on its neighbors, nor on how its prompt is
//     cut into chunks, on backends whose results per row do not depend on other
//     rows.
//   - A step that failed because a copy failed is run again, at most
//     Options.Retries times.
//
// # Example
//
//	e := engine.New(engine.Options{Pipeline: p, KV: pool, MaxModelLen: 4096, Vocab: config.Vocab, StopIDs: config.EOS})
//	outs, err := e.Generate(ctx, []engine.Request{{Prompt: ids, MaxNewTokens: 32}}, nil)
package engine
