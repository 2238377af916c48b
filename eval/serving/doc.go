// Package serving measures an OpenAI-compatible server under load, as vllm bench serve does:
// requests arrive at a rate, at a rising one, or as a trace says, up to a maximum run at once, and
// of each are measured time to first token, time per output token, inter-token latency and
// end-to-end latency.
//
// # What it is not
//
// It serves nothing, and knows a server by its URL only: moeserve, vLLM, or another. It counts tokens by what the server reports as usage.
//
// # How it measures
//
// Each request streams. Its clock starts when it is sent, which waits for the arrival time,
// and with a limit of concurrency for an earlier request to end. TTFT ends with the first
// chunk of a token, ITL is between two such chunks, end-to-end latency ends with the stream,
// and TPOT is the time from the first token to that end over all tokens but the first. The chunk of a token
// may have no text.
//
// # Invariants
//
//   - The same seed gives the same arrivals and the same requests.
//   - A failed request is counted with its reason, and is in no other figure.
//   - A result's JSON has vLLM's keys, in its units.
//
// # Example
//
//	c := serving.Client{BaseURL: "http://127.0.0.1:8000", Endpoint: serving.Completions, Model: "built-in"}
//	ids, err := c.Vocabulary(ctx)
//	requests := serving.Random{Count: 100, InputLen: 128, OutputLen: 32}.Requests(ids, 0)
//	r, err := serving.Run(ctx, &c, serving.Options{Requests: requests, OutputLen: 32, Arrivals: serving.Arrivals{Rate: 4}})
//	err = serving.WriteTable(os.Stdout, &r)
package serving
