package kv

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/moeserve/moeserve/kvcache"
)

// PageCache is what became of files' pages in the operating system's page cache before loads.
type PageCache string

// What may become of them.
const (
	// PagesDropped: the system was asked to drop them, and had hardly any left.
	PagesDropped PageCache = "dropped"
	// PagesAsked: the system was asked to drop them, and does not report whether it did.
	PagesAsked PageCache = "asked"
	// PagesKept: the system still had them, as where the file system is in memory.
	PagesKept PageCache = "kept"
)

// pageCaches are all, the best first.
var pageCaches = []PageCache{PagesDropped, PagesAsked, PagesKept}

// worse is the worse of two; empty is none.
func worse(a, b PageCache) PageCache {
	if slices.Index(pageCaches, a) > slices.Index(pageCaches, b) {
		return a
	}
	return b
}

// keptShare is the share of pages, as 1 of so many, up to which they count as dropped: others may read
// the same files, such as a backup.
const keptShare = 50

// dropPages has the system drop the pages of files, which it has written, and says what became of them.
func dropPages(paths []string) (PageCache, error) {
	var kept, pages uint64
	reported := true
	for _, path := range paths {
		err := withFile(path, func(fd int, bytes int64) error {
			if err := unix.Fadvise(fd, 0, 0, unix.FADV_DONTNEED); err != nil {
				return fmt.Errorf("drop pages of %s: %w", path, err)
			}
			var have unix.Cachestat_t
			// Length 0 is up to the end. Systems before Linux 6.5 do not report it.
			if err := unix.Cachestat(uint(fd), &unix.CachestatRange{}, &have, 0); err != nil {
				reported = false
			}
			kept += have.Cache
			pages += uint64(bytes)/uint64(os.Getpagesize()) + 1
			return nil
		})
		if err != nil {
			return "", err
		}
	}
	switch {
	case !reported:
		return PagesAsked, nil
	case kept > pages/keptShare:
		return PagesKept, nil
	}
	return PagesDropped, nil
}

// syncFile waits until the disk has a file: pages that it lacks are not dropped.
func syncFile(path string) error {
	return withFile(path, func(fd int, _ int64) error {
		if err := unix.Fsync(fd); err != nil {
			return &os.PathError{Op: "fsync", Path: path, Err: err}
		}
		return nil
	})
}

// withFile opens a file for a call, which gets its size.
func withFile(path string, call func(fd int, bytes int64) error) (err error) {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	info, err := file.Stat()
	if err != nil {
		return err
	}
	return call(int(file.Fd()), info.Size())
}

// findFiles returns the files of keys, in a folder that a file tier has made in the directory.
func findFiles(directory string, keys []kvcache.Key) ([]string, error) {
	folders, err := os.ReadDir(directory)
	if err != nil {
		return nil, err
	}
	for _, folder := range folders {
		if !folder.IsDir() || !strings.HasPrefix(folder.Name(), "moeserve-kv-") {
			continue
		}
		path := filepath.Join(directory, folder.Name())
		names, err := os.ReadDir(path)
		if err != nil {
			continue // another user's
		}
		byKey := map[string]string{}
		for _, n := range names {
			if key, _, ok := strings.Cut(n.Name(), "-"); ok {
				byKey[key+"-"] = filepath.Join(path, n.Name())
			}
		}
		paths := make([]string, 0, len(keys))
		for _, k := range keys {
			if at, ok := byKey[fileName(k)]; ok {
				paths = append(paths, at)
			}
		}
		if len(paths) == len(keys) {
			return paths, nil
		}
	}
	return nil, fmt.Errorf("no folder in directory %q has the files of %d blocks", directory, len(keys))
}
