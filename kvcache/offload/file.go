package offload

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"sync"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kvcache"
	"github.com/moeserve/moeserve/transfer"
)

// FileReaders is the number of host streams of a tier that read and write files.
const FileReaders = 16

const (
	// stagingBuffers are two for each stream: one is filled while the other is copied.
	stagingBuffers = 2 * FileReaders
	// bufferBytes is the most that a staging buffer has, in whole blocks and at least one. With 2 MiB, and 8 or 16
	// streams, loads from memory were half as fast as with 8 MiB and 16 streams (docs/log/two-gpus-2026-11-29.md).
	bufferBytes = 8 << 20
	// shareBytes is the least, in whole blocks and at least one, that a job is divided into so that more
	// streams take part.
	shareBytes = 2 << 20
)

// bufferBlocks is the number of blocks of a staging buffer, for a tier of so many blocks.
func bufferBlocks(blockBytes int64, blocks int) int64 {
	return max(1, min(bufferBytes/blockBytes, share(blockBytes, blocks), int64(blocks)))
}

// share is the number of blocks that each stream gets of a job.
func share(blockBytes int64, blocks int) int64 {
	return max(1, shareBytes/blockBytes, (int64(blocks)+FileReaders-1)/FileReaders)
}

// fileMemory is the tier in files of a folder, one for each block, which is removed at the
// end. Blocks pass through staging buffers in pinned memory, in groups of at most as many as one
// holds.
//
// Files are written under a name of their own and then renamed; no name is used again. So a
// file that is there is whole, and one that is dropped and stored again is another. A header
// has the key and a checksum, which a load verifies: a block that is damaged, or gone, is
// lost, and never loaded. A file that is dropped while loads read it stays until they have
// ended.
//
// Everything behind Start runs as host work on the streams: the goroutine of the engine does
// not wait for files, and virtual time sees the work. A stream reads or writes one group at a time
// and then takes the next one, so that none waits for a stream while another is idle; the ends of
// copies are watched by a stream of their own, where they wait for no file. Every group ends once,
// with end, where it was begun or on a stream; a job ends with its last group.
type fileMemory struct {
	env     Env
	folder  *folder
	streams []device.Executor
	copied  device.Watcher
	removes int // stream of the next removal
	staging device.Memory
	// perBuffer is the number of blocks of a staging buffer.
	perBuffer int

	// mu is a leaf, except that fences are signaled and work is enqueued under it. It is not held
	// during a wait.
	mu sync.Mutex
	// files of the keys, and the number of the last.
	files map[kvcache.Key]*blockFile
	last  int64
	// free are the streams that have no group, idle the buffers. loads wait for both, stores for a
	// buffer: loads go first. copies of stores fill buffers, and then wait for a stream.
	free                  []device.Executor
	idle                  []*buffer
	loads, stores, copies []*group
	points                points
}

// blockFile is the file of a block, which a store may yet have to write.
type blockFile struct {
	name string
	// readers are loads under way; dropped: the last of them removes the file.
	readers int
	dropped bool
}

// buffer is a part of the staging memory.
type buffer struct {
	at int64
	// copied is the fence of the copies from and to it, one after the other.
	copied device.Point
}

// openFiles opens the tier in a new folder of the configured one.
func openFiles(e Env, c Config) (*Medium, error) {
	f := &fileMemory{env: e, files: map[kvcache.Key]*blockFile{}, points: points{machine: e.Machine, name: "kv file tier"}}
	var err error
	if f.folder, err = newFolder(c.Directory, e.Log); err != nil {
		return nil, fmt.Errorf("cannot create a folder in directory %q: %w; name a folder that exists, can be written and has room", c.Directory, err)
	}
	if err := f.open(c.FileBlocks); err != nil {
		return nil, errors.Join(fmt.Errorf("file tier: %w", err), f.Close())
	}
	if err := f.checkRoom(c.FileBlocks); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return &Medium{
		Name: File, Blocks: c.FileBlocks, Memory: f, Store: fileHandler{f, true}, Load: fileHandler{f, false},
		BytesPerSecond: func() float64 { return 0 },
	}, nil
}

// checkRoom refuses more blocks than there is room for in the directory: the tier's account needs
// memory for each, whether it is ever stored or not.
func (f *fileMemory) checkRoom(blocks int) error {
	free, err := f.folder.free()
	if err != nil {
		return nil // stores will show it
	}
	bytes := f.env.BlockBytes + int64(headerBytes)
	if most := free / bytes; int64(blocks) > most {
		return fmt.Errorf("num_file_blocks is %d, of %d bytes each, and %d bytes are free in directory %q; set it to at most %d, or make room", blocks, bytes, free, filepath.Dir(f.folder.path), most)
	}
	return nil
}

func (f *fileMemory) open(blocks int) error {
	if err := f.folder.probe(f.env.BlockBytes); err != nil {
		return fmt.Errorf("cannot write a block of %d bytes: %w; make room in directory, or name another", f.env.BlockBytes, err)
	}
	for i := range FileReaders {
		s, err := f.env.Machine.NewStream(device.Host, device.StreamOptions{Name: fmt.Sprintf("kv files %d", i+1)})
		if err != nil {
			return err
		}
		x, ok := s.(device.Executor)
		if !ok {
			return errors.Join(errors.New("host streams of this machine cannot execute work"), s.Close())
		}
		f.streams = append(f.streams, x)
	}
	f.free = slices.Clone(f.streams)
	s, err := f.env.Machine.NewStream(device.Host, device.StreamOptions{Name: "kv files copied"})
	if err != nil {
		return err
	}
	w, ok := s.(device.Watcher)
	if !ok {
		return errors.Join(errors.New("host streams of this machine cannot watch fences"), s.Close())
	}
	f.copied = w
	f.perBuffer = int(bufferBlocks(f.env.BlockBytes, blocks))
	size := int64(f.perBuffer) * f.env.BlockBytes
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
	var files []*blockFile
	for _, k := range keys {
		if file, ok := f.files[k]; ok {
			files = append(files, file)
			delete(f.files, k)
		}
	}
	f.remove(files)
}

// remove removes files that no key has any more: now, or when no load reads them. mu is held.
func (f *fileMemory) remove(files []*blockFile) {
	var names []string
	for _, file := range files {
		if file.dropped = true; file.readers == 0 {
			names = append(names, file.name)
		}
	}
	if len(names) > 0 {
		s := f.streams[f.removes]
		f.removes = (f.removes + 1) % len(f.streams)
		_ = execute(s, "remove kv files", func(error) { f.folder.drop(names) })
	}
}

// execute has a stream call a function: with an error, if the stream is in the error state.
func execute(s device.Executor, name string, call func(error)) error {
	return s.Execute(device.Work{
		Name: name, Host: true, Run: func(device.Access) error { call(nil); return nil }, Failed: call,
	})
}

// Lost implements Memory: what is gone shows when it is read.
func (f *fileMemory) Lost() []kvcache.Key { return nil }

// Locate implements Memory.
func (f *fileMemory) Locate(kvcache.Key) device.Space { return device.Host }

// Reset implements Memory.
func (f *fileMemory) Reset() {
	f.mu.Lock()
	defer f.mu.Unlock()
	files := slices.Collect(maps.Values(f.files))
	clear(f.files)
	f.remove(files)
}

// Close implements Memory.
func (f *fileMemory) Close() error {
	var errs []error
	if f.copied != nil {
		errs = append(errs, f.copied.Close()) // waits for its work
	}
	for _, s := range f.streams {
		errs = append(errs, s.Close())
	}
	errs = append(errs, f.points.close())
	if f.staging != nil {
		errs = append(errs, f.staging.Free())
	}
	return errors.Join(append(errs, f.folder.remove())...)
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
	files []*blockFile // by block; nil: there is none
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
	stream   device.Executor // that reads or writes its files; nil: none does
	ticket   *transfer.Ticket
	// good are the blocks that are copied, err the error of a store's copies.
	good []int
	err  error
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
		t.files = append(t.files, f.begin(job.Blocks[i].Key, h.store))
	}
	most := f.groupBlocks(len(job.Blocks))
	for i := 0; i < len(job.Blocks); i += most {
		g := &group{transfer: t, first: i, n: min(most, len(job.Blocks)-i)}
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

// groupBlocks is the number of blocks of a job's groups.
func (f *fileMemory) groupBlocks(blocks int) int {
	return min(f.perBuffer, int(share(f.env.BlockBytes, blocks)))
}

// begin returns the file of a key, for a store or a load that begins; nil: a load finds none. mu
// is held.
func (f *fileMemory) begin(k kvcache.Key, store bool) *blockFile {
	if store {
		f.last++
		f.files[k] = &blockFile{name: fmt.Sprintf("%x-%d", k[:8], f.last)}
	} else if f.files[k] != nil {
		f.files[k].readers++
	}
	return f.files[k]
}

// pump begins what buffers and streams are free for. mu is held, but not throughout.
func (f *fileMemory) pump() {
	for {
		switch {
		case len(f.copies) > 0 && len(f.free) > 0:
			f.begun(f.useStream(take(&f.copies), "write kv files", f.writeFiles))
		case len(f.loads) > 0 && len(f.idle) > 0 && len(f.free) > 0:
			f.begun(f.useStream(f.useBuffer(&f.loads), "read kv files", f.readFiles))
		case len(f.loads) == 0 && len(f.stores) > 0 && len(f.idle) > 0:
			g := f.useBuffer(&f.stores)
			f.begun(g, f.copyGroup(g, g.indices(), f.filled))
		default:
			return
		}
	}
}

// begun ends a group of which a part could not be begun. mu is held.
func (f *fileMemory) begun(g *group, err error) {
	if err != nil {
		f.end(g, err)
	}
}

// take removes the first of groups.
func take(from *[]*group) *group {
	g := (*from)[0]
	*from = slices.Delete(*from, 0, 1)
	return g
}

// useBuffer takes the first of groups, and gives it an idle buffer. mu is held.
func (f *fileMemory) useBuffer(from *[]*group) *group {
	g := take(from)
	g.buffer, f.idle = f.idle[len(f.idle)-1], f.idle[:len(f.idle)-1]
	return g
}

// useStream has a free stream call next for a group. mu is held.
func (f *fileMemory) useStream(g *group, name string, next func(*group, error)) (*group, error) {
	// The last one is awake: mostly it is the caller.
	g.stream, f.free = f.free[len(f.free)-1], f.free[:len(f.free)-1]
	err := execute(g.stream, name, func(err error) { next(g, err) })
	if err != nil {
		f.freeStream(g)
		err = fmt.Errorf("%w: %w", errRefused, err)
	}
	return g, err
}

// freeStream takes the group's stream back. mu is held.
func (f *fileMemory) freeStream(g *group) {
	f.free = append(f.free, g.stream)
	g.stream = nil
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

// copyGroup copies blocks between the GPU and the group's buffer, and then has the stream of copies
// call next. With an error nothing is copied any more, and next is not called. mu is held, but not
// while it waits for a copy whose end cannot be watched.
func (f *fileMemory) copyGroup(g *group, blocks []int, next func(*group, error)) error {
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
		Pieces: pieces, Priority: t.class, After: t.job.After, Done: g.buffer.copied, DoneInOrder: true, Label: t.job.Label,
	})
	if err != nil {
		g.buffer.copied.Value--
		return fmt.Errorf("%w: %w", errRefused, err)
	}
	t.tickets = append(t.tickets, g.ticket)
	work := device.Work{
		Name: "kv files copied", Host: true, Failed: func(err error) { next(g, err) },
		Run: func(device.Access) error { next(g, nil); return nil },
	}
	reached, err := f.copied.Watch(g.ticket.End(), work)
	if reached {
		err = f.copied.Execute(work)
	}
	if err != nil {
		f.mu.Unlock()
		_ = g.ticket.End().Wait(context.Background()) // until then the buffer is the copy's
		f.mu.Lock()
		return fmt.Errorf("%w: %w", errRefused, err)
	}
	return nil
}

// filled runs on the stream of copies when the blocks of a store are in the buffer.
func (f *fileMemory) filled(g *group, err error) {
	g.err = errors.Join(err, g.ticket.Err())
	f.mu.Lock()
	defer f.mu.Unlock()
	f.copies = append(f.copies, g)
	f.pump()
}

// writeFiles runs on a stream when blocks are in the buffer.
func (f *fileMemory) writeFiles(g *group, err error) {
	t := g.transfer
	err = errors.Join(err, g.err)
	var written []int
	if err == nil {
		for _, i := range g.good {
			if failed := f.folder.write(t.files[i].name, t.job.Blocks[i].Key, f.staging.Read(f.slot(g, i), f.env.BlockBytes)); failed != nil {
				err = errors.Join(err, failed)
				continue
			}
			written = append(written, i)
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.freeStream(g)
	for _, i := range written {
		t.arrived[i] = true
	}
	f.end(g, err)
	f.pump()
}

// readFiles runs on a stream.
func (f *fileMemory) readFiles(g *group, err error) {
	t := g.transfer
	var read []int
	if err != nil {
		err = fmt.Errorf("%w: %w", errRefused, err)
	} else {
		for _, i := range g.indices() {
			if failed := f.readFile(t, i, f.staging.Write(f.slot(g, i), f.env.BlockBytes)); failed != nil {
				err = errors.Join(err, failed)
				continue
			}
			read = append(read, i)
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.freeStream(g)
	t.err = errors.Join(t.err, err)
	if len(read) > 0 {
		f.begun(g, f.copyGroup(g, read, f.loaded))
	} else {
		f.end(g, nil)
	}
	f.pump()
}

// readFile reads a block of a job.
func (f *fileMemory) readFile(t *fileTransfer, block int, content []byte) error {
	k := t.job.Blocks[block].Key
	if t.files[block] == nil {
		return fmt.Errorf("no file of key %x", k[:8])
	}
	return f.folder.read(t.files[block].name, k, content)
}

// loaded runs on the stream of copies when blocks of the buffer have been copied, whatever became of
// the stream.
func (f *fileMemory) loaded(g *group, _ error) {
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
	f.end(g, g.ticket.Err())
	f.pump()
}

// end ends a group, which nothing reads or writes any more: its buffer is free for the next one,
// and the job ends with its last one. mu is held.
func (f *fileMemory) end(g *group, err error) {
	t := g.transfer
	t.err = errors.Join(t.err, err)
	f.idle = append(f.idle, g.buffer)
	if t.left--; t.left > 0 {
		return
	}
	if err := t.end.Fence.Signal(t.end.Value); err != nil {
		t.err = errors.Join(t.err, err, t.end.Fence.Fail(t.end.Value, err)) // the job ends nevertheless
	}
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
	var gone []*blockFile
	for i, file := range t.files {
		switch {
		case file == nil:
			continue
		case !t.store:
			file.readers--
		case file.dropped && t.arrived[i]: // meanwhile: it is not needed
			t.arrived[i] = false
		default:
			continue
		}
		if file.dropped {
			gone = append(gone, file)
		}
	}
	t.remove(gone)
	return t.arrived, t.err
}
