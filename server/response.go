package server

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"time"
)

// response writes one HTTP response: JSON, or server-sent events.
type response struct {
	http.ResponseWriter
	control *http.ResponseController
	// timeout of each write.
	timeout time.Duration
	// id of the request.
	id      string
	log     *slog.Logger
	request *http.Request
	// unread: the request has a body, of which nothing is known to have come.
	unread bool

	// works: the request needs the model; entered: it has passed the gate. ran is how it ran there; nil where it did not. refused
	// is the error that was its response.
	works   bool
	entered bool
	ran     *requestLog
	refused *Error
	// errorBody is the form of errors on this route; nil: OpenAI's.
	errorBody func(e *Error, id string) any

	// status that was sent; 0: none yet.
	status    int
	streaming bool
	buf       bytes.Buffer
}

// writeError is a response that its client does not read.
type writeError struct{ err error }

func (e *writeError) Error() string { return "write the response: " + e.err.Error() }
func (e *writeError) Unwrap() error { return e.err }

// WriteHeader implements http.ResponseWriter.
func (w *response) WriteHeader(status int) {
	if w.status == 0 {
		w.begin(status)
	}
	w.ResponseWriter.WriteHeader(status)
}

// Write implements http.ResponseWriter.
func (w *response) Write(p []byte) (int, error) {
	if w.status == 0 {
		w.begin(http.StatusOK)
	}
	return w.ResponseWriter.Write(p)
}

// Unwrap is for http.ResponseController.
func (w *response) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// deadline starts the time that the client has to read what is written next.
func (w *response) deadline() {
	// A writer without deadlines (of a test) has no client who could be slow.
	if err := w.control.SetWriteDeadline(time.Now().Add(w.timeout)); err != nil && !errors.Is(err, http.ErrNotSupported) {
		w.log.Debug("write deadline not set", "request_id", w.id, "err", err)
	}
}

// readUntil sets the time by which what is read next of the request must have come; zero: none.
func (w *response) readUntil(t time.Time) {
	if err := w.control.SetReadDeadline(t); err != nil && !errors.Is(err, http.ErrNotSupported) {
		w.log.Debug("read deadline not set", "request_id", w.id, "err", err)
	}
}

// A body that the response does not depend on is read for discardTime, up to discardBytes, so that
// the connection can have further requests. It is closed where that is not all.
const (
	discardTime  = 500 * time.Millisecond
	discardBytes = 256 << 10
)

// begin precedes the first byte of the response.
func (w *response) begin(status int) {
	w.status = status
	defer w.deadline()
	if !w.unread {
		return
	}
	w.unread = false
	if w.request.Header.Get("Expect") != "" {
		// The client has sent nothing, and now need not. The deadline is net/http's, which reads too.
		w.readUntil(time.Unix(1, 0))
	} else {
		w.readUntil(time.Now().Add(discardTime))
		if _, err := io.CopyN(io.Discard, w.request.Body, discardBytes+1); errors.Is(err, io.EOF) {
			w.readUntil(time.Time{})
			return
		}
	}
	w.Header().Set("Connection", "close")
}

// marshal encodes v into the buffer, which is valid until the next call. What is
// written here always has a JSON form.
func (w *response) marshal(v any) {
	enc := json.NewEncoder(&w.buf)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		panic("server: response without a JSON form: " + err.Error())
	}
}

// json writes a whole response. One whose client has gone is lost.
func (w *response) json(status int, v any) {
	w.buf.Reset()
	w.marshal(v)
	w.Header().Set("Content-Type", "application/json")
	w.deadline()
	w.WriteHeader(status)
	w.Write(w.buf.Bytes()) //nolint:errcheck // the client has gone
}

// fail writes an error, unless a response has begun.
func (w *response) fail(e *Error) {
	w.refused = e
	if w.status != 0 {
		return
	}
	e.header(w.Header())
	if w.errorBody != nil {
		w.json(e.Status, w.errorBody(e, w.id))
		return
	}
	w.json(e.Status, e.body())
}

// event writes a server-sent event at once. Its error is a *writeError.
func (w *response) event(v any) error {
	w.buf.Reset()
	w.buf.WriteString("data: ")
	w.marshal(v)
	w.buf.WriteByte('\n')
	return w.flush()
}

// named writes a server-sent event that has a name. Its error is a *writeError.
func (w *response) named(name string, v any) error {
	w.buf.Reset()
	w.buf.WriteString("event: " + name + "\ndata: ")
	w.marshal(v)
	w.buf.WriteByte('\n')
	return w.flush()
}

// events writes chunks of a stream. Its error is a *writeError.
func (w *response) events(chunks []any) (err error) {
	for i := 0; i < len(chunks) && err == nil; i++ {
		switch c := chunks[i].(type) {
		case streamEnd:
			err = w.eventsEnd()
		case namedEvent:
			err = w.named(c.name, c.data)
		default:
			err = w.event(c)
		}
	}
	return err
}

// comment writes a comment, which clients of server-sent events ignore.
func (w *response) comment(text string) error {
	w.buf.Reset()
	w.buf.WriteString(": " + text + "\n\n")
	return w.flush()
}

// eventsEnd writes the event that ends an OpenAI stream.
func (w *response) eventsEnd() error {
	w.buf.Reset()
	w.buf.WriteString("data: [DONE]\n\n")
	return w.flush()
}

// flush sends the buffer.
func (w *response) flush() error {
	if !w.streaming {
		w.streaming = true
		h := w.Header()
		h.Set("Content-Type", "text/event-stream")
		h.Set("Cache-Control", "no-cache")
		h.Set("X-Accel-Buffering", "no") // or nginx holds events back
		w.deadline()
		w.WriteHeader(http.StatusOK)
	}
	w.deadline()
	_, err := w.Write(w.buf.Bytes())
	if err == nil {
		err = w.control.Flush()
	}
	if err != nil {
		return &writeError{err}
	}
	return nil
}
