//go:build cuda && amd64

package simt

import (
	"fmt"
	"strings"
	"testing"
	"unsafe"
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
		data := make([]byte, 1<<20) // pages of its own
		at := (uintptr(unsafe.Pointer(unsafe.SliceData(data))) + 15) &^ 15
		args := *(*[8]byte)(unsafe.Pointer(&at))
		err := launch(faults, c.name, args[:], [3]int{1, 1, 1}, 32, 1024, 1)
		if c.want == "" {
			if err != nil {
				t.Errorf("%s: %v", c.name, err)
			}
		} else if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want it to say %q", c.name, err, c.want)
		}
		data[0] = 1 // it is there until now
	}
}
