package server

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/models/grammar"
	"github.com/moeserve/moeserve/untrusted"
)

// Error is an error as clients of the OpenAI API read it.
type Error struct {
	// Status of the HTTP response.
	Status int
	// Message says what is wrong and what to do, Type the kind in OpenAI's words.
	Message, Type string
	// Param is the member of the body that is wrong, Code a machine-readable code; empty for
	// none.
	Param, Code string
	// RetryAfter is how long to wait before a retry, in whole seconds; 0 for none.
	RetryAfter time.Duration
}

func (e *Error) Error() string { return e.Message }

// OpenAI's kinds of errors.
const (
	invalidRequest = "invalid_request_error"
	rateLimit      = "rate_limit_error"
	serverError    = "server_error"
	unavailable    = "service_unavailable"
)

// Causes of an abort that do not come from the client.
var (
	errStopping = errors.New("the server is stopping")
	errCopies   = errors.New("copies to the compute device fail")
	errTimeout  = errors.New("the request exceeded the time limit of this server")
)

// retrySoon is the Retry-After of conditions that pass within seconds.
const retrySoon = time.Second

// packages are those that begin their errors with their names, which mean nothing to
// clients and users.
var packages = regexp.MustCompile(`(^|: |; )(?:(?:configs|device|dispatch|emulated|engine|eval|experts|forward|harvest|kvcache|metrics|models|node|peercache|sleeping|pipeline|planner|lease|rebalancer|scheduler|server|tenants|transfer): )+`)

// Message is an error as clients and users read it: in one short line of printable
// characters, also where it has several causes or quotes a file, and without the names of
// packages.
func Message(err error) string {
	return packages.ReplaceAllString(untrusted.Line(err.Error()), "$1")
}

func badRequest(param, code, format string, args ...any) *Error {
	return &Error{Status: http.StatusBadRequest, Type: invalidRequest, Param: param, Code: code, Message: fmt.Sprintf(format, args...)}
}

func notNow(err error) *Error {
	return &Error{
		Status: http.StatusServiceUnavailable, Type: unavailable, RetryAfter: retrySoon,
		Message: err.Error() + "; retry later, or on another server",
	}
}

// asError is err as its client reads it. prompt is the member of the body that holds the
// prompt.
func asError(ctx context.Context, err error, prompt string) *Error {
	var e *Error
	var param *engine.ParamError
	switch {
	case errors.As(err, &e):
		return e
	case errors.As(err, &param):
		return badRequest(param.Param, "invalid_value", "Invalid value for '%s': it is %v, and must be %s.", param.Param, param.Value, param.Want)
	case errors.Is(err, engine.ErrPromptTooLong):
		return badRequest(prompt, "context_length_exceeded", "%s", Message(err))
	case errors.Is(err, engine.ErrBadRequest):
		return badRequest(prompt, "invalid_value", "Invalid value for '%s': %s.", prompt, strings.TrimPrefix(Message(err), engine.ErrBadRequest.Error()+": "))
	case errors.Is(err, engine.ErrQueueFull):
		return &Error{
			Status: http.StatusTooManyRequests, Type: rateLimit, Code: "queue_full", RetryAfter: retrySoon,
			Message: "too many requests are waiting; retry later",
		}
	case errors.Is(err, engine.ErrUnavailable):
		return notNow(errCopies)
	case errors.Is(err, engine.ErrPaused):
		return &Error{Status: http.StatusServiceUnavailable, Type: unavailable, Code: "model_asleep", RetryAfter: retrySoon, Message: Message(err) + "; send the request again: it waits until the model is woken"}
	case errors.Is(err, grammar.ErrAmbiguous):
		return badRequest("", "invalid_value", "%s", Message(err))
	case errors.Is(err, engine.ErrNoToken):
		return &Error{Status: http.StatusInternalServerError, Type: serverError, Message: Message(err)}
	case errors.Is(err, engine.ErrStopped), errors.Is(context.Cause(ctx), errStopping):
		return notNow(errStopping)
	case errors.Is(context.Cause(ctx), errTimeout):
		return &Error{Status: http.StatusGatewayTimeout, Type: serverError, Code: "timeout", Message: errTimeout.Error() + "; request fewer tokens"}
	}
	if errors.Is(ctx.Err(), context.Canceled) {
		return &Error{Status: statusClientLeft, Type: invalidRequest, Message: "the client closed the connection"}
	}
	return &Error{Status: http.StatusInternalServerError, Type: serverError, Message: "the engine failed: " + Message(err)}
}

// statusClientLeft is for logs, since the client has gone; nginx has the number.
const statusClientLeft = 499

type errorBody struct {
	Error errorJSON `json:"error"`
}

type errorJSON struct {
	Message string  `json:"message"`
	Type    string  `json:"type"`
	Param   *string `json:"param"`
	Code    *string `json:"code"`
}

func (e *Error) body() errorBody {
	optional := func(s string) *string {
		if s == "" {
			return nil
		}
		return &s
	}
	return errorBody{errorJSON{untrusted.Line(e.Message), e.Type, optional(e.Param), optional(e.Code)}}
}

// header sets what goes beside the body.
func (e *Error) header(h http.Header) {
	if e.RetryAfter > 0 {
		h.Set("Retry-After", strconv.Itoa(int(math.Ceil(e.RetryAfter.Seconds()))))
	}
	if e.Status == http.StatusUnauthorized {
		h.Set("WWW-Authenticate", "Bearer")
	}
}
