package dispatch

import (
	"cmp"
	"errors"

	"github.com/moeserve/moeserve/device"
)

// Classes is the number of priority classes, from 0 up.
const Classes = 8

// Piece is one contiguous part of a request: two ranges of the same size.
type Piece struct {
	Dst, Src device.Range
	// Separate: the piece is in another allocation than the one before it, even if they
	// are adjacent.
	Separate bool
}

// Request is one copy, of one or more pieces, from one memory to another. It belongs to
// the core from Submit until it has finished.
type Request struct {
	From, To device.Space
	// Pieces have at least one byte each; see Add.
	Pieces []Piece
	// Class is the priority: higher ones go first.
	Class uint8
	// TakesTurns: requests of a class that do share a link equally while their points are
	// reached, whatever their order and size. So a small one does not wait for a large one, nor
	// a large one for a steady stream of small ones.
	TakesTurns bool
	// ChunkPieces is the maximum number of contiguous parts of a chunk. 0: DefaultChunkPieces.
	ChunkPieces int
	// Direct: relays carry nothing of the request.
	Direct bool
	// Done is the fence value that the caller signals when the request has finished: a
	// request that waits for it, of a higher class, gives this one its class.
	Done device.Point
	// Owner is for the caller; the core does not use it.
	Owner any

	seq   uint64
	bytes int64
	// turn is the virtual time, in bytes, that the request has reached by what was launched;
	// see link.virtual.
	turn int64
	// waiting are the lists of the points that are not reached yet.
	waiting []*waiters
	// The next chunk begins at offset within piece. launched and landed count bytes.
	piece            int
	offset           int64
	launched, landed int64
	// inFlight is the number of chunks that were cut and have not ended: first to last, in the
	// order of their bytes. returned are those of them, in this order too, that a relay could not
	// carry, and that wait for a link of the request.
	inFlight    int
	first, last *flight
	returned    []*flight
	// missing is where the first chunk that ended and has not landed begins, plus 1; 0: there is none.
	missing int64
	// failure is why no more chunks are launched; errSkipped: they are not needed.
	failure error
	ended   bool
}

// Add appends a piece. If it is adjacent to the last piece in both memories, and not
// Separate, it is merged with that one.
func (r *Request) Add(p Piece) {
	r.bytes += p.Src.Bytes
	if n := len(r.Pieces); n > 0 && !p.Separate {
		last := &r.Pieces[n-1]
		if last.Src.End() == p.Src.Addr && last.Dst.End() == p.Dst.Addr {
			last.Src.Bytes += p.Src.Bytes
			last.Dst.Bytes += p.Dst.Bytes
			return
		}
	}
	r.Pieces = append(r.Pieces, p)
}

// Reset empties a request that has finished or was never submitted, for reuse. It keeps
// the owner and the capacity for pieces and points.
func (r *Request) Reset() {
	*r = Request{Pieces: r.Pieces[:0], waiting: r.waiting[:0], returned: r.returned[:0], Owner: r.Owner}
}

// Bytes of all pieces.
func (r *Request) Bytes() int64 { return r.bytes }

// Landed is the number of bytes that have landed, in order: those before the first that have not.
func (r *Request) Landed() int64 {
	n := r.launched
	if r.first != nil {
		n = min(n, r.first.begin)
	}
	if r.missing > 0 {
		n = min(n, r.missing-1)
	}
	return n
}

// InFlight is the number of bytes that were launched and have not ended.
func (r *Request) InFlight() (bytes int64) {
	for f := r.first; f != nil; f = f.after {
		bytes += f.chunk.Bytes
	}
	for _, f := range r.returned {
		bytes -= f.chunk.Bytes
	}
	return bytes
}

// Ended reports whether the request has finished.
func (r *Request) Ended() bool { return r.ended }

// Skipped reports whether not all of the request is copied, see Core.Skip.
func (r *Request) Skipped() bool { return errors.Is(r.failure, errSkipped) }

// Chunk is what one launch copies: Bytes bytes of a request, from Offset within Piece on,
// continuing with the following pieces.
type Chunk struct {
	Request *Request
	Piece   int
	Offset  int64
	Bytes   int64
}

// First reports whether the chunk is the beginning of its request.
func (c Chunk) First() bool { return c.Piece == 0 && c.Offset == 0 }

// Last reports whether the chunk is the end of its request.
func (c Chunk) Last() bool {
	left := -c.Offset - c.Bytes
	for i := range c.Request.Pieces[c.Piece:] {
		left += c.Request.Pieces[c.Piece+i].Src.Bytes
	}
	return left == 0
}

// Each calls copy for every contiguous part of the chunk, until one fails.
func (c Chunk) Each(copy func(dst, src device.Range) error) error {
	offset, left := c.Offset, c.Bytes
	for i := c.Piece; left > 0; i++ {
		p := &c.Request.Pieces[i]
		n := min(left, p.Src.Bytes-offset)
		if err := copy(p.Dst.Slice(offset, n), p.Src.Slice(offset, n)); err != nil {
			return err
		}
		offset, left = 0, left-n
	}
	return nil
}

// DefaultChunkPieces is the maximum number of contiguous parts of a chunk: enqueuing one takes
// some microseconds, during which nothing can overtake, and in a batch the device some more.
const DefaultChunkPieces = 64

// cutChunk takes the next chunk of at most chunkBytes from the request. Requests are
// divided into as few chunks of equal size as possible: a small last chunk would end
// before the next one is enqueued, and the link would idle. Small pieces share a chunk,
// and only a piece that is larger than a chunk is divided.
func (r *Request) cutChunk(chunkBytes int64) Chunk {
	c := Chunk{Request: r, Piece: r.piece, Offset: r.offset}
	room := chunkSize(r.bytes-r.launched, chunkBytes)
	for copies := cmp.Or(r.ChunkPieces, DefaultChunkPieces); copies > 0 && r.piece < len(r.Pieces) && room > 0; copies-- {
		left := r.Pieces[r.piece].Src.Bytes - r.offset
		n := left
		switch {
		case left <= room:
		case left > chunkBytes && c.Bytes == 0:
			n = room
		case left > chunkBytes:
			n = room / device.Alignment * device.Alignment
		case c.Bytes > 0:
			n = 0
		}
		if n == 0 {
			break
		}
		c.Bytes, room = c.Bytes+n, room-n
		if r.offset += n; n == left {
			r.piece, r.offset = r.piece+1, 0
		}
	}
	r.launched += c.Bytes
	return c
}

// chunkSize is the size of the next chunk if so many bytes are divided into equal chunks.
func chunkSize(bytes, chunkBytes int64) int64 {
	n := (bytes + chunkBytes - 1) / chunkBytes
	each := (bytes + n - 1) / n
	return min(device.Align(each), chunkBytes, bytes)
}
