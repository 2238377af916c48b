package dispatch

import "github.com/moeserve/moeserve/device"

// Classes is how many classes of priority there are, from 0 up.
const Classes = 8

// Piece is one contiguous part of a request: two ranges of the same size.
type Piece struct {
	Dst, Src device.Range
	// Apart: it is another allocation's than the piece before it, also where they adjoin.
	Apart bool
}

// Request is one copy, of one or more pieces from one memory to another. It belongs to
// the core from Submit until it has finished.
type Request struct {
	From, To device.Space
	// Pieces that have at least one byte each; see Add.
	Pieces []Piece
	// Class of priority: the higher goes first.
	Class uint8
	// Owner is for whoever submits the request; the core does not look at it.
	Owner any

	seq   uint64
	bytes int64
	// waiting counts the points that are not reached yet.
	waiting int
	// piece and offset within it are where the next chunk begins; issued bytes were
	// launched, landed ones have arrived.
	piece          int
	offset         int64
	issued, landed int64
	// flying counts its chunks that are with the device.
	flying int
	// failure is why no more of it is launched.
	failure        error
	ended, skipped bool
}

// Add appends a piece. One that adjoins the piece before it in both memories, and is not
// Apart, prolongs that one.
func (r *Request) Add(p Piece) {
	r.bytes += p.Src.Bytes
	if n := len(r.Pieces); n > 0 && !p.Apart {
		last := &r.Pieces[n-1]
		if last.Src.End() == p.Src.Addr && last.Dst.End() == p.Dst.Addr {
			last.Src.Bytes += p.Src.Bytes
			last.Dst.Bytes += p.Dst.Bytes
			return
		}
	}
	r.Pieces = append(r.Pieces, p)
}

// Reset makes a request that has finished, or was never submitted, a new one. It keeps
// the owner, and the room for pieces.
func (r *Request) Reset() { *r = Request{Pieces: r.Pieces[:0], Owner: r.Owner} }

// Bytes are those of all pieces.
func (r *Request) Bytes() int64 { return r.bytes }

// Ended says whether the request has finished.
func (r *Request) Ended() bool { return r.ended }

// Skipped says whether it finished without having been copied, see Core.Skip.
func (r *Request) Skipped() bool { return r.skipped }

// Chunk is what one launch copies: Bytes bytes of a request, from an offset within a
// piece on, going on in the pieces behind.
type Chunk struct {
	Request *Request
	Piece   int
	Offset  int64
	Bytes   int64
}

// Last says whether nothing of the request comes behind the chunk.
func (c Chunk) Last() bool {
	left := -c.Offset - c.Bytes
	for i := range c.Request.Pieces[c.Piece:] {
		left += c.Request.Pieces[c.Piece+i].Src.Bytes
	}
	return left == 0
}

// Each calls copy for every contiguous part of the chunk, until that fails.
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

// maxCopies bounds the contiguous parts of a chunk: giving the device one takes some
// microseconds, and nothing overtakes meanwhile.
const maxCopies = 64

// take cuts the next chunk off the request, of at most so many bytes. Requests are cut
// into equal chunks, as few as possible: a small rest would end before the device has
// been given the chunk behind it, and the link would idle. Small pieces share a chunk,
// and only a piece that is larger than a chunk is cut.
func (r *Request) take(chunkBytes int64) Chunk {
	c := Chunk{Request: r, Piece: r.piece, Offset: r.offset}
	room := target(r.bytes-r.issued, chunkBytes)
	for copies := 0; copies < maxCopies && r.piece < len(r.Pieces) && room > 0; copies++ {
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
	r.issued += c.Bytes
	return c
}

// target is the size of the next of equal chunks of so many bytes.
func target(bytes, chunkBytes int64) int64 {
	n := (bytes + chunkBytes - 1) / chunkBytes
	each := (bytes + n - 1) / n
	return min(device.Align(each), chunkBytes, bytes)
}
