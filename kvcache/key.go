package kvcache

import (
	"crypto/sha256"
	"encoding/binary"
)

// Key names the content of a full block: it is a hash of all tokens from the start
// of the sequence to the end of the block, and of a salt. Blocks of equal keys hold
// equal keys and values. The zero Key names nothing.
//
// It is SHA-256, since who finds two contents of one key reads another tenant's.
type Key [sha256.Size]byte

// RootKey is the parent of the keys of first blocks. The salt is all that keys and
// values depend on beside tokens and their positions, and whatever must not be shared:
// tenants, types, the choice of longrope's factors.
func RootKey(salt []byte) Key {
	// Behind the zero key, which is nobody's parent: so no salt makes a block's key.
	return sha256.Sum256(append(make([]byte, sha256.Size), salt...))
}

// Next is the key of the block that holds tokens, behind the one that k names.
func (k Key) Next(tokens []int32) Key {
	b := append(make([]byte, 0, len(k)+4*len(tokens)), k[:]...)
	for _, id := range tokens {
		b = binary.LittleEndian.AppendUint32(b, uint32(id))
	}
	return sha256.Sum256(b)
}
