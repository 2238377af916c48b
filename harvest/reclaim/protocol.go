package reclaim

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/moeserve/moeserve/untrusted"
)

// Paths of the protocol.
const (
	Path         = "/harvest/reclaim"
	BorrowedPath = "/harvest/borrowed"
)

// Request asks for memory.
type Request struct {
	// Device is a GPU's number, as in --peers of the process that borrows, or its UUID.
	Device string
	// Bytes that are to be free on it.
	Bytes int64
	// Within is how long the memory may take; 0: as long as the process's own deadline of a
	// revocation.
	Within time.Duration
}

type requestJSON struct {
	Device     json.RawMessage `json:"device"`
	Bytes      int64           `json:"bytes"`
	DeadlineMS int64           `json:"deadline_ms,omitempty"`
}

// Limits of requests.
const (
	maxBody   = 4 << 10
	maxDevice = 64 // characters
	maxWithin = time.Hour
)

// MarshalJSON implements json.Marshaler.
func (r Request) MarshalJSON() ([]byte, error) {
	device, err := json.Marshal(r.Device)
	if err != nil {
		return nil, err
	}
	return json.Marshal(requestJSON{device, r.Bytes, r.Within.Milliseconds()})
}

// UnmarshalJSON implements json.Unmarshaler: the device is a number or a text.
func (r *Request) UnmarshalJSON(text []byte) error {
	var j requestJSON
	var kind *json.UnmarshalTypeError
	switch err := json.Unmarshal(text, &j); {
	case errors.As(err, &kind) && kind.Field == "":
		return errors.New(`the body must be an object, as {"device": 1, "bytes": 1073741824}`)
	case errors.As(err, &kind):
		return fmt.Errorf("%s is a %s: must be a whole number", kind.Field, kind.Value)
	case err != nil:
		return err
	}
	*r = Request{Bytes: j.Bytes}
	if n, err := strconv.ParseUint(string(j.Device), 10, 31); err == nil {
		r.Device = strconv.FormatUint(n, 10)
	} else if err := json.Unmarshal(j.Device, &r.Device); err != nil {
		return errors.New(`device must be the number of a GPU or its UUID`)
	}
	switch {
	case r.Device == "" || len(r.Device) > maxDevice:
		return errors.New("device must be the number of a GPU or its UUID")
	case r.Bytes < 1 || r.Bytes > 1<<60:
		return fmt.Errorf("bytes is %d and must be from 1 to 2^60", r.Bytes)
	case j.DeadlineMS < 0 || j.DeadlineMS > maxWithin.Milliseconds():
		return fmt.Errorf("deadline_ms is %d and must be from 0 to %d", j.DeadlineMS, maxWithin.Milliseconds())
	}
	r.Within = time.Duration(j.DeadlineMS) * time.Millisecond
	return nil
}

// Answer is what a process has released.
type Answer struct {
	// Device and UUID of the peer.
	Device string `json:"device"`
	UUID   string `json:"uuid"`
	// Freed is what this request has released; Free what can be allocated on the device now;
	// Borrowed what the process still holds there.
	Freed    int64 `json:"freed_bytes"`
	Free     int64 `json:"free_bytes"`
	Borrowed int64 `json:"borrowed_bytes"`
	// TookMS is how long it took.
	TookMS float64 `json:"took_ms"`
	// Late says what is not released in time, and who holds it; empty where all is.
	Late string `json:"late,omitempty"`
}

// Borrowed is what a process has borrowed of one device.
type Borrowed struct {
	Device string `json:"device"`
	UUID   string `json:"uuid"`
	// Free can be allocated on the device now; Borrowed is held by the process, which has had
	// requests refused lately if it Wants more.
	Free     int64 `json:"free_bytes"`
	Borrowed int64 `json:"borrowed_bytes"`
	Wants    bool  `json:"wants_more"`
	// Weight of the process's share.
	Weight float64 `json:"weight"`
}

// Names reports whether name, of a Request, is a device of that number and UUID. CUDA spells
// UUIDs without the prefix "GPU-" or "MIG-" that NVML has.
func Names(name, number, uuid string) bool {
	bare := func(s string) string {
		return strings.TrimPrefix(strings.TrimPrefix(strings.ToLower(s), "gpu-"), "mig-")
	}
	return name == number || bare(uuid) != "" && bare(name) == bare(uuid)
}

// ErrNoPeer: the process borrows nothing of that device.
var ErrNoPeer = errors.New("not a peer of this process")

// Lender is a process that has borrowed memory.
type Lender interface {
	// Reclaim makes the bytes free, as far as this process holds them. Errors wrap ErrNoPeer
	// where it does not borrow from the device.
	Reclaim(ctx context.Context, r Request) (Answer, error)
	// Borrowed lists the devices that the process may borrow from.
	Borrowed() []Borrowed
}

// maxRequests is the maximum of requests for memory in progress of one process.
const maxRequests = 16

// Handler serves the protocol.
func Handler(l Lender) http.Handler {
	mux, slots := http.NewServeMux(), make(chan struct{}, maxRequests)
	mux.HandleFunc("POST "+Path, func(w http.ResponseWriter, r *http.Request) {
		// A web page can send no such request to another address without being asked first.
		if kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type")); err != nil || kind != "application/json" {
			fail(w, http.StatusUnsupportedMediaType, errors.New("the body must be JSON: send Content-Type: application/json"))
			return
		}
		var ask Request
		body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
		if err == nil {
			err = json.Unmarshal(body, &ask)
		}
		if err != nil {
			fail(w, http.StatusBadRequest, err)
			return
		}
		select {
		case slots <- struct{}{}:
			defer func() { <-slots }()
		default:
			fail(w, http.StatusTooManyRequests, errors.New("too many requests for memory in progress; retry later"))
			return
		}
		switch a, err := l.Reclaim(r.Context(), ask); {
		case errors.Is(err, ErrNoPeer):
			fail(w, http.StatusNotFound, err)
		case err != nil:
			fail(w, http.StatusServiceUnavailable, err)
		default:
			reply(w, http.StatusOK, a)
		}
	})
	mux.HandleFunc("GET "+BorrowedPath, func(w http.ResponseWriter, _ *http.Request) {
		reply(w, http.StatusOK, map[string][]Borrowed{"devices": l.Borrowed()})
	})
	return mux
}

// failure has the shape of the API's errors.
type failure struct {
	Error struct {
		Message string  `json:"message"`
		Type    string  `json:"type"`
		Param   *string `json:"param"`
		Code    *string `json:"code"`
	} `json:"error"`
}

func fail(w http.ResponseWriter, status int, err error) {
	var f failure
	f.Error.Message, f.Error.Type = untrusted.Line(err.Error()), "invalid_request_error"
	switch status {
	case http.StatusTooManyRequests:
		f.Error.Type = "rate_limit_error"
	case http.StatusServiceUnavailable:
		f.Error.Type = "service_unavailable"
	}
	reply(w, status, f)
}

func reply(w http.ResponseWriter, status int, v any) {
	text, err := json.Marshal(v)
	if err != nil { // only of numbers that have no JSON form
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(append(text, '\n')) // a client that has gone
}
