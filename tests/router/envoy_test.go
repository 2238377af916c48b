package router

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	filterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"
)

// destination is the header in which the picker names a node, as deploy/router/envoy.yaml has it.
const destination = "x-gateway-destination-endpoint"

// envoy does with requests what Envoy does with deploy/router/envoy.yaml: it gives the picker the headers and the body of
// a request, sends the request to the node that the picker names, and takes the answer past the picker.
type envoy struct {
	client extprocv3.ExternalProcessorClient
	sent   int // requests
}

// exchange is a request on its way past the picker.
type exchange struct {
	stream grpc.BidiStreamingClient[extprocv3.ProcessingRequest, extprocv3.ProcessingResponse]
	end    context.CancelFunc
	// path, headers and body are the request as the picker has left it, and node is where it goes.
	path, node string
	headers    http.Header
	body       []byte
}

// answer is what a client gets.
type answer struct {
	status int
	body   []byte
	// node has answered.
	node string
}

// pick is the node that the picker names for a request, which is not sent.
func (e *envoy) pick(t *testing.T, path string, body []byte) (node string) {
	t.Helper()
	x, err := e.begin(t.Context(), path, body)
	if err != nil {
		t.Fatal(err)
	}
	x.end()
	return x.node
}

// post sends a request by way of the picker.
func (e *envoy) post(t *testing.T, path string, body []byte) answer {
	t.Helper()
	x, err := e.begin(t.Context(), path, body)
	if err != nil {
		t.Fatal(err)
	}
	defer x.end()
	a, err := x.forward(t.Context())
	if err != nil {
		t.Fatalf("a request for %s: %v", x.node, err)
	}
	return a
}

// begin gives the picker the request's headers, and its body in two pieces: request_body_mode FULL_DUPLEX_STREAMED.
func (e *envoy) begin(ctx context.Context, path string, body []byte) (_ *exchange, err error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer func() {
		if err != nil {
			cancel()
		}
	}()
	stream, err := e.client.Process(ctx, grpc.WaitForReady(true))
	if err != nil {
		return nil, err
	}
	e.sent++
	x := &exchange{stream: stream, end: cancel, path: path, headers: http.Header{"Content-Type": {"application/json"}}}
	requests := []*extprocv3.ProcessingRequest{{
		Request: &extprocv3.ProcessingRequest_RequestHeaders{RequestHeaders: &extprocv3.HttpHeaders{Headers: headerMap(
			":method", http.MethodPost, ":path", path, ":authority", "moeserve", ":scheme", "http", "content-type", "application/json",
			"content-length", strconv.Itoa(len(body)), "x-request-id", "request-"+strconv.Itoa(e.sent),
		)}},
		ProtocolConfig: &extprocv3.ProtocolConfiguration{
			RequestBodyMode: filterv3.ProcessingMode_FULL_DUPLEX_STREAMED, ResponseBodyMode: filterv3.ProcessingMode_FULL_DUPLEX_STREAMED,
		},
	}}
	for _, piece := range [][]byte{body[:len(body)/2], body[len(body)/2:]} {
		requests = append(requests, &extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_RequestBody{
			RequestBody: &extprocv3.HttpBody{Body: piece, EndOfStream: len(requests) == 2},
		}})
	}
	for _, r := range requests {
		if err := stream.Send(r); err != nil && !errors.Is(err, io.EOF) { // of which Recv says why
			return nil, err
		}
	}
	r, err := stream.Recv()
	if err != nil {
		return nil, err
	}
	if r.GetRequestHeaders() == nil {
		return nil, fmt.Errorf("the picker does not answer headers but says %v", r)
	}
	for _, h := range r.GetRequestHeaders().GetResponse().GetHeaderMutation().GetSetHeaders() {
		name, value := h.GetHeader().GetKey(), string(h.GetHeader().GetRawValue())
		switch {
		case name == destination:
			x.node = value
		case name == ":path":
			x.path = value
		}
		if !strings.HasPrefix(name, ":") {
			x.headers.Set(name, value)
		}
	}
	x.body, err = x.receiveBody((*extprocv3.ProcessingResponse).GetRequestBody)
	return x, err
}

// receiveBody receives a body as the picker passes it on.
func (x *exchange) receiveBody(part func(*extprocv3.ProcessingResponse) *extprocv3.BodyResponse) (body []byte, err error) {
	for {
		r, err := x.stream.Recv()
		if err != nil {
			return nil, err
		}
		piece := part(r).GetResponse().GetBodyMutation().GetStreamedResponse()
		if piece == nil {
			return nil, fmt.Errorf("the picker does not pass a body on but says %v", r)
		}
		if body = append(body, piece.GetBody()...); piece.GetEndOfStream() {
			return body, nil
		}
	}
}

// forward sends the request to its node, and takes the answer past the picker piece by piece as it comes.
func (x *exchange) forward(ctx context.Context) (a answer, err error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+x.node+x.path, bytes.NewReader(x.body))
	if err != nil {
		return a, err
	}
	r.Header = x.headers
	response, err := http.DefaultClient.Do(r)
	if err != nil {
		return a, err
	}
	defer response.Body.Close()
	a.node, a.status = x.node, response.StatusCode
	if err := x.stream.Send(&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_ResponseHeaders{
		ResponseHeaders: &extprocv3.HttpHeaders{Headers: headerMap(
			":status", strconv.Itoa(a.status), "content-type", response.Header.Get("Content-Type"),
		)},
	}}); err != nil && !errors.Is(err, io.EOF) {
		return a, err
	}
	sent := make(chan error, 1)
	go func() { sent <- x.sendAnswer(response.Body) }()
	h, err := x.stream.Recv()
	if err == nil && h.GetResponseHeaders() == nil {
		err = fmt.Errorf("the picker does not answer the response's headers but says %v", h)
	}
	if err == nil {
		a.body, err = x.receiveBody((*extprocv3.ProcessingResponse).GetResponseBody)
	}
	if err != nil {
		cancel() // the node's answer
	}
	return a, errors.Join(err, <-sent)
}

// sendAnswer gives the picker a node's answer.
func (x *exchange) sendAnswer(body io.Reader) error {
	piece := make([]byte, 4096)
	for {
		n, err := body.Read(piece)
		if err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		if sendErr := x.stream.Send(&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_ResponseBody{
			ResponseBody: &extprocv3.HttpBody{Body: bytes.Clone(piece[:n]), EndOfStream: err != nil},
		}}); sendErr != nil {
			return sendErr
		}
		if err != nil {
			return x.stream.CloseSend()
		}
	}
}

// headerMap has names and values by turns.
func headerMap(pairs ...string) *corev3.HeaderMap {
	m := &corev3.HeaderMap{}
	for i := 0; i < len(pairs); i += 2 {
		m.Headers = append(m.Headers, &corev3.HeaderValue{Key: pairs[i], RawValue: []byte(pairs[i+1])})
	}
	return m
}
