package kernels

// CopyBlocks copies N blocks of BlockBytes each, block i from address Src[i] to Dst[i], in
// 16-byte words. Addresses are multiples of 16, in any memory that the stream's device can
// access: its own, a peer's, the host's. A pair with address 0 on either side is skipped.
// Blocks are copied in any order and at the same time, so a destination may overlap no other
// block of the operation.
//
// One operation copies many small blocks at once, where Stream.Copy needs one operation each;
// but it takes multiprocessors (or threads) from other work of the device.
type CopyBlocks struct {
	Src, Dst   Tensor // [N] U64: addresses
	BlockBytes int64  // a multiple of 16
	// ThreadBlocks is the maximum number of thread blocks of the launch, and so of the
	// multiprocessors that it uses; 0: one per multiprocessor. Backends without thread blocks
	// ignore it.
	ThreadBlocks int
}

// Copy copies Src to Dst, in words of 4 bytes. Both have no gaps, and are in any memory that the
// stream's device can access, as for CopyBlocks.
//
// It is for the few KiB that a step reads from host memory and writes there. A copy engine makes
// such a copy later: it takes turns with other streams, so behind a large copy in the same
// direction it waits until that has ended, however small its chunks are.
type Copy struct {
	Src, Dst Tensor // the same type and shape
	// Src2 and Dst2 are copied at the same time, so Dst2 shares no memory with the others; none: there is nothing more.
	Src2, Dst2 Tensor
}

// AddRows adds N rows of Columns elements, row i at address Src[i] to the one at Dst[i], with one
// rounding. Addresses are multiples of 16, as for CopyBlocks. A Dst may overlap no other row of the
// operation.
type AddRows struct {
	Src, Dst Tensor // [N] U64: addresses
	Columns  int    // elements of a row, of a multiple of 16 bytes
	DType    DType
}

const (
	// copyUnit is the unit of a Copy, in bytes.
	copyUnit = 4
	// maxCopyBytes is the limit of a Copy, so that a kernel may count its words in 32 bits.
	maxCopyBytes = copyUnit << 30
	// copyWord is the number of bytes that are copied as one.
	copyWord = 16
	// Limits of a CopyBlocks, so that a kernel may count blocks and words in 32 bits.
	maxCopyBlocks     = 1 << 30
	maxCopyBlockBytes = copyWord << 30
)

// addresses checks tables of the addresses of blocks, or rows, that are read and written.
func (c *checker) addresses(src, dst *Tensor, what string) {
	c.tensor("Src", src, uint64Only, 1)
	c.list("Dst", dst, uint64Only, src.Shape[0], "Src")
	if c.ok() && src.Shape[0] > maxCopyBlocks {
		c.failf("Src is %v, want at most %d %s", *src, maxCopyBlocks, what)
	}
}

// Name implements Op.
func (*CopyBlocks) Name() string { return "copy_blocks" }

// Check implements Op.
func (o *CopyBlocks) Check() error {
	c := checker{op: o.Name()}
	c.addresses(&o.Src, &o.Dst, "blocks")
	switch {
	case !c.ok():
	case o.BlockBytes <= 0 || o.BlockBytes%copyWord != 0 || o.BlockBytes > maxCopyBlockBytes:
		c.failf("BlockBytes is %d, want a multiple of %d of at most %d", o.BlockBytes, copyWord, int64(maxCopyBlockBytes))
	case o.ThreadBlocks < 0:
		c.failf("ThreadBlocks is %d, want 0 (one per multiprocessor) or more", o.ThreadBlocks)
	}
	return c.err
}

// Declare implements Op. Reads and Writes have no blocks: only the tables determine which.
func (o *CopyBlocks) Declare(d *Decl) {
	d.read(&o.Src)
	d.read(&o.Dst)
	d.Bytes += 2 * int64(o.Src.Shape[0]) * o.BlockBytes
}

// Name implements Op.
func (*AddRows) Name() string { return "add_rows" }

// Check implements Op.
func (o *AddRows) Check() error {
	c := checker{op: o.Name()}
	c.addresses(&o.Src, &o.Dst, "rows")
	switch {
	case !c.ok():
	case int(o.DType) >= len(dtypes):
		c.failf("DType is unknown type %d, want %v", uint8(o.DType), floats)
	case !floats.has(o.DType):
		c.failf("DType is %v, want %v", o.DType, floats)
	case o.Columns <= 0 || o.Columns*o.DType.Size()%copyWord != 0 || o.Columns > maxCopyBlockBytes/o.DType.Size():
		c.failf("Columns is %d of %v, want a multiple of %d bytes of at most %d", o.Columns, o.DType, copyWord, int64(maxCopyBlockBytes))
	}
	return c.err
}

// Declare implements Op. Reads and Writes have no rows: only the tables determine which.
func (o *AddRows) Declare(d *Decl) {
	d.read(&o.Src)
	d.read(&o.Dst)
	elements := int64(o.Src.Shape[0]) * int64(o.Columns)
	d.Bytes += 3 * elements * int64(o.DType.Size())
	d.Flops += elements
}

// Name implements Op.
func (*Copy) Name() string { return "copy" }

// Check implements Op.
func (o *Copy) Check() error {
	c := checker{op: o.Name()}
	c.copied("Src", &o.Src, "Dst", &o.Dst)
	if !o.Src2.None() || !o.Dst2.None() {
		c.copied("Src2", &o.Src2, "Dst2", &o.Dst2)
		c.disjoint("Dst2", &o.Dst2, "Dst", &o.Dst)
		c.disjoint("Dst2", &o.Dst2, "Src", &o.Src)
		c.disjoint("Dst", &o.Dst, "Src2", &o.Src2)
	}
	return c.err
}

// copied checks what a Copy copies.
func (c *checker) copied(from string, src *Tensor, to string, dst *Tensor) {
	c.tensor(from, src, anyType, src.Rank)
	c.tensor(to, dst, anyType, dst.Rank)
	c.same(to, dst, from, src)
	c.dense(from, src)
	c.dense(to, dst)
	if c.ok() && src.Bytes() > maxCopyBytes {
		c.failf("%d bytes, want at most %d", src.Bytes(), int64(maxCopyBytes))
	}
	c.disjoint(to, dst, from, src)
	if c.ok() && (src.Bytes()%copyUnit != 0 || src.Addr%copyUnit != 0 || dst.Addr%copyUnit != 0) {
		c.failf("%d bytes from %#x to %#x, want multiples of %d", src.Bytes(), uint64(src.Addr), uint64(dst.Addr), copyUnit)
	}
}

// Declare implements Op.
func (o *Copy) Declare(d *Decl) {
	d.read(&o.Src)
	d.read(&o.Src2)
	d.write(&o.Dst)
	d.write(&o.Dst2)
}
