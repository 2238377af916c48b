package offload_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/kvcache/offload"
	"github.com/moeserve/moeserve/transfer"
)

// recorder is a medium that records the priorities of its transfers.
type recorder struct{ said []string }

var records = &recorder{}

var registerRecorder = sync.OnceFunc(func() {
	offload.Register("RecorderSpec", func(offload.Config) (offload.Spec, error) { return records, nil })
})

func (r *recorder) Open(e offload.Env) ([]*offload.Medium, error) {
	all, err := neighborSpec{}.Open(e)
	for _, m := range all {
		m.Store, m.Load = recordingHandler{m.Store, r}, recordingHandler{m.Load, r}
	}
	return all, err
}

type recordingHandler struct {
	offload.Handler
	to *recorder
}

func (h recordingHandler) Start(job *offload.Job) (offload.Transfer, []int, error) {
	h.to.said = append(h.to.said, fmt.Sprintf("%v: %v", job.Label, job.Priority))
	t, refused, err := h.Handler.Start(job)
	return recordingTransfer{t, job, h.to}, refused, err
}

type recordingTransfer struct {
	offload.Transfer
	job *offload.Job
	to  *recorder
}

func (t recordingTransfer) RaisePriority(p transfer.Priority) {
	t.to.said = append(t.to.said, fmt.Sprintf("%v: raised to %v", t.job.Label, p))
	t.Transfer.RaisePriority(p)
}

// TestPriorities: stores of preempted sequences, and those that a sequence waits for, have the
// priority of loads; others have a lower one.
func TestPriorities(t *testing.T) {
	registerRecorder()
	records.said = nil
	r := newRig(t, rigOptions{config: offload.Config{SpecName: "RecorderSpec"}, limit: 64})
	a, b := r.sequence(1, "a", 3), r.sequence(2, "b", 2)
	r.fill(a, 0, 3)
	r.fill(b, 0, 2)
	r.tiers.Store(a.keys, 0, a.table.Blocks(), offload.Filled)
	r.tiers.Store(b.keys, 0, b.table.Blocks(), offload.Preempted)
	for range 2 {
		if n, wait := r.tiers.Lookup(a.keys, 0, 100); n != 0 || !wait {
			t.Errorf("found %d, wait %t", n, wait)
		}
	}
	r.settle()
	r.load(a, 0)
	want := []string{
		"store 3 kv blocks in NEIGHBOR: " + transfer.KVStore.String(),
		"store 2 kv blocks in NEIGHBOR: " + transfer.KVLoad.String(),
		"store 3 kv blocks in NEIGHBOR: raised to " + transfer.KVLoad.String(),
		"load 3 kv blocks of sequence 1 from NEIGHBOR: " + transfer.KVLoad.String(),
	}
	if !slices.Equal(records.said, want) || transfer.KVStore >= transfer.KVLoad {
		t.Errorf("%q, want %q", records.said, want)
	}
}

// TestFilesOfLostBlocks: a damaged file is removed when it was read, and one that was evicted; of a
// failed store nothing is left.
func TestFilesOfLostBlocks(t *testing.T) {
	folder := t.TempDir()
	r := newRig(t, rigOptions{config: offload.Config{FileBlocks: 6, Directory: folder}})
	files := func() (names []string) {
		names, err := filepath.Glob(filepath.Join(folder, "moeserve-kv-*", "*-*"))
		r.ok(err)
		return names
	}
	// left waits until the streams have removed what is to be removed.
	left := func() int {
		for range 100 {
			r.ok(r.m.Yield(t.Context(), time.Millisecond))
			if s := r.stats(offload.File); len(files()) == s.Capacity-s.Free {
				break
			}
		}
		return len(files())
	}
	s := r.sequence(1, "a", 6)
	r.fill(s, 0, 6)
	r.store(s, 0, 6)
	all := files()
	if len(all) != 6 {
		t.Fatalf("files %q", all)
	}
	slices.Sort(all)
	r.ok(os.Truncate(all[0], 10))
	s.table.Release(false)
	r.overwrite()
	r.reserve(s)
	if n, l := r.load(s, 0); n != 6 || l.Blocks == 6 {
		t.Errorf("found %d, loaded %+v", n, l)
	}
	if got := left(); got != 5 {
		t.Errorf("%d files after one was damaged: %q", got, files())
	}
	x := r.sequence(2, "x", 4)
	r.fill(x, 0, 4)
	r.store(x, 0, 4)
	if got := left(); got != 6 {
		t.Errorf("%d files of 6 blocks: %q", got, files())
	}
	y := r.sequence(3, "y", 4)
	r.fill(y, 0, 4)
	r.m.Inject(&emulated.Fault{Kind: emulated.FailCopy, Times: 2, Match: func(p emulated.Point) bool { return p.From == device.HBM(0) && p.Stream != "compute" }})
	r.store(y, 0, 4)
	if got, names := left(), r.tiers.FileNames(); r.stats(offload.File).FailedStores != 4 || got != 2 || names != 2 {
		t.Errorf("%d files, %d names after a failed store that has evicted 4 blocks of 6: %+v", got, names, r.stats(offload.File))
	}
}
