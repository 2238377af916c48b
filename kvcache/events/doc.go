// Package events publishes what happens to KV blocks over ZeroMQ, in the form of vLLM's KV events, so that a router of
// several nodes knows which node has which prefix.
//
//	p, err := events.Open(events.Options{Config: config, Topic: "kv@node-0@mixtral", BlockTokens: 16})
//	engine.Options{KVEvents: p.Publish, …}
//	err = p.Close()
//
// # Messages
//
// A message has three frames: the topic, the number of the batch (8 bytes, big-endian, from 0), and the batch as
// MessagePack: [seconds since 1970, [events], 0]. Events are maps with vLLM's names, see encode.go. The first batch of a
// process has the event AllBlocksCleared: whatever was known of an earlier process is not so any more.
//
// # What is lost
//
// Publish never waits. A subscriber that reads slowly, or comes late, finds batches missing by their numbers, and can ask
// for them on the replay endpoint, as long as they are kept. Where batches come faster than they are encoded, so that the
// queue is full, events are dropped for everybody; then the next batch begins with AllBlocksCleared: subscribers
// forget blocks that are there, and never believe in blocks that are not.
//
// # Invariants
//
//   - Who applies all batches in order, with none dropped, has the keys that each medium has.
//   - Batches are numbered without gaps, in the order of Publish.
//   - A subscriber holds up neither the engine nor other subscribers.
package events
