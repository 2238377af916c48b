package offload

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/transfer"
)

const (
	// fileStreams is the number of host streams that read and write files.
	fileStreams = 4
	// stagingBuffers are two for each stream: one is filled while the other is copied.
	stagingBuffers = 2 * fileStreams
	// bufferBytes is the size of a staging buffer, in whole blocks and at least one.
	bufferBytes = 4 << 20
)

// bufferBlocks is the number of blocks of a staging buffer.
func bufferBlocks(blockBytes int64) int64 { return max(1, bufferBytes/blockBytes) }

// fileMemory is the tier in files of a folder, one for each block, which is removed at the
// end. Blocks pass through staging buffers in pinned memory, in groups of as many as one
// holds.
//
// Files are written under a name of their own and then renamed; no name is used again. So a
// file that is there is whole, and one that is dropped and stored again is another. A header
// has the key and a checksum, which a load verifies: a block that is damaged, or gone, is
// lost, and never loaded.
//
// Everything behind Start runs as host work on the streams: the goroutine of the engine does
// not wait for files, and virtual time sees the work.
type fileMemory struct {
	env       Env
	directory string
	streams   []device.Watcher
	next      int // stream of the next group
	staging   device.Memory
	// perBuffer is the number of blocks of a staging buffer.
	perBuffer int

	// mu is a leaf, except that fences are signaled and work is enqueued under it.
	mu sync.Mutex
	// names of the keys' files, and the number of the last.
	names map[kvcache.Key]string
	last  int64
	// idle buffers, and the groups that wait for one: loads go first.
	idle          []*buffer
	loads, stores []*group
	points        points
}

// buffer is a part of the staging memory.
type buffer struct {
	at int64
	// copied is the fence of the copies from and to it, one after the other.
	copied device.Point
}

// openFiles opens the tier in a new folder of the configured one.
func openFiles(e Env, c Config) (*Medium, error) {
	f := &fileMemory{env: e, names: map[kvcache.Key]string{}, points: points{machine: e.Machine, name: "kv file tier"}}
	var err error
	if f.directory, err = os.MkdirTemp(c.Directory, "moeserve-kv-"); err != nil {
		return nil, fmt.Errorf("cannot create a folder in directory %q: %w; name a folder that exists and can be written", c.Directory, err)
	}
	if err := f.open(); err != nil {
		return nil, errors.Join(fmt.Errorf("file tier: %w", err), f.Close())
	}
	return &Medium{
		Name: File, Blocks: c.FileBlocks, Memory: f, Store: fileHandler{f, true}, Load: fileHandler{f, false},
		BytesPerSecond: func() float64 { return 0 },
	}, nil
}

func (f *fileMemory) open() error {
	// A first file shows that there is room, and rights.
	probe := filepath.Join(f.directory, "probe")
	if err := errors.Join(os.WriteFile(probe, make([]byte, int(f.env.BlockBytes)+headerBytes), 0o600), os.Remove(probe)); err != nil {
		return fmt.Errorf("cannot write a block to directory: %w", err)
	}
	for i := range fileStreams {
		s, err := f.env.Machine.NewStream(device.Host, device.StreamOptions{Name: fmt.Sprintf("kv files %d", i+1)})
		if err != nil {
			return err
		}
		w, ok := s.(device.Watcher)
		if !ok {
			return errors.Join(errors.New("host streams of this machine cannot watch fences"), s.Close())
		}
		f.streams = append(f.streams, w)
	}
	f.perBuffer = int(bufferBlocks(f.env.BlockBytes))
	size := int64(f.perBuffer) * f.env.BlockBytes
	var err error
	if f.staging, err = f.env.Machine.Alloc(device.Host, stagingBuffers*size, "kv file staging"); err != nil {
		return fmt.Errorf("staging buffers: %w", err)
	}
	for i := range stagingBuffers {
		at, err := f.points.take()
		if err != nil {
			return err
		}
		at.Value-- // of the copy before the first
		f.idle = append(f.idle, &buffer{at: int64(i) * size, copied: at})
	}
	return nil
}

// Drop implements Memory. Files are removed by a stream.
func (f *fileMemory) Drop(keys []kvcache.Key) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var names []string
	for _, k := range keys {
		if name, ok := f.names[k]; ok {
			names = append(names, name)
			delete(f.names, k)
		}
	}
	f.remove(names)
}

// remove removes files. mu is held.
func (f *fileMemory) remove(names []string) {
	if len(names) == 0 {
		return
	}
	// One that cannot be removed now goes with the folder.
	f.execute("remove kv files", func() {
		for _, name := range names {
			_ = os.Remove(filepath.Join(f.directory, name))
		}
	})
}

// execute has a stream call a function. mu is held. It returns false if the stream is closed
// or lost.
func (f *fileMemory) execute(name string, call func()) bool {
	s := f.streams[f.next]
	f.next = (f.next + 1) % len(f.streams)
	return s.Execute(device.Work{Name: name, Host: true, Run: func(device.Access) error { call(); return nil }}) == nil
}

// Lost implements Memory: what is gone shows when it is read.
func (f *fileMemory) Lost() []kvcache.Key { return nil }

// Locate implements Memory.
func (f *fileMemory) Locate(kvcache.Key) device.Space { return device.Host }

// Reset implements Memory.
func (f *fileMemory) Reset() {
	f.mu.Lock()
	defer f.mu.Unlock()
	var names []string
	for _, name := range f.names {
		names = append(names, name)
	}
	clear(f.names)
	f.remove(names)
}

// Close implements Memory.
func (f *fileMemory) Close() error {
	var errs []error
	for _, s := range f.streams {
		errs = append(errs, s.Close()) // waits for its work
	}
	errs = append(errs, f.points.close())
	if f.staging != nil {
		errs = append(errs, f.staging.Free())
	}
	return errors.Join(append(errs, os.RemoveAll(f.directory))...)
}

// fileHandler copies to files (store) or back.
type fileHandler struct {
	*fileMemory
	store bool
}

// fileTransfer is a job under way.
type fileTransfer struct {
	*fileMemory
	job   *Job
	store bool
	names []string // by block
	end   device.Point
	// arrived and err belong to the groups until end; left is the number of those. mu guards
	// them.
	arrived []bool
	err     error
	left    int
	class   transfer.Priority
	tickets []*transfer.Ticket // of the groups that are being copied
}

// group is a part of a job that goes through one buffer: blocks from first on.
type group struct {
	transfer *fileTransfer
	first, n int
	buffer   *buffer
	ticket   *transfer.Ticket
	// good are the blocks that were read.
	good []int
}

// Start implements Handler.
func (h fileHandler) Start(job *Job) (Transfer, []int, error) {
	f := h.fileMemory
	f.mu.Lock()
	defer f.mu.Unlock()
	end, err := f.points.take()
	if err != nil {
		return nil, nil, err
	}
	t := &fileTransfer{fileMemory: f, job: job, store: h.store, end: end, arrived: make([]bool, len(job.Blocks)), class: job.Priority}
	for i := range job.Blocks {
		k := job.Blocks[i].Key
		if h.store {
			f.last++
			f.names[k] = fmt.Sprintf("%x-%d", k[:8], f.last)
		}
		t.names = append(t.names, f.names[k])
	}
	for i := 0; i < len(job.Blocks); i += f.perBuffer {
		g := &group{transfer: t, first: i, n: min(f.perBuffer, len(job.Blocks)-i)}
		t.left++
		if h.store {
			f.stores = append(f.stores, g)
		} else {
			f.loads = append(f.loads, g)
		}
	}
	f.pump()
	return t, nil, nil
}

// pump begins groups as long as there are buffers. mu is held.
func (f *fileMemory) pump() {
	for len(f.idle) > 0 && len(f.loads)+len(f.stores) > 0 {
		from := &f.loads
		if len(*from) == 0 {
			from = &f.stores
		}
		g := (*from)[0]
		*from = slices.Delete(*from, 0, 1)
		g.buffer = f.idle[len(f.idle)-1]
		f.idle = f.idle[:len(f.idle)-1]
		if g.transfer.store {
			f.copyGroup(g, g.indices(), f.writeFiles)
		} else if !f.execute("read kv files", func() { f.readFiles(g) }) {
			f.finishGroup(g, device.ErrClosed)
		}
	}
}

// indices of all blocks of the group.
func (g *group) indices() []int {
	all := make([]int, g.n)
	for i := range all {
		all[i] = g.first + i
	}
	return all
}

// slot is the place of a block in the group's buffer.
func (f *fileMemory) slot(g *group, block int) int64 {
	return g.buffer.at + int64(block-g.first)*f.env.BlockBytes
}

// copyGroup copies blocks between the GPU and the group's buffer, and then has a stream call
// next. mu is held.
func (f *fileMemory) copyGroup(g *group, blocks []int, next func(*group)) {
	t := g.transfer
	var pieces []transfer.Piece
	for _, i := range blocks {
		at := f.staging.Region(f.slot(g, i), f.env.BlockBytes)
		for _, p := range t.job.Blocks[i].Pieces {
			pieces = append(pieces, piece(p, at, t.store))
		}
	}
	g.good = blocks
	g.buffer.copied.Value++
	var err error
	g.ticket, err = f.env.Transfer.Submit(transfer.Request{
		Pieces: pieces, Priority: t.class, After: t.job.After, Done: g.buffer.copied, Label: t.job.Label,
	})
	if err != nil {
		g.buffer.copied.Value--
		f.finishGroup(g, err)
		return
	}
	t.tickets = append(t.tickets, g.ticket)
	s := f.streams[f.next]
	f.next = (f.next + 1) % len(f.streams)
	work := device.Work{Name: "kv files copied", Host: true, Run: func(device.Access) error { next(g); return nil }, Failed: func(error) { next(g) }}
	// Where the end cannot be watched the stream waits for it.
	if reached, err := s.Watch(g.ticket.End(), work); err != nil {
		f.finishGroup(g, err)
	} else if reached {
		_ = s.Execute(work)
	}
}

// writeFiles runs on a stream when blocks are in the buffer.
func (f *fileMemory) writeFiles(g *group) {
	t := g.transfer
	err := g.ticket.Err()
	var written []int
	if err == nil {
		for _, i := range g.good {
			if failed := f.writeFile(t.names[i], t.job.Blocks[i].Key, f.staging.Read(f.slot(g, i), f.env.BlockBytes)); failed != nil {
				err = errors.Join(err, failed)
				continue
			}
			written = append(written, i)
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, i := range written {
		t.arrived[i] = true
	}
	f.finishGroup(g, err)
}

// readFiles runs on a stream.
func (f *fileMemory) readFiles(g *group) {
	t := g.transfer
	var read []int
	var err error
	for _, i := range g.indices() {
		if failed := f.readFile(t.names[i], t.job.Blocks[i].Key, f.staging.Write(f.slot(g, i), f.env.BlockBytes)); failed != nil {
			err = errors.Join(err, failed)
			continue
		}
		read = append(read, i)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	t.err = errors.Join(t.err, err)
	if len(read) == 0 {
		f.finishGroup(g, nil)
		return
	}
	f.copyGroup(g, read, f.loaded)
}

// loaded runs on a stream when blocks of the buffer have been copied.
func (f *fileMemory) loaded(g *group) {
	t := g.transfer
	part := Job{}
	for _, i := range g.good {
		part.Blocks = append(part.Blocks, t.job.Blocks[i])
	}
	landed := part.landed(g.ticket.Landed())
	f.mu.Lock()
	defer f.mu.Unlock()
	for i, ok := range landed {
		t.arrived[g.good[i]] = ok
	}
	f.finishGroup(g, g.ticket.Err())
}

// finishGroup gives the buffer to the next group, and ends the job with its last one. mu is
// held.
func (f *fileMemory) finishGroup(g *group, err error) {
	t := g.transfer
	t.err = errors.Join(t.err, err)
	f.idle = append(f.idle, g.buffer)
	if t.left--; t.left == 0 {
		if err := t.end.Fence.Signal(t.end.Value); err != nil {
			t.err = errors.Join(t.err, err)
		}
	}
	f.pump()
}

// Ends implements Transfer.
func (t *fileTransfer) Ends() []device.Point { return []device.Point{t.end} }

// RaisePriority implements Transfer.
func (t *fileTransfer) RaisePriority(p transfer.Priority) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.class = max(t.class, p)
	for _, ticket := range t.tickets {
		ticket.RaisePriority(p)
	}
}

// Result implements Transfer.
func (t *fileTransfer) Result() ([]bool, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.points.put(t.end)
	if t.store {
		// What was dropped meanwhile is not needed.
		var names []string
		for i, ok := range t.arrived {
			if ok && t.names[i] != t.fileMemory.names[t.job.Blocks[i].Key] {
				names = append(names, t.names[i])
				t.arrived[i] = false
			}
		}
		t.remove(names)
	}
	return t.arrived, t.err
}

// The header of a file: magic, key, checksum of the content. All numbers are little-endian.
const (
	fileMagic   = "moeKVb1\n"
	headerBytes = len(fileMagic) + 32 + 4
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func fileHeader(k kvcache.Key, content []byte) []byte {
	h := append([]byte(fileMagic), k[:]...)
	return binary.LittleEndian.AppendUint32(h, crc32.Checksum(content, castagnoli))
}

// writeFile writes a block under another name first: a file of this name is whole.
func (f *fileMemory) writeFile(name string, k kvcache.Key, content []byte) (err error) {
	path := filepath.Join(f.directory, name)
	file, err := os.OpenFile(path+".new", os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = file.Write(fileHeader(k, content))
	if err == nil {
		_, err = file.Write(content)
	}
	if err = errors.Join(err, file.Close()); err == nil {
		err = os.Rename(path+".new", path)
	}
	if err != nil {
		_ = os.Remove(path + ".new") // the first error is the one that matters
	}
	return err
}

// errDamaged: a file is not as it was written.
var errDamaged = errors.New("the file is damaged")

// readFile reads a block, and verifies it.
func (f *fileMemory) readFile(name string, k kvcache.Key, content []byte) (err error) {
	if name == "" {
		return fmt.Errorf("no file of key %x", k[:8])
	}
	file, err := os.Open(filepath.Join(f.directory, name))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	header := make([]byte, headerBytes)
	if _, err := io.ReadFull(file, header); err != nil {
		return fmt.Errorf("%s: %w: %w", name, errDamaged, err)
	}
	if _, err := io.ReadFull(file, content); err != nil {
		return fmt.Errorf("%s: %w: %w", name, errDamaged, err)
	}
	if !bytes.Equal(header, fileHeader(k, content)) {
		return fmt.Errorf("%s: %w", name, errDamaged)
	}
	return nil
}
