//go:build cuda && amd64

// A package of its own: the C++ sources, which take a minute, would be compiled again for a test inside the package.
package simt_test

import (
	"fmt"
	"runtime"
	"strings"
	"sync"
	"testing"
	"unsafe"

	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/kernels/cuda/internal/simt"
)

// What a GPU would refuse, or do otherwise, is an error here, and what it does well is none, whatever
// others launch at the same time.
func TestFaults(t *testing.T) {
	for i := range 4 {
		t.Run(fmt.Sprint("goroutine ", i), func(t *testing.T) {
			t.Parallel()
			for range 50 {
				testFaults(t)
			}
		})
	}
}

func testFaults(t *testing.T) {
	t.Helper()
	for _, c := range []struct{ name, want string }{
		{"well_behaved", ""},
		{"unaligned_load", "faults.cc:25: an access at"},
		{"unaligned_store", "which is not aligned"},
		{"store_to_shared", "which is shared"},
		{"store_to_static_shared", "which is static, so shared"},
		{"store_to_own", "which is a thread's own"},
		{"load_of_shared", "which is shared"},
		{"prefetch_of_static_shared", "which is static, so shared"},
		{"copy_from_shared", "which is shared"},
		{"well_behaved", ""}, // what went wrong is forgotten
	} {
		testLaunch(t, c.name, c.want, 1)
	}
}

// A kernel that lets the next one start before it has waited itself is found.
func TestLaunchedEarly(t *testing.T) {
	data := make([]byte, 1<<16)
	at := (uintptr(unsafe.Pointer(unsafe.SliceData(data))) + 15) &^ 15
	args := *(*[8]byte)(unsafe.Pointer(&at))
	for _, c := range []struct {
		name  string
		early bool
	}{{"well_behaved", false}, {"launches_early", true}, {"launches_late", false}} {
		early, err := simt.Fault(c.name, args[:], [3]int{3, 1, 1}, 64, 2048, 1, device.Range{Addr: device.Addr(at), Bytes: 1024})
		if err != nil || early != c.early {
			t.Errorf("%s: early is %v, want %v: %v", c.name, early, c.early, err)
		}
	}
	data[0] = 1 // it is there until now
}

// Launches have their own faults, also long ones, behind which the Go runtime moves goroutines to other threads.
func TestFaultsOfLongLaunches(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(2)) // fewer than goroutines
	var all sync.WaitGroup
	for i := range 8 {
		all.Go(func() {
			for range 100 {
				testLaunch(t, "well_behaved", "", 500+50*i)
				testLaunch(t, "copy_from_shared_late", "which is shared", 500+10*i)
				testLaunch(t, "store_to_own_late", "which is a thread's own", 500+10*i)
			}
		})
	}
	all.Wait()
}

// testLaunch launches a kernel that is to fail with what contains want, or not to if that is empty.
func testLaunch(t *testing.T, name, want string, blocks int) {
	t.Helper()
	data := make([]byte, 1<<16) // pages of its own
	at := (uintptr(unsafe.Pointer(unsafe.SliceData(data))) + 15) &^ 15
	args := *(*[8]byte)(unsafe.Pointer(&at))
	_, err := simt.Fault(name, args[:], [3]int{blocks, 1, 1}, 32, 1024, 1)
	if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
		t.Errorf("%s: %v, want %q", name, err, want)
	}
	data[0] = 1 // it is there until now
}
