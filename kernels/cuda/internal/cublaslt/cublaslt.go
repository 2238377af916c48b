//go:build cuda

package cublaslt

/*
#cgo noescape lt_run
#cgo nocallback lt_run
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

// The interface's facts; names as in cublasLt.h.
enum { SUCCESS = 0, INVALID_VALUE = 7, NOT_SUPPORTED = 15 };
enum { R_32F = 0, R_16F = 2, R_16BF = 14 };
enum { COMPUTE_32F = 68 };
enum { OP_T = 1 };
enum { DESC_TRANSA = 3, DESC_EPILOGUE = 7, DESC_BIAS_POINTER = 8 };
enum { EPILOGUE_DEFAULT = 1, EPILOGUE_BIAS = 4 };
enum { LAYOUT_COLS = 3 };
enum { PREF_MAX_WORKSPACE_BYTES = 1, PREF_MIN_ALIGNMENT_A_BYTES = 5, PREF_MIN_ALIGNMENT_D_BYTES = 8 };

typedef struct {
  uint64_t algo[8];
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
} lt_heuristic;

typedef struct {
  int (*create)(void **handle);
  int (*destroy)(void *handle);
  size_t (*version)(void);
  const char *(*status)(int status);
  int (*desc_create)(void **desc, int compute, int scale);
  int (*desc_destroy)(void *desc);
  int (*desc_set)(void *desc, int attribute, const void *value, size_t bytes);
  int (*layout_create)(void **layout, int type, uint64_t rows, uint64_t cols, int64_t ld);
  int (*layout_destroy)(void *layout);
  int (*layout_set)(void *layout, int attribute, const void *value, size_t bytes);
  int (*pref_create)(void **pref);
  int (*pref_destroy)(void *pref);
  int (*pref_set)(void *pref, int attribute, const void *value, size_t bytes);
  int (*heuristic)(void *handle, void *desc, void *a, void *b, void *c, void *d, void *pref, int want, lt_heuristic *found, int *n);
  int (*matmul)(void *handle, void *desc, const void *alpha, const void *a, void *a_layout, const void *b, void *b_layout,
                const void *beta, const void *c, void *c_layout, void *d, void *d_layout, const uint64_t *algo, void *workspace,
                size_t bytes, void *stream);
} lt_calls;

// The library's matrices lie by columns: it sees D[columns, rows] = W^T X with W
// [inner, columns] and X [inner, rows].
typedef struct {
  void *desc, *w, *x, *out;
  uint64_t algo[8];
  int usable;
} lt_plan;

typedef struct {
  uint64_t x, w, bias, out;
  uint64_t rows, columns, inner;
  int64_t x_stride, out_stride;
  int half, out_float;
} lt_product;

static int lt_create(lt_calls *c, void **h) { return c->create(h); }
static int lt_destroy(lt_calls *c, void *h) { return c->destroy(h); }
static size_t lt_version(lt_calls *c) { return c->version(); }
static const char *lt_status(lt_calls *c, int r) { return c->status(r); }

static void lt_plan_free(lt_calls *c, lt_plan *p) {
  if (p->desc) c->desc_destroy(p->desc);
  if (p->w) c->layout_destroy(p->w);
  if (p->x) c->layout_destroy(p->x);
  if (p->out) c->layout_destroy(p->out);
  free(p);
}

// Chooses an algorithm for rows rows. A plan that has none is not usable.
static int lt_plan_make(lt_calls *c, void *handle, const lt_product *m, uint64_t rows, uint64_t workspace, lt_plan **out) {
  int type = m->half ? R_16F : R_16BF, out_type = m->out_float ? R_32F : type, r, found = 0;
  int32_t transpose = OP_T;
  uint32_t epilogue = m->bias ? EPILOGUE_BIAS : EPILOGUE_DEFAULT, alignment = 16;
  void *pref = NULL;
  lt_heuristic best;
  lt_plan *p = calloc(1, sizeof *p);
  if (!p) return 3;
  memset(&best, 0, sizeof best);
  if ((r = c->desc_create(&p->desc, COMPUTE_32F, R_32F)) ||
      (r = c->desc_set(p->desc, DESC_TRANSA, &transpose, sizeof transpose)) ||
      (r = c->desc_set(p->desc, DESC_EPILOGUE, &epilogue, sizeof epilogue)) ||
      (m->bias && (r = c->desc_set(p->desc, DESC_BIAS_POINTER, &m->bias, sizeof m->bias))) ||
      (r = c->layout_create(&p->w, type, m->inner, m->columns, (int64_t)m->inner)) ||
      (r = c->layout_create(&p->x, type, m->inner, rows, m->x_stride)) ||
      (r = c->layout_create(&p->out, out_type, m->columns, rows, m->out_stride)) ||
      (r = c->pref_create(&pref)) || (r = c->pref_set(pref, PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace)))
    goto done;
  for (int a = PREF_MIN_ALIGNMENT_A_BYTES; a <= PREF_MIN_ALIGNMENT_D_BYTES; a++)
    if ((r = c->pref_set(pref, a, &alignment, sizeof alignment))) goto done;
  r = c->heuristic(handle, p->desc, p->w, p->x, p->out, p->out, pref, 1, &best, &found);
  p->usable = r == SUCCESS && found > 0 && best.state == SUCCESS;
  memcpy(p->algo, best.algo, sizeof p->algo);
  if (r == NOT_SUPPORTED) r = SUCCESS;
done:
  if (pref) c->pref_destroy(pref);
  if (r)
    lt_plan_free(c, p);
  else
    *out = p;
  return r;
}

static int lt_run(lt_calls *c, void *handle, lt_plan *p, const lt_product *m, uint64_t workspace, uint64_t bytes, void *stream) {
  float one = 1, zero = 0;
  int r;
  if (!p->usable) return NOT_SUPPORTED;
  if ((r = c->layout_set(p->x, LAYOUT_COLS, &m->rows, sizeof m->rows)) ||
      (r = c->layout_set(p->out, LAYOUT_COLS, &m->rows, sizeof m->rows)) ||
      (m->bias && (r = c->desc_set(p->desc, DESC_BIAS_POINTER, &m->bias, sizeof m->bias))))
    return r;
  return c->matmul(handle, p->desc, &one, (void *)m->w, p->w, (void *)m->x, p->x, &zero, (void *)m->out, p->out, (void *)m->out, p->out,
                   p->algo, (void *)workspace, bytes, stream);
}

static int lt_usable(lt_plan *p) { return p->usable; }
static void lt_give_up(lt_plan *p) { p->usable = 0; }
*/
import "C"

import (
	"errors"
	"fmt"
	"sync"
	"unsafe"

	"github.com/moeserve/moeserve/device/cuda/dylib"
)

// ErrUnavailable says that no cuBLASLt was found that fits the driver.
var ErrUnavailable = errors.New("cuBLASLt is not available")

// Library is an open libcublasLt.
type Library struct {
	// Path of the library.
	Path  string
	calls *C.lt_calls
}

// Open opens the newest libcublasLt of the folders whose major version is at most
// that of the CUDA version which the driver offers. Its error wraps ErrUnavailable
// and says what to install.
func Open(folders []string, driverMajor int) (*Library, error) {
	lib, err := dylib.Open(dylib.Names("libcublasLt.so", driverMajor), folders)
	if err != nil {
		return nil, fmt.Errorf("cublaslt: %w: install cuBLAS of CUDA %d or 12, from a toolkit or by pip install nvidia-cublas-cu12: %w", ErrUnavailable, driverMajor, err)
	}
	l := &Library{Path: lib.Path, calls: (*C.lt_calls)(C.calloc(1, C.sizeof_lt_calls))}
	if l.calls == nil {
		return nil, errors.New("cublaslt: no memory for the table of calls")
	}
	table := unsafe.Slice((*unsafe.Pointer)(unsafe.Pointer(l.calls)), int(C.sizeof_lt_calls)/int(unsafe.Sizeof(uintptr(0))))
	for i, name := range []string{
		"cublasLtCreate", "cublasLtDestroy", "cublasLtGetVersion", "cublasLtGetStatusString",
		"cublasLtMatmulDescCreate", "cublasLtMatmulDescDestroy", "cublasLtMatmulDescSetAttribute",
		"cublasLtMatrixLayoutCreate", "cublasLtMatrixLayoutDestroy", "cublasLtMatrixLayoutSetAttribute",
		"cublasLtMatmulPreferenceCreate", "cublasLtMatmulPreferenceDestroy", "cublasLtMatmulPreferenceSetAttribute",
		"cublasLtMatmulAlgoGetHeuristic", "cublasLtMatmul",
	} {
		if table[i], err = lib.Symbol(name); err != nil {
			C.free(unsafe.Pointer(l.calls))
			return nil, fmt.Errorf("cublaslt: %w: %w", ErrUnavailable, err)
		}
	}
	return l, nil
}

// Version is the library's: 120804 is 12.8.4.
func (l *Library) Version() int { return int(C.lt_version(l.calls)) }

// Status is a failed call.
type Status struct {
	Op   string
	Code int
	Text string
}

func (s *Status) Error() string {
	return fmt.Sprintf("cublaslt: %s: %s (%d)", s.Op, s.Text, s.Code)
}

func (l *Library) check(op string, r C.int) error {
	if r == C.SUCCESS {
		return nil
	}
	return &Status{Op: op, Code: int(r), Text: C.GoString(C.lt_status(l.calls, r))}
}

// Handle is the library on one device. Its methods may be called from several
// goroutines.
type Handle struct {
	l      *Library
	handle unsafe.Pointer
	work   uint64 // bytes
	mu     sync.Mutex
	plans  map[shape]*C.lt_plan
}

// shape is what a plan depends on; nothing else does, so that the choice does not
// depend on what came before.
type shape struct {
	rows, columns, inner, xStride, outStride int
	half, outFloat, bias                     bool
}

// Product is Out[rows, columns] = X[rows, inner] W[columns, inner]ᵀ (+ Bias), in
// bfloat16 or half precision, Out also in float32. Addresses are multiples of 16
// bytes; strides are in elements.
type Product struct {
	X, W, Bias, Out      uint64 // Bias: 0 for none
	Rows, Columns, Inner int
	XStride, OutStride   int
	Half, OutFloat       bool
}

// NewHandle returns a handle for the device whose context is current, whose products
// may use workspaces of work bytes.
func (l *Library) NewHandle(work int64) (*Handle, error) {
	h := &Handle{l: l, work: uint64(work), plans: make(map[shape]*C.lt_plan)}
	if err := l.check("create", C.lt_create(l.calls, &h.handle)); err != nil {
		return nil, err
	}
	return h, nil
}

// Close releases the handle; its device's context is current.
func (h *Handle) Close() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, p := range h.plans {
		C.lt_plan_free(h.l.calls, p)
	}
	h.plans = nil
	return h.l.check("destroy", C.lt_destroy(h.l.calls, h.handle))
}

// MatMul enqueues p on the stream (a CUstream), with the workspace of the handle's
// size at work; it returns false where the library does not take such a product.
func (h *Handle) MatMul(stream uintptr, work uint64, p *Product) (bool, error) {
	key := shape{
		rows: bucket(p.Rows), columns: p.Columns, inner: p.Inner, xStride: p.XStride, outStride: p.OutStride,
		half: p.Half, outFloat: p.OutFloat, bias: p.Bias != 0,
	}
	m := C.lt_product{
		x: C.uint64_t(p.X), w: C.uint64_t(p.W), bias: C.uint64_t(p.Bias), out: C.uint64_t(p.Out),
		rows: C.uint64_t(p.Rows), columns: C.uint64_t(p.Columns), inner: C.uint64_t(p.Inner),
		x_stride: C.int64_t(p.XStride), out_stride: C.int64_t(p.OutStride),
	}
	if p.Half {
		m.half = 1
	}
	if p.OutFloat {
		m.out_float = 1
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	plan := h.plans[key]
	if plan == nil {
		var err error
		if plan, err = h.plan(m, key.rows); err != nil {
			return false, err
		}
		h.plans[key] = plan
	}
	if C.lt_usable(plan) == 0 {
		return false, nil
	}
	// The handle of a stream is no Go pointer.
	r := C.lt_run(h.l.calls, h.handle, plan, &m, C.uint64_t(work), C.uint64_t(h.work), *(*unsafe.Pointer)(unsafe.Pointer(&stream)))
	if r == C.NOT_SUPPORTED || r == C.INVALID_VALUE {
		// An algorithm for the bucket's rows need not take fewer. Nothing was enqueued.
		C.lt_give_up(plan)
		return false, nil
	}
	return r == C.SUCCESS, h.l.check("matmul", r)
}

func (h *Handle) plan(m C.lt_product, rows int) (*C.lt_plan, error) {
	var plan *C.lt_plan
	err := h.l.check("choose an algorithm", C.lt_plan_make(h.l.calls, h.handle, &m, C.uint64_t(rows), C.uint64_t(h.work), &plan))
	return plan, err
}
