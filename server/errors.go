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
)

// Error is an error as clients of the OpenAI API read it.
type Error struct {
	// Status of the HTTP answer.
	Status int
	// Message says what is wrong and what to do, Type the kind in OpenAI's words.
	Message, Type string
	// Param is the member of the body that is wrong, Code a word for programs; empty
	// for none.
	Param, Code string
	// RetryAfter, where it is not 0, says when to try again; in whole seconds.
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

// Causes of a request's end that do not come from its client.
var (
	errStopping = errors.New("the server is stopping")
	errTimeout  = errors.New("the request took longer than this server lets one take")
)

// retrySoon is the Retry-After of what passes within seconds.
const retrySoon = time.Second

// packages are those that begin their errors with their names, which say nothing to
// clients, nor to those who run a command.
var packages = regexp.MustCompile(`(^|: |; )(?:(?:configs|device|dispatch|emulated|engine|eval|experts|forward|harvest|kvcache|metrics|models|node|peercache|pipeline|planner|rebalancer|residency|scheduler|server|tenants|transfer): )+`)

// Message words an error for those who asked for what failed: in one line, also where
// it has several causes, and without the names of packages.
func Message(err error) string {
	line := strings.Join(strings.FieldsFunc(err.Error(), func(r rune) bool { return r == '\n' || r == '\r' }), "; ")
	return packages.ReplaceAllString(line, "$1")
}

func badRequest(param, code, format string, args ...any) *Error {
	return &Error{Status: http.StatusBadRequest, Type: invalidRequest, Param: param, Code: code, Message: fmt.Sprintf(format, args...)}
}

func notNow(err error) *Error {
	return &Error{
		Status: http.StatusServiceUnavailable, Type: unavailable, RetryAfter: retrySoon,
		Message: err.Error() + "; try again soon, or elsewhere",
	}
}

// asError says what a client is told about err. prompt is the member of the body
// that holds the prompt.
func asError(ctx context.Context, err error, prompt string) *Error {
	var e *Error
	var param *engine.ParamError
	switch {
	case errors.As(err, &e):
		return e
	case errors.As(err, &param):
		return badRequest(param.Param, "invalid_value", "%s", param.Error())
	case errors.Is(err, engine.ErrPromptTooLong):
		return badRequest(prompt, "context_length_exceeded", "%s", Message(err))
	case errors.Is(err, engine.ErrBadRequest):
		return badRequest(prompt, "invalid_value", "%s", Message(err))
	case errors.Is(err, engine.ErrQueueFull):
		return &Error{
			Status: http.StatusTooManyRequests, Type: rateLimit, Code: "queue_full", RetryAfter: retrySoon,
			Message: "too many requests are waiting; try again soon",
		}
	case errors.Is(err, engine.ErrStopped), errors.Is(context.Cause(ctx), errStopping):
		return notNow(errStopping)
	case errors.Is(context.Cause(ctx), errTimeout):
		return &Error{Status: http.StatusGatewayTimeout, Type: serverError, Code: "timeout", Message: errTimeout.Error() + "; ask for fewer tokens"}
	}
	if errors.Is(ctx.Err(), context.Canceled) {
		return &Error{Status: statusClientLeft, Type: invalidRequest, Message: "the client has left"}
	}
	return &Error{Status: http.StatusInternalServerError, Type: serverError, Message: "the engine failed: " + Message(err)}
}

// statusClientLeft is for logs, as nobody reads it; nginx has the number.
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
	return errorBody{errorJSON{e.Message, e.Type, optional(e.Param), optional(e.Code)}}
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
