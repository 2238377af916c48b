package offload

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/zeebo/xxh3"
	"golang.org/x/sys/unix"

	"github.com/moeserve/moeserve/kvcache"
)

// folder is where a file tier has its files: a new one in the configured directory. The process
// holds a lock on a file in it for as long as it lives, also where it is killed; so the next one
// that uses the directory sees which folders are abandoned, and removes them.
type folder struct {
	path string
	lock *os.File // nil: it is not made yet
}

const (
	folderPrefix = "moeserve-kv-"
	probeName    = "probe"
	unfinished   = ".new" // behind the name of a file that is being written
)

// folderNames are the names of files in a folder, except for the lock.
var folderNames = regexp.MustCompile(`^([0-9a-f]{16}-[0-9]+|` + probeName + `)(\` + unfinished + `)?$`)

// newFolder makes a folder in the directory, after it has removed those that are abandoned.
func newFolder(directory string, log *slog.Logger) (*folder, error) {
	removeAbandoned(directory, log)
	for attempt := 1; ; attempt++ {
		path, err := os.MkdirTemp(directory, folderPrefix)
		if err != nil {
			return nil, err
		}
		f := &folder{path: path}
		f.lock, err = newLock(path)
		if errors.Is(err, errNoLocks) {
			log.Warn("KV files cannot be locked: if this process is killed they stay", "folder", path, "err", err)
			err = nil
		}
		if err == nil {
			return f, nil
		}
		removed := f.remove()
		if taken := errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.EWOULDBLOCK); !taken || attempt == lockAttempts {
			return nil, errors.Join(err, removed)
		}
	}
}

// remove removes the folder with all its files.
func (f *folder) remove() error {
	// The lock goes last: a folder without it is nobody's, should the process be killed now.
	entries, err := os.ReadDir(f.path)
	if errors.Is(err, os.ErrNotExist) {
		err = nil
	}
	for _, e := range entries {
		if e.Name() != lockName {
			err = errors.Join(err, os.RemoveAll(filepath.Join(f.path, e.Name())))
		}
	}
	err = errors.Join(err, os.RemoveAll(f.path))
	if f.lock != nil {
		err = errors.Join(err, f.lock.Close()) // last, so that nobody else removes files meanwhile
	}
	return err
}

// removeAbandoned removes the folders of processes that were killed. What it cannot read or
// remove stays.
func removeAbandoned(directory string, log *slog.Logger) {
	d, err := os.OpenFile(directory, os.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return // newFolder says so
	}
	defer d.Close()                //nolint:errcheck // it was only read
	names, _ := d.Readdirnames(-1) // those before an error
	for _, name := range names {
		if !strings.HasPrefix(name, folderPrefix) {
			continue
		}
		path := filepath.Join(directory, name)
		switch files, err := removeFolder(int(d.Fd()), name); {
		case errors.Is(err, errElsewhere):
			log.Info("KV files may be of a process that was killed: remove the folder if it was", "folder", path, "err", err)
		case err != nil:
			log.Warn("KV files of a process that was killed not removed", "folder", path, "err", err)
		case files > 0:
			log.Info("KV files of a process that was killed removed", "folder", path, "files", files)
		}
	}
}

// removeFolder removes a folder in a directory and returns the number of its files, if this user
// has made it, and the lock in it is one of ours that nobody holds, or it has none yet; otherwise 0.
// It removes nothing but what a file tier makes. Everything is opened relative to what was checked, and no
// symbolic link is followed.
func removeFolder(directory int, name string) (files int, err error) {
	at, err := unix.Openat(directory, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, nil // it is another's, no folder, or gone
	}
	f := os.NewFile(uintptr(at), name)
	defer f.Close() //nolint:errcheck // it was only read
	if _, ok := own(at, unix.S_IFDIR); !ok {
		return 0, nil
	}
	lock, err := takeLock(at)
	if errors.Is(err, unix.ENOENT) {
		return removeUnfinished(directory, f, name), nil
	}
	if lock == nil || err != nil {
		return 0, err
	}
	defer lock.Close() //nolint:errcheck // it was only read
	names, err := f.Readdirnames(-1)
	if err != nil {
		return 0, err
	}
	foreign := 0
	for _, n := range names {
		switch {
		case n == lockName:
		case !folderNames.MatchString(n):
			foreign++
		default:
			if err := unix.Unlinkat(at, n, 0); err != nil {
				return files, fmt.Errorf("%s: %w", n, err)
			}
			files++
		}
	}
	if foreign > 0 {
		return files, fmt.Errorf("it has %d other files", foreign)
	}
	if err := unix.Unlinkat(at, lockName, 0); err != nil {
		return files, err
	}
	return files + 1, unix.Unlinkat(directory, name, unix.AT_REMOVEDIR)
}

// own reports whether an open file is of this kind and this user's, and its size.
func own(fd int, kind uint32) (size int64, ok bool) {
	var s unix.Stat_t
	err := unix.Fstat(fd, &s)
	return s.Size, err == nil && s.Mode&unix.S_IFMT == kind && int(s.Uid) == os.Geteuid()
}

// The header of a file: magic, key, XXH3 of the content. All numbers are little-endian.
// XXH3 in place of CRC-32C: behind a read from the page cache it takes less than half of the time.
const (
	fileMagic   = "moeKVb2\n"
	headerBytes = len(fileMagic) + len(kvcache.Key{}) + 8
)

func fileHeader(k kvcache.Key, content []byte) []byte {
	h := append([]byte(fileMagic), k[:]...)
	return binary.LittleEndian.AppendUint64(h, xxh3.Hash(content))
}

// probe writes and removes a file of a block's size: there is room, and rights.
func (f *folder) probe(blockBytes int64) error {
	path := filepath.Join(f.path, probeName)
	err := os.WriteFile(path, make([]byte, int(blockBytes)+headerBytes), 0o600)
	if removed := os.Remove(path); err == nil {
		err = removed
	}
	return err
}

// free is the number of bytes that this user may still write there.
func (f *folder) free() (int64, error) {
	var s unix.Statfs_t
	if err := unix.Statfs(f.path, &s); err != nil {
		return 0, err
	}
	if s.Bavail > math.MaxInt64/uint64(s.Bsize) {
		return math.MaxInt64, nil
	}
	return int64(s.Bavail) * s.Bsize, nil
}

// write writes a block under another name first: a file of this name is whole.
func (f *folder) write(name string, k kvcache.Key, content []byte) (err error) {
	path := filepath.Join(f.path, name)
	file, err := os.OpenFile(path+unfinished, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = file.Write(fileHeader(k, content))
	if err == nil {
		_, err = file.Write(content)
	}
	if err = errors.Join(err, file.Close()); err == nil {
		err = os.Rename(path+unfinished, path)
	}
	if err != nil {
		_ = os.Remove(path + unfinished) // the first error is the one that matters
	}
	return err
}

// errDamaged: a file is not as it was written.
var errDamaged = errors.New("the file is damaged")

// read reads a block, and verifies it.
func (f *folder) read(name string, k kvcache.Key, content []byte) (err error) {
	file, err := os.Open(filepath.Join(f.path, name))
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

// drop removes files. One that cannot be removed now goes with the folder.
func (f *folder) drop(names []string) {
	for _, name := range names {
		_ = os.Remove(filepath.Join(f.path, name))
	}
}
