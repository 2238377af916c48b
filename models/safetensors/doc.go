// Package safetensors reads Hugging Face checkpoints in the safetensors format.
//
// A checkpoint is a directory with either one model.safetensors or a
// model.safetensors.index.json that names several shards. Open maps every shard read-only
// and checks all of them before it returns. A [Tensor] is a view into a mapping: its data
// is not copied, and the Go heap holds only names and shapes. Package write, below this
// one, writes checkpoints.
//
// The package is not a loader: it has no knowledge of architectures, converts no layouts
// and places no weights. [Checkpoint.Diff] compares the tensors that a model needs with
// those of a checkpoint.
//
// # Invariants
//
//   - What Open returns is sound: every header is valid JSON without repeated
//     keys, every tensor's bytes lie inside its file, agree with dtype and
//     shape, overlap no other tensor and leave no hole, and the index and the
//     shards name the same tensors. A checkpoint that breaks one of these is an
//     error that names the file and the tensor and says what to do.
//   - Tensor.Data is valid until Checkpoint.Close, and must not be written to:
//     the mapping is read-only, and a write faults.
//   - Sizes are computed with overflow checks, and no header can make the reader
//     allocate more than a small multiple of the header's own length, which is
//     at most [MaxHeaderBytes].
//
// # Files that change after Open
//
// Every tensor lies inside its file when Open returns. If another process truncates a file
// later, the file no longer backs its mapping, and access to the lost pages raises SIGBUS.
// [Tensor.Read] and [Tensor.CopyTo] convert that fault to [ErrChanged], so a loader that
// copies through them never crashes. Code that reads Tensor.Data directly, or passes it to
// C, has no such protection. Reads cannot detect a file that is overwritten in place:
// [Checkpoint.Verify] compares sizes and modification times with those at Open, and a
// loader calls it once after copying everything. Replacing a file by rename is harmless,
// because the mapping keeps the old file alive.
//
// # Memory
//
// Mapped pages are file pages: they count in a process's resident size while mapped, but
// they are not anonymous memory and the kernel may drop them. A loader that streams a
// checkpoint larger than memory iterates over Names in order, calls Prefetch on the next
// tensor and Release on the previous one, and so keeps about two tensors resident. Release
// unmaps pages from this process only; the page cache keeps them while it has room, so a
// second start is fast.
//
// # Example
//
//	ck, err := safetensors.Open("/models/mixtral")
//	if err != nil {
//		return err
//	}
//	defer ck.Close()
//	if missing, unexpected := ck.Diff(slices.Values(want)); len(missing)+len(unexpected) > 0 {
//		return &safetensors.MismatchError{Dir: ck.Dir(), Missing: missing, Unexpected: unexpected}
//	}
//	for _, name := range ck.Names() {
//		t, _ := ck.Tensor(name)
//		if err := t.CopyTo(place(name)); err != nil {
//			return err
//		}
//		t.Release()
//	}
//	return ck.Verify()
package safetensors
