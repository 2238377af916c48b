package events

import (
	"bytes"

	"github.com/vmihailenco/msgpack/v5"

	"github.com/moeserve/moeserve/kvcache"
)

// batch is what one call of Publish brought.
type batch struct {
	seconds float64 // since 1970
	events  []kvcache.Event
	// cleared: AllBlocksCleared comes first.
	cleared bool
}

// encoder encodes batches.
type encoder struct {
	buffer bytes.Buffer
	to     *msgpack.Encoder
	// blockTokens is the number of tokens of a block.
	blockTokens int
}

func newEncoder(blockTokens int) *encoder {
	e := &encoder{blockTokens: blockTokens}
	e.to = msgpack.NewEncoder(&e.buffer)
	e.to.UseCompactInts(true)
	return e
}

// encode returns a batch as vLLM encodes its KVEventBatch: an array of the time, the events and
// data_parallel_rank. Each event is a map with its type under "type", which vLLM writes since its #42892; the order of
// the other keys is that of vLLM's fields.
func (e *encoder) encode(b batch) []byte {
	e.buffer.Reset()
	n := len(b.events)
	if b.cleared {
		n++
	}
	// A bytes.Buffer returns no error.
	_ = e.to.EncodeArrayLen(3)
	_ = e.to.EncodeFloat64(b.seconds)
	_ = e.to.EncodeArrayLen(n)
	if b.cleared {
		e.begin("AllBlocksCleared", 0)
	}
	for i := range b.events {
		if ev := &b.events[i]; len(ev.Stored) > 0 {
			e.stored(ev)
		} else {
			e.begin("BlockRemoved", 2)
			e.keys("block_hashes", ev.Removed)
			e.text("medium", ev.Medium)
		}
	}
	_ = e.to.EncodeInt(0)
	return bytes.Clone(e.buffer.Bytes())
}

func (e *encoder) stored(ev *kvcache.Event) {
	e.begin("BlockStored", 7)
	e.keys("block_hashes", ev.Stored)
	_ = e.to.EncodeString("parent_block_hash")
	// A parent says behind which tokens these come. Without any, as of prompts with a salt, it says nothing, and routers
	// report an error for one whose tokens they do not know.
	if ev.Parent == (kvcache.Key{}) || len(ev.Tokens) == 0 {
		_ = e.to.EncodeNil()
	} else {
		_ = e.to.EncodeBytes(ev.Parent[:])
	}
	_ = e.to.EncodeString("token_ids")
	_ = e.to.EncodeArrayLen(len(ev.Tokens)) // never nil
	for _, t := range ev.Tokens {
		_ = e.to.EncodeInt(int64(t))
	}
	_ = e.to.EncodeString("block_size")
	_ = e.to.EncodeInt(int64(e.blockTokens))
	_ = e.to.EncodeString("lora_id")
	_ = e.to.EncodeNil()
	e.text("medium", ev.Medium)
	_ = e.to.EncodeString("lora_name")
	_ = e.to.EncodeNil()
}

// begin begins an event with so many fields beside its type.
func (e *encoder) begin(kind string, fields int) {
	_ = e.to.EncodeMapLen(1 + fields)
	e.text("type", kind)
}

func (e *encoder) text(key, value string) {
	_ = e.to.EncodeString(key)
	_ = e.to.EncodeString(value)
}

func (e *encoder) keys(key string, keys []kvcache.Key) {
	_ = e.to.EncodeString(key)
	_ = e.to.EncodeArrayLen(len(keys))
	for i := range keys {
		_ = e.to.EncodeBytes(keys[i][:])
	}
}
