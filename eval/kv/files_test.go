package kv_test

import (
	"bytes"
	"context"
	"encoding/csv"
	"errors"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/device/emulated"
	"github.com/moeserve/moeserve/eval"
	"github.com/moeserve/moeserve/eval/kv"
	"github.com/moeserve/moeserve/kvcache/offload"
)

// smallFiles are loads of two sizes of entries from files in a directory, on a machine with a check of
// accesses.
func smallFiles(t *testing.T, directory string) kv.ReloadOptions {
	t.Helper()
	return kv.ReloadOptions{
		Machine: machine(t, emulated.Options{Check: true, GPUs: make([]emulated.GPU, 1)}), Compute: device.HBM(0), Directory: directory,
		Entries: []kv.Entry{{Models: []string{"tiny"}, Bytes: 256}, {Models: []string{"small"}, Bytes: 1024}},
		Counts:  []int{4, 40}, BlockTokens: 4, Repetitions: 2, QueuedBytes: 1 << 15,
	}
}

// nothingLeft checks that a directory is empty.
func nothingLeft(t *testing.T, directory string) {
	t.Helper()
	if left, err := os.ReadDir(directory); err != nil || len(left) > 0 {
		t.Errorf("left in the directory: %v, %v", left, err)
	}
}

// Scattered blocks are loaded from files: virtual time has their way from the staging buffers to the
// GPU. What is taken is what was announced, and no file is left.
func TestReloadFiles(t *testing.T) {
	directory := t.TempDir()
	o := smallFiles(t, directory)
	var done, total int64
	o.Progress = func(d, all int64) { done, total = d, all }
	points, err := kv.Reload(t.Context(), o)
	if err != nil || len(points) != 8 || done != total || total == 0 {
		t.Fatalf("%v, %d points, %d of %d bytes", err, len(points), done, total)
	}
	for _, p := range points {
		if f := p.File; p.Layout == kv.Contiguous {
			if f != nil {
				t.Errorf("one run from files: %+v", *f)
			}
		} else if least := float64(p.Bytes) / hostRate; f == nil || f.Seconds < least || f.CachedSeconds < least ||
			f.QueuedBytesPerSecond <= 0 || f.QueuedBytesPerSecond > hostRate || f.CachedQueuedBytesPerSecond <= 0 || f.CachedQueuedBytesPerSecond > hostRate || f.QueuedLoads != p.Host.QueuedLoads ||
			math.Abs(f.BytesPerSecond*f.Seconds/float64(p.Bytes)-1) > 1e-9 || math.Abs(f.CachedBytesPerSecond*f.CachedSeconds/float64(p.Bytes)-1) > 1e-9 ||
			!slices.Contains([]kv.PageCache{kv.PagesDropped, kv.PagesAsked, kv.PagesKept}, f.PageCache) {
			t.Errorf("%d entries of %d bytes: %+v", p.Entries, p.EntryBytes, f)
		} else if (f.FileRaw != kv.FileRaw{RawThreads: offload.FileReaders}) {
			t.Errorf("%d entries of %d bytes: raw rates on a clock that does not count reading files: %+v", p.Entries, p.EntryBytes, f.FileRaw)
		}
	}
	for s, want := range o.Needs() {
		if u, err := o.Machine.Usage(s); err != nil || u.Peak != want {
			t.Errorf("%s: peak of %d bytes, %v; %d announced", s, u.Peak, err, want)
		}
	}
	nothingLeft(t, directory)
}

// On the wall clock files are read without the engine, too: those that the queued loads read, and at a
// rate of which theirs is a share.
func TestReloadFilesRaw(t *testing.T) {
	directory := t.TempDir()
	o := smallFiles(t, directory)
	o.Machine = machine(t, emulated.Options{GPUs: make([]emulated.GPU, 1), Pace: true})
	points, err := kv.Reload(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	raw := 0
	for _, p := range points {
		f := p.File
		if f == nil {
			continue
		}
		raw++
		if f.RawThreads != offload.FileReaders || f.RawBytesPerSecond <= 0 || f.CachedRawBytesPerSecond <= 0 || f.RawBytesPerSecond+f.CachedRawBytesPerSecond > 1e12 ||
			math.Abs(f.RawFraction*f.RawBytesPerSecond/f.QueuedBytesPerSecond-1) > 1e-9 ||
			math.Abs(f.CachedRawFraction*f.CachedRawBytesPerSecond/f.CachedQueuedBytesPerSecond-1) > 1e-9 {
			t.Errorf("%d entries of %d bytes: %+v", p.Entries, p.EntryBytes, f)
		}
	}
	if raw == 0 {
		t.Errorf("none of %d points is of files", len(points))
	}
	for s, want := range o.Needs() {
		if u, err := o.Machine.Usage(s); err != nil || u.Peak != want {
			t.Errorf("%s: peak of %d bytes, %v; %d announced", s, u.Peak, err, want)
		}
	}
	nothingLeft(t, directory)
}

// Without a directory nothing is read from files.
func TestReloadWithoutFiles(t *testing.T) {
	points, err := kv.Reload(t.Context(), smallFiles(t, ""))
	if err != nil || slices.ContainsFunc(points, func(p kv.ReloadPoint) bool { return p.File != nil }) {
		t.Errorf("%v, %+v", err, points)
	}
}

// The files are what is loaded: a damaged one ends the measurement, which names the directory.
func TestReloadDamagedFile(t *testing.T) {
	directory := t.TempDir()
	o := smallFiles(t, directory)
	damaged := 0
	o.Progress = func(int64, int64) {
		files, err := filepath.Glob(filepath.Join(directory, "moeserve-kv-*", "*-*"))
		if err != nil || len(files) == 0 {
			t.Errorf("no files: %v", err)
		}
		for _, f := range files {
			damaged++
			if err := os.Truncate(f, 100); err != nil {
				t.Error(err)
			}
		}
	}
	points, err := kv.Reload(t.Context(), o)
	if damaged == 0 || !errors.Is(err, kv.ErrDirectory) || len(points) > 0 || !strings.Contains(err.Error(), directory) || !strings.Contains(err.Error(), "damaged") {
		t.Errorf("%d damaged files, %d points, %v", damaged, len(points), err)
	}
	nothingLeft(t, directory)
}

// An interrupted measurement has the points that are done, and leaves no files: between loads, and
// before the files of the next entry are written.
func TestReloadFilesInterrupted(t *testing.T) {
	for after := 1; after <= 5; after++ {
		directory := t.TempDir()
		o := smallFiles(t, directory)
		ctx, cancel := context.WithCancel(t.Context())
		n := 0
		o.Progress = func(int64, int64) {
			if n++; n == after {
				cancel()
			}
		}
		points, err := kv.Reload(ctx, o)
		if !errors.Is(err, context.Canceled) || len(points) != after || errors.Is(err, kv.ErrDirectory) {
			t.Errorf("after %d: %d points, %v", after, len(points), err)
		}
		nothingLeft(t, directory)
		cancel()
	}
}

// A directory that is none, or has no room, is an error that names it and says what to do, and so is a
// file system that is full only while files are written.
func TestReloadDirectoryErrors(t *testing.T) {
	directory := t.TempDir()
	file := filepath.Join(directory, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		directory string
		spoil     func(*kv.ReloadOptions)
		want      []string
	}{
		"none":    {filepath.Join(directory, "none"), nil, []string{"none", "name a folder that exists"}},
		"a file":  {file, nil, []string{file, "not a directory", "name a folder that exists"}},
		"no room": {directory, func(o *kv.ReloadOptions) { o.Counts = []int{1 << 50} }, []string{directory, "files of", "are free", "make room"}},
	} {
		o := smallFiles(t, c.directory)
		if c.spoil != nil {
			c.spoil(&o)
		}
		checkDirectoryError(t, name, o, c.want)
	}
	full := t.TempDir()
	mountSmall(t, full, "size=4m,nr_inodes=9") // the root, a folder, its lock, and some blocks
	checkDirectoryError(t, "no more files", smallFiles(t, full), []string{full, "of 30 blocks", "not all could be written", "make room"})
	nothingLeft(t, full)
}

func checkDirectoryError(t *testing.T, name string, o kv.ReloadOptions, want []string) {
	t.Helper()
	points, err := kv.Reload(t.Context(), o)
	if !errors.Is(err, kv.ErrDirectory) || len(points) > 0 {
		t.Errorf("%s: %d points, %v", name, len(points), err)
		return
	}
	for _, w := range want {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("%s: no %q in %v", name, w, err)
		}
	}
}

// mountSmall mounts a file system in memory until the end of the test.
func mountSmall(t *testing.T, folder, options string) {
	t.Helper()
	if err := unix.Mount("tmpfs", folder, "tmpfs", 0, options); errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES) {
		t.Skip("no right to mount a small file system")
	} else if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(folder, 0); err != nil {
			t.Error(err)
		}
	})
}

// Files of a file system in memory are never said to be read from a disk.
func TestPagesInMemory(t *testing.T) {
	folder := t.TempDir()
	mountSmall(t, folder, "size=4m")
	points, err := kv.Reload(t.Context(), smallFiles(t, folder))
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range points {
		if p.File != nil && p.File.PageCache == kv.PagesDropped {
			t.Errorf("%+v", *p.File)
		}
	}
}

func TestFilesOutput(t *testing.T) {
	directory := t.TempDir()
	o := smallFiles(t, directory)
	points, err := kv.Reload(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	for i := range points { // what this system has is of no matter
		if f := points[i].File; f != nil {
			f.PageCache = kv.PagesDropped
		}
	}
	points[2].File.PageCache = kv.PagesKept
	points[2].File.FileRaw = kv.FileRaw{RawThreads: 5, RawBytesPerSecond: 2e9, RawFraction: 0.625, CachedRawBytesPerSecond: 8e9, CachedRawFraction: 0.375}
	r := &kv.Result{
		Machine: eval.Machine{Device: "emulated", Emulated: true, Emulation: &eval.Emulation{Rates: eval.RatesVirtual}},
		Loads:   &kv.Loads{BlockTokens: 4, FileDirectory: directory, Entries: o.Entries, Reloads: points},
	}
	var table, list, svg bytes.Buffer
	if err := errors.Join(kv.WriteTable(&table, r), kv.WriteCSV(&list, r), kv.Plot(&svg, "svg", r)); err != nil {
		t.Fatal(err)
	}
	words := strings.Join(strings.Fields(table.String()), " ")
	for _, want := range []string{"file ms queued raw % of raw cached ms queued raw % of raw pages", " 2 62.5 ", " 8 37.5 kept", " - - dropped", "by " + strconv.Itoa(offload.FileReaders) + " threads", "without verifying them", strconv.Quote(directory), "pages dropped: ", "pages kept: ", "virtual clock of emulated devices does not count reading files"} {
		if !strings.Contains(words, want) {
			t.Errorf("no %q in\n%s", want, &table)
		}
	}
	if strings.Contains(table.String(), "pages asked: ") {
		t.Errorf("explains what did not occur:\n%s", &table)
	}
	for _, want := range []string{">files, page cache not dropped<", ">files in the page cache<", "virtual clock does not count reading files"} {
		if strings.Count(svg.String(), want) != 1 {
			t.Errorf("no %q, or more than one, in %s", want, &svg)
		}
	}
	lines, err := csv.NewReader(&list).ReadAll()
	if err != nil || len(lines) != 1+len(points) {
		t.Fatalf("%v, %d lines", err, len(lines))
	}
	for i, p := range points {
		at := func(column string) string { return lines[1+i][slices.Index(lines[0], column)] }
		want := ""
		if p.File != nil {
			want = string(p.File.PageCache)
		}
		for column, value := range map[string]string{"raw_threads": "5", "raw_bytes_per_s": "2e+09", "raw_fraction": "0.625", "cached_raw_bytes_per_s": "8e+09", "cached_raw_fraction": "0.375"} {
			if (at("file_"+column) == value) != (i == 2) {
				t.Errorf("line %d: %s %q", i, column, at("file_"+column))
			}
		}
		if at("file_page_cache") != want || (at("file_cached_load_s") == "") != (p.File == nil) || at("file_directory") != directory {
			t.Errorf("line %d: %q", i, lines[1+i])
		}
	}
}
