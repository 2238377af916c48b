package spans

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"

	sdk "go.opentelemetry.io/otel/sdk/trace"

	"github.com/moeserve/moeserve/untrusted"
)

// sender posts spans to a collector by OTLP over HTTP, as JSON
// (https://opentelemetry.io/docs/specs/otlp/#otlphttp). Such an exporter of OpenTelemetry's own brings
// gRPC and protobuf into the command, more than all other modules together.
type sender struct {
	url    string
	header http.Header
	client *http.Client
	gzip   bool
	// timeout of a batch of spans, with what is sent again.
	timeout time.Duration
	// backoff is the wait before a batch is sent again where the collector does not say how long; it
	// doubles each time.
	backoff time.Duration
	// stopped is done after Shutdown, which ends what is being sent.
	stopped context.Context
	stop    context.CancelFunc
}

var _ sdk.SpanExporter = (*sender)(nil)

// What is used where the environment says nothing, and the most that is read.
const (
	defaultTimeout = 10 * time.Second
	firstBackoff   = 500 * time.Millisecond
	maxAnswer      = 64 << 10 // bytes
	maxCertificate = 1 << 20  // bytes
)

// variable is the value of OTEL_EXPORTER_OTLP_TRACES_name, or else of OTEL_EXPORTER_OTLP_name, and
// which of them it is of.
func variable(name string) (value, of string) {
	for _, of = range []string{"OTEL_EXPORTER_OTLP_TRACES_" + name, "OTEL_EXPORTER_OTLP_" + name} {
		if value = strings.TrimSpace(os.Getenv(of)); value != "" {
			return value, of
		}
	}
	return "", of
}

// newSender reads the environment, of which an error names the variable.
func newSender(to *url.URL, version string) (*sender, error) {
	s := &sender{url: to.String(), header: http.Header{}, timeout: defaultTimeout, backoff: firstBackoff}
	s.header.Set("User-Agent", "moeserve/"+version)
	headers, of := variable("HEADERS")
	for kv := range strings.SplitSeq(headers, ",") {
		key, value, ok := strings.Cut(kv, "=")
		key = strings.TrimSpace(key)
		value, err := url.PathUnescape(strings.TrimSpace(value))
		switch {
		case strings.TrimSpace(kv) == "":
		case !ok || key == "" || err != nil: // values may be secrets
			return nil, fmt.Errorf("%s must be headers as NAME=VALUE,NAME=VALUE, with %%XX for what is special in URLs", of)
		default:
			s.header.Set(key, value)
		}
	}
	s.header.Set("Content-Type", "application/json")
	switch compression, of := variable("COMPRESSION"); compression {
	case "", "none":
	case "gzip":
		s.gzip = true
		s.header.Set("Content-Encoding", "gzip")
	default:
		return nil, fmt.Errorf("%s is %s; must be gzip or none", of, untrusted.Name(compression))
	}
	if timeout, of := variable("TIMEOUT"); timeout != "" {
		ms, err := strconv.ParseUint(timeout, 10, 31)
		if err != nil || ms == 0 {
			return nil, fmt.Errorf("%s is %s; must be a number of milliseconds", of, untrusted.Name(timeout))
		}
		s.timeout = time.Duration(ms) * time.Millisecond
	}
	transport := http.DefaultTransport.(*http.Transport).Clone()
	var err error
	if transport.TLSClientConfig, err = newTLS(); err != nil {
		return nil, err
	}
	s.client = &http.Client{Transport: transport}
	s.stopped, s.stop = context.WithCancel(context.Background())
	return s, nil
}

// newTLS trusts and presents what the environment says.
func newTLS() (*tls.Config, error) {
	c := &tls.Config{MinVersion: tls.VersionTLS12}
	read := func(name string) ([]byte, string, error) {
		path, of := variable(name)
		if path == "" {
			return nil, of, nil
		}
		data, err := untrusted.ReadFile(path, maxCertificate)
		if err != nil {
			return nil, of, fmt.Errorf("%s: %w", of, err)
		}
		return data, of, nil
	}
	trusted, of, err := read("CERTIFICATE")
	if err != nil {
		return nil, err
	}
	if trusted != nil {
		if c.RootCAs = x509.NewCertPool(); !c.RootCAs.AppendCertsFromPEM(trusted) {
			return nil, fmt.Errorf("%s: the file has no certificate in PEM", of)
		}
	}
	certificate, of, err := read("CLIENT_CERTIFICATE")
	if err != nil {
		return nil, err
	}
	key, ofKey, err := read("CLIENT_KEY")
	if err != nil {
		return nil, err
	}
	if certificate != nil || key != nil {
		pair, err := tls.X509KeyPair(certificate, key)
		if err != nil {
			return nil, fmt.Errorf("%s and %s must name a certificate and its key: %w", of, ofKey, err)
		}
		c.Certificates = []tls.Certificate{pair}
	}
	return c, nil
}

// Shutdown implements sdk.SpanExporter. It ends what is being sent.
func (s *sender) Shutdown(context.Context) error {
	s.stop()
	s.client.CloseIdleConnections()
	return nil
}

// ExportSpans implements sdk.SpanExporter. It sends spans again where the collector asks for that,
// within the timeout. A *partialError says what the collector refused of them.
func (s *sender) ExportSpans(ctx context.Context, spans []sdk.ReadOnlySpan) error {
	if len(spans) == 0 {
		return nil
	}
	body, err := encode(spans[0].Resource(), spans[0].InstrumentationScope(), spans)
	if err != nil {
		return err
	}
	if s.gzip {
		var b bytes.Buffer
		z := gzip.NewWriter(&b)
		if _, err = z.Write(body); err == nil {
			err = z.Close()
		}
		if err != nil {
			return err
		}
		body = b.Bytes()
	}
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	defer context.AfterFunc(s.stopped, cancel)()
	for wait := s.backoff; ; wait *= 2 {
		err := s.post(ctx, body)
		var again *retryError
		if !errors.As(err, &again) {
			return err
		}
		pause := wait
		if again.after >= 0 {
			pause = again.after
		}
		if end, _ := ctx.Deadline(); time.Until(end) < pause {
			return err
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return err
		}
	}
}

// retryError is an answer after which spans are to be sent again: after a while, or the sender's
// backoff if that is negative.
type retryError struct {
	err   error
	after time.Duration
}

func (e *retryError) Error() string { return e.err.Error() }

// partialError is an answer of a collector that took spans: it refused some, or none and only warns.
type partialError struct {
	refused int64
	message string
}

func (e *partialError) Error() string {
	return fmt.Sprintf("the collector refused %d spans of a batch: %s", e.refused, untrusted.Quote(e.message))
}

// post sends a batch once.
func (s *sender) post(ctx context.Context, body []byte) (err error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, s.url, bytes.NewReader(body))
	if err != nil {
		return err
	}
	r.Header = s.header.Clone()
	answer, err := s.client.Do(r)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, answer.Body.Close()) }()
	data, err := io.ReadAll(io.LimitReader(answer.Body, maxAnswer))
	if err != nil {
		return err
	}
	switch code := answer.StatusCode; {
	case code >= 200 && code <= 299:
		return partial(answer.Header.Get("Content-Type"), data)
	case code == http.StatusTooManyRequests, code == http.StatusBadGateway, code == http.StatusServiceUnavailable, code == http.StatusGatewayTimeout:
		return &retryError{err: refused(answer, data), after: retryAfter(answer.Header.Get("Retry-After"), time.Now())}
	default:
		return refused(answer, data)
	}
}

func refused(answer *http.Response, data []byte) error {
	return fmt.Errorf("the collector answers %s: %s", answer.Status, untrusted.Quote(strings.TrimSpace(string(data))))
}

// retryAfter reads a Retry-After header, which has seconds or a date; it is negative without one.
func retryAfter(header string, now time.Time) time.Duration {
	if seconds, err := strconv.ParseUint(header, 10, 31); err == nil {
		return time.Duration(seconds) * time.Second
	}
	if date, err := http.ParseTime(header); err == nil {
		return max(0, date.Sub(now))
	}
	return -1
}

// partial reads what a collector says of spans that it took. Only JSON is read.
func partial(contentType string, data []byte) error {
	if t, _, err := mime.ParseMediaType(contentType); err != nil || t != "application/json" || len(data) == 0 {
		return nil
	}
	var a struct {
		PartialSuccess struct {
			RejectedSpans json.Number // in quotes or not
			ErrorMessage  string
		}
	}
	if err := json.Unmarshal(data, &a); err != nil {
		return fmt.Errorf("the collector's answer: %w", err)
	}
	n, _ := a.PartialSuccess.RejectedSpans.Int64() // 0 where it says nothing
	if n == 0 && a.PartialSuccess.ErrorMessage == "" {
		return nil
	}
	return &partialError{refused: n, message: a.PartialSuccess.ErrorMessage}
}
