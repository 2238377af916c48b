// Package spanstest is a collector of OpenTelemetry for tests: a server that takes spans by OTLP over
// HTTP as JSON, and is strict where collectors need not be. It is not a collector for anything else.
package spanstest

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strconv"
	"sync"
	"testing"
)

// Collector is a server, and what came to it.
type Collector struct {
	URL string

	mu       sync.Mutex
	requests []*http.Request
	spans    []Span
	resource map[string]any
}

// Span is a span of OTLP. It may have only these fields, which are all that spans of requests need.
type Span struct {
	TraceID           ID16          `json:"traceId"`
	SpanID            ID8           `json:"spanId"`
	ParentSpanID      ID8           `json:"parentSpanId"`
	TraceState        string        `json:"traceState"`
	Name              string        `json:"name"`
	Flags             uint32        `json:"flags"`
	Kind              int           `json:"kind"`
	Start             Nanoseconds   `json:"startTimeUnixNano"`
	End               Nanoseconds   `json:"endTimeUnixNano"`
	Attributes        Attributes    `json:"attributes"`
	DroppedAttributes uint32        `json:"droppedAttributesCount"`
	Events            []Event       `json:"events"`
	DroppedEvents     uint32        `json:"droppedEventsCount"`
	Status            *StatusOfSpan `json:"status"`
}

// Event of a span.
type Event struct {
	Time       Nanoseconds `json:"timeUnixNano"`
	Name       string      `json:"name"`
	Attributes Attributes  `json:"attributes"`
}

// StatusOfSpan has OTLP's codes: 0 unset, 1 ok, 2 error.
type StatusOfSpan struct {
	Message string `json:"message"`
	Code    int    `json:"code"`
}

// ID16 and ID8 are ids of traces and spans, of 32 and 16 hexadecimal digits; only ID8 may be absent.
type (
	ID16 string
	ID8  string
)

// Nanoseconds since 1970, which JSON has as a decimal string.
type Nanoseconds uint64

// Attributes by name: string, bool, int64, float64, or []any of them.
type Attributes map[string]any

var hexadecimal = regexp.MustCompile(`^([0-9a-f]{16}){1,2}$`)

func id(data []byte, digits int) (s string, err error) {
	if err = json.Unmarshal(data, &s); err == nil && (len(s) != digits || !hexadecimal.MatchString(s)) {
		err = fmt.Errorf("%s is no id of %d hexadecimal digits", data, digits)
	}
	return s, err
}

// UnmarshalJSON implements json.Unmarshaler.
func (i *ID16) UnmarshalJSON(data []byte) error {
	s, err := id(data, 32)
	*i = ID16(s)
	return err
}

// UnmarshalJSON implements json.Unmarshaler.
func (i *ID8) UnmarshalJSON(data []byte) error {
	s, err := id(data, 16)
	*i = ID8(s)
	return err
}

// UnmarshalJSON implements json.Unmarshaler.
func (n *Nanoseconds) UnmarshalJSON(data []byte) error {
	var s string
	if err := json.Unmarshal(data, &s); err != nil {
		return err
	}
	v, err := strconv.ParseUint(s, 10, 64)
	*n = Nanoseconds(v)
	return err
}

// UnmarshalJSON implements json.Unmarshaler.
func (a *Attributes) UnmarshalJSON(data []byte) error {
	var list []struct {
		Key   string `json:"key"`
		Value value  `json:"value"`
	}
	if err := strict(data, &list); err != nil {
		return err
	}
	*a = Attributes{}
	for _, kv := range list {
		if _, twice := (*a)[kv.Key]; twice || kv.Key == "" {
			return fmt.Errorf("attribute %q is there twice, or has no name", kv.Key)
		}
		(*a)[kv.Key] = kv.Value.is
	}
	return nil
}

// value of an attribute.
type value struct{ is any }

// UnmarshalJSON implements json.Unmarshaler.
func (v *value) UnmarshalJSON(data []byte) error {
	var of struct {
		String *string          `json:"stringValue"`
		Bool   *bool            `json:"boolValue"`
		Int    *string          `json:"intValue"`
		Double *json.RawMessage `json:"doubleValue"`
		Array  *struct {
			Values []value `json:"values"`
		} `json:"arrayValue"`
	}
	if err := strict(data, &of); err != nil {
		return err
	}
	n := 0
	var err error
	if of.String != nil {
		n, v.is = n+1, *of.String
	}
	if of.Bool != nil {
		n, v.is = n+1, *of.Bool
	}
	if of.Int != nil {
		n++
		v.is, err = strconv.ParseInt(*of.Int, 10, 64)
	}
	if of.Double != nil {
		n++
		switch s := string(*of.Double); s {
		case `"NaN"`, `"Infinity"`, `"-Infinity"`:
			v.is, err = strconv.ParseFloat(s[1:len(s)-1], 64)
		default:
			v.is, err = strconv.ParseFloat(s, 64)
		}
	}
	if of.Array != nil {
		list := []any{}
		for _, x := range of.Array.Values {
			list = append(list, x.is)
		}
		n, v.is = n+1, list
	}
	if err == nil && n != 1 {
		err = fmt.Errorf("%s has %d values", data, n)
	}
	return err
}

// strict decodes one JSON value that has no fields but those of to.
func strict(data []byte, to any) error {
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	if err := d.Decode(to); err != nil {
		return err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("there is more after the JSON value")
	}
	return nil
}

// Start runs a collector until the test's end. It answers the first requests by answer, one function
// each, and the others with success; a nil function is success, too. Spans of requests that are not
// answered with success are forgotten.
func Start(t testing.TB, answer ...http.HandlerFunc) *Collector {
	t.Helper()
	c := &Collector{}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		spans, resource, err := read(r)
		if err != nil {
			t.Errorf("%s %s: %v", r.Method, r.URL, err)
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		i := len(c.requests)
		c.requests = append(c.requests, r)
		status := &statusWriter{ResponseWriter: w, code: http.StatusOK}
		if i < len(answer) && answer[i] != nil {
			answer[i](status, r)
		} else {
			w.Header().Set("Content-Type", "application/json")
			_, _ = io.WriteString(w, "{}")
		}
		if status.code == http.StatusOK {
			c.spans, c.resource = append(c.spans, spans...), resource
		}
	}))
	t.Cleanup(s.Close)
	c.URL = s.URL
	return c
}

// statusWriter keeps the status of an answer.
type statusWriter struct {
	http.ResponseWriter
	code int
}

func (w *statusWriter) WriteHeader(code int) {
	w.code = code
	w.ResponseWriter.WriteHeader(code)
}

// Got returns the spans that came, in their order, and the attributes of their process.
func (c *Collector) Got() ([]Span, map[string]any) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.spans, c.resource
}

// Requests returns the requests that came. Their bodies are read.
func (c *Collector) Requests() []*http.Request {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.requests
}

// read decodes a request.
func read(r *http.Request) (spans []Span, resource map[string]any, err error) {
	var body io.Reader = r.Body
	if e := r.Header.Get("Content-Encoding"); e == "gzip" {
		if body, err = gzip.NewReader(body); err != nil {
			return nil, nil, err
		}
	} else if e != "" {
		return nil, nil, fmt.Errorf("encoding %s", e)
	}
	data, err := io.ReadAll(body)
	if err != nil {
		return nil, nil, err
	}
	if r.Method != http.MethodPost || r.URL.Path != "/v1/traces" || r.Header.Get("Content-Type") != "application/json" {
		return nil, nil, fmt.Errorf("not an export of spans, of type %q", r.Header.Get("Content-Type"))
	}
	var m struct {
		ResourceSpans []struct {
			Resource struct {
				Attributes Attributes `json:"attributes"`
			} `json:"resource"`
			ScopeSpans []struct {
				Scope struct {
					Name    string `json:"name"`
					Version string `json:"version"`
				} `json:"scope"`
				Spans []Span `json:"spans"`
			} `json:"scopeSpans"`
			SchemaURL string `json:"schemaUrl"`
		} `json:"resourceSpans"`
	}
	if err := strict(data, &m); err != nil {
		return nil, nil, err
	}
	for _, of := range m.ResourceSpans {
		resource = of.Resource.Attributes
		for _, s := range of.ScopeSpans {
			if s.Scope.Name == "" {
				return nil, nil, errors.New("spans of no scope")
			}
			spans = append(spans, s.Spans...)
		}
	}
	for _, s := range spans {
		if s.TraceID == "" || s.SpanID == "" || s.Name == "" || s.Start == 0 || s.End == 0 {
			return nil, nil, fmt.Errorf("a span lacks what each has: %+v", s)
		}
	}
	if len(spans) == 0 {
		return nil, nil, errors.New("no spans")
	}
	return spans, resource, nil
}
