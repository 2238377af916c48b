// Package server serves the OpenAI API over HTTP: completions and chat
// completions, also in the forms of the Responses API and of Anthropic's Messages API,
// whole or as server-sent events, the list of models, and beside them
// vLLM's tokenize and detokenize, health, load, version and Prometheus metrics, and, for
// operators, /debug/residency and the stream of /debug/events, and on the admin address
// what acts: sleep and wake, the reset of caches, and changes of settings. Several models can be served, each
// found by its name.
//
// # What it is not
//
// It neither loads nor runs a model: it turns bodies into engine requests, and
// updates of the engine into JSON. It knows neither experts nor peers: what it shows
// of them are counts, events and values with a JSON form. It does not
// route between nodes; the names of its metrics are those that routers know from
// vLLM.
//
// # Invariants
//
//   - No request body, whatever it holds, gets a worse status than 4xx, unless what it bans and what
//     it asks for leave no token to sample, which looks like a broken model: 500. Otherwise 5xx means
//     that this node cannot serve now, or is broken.
//   - Every error has OpenAI's shape, {"error": {message, type, param, code}}, or on Anthropic's paths
//     theirs, and names the member of the body that it is about.
//   - A client that leaves, or reads nothing for Options.WriteTimeout, ends its
//     request in the engine and holds up no other.
//   - A client that follows events and reads slowly loses some, reads how many, and delays
//     nothing.
//   - Serve returns when no request works on the model any more.
//
// # What a body may hold
//
// A member that would change a completion, or the order of completions, and that this server
// does not do is an error, and so is one that it does not know: no request is served without
// what it asks for. What changes neither is ignored; Members lists both, with the reason. Of
// two members of the same name the last counts, and null is the same as no member. The
// messages that clients keep can be sent back as they are.
//
// # What a chat's completion holds
//
// Package models/chat/output splits the text into reasoning, content and tool calls, each choice by itself, by
// the formats in Model. A streamed completion has the same ones as a whole one, and a chunk for every token.
//
// # Three forms of a chat
//
// A body of /v1/chat/completions, /v1/responses or /v1/messages becomes the same chatRequest, which converse has
// generated; a responseShape writes what comes of it, chatResponse by itself and the other two from parts.
//
// # Example
//
//	metrics := server.NewMetrics("built-in")
//	s := server.New(server.Options{Metrics: metrics})
//	go s.Serve(ctx, listener) // 503 until there is a model
//	s.SetModels(&server.Model{Names: []string{"built-in"}, Engine: e, Tokenizer: tok, Template: tmpl, MaxModelLen: 256})
package server
