package reclaim

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// None is the name of no directory: nobody is listened to.
const None = "none"

// Dir is the directory of sockets by default: of the user's session ($XDG_RUNTIME_DIR), or
// else /tmp/moeserve-UID.
func Dir() string {
	if dir := os.Getenv("XDG_RUNTIME_DIR"); filepath.IsAbs(dir) {
		return filepath.Join(dir, "moeserve")
	}
	return "/tmp/moeserve-" + strconv.Itoa(os.Getuid())
}

// makeDir makes the directory where it is the default one, which must be this user's alone.
// Who has named another one has decided who may enter it.
func makeDir(dir string) error {
	if dir != Dir() {
		return nil
	}
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	return checkDir(dir)
}

// checkDir refuses the default directory where others could have put sockets into it.
func checkDir(dir string) error {
	if dir != Dir() {
		return nil
	}
	i, err := os.Lstat(dir)
	if err != nil {
		return err
	}
	if !i.IsDir() || i.Mode().Perm()&0o077 != 0 || !ours(i) {
		return fmt.Errorf("%s is not a directory of this user alone (mode 0700); remove it, or set --runtime-dir", dir)
	}
	return nil
}

// Listener listens to neighbors until it is closed.
type Listener struct {
	path   string
	server *http.Server
	served chan error
}

// suffix of the names of sockets, and of those that do not listen yet.
const suffix, begunSuffix = ".sock", ".new"

// Listen listens on a socket of this process in dir. The default directory is made, and its
// sockets are this user's; those in another directory are for all that may enter it. Sockets of this
// user's processes that were killed are removed.
func Listen(dir string, h http.Handler, log *slog.Logger) (*Listener, error) {
	if err := makeDir(dir); err != nil {
		return nil, fmt.Errorf("reclaim: %w", err)
	}
	at, path, err := open(dir)
	// A neighbor may have taken the socket for that of a dead process before it listened.
	for try := 0; try < 3 && errors.Is(err, fs.ErrNotExist); try++ {
		at, path, err = open(dir)
	}
	switch {
	case err != nil && dir == Dir():
		return nil, fmt.Errorf("reclaim: listen to neighbors: %w; set --runtime-dir", err)
	case err != nil:
		return nil, fmt.Errorf("reclaim: listen to neighbors: %w", err)
	}
	removeDead(dir, log)
	l := &Listener{path: path, served: make(chan error, 1), server: &http.Server{
		Handler: h, ReadTimeout: 10 * time.Second, IdleTimeout: 10 * time.Second, MaxHeaderBytes: maxBody,
		ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}}
	go func() { l.served <- l.server.Serve(at) }()
	return l, nil
}

// open makes a socket of this process in dir, and listens. It has the name of a socket once it
// listens: who finds one that refuses connections knows that its process has ended.
func open(dir string) (at net.Listener, path string, err error) {
	// Containers may share the directory and not the numbers of processes.
	var unique [3]byte
	rand.Read(unique[:]) //nolint:errcheck // never fails
	name := fmt.Sprintf("%d-%s", os.Getpid(), hex.EncodeToString(unique[:]))
	begun := filepath.Join(dir, name+begunSuffix)
	path = filepath.Join(dir, name+suffix)
	if at, err = listenAt(begun); err != nil {
		return nil, "", err
	}
	mode := os.FileMode(0o600)
	if dir != Dir() {
		mode = 0o666
	}
	if err = os.Chmod(begun, mode); err == nil {
		err = os.Rename(begun, path)
	}
	if err != nil {
		return nil, "", errors.Join(err, at.Close(), os.Remove(begun))
	}
	return at, path, nil
}

// listenAt listens on a socket, whose file its closing leaves.
func listenAt(path string) (net.Listener, error) {
	at, err := new(net.ListenConfig).Listen(context.Background(), "unix", path)
	if u, ok := at.(*net.UnixListener); ok {
		u.SetUnlinkOnClose(false)
	}
	return at, err
}

// removeDead removes the sockets in dir of this user's processes that have ended without closing
// them, or before they listened. Others are skipped by who asks.
func removeDead(dir string, log *slog.Logger) {
	files, err := os.ReadDir(dir)
	if err != nil {
		return // who may not list a directory that others share leaves what is there
	}
	for _, f := range files {
		i, err := f.Info()
		if err != nil || f.Type() != os.ModeSocket || !ours(i) ||
			!strings.HasSuffix(f.Name(), suffix) && !strings.HasSuffix(f.Name(), begunSuffix) {
			continue
		}
		path := filepath.Join(dir, f.Name())
		dead := refuses(path)
		if dead && strings.HasSuffix(path, begunSuffix) {
			// It may be about to listen.
			time.Sleep(20 * time.Millisecond)
			dead = refuses(path)
		}
		if dead && os.Remove(path) == nil {
			log.Debug("socket of a process that was killed removed", "socket", path)
		}
	}
}

// refuses says whether nobody listens on a socket.
func refuses(path string) bool {
	c, err := new(net.Dialer).DialContext(context.Background(), "unix", path)
	if err == nil {
		_ = c.Close()
	}
	return errors.Is(err, syscall.ECONNREFUSED)
}

// Path of the socket.
func (l *Listener) Path() string { return l.path }

// Close ends the listening, and requests under way; the socket is removed.
func (l *Listener) Close() error {
	err := l.server.Close()
	if served := <-l.served; !errors.Is(served, http.ErrServerClosed) {
		err = errors.Join(err, served)
	}
	if gone := os.Remove(l.path); !errors.Is(gone, os.ErrNotExist) {
		err = errors.Join(err, gone)
	}
	return err
}
