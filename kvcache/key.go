package kvcache

import (
	"crypto/sha256"
	"encoding/binary"
)

// Key identifies the content of a full block: a hash of a salt and of all tokens from
// the start of the sequence to the end of the block. Blocks with equal keys have equal
// content. The zero Key means no key.
//
// The hash is SHA-256: with a weaker one, a collision would give a tenant the KV cache of
// another.
type Key [sha256.Size]byte

// RootKey is the parent of the keys of first blocks. The salt covers everything besides
// tokens and their positions that the KV cache depends on (data type, longrope factors),
// and whatever separates users that must not share blocks (tenants).
func RootKey(salt []byte) Key {
	// The zero key comes first. No block has it as its parent, so no salt can produce a
	// block's key.
	return sha256.Sum256(append(make([]byte, sha256.Size), salt...))
}

// Next returns the key of the block that holds tokens and follows the block of key k. It
// allocates nothing for blocks of up to 64 tokens.
func (k Key) Next(tokens []int32) Key {
	var buf [sha256.Size + 4*64]byte
	b := append(buf[:0], k[:]...)
	for _, id := range tokens {
		b = binary.LittleEndian.AppendUint32(b, uint32(id))
	}
	return sha256.Sum256(b)
}
