// Package safetensors reads Hugging Face checkpoints in the safetensors format.
//
// A checkpoint is a directory with either one model.safetensors or a
// model.safetensors.index.json that names several shards. Open maps every shard
// read-only and checks all of them before it returns; a [Tensor] is then a view
// into a mapping, so nothing is copied and nothing lies on Go's heap but names
// and shapes. Package write, below this one, writes checkpoints.
//
// It is not a loader: it knows no architecture, converts no layout, and places
// no weight. What a model needs and what a checkpoint has are compared by
// [Checkpoint.Diff].
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
// Every tensor lies inside its file when Open returns. A file that another
// process truncates later no longer backs its mapping, and touching the lost
// pages raises SIGBUS. [Tensor.Read] and [Tensor.CopyTo] turn that fault into
// [ErrChanged], so a loader that copies through them never crashes; code that
// reads Tensor.Data directly, or hands it to C, has no such protection. A file
// that is overwritten in place cannot be noticed while reading:
// [Checkpoint.Verify] compares sizes and times with those at Open, and a loader
// calls it once when all is copied. A file replaced by rename is harmless, as
// the mapping keeps the old one alive.
//
// # Memory
//
// Mapped pages are file pages: they count in a process's resident size while
// mapped, but are no anonymous memory and the kernel may drop them. A loader
// that streams a checkpoint larger than memory goes through Names in order,
// calls Prefetch on the tensor ahead and Release on the one behind, and so keeps
// about two tensors resident. Release unmaps pages from this process only; the
// page cache keeps them as long as it has room, so that a second start is fast.
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
