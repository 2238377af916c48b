// Package server answers HTTP in the shapes of the OpenAI API: completions and chat
// completions, whole or as server-sent events, the list of models, and beside them
// vLLM's tokenize and detokenize, health, version and Prometheus metrics, and, for
// operators, /debug/residency and the stream of /debug/events.
//
// # What it is not
//
// It neither loads nor runs a model: it turns bodies into engine requests, and
// updates of the engine into JSON. It knows neither experts nor peers: what it shows
// of them is handed to it as counts, events and values with a JSON form. It does not
// route between nodes; the names of its metrics are those that routers know from
// vLLM.
//
// # Invariants
//
//   - A request body, whatever it holds, gets an answer of status 4xx at worst; 5xx
//     says that this node cannot serve now, or is broken.
//   - Every error has OpenAI's shape, {"error": {message, type, param, code}}, and
//     names the member of the body that it is about.
//   - A client that leaves, or reads nothing for Options.WriteTimeout, ends its
//     request in the engine and holds up no other.
//   - Who follows events and reads slowly loses some, is told how many, and holds up
//     nobody.
//   - Serve returns when no request works on the model any more.
//
// # What a body may hold
//
// A member that this package does not know is an error, as it is for OpenAI: who
// asks for something must not be answered without it. Members of OpenAI's that
// change nothing about the answer here (user, metadata, store, …) are accepted. Of
// two members of the same name the last counts, and null is the same as leaving a
// member out.
//
// # Example
//
//	metrics := server.NewMetrics("built-in")
//	s := server.New(server.Options{Metrics: metrics})
//	go s.Serve(ctx, listener) // answers 503 until there is a model
//	s.SetModel(&server.Model{Name: "built-in", Engine: e, Tokenizer: tok, Template: tmpl, MaxModelLen: 256})
package server
