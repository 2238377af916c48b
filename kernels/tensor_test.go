package kernels

import (
	"slices"
	"testing"

	"github.com/moeserve/moeserve/device"
)

func TestAppendRanges(t *testing.T) {
	rows := New(1000, F32, 3, 10)
	cache := New(4096, F32, 2, 3, 2, 4) // blocks, tokens, heads, head size
	cache.Stride = [MaxRank]int{100, 20, 4, 1}
	scattered := New(0, BF16, 2, 2, 3)
	scattered.Stride = [MaxRank]int{20, 5, 1}
	for _, c := range []struct {
		name string
		t    Tensor
		want []device.Range
	}{
		{"dense", rows, []device.Range{{Addr: 1000, Bytes: 120}}},
		{"some rows", rows.Slice(1, 3), []device.Range{{Addr: 1040, Bytes: 80}}},
		{"some columns", rows.Narrow(1, 2, 5), []device.Range{{Addr: 1008, Bytes: 12}, {Addr: 1048, Bytes: 12}, {Addr: 1088, Bytes: 12}}},
		{"columns of one row", rows.Slice(2, 3).Narrow(1, 2, 5), []device.Range{{Addr: 1088, Bytes: 12}}},
		{"one column", rows.Narrow(1, 9, 10).Slice(0, 2), []device.Range{{Addr: 1036, Bytes: 4}, {Addr: 1076, Bytes: 4}}},
		{"no rows", rows.Slice(1, 1), nil},
		{"none", Tensor{}, nil},
		{"a cache's tokens", cache.Narrow(1, 1, 3), []device.Range{
			{Addr: 4096 + 80, Bytes: 32}, {Addr: 4096 + 160, Bytes: 32}, {Addr: 4096 + 480, Bytes: 32}, {Addr: 4096 + 560, Bytes: 32},
		}},
		{"gaps at every level", scattered, []device.Range{{Addr: 0, Bytes: 6}, {Addr: 10, Bytes: 6}, {Addr: 40, Bytes: 6}, {Addr: 50, Bytes: 6}}},
	} {
		if got := c.t.AppendRanges(nil); !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}

func TestViews(t *testing.T) {
	qkv := New(0, F32, 5, 96)
	q, k := qkv.Narrow(1, 0, 64).View(5, 4, 16), qkv.Narrow(1, 64, 80).View(5, 1, 16)
	if q.Stride != [MaxRank]int{96, 16, 1} || k.Addr != 256 || k.Stride != [MaxRank]int{96, 16, 1} {
		t.Errorf("q is %v, k %v at %d", q, k, k.Addr)
	}
	if q.Dense() || !qkv.Dense() || !qkv.Slice(2, 3).Narrow(1, 8, 9).Dense() {
		t.Error("Dense is wrong")
	}
	if r := q.Range(); r != (device.Range{Addr: 0, Bytes: 4 * (4*96 + 64)}) {
		t.Errorf("q's range is %v", r)
	}
	if s := k.String(); s != "float32[5 1 16] strides [96 16 1]" {
		t.Errorf("k is %s", s)
	}
	for name, f := range map[string]func(){
		"narrow outside":             func() { qkv.Narrow(1, 90, 97) },
		"view of another size":       func() { qkv.View(5, 95) },
		"view across gaps":           func() { qkv.Narrow(1, 0, 64).View(10, 32) },
		"a fifth dimension":          func() { New(0, F32, 1, 1, 1, 1, 1) },
		"narrow a missing dimension": func() { qkv.Narrow(2, 0, 1) },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s does not panic", name)
				}
			}()
			f()
		}()
	}
}
