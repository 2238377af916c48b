package offload_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/moeserve/moeserve/kvcache/offload"
)

// lockOf is the text of the lock of a process that runs, with some of it replaced.
func lockOf(t *testing.T, directory string, replace ...string) []byte {
	t.Helper()
	text, err := os.ReadFile(mustGlob(t, directory, "moeserve-kv-*", "lock"))
	if err != nil {
		t.Fatal(err)
	}
	changed := strings.NewReplacer(replace...).Replace(string(text))
	if len(replace) > 0 && changed == string(text) {
		t.Fatalf("%q has no %q", text, replace[0])
	}
	return []byte(changed)
}

func openFileTier(t *testing.T, directory string) *rig {
	t.Helper()
	return newRig(t, rigOptions{config: offload.Config{FileBlocks: 20, Directory: directory}})
}

func bootID(t *testing.T) string {
	t.Helper()
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		t.Skip("the kernel has no boot id here: ", err)
	}
	return strings.TrimSpace(string(b))
}

// TestKilledInTheMidstOfLocking: the folder of a process that was killed before it had its lock is
// removed by the next one, and no other that has no lock.
func TestKilledInTheMidstOfLocking(t *testing.T) {
	for name, c := range map[string]struct {
		files []string
		stays bool
	}{
		"before the lock":         {nil, false},
		"before it is held":       {[]string{"lock.new"}, false},
		"a file without a lock":   {[]string{"0123456789abcdef-1"}, true},
		"a file and a new lock":   {[]string{"lock.new", "0123456789abcdef-1"}, true},
		"a file of somebody else": {[]string{"mine"}, true},
	} {
		t.Run(name, func(t *testing.T) {
			directory := t.TempDir()
			folder := filepath.Join(directory, "moeserve-kv-1")
			err := os.Mkdir(folder, 0o700)
			for _, f := range c.files {
				err = errors.Join(err, os.WriteFile(filepath.Join(folder, f), []byte("A moeserve pro"), 0o600))
			}
			if err != nil {
				t.Fatal(err)
			}
			openFileTier(t, directory).close()
			left, err := os.ReadDir(folder)
			if c.stays && (err != nil || len(left) != len(c.files)) || !c.stays && !errors.Is(err, os.ErrNotExist) {
				t.Errorf("left: %v, %v", left, err)
			}
		})
	}
}

// TestTakenForAbandoned: a process whose folder another one removes before it has its lock, or has
// locked to do so, makes another.
func TestTakenForAbandoned(t *testing.T) {
	for name, take := range map[string]func(folder string) error{
		"removed": os.RemoveAll,
		"locked":  func(string) error { return unix.EWOULDBLOCK },
	} {
		t.Run(name, func(t *testing.T) {
			directory, taken := t.TempDir(), 0
			offload.LockWith(t, func(fd, how int) error {
				if taken++; taken > 3 {
					return unix.Flock(fd, how)
				}
				return take(filepath.Dir(mustGlob(t, directory, "moeserve-kv-*", "lock.new")))
			}, true)
			r := openFileTier(t, directory)
			if taken != 4 {
				t.Errorf("%d attempts", taken)
			}
			mustGlob(t, directory, "moeserve-kv-*", "lock") // and no other folder
			r.close()
		})
	}
}

// TestNoLocks: where files cannot be locked the tier works, says so, and nobody removes its folder.
func TestNoLocks(t *testing.T) {
	for _, refused := range []error{unix.ENOLCK, unix.EOPNOTSUPP, unix.ENOSYS} {
		t.Run(refused.Error(), func(t *testing.T) {
			directory := t.TempDir()
			offload.LockWith(t, func(int, int) error { return refused }, true)
			r := openFileTier(t, directory)
			wantError(t, errors.New(r.logged()), "cannot be locked", refused.Error())
			s := r.sequence(1, "a", 4)
			r.fill(s, 0, 4)
			r.store(s, 0, 4)
			offload.LockWith(t, unix.Flock, true) // of a process that finds locks again
			x := openFileTier(t, directory)
			x.close()
			if log := x.logged(); log != "" {
				t.Error(log)
			}
			if n, l := r.load(s, 0); n != 4 || l.Blocks != 4 || !r.right(s, 0, 4) {
				t.Errorf("found %d, loaded %+v", n, l)
			}
			r.close()
			if left, err := os.ReadDir(directory); err != nil || len(left) > 0 {
				t.Errorf("left: %v, %v", left, err)
			}
		})
	}
	offload.LockWith(t, func(int, int) error { return unix.EIO }, true)
	if r, err := openRig(t, rigOptions{config: offload.Config{FileBlocks: 20, Directory: t.TempDir()}}); err == nil || !strings.Contains(err.Error(), "input/output error") {
		t.Errorf("any other error: %v", err)
		r.close()
	}
}

// TestFolderOfAnotherHost: on a network file system a lock that can be had does not prove that its
// process has ended, if that was of another host, or of another start of this one.
func TestFolderOfAnotherHost(t *testing.T) {
	for name, c := range map[string]struct {
		boot    string // of the lock; empty: this one
		oneHost bool
		stays   bool
	}{
		"this kernel, one host":    {"", true, false},
		"this kernel, network":     {"", false, false},
		"another kernel, one host": {"1b4e28ba-2fa1-11d2-883f-0016d3cca427", true, false},
		"another kernel, network":  {"1b4e28ba-2fa1-11d2-883f-0016d3cca427", false, true},
	} {
		t.Run(name, func(t *testing.T) {
			directory := t.TempDir()
			offload.LockWith(t, unix.Flock, c.oneHost)
			boot := bootID(t)
			r := openFileTier(t, directory)
			text := lockOf(t, directory)
			if c.boot != "" {
				text = lockOf(t, directory, boot, c.boot)
			}
			r.close()
			folder := filepath.Join(directory, "moeserve-kv-1")
			err := os.Mkdir(folder, 0o700)
			for f, content := range map[string][]byte{"lock": text, "0123456789abcdef-1": nil} {
				err = errors.Join(err, os.WriteFile(filepath.Join(folder, f), content, 0o600))
			}
			if err != nil {
				t.Fatal(err)
			}
			x := openFileTier(t, directory)
			x.close()
			if _, err := os.Stat(filepath.Join(folder, "0123456789abcdef-1")); (err == nil) != c.stays {
				t.Errorf("%v", err)
			}
			if log := x.logged(); strings.Contains(log, "remove the folder if it was") != c.stays || strings.Contains(log, "killed removed") == c.stays {
				t.Error(log)
			}
		})
	}
}
