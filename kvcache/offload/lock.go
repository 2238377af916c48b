package offload

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"

	"golang.org/x/sys/unix"
)

// The lock of a folder is a file in it that says which kernel its process runs on, and which the
// process has locked. Another process removes the folder where it gets that lock, and where that
// proves that the first one has ended: on one kernel, or on a file system of one host. Network file
// systems may not tell one host of the locks of another, so their folders of other hosts stay, and
// so do those of this one from before it was started again.
//
// A folder gets its lock in three steps: it is made, the file is made under another name and locked,
// and renamed. A process that is killed meanwhile leaves a folder without a lock, and with no other
// file. Anybody may remove that: a process that lives sees that it is gone, and makes another.
const (
	lockName = "lock"
	lockHead = "A moeserve process holds a lock on this file while it uses the folder.\n"
	// unlocked is the text of a lock where there are no locks.
	unlocked = "Files cannot be locked here. Remove the folder when no moeserve process uses it.\n"
	// maxLockText bounds what is read of a lock.
	maxLockText = 4 << 10
	// lockAttempts is how often a folder is made that others remove before it has its lock; each of
	// them does so once, when it starts.
	lockAttempts = 100
)

// lockText has the kernel's boot id, and the host's name for people.
var lockText = regexp.MustCompile(`^` + regexp.QuoteMeta(lockHead) + `boot ([0-9a-f-]*)\nhost (.*)\n$`)

// Tests replace these.
var (
	flock = unix.Flock
	// ofOneHost reports whether an open file is on a file system that only one host mounts at a
	// time.
	ofOneHost = func(fd int) bool {
		var s unix.Statfs_t
		if unix.Fstatfs(fd, &s) != nil {
			return false
		}
		switch uint32(s.Type) {
		case unix.EXT4_SUPER_MAGIC, unix.XFS_SUPER_MAGIC, unix.BTRFS_SUPER_MAGIC, unix.F2FS_SUPER_MAGIC, unix.BCACHEFS_SUPER_MAGIC,
			unix.TMPFS_MAGIC, unix.RAMFS_MAGIC, unix.OVERLAYFS_SUPER_MAGIC, zfsMagic:
			return true
		}
		return false
	}
)

// zfsMagic is that of ZFS on Linux, which is not part of the kernel.
const zfsMagic = 0x2fc12fc1

// bootID is a number of the running kernel, the same in all containers; empty: unknown.
func bootID() string {
	b, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if len(b) > 0 && b[len(b)-1] == '\n' {
		b = b[:len(b)-1]
	}
	return string(b)
}

// errNoLocks: the file system has no locks.
var errNoLocks = errors.New("the file system has no locks")

// noLocks reports whether an error of flock says that.
func noLocks(err error) bool {
	return errors.Is(err, unix.ENOLCK) || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOSYS)
}

// newLock makes the lock of a folder; with errNoLocks it is one that nobody holds and that keeps
// others from removing the folder. It has its name once it is held: a file of this name that nobody
// holds is one that is abandoned. An error that wraps os.ErrNotExist or EWOULDBLOCK says that another
// process has taken the folder for an abandoned one.
func newLock(path string) (lock *os.File, err error) {
	name := filepath.Join(path, lockName)
	lock, err = os.OpenFile(name+unfinished, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, err
	}
	host, _ := os.Hostname()
	none := error(nil)
	_, err = fmt.Fprintf(lock, "%sboot %s\nhost %s\n", lockHead, bootID(), host)
	if err == nil {
		err = flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	}
	if noLocks(err) {
		none = fmt.Errorf("%w: %w", errNoLocks, err)
		_, err = lock.WriteAt([]byte(unlocked), 0)
		err = errors.Join(err, lock.Truncate(int64(len(unlocked))))
	}
	if err == nil {
		err = os.Rename(name+unfinished, name)
	}
	if err != nil {
		err = errors.Join(err, lock.Close())
		_ = os.Remove(name + unfinished) // or it goes with the folder
		return nil, err
	}
	return lock, none
}

// takeLock opens and locks the lock of a folder that this user's process has left. nil: it lives, or
// the lock is none of ours. An error says why a folder may be abandoned and stays nevertheless.
func takeLock(folder int) (lock *os.File, err error) {
	l, err := unix.Openat(folder, lockName, unix.O_RDWR|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) {
		return nil, err
	} else if err != nil {
		return nil, nil
	}
	lock = os.NewFile(uintptr(l), lockName)
	if ours, err := abandoned(l, lock); !ours || err != nil {
		return nil, errors.Join(err, lock.Close())
	}
	return lock, nil
}

// abandoned reports whether a lock is one of ours that no process holds any more, and holds it then.
func abandoned(fd int, lock io.Reader) (bool, error) {
	if size, ok := own(fd, unix.S_IFREG); !ok || size > maxLockText {
		return false, nil
	}
	text, err := io.ReadAll(io.LimitReader(lock, maxLockText))
	m := lockText.FindSubmatch(text)
	if err != nil || m == nil || flock(fd, unix.LOCK_EX|unix.LOCK_NB) != nil {
		return false, nil
	}
	if boot := bootID(); (boot == "" || string(m[1]) != boot) && !ofOneHost(fd) {
		return false, fmt.Errorf("%w: host %q", errElsewhere, m[2])
	}
	return true, nil
}

// errElsewhere: nothing shows whether the process of a folder has ended.
var errElsewhere = errors.New("its process ran on another host, or before this one was started again, and the file system is not of one host")

// removeUnfinished removes a folder in a directory that has no lock yet, if it has nothing else
// either, and returns the number of its files.
func removeUnfinished(directory int, folder *os.File, name string) (files int) {
	at := int(folder.Fd())
	names, err := folder.Readdirnames(2)
	if err != nil && !errors.Is(err, io.EOF) || len(names) > 1 || len(names) == 1 && names[0] != lockName+unfinished {
		return 0
	}
	if len(names) == 1 {
		var s unix.Stat_t
		if err := unix.Fstatat(at, names[0], &s, unix.AT_SYMLINK_NOFOLLOW); err != nil || s.Mode&unix.S_IFMT != unix.S_IFREG || unix.Unlinkat(at, names[0], 0) != nil {
			return 0
		}
	}
	_ = unix.Unlinkat(directory, name, unix.AT_REMOVEDIR) // fails where it has got its lock meanwhile
	return len(names)
}
