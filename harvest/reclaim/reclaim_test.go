package reclaim_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/moeserve/moeserve/harvest/reclaim"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// gpu is a device that several processes borrow from.
type gpu struct {
	mu   sync.Mutex
	free int64
}

// holder is a process that has borrowed memory of a GPU, in pieces.
type holder struct {
	of          *gpu
	held, piece int64
	asked       []reclaim.Request
}

func (h *holder) Reclaim(_ context.Context, ask reclaim.Request) (reclaim.Answer, error) {
	if ask.Device != "1" && ask.Device != "GPU-a" {
		return reclaim.Answer{}, fmt.Errorf("GPU %s: %w", ask.Device, reclaim.ErrNoPeer)
	}
	h.of.mu.Lock()
	defer h.of.mu.Unlock()
	h.asked = append(h.asked, ask)
	a := reclaim.Answer{Device: "1", UUID: "GPU-a"}
	for h.of.free < ask.Bytes && h.held > 0 {
		h.held -= h.piece
		h.of.free += h.piece
		a.Freed += h.piece
	}
	a.Free, a.Borrowed = h.of.free, h.held
	return a, nil
}

func (h *holder) Borrowed() []reclaim.Borrowed {
	h.of.mu.Lock()
	defer h.of.mu.Unlock()
	return []reclaim.Borrowed{{Device: "1", UUID: "GPU-a", Free: h.of.free, Borrowed: h.held}}
}

func listen(t *testing.T, dir string, l reclaim.Lender) *reclaim.Listener {
	t.Helper()
	at, err := reclaim.Listen(dir, reclaim.Handler(l), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := at.Close(); err != nil {
			t.Error(err)
		}
	})
	return at
}

// leave leaves a socket as a process that was killed does.
func leave(t *testing.T, path string) {
	t.Helper()
	at, err := new(net.ListenConfig).Listen(t.Context(), "unix", path)
	if err != nil {
		t.Fatal(err)
	}
	at.(*net.UnixListener).SetUnlinkOnClose(false)
	if err := at.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestProcessesShare: each process gives in proportion to what it has borrowed, no more is
// released than is missing, and all of them hear of it.
func TestProcessesShare(t *testing.T) {
	dir := t.TempDir()
	of := &gpu{free: 10}
	small, large := &holder{of: of, held: 20, piece: 1}, &holder{of: of, held: 60, piece: 1}
	for _, h := range []*holder{small, large} {
		listen(t, dir, h)
	}
	// One that has ended leaves its socket behind.
	leave(t, filepath.Join(dir, "1-dead.sock"))
	c := reclaim.Client{Dir: dir}
	ask := func(bytes int64) reclaim.Report {
		t.Helper()
		r, err := c.Reclaim(t.Context(), reclaim.Request{Device: "1", Bytes: bytes, Within: time.Minute})
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	if r := ask(50); !r.Met(50) || r.Free != 50 || r.Freed != 40 || r.Borrowed != 40 || small.held != 10 || large.held != 30 || r.Processes != 2 {
		t.Errorf("%+v; %d and %d are left, want 10 and 30", r, small.held, large.held)
	}
	if r := ask(50); r.Freed != 0 || len(small.asked) != 2 || len(large.asked) != 2 {
		t.Errorf("what is free already: %+v; asked %d and %d times", r, len(small.asked), len(large.asked))
	}
	if r := ask(1000); r.Met(1000) || r.Free != 90 || r.Borrowed != 0 {
		t.Errorf("more than there is: %+v", r)
	}
	if r, err := c.Reclaim(t.Context(), reclaim.Request{Device: "7", Bytes: 1, Within: time.Minute}); err != nil || r.Processes != 0 {
		t.Errorf("a GPU that nobody borrows from: %+v, %v", r, err)
	}
	if r, err := (reclaim.Client{Dir: filepath.Join(dir, "nowhere")}).Reclaim(t.Context(), reclaim.Request{Device: "1", Bytes: 1}); err == nil {
		t.Errorf("a directory that was named and is not there: %+v", r)
	}
}

// TestSocketsOfTheDead: who listens removes the sockets of processes that were killed, before or after they
// listened, and nothing else.
func TestSocketsOfTheDead(t *testing.T) {
	dir := t.TempDir()
	alive := listen(t, dir, &holder{of: &gpu{}})
	for _, name := range []string{"1-dead.sock", "2-dead.new", "3-dead.other"} {
		leave(t, filepath.Join(dir, name))
	}
	if err := os.WriteFile(filepath.Join(dir, "file.new"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	last := listen(t, dir, &holder{of: &gpu{}})
	want := []string{"3-dead.other", filepath.Base(alive.Path()), filepath.Base(last.Path()), "file.new"}
	slices.Sort(want)
	files, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, f := range files {
		got = append(got, f.Name())
	}
	if !slices.Equal(got, want) {
		t.Errorf("there are %v, want %v", got, want)
	}
}

// TestListenAtOnce: processes that begin to listen at once do not take each other for dead.
func TestListenAtOnce(t *testing.T) {
	dir := t.TempDir()
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for range 100 {
				l, err := reclaim.Listen(dir, http.NotFoundHandler(), slog.New(slog.DiscardHandler))
				if err != nil {
					t.Error(err)
					return
				}
				if _, err := os.Lstat(l.Path()); err != nil {
					t.Error(err)
				}
				if err := l.Close(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	if files, err := os.ReadDir(dir); err != nil || len(files) > 0 {
		t.Errorf("left behind: %v, %v", files, err)
	}
}

// failing is a process that cannot answer.
type failing struct{ holder }

func (f *failing) Reclaim(context.Context, reclaim.Request) (reclaim.Answer, error) {
	return reclaim.Answer{}, errors.New("closed\x1b[31m")
}

// TestOneFails: what one process cannot give, another does, and the error names it.
func TestOneFails(t *testing.T) {
	dir := t.TempDir()
	of := &gpu{}
	good := &holder{of: of, held: 60, piece: 1}
	listen(t, dir, good)
	bad := listen(t, dir, &failing{holder{of: of, held: 20}})
	r, err := reclaim.Client{Dir: dir}.Reclaim(t.Context(), reclaim.Request{Device: "GPU-a", Bytes: 40, Within: time.Minute})
	if err == nil || !strings.Contains(err.Error(), bad.Path()) || strings.Contains(err.Error(), "\x1b") || !r.Met(40) {
		t.Errorf("%+v, %v", r, err)
	}
}

func TestHandler(t *testing.T) {
	h := reclaim.Handler(&holder{of: &gpu{}, held: 100, piece: 10})
	for _, c := range []struct {
		body, kind string
		status     int
		want       string
	}{
		{`{"device": 1, "bytes": 25, "deadline_ms": 500}`, "application/json", 200, `"freed_bytes":30,"free_bytes":30,"borrowed_bytes":70`},
		{`{"device": "GPU-a", "bytes": 1}`, "application/json; charset=utf-8", 200, `"freed_bytes":0`},
		{`{"device": 2, "bytes": 1}`, "application/json", 404, "GPU 2: not a peer"},
		{`{"device": 1, "bytes": 1}`, "text/plain", 415, "application/json"},
		{`{"device": 1, "bytes": 0}`, "application/json", 400, "bytes is 0 and must be from 1"},
		{`{"device": 1, "bytes": 1e30}`, "application/json", 400, "bytes is a number 1e30: must be a whole number"},
		{`{"device": 1, "bytes": "x"}`, "application/json", 400, "bytes is a string: must be a whole number"},
		{`[]`, "application/json", 400, "the body must be an object"},
		{`{"device": 1, "bytes": 1, "deadline_ms": -1}`, "application/json", 400, "deadline_ms is -1"},
		{`{"device": 1, "bytes": 1, "deadline_ms": 9999999999}`, "application/json", 400, "and must be from 0 to 3600000"},
		{`{"device": -1, "bytes": 1}`, "application/json", 400, "device must be the number"},
		{`{"device": "", "bytes": 1}`, "application/json", 400, "device must be the number"},
		{`{"device": "` + strings.Repeat("x", 65) + `", "bytes": 1}`, "application/json", 400, "device must be the number"},
		{`{"bytes": 1}`, "application/json", 400, "device must be the number"},
		{`[`, "application/json", 400, "unexpected end"},
		{strings.Repeat(" ", 5000), "application/json", 400, "too large"},
	} {
		r := httptest.NewRequest(http.MethodPost, reclaim.Path, strings.NewReader(c.body))
		r.Header.Set("Content-Type", c.kind)
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		body, err := io.ReadAll(w.Result().Body)
		if err != nil || w.Code != c.status || !strings.Contains(string(body), c.want) || !json.Valid(body) {
			t.Errorf("%.80s: status %d, %s", c.body, w.Code, body)
		}
	}
}

// waiting is a process that takes its time.
type waiting struct {
	holder
	began, end chan struct{}
}

func (w *waiting) Reclaim(context.Context, reclaim.Request) (reclaim.Answer, error) {
	w.began <- struct{}{}
	<-w.end
	return reclaim.Answer{}, nil
}

// TestManyRequests: more requests at a time than a process serves are refused at once.
func TestManyRequests(t *testing.T) {
	l := &waiting{began: make(chan struct{}), end: make(chan struct{})}
	h := reclaim.Handler(l)
	ask := func() int {
		r := httptest.NewRequest(http.MethodPost, reclaim.Path, strings.NewReader(`{"device": 1, "bytes": 1}`))
		r.Header.Set("Content-Type", "application/json")
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		return w.Code
	}
	var all sync.WaitGroup
	for range 16 {
		all.Go(func() {
			if got := ask(); got != http.StatusOK {
				t.Errorf("status %d", got)
			}
		})
		<-l.began
	}
	if got := ask(); got != http.StatusTooManyRequests {
		t.Errorf("one more: status %d", got)
	}
	close(l.end)
	all.Wait()
}

func FuzzRequest(f *testing.F) {
	f.Add(`{"device": 1, "bytes": 25, "deadline_ms": 500}`)
	f.Add(`{"device": "GPU-a", "bytes": 1e3}`)
	f.Fuzz(func(t *testing.T, text string) {
		var r, again reclaim.Request
		if json.Unmarshal([]byte(text), &r) != nil {
			return
		}
		if r.Device == "" || r.Bytes < 1 || r.Within < 0 {
			t.Fatalf("%+v", r)
		}
		data, err := json.Marshal(r)
		if err == nil {
			err = json.Unmarshal(data, &again)
		}
		if err != nil || again != r {
			t.Fatalf("%+v is read back as %+v, %v", r, again, err)
		}
	})
}

func TestNames(t *testing.T) {
	const bare = "5fd4f087-86f3-7a43-b711-4771313afc50"
	for _, c := range []struct {
		name, number, uuid string
		want               bool
	}{
		{"1", "1", bare, true},
		{"1", "2", bare, false},
		{bare, "2", bare, true},
		{"GPU-" + bare, "2", bare, true},
		{bare, "2", "GPU-" + bare, true},
		{"MIG-" + strings.ToUpper(bare), "2", bare, true},
		{"GPU-", "2", "", false},
		{"", "2", "", false},
	} {
		if got := reclaim.Names(c.name, c.number, c.uuid); got != c.want {
			t.Errorf("%+v: %t", c, got)
		}
	}
}

// TestDefaultDirectory: it is used only where it is this user's alone.
func TestDefaultDirectory(t *testing.T) {
	base := t.TempDir()
	t.Setenv("XDG_RUNTIME_DIR", base)
	dir := reclaim.Dir()
	if dir != filepath.Join(base, "moeserve") {
		t.Fatal(dir)
	}
	if r, err := (reclaim.Client{Dir: dir}).Reclaim(t.Context(), reclaim.Request{Device: "1", Bytes: 1}); err != nil || r.Processes != 0 {
		t.Errorf("nobody has listened yet: %+v, %v", r, err)
	}
	l := listen(t, dir, &holder{of: &gpu{}})
	for path, want := range map[string]os.FileMode{dir: os.ModeDir | 0o700, l.Path(): os.ModeSocket | 0o600} {
		if i, err := os.Lstat(path); err != nil || i.Mode() != want {
			t.Errorf("%s: %v, %v; want %v", path, i.Mode(), err, want)
		}
	}
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	const want = "is not a directory of this user alone"
	if _, err := (reclaim.Client{Dir: dir}).Reclaim(t.Context(), reclaim.Request{Device: "1", Bytes: 1}); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("others may write to it: %v", err)
	}
	if _, err := reclaim.Listen(dir, nil, slog.New(slog.DiscardHandler)); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("listens where others may write: %v", err)
	}
	t.Setenv("XDG_RUNTIME_DIR", "relative")
	if dir := reclaim.Dir(); !strings.HasPrefix(dir, "/tmp/moeserve-") {
		t.Errorf("without a session: %s", dir)
	}
}
