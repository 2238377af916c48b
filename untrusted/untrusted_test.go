package untrusted

import (
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/fstest"
	"unicode/utf8"

	"golang.org/x/sys/unix"
)

// irregularFiles returns the kinds of paths that are no regular files, by what errors call them.
func irregularFiles(t *testing.T) map[string]string {
	t.Helper()
	dir := t.TempDir()
	paths := map[string]string{"a directory": dir, "a device": "/dev/zero"}
	paths["a named pipe"] = filepath.Join(dir, "pipe")
	if err := unix.Mkfifo(paths["a named pipe"], 0o600); err != nil {
		t.Fatal(err)
	}
	paths["a socket"] = filepath.Join(dir, "s")
	l, err := net.Listen("unix", paths["a socket"])
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return paths
}

func TestOnlyRegularFiles(t *testing.T) {
	for what, path := range irregularFiles(t) {
		for name, read := range map[string]func() error{
			"ReadFile": func() error { _, err := ReadFile(path, 10); return err },
			"ReadFS":   func() error { _, err := ReadFS(Dir(filepath.Dir(path)), filepath.Base(path), 10); return err },
			"a link": func() error {
				link := filepath.Join(t.TempDir(), "link")
				if err := os.Symlink(path, link); err != nil {
					t.Fatal(err)
				}
				_, err := ReadFile(link, 10)
				return err
			},
		} {
			err := read()
			if what == "a directory" && name == "ReadFS" {
				if err == nil {
					t.Errorf("%s of a directory: no error", name)
				}
				continue
			}
			if err == nil || !strings.Contains(err.Error(), "is "+what+"; give a regular file") {
				t.Errorf("%s of %s: %v", name, what, err)
			}
		}
	}
}

func TestLimits(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	if err := os.WriteFile(path, []byte("0123456789"), 0o600); err != nil {
		t.Fatal(err)
	}
	if data, err := ReadFile(path, 10); err != nil || string(data) != "0123456789" {
		t.Errorf("a file as large as its limit: %q, %v", data, err)
	}
	var size *SizeError
	if _, err := ReadFile(path, 9); !errors.As(err, &size) {
		t.Errorf("a file over its limit: %v", err)
	}
	// The size of such a file is 0 until it is read.
	if _, err := ReadFile("/proc/self/status", 9); !errors.As(err, &size) {
		t.Errorf("a file over its limit whose size is not known: %v", err)
	}
	if _, err := ReadFS(fstest.MapFS{"f": {Data: []byte("0123456789")}}, "f", 9); !errors.As(err, &size) {
		t.Errorf("a file in memory: %v", err)
	}
	if _, err := ReadFile(path+"x", 9); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no file: %v", err)
	}
}

func TestDir(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"a/b.txt", "c.txt"} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := fstest.TestFS(Dir(dir), "a/b.txt", "c.txt"); err != nil {
		t.Error(err)
	}
	_, err := ReadFS(Dir(dir), "../c.txt", 10)
	if !errors.Is(err, fs.ErrInvalid) {
		t.Errorf("a path out of the directory: %v", err)
	}
}

func TestText(t *testing.T) {
	for _, c := range []struct{ in, name, line string }{
		{"plain", "plain", "plain"},
		{"a b é 你", "a b é 你", "a b é 你"},
		{"a\x1b[31m", `"a\x1b[31m"`, `a\x1b[31m`},
		{"\n\na\r\nb\n", `"\n\na\r\nb\n"`, "a; b"},
		{"\xff", `"\xff"`, `\xff`},
		{"x\u202ey", `"x\u202ey"`, `x\u202ey`},
		{"", "", ""},
	} {
		if got := Name(c.in); got != c.name {
			t.Errorf("Name(%q) = %s, want %s", c.in, got, c.name)
		}
		if got := Line(c.in); got != c.line {
			t.Errorf("Line(%q) = %s, want %s", c.in, got, c.line)
		}
	}
	if got := Name("start" + strings.Repeat("x", 1e6) + "end"); !strings.HasPrefix(got, `"startx`) || !strings.HasSuffix(got, `xend"`) {
		t.Errorf("a long name is %s", got)
	}
}

func FuzzText(f *testing.F) {
	for _, s := range []string{"", "a\x1b", strings.Repeat("\x00", 300), strings.Repeat("é", 150), strings.Repeat("\xff", 3000), "a\nb"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		for what, got := range map[string]string{"Name": Name(s), "Quote": Quote(s), "Line": Line(s)} {
			most := maxName + len(ellipsis) + 6
			if what == "Line" {
				most = maxLine
			}
			if !utf8.ValidString(got) || !printable(got) || len(got) > most {
				t.Errorf("%s(%q) = %q, %d bytes", what, s, got, len(got))
			}
		}
	})
}
