package server

import (
	"net/http"
	"slices"
	"strings"
)

// CORS says which web pages' scripts may use the server from a browser (cross-origin resource
// sharing): none where Origins is empty. "*" in a list stands for all.
type CORS struct {
	// Origins are the addresses of pages: https://example.com.
	Origins []string
	// Methods and Headers that their requests may have.
	Methods, Headers []string
	// Credentials lets browsers send cookies and certificates, and pages read what comes back.
	Credentials bool
}

// preflightAge is for how many seconds a browser remembers what it may send.
const preflightAge = "600"

// exposed are headers of responses that scripts may read.
const exposed = "X-Request-Id, Retry-After"

// apply sets the headers for a request of a page. done: it was a browser's question whether it may
// send a request, and has its answer.
func (c *CORS) apply(h http.Header, r *http.Request) (done bool, err error) {
	origin := r.Header.Get("Origin")
	if origin == "" || len(c.Origins) == 0 {
		return false, nil
	}
	method := r.Header.Get("Access-Control-Request-Method")
	preflight := r.Method == http.MethodOptions && method != ""
	all := slices.Contains(c.Origins, "*")
	if !all {
		h.Add("Vary", "Origin")
	}
	switch {
	case all && !c.Credentials:
		h.Set("Access-Control-Allow-Origin", "*")
	case all || slices.Contains(c.Origins, origin):
		h.Set("Access-Control-Allow-Origin", origin)
	case preflight:
		return false, forbidden("the origin " + truncate(origin) + " is not one of --allowed-origins")
	default:
		return false, nil // who is no browser may read the response
	}
	if c.Credentials {
		h.Set("Access-Control-Allow-Credentials", "true")
	}
	if !preflight {
		h.Set("Access-Control-Expose-Headers", exposed)
		return false, nil
	}
	if !slices.Contains(c.Methods, "*") && !slices.Contains(c.Methods, method) {
		return false, forbidden("the method " + truncate(method) + " is not one of --allowed-methods")
	}
	h.Set("Access-Control-Allow-Methods", method)
	if asked := r.Header.Get("Access-Control-Request-Headers"); asked != "" {
		for name := range strings.SplitSeq(asked, ",") {
			same := func(allowed string) bool {
				return allowed == "*" || strings.EqualFold(allowed, strings.TrimSpace(name))
			}
			if !slices.ContainsFunc(c.Headers, same) {
				return false, forbidden("the header " + truncate(strings.TrimSpace(name)) + " is not one of --allowed-headers")
			}
		}
		h.Set("Access-Control-Allow-Headers", asked)
	}
	h.Set("Access-Control-Max-Age", preflightAge)
	return true, nil
}

func forbidden(message string) *Error {
	return &Error{Status: http.StatusForbidden, Type: invalidRequest, Code: "cors", Message: message}
}
